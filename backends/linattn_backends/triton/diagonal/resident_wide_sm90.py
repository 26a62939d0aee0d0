"""The scan of :mod:`.resident` in Gluon, for Hopper, with 256 key channels: forwards, or in reverse for ``dv``.

A state that wide fills a warpgroup's registers. So of the four partitions ``state`` has its tile, transposed, ``[BV, W]``, and
leaves a copy in shared memory before each chunk; ``output`` makes of it, and of the scores inside the chunk, what comes out;
``load`` copies the chunks into rings, and ``store`` stores. Decays are as in :mod:`.resident_sm90`. In reverse the scale goes
into the state, else to what comes out.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..lib.indexing import chunk_at, state_tile
from ..lib.sm90 import lhs_layout, mma_async, mma_layout
from ..lib.sm90_pipeline import store_buffer
from .gate import SCALAR
from .resident_sm90 import Arrays, ScanConstants, Strides, load_partition
from .walks_sm90 import first_chunk, only_span, walk_of

__all__ = ["diagonal_scan_wide_sm90"]


class WideRings(NamedTuple):
    """Buffers of a scan in shared memory, rings of ``STAGES`` chunks but for the last; what a call does not need is another's.

    Attributes:
        rows, others: ``a`` and ``b [C, W]``.
        ys: ``y [C, BV]``.
        outs: What comes out, ``[C, BV]``.
        rates: A gate's sums, the third of three lines of ``[4C]``.
        state: A copy of the state: ``[BV, W]``, or ``[W, BV]``, as states lie in memory, where they are kept.
    """

    rows: gl.shared_memory_descriptor
    others: gl.shared_memory_descriptor
    ys: gl.shared_memory_descriptor
    outs: gl.shared_memory_descriptor
    rates: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor


class WideBarriers(NamedTuple):
    """Barriers of a scan, one a place of the rings but for the last two.

    Attributes:
        ready: What a chunk loads is there.
        free: Both have read it.
        made: What comes out is there.
        stored: It is stored.
        copied: The copy of the state is there.
        read: All have read it.
    """

    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    made: gl.shared_memory_descriptor
    stored: gl.shared_memory_descriptor
    copied: gl.shared_memory_descriptor
    read: gl.shared_memory_descriptor


@gluon.jit
def state_partition(c, rings, barriers, walk, start, sn, sk, sv, end, scale, iv, HV):
    """Scan the state: a copy of it, then what the chunk adds."""
    span = only_span(c, walk)
    wide: gl.constexpr = mma_layout(128)  # of two products: one of 256 columns has more registers than the assembler allows
    by_token: gl.constexpr = gl.SliceLayout(0, lhs_layout(c.C))
    S = gl.zeros((c.BV, c.W), gl.float32, wide)
    columns_k = gl.arange(0, c.W, gl.SliceLayout(0, wide))[None, :]
    columns_v = (iv * c.BV + gl.arange(0, c.BV, gl.SliceLayout(1, wide)))[:, None]
    there = columns_k * c.V + columns_v
    if c.START:
        own = start + walk.i.to(gl.int64) * sn
        S = S + gl.load(state_tile(own, columns_k, columns_v, sk, sv)).to(gl.float32)
    for n in range(span.high - span.low):
        stage = n % c.STAGES
        mbarrier.wait(barriers.read, (n & 1) ^ 1)
        if c.KEEP:
            rings.state.permute((1, 0)).store(S.to(gl.bfloat16))
        else:
            rings.state.store(S.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(barriers.copied, count=1)
        mbarrier.wait(barriers.ready.index(stage), (n // c.STAGES) & 1)
        fence_async_shared()
        added = rings.ys.index(stage).permute((1, 0)).load(lhs_layout(c.C))
        if c.GATE == SCALAR:
            line = rings.rates.index(stage)
            S = S * gl.exp2(line.slice(3 * c.C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
            rate = line.slice(2 * c.C, c.C).load(by_token)
            if c.REVERSE:
                rate = gl.exp2(rate) * scale
            else:
                rate = gl.exp2(gl.minimum(line.slice(3 * c.C - 1, 1).load(by_token) - rate, 0.0))
            added = (added.to(gl.float32) * rate[None, :]).to(gl.bfloat16)
        elif c.REVERSE:
            added = (added.to(gl.float32) * scale).to(gl.bfloat16)
        added = gl.convert_layout(added, lhs_layout(128))
        S = mma_async(added, rings.others.index(stage), S, False)
        S, added = warpgroup_mma_wait(0, [S, added])
        gl.thread_barrier()
        mbarrier.arrive(barriers.free.index(stage), count=1)
    if c.END:
        gl.store(end + span.n * HV * (c.W * c.V) + there, S)


@gluon.jit
def output_partition(c, rings, barriers, walk, scale):
    """Make what comes out, from the state and from the chunk's own tokens."""
    span = only_span(c, walk)
    square: gl.constexpr = mma_layout(c.C)
    acc: gl.constexpr = mma_layout(c.BV)
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    t = gl.arange(0, c.C, gl.SliceLayout(1, square))
    s = gl.arange(0, c.C, gl.SliceLayout(0, square))
    zeros = gl.zeros((c.C, c.C), gl.float32, square)
    none = gl.zeros((c.C, c.BV), gl.float32, acc)
    for n in range(span.high - span.low):
        stage = n % c.STAGES
        phase = (n // c.STAGES) & 1
        mbarrier.wait(barriers.ready.index(stage), phase)
        fence_async_shared()
        A = mma_async(rings.rows.index(stage), rings.others.index(stage).permute((1, 0)), zeros, True)
        mbarrier.wait(barriers.copied, n & 1)
        if c.KEEP:
            o = mma_async(rings.rows.index(stage), rings.state, none, True)
        else:
            o = mma_async(rings.rows.index(stage), rings.state.permute((1, 0)), none, True)
        line = rings.rates.index(stage)
        if c.GATE == SCALAR:
            between = line.slice(2 * c.C, c.C).load(gl.SliceLayout(1, square))[:, None]
            between -= line.slice(2 * c.C, c.C).load(gl.SliceLayout(0, square))[None, :]
            if c.REVERSE:
                between = -between
            D = gl.exp2(gl.minimum(between, 0.0)) * scale
        else:
            D = scale
        A = warpgroup_mma_wait(1, [A])
        if c.REVERSE:
            A = gl.where(t[:, None] <= s[None, :], A * D, 0.0)
        else:
            A = gl.where(s[None, :] <= t[:, None], A * D, 0.0)
        A = gl.convert_layout(A.to(gl.bfloat16), lhs_layout(c.BV))
        o = warpgroup_mma_wait(0, [o])
        gl.thread_barrier()
        mbarrier.arrive(barriers.read, count=1)
        if c.GATE == SCALAR:
            rate = line.slice(2 * c.C, c.C).load(by_row)
            if c.REVERSE:
                rate = gl.exp2(gl.minimum(line.slice(3 * c.C - 1, 1).load(by_row) - rate, 0.0))
            else:
                rate = gl.exp2(rate) * scale
            o = o * rate[:, None]
        elif not c.REVERSE:
            o = o * scale
        o = mma_async(A, rings.ys.index(stage), o, False)
        o, A = warpgroup_mma_wait(0, [o, A])
        gl.thread_barrier()
        mbarrier.arrive(barriers.free.index(stage), count=1)
        mbarrier.wait(barriers.stored.index(stage), phase ^ 1)
        rings.outs.index(stage).store(o.to(gl.bfloat16))
        gl.thread_barrier()
        mbarrier.arrive(barriers.made.index(stage), count=1)


@gluon.jit
def wide_store_partition(c, rings, barriers, walk, kept, out, chunk_first, HV):
    """Store states, if ``KEEP``, and outputs."""
    span = only_span(c, walk)
    low, high = span.low, span.high
    out += (span.row * walk.T + span.bos) * HV * c.V
    if c.KEEP:
        kept += first_chunk(c, walk, span.n, chunk_first, walk.i) * HV * (c.W * c.V)
    for n in range(high - low):
        chunk = chunk_at(low + n, low, high, c.REVERSE)
        stage = n % c.STAGES
        if c.KEEP:
            mbarrier.wait(barriers.copied, n & 1)
            store_buffer(kept + chunk.to(gl.int64) * HV * (c.W * c.V), rings.state, c.V, c.W, c.W, c.BV)
            gl.thread_barrier()
            mbarrier.arrive(barriers.read, count=1)
        mbarrier.wait(barriers.made.index(stage), (n // c.STAGES) & 1)
        row = chunk * c.C
        far = row.to(gl.int64) * (HV * c.V)
        store_buffer(out + far, rings.outs.index(stage), HV * c.V, span.limit - row, c.C, c.BV)
        gl.thread_barrier()
        mbarrier.arrive(barriers.stored.index(stage), count=1)


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "STEP"])
def diagonal_scan_wide_sm90(
    a, b, y, G, weight, skip, start, out, end, kept, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, STEP, scale,
    ab, at, ah, eb, et, eh, yb, yt, yh, gb, gt, gh, mb, mt, mh, sn, sh, sk, sv,
    W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
    GROUP: gl.constexpr, Y_GROUP: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, TRANSPOSED: gl.constexpr,
    WEIGHTED: gl.constexpr, SKIP: gl.constexpr, PACKED: gl.constexpr, WHOLE: gl.constexpr, START: gl.constexpr,
    END: gl.constexpr, KEEP: gl.constexpr, RANGE: gl.constexpr, PREC: gl.constexpr, SHARE: gl.constexpr, MANY: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Scan as :func:`.resident_sm90.diagonal_scan_sm90`.

    A program scans one segment, which nobody shares, the state is never ``TRANSPOSED``, and values are taken as they come.
    """
    gl.static_assert(not TRANSPOSED and not SHARE and not MANY and not WEIGHTED and not SKIP)
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
    if KEEP:
        kept += hv * (W * V) + iv * BV
    if START:
        start += hv * sh
    if END:
        end += hv * (W * V)

    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, W], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, W], wide)
    others = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, W], wide)
    ys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], square)
    outs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], square)
    if KEEP:
        state = gl.allocate_shared_memory(gl.bfloat16, [W, BV], square)  # as states lie in memory
    else:
        state = gl.allocate_shared_memory(gl.bfloat16, [BV, W], wide)
    rates = outs
    if GATE == SCALAR:
        rates = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], line)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    stored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    copied = gl.allocate_shared_memory(gl.int64, [1], layout)
    read = gl.allocate_shared_memory(gl.int64, [1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129)  # each thread's copies, and the numbers that threads store
        mbarrier.init(free.index(stage), count=2)
        mbarrier.init(made.index(stage), count=1)
        mbarrier.init(stored.index(stage), count=1)
    mbarrier.init(copied, count=1)
    mbarrier.init(read, count=2 if KEEP else 1)
    rings = WideRings(rows=rows, others=others, ys=ys, outs=outs, rates=rates, state=state)
    barriers = WideBarriers(ready=ready, free=free, made=made, stored=stored, copied=copied, read=read)
    arrays = Arrays(a=a, b=b, y=y, G=G, weight=G)
    c = ScanConstants(
        W=W, V=V, C=C, BV=BV, GATE=GATE, REVERSE=REVERSE, TRANSPOSED=False, SHARE=0, MANY=False, PACKED=PACKED, WHOLE=WHOLE,
        RAW=True, RATED=False, WEIGHTED=False, SKIP=False, START=START, END=END, KEEP=KEEP, STAGES=STAGES,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (state_partition, (c, rings, barriers, walk, start, sn, sk, sv, end, scale, iv, HV)),
            (output_partition, (c, rings, barriers, walk, scale)),
            (load_partition, (
                c, rings, barriers, walk, arrays, scale,
                Strides(at=at, bt=et, yt=yt, gt=gt, mt=gt, ab=ab, bb=eb, yb=yb, gb=gb, mb=gb),
            )),
            (wide_store_partition, (c, rings, barriers, walk, kept, out, chunk_first, HV)),
        ], [4, 4, 4], [144, 72, 64],
    )  # fmt: skip
