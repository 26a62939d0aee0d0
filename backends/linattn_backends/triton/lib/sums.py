"""Sums of the parts of a gradient that programs left, in one order whatever the device does first.

::

    dweight_dj = Σ_p parts_pjd        for j < J
    dbias_d = Σ_p parts_pJd           if there is one more
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["P"])
def column_sums(parts, dweight, dbias, P, D, ROWS: tl.constexpr, J: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr):
    """``BD`` columns of row ``j`` of ``parts [P, ROWS, D]``, to ``dweight [D, J]`` or ``dbias [D]``."""
    pid = tl.program_id(0)
    j = pid % ROWS
    columns = pid // ROWS * BD + tl.arange(0, BD)
    inside = columns < D
    at = parts + j.to(tl.int64) * D + columns
    acc = tl.zeros((BP, BD), tl.float32)
    for p in range(0, P, BP):
        rows = p + tl.arange(0, BP)
        mask = (rows < P)[:, None] & inside[None, :]
        acc += tl.load(at[None, :] + rows.to(tl.int64)[:, None] * ROWS * D, mask=mask, other=0.0)
    total = tl.sum(acc, 0)
    if j < J:
        tl.store(dweight + columns.to(tl.int64) * J + j, total.to(dweight.dtype.element_ty), mask=inside)
    elif ROWS > J:
        tl.store(dbias + columns, total.to(dbias.dtype.element_ty), mask=inside)
