"""What ranks that share sequences tell each other of their spans: how a message ends, and what follows from those of all."""

import triton
import triton.language as tl

from .tiles import dot_add

# How a transition acts on a state ``[K, V]``, as in :mod:`linattn.affine` (``KIND``).
MADE = tl.constexpr(0)  # it has been written already
NUMBER = tl.constexpr(1)  # one number
KEYS = tl.constexpr(2)  # one a key channel
KEYS_VALUES = tl.constexpr(3)  # one a key channel, then one a value channel
MATRIX = tl.constexpr(4)  # from the left


@triton.jit
def decay_of(sums, n, hv, pieces, HV, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """What channels of a head decay by over all pieces of a sequence, from the sums over each, base 2."""
    found = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        at = ((n * pieces + piece) * HV + hv).to(tl.int64) * WIDTH
        found += tl.load(sums + at + columns, mask=columns < WIDTH, other=0.0)
    return tl.exp2(found)


@triton.jit(do_not_specialize=["pieces", "HV", "at"])
def span_message_end(
    message, decay, value_decay, digest, pieces, HV, at, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """The digest, two numbers, ``at`` its place in a message; and in front the transitions that gates' sums over ``pieces`` of
    every sequence say, unless they have been ``MADE``.
    """
    pid = tl.program_id(0)
    if pid == 0:
        both = tl.arange(0, 2)
        tl.store(message + at + both, tl.load(digest + both))
    if KIND != MADE:
        n, hv = pid // HV, pid % HV
        columns = tl.arange(0, BK)
        if KIND == NUMBER:
            A = tl.zeros((BK,), tl.float32) + 1
            if decay is not None:
                A = decay_of(decay, n, hv, pieces, HV, columns, K, BK)
            tl.store(message + pid + columns, A, mask=columns < 1)
        else:
            WIDTH: tl.constexpr = K if KIND == KEYS else K + V
            p = message + pid.to(tl.int64) * WIDTH
            tl.store(p + columns, decay_of(decay, n, hv, pieces, HV, columns, K, BK), mask=columns < K)
            if KIND == KEYS_VALUES:
                columns_v = tl.arange(0, BV)
                tl.store(p + K + columns_v, decay_of(value_decay, n, hv, pieces, HV, columns_v, V, BV), mask=columns_v < V)


@triton.jit
def acted(
    A, S, own, columns_k, columns_v, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
    REVERSE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``A ∘ S + own`` of a tile, in ``REVERSE`` with ``Aᵀ``; of a matrix the tile has all rows."""
    if KIND == NUMBER:
        return tl.load(A) * S + own
    if KIND == MATRIX:
        before = tl.arange(0, BK)
        p = A + columns_k[:, None] * K + before[None, :]
        if REVERSE:
            p = A + before[None, :] * K + columns_k[:, None]
        return dot_add(tl.load(p, mask=(columns_k < K)[:, None] & (before < K)[None, :], other=0.0), S, own, PREC)
    S = tl.load(A + columns_k, mask=columns_k < K, other=0.0)[:, None] * S
    if KIND == KEYS_VALUES:
        S = tl.load(A + K + columns_v, mask=columns_v < V, other=0.0)[None, :] * S
    return S + own


@triton.jit(do_not_specialize=["first", "count", "A_first", "A_size", "b_size", "at", "ranks"])
def span_states(
    A, b, digest, ever, told, out, first, count, A_first, A_size, b_size, at, ranks,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr,
    KIND: tl.constexpr, REVERSE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The states ``out [N, HV, K, V]`` after ``count`` spans, of which the ``first`` one starts from zero: ``S' = A ∘ S + b``;
    in ``REVERSE`` gradients, from the ``first`` one back, with ``Aᵀ``. Zeros after none.

    Those of a rank lie ``A_size`` and ``b_size`` numbers behind those of the one before; ``A`` begins with span ``A_first``.
    Where there is a ``digest``, each rank's lies ``at`` its place behind its ``A``: if one is another, all is NaN, and what is
    to know of it is ``told``.
    """
    TILES: tl.constexpr = ((V + BV - 1) // BV) * ((K + BK - 1) // BK)
    pid = tl.program_id(0)
    head = (pid // TILES).to(tl.int64)
    tile = pid % TILES
    columns_k = tile // ((V + BV - 1) // BV) * BK + tl.arange(0, BK)
    columns_v = tile % ((V + BV - 1) // BV) * BV + tl.arange(0, BV)
    inside = (columns_k < K)[:, None] & (columns_v < V)[None, :]
    place = head * (K * V) + columns_k[:, None] * V + columns_v[None, :]
    S = tl.load(b + first.to(tl.int64) * b_size + place, mask=inside & (count > 0), other=0.0)
    for step in range(1, count):
        j = first + step
        if REVERSE:
            j = first - step
        own = tl.load(b + j.to(tl.int64) * b_size + place, mask=inside, other=0.0)
        p = A + (j - A_first).to(tl.int64) * A_size + head * WIDTH
        S = acted(p, S, own, columns_k, columns_v, K, V, BK, KIND, REVERSE, PREC)
    if digest is not None:
        rank = tl.arange(0, R)
        p = A + rank.to(tl.int64) * A_size + at
        low = tl.load(p, mask=rank < ranks, other=0.0).to(tl.int32, bitcast=True)
        high = tl.load(p + 1, mask=rank < ranks, other=0.0).to(tl.int32, bitcast=True)
        other = (low != tl.load(digest).to(tl.int32, bitcast=True)) | (high != tl.load(digest + 1).to(tl.int32, bitcast=True))
        odd = tl.max((other & (rank < ranks)).to(tl.int32), 0)
        S = tl.where(odd > 0, float("nan"), S)
        if pid == 0:
            tl.store(ever, odd.to(tl.uint8), mask=odd > 0)
            tl.store(told, odd.to(tl.uint8), mask=odd > 0)
    tl.store(out + place, S, mask=inside)
