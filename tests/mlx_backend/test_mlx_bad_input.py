"""What the backend does not take, said by ``explain`` and raised by a call that names it."""

import sys

import linattn
import mlx.core as mx
import numpy as np
import pytest
from linattn import errors
from linattn.cli import app
from linattn.registry import _discover, registry
from linattn_conformance.adapters import adapter_for
from typer.testing import CliRunner

x = mx.ones((1, 4, 2, 8))


def test_explain_tells_what_runs():
    plan = linattn.explain("chunk_gla", x, x, x, -x)
    assert (plan.backend, plan.details) == ("mlx", "MLX operations (no Metal kernels: the device is cpu)")
    assert str(plan).splitlines()[2:] == ["  runs         mlx.chunk_gla: MLX operations (no Metal kernels: the device is cpu)"]


def test_float64_on_a_gpu(monkeypatch):
    """MLX has it on the CPU only."""
    monkeypatch.setattr(linattn.frameworks.Mlx, "device", lambda self, x: "metal")
    wide = x.astype(mx.float64)
    reason = "MLX has float64 on the CPU only, and q is float64 on metal: cast it to float32, or make mx.cpu the default device"
    plan = linattn.explain("chunk_gla", wide, wide, wide, wide)
    assert (plan.backend, plan.passed[0]) == (None, ("mlx", reason))
    with pytest.raises(linattn.Unsupported) as caught:
        linattn.chunk_gla(wide, wide, wide, wide, backend="mlx")
    assert str(caught.value).splitlines()[1:] == [f"  mlx: {reason}"]
    reason = reason.replace("q is", "g is")
    assert linattn.explain("chunk_gla", x, x, x, wide).passed[0] == ("mlx", reason)


@pytest.fixture
def no_mlx(monkeypatch):
    """A machine without MLX."""
    if not _discover().get("mlx"):
        pytest.skip("linattn is on the path but not installed with this entry point")
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    for name in [name for name in sys.modules if name.startswith("linattn_backends.mlx")]:
        monkeypatch.delitem(sys.modules, name)
    registry.refresh()
    yield "needs the package mlx: pip install 'linattn[mlx]'"
    registry.refresh()


def test_no_mlx(no_mlx):
    """Every way to ask for the backend says what installs it."""
    with pytest.raises(errors.BackendLoadError) as caught:
        linattn.chunk_gla(x, x, x, -x, backend="mlx")
    assert str(caught.value) == no_mlx
    assert linattn.explain("chunk_gla", x, x, x, -x).passed[0] == ("mlx", no_mlx)
    assert no_mlx in CliRunner().invoke(app, ["backends"]).output
    told = CliRunner().invoke(app, ["explain", "gla", "--framework", "mlx", "--device", "metal"]).output
    assert f"  passed over  mlx: {no_mlx}" in told


def test_arrays_of_another_framework():
    q = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(linattn.Unsupported) as caught:
        linattn.chunk_gla(q, q, q, -q, backend="mlx")
    assert str(caught.value).splitlines()[1:] == ["  mlx: takes mlx arrays, not numpy"]


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is one here")
@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_conformance_on_a_device_that_is_not_there(device):
    with pytest.raises(ValueError, match=f"^MLX has no device '{device}' here: expected cpu, or gpu where there is one$"):
        adapter_for("mlx", device)


def test_offsets_are_checked_before_anything_runs():
    with pytest.raises(errors.ShapeError, match="chunk_gla: cu_seqlens must not pass T = 4, got 5 at the end"):
        linattn.chunk_gla(x, x, x, -x, cu_seqlens=mx.array([0, 5]))


def test_integers():
    with pytest.raises(errors.DtypeError, match="chunk_gla: q must be float16, bfloat16, float32 or float64, got int32"):
        linattn.chunk_gla(*[x.astype(mx.int32)] * 4)


def test_operands_of_two_dtypes():
    with pytest.raises(errors.DtypeError, match="chunk_gla: v must have the dtype of q, float32, got bfloat16"):
        linattn.chunk_gla(x, x, x.astype(mx.bfloat16), -x)


def test_an_array_as_an_option():
    """Options are static."""
    with pytest.raises(errors.OptionError, match="scale must be float or int or None, a static Python value, got array"):
        linattn.chunk_gla(x, x, x, -x, scale=mx.array(0.5))


def test_no_tokens_and_no_sequences():
    """MLX raises for empty arrays in places; the operators do not, and gradients go through the state."""
    nothing, state = mx.zeros((1, 0, 2, 8)), mx.ones((1, 2, 8, 8))
    for form in ("chunk", "recurrent", "parallel"):
        operator = getattr(linattn, f"{form}_gla")
        call = lambda q, S: operator(q, q, q, q, initial_state=S, output_final_state=True)  # noqa: E731, B023
        o, final = call(nothing, state)
        assert (o.shape, final.tolist()) == (nothing.shape, state.tolist())
        dq, dS = mx.grad(lambda q, S: call(q, S)[1].sum(), argnums=(0, 1))(nothing, state)  # noqa: B023
        assert (dq.shape, dS.tolist()) == (nothing.shape, state.tolist())
    packed = linattn.chunk_gla(nothing, nothing, nothing, nothing, cu_seqlens=mx.array([0, 0, 0]), output_final_state=True)
    assert packed[1].shape == (2, 2, 8, 8)


def test_a_compilation_for_any_shape_is_refused_by_mlx():
    """Lengths are static: MLX says so, and nothing is computed for another length than was traced."""
    compiled = mx.compile(lambda q: linattn.chunk_gla(q, q, q, -mx.abs(q))[0], shapeless=True)
    with pytest.raises(ValueError, match="cannot infer output shapes"):
        mx.eval(compiled(mx.ones((1, 70, 2, 8))))
