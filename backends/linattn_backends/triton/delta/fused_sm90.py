"""Scores, solved systems and the state of the delta families in one kernel, in Gluon for Hopper: nothing is kept of a chunk.

For at most a scalar gate, where there are sequences and value heads enough to fill the device. A program walks one head of one
sequence with its whole state, ``[V, K]``, in the registers of two warpgroups, each with a tile of 64 value channels, as in
:mod:`.state_sm90`. A third makes scores ``A`` and solved systems ``M`` of the chunks to come (:mod:`.scores`) and hands them on
in shared memory; the fourth stores outputs and copies what chunks bring. Memory sees operands, outputs and the states before
and after, each once. With ``A, M`` of :mod:`.scores` and ``x = beta ∘ e``, products take ``A beta`` and ``-M beta``, and ``e``
itself::

    e = r + (-M beta) r        o = scale (q ∘ e^G) S + (A beta) e        S' = γ S + (beta k ∘ e^{G_C - G})ᵀ e

``-M beta = (I - N)⁻¹ N`` with ``N = -L beta``: what is solved knows no ``beta`` of its own.

Registers are what there is least of. Where a warpgroup that multiplies needs more than its part, the assembler begins no
product before the last has ended, in all of the kernel.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ..lib.gates import FLOOR, LOG2E
from ..lib.indexing import head_pointer, locate_segment
from ..lib.sm90 import add, copy_layout, load_scalars, mma_async, mma_layout, wait_for_predecessor
from .scores_sm90 import join_pairs, split_columns, stack_rows
from .state_sm90 import Form, Rings, Way, forward_mma_partition, nth_chunk

__all__ = ["delta_fused_fwd_sm90"]


class Operands(NamedTuple):
    """What chunks bring, from a sequence's first token on, with strides from token to token."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    qt: gl.tensor
    kt: gl.tensor
    vt: gl.tensor


class Scalars(NamedTuple):
    """Numbers a token, from a sequence's first on: gates and ``beta``, reciprocal lengths of queries and keys."""

    g: gl.tensor | gl.constexpr
    beta: gl.tensor
    uq: gl.tensor | gl.constexpr
    uk: gl.tensor | gl.constexpr
    gt: gl.tensor
    bt: gl.tensor
    ut: gl.tensor


class Scratch(NamedTuple):
    """Where a chunk's system is solved: blocks on the diagonal, those below, two columns of blocks; and numbers a token."""

    diagonal: gl.shared_memory_descriptor
    below: gl.shared_memory_descriptor
    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor


class Steps(NamedTuple):
    """Barriers of a place of the rings: operands are there; scores too; outputs are made, and all is read, which is one."""

    copied: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    made: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


@gluon.jit
def allocate_tiles(form):
    """Rings of ``STAGES`` chunks, for each of two tiles of the state; they differ in values only."""
    K: gl.constexpr = form.K
    C: gl.constexpr = form.C
    STAGES: gl.constexpr = form.STAGES
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    tiles_c: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], tiles_k)
    q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], tiles_k)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, form.BV], tiles_c)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, form.BV], tiles_c)
    M = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tiles_c)
    A = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tiles_c)
    rates = gl.allocate_shared_memory(gl.float32, [STAGES, form.RATES], line)
    return Rings(k, k, k, M, rates, rates, left, q, A, A, A, k), Rings(k, k, k, M, rates, rates, right, q, A, A, A, k)


@gluon.jit
def allocate_steps(STAGES: gl.constexpr):
    """Barriers of the rings' places, which one warpgroup fills and two use up."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    copied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(copied.index(stage), count=128)
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(made.index(stage), count=4)
    return Steps(copied, ready, made, made)


@gluon.jit
def opaque(x):
    """``x``, which the compiler takes for another number in every step of a loop: it keeps nothing that is made of it."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def tile_at(p, row, stride, limit, C: gl.constexpr, W: gl.constexpr):
    """Places of rows ``[C, W]`` of an array at ``p``, from ``row`` on, and which of them are there; made anew in every step."""
    layout: gl.constexpr = copy_layout(W)
    r = opaque(gl.to_tensor(0)) + gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    return p + row.to(gl.int64) * stride + (r[:, None] * stride + columns[None, :]), (r < limit - row)[:, None]


@gluon.jit
def copy_tile(buffer, p, row, stride, limit, C: gl.constexpr, W: gl.constexpr):
    """Begin to copy rows to ``buffer [C, W]``, and zeros past ``limit``."""
    places, there = tile_at(p, row, stride, limit, C, W)
    async_copy.async_copy_global_to_shared(buffer, places, mask=there)


@gluon.jit
def store_tile(buffer, p, row, stride, limit, C: gl.constexpr, W: gl.constexpr):
    """Store rows of ``buffer [C, W]`` up to ``limit``."""
    places, there = tile_at(p, row, stride, limit, C, W)
    gl.store(places, buffer.load(copy_layout(W)), mask=there)


@gluon.jit
def memory_partition(operands, out, left, right, steps, way, form):
    """The warpgroup of memory: outputs of a chunk, which stand where its values did, give their place to a chunk to come."""
    K: gl.constexpr = form.K
    C: gl.constexpr = form.C
    BV: gl.constexpr = form.BV
    stride = way.HV * form.V
    for n in range(way.high + form.STAGES):
        stage = n % form.STAGES
        if n >= form.STAGES:
            row = nth_chunk(n - form.STAGES, way, form) * C
            mbarrier.wait(steps.made.index(stage), ((n // form.STAGES) & 1) ^ 1)
            store_tile(left.v.index(stage), out, row, stride, way.limit, C, BV)
            store_tile(right.v.index(stage), out + BV, row, stride, way.limit, C, BV)
            gl.thread_barrier()
        if n < way.high:
            row = nth_chunk(n, way, form) * C
            copy_tile(left.k.index(stage), operands.k, row, operands.kt, way.limit, C, K)
            copy_tile(left.q.index(stage), operands.q, row, operands.qt, way.limit, C, K)
            copy_tile(left.v.index(stage), operands.v, row, operands.vt, way.limit, C, BV)
            copy_tile(right.v.index(stage), operands.v + BV, row, operands.vt, way.limit, C, BV)
            async_copy.mbarrier_arrive(steps.copied.index(stage), increment_count=False)


@gluon.jit
def allocate_scratch(C: gl.constexpr):
    """Places for a chunk's system."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    diagonal = gl.allocate_shared_memory(gl.float32, [4, 256], plain)
    below = gl.allocate_shared_memory(gl.float32, [C, 16], plain)
    first = gl.allocate_shared_memory(gl.float32, [C, 16], plain)
    second = gl.allocate_shared_memory(gl.float32, [C, 16], plain)
    numbers = gl.allocate_shared_memory(gl.float32, [4 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Scratch(diagonal, below, first, second, numbers)


@gluon.jit
def substitute_rows(own):
    """``(I - L)⁻¹ L`` of blocks ``L [4, 16 · 16]``, row after row; a warp has one."""
    row: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    four: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    done = ()
    for i in gl.static_range(16):
        x = own.slice(i * 16, 16, 1).load(row)
        for j in gl.static_range(0, i, 4):
            factors = split_columns(own.slice(i * 16 + j, 4, 1).load(four))
            for n in gl.static_range(4):
                if j + n < i:
                    x += gl.convert_layout(factors[n], row) * done[j + n]
        done = done + (x,)  # noqa: RUF005
    together = join_pairs(join_pairs(join_pairs(join_pairs(done, 8), 4), 2), 1)[0]
    return gl.reshape(gl.permute(together, (0, 2, 3, 4, 5, 1)), (4, 256))


@gluon.jit
def join_columns(x, y):
    """``x, y [R, W]`` beside one another."""
    return gl.reshape(gl.permute(gl.join(x, y), (0, 2, 1)), (x.shape[0], 2 * x.shape[1]))


@gluon.jit
def add_product(x, y, z, form: gl.constexpr):
    """``x + y z`` of blocks, ``y`` in registers and ``z`` in shared memory."""
    return mma_v2(y, z.load(gl.DotOperandLayout(1, form, 1)), x, "tf32")


@gluon.jit
def solve_system(M, L, scratch, C: gl.constexpr):
    """``M = (I - L)⁻¹ L`` of one chunk: blocks of 16 row by row, then merged to 32 and 64. ``M`` holds zeros above them.

    With ``M₁, M₂`` of two neighbours and ``L₂₁`` between them, ``M₂₁ = (I + M₂) L₂₁ (I + M₁)``.
    """
    pairs: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 1, 2], [1, 16, 8])
    halves: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    pairs_left: gl.constexpr = gl.DotOperandLayout(0, pairs, 1)
    left: gl.constexpr = gl.DotOperandLayout(0, halves, 1)
    tile: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    compared = split_columns(L)
    block = (gl.arange(0, C, gl.SliceLayout(1, compared[0].type.layout)) // 16)[:, None]
    D = scratch.diagonal.reshape((C, 16))
    E = scratch.below
    P = scratch.first
    R = scratch.second
    upper = gl.where(block == 0, compared[0], compared[1])
    D.store(gl.where(block < 2, upper, gl.where(block == 2, compared[2], compared[3])))
    E.store(gl.where(block < 2, compared[0], compared[2]))
    P.store(compared[0])
    R.store(compared[1])
    scratch.diagonal.store(substitute_rows(scratch.diagonal))
    tops = D.reshape((2, 32, 16)).slice(0, 16, 1)
    bottoms = D.reshape((2, 32, 16)).slice(16, 16, 1)
    between = E.reshape((2, 32, 16)).slice(16, 16, 1)
    made = E.reshape((2, 32, 16)).slice(0, 16, 1)
    x = add_product(between.load(pairs), bottoms.load(pairs_left), between, pairs)
    made.store(x)
    between.store(add_product(x, made.load(pairs_left), tops, pairs))
    there = (gl.arange(0, 32, gl.SliceLayout(1, left)) < 16)[:, None]
    diagonal = D.slice(32, 32).load(left)
    U = gl.where(there, diagonal, E.slice(32, 32).load(left))
    W = gl.where(there, 0.0, diagonal)
    x = add_product(add_product(P.slice(32, 32).load(halves), U, P.slice(32, 16), halves), W, P.slice(48, 16), halves)
    y = add_product(add_product(R.slice(32, 32).load(halves), U, R.slice(32, 16), halves), W, R.slice(48, 16), halves)
    P.slice(0, 32).store(x)
    R.slice(0, 32).store(y)
    above = (gl.arange(0, 32, gl.SliceLayout(1, tile)) < 16)[:, None]
    for n in gl.static_range(2):
        own = D.slice(32 * n, 32).load(tile)
        pair = join_columns(gl.where(above, own, E.slice(32 * n, 32).load(tile)), gl.where(above, 0.0, own))
        M.slice(32 * n, 32).slice(32 * n, 32, 1).store(pair.to(gl.bfloat16))
    Y = R.slice(0, 32).load(left)
    x = add_product(add_product(x, P.slice(0, 32).load(left), D.slice(0, 16), halves), Y, E.slice(16, 16), halves)
    y = add_product(y, Y, D.slice(16, 16), halves)
    M.slice(32, 32).slice(0, 32, 1).store(join_columns(x, y).to(gl.bfloat16))


@gluon.jit
def load_numbers(p, row, j, stride, count):
    """Numbers of a chunk's tokens ``j``, from ``row`` of the sequence on."""
    return load_scalars(p + row.to(gl.int64) * stride, j, stride, count)


@gluon.jit
def load_chunk_scalars(scalars, chunk, j, way, form):
    """Gates, ``beta`` and reciprocal lengths of a chunk; zeros past the end, and for what is not there."""
    row = chunk * form.C
    count = way.limit - row
    beta = load_numbers(scalars.beta, row, j, scalars.bt, count)
    g = gl.zeros_like(beta)
    lq = gl.zeros_like(beta)
    lk = gl.zeros_like(beta)
    if form.GATE == 1:
        g = load_numbers(scalars.g, row, j, scalars.gt, count)
    if form.UNIT:
        lq = load_numbers(scalars.uq, row, j, scalars.ut, count)
        lk = load_numbers(scalars.uk, row, j, scalars.ut, count)
    return beta, g, lq, lk


@gluon.jit
def store_rates(rates, G, last, beta, lq, lk, form, scale):
    """Store of what a chunk's products are multiplied by, of sums of gates ``G``, their ``last``, ``beta`` and lengths."""
    C: gl.constexpr = form.C
    early = gl.exp2(G)
    late = gl.exp2(last - G)
    asked = early
    read = early
    if form.UNIT:
        asked = lq * early
        read = lk * early
        late = lk * late
    rates.store(gl.reshape(stack_rows((asked * scale, read * -1.0, beta * late, early), C), (4 * C,)))


@gluon.jit
def scores_partition(scalars, rings, steps, scratch, way, form, scale):
    """The scores' warpgroup: ``A``, ``M`` and rates of the chunks to come."""
    C: gl.constexpr = form.C
    acc: gl.constexpr = mma_layout(C)
    by_row: gl.constexpr = gl.SliceLayout(1, acc)
    by_column: gl.constexpr = gl.SliceLayout(0, acc)
    s = gl.arange(0, C, by_column)[None, :]
    t = gl.arange(0, C, by_row)[:, None]
    j = gl.arange(0, C, gl.BlockedLayout([2], [32], [4], [0]))
    zeros = gl.zeros((C, C), gl.float32, acc)
    sums = scratch.numbers.slice(0, C)
    betas = scratch.numbers.slice(C, C)
    for place in gl.static_range(form.STAGES):
        rings.M.index(place).store(gl.zeros((C, C), gl.bfloat16, acc))
    beta, g, lq, lk = load_chunk_scalars(scalars, nth_chunk(0, way, form), j, way, form)
    for n in range(way.high):
        stage = n % form.STAGES
        mbarrier.wait(steps.copied.index(stage), (n // form.STAGES) & 1)
        fence_async_shared()
        kk = mma_async(rings.k.index(stage), rings.k.index(stage).permute((1, 0)), zeros, True)
        qk = mma_async(rings.q.index(stage), rings.k.index(stage).permute((1, 0)), zeros, True)
        bg = gl.maximum(g, FLOOR, propagate_nan=tl.PropagateNan.ALL) * LOG2E
        G = bg
        if form.GATE == 1:
            G = gl.associative_scan(bg, 0, add)
        store_rates(rings.rates.index(stage), G, gl.sum(bg, 0), beta, lq, lk, form, scale)
        scratch.numbers.store(gl.reshape(stack_rows((G, beta, lq, lk), C), (4 * C,)))
        beta, g, lq, lk = load_chunk_scalars(scalars, nth_chunk(n + 1, way, form), j, way, form)
        kk, qk = warpgroup_mma_wait(0, [kk, qk])
        if form.UNIT:
            lengths = scratch.numbers.slice(3 * C, C)
            qk = qk * (scratch.numbers.slice(2 * C, C).load(by_row)[:, None] * lengths.load(by_column)[None, :])
            kk = kk * (lengths.load(by_row)[:, None] * lengths.load(by_column)[None, :])
        D = betas.load(by_column)[None, :]
        if form.GATE == 1:
            D = D * gl.exp2(sums.load(by_row)[:, None] - sums.load(by_column)[None, :])
        rings.A.index(stage).store((gl.where(s <= t, qk * D, 0.0) * scale).to(gl.bfloat16))
        solve_system(rings.M.index(stage), gl.where(s < t, kk * (D * -1.0), 0.0), scratch, C)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(steps.ready.index(stage), count=1)


@gluon.jit(do_not_specialize=["T", "HV"])
def delta_fused_fwd_sm90(
    q, k, v, uq, uk, g, beta, start, end, out, cu, T, HV, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, gb, gt, gh, bb, bt, bh, sn, sh, sk, sv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr, GATE: gl.constexpr,
    UNIT: gl.constexpr, PACKED: gl.constexpr, START: gl.constexpr, END: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Outputs of one value head of one sequence, and the state after it."""
    wait_for_predecessor()
    hv = gl.program_id(0) % HV
    i = gl.program_id(0) // HV
    _, bos, L, b, _, high = locate_segment(i, None, None, cu, T, 1, 0, C, PACKED, True)
    at = (i.to(gl.int64) * HV + hv) * (K * V)
    if START:
        start += i.to(gl.int64) * sn + hv.to(gl.int64) * sh
    out += ((b * T + bos) * HV + hv) * V
    operands = Operands(
        head_pointer(q, b, bos, hv, qb, qt, qh, GROUP), head_pointer(k, b, bos, hv, kb, kt, kh, GROUP),
        head_pointer(v, b, bos, hv, vb, vt, vh, 1), qt, kt, vt,
    )  # fmt: skip
    beta = head_pointer(beta, b, bos, hv, bb, bt, bh, 1)
    heads = HV // GROUP
    if GATE == 1:
        g = head_pointer(g, b, bos, hv, gb, gt, gh, 1)
    if UNIT:
        uq = head_pointer(uq, b, bos, hv, T * heads, heads, 1, GROUP)
        uk = head_pointer(uk, b, bos, hv, T * heads, heads, 1, GROUP)
    scalars = Scalars(g, beta, uq, uk, gt, bt, heads)

    form = Form(K, V, C, BV, GATE, 0, False, UNIT, STAGES, False, True, False, False, START, END, True)
    way = Way(at * 0, gl.to_tensor(0), high, L.to(gl.int32), hv, HV)
    left, right = allocate_tiles(form)
    steps = allocate_steps(STAGES)
    scratch = allocate_scratch(C)
    gl.warp_specialize(
        [
            (forward_mma_partition, (start, sk, sv, end, left, steps, way, form, scale, at, 0)),
            (forward_mma_partition, (start, sk, sv, end, right, steps, way, form, scale, at, 1)),
            (scores_partition, (scalars, left, steps, scratch, way, form, scale)),
            (memory_partition, (operands, out, left, right, steps, way, form)),
        ],
        [4, 4, 4],
        REGISTERS,
    )
    steps.copied._keep_alive()
    steps.ready._keep_alive()
    steps.made._keep_alive()
