"""Which calls the Pallas backend takes, why it passes the others on, and what it says where nobody else may run them."""

import jax.numpy as jnp
import linattn
import pytest
from linattn.planning import refusal
from linattn.plugin import Call
from linattn_backends.pallas import PallasBackend
from linattn_backends.pallas import backend as module

backend = PallasBackend()


def call(op="gla", form="chunk", device="tpu:0", dtype="bfloat16", T=128, K=64, V=64, **more):
    shapes = {"q": "B T H K", "k": "B T H K", "v": "B T HV V", **more.pop("shapes", {})}
    dtypes = dict.fromkeys(shapes, dtype) | more.pop("dtypes", {})
    arrays = tuple((name, shape, dtypes[name]) for name, shape in shapes.items())
    dims = tuple(dict(B=1, T=T, H=2, HV=2, K=K, V=V, N=1).items())
    return Call(op, form, "jax", device, arrays, dims, tuple(more.items()))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (dict(device="cpu:0"), "runs on TPUs (on cpu only in Pallas's interpreter: LINATTN_PALLAS_INTERPRET=1)"),
        (dict(device="gpu:0"), "runs on TPUs, not gpu"),
        (dict(dtype="float16"), "takes bfloat16 and float32, not float16"),
        (dict(dtype="float64"), "takes bfloat16 and float32, not float64"),
        (dict(shapes={"g": "B T HV K"}, dtypes={"g": "float64"}), "has no float64"),
        (dict(T=None), "takes no symbolic sizes"),
        (dict(K=257), "K must be at most 256, got 257"),
        (dict(V=300), "V must be at most 256, got 300"),
        (dict(form="recurrent"), "takes the recurrent form for one token only; the chunk form for more"),
        (dict(shapes={"gv": "B T HV V"}), "has no value gate gv"),
        (dict(op="delta_rule", shapes={"beta": "B T HV V"}), "has no beta per value channel"),
    ],
)
def test_what_it_does_not_take(given, complaint):
    assert str(backend.supports(call(**given))) == complaint


def test_what_its_methods_leave_out():
    reason = "chunk_linear_attn does not take causal=False; causal=False is no special case of simple_gla"
    assert refusal(backend, call(op="linear_attn", causal=False)) == reason
    assert refusal(backend, call(op="linear_attn", normalize=True, V=256)) == "V must be at most 256, got 257"
    assert refusal(backend, call(op="linear_attn", normalize=True)) is None


@pytest.mark.parametrize(
    "given",
    [
        {},
        dict(form="recurrent", T=1),
        dict(dtype="float32", K=256, V=1),
        dict(op="delta_rule", shapes={"beta": "B T HV"}),
        dict(op="linear_attn", causal=True, normalize=False),
    ],
)
def test_what_it_takes(given):
    assert backend.supports(call(**given)) is None


def test_interpreted_where_asked(monkeypatch):
    monkeypatch.setattr(module, "INTERPRETED", True)
    assert backend.supports(call(device="cpu:0")) is None
    assert str(backend.supports(call(device="gpu:0"))) == "runs on TPUs, not gpu"


def test_auto_goes_on_to_plain_jax_and_says_why(everything_registered):
    x = jnp.ones((1, 4, 2, 3))
    plan = linattn.explain("chunk_gla", x, x, x, -x)
    assert plan.backend == "jax"
    assert "passed over  pallas: runs on TPUs (on cpu only in Pallas's interpreter: LINATTN_PALLAS_INTERPRET=1)" in str(plan)


def test_pallas_by_name_is_strict(everything_registered):
    x = jnp.ones((1, 4, 2, 3))
    with pytest.raises(linattn.Unsupported, match=r"pallas.*runs on TPUs \(on cpu only in Pallas's interpreter"):
        linattn.chunk_gla(x, x, x, -x, backend="pallas")


@pytest.fixture
def everything_registered():
    """By name, where linattn is on the path but not installed."""
    from linattn.registry import registry

    if "pallas" not in registry.records:
        linattn.register_backend(PallasBackend)
