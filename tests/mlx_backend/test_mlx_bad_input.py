"""What the backend does not take, said by ``explain`` and raised by a call that names it."""

import linattn
import mlx.core as mx
import pytest
from linattn import errors
from linattn.cli import app
from linattn.registry import _discover, registry
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
    assert (plan.backend, plan.passed) == (None, (("mlx", reason),))
    with pytest.raises(linattn.Unsupported) as caught:
        linattn.chunk_gla(wide, wide, wide, wide, backend="mlx")
    assert str(caught.value).splitlines()[1:] == [f"  mlx: {reason}"]
    reason = reason.replace("q is", "g is")
    assert linattn.explain("chunk_gla", x, x, x, wide).passed == (("mlx", reason),)


def test_no_mlx(monkeypatch):
    """A machine without MLX: the row of the backend, and the error of a call that names it, say what installs it."""
    if not _discover().get("mlx"):
        pytest.skip("linattn is on the path but not installed with this entry point")
    monkeypatch.setitem(__import__("sys").modules, "mlx.core", None)
    for name in [name for name in __import__("sys").modules if name.startswith("linattn_backends.mlx")]:
        monkeypatch.delitem(__import__("sys").modules, name)
    registry.refresh()
    try:
        with pytest.raises(errors.BackendLoadError) as caught:
            registry.load("mlx")
        assert str(caught.value) == "needs the package mlx: pip install 'linattn[mlx]'"
        assert "needs the package mlx: pip install 'linattn[mlx]'" in CliRunner().invoke(app, ["backends"]).output
    finally:
        registry.refresh()


def test_offsets_are_checked_before_anything_runs():
    with pytest.raises(errors.ShapeError, match="chunk_gla: cu_seqlens must end at T = 4, got 3"):
        linattn.chunk_gla(x, x, x, -x, cu_seqlens=mx.array([0, 3]))


def test_integers():
    with pytest.raises(errors.DtypeError, match="chunk_gla: q must be float16, bfloat16, float32 or float64, got int32"):
        linattn.chunk_gla(*[x.astype(mx.int32)] * 4)
