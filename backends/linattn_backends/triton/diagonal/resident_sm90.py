"""The walk of :mod:`.resident` in Gluon, for Hopper: bfloat16, usual sizes.

Four warpgroups' work. The first has the state's tile, transposed, ``[BV, W]``, in registers, as the left operand of what it
meets and the accumulator of what it takes in; the second makes the scores inside the chunks, which need no state; the third
copies what chunks bring into rings in shared memory, ``STAGES`` chunks long; the fourth stores what the first leaves in the
ring's place of the values. The rules are those of :mod:`..delta.hopper`.

Decays are measured from the chunk's start and to its end, and between two tokens from their difference: every factor is at
most one, so no gate is too strong.

Where there are half as many heads of width 64 as the device has room for, two programs share a walk (``SHARE``). The second
walks the first one's chunks too, for the state alone: it copies less and stores nothing, so the first takes more of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..lib.indexing import nth, span_of
from ..lib.sm90 import add, copy, issue, left, sums
from ..lib.sm90_pipeline import barriers, hold, put
from .gate import NONE, SCALAR

__all__ = ["diagonal_scalar_gradients_bwd_sm90", "diagonal_scan_sm90"]


@gluon.jit
def scan_rings(
    W: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr
):
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
    if GATE == SCALAR:
        rates = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], line)  # three lines, and a size that is a power of two
    if KEEP:
        whole = gl.allocate_shared_memory(gl.bfloat16, [W, BV], square)
    return rows, others, ys, As, rates, whole


@gluon.jit
def rows_unless(skipped, count, SHARE: gl.constexpr):
    """``count``; of a walk that two share, zero if this is ``skipped``."""
    if SHARE:
        return gl.where(skipped, 0, count)
    return count


@gluon.constexpr_function
def token_layout():
    """Of a chunk's numbers, one a token."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def copy_sums(line, G, row, count, gt, C: gl.constexpr):
    """Begin to copy the running sums of the chunk from ``row`` on; the last one stands for tokens past it as well."""
    t = gl.arange(0, C, token_layout())
    async_copy.async_copy_global_to_shared(line, G + (row + gl.minimum(t, count - 1)) * gt, mask=t < C)


@gluon.jit
def load_sums(G, chunk, limit, gt, there, C: gl.constexpr):
    """Running sums of a chunk's tokens, if it is ``there``, and the last one, which stands for tokens past it as well."""
    t = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    row = chunk.to(gl.int64) * C
    last = gl.minimum(limit - chunk * C, C) - 1
    found = gl.load(G + (row + gl.minimum(t, last)) * gt, mask=(t < C) & there, other=0.0)
    return found, gl.load(G + (row + last) * gt, mask=there, other=0.0)


@gluon.jit
def load_partition(
    a, b, y, G, rows, others, ys, rates, ready, free, low, high, skip, limit, scale, at, bt, yt, gt,
    W: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, SHARE: gl.constexpr,
    RAW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy what the chunks bring; the first ``skip`` of them bring nothing that meets the state.

    Of a gate: the sums, and, unless they stay ``RAW``, the factors from the chunk's start, with the scale, and to its end.
    Which order is faster was measured.
    """
    if GATE == SCALAR and not RAW:
        found, last = load_sums(G, nth(low, low, high, REVERSE), limit, gt, low < high, C)
    for n in range(high - low):
        row = nth(low + n, low, high, REVERSE) * C
        stage = n % STAGES
        count = limit - row
        far = row.to(gl.int64)
        mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
        if not RAW:
            copy(rows.index(stage), a + far * at, at, count, C, W)
        elif GATE == SCALAR:
            copy_sums(rates.index(stage).slice(2 * C, C), G, far, count, gt, C)
        copy(others.index(stage), b + far * bt, bt, count, C, W)
        copy(ys.index(stage), y + far * yt, yt, count, C, BV)
        if RAW:
            copy(rows.index(stage), a + far * at, at, rows_unless(n < skip, count, SHARE), C, W)
        elif GATE == SCALAR:
            rates.index(stage).slice(0, C).store(gl.exp2(found) * scale)
            rates.index(stage).slice(C, C).store(gl.exp2(gl.minimum(last - found, 0.0)))
            rates.index(stage).slice(2 * C, C).store(found)
            found, last = load_sums(G, nth(gl.minimum(low + n + 1, high - 1), low, high, REVERSE), limit, gt, True, C)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
        gl.thread_barrier()
        mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def store_rates(line, rated, scale, C: gl.constexpr):
    """Of a chunk's sums, the third of three lines: the factors from its start, with the scale, and to its end."""
    found = line.slice(2 * C, C).load(token_layout())
    last = line.slice(3 * C - 1, 1).load(token_layout())
    line.slice(0, C).store(gl.exp2(found) * scale)
    line.slice(C, C).store(gl.exp2(gl.minimum(last - found, 0.0)))
    gl.thread_barrier()
    mbarrier.arrive(rated, count=1)


@gluon.jit
def scores_partition(
    rows, others, As, rates, ready, rated, begun, scored, low, high, skip, scale,
    C: gl.constexpr, SUMS: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, SHARE: gl.constexpr, RATED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """``scale D_ts (a_t·b_s)``, the transposed mask and decays in reverse. ``rates`` have the gate's sums from ``SUMS`` on;
    if ``RATED``, places for factors before them.
    """
    square: gl.constexpr = sums(C)
    t = gl.arange(0, C, gl.SliceLayout(1, square))
    s = gl.arange(0, C, gl.SliceLayout(0, square))
    zeros = gl.zeros((C, C), gl.float32, square)
    if SHARE:
        if RATED:
            for n in range(skip):
                mbarrier.wait(ready.index(n % STAGES), (n // STAGES) & 1)
                store_rates(rates.index(n % STAGES), rated.index(n % STAGES), scale, C)
        mbarrier.wait(begun, 0)
    for n in range(skip, high - low):
        stage = n % STAGES
        mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        A = issue(rows.index(stage), others.index(stage).permute((1, 0)), zeros, True)
        if RATED:
            store_rates(rates.index(stage), rated.index(stage), scale, C)
        if GATE == SCALAR:
            sums_t = rates.index(stage).slice(SUMS, C).load(gl.SliceLayout(1, square))
            sums_s = rates.index(stage).slice(SUMS, C).load(gl.SliceLayout(0, square))
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
def mma_partition(
    start, end, rows, others, ys, As, rates, whole, ready, rated, begun, scored, free, made, kept_full, kept_free, low, high,
    skip, last, scale, at, to, iv, W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr,
    REVERSE: gl.constexpr, TRANSPOSED: gl.constexpr, SHARE: gl.constexpr, RAW: gl.constexpr, START: gl.constexpr,
    END: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The walk itself. In reverse, with a gate, the scale goes into the state, else to what comes out."""
    wide: gl.constexpr = sums(W)
    narrow: gl.constexpr = sums(C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    S = gl.zeros((BV, W), gl.float32, wide)
    columns_k = gl.arange(0, W, gl.SliceLayout(0, wide))[None, :]
    columns_v = (iv * BV + gl.arange(0, BV, gl.SliceLayout(1, wide)))[:, None]
    there = columns_v * W + columns_k if TRANSPOSED else columns_k * V + columns_v
    if START:
        S = S + gl.load(start + at + there).to(gl.float32)
        if REVERSE and GATE == NONE:
            S = S / scale
    zeros = gl.zeros((BV, C), gl.float32, narrow)
    MEETS: gl.constexpr = C if REVERSE else 0  # where the factors lie for what meets the state, and for what goes into it
    MAKES: gl.constexpr = 0 if REVERSE else C
    if SHARE:
        for n in range(skip):
            stage = n % STAGES
            mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
            fence_async_shared()
            if GATE == SCALAR:
                mbarrier.wait(rated.index(stage), (n // STAGES) & 1)
                S = S * gl.exp2(rates.index(stage).slice(3 * C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
                decayed = ys.index(stage).permute((1, 0)).load(left(C)).to(gl.float32)
                decayed = decayed * rates.index(stage).slice(MAKES, C).load(gl.SliceLayout(0, left(C)))[None, :]
                added = gl.convert_layout(decayed.to(gl.bfloat16), left(W))
                S = issue(added, others.index(stage), S, False)
                S, added = warpgroup_mma_wait(0, [S, added])
            else:
                S = issue(ys.index(stage).permute((1, 0)), others.index(stage), S, False)
                S = warpgroup_mma_wait(0, [S])
            gl.thread_barrier()
            mbarrier.arrive(free.index(stage), count=2)
        mbarrier.arrive(begun, count=1)
    for n in range(skip, high - low):
        stage = n % STAGES
        mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        before = S.to(gl.bfloat16)
        held = before
        if KEEP and REVERSE and GATE == NONE:
            held = (S * scale).to(gl.bfloat16)
        if GATE == SCALAR:  # while nothing runs: the assembler waits for every product where it meets these registers
            S = S * gl.exp2(rates.index(stage).slice(3 * C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
        old = gl.convert_layout(before, left(C))
        o = issue(old, rows.index(stage).permute((1, 0)), zeros, True)
        given = ys.index(stage).permute((1, 0)).load(left(C))
        added = given
        if GATE == SCALAR:
            if RAW:
                mbarrier.wait(rated.index(stage), (n // STAGES) & 1)
            decayed = given.to(gl.float32) * rates.index(stage).slice(MAKES, C).load(gl.SliceLayout(0, left(C)))[None, :]
            added = decayed.to(gl.bfloat16)
        added = gl.convert_layout(added, left(W))
        S = issue(added, others.index(stage), S, False)
        if KEEP:
            mbarrier.wait(kept_free, ((n - skip) & 1) ^ 1)
            whole.permute((1, 0)).store(held)
            gl.thread_barrier()
            mbarrier.arrive(kept_full, count=1)
        mbarrier.wait(scored.index(stage), ((n - skip) // STAGES) & 1)
        o, old = warpgroup_mma_wait(1, [o, old])
        if GATE == SCALAR:
            o = o * rates.index(stage).slice(MEETS, C).load(by_token)[None, :]
        else:
            o = o * scale
        o = issue(given, As.index(stage).permute((1, 0)), o, False)
        S, added = warpgroup_mma_wait(1, [S, added])
        o, given = warpgroup_mma_wait(0, [o, given])
        ys.index(stage).permute((1, 0)).store(o.to(gl.bfloat16))
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)
        mbarrier.arrive(made.index(stage), count=1)
    if END:
        if REVERSE and GATE == NONE:
            S = S * scale
        if last:
            gl.store(end + to + there, S)


@gluon.jit
def store_partition(
    kept, out, whole, ys, kept_full, kept_free, made, free, chunk0, low, high, skip, limit, HV,
    W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, KEEP: gl.constexpr, REVERSE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Store states, if ``KEEP``, and outputs."""
    for n in range(skip, high - low):
        chunk = nth(low + n, low, high, REVERSE)
        stage = n % STAGES
        if KEEP:
            mbarrier.wait(kept_full, (n - skip) & 1)
            put(kept + (chunk0 + chunk) * HV * (W * V), whole, V, W, W, BV)
            gl.thread_barrier()
            mbarrier.arrive(kept_free, count=1)
        mbarrier.wait(made.index(stage), ((n - skip) // STAGES) & 1)
        row = chunk * C
        put(out + row.to(gl.int64) * (HV * V), ys.index(stage), HV * V, limit - row, C, BV)
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def shared_program(i, SHARE: gl.constexpr):
    """Whose walk program ``i`` takes part in, and whether it stores the last state."""
    if SHARE:
        return i // 2, i % 2
    return i, i * 0 + 1


@gluon.jit
def shared_span(low, high, second, REVERSE: gl.constexpr, SHARE: gl.constexpr):
    """The chunks that a program walks, and how many of them for the state alone."""
    low = gl.to_tensor(low).to(gl.int32)
    skip = low * 0
    if SHARE:
        first = (high - low) * SHARE // 16
        skip = first * second
        if REVERSE:
            low = gl.where(second == 1, low, high - first)
        else:
            high = gl.where(second == 1, high, low + first)
    return low, high, skip


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def diagonal_scan_sm90(
    a, b, y, G, start, out, end, kept, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    ab, at, ah, eb, et, eh, yb, yt, yh, gb, gt, gh,
    W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
    GROUP: gl.constexpr, Y_GROUP: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, TRANSPOSED: gl.constexpr,
    PACKED: gl.constexpr, WHOLE: gl.constexpr, START: gl.constexpr, END: gl.constexpr, KEEP: gl.constexpr,
    RANGE: gl.constexpr, PREC: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As :func:`.resident.fused`; with ``SHARE``, two programs a sequence, of which the first walks ``SHARE`` 16ths of it."""
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0)
    iv = pid % NV
    hv = (pid // NV % HV).to(gl.int64)
    i, second = shared_program(pid // (NV * HV), SHARE)
    if PACKED and not WHOLE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    n, bos, L, row, low, high = span_of(i, owner, first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    low, high, skip = shared_span(low, high, second, REVERSE, SHARE)
    limit = gl.minimum(L, high * C).to(gl.int32)
    a += row * ab + bos * at + hv // GROUP * ah
    b += row * eb + bos * et + hv // GROUP * eh
    y += row * yb + bos * yt + hv // Y_GROUP * yh + iv * BV
    out += ((row * T + bos) * HV + hv) * V + iv * BV
    if GATE == SCALAR:
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

    rows, others, ys, As, rates, whole = scan_rings(W, C, BV, GATE, KEEP, STAGES)
    ready, free, made, kept_full, kept_free = barriers(2, STAGES)
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(scored.index(stage), count=1)
    RAW: gl.constexpr = SHARE > 0 or W == 64
    RATED: gl.constexpr = RAW and GATE == SCALAR
    rated = scored
    if RATED:
        rated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(rated.index(stage), count=1)
    begun = kept_full
    if SHARE:
        begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(begun, count=1)
    gl.warp_specialize(
        [
            (mma_partition, (
                start, end, rows, others, ys, As, rates, whole, ready, rated, begun, scored, free, made, kept_full, kept_free,
                low, high, skip, second, scale, head, to, iv, W, V, C, BV, GATE, REVERSE, TRANSPOSED, SHARE, RAW, START, END,
                KEEP, STAGES,
            )),
            (scores_partition, (
                rows, others, As, rates, ready, rated, begun, scored, low, high, skip, scale, C, 2 * C, GATE, REVERSE, SHARE,
                RATED, STAGES,
            )),
            (load_partition, (
                a, b, y, G, rows, others, ys, rates, ready, free, low, high, skip, limit, scale, at, et, yt, gt, W, C, BV, GATE,
                REVERSE, SHARE, RAW, STAGES,
            )),
            (store_partition, (
                kept, out, whole, ys, kept_full, kept_free, made, free, chunk0, low, high, skip, limit, HV, W, V, C, BV, KEEP,
                REVERSE, STAGES,
            )),
        ], [4, 4, 4], [112, 72, 72],
    )  # fmt: skip
    hold(ready, free, made, kept_full, kept_free)
    rated._keep_alive()
    begun._keep_alive()


@gluon.jit
def load_gradient_chunk(
    n, do, v, k, q, dkept, G, dos, vs, ks, qs, dSs, sums_, ready, low, skip, limit, HV, ot, vt, kt, qt, gt,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to copy what a chunk brings to the gradients; of the gate, the running sums and those one token before."""
    stage = n % STAGES
    row = (low + n) * C
    count = limit - row
    far = row.to(gl.int64)
    copy(dos.index(stage), do + far * ot, ot, rows_unless(n < skip, count, SHARE), C, V)
    copy(vs.index(stage), v + far * vt, vt, count, C, V)
    copy(dSs.index(stage), dkept + (low + n).to(gl.int64) * HV * (K * V), V, rows_unless(n < skip, BK, SHARE), BK, V)
    copy(ks.index(stage), k + far * kt, kt, count, C, BK)
    copy(qs.index(stage), q + far * qt, qt, rows_unless(n < skip, count, SHARE), C, BK)
    t = gl.arange(0, C, token_layout())
    p = G + (far + gl.minimum(t, count - 1)) * gt
    async_copy.async_copy_global_to_shared(sums_.index(stage).slice(0, C), p, mask=t < C)
    async_copy.async_copy_global_to_shared(sums_.index(stage).slice(C, C), p - gt, mask=t > 0)
    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    gl.thread_barrier()
    mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def load_store_partition(
    do, v, k, q, dkept, G, dq, dk, dg, dos, vs, ks, qs, dSs, sums_, lines, ready, made_q, made_k, low, high, skip, limit, HV,
    ot, vt, kt, qt, gt,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy what the chunks bring, and store what stands in its place when it has been used."""
    t = gl.arange(0, C, token_layout())
    for n in range(gl.minimum(high - low, STAGES)):
        load_gradient_chunk(
            n, do, v, k, q, dkept, G, dos, vs, ks, qs, dSs, sums_, ready, low, skip, limit, HV, ot, vt, kt, qt, gt, K, V, C, BK,
            SHARE, STAGES
        )  # fmt: skip
    for n in range(high - low):
        stage = n % STAGES
        row = (low + n) * C
        far = row.to(gl.int64) * HV
        count = rows_unless(n < skip, limit - row, SHARE)
        mbarrier.wait(made_q.index(stage), (n // STAGES) & 1)
        put(dq + far * K, ks.index(stage), HV * K, count, C, BK)
        mbarrier.wait(made_k.index(stage), (n // STAGES) & 1)
        put(dk + far * K, qs.index(stage), HV * K, count, C, BK)
        gl.store(dg + far + t * HV, lines.index(stage).load(token_layout()), mask=t < count)
        gl.thread_barrier()
        if low + n + STAGES < high:
            load_gradient_chunk(
                n + STAGES, do, v, k, q, dkept, G, dos, vs, ks, qs, dSs, sums_, ready, low, skip, limit, HV, ot, vt, kt, qt, gt,
                K, V, C, BK, SHARE, STAGES
            )  # fmt: skip


@gluon.jit
def key_operands(keys_, sums_, C: gl.constexpr, V: gl.constexpr):
    """A chunk's keys, transposed, as left operands: as they are, and as they go into the state."""
    given = keys_.permute((1, 0)).load(left(C))
    to_end = sums_.slice(C - 1, 1).load(gl.SliceLayout(0, left(C)))
    to_end = gl.exp2(gl.minimum(to_end - sums_.slice(0, C).load(gl.SliceLayout(0, left(C))), 0.0))
    decayed = given.to(gl.float32) * to_end[None, :]
    return given, gl.convert_layout(decayed.to(gl.bfloat16), left(V))


@gluon.jit
def query_partition(
    start, dos, vs, ks, qs, dSs, As, sums_, lines, ready, scored, taken, crossed, begun, made_q, low, high, skip, scale,
    at, ik, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr, START: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The walk of ``do, v, k``, which gives ``dq``; ``q·dq``, and ``Σ S ∘ dS'`` at the last token, for the gate."""
    wide: gl.constexpr = sums(V)
    narrow: gl.constexpr = sums(C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    S = gl.zeros((BK, V), gl.float32, wide)
    if START:
        columns_v = gl.arange(0, V, gl.SliceLayout(0, wide))[None, :]
        columns_k = (ik * BK + gl.arange(0, BK, gl.SliceLayout(1, wide)))[:, None]
        S = S + gl.load(start + at + (columns_k * V + columns_v)).to(gl.float32)
    zeros = gl.zeros((BK, C), gl.float32, narrow)
    t = gl.arange(0, C, by_token)
    if SHARE:
        for n in range(skip):
            stage = n % STAGES
            mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
            fence_async_shared()
            S = S * gl.exp2(sums_.index(stage).slice(C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
            _, added = key_operands(ks.index(stage), sums_.index(stage), C, V)
            S = issue(added, vs.index(stage), S, False)
            S, added = warpgroup_mma_wait(0, [S, added])
            gl.thread_barrier()
            mbarrier.arrive(made_q.index(stage), count=1)
        mbarrier.arrive(begun, count=1)
    for n in range(skip, high - low):
        stage = n % STAGES
        phase = ((n - skip) // STAGES) & 1
        mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        before = S.to(gl.bfloat16)
        S = S * gl.exp2(sums_.index(stage).slice(C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
        met = gl.sum(S * dSs.index(stage).load(wide).to(gl.float32), 1)
        old = gl.convert_layout(before, left(C))
        x = issue(old, dos.index(stage).permute((1, 0)), zeros, True)
        given, added = key_operands(ks.index(stage), sums_.index(stage), C, V)
        S = issue(added, vs.index(stage), S, False)
        met = gl.sum(met, 0)
        to_start = gl.exp2(sums_.index(stage).slice(0, C).load(by_token)) * scale
        mbarrier.wait(scored.index(stage), phase)
        x, old = warpgroup_mma_wait(1, [x, old])
        x = x * to_start[None, :]
        x = issue(given, As.index(stage).permute((1, 0)), x, False)
        query = qs.index(stage).permute((1, 0)).load(narrow).to(gl.float32)
        S, added = warpgroup_mma_wait(1, [S, added])
        x, given = warpgroup_mma_wait(0, [x, given])
        across = gl.sum(query * x, 0)
        lines.index(stage).store(gl.where(t == C - 1, across + met, across))
        gl.thread_barrier()
        mbarrier.arrive(crossed.index(stage), count=1)
        mbarrier.wait(taken.index(stage), phase)
        ks.index(stage).permute((1, 0)).store(x.to(gl.bfloat16))
        gl.thread_barrier()
        mbarrier.arrive(made_q.index(stage), count=1)


@gluon.jit
def key_partition(
    vs, ks, qs, dSs, As, sums_, lines, ready, scored, taken, crossed, made_k, low, high, skip,
    C: gl.constexpr, BK: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``dk`` and ``dg``."""
    acc: gl.constexpr = sums(BK)
    of_rows: gl.constexpr = gl.SliceLayout(1, acc)
    scan: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    zeros = gl.zeros((C, BK), gl.float32, acc)
    if SHARE:
        for n in range(skip):
            mbarrier.wait(ready.index(n % STAGES), (n // STAGES) & 1)
            mbarrier.arrive(made_k.index(n % STAGES), count=1)
    for n in range(skip, high - low):
        stage = n % STAGES
        phase = ((n - skip) // STAGES) & 1
        mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        x = issue(vs.index(stage), dSs.index(stage).permute((1, 0)), zeros, True)
        key = ks.index(stage).load(acc).to(gl.float32)
        gl.thread_barrier()
        mbarrier.arrive(taken.index(stage), count=1)
        mbarrier.wait(scored.index(stage), phase)
        x = warpgroup_mma_wait(0, [x])
        to_end = sums_.index(stage).slice(C - 1, 1).load(of_rows) - sums_.index(stage).slice(0, C).load(of_rows)
        x = x * gl.exp2(gl.minimum(to_end, 0.0))[:, None]
        crossing = gl.sum(gl.sum(key * x, 1), 0)
        x = issue(As.index(stage).permute((1, 0)), qs.index(stage), x, False)
        x = warpgroup_mma_wait(0, [x])
        own = gl.sum(key * x, 1)
        mbarrier.wait(crossed.index(stage), phase)
        gl.thread_barrier()
        qs.index(stage).store(x.to(gl.bfloat16))
        across = lines.index(stage).load(scan) - gl.convert_layout(own, scan)
        gate = sums_.index(stage).slice(0, C).load(scan) - sums_.index(stage).slice(C, C).load(scan)
        passed = gl.sum(across, 0) - gl.associative_scan(across, 0, add)
        across = gl.where(gate > -125.0, across + passed + crossing, 0.0)  # e^g is zero, and so is its gradient
        lines.index(stage).store(across)
        gl.thread_barrier()
        mbarrier.arrive(made_k.index(stage), count=1)


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "tiles_stride"])
def diagonal_scalar_gradients_bwd_sm90(
    q, k, v, do, G, start, dkept, dq, dk, dg, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, ob, ot, oh, gb, gt, gh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr,
    WHOLE: gl.constexpr, START: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``dq, dk`` and these channels' part of ``dg`` of a scalar gate, from the gradients of the states after the chunks.

    One walk from the first chunk, with a ``[BK, V]`` tile of the state in registers, so no state is read or written.
    """
    NK: gl.constexpr = K // BK
    pid = gl.program_id(0)
    ik = pid % NK
    hv = (pid // NK % HV).to(gl.int64)
    i, second = shared_program(pid // (NK * HV), SHARE)
    if PACKED and not WHOLE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    n, bos, L, row, low, high = span_of(i, owner, first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    low, high, skip = shared_span(low, high, second, False, SHARE)
    limit = gl.minimum(L, high * C).to(gl.int32)
    q += row * qb + bos * qt + hv // GROUP * qh + ik * BK
    k += row * kb + bos * kt + hv // GROUP * kh + ik * BK
    v += row * vb + bos * vt + hv * vh
    do += row * ob + bos * ot + hv * oh
    G += row * gb + bos * gt + hv * gh
    head = (row * T + bos) * HV + hv
    dq += head * K + ik * BK
    dk += head * K + ik * BK
    dg += ik * tiles_stride + head
    if PACKED:
        chunk0 = gl.load(chunk_first + n).to(gl.int64)
    else:
        chunk0 = n * ((T + C - 1) // C)
    dkept += (chunk0 * HV + hv) * (K * V) + ik * BK * V
    at = (i.to(gl.int64) * HV + hv) * (K * V)

    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    dos = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, V], wide)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, V], wide)
    dSs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, V], wide)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BK], square)
    qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BK], square)
    As = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], square)
    sums_ = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * C], line)
    lines = gl.allocate_shared_memory(gl.float32, [STAGES, C], line)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    taken = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    crossed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    made_q = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    made_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129)  # each thread's copies, and the numbers that threads store
        mbarrier.init(scored.index(stage), count=1)
        mbarrier.init(taken.index(stage), count=1)
        mbarrier.init(crossed.index(stage), count=1)
        mbarrier.init(made_q.index(stage), count=1)
        mbarrier.init(made_k.index(stage), count=1)
    begun = ready
    if SHARE:
        begun = gl.allocate_shared_memory(gl.int64, [1], layout)
        mbarrier.init(begun, count=1)
    gl.warp_specialize(
        [
            (query_partition, (
                start, dos, vs, ks, qs, dSs, As, sums_, lines, ready, scored, taken, crossed, begun, made_q, low, high, skip,
                scale, at, ik, V, C, BK, SHARE, START, STAGES,
            )),
            (key_partition, (
                vs, ks, qs, dSs, As, sums_, lines, ready, scored, taken, crossed, made_k, low, high, skip, C, BK, SHARE,
                STAGES,
            )),
            (scores_partition, (
                dos, vs, As, sums_, ready, ready, begun, scored, low, high, skip, scale, C, 0, SCALAR, False, SHARE, False,
                STAGES,
            )),
            (load_store_partition, (
                do, v, k, q, dkept, G, dq, dk, dg, dos, vs, ks, qs, dSs, sums_, lines, ready, made_q, made_k, low, high, skip,
                limit, HV, ot, vt, kt, qt, gt, K, V, C, BK, SHARE, STAGES,
            )),
        ], [4, 4, 4], [120, 88, 96],
    )  # fmt: skip
    begun._keep_alive()
