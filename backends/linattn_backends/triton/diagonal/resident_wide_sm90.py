"""The walk of :mod:`.resident` in Gluon, for Hopper, with 256 key channels: forwards, or in reverse for ``dv``.

A state that wide fills a warpgroup's registers. So the first of four has the state's tile, transposed, ``[BV, W]``, and leaves
a copy in shared memory before each chunk; the second makes of it, and of the scores inside the chunk, what comes out; the third
copies what chunks bring into rings, and the fourth stores. Decays are as in :mod:`.resident_sm90`. In reverse the scale goes
into the state, else to what comes out.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..lib.indexing import nth, span_of
from ..lib.sm90 import issue, left, sums
from ..lib.sm90_pipeline import put
from .gate import SCALAR
from .resident_sm90 import load_partition

__all__ = ["diagonal_scan_wide_sm90"]


@gluon.jit
def state_partition(
    start, end, others, ys, rates, whole, ready, free, copied, read, low, high, scale, at, to, iv,
    W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr,
    START: gl.constexpr, END: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The state's walk: a copy of it, then what the chunk adds."""
    wide: gl.constexpr = sums(128)  # of two products: one of 256 columns has more registers than the assembler allows
    by_token: gl.constexpr = gl.SliceLayout(0, left(C))
    S = gl.zeros((BV, W), gl.float32, wide)
    columns_k = gl.arange(0, W, gl.SliceLayout(0, wide))[None, :]
    columns_v = (iv * BV + gl.arange(0, BV, gl.SliceLayout(1, wide)))[:, None]
    there = columns_k * V + columns_v
    if START:
        S = S + gl.load(start + at + there).to(gl.float32)
    for n in range(high - low):
        stage = n % STAGES
        mbarrier.wait(read, (n & 1) ^ 1)
        if KEEP:
            whole.permute((1, 0)).store(S.to(gl.bfloat16))
        else:
            whole.store(S.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(copied, count=1)
        mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        added = ys.index(stage).permute((1, 0)).load(left(C))
        if GATE == SCALAR:
            line = rates.index(stage)
            S = S * gl.exp2(line.slice(3 * C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
            rate = line.slice(2 * C, C).load(by_token)
            if REVERSE:
                rate = gl.exp2(rate) * scale
            else:
                rate = gl.exp2(gl.minimum(line.slice(3 * C - 1, 1).load(by_token) - rate, 0.0))
            added = (added.to(gl.float32) * rate[None, :]).to(gl.bfloat16)
        elif REVERSE:
            added = (added.to(gl.float32) * scale).to(gl.bfloat16)
        added = gl.convert_layout(added, left(128))
        S = issue(added, others.index(stage), S, False)
        S, added = warpgroup_mma_wait(0, [S, added])
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)
    if END:
        gl.store(end + to + there, S)


@gluon.jit
def output_partition(
    rows, others, ys, outs, rates, whole, ready, free, copied, read, made, stored, low, high, scale,
    W: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, KEEP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """What comes out: from the state, and from the chunk's own tokens."""
    square: gl.constexpr = sums(C)
    acc: gl.constexpr = sums(BV)
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    t = gl.arange(0, C, gl.SliceLayout(1, square))
    s = gl.arange(0, C, gl.SliceLayout(0, square))
    zeros = gl.zeros((C, C), gl.float32, square)
    none = gl.zeros((C, BV), gl.float32, acc)
    for n in range(high - low):
        stage = n % STAGES
        phase = (n // STAGES) & 1
        mbarrier.wait(ready.index(stage), phase)
        fence_async_shared()
        A = issue(rows.index(stage), others.index(stage).permute((1, 0)), zeros, True)
        mbarrier.wait(copied, n & 1)
        if KEEP:
            o = issue(rows.index(stage), whole, none, True)
        else:
            o = issue(rows.index(stage), whole.permute((1, 0)), none, True)
        line = rates.index(stage)
        if GATE == SCALAR:
            between = line.slice(2 * C, C).load(gl.SliceLayout(1, square))[:, None]
            between -= line.slice(2 * C, C).load(gl.SliceLayout(0, square))[None, :]
            if REVERSE:
                between = -between
            D = gl.exp2(gl.minimum(between, 0.0)) * scale
        else:
            D = scale
        A = warpgroup_mma_wait(1, [A])
        if REVERSE:
            A = gl.where(t[:, None] <= s[None, :], A * D, 0.0)
        else:
            A = gl.where(s[None, :] <= t[:, None], A * D, 0.0)
        A = gl.convert_layout(A.to(gl.bfloat16), left(BV))
        o = warpgroup_mma_wait(0, [o])
        gl.thread_barrier()
        mbarrier.arrive(read, count=1)
        if GATE == SCALAR:
            rate = line.slice(2 * C, C).load(by_row)
            if REVERSE:
                rate = gl.exp2(gl.minimum(line.slice(3 * C - 1, 1).load(by_row) - rate, 0.0))
            else:
                rate = gl.exp2(rate) * scale
            o = o * rate[:, None]
        elif not REVERSE:
            o = o * scale
        o = issue(A, ys.index(stage), o, False)
        o, A = warpgroup_mma_wait(0, [o, A])
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)
        mbarrier.wait(stored.index(stage), phase ^ 1)
        outs.index(stage).store(o.to(gl.bfloat16))
        gl.thread_barrier()
        mbarrier.arrive(made.index(stage), count=1)


@gluon.jit
def wide_store_partition(
    kept, out, whole, outs, copied, read, made, stored, chunk0, low, high, limit, HV,
    W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, REVERSE: gl.constexpr, KEEP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Store states, if ``KEEP``, and outputs."""
    for n in range(high - low):
        chunk = nth(low + n, low, high, REVERSE)
        stage = n % STAGES
        if KEEP:
            mbarrier.wait(copied, n & 1)
            put(kept + (chunk0 + chunk) * HV * (W * V), whole, V, W, W, BV)
            gl.thread_barrier()
            mbarrier.arrive(read, count=1)
        mbarrier.wait(made.index(stage), (n // STAGES) & 1)
        row = chunk * C
        put(out + row.to(gl.int64) * (HV * V), outs.index(stage), HV * V, limit - row, C, BV)
        gl.thread_barrier()
        mbarrier.arrive(stored.index(stage), count=1)


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def diagonal_scan_wide_sm90(
    a, b, y, G, start, out, end, kept, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    ab, at, ah, eb, et, eh, yb, yt, yh, gb, gt, gh,
    W: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr,
    GROUP: gl.constexpr, Y_GROUP: gl.constexpr, GATE: gl.constexpr, REVERSE: gl.constexpr, TRANSPOSED: gl.constexpr,
    PACKED: gl.constexpr, WHOLE: gl.constexpr, START: gl.constexpr, END: gl.constexpr, KEEP: gl.constexpr,
    RANGE: gl.constexpr, PREC: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As :func:`.resident_sm90.fused`; nobody shares a walk, and the state is never ``TRANSPOSED``."""
    gl.static_assert(not TRANSPOSED and not SHARE)
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

    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, W], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, W], wide)
    others = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, W], wide)
    ys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], square)
    outs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], square)
    if KEEP:
        whole = gl.allocate_shared_memory(gl.bfloat16, [W, BV], square)  # as states lie in memory
    else:
        whole = gl.allocate_shared_memory(gl.bfloat16, [BV, W], wide)
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
    gl.warp_specialize(
        [
            (state_partition, (
                start, end, others, ys, rates, whole, ready, free, copied, read, low, high, scale, head, to, iv, W, V, C, BV,
                GATE, REVERSE, START, END, KEEP, STAGES,
            )),
            (output_partition, (
                rows, others, ys, outs, rates, whole, ready, free, copied, read, made, stored, low, high, scale, W, C, BV, GATE,
                REVERSE, KEEP, STAGES,
            )),
            (load_partition, (
                a, b, y, G, rows, others, ys, rates, ready, free, low, high, 0, limit, scale, at, et, yt, gt, W, C, BV, GATE,
                REVERSE, 0, True, STAGES,
            )),
            (wide_store_partition, (
                kept, out, whole, outs, copied, read, made, stored, chunk0, low, high, limit, HV, W, V, C, BV, REVERSE, KEEP,
                STAGES,
            )),
        ], [4, 4, 4], [144, 72, 64],
    )  # fmt: skip
