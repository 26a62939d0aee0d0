"""The scan of :mod:`.resident` in Gluon, for Hopper: bfloat16, usual sizes.

Four partitions, a warpgroup each. ``mma`` has the state's tile, transposed, ``[BV, W]``, in registers, as the left operand of
what it meets and the accumulator of what it takes in; ``scores`` makes the scores inside the chunks, which need no state;
``load`` copies the chunks into rings in shared memory, ``STAGES`` chunks long; ``store`` stores what ``mma`` leaves in the
ring's place of the values. What holds for all such kernels is in :mod:`..lib.sm90`.

Decays are measured from the chunk's start and to its end, and between two tokens from their difference: every factor is at
most one, so no gate is too strong.

Where there are half as many heads of width 64 as the device has room for, two programs share a scan (``SHARE``). The second
scans the first one's chunks too, for the state alone: it copies less and stores nothing, so the first takes more of them. Where
sequences are many and short a program scans several (``MANY``), see :mod:`.walks_sm90`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..lib.indexing import chunk_at, state_tile
from ..lib.sm90 import constants, copy_rows_async, lhs_layout, mma_async, mma_layout
from ..lib.sm90_pipeline import allocate_barriers, keep_alive, store_buffer
from ..lib.sm90_walks import state_channels
from .gate import NONE, SCALAR
from .walks_sm90 import ask_first_chunk, ask_segment, first_chunk, rows_unless, segment_of, segments_of, span_of, walk_of

__all__ = ["diagonal_scan_sm90"]


class Rings(NamedTuple):
    """Buffers of a scan in shared memory, rings of ``STAGES`` chunks but for the last; what a call does not need is another's.

    Attributes:
        rows: What meets the state, ``a [C, W]``.
        others: What the state is made of, ``b [C, W]``.
        ys: ``y [C, BV]``, and then in its place what comes out.
        scores: Scores inside the chunk, ``[C, C]``.
        rates: A gate's factors from the chunk's start, with the scale, and to its end, its sums, and the weights of values:
            ``[4C]``.
        state: A copy of the state, ``[W, BV]``.
    """

    rows: gl.shared_memory_descriptor
    others: gl.shared_memory_descriptor
    ys: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    rates: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor


class ScanBarriers(NamedTuple):
    """Barriers of a scan: one a place of the rings, but for those of the state.

    Attributes:
        ready: What a chunk loads is there.
        rated: The gate's factors are.
        begun: The chunks that are scanned for the state alone are over.
        scored: The scores are there.
        free: All have read, and stored, what the chunk has there.
        made: What comes out is there.
        state_full, state_free: The copy of the state is there; it is stored.
    """

    ready: gl.shared_memory_descriptor
    rated: gl.shared_memory_descriptor
    begun: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    made: gl.shared_memory_descriptor
    state_full: gl.shared_memory_descriptor
    state_free: gl.shared_memory_descriptor


class Arrays(NamedTuple):
    """What a scan loads, of one head; ``G`` are a gate's running sums, ``weight`` the factors on values."""

    a: gl.tensor
    b: gl.tensor
    y: gl.tensor
    G: gl.tensor
    weight: gl.tensor


class Strides(NamedTuple):
    """How far apart tokens, and batch rows, of :class:`Arrays` are.

    Built where it is handed on: a variable holds no constant, like 1.
    """

    at: gl.tensor
    bt: gl.tensor
    yt: gl.tensor
    gt: gl.tensor
    mt: gl.tensor
    ab: gl.tensor
    bb: gl.tensor
    yb: gl.tensor
    gb: gl.tensor
    mb: gl.tensor


@constants
class ScanConstants:
    """Compile-time facts of a scan: those of the kernel, and two of how a gate's factors are made.

    Attributes:
        RAW: They are not made by who loads the sums.
        RATED: They are made by who makes the scores.
        WEIGHTED: Values have weights, which go with the factors to the end; then they are ``RATED``.
        SKIP: A multiple of what goes in is added to what comes out.
    """

    W: int
    V: int
    C: int
    BV: int
    GATE: int
    REVERSE: bool
    TRANSPOSED: bool
    SHARE: int
    MANY: bool
    PACKED: bool
    WHOLE: bool
    RAW: bool
    RATED: bool
    WEIGHTED: bool
    SKIP: bool
    START: bool
    END: bool
    KEEP: bool
    STAGES: int


@gluon.jit
def scan_rings(
    W: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr
):
    """Buffers for ``STAGES`` chunks, and for a copy of the state; what is not needed is another's."""
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, W], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, W], wide)
    others = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, W], wide)
    ys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], square)
    scores = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], square)
    rates = ys
    state = ys.index(0)
    if GATE == SCALAR:
        rates = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], line)
    if KEEP:
        state = gl.allocate_shared_memory(gl.bfloat16, [W, BV], square)
    return Rings(rows=rows, others=others, ys=ys, scores=scores, rates=rates, state=state)


@gluon.constexpr_function
def token_layout():
    """The layout of a chunk's numbers, one a token."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def copy_sums(line, G, row, count, gt, C: gl.constexpr):
    """Begin to copy the numbers of the chunk from ``row`` on; the last one stands for tokens past it as well."""
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
def load_partition(c, rings, barriers, walk, arrays, scale, strides):
    """Copy the chunks; of those that are scanned for the state alone nothing that meets it.

    Of a gate: the sums, and, unless they stay ``RAW``, the factors from the chunk's start, with the scale, and to its end.
    Which order is faster was measured.
    """
    at, bt, yt, gt, mt, ab, bb, yb, gb, mb = strides
    done = 0
    asked = ask_segment(c, walk, 0)
    for m in range(segments_of(c, walk)):
        span = span_of(c, walk, m, asked)
        asked = ask_segment(c, walk, m + 1)
        low, high = span.low, span.high
        a = arrays.a + (span.row * ab + span.bos * at)
        b = arrays.b + (span.row * bb + span.bos * bt)
        y = arrays.y + (span.row * yb + span.bos * yt)
        G = arrays.G
        weight = arrays.weight
        if c.GATE == SCALAR:
            G += span.row * gb + span.bos * gt
            if not c.RAW:
                found, last = load_sums(G, chunk_at(low, low, high, c.REVERSE), span.limit, gt, low < high, c.C)
        if c.WEIGHTED:
            weight += span.row * mb + span.bos * mt
        for n in range(high - low):
            row = chunk_at(low + n, low, high, c.REVERSE) * c.C
            stage = (done + n) % c.STAGES
            count = span.limit - row
            far = row.to(gl.int64)
            mbarrier.wait(barriers.free.index(stage), (((done + n) // c.STAGES) & 1) ^ 1)
            if not c.RAW:
                copy_rows_async(rings.rows.index(stage), a + far * at, at, count, c.C, c.W)
            elif c.GATE == SCALAR:
                copy_sums(rings.rates.index(stage).slice(2 * c.C, c.C), G, far, count, gt, c.C)
                if c.WEIGHTED:
                    copy_sums(rings.rates.index(stage).slice(3 * c.C, c.C), weight, far, count, mt, c.C)
            copy_rows_async(rings.others.index(stage), b + far * bt, bt, count, c.C, c.W)
            copy_rows_async(rings.ys.index(stage), y + far * yt, yt, count, c.C, c.BV)
            if c.RAW:
                copy_rows_async(rings.rows.index(stage), a + far * at, at, rows_unless(n < span.skip, count, c.SHARE), c.C, c.W)
            elif c.GATE == SCALAR:
                rings.rates.index(stage).slice(0, c.C).store(gl.exp2(found) * scale)
                rings.rates.index(stage).slice(c.C, c.C).store(gl.exp2(gl.minimum(last - found, 0.0)))
                rings.rates.index(stage).slice(2 * c.C, c.C).store(found)
                coming = chunk_at(gl.minimum(low + n + 1, high - 1), low, high, c.REVERSE)
                found, last = load_sums(G, coming, span.limit, gt, True, c.C)
            async_copy.mbarrier_arrive(barriers.ready.index(stage), increment_count=False)
            gl.thread_barrier()
            mbarrier.arrive(barriers.ready.index(stage), count=1)
        done += high - low


@gluon.jit
def store_rates(line, rated, scale, C: gl.constexpr, WEIGHTED: gl.constexpr):
    """Make of a chunk's sums, the third of four lines, the factors from its start, with the scale, and to its end.

    Those to the end belong to the token of a value, and have its weight.
    """
    found = line.slice(2 * C, C).load(token_layout())
    last = line.slice(3 * C - 1, 1).load(token_layout())
    line.slice(0, C).store(gl.exp2(found) * scale)
    to_end = gl.exp2(gl.minimum(last - found, 0.0))
    if WEIGHTED:
        to_end = to_end * line.slice(3 * C, C).load(token_layout())
    line.slice(C, C).store(to_end)
    gl.thread_barrier()
    mbarrier.arrive(rated, count=1)


@gluon.jit
def scores_partition(c, rings, barriers, walk, scale, factor, SUMS: gl.constexpr):
    """Make ``scale D_ts (a_t·b_s)``, with the transposed mask and decays in reverse; ``factor`` is that of a skip.

    ``rates`` have the gate's sums from ``SUMS`` on; if ``RATED``, places for factors before them, and weights behind.
    """
    square: gl.constexpr = mma_layout(c.C)
    t = gl.arange(0, c.C, gl.SliceLayout(1, square))
    s = gl.arange(0, c.C, gl.SliceLayout(0, square))
    zeros = gl.zeros((c.C, c.C), gl.float32, square)
    done = 0
    asked = ask_segment(c, walk, 0)
    for m in range(segments_of(c, walk)):
        span = span_of(c, walk, m, asked)
        asked = ask_segment(c, walk, m + 1)
        if c.SHARE:
            if c.RATED:
                for n in range(span.skip):
                    mbarrier.wait(barriers.ready.index(n % c.STAGES), (n // c.STAGES) & 1)
                    store_rates(rings.rates.index(n % c.STAGES), barriers.rated.index(n % c.STAGES), scale, c.C, c.WEIGHTED)
            mbarrier.wait(barriers.begun, 0)
        for n in range(span.skip, span.high - span.low):
            stage = (done + n) % c.STAGES
            mbarrier.wait(barriers.ready.index(stage), ((done + n) // c.STAGES) & 1)
            fence_async_shared()
            A = mma_async(rings.rows.index(stage), rings.others.index(stage).permute((1, 0)), zeros, True)
            if c.RATED:
                store_rates(rings.rates.index(stage), barriers.rated.index(stage), scale, c.C, c.WEIGHTED)
            if c.GATE == SCALAR:
                sums_t = rings.rates.index(stage).slice(SUMS, c.C).load(gl.SliceLayout(1, square))
                sums_s = rings.rates.index(stage).slice(SUMS, c.C).load(gl.SliceLayout(0, square))
                between = sums_t[:, None] - sums_s[None, :]
                if c.REVERSE:
                    between = -between
                D = gl.exp2(gl.minimum(between, 0.0)) * scale
                if c.WEIGHTED:
                    if c.REVERSE:
                        D = D * rings.rates.index(stage).slice(SUMS + c.C, c.C).load(gl.SliceLayout(1, square))[:, None]
                    else:
                        D = D * rings.rates.index(stage).slice(SUMS + c.C, c.C).load(gl.SliceLayout(0, square))[None, :]
            else:
                D = scale
            A = warpgroup_mma_wait(0, [A])
            if c.REVERSE:
                A = gl.where(t[:, None] <= s[None, :], A * D, 0.0)
            else:
                A = gl.where(s[None, :] <= t[:, None], A * D, 0.0)
            if c.SKIP:
                A = gl.where(s[None, :] == t[:, None], A + factor, A)
            rings.scores.index(stage).store(A.to(gl.bfloat16))
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(barriers.scored.index(stage), count=1)
        done += span.high - span.low


@gluon.jit
def mma_partition(c, rings, barriers, walk, start, sn, sk, sv, end, scale, iv, HV):
    """Scan: the state, and what comes out. In reverse, with a gate, the scale goes into the state, else to what comes out."""
    wide: gl.constexpr = mma_layout(c.W)
    narrow: gl.constexpr = mma_layout(c.C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    zeros = gl.zeros((c.BV, c.C), gl.float32, narrow)
    MEETS: gl.constexpr = c.C if c.REVERSE else 0  # where the factors lie for what meets the state, and for what goes into it
    MAKES: gl.constexpr = 0 if c.REVERSE else c.C
    done = 0
    asked = ask_segment(c, walk, 0)
    for m in range(segments_of(c, walk)):
        span = span_of(c, walk, m, asked)
        asked = ask_segment(c, walk, m + 1)
        S = gl.zeros((c.BV, c.W), gl.float32, wide)
        if c.START:
            own = start + segment_of(walk, m).to(gl.int64) * sn
            columns_k, columns_v = state_channels(iv, c.W, c.BV)
            S = S + gl.load(state_tile(own, columns_k, columns_v, sk, sv)).to(gl.float32)
            if c.REVERSE and c.GATE == NONE:
                S = S / scale
        if c.SHARE:
            for n in range(span.skip):
                stage = n % c.STAGES
                mbarrier.wait(barriers.ready.index(stage), (n // c.STAGES) & 1)
                fence_async_shared()
                if c.GATE == SCALAR:
                    mbarrier.wait(barriers.rated.index(stage), (n // c.STAGES) & 1)
                    S = S * gl.exp2(rings.rates.index(stage).slice(3 * c.C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
                    rate = rings.rates.index(stage).slice(MAKES, c.C).load(gl.SliceLayout(0, lhs_layout(c.C)))
                    decayed = rings.ys.index(stage).permute((1, 0)).load(lhs_layout(c.C)).to(gl.float32) * rate[None, :]
                    added = gl.convert_layout(decayed.to(gl.bfloat16), lhs_layout(c.W))
                    S = mma_async(added, rings.others.index(stage), S, False)
                    S, added = warpgroup_mma_wait(0, [S, added])
                else:
                    S = mma_async(rings.ys.index(stage).permute((1, 0)), rings.others.index(stage), S, False)
                    S = warpgroup_mma_wait(0, [S])
                gl.thread_barrier()
                mbarrier.arrive(barriers.free.index(stage), count=2)
            mbarrier.arrive(barriers.begun, count=1)
        for n in range(span.skip, span.high - span.low):
            stage = (done + n) % c.STAGES
            mbarrier.wait(barriers.ready.index(stage), ((done + n) // c.STAGES) & 1)
            fence_async_shared()
            before = S.to(gl.bfloat16)
            held = before
            if c.KEEP and c.REVERSE and c.GATE == NONE:
                held = (S * scale).to(gl.bfloat16)
            if c.GATE == SCALAR:  # while nothing runs: the assembler waits for every product where it meets these registers
                S = S * gl.exp2(rings.rates.index(stage).slice(3 * c.C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
            old = gl.convert_layout(before, lhs_layout(c.C))
            o = mma_async(old, rings.rows.index(stage).permute((1, 0)), zeros, True)
            given = rings.ys.index(stage).permute((1, 0)).load(lhs_layout(c.C))
            added = given
            if c.GATE == SCALAR:
                if c.RAW:
                    mbarrier.wait(barriers.rated.index(stage), ((done + n) // c.STAGES) & 1)
                decayed = (
                    given.to(gl.float32)
                    * rings.rates.index(stage).slice(MAKES, c.C).load(gl.SliceLayout(0, lhs_layout(c.C)))[None, :]
                )
                added = decayed.to(gl.bfloat16)
            added = gl.convert_layout(added, lhs_layout(c.W))
            S = mma_async(added, rings.others.index(stage), S, False)
            if c.KEEP:
                mbarrier.wait(barriers.state_free, ((done + n - span.skip) & 1) ^ 1)
                rings.state.permute((1, 0)).store(held)
                gl.thread_barrier()
                mbarrier.arrive(barriers.state_full, count=1)
            mbarrier.wait(barriers.scored.index(stage), ((done + n - span.skip) // c.STAGES) & 1)
            o, old = warpgroup_mma_wait(1, [o, old])
            if c.GATE == SCALAR:
                o = o * rings.rates.index(stage).slice(MEETS, c.C).load(by_token)[None, :]
            else:
                o = o * scale
            o = mma_async(given, rings.scores.index(stage).permute((1, 0)), o, False)
            S, added = warpgroup_mma_wait(1, [S, added])
            o, given = warpgroup_mma_wait(0, [o, given])
            rings.ys.index(stage).permute((1, 0)).store(o.to(gl.bfloat16))
            gl.thread_barrier()
            mbarrier.arrive(barriers.free.index(stage), count=1)
            mbarrier.arrive(barriers.made.index(stage), count=1)
        if c.END:
            if c.REVERSE and c.GATE == NONE:
                S = S * scale
            if walk.last == 1:
                columns_k, columns_v = state_channels(iv, c.W, c.BV)
                there = columns_v * c.W + columns_k if c.TRANSPOSED else columns_k * c.V + columns_v
                gl.store(end + span.n * HV * (c.W * c.V) + there, S)
        done += span.high - span.low


@gluon.jit
def store_partition(c, rings, barriers, walk, kept, out, chunk_first, HV):
    """Store states, if ``KEEP``, and outputs."""
    done = 0
    if c.KEEP:
        coming = ask_first_chunk(c, walk, 0, chunk_first)
    asked = ask_segment(c, walk, 0)
    for m in range(segments_of(c, walk)):
        span = span_of(c, walk, m, asked)
        asked = ask_segment(c, walk, m + 1)
        low, high = span.low, span.high
        rows = out + (span.row * walk.T + span.bos) * HV * c.V
        states = kept
        if c.KEEP:
            states += first_chunk(c, walk, span.n, chunk_first, coming) * HV * (c.W * c.V)
            coming = ask_first_chunk(c, walk, m + 1, chunk_first)
        for n in range(span.skip, high - low):
            chunk = chunk_at(low + n, low, high, c.REVERSE)
            stage = (done + n) % c.STAGES
            if c.KEEP:
                mbarrier.wait(barriers.state_full, (done + n - span.skip) & 1)
                store_buffer(states + chunk.to(gl.int64) * HV * (c.W * c.V), rings.state, c.V, c.W, c.W, c.BV)
                gl.thread_barrier()
                mbarrier.arrive(barriers.state_free, count=1)
            mbarrier.wait(barriers.made.index(stage), ((done + n - span.skip) // c.STAGES) & 1)
            row = chunk * c.C
            far = row.to(gl.int64) * (HV * c.V)
            store_buffer(rows + far, rings.ys.index(stage), HV * c.V, span.limit - row, c.C, c.BV)
            gl.thread_barrier()
            mbarrier.arrive(barriers.free.index(stage), count=1)
        done += high - low


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "STEP"])
def diagonal_scan_sm90(
    a, b, y, G, weight, skip, start, out, end, kept, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, STEP, scale,
    ab, at, ah, eb, et, eh, yb, yt, yh, gb, gt, gh, mb, mt, mh, sn, sh, sk, sv,
    W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
    GROUP: gl.constexpr, Y_GROUP: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, TRANSPOSED: gl.constexpr,
    WEIGHTED: gl.constexpr, SKIP: gl.constexpr, PACKED: gl.constexpr, WHOLE: gl.constexpr, START: gl.constexpr,
    END: gl.constexpr, KEEP: gl.constexpr, RANGE: gl.constexpr, PREC: gl.constexpr, SHARE: gl.constexpr, MANY: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Scan as :func:`.resident.diagonal_scan`.

    ``SHARE`` says that two programs scan a sequence, the first ``SHARE`` 16ths of it, ``MANY`` that a program scans several,
    ``STEP`` apart.
    """
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0)
    iv = pid % NV
    hv = (pid // NV % HV).to(gl.int64)
    walk = walk_of(pid // (NV * HV), owner, first, cu, T, PER, SEGMENT, N, STEP, PACKED, WHOLE, SHARE)
    if PACKED and not WHOLE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + walk.i) >= N:
            return
    a += hv // GROUP * ah
    b += hv // GROUP * eh
    y += hv // Y_GROUP * yh + iv * BV
    out += hv * V + iv * BV
    if GATE == SCALAR:
        G += hv * gh
    factor = scale
    if WEIGHTED:
        weight += hv * mh
    if SKIP:
        factor = gl.load(skip + hv).to(gl.float32)
    if KEEP:
        kept += hv * (W * V) + iv * BV
    if START:
        start += hv * sh
    if END:
        end += hv * (W * V)

    rings = scan_rings(W, C, BV, GATE, KEEP, STAGES)
    usual = allocate_barriers(2, STAGES)
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(scored.index(stage), count=1)
    RAW: gl.constexpr = SHARE > 0 or W == 64 or WEIGHTED
    RATED: gl.constexpr = RAW and GATE == SCALAR
    rated = scored
    if RATED:
        rated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(rated.index(stage), count=1)
    begun = usual.state_full
    if SHARE:
        begun = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(begun, count=1)
    barriers = ScanBarriers(
        ready=usual.ready, rated=rated, begun=begun, scored=scored, free=usual.free, made=usual.made,
        state_full=usual.state_full, state_free=usual.state_free,
    )  # fmt: skip
    arrays = Arrays(a=a, b=b, y=y, G=G, weight=weight)
    c = ScanConstants(
        W=W, V=V, C=C, BV=BV, GATE=GATE, REVERSE=REVERSE, TRANSPOSED=TRANSPOSED, SHARE=SHARE, MANY=MANY, PACKED=PACKED,
        WHOLE=WHOLE, RAW=RAW, RATED=RATED, WEIGHTED=WEIGHTED, SKIP=SKIP, START=START, END=END, KEEP=KEEP, STAGES=STAGES,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (mma_partition, (c, rings, barriers, walk, start, sn, sk, sv, end, scale, iv, HV)),
            (scores_partition, (c, rings, barriers, walk, scale, factor, 2 * C)),
            (load_partition, (
                c, rings, barriers, walk, arrays, scale,
                Strides(at=at, bt=et, yt=yt, gt=gt, mt=mt, ab=ab, bb=eb, yb=yb, gb=gb, mb=mb),
            )),
            (store_partition, (c, rings, barriers, walk, kept, out, chunk_first, HV)),
        ], [4, 4, 4], [112, 72, 72],
    )  # fmt: skip
    keep_alive(usual)
    rated._keep_alive()
    begun._keep_alive()
