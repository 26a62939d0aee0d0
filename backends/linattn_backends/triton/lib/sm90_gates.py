"""A gate per key channel, however strong, in Gluon for Hopper: sums of gates, decayed rows, scores and their gradients.

As :mod:`.gates` for plain Triton, in its symbols.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from .gates import FLOOR, LOG2E, opaque_zero
from .indexing import locate_sequence
from .input_maps import LOG_SIGMOID, NONE, SOFTPLUS, decay_of, decay_slopes, load_rate
from .sm90 import copy_rows_async, lhs_layout, mma_async, mma_layout, store_layout, store_rows, widen


@gluon.jit
def sum_where(ones, x, C: gl.constexpr, BK: gl.constexpr):
    """``ones @ x`` in two bfloat16 terms, for a matrix of ones and zeros ``[C, C]`` and float32 ``x [C, BK]``.

    Ones in registers, whose contents the compiler knows, came out wrong in rows 8 to 15 of every 16 (Triton 3.6.0).
    """
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    high = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile)
    rest = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile)
    store_split(high, rest, x)
    left = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, ones.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    acc = warpgroup_mma_wait(0, [sum_where_async(left, high, rest, C, BK)])
    left._keep_alive()
    high._keep_alive()
    rest._keep_alive()
    return acc


SPLIT_IN_TWO = gl.constexpr("""{
    .reg .b32 x, y;
    cvt.rn.bf16x2.f32 $0, $3, $2;
    shl.b32 x, $0, 16;
    and.b32 y, $0, 0xffff0000;
    sub.f32 x, $2, x;
    sub.f32 y, $3, y;
    cvt.rn.bf16x2.f32 $1, y, x;
}""")
"""Two numbers, two bfloat16 terms each. What the compiler makes of it rounds one number at a time, at an eighth of the rate."""


DECAY_BOTH = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 x;
    setp.ne.u32 first, $5, 0;
    selp.b32 x, $2, $3, first;
    mul.rn.bf16x2 $0, x, $4;
    mul.rn.bf16x2 $1, $3, $4;
}""")
"""The first two numbers or the second, as a row says, times the third; and the second times the third."""


@gluon.jit
def decay_both(x, y, e, first):
    """``x`` where ``first`` is not zero, elsewhere ``y``, and ``y``, both times ``e``; in bfloat16, two numbers at a time.

    ``first`` is of whole rows. What is decayed so is rounded twice, ``e`` and the product.
    """
    return gl.inline_asm_elementwise(
        DECAY_BOTH, "=&r,=&r,r,r,r,r,r", [x, y, e.to(gl.bfloat16), first], (gl.bfloat16, gl.bfloat16), True, 2
    )


KEEP_BELOW = gl.constexpr("""{
    .reg .pred p, q;
    .reg .b32 x, y;
    setp.lt.u32 p, $4, $6;
    setp.lt.u32 q, $5, $7;
    selp.b32 x, 0xffff, 0, p;
    selp.b32 y, 0xffff0000, 0, q;
    or.b32 x, x, y;
    and.b32 $0, $2, x;
    and.b32 $1, $3, x;
}""")
"""Two numbers of two tiles each where an integer is below another, else zero."""


@gluon.jit
def keep_below(x, y, i, limit):
    """``x`` and ``y`` of bfloat16 where ``0 ≤ i < limit``, else zero."""
    return gl.inline_asm_elementwise(
        KEEP_BELOW, "=&r,=&r,r,r,r,r,r,r", [x, y, i, limit], (gl.bfloat16, gl.bfloat16), True, 2
    )  # fmt: skip


@gluon.jit
def store_split(high, rest, x):
    """Store float32 ``x`` as two bfloat16 terms."""
    first, second = gl.inline_asm_elementwise(SPLIT_IN_TWO, "=&r,=&r,r,r", [x], (gl.bfloat16, gl.bfloat16), True, 2)
    high.store(first)
    rest.store(second)


@gluon.jit
def sum_where_async(ones, high, rest, C: gl.constexpr, BK: gl.constexpr):
    """Begin ``ones @ x`` for the two terms of ``x``."""
    acc = mma_async(ones, high, gl.zeros((C, BK), gl.float32, mma_layout(BK)), True)
    return mma_async(ones, rest, acc, False)


@gluon.jit
def load_log2_gates(buffer, BK: gl.constexpr):
    """Log decays ``[C, BK]`` that were copied to ``buffer``, at least ``FLOOR``, base 2."""
    return to_log2(buffer.load(mma_layout(BK)))


@gluon.jit
def with_bias(x, factor, column, bias, hv, bs, bias_k, BK: gl.constexpr, layout: gl.constexpr):
    """A tile of raw gates of head ``hv``, from a column on, with their bias, times a factor, float32."""
    x = widen(x) * factor
    if bias is not None:
        columns = column + gl.arange(0, BK, gl.SliceLayout(0, layout))
        x += (gl.load(bias + hv.to(gl.int64) * bs + columns * bias_k).to(gl.float32) * factor)[None, :]
    return x


@gluon.jit
def load_mapped_gates(
    buffer, column, count, A_log, bias, hv, As, bs, bias_k, number, C: gl.constexpr, BK: gl.constexpr, MAP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Log decays ``[C, BK]``, at least ``FLOOR``, base 2, of raw gates that were copied to ``buffer``, or as they are there.

    ``A_log`` and ``bias`` are of all heads, and the tile of head ``hv`` from a column on.
    """
    x = buffer.load(layout)
    if MAP == NONE:
        x = to_log2(x)
    else:
        there = (gl.arange(0, C, gl.SliceLayout(1, layout)) < count)[:, None]
        rate = load_rate(A_log, hv.to(gl.int64) * As)
        if MAP == SOFTPLUS:
            x = log2_of_one_and_exp2(with_bias(x, LOG2E, column, bias, hv, bs, bias_k, BK, layout)) * -rate
        elif MAP == LOG_SIGMOID:
            x = log2_of_one_and_exp2(with_bias(x, -LOG2E, column, bias, hv, bs, bias_k, BK, layout)) * -number
        else:
            x = decay_of(with_bias(x, 1.0, column, bias, hv, bs, bias_k, BK, layout), rate, number, MAP) * LOG2E
        x = gl.maximum(gl.where(there, x, 0.0), FLOOR * LOG2E, propagate_nan=tl.PropagateNan.ALL)
    return x


LOG_OF_ONE_AND_EXP = gl.constexpr("""{
    .reg .pred small;
    .reg .f32 e, x, y;
    abs.f32 e, $1;
    neg.f32 e, e;
    ex2.approx.ftz.f32 e, e;
    add.f32 x, e, 0f3F800000;
    lg2.approx.ftz.f32 x, x;
    fma.rn.f32 y, e, 0f3EF6384F, 0fBF38AA3B;
    fma.rn.f32 y, e, y, 0f3FB8AA3B;
    mul.f32 y, e, y;
    setp.lt.f32 small, e, 0f3C800000;
    selp.f32 x, y, x, small;
    max.NaN.f32 y, $1, 0f00000000;
    add.f32 $0, x, y;
}""")
"""By the logarithm's instruction or, where ``e = 2^-|x|`` is below 2^-6 and ``1 + e`` loses it, three terms of a series."""


@gluon.jit
def log2_of_one_and_exp2(x):
    """``log2(1 + 2^x)``, off by 2e-5 of itself at most, as two bfloat16 terms of it are by 8e-6."""
    return gl.inline_asm_elementwise(LOG_OF_ONE_AND_EXP, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def store_gate_gradient(
    p, d, stride, parts, g, gt, column, count, A_log, bias, hv, As, bs, bias_k, number, C: gl.constexpr, BK: gl.constexpr,
    MAP: gl.constexpr,
):  # fmt: skip
    """Store of a tile of the gate's gradient, of raw gates' if there is a map; and of its sums over tokens for the parameters.

    ``parts [2, stride]`` are those of ``A`` and of the bias, a channel of every head each, from this tile's place on.
    """
    if MAP == NONE:
        store_rows(p, d.to(p.dtype.element_ty), stride, count, C, BK)
    else:
        layout: gl.constexpr = store_layout(BK)
        r = gl.arange(0, C, gl.SliceLayout(1, layout))
        columns = gl.arange(0, BK, gl.SliceLayout(0, layout))
        x = gl.load(g + (r[:, None] * gt + columns[None, :]), mask=(r < count)[:, None], other=0.0)
        by_x, by_A = decay_slopes(
            with_bias(x, 1.0, column, bias, hv, bs, bias_k, BK, layout), load_rate(A_log, hv.to(gl.int64) * As), number, MAP
        )
        d = gl.convert_layout(d, layout)
        reaches = (r < count)[:, None] & (d != 0.0)
        if parts is not None:
            gl.store(parts + columns, gl.sum(gl.where(reaches, d * by_A, 0.0), 0))
        d = gl.where(reaches, d * by_x, 0.0)
        if parts is not None:
            gl.store(parts + stride + columns, gl.sum(d, 0))
        gl.store(p + (r[:, None] * stride + columns[None, :]), d.to(p.dtype.element_ty), mask=(r < count)[:, None])


@gluon.jit
def to_log2(x):
    """Log decays at least ``FLOOR``, base 2."""
    return gl.maximum(x.to(gl.float32), FLOOR, propagate_nan=tl.PropagateNan.ALL) * LOG2E


@gluon.jit
def copy_chunk_async(
    item, q, k, g, owner, first, cu, T, PER, HV, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, GATE_GROUP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Begin to copy gates, queries and keys of one chunk, ``K / BK`` tiles ``[C, BK]`` each, the gates first.

    And say where the gates' two terms go, in their place, and where results go.
    """
    NK: gl.constexpr = K // BK
    hv = item % HV
    i = item // HV
    _, piece, bos, length, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    row = piece.to(gl.int64) * C
    count = (length - row).to(gl.int32)
    q += b * qb + (bos + row) * qt + (hv // GROUP).to(gl.int64) * qh
    k += b * kb + (bos + row) * kt + (hv // GROUP).to(gl.int64) * kh
    g += b * gb + (bos + row) * gt + (hv // GATE_GROUP).to(gl.int64) * gh
    type: gl.constexpr = g.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], type)
    gs = ()
    terms = ()
    qs = ()
    ks = ()
    for ik in gl.static_range(NK):
        terms = terms + (gl.allocate_shared_memory(gl.bfloat16, [2, C, BK], tile),)  # noqa: RUF005
        if type == gl.bfloat16:
            gs = gs + (terms[ik].index(0),)  # noqa: RUF005
        else:
            gs = gs + (terms[ik]._reinterpret(type, [C, BK], wide),)  # noqa: RUF005
        copy_rows_async(gs[ik], g + ik * BK, gt, count, C, BK)
    async_copy.commit_group()
    for ik in gl.static_range(NK):
        qs = qs + (gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile),)  # noqa: RUF005
        ks = ks + (gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile),)  # noqa: RUF005
        copy_rows_async(qs[ik], q + ik * BK, qt, count, C, BK)
        copy_rows_async(ks[ik], k + ik * BK, kt, count, C, BK)
        async_copy.commit_group()
    return gs, terms, qs, ks, i.to(gl.int64) * HV + hv, ((b * T + bos + row) * HV + hv) * K, count


@gluon.jit
def store_decayed_rows(
    read, compare, write, bq, bk, by_query, by_key, high, rest, ones, stride, count, C: gl.constexpr, BK: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """Store ``q ∘ e^G``, ``k ∘ e^{G_C - G}`` and, if ``KEYS``, ``k ∘ e^G``, for any gates.

    Queries and keys are multiplied by factors, numbers or ``[C, 1]``. ``high, rest`` are the gates' terms; ``ones`` has room
    for two matrices ``[C, C]``.
    """
    acc: gl.constexpr = mma_layout(BK)
    s = gl.arange(0, C, gl.SliceLayout(0, mma_layout(C)))[None, :]
    t = gl.arange(0, C, gl.SliceLayout(1, mma_layout(C)))[:, None]
    before = gl.where(s <= t, gl.full((C, C), 1.0, gl.float32, mma_layout(C)), 0.0)
    ones.index(0).store(before.to(gl.bfloat16))
    ones.index(1).store((1.0 - before).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    early = sum_where_async(ones.index(0), high, rest, C, BK)
    later = sum_where_async(ones.index(1), high, rest, C, BK)
    early = gl.exp2(warpgroup_mma_wait(2, [early]))
    asked = widen(bq.load(acc)) * by_query * early
    store_rows(read, asked.to(gl.bfloat16), stride, count, C, BK)
    key = widen(bk.load(acc)) * by_key
    if KEYS:
        store_rows(compare, (key * early).to(gl.bfloat16), stride, count, C, BK)
    later = gl.exp2(warpgroup_mma_wait(0, [later]))
    store_rows(write, (key * later).to(gl.bfloat16), stride, count, C, BK)


@gluon.jit
def opaque_offset(item):
    """Zero, a multiple of 16, which no compiler can know.

    Offsets that depend on it are not held in memory from one item of a loop to the next: registers are short, and so is what
    the processor's memory has left for the cache.
    """
    return (item >> 31) * 16


@gluon.jit
def any_strong(marks, pid, COUNT, PARTS: gl.constexpr, TILES: gl.constexpr, LIMIT: gl.constexpr):
    """Whether program ``pid`` of those that share ``COUNT`` tiles, ``TILES`` a chunk, meets a mark of at most ``LIMIT``.

    A chunk has ``PARTS`` marks.
    """
    jump = gl.num_programs(0)
    found = 0
    for base in range(pid, COUNT, jump * 128):
        items = base + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])) * jump
        for part in gl.static_range(PARTS):
            mark = gl.load(marks + items // TILES * PARTS + part, mask=items < COUNT, other=0)
            found += gl.sum(((mark <= LIMIT) & (items < COUNT)).to(gl.int32), 0)
    return found > 0


@gluon.jit
def store_level_mask(ones, half, C: gl.constexpr):
    """Store which gates lie between a token, a row, and the middle of its block of ``2 · half`` tokens."""
    t = gl.arange(0, C, gl.SliceLayout(1, mma_layout(C)))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, mma_layout(C)))[None, :]
    begin = t & -half  # of its half: from there until t, or after t until the half's end
    upper = (t & half) != 0
    low = gl.where(upper, begin, t + 1)
    length = gl.where(upper, t + 1 - begin, begin + half - 1 - t)
    lies = (s - low).to(gl.uint32) < length.to(gl.uint32)
    ones.store(gl.where(lies, gl.full((C, C), 1.0, gl.float32, mma_layout(C)), 0.0).to(gl.bfloat16))


@gluon.jit
def level_scores(bq, bk, high, rest, ones, C: gl.constexpr, K: gl.constexpr, KEYS: gl.constexpr):
    """``Σ_k q_tk k_sk e^{G_tk - G_sk}``, ``s ≤ t``, and, if ``KEYS``, that of ``k_tk``, ``s < t``, for any gates; else zero.

    At each of ``log2 C`` levels, from pairs of neighbours on: pairs of tokens in two halves of a block, measured from its
    middle, where both exponents are sums of gates, so ``≤ 0``. Sums are begun a level ahead, their ones made two.
    """
    wide: gl.constexpr = mma_layout(K)
    acc: gl.constexpr = mma_layout(C)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    asked = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    wrote = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    store_level_mask(ones.index(0), 1, C)
    store_level_mask(ones.index(1), 2, C)
    fence_async_shared()
    gl.thread_barrier()
    L = gl.zeros((C, C), gl.float32, acc)
    A = mma_async(bq, bk.permute((1, 0)), L, True)
    S = sum_where_async(ones.index(0), high, rest, C, K)
    A, S = warpgroup_mma_wait(0, [A, S])
    for level in range(6):
        half = 1 << level
        left, right = decay_both(bq.load(wide), bk.load(wide), gl.exp2(S), 1)
        asked.store(left)
        wrote.store(right)
        fence_async_shared()
        gl.thread_barrier()
        S = sum_where_async(ones.index((level + 1) & 1), high, rest, C, K)
        X = mma_async(asked, wrote.permute((1, 0)), A, True)
        if KEYS:
            Y = mma_async(wrote, wrote.permute((1, 0)), L, True)
        store_level_mask(ones.index(level & 1), 4 * half, C)
        apart = (t + opaque_zero(half)) ^ (s + opaque_zero(half)) ^ half
        S, X = warpgroup_mma_wait(0, [S, X])
        A = gl.where(apart < half, X, A)
        if KEYS:
            Y = warpgroup_mma_wait(0, [Y])
            L = gl.where(apart < half, Y, L)
        gl.thread_barrier()
    asked._keep_alive()
    wrote._keep_alive()
    return gl.where(s <= t, A, 0.0), gl.where(s < t, L, 0.0)


@gluon.jit
def strong_scores(
    read, compare, write, gate, terms, bq, bk, by_query, by_key, stride, count, C: gl.constexpr, K: gl.constexpr,
    KEYS: gl.constexpr,
):  # fmt: skip
    """``store_decayed_rows`` and ``level_scores`` of a chunk in one piece, its gates in registers, to go to ``terms``.

    Factors are on the rows only.
    """
    high = terms.index(0)
    rest = terms.index(1)
    store_split(high, rest, gate)
    ones = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16))
    store_decayed_rows(read, compare, write, bq, bk, by_query, by_key, high, rest, ones, stride, count, C, K, KEYS)
    gl.thread_barrier()
    A, L = level_scores(bq, bk, high, rest, ones, C, K, KEYS)
    terms._keep_alive()
    ones._keep_alive()
    return A, L


@gluon.jit
def strong_gradients(
    gate, bq, bk, sA, sL, own, dq, dread, dwrote, met, C: gl.constexpr, BK: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    """``dq, dk, dg [C, BK]`` for any gates, as sums over two ways. Through the state: ``dq, dread, dwrote`` of ``q ∘ e^G``, of
    ``k ∘ e^G`` if ``KEYS``, of ``k ∘ e^{G_C - G}``, and ``met [BK]`` of ``e^{G_C}``.

    Through the scores, by the levels of ``level_scores``, whose gradients, mirrored at the diagonal, are ``sA`` and, if
    ``KEYS``, ``sL``, which else is read and says nothing; ``own [C, 1]`` is the first's diagonal. A tile ``X`` of decayed
    queries in upper halves and keys in lower ones meets a level's pairs ``dA``: ``e^{…} ∘ dA X`` is ``dq`` in upper halves and
    ``dk`` in lower ones. A gate's gradient sums over the tokens whose way to the middle crosses it. Queries and keys are loaded
    where they are needed: registers are what there is least of.
    """
    acc: gl.constexpr = mma_layout(C)
    tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    r = gl.arange(0, C, gl.SliceLayout(1, lhs_layout(C)))[:, None]
    w = gl.arange(0, C, gl.SliceLayout(0, lhs_layout(C)))[None, :]
    zeros = gl.zeros((C, BK), gl.float32, acc)
    high = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tiles)
    rest = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tiles)
    store_split(high, rest, gate)
    met *= gl.exp2(gl.sum(gate, 0))
    ones = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], tiles)
    before = gl.where(s <= t, zeros + 1.0, 0.0)
    ones.index(0).store(before.to(gl.bfloat16))
    ones.index(1).store((1.0 - before).to(gl.bfloat16))
    XA = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tiles)
    XL = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tiles)
    crossing = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tiles)
    fence_async_shared()
    gl.thread_barrier()
    early = gl.exp2(warpgroup_mma_wait(0, [sum_where_async(ones.index(0), high, rest, C, BK)]))
    key = widen(bk.load(acc))
    asked = widen(bq.load(acc))
    dq *= early
    across = asked * dq
    dk = own * asked
    dq += own * key
    if KEYS:
        dread *= early
        across += key * dread
        dk += dread
    store_split(XA, XL, across)
    fence_async_shared()
    gl.thread_barrier()
    dg = sum_where_async(ones.index(0).permute((1, 0)), XA, XL, C, BK)
    later = sum_where_async(ones.index(1), high, rest, C, BK)
    dg, later = warpgroup_mma_wait(0, [dg, later])
    dg += met[None, :]
    dwrote *= gl.exp2(later)
    dk += dwrote
    gl.thread_barrier()
    store_split(XA, XL, widen(bk.load(acc)) * dwrote)
    store_level_mask(ones.index(0), 1, C)
    fence_async_shared()
    gl.thread_barrier()
    dg = mma_async(ones.index(1).permute((1, 0)), XA, dg, False)
    dg = mma_async(ones.index(1).permute((1, 0)), XL, dg, False)
    e = sum_where_async(ones.index(0), high, rest, C, BK)
    dg, e = warpgroup_mma_wait(0, [dg, e])
    gl.thread_barrier()
    for level in range(6):
        half = 1 << level
        e = gl.exp2(e)
        upper = gl.where((t & half) != 0, 1.0, 0.0)
        above, keys = decay_both(bq.load(acc), bk.load(acc), e, t & half)
        XA.store(above)
        if KEYS:
            XL.store(keys)
        apart = (r + opaque_zero(half)) ^ (w + opaque_zero(half)) ^ half
        dA, dL = keep_below(sA.load(lhs_layout(C)), sL.load(lhs_layout(C)), apart, half)
        fence_async_shared()
        gl.thread_barrier()
        Z = mma_async(dA, XA, zeros, True)
        if KEYS:
            Y = mma_async(dL, XL, zeros, True)
        store_level_mask(ones.index((level + 1) & 1), 2 * half, C)
        if KEYS:
            Y, dL = warpgroup_mma_wait(0, [Y, dL])
        Z, dA = warpgroup_mma_wait(0, [Z, dA])
        Z = Z * e
        across = Z * upper
        dq = dq + across
        across = widen(bq.load(acc)) * across
        Z = Z * (1.0 - upper)
        if KEYS:
            Z += Y * e
        dk = dk + Z
        crossing.store((across + widen(bk.load(acc)) * Z).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        dg = mma_async(ones.index(level & 1).permute((1, 0)), crossing, dg, False)
        e = sum_where_async(ones.index((level + 1) & 1), high, rest, C, BK)
        dg, e = warpgroup_mma_wait(0, [dg, e])
    high._keep_alive()
    rest._keep_alive()
    ones._keep_alive()
    XA._keep_alive()
    XL._keep_alive()
    crossing._keep_alive()
    return dq, dk, dg
