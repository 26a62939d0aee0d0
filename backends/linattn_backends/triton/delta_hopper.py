"""Kernels of :mod:`.delta_kernels` and :mod:`.delta_vector` in Gluon, for Hopper: bfloat16, usual sizes, a ``beta`` a token.

Plain Triton waits for every product whose left operand is in registers before it issues the next, and for every load that no
product prefetches. Here a product is waited for where its result is used.

* A walk is three warpgroups' work. The first has the state's tile, transposed, ``[BV, K]``, in registers, as the left operand
  of every product and the accumulator of the last; the second copies what chunks bring into rings in shared memory, ``STAGES``
  chunks long; the third stores what the first leaves in the ring's place of the values. They wait for one another at barriers
  in shared memory, so a program's warps run on their own, and registers go to the first.
* The gradients ask for everything at once and use it as it comes; two programs share a processor.

Two rules of this file. A buffer's place is given to another after its last use in the program, which for a product is where it
is issued: ``_keep_alive`` says where it is done. And a warp waits for its own rows of a product only: whoever overwrites an
operand needs a barrier after the wait.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .delta_kernels import span
from .kernels import chunk_within, sequence_of
from .tiles import FLOOR, LOG2E

__all__ = ["backwards", "forwards", "gradients", "prepare", "solve", "vector_gradients", "vector_prepare"]

PROPAGATE = gl.constexpr(tl.PropagateNan.ALL)


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
def by_warp():
    """Of products of four pairs of blocks ``[4, 16, 16]``, a warp each."""
    return gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])


@gluon.jit
def copy(buffer, p, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Begin to copy ``count`` rows from ``p`` on to ``buffer [C, W]``, and zeros to the others."""
    layout: gl.constexpr = rows_of(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(buffer, p + (r[:, None] * stride + columns[None, :]), mask=(r < count)[:, None])


@gluon.jit
def copy_line(buffer, p, there, W: gl.constexpr):
    """Begin to copy ``W ≤ 128`` numbers."""
    i = gl.arange(0, W, gl.BlockedLayout([1], [32], [4], [0]))
    async_copy.async_copy_global_to_shared(buffer, p + i, mask=(i < W) & there)


@gluon.jit
def put(p, buffer, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Store the first ``count`` rows of ``buffer [C, W]`` from ``p`` on."""
    layout: gl.constexpr = rows_of(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    gl.store(p + (r[:, None] * stride + columns[None, :]), buffer.load(layout), mask=(r < count)[:, None])


@gluon.jit
def issue(a, b, acc, START: gl.constexpr):
    """Begin ``acc + a b``, without ``acc`` if ``START``."""
    return warpgroup_mma(a, b, acc, use_acc=not START, is_async=True)


@gluon.jit
def numbers(p, i, stride, count):
    """Of tokens ``i``, float32; zero from ``count`` on."""
    return gl.load(p + i.to(gl.int64) * stride, mask=i < count, other=0.0).to(gl.float32)


@gluon.jit
def row_of(x, b, token, head, xb, xt, xh):
    """Where row ``b, token, head`` of ``x`` begins."""
    return x + b * xb + token * xt + head.to(gl.int64) * xh


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
def barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Of the rings: copied, read by all ``CONSUMERS``, results made; of the state's copy: made, stored."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    kept_full = gl.allocate_shared_memory(gl.int64, [1], layout)
    kept_free = gl.allocate_shared_memory(gl.int64, [1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129)  # each thread's copies, and the numbers that threads store
        mbarrier.init(free.index(stage), count=CONSUMERS)
        mbarrier.init(made.index(stage), count=1)
    mbarrier.init(kept_full, count=1)
    mbarrier.init(kept_free, count=1)
    return ready, free, made, kept_full, kept_free


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
            copy_line(rs.index(stage), rates + at * (2 * C), True, 2 * C)
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
    """As :func:`.delta_kernels.forwards`."""
    iv, hv, i = parts(V // BV, HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if gl.load(owner + i) >= N:
            return
    b, bos, L, chunk0, low, high = span(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    low = low.to(gl.int32)
    limit = gl.minimum(L, high * C).to(gl.int32)
    q = row_of(q, b, bos, hv // GROUP, qb, qt, qh)
    k = row_of(k, b, bos, hv // GROUP, kb, kt, kh)
    if GATE == 2:
        write = row_of(write, b, bos, hv, kb, kt, kh)
    if not IDENTITY:
        v = row_of(v, b, bos, hv, vb, vt, vh) + iv * BV
    beta = row_of(beta, b, bos, hv, bb, bt, bh)
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


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV"])
def backwards(
    q, k, do, beta, write, A, M, rates, start, end, kept, adjoint,
    owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, scale,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, bb, bt, bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, PACKED: gl.constexpr, WHOLE: gl.constexpr, START: gl.constexpr,
    END: gl.constexpr, KEEP: gl.constexpr, PREC: gl.constexpr, DT: gl.constexpr, ST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As :func:`.delta_kernels.backwards`."""
    iv, hv, i = parts(V // BV, HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if gl.load(owner + i) >= N:
            return
    b, bos, L, chunk0, low, high = span(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
    low = low.to(gl.int32)
    limit = gl.minimum(L, high * C).to(gl.int32)
    q = row_of(q, b, bos, hv // GROUP, qb, qt, qh)
    k = row_of(k, b, bos, hv // GROUP, kb, kt, kh)
    if GATE == 2:
        write = row_of(write, b, bos, hv, kb, kt, kh)
    do = row_of(do, b, bos, hv, ob, ot, oh) + iv * BV
    beta = row_of(beta, b, bos, hv, bb, bt, bh)
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


@gluon.jit
def add(a, b):
    """The sum, for scans."""
    return a + b


@gluon.jit
def quarters(x):
    """The columns of ``x [R, W]`` in four parts."""
    W: gl.constexpr = x.shape[1] // 4
    even, odd = gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, 2, W)), (0, 3, 1, 2)))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return a, b, c, d


@gluon.jit
def halves(x, N: gl.constexpr):
    """``N`` tensors of ``2 N``: each beside the one ``N`` places on, in a new last axis."""
    y = ()
    for i in gl.static_range(N):
        y = y + (gl.join(x[i], x[i + N]),)  # noqa: RUF005
    return y


@gluon.jit
def stacked(x, W: gl.constexpr):
    """Four ``[W]`` as ``[4, W]``."""
    return gl.reshape(gl.permute(halves(halves(x, 2), 1)[0], (1, 2, 0)), (4, W))


@gluon.jit
def substitute(own, beta):
    """``M`` of blocks on the diagonal, ``L [4, 16 · 16]``, row after row."""
    row: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    four: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    done = ()
    scaled = ()
    for i in gl.static_range(16):
        x = own.slice(i * 16, 16, 1).load(row)
        for j in gl.static_range(0, i, 4):
            factors = quarters(own.slice(i * 16 + j, 4, 1).load(four))
            for n in gl.static_range(4):
                if j + n < i:
                    x -= gl.convert_layout(factors[n], row) * scaled[j + n]
        done = done + (x,)  # noqa: RUF005
        scaled = scaled + (x * beta.slice(i, 1, 1).load(row),)  # noqa: RUF005
    together = halves(halves(halves(halves(done, 8), 4), 2), 1)[0]
    return gl.reshape(gl.permute(together, (0, 2, 3, 4, 5, 1)), (4, 256))


@gluon.jit
def less(x, y, beta, z):
    """``x - y (beta z)`` for blocks ``y, z [4, 16, 16]`` in shared memory and ``x`` in registers."""
    rows: gl.constexpr = gl.DotOperandLayout(0, by_warp(), 1)
    scaled = y.load(rows) * -beta.load(gl.SliceLayout(1, rows))[:, None, :]
    return mma_v2(scaled, z.load(gl.DotOperandLayout(1, by_warp(), 1)), x, "tf32")


@gluon.jit
def solve_in_place(P, betas):
    """``M`` in the place of ``L``, of four chunks, as :func:`.delta_kernels.solve`: a chunk is a warp's.

    ``P``: four columns of blocks, each ``[4, 64 · 16]``; ``betas [4, 64]``.
    """
    form: gl.constexpr = by_warp()
    blocks = ()
    for n in gl.static_range(4):
        blocks = blocks + (substitute(P[n].slice(n * 256, 256, 1), betas.slice(n * 16, 16, 1)),)  # noqa: RUF005
    for n in gl.static_range(4):
        P[n].slice(n * 256, 256, 1).store(blocks[n])
    first = P[0].reshape((4, 64, 16))
    second = P[1].reshape((4, 64, 16))
    third = P[2].reshape((4, 64, 16))
    M00 = first.slice(0, 16, 1)
    M10 = first.slice(16, 16, 1)
    M20 = first.slice(32, 16, 1)
    M30 = first.slice(48, 16, 1)
    M11 = second.slice(16, 16, 1)
    M21 = second.slice(32, 16, 1)
    M31 = second.slice(48, 16, 1)
    M22 = third.slice(32, 16, 1)
    M32 = third.slice(48, 16, 1)
    M33 = P[3].reshape((4, 64, 16)).slice(48, 16, 1)
    b0 = betas.slice(0, 16, 1)
    b1 = betas.slice(16, 16, 1)
    b2 = betas.slice(32, 16, 1)
    b3 = betas.slice(48, 16, 1)
    Y10 = less(M10.load(form), M11, b1, M10)
    Y32 = less(M32.load(form), M33, b3, M32)
    Y20 = less(M20.load(form), M22, b2, M20)
    Y21 = less(M21.load(form), M22, b2, M21)
    Y30 = less(M30.load(form), M33, b3, M30)
    Y31 = less(M31.load(form), M33, b3, M31)
    M10.store(Y10)
    M32.store(Y32)
    Y10 = less(Y10, M10, b0, M00)
    Y32 = less(Y32, M32, b2, M22)
    M10.store(Y10)
    M32.store(Y32)
    Y30 = less(Y30, M32, b2, M20)
    Y31 = less(Y31, M32, b2, M21)
    M20.store(Y20)
    M21.store(Y21)
    M30.store(Y30)
    M31.store(Y31)
    Y20 = less(less(Y20, M20, b0, M00), M21, b1, M10)
    Y30 = less(less(Y30, M30, b0, M00), M31, b1, M10)
    Y21 = less(Y21, M21, b1, M11)
    Y31 = less(Y31, M31, b1, M11)
    M20.store(Y20)
    M21.store(Y21)
    M30.store(Y30)
    M31.store(Y31)


@gluon.jit
def columns(C: gl.constexpr):
    """Places for four chunks' ``[C, C]`` in four columns of blocks."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    P0 = gl.allocate_shared_memory(gl.float32, [4, C * 16], plain)
    P1 = gl.allocate_shared_memory(gl.float32, [4, C * 16], plain)
    P2 = gl.allocate_shared_memory(gl.float32, [4, C * 16], plain)
    P3 = gl.allocate_shared_memory(gl.float32, [4, C * 16], plain)
    return (P0, P1, P2, P3), gl.allocate_shared_memory(gl.float32, [4, C], plain)


@gluon.jit
def put_columns(M, P, left, C: gl.constexpr):
    """Store the first ``left`` of four chunks."""
    layout: gl.constexpr = rows_of(16)
    r = gl.arange(0, 4 * C, gl.SliceLayout(1, layout))
    c = gl.arange(0, 16, gl.SliceLayout(0, layout))
    for n in gl.static_range(4):
        x = P[n].reshape((4 * C, 16)).load(layout).to(M.dtype.element_ty)
        gl.store(M + (r[:, None] * C + 16 * n + c[None, :]), x, mask=(r < left * C)[:, None])


@gluon.jit
def chunk_at(item, total, owner, first, cu, T, PER, N, HV, C: gl.constexpr, PACKED: gl.constexpr):
    """Of the ``item``-th of ``total`` pairs of chunk and value head: batch row, first token, tokens, at most 0 if there is none,
    value head and number.
    """
    last = gl.minimum(item, total - 1)
    hv = last % HV
    i = last // HV
    _, piece, bos, L, b = chunk_within(i, owner, first, cu, T, PER, N, PACKED)
    row = piece.to(gl.int64) * C
    return b, bos + row, gl.where(item < total, (L - row).to(gl.int32), 0), hv, i.to(gl.int64) * HV + hv


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "total"])
def solve(
    L, M, beta, owner, first, cu, T, PER, N, HV, total, bb, bt, bh, C: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """As :func:`.delta_kernels.solve`, four chunks a program; ``L`` is kept."""
    item = gl.program_id(0) * 4
    P, betas = columns(C)
    square = item.to(gl.int64) * (C * C)
    layout: gl.constexpr = rows_of(16)
    r = gl.arange(0, 4 * C, gl.SliceLayout(1, layout))
    c = gl.arange(0, 16, gl.SliceLayout(0, layout))
    for n in gl.static_range(4):  # no block above the diagonal is read
        there = (r < (total - item) * C) & (r % C >= 16 * n)
        place = P[n].reshape((4 * C, 16))
        async_copy.async_copy_global_to_shared(place, L + square + (r[:, None] * C + 16 * n + c[None, :]), mask=there[:, None])
    async_copy.commit_group()
    j = gl.arange(0, C, gl.BlockedLayout([2], [32], [4], [0]))
    strengths = ()
    for w in gl.static_range(4):
        b, row, count, hv, _ = chunk_at(item + w, total, owner, first, cu, T, PER, N, HV, C, PACKED)
        strengths = strengths + (numbers(row_of(beta, b, row, hv, bb, bt, bh), j, bt, count),)  # noqa: RUF005
    betas.store(stacked(strengths, C))
    async_copy.wait_group(0)
    gl.thread_barrier()
    solve_in_place(P, betas)
    put_columns(M + square, P, total - item, C)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "total"])
def prepare(
    q, k, g, beta, A, M, rates, owner, first, cu, T, PER, N, HV, total, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, GATE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As :func:`.delta_kernels.prepare` and :func:`.delta_kernels.solve`, four chunks a program.

    ``A`` and ``L`` are made chunk after chunk, while the next is copied; then all four are solved.
    """
    item = gl.program_id(0) * 4
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    qs = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    ks = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    P, betas = columns(C)
    acc: gl.constexpr = sums(C)
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    j = gl.arange(0, C, gl.BlockedLayout([2], [32], [4], [0]))
    zeros = gl.zeros((C, C), gl.float32, acc)
    b, row, count, hv, here = chunk_at(item, total, owner, first, cu, T, PER, N, HV, C, PACKED)
    copy(ks, row_of(k, b, row, hv // GROUP, kb, kt, kh), kt, count, C, K)
    copy(qs, row_of(q, b, row, hv // GROUP, qb, qt, qh), qt, count, C, K)
    async_copy.commit_group()
    strengths = ()
    gates = ()
    for w in gl.static_range(4):  # asked for at once
        b, row, count, hv, here = chunk_at(item + w, total, owner, first, cu, T, PER, N, HV, C, PACKED)
        strengths = strengths + (numbers(row_of(beta, b, row, hv, bb, bt, bh), j, bt, count),)  # noqa: RUF005
        if GATE == 1:
            gates = gates + (numbers(row_of(g, b, row, hv, gb, gt, gh), j, gt, count),)  # noqa: RUF005
    betas.store(stacked(strengths, C))
    for w in gl.static_range(4):
        b, row, count, hv, here = chunk_at(item + w, total, owner, first, cu, T, PER, N, HV, C, PACKED)
        if GATE == 1:
            bg = gl.maximum(gates[w], FLOOR, propagate_nan=PROPAGATE) * LOG2E
            G = gl.associative_scan(bg, 0, add)
            gl.store(rates + here * (2 * C) + j, gl.exp2(G), mask=count > 0)
            gl.store(rates + here * (2 * C) + C + j, gl.exp2(gl.sum(bg, 0) - G), mask=count > 0)
        square = here * (C * C)
        there = gl.where(count > 0, C, 0)
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        kk = issue(ks, ks.permute((1, 0)), zeros, True)
        qk = issue(qs, ks.permute((1, 0)), zeros, True)
        kk, qk = warpgroup_mma_wait(0, [kk, qk])
        gl.thread_barrier()  # every warp waits for its own rows of a product only
        if w < 3:
            b, row, count, hv, _ = chunk_at(item + w + 1, total, owner, first, cu, T, PER, N, HV, C, PACKED)
            copy(ks, row_of(k, b, row, hv // GROUP, kb, kt, kh), kt, count, C, K)
            copy(qs, row_of(q, b, row, hv // GROUP, qb, qt, qh), qt, count, C, K)
            async_copy.commit_group()
        if GATE == 1:
            E = gl.convert_layout(G, gl.SliceLayout(1, acc))[:, None] - gl.convert_layout(G, gl.SliceLayout(0, acc))[None, :]
            D = gl.exp2(gl.minimum(E, 0.0))
            qk = qk * D
            kk = kk * D
        parts_of_k = quarters(gl.where(s < t, kk, 0.0))
        for n in gl.static_range(4):
            P[n].slice(w, 1).store(gl.reshape(parts_of_k[n], (1, C * 16)))
        spread(A + square, gl.where(s <= t, qk * scale, 0.0).to(A.dtype.element_ty), C, there, C, C)
    qs._keep_alive()
    ks._keep_alive()
    solve_in_place(P, betas)
    put_columns(M + item.to(gl.int64) * (C * C), P, total - item, C)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "tiles_stride"])
def gradients(
    q, k, do, g, beta, errors, adjoint, rates, kept, dkept, dq, dk, dv, dg, dbeta,
    owner, first, cu, T, PER, N, HV, scale, tiles_stride,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, PACKED: gl.constexpr, SPLIT: gl.constexpr, PREC: gl.constexpr,
    DT: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    """As :func:`.delta_kernels.gradients`: everything is asked for at once, and used as it comes; two programs a processor."""
    NK: gl.constexpr = K // BK
    ik, hv, i = parts(NK, HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    b, row, count = chunk_of(i, owner, first, cu, T, PER, C, PACKED)
    here = i.to(gl.int64) * HV + hv
    head = (b * T + row) * HV + hv

    rows_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    given = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    e = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    y = gl.allocate_shared_memory(gl.bfloat16, [C, V], rows_v)
    S = gl.allocate_shared_memory(gl.bfloat16, [V, BK], square)
    dS = gl.allocate_shared_memory(gl.bfloat16, [V, BK], square)
    bq = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    bk = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square)
    sA = gl.allocate_shared_memory(gl.bfloat16, [C, C], square)
    sL = gl.allocate_shared_memory(gl.bfloat16, [C, C], square)
    copy(given, row_of(do, b, row, hv, ob, ot, oh), ot, count, C, V)
    copy(e, errors + head * V, HV * V, count, C, V)
    copy(y, adjoint + head * V, HV * V, count, C, V)
    async_copy.commit_group()
    copy(S, kept + here * (K * V) + ik * BK, K, V, V, BK)
    copy(dS, dkept + here * (K * V) + ik * BK, K, V, V, BK)
    async_copy.commit_group()
    copy(bq, row_of(q, b, row, hv // GROUP, qb, qt, qh) + ik * BK, qt, count, C, BK)
    copy(bk, row_of(k, b, row, hv // GROUP, kb, kt, kh) + ik * BK, kt, count, C, BK)
    async_copy.commit_group()

    acc: gl.constexpr = sums(C)
    of_rows: gl.constexpr = gl.SliceLayout(1, acc)
    of_columns: gl.constexpr = gl.SliceLayout(0, acc)
    scan: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    zeros = gl.zeros((C, C), gl.float32, acc)
    t = gl.arange(0, C, of_rows)
    s = gl.arange(0, C, of_columns)
    beta = row_of(beta, b, row, hv, bb, bt, bh)
    beta_t = numbers(beta, t, bt, count)
    beta_s = numbers(beta, s, bt, count)
    if GATE == 1:
        rates += here * (2 * C)
        early = gl.load(rates + t)
        late = gl.load(rates + C + t)
        decay = gl.load(rates + C - 1)
        j = gl.arange(0, C, scan)
        bg = numbers(row_of(g, b, row, hv, gb, gt, gh), j, gt, count)
        bg = gl.maximum(bg, FLOOR, propagate_nan=PROPAGATE)
        G = gl.associative_scan(bg, 0, add) * LOG2E
        E = gl.convert_layout(G, of_rows)[:, None] - gl.convert_layout(G, of_columns)[None, :]
        D = gl.exp2(gl.minimum(E, 0.0))

    async_copy.wait_group(2)
    fence_async_shared()
    gl.thread_barrier()
    dA = issue(given, e.permute((1, 0)), zeros, True)
    dL = issue(y, e.permute((1, 0)), zeros, True)
    async_copy.wait_group(1)
    fence_async_shared()
    gl.thread_barrier()
    read = issue(given, S, zeros, True)
    compared = issue(y, S, zeros, True)
    wrote = issue(e, dS, zeros, True)
    dA = warpgroup_mma_wait(4, [dA])
    dL = warpgroup_mma_wait(3, [dL])
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

    read = warpgroup_mma_wait(2, [read])
    read = read * (scale * early[:, None] if GATE == 1 else scale)
    read = issue(dA, bk, read, False)
    compared = warpgroup_mma_wait(2, [compared])
    compared = compared * (-beta_t * early if GATE == 1 else -beta_t)[:, None]
    compared = issue(dL, bk, compared, False)
    wrote = warpgroup_mma_wait(2, [wrote])
    given._keep_alive()  # until what reads them is done, or the compiler gives their place away
    e._keep_alive()
    gl.thread_barrier()  # every warp waits for its own rows of a product only
    wrote = wrote * (beta_t * late if GATE == 1 else beta_t)[:, None]
    if GATE == 1:
        key = bk.load(acc).to(gl.float32)
        crossing = gl.sum(key * wrote, 1)
    wrote = issue(sA.permute((1, 0)), bq, wrote, False)
    wrote = issue(sL.permute((1, 0)), bk, wrote, False)

    # While those run: the value's gradient, a part of it in every program, and what the gate of the whole chunk decays.
    part: gl.constexpr = V // NK
    layout: gl.constexpr = rows_of(part)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, part, gl.SliceLayout(0, layout))
    scaled = numbers(beta, r, bt, count)[:, None]
    if NK == 1:
        mine = y.load(layout)
    elif ik == 0:
        mine = y.slice(0, part, 1).load(layout)
    else:
        mine = y.slice(part, part, 1).load(layout)
    p = dv + head * V + ik * part + (r[:, None] * (HV * V) + columns[None, :])
    gl.store(p, (mine.to(gl.float32) * scaled).to(dv.dtype.element_ty), mask=(r < count)[:, None])
    if GATE == 1:
        both = S.load(rows_of(BK)).to(gl.float32) * dS.load(rows_of(BK)).to(gl.float32)
        through = gl.sum(gl.sum(both, 1), 0) * decay

    out: gl.constexpr = rows_of(BK)
    r = gl.arange(0, C, gl.SliceLayout(1, out))
    columns = gl.arange(0, BK, gl.SliceLayout(0, out))
    place = head * K + ik * BK + (r[:, None] * (HV * K) + columns[None, :])
    inside = (r < count)[:, None]
    read, dA = warpgroup_mma_wait(3, [read, dA])
    gl.store(dq + place, gl.convert_layout(read.to(dq.dtype.element_ty), out), mask=inside)
    compared, wrote, dL = warpgroup_mma_wait(0, [compared, wrote, dL])
    bq._keep_alive()
    bk._keep_alive()
    sA._keep_alive()
    sL._keep_alive()
    gl.store(dk + place, gl.convert_layout((wrote + compared).to(dk.dtype.element_ty), out), mask=inside)
    if GATE == 1:
        across = gl.sum(bq.load(acc).to(gl.float32) * read + key * (compared - wrote), 1)
        across = gl.convert_layout(across, scan)
        passed = gl.sum(across, 0) - gl.associative_scan(across, 0, add)
        across = across + passed + gl.sum(crossing, 0) + through
        across = gl.where(bg > -87.0, across, 0.0)  # e^g is zero, and so is its gradient
        gl.store(dg + ik * tiles_stride + head + j * HV, across, mask=j < count)


@gluon.jit
def totals(ones, x, C: gl.constexpr, BK: gl.constexpr):
    """``ones @ x`` in two bfloat16 terms, for a matrix of ones and zeros ``[C, C]`` and float32 ``x [C, BK]``.

    Ones in registers, whose contents the compiler knows, came out wrong in rows 8 to 15 of every 16 (Triton 3.6.0).
    """
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    part = x.to(gl.bfloat16)
    high = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile, part)
    rest = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile, (x - part.to(gl.float32)).to(gl.bfloat16))
    left = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, ones.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    acc = gl.zeros((C, BK), gl.float32, sums(BK))
    acc = issue(left, high, acc, True)
    acc = issue(left, rest, acc, False)
    acc = warpgroup_mma_wait(0, [acc])
    left._keep_alive()
    high._keep_alive()
    rest._keep_alive()
    return acc


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV"])
def vector_gradients(
    q, k, do, g, beta, errors, adjoint, dA, dL, kept, dkept, dq, dk, dv, dg, dbeta, ranges,
    owner, first, cu, T, PER, N, HV, scale,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr,
    RANGE: gl.constexpr,
):  # fmt: skip
    """``dv, dbeta`` of one chunk and, by plain products, ``dq, dk, dg [C, BK]``; of a chunk that decays by ``2^RANGE``, in the
    place of those, gradients of scores for :func:`.delta_vector.gradients`.
    """
    NK: gl.constexpr = K // BK
    pid = gl.program_id(0)
    ik = pid % NK
    hv = pid // NK % HV
    i = pid // (NK * HV)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
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
    beta_t = gl.load(beta + t * bt, mask=t < count, other=0.0).to(gl.float32)
    beta_s = gl.load(beta + s * bt, mask=s < count, other=0.0).to(gl.float32)
    least = gl.load(ranges + here)
    one = zeros + 1.0

    async_copy.wait_group(2)
    gl.thread_barrier()
    gate = gl.maximum(bg.load(acc).to(gl.float32), -112.0) * 1.4426950408889634
    c = gl.sum(gate, 0) * 0.5
    half = gl.exp2(c)
    G = totals(gl.where(s[None, :] <= t[:, None], one, 0.0), gate, C, BK) - c[None, :]
    gl.thread_barrier()
    S = gl.allocate_shared_memory(gl.bfloat16, [V, BK], square)
    dS = gl.allocate_shared_memory(gl.bfloat16, [V, BK], square)
    copy(S, kept + here * (K * V) + ik * BK, K, V, V, BK)
    copy(dS, dkept + here * (K * V) + ik * BK, K, V, V, BK)
    async_copy.commit_group()
    async_copy.wait_group(2)
    gl.thread_barrier()
    key = bk.load(acc).to(gl.float32)
    right = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square, (key * gl.exp2(-G)).to(gl.bfloat16))
    early = gl.exp2(G)
    behind = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square, (key * early).to(gl.bfloat16))
    reads = gl.allocate_shared_memory(gl.bfloat16, [C, BK], square, (bq.load(acc).to(gl.float32) * early).to(gl.bfloat16))

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
    if (least <= -RANGE) & (ik == 0):
        place = here * (C * C) + t[:, None] * C + s[None, :]
        gl.store(dA + place, A.to(dA.dtype.element_ty))
        gl.store(dL + place, own.to(dL.dtype.element_ty))
    read = warpgroup_mma_wait(0, [read])
    given._keep_alive()
    gl.thread_barrier()
    sA = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, A)
    sL = gl.allocate_shared_memory(gl.bfloat16, [C, C], square, own)
    fence_async_shared()
    gl.thread_barrier()
    compared = issue(y, S, zeros, True)
    wrote = issue(e, dS, zeros, True)
    met = gl.sum(S.load(rows_of(BK)).to(gl.float32) * dS.load(rows_of(BK)).to(gl.float32), 0)
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

    part: gl.constexpr = V // NK
    layout: gl.constexpr = rows_of(part)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, part, gl.SliceLayout(0, layout))
    scaled = gl.load(beta + r * bt, mask=r < count, other=0.0).to(gl.float32)[:, None]
    if NK == 1:
        mine = y.load(layout)
    elif ik == 0:
        mine = y.slice(0, part, 1).load(layout)
    else:
        mine = y.slice(part, part, 1).load(layout)
    p = dv + head * V + ik * part + (r[:, None] * (HV * V) + columns[None, :])
    gl.store(p, (mine.to(gl.float32) * scaled).to(dv.dtype.element_ty), mask=(r < count)[:, None])

    out: gl.constexpr = rows_of(BK)
    r = gl.arange(0, C, gl.SliceLayout(1, out))
    columns = gl.arange(0, BK, gl.SliceLayout(0, out))
    place = head * K + ik * BK + (r[:, None] * (HV * K) + columns[None, :])
    inside = (r < count)[:, None] & (least > -RANGE)
    early = gl.exp2(G)
    read = warpgroup_mma_wait(3, [read])
    gl.store(dq + place, gl.convert_layout((read * early).to(dq.dtype.element_ty), out), mask=inside)
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
    gl.store(dk + place, gl.convert_layout(wrote.to(dk.dtype.element_ty), out), mask=inside)
    gates = totals(gl.where(s[None, :] >= t[:, None], one, 0.0), crossing, C, BK) + through[None, :]
    gl.store(dg + place, gl.convert_layout(gates.to(dg.dtype.element_ty), out), mask=inside)


@gluon.jit
def spread(p, x, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Store the first ``count`` rows of ``x [C, W]``, 16 bytes a thread."""
    layout: gl.constexpr = rows_of(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    gl.store(p + (r[:, None] * stride + columns[None, :]), gl.convert_layout(x, layout), mask=(r < count)[:, None])


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV"])
def vector_prepare(
    q, k, g, A, L, rates, read, compare, write, ranges, owner, first, cu, T, PER, N, HV, scale,
    qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """As :func:`.delta_vector.prepare` by plain products, whatever the chunk decays by; without ``SCORES`` as ``decayed``."""
    NK: gl.constexpr = K // BK
    pid = gl.program_id(0)
    hv = pid % HV
    i = pid // HV
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    _, piece, bos, length, b = sequence_of(i, owner, first, cu, T, PER, PACKED)
    row = piece.to(gl.int64) * C
    count = (length - row).to(gl.int32)
    here = i.to(gl.int64) * HV + hv
    head = ((b * T + bos + row) * HV + hv) * K
    q += b * qb + (bos + row) * qt + (hv // GROUP).to(gl.int64) * qh
    k += b * kb + (bos + row) * kt + (hv // GROUP).to(gl.int64) * kh
    g += b * gb + (bos + row) * gt + hv.to(gl.int64) * gh

    type: gl.constexpr = g.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    gs = gl.allocate_shared_memory(type, [NK, C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], type))
    qs = gl.allocate_shared_memory(gl.bfloat16, [NK, C, BK], tile)
    ks = gl.allocate_shared_memory(gl.bfloat16, [NK, C, BK], tile)
    for ik in gl.static_range(NK):
        copy(gs.index(ik), g + ik * BK, gt, count, C, BK)
        copy(qs.index(ik), q + ik * BK, qt, count, C, BK)
        copy(ks.index(ik), k + ik * BK, kt, count, C, BK)
        async_copy.commit_group()

    acc: gl.constexpr = sums(C)
    s = gl.arange(0, C, gl.SliceLayout(0, acc))
    t = gl.arange(0, C, gl.SliceLayout(1, acc))
    one = gl.full((C, C), 1.0, gl.float32, acc)
    before = gl.where(s[None, :] <= t[:, None], one, 0.0)
    qw = gl.zeros((C, C), gl.float32, acc)
    rw = gl.zeros((C, C), gl.float32, acc)
    least = 0.0
    for ik in gl.static_range(NK):
        async_copy.wait_group(NK - 1 - ik)
        gl.thread_barrier()
        gate = gl.maximum(gs.index(ik).load(acc).to(gl.float32), -112.0) * 1.4426950408889634
        whole = gl.sum(gate, 0)
        gl.store(rates + here * K + ik * BK + s, gl.exp2(whole))
        least = gl.minimum(least, gl.min(whole, 0))
        G = totals(before, gate, C, BK)
        place = head + ik * BK
        if SCORES:
            c = whole * 0.5
            half = gl.exp2(c)[None, :]
            G = G - c[None, :]
            key = ks.index(ik).load(acc).to(gl.float32)
            right = key * gl.exp2(-G)
            wrote = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile, right.to(gl.bfloat16))
            fence_async_shared()
            spread(write + place, (right * half).to(gl.bfloat16), HV * K, count, C, BK)
            early = gl.exp2(G)
            key = key * early
            left_k = gl.convert_layout(key.to(gl.bfloat16), left(C))
            gl.thread_barrier()
            rw = issue(left_k, wrote.permute((1, 0)), rw, False)
            asked = qs.index(ik).load(acc).to(gl.float32) * early
            left_q = gl.convert_layout(asked.to(gl.bfloat16), left(C))
            qw = issue(left_q, wrote.permute((1, 0)), qw, False)
            spread(compare + place, (key * half).to(gl.bfloat16), HV * K, count, C, BK)
            spread(read + place, (asked * half).to(gl.bfloat16), HV * K, count, C, BK)
            rw, qw, left_k, left_q = warpgroup_mma_wait(0, [rw, qw, left_k, left_q])
            wrote._keep_alive()
            gl.thread_barrier()
        else:
            later = gl.exp2(totals(one - before, gate, C, BK))
            early = gl.exp2(G)
            key = ks.index(ik).load(acc).to(gl.float32)
            spread(write + place, (key * later).to(gl.bfloat16), HV * K, count, C, BK)
            spread(compare + place, (key * early).to(gl.bfloat16), HV * K, count, C, BK)
            asked = qs.index(ik).load(acc).to(gl.float32) * early
            spread(read + place, asked.to(gl.bfloat16), HV * K, count, C, BK)
    gl.store(ranges + here, least)
    if SCORES:
        square = here * (C * C)
        qw = gl.where(s[None, :] <= t[:, None], qw * scale, 0.0)
        spread(A + square, qw.to(gl.bfloat16), C, C, C, C)
        rw = gl.where(s[None, :] < t[:, None], rw, 0.0)
        gl.store(L + square + t[:, None] * C + s[None, :], rw, mask=s[None, :] // 16 <= t[:, None] // 16)
