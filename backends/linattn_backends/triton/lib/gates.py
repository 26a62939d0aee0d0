"""Sums of gates, and scores inside a chunk under a gate per channel, in plain Triton.

Symbols are those of the specification. A chunk has ``C`` tokens; ``G_t = Σ_{j≤t} g_j`` inside it, ``G_C`` its last row. A sum
of gates over a range of tokens is a product with a matrix of ones and zeros (``sum_where``), on the tensor cores: it has no
cancellation, so a reset (``g = -inf``) in one range leaves the others exact.

Gates reach the kernels as natural logs, at least ``FLOOR``: ``e^FLOOR`` is zero in float32, so nothing is lost.
"""

import triton
import triton.language as tl

from .tiles import INTERPRETED, dot, largest, load_tile, smallest, total

LOG2E = tl.constexpr(1.4426950408889634)


FLOOR = tl.constexpr(-112.0)


BLOCK = tl.constexpr(16)
"""Tokens of the longest blocks that plain products are tried on when a chunk decays too much for one."""


HELD = tl.constexpr(88.0)
"""float32 holds sums of a chunk's products of rows up to ``2^32`` with numbers and factors that are ``2^HELD`` together."""


@triton.jit
def load_gate(p, rows, stride, columns, L, W: tl.constexpr, BW: tl.constexpr):
    """A tile of log decays, at least ``FLOOR``, in their own dtype."""
    g = load_tile(p, rows, stride, columns, L, W, BW)
    return tl.maximum(g.to(tl.float32), FLOOR, propagate_nan=tl.PropagateNan.ALL).to(g.dtype)


@triton.jit
def load_scalar_gate(p, rows, stride, L):
    """One log decay a token ``[C]``, float32."""
    g = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0).to(tl.float32)
    return tl.maximum(g, FLOOR, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sum_where(ones, x, SPLIT: tl.constexpr):
    """``ones @ x`` for a matrix of ones and zeros. float32 is split into ``SPLIT`` bfloat16 terms, which is exact for three."""
    if INTERPRETED:
        result = tl.dot(ones.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    elif x.dtype == tl.float32:
        part = x.to(tl.bfloat16)
        result = tl.dot(ones.to(tl.bfloat16), part)
        if SPLIT > 1:
            rest = x - part.to(tl.float32)
            part = rest.to(tl.bfloat16)
            result = tl.dot(ones.to(tl.bfloat16), part, result)
        if SPLIT > 2:
            part = (rest - part.to(tl.float32)).to(tl.bfloat16)
            result = tl.dot(ones.to(tl.bfloat16), part, result)
    else:
        result = tl.dot(ones.to(x.dtype), x)
    return result


@triton.jit
def prefix_sum(g, C: tl.constexpr, SPLIT: tl.constexpr):
    """``Σ_{j≤t} g_j`` for one number a token ``[C]``."""
    if SPLIT < 3:
        return tl.cumsum(g, 0)
    t = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return tl.sum(tl.where(j <= t, g[None, :], 0.0), 1)


@triton.jit
def suffix_sum(g, C: tl.constexpr, SPLIT: tl.constexpr):
    """``Σ_{j>t} g_j``."""
    if SPLIT < 3:
        return total(g) - tl.cumsum(g, 0)
    t = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return tl.sum(tl.where(j > t, g[None, :], 0.0), 1)


@triton.jit
def decay_matrix(g, C: tl.constexpr, REVERSE: tl.constexpr, SPLIT: tl.constexpr):
    """``e^{G_t - G_s}`` for ``s ≤ t``, else 0, from one log decay a token: ``[C, C]``; the transpose in reverse.

    ``G ≥ C · FLOOR``, so its differences are right to ``5e-4``: enough for 16-bit operands. Otherwise, sums of gates.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    if SPLIT < 3:
        G = tl.cumsum(g, 0) * LOG2E
        E = G[:, None] - G[None, :]
        if REVERSE:
            E = -E
    elif REVERSE:
        E = sum_where(s > t, tl.where(t <= s, g[:, None], 0.0), SPLIT) * LOG2E
    else:
        E = sum_where(s <= t, tl.where(t > s, g[:, None], 0.0), SPLIT) * LOG2E
    if REVERSE:
        return tl.where(t <= s, tl.exp2(tl.minimum(E, 0.0)), 0.0)
    return tl.where(s <= t, tl.exp2(tl.minimum(E, 0.0)), 0.0)


@triton.jit
def scalar_decays(p, rows, end, stride, L):
    """``e^{G_t}`` and ``e^{G_C - G_t}`` ``[C]``, and ``G_C``, base 2: from a scalar gate's running sums and ``G_C``."""
    G = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0)
    return tl.exp2(G.to(tl.float32)), tl.exp2(tl.minimum((end - G).to(tl.float32), 0.0)), end.to(tl.float32)


@triton.jit
def decay_from_sums(p, rows, stride, L, REVERSE: tl.constexpr):
    """``e^{G_t - G_s}`` for ``s ≤ t``, else 0, from a scalar gate's running sums: ``[C, C]``; the transpose in reverse."""
    G = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0)
    t = rows[:, None]
    s = rows[None, :]
    if REVERSE:
        return tl.where(t <= s, tl.exp2(tl.minimum((G[None, :] - G[:, None]).to(tl.float32), 0.0)), 0.0)
    return tl.where(s <= t, tl.exp2(tl.minimum((G[:, None] - G[None, :]).to(tl.float32), 0.0)), 0.0)


@triton.jit
def decays_of_values(p, late, rows, end, stride, L):
    """Decays as of :func:`scalar_decays`, with ``late`` sums for the tokens of values, which have their weights."""
    G = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0)
    of_values = tl.load(late + rows.to(tl.int64) * stride, mask=rows < L, other=0.0)
    return tl.exp2(G.to(tl.float32)), tl.exp2((end - of_values).to(tl.float32)), end.to(tl.float32)


@triton.jit
def decay_to_queries(p, late, rows, stride, L):
    """Decays from values, by ``late`` sums with their weights, to queries: ``[C, C]``, zero for values after the query."""
    G = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=-float("inf"))
    of_values = tl.load(late + rows.to(tl.int64) * stride, mask=rows < L, other=0.0)
    between = tl.where(rows[None, :] <= rows[:, None], G[:, None] - of_values[None, :], -float("inf"))
    return tl.exp2(between.to(tl.float32))


@triton.jit
def reset_tokens(p, rows, stride, L, C: tl.constexpr):
    """Which tokens ``[C]`` forget everything before them: ``e^g`` is zero, and so is the gradient of ``g``."""
    G = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0)
    before = tl.load(p + (rows - 1).to(tl.int64) * stride, mask=(rows < L) & (rows % C > 0), other=0.0)
    return G - before <= -125.0


@triton.jit
def opaque_zero(half):
    """Zero, which no compiler can know: what depends on it stays in the loop over levels, and frees registers outside."""
    return (half * tl.num_programs(0)) >> 31


@triton.jit
def level_masks(half, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Blocks of ``2·half`` tokens, cut in the middle: which gates lie between token ``t`` and the cut.

    Returns ``[C, 1]`` whether ``t`` is in the upper half, ``[C, C]`` the gates ``j`` to sum for ``t``, and ``[C, C]`` the pairs
    ``(t, s)`` of one block with ``s`` below and ``t`` above the cut.
    """
    t = tl.arange(0, C)[:, None] + opaque_zero(half)
    j = tl.arange(0, C)[None, :] + opaque_zero(half)
    upper = (t & half) != 0
    other = (j & half) != 0
    same = (t ^ j) < 2 * half
    if EXCLUSIVE:
        above = upper & other & (j < t)
    else:
        above = upper & other & (j <= t)
    below = (upper == 0) & (other == 0) & (j > t)
    return upper, same & (above | below), same & upper & (other == 0)


@triton.jit
def level_pairs_transposed(half, C: tl.constexpr):
    """``level_masks``'s pairs, transposed."""
    s = tl.arange(0, C)[:, None] + opaque_zero(half)
    t = tl.arange(0, C)[None, :] + opaque_zero(half)
    return ((s ^ t) < 2 * half) & ((s & half) == 0) & ((t & half) != 0)


@triton.jit
def excess(x, RANGE: tl.constexpr):
    """By how much, base 2, the largest of ``x`` is beyond what float32 holds by a factor of ``2^{RANGE/2}``, or 0.

    That is the larger of the two factors of which a decay is made, if it is as large as it may be.
    """
    return tl.maximum(tl.log2(tl.maximum(largest(x), 1.0)) + 0.5 * RANGE - HELD, 0.0)


@triton.jit
def plain_block_half(g, limit, C: tl.constexpr, EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr):
    """Half of the longest block, of ``BLOCK`` or of 4 tokens, that never decays by ``2^limit``; 0 if there is none.

    Levels stop there: one product does all the blocks. Not for short blocks and ``EXCLUSIVE``: most of such
    a block's pairs have no gate between them, and the gate's gradient would be the difference of their sums.
    """
    t = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    stop = 0
    if smallest(tl.min(sum_where((t ^ j) < BLOCK, g, SPLIT), 1)) * LOG2E > -limit:
        stop = BLOCK // 2
    elif not EXCLUSIVE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if smallest(tl.min(sum_where((t ^ j) < 4, g, SPLIT), 1)) * LOG2E > -limit:
            stop = 2
    return stop


@triton.jit
def block_decays(g, stop, C: tl.constexpr, EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr):
    """Log2 decays inside each block of ``2·stop`` tokens, measured from half of its own: the query's side and the key's."""
    t = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    same = (t ^ j) < 2 * stop
    c = sum_where(same, g, 1) * 0.5  # any number near it would do
    if EXCLUSIVE:
        Gq = (sum_where(same & (j < t), g, SPLIT) - c) * LOG2E
        G = Gq + g.to(tl.float32) * LOG2E
    else:
        Gq = (sum_where(same & (j <= t), g, SPLIT) - c) * LOG2E
        G = Gq
    return Gq, G


@triton.jit
def diagonal_scores(q, k, u, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """``A_tt`` on the diagonal, zero elsewhere."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    own = q.to(tl.float32) * k.to(tl.float32)
    if EXCLUSIVE:
        own = own * u[None, :]
    return tl.where(t == s, tl.sum(own, 1)[:, None], 0.0)


@triton.jit
def level_scores(
    q, k, g, u, C: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Scores of one chunk for a decay per key channel, over the ``BK`` channels of the tiles ``q, k, g [C, BK]``.

    ``A[t, s] = Σ_k q_tk k_sk e^{G_tk - G_sk}`` for ``s ≤ t``; ``REVERSE`` gives its transpose. ``EXCLUSIVE`` (RWKV-6) has
    ``G_{t-1}`` in the place of ``G_t``, and ``u`` on the diagonal.

    At each of ``log2 C`` levels, the pairs on two sides of the middle of a block, measured from that middle: both exponents are
    sums of gates, so ``≤ 0``, and one tile ``X`` holds decayed queries above the cut and decayed keys below it. Where no
    channel decays by much in any block of a few tokens, the levels end, and one product does all the blocks.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    A = diagonal_scores(q, k, u, C, EXCLUSIVE)
    stop = plain_block_half(g, RANGE, C, EXCLUSIVE, 1)
    half = C // 2
    while half > stop:
        upper, between, pairs = level_masks(half, C, EXCLUSIVE)
        X = (tl.where(upper, q, k).to(tl.float32) * tl.exp2(sum_where(between, g, SPLIT) * LOG2E)).to(DT)
        XX = dot(X, tl.trans(X), PREC)
        if REVERSE:
            A += tl.where(level_pairs_transposed(half, C), XX, 0.0)
        else:
            A += tl.where(pairs, XX, 0.0)
        half = half // 2
    if stop > 0:
        Gq, G = block_decays(g, stop, C, EXCLUSIVE, SPLIT)
        left = (q.to(tl.float32) * tl.exp2(Gq)).to(DT)
        right = (k.to(tl.float32) * tl.exp2(-G)).to(DT)
        if REVERSE:
            A += tl.where((t < s) & ((t ^ s) < 2 * stop), dot(right, tl.trans(left), PREC), 0.0)
        else:
            A += tl.where((s < t) & ((t ^ s) < 2 * stop), dot(left, tl.trans(right), PREC), 0.0)
    return A


@triton.jit
def decay_rows(x, g, C: tl.constexpr, REVERSE: tl.constexpr, EXCLUSIVE: tl.constexpr, SPLIT: tl.constexpr):
    """The rows that meet the state, for any decay: ``x ∘ e^G``, in reverse ``x ∘ e^{G_C - G}``."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    if REVERSE:
        E = sum_where(s > t, g, SPLIT)
    elif EXCLUSIVE:
        E = sum_where(s < t, g, SPLIT)
    else:
        E = sum_where(s <= t, g, SPLIT)
    return x.to(tl.float32) * tl.exp2(E * LOG2E)


@triton.jit
def decayed_values(
    A, y, w, C: tl.constexpr, SPLIT: tl.constexpr, RANGE: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr
):  # fmt: skip
    """``Σ_{s≤t} A_ts e^{W_t - W_s} ∘ y_s`` for a decay ``w`` per value channel, ``W`` its running sum: ``[C, BV]``.

    The levels of :func:`level_scores`, which decays what ``A`` is made of; here it is what ``A`` meets.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    y = y.to(tl.float32)
    acc = tl.sum(tl.where(t == s, A, 0.0), 1)[:, None] * y
    stop = plain_block_half(w, RANGE, C, False, 1)
    half = C // 2
    while half > stop:
        upper, between, pairs = level_masks(half, C, False)
        e = tl.exp2(sum_where(between, w, SPLIT) * LOG2E)
        X = tl.where(upper, 0.0, y * e).to(DT)
        acc += tl.where(upper, e * dot(tl.where(pairs, A, 0.0).to(DT), X, PREC), 0.0)
        half = half // 2
    if stop > 0:
        Wq, W = block_decays(w, stop, C, False, SPLIT)
        near = tl.where(((t ^ s) < 2 * stop) & (s < t), A, 0.0)
        acc += tl.exp2(Wq) * dot(near.to(DT), (y * tl.exp2(-W)).to(DT), PREC)
    return acc


@triton.jit
def upper_gates_transposed(half, C: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Of ``level_masks``'s second result the upper half, transposed: which tokens ``t`` (columns) lean on gate ``j`` (rows)."""
    j = tl.arange(0, C)[:, None] + opaque_zero(half)
    t = tl.arange(0, C)[None, :] + opaque_zero(half)
    both = ((t ^ j) < 2 * half) & ((t & half) != 0) & ((j & half) != 0)
    if EXCLUSIVE:
        return both & (j < t)
    return both & (j <= t)


@triton.jit
def lower_gates_transposed(half, C: tl.constexpr):
    """The lower half of ``level_masks``'s second result, transposed."""
    j = tl.arange(0, C)[:, None] + opaque_zero(half)
    t = tl.arange(0, C)[None, :] + opaque_zero(half)
    return ((t ^ j) < 2 * half) & ((t & half) == 0) & ((j & half) == 0) & (j > t)
