"""Sums of the parts of a gradient that programs left, in one order whatever the device does first.

::

    dweight_dj = Σ_p parts_pjd        for j < J
    dbias_d = Σ_p parts_pJd           if there is one more, and dskip likewise if there are two
    dq_mk = Σ_s parts_msk             and dk likewise: a query/key head's from those of its value heads
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["P"])
def column_sums(
    parts, dweight, dbias, dskip, P, D, ROWS: tl.constexpr, J: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """``BD`` columns of row ``j`` of ``parts [P, ROWS, D]``, to ``dweight [D, J]``, ``dbias [D]`` or ``dskip [D]``."""
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
        if ROWS > J + 1:
            if j > J:
                tl.store(dskip + columns, total.to(dskip.dtype.element_ty), mask=inside)
            else:
                tl.store(dbias + columns, total.to(dbias.dtype.element_ty), mask=inside)
        else:
            tl.store(dbias + columns, total.to(dbias.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "SUMS"])
def head_sums(q_parts, k_parts, dq, dk, M, SUMS, K: tl.constexpr, BK: tl.constexpr, R: tl.constexpr):
    """``R`` rows of ``dq [M, K]`` from ``q_parts [M, SUMS, K]``; every second program has those of ``dk``."""
    pid = tl.program_id(0)
    parts, into = q_parts, dq
    if pid % 2 == 1:
        parts, into = k_parts, dk
    rows = (pid // 2).to(tl.int64) * R + tl.arange(0, R)
    columns = tl.arange(0, BK)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    at = parts + rows[:, None] * SUMS * K + columns[None, :]
    acc = tl.zeros((R, BK), tl.float32)
    for _ in range(SUMS):
        acc += tl.load(at, mask=inside, other=0.0)
        at += K
    tl.store(into + rows[:, None] * K + columns[None, :], acc.to(into.dtype.element_ty), mask=inside)
