"""Scores ``A`` and solved systems ``M`` of chunks in Gluon, for Hopper: both kernels of :mod:`.scores` in one.

A chunk's scores are products of a warpgroup, but its system is solved in many small steps, each waiting for the last: a warp
solves as fast as four. So a program takes four chunks: their ``L`` are made one after the other and stay in shared memory,
the last two in registers until queries and keys make room; then each warp solves one, as :func:`.scores.delta_solve_fwd` does.
Three programs share a processor: 168 registers a thread, 70 KB.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..lib.gates import FLOOR, LOG2E
from ..lib.indexing import head_pointer, items_there, locate_sequence
from ..lib.sm90 import (
    add,
    copy_layout,
    copy_rows_async,
    load_lengths,
    load_scalars,
    mma_async,
    mma_layout,
    scale_rows,
    store_rows,
    wait_for_predecessor,
)

__all__ = ["delta_scores_fwd_sm90", "join_pairs", "solve_and_store", "split_columns", "stack_rows"]


@gluon.constexpr_function
def block_product_layout(chunks):
    """Layout of products of blocks ``[chunks, …, 16]``: of four chunks a warp has one; of one, four warps share the block."""
    return gl.NVMMADistributedLayout([2, 0], [4, 1, 1] if chunks == 4 else [1, 2, 2], [1, 16, 8])


@gluon.jit
def split_columns(x):
    """Four parts of the columns of ``x [R, W]``."""
    W: gl.constexpr = x.shape[1] // 4
    even, odd = gl.split(gl.permute(gl.reshape(x, (x.shape[0], 2, 2, W)), (0, 3, 1, 2)))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return a, b, c, d


@gluon.jit
def join_pairs(x, N: gl.constexpr):
    """Pairs ``N`` of ``2 N`` tensors: each beside the one ``N`` places on, in a new last axis."""
    y = ()
    for i in gl.static_range(N):
        y = y + (gl.join(x[i], x[i + N]),)  # noqa: RUF005
    return y


@gluon.jit
def stack_rows(x, W: gl.constexpr):
    """One ``[4, W]`` of four ``[W]``."""
    return gl.reshape(gl.permute(join_pairs(join_pairs(x, 2), 1)[0], (1, 2, 0)), (4, W))


@gluon.jit
def solve_diagonal_blocks(own, beta):
    """Solved blocks of the diagonal, ``M`` of ``L [4, 16 · 16]``, row after row."""
    row: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    four: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    done = ()
    scaled = ()
    for i in gl.static_range(16):
        x = own.slice(i * 16, 16, 1).load(row)
        for j in gl.static_range(0, i, 4):
            factors = split_columns(own.slice(i * 16 + j, 4, 1).load(four))
            for n in gl.static_range(4):
                if j + n < i:
                    x -= gl.convert_layout(factors[n], row) * scaled[j + n]
        done = done + (x,)  # noqa: RUF005
        scaled = scaled + (x * beta.slice(i, 1, 1).load(row),)  # noqa: RUF005
    together = join_pairs(join_pairs(join_pairs(join_pairs(done, 8), 4), 2), 1)[0]
    return gl.reshape(gl.permute(together, (0, 2, 3, 4, 5, 1)), (4, 256))


@gluon.jit
def subtract_product(x, y, beta, z):
    """``x - y (beta z)`` of blocks ``y [chunks, …, 16], z [chunks, 16, 16]`` in shared memory and ``x`` in registers."""
    form: gl.constexpr = block_product_layout(y.shape[0])
    rows: gl.constexpr = gl.DotOperandLayout(0, form, 1)
    scaled = y.load(rows) * -beta.load(gl.SliceLayout(1, rows))[:, None, :]
    return mma_v2(scaled, z.load(gl.DotOperandLayout(1, form, 1)), x, "tf32")


@gluon.jit
def merge_blocks(P, betas):
    """Merge of solved blocks on the diagonal, from 16 to 32 and 64, of one chunk or four: ``M`` in the place of ``L``.

    Equations as in :func:`.scores.delta_solve_fwd`. ``P``: four columns of blocks, each ``[chunks, 64 · 16]``; ``betas
    [chunks, 64]``.
    """
    N: gl.constexpr = betas.shape[0]
    form: gl.constexpr = block_product_layout(N)
    first = P[0].reshape((N, 64, 16))
    second = P[1].reshape((N, 64, 16))
    third = P[2].reshape((N, 64, 16))
    fourth = P[3].reshape((N, 64, 16))
    M00 = first.slice(0, 16, 1)
    M10 = first.slice(16, 16, 1)
    M11 = second.slice(16, 16, 1)
    M22 = third.slice(32, 16, 1)
    M32 = third.slice(48, 16, 1)
    M33 = fourth.slice(48, 16, 1)
    b0 = betas.slice(0, 16, 1)
    b1 = betas.slice(16, 16, 1)
    b2 = betas.slice(32, 16, 1)
    b3 = betas.slice(48, 16, 1)
    Y10 = subtract_product(M10.load(form), M11, b1, M10)
    Y32 = subtract_product(M32.load(form), M33, b3, M32)
    M10.store(Y10)
    M32.store(Y32)
    Y10 = subtract_product(Y10, M10, b0, M00)
    Y32 = subtract_product(Y32, M32, b2, M22)
    M10.store(Y10)
    M32.store(Y32)
    lower = third.slice(32, 32, 1)  # [M22; M32]
    last = fourth.slice(32, 32, 1)  # [0; M33]
    Y0 = first.slice(32, 32, 1)
    Y1 = second.slice(32, 32, 1)
    x = subtract_product(subtract_product(Y0.load(form), lower, b2, first.slice(32, 16, 1)), last, b3, first.slice(48, 16, 1))
    y = subtract_product(subtract_product(Y1.load(form), lower, b2, second.slice(32, 16, 1)), last, b3, second.slice(48, 16, 1))
    Y0.store(x)
    Y1.store(y)
    x = subtract_product(subtract_product(x, Y0, b0, M00), Y1, b1, M10)
    y = subtract_product(y, Y1, b1, M11)
    Y0.store(x)
    Y1.store(y)


@gluon.jit
def allocate_block_columns(N: gl.constexpr, C: gl.constexpr):
    """Places for ``[C, C]`` of ``N`` chunks in four columns of blocks, and for their ``beta``."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    P0 = gl.allocate_shared_memory(gl.float32, [N, C * 16], plain)
    P1 = gl.allocate_shared_memory(gl.float32, [N, C * 16], plain)
    P2 = gl.allocate_shared_memory(gl.float32, [N, C * 16], plain)
    P3 = gl.allocate_shared_memory(gl.float32, [N, C * 16], plain)
    return (P0, P1, P2, P3), gl.allocate_shared_memory(gl.float32, [N, C], plain)


@gluon.jit
def store_block_columns(M, P, left, C: gl.constexpr):
    """Store of the first ``left`` chunks, from four columns of blocks each."""
    rows: gl.constexpr = P[0].shape[0] * C
    layout: gl.constexpr = copy_layout(16)
    r = gl.arange(0, rows, gl.SliceLayout(1, layout))
    c = gl.arange(0, 16, gl.SliceLayout(0, layout))
    for n in gl.static_range(4):
        x = P[n].reshape((rows, 16)).load(layout).to(M.dtype.element_ty)
        gl.store(M + (r[:, None] * C + 16 * n + c[None, :]), x, mask=(r < left * C)[:, None])


@gluon.jit
def solve_and_store(M, L, chunk_betas, left, C: gl.constexpr):
    """Solve of one chunk's ``L [C, C]`` and ``beta [C]``, ``M`` stored if ``left``; a warp solves a block on the diagonal."""
    P, betas = allocate_block_columns(1, C)
    block: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [1, 4], [1, 0])
    own = gl.allocate_shared_memory(gl.float32, [4, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    compared = split_columns(L)
    betas.store(gl.reshape(chunk_betas, (1, C)))
    for n in gl.static_range(4):
        P[n].store(gl.reshape(compared[n], (1, C * 16)))
    for n in gl.static_range(4):
        own.slice(n, 1).store(P[n].slice(n * 256, 256, 1).load(block))
    own.store(solve_diagonal_blocks(own, betas.reshape((4, 16))))
    for n in gl.static_range(4):
        P[n].slice(n * 256, 256, 1).store(own.slice(n, 1).load(block))
    merge_blocks(P, betas)
    store_block_columns(M, P, left, C)


@gluon.jit
def locate_chunk(item, COUNT, owner, first, cu, T, PER, HV, C: gl.constexpr, PACKED: gl.constexpr):
    """Place of the ``item``-th of ``COUNT`` pairs of chunk and value head: batch row, first token, tokens, value head, number.

    Without such a pair, tokens are not above 0.
    """
    last = gl.minimum(item, COUNT - 1)
    hv = last % HV
    i = last // HV
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    row = piece.to(gl.int64) * C
    return b, bos + row, gl.where(item < COUNT, (L - row).to(gl.int32), 0), hv, i.to(gl.int64) * HV + hv


@gluon.jit(do_not_specialize=["T", "PER", "N", "HV", "COUNT"])
def delta_scores_fwd_sm90(
    q, k, uq, uk, g, beta, A, M, rates, owner, first, cu, T, PER, N, HV, COUNT, scale,
    qb, qt, qh, kb, kt, kh, gb, gt, gh, bb, bt, bh,
    K: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr,
    PACKED: gl.constexpr, SPLIT: gl.constexpr, PREC: gl.constexpr, UNIT: gl.constexpr,
):  # fmt: skip
    """Scores and solved systems of four chunks a program.

    ``A`` and ``L`` are made chunk after chunk, while the next is copied; then all four are solved.
    """
    wait_for_predecessor()
    item = gl.program_id(0) * 4
    COUNT = items_there(COUNT, first, N, HV, PACKED)
    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
        if item >= COUNT:
            return
    NK: gl.constexpr = K // C
    ROWS: gl.constexpr = 6 if UNIT else 3
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    betas = gl.allocate_shared_memory(gl.float32, [4, C], plain)
    P = ()
    qs = ()
    ks = ()
    for n in gl.static_range(4):  # queries and keys where the last two chunks' columns come in the end
        room = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], tile)
        P = P + (room._reinterpret(gl.float32, [4, C * 16], plain),)  # noqa: RUF005
        if n < NK:
            qs = qs + (room.index(1),)  # noqa: RUF005
        elif n < 2 * NK:
            ks = ks + (room.index(1),)  # noqa: RUF005
    acc: gl.constexpr = mma_layout(C)
    s = gl.arange(0, C, gl.SliceLayout(0, acc))[None, :]
    t = gl.arange(0, C, gl.SliceLayout(1, acc))[:, None]
    j = gl.arange(0, C, gl.BlockedLayout([2], [32], [4], [0]))
    zeros = gl.zeros((C, C), gl.float32, acc)
    chunk_betas = ()
    decays = ()
    for w in gl.static_range(4):  # asked for at once, ahead of the copies
        b, row, count, hv, here = locate_chunk(item + w, COUNT, owner, first, cu, T, PER, HV, C, PACKED)
        chunk_betas = chunk_betas + (load_scalars(head_pointer(beta, b, row, hv, bb, bt, bh, 1), j, bt, count),)  # noqa: RUF005
        if GATE == 1:
            decays = decays + (load_scalars(head_pointer(g, b, row, hv, gb, gt, gh, 1), j, gt, count),)  # noqa: RUF005
    b, row, count, hv, here = locate_chunk(item, COUNT, owner, first, cu, T, PER, HV, C, PACKED)
    for n in gl.static_range(NK):
        copy_rows_async(ks[n], head_pointer(k, b, row, hv, kb, kt, kh, GROUP) + n * C, kt, count, C, C)
        copy_rows_async(qs[n], head_pointer(q, b, row, hv, qb, qt, qh, GROUP) + n * C, qt, count, C, C)
    async_copy.commit_group()
    betas.store(stack_rows(chunk_betas, C))
    held = ()
    for w in gl.static_range(4):
        b, row, count, hv, here = locate_chunk(item + w, COUNT, owner, first, cu, T, PER, HV, C, PACKED)
        if UNIT:
            lq = load_lengths(uq, j, b, row, hv, T, HV // GROUP, count, GROUP)
            lk = load_lengths(uk, j, b, row, hv, T, HV // GROUP, count, GROUP)
        if GATE == 1:
            bg = gl.maximum(decays[w], FLOOR, propagate_nan=tl.PropagateNan.ALL) * LOG2E
            G = gl.associative_scan(bg, 0, add)
            early = gl.exp2(G)
            late = gl.exp2(gl.sum(bg, 0) - G)
            gl.store(rates + here * (ROWS * C) + j, early, mask=count > 0)
            gl.store(rates + here * (ROWS * C) + C + j, late, mask=count > 0)
            gl.store(rates + here * (ROWS * C) + 2 * C + j, G, mask=count > 0)
        if UNIT:
            gl.store(rates + here * (ROWS * C) + 3 * C + j, lq * early if GATE == 1 else lq, mask=count > 0)
            gl.store(rates + here * (ROWS * C) + 4 * C + j, lk * early if GATE == 1 else lk, mask=count > 0)
            gl.store(rates + here * (ROWS * C) + 5 * C + j, lk * late if GATE == 1 else lk, mask=count > 0)
        square = here * (C * C)
        there = gl.where(count > 0, C, 0)
        async_copy.wait_group(0)
        if UNIT:  # here, and not the products: registers are what there is least of
            for n in gl.static_range(NK):
                scale_rows(ks[n], uk, b, row, hv, T, HV // GROUP, count, C, C, GROUP)
                scale_rows(qs[n], uq, b, row, hv, T, HV // GROUP, count, C, C, GROUP)
        fence_async_shared()
        gl.thread_barrier()
        kk = zeros
        qk = zeros
        for n in gl.static_range(NK):
            kk = mma_async(ks[n], ks[n].permute((1, 0)), kk, n == 0)
            qk = mma_async(qs[n], ks[n].permute((1, 0)), qk, n == 0)
        kk, qk = warpgroup_mma_wait(0, [kk, qk])
        gl.thread_barrier()  # every warp waits for its own rows of a product only
        if w < 3:
            b, row, count, hv, _ = locate_chunk(item + w + 1, COUNT, owner, first, cu, T, PER, HV, C, PACKED)
            for n in gl.static_range(NK):
                copy_rows_async(ks[n], head_pointer(k, b, row, hv, kb, kt, kh, GROUP) + n * C, kt, count, C, C)
                copy_rows_async(qs[n], head_pointer(q, b, row, hv, qb, qt, qh, GROUP) + n * C, qt, count, C, C)
            async_copy.commit_group()
        if GATE == 1:
            E = gl.convert_layout(G, gl.SliceLayout(1, acc))[:, None] - gl.convert_layout(G, gl.SliceLayout(0, acc))[None, :]
            D = gl.exp2(E)
            qk = qk * D
            kk = kk * D
        compared = split_columns(gl.where(s < t, kk, 0.0))
        if w < 2:
            for n in gl.static_range(4):
                P[n].slice(w, 1).store(gl.reshape(compared[n], (1, C * 16)))
        else:
            held = held + (compared,)  # noqa: RUF005
        store_rows(A + square, gl.where(s <= t, qk * scale, 0.0).to(A.dtype.element_ty), C, there, C, C)
    for w in gl.static_range(2):
        for n in gl.static_range(4):
            P[n].slice(2 + w, 1).store(gl.reshape(held[w][n], (1, C * 16)))
    blocks = ()
    for n in gl.static_range(4):
        blocks = blocks + (solve_diagonal_blocks(P[n].slice(n * 256, 256, 1), betas.slice(n * 16, 16, 1)),)  # noqa: RUF005
    for n in gl.static_range(4):
        P[n].slice(n * 256, 256, 1).store(blocks[n])
    merge_blocks(P, betas)
    store_block_columns(M + item.to(gl.int64) * (C * C), P, COUNT - item, C)
