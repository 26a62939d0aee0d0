"""What MLX does to functions, done to calls of linattn on the public API."""

import mlx.core as mx
import pytest
from mlx_cases import EVERY, Problem, error


@pytest.mark.parametrize("op", ["gla", "gated_delta_rule"])  # compiling takes seconds each
def test_compile(op):
    problem = Problem(op)
    eager, compiled = problem.gradient(), mx.compile(problem.gradient())
    assert error(compiled(*problem.leaves), eager(*problem.leaves)) < 1e-6


@pytest.mark.parametrize("op", EVERY)
def test_vmap_of_a_gradient(op):
    problem = Problem(op, T=20)
    twice = [mx.stack([x, x * 0.5]) for x in problem.leaves]
    mapped = mx.vmap(problem.gradient())(*twice)
    for i in range(2):
        assert error([x[i] for x in mapped], problem.gradient()(*[x[i] for x in twice])) < 1e-6


@pytest.mark.parametrize("op", ["simple_gla", "rwkv6", "mixed_attn"])
def test_gradient_of_a_vmap(op):
    problem = Problem(op, T=20)
    twice = [mx.stack([x, x * 0.5]) for x in problem.leaves]
    found = problem.gradient(lambda *leaves: mx.vmap(problem.loss)(*leaves).sum())(*twice)
    assert error(found, mx.vmap(problem.gradient())(*twice)) < 1e-6


def test_vmap_over_one_argument():
    problem = Problem("delta_rule", T=20)
    q, *others = problem.leaves
    axes = (1, *[None] * len(others))
    found = mx.vmap(problem.loss, in_axes=axes)(mx.stack([q, 2 * q], axis=1), *others)
    assert error(found, [problem.loss(q, *others), problem.loss(2 * q, *others)]) < 1e-6


def test_vmap_of_packed_sequences():
    problem = Problem("kda", "state-varlen", T=20)
    twice = [mx.stack([x, x * 0.5]) for x in problem.leaves]
    mapped = mx.vmap(problem.gradient())(*twice)
    assert error([x[1] for x in mapped], problem.gradient()(*[x[1] for x in twice])) < 1e-6


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("op", EVERY)
def test_one_packed_sequence_has_the_gradients_of_a_row(op, form):
    """In a segment of one chunk, the state after the segment is that after the chunk: one array, and two cotangents."""
    packed, row = (Problem(op, "state-varlen-pack.9", form=form, T=9, B=1) for _ in range(2))
    del row.arrays["cu_seqlens"]
    assert error(packed.gradient()(*packed.leaves), row.gradient()(*row.leaves)) < 1e-5


@pytest.mark.parametrize("op", EVERY)
def test_second_order_and_forward_mode(op):
    """Not promised by a custom VJP; what MLX makes of the operations inside is right."""
    problem = Problem(op, "state", "fp64", T=20)
    mx.random.seed(0)
    directions = [mx.random.normal(x.shape).astype(x.dtype) for x in problem.leaves]

    def slope(*leaves):
        return sum((g * d).sum() for g, d in zip(problem.gradient(wide_loss)(*leaves), directions, strict=True))

    def wide_loss(*leaves):
        arrays = {**problem.arrays, **dict(zip(problem.floats, leaves, strict=True))}
        return sum(mx.square(x).sum() for x in problem.call(arrays).values() if x.dtype != mx.int32)

    step = 1e-5
    forward, back = ([x + s * step * d for x, d in zip(problem.leaves, directions, strict=True)] for s in (1, -1))
    numeric = (wide_loss(*forward) - wide_loss(*back)) / (2 * step)
    by_reverse = slope(*problem.leaves)
    (by_forward,) = mx.jvp(wide_loss, problem.leaves, directions)[1]
    assert error([by_reverse], [by_forward]) < 1e-10
    assert error([by_reverse], [numeric]) < 1e-6
    second = problem.gradient(slope)(*problem.leaves)
    numeric = (slope(*forward) - slope(*back)) / (2 * step)
    along = sum((x * d).sum() for x, d in zip(second, directions, strict=True))
    assert error([along], [numeric]) < 1e-6


def test_offsets_may_be_traced():
    """One compilation serves every pack of as many tokens and sequences."""
    problem = Problem("simple_gla", "state-varlen", T=20)
    traces = []

    def packed(cu_seqlens):
        traces.append(None)
        return problem.call({**problem.arrays, "cu_seqlens": cu_seqlens})

    compiled = mx.compile(packed)
    N = problem.arrays["cu_seqlens"].shape[0] - 1
    for first in (0, 3, 20):
        cu_seqlens = mx.array([0, *[first] * (N - 1), 20], dtype=mx.int32)
        eager = problem.call({**problem.arrays, "cu_seqlens": cu_seqlens})
        assert error(compiled(cu_seqlens).values(), eager.values()) < 1e-6
    assert len(traces) == 1


def test_vmap_of_a_vmap():
    problem = Problem("gla", T=20)
    q, *others = problem.leaves
    grid = mx.stack([mx.stack([q, 2 * q]), mx.stack([3 * q, 4 * q])])
    rows = mx.vmap(mx.vmap(lambda q: problem.loss(q, *others)))(grid)
    assert error([rows[1, 0]], [problem.loss(3 * q, *others)]) < 1e-6


def test_checkpoint():
    problem = Problem("kda", T=20)
    again = problem.gradient(mx.checkpoint(problem.loss))(*problem.leaves)
    assert error(again, problem.gradient()(*problem.leaves)) < 1e-6


def test_one_token_can_be_exported(tmp_path):
    problem = Problem("gated_delta_rule", T=1, form="recurrent")
    names = list(problem.arrays)
    step = lambda *arrays: tuple(problem.call(dict(zip(names, arrays, strict=True))).values())  # noqa: E731
    path = str(tmp_path / "step.mlxfn")
    mx.export_function(path, step, *problem.arrays.values())
    assert error(mx.import_function(path)(*problem.arrays.values()), problem.call().values()) < 1e-6
