"""Zeros where no packed sequence has its tokens: rows from the end of the last one on, of whatever an operator writes.

Kernels walk sequences, and the end of the last one is known on the device alone. So programs beside those that cut sequences,
or a launch for itself, look it up, and do nothing where it is the end of the rows.
"""

import triton
import triton.language as tl


@triton.jit
def zero_rows(x, end, T, width, part, parts, BLOCK: tl.constexpr):
    """Zeros in rows ``end … T`` of ``x``, each of ``width`` numbers, without gaps: one of ``parts`` of them."""
    if x is not None:
        count = (T - end) * width
        at = part.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        for _ in range(part, tl.cdiv(count, BLOCK).to(tl.int32), parts):
            tl.store(x + end * width + at, tl.zeros((BLOCK,), x.dtype.element_ty), mask=at < count)
            at += parts * BLOCK


@triton.jit(do_not_specialize=["T", "N"])
def zero_tails(a, b, c, d, e, f, cu, T, N, aw, bw, cw, dw, ew, fw, BLOCK: tl.constexpr):
    """Zeros in the rows behind the last of ``N`` sequences, of up to six arrays ``[1, T, …]`` whose rows have such widths."""
    end = tl.load(cu + N).to(tl.int64)
    part, parts = tl.program_id(0), tl.num_programs(0)
    zero_rows(a, end, T, aw, part, parts, BLOCK)
    zero_rows(b, end, T, bw, part, parts, BLOCK)
    zero_rows(c, end, T, cw, part, parts, BLOCK)
    zero_rows(d, end, T, dw, part, parts, BLOCK)
    zero_rows(e, end, T, ew, part, parts, BLOCK)
    zero_rows(f, end, T, fw, part, parts, BLOCK)
