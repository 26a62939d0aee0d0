"""Gradients under a scalar gate in Gluon, for Hopper: one scan with the state in registers.

The equations are those of :mod:`.memory`, the state before a chunk made on the way from the first one::

    S' = e^{G_C} S + (k ∘ e^{G_C - G})ᵀ v
    dq = scale (dA (k e^{-G}) + do Sᵀ) e^{G},    dk = scale dAᵀ (q e^{G}) e^{-G} + (v dS'ᵀ) e^{G_C - G},    dA = do vᵀ, s ≤ t
    dg_j = Σ_{t≥j} (q·dq - k·dk) + Σ_t k_t·(v dS'ᵀ)_t e^{G_C - G_t} + e^{G_C} Σ S ∘ dS'

Four partitions, a warpgroup each: ``query`` has the state's tile, transposed, ``[BK, V]``, in registers, and makes ``dq``;
``key`` makes ``dk`` and ``dg``; ``scores`` makes ``dA``; ``load_store`` copies the chunks into rings in shared memory, and
stores what takes their places. Where sequences are many and short a program scans several, see :mod:`.walks_sm90`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..lib.indexing import state_tile
from ..lib.sm90 import add, constants, lhs_layout, mma_async, mma_layout
from ..lib.sm90_pipeline import copy_tile, store_tile
from ..lib.sm90_walks import state_channels
from .gate import SCALAR
from .resident_sm90 import scores_partition, token_layout
from .walks_sm90 import ask_first_chunk, ask_segment, first_chunk, rows_unless, segment_of, segments_of, span_of, walk_of

__all__ = ["diagonal_scalar_gradients_bwd_sm90"]


class ScoreRings(NamedTuple):
    """Rings of which and to which scores are made, as in :class:`.resident_sm90.Rings`."""

    rows: gl.shared_memory_descriptor
    others: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    rates: gl.shared_memory_descriptor


class GradientRings(NamedTuple):
    """Buffers of the gradients' scan in shared memory, rings of ``STAGES`` chunks.

    Attributes:
        dos, vs: ``do`` and ``v [C, V]``.
        ks, qs: ``k`` and ``q [C, BK]``, and then in their places ``dq`` and ``dk``.
        dSs: The gradient of the state after the chunk, ``[BK, V]``.
        scores: Scores' gradients, ``[C, C]``.
        sums: A gate's running sums and those one token before, ``[2C]``.
        lines: One number a token, ``[C]``: what passes through ``dq``, and then ``dg``.
    """

    dos: gl.shared_memory_descriptor
    vs: gl.shared_memory_descriptor
    ks: gl.shared_memory_descriptor
    qs: gl.shared_memory_descriptor
    dSs: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    lines: gl.shared_memory_descriptor


class GradientBarriers(NamedTuple):
    """Barriers of the gradients' scan, one a place of the rings but for ``begun``.

    Attributes:
        ready: What a chunk loads is there.
        scored: The scores' gradients are.
        taken: The keys have been read for ``dk``, so that ``dq`` may take their place.
        crossed: What passes through ``dq`` is there.
        begun: The chunks that are scanned for the state alone are over.
        made_q, made_k: ``dq`` is there; ``dk`` and ``dg`` are.
    """

    ready: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor
    crossed: gl.shared_memory_descriptor
    begun: gl.shared_memory_descriptor
    made_q: gl.shared_memory_descriptor
    made_k: gl.shared_memory_descriptor


class GradientArrays(NamedTuple):
    """What the gradients' scan loads and, the last three, stores, of one head."""

    do: gl.tensor
    v: gl.tensor
    k: gl.tensor
    q: gl.tensor
    dkept: gl.tensor
    G: gl.tensor
    dq: gl.tensor
    dk: gl.tensor
    dg: gl.tensor


class GradientStrides(NamedTuple):
    """How far apart tokens, and batch rows, of what is loaded are, as in :class:`.resident_sm90.Strides`."""

    ot: gl.tensor
    vt: gl.tensor
    kt: gl.tensor
    qt: gl.tensor
    gt: gl.tensor
    ob: gl.tensor
    vb: gl.tensor
    kb: gl.tensor
    qb: gl.tensor
    gb: gl.tensor


@constants
class GradientConstants:
    """Compile-time facts of the gradients' scan: those of the kernel, and of its scores, as in its ``ScanConstants``."""

    K: int
    V: int
    C: int
    BK: int
    GATE: int
    REVERSE: bool
    SHARE: int
    MANY: bool
    PACKED: bool
    WHOLE: bool
    RATED: bool
    WEIGHTED: bool
    SKIP: bool
    START: bool
    STAGES: int


@gluon.jit
def load_gradient_chunk(c, rings, barriers, arrays, strides, chunk, limit, skipped, HV, stage):
    """Begin to copy a chunk's tokens before ``limit``; of the gate, the running sums and those one token before."""
    row = chunk * c.C
    count = limit - row
    met = row + rows_unless(skipped, count, c.SHARE)
    dS = arrays.dkept + chunk.to(gl.int64) * HV * (c.K * c.V)
    copy_tile(rings.dos.index(stage), arrays.do, row, strides.ot, met, c.C, c.V)
    copy_tile(rings.vs.index(stage), arrays.v, row, strides.vt, limit, c.C, c.V)
    copy_tile(rings.dSs.index(stage), dS, gl.to_tensor(0), c.V, rows_unless(skipped, c.BK, c.SHARE), c.BK, c.V)
    copy_tile(rings.ks.index(stage), arrays.k, row, strides.kt, limit, c.C, c.BK)
    copy_tile(rings.qs.index(stage), arrays.q, row, strides.qt, met, c.C, c.BK)
    t = gl.arange(0, c.C, token_layout())
    token = gl.minimum(t, count - 1)
    sums = arrays.G + row.to(gl.int64) * strides.gt
    p = sums + token * strides.gt
    before = sums + gl.maximum(token - 1, 0) * strides.gt  # the first sequence may have one token
    async_copy.async_copy_global_to_shared(rings.sums.index(stage).slice(0, c.C), p, mask=t < c.C)
    async_copy.async_copy_global_to_shared(rings.sums.index(stage).slice(c.C, c.C), before, mask=t > 0)
    async_copy.mbarrier_arrive(barriers.ready.index(stage), increment_count=False)
    gl.thread_barrier()
    mbarrier.arrive(barriers.ready.index(stage), count=1)


@gluon.jit
def store_gradient_chunk(c, rings, barriers, arrays, token, count, HV, n):
    """Store what stands in the places of chunk ``n`` when it has been used, ``count`` tokens from ``token`` on."""
    stage = n % c.STAGES
    t = gl.arange(0, c.C, token_layout())
    mbarrier.wait(barriers.made_q.index(stage), (n // c.STAGES) & 1)
    store_tile(rings.ks.index(stage), arrays.dq, token, HV * c.K, token + count, c.C, c.BK)
    mbarrier.wait(barriers.made_k.index(stage), (n // c.STAGES) & 1)
    store_tile(rings.qs.index(stage), arrays.dk, token, HV * c.K, token + count, c.C, c.BK)
    gl.store(arrays.dg + token.to(gl.int64) * HV + t * HV, rings.lines.index(stage).load(token_layout()), mask=t < count)
    gl.thread_barrier()


@gluon.jit
def of_place(numbers, stage):
    """What of ``numbers``, one a place of the rings, is that of ``stage``."""
    return gl.sum(gl.where(gl.arange(0, 4, numbers.type.layout) == stage, numbers, 0), 0)


@gluon.jit
def load_store_partition(c, rings, barriers, walk, arrays, chunk_first, HV, strides):
    """Copy the chunks, and store what stands in their places when they have been used."""
    ot, vt, kt, qt, gt, ob, vb, kb, qb, gb = strides
    places: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    # Where the chunks in the rings begin, and how many tokens they have; of 2^31 tokens one head is more than a device holds.
    tokens = gl.zeros((4,), gl.int32, places)
    counts = gl.zeros((4,), gl.int32, places)
    done = 0
    coming = ask_first_chunk(c, walk, 0, chunk_first)
    asked = ask_segment(c, walk, 0)
    for m in range(segments_of(c, walk)):
        span = span_of(c, walk, m, asked)
        asked = ask_segment(c, walk, m + 1)
        chunk0 = first_chunk(c, walk, span.n, chunk_first, coming)
        coming = ask_first_chunk(c, walk, m + 1, chunk_first)
        first = (span.row * walk.T + span.bos).to(gl.int32)
        own = GradientArrays(
            do=arrays.do + (span.row * ob + span.bos * ot),
            v=arrays.v + (span.row * vb + span.bos * vt),
            k=arrays.k + (span.row * kb + span.bos * kt),
            q=arrays.q + (span.row * qb + span.bos * qt),
            dkept=arrays.dkept + chunk0 * HV * (c.K * c.V),
            G=arrays.G + (span.row * gb + span.bos * gt),
            dq=arrays.dq, dk=arrays.dk, dg=arrays.dg,
        )  # fmt: skip
        for n in range(span.high - span.low):
            stage = (done + n) % c.STAGES
            if done + n >= c.STAGES:
                earlier = done + n - c.STAGES
                store_gradient_chunk(c, rings, barriers, arrays, of_place(tokens, stage), of_place(counts, stage), HV, earlier)
            chunk = span.low + n
            count = span.limit - chunk * c.C
            load_gradient_chunk(c, rings, barriers, own, strides, chunk, span.limit, n < span.skip, HV, stage)
            place = gl.arange(0, 4, places)
            tokens = gl.where(place == stage, first + chunk * c.C, tokens)
            counts = gl.where(place == stage, rows_unless(n < span.skip, count, c.SHARE), counts)
        done += span.high - span.low
    for n in range(gl.maximum(done - c.STAGES, 0), done):
        stage = n % c.STAGES
        store_gradient_chunk(c, rings, barriers, arrays, of_place(tokens, stage), of_place(counts, stage), HV, n)


@gluon.jit
def key_operands(keys, gate_sums, C: gl.constexpr, V: gl.constexpr):
    """A chunk's keys, transposed, as left operands: as they are, and as they go into the state."""
    given = keys.permute((1, 0)).load(lhs_layout(C))
    to_end = gate_sums.slice(C - 1, 1).load(gl.SliceLayout(0, lhs_layout(C)))
    to_end = gl.exp2(gl.minimum(to_end - gate_sums.slice(0, C).load(gl.SliceLayout(0, lhs_layout(C))), 0.0))
    decayed = given.to(gl.float32) * to_end[None, :]
    return given, gl.convert_layout(decayed.to(gl.bfloat16), lhs_layout(V))


@gluon.jit
def query_partition(c, rings, barriers, walk, start, sn, sk, sv, scale, ik):
    """Scan ``do, v, k``, which gives ``dq``; ``q·dq``, and ``Σ S ∘ dS'`` at the last token, for the gate."""
    wide: gl.constexpr = mma_layout(c.V)
    narrow: gl.constexpr = mma_layout(c.C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    zeros = gl.zeros((c.BK, c.C), gl.float32, narrow)
    t = gl.arange(0, c.C, by_token)
    done = 0
    asked = ask_segment(c, walk, 0)
    for m in range(segments_of(c, walk)):
        span = span_of(c, walk, m, asked)
        asked = ask_segment(c, walk, m + 1)
        S = gl.zeros((c.BK, c.V), gl.float32, wide)
        if c.START:
            columns_v, columns_k = state_channels(ik, c.V, c.BK)
            own = start + segment_of(walk, m).to(gl.int64) * sn
            S = S + gl.load(state_tile(own, columns_k, columns_v, sk, sv)).to(gl.float32)
        if c.SHARE:
            for n in range(span.skip):
                stage = n % c.STAGES
                mbarrier.wait(barriers.ready.index(stage), (n // c.STAGES) & 1)
                fence_async_shared()
                S = S * gl.exp2(rings.sums.index(stage).slice(c.C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
                _, added = key_operands(rings.ks.index(stage), rings.sums.index(stage), c.C, c.V)
                S = mma_async(added, rings.vs.index(stage), S, False)
                S, added = warpgroup_mma_wait(0, [S, added])
                gl.thread_barrier()
                mbarrier.arrive(barriers.made_q.index(stage), count=1)
            mbarrier.arrive(barriers.begun, count=1)
        for n in range(span.skip, span.high - span.low):
            stage = (done + n) % c.STAGES
            phase = ((done + n - span.skip) // c.STAGES) & 1
            mbarrier.wait(barriers.ready.index(stage), ((done + n) // c.STAGES) & 1)
            fence_async_shared()
            before = S.to(gl.bfloat16)
            S = S * gl.exp2(rings.sums.index(stage).slice(c.C - 1, 1).load(gl.SliceLayout(0, wide)))[None, :]
            met = gl.sum(S * rings.dSs.index(stage).load(wide).to(gl.float32), 1)
            old = gl.convert_layout(before, lhs_layout(c.C))
            x = mma_async(old, rings.dos.index(stage).permute((1, 0)), zeros, True)
            given, added = key_operands(rings.ks.index(stage), rings.sums.index(stage), c.C, c.V)
            S = mma_async(added, rings.vs.index(stage), S, False)
            met = gl.sum(met, 0)
            to_start = gl.exp2(rings.sums.index(stage).slice(0, c.C).load(by_token)) * scale
            mbarrier.wait(barriers.scored.index(stage), phase)
            x, old = warpgroup_mma_wait(1, [x, old])
            x = x * to_start[None, :]
            x = mma_async(given, rings.scores.index(stage).permute((1, 0)), x, False)
            query = rings.qs.index(stage).permute((1, 0)).load(narrow).to(gl.float32)
            S, added = warpgroup_mma_wait(1, [S, added])
            x, given = warpgroup_mma_wait(0, [x, given])
            across = gl.sum(query * x, 0)
            rings.lines.index(stage).store(gl.where(t == c.C - 1, across + met, across))
            gl.thread_barrier()
            mbarrier.arrive(barriers.crossed.index(stage), count=1)
            mbarrier.wait(barriers.taken.index(stage), phase)
            rings.ks.index(stage).permute((1, 0)).store(x.to(gl.bfloat16))
            gl.thread_barrier()
            mbarrier.arrive(barriers.made_q.index(stage), count=1)
        done += span.high - span.low


@gluon.jit
def key_partition(c, rings, barriers, walk):
    """Make ``dk`` and ``dg``."""
    acc: gl.constexpr = mma_layout(c.BK)
    of_rows: gl.constexpr = gl.SliceLayout(1, acc)
    scan: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    zeros = gl.zeros((c.C, c.BK), gl.float32, acc)
    done = 0
    asked = ask_segment(c, walk, 0)
    for m in range(segments_of(c, walk)):
        span = span_of(c, walk, m, asked)
        asked = ask_segment(c, walk, m + 1)
        if c.SHARE:
            for n in range(span.skip):
                mbarrier.wait(barriers.ready.index(n % c.STAGES), (n // c.STAGES) & 1)
                mbarrier.arrive(barriers.made_k.index(n % c.STAGES), count=1)
        for n in range(span.skip, span.high - span.low):
            stage = (done + n) % c.STAGES
            phase = ((done + n - span.skip) // c.STAGES) & 1
            mbarrier.wait(barriers.ready.index(stage), ((done + n) // c.STAGES) & 1)
            fence_async_shared()
            x = mma_async(rings.vs.index(stage), rings.dSs.index(stage).permute((1, 0)), zeros, True)
            key = rings.ks.index(stage).load(acc).to(gl.float32)
            gl.thread_barrier()
            mbarrier.arrive(barriers.taken.index(stage), count=1)
            mbarrier.wait(barriers.scored.index(stage), phase)
            x = warpgroup_mma_wait(0, [x])
            sums = rings.sums.index(stage)
            to_end = sums.slice(c.C - 1, 1).load(of_rows) - sums.slice(0, c.C).load(of_rows)
            x = x * gl.exp2(gl.minimum(to_end, 0.0))[:, None]
            crossing = gl.sum(gl.sum(key * x, 1), 0)
            x = mma_async(rings.scores.index(stage).permute((1, 0)), rings.qs.index(stage), x, False)
            x = warpgroup_mma_wait(0, [x])
            own = gl.sum(key * x, 1)
            mbarrier.wait(barriers.crossed.index(stage), phase)
            gl.thread_barrier()
            rings.qs.index(stage).store(x.to(gl.bfloat16))
            across = rings.lines.index(stage).load(scan) - gl.convert_layout(own, scan)
            gate = rings.sums.index(stage).slice(0, c.C).load(scan) - rings.sums.index(stage).slice(c.C, c.C).load(scan)
            passed = gl.sum(across, 0) - gl.associative_scan(across, 0, add)
            across = gl.where(gate > -125.0, across + passed + crossing, 0.0)  # e^g is zero, and so is its gradient
            rings.lines.index(stage).store(across)
            gl.thread_barrier()
            mbarrier.arrive(barriers.made_k.index(stage), count=1)
        done += span.high - span.low


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "STEP", "tiles_stride"])
def diagonal_scalar_gradients_bwd_sm90(
    q, k, v, do, G, start, dkept, dq, dk, dg, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, STEP, scale,
    tiles_stride, qb, qt, qh, kb, kt, kh, vb, vt, vh, ob, ot, oh, gb, gt, gh, sn, sh, sk, sv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr,
    WHOLE: gl.constexpr, START: gl.constexpr, SHARE: gl.constexpr, MANY: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``dq, dk`` and these channels' part of ``dg`` of a scalar gate, from the gradients of the states after the chunks.

    One scan from the first chunk, with a ``[BK, V]`` tile of the state in registers, so no state is read or written.
    """
    gl.static_assert(STAGES <= 4)
    NK: gl.constexpr = K // BK
    pid = gl.program_id(0)
    ik = pid % NK
    hv = (pid // NK % HV).to(gl.int64)
    walk = walk_of(pid // (NK * HV), owner, first, cu, T, PER, SEGMENT, N, STEP, PACKED, WHOLE, SHARE)
    if PACKED and not WHOLE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + walk.i) >= N:
            return
    q += hv // GROUP * qh + ik * BK
    k += hv // GROUP * kh + ik * BK
    v += hv * vh
    do += hv * oh
    G += hv * gh
    dq += hv * K + ik * BK
    dk += hv * K + ik * BK
    dg += ik * tiles_stride + hv
    dkept += hv * (K * V) + ik * BK * V
    if START:
        start += hv * sh

    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    dos = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, V], wide)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, V], wide)
    dSs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, V], wide)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BK], square)
    qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BK], square)
    scores = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], square)
    gate_sums = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * C], line)
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
    rings = GradientRings(dos=dos, vs=vs, ks=ks, qs=qs, dSs=dSs, scores=scores, sums=gate_sums, lines=lines)
    of_scores = ScoreRings(rows=dos, others=vs, scores=scores, rates=gate_sums)
    barriers = GradientBarriers(
        ready=ready, scored=scored, taken=taken, crossed=crossed, begun=begun, made_q=made_q, made_k=made_k
    )
    arrays = GradientArrays(do=do, v=v, k=k, q=q, dkept=dkept, G=G, dq=dq, dk=dk, dg=dg)
    c = GradientConstants(
        K=K, V=V, C=C, BK=BK, GATE=SCALAR, REVERSE=False, SHARE=SHARE, MANY=MANY, PACKED=PACKED, WHOLE=WHOLE, RATED=False,
        WEIGHTED=False, SKIP=False, START=START, STAGES=STAGES,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (query_partition, (c, rings, barriers, walk, start, sn, sk, sv, scale, ik)),
            (key_partition, (c, rings, barriers, walk)),
            (scores_partition, (c, of_scores, barriers, walk, scale, scale, 0)),
            (load_store_partition, (
                c, rings, barriers, walk, arrays, chunk_first, HV,
                GradientStrides(ot=ot, vt=vt, kt=kt, qt=qt, gt=gt, ob=ob, vb=vb, kb=kb, qb=qb, gb=gb),
            )),
        ], [4, 4, 4], [120, 88, 112 if V == 64 else 96],
    )  # fmt: skip
    begun._keep_alive()
