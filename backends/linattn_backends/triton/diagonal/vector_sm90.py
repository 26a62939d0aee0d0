"""Kernels of :mod:`.vector` in Gluon, for Hopper: chunks under strong gates, bfloat16, 64 or 128 key channels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..lib.indexing import head_pointer, items_there, locate_sequence
from ..lib.sm90 import copy_layout, copy_rows_async, mma_layout, store_rows
from ..lib.sm90_gates import (
    any_strong,
    copy_chunk_async,
    load_log2_gates,
    opaque_offset,
    strong_gradients,
    strong_scores,
)

__all__ = ["diagonal_vector_intra_strong_bwd_sm90", "diagonal_vector_scores_strong_fwd_sm90"]


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def diagonal_vector_scores_strong_fwd_sm90(
    q, k, g, A, read, write, stops, owner, first, cu, T, PER, N, HV, COUNT, scale, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, GATE_GROUP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As :func:`.vector.diagonal_vector_scores_fwd` if ``STRONG``, by levels down to pairs of neighbours: ``stops`` stay 0."""
    NK: gl.constexpr = K // 64  # tiles that the plain products took, each with a mark
    pid = gl.program_id(0)
    COUNT = items_there(COUNT, first, N, HV, PACKED)
    if any_strong(stops, pid, COUNT, NK, 1, C // 2 - 1):
        for item in range(pid, COUNT, gl.num_programs(0)):
            least = C
            for ik in gl.static_range(NK):
                least = gl.minimum(least, gl.load(stops + item * NK + ik))
            if least < C // 2:
                none = opaque_offset(item)
                gs, terms, qs, ks, here, head, count = copy_chunk_async(
                    item, q, k, g, owner, first, cu, T, PER, HV, qb, qt + none, qh, kb, kt + none, kh, gb, gt + none, gh,
                    K, C, K, GROUP, GATE_GROUP, PACKED
                )  # fmt: skip
                async_copy.wait_group(0)
                gl.thread_barrier()
                gate = load_log2_gates(gs[0], K)
                made, _ = strong_scores(
                    read + head, write + head, write + head, gate, terms[0], qs[0], ks[0], scale, 1.0, (HV + none) * K, count,
                    C, K, False
                )  # fmt: skip
                store_rows(A + here * (C * C), (made * scale).to(gl.bfloat16), C, C, C, C)
                gl.thread_barrier()


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def diagonal_vector_intra_strong_bwd_sm90(
    q, k, g, dA, own, met, stops, dq, dk, dg, owner, first, cu, T, PER, N, HV, COUNT, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, GATE_GROUP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """As :func:`.vector.diagonal_vector_intra_bwd` if ``STRONG``."""
    pid = gl.program_id(0)
    COUNT = items_there(COUNT, first, N, K // BK * HV, PACKED)
    if any_strong(stops, pid, COUNT, 1, 1, C // 2 - 1):
        for item in range(pid, COUNT, gl.num_programs(0)):
            if gl.load(stops + item) < C // 2:
                none = opaque_offset(item)
                intra_tile(
                    item, q, k, g, dA, own, met, dq, dk, dg, owner, first, cu, T, PER, HV + none,
                    qb, qt + none, qh, kb, kt + none, kh, gb, gt + none, gh,
                    K, C, BK, GROUP, GATE_GROUP, PACKED
                )  # fmt: skip
                gl.thread_barrier()


@gluon.jit
def intra_tile(
    item, q, k, g, dA, own, met, dq, dk, dg, owner, first, cu, T, PER, HV, qb, qt, qh, kb, kt, kh, gb, gt, gh,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, GATE_GROUP: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """``dq, dk, dg [C, BK]`` of one chunk; the first two hold what passes through states."""
    NK: gl.constexpr = K // BK
    ik = item % NK
    hv = item // NK % HV
    i = item // (NK * HV)
    _, piece, bos, length, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    row = piece.to(gl.int64) * C
    count = (length - row).to(gl.int32)
    at = i.to(gl.int64) * HV + hv
    place = ((b * T + bos + row) * HV + hv) * K + ik * BK

    acc: gl.constexpr = mma_layout(C)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BK], gl.bfloat16)
    type: gl.constexpr = g.dtype.element_ty
    passed: gl.constexpr = dq.dtype.element_ty
    bg = gl.allocate_shared_memory(type, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], type))
    bq = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile)
    bk = gl.allocate_shared_memory(gl.bfloat16, [C, BK], tile)
    bdq = gl.allocate_shared_memory(passed, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], passed))
    bdk = gl.allocate_shared_memory(passed, [C, BK], gl.NVMMASharedLayout.get_default_for([C, BK], passed))
    copy_rows_async(bg, head_pointer(g, b, bos + row, hv, gb, gt, gh, GATE_GROUP) + ik * BK, gt, count, C, BK)
    copy_rows_async(bq, head_pointer(q, b, bos + row, hv, qb, qt, qh, GROUP) + ik * BK, qt, count, C, BK)
    copy_rows_async(bk, head_pointer(k, b, bos + row, hv, kb, kt, kh, GROUP) + ik * BK, kt, count, C, BK)
    copy_rows_async(bdq, dq + place, HV * K, count, C, BK)
    copy_rows_async(bdk, dk + place, HV * K, count, C, BK)
    async_copy.commit_group()
    weights = gl.load(own + at * C + gl.arange(0, C, gl.SliceLayout(1, acc)))[:, None]
    through = gl.load(met + at * K + ik * BK + gl.arange(0, BK, gl.SliceLayout(0, acc)))
    lines: gl.constexpr = copy_layout(C)
    t = gl.arange(0, C, gl.SliceLayout(1, lines))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, lines))[None, :]
    square = dA + at * (2 * C * C) + t * C + s
    pairs = gl.load(square) + gl.load(square + C * C)
    mirrored = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile, pairs.to(gl.bfloat16))
    async_copy.wait_group(0)
    gl.thread_barrier()
    bdq, bdk, bdg = strong_gradients(
        load_log2_gates(bg, BK), bq, bk, mirrored, mirrored, weights, bdq.load(acc).to(gl.float32), None,
        bdk.load(acc).to(gl.float32), through, C, BK, False
    )  # fmt: skip
    store_rows(dq + place, bdq.to(passed), HV * K, count, C, BK)
    store_rows(dk + place, bdk.to(passed), HV * K, count, C, BK)
    store_rows(dg + place, bdg.to(dg.dtype.element_ty), HV * K, count, C, BK)
