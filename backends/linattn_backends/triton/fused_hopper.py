"""The walk of :mod:`.fused` in Gluon, for Hopper: bfloat16, usual sizes.

Four warpgroups' work. The first has the state's tile, transposed, ``[BV, W]``, in registers, as the left operand of what it
meets and the accumulator of what it takes in; the second makes the scores inside the chunks, which need no state; the third
copies what chunks bring into rings in shared memory, ``STAGES`` chunks long; the fourth stores what the first leaves in the
ring's place of the values. The rules are those of :mod:`.delta_hopper`.

Decays are measured from the chunk's start and to its end, and between two tokens from their difference: every factor is at
most one, so no gate is too strong.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from .delta_hopper import barriers, put
from .hopper import copy, issue, left, sums
from .kernels import nth, span_of

__all__ = ["fused"]


@gluon.jit
def rings(W: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr):
    """Places for what ``STAGES`` chunks bring, and for a copy of the state; what is not needed is another's."""
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, W], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, W], wide)
    others = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, W], wide)
    ys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], square)
    As = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], square)
    rates = ys
    whole = ys.index(0)
    if GATE == 1:
        rates = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], line)  # three lines, and a size that is a power of two
    if KEEP:
        whole = gl.allocate_shared_memory(gl.bfloat16, [W, BV], square)
    return rows, others, ys, As, rates, whole


@gluon.jit
def sums_of(G, row, count, gt, there, C: gl.constexpr):
    """Running sums of a chunk's tokens, if it is ``there``; past the last one, the last one's."""
    t = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(G + (row.to(gl.int64) + gl.minimum(t, count - 1)) * gt, mask=(t < C) & there, other=0.0)


@gluon.jit
def bring(
    a, b, y, G, rows, others, ys, rates, ready, free, low, high, limit, at, bt, yt, gt,
    W: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy what the chunks bring; of a gate, the factors from the chunk's start and to its end, and the sums themselves."""
    if GATE == 1:
        row = nth(low, low, high, REVERSE) * C
        coming = sums_of(G, row, limit - row, gt, low < high, C)
    for n in range(high - low):
        row = nth(low + n, low, high, REVERSE) * C
        stage = n % STAGES
        count = limit - row
        far = row.to(gl.int64)
        if GATE == 1:
            found = coming
            row = nth(gl.minimum(low + n + 1, high - 1), low, high, REVERSE) * C
            coming = sums_of(G, row, limit - row, gt, True, C)
        mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
        copy(rows.index(stage), a + far * at, at, count, C, W)
        copy(others.index(stage), b + far * bt, bt, count, C, W)
        copy(ys.index(stage), y + far * yt, yt, count, C, BV)
        if GATE == 1:
            last = gl.min(found, 0)
            rates.index(stage).slice(0, C).store(gl.exp2(found))
            rates.index(stage).slice(C, C).store(gl.exp2(gl.minimum(last - found, 0.0)))
            rates.index(stage).slice(2 * C, C).store(found)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
        gl.thread_barrier()
        mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def scores(
    rows, others, As, rates, ready, scored, low, high, scale,
    C: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``scale D_ts (a_t·b_s)``, the transposed mask and decays in reverse."""
    square: gl.constexpr = sums(C)
    t = gl.arange(0, C, gl.SliceLayout(1, square))
    s = gl.arange(0, C, gl.SliceLayout(0, square))
    zeros = gl.zeros((C, C), gl.float32, square)
    for n in range(high - low):
        stage = n % STAGES
        mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        A = issue(rows.index(stage), others.index(stage).permute((1, 0)), zeros, True)
        if GATE == 1:
            sums_t = rates.index(stage).slice(2 * C, C).load(gl.SliceLayout(1, square))
            sums_s = rates.index(stage).slice(2 * C, C).load(gl.SliceLayout(0, square))
            between = sums_t[:, None] - sums_s[None, :]
            if REVERSE:
                between = -between
            D = gl.exp2(gl.minimum(between, 0.0)) * scale
        else:
            D = scale
        A = warpgroup_mma_wait(0, [A])
        if REVERSE:
            A = gl.where(t[:, None] <= s[None, :], A * D, 0.0)
        else:
            A = gl.where(s[None, :] <= t[:, None], A * D, 0.0)
        As.index(stage).store(A.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(scored.index(stage), count=1)


@gluon.jit
def chain(
    start, end, rows, others, ys, As, rates, whole, ready, scored, free, made, kept_full, kept_free, low, high, scale, at, to,
    iv, W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr,
    TRANSPOSED: gl.constexpr, START: gl.constexpr, END: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The walk itself."""
    wide: gl.constexpr = sums(W)
    narrow: gl.constexpr = sums(C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    S = gl.zeros((BV, W), gl.float32, wide)
    columns_k = gl.arange(0, W, gl.SliceLayout(0, wide))[None, :]
    columns_v = (iv * BV + gl.arange(0, BV, gl.SliceLayout(1, wide)))[:, None]
    there = columns_v * W + columns_k if TRANSPOSED else columns_k * V + columns_v
    if START:
        S = S + gl.load(start + at + there).to(gl.float32)
        if REVERSE:
            S = S / scale
    zeros = gl.zeros((BV, C), gl.float32, narrow)
    MEETS: gl.constexpr = C if REVERSE else 0  # where the factors lie for what meets the state, and for what goes into it
    MAKES: gl.constexpr = 0 if REVERSE else C
    for n in range(high - low):
        stage = n % STAGES
        mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        before = (S * scale).to(gl.bfloat16)
        if GATE == 1:  # while nothing runs: the assembler waits for every product where it meets these registers
            S = S * rates.index(stage).slice(C - 1, 1).load(gl.SliceLayout(0, wide))[None, :]
        old = gl.convert_layout(before, left(C))
        o = issue(old, rows.index(stage).permute((1, 0)), zeros, True)
        given = ys.index(stage).permute((1, 0)).load(left(C))
        added = given
        if GATE == 1:
            decayed = given.to(gl.float32) * rates.index(stage).slice(MAKES, C).load(gl.SliceLayout(0, left(C)))[None, :]
            added = decayed.to(gl.bfloat16)
        added = gl.convert_layout(added, left(W))
        S = issue(added, others.index(stage), S, False)
        if KEEP:
            mbarrier.wait(kept_free, (n & 1) ^ 1)
            whole.permute((1, 0)).store(before)
            gl.thread_barrier()
            mbarrier.arrive(kept_full, count=1)
        mbarrier.wait(scored.index(stage), (n // STAGES) & 1)
        o, old = warpgroup_mma_wait(1, [o, old])
        if GATE == 1:
            o = o * rates.index(stage).slice(MEETS, C).load(by_token)[None, :]
        o = issue(given, As.index(stage).permute((1, 0)), o, False)
        S, added = warpgroup_mma_wait(1, [S, added])
        o, given = warpgroup_mma_wait(0, [o, given])
        ys.index(stage).permute((1, 0)).store(o.to(gl.bfloat16))
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)
        mbarrier.arrive(made.index(stage), count=1)
    if END:
        if REVERSE:
            S = S * scale
        gl.store(end + to + there, S)


@gluon.jit
def carry_off(
    kept, out, whole, ys, kept_full, kept_free, made, free, chunk0, low, high, limit, HV,
    W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, KEEP: gl.constexpr, REVERSE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Store states, if ``KEEP``, and outputs."""
    for n in range(high - low):
        chunk = nth(low + n, low, high, REVERSE)
        stage = n % STAGES
        if KEEP:
            mbarrier.wait(kept_full, n & 1)
            put(kept + (chunk0 + chunk) * HV * (W * V), whole, V, W, W, BV)
            gl.thread_barrier()
            mbarrier.arrive(kept_free, count=1)
        mbarrier.wait(made.index(stage), (n // STAGES) & 1)
        row = chunk * C
        put(out + row.to(gl.int64) * (HV * V), ys.index(stage), HV * V, limit - row, C, BV)
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def fused(
    a, b, y, G, start, out, end, kept, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    ab, at, ah, eb, et, eh, yb, yt, yh, gb, gt, gh,
    W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
    GROUP: gl.constexpr, Y_GROUP: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, TRANSPOSED: gl.constexpr,
    PACKED: gl.constexpr, WHOLE: gl.constexpr, START: gl.constexpr, END: gl.constexpr, KEEP: gl.constexpr,
    RANGE: gl.constexpr, PREC: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As :func:`.fused.fused`."""
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0)
    iv = pid % NV
    hv = (pid // NV % HV).to(gl.int64)
    i = pid // (NV * HV)
    if PACKED and not WHOLE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    n, bos, L, row, low, high = span_of(i, owner, first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    low = gl.to_tensor(low).to(gl.int32)
    limit = gl.minimum(L, high * C).to(gl.int32)
    a += row * ab + bos * at + hv // GROUP * ah
    b += row * eb + bos * et + hv // GROUP * eh
    y += row * yb + bos * yt + hv // Y_GROUP * yh + iv * BV
    out += ((row * T + bos) * HV + hv) * V + iv * BV
    if GATE == 1:
        G += row * gb + bos * gt + hv * gh
    chunk0 = n * 0
    if KEEP:
        if PACKED:
            chunk0 = gl.load(chunk_first + n).to(gl.int64)
        else:
            chunk0 = n * ((T + C - 1) // C)
        kept += hv * (W * V) + iv * BV
    head = (i.to(gl.int64) * HV + hv) * (W * V)
    to = (n * HV + hv) * (W * V)

    rows, others, ys, As, rates, whole = rings(W, C, BV, GATE, KEEP, STAGES)
    ready, free, made, kept_full, kept_free = barriers(2, STAGES)
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(scored.index(stage), count=1)
    gl.warp_specialize(
        [
            (chain, (
                start, end, rows, others, ys, As, rates, whole, ready, scored, free, made, kept_full, kept_free, low, high,
                scale, head, to, iv, W, V, C, BV, GATE, REVERSE, TRANSPOSED, START, END, KEEP, STAGES,
            )),
            (scores, (rows, others, As, rates, ready, scored, low, high, scale, C, GATE, REVERSE, STAGES)),
            (bring, (
                a, b, y, G, rows, others, ys, rates, ready, free, low, high, limit, at, et, yt, gt, W, C, BV, GATE, REVERSE,
                STAGES,
            )),
            (carry_off, (
                kept, out, whole, ys, kept_full, kept_free, made, free, chunk0, low, high, limit, HV, W, V, C, BV, KEEP,
                REVERSE, STAGES,
            )),
        ], [4, 4, 4], [112, 72, 72],
    )  # fmt: skip
