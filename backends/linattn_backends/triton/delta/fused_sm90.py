"""Scores, solved systems and the state of the delta families in one kernel, in Gluon for Hopper: nothing is kept of a chunk.

For at most a scalar gate, where there are sequences and value heads enough to fill the device. A program walks one head of one
sequence with its whole state, ``[V, K]``, in the registers of two warpgroups, each with a tile of 64 value channels, as in
:mod:`.state_sm90`. A third makes scores ``A`` and solved systems ``M`` of the chunks to come (:mod:`.scores`) and hands them
on in shared memory; the fourth copies what chunks bring. Walks store outputs. Memory sees operands, outputs and the states
before and after, each once. Where sequences are short a program walks several, as :mod:`..lib.sm90_walks` has it. With ``A,
M`` of :mod:`.scores` and ``x = beta ∘ e``, products take ``A beta`` and ``-M beta``, and ``e`` itself::

    e = r + (-M beta) r        o = scale (q ∘ e^G) S + (A beta) e        S' = γ S + (beta k ∘ e^{G_C - G})ᵀ e

``-M beta = (I - N)⁻¹ N`` with ``N = -L beta``: what is solved knows no ``beta`` of its own. A warp has 16 rows of the scores,
four blocks, and solves its part in registers; only what is another warp's comes through shared memory.

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
from ..lib.sm90 import add, mma_async, mma_layout, wait_for_predecessor
from ..lib.sm90_pipeline import copy_tile
from ..lib.sm90_walks import ask_bounds, bounds
from .scores_sm90 import join_pairs, split_columns, stack_rows
from .state_sm90 import Form, Rings, Way, forward_mma_partition, many_mma_partition
from .walks_sm90 import Walk

__all__ = ["delta_fused_fwd_sm90"]


class Operands(NamedTuple):
    """What chunks bring, from the first token of one sequence, or of all, on, with strides from token to token."""

    q: gl.tensor
    k: gl.tensor
    v: gl.tensor
    qt: gl.tensor
    kt: gl.tensor
    vt: gl.tensor


class Scalars(NamedTuple):
    """Numbers a token, from the first of one sequence, or of all, on: gates, ``beta``, reciprocals of two lengths."""

    g: gl.tensor | gl.constexpr
    beta: gl.tensor
    uq: gl.tensor | gl.constexpr
    uk: gl.tensor | gl.constexpr
    gt: gl.tensor
    bt: gl.tensor
    ut: gl.tensor


class Scratch(NamedTuple):
    """What warps hand one another: blocks of a system that is solved, factors of scores, and numbers of the chunk to come."""

    solved: gl.shared_memory_descriptor
    beside: gl.shared_memory_descriptor
    between: gl.shared_memory_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    columns: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    coming: gl.shared_memory_descriptor


class Steps(NamedTuple):
    """Barriers of a place of the rings: operands are there; scores too; all is read, and outputs are stored."""

    copied: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
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
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(copied.index(stage), count=128)
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    return Steps(copied, ready, free)


@gluon.jit
def load_numbers(p, row, j, stride, count):
    """Numbers of a chunk's tokens ``j``, from ``row`` on, past the first cache, which is small here."""
    at = p + row.to(gl.int64) * stride + j.to(gl.int64) * stride
    return gl.load(at, mask=j < count, other=0.0, cache_modifier=".cg").to(gl.float32)


@gluon.jit
def load_chunk_scalars(scalars, row, limit, form):
    """``beta``, gates and reciprocal lengths of the chunk from ``row`` on, zeros past ``limit``, a number a thread; of lengths,
    what is there.
    """
    j = gl.arange(0, form.C, gl.BlockedLayout([1], [32], [4], [0]))
    count = limit - row
    loaded = (load_numbers(scalars.beta, row, j, scalars.bt, count),)
    if form.GATE == 1:
        loaded = loaded + (load_numbers(scalars.g, row, j, scalars.gt, count),)  # noqa: RUF005
    if form.UNIT:
        loaded = loaded + (load_numbers(scalars.uq, row, j, scalars.ut, count),)  # noqa: RUF005
        loaded = loaded + (load_numbers(scalars.uk, row, j, scalars.ut, count),)  # noqa: RUF005
    return loaded


@gluon.jit
def store_numbers(buffer, loaded, C: gl.constexpr):
    """Store of a chunk's numbers, one kind after the other."""
    for i in gl.static_range(len(loaded)):
        buffer.slice(i * C, C).store(loaded[i])


@gluon.jit
def take_numbers(buffer, i, there: gl.constexpr, C: gl.constexpr):
    """The ``i``-th kind of a chunk's numbers, for every warp; zeros if there are none."""
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    if there:
        return buffer.slice(i * C, C).load(layout)
    return gl.zeros((C,), gl.float32, layout)


@gluon.jit
def copy_chunks(operands, left, right, steps, count, row, limit, done, form):
    """Copies of what ``count`` chunks of a sequence bring, its tokens ``row … limit``, to places that become free."""
    K: gl.constexpr = form.K
    C: gl.constexpr = form.C
    BV: gl.constexpr = form.BV
    for n in range(count):
        stage = (done + n) % form.STAGES
        mbarrier.wait(steps.free.index(stage), (((done + n) // form.STAGES) & 1) ^ 1)
        here = row + n * C
        copy_tile(left.k.index(stage), operands.k, here, operands.kt, limit, C, K)
        copy_tile(left.q.index(stage), operands.q, here, operands.qt, limit, C, K)
        copy_tile(left.v.index(stage), operands.v, here, operands.vt, limit, C, BV)
        copy_tile(right.v.index(stage), operands.v + BV, here, operands.vt, limit, C, BV)
        async_copy.mbarrier_arrive(steps.copied.index(stage), increment_count=False)


@gluon.jit
def memory_partition(operands, left, right, steps, way, form):
    """The warpgroup of memory."""
    copy_chunks(operands, left, right, steps, way.high, way.low * form.C, way.limit, 0, form)


@gluon.jit
def allocate_scratch(C: gl.constexpr):
    """Places for a chunk's system."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    blocks: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    solved = gl.allocate_shared_memory(gl.float32, [4, 16, 16], blocks)
    beside = gl.allocate_shared_memory(gl.float32, [4, 16, 16], blocks)
    between = gl.allocate_shared_memory(gl.float32, [4, 16, 16], blocks)
    left = gl.allocate_shared_memory(gl.float32, [4, 16, 16], blocks)
    right = gl.allocate_shared_memory(gl.float32, [4, 16, 16], blocks)
    columns = gl.allocate_shared_memory(gl.float32, [4, C], plain)
    numbers = gl.allocate_shared_memory(gl.float32, [C // 4, 16], plain)
    coming = gl.allocate_shared_memory(gl.float32, [4 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Scratch(solved, beside, between, left, right, columns, numbers, coming)


@gluon.constexpr_function
def block_layout():
    """The layout of blocks ``[4, 16, 16]``, a warp each: as a product has its results, and, whatever it is, its operands."""
    return gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])


@gluon.jit
def column_blocks(x):
    """Four columns of blocks of a product's ``x [64, 64]``: a warp has the rows of its own."""
    y = split_columns(x)
    blocks = ()
    for n in gl.static_range(4):
        blocks = blocks + (gl.convert_layout(gl.reshape(y[n], (4, 16, 16)), block_layout()),)  # noqa: RUF005
    return blocks


@gluon.jit
def block_rows():
    """Numbers of blocks, of rows in them, and of columns."""
    form: gl.constexpr = block_layout()
    n = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, form)))[:, None, None]
    r = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, form)))[None, :, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, form)))[None, None, :]
    return n, r, c


@gluon.jit
def on_diagonal(x):
    """Of columns of blocks those on the diagonal."""
    n, _, _ = block_rows()
    return gl.where(n < 2, gl.where(n == 0, x[0], x[1]), gl.where(n == 2, x[2], x[3]))


@gluon.jit
def rounded(x):
    """``x`` plus half of the last place that a product takes, which cuts off the rest: the nearest number of tf32."""
    return gl.inline_asm_elementwise("add.u32 $0, $1, 0x1000;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def times_transposed(x, y, z):
    """``x yᵀ + z`` of blocks in registers: as the left operand lies, so does the transposed of the right."""
    form: gl.constexpr = block_layout()
    right = gl.convert_layout(gl.permute(rounded(y), (0, 2, 1)), gl.DotOperandLayout(1, form, 2))
    return mma_v2(gl.convert_layout(rounded(x), gl.DotOperandLayout(0, form, 2)), right, z, "tf32")


@gluon.jit
def invert_blocks(N):
    """``X = (I - N)⁻¹`` of blocks ``N [4, 16, 16]``, and its transposed, from two rows to four, eight and sixteen.

    With ``L`` between two neighbours, ``X' = X + X L X``. Products have one operand transposed, so ``Xᵀ`` is made, too.
    """
    _, r, c = block_rows()
    zeros = gl.zeros((4, 16, 16), gl.float32, block_layout())
    one = gl.where(r == c, 1.0, zeros)
    X = gl.where(r // 2 == c // 2, N, 0.0) + one
    Xt = times_transposed(one, X, zeros)
    for i in gl.static_range(1, 4):
        L = gl.where((r >> i != c >> i) & (r >> (i + 1) == c >> (i + 1)), N, 0.0)
        Pt = times_transposed(Xt, L, zeros)
        made = times_transposed(X, Pt, X)
        Xt = times_transposed(Pt, X, Xt)
        X = made
    return X, Xt


@gluon.jit
def load_block(blocks, i):
    """Block ``i`` of ``blocks [4, 16, 16]`` in shared memory, for every warp."""
    return gl.broadcast(blocks.slice(i, 1).load(block_layout()), gl.zeros((4, 16, 16), gl.float32, block_layout()))[0]


@gluon.jit
def leave_rows(N, scratch):
    """Blocks below the diagonal, three columns, left in scratch for :func:`merge_rows`."""
    n, _, _ = block_rows()
    scratch.beside.store(gl.where(n == 1, N[0], gl.where(n == 3, N[2], 0.0)))
    scratch.left.store(gl.where(n >= 2, N[0], 0.0))
    scratch.right.store(gl.where(n >= 2, N[1], 0.0))


@gluon.jit
def merge_rows(X, Xt, scratch):
    """``M = (I - N)⁻¹ N`` of a chunk: its blocks below the diagonal, in three columns, of ``X`` on it and ``N`` in scratch.

    A warp has a row of blocks. From 16 rows to 32, and then to 64, as in :func:`invert_blocks`; what is another warp's comes,
    transposed, from scratch.
    """
    form: gl.constexpr = block_layout()
    n, _, _ = block_rows()
    zeros = gl.zeros((4, 16, 16), gl.float32, form)
    scratch.solved.store(Xt)
    first = load_block(scratch.solved, 0)
    second = load_block(scratch.solved, 1)
    before = gl.where(n < 2, first, load_block(scratch.solved, 2))
    Pt = times_transposed(before, scratch.beside.load(form), zeros)
    between = times_transposed(X, Pt, zeros)
    right = scratch.right.load(form)
    left = times_transposed(first, scratch.left.load(form), zeros)
    scratch.between.store(times_transposed(Pt, X, zeros))
    left = times_transposed(load_block(scratch.between, 1), right, left)
    right = times_transposed(second, right, zeros)
    scratch.left.store(left)
    scratch.right.store(right)
    last = gl.where(n == 3, between, 0.0)
    left = times_transposed(last, load_block(scratch.left, 2), times_transposed(X, left, zeros))
    right = times_transposed(last, load_block(scratch.right, 2), times_transposed(X, right, zeros))
    return gl.where(n == 1, between, left), right, last


@gluon.jit
def add_gates(g, beta, lk, scratch, form):
    """Sums of a chunk's gates, and the last; for the scores' columns, left in scratch, ``beta`` and the decay since then.

    Rows of a block of 16 and the tokens before it decay to where the block begins and on from there, so neither leaves range.
    """
    C: gl.constexpr = form.C
    two: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    across: gl.constexpr = gl.SliceLayout(0, two)
    written = beta
    if form.UNIT:
        written = beta * lk
    s = gl.arange(0, C, across)[None, :]
    begin = 16 * gl.arange(0, 4, gl.SliceLayout(1, two))[:, None]
    columns = gl.convert_layout(written, across)[None, :]
    G = gl.maximum(g, FLOOR, propagate_nan=tl.PropagateNan.ALL) * LOG2E
    last = gl.sum(G, 0)
    if form.GATE == 1:
        reached = gl.sum(gl.where(s <= begin, gl.convert_layout(G, across)[None, :], 0.0), 1)
        G = gl.associative_scan(G, 0, add)
        columns = columns * gl.exp2(reached[:, None] - gl.convert_layout(G, across)[None, :])
    scratch.columns.store(gl.where(s < begin, columns, 0.0))
    return G, last, written


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
def block_factors(scratch, scale, form):
    """What scores are multiplied by: since their blocks began; of queries and of keys; and in blocks on the diagonal."""
    rows: gl.constexpr = gl.SliceLayout(2, block_layout())
    columns: gl.constexpr = gl.SliceLayout(1, block_layout())
    sums = scratch.numbers.slice(0, 4)
    own = scratch.numbers.slice(4, 4).load(columns)[:, None, :]
    decay = gl.full((4, 16), 1.0, gl.float32, rows)
    if form.GATE == 1:
        G = sums.load(rows)
        decay = gl.exp2(G - sums.slice(0, 1, 1).load(rows))
        own = own * gl.exp2(G[:, :, None] - sums.load(columns)[:, None, :])
    asked = gl.full((4, 16), 1.0, gl.float32, rows) * scale
    read = gl.full((4, 16), -1.0, gl.float32, rows)
    if form.UNIT:
        asked = asked * scratch.numbers.slice(8, 4).load(rows)
        read = read * scratch.numbers.slice(12, 4).load(rows)
    return decay, asked[:, :, None], read[:, :, None], own


@gluon.jit
def below_diagonal(x, rows, scratch):
    """Columns of blocks ``x`` times ``rows`` and the columns' factors: zeros where no block is below the diagonal."""
    columns: gl.constexpr = gl.SliceLayout(1, block_layout())
    made = ()
    for n in gl.static_range(3):
        made = made + (x[n] * rows * scratch.columns.slice(16 * n, 16, 1).load(columns)[:, None, :],)  # noqa: RUF005
    return made


@gluon.jit
def store_blocks(buffer, own, below):
    """Store of a lower triangle, of its blocks on the diagonal and the columns of blocks below it."""
    C: gl.constexpr = buffer.shape[0]
    n, _, _ = block_rows()
    columns = ()
    for i in gl.static_range(4):
        columns = columns + (gl.where(n == i, own, below[i] if i < 3 else 0.0).to(gl.bfloat16),)  # noqa: RUF005
    square = gl.permute(join_pairs(join_pairs(columns, 2), 1)[0], (0, 1, 3, 4, 2))
    buffer.store(gl.convert_layout(gl.reshape(square, (C, C)), mma_layout(C)))


@gluon.jit
def scores_partition(scalars, rings, steps, scratch, way, form, scale):
    """The scores' warpgroup: ``A``, ``M`` and rates of the chunks to come."""
    C: gl.constexpr = form.C
    store_numbers(scratch.coming, load_chunk_scalars(scalars, way.low * C, way.limit, form), C)
    for n in range(way.high):
        chunk_scores(n, scalars, (way.low + n + 1) * C, way.limit, rings, steps, scratch, form, scale)


@gluon.jit
def chunk_scores(n, scalars, row, limit, rings, steps, scratch, form, scale):
    """``A``, ``M`` and rates of the ``n``-th chunk; the numbers of the one after it, from ``row`` on, are loaded meanwhile."""
    C: gl.constexpr = form.C
    acc: gl.constexpr = mma_layout(C)
    LENGTHS: gl.constexpr = 1 + form.GATE
    _, r, c = block_rows()
    zeros = gl.zeros((C, C), gl.float32, acc)
    stage = n % form.STAGES
    mbarrier.wait(steps.copied.index(stage), (n // form.STAGES) & 1)
    fence_async_shared()
    kk = mma_async(rings.k.index(stage), rings.k.index(stage).permute((1, 0)), zeros, True)
    beta = take_numbers(scratch.coming, 0, True, C)
    g = take_numbers(scratch.coming, 1, form.GATE == 1, C)
    lq = take_numbers(scratch.coming, LENGTHS, form.UNIT, C)
    lk = take_numbers(scratch.coming, LENGTHS + 1, form.UNIT, C)
    G, last, written = add_gates(g, beta, lk, scratch, form)
    store_rates(rings.rates.index(stage), G, last, beta, lq, lk, form, scale)
    scratch.numbers.store(gl.reshape(stack_rows((G, written, lq, lk), C), (16, 16)))
    loaded = load_chunk_scalars(scalars, row, limit, form)
    decay, asked, read, own = block_factors(scratch, scale, form)
    kk = warpgroup_mma_wait(0, [kk])
    x = column_blocks(kk)
    N = gl.where(c < r, on_diagonal(x) * own * read, 0.0)
    leave_rows(below_diagonal(x, decay[:, :, None] * read, scratch), scratch)
    qk = mma_async(rings.q.index(stage), rings.k.index(stage).permute((1, 0)), zeros, True)
    X, Xt = invert_blocks(N)
    qk = warpgroup_mma_wait(0, [qk])
    store_numbers(scratch.coming, loaded, C)
    y = column_blocks(qk)
    own = gl.where(c <= r, on_diagonal(y) * own * asked, 0.0)
    store_blocks(rings.A.index(stage), own, below_diagonal(y, decay[:, :, None] * asked, scratch))
    store_blocks(rings.M.index(stage), gl.where(r == c, 0.0, X), merge_rows(X, Xt, scratch))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(steps.ready.index(stage), count=1)


@gluon.jit
def many_memory_partition(operands, left, right, steps, walk, form, PACKED: gl.constexpr):
    """The warpgroup of memory, of several sequences."""
    done = 0
    asked = ask_bounds(walk.cu, walk.T, walk.i, walk.N, PACKED)
    for i in range(walk.i, walk.N, walk.STEP):
        row, limit = bounds(asked, walk.T, PACKED)
        asked = ask_bounds(walk.cu, walk.T, i + walk.STEP, walk.N, PACKED)
        count = (limit - row + form.C - 1) // form.C
        copy_chunks(operands, left, right, steps, count, row, limit, done, form)
        done += count


@gluon.jit
def many_scores_partition(scalars, rings, steps, scratch, walk, form, scale, PACKED: gl.constexpr):
    """The scores' warpgroup, of several sequences: of those behind an empty one the first chunk's numbers are not ``known``.

    Bounds are asked for two sequences ahead, because the numbers of the next one's first chunk are loaded in this one.
    """
    C: gl.constexpr = form.C
    done = 0
    bos, eos = bounds(ask_bounds(walk.cu, walk.T, walk.i, walk.N, PACKED), walk.T, PACKED)
    asked = ask_bounds(walk.cu, walk.T, walk.i + walk.STEP, walk.N, PACKED)
    known = (eos < bos).to(gl.int32)  # 0, which only sums of chunks begin at, so that the compiled code can be looked into
    for i in range(walk.i, walk.N, walk.STEP):
        row = bos
        limit = eos
        bos, eos = bounds(asked, walk.T, PACKED)
        asked = ask_bounds(walk.cu, walk.T, i + 2 * walk.STEP, walk.N, PACKED)
        count = (limit - row + C - 1) // C
        if (known == 0) & (limit > row):
            store_numbers(scratch.coming, load_chunk_scalars(scalars, row, limit, form), C)
        for n in range(count):
            coming = row + (n + 1) * C
            within = coming < limit
            coming = gl.where(within, coming, bos)
            chunk_scores(done + n, scalars, coming, gl.where(within, limit, eos), rings, steps, scratch, form, scale)
        known = gl.where(count > 0, (eos > bos).to(gl.int32), known)
        done += count


@gluon.jit(do_not_specialize=["T", "HV", "N", "STEP"])
def delta_fused_fwd_sm90(
    q, k, v, uq, uk, g, beta, start, end, out, cu, T, HV, N, STEP, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, gb, gt, gh, bb, bt, bh, sn, sh, sk, sv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr, GATE: gl.constexpr,
    UNIT: gl.constexpr, PACKED: gl.constexpr, START: gl.constexpr, END: gl.constexpr, MANY: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Outputs of one value head of a sequence, and the state after it; of ``MANY``, ``STEP`` apart, whose tokens lie one after
    the other.
    """
    wait_for_predecessor()
    hv = gl.program_id(0) % HV
    i = gl.program_id(0) // HV
    if MANY:
        bos = i.to(gl.int64) * 0
        b = bos
    else:
        _, bos, L, b, _, high = locate_segment(i, None, None, cu, T, 1, 0, C, PACKED, True)
    if START:
        start += hv.to(gl.int64) * sh
        if not MANY:
            start += i.to(gl.int64) * sn
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
    left, right = allocate_tiles(form)
    steps = allocate_steps(STAGES)
    scratch = allocate_scratch(C)
    if MANY:
        walk = Walk(i, STEP, N, cu, None, T, T)
        gl.warp_specialize(
            [
                (many_mma_partition, (start, sn, sk, sv, end, left, steps, walk, form, scale, hv, HV, 0, out, PACKED)),
                (
                    many_mma_partition,
                    (start, sn, sk, sv, end, right, steps, walk, form, scale, hv, HV, 1, out + BV, PACKED),
                ),
                (many_scores_partition, (scalars, left, steps, scratch, walk, form, scale, PACKED)),
                (many_memory_partition, (operands, left, right, steps, walk, form, PACKED)),
            ],
            [4, 4, 4],
            REGISTERS,
        )  # fmt: skip
    else:
        at = (i.to(gl.int64) * HV + hv) * (K * V)
        way = Way(at * 0, gl.to_tensor(0), high, L.to(gl.int32), hv, HV)
        gl.warp_specialize(
            [
                (forward_mma_partition, (start, sk, sv, end, left, steps, way, form, scale, at, 0, out)),
                (forward_mma_partition, (start, sk, sv, end, right, steps, way, form, scale, at, 1, out + BV)),
                (scores_partition, (scalars, left, steps, scratch, way, form, scale)),
                (memory_partition, (operands, left, right, steps, way, form)),
            ],
            [4, 4, 4],
            REGISTERS,
        )
    steps.copied._keep_alive()
    steps.ready._keep_alive()
    steps.free._keep_alive()
