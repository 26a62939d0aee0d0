"""All gradients of a chunk of ``dplr`` at once, in Gluon for Hopper: heads of 64, chunks that take plain products.

Rows are those of :mod:`.dplr_fused_sm90`, and ``h = e^c`` is half of what a chunk decays by; ``e`` are errors,
``y`` their adjoint, ``S`` the state before the chunk and ``dS'`` the gradient of the one after it::

    scores     dA = do eᵀ, dA' = do vᵀ, s ≤ t                      dN = y eᵀ, dN' = y vᵀ, s < t
    readers    dq̂ = do (h ∘ S)ᵀ + dA b̂ + dA' k̂                     dâ = y (h ∘ S)ᵀ + dN b̂ + dN' k̂
    writers    db̂ = e (h ∘ dS')ᵀ + dAᵀ q̂ + dNᵀ â                   dk̂ = v (h ∘ dS')ᵀ + dA'ᵀ q̂ + dN'ᵀ â
    values     dv = k̂ (h ∘ dS') + A'ᵀ do + N'ᵀ y
    gate       dg_j sums q̂ dq̂ - b̂ db̂ - k̂ dk̂ from j on, â dâ after j, and what passes through the chunk

Everything is asked for at the beginning. Matrices ``[C, C]`` are left operands in registers and, transposed, in shared memory,
which has room for two at a time.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..lib.indexing import head_pointer
from ..lib.sm90 import copy_rows_async, locate_chunk, mma_async, mma_layout, program_parts, store_or_add_rows, store_rows
from ..lib.sm90_gates import load_log2_gates, opaque_offset, store_split, sum_where
from ..lib.sm90_pipeline import opaque
from .rows_sm90 import (
    allocate_halves,
    as_left,
    centered_sums,
    copy_narrow_rows,
    load_wide_rows,
    lower_left,
    rounded,
    scale_rows,
    store_product,
    store_wide_rows,
)

__all__ = ["delta_dplr_chunk_bwd_sm90"]


@gluon.jit
def sum_neighbours(x, K: gl.constexpr):
    """Sums of those rows of a product's ``x [64, K]`` which one thread holds: the others are summed once, in the end."""
    return gl.sum(gl.reshape(x, (4, 2, 8, K)), 1)


class Rows(NamedTuple):
    """Rows of a chunk: decayed ``q, a, b, k``, and as they are ``v, do``, errors ``e`` and their adjoint ``y``."""

    q: gl.shared_memory_descriptor
    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    e: gl.shared_memory_descriptor
    y: gl.shared_memory_descriptor


class Results(NamedTuple):
    """Where a chunk's gradients go; rows of ``q, k`` lie ``stride_q`` apart, others as those of ``heads`` value heads."""

    q: gl.tensor
    a: gl.tensor
    b: gl.tensor
    k: gl.tensor
    v: gl.tensor
    g: gl.tensor
    stride_q: gl.tensor
    heads: gl.tensor


@gluon.jit
def copy_key_rows(
    rows, q, a, b, k, qb, qt, qh, at, bt, kb, kt, kh, batch, row, hv, count, C: gl.constexpr, K: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Begin to copy queries, keys, and ``a, b``, a head's, if they are in bfloat16; zeros from token ``count`` on."""
    copy_rows_async(rows.q, head_pointer(q, batch, row, hv, qb, qt, qh, GROUP), qt, count, C, K)
    copy_narrow_rows(rows.a, a, at, count, C, K)
    copy_narrow_rows(rows.b, b, bt, count, C, K)
    copy_rows_async(rows.k, head_pointer(k, batch, row, hv, kb, kt, kh, GROUP), kt, count, C, K)


@gluon.jit
def copy_value_rows(
    rows, v, do, errors, adjoint, vb, vt, vh, ob, ot, oh, batch, row, hv, head, HV, count, C: gl.constexpr, V: gl.constexpr
):  # fmt: skip
    """Begin to copy values, gradients of outputs, errors and their adjoint; zeros from token ``count`` on.

    ``head`` is the place of the first one among all tokens' heads.
    """
    copy_rows_async(rows.v, head_pointer(v, batch, row, hv, vb, vt, vh, 1), vt, count, C, V)
    copy_rows_async(rows.do, head_pointer(do, batch, row, hv, ob, ot, oh, 1), ot, count, C, V)
    copy_rows_async(rows.e, errors + head * V, HV * V, count, C, V)
    copy_rows_async(rows.y, adjoint + head * V, HV * V, count, C, V)


@gluon.jit
def results_at(
    dq, da, db, dk, dv, dg, token, hv, head, HV, K: gl.constexpr, V: gl.constexpr, TURNS: gl.constexpr
):  # fmt: skip
    """Where the gradients of a value head's tokens from ``token`` of all on go; ``TURNS`` heads share those of ``q, k``."""
    heads = HV // TURNS
    summed = (token * heads + hv // TURNS) * K
    return Results(dq + summed, da + head * K, db + head * K, dk + summed, dv + head * V, dg + head * K, heads * K, HV)


@gluon.jit
def factor(exponent, t, lo, hi, SPAN: gl.constexpr):
    """Factors ``2^exponent``; of a ``SPAN``, zero outside it."""
    x = gl.exp2(exponent)
    if SPAN:
        x = gl.where((t >= lo) & (t < hi), x, 0.0)
    return x


@gluon.jit
def span_gradients(
    rows, squares, S, dS, G, gate, half, results, lo, hi, count, TURN, scale, none, C: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, TURNS: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """Gradients of the tokens of a chunk, or of a ``SPAN`` of it; those before the span are left to the spans before.

    All copies but those of states are there; those are waited for.
    """
    acc: gl.constexpr = mma_layout(C)
    zeros = gl.zeros((C, C), gl.float32, acc)
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    sA, sL = squares.index(0), squares.index(1)

    # Values, of scores that are made again.
    A = mma_async(rows.q, rows.k.permute((1, 0)), zeros, True)
    L = mma_async(rows.a, rows.k.permute((1, 0)), zeros, True)
    A, L = warpgroup_mma_wait(0, [A, L])
    ahead = s + opaque(gl.to_tensor(0))  # masks are made again where they are needed, not held
    sA.store(rounded(gl.where(ahead <= t, A, 0.0)))
    sL.store(rounded(gl.where(ahead < t, L, 0.0)))
    wrote = as_left(rounded(rows.k.load(acc).to(gl.float32) * half), K)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    dvalue = mma_async(wrote, dS.permute((1, 0)), zeros, True)
    dvalue = mma_async(sA.permute((1, 0)), rows.do, dvalue, False)
    dvalue = mma_async(sL.permute((1, 0)), rows.y, dvalue, False)
    A = mma_async(rows.do, rows.e.permute((1, 0)), zeros, True)
    L = mma_async(rows.y, rows.e.permute((1, 0)), zeros, True)
    dvalue, A, L = warpgroup_mma_wait(0, [dvalue, A, L])
    store_rows(results.v, dvalue.to(results.v.dtype.element_ty), results.heads * V, count, C, V)
    gl.thread_barrier()

    # Readers.
    ahead = s + opaque(gl.to_tensor(0))
    A = lower_left(A, ahead <= t, C)
    L = lower_left(L, ahead < t, C)
    sA.store(gl.convert_layout(A, acc))
    sL.store(gl.convert_layout(L, acc))
    read = mma_async(rows.do, S, zeros, True)
    compared = mma_async(rows.y, S, zeros, True)
    through = sum_neighbours(S.load(acc).to(gl.float32) * dS.load(acc).to(gl.float32) * (half * half), K)
    read, compared = warpgroup_mma_wait(0, [read, compared])
    S._keep_alive()
    read = mma_async(A, rows.b, read * half, False)
    compared = mma_async(L, rows.b, compared * half, False)
    A2 = mma_async(rows.do, rows.v.permute((1, 0)), zeros, True)
    L2 = mma_async(rows.y, rows.v.permute((1, 0)), zeros, True)
    read, compared, A2, L2 = warpgroup_mma_wait(0, [read, compared, A2, L2])
    ahead = s + opaque(gl.to_tensor(0))
    A2 = lower_left(A2, ahead <= t, C)
    L2 = lower_left(L2, ahead < t, C)
    read = mma_async(A2, rows.k, read, False)
    compared = mma_async(L2, rows.k, compared, False)
    read, compared = warpgroup_mma_wait(0, [read, compared])
    behind = rows.a.load(acc).to(gl.float32) * compared
    store_product(results.a, compared * factor(G - gate, t, lo, hi, SPAN), results.heads * K, count, C, K)
    crossing = rows.q.load(acc).to(gl.float32) * read
    early = factor(G, t, lo, hi, SPAN) * scale
    store_or_add_rows(results.q, read * early, results.stride_q, count, TURN, C, K, TURNS)
    G += none

    # Writers. What a pair gives to its two tokens must cancel for gates outside: so both sides as they were rounded.
    fence_async_shared()
    gl.thread_barrier()
    wrote = warpgroup_mma_wait(0, [mma_async(rows.e, dS, zeros, True)]) * half
    through += sum_neighbours(rows.b.load(acc).to(gl.float32) * wrote, K)
    wrote = mma_async(sA.permute((1, 0)), rows.q, wrote, False)
    wrote = warpgroup_mma_wait(0, [mma_async(sL.permute((1, 0)), rows.a, wrote, False)])
    crossing -= rows.b.load(acc).to(gl.float32) * wrote
    store_product(results.b, wrote * factor(-G, t, lo, hi, SPAN), results.heads * K, count, C, K)
    G += none
    gl.thread_barrier()
    sA.store(gl.convert_layout(A2, acc))
    sL.store(gl.convert_layout(L2, acc))
    fence_async_shared()
    gl.thread_barrier()
    wrote = warpgroup_mma_wait(0, [mma_async(rows.v, dS, zeros, True)]) * half
    rows.v._keep_alive()
    dS._keep_alive()
    through += sum_neighbours(rows.k.load(acc).to(gl.float32) * wrote, K)
    wrote = mma_async(sA.permute((1, 0)), rows.q, wrote, False)
    wrote = warpgroup_mma_wait(0, [mma_async(sL.permute((1, 0)), rows.a, wrote, False)])
    squares._keep_alive()
    crossing -= rows.k.load(acc).to(gl.float32) * wrote
    rows.q._keep_alive()
    store_or_add_rows(results.k, wrote * factor(-G, t, lo, hi, SPAN), results.stride_q, count, TURN, C, K, TURNS)
    gl.thread_barrier()
    ahead = s + opaque(gl.to_tensor(0))
    crossing = sum_where(gl.where(ahead >= t, zeros + 1.0, 0.0), crossing + behind, C, K) - behind
    through = gl.convert_layout(gl.sum(gl.reshape(through, (C // 2, K)), 0), gl.SliceLayout(0, acc))[None, :]
    store_rows(results.g, (crossing + through).to(results.g.dtype.element_ty), results.heads * K, count, C, K)


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "TURN", "COUNT"])
def delta_dplr_chunk_bwd_sm90(
    q, r, w, k, v, do, g, uq, uk, A_log, bias, beta, errors, adjoint, dA, dL, dA2, dL2, states, dstates, dq, dr, dw, dk, dv,
    dg, parts, dbeta, log_decays, owner, first, cu, T, PER, N, HV, TURN, COUNT, scale, number,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, rb, rt, rh, wb, wt, wh, vb, vt, vh, ob, ot, oh, bb, bt, bh, As, bs, bias_k,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    TURNS: gl.constexpr, BETA: gl.constexpr, DPLR: gl.constexpr, PACKED: gl.constexpr, STRONG: gl.constexpr,
    SPLIT: gl.constexpr, RANGE: gl.constexpr, PREC: gl.constexpr, DT: gl.constexpr, UNIT: gl.constexpr, MAP: gl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of one value head; nothing of strong chunks. ``r, w`` are ``a, b`` here."""
    gl.static_assert(K == V and K == C)
    heads = HV // TURNS
    _, h, i = program_parts(1, heads)
    hv = h * TURNS + TURN
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if gl.load(owner + i) >= N:
            return
    here = i.to(gl.int64) * HV + hv
    if gl.load(log_decays + here) <= -RANGE:
        return
    b, row, count = locate_chunk(i, owner, first, cu, T, PER, C, PACKED)
    head = (b * T + row) * HV + hv
    none = opaque_offset(i).to(gl.float32)  # factors are made again where they are needed, not held

    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    type: gl.constexpr = g.dtype.element_ty
    bg = gl.allocate_shared_memory(type, [C, K], gl.NVMMASharedLayout.get_default_for([C, K], type))
    rows = gl.allocate_shared_memory(gl.bfloat16, [4, C, K], tile)
    bq, br, bw, bk = rows.index(0), rows.index(1), rows.index(2), rows.index(3)
    values = gl.allocate_shared_memory(gl.bfloat16, [4, C, V], tile)
    chunk = Rows(bq, br, bw, bk, values.index(0), values.index(1), values.index(2), values.index(3))
    r = head_pointer(r, b, row, hv, rb, rt, rh, 1)
    w = head_pointer(w, b, row, hv, wb, wt, wh, 1)
    copy_rows_async(bg, head_pointer(g, b, row, hv, gb, gt, gh, 1), gt, count, C, K)
    async_copy.commit_group()
    copy_key_rows(chunk, q, r, w, k, qb, qt, qh, rt, wt, kb, kt, kh, b, row, hv, count, C, K, GROUP)
    async_copy.commit_group()
    copy_value_rows(chunk, v, do, errors, adjoint, vb, vt, vh, ob, ot, oh, b, row, hv, head, HV, count, C, V)
    async_copy.commit_group()
    xr = load_wide_rows(r, rt, count, C, K)
    xw = load_wide_rows(w, wt, count, C, K)

    acc: gl.constexpr = mma_layout(C)
    high = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    rest = gl.allocate_shared_memory(gl.bfloat16, [C, K], tile)
    halves, whole = allocate_halves(C)
    async_copy.wait_group(2)
    gl.thread_barrier()
    gate = load_log2_gates(bg, K)
    store_split(high, rest, gate)
    fence_async_shared()
    gl.thread_barrier()
    G, c = centered_sums(halves, whole, high, rest, C, K)
    high._keep_alive()
    rest._keep_alive()
    halves._keep_alive()
    whole._keep_alive()
    half = gl.convert_layout(gl.exp2(c), gl.SliceLayout(0, acc))[None, :]
    gl.thread_barrier()
    S = gl.allocate_shared_memory(gl.bfloat16, [V, K], tile)
    dS = gl.allocate_shared_memory(gl.bfloat16, [V, K], tile)
    copy_rows_async(S, states + here * (K * V), K, V, V, K)
    copy_rows_async(dS, dstates + here * (K * V), K, V, V, K)
    async_copy.commit_group()
    store_wide_rows(br, r, xr)
    store_wide_rows(bw, w, xw)
    async_copy.wait_group(2)
    gl.thread_barrier()
    late = gl.exp2(-G)
    scale_rows(bk, late, C, K)
    scale_rows(bw, late, C, K)
    scale_rows(bq, gl.exp2(G) * scale, C, K)
    scale_rows(br, gl.exp2(G - gate), C, K)  # reads before its own gate
    G += none
    fence_async_shared()
    gl.thread_barrier()
    squares = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], tile)
    results = results_at(dq, dr, dw, dk, dv, dg, b * T + row, hv, head, HV, K, V, TURNS)
    span_gradients(
        chunk, squares, S, dS, G, gate, half, results, 0, C, count, TURN, scale, none, C, K, V, TURNS, False
    )  # fmt: skip
    rows._keep_alive()
    values._keep_alive()
