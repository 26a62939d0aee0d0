"""Rows, products and states on their way to or from registers, for the kernels of ``dplr`` in Gluon for Hopper.

``a`` and ``b`` may have another dtype than bfloat16; no copy converts, so those pass through registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ..lib.sm90 import copy_rows_async, lhs_layout, mma_async, mma_layout, store_rows
from ..lib.sm90_gates import sum_where_async

__all__ = [
    "allocate_halves",
    "as_left",
    "centered_sums",
    "copy_narrow_rows",
    "load_wide_rows",
    "lower_left",
    "rounded",
    "scale_rows",
    "store_product",
    "store_wide_rows",
]


@gluon.jit
def copy_narrow_rows(buffer, p, stride, count, C: gl.constexpr, BK: gl.constexpr):
    """Begin of a copy of rows of bfloat16 to ``buffer``; wider rows are loaded by ``load_wide_rows``."""
    if p.dtype.element_ty == gl.bfloat16:
        copy_rows_async(buffer, p, stride, count, C, BK)


@gluon.jit
def load_wide_rows(p, stride, count, C: gl.constexpr, BK: gl.constexpr):
    """Rows wider than bfloat16, on their way to registers."""
    if p.dtype.element_ty == gl.bfloat16:
        return 0
    else:
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // BK, BK // 4], [4, 1], [1, 0])
        r = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
        columns = gl.arange(0, BK, gl.SliceLayout(0, layout))[None, :]
        return gl.load(p + (r * stride + columns), mask=r < count, other=0.0)


@gluon.jit
def store_wide_rows(buffer, p, x):
    """Store to ``buffer`` of rows that ``load_wide_rows`` brought."""
    if p.dtype.element_ty != gl.bfloat16:
        buffer.store(x.to(gl.bfloat16))


@gluon.jit
def store_product(p, x, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Store of a product's float32 ``x``; where that is what is stored, from the registers where it lies."""
    if p.dtype.element_ty == gl.float32:
        r = gl.arange(0, C, gl.SliceLayout(1, mma_layout(W)))[:, None]
        columns = gl.arange(0, W, gl.SliceLayout(0, mma_layout(W)))[None, :]
        gl.store(p + (r * stride + columns), x, mask=r < count)
    else:
        store_rows(p, x.to(p.dtype.element_ty), stride, count, C, W)


@gluon.jit
def scale_rows(buffer, x, C: gl.constexpr, BK: gl.constexpr):
    """Product ``buffer ∘ x``, in the buffer's place."""
    buffer.store((buffer.load(mma_layout(BK)).to(gl.float32) * x).to(gl.bfloat16))


@gluon.jit
def as_left(x, W: gl.constexpr):
    """Rows of bfloat16 as a product's left operand; the registers are the same."""
    return gl.convert_layout(x, lhs_layout(W))


ROUND_TWO = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
"""Two numbers to bfloat16. Else the compiler rounds before it selects, one number at a time."""


@gluon.jit
def rounded(x):
    """float32 ``x`` as bfloat16."""
    return gl.inline_asm_elementwise(ROUND_TWO, "=r,r,r", [x], gl.bfloat16, True, 2)


@gluon.jit
def lower_left(x, there, W: gl.constexpr):
    """The scores ``x`` that are ``there``, else zeros, as a product's left operand."""
    return as_left(rounded(gl.where(there, x, 0.0)), W)


@gluon.jit
def allocate_halves(C: gl.constexpr):
    """Matrices that sum gates: half of those until a token, less half of those after it; and half of all."""
    acc: gl.constexpr = mma_layout(C)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    until = gl.where(s <= t, gl.full((C, C), 0.5, gl.float32, acc), -0.5)
    halves = gl.allocate_shared_memory(
        gl.bfloat16, [C, C], gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16), until.to(gl.bfloat16)
    )
    whole = gl.allocate_shared_memory(
        gl.bfloat16, [8, C], gl.NVMMASharedLayout.get_default_for([8, C], gl.bfloat16),
        gl.full((8, C), 0.5, gl.bfloat16, gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])),
    )  # fmt: skip
    return halves, whole


@gluon.jit
def centered_sums(halves, whole, high, rest, C: gl.constexpr, K: gl.constexpr):
    """Sums of gates, given in two terms, until each token, less half of what all sum to; and that half, by rows of a state."""
    G = sum_where_async(halves, high, rest, C, K)
    c = mma_async(high.permute((1, 0)), whole.permute((1, 0)), gl.zeros((K, 8), gl.float32, mma_layout(8)), True)
    c = mma_async(rest.permute((1, 0)), whole.permute((1, 0)), c, False)
    G, c = warpgroup_mma_wait(0, [G, c])
    return G, gl.convert_layout(gl.max(c, 1), gl.SliceLayout(1, mma_layout(K)))  # its columns are equal
