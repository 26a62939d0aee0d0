"""A chunk's triangular system, solved by one warpgroup whose scores lie in shared memory, in Gluon for Hopper.

    M = (I - L)⁻¹ L,    L strictly lower triangular [64, 64]

Blocks of 16 on the diagonal by rows, a warp each; then ``M₂₁ = (I + M₂) L₂₁ (I + M₁)`` of two neighbours, twice, in products
of tf32.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .scores_sm90 import join_pairs, split_columns

__all__ = ["allocate_scratch", "solve_system"]


class Scratch(NamedTuple):
    """Where a chunk's system is solved: blocks on the diagonal, those below, and two columns of blocks."""

    diagonal: gl.shared_memory_descriptor
    below: gl.shared_memory_descriptor
    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor


@gluon.jit
def allocate_scratch(C: gl.constexpr):
    """Places for a chunk's system."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    diagonal = gl.allocate_shared_memory(gl.float32, [4, 256], plain)
    below = gl.allocate_shared_memory(gl.float32, [C, 16], plain)
    first = gl.allocate_shared_memory(gl.float32, [C, 16], plain)
    second = gl.allocate_shared_memory(gl.float32, [C, 16], plain)
    return Scratch(diagonal, below, first, second)


@gluon.jit
def substitute_rows(own):
    """``(I - L)⁻¹ L`` of blocks ``L [4, 16 · 16]``, row after row; a warp has one."""
    row: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    four: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    done = ()
    for i in gl.static_range(16):
        x = own.slice(i * 16, 16, 1).load(row)
        for j in gl.static_range(0, i, 4):
            factors = split_columns(own.slice(i * 16 + j, 4, 1).load(four))
            for n in gl.static_range(4):
                if j + n < i:
                    x += gl.convert_layout(factors[n], row) * done[j + n]
        done = done + (x,)  # noqa: RUF005
    together = join_pairs(join_pairs(join_pairs(join_pairs(done, 8), 4), 2), 1)[0]
    return gl.reshape(gl.permute(together, (0, 2, 3, 4, 5, 1)), (4, 256))


@gluon.jit
def join_columns(x, y):
    """``x, y [R, W]`` beside one another."""
    return gl.reshape(gl.permute(gl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@gluon.jit
def add_product(x, y, z, form: gl.constexpr):
    """``x + y z`` of blocks, ``y`` in registers and ``z`` in shared memory."""
    return mma_v2(y, z.load(gl.DotOperandLayout(1, form, 1)), x, "tf32")


@gluon.jit
def solve_system(M, L, scratch, C: gl.constexpr):
    """``M = (I - L)⁻¹ L`` of one chunk: blocks of 16 row by row, then merged to 32 and 64. ``M`` holds zeros above them.

    With ``M₁, M₂`` of two neighbours and ``L₂₁`` between them, ``M₂₁ = (I + M₂) L₂₁ (I + M₁)``.
    """
    pairs: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 1, 2], [1, 16, 8])
    halves: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    pairs_left: gl.constexpr = gl.DotOperandLayout(0, pairs, 1)
    left: gl.constexpr = gl.DotOperandLayout(0, halves, 1)
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    compared = split_columns(L)
    block = (gl.arange(0, C, gl.SliceLayout(1, compared[0].type.layout)) // 16)[:, None]
    D = scratch.diagonal.reshape((C, 16))
    E = scratch.below
    P = scratch.first
    R = scratch.second
    upper = gl.where(block == 0, compared[0], compared[1])
    D.store(gl.where(block < 2, upper, gl.where(block == 2, compared[2], compared[3])))
    E.store(gl.where(block < 2, compared[0], compared[2]))
    P.store(compared[0])
    R.store(compared[1])
    scratch.diagonal.store(substitute_rows(scratch.diagonal))
    tops = D.reshape((2, 32, 16)).slice(0, 16, 1)
    bottoms = D.reshape((2, 32, 16)).slice(16, 16, 1)
    between = E.reshape((2, 32, 16)).slice(16, 16, 1)
    made = E.reshape((2, 32, 16)).slice(0, 16, 1)
    x = add_product(between.load(pairs), bottoms.load(pairs_left), between, pairs)
    made.store(x)
    between.store(add_product(x, made.load(pairs_left), tops, pairs))
    there = (gl.arange(0, 32, gl.SliceLayout(1, left)) < 16)[:, None]
    diagonal = D.slice(32, 32).load(left)
    U = gl.where(there, diagonal, E.slice(32, 32).load(left))
    W = gl.where(there, 0.0, diagonal)
    x = add_product(add_product(P.slice(32, 32).load(halves), U, P.slice(32, 16), halves), W, P.slice(48, 16), halves)
    y = add_product(add_product(R.slice(32, 32).load(halves), U, R.slice(32, 16), halves), W, R.slice(48, 16), halves)
    P.slice(0, 32).store(x)
    R.slice(0, 32).store(y)
    above = (gl.arange(0, 32, gl.SliceLayout(1, tile)) < 16)[:, None]
    for n in gl.static_range(2):
        own = D.slice(32 * n, 32).load(tile)
        pair = join_columns(gl.where(above, own, E.slice(32 * n, 32).load(tile)), gl.where(above, 0.0, own))
        M.slice(32 * n, 32).slice(32 * n, 32, 1).store(pair.to(gl.bfloat16))
    Y = R.slice(0, 32).load(left)
    x = add_product(add_product(x, P.slice(0, 32).load(left), D.slice(0, 16), halves), Y, E.slice(16, 16), halves)
    y = add_product(y, Y, D.slice(16, 16), halves)
    M.slice(32, 32).slice(0, 32, 1).store(join_columns(x, y).to(gl.bfloat16))
