"""Gradients under a scalar gate in Gluon, for Hopper: one scan with the state in registers.

The equations are those of :mod:`.memory`, the state before a chunk made on the way from the first one::

    S' = e^{G_C} S + (k ∘ e^{G_C - G})ᵀ v
    dq = scale (dA (k e^{-G}) + do Sᵀ) e^{G},    dk = scale dAᵀ (q e^{G}) e^{-G} + (v dS'ᵀ) e^{G_C - G},    dA = do vᵀ, s ≤ t
    dg_j = Σ_{t≥j} (q·dq - k·dk) + Σ_t k_t·(v dS'ᵀ)_t e^{G_C - G_t} + e^{G_C} Σ S ∘ dS'

Four partitions, a warpgroup each: ``query`` has the state's tile, transposed, ``[BK, V]``, in registers, and makes ``dq``;
``key`` makes ``dk`` and ``dg``; ``scores`` makes ``dA``; ``load_store`` copies the chunks into rings in shared memory, and
stores what takes their places.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..lib.indexing import locate_segment, state_tile
from ..lib.sm90 import add, constants, copy_rows_async, lhs_layout, mma_async, mma_layout
from ..lib.sm90_pipeline import store_buffer
from .gate import SCALAR
from .resident_sm90 import Span, rows_unless, scores_partition, shared_program, shared_span, token_layout

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
    """What the gradients' scan loads and, the last three, stores, from a head's first token on."""

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
    """How far apart the tokens are of what is loaded, as in :class:`.resident_sm90.Strides`."""

    ot: gl.tensor
    vt: gl.tensor
    kt: gl.tensor
    qt: gl.tensor
    gt: gl.tensor


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
    RATED: bool
    WEIGHTED: bool
    SKIP: bool
    START: bool
    STAGES: int


@gluon.jit
def load_gradient_chunk(c, rings, barriers, arrays, span, limit, HV, strides, n):
    """Begin to copy a chunk, of tokens before ``limit``; of the gate, the running sums and those one token before."""
    low, _high, skip = span
    ot, vt, kt, qt, gt = strides
    stage = n % c.STAGES
    row = (low + n) * c.C
    count = limit - row
    far = row.to(gl.int64)
    copy_rows_async(rings.dos.index(stage), arrays.do + far * ot, ot, rows_unless(n < skip, count, c.SHARE), c.C, c.V)
    copy_rows_async(rings.vs.index(stage), arrays.v + far * vt, vt, count, c.C, c.V)
    dS = arrays.dkept + (low + n).to(gl.int64) * HV * (c.K * c.V)
    copy_rows_async(rings.dSs.index(stage), dS, c.V, rows_unless(n < skip, c.BK, c.SHARE), c.BK, c.V)
    copy_rows_async(rings.ks.index(stage), arrays.k + far * kt, kt, count, c.C, c.BK)
    copy_rows_async(rings.qs.index(stage), arrays.q + far * qt, qt, rows_unless(n < skip, count, c.SHARE), c.C, c.BK)
    t = gl.arange(0, c.C, token_layout())
    token = gl.minimum(t, count - 1)
    p = arrays.G + (far + token) * gt
    before = arrays.G + (far + gl.maximum(token - 1, 0)) * gt  # the first sequence may have one token
    async_copy.async_copy_global_to_shared(rings.sums.index(stage).slice(0, c.C), p, mask=t < c.C)
    async_copy.async_copy_global_to_shared(rings.sums.index(stage).slice(c.C, c.C), before, mask=t > 0)
    async_copy.mbarrier_arrive(barriers.ready.index(stage), increment_count=False)
    gl.thread_barrier()
    mbarrier.arrive(barriers.ready.index(stage), count=1)


@gluon.jit
def load_store_partition(c, rings, barriers, arrays, span, limit, HV, strides):
    """Copy the chunks, and store what stands in their places when they have been used."""
    low, high, skip = span
    t = gl.arange(0, c.C, token_layout())
    for n in range(gl.minimum(high - low, c.STAGES)):
        load_gradient_chunk(c, rings, barriers, arrays, span, limit, HV, strides, n)
    for n in range(high - low):
        stage = n % c.STAGES
        row = (low + n) * c.C
        far = row.to(gl.int64) * HV
        count = rows_unless(n < skip, limit - row, c.SHARE)
        mbarrier.wait(barriers.made_q.index(stage), (n // c.STAGES) & 1)
        store_buffer(arrays.dq + far * c.K, rings.ks.index(stage), HV * c.K, count, c.C, c.BK)
        mbarrier.wait(barriers.made_k.index(stage), (n // c.STAGES) & 1)
        store_buffer(arrays.dk + far * c.K, rings.qs.index(stage), HV * c.K, count, c.C, c.BK)
        gl.store(arrays.dg + far + t * HV, rings.lines.index(stage).load(token_layout()), mask=t < count)
        gl.thread_barrier()
        if low + n + c.STAGES < high:
            load_gradient_chunk(c, rings, barriers, arrays, span, limit, HV, strides, n + c.STAGES)


@gluon.jit
def key_operands(keys, gate_sums, C: gl.constexpr, V: gl.constexpr):
    """A chunk's keys, transposed, as left operands: as they are, and as they go into the state."""
    given = keys.permute((1, 0)).load(lhs_layout(C))
    to_end = gate_sums.slice(C - 1, 1).load(gl.SliceLayout(0, lhs_layout(C)))
    to_end = gl.exp2(gl.minimum(to_end - gate_sums.slice(0, C).load(gl.SliceLayout(0, lhs_layout(C))), 0.0))
    decayed = given.to(gl.float32) * to_end[None, :]
    return given, gl.convert_layout(decayed.to(gl.bfloat16), lhs_layout(V))


@gluon.jit
def query_partition(c, rings, barriers, span, start, sk, sv, scale, ik):
    """Scan ``do, v, k``, which gives ``dq``; ``q·dq``, and ``Σ S ∘ dS'`` at the last token, for the gate."""
    low, high, skip = span
    wide: gl.constexpr = mma_layout(c.V)
    narrow: gl.constexpr = mma_layout(c.C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    S = gl.zeros((c.BK, c.V), gl.float32, wide)
    if c.START:
        columns_v = gl.arange(0, c.V, gl.SliceLayout(0, wide))[None, :]
        columns_k = (ik * c.BK + gl.arange(0, c.BK, gl.SliceLayout(1, wide)))[:, None]
        S = S + gl.load(state_tile(start, columns_k, columns_v, sk, sv)).to(gl.float32)
    zeros = gl.zeros((c.BK, c.C), gl.float32, narrow)
    t = gl.arange(0, c.C, by_token)
    if c.SHARE:
        for n in range(skip):
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
    for n in range(skip, high - low):
        stage = n % c.STAGES
        phase = ((n - skip) // c.STAGES) & 1
        mbarrier.wait(barriers.ready.index(stage), (n // c.STAGES) & 1)
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


@gluon.jit
def key_partition(c, rings, barriers, span):
    """Make ``dk`` and ``dg``."""
    low, high, skip = span
    acc: gl.constexpr = mma_layout(c.BK)
    of_rows: gl.constexpr = gl.SliceLayout(1, acc)
    scan: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    zeros = gl.zeros((c.C, c.BK), gl.float32, acc)
    if c.SHARE:
        for n in range(skip):
            mbarrier.wait(barriers.ready.index(n % c.STAGES), (n // c.STAGES) & 1)
            mbarrier.arrive(barriers.made_k.index(n % c.STAGES), count=1)
    for n in range(skip, high - low):
        stage = n % c.STAGES
        phase = ((n - skip) // c.STAGES) & 1
        mbarrier.wait(barriers.ready.index(stage), (n // c.STAGES) & 1)
        fence_async_shared()
        x = mma_async(rings.vs.index(stage), rings.dSs.index(stage).permute((1, 0)), zeros, True)
        key = rings.ks.index(stage).load(acc).to(gl.float32)
        gl.thread_barrier()
        mbarrier.arrive(barriers.taken.index(stage), count=1)
        mbarrier.wait(barriers.scored.index(stage), phase)
        x = warpgroup_mma_wait(0, [x])
        to_end = rings.sums.index(stage).slice(c.C - 1, 1).load(of_rows) - rings.sums.index(stage).slice(0, c.C).load(of_rows)
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


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "tiles_stride"])
def diagonal_scalar_gradients_bwd_sm90(
    q, k, v, do, G, start, dkept, dq, dk, dg, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, ob, ot, oh, gb, gt, gh, sn, sh, sk, sv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr,
    WHOLE: gl.constexpr, START: gl.constexpr, SHARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``dq, dk`` and these channels' part of ``dg`` of a scalar gate, from the gradients of the states after the chunks.

    One scan from the first chunk, with a ``[BK, V]`` tile of the state in registers, so no state is read or written.
    """
    NK: gl.constexpr = K // BK
    pid = gl.program_id(0)
    ik = pid % NK
    hv = (pid // NK % HV).to(gl.int64)
    i, second = shared_program(pid // (NK * HV), SHARE)
    if PACKED and not WHOLE:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    n, bos, L, row, low, high = locate_segment(i, owner, first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
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
    if START:
        start += i.to(gl.int64) * sn + hv * sh

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
    span = Span(low=low, high=high, skip=skip)
    arrays = GradientArrays(do=do, v=v, k=k, q=q, dkept=dkept, G=G, dq=dq, dk=dk, dg=dg)
    c = GradientConstants(
        K=K, V=V, C=C, BK=BK, GATE=SCALAR, REVERSE=False, SHARE=SHARE, RATED=False, WEIGHTED=False, SKIP=False, START=START,
        STAGES=STAGES,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (query_partition, (c, rings, barriers, span, start, sk, sv, scale, ik)),
            (key_partition, (c, rings, barriers, span)),
            (scores_partition, (c, of_scores, barriers, span, scale, scale, 0)),
            (load_store_partition, (
                c, rings, barriers, arrays, span, limit, HV, GradientStrides(ot=ot, vt=vt, kt=kt, qt=qt, gt=gt),
            )),
        ], [4, 4, 4], [120, 88, 96],
    )  # fmt: skip
    begun._keep_alive()
