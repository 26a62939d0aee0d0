"""Scores, solved systems and the state of ``dplr`` in one kernel, in Gluon for Hopper: nothing of a chunk goes through memory.

For heads of 64 and sequences and heads enough to fill the device. A program walks one head of one sequence with its state
``[K, V]`` in registers, and two programs share a multiprocessor: while one waits the other multiplies.

A *span* is a run of tokens inside a chunk that decays by less than ``2^RANGE`` in every channel, or a single token: a whole
chunk, unless its gates are strong. Everything is measured from half of what a span decays by, the state too. With ``G`` the
sum of the gates from the span's start, ``c`` half of its last row and ``h = e^c``::

    rows      q̂ = scale q ∘ e^{G - c}    â = a ∘ e^{G⁻ - c}    b̂ = b ∘ e^{c - G}    k̂ = k ∘ e^{c - G}      G⁻ before the token
    scores    A = q̂ b̂ᵀ, A' = q̂ k̂ᵀ, s ≤ t                     N = â b̂ᵀ, N' = â k̂ᵀ, s < t
    errors    r = â (h ∘ S) + N' v                            e = r + (I - N)⁻¹ N r
    outputs   o = q̂ (h ∘ S) + A' v + A e                      S' = h ∘ (h ∘ S + k̂ᵀ v + b̂ᵀ e)

So rows serve scores and state alike, and left operands of products come from registers. ``b̂, k̂`` are zero outside the span;
what other rows hold there reaches nothing.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..lib.indexing import head_pointer, locate_segment, state_tile
from ..lib.sm90 import mma_async, mma_layout, store_layout, wait_for_predecessor
from ..lib.sm90_gates import load_log2_gates, store_split
from ..lib.sm90_pipeline import copy_tile, opaque, store_buffer
from .rows_sm90 import allocate_halves, as_left, centered_sums, load_wide_rows, lower_left, store_wide_rows
from .solve_sm90 import allocate_scratch, solve_system

__all__ = ["delta_dplr_fused_fwd_sm90"]


class Operands(NamedTuple):
    """What chunks bring, from a sequence's first token on, with strides from token to token."""

    q: gl.tensor
    a: gl.tensor
    b: gl.tensor
    k: gl.tensor
    v: gl.tensor
    g: gl.tensor
    qt: gl.tensor
    at: gl.tensor
    bt: gl.tensor
    kt: gl.tensor
    vt: gl.tensor
    gt: gl.tensor


class Tiles(NamedTuple):
    """Where operands of a chunk are copied to."""

    q: gl.shared_memory_descriptor
    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    g: gl.shared_memory_descriptor


@gluon.jit
def allocate_tiles(type: gl.constexpr, C: gl.constexpr, K: gl.constexpr):
    """Places for a chunk's operands; gates have a ``type`` of their own."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    q = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    a = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    b = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    k = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    v = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    g = gl.allocate_shared_memory(type, [C, K], gl.NVMMASharedLayout.get_default_for([C, K], type))
    return Tiles(q, a, b, k, v, g)


@gluon.jit
def copy_operands(tiles, operands, row, limit, KEYS: gl.constexpr, C: gl.constexpr, K: gl.constexpr):
    """Begin to copy gates, queries and, of ``KEYS``, keys from ``row`` on, and ``a, b`` if they are in bfloat16; zeros past
    ``limit``.
    """
    copy_tile(tiles.g, operands.g, row, operands.gt, limit, C, K)
    copy_tile(tiles.q, operands.q, row, operands.qt, limit, C, K)
    if KEYS:
        copy_tile(tiles.k, operands.k, row, operands.kt, limit, C, K)
    if operands.a.dtype.element_ty == gl.bfloat16:
        copy_tile(tiles.a, operands.a, row, operands.at, limit, C, K)
    if operands.b.dtype.element_ty == gl.bfloat16:
        copy_tile(tiles.b, operands.b, row, operands.bt, limit, C, K)


@gluon.jit
def load_scaled(buffer, factors, W: gl.constexpr):
    """Rows ``buffer ∘ factors`` as bfloat16."""
    return (buffer.load(mma_layout(W)).to(gl.float32) * factors).to(gl.bfloat16)


@gluon.jit
def cut_span(G, gate, c, lo, C: gl.constexpr, RANGE: gl.constexpr):
    """The end of a span from ``lo`` on, if its gates are strong before the chunk's end; and what is left of its gates.

    ``G`` is measured from ``c``, half of all gates' sum.
    """
    acc: gl.constexpr = mma_layout(C)
    hi = gl.to_tensor(C)
    if gl.min(c, 0) <= -0.5 * RANGE:
        t = gl.arange(0, C, gl.SliceLayout(1, acc))
        G += gl.convert_layout(c, gl.SliceLayout(0, acc))[None, :]
        beyond = (gl.min(G, 1) <= -RANGE) & (t >= lo)
        hi = gl.maximum(gl.min(gl.where(beyond, t, C), 0), lo + 1)
        before = (t < hi)[:, None]
        gate = gl.where(before, gate, 0.0)
        half = gl.sum(gate, 0) * 0.5
        G = gl.where(before, G - half[None, :], half[None, :])
        c = gl.convert_layout(half, gl.SliceLayout(1, acc))
    return hi, G, gate, c


@gluon.jit
def store_span(p, x, stride, lo, hi, C: gl.constexpr, W: gl.constexpr):
    """Store rows ``lo … hi`` of a product's ``x [C, W]``, 16 bytes a thread."""
    layout: gl.constexpr = store_layout(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    there = ((r >= lo) & (r < hi))[:, None]
    gl.store(p + (r[:, None] * stride + columns[None, :]), gl.convert_layout(x.to(p.dtype.element_ty), layout), mask=there)


@gluon.jit(do_not_specialize=["T", "HV"])
def delta_dplr_fused_fwd_sm90(
    q, a, b, k, v, g, start, end, states, errors, out, chunk_first, cu, T, HV, scale,
    qb, qt, qh, ab, at, ah, bb, bt, bh, kb, kt, kh, vb, vt, vh, gb, gt, gh, sn, sh, sk, sv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, RANGE: gl.constexpr, PACKED: gl.constexpr,
    START: gl.constexpr, END: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Outputs of one value head of one sequence, and the state after it; if ``KEEP``, that before every chunk, and errors."""
    gl.static_assert(K == V and K == C)
    wait_for_predecessor()
    hv = gl.program_id(0) % HV
    i = gl.program_id(0) // HV
    _, bos, L, n, _, high = locate_segment(i, None, None, cu, T, 1, 0, C, PACKED, True)
    limit = L.to(gl.int32)
    operands = Operands(
        head_pointer(q, n, bos, hv, qb, qt, qh, GROUP), head_pointer(a, n, bos, hv, ab, at, ah, 1),
        head_pointer(b, n, bos, hv, bb, bt, bh, 1), head_pointer(k, n, bos, hv, kb, kt, kh, GROUP),
        head_pointer(v, n, bos, hv, vb, vt, vh, 1), head_pointer(g, n, bos, hv, gb, gt, gh, 1), qt, at, bt, kt, vt, gt,
    )  # fmt: skip
    head = ((n * T + bos) * HV + hv) * V
    out += head
    if KEEP:
        errors += head
        if PACKED:
            before = gl.load(chunk_first + i).to(gl.int64)
        else:
            before = n * ((T + C - 1) // C)
        states += (before * HV + hv) * (K * V)

    acc: gl.constexpr = mma_layout(C)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    zeros = gl.zeros((C, C), gl.float32, acc)
    S = zeros
    if START:
        S = S + gl.load(state_tile(start + i.to(gl.int64) * sn + hv.to(gl.int64) * sh, t, s, sk, sv)).to(gl.float32)
    tiles = allocate_tiles(g.dtype.element_ty, C, K)
    halves, whole = allocate_halves(C)
    M = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, zeros.to(gl.bfloat16))  # above its diagonal nobody writes
    writers = gl.allocate_shared_memory(gl.bfloat16, [2, C, K], tile)
    bw, bk = writers.index(0), writers.index(1)

    chunk = gl.to_tensor(0)
    lo = gl.to_tensor(0)
    copy_operands(tiles, operands, chunk, limit, True, C, K)
    async_copy.commit_group()
    copy_tile(tiles.v, operands.v, chunk, vt, limit, C, V)
    async_copy.commit_group()
    wide = load_wide_rows(operands.a, at, limit, C, K)
    store_wide_rows(tiles.a, operands.a, wide)
    wide = load_wide_rows(operands.b, bt, limit, C, K)
    store_wide_rows(tiles.b, operands.b, wide)
    while chunk < high:
        row = chunk * C
        async_copy.wait_group(1)
        gl.thread_barrier()
        gate = load_log2_gates(tiles.g, K)
        if lo > 0:
            gate = gl.where(t >= lo, gate, 0.0)
        store_split(bw, bk, gate)
        fence_async_shared()
        gl.thread_barrier()
        G, c = centered_sums(halves, whole, bw, bk, C, K)
        hi, G, gate, c = cut_span(G, gate, c, lo, C, RANGE)
        half = gl.exp2(c)[:, None]
        last = (hi >= C) | (row + hi >= limit)
        following = row + C

        late = gl.exp2(-G)
        if (lo > 0) | (hi < C):
            late = gl.where((t >= lo) & (t < hi), late, 0.0)
        gl.thread_barrier()  # the gates' terms were read by all
        bw.store(load_scaled(tiles.b, late, K))
        bk.store(load_scaled(tiles.k, late, K))
        asked = as_left(load_scaled(tiles.q, gl.exp2(G) * scale, K), K)
        read = as_left(load_scaled(tiles.a, gl.exp2(G - gate), K), K)
        fence_async_shared()
        gl.thread_barrier()
        if last:
            copy_operands(tiles, operands, following, limit, True, C, K)
        async_copy.commit_group()
        N = mma_async(read, bw.permute((1, 0)), zeros, True)
        A = mma_async(asked, bw.permute((1, 0)), zeros, True)
        N2 = mma_async(read, bk.permute((1, 0)), zeros, True)
        A2 = mma_async(asked, bk.permute((1, 0)), zeros, True)
        wide = load_wide_rows(operands.a + following.to(gl.int64) * at, at, gl.where(last, limit - following, 0), C, K)
        N, A, N2, A2 = warpgroup_mma_wait(0, [N, A, N2, A2])
        ahead = s + opaque(gl.to_tensor(0))  # masks are made again in every chunk, not held
        A = lower_left(A, ahead <= t, C)
        A2 = lower_left(A2, ahead <= t, C)
        N2 = lower_left(N2, ahead < t, C)
        scratch = allocate_scratch(C)
        solve_system(M, gl.where(ahead < t, N, 0.0), scratch, C)
        if last:
            store_wide_rows(tiles.a, operands.a, wide)
        gl.thread_barrier()

        state = gl.allocate_shared_memory(gl.bfloat16, [K, V], tile)
        if KEEP:  # noqa: SIM102 - one is for the compiler
            if lo == 0:
                state.permute((1, 0)).store(S.to(gl.bfloat16))
                gl.thread_barrier()
                store_buffer(states + chunk.to(gl.int64) * (HV * K * V), state, K, V, V, K)
                gl.thread_barrier()
        S = S * half
        state.store(S.to(gl.bfloat16))
        async_copy.wait_group(1)
        fence_async_shared()
        gl.thread_barrier()
        r = mma_async(N2, tiles.v, zeros, True)
        r = mma_async(read, state, r, False)
        o = mma_async(asked, state, zeros, True)
        o = mma_async(A2, tiles.v, o, False)
        S = mma_async(bk.permute((1, 0)), tiles.v, S, False)
        wide = load_wide_rows(operands.b + following.to(gl.int64) * bt, bt, gl.where(last, limit - following, 0), C, K)
        r = warpgroup_mma_wait(3, [r])
        wrote = gl.allocate_shared_memory(gl.bfloat16, [C, V], tile, r.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        e = mma_async(M, wrote, r, False)
        o, S, e = warpgroup_mma_wait(0, [o, S, e])
        state._keep_alive()
        gl.thread_barrier()
        wrote.store(e.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        if KEEP:
            store_span(errors + row.to(gl.int64) * (HV * V), e, HV * V, lo, gl.minimum(hi, limit - row), C, V)
        if last:
            copy_tile(tiles.v, operands.v, following, vt, limit, C, V)
        async_copy.commit_group()
        o = mma_async(A, wrote, o, False)
        S = mma_async(bw.permute((1, 0)), wrote, S, False)
        if last:
            store_wide_rows(tiles.b, operands.b, wide)
        o, S = warpgroup_mma_wait(0, [o, S])
        wrote._keep_alive()
        S = S * half
        store_span(out + row.to(gl.int64) * (HV * V), o, HV * V, lo, gl.minimum(hi, limit - row), C, V)
        chunk = gl.where(last, chunk + 1, chunk)
        lo = gl.where(last, 0, hi)
        gl.thread_barrier()
    if END:
        gl.store(end + ((i.to(gl.int64) * HV + hv) * (K * V) + t * V + s), S)
