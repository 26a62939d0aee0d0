"""Kernels of :mod:`.kernels` and :mod:`.vector` in Gluon, for Hopper: bfloat16, usual sizes, a ``beta`` a token.

Plain Triton waits for every product whose left operand is in registers before it issues the next, and for every load that no
product prefetches. Here a product is waited for where its result is used.

* A walk is three warpgroups' work. The first has the state's tile, transposed, ``[BV, K]``, in registers, as the left operand
  of every product and the accumulator of the last; the second copies what chunks bring into rings in shared memory, ``STAGES``
  chunks long; the third stores what the first leaves in the ring's place of the values. They wait for one another at barriers
  in shared memory, so a program's warps run on their own, and registers go to the first.
* The gradients ask for everything at once and use it as it comes; two programs share a processor.

What a product's operands ask for is said in :mod:`..lib.sm90`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..lib.indexing import at_head, sequence_of
from ..lib.sm90 import (
    any_marked,
    begin_total,
    binary,
    bring_chunk,
    chunk_of,
    copy,
    decayed_rows,
    follow,
    gates,
    issue,
    left,
    numbers,
    parts,
    put_sum,
    put_terms,
    rows_of,
    spread,
    strong_chunk,
    strong_gradients,
    sums,
    totals,
    unknown_zero,
)
from ..lib.sm90_pipeline import barriers, hold, put
from .kernels import span
from .scores_sm90 import prepare, put_solved  # noqa: F401 - prepare is launched from here

__all__ = ["backwards", "forwards", "gradients", "strong_prepare", "vector_gradients", "vector_prepare"]


@gluon.jit
def copy_line(buffer, p, there, W: gl.constexpr):
    """Begin to copy ``W ≤ 128`` numbers."""
    i = gl.arange(0, W, gl.BlockedLayout([1], [32], [4], [0]))
    async_copy.async_copy_global_to_shared(buffer, p + i, mask=(i < W) & there)


@gluon.jit
def rings(
    K: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, OUT: gl.constexpr, IDENTITY: gl.constexpr,
    KEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Places for what ``STAGES`` chunks bring, and for a copy of the state; what is not needed is another's."""
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    tiles_c: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    RATES: gl.constexpr = 2 * C if GATE == 1 else K
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], tiles_k)
    Ms = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tiles_c)
    betas = gl.allocate_shared_memory(gl.float32, [STAGES, C], line)
    ws = ks
    rs = betas
    vs = Ms
    qs = ks
    As = Ms
    whole = ks.index(0)
    if GATE == 2:
        ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], tiles_k)
    if GATE > 0:
        rs = gl.allocate_shared_memory(gl.float32, [STAGES, RATES], line)
    if not IDENTITY:
        vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], tiles_c)
    if OUT:
        qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], tiles_k)
        As = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tiles_c)
    if KEEP:
        whole = gl.allocate_shared_memory(gl.bfloat16, [BV, K], tiles_k)
    return ks, ws, Ms, rs, betas, vs, qs, As, whole


@gluon.jit
def bring(
    k, write, M, rates, beta, v, q, A, ks, ws, Ms, rs, betas, vs, qs, As, ready, free,
    chunk0, low, high, limit, hv, HV, kt, bt, vt, qt,
    K: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, OUT: gl.constexpr, IDENTITY: gl.constexpr,
    REVERSE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup's work: copy what the chunks bring to shared memory, as places in its rings become free."""
    t = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    for n in range(high - low):
        chunk = low + n
        if REVERSE:
            chunk = high - 1 - n
        stage = n % STAGES
        at = (chunk0 + chunk) * HV + hv
        row = chunk * C
        count = limit - row
        far = row.to(gl.int64)
        strengths = numbers(beta + far * bt, t, bt, count)
        mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
        copy(ks.index(stage), k + far * kt, kt, count, C, K)
        if GATE == 2:
            copy_line(rs.index(stage), rates + at * K, True, K)
            copy(ws.index(stage), write + far * kt, kt, count, C, K)
        if GATE == 1:
            copy_line(rs.index(stage), rates + at * (3 * C), True, 2 * C)
        if not IDENTITY:
            copy(vs.index(stage), v + far * vt, vt, count, C, BV)
        copy(Ms.index(stage), M + at * (C * C), C, C, C, C)
        if OUT:
            copy(qs.index(stage), q + far * qt, qt, count, C, K)
            copy(As.index(stage), A + at * (C * C), C, C, C, C)
        betas.index(stage).store(strengths)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
        gl.thread_barrier()
        mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def carry_off(
    states, lines, whole, vs, kept_full, kept_free, made, free, chunk0, low, high, limit, hv, HV,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, KEEP: gl.constexpr, REVERSE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Another's: store states, if ``KEEP``, and lines of values, which stand where a chunk's values did."""
    for n in range(high - low):
        chunk = low + n
        if REVERSE:
            chunk = high - 1 - n
        stage = n % STAGES
        row = chunk * C
        if KEEP:
            mbarrier.wait(kept_full, n & 1)
            put(states + ((chunk0 + chunk) * HV + hv) * (K * V), whole, K, BV, BV, K)
            gl.thread_barrier()
            mbarrier.arrive(kept_free, count=1)
        mbarrier.wait(made.index(stage), (n // STAGES) & 1)
        put(lines + row.to(gl.int64) * (HV * V), vs.index(stage), HV * V, limit - row, C, BV)
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def forwards_chain(
    start, end, ks, ws, Ms, rs, betas, vs, qs, As, whole, ready, free, kept_full, kept_free, made, low, high, scale, at, iv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, START: gl.constexpr,
    END: gl.constexpr, KEEP: gl.constexpr, OUT: gl.constexpr, IDENTITY: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The first's: the walk itself."""
    wide: gl.constexpr = sums(K)
    narrow: gl.constexpr = sums(C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    by_key: gl.constexpr = gl.SliceLayout(0, wide)
    S = gl.zeros((BV, K), gl.float32, wide)
    columns_k = gl.arange(0, K, by_key)[None, :]
    columns_v = (iv * BV + gl.arange(0, BV, gl.SliceLayout(1, wide)))[:, None]
    there = columns_k * V + columns_v
    if IDENTITY:
        S = gl.where(columns_k == columns_v, 1.0, S)
    if START:
        S = S + gl.load(start + at + there).to(gl.float32)
    zeros = gl.zeros((BV, C), gl.float32, narrow)
    for n in range(high - low):
        stage = n % STAGES
        mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        before = S.to(gl.bfloat16)
        if GATE > 0:  # while nothing runs: the assembler waits for every product where it meets these registers
            S = S * rs.index(stage).slice(C - 1 if GATE == 1 else 0, 1 if GATE == 1 else K).load(by_key)[None, :]
        old = gl.convert_layout(before, left(C))
        r = issue(old, ks.index(stage).permute((1, 0)), zeros, True)
        if OUT:
            o = issue(old, qs.index(stage).permute((1, 0)), zeros, True)
        if KEEP:
            mbarrier.wait(kept_free, (n & 1) ^ 1)
            whole.store(before)
            gl.thread_barrier()
            mbarrier.arrive(kept_full, count=1)
        if OUT:
            r = warpgroup_mma_wait(1, [r])
        else:
            r, old = warpgroup_mma_wait(0, [r, old])
        if GATE == 1:
            r = r * rs.index(stage).slice(0, C).load(by_token)[None, :]
        if IDENTITY:
            r = -r
        else:
            r = vs.index(stage).permute((1, 0)).load(narrow).to(gl.float32) - r
        asked = gl.convert_layout((r * betas.index(stage).load(by_token)[None, :]).to(gl.bfloat16), left(C))
        e = issue(asked, Ms.index(stage).permute((1, 0)), zeros, True)
        if OUT:
            o, old = warpgroup_mma_wait(1, [o, old])
            o = o * scale
            if GATE == 1:
                o = o * rs.index(stage).slice(0, C).load(by_token)[None, :]
        e, asked = warpgroup_mma_wait(0, [e, asked])
        e = r - e
        x = e * betas.index(stage).load(by_token)[None, :]
        added = x
        if GATE == 1:
            added = x * rs.index(stage).slice(C, C).load(by_token)[None, :]
        added = gl.convert_layout(added.to(gl.bfloat16), left(K))
        S = issue(added, (ws if GATE == 2 else ks).index(stage), S, False)
        if KEEP:
            vs.index(stage).permute((1, 0)).store(e.to(gl.bfloat16))
        if OUT:
            x = gl.convert_layout(x.to(gl.bfloat16), left(C))
            o = issue(x, As.index(stage).permute((1, 0)), o, False)
            S, added = warpgroup_mma_wait(1, [S, added])
            o, x = warpgroup_mma_wait(0, [o, x])
            vs.index(stage).permute((1, 0)).store(o.to(gl.bfloat16))
        else:
            S, added = warpgroup_mma_wait(0, [S, added])
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)
        if OUT or KEEP:
            mbarrier.arrive(made.index(stage), count=1)
    if END:
        gl.store(end + at + there, S)


@gluon.jit
def backwards_chain(
    start, end, ks, ws, Ms, rs, betas, os, qs, As, whole, ready, free, kept_full, kept_free, made, low, high, scale, at, iv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GATE: gl.constexpr, START: gl.constexpr,
    END: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The same, from the last chunk."""
    wide: gl.constexpr = sums(K)
    narrow: gl.constexpr = sums(C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    by_key: gl.constexpr = gl.SliceLayout(0, wide)
    dS = gl.zeros((BV, K), gl.float32, wide)
    columns_k = gl.arange(0, K, by_key)[None, :]
    columns_v = (iv * BV + gl.arange(0, BV, gl.SliceLayout(1, wide)))[:, None]
    there = columns_k * V + columns_v
    if START:
        dS = dS + gl.load(start + at + there).to(gl.float32)
    zeros = gl.zeros((BV, C), gl.float32, narrow)
    for n in range(high - low):
        stage = n % STAGES
        mbarrier.wait(ready.index(stage), (n // STAGES) & 1)
        fence_async_shared()
        before = dS.to(gl.bfloat16)
        if GATE > 0:
            dS = dS * rs.index(stage).slice(C - 1 if GATE == 1 else 0, 1 if GATE == 1 else K).load(by_key)[None, :]
        old = gl.convert_layout(before, left(C))
        dx = issue(old, (ws if GATE == 2 else ks).index(stage).permute((1, 0)), zeros, True)
        given = os.index(stage).permute((1, 0)).load(left(C))
        own = issue(given, As.index(stage), zeros, True)
        if KEEP:
            mbarrier.wait(kept_free, (n & 1) ^ 1)
            whole.store(before)
            gl.thread_barrier()
            mbarrier.arrive(kept_full, count=1)
        read = given.to(gl.float32) * scale
        if GATE == 1:
            read = read * rs.index(stage).slice(0, C).load(gl.SliceLayout(0, left(C)))[None, :]
        read = gl.convert_layout(read.to(gl.bfloat16), left(K))
        dS = issue(read, qs.index(stage), dS, False)
        dx, own, old, given = warpgroup_mma_wait(1, [dx, own, old, given])
        if GATE == 1:
            dx = dx * rs.index(stage).slice(C, C).load(by_token)[None, :]
        dx = dx + own
        asked = gl.convert_layout((dx * betas.index(stage).load(by_token)[None, :]).to(gl.bfloat16), left(C))
        y = issue(asked, Ms.index(stage), zeros, True)
        dS, read = warpgroup_mma_wait(1, [dS, read])
        y, asked = warpgroup_mma_wait(0, [y, asked])
        y = dx - y
        dr = -y * betas.index(stage).load(by_token)[None, :]
        if GATE == 1:
            dr = dr * rs.index(stage).slice(0, C).load(by_token)[None, :]
        dr = gl.convert_layout(dr.to(gl.bfloat16), left(K))
        dS = issue(dr, ks.index(stage), dS, False)
        if KEEP:
            os.index(stage).permute((1, 0)).store(y.to(gl.bfloat16))
        dS, dr = warpgroup_mma_wait(0, [dS, dr])
        gl.thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)
        if KEEP:
            mbarrier.arrive(made.index(stage), count=1)
    if END:
        gl.store(end + at + there, dS)


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def forwards(
    q, k, v, beta, write, write2, A, M, A2, L2, rates, start, end, kept, errors, out,
    owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, bb, bt, bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, DPLR: gl.constexpr, PACKED: gl.constexpr, WHOLE: gl.constexpr,
    START: gl.constexpr, END: gl.constexpr, KEEP: gl.constexpr, OUT: gl.constexpr, IDENTITY: gl.constexpr,
    PREC: gl.constexpr, DT: gl.constexpr, ST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As :func:`.kernels.forwards`."""
    follow()
    iv, hv, i = parts(V // BV, HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if gl.load(owner + i) >= N:
            return
    b, bos, L, chunk0, low, high = span(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    low = low.to(gl.int32)
    limit = gl.minimum(L, high * C).to(gl.int32)
    q = at_head(q, b, bos, hv, qb, qt, qh, GROUP)
    k = at_head(k, b, bos, hv, kb, kt, kh, GROUP)
    if GATE == 2:
        write = at_head(write, b, bos, hv, kb, kt, kh, 1)
    if not IDENTITY:
        v = at_head(v, b, bos, hv, vb, vt, vh, 1) + iv * BV
    beta = at_head(beta, b, bos, hv, bb, bt, bh, 1)
    head = ((b * T + bos) * HV + hv) * V + iv * BV
    if OUT:
        out += head
    if KEEP:
        errors += head
        kept += iv * BV * K
    at = (i.to(gl.int64) * HV + hv) * (K * V)

    SILENT: gl.constexpr = not (OUT or KEEP)
    ks, ws, Ms, rs, betas, vs, qs, As, whole = rings(K, C, BV, GATE, OUT, IDENTITY, KEEP, STAGES)
    ready, free, made, kept_full, kept_free = barriers(1 if SILENT else 2, STAGES)
    if SILENT:
        gl.warp_specialize(
            [
                (forwards_chain, (
                    start, end, ks, ws, Ms, rs, betas, vs, qs, As, whole, ready, free, kept_full, kept_free, made, low,
                    high, scale, at, iv, K, V, C, BV, GATE, START, END, KEEP, OUT, IDENTITY, STAGES,
                )),
                (bring, (
                    k, write, M, rates, beta, v, q, A, ks, ws, Ms, rs, betas, vs, qs, As, ready, free, chunk0, low, high,
                    limit, hv, HV, kt, bt, vt, qt, K, C, BV, GATE, OUT, IDENTITY, False, STAGES,
                )),
            ], [4], [112],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (forwards_chain, (
                    start, end, ks, ws, Ms, rs, betas, vs, qs, As, whole, ready, free, kept_full, kept_free, made, low,
                    high, scale, at, iv, K, V, C, BV, GATE, START, END, KEEP, OUT, IDENTITY, STAGES,
                )),
                (bring, (
                    k, write, M, rates, beta, v, q, A, ks, ws, Ms, rs, betas, vs, qs, As, ready, free, chunk0, low, high,
                    limit, hv, HV, kt, bt, vt, qt, K, C, BV, GATE, OUT, IDENTITY, False, STAGES,
                )),
                (carry_off, (
                    kept, out if OUT else errors, whole, vs, kept_full, kept_free, made, free, chunk0, low, high, limit, hv,
                    HV, K, V, C, BV, KEEP, False, STAGES,
                )),
            ], [4, 4], [112, 112],
        )  # fmt: skip
    hold(ready, free, made, kept_full, kept_free)


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def backwards(
    q, k, do, beta, write, A, M, rates, start, end, kept, adjoint,
    owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, bb, bt, bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, PACKED: gl.constexpr, WHOLE: gl.constexpr, START: gl.constexpr,
    END: gl.constexpr, KEEP: gl.constexpr, PREC: gl.constexpr, DT: gl.constexpr, ST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As :func:`.kernels.backwards`."""
    follow()
    iv, hv, i = parts(V // BV, HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if gl.load(owner + i) >= N:
            return
    b, bos, L, chunk0, low, high = span(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    low = low.to(gl.int32)
    limit = gl.minimum(L, high * C).to(gl.int32)
    q = at_head(q, b, bos, hv, qb, qt, qh, GROUP)
    k = at_head(k, b, bos, hv, kb, kt, kh, GROUP)
    if GATE == 2:
        write = at_head(write, b, bos, hv, kb, kt, kh, 1)
    do = at_head(do, b, bos, hv, ob, ot, oh, 1) + iv * BV
    beta = at_head(beta, b, bos, hv, bb, bt, bh, 1)
    if KEEP:
        adjoint += ((b * T + bos) * HV + hv) * V + iv * BV
        kept += iv * BV * K
    at = (i.to(gl.int64) * HV + hv) * (K * V)

    ks, ws, Ms, rs, betas, os, qs, As, whole = rings(K, C, BV, GATE, True, False, KEEP, STAGES)
    ready, free, made, kept_full, kept_free = barriers(2 if KEEP else 1, STAGES)
    if KEEP:
        gl.warp_specialize(
            [
                (backwards_chain, (
                    start, end, ks, ws, Ms, rs, betas, os, qs, As, whole, ready, free, kept_full, kept_free, made, low,
                    high, scale, at, iv, K, V, C, BV, GATE, START, END, KEEP, STAGES,
                )),
                (bring, (
                    k, write, M, rates, beta, do, q, A, ks, ws, Ms, rs, betas, os, qs, As, ready, free, chunk0, low, high,
                    limit, hv, HV, kt, bt, ot, qt, K, C, BV, GATE, True, False, True, STAGES,
                )),
                (carry_off, (
                    kept, adjoint, whole, os, kept_full, kept_free, made, free, chunk0, low, high, limit, hv, HV, K, V, C,
                    BV, True, True, STAGES,
                )),
            ], [4, 4], [112, 112],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (backwards_chain, (
                    start, end, ks, ws, Ms, rs, betas, os, qs, As, whole, ready, free, kept_full, kept_free, made, low,
                    high, scale, at, iv, K, V, C, BV, GATE, START, END, KEEP, STAGES,
                )),
                (bring, (
                    k, write, M, rates, beta, do, q, A, ks, ws, Ms, rs, betas, os, qs, As, ready, free, chunk0, low, high,
                    limit, hv, HV, kt, bt, ot, qt, K, C, BV, GATE, True, False, True, STAGES,
                )),
            ], [4], [112],
        )  # fmt: skip
    hold(ready, free, made, kept_full, kept_free)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "tiles_stride"])
def gradients(
    q, k, do, g, beta, errors, adjoint, rates, kept, dkept, dq, dk, dv, shares, dbeta,
    owner, first, cu, T, PER, N, HV, TURN, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    PART: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, PREC: gl.constexpr,
    DT: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """As :func:`.kernels.gradients`: everything is asked for at once, and used as it comes; two programs a processor.

    With a gate, :func:`.kernels.gate_gradients` makes ``dg`` of the ``shares`` that are left of each tile.
    """
    follow()
    NK: gl.constexpr = K // BK
    heads = HV // PART
    ik, h, i = parts(NK, heads)
    hv = h * PART + TURN
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    b, row, count = chunk_of(i, owner, first, cu, T, PER, C, PACKED)
    here = i.to(gl.int64) * HV + hv
    head = (b * T + row) * HV + hv

    acc: gl.constexpr = sums(C)
    of_rows: gl.constexpr = gl.SliceLayout(1, acc)
    of_columns: gl.constexpr = gl.SliceLayout(0, acc)
    zeros = gl.zeros((C, C), gl.float32, acc)
    t = gl.arange(0, C, of_rows)
    s = gl.arange(0, C, of_columns)
    scan: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    j = gl.arange(0, C, scan)
    strengths = numbers(at_head(beta, b, row, hv, bb, bt, bh, 1), j, bt, count)  # ahead of the copies, not behind them
    if GATE == 1:
        sums_of_gates = rates + here * (3 * C) + 2 * C
        G_t = gl.load(sums_of_gates + t)
        G_s = gl.load(sums_of_gates + s)
        whole = gl.load(sums_of_gates + C - 1)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    # Values in parts of C, of which a program stores its own: a part of a larger buffer is loaded a number at a time.
    NV: gl.constexpr = V // C
    given = gl.allocate_shared_memory(gl.bfloat16, [NV, C, C], square)
    e = gl.allocate_shared_memory(gl.bfloat16, [NV, C, C], square)
    y = gl.allocate_shared_memory(gl.bfloat16, [NV, C, C], square)
    S = gl.allocate_shared_memory(gl.bfloat16, [NV, C, BK], square)
    dS = gl.allocate_shared_memory(gl.bfloat16, [NV, C, BK], square)
    bq = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    bk = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    sA = gl.allocate_shared_memory(gl.bfloat16, [C, C], square)
    sL = gl.allocate_shared_memory(gl.bfloat16, [C, C], square)
    do = at_head(do, b, row, hv, ob, ot, oh, 1)
    for n in gl.static_range(NV):
        copy(given.index(n), do + n * C, ot, count, C, C)
        copy(e.index(n), errors + head * V + n * C, HV * V, count, C, C)
        copy(y.index(n), adjoint + head * V + n * C, HV * V, count, C, C)
    async_copy.commit_group()
    for n in gl.static_range(NV):
        copy(S.index(n), kept + here * (K * V) + n * (C * K) + ik * BK, K, C, C, BK)
        copy(dS.index(n), dkept + here * (K * V) + n * (C * K) + ik * BK, K, C, C, BK)
    async_copy.commit_group()
    copy(bq, at_head(q, b, row, hv, qb, qt, qh, GROUP) + ik * BK, qt, count, C, BK)
    copy(bk, at_head(k, b, row, hv, kb, kt, kh, GROUP) + ik * BK, kt, count, C, BK)
    async_copy.commit_group()

    beta_t = gl.convert_layout(strengths, of_rows)
    beta_s = gl.convert_layout(strengths, of_columns)
    if GATE == 1:
        D = gl.exp2(G_t[:, None] - G_s[None, :])
        early = gl.exp2(G_t)
        late = gl.exp2(whole - G_t)

    async_copy.wait_group(2)
    fence_async_shared()
    gl.thread_barrier()
    dA = zeros
    dL = zeros
    for n in gl.static_range(NV):
        dA = issue(given.index(n), e.index(n).permute((1, 0)), dA, n == 0)
    for n in gl.static_range(NV):
        dL = issue(y.index(n), e.index(n).permute((1, 0)), dL, n == 0)
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    read = zeros
    compared = zeros
    wrote = zeros
    for n in gl.static_range(NV):
        read = issue(given.index(n), S.index(n), read, n == 0)
    for n in gl.static_range(NV):
        compared = issue(y.index(n), S.index(n), compared, n == 0)
    for n in gl.static_range(NV):
        wrote = issue(e.index(n), dS.index(n), wrote, n == 0)
    dA = warpgroup_mma_wait(4 * NV, [dA])
    dL = warpgroup_mma_wait(3 * NV, [dL])
    if ik == 0:
        own = gl.sum(gl.where(t[:, None] == s[None, :], dL, 0.0), 1)
        gl.store(dbeta + head + t * HV, own.to(dbeta.dtype.element_ty), mask=t < count)
    dA = dA * (scale * beta_s[None, :])
    dL = dL * (-beta_t[:, None] * beta_s[None, :])
    if GATE == 1:
        dA = dA * D
        dL = dL * D
    dA = gl.where(s[None, :] <= t[:, None], dA, 0.0).to(gl.bfloat16)
    dL = gl.where(s[None, :] < t[:, None], dL, 0.0).to(gl.bfloat16)
    sA.store(dA)
    sL.store(dL)
    dA = gl.convert_layout(dA, left(C))
    dL = gl.convert_layout(dL, left(C))
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()

    met = zeros
    if GATE == 1:  # its diagonal is wanted: what the whole chunk decays of the state
        for n in gl.static_range(NV):
            met = issue(S.index(n).permute((1, 0)), dS.index(n), met, n == 0)
    read = warpgroup_mma_wait((2 + GATE) * NV, [read])
    read = read * (scale * early[:, None] if GATE == 1 else scale)
    read = issue(dA, bk, read, False)
    compared = warpgroup_mma_wait((1 + GATE) * NV + 1, [compared])
    compared = compared * (-beta_t * early if GATE == 1 else -beta_t)[:, None]
    compared = issue(dL, bk, compared, False)
    wrote = warpgroup_mma_wait(GATE * NV + 2, [wrote])
    if GATE == 1:
        met = warpgroup_mma_wait(2, [met])
    given._keep_alive()  # until what reads them is done, or the compiler gives their place away
    e._keep_alive()
    S._keep_alive()
    dS._keep_alive()
    gl.thread_barrier()  # every warp waits for its own rows of a product only
    wrote = wrote * (beta_t * late if GATE == 1 else beta_t)[:, None]
    if GATE == 1:
        key = bk.load(acc).to(gl.float32)
        crossing = gl.sum(key * wrote + gl.where(t[:, None] == s[None, :], met * gl.exp2(whole), 0.0), 1)
    wrote = issue(sA.permute((1, 0)), bq, wrote, False)
    wrote = issue(sL.permute((1, 0)), bk, wrote, False)

    place = ((b * T + row) * heads + hv // PART) * K + ik * BK
    read, dA = warpgroup_mma_wait(3, [read, dA])
    put_sum(dq + place, read, heads * K, count, TURN, C, BK, PART)
    if GATE == 1:
        across = gl.sum(bq.load(acc).to(gl.float32) * read, 1)
    # While those run: the value's gradient, a part of it in every program.
    EACH: gl.constexpr = NV // NK
    if EACH == 0:
        put_part(dv + head * V, y.index(0), strengths, HV * V, gl.where(ik == 0, count, 0), C)
    for n in gl.static_range(EACH):
        part = ik * EACH + n
        put_part(dv + head * V + part * C, y.index(part), strengths, HV * V, count, C)
    compared, wrote, dL = warpgroup_mma_wait(0, [compared, wrote, dL])
    bq._keep_alive()
    bk._keep_alive()
    sA._keep_alive()
    sL._keep_alive()
    put_sum(dk + place, wrote + compared, heads * K, count, TURN, C, BK, PART)
    if GATE == 1:
        across += gl.sum(key * (compared - wrote), 1)
        shares += ik * tiles_stride + here * (2 * C)
        gl.store(shares + t, across)
        gl.store(shares + C + t, crossing)


@gluon.jit
def tile_gradients(
    item, q, k, do, g, beta, errors, adjoint, kept, dkept, dq, dk, dv, dg, dbeta,
    owner, first, cu, T, PER, HV, TURN, scale,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
    PACKED: gl.constexpr, STRONG: gl.constexpr,
):  # fmt: skip
    """Of one chunk, ``dq, dk, dg [C, BK]``, a part of ``dv`` and ``dbeta``; by plain products or, if ``STRONG``, by levels."""
    NK: gl.constexpr = K // BK
    ik = item % NK
    heads = HV // PART
    hv = item // NK % heads * PART + TURN
    i = item // (NK * heads)
    _, piece, bos, L, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    row = piece.to(gl.int64) * C
    count = (L - row).to(gl.int32)
    here = i.to(gl.int64) * HV + hv
    head = (b * T + bos + row) * HV + hv

    rows_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    type: gl.constexpr = g.dtype.element_ty
    bg = gl.allocate_shared_memory(type, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], type))
    bq = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    bk = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    given = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    e = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    y = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    copy(bg, g + b * gb + (bos + row) * gt + hv.to(gl.int64) * gh + ik * BK, gt, count, C, BK)
    async_copy.commit_group()
    copy(bq, q + b * qb + (bos + row) * qt + (hv // GROUP).to(gl.int64) * qh + ik * BK, qt, count, C, BK)
    copy(bk, k + b * kb + (bos + row) * kt + (hv // GROUP).to(gl.int64) * kh + ik * BK, kt, count, C, BK)
    async_copy.commit_group()
    copy(given, do + b * ob + (bos + row) * ot + hv.to(gl.int64) * oh, ot, count, C, V)
    copy(e, errors + head * V, HV * V, count, C, V)
    copy(y, adjoint + head * V, HV * V, count, C, V)
    async_copy.commit_group()

    acc: gl.constexpr = sums(C)
    of_rows: gl.constexpr = gl.SliceLayout(1, acc)
    of_columns: gl.constexpr = gl.SliceLayout(0, acc)
    zeros = gl.zeros((C, C), gl.float32, acc)
    t = gl.arange(0, C, of_rows)
    s = gl.arange(0, C, of_columns)
    beta += b * bb + (bos + row) * bt + hv.to(gl.int64) * bh
    beta_t = gl.load(beta + t.to(gl.int64) * bt, mask=t < count, other=0.0).to(gl.float32)
    beta_s = gl.load(beta + s.to(gl.int64) * bt, mask=s < count, other=0.0).to(gl.float32)
    one = zeros + 1.0

    if not STRONG:
        async_copy.wait_group(2)
        gl.thread_barrier()
        gate = gates(bg, BK)
        c = gl.sum(gate, 0) * 0.5
        half = gl.exp2(c)
        G = totals(gl.where(s[None, :] <= t[:, None], one, 0.0), gate, C, BK) - c[None, :]
        gl.thread_barrier()
    S = gl.allocate_shared_memory(gl.bfloat16, [V, BK], square)
    dS = gl.allocate_shared_memory(gl.bfloat16, [V, BK], square)
    copy(S, kept + here * (K * V) + ik * BK, K, V, V, BK)
    copy(dS, dkept + here * (K * V) + ik * BK, K, V, V, BK)
    async_copy.commit_group()
    if not STRONG:
        async_copy.wait_group(2)
        gl.thread_barrier()
        key = bk.load(acc).to(gl.float32)
        right = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square, (key * gl.exp2(-G)).to(gl.bfloat16))
        early = gl.exp2(G)
        behind = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square, (key * early).to(gl.bfloat16))
        asked = bq.load(acc).to(gl.float32) * early
        reads = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square, asked.to(gl.bfloat16))

    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    A = issue(given, e.permute((1, 0)), zeros, True)
    own = issue(y, e.permute((1, 0)), zeros, True)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    read = issue(given, S, zeros, True)
    A, own = warpgroup_mma_wait(1, [A, own])
    if ik == 0:
        both = gl.sum(gl.where(t[:, None] == s[None, :], own, 0.0), 1)
        gl.store(dbeta + head + t * HV, both.to(dbeta.dtype.element_ty), mask=t < count)
    A = gl.where(s[None, :] <= t[:, None], A * (scale * beta_s[None, :]), 0.0).to(gl.bfloat16)
    own = gl.where(s[None, :] < t[:, None], own * (-beta_t[:, None] * beta_s[None, :]), 0.0).to(gl.bfloat16)
    read = warpgroup_mma_wait(0, [read])
    given._keep_alive()
    if not STRONG:
        gl.thread_barrier()
        sA = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, A)
        sL = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, own)
        fence_async_shared()
        gl.thread_barrier()
    compared = issue(y, S, zeros, True)
    wrote = issue(e, dS, zeros, True)
    met = gl.sum(S.load(rows_of(BK)).to(gl.float32) * dS.load(rows_of(BK)).to(gl.float32), 0)
    place = head * K + ik * BK
    summed = ((b * T + bos + row) * heads + hv // PART) * K + ik * BK
    mine = dv + head * V
    if STRONG:
        compared, wrote = warpgroup_mma_wait(0, [compared, wrote])
        e._keep_alive()
        S._keep_alive()
        dS._keep_alive()
        put_values(mine, y, beta, bt, ik, HV * V, count, C, V, NK)
        gl.thread_barrier()
        sA = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, A)
        sL = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, own)
        gl.thread_barrier()
        both = gl.sum(gl.where(t[:, None] == s[None, :], A.to(gl.float32), 0.0), 1)[:, None]
        mirror(sA, C)
        mirror(sL, C)
        read *= scale
        compared *= -beta_t[:, None]
        wrote *= beta_t[:, None]
        met = gl.convert_layout(met, of_columns)
        read, compared, crossing = strong_gradients(
            bg, bq, bk, sA, sL, both, read, compared, wrote, met, C, BK, True
        )  # fmt: skip
        put_sum(dq + summed, read, heads * K, count, TURN, C, BK, PART)
        put_sum(dk + summed, compared, heads * K, count, TURN, C, BK, PART)
        spread(dg + place, crossing.to(dg.dtype.element_ty), HV * K, count, C, BK)
    else:
        read = issue(sA, right, read * (scale * half)[None, :], False)
        compared = warpgroup_mma_wait(2, [compared])
        compared = issue(sL, right, compared * -beta_t[:, None] * half[None, :], False)
        wrote = warpgroup_mma_wait(2, [wrote])
        e._keep_alive()
        S._keep_alive()
        dS._keep_alive()
        gl.thread_barrier()
        wrote = wrote * beta_t[:, None] * half[None, :]
        through = gl.sum(right.load(acc).to(gl.float32) * wrote, 0) + gl.convert_layout(met, of_columns) * half * half
        wrote = issue(sA.permute((1, 0)), reads, wrote, False)
        wrote = issue(sL.permute((1, 0)), behind, wrote, False)
        put_values(mine, y, beta, bt, ik, HV * V, count, C, V, NK)
        early = gl.exp2(G)
        read = warpgroup_mma_wait(3, [read])
        put_sum(dq + summed, read * early, heads * K, count, TURN, C, BK, PART)
        crossing = reads.load(acc).to(gl.float32) * read
        compared = warpgroup_mma_wait(2, [compared])
        crossing += behind.load(acc).to(gl.float32) * compared
        wrote = warpgroup_mma_wait(0, [wrote])
        sA._keep_alive()
        sL._keep_alive()
        reads._keep_alive()
        behind._keep_alive()
        gl.thread_barrier()
        crossing -= right.load(acc).to(gl.float32) * wrote
        wrote = compared * early + wrote * gl.exp2(-G)
        put_sum(dk + summed, wrote, heads * K, count, TURN, C, BK, PART)
        crossing = totals(gl.where(s[None, :] >= t[:, None], one, 0.0), crossing, C, BK) + through[None, :]
        spread(dg + place, crossing.to(dg.dtype.element_ty), HV * K, count, C, BK)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "COUNT"])
def vector_gradients(
    q, k, do, g, beta, errors, adjoint, kept, dkept, dq, dk, dv, dg, dbeta, ranges,
    owner, first, cu, T, PER, N, HV, TURN, COUNT, scale,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PART: gl.constexpr,
    PACKED: gl.constexpr, RANGE: gl.constexpr, STRONG: gl.constexpr,
):  # fmt: skip
    """``tile_gradients`` for every tile. ``STRONG`` programs look for chunks that decay by ``2^RANGE``; others leave those."""
    follow()
    NK: gl.constexpr = K // BK
    pid = gl.program_id(0)
    if STRONG:
        if any_marked(ranges, pid, COUNT, PART, NK, -RANGE):
            for item in range(pid, COUNT, gl.num_programs(0)):
                wanted = gl.load(ranges + item // NK * PART + TURN) <= -RANGE
                if PACKED:
                    wanted = wanted & (gl.load(owner + item // (NK * (HV // PART))) < N)
                if wanted:
                    none = unknown_zero(item)
                    tile_gradients(
                        item, q, k, do, g, beta, errors, adjoint, kept, dkept, dq, dk, dv, dg, dbeta,
                        owner, first, cu, T, PER, HV + none, TURN, scale, qb, qt + none, qh, kb, kt + none, kh,
                        ob, ot + none, oh, gb, gt + none, gh, bb, bt + none, bh,
                        K, V, C, BK, GROUP, PART, PACKED, STRONG
                    )  # fmt: skip
                    gl.thread_barrier()  # the next item's copies may land where a slower warp still reads this one's
    else:
        if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
            if gl.load(owner + pid // (NK * (HV // PART))) >= N:
                return
        if gl.load(ranges + pid // NK * PART + TURN) <= -RANGE:
            return
        tile_gradients(
            pid, q, k, do, g, beta, errors, adjoint, kept, dkept, dq, dk, dv, dg, dbeta,
            owner, first, cu, T, PER, HV, TURN, scale, qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh,
            K, V, C, BK, GROUP, PART, PACKED, STRONG
        )  # fmt: skip


@gluon.jit
def put_part(p, buffer, strengths, stride, count, C: gl.constexpr):
    """Store the first ``count`` rows of ``beta ∘ buffer [C, C]``."""
    layout: gl.constexpr = rows_of(C)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, C, gl.SliceLayout(0, layout))
    x = buffer.load(layout).to(gl.float32) * gl.convert_layout(strengths, gl.SliceLayout(1, layout))[:, None]
    gl.store(p + (r[:, None] * stride + columns[None, :]), x.to(p.dtype.element_ty), mask=(r < count)[:, None])


@gluon.jit
def put_values(p, buffer, beta, bt, ik, stride, count, C: gl.constexpr, V: gl.constexpr, NK: gl.constexpr):
    """Store ``beta ∘ buffer [C, V]``: of ``NK`` parts of its rows, number ``ik``."""
    part: gl.constexpr = C // NK
    layout: gl.constexpr = rows_of(V)
    r = ik * part + gl.arange(0, part, gl.SliceLayout(1, layout))
    columns = gl.arange(0, V, gl.SliceLayout(0, layout))
    if NK == 1:
        mine = buffer.load(layout)
    elif ik == 0:
        mine = buffer.slice(0, part).load(layout)
    else:
        mine = buffer.slice(part, part).load(layout)
    x = (mine.to(gl.float32) * numbers(beta, r, bt, count)[:, None]).to(p.dtype.element_ty)
    gl.store(p + (r[:, None] * stride + columns[None, :]), x, mask=(r < count)[:, None])


@gluon.jit
def mirror(buffer, C: gl.constexpr):
    """Make a lower triangular matrix symmetric, without its diagonal."""
    acc: gl.constexpr = sums(C)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    lower = buffer.load(acc)
    upper = buffer.permute((1, 0)).load(acc)
    gl.thread_barrier()
    buffer.store(gl.where(s < t, lower, gl.where(s > t, upper, gl.zeros((C, C), buffer.dtype, acc))))


@gluon.constexpr_function
def strips(width):
    """Of a tile whose columns are summed: a thread has four of them, and few threads the same."""
    return gl.BlockedLayout([1, 4], [128 // width, width // 4], [4, 1], [1, 0])


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV"])
def vector_prepare(
    q, k, g, beta, A, M, rates, read, compare, write, ranges, owner, first, cu, T, PER, N, HV, scale,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr, SCORES: gl.constexpr,
    RANGE: gl.constexpr,
):  # fmt: skip
    """As :func:`.vector.prepare` by plain products, and :func:`.kernels.solve`; without ``SCORES`` as ``decayed``,
    whatever the chunk decays by.
    """
    follow()
    NK: gl.constexpr = K // BK
    pid = gl.program_id(0)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + pid // HV) >= N:
            return
    if SCORES:
        strengths = strengths_of(pid, beta, owner, first, cu, T, PER, HV, bb, bt, bh, C, PACKED)
    gs, qs, ks, here, head, count = bring_chunk(
        pid, q, k, g, owner, first, cu, T, PER, HV, qb, qt, qh, kb, kt, kh, gb, gt, gh, K, C, BK, GROUP, 1, PACKED
    )
    acc: gl.constexpr = sums(C)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    s = gl.arange(0, C, gl.SliceLayout(0, acc))
    t = gl.arange(0, C, gl.SliceLayout(1, acc))
    if SCORES:
        from_middle = gl.where(s[None, :] <= t[:, None], gl.full((C, C), 0.5, gl.float32, acc), -0.5)
        halves = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, from_middle.to(gl.bfloat16))
    async_copy.wait_group(NK)
    gl.thread_barrier()
    wholes = ()
    high = ()
    rest = ()
    least = 0.0
    for ik in gl.static_range(NK):
        gate = binary(gs[ik].load(strips(BK)))
        whole = gl.convert_layout(gl.sum(gate, 0), gl.SliceLayout(0, acc))
        gl.store(rates + here * K + ik * BK + s, gl.exp2(whole))
        least = gl.minimum(least, gl.min(whole, 0))
        wholes = wholes + (whole,)  # noqa: RUF005
        high = high + (gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile),)  # noqa: RUF005
        rest = rest + (gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile),)  # noqa: RUF005
        put_terms(high[ik], rest[ik], gate)
    gl.store(ranges + here, least)
    if not SCORES:
        ones = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], tile)
        for ik in gl.static_range(NK):
            async_copy.wait_group(NK - 1 - ik)
            gl.thread_barrier()
            place = head + ik * BK
            decayed_rows(
                read + place, compare + place, write + place, qs[ik], ks[ik], high[ik], rest[ik], ones, 1.0, HV * K, count,
                C, BK, True
            )  # fmt: skip
            gl.thread_barrier()
    else:
        if least <= -RANGE:  # left to strong_prepare
            async_copy.wait_group(0)
            return
        wrote = ()
        for ik in gl.static_range(NK):
            place = head + ik * BK
            half = gl.exp2(wholes[ik] * 0.5)[None, :]
            fence_async_shared()
            async_copy.wait_group(NK - 1 - ik)
            gl.thread_barrier()
            G = warpgroup_mma_wait(0, [begin_total(halves, high[ik], rest[ik], C, BK)])
            high[ik]._keep_alive()
            rest[ik]._keep_alive()
            gl.thread_barrier()
            key = ks[ik].load(acc).to(gl.float32)
            right = key * gl.exp2(-G)
            wrote = wrote + (gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile, right.to(gl.bfloat16)),)  # noqa: RUF005
            spread(write + place, (right * half).to(gl.bfloat16), HV * K, count, C, BK)
            early = gl.exp2(G)
            key = key * early
            ks[ik].store(key.to(gl.bfloat16))
            spread(compare + place, (key * half).to(gl.bfloat16), HV * K, count, C, BK)
            asked = qs[ik].load(acc).to(gl.float32) * early
            qs[ik].store(asked.to(gl.bfloat16))
            spread(read + place, (asked * half).to(gl.bfloat16), HV * K, count, C, BK)
        fence_async_shared()
        gl.thread_barrier()
        qw = gl.zeros((C, C), gl.float32, acc)
        rw = gl.zeros((C, C), gl.float32, acc)
        for ik in gl.static_range(NK):
            rw = issue(ks[ik], wrote[ik].permute((1, 0)), rw, ik == 0)
            qw = issue(qs[ik], wrote[ik].permute((1, 0)), qw, ik == 0)
        rw, qw = warpgroup_mma_wait(0, [rw, qw])
        for ik in gl.static_range(NK):
            qs[ik]._keep_alive()
            ks[ik]._keep_alive()
            wrote[ik]._keep_alive()
        gl.thread_barrier()
        put_both(A, M, qw * scale, rw, strengths, here, C)


@gluon.jit
def strengths_of(item, beta, owner, first, cu, T, PER, HV, bb, bt, bh, C: gl.constexpr, PACKED: gl.constexpr):
    """``beta`` of the tokens of one chunk and value head."""
    b, row, count = chunk_of(item // HV, owner, first, cu, T, PER, C, PACKED)
    j = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    return numbers(at_head(beta, b, row, item % HV, bb, bt, bh, 1), j, bt, count)


@gluon.jit
def put_scores(A, L, a, m, here, rows, C: gl.constexpr):
    """Store the first ``rows`` of a chunk's scores: what is above their diagonals is zero, or not read."""
    t = gl.arange(0, C, gl.SliceLayout(1, sums(C)))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, sums(C)))[None, :]
    square = here * (C * C)
    spread(A + square, gl.where(s <= t, a, 0.0).to(gl.bfloat16), C, rows, C, C)
    gl.store(L + square + t * C + s, gl.where(s < t, m, 0.0), mask=(s // 16 <= t // 16) & (t < rows))


@gluon.jit
def put_both(A, M, a, compared, strengths, here, C: gl.constexpr):
    """Store a chunk's ``A`` and, of ``L`` and ``beta``, its ``M``."""
    t = gl.arange(0, C, gl.SliceLayout(1, sums(C)))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, sums(C)))[None, :]
    square = here * (C * C)
    spread(A + square, gl.where(s <= t, a, 0.0).to(gl.bfloat16), C, C, C, C)
    put_solved(M + square, gl.where(s < t, compared, 0.0), strengths, 1, C)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def strong_prepare(
    q, k, g, beta, A, M, read, compare, write, ranges, owner, first, cu, T, PER, N, HV, COUNT, scale,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr, RANGE: gl.constexpr,
):  # fmt: skip
    """Looks for chunks that decay by ``2^RANGE``, and makes again what ``vector_prepare`` made of them, by levels."""
    follow()
    pid = gl.program_id(0)
    if any_marked(ranges, pid, COUNT, 1, 1, -RANGE):
        for item in range(pid, COUNT, gl.num_programs(0)):
            wanted = gl.load(ranges + item) <= -RANGE
            if PACKED:
                wanted = wanted & (gl.load(owner + item // HV) < N)
            if wanted:
                none = unknown_zero(item)
                gs, qs, ks, here, head, count = bring_chunk(
                    item, q, k, g, owner, first, cu, T, PER, HV, qb, qt + none, qh, kb, kt + none, kh, gb, gt + none, gh,
                    K, C, K, GROUP, 1, PACKED
                )  # fmt: skip
                a, m = strong_chunk(
                    read + head, compare + head, write + head, gs, qs, ks, 1.0, (HV + none) * K, count, C, K, True
                )  # fmt: skip
                strengths = strengths_of(item, beta, owner, first, cu, T, PER, HV, bb, bt, bh, C, PACKED)
                put_both(A, M, a * scale, m, strengths, here, C)
                gl.thread_barrier()
