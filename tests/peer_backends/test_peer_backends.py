"""The adapters of other libraries: arguments arrive under the library's names, limits are said, and auto comes to them last.

Only conformance with the libraries installed says whether their numbers are right: see docs/conformance/.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from functools import partial

import linattn
import numpy as np
import pytest
import stand_ins
from linattn import cli
from linattn.errors import BackendLoadError
from linattn.planning import keywords_of
from linattn.registry import GROUP, Record, Registry, registry
from linattn.spec import FAMILIES
from typer.testing import CliRunner

CLASSES = {
    "fla": "FlaBackend",
    "flash_qla": "FlashQlaBackend",
    "jla": "JlaBackend",
    "mlx_fast": "MlxFastBackend",
    "mlx_lm": "MlxLmBackend",
}
FRAMEWORK = {"fla": "torch", "flash_qla": "torch", "jla": "jax", "mlx_fast": "mlx", "mlx_lm": "mlx"}
DEVICE = {"torch": "cuda", "jax": "cuda", "mlx": "metal"}
SIZES = {"B": 2, "T": 9, "H": 2, "HV": 2, "K": 4, "V": 3}


@pytest.fixture
def backend(request, monkeypatch):
    """An adapter on a stand-in of its library, registered; MLX is itself."""
    name = request.param
    pytest.importorskip(FRAMEWORK[name])
    stand_ins.install(monkeypatch, name)
    made = getattr(importlib.import_module(f"linattn_backends.{name}"), CLASSES[name])()
    linattn.register_backend(made, replace=True)
    with untraced(FRAMEWORK[name]):
        yield made
    registry.refresh()
    for module in [module for module in sys.modules if module.startswith(f"linattn_backends.{name}")]:
        del sys.modules[module]


def untraced(framework):
    """Stand-ins read values, which compiled functions of JAX do not have."""
    return importlib.import_module("jax").disable_jit() if framework == "jax" else contextlib.nullcontext()


def each_method(name: str, families: list[str], forms: tuple[str, ...]):
    return [pytest.param(name, f"{form}_{family}", id=f"{name}-{form}_{family}") for family in families for form in forms]


FAMILIES_OF_FLA = [family for family in FAMILIES if family not in ("mixed_attn", "ssd")]
FAMILIES_OF_JLA = [family for family in FAMILIES_OF_FLA if family != "linear_attn"]
METHODS = [
    *each_method("fla", FAMILIES_OF_FLA, ("chunk", "recurrent")),
    *each_method("flash_qla", ["gated_delta_rule"], ("chunk",)),
    *each_method("jla", FAMILIES_OF_JLA, ("chunk", "recurrent")),
    *each_method("mlx_fast", ["gated_delta_rule"], ("chunk",)),
    *each_method("mlx_lm", ["gated_delta_rule", "kda"], ("recurrent",)),
]


def arrays_of(family: str, framework: str, packed: bool, fixed: bool = False):
    """Required arrays, an initial state, and offsets with an empty sequence if packed."""
    rng = np.random.default_rng(0)
    sizes = {**SIZES, "B": 1 if packed else 2}
    shapes = {arg.name: arg.shapes[-1 if fixed else 0] for arg in FAMILIES[family].args if not arg.optional}
    drawn = {name: 0.5 * rng.standard_normal([sizes[s] for s in shape], dtype=np.float32) for name, shape in shapes.items()}
    drawn = {name: -abs(x) if name == "g" else x for name, x in drawn.items()}
    drawn["initial_state"] = rng.standard_normal((3 if packed else 2, 2, 4, 3)).astype(np.float64)
    if packed:
        drawn["cu_seqlens"] = np.array([0, 4, 4, 9], np.int32)
    if framework == "torch":
        import torch

        return {name: torch.from_numpy(x) for name, x in drawn.items()}
    if framework == "mlx":
        import mlx.core as mx

        return {name: mx.array(x) for name, x in drawn.items()}
    import jax.numpy as jnp

    return {name: jnp.asarray(x) for name, x in drawn.items()}


def check(backend, method, arrays, **options):
    """What the method gives is what the definition gives."""
    keywords = dict.fromkeys(keywords_of(backend, method))
    keywords |= {"scale": 0.3, "output_final_state": True} | options
    o, state = getattr(backend, method)(**{**keywords, **arrays})
    public = {name: value for name, value in keywords.items() if value is not None}
    wanted, wanted_state = stand_ins.by_definition(method, {**public, **arrays})
    np.testing.assert_allclose(np.asarray(o), np.asarray(wanted), rtol=1e-5, atol=1e-6)
    if wanted_state is None:
        assert state is None
    else:
        np.testing.assert_allclose(np.asarray(state), np.asarray(wanted_state), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("backend", "method"), METHODS, indirect=["backend"])
@pytest.mark.parametrize("packed", [False, True], ids=["equal", "packed"])
def test_arguments_arrive(backend, method, packed):
    arrays = arrays_of(method.partition("_")[2], FRAMEWORK[backend.name], packed)
    options = {}
    if backend.name == "jla" and packed and method.startswith("chunk"):
        del arrays["initial_state"]
        options["output_final_state"] = False
    if backend.name == "jla" and packed and method.endswith(("rwkv6", "dplr")) and method.startswith("recurrent"):
        pytest.skip("declared unsupported")
    if backend.name.startswith("mlx") and packed:
        pytest.skip("declared unsupported")
    check(backend, method, arrays, **options)


@pytest.mark.parametrize("backend", ["fla", "jla"], indirect=True)
def test_a_fixed_decay_arrives(backend):
    check(backend, "chunk_simple_gla", arrays_of("simple_gla", FRAMEWORK[backend.name], packed=False, fixed=True))


# -- limits ------------------------------------------------------------------------------------------------------------

LIMITS = {
    "fla": [
        ("chunk_gla", "runs on CUDA devices, not cpu", ["--device", "cpu"]),
        ("chunk_gla", "has no float64", ["--dtype", "fp64"]),
        ("chunk_gla", "takes no grouped value heads in gla", ["-s", "HV=8"]),
        ("chunk_kda", "K must be at most 256, got 512", ["-s", "K=512"]),
        ("recurrent_kda", "has no backward of recurrent_kda", ["--grad"]),
        ("chunk_gla", "takes gv in the recurrent form only", ["--with", "gv"]),
        ("chunk_delta_rule", "takes a beta for each value channel in the recurrent form only", ["--shape", "beta=B T HV V"]),
        ("chunk_delta_rule", "takes float16 and bfloat16 in the chunk form of delta_rule, not float32", ["--dtype", "fp32"]),
        (
            "chunk_simple_gla",
            "refuses the backward of chunk_simple_gla on Hopper with Triton from 3.4 to 3.7.0, which compiles it wrongly",
            ["--grad"],
        ),
    ],
    "flash_qla": [
        ("chunk_gated_delta_rule", "runs on CUDA devices, not cpu", ["--device", "cpu"]),
        ("chunk_gated_delta_rule", "takes bfloat16 and float16, not float32", ["--dtype", "fp32"]),
        ("chunk_gated_delta_rule", "K and V must be 128, got 64 and 128", ["-s", "K=64"]),
        ("chunk_gated_delta_rule", "takes one beta for a token and head", ["--shape", "beta=B T HV V"]),
        ("chunk_gated_delta_rule", "takes one token at least", ["-s", "T=0"]),
    ],
    "jla": [
        ("chunk_gla", "computes in float32, so takes no float64", ["--dtype", "fp64"]),
        ("chunk_gla", "takes no grouped value heads", ["-s", "HV=8"]),
        ("chunk_gla", "has no gv", ["--with", "gv"]),
        ("chunk_kda", "takes one beta for a token and head", ["--shape", "beta=B T HV V"]),
        (
            "chunk_gla",
            "takes packed sequences without states in the chunk form, where it marks them by segment ids",
            ["--with", "cu_seqlens", "--with", "initial_state"],
        ),
        ("recurrent_rwkv6", "takes no packed sequences in recurrent_rwkv6", ["--with", "cu_seqlens"]),
    ],
    "mlx_fast": [
        ("chunk_gated_delta_rule", "takes one beta for a token and head", ["--shape", "beta=B T HV V"]),
        ("chunk_gated_delta_rule", "takes one token at least", ["-s", "T=0"]),
        ("chunk_gated_delta_rule", "has float64 on the CPU only, not on metal", ["--dtype", "fp64"]),
        (
            "chunk_gated_delta_rule",
            "rounds a state that comes in to float32, so takes none beside float64",
            ["--device", "cpu", "--dtype", "fp64", "--with", "initial_state"],
        ),
    ],
    "mlx_lm": [
        ("recurrent_kda", "takes one beta for a token and head", ["--shape", "beta=B T HV V"]),
        ("recurrent_kda", "takes one token at least", ["-s", "T=0"]),
        ("recurrent_kda", "computes in float32, so takes no float64", ["--dtype", "fp64"]),
    ],
}


@pytest.mark.parametrize(
    ("backend", "method", "reason", "words"),
    [pytest.param(name, *limit, id=f"{name}-{limit[0]}-{limit[2][-1]}") for name, limits in LIMITS.items() for limit in limits],
    indirect=["backend"],
)
def test_limits_are_declared(backend, method, reason, words, monkeypatch):
    """Of the call itself: the dispatcher may still lower it to one that the backend takes."""
    plans = []
    decide = cli.plan_of
    monkeypatch.setattr(cli, "plan_of", lambda *args, **more: plans.append(decide(*args, **more)) or plans[0])
    given = [*asked(backend.name), *words]
    CliRunner().invoke(cli.app, ["explain", method, *given])
    assert str(backend.supports(plans[0].call)) == reason


def asked(name):
    """Options of ``linattn explain`` for a call that the backend takes."""
    framework = FRAMEWORK[name]
    return ["--framework", framework, "--device", DEVICE[framework], "--dtype", "bf16", "--backend", name]


@pytest.mark.parametrize("backend", CLASSES, indirect=True)
def test_within_its_limits_it_runs(backend):
    method = "recurrent_gated_delta_rule" if backend.name == "mlx_lm" else "chunk_gated_delta_rule"
    details = ": Metal kernel" if backend.name == "mlx_lm" else ""
    told = CliRunner().invoke(cli.app, ["explain", method, *asked(backend.name)]).stdout
    assert f"  runs         {backend.name}.{method}{details}" in told.splitlines()


@pytest.mark.parametrize("backend", ["mlx_fast"], indirect=True)
def test_float64_decays_have_its_digits(backend):
    """``mx.exp`` has seven of them."""
    import mlx.core as mx

    drawn = arrays_of("gated_delta_rule", "mlx", False)
    x = {name: mx.array(np.asarray(y), mx.float64) for name, y in drawn.items()}
    o, _ = backend.chunk_gated_delta_rule(**x, scale=1.0, output_final_state=False)
    wanted, _ = stand_ins.by_definition("gated_delta_rule", dict(x, scale=1.0))
    np.testing.assert_allclose(np.asarray(o), wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("backend", ["mlx_fast", "mlx_lm"], indirect=True)
def test_what_float16_does_not_hold_unscaled_is_scaled_before(backend):
    """An output of 3e5, times a scale of 2^-12."""
    import mlx.core as mx

    one = mx.ones((1, 1, 1, 1), mx.float16)
    form = "recurrent" if backend.name == "mlx_lm" else "chunk"
    run = partial(getattr(backend, f"{form}_gated_delta_rule"), scale=2.0**-12, initial_state=None, output_final_state=False)
    o, _ = run(600 * one, one, 500 * one, mx.zeros((1, 1, 1)), mx.ones((1, 1, 1)))
    assert o.dtype == mx.float16
    assert o.item() == pytest.approx(3e5 * 2.0**-12, rel=1e-3)


# -- its place ---------------------------------------------------------------------------------------------------------


PEERS = {kind.name: kind for kind in registry.built_in if kind.requires}


def test_these_are_the_adapters():
    assert set(PEERS) == set(CLASSES)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_comes_after_our_own_backends(name):
    order = list(registry.order(FRAMEWORK[name]))
    assert order.index(name) > order.index(FRAMEWORK[name])


def test_explain_says_which_peers_it_did_not_try(monkeypatch):
    monkeypatch.setitem(registry.records, "fla", Record("fla"))
    monkeypatch.setitem(registry.records, "flash_qla", Record("flash_qla"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "fla" else find(name))
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 4, 1, 2)
    line = "  not tried    fla: another library, which auto tries after our own backends"
    assert str(linattn.explain(linattn.chunk_gla, x, x, x, x)).splitlines()[-1] == line
    assert "not tried" not in str(linattn.explain(linattn.chunk_gla, x, x, x, x, backend="torch"))


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.families])
def test_a_peer_for_a_few_families_is_named_for_no_other(name):
    """Those that it has, and those that are lowered to them."""
    mine = {method.values[1].partition("_")[2] for method in METHODS if method.values[0] == name}
    assert set(PEERS[name].families) == mine | {"delta_rule"}


def test_explain_names_a_peer_where_it_would_do():
    mx = pytest.importorskip("mlx.core")
    q, g = mx.zeros((1, 4, 1, 2)), mx.zeros((1, 4, 1))
    line = "  not tried    mlx_fast: another library, which auto tries after our own backends"
    assert line in str(linattn.explain(linattn.chunk_gated_delta_rule, q, q, q, g, g)).splitlines()
    assert "mlx_fast" not in str(linattn.explain(linattn.chunk_gla, q, q, q, q))


@pytest.mark.parametrize("name", PEERS)
def test_without_the_library_it_says_what_to_install(name):
    if importlib.util.find_spec(PEERS[name].requires):
        pytest.skip(f"{name} is installed")
    value = f"linattn_backends:{PEERS[name].__name__}"
    entry = importlib.metadata.EntryPoint(name, value, GROUP)._for(importlib.metadata.distribution("linattn"))
    alone = Registry()
    alone._records = {name: Record(name, [entry])}
    with pytest.raises(BackendLoadError) as caught:
        alone.load(name)
    assert str(caught.value) == f"needs the package {PEERS[name].requires}: pip install 'linattn[{name}]'"
