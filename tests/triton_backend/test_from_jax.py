"""The kernels on JAX arrays: the host code while JAX traces, and kernels in the interpreter, called back from the program."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
jax = pytest.importorskip("jax")
sys.path.append(str(Path(__file__).parents[1] / "jax_backend"))

import jax.numpy as jnp  # noqa: E402
import linattn  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from jax_cases import VARIANTS, compare, convert, draw, float_outputs, merge, split  # noqa: E402
from linattn.registry import registry  # noqa: E402
from linattn_backends.jax_triton import JaxTritonBackend, calls, devices, launchers  # noqa: E402
from linattn_backends.jax_triton.devices import HOPPER, INTERPRETER  # noqa: E402
from linattn_backends.jax_triton.host import Host  # noqa: E402
from linattn_backends.jax_triton.operations import OPERATIONS  # noqa: E402
from linattn_backends.triton import TritonBackend  # noqa: E402
from linattn_backends.triton.diagonal import backward, portions  # noqa: E402
from linattn_backends.triton.diagonal import memory as kernels  # noqa: E402
from linattn_backends.triton.runtime import launch as launches  # noqa: E402
from linattn_backends.triton.runtime.device import standing_in  # noqa: E402

BACKEND = JaxTritonBackend()
PACK = (0, 3, 20, 0, 1)


@pytest.fixture(autouse=True)
def registered():
    if "jax_triton" not in registry.records:
        linattn.register_backend(JaxTritonBackend)


def operands(variant, **how):
    """The family, and arguments by name in float32."""
    family, arrays, options = draw(variant, **how)
    return family, convert(arrays, jnp.float32), options


@pytest.mark.parametrize("variant", ["linear_attn", "fixed_decay", "rwkv6", "gated_delta_rule", "kda", "dplr", "mixed_bias"])
def test_packed_under_harsh_gates(variant):
    """Outputs, states and gradients; hard resets, empty sequences, grouped heads, sequences cut on the device."""
    compare("chunk", variant, 2e-5, jnp.float32, BACKEND, lengths=PACK, kind="harsh", H=1, HV=2)


@pytest.mark.parametrize("op", ["chunk_simple_gla", "recurrent_simple_gla", "chunk_gated_delta_rule"])
def test_behind_packed_sequences(op):
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 20, 1, 8), np.float32)
    arrays = (*map(jnp.asarray, (q, k, v, -abs(q[..., 0]))), *([jnp.ones((1, 20, 1))] if "delta" in op else []))
    options = dict(cu_seqlens=jnp.array([0, 3, 13]), backend="jax_triton")
    o, back = jax.vjp(lambda *x: getattr(linattn, op)(*x, **options)[0], *arrays)
    for x in (o, *back(jnp.ones_like(o))):
        assert (x[:, 13:] == 0).all()
        assert (x[:, :13] != 0).any()


def test_a_backward_pass_in_parts(monkeypatch):
    monkeypatch.setattr(portions, "LITTLE", 0)
    monkeypatch.setattr(portions, "LEAST", 1)
    noted, cut = [], portions.portions_of
    monkeypatch.setattr(backward, "portions_of", lambda *call: noted.append(cut(*call)) or noted[-1])
    compare("chunk", "simple_gla", 2e-5, jnp.float32, BACKEND, B=1, T=70, H=1, HV=4, K=32)
    assert noted
    assert all(len(spans) > 1 for groups in noted for spans in groups)


@pytest.mark.parametrize("variant", ["gla_value_gate", "bidirectional"])
def test_rows(variant):
    compare("chunk", variant, 2e-5, jnp.float32, BACKEND, T=37)


def test_gates_after_many_resets():
    """Their running sums are differences of thousands: float64 between two kernels, which JAX has not been told of."""
    rng = np.random.default_rng(3)
    q, k, v = rng.standard_normal((3, 1, 64, 1, 16), np.float32)
    g = -rng.uniform(0, 0.1, (1, 64, 1)).astype(np.float32)
    g[:, ::4] = -np.inf
    found = linattn.chunk_simple_gla(*map(jnp.asarray, (q, k, v, g)), backend="jax_triton")[0]
    expected = linattn.chunk_simple_gla(*(x.astype(np.float64) for x in (q, k, v, g)))[0]
    assert (np.abs(found - expected).max(-1) / np.abs(expected).max(-1)).max() < 5e-6


@pytest.mark.parametrize("variant", ["simple_gla", "kda"])
def test_token_by_token(variant):
    compare("recurrent", variant, 2e-6, jnp.float32, BACKEND, T=5)


def test_bfloat16():
    found, gradients = compare("chunk", "gla", 3e-2, jnp.bfloat16, BACKEND, T=33)
    assert found["o"].dtype == gradients["q"].dtype == jnp.bfloat16


@pytest.mark.parametrize("shared", [False, True], ids=["folded", "looped"])
def test_vmap(shared):
    """Rows are more batch; what the rows share is looped over."""
    family, x, options = operands("rwkv6" if shared else "gla", T=20, B=1, H=1, HV=1)
    loss = lambda x: sum(y.sum() for y in getattr(BACKEND, f"chunk_{family}")(**x, **options))  # noqa: E731
    one, two = jax.grad(loss)(x), jax.grad(loss)(jax.tree.map(lambda y: y / 2, x))
    both = jax.vmap(jax.grad(jax.checkpoint(loss)))(jax.tree.map(lambda y: jnp.stack([y, y / 2]), x))
    for name in x:
        np.testing.assert_allclose(both[name], jnp.stack([one[name], two[name]]), rtol=1e-5, atol=1e-6)


def test_one_mapped_argument():
    _, x, _ = operands("linear_attn", T=9, B=2, H=1, HV=1)
    q, k, v = (x[name] for name in "qkv")
    loss = lambda q: BACKEND.chunk_linear_attn(q, k, v)[0]  # noqa: E731
    found = jax.vmap(loss)(jnp.stack([q, 2 * q, 3 * q]))
    np.testing.assert_allclose(found, jnp.stack([loss(q), loss(2 * q), loss(3 * q)]), rtol=1e-6)


def test_nothing_to_do():
    _, x, _ = operands("gla", T=3)
    q, k, v, g, S = (x[name] for name in ("q", "k", "v", "g", "initial_state"))
    o, state = BACKEND.chunk_gla(q[:, :0], k[:, :0], v[:, :0], g[:, :0], initial_state=S, output_final_state=True)
    assert o.shape == (2, 0, 4, 7)
    np.testing.assert_array_equal(state, S)


def test_no_second_derivatives():
    x = jnp.ones((1, 16, 1, 8))
    with pytest.raises(NotImplementedError, match="the jax_triton backend has first derivatives only: pass backend='jax'"):
        jax.grad(lambda x: jax.grad(lambda q: BACKEND.chunk_gla(q, x, x, -x)[0].sum())(x).sum())(x)


def test_no_forward_mode():
    x = jnp.ones((1, 16, 1, 8))
    wanted = "the jax_triton backend has no forward-mode derivatives: pass backend='jax' for jvp and jacfwd"
    with pytest.raises(NotImplementedError, match=wanted):
        jax.jvp(lambda q: BACKEND.chunk_gla(q, x, x, -x)[0], (x,), (x,))


def test_gradients_over_a_mesh():
    """Marks of ``shard_map`` reach the outputs and the gradients."""
    _, x, _ = operands("gla", T=16, B=2, H=1, HV=1, state=False)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("rows")
    loss = lambda *x: (BACKEND.chunk_gla(*x)[0] ** 2).sum(keepdims=True)  # noqa: E731
    given = [x[name] for name in "qkvg"]
    total = lambda *x: jax.shard_map(loss, mesh=mesh, in_specs=rows, out_specs=rows)(*x).sum()  # noqa: E731
    expected = jax.grad(lambda *x: loss(*x).sum(), (0, 1, 2, 3))(*given)
    for found, wanted in zip(jax.jit(jax.grad(total, (0, 1, 2, 3)))(*given), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["rwkv6", "simple_gla", "bidirectional"])
def test_what_the_devices_of_a_mesh_share(family):
    """A bonus, a fixed decay or keys that every device has a copy of: their gradients are sums over the devices."""
    _, x, _ = operands("rwkv6", T=16, B=2, H=1, HV=1, state=False)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, copies = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    q, k, v, g, u = (x[name] for name in "qkvgu")
    split, shared, outputs = {
        "rwkv6": ((q, k, v, g), u, lambda x, u: BACKEND.chunk_rwkv6(*x, u)),
        "simple_gla": ((q, k, v), -jnp.abs(u[:, 0]), lambda x, g: BACKEND.chunk_simple_gla(*x, g)),
        "bidirectional": ((q, v), k, lambda x, k: BACKEND.chunk_linear_attn(x[0], k, x[1], causal=False)),
    }[family]
    loss = lambda *x: (outputs(*x)[0] ** 2).sum().reshape(1)  # noqa: E731
    total = lambda *x: jax.shard_map(loss, mesh=mesh, in_specs=(rows, copies), out_specs=rows)(*x).sum()  # noqa: E731
    expected = jax.grad(lambda *x: loss(*x).sum(), (0, 1))(split, shared)
    found = jax.jit(jax.grad(total, (0, 1)))(split, shared)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["gla", "gated_delta_rule"])
def test_both_frameworks_launch_the_same(variant, monkeypatch):
    """Kernels, grids and configurations of a forward and a backward pass are those of PyTorch's tensors."""
    family, x, options = operands(variant, T=40, B=1, H=1, HV=1)
    found = {"torch": [], "jax": []}

    def noted(into, run):
        def start(kernel, count, *rest):
            into.append((kernel.__name__, count, sorted(rest[-1].items(), key=str)))
            run(kernel, count, *rest)

        return start

    monkeypatch.setattr(launchers, "interpreted", noted(found["jax"], launchers.interpreted))
    monkeypatch.setattr(calls, "interpreted", launchers.interpreted)
    calls.jitted.clear_cache()
    jax.grad(lambda x: sum(y.sum() for y in getattr(BACKEND, f"chunk_{family}")(**x, **options)))(x)
    monkeypatch.setattr(launches, "start", noted(found["torch"], launches.start))
    tensors = {name: torch.from_numpy(np.array(y)).requires_grad_() for name, y in x.items()}
    o, state = getattr(TritonBackend(), f"chunk_{family}")(**tensors, **options)
    (o.sum() + state.sum()).backward()
    assert found["jax"][-len(found["torch"]) :] == found["torch"] != []  # JAX traces a forward pass once more to begin with


def test_auto_takes_it_and_says_why(monkeypatch):
    x = jnp.ones((1, 16, 1, 8))
    assert linattn.explain("gla", x, x, x, -x).backend == "jax_triton"
    plan = linattn.explain("parallel_gla", x, x, x, -x)
    assert plan.backend == "jax"
    assert "jax_triton" in str(plan)
    wide = jnp.ones((1, 4, 1, 300))
    assert "jax_triton: K must be at most 256, got 300" in str(
        linattn.explain("delta_rule", wide, wide, x[:, :4], x[:, :4, :, 0])
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", "jax_triton: runs on NVIDIA GPUs (on cpu only in Triton's interpreter: TRITON_INTERPRET=1)"),
        ("sys.modules['triton'] = None", "jax_triton: runs on NVIDIA GPUs (on cpu only"),
    ],
)
def test_elsewhere_plain_jax_runs(code, expected):
    """And neither PyTorch nor Triton is imported for it."""
    script = f"""
import sys
{code}
import jax.numpy as jnp, linattn
from linattn_backends.jax_triton import JaxTritonBackend
from linattn.registry import registry
if "jax_triton" not in registry.records:
    linattn.register_backend(JaxTritonBackend)
x = jnp.ones((1, 16, 1, 8))
plan = linattn.explain("gla", x, x, x, -x, backend=["jax_triton", "auto"])
assert plan.backend == "jax", plan
print(plan)
assert "torch" not in sys.modules
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.parametrize("lengths", [None, (0, 40, 300)], ids=["rows", "packed"])
@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("normalized")])
def test_host_code_runs_for_a_gpu(variant, lengths, monkeypatch):
    """Every family, as a device with 132 processors has it: sequences are cut into segments, and nothing is compiled."""
    family, x, options = operands(variant, T=340, B=1, lengths=lengths)
    monkeypatch.setattr(calls.backend, "INTERPRETED", False)
    monkeypatch.setattr(calls, "target", lambda: HOPPER)
    monkeypatch.setattr(calls, "compiled", lambda *launch: seen.append(launchers.written(launch[2])))
    calls.jitted.clear_cache()
    seen = []
    floats, others = split(x)
    outputs = lambda floats: float_outputs(getattr(BACKEND, f"chunk_{family}")(**merge(floats, others), **options))  # noqa: E731
    (found,) = jax.eval_shape(lambda floats: jax.vjp(outputs, floats)[1](outputs(floats)), floats)
    calls.jitted.clear_cache()
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, floats)
    assert len(seen) > 3
    for written in seen:
        assert written
        assert len({id(pointer.memory) for pointer in written}) == len(written)


def test_an_operation_without_an_entry_says_so():
    host = Host(launchers.interpreted, INTERPRETER)
    x = host.tensor(jnp.ones(3))
    with host, standing_in(host), pytest.raises(NotImplementedError, match=r"asks for aten\.erfinv.*no entry in OPERATIONS"):
        x.erfinv()


def test_operators_that_return_several_tensors(monkeypatch):
    monkeypatch.setitem(OPERATIONS, "max", lambda x, axis, *, like: (x.max(axis), x.argmax(axis)))
    host = Host(launchers.interpreted, INTERPRETER)
    x = host.tensor(jnp.array([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]]))
    with host, standing_in(host):
        top, bottom = x.split(1)
        values, places = x.max(1)
        bottom.copy_(bottom + 1)
    assert host.array(top).tolist() == [[3, 1, 2]]
    assert host.array(bottom).tolist() == [[1, 6, 5]]
    assert (host.array(values).tolist(), host.array(places).tolist()) == ([3, 5], [0, 1])
    assert host.array(x).tolist() == [[3, 1, 2], [1, 6, 5]]


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        (lambda x: x.double() + 1, "the host code computes in float64, which only kernels can here"),
        (lambda x: start(x, x), "a kernel may write two of its arguments, which are one array"),
        (lambda x: start(x[1:]), "a kernel may write from the middle of an array"),
    ],
)
def test_what_host_code_must_not_do(code, complaint):
    host = Host(launchers.compiled, INTERPRETER)
    with host, standing_in(host), pytest.raises(NotImplementedError, match=f"linattn jax_triton: {complaint}"):
        code(torch.empty(3, device="meta"))


@pytest.mark.parametrize(("dtype", "unwritten"), [(torch.float32, np.nan), (torch.bfloat16, np.nan), (torch.int32, -1)])
def test_what_nothing_wrote_is_poisoned(dtype, unwritten):
    host = Host(launchers.compiled, INTERPRETER)
    with host, standing_in(host):
        x = torch.empty(3, dtype=dtype, device="meta")
        x[1:2] = torch.zeros(1, dtype=dtype, device="meta")
    np.testing.assert_array_equal(np.asarray(host.array(x), float), [unwritten, 0, unwritten])


def start(*args):
    """Launch some kernel on tensors that the host code allocated."""
    launches.start(kernels.diagonal_states, 1, torch.device("meta"), args, {})


@pytest.mark.parametrize(
    ("device", "missing", "present", "complaint"),
    [
        ("tpu", [], None, "runs on NVIDIA GPUs, not tpu"),
        ("gpu", ["jax-triton"], None, "needs jax-triton: pip install 'linattn[jax_triton]'"),
        ("gpu:0", [], ("cuda 13", "7.5"), "needs compute capability 8.0 or newer, got 7.5"),
        ("gpu", [], ("rocm 7", "9.4"), "runs on NVIDIA GPUs, not AMD"),
        ("cuda", [], ("cuda 13", "9.0"), None),
    ],
)
def test_says_why_not(device, missing, present, complaint, monkeypatch):
    monkeypatch.setattr(calls.backend, "MISSING", missing)
    if present:
        client = SimpleNamespace(platform_version=present[0])
        monkeypatch.setattr(
            devices, "present", lambda: SimpleNamespace(client=client, compute_capability=present[1], core_count=80)
        )
    for cached in (devices.target, devices.complaint):
        cached.cache_clear()
    assert calls.backend.device_complaint(SimpleNamespace(device=device)) == complaint
    for cached in (devices.target, devices.complaint):
        cached.cache_clear()


def test_symbolic_sizes_are_left_to_plain_jax():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 16, 1, 8"), jnp.float32)
    plan = linattn.explain("chunk_gla", x, x, x, x)
    assert plan.backend == "jax"
    assert "jax_triton: takes no symbolic sizes" in str(plan)
