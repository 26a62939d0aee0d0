"""Calls inside torch.compile, torch.export, fake tensors, torch.func, and jax.jit take the same decision as eager ones."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import linattn
import numpy as np
import pytest
from backends_for_tests import named
from linattn import frameworks
from linattn.frameworks import framework_of
from linattn.plugin import Unsupported


class Constant:
    """A backend method that returns one number everywhere."""

    def __init__(self, value):
        self.value = value

    def __call__(self, name):
        value = self.value

        def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
            return v * 0 + value, None

        return named(name, chunk_gla=chunk_gla, frameworks=("torch", "jax"))


@pytest.fixture
def two_backends():
    linattn.register_backend(Constant(1.0)("one"))
    linattn.register_backend(Constant(2.0)("two"))


@pytest.fixture
def counter(torch):
    import torch._dynamo.testing

    torch._dynamo.reset()
    return torch._dynamo.testing.CompileCounter()


def gla(x):
    return linattn.chunk_gla(x, x, x, -abs(x))[0]


def test_compile_without_graph_break(torch, counter):
    x = torch.randn(1, 8, 2, 16)
    torch.testing.assert_close(torch.compile(gla, fullgraph=True, backend=counter)(x), gla(x))
    assert counter.frame_count == 1


def test_compile_notices_use_backend(torch, counter, two_backends):
    x = torch.randn(1, 8, 2, 16)
    gla(x)  # met inside a block first, a framework is told of the block while it traces, and traces once more
    compiled = torch.compile(gla, fullgraph=True, backend=counter)
    found = []
    for name in ("one", "two", "one"):
        with linattn.use_backend(name):
            found.append(compiled(x).unique().item())
    assert found == [1.0, 2.0, 1.0]
    assert counter.frame_count == 2  # the third call finds the first's code again


def test_compile_notices_a_new_registration(torch, counter, monkeypatch):
    x = torch.randn(1, 8, 2, 16)
    linattn.register_backend(Constant(1.0)("one"))
    compiled = torch.compile(lambda x: linattn.chunk_gla(x, x, x, x, backend="one")[0], fullgraph=True, backend=counter)
    assert compiled(x).unique().item() == 1.0
    linattn.register_backend(Constant(3.0)("one"), replace=True)
    assert compiled(x).unique().item() == 3.0


def test_compile_does_not_specialise_a_dynamic_length(torch, counter, two_backends):
    compiled = torch.compile(gla, fullgraph=True, backend=counter)
    with linattn.use_backend("one"):
        for T in (8, 9, 10, 11, 12):
            assert compiled(torch.randn(1, T, 2, 16)).shape[1] == T
    assert counter.frame_count <= 2  # one static, one dynamic


def test_a_symbolic_length_is_none_and_a_width_never(torch, counter, two_backends):
    backend = linattn.registry.registry.loaded["one"]
    compiled = torch.compile(gla, fullgraph=True, backend=counter, dynamic=True)
    with linattn.use_backend("one"):
        compiled(torch.randn(1, 8, 2, 16))
        compiled(torch.randn(1, 9, 2, 24))
    assert [(call.T, call.K) for call in backend.calls] == [(None, 16), (None, 24)]


MADE = {
    "short_conv": (linattn.short_conv, {"x": (1, 8, 16), "weight": (16, 4)}, {}),
    "gated_rms_norm": (linattn.gated_rms_norm, {"x": (8, 16), "z": (8, 16), "weight": (16,)}, {"group_size": 8}),
    "ssd": (linattn.ssd, {"x": (1, 8, 4, 6), "dt": (1, 8, 4), "A": (4,), "B": (1, 8, 2, 5), "C": (1, 8, 2, 5)}, {}),
}
"""Operators whose widths are axes of matrices, or whose defaults are tuples of numbers: all may be symbols while tracing."""


@pytest.mark.parametrize("operator", MADE)
def test_every_size_may_be_a_symbol(torch, operator):
    function, shapes, options = MADE[operator]
    arrays = [torch.randn(shape) for shape in shapes.values()]
    found = torch.compile(lambda *xs: function(*xs, **options), fullgraph=True, backend="eager", dynamic=True)(*arrays)
    torch.testing.assert_close(found, function(*arrays, **options))


def test_a_number_in_an_option_may_be_a_symbol(torch):
    x, dt, A, B, C = (torch.randn(shape) for shape in MADE["ssd"][1].values())

    def f(limit):
        return linattn.ssd(x, dt, A, B, C, dt_softplus=True, dt_limit=(0.0, limit))[0]

    compiled = torch.compile(f, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close([compiled(limit) for limit in (0.5, 0.25)], [f(0.5), f(0.25)])


def test_a_supports_that_takes_no_symbolic_size_says_so(torch, counter):
    kind = type("Odd", (Constant(1.0)("odd"),), {"supports": lambda self, call: Unsupported("short") if call.T < 64 else None})
    linattn.register_backend(kind)
    compiled = torch.compile(lambda x: linattn.chunk_gla(x, x, x, x, backend="odd")[0], fullgraph=True, dynamic=True)
    expected = "backend 'odd': supports raised TypeError: '<' not supported .*; T of this call is None: any size, under tracing"
    with pytest.raises(Exception, match=expected):
        compiled(torch.randn(1, 8, 2, 16))


def test_compile_lowers(torch, counter):
    x = torch.randn(1, 8, 2, 16)

    def f(x):
        return linattn.linear_attn(x, x, x, normalize=True, feature_map="elu1", backend="one")[0]

    linattn.register_backend(Constant(1.0)("one"))
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend=counter)(x), f(x))


def test_compile_says_what_is_wrong(torch, counter):
    x = torch.randn(1, 8, 2, 16)
    with pytest.raises(Exception, match=r"chunk_gla: k must be \[B, T, H, K\] = \[1, 8, 2, 16\], got \[1, 7, 2, 16\]"):
        torch.compile(lambda x: linattn.chunk_gla(x, x[:, :7], x, x)[0], fullgraph=True, backend=counter)(x)
    linattn.register_backend(Constant(1.0)("one"))
    with pytest.raises(Exception, match="unknown backend 'oen': did you mean 'one'"):
        torch.compile(lambda x: linattn.chunk_gla(x, x, x, x, backend="oen")[0], fullgraph=True, backend=counter)(x)


FIRST_CALL = """
import {first}, {second}
import torch
f = torch.compile(lambda x: linattn.chunk_gla(x, x, x, -abs(x), backend="torch")[0], fullgraph=True, backend="eager")
x = torch.randn(1, 8, 2, 16)
got = f(x)
torch.testing.assert_close(got, linattn.chunk_gla(x, x, x, -abs(x))[0])
print("same")
"""


@pytest.mark.parametrize("order", [("torch", "linattn"), ("linattn", "torch")])
def test_the_very_first_call_may_be_compiled(torch, order):
    code = FIRST_CALL.format(first=order[0], second=order[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "same\n", done.stderr


class Named(type):
    @property
    def __module__(cls):
        """``torch.compile`` of PyTorch 2.11 cannot read that of the last base of a tensor."""
        assert cls.__name__ != "Last", "looked further than needed"
        return "elsewhere"


class Last(metaclass=Named):
    pass


class Array(np.ndarray, Last):
    pass


def test_an_array_is_known_by_its_first_base_of_a_framework():
    x = np.ones((1, 5, 2, 4)).view(Array)
    assert linattn.linear_attn(x, x, x)[0].shape == (1, 5, 2, 4)


def test_export(torch, two_backends):
    class Model(torch.nn.Module):
        def forward(self, x):
            return linattn.chunk_gla(x, x, x, x, backend="one")[0]

    x = torch.randn(1, 8, 2, 16)
    T = torch.export.Dim("T", min=2, max=64)
    for strict in (False, True):
        program = torch.export.export(Model(), (x,), dynamic_shapes=({1: T},), strict=strict)
        assert program.module()(torch.randn(1, 33, 2, 16)).shape == (1, 33, 2, 16)


def test_fake_tensors(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        o = gla(torch.randn(1, 8, 2, 16))
    assert o.shape == (1, 8, 2, 16)


def test_parameters_and_subclasses_are_tensors(torch):
    class Mine(torch.Tensor):
        pass

    x = torch.randn(1, 8, 2, 16)
    torch.testing.assert_close(gla(torch.nn.Parameter(x)).detach(), gla(x))
    assert linattn.explain("chunk_gla", *[x.as_subclass(Mine)] * 4).backend == "torch"


def test_vmap_and_grad(torch):
    x = torch.randn(3, 1, 8, 2, 16)
    torch.testing.assert_close(torch.func.vmap(gla)(x), torch.stack([gla(row) for row in x]))
    torch.func.grad(lambda x: gla(x).sum())(x[0])


def test_offsets_are_not_read_inside_a_trace(torch, counter):
    x = torch.randn(1, 8, 2, 16)

    def f(x, cu):
        return linattn.chunk_gla(x, x, x, -abs(x), cu_seqlens=cu)[0]

    cu = torch.tensor([0, 3, 8])
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend=counter)(x, cu), f(x, cu))


def test_jit_notices_use_backend(two_backends):
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1, 8, 2, 16))
    gla(x)  # so that JAX is met before, as above
    traced = []

    @jax.jit
    def f(x):
        traced.append(1)
        return gla(x)

    found = []
    for name in ("one", "two", "one"):
        with linattn.use_backend(name):
            found.append(float(f(x)[0, 0, 0, 0]))
    assert found == [1.0, 2.0, 1.0]
    assert len(traced) == 2


def test_jax_met_first_inside_a_block(two_backends):
    code = """
import jax, linattn, sys
sys.path.insert(0, {path!r})
from test_tracing import Constant, gla
for name, value in (("one", 1.0), ("two", 2.0)):
    linattn.register_backend(Constant(value)(name))
x = jax.numpy.ones((1, 8, 2, 16))
f = jax.jit(gla)
with linattn.use_backend("one"):
    print(float(f(x)[0, 0, 0, 0]))
with linattn.use_backend("two"):
    print(float(f(x)[0, 0, 0, 0]))
"""
    pytest.importorskip("jax")
    code = code.format(path=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1.0\n2.0\n", done.stderr


def test_interleaved_tasks_leave_nothing_behind(torch, counter, two_backends):
    jax = pytest.importorskip("jax")
    x, y = torch.randn(1, 8, 2, 16), jax.numpy.ones((1, 8, 2, 16))
    compiled, jitted = torch.compile(gla, fullgraph=True, backend=counter), jax.jit(gla)

    async def task(name, first, second):
        await asyncio.sleep(first)
        with linattn.use_backend(name):
            await asyncio.sleep(second)

    async def both():
        await asyncio.gather(task("one", 0, 0.02), task("two", 0.01, 0.02))

    asyncio.run(both())
    torch.testing.assert_close(compiled(x), gla(x))
    with linattn.use_backend("two"):
        jitted(y)
    linattn.unregister_backend("one")
    linattn.unregister_backend("two")
    assert jax.numpy.allclose(jitted(y), gla(y))


def test_jax_shapes_and_gradients(two_backends):
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1, 8, 2, 16))
    with linattn.use_backend("one"):
        assert jax.eval_shape(gla, x).shape == (1, 8, 2, 16)
        assert jax.vmap(gla)(x[None]).shape == (1, 1, 8, 2, 16)
        assert jax.grad(lambda x: gla(x).sum())(x).shape == x.shape


def test_numpy_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.ones((1, 8, 2, 16), ml_dtypes.bfloat16)
    assert linattn.explain("chunk_gla", x, x, x, x).call.dtype == "bfloat16"
    assert linattn.chunk_gla(x, x, x, -x)[0].dtype == ml_dtypes.bfloat16


def test_jax_tracers_beside_arrays(two_backends):
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1, 8, 2, 16))

    def f(q):
        return linattn.chunk_gla(q, x, x, -x, backend="one")[0].sum()

    assert jax.jit(f)(x) == f(x)
    assert jax.grad(f)(x).shape == x.shape
    assert jax.vmap(f)(x[None]).shape == (1,)


def test_jax_shapes_without_arrays_can_be_explained(two_backends):
    jax = pytest.importorskip("jax")
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), "float32")
    assert linattn.explain("chunk_gla", x, x, x, x, backend="one").backend == "one"


@pytest.mark.parametrize("place", ["cpu", None])
def test_jax_tracers_run_on_the_default_device(two_backends, place, monkeypatch):
    """Beside a GPU too, which is JAX's default otherwise."""
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), "float32")
    for default in (place, place and jax.devices(place)[0]):
        with jax.default_device(default):
            assert linattn.explain("chunk_gla", x, x, x, x, backend="one").call.device == (place or "gpu")


def test_mlx_plans_notice_another_default_device(monkeypatch):
    mx = pytest.importorskip("mlx.core")
    x = mx.ones((1, 8, 2, 16))
    device = linattn.explain("chunk_gla", x, x, x, x).call.device
    monkeypatch.setattr(linattn.frameworks.Mlx, "device", lambda self, x: "elsewhere")
    assert linattn.explain("chunk_gla", x, x, x, x).call.device == "elsewhere" != device


@pytest.mark.parametrize("dynamic", [True, None])
def test_compile_with_options_computed_from_sizes(torch, counter, two_backends, dynamic):
    def f(x):
        size = min(64, x.shape[1])
        return linattn.chunk_gla(x, x, x, x, scale=x.shape[-1] ** -0.5, chunk_size=size, backend="one")[0]

    compiled = torch.compile(f, fullgraph=True, backend=counter, dynamic=dynamic)
    for T in (8, 12):
        assert compiled(torch.randn(1, T, 2, 16)).shape == (1, T, 2, 16)


def test_compile_with_options_that_change(torch, counter):
    def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        return v * 0 + scale * chunk_size, None

    linattn.register_backend(named("product", chunk_gla=chunk_gla, frameworks=("torch",)))

    def f(x, scale, chunk_size):
        return linattn.chunk_gla(x, x, x, x, scale=scale, chunk_size=chunk_size, backend="product")[0]

    compiled = torch.compile(f, fullgraph=True, backend=counter)
    x = torch.randn(1, 8, 2, 16)
    for scale, chunk_size in ((0.5, 16), (0.25, 32), (1.5, 64)):
        assert compiled(x, scale, chunk_size).unique().item() == scale * chunk_size


def test_compile_misses_an_array(torch, counter, two_backends):
    f = torch.compile(lambda x: linattn.chunk_gla(x, x, x, None, backend="one")[0], fullgraph=True, backend=counter)
    with pytest.raises(Exception, match="chunk_gla: g is required, got None"):
        f(torch.randn(1, 8, 2, 16))


def test_a_constant_that_is_first_needed_under_a_transform_is_not_of_it():
    """It is kept, and other threads take it: one made within ``grad`` would be a wrapper of that call's."""
    torch = pytest.importorskip("torch")
    fresh = float(torch.rand((), dtype=torch.float64))

    def total(x):
        return (x * framework_of(x).numbers([fresh, 2.0], like=x)).sum()

    torch.func.grad(total)(torch.ones(2))
    kept = frameworks._torch_constant(frameworks._array, (fresh, 2.0), "float32", "cpu")
    assert not torch._C._functorch.is_functorch_wrapped_tensor(kept)
    assert kept.tolist() == pytest.approx([fresh, 2.0])


def test_kept_arrays_of_functions_that_are_called_the_same_are_apart(torch):
    def draw_of(value):
        def draw():
            return np.full(2, value)

        return draw

    first, second, like = draw_of(1.0), draw_of(2.0), torch.zeros(2)

    def both(x):
        return framework_of(x).constant(first, (), x) + 10 * framework_of(x).constant(second, (), x)

    torch._dynamo.reset()
    for run in (both, torch.compile(both, fullgraph=True, backend="aot_eager"), both):
        assert run(like).tolist() == [21.0, 21.0]
