"""Pieces that the kernels in Gluon for Hopper share: copies, products, and a gate per key channel, however strong.

As :mod:`.tiles` for the others. What holds for every kernel here: a buffer's place is given to another after its last use in
the program, which for a product is where it is issued: ``_keep_alive`` says where it is done. And a warp waits for its own
rows of a product only: whoever overwrites an operand needs a barrier after the wait.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .indexing import sequence_of
from .tiles import FLOOR, LOG2E, in_loop


def constants(names):
    """A class of compile-time constants, made of one that names them, to hand to the parts of a kernel: built by keywords."""

    def __init__(self, **given):
        for name, value in given.items():
            setattr(self, name, gl.constexpr(value))

    names.__annotations__ = dict.fromkeys(names.__annotations__, gl.constexpr)
    names.__init__ = gluon.constexpr_function(__init__)
    return aggregate(names)


@gluon.constexpr_function
def sums(width):
    """Of a product's ``[64, width]`` results in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def left(width):
    """Of a left operand; ``sums`` has the same registers, whatever ``width``."""
    return gl.DotOperandLayout(0, sums(width), 2)


@gluon.constexpr_function
def rows_of(width):
    """Of a tile's rows as they are copied, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def own_rows(width):
    """Of a product's ``[64, width]`` results as they are stored, 16 bytes a thread: a warp has the same rows as in ``sums``.

    So no warp waits for another where results go from there to here.
    """
    across = [[0, 8 << i] for i in range((width // 8).bit_length() - 1)]
    down = [[1 << i, 0] for i in range(4)]
    lanes = 5 - len(across)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *down[lanes:]], across + down[:lanes], [[16, 0], [32, 0]], [], [64, width]
    )


@gluon.jit
def copy(buffer, p, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Begin to copy ``count`` rows from ``p`` on to ``buffer [C, W]``, and zeros to the others."""
    layout: gl.constexpr = rows_of(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(buffer, p + (r[:, None] * stride + columns[None, :]), mask=(r < count)[:, None])


@gluon.jit
def follow():
    """Wait for the kernel before, then let the one after begin: where it may (``launch_pdl``), it is there when this one ends.

    First in a kernel, so that what any kernel reads was written by those before, however many of them may overlap.
    """
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def issue(a, b, acc, START: gl.constexpr):
    """Begin ``acc + a b``, without ``acc`` if ``START``."""
    return warpgroup_mma(a, b, acc, use_acc=not START, is_async=True)


@gluon.jit
def spread(p, x, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Store the first ``count`` rows of a product's ``x [C, W]``, 16 bytes a thread."""
    layout: gl.constexpr = own_rows(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    gl.store(p + (r[:, None] * stride + columns[None, :]), gl.convert_layout(x, layout), mask=(r < count)[:, None])


@gluon.jit
def put_sum(p, x, stride, count, TURN, C: gl.constexpr, W: gl.constexpr, PART: gl.constexpr):
    """``spread`` of float32 ``x``; where ``PART`` heads take turns, added to the sum of those before."""
    if PART == 1:
        spread(p, x.to(p.dtype.element_ty), stride, count, C, W)
    else:
        r = gl.arange(0, C, gl.SliceLayout(1, sums(W)))[:, None]
        p += r * stride + gl.arange(0, W, gl.SliceLayout(0, sums(W)))[None, :]
        gl.store(p, x + gl.load(p, mask=(r < count) & (TURN > 0), other=0.0), mask=r < count)


@gluon.jit
def numbers(p, i, stride, count):
    """Of tokens ``i``, float32; zero from ``count`` on."""
    return gl.load(p + i.to(gl.int64) * stride, mask=i < count, other=0.0).to(gl.float32)


@gluon.jit
def parts(TILES: gl.constexpr, HV):
    """What a program does: which tile, value head, and piece."""
    pid = gl.program_id(0)
    return pid % TILES, pid // TILES % HV, pid // (TILES * HV)


@gluon.jit
def chunk_of(i, owner, first, cu, T, PER, C: gl.constexpr, PACKED: gl.constexpr):
    """Of chunk ``i``: batch row, first token, and how many it has, perhaps more than ``C``."""
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    row = piece.to(gl.int64) * C
    return b, bos + row, (L - row).to(gl.int32)


@gluon.jit
def add(a, b):
    """The sum, for scans."""
    return a + b


@gluon.jit
def totals(ones, x, C: gl.constexpr, BK: gl.constexpr):
    """``ones @ x`` in two bfloat16 terms, for a matrix of ones and zeros ``[C, C]`` and float32 ``x [C, BK]``.

    Ones in registers, whose contents the compiler knows, came out wrong in rows 8 to 15 of every 16 (Triton 3.6.0).
    """
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    high = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile)
    rest = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile)
    put_terms(high, rest, x)
    left = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, ones.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    acc = warpgroup_mma_wait(0, [begin_total(left, high, rest, C, BK)])
    left._keep_alive()
    high._keep_alive()
    rest._keep_alive()
    return acc


TERMS = gl.constexpr("""{
    .reg .b32 x, y;
    cvt.rn.bf16x2.f32 $0, $3, $2;
    shl.b32 x, $0, 16;
    and.b32 y, $0, 0xffff0000;
    sub.f32 x, $2, x;
    sub.f32 y, $3, y;
    cvt.rn.bf16x2.f32 $1, y, x;
}""")
"""Two numbers, two bfloat16 terms each. What the compiler makes of it rounds one number at a time, at an eighth of the rate."""


@gluon.jit
def put_terms(high, rest, x):
    """Store float32 ``x`` as two bfloat16 terms."""
    first, second = gl.inline_asm_elementwise(TERMS, "=&r,=&r,r,r", [x], (gl.bfloat16, gl.bfloat16), True, 2)
    high.store(first)
    rest.store(second)


@gluon.jit
def begin_total(ones, high, rest, C: gl.constexpr, BK: gl.constexpr):
    """Begin ``ones @ x`` for the two terms of ``x``."""
    acc = issue(ones, high, gl.zeros((C, BK), gl.float32, sums(BK)), True)
    return issue(ones, rest, acc, False)


@gluon.jit
def gates(buffer, BK: gl.constexpr):
    """Log decays ``[C, BK]`` that were copied to ``buffer``, at least ``FLOOR``, base 2."""
    return binary(buffer.load(sums(BK)))


@gluon.jit
def binary(x):
    """Log decays at least ``FLOOR``, base 2."""
    return gl.maximum(x.to(gl.float32), FLOOR, propagate_nan=tl.PropagateNan.ALL) * LOG2E


@gluon.jit
def bring_chunk(
    item, q, k, g, owner, first, cu, T, PER, HV, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, GATE_GROUP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Begin to copy gates, queries and keys of one chunk, ``K / BK`` tiles ``[C, BK]`` each, the gates first.

    And say where its results go."""
    NK: gl.constexpr = K // BK
    hv = item % HV
    i = item // HV
    _, piece, bos, length, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    row = piece.to(gl.int64) * C
    count = (length - row).to(gl.int32)
    q += b * qb + (bos + row) * qt + (hv // GROUP).to(gl.int64) * qh
    k += b * kb + (bos + row) * kt + (hv // GROUP).to(gl.int64) * kh
    g += b * gb + (bos + row) * gt + (hv // GATE_GROUP).to(gl.int64) * gh
    type: gl.constexpr = g.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    gs = ()
    qs = ()
    ks = ()
    for ik in gl.static_range(NK):  # each of its own: what were gates makes room when they are read
        gs = gs + (gl.allocate_shared_memory(type, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], type)),)  # noqa: RUF005
        copy(gs[ik], g + ik * BK, gt, count, C, BK)
    async_copy.commit_group()
    for ik in gl.static_range(NK):
        qs = qs + (gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile),)  # noqa: RUF005
        ks = ks + (gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile),)  # noqa: RUF005
        copy(qs[ik], q + ik * BK, qt, count, C, BK)
        copy(ks[ik], k + ik * BK, kt, count, C, BK)
        async_copy.commit_group()
    return gs, qs, ks, i.to(gl.int64) * HV + hv, ((b * T + bos + row) * HV + hv) * K, count


@gluon.jit
def decayed_rows(
    read, compare, write, bq, bk, high, rest, ones, scale, stride, count, C: gl.constexpr, BK: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    """Store ``scale q ∘ e^G``, ``k ∘ e^{G_C - G}`` and, if ``KEYS``, ``k ∘ e^G``, for any gates.

    ``high, rest`` are the gates' terms; ``ones`` has room for two matrices ``[C, C]``.
    """
    acc: gl.constexpr = sums(BK)
    s = gl.arange(0, C, gl.SliceLayout(0, sums(C)))[None, :]
    t = gl.arange(0, C, gl.SliceLayout(1, sums(C)))[:, None]
    before = gl.where(s <= t, gl.full((C, C), 1.0, gl.float32, sums(C)), 0.0)
    ones.index(0).store(before.to(gl.bfloat16))
    ones.index(1).store((1.0 - before).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    early = begin_total(ones.index(0), high, rest, C, BK)
    later = begin_total(ones.index(1), high, rest, C, BK)
    early = gl.exp2(warpgroup_mma_wait(2, [early]))
    asked = bq.load(acc).to(gl.float32) * early
    spread(read, (asked * scale).to(gl.bfloat16), stride, count, C, BK)
    key = bk.load(acc).to(gl.float32)
    if KEYS:
        spread(compare, (key * early).to(gl.bfloat16), stride, count, C, BK)
    later = gl.exp2(warpgroup_mma_wait(0, [later]))
    spread(write, (key * later).to(gl.bfloat16), stride, count, C, BK)


@gluon.jit
def unknown_zero(item):
    """Zero, a multiple of 16, which no compiler can know.

    Offsets that depend on it are not held in memory from one item of a loop to the next: registers are short, and so is what
    the processor's memory has left for the cache.
    """
    return (item >> 31) * 16


@gluon.jit
def any_marked(marks, pid, COUNT, PARTS: gl.constexpr, TILES: gl.constexpr, LIMIT: gl.constexpr):
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
def put_between(ones, half, C: gl.constexpr):
    """Store which gates lie between a token, a row, and the middle of its block of ``2 · half`` tokens."""
    t = gl.arange(0, C, gl.SliceLayout(1, sums(C)))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, sums(C)))[None, :]
    begin = t & -half  # of its half: from there until t, or after t until the half's end
    upper = (t & half) != 0
    low = gl.where(upper, begin, t + 1)
    length = gl.where(upper, t + 1 - begin, begin + half - 1 - t)
    lies = (s - low).to(gl.uint32) < length.to(gl.uint32)
    ones.store(gl.where(lies, gl.full((C, C), 1.0, gl.float32, sums(C)), 0.0).to(gl.bfloat16))


@gluon.jit
def level_scores(bq, bk, high, rest, ones, C: gl.constexpr, K: gl.constexpr, KEYS: gl.constexpr):
    """``Σ_k q_tk k_sk e^{G_tk - G_sk}``, ``s ≤ t``, and, if ``KEYS``, that of ``k_tk``, ``s < t``, for any gates; else zero.

    At each of ``log2 C`` levels, from pairs of neighbours on: pairs of tokens in two halves of a block, measured from its
    middle, where both exponents are sums of gates, so ``≤ 0``. Sums are begun a level ahead, their ones made two.
    """
    wide: gl.constexpr = sums(K)
    acc: gl.constexpr = sums(C)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    asked = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    wrote = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    put_between(ones.index(0), 1, C)
    put_between(ones.index(1), 2, C)
    fence_async_shared()
    gl.thread_barrier()
    L = gl.zeros((C, C), gl.float32, acc)
    A = issue(bq, bk.permute((1, 0)), L, True)
    S = begin_total(ones.index(0), high, rest, C, K)
    A, S = warpgroup_mma_wait(0, [A, S])
    for level in range(6):
        half = 1 << level
        e = gl.exp2(S)
        wrote.store((bk.load(wide).to(gl.float32) * e).to(gl.bfloat16))
        asked.store((bq.load(wide).to(gl.float32) * e).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        S = begin_total(ones.index((level + 1) & 1), high, rest, C, K)
        X = issue(asked, wrote.permute((1, 0)), A, True)
        if KEYS:
            Y = issue(wrote, wrote.permute((1, 0)), L, True)
        put_between(ones.index(level & 1), 4 * half, C)
        apart = (t + in_loop(half)) ^ (s + in_loop(half)) ^ half
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
def strong_chunk(
    read, compare, write, gs, qs, ks, scale, stride, count, C: gl.constexpr, K: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    """``decayed_rows`` and ``level_scores`` of a chunk that ``bring_chunk`` brings in one piece."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    high = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    rest = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    async_copy.wait_group(0)
    gl.thread_barrier()
    put_terms(high, rest, gates(gs[0], K))
    ones = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16))
    decayed_rows(read, compare, write, qs[0], ks[0], high, rest, ones, scale, stride, count, C, K, KEYS)
    gl.thread_barrier()
    A, L = level_scores(qs[0], ks[0], high, rest, ones, C, K, KEYS)
    high._keep_alive()
    rest._keep_alive()
    ones._keep_alive()
    return A, L


@gluon.jit
def strong_gradients(
    bg, bq, bk, sA, sL, own, dq, dread, dwrote, met, C: gl.constexpr, BK: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    """``dq, dk, dg [C, BK]`` for any gates, as sums over two ways. Through the state: ``dq, dread, dwrote`` of ``q ∘ e^G``, of
    ``k ∘ e^G`` if ``KEYS``, of ``k ∘ e^{G_C - G}``, and ``met [BK]`` of ``e^{G_C}``.

    Through the scores, by the levels of ``level_scores``, whose gradients, mirrored at the diagonal, are ``sA`` and, if
    ``KEYS``, ``sL``; ``own [C, 1]`` is the first's diagonal. A tile ``X`` of decayed queries in upper halves and keys in lower
    ones meets a level's pairs ``dA``: ``e^{…} ∘ dA X`` is ``dq`` in upper halves and ``dk`` in lower ones. A gate's gradient
    sums over the tokens whose way to the middle crosses it. Queries and keys are loaded where they are needed: registers are
    what there is least of.
    """
    acc: gl.constexpr = sums(C)
    tiles: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    r = gl.arange(0, C, gl.SliceLayout(1, left(C)))[:, None]
    w = gl.arange(0, C, gl.SliceLayout(0, left(C)))[None, :]
    zeros = gl.zeros((C, BK), gl.float32, acc)
    none = gl.zeros((C, C), gl.bfloat16, left(C))
    gate = gates(bg, BK)
    high = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tiles)
    rest = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tiles)
    put_terms(high, rest, gate)
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
    early = gl.exp2(warpgroup_mma_wait(0, [begin_total(ones.index(0), high, rest, C, BK)]))
    key = bk.load(acc).to(gl.float32)
    asked = bq.load(acc).to(gl.float32)
    dq *= early
    across = asked * dq
    dk = own * asked
    dq += own * key
    if KEYS:
        dread *= early
        across += key * dread
        dk += dread
    put_terms(XA, XL, across)
    fence_async_shared()
    gl.thread_barrier()
    dg = begin_total(ones.index(0).permute((1, 0)), XA, XL, C, BK)
    later = begin_total(ones.index(1), high, rest, C, BK)
    dg, later = warpgroup_mma_wait(0, [dg, later])
    dg += met[None, :]
    dwrote *= gl.exp2(later)
    dk += dwrote
    gl.thread_barrier()
    put_terms(XA, XL, bk.load(acc).to(gl.float32) * dwrote)
    put_between(ones.index(0), 1, C)
    fence_async_shared()
    gl.thread_barrier()
    dg = issue(ones.index(1).permute((1, 0)), XA, dg, False)
    dg = issue(ones.index(1).permute((1, 0)), XL, dg, False)
    e = begin_total(ones.index(0), high, rest, C, BK)
    dg, e = warpgroup_mma_wait(0, [dg, e])
    gl.thread_barrier()
    for level in range(6):
        half = 1 << level
        e = gl.exp2(e)
        upper = gl.where((t & half) != 0, 1.0, 0.0)
        key = bk.load(acc).to(gl.float32)
        XA.store(((bq.load(acc).to(gl.float32) * upper + key * (1.0 - upper)) * e).to(gl.bfloat16))
        if KEYS:
            XL.store((key * e).to(gl.bfloat16))
        apart = (r + in_loop(half)) ^ (w + in_loop(half)) ^ half
        dA = gl.where(apart < half, sA.load(left(C)), none)
        if KEYS:
            dL = gl.where(apart < half, sL.load(left(C)), none)
        fence_async_shared()
        gl.thread_barrier()
        Z = issue(dA, XA, zeros, True)
        if KEYS:
            Y = issue(dL, XL, zeros, True)
        put_between(ones.index((level + 1) & 1), 2 * half, C)
        if KEYS:
            Y, dL = warpgroup_mma_wait(0, [Y, dL])
        Z, dA = warpgroup_mma_wait(0, [Z, dA])
        Z = Z * e
        across = Z * upper
        dq = dq + across
        across = bq.load(acc).to(gl.float32) * across
        Z = Z * (1.0 - upper)
        if KEYS:
            Z += Y * e
        dk = dk + Z
        crossing.store((across + bk.load(acc).to(gl.float32) * Z).to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        dg = issue(ones.index(level & 1).permute((1, 0)), crossing, dg, False)
        e = begin_total(ones.index((level + 1) & 1), high, rest, C, BK)
        dg, e = warpgroup_mma_wait(0, [dg, e])
    high._keep_alive()
    rest._keep_alive()
    ones._keep_alive()
    XA._keep_alive()
    XL._keep_alive()
    crossing._keep_alive()
    return dq, dk, dg
