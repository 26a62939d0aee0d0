"""Scores inside a chunk, and the triangular system of its errors (WY / UT transform), for at most a scalar gate.

In chunks of ``C`` tokens, with ``G`` the running sum of the gates inside a chunk::

    scores     A_ts = scale Σ_k q_t k_s e^{G_t - G_s}, s ≤ t          L_ts = Σ_k k_t k_s e^{G_t - G_s}, s < t
    solve      M = (I + L beta)⁻¹ L

The *error* ``e`` of a token is what its value lacks, ``(I + L beta) e = v - (k ∘ e^G) S``. ``M`` gives errors forwards and,
by its transpose, their adjoint backwards (:mod:`.state`). It is strictly lower triangular and stays finite where ``beta`` is
zero. With a ``beta`` a value channel every channel has a system of its own, solved by substitution as the state is carried:
``L`` stands in the place of ``M``. The same with a gate per key channel is in :mod:`.vector`.

No two programs of a launch add to one place, and none waits for another or asks the host for a size. That holds for every
kernel of this folder.
"""

import triton
import triton.language as tl

from ..lib.gates import BLOCK, LOG2E, decay_matrix, load_scalar_gate, prefix_sum, suffix_sum
from ..lib.indexing import locate_sequence
from ..lib.tiles import dot, dot_add, load_tile
from .loads import load_beta, load_two_lengths


@triton.jit
def block_at(L, i: tl.constexpr, j: tl.constexpr, C: tl.constexpr):
    """Pointers to block ``i, j`` of a ``[C, C]`` matrix."""
    t = tl.arange(0, BLOCK)[:, None]
    s = tl.arange(0, BLOCK)[None, :]
    return L + (i * BLOCK + t) * C + j * BLOCK + s


@triton.jit
def subtract_product(x, y, beta, z, PREC: tl.constexpr):
    """``x - y (beta z)`` of blocks."""
    return x - dot(y * beta[None, :], z, PREC)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV"])
def delta_solve_fwd(
    L, M, beta, owner, first, cu, T, PER, N, HV, bb, bt, bh,
    C: tl.constexpr, BETA: tl.constexpr, PACKED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The triangular solve ``M = (I + L beta)⁻¹ L`` of one chunk, in blocks of 16 merged to 32 and 64. ``L`` is overwritten.

    With ``M₁, M₂`` of two neighbours and ``L₂₁`` between them, ``M₂₁ = (I - M₂ beta) L₂₁ (I - beta M₁)``.
    """
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, length, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    at = (i.to(tl.int64) * HV + hv) * (C * C)
    L += at
    M += at
    rows = piece * C + tl.arange(0, BLOCK)
    if BETA == 1:
        beta += b * bb + bos * bt + hv.to(tl.int64) * bh
    b0 = load_beta(beta, rows, length, bt, BETA)
    b1 = load_beta(beta, rows + BLOCK, length, bt, BETA)
    b2 = load_beta(beta, rows + 2 * BLOCK, length, bt, BETA)
    b3 = load_beta(beta, rows + 3 * BLOCK, length, bt, BETA)
    type = M.dtype.element_ty

    # Everything is asked for at once. Then the blocks on the diagonal, row after row: a column is a lane's, and so are its rows
    # above; the factors, which all lanes of a block share, come from the cache.
    column = tl.arange(0, C)
    top = column // BLOCK * BLOCK
    p = L + top * C + top
    unsolved = ()
    betas = ()
    for t in tl.static_range(BLOCK):
        unsolved = unsolved + (tl.load(p + t * C + column % BLOCK),)  # noqa: RUF005
        betas = betas + (load_beta(beta, piece * C + top + t, length, bt, BETA),)  # noqa: RUF005
    if C > BLOCK:
        L10 = tl.load(block_at(L, 1, 0, C))
    if C > 2 * BLOCK:
        L32 = tl.load(block_at(L, 3, 2, C))
        L20 = tl.load(block_at(L, 2, 0, C))
        L30 = tl.load(block_at(L, 3, 0, C))
        L21 = tl.load(block_at(L, 2, 1, C))
        L31 = tl.load(block_at(L, 3, 1, C))
    solved = (unsolved[0],)
    scaled = (unsolved[0] * betas[0],)
    for t in tl.static_range(1, BLOCK):
        x = unsolved[t]
        for s in tl.static_range(t):
            x -= tl.load(p + t * C + s) * scaled[s]
        solved = solved + (x,)  # noqa: RUF005
        scaled = scaled + (x * betas[t],)  # noqa: RUF005
    tl.debug_barrier()
    for t in tl.static_range(1, BLOCK):
        tl.store(p + t * C + column % BLOCK, solved[t])
    tl.debug_barrier()
    M00 = tl.load(block_at(L, 0, 0, C))
    if C > BLOCK:
        M11 = tl.load(block_at(L, 1, 1, C))
    if C > 2 * BLOCK:
        M22 = tl.load(block_at(L, 2, 2, C))
        M33 = tl.load(block_at(L, 3, 3, C))
    tl.store(block_at(M, 0, 0, C), M00.to(type))
    if C > BLOCK:
        zero = tl.zeros((BLOCK, BLOCK), type)
        Y = subtract_product(L10, M11, b1, L10, PREC)
        M10 = subtract_product(Y, Y, b0, M00, PREC)
        tl.store(block_at(M, 1, 1, C), M11.to(type))
        tl.store(block_at(M, 1, 0, C), M10.to(type))
        tl.store(block_at(M, 0, 1, C), zero)
    if C > 2 * BLOCK:
        Y = subtract_product(L32, M33, b3, L32, PREC)
        M32 = subtract_product(Y, Y, b2, M22, PREC)
        tl.store(block_at(M, 2, 2, C), M22.to(type))
        tl.store(block_at(M, 3, 3, C), M33.to(type))
        tl.store(block_at(M, 3, 2, C), M32.to(type))
        Y20 = subtract_product(L20, M22, b2, L20, PREC)
        Y21 = subtract_product(L21, M22, b2, L21, PREC)
        Y30 = subtract_product(subtract_product(L30, M33, b3, L30, PREC), M32, b2, L20, PREC)
        Y31 = subtract_product(subtract_product(L31, M33, b3, L31, PREC), M32, b2, L21, PREC)
        M20 = subtract_product(subtract_product(Y20, Y20, b0, M00, PREC), Y21, b1, M10, PREC)
        M30 = subtract_product(subtract_product(Y30, Y30, b0, M00, PREC), Y31, b1, M10, PREC)
        tl.store(block_at(M, 2, 0, C), M20.to(type))
        tl.store(block_at(M, 3, 0, C), M30.to(type))
        tl.store(block_at(M, 2, 1, C), subtract_product(Y21, Y21, b1, M11, PREC).to(type))
        tl.store(block_at(M, 3, 1, C), subtract_product(Y31, Y31, b1, M11, PREC).to(type))
        tl.store(block_at(M, 0, 2, C), zero)
        tl.store(block_at(M, 0, 3, C), zero)
        tl.store(block_at(M, 1, 2, C), zero)
        tl.store(block_at(M, 1, 3, C), zero)
        tl.store(block_at(M, 2, 3, C), zero)


@triton.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def delta_scores_fwd(
    q, k, uq, uk, g, beta, A, L, rates, owner, first, cu, T, PER, N, HV, COUNT, scale,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    PACKED: tl.constexpr, SPLIT: tl.constexpr, PREC: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Scores ``A, L [C, C]`` of one chunk and, for a scalar gate, ``rates [3, C]``: ``e^G``, ``e^{G_C - G}``, ``G log2(e)``.

    If ``UNIT``, rows have reciprocal lengths ``uq, uk``, which factor out like a decay: ``rates [6, C]`` goes on with those of
    products with a query, with a key that reads, and with one that is written.
    """
    pid = tl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if tl.load(owner + i) >= N:
            return
    _, piece, bos, length, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    rows = piece * C + tl.arange(0, C)
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    q += b * qb + bos * qt + (hv // GROUP).to(tl.int64) * qh
    k += b * kb + bos * kt + (hv // GROUP).to(tl.int64) * kh
    at = i.to(tl.int64) * HV + hv
    qk = tl.zeros((C, C), tl.float32)
    kk = tl.zeros((C, C), tl.float32)
    for ik in range((K + BK - 1) // BK):
        columns = ik * BK + tl.arange(0, BK)
        bq = load_tile(q, rows, qt, columns, length, K, BK)
        bk = load_tile(k, rows, kt, columns, length, K, BK)
        qk = dot_add(bq, tl.trans(bk), qk, PREC)
        kk = dot_add(bk, tl.trans(bk), kk, PREC)
    qk = tl.where(s <= t, qk * scale, 0.0)
    kk = tl.where(s < t, kk, 0.0)
    p = rates
    if UNIT:
        lq, lk = load_two_lengths(uq, uk, (b * T + bos) * (HV // GROUP) + hv // GROUP, rows, length, HV // GROUP, UNIT)
        qk = qk * (lq[:, None] * lk[None, :])
        kk = kk * (lk[:, None] * lk[None, :])
        p += at * (6 * C) + tl.arange(0, C)
        early = tl.full((C,), 1.0, tl.float32)
        late = early
    elif GATE == 1:
        p += at * (3 * C) + tl.arange(0, C)
    if GATE == 1:
        bg = load_scalar_gate(g + b * gb + bos * gt + hv.to(tl.int64) * gh, rows, gt, length)
        D = decay_matrix(bg, C, False, SPLIT)
        qk = tl.where(s <= t, qk * D, 0.0)
        kk = tl.where(s < t, kk * D, 0.0)
        G = prefix_sum(bg, C, SPLIT) * LOG2E
        early = tl.exp2(G)
        late = tl.exp2(suffix_sum(bg, C, SPLIT) * LOG2E)
        tl.store(p, early)
        tl.store(p + C, late)
        tl.store(p + 2 * C, G)
    if UNIT:
        tl.store(p + 3 * C, early * lq)
        tl.store(p + 4 * C, early * lk)
        tl.store(p + 5 * C, late * lk)
    square = at * (C * C) + t * C + s
    tl.store(A + square, qk.to(A.dtype.element_ty))
    if BETA == 2:
        tl.store(L + square, kk)
    else:  # the solve reads no block above the diagonal
        tl.store(L + square, kk, mask=s // BLOCK <= t // BLOCK)
