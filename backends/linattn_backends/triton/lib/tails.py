"""Zeros where no packed sequence has its tokens: rows from the end of the last one on, of whatever an operator writes.

Kernels walk sequences, and the end of the last one is known on the device alone. So a launch for itself looks it up, and does
nothing where it is the end of the rows.
"""

import triton
import triton.language as tl


@triton.jit
def zero_rows(x, end, T, width, BLOCK: tl.constexpr):
    """Zeros in rows ``end … T`` of ``x``, each of ``width`` numbers, without gaps; all programs share them."""
    if x is not None:
        count = (T - end) * width
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        for _ in range(tl.program_id(0), tl.cdiv(count, BLOCK).to(tl.int32), tl.num_programs(0)):
            tl.store(x + end * width + at, tl.zeros((BLOCK,), x.dtype.element_ty), mask=at < count)
            at += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["T", "N"])
def zero_tails(a, b, c, d, e, f, cu, T, N, aw, bw, cw, dw, ew, fw, BLOCK: tl.constexpr):
    """Zeros in the rows behind the last of ``N`` sequences, of up to six arrays ``[1, T, …]`` whose rows have such widths."""
    end = tl.load(cu + N).to(tl.int64)
    zero_rows(a, end, T, aw, BLOCK)
    zero_rows(b, end, T, bw, BLOCK)
    zero_rows(c, end, T, cw, BLOCK)
    zero_rows(d, end, T, dw, BLOCK)
    zero_rows(e, end, T, ew, BLOCK)
    zero_rows(f, end, T, fw, BLOCK)
