"""The delta families' state, carried across chunks, in Gluon for Hopper: bfloat16, usual sizes, at most a ``beta`` a token.

Plain Triton waits for every product whose left operand is in registers before it issues the next, and for every load that no
product prefetches. Here a product is waited for where its result is used, and a program is three partitions, of a warpgroup
each. The first (mma) has the state's tile, transposed, ``[BV, K]``, in registers, as the left operand of every product and
the accumulator of the last; the second (load) copies what chunks bring into rings in shared memory, ``STAGES`` chunks long;
the third (store) stores what the first leaves in the ring's place of the values. They wait for one another at barriers in
shared memory, so a multiprocessor runs one program, and registers go to the first. Where sequences are short a program goes
through several, as :mod:`..lib.sm90_walks` has it.

Equations are those of :mod:`.state`; what a product's operands ask for is said in :mod:`..lib.sm90`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from ..lib.indexing import head_pointer, state_tile
from ..lib.sm90 import copy_rows_async, lhs_layout, load_scalars, mma_async, mma_layout, program_parts, wait_for_predecessor
from ..lib.sm90_pipeline import allocate_barriers, keep_alive, store_buffer, store_tile
from ..lib.sm90_walks import ask_bounds, bounds, state_channels
from .state import chunk_range, load_range
from .walks_sm90 import Walk


@gluon.jit
def copy_vector(buffer, p, W: gl.constexpr):
    """Begin of a copy of ``W ≤ 128`` numbers."""
    i = gl.arange(0, W, gl.BlockedLayout([1], [32], [4], [0]))
    async_copy.async_copy_global_to_shared(buffer, p + i, mask=i < W)


@aggregate
class Form:
    """What a program is compiled for: widths, tokens a chunk, kinds of gate, and what it reads, writes and begins with.

    Names are the kernel's; ``REVERSE`` begins with the last chunk. With a ``SECOND`` writer values are written, too, and read
    by its scores. Of what a chunk's products are multiplied by, ``RATES`` numbers stand in the ring if ``RATED``: those of
    queries, of keys that read and of keys that are written from ``ASKED``, ``READ`` and ``WRITTEN`` on, and the whole chunk's
    decay from ``DECAY`` on, one or with a vector gate ``K``. If ``FOLDED``, ``A``, ``M`` and numbers of written keys are times
    ``beta`` already, those of queries times ``scale``, and ``M`` and numbers of keys that read have the other sign; and the
    partition that makes outputs stores them.
    """

    K: gl.constexpr
    V: gl.constexpr
    C: gl.constexpr
    BV: gl.constexpr
    GATE: gl.constexpr
    BETA: gl.constexpr
    SECOND: gl.constexpr
    UNIT: gl.constexpr
    RATED: gl.constexpr
    RATES: gl.constexpr
    ASKED: gl.constexpr
    READ: gl.constexpr
    WRITTEN: gl.constexpr
    DECAY: gl.constexpr
    STAGES: gl.constexpr
    KEEP: gl.constexpr
    OUT: gl.constexpr
    IDENTITY: gl.constexpr
    REVERSE: gl.constexpr
    START: gl.constexpr
    END: gl.constexpr
    FOLDED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, K, V, C, BV, GATE, BETA, DPLR, UNIT, STAGES, KEEP, OUT, IDENTITY, REVERSE, START, END, FOLDED=False):
        four = UNIT or FOLDED
        self.K = gl.constexpr(K)
        self.V = gl.constexpr(V)
        self.C = gl.constexpr(C)
        self.BV = gl.constexpr(BV)
        self.GATE = gl.constexpr(GATE)
        self.BETA = gl.constexpr(BETA)
        self.SECOND = gl.constexpr(DPLR and not IDENTITY and not REVERSE)
        self.UNIT = gl.constexpr(UNIT)
        self.RATED = gl.constexpr(GATE == 1 or four)
        self.RATES = gl.constexpr(K if GATE == 2 else 4 * C if four else 2 * C)
        self.ASKED = gl.constexpr(0)
        self.READ = gl.constexpr(C if four else 0)
        self.WRITTEN = gl.constexpr(2 * C if four else C)
        self.DECAY = gl.constexpr(0 if GATE == 2 else 4 * C - 1 if four else C - 1)
        self.STAGES = gl.constexpr(STAGES)
        self.KEEP = gl.constexpr(KEEP)
        self.OUT = gl.constexpr(OUT)
        self.IDENTITY = gl.constexpr(IDENTITY)
        self.REVERSE = gl.constexpr(REVERSE)
        self.START = gl.constexpr(START)
        self.END = gl.constexpr(END)
        self.FOLDED = gl.constexpr(FOLDED)


class Rings(NamedTuple):
    """Rings in shared memory for what chunks bring, and a place for a copy of the state; what is not needed is another's.

    A chunk's values, ``v``, or in reverse ``do``, give their place to its results.
    """

    k: gl.shared_memory_descriptor
    write: gl.shared_memory_descriptor
    write2: gl.shared_memory_descriptor
    M: gl.shared_memory_descriptor
    rates: gl.shared_memory_descriptor
    beta: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    A: gl.shared_memory_descriptor
    A2: gl.shared_memory_descriptor
    L2: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor


class Sources(NamedTuple):
    """Arrays that fill the rings, from the first token or chunk of a sequence, or of all, with strides from token to token."""

    k: gl.tensor
    write: gl.tensor | gl.constexpr
    write2: gl.tensor | gl.constexpr
    M: gl.tensor
    rates: gl.tensor | gl.constexpr
    beta: gl.tensor | gl.constexpr
    v: gl.tensor | gl.constexpr
    q: gl.tensor
    A: gl.tensor
    A2: gl.tensor | gl.constexpr
    L2: gl.tensor | gl.constexpr
    kt: gl.tensor | gl.constexpr
    bt: gl.tensor | gl.constexpr
    vt: gl.tensor | gl.constexpr
    qt: gl.tensor | gl.constexpr


class Way(NamedTuple):
    """The chunks that a program goes through: from ``low`` to ``high`` of one value head of a sequence.

    Its tokens end before ``limit``, and ``first`` is the number of its first chunk.
    """

    first: gl.tensor
    low: gl.tensor
    high: gl.tensor
    limit: gl.tensor
    hv: gl.tensor
    HV: gl.tensor


@gluon.jit
def nth_chunk(n, way, form):
    """The chunk of a step on the way."""
    if form.REVERSE:
        return way.high - 1 - n
    return way.low + n


@gluon.jit
def allocate_rings(form):
    """Rings of ``STAGES`` chunks."""
    K: gl.constexpr = form.K
    C: gl.constexpr = form.C
    STAGES: gl.constexpr = form.STAGES
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    tiles_c: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], tiles_k)
    M = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tiles_c)
    write = k
    write2 = k
    rates = M
    beta = M
    v = M
    q = k
    A = M
    A2 = M
    L2 = M
    state = k.index(0)
    if form.BETA:
        beta = gl.allocate_shared_memory(gl.float32, [STAGES, C], line)
    if form.GATE == 2:
        write = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], tiles_k)
    if form.GATE > 0 or form.UNIT:
        rates = gl.allocate_shared_memory(gl.float32, [STAGES, form.RATES], line)
    if form.SECOND:
        write2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], tiles_k)
        L2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tiles_c)
        if form.OUT:
            A2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tiles_c)
    if not form.IDENTITY:
        v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, form.BV], tiles_c)
    if form.OUT or form.REVERSE:
        q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], tiles_k)
        A = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], tiles_c)
    if form.KEEP:
        state = gl.allocate_shared_memory(gl.bfloat16, [form.BV, K], tiles_k)
    return Rings(k, write, write2, M, rates, beta, v, q, A, A2, L2, state)


@gluon.jit
def load_partition(sources, rings, barriers, way, form):
    """The load partition: copies what chunks bring to the rings, as places there become free."""
    load_chunks(sources, rings, barriers, way, 0, 0, form)


@gluon.jit
def way_of(walk, asked, coming, hv, HV, form, PACKED: gl.constexpr):
    """The first token of a sequence, and the way through it, whose tokens and chunks were :func:`asked for
    <..lib.sm90_walks.ask_bounds>`.
    """
    row, limit = bounds(asked, walk.T, PACKED)
    first, _ = bounds(coming, walk.PER, PACKED)
    return row, Way(first.to(gl.int64), gl.to_tensor(0), (limit - row + form.C - 1) // form.C, limit, hv, HV)


@gluon.jit
def many_load_partition(sources, rings, barriers, walk, hv, HV, form, PACKED: gl.constexpr):
    """The load partition, of several sequences."""
    done = 0
    asked = ask_bounds(walk.cu, walk.T, walk.i, walk.N, PACKED)
    coming = ask_bounds(walk.first, walk.PER, walk.i, walk.N, PACKED)
    for i in range(walk.i, walk.N, walk.STEP):
        row, way = way_of(walk, asked, coming, hv, HV, form, PACKED)
        asked = ask_bounds(walk.cu, walk.T, i + walk.STEP, walk.N, PACKED)
        coming = ask_bounds(walk.first, walk.PER, i + walk.STEP, walk.N, PACKED)
        load_chunks(sources, rings, barriers, way, row, done, form)
        done += way.high


@gluon.jit
def load_chunks(sources, rings, barriers, way, begin, done, form):
    """Copies of what a sequence's chunks bring, its tokens from ``begin`` on, when so many chunks of others are ``done``."""
    K: gl.constexpr = form.K
    C: gl.constexpr = form.C
    t = gl.arange(0, C, gl.BlockedLayout([1], [32], [4], [0]))
    for n in range(way.high - way.low):
        chunk = nth_chunk(n, way, form)
        stage = (done + n) % form.STAGES
        at = (way.first + chunk) * way.HV + way.hv
        row = begin + chunk * C
        count = way.limit - row
        far = row.to(gl.int64)
        if form.BETA:
            betas = load_scalars(sources.beta + far * sources.bt, t, sources.bt, count)
        mbarrier.wait(barriers.free.index(stage), (((done + n) // form.STAGES) & 1) ^ 1)
        copy_rows_async(rings.k.index(stage), sources.k + far * sources.kt, sources.kt, count, C, K)
        if form.GATE == 2:
            copy_vector(rings.rates.index(stage), sources.rates + at * K, K)
            copy_rows_async(rings.write.index(stage), sources.write + far * sources.kt, sources.kt, count, C, K)
        if form.SECOND:
            copy_rows_async(rings.write2.index(stage), sources.write2 + far * sources.kt, sources.kt, count, C, K)
            copy_rows_async(rings.L2.index(stage), sources.L2 + at * (C * C), C, C, C, C)
            if form.OUT:
                copy_rows_async(rings.A2.index(stage), sources.A2 + at * (C * C), C, C, C, C)
        if form.UNIT:
            copy_vector(rings.rates.index(stage).slice(0, 2 * C), sources.rates + at * (6 * C) + 3 * C, 2 * C)
            copy_vector(rings.rates.index(stage).slice(2 * C, C), sources.rates + at * (6 * C) + 5 * C, C)
            if form.GATE == 1:
                copy_vector(rings.rates.index(stage).slice(3 * C, C), sources.rates + at * (6 * C), C)
        elif form.GATE == 1:
            copy_vector(rings.rates.index(stage), sources.rates + at * (3 * C), 2 * C)
        if not form.IDENTITY:
            copy_rows_async(rings.v.index(stage), sources.v + far * sources.vt, sources.vt, count, C, form.BV)
        copy_rows_async(rings.M.index(stage), sources.M + at * (C * C), C, C, C, C)
        if form.OUT or form.REVERSE:
            copy_rows_async(rings.q.index(stage), sources.q + far * sources.qt, sources.qt, count, C, K)
            copy_rows_async(rings.A.index(stage), sources.A + at * (C * C), C, C, C, C)
        if form.BETA:
            rings.beta.index(stage).store(betas)
        async_copy.mbarrier_arrive(barriers.ready.index(stage), increment_count=False)
        gl.thread_barrier()
        mbarrier.arrive(barriers.ready.index(stage), count=1)


@gluon.jit
def store_partition(states, results, rings, barriers, way, form):
    """The store partition: states, if ``KEEP``, and rows of results, which stand where a chunk's values did."""
    store_chunks(states, results, rings, barriers, way, 0, 0, form)


@gluon.jit
def many_store_partition(states, results, rings, barriers, walk, hv, HV, form, PACKED: gl.constexpr):
    """The store partition, of several sequences."""
    done = 0
    asked = ask_bounds(walk.cu, walk.T, walk.i, walk.N, PACKED)
    coming = ask_bounds(walk.first, walk.PER, walk.i, walk.N, PACKED)
    for i in range(walk.i, walk.N, walk.STEP):
        row, way = way_of(walk, asked, coming, hv, HV, form, PACKED)
        asked = ask_bounds(walk.cu, walk.T, i + walk.STEP, walk.N, PACKED)
        coming = ask_bounds(walk.first, walk.PER, i + walk.STEP, walk.N, PACKED)
        store_chunks(states, results, rings, barriers, way, row, done, form)
        done += way.high


@gluon.jit
def store_chunks(states, results, rings, barriers, way, begin, done, form):
    """Stores of what a sequence's chunks leave, its tokens from ``begin`` on, when so many chunks of others are ``done``."""
    K: gl.constexpr = form.K
    V: gl.constexpr = form.V
    for n in range(way.high - way.low):
        chunk = nth_chunk(n, way, form)
        stage = (done + n) % form.STAGES
        row = begin + chunk * form.C
        if form.KEEP:
            mbarrier.wait(barriers.state_full, (done + n) & 1)
            store_buffer(states + ((way.first + chunk) * way.HV + way.hv) * (K * V), rings.state, K, form.BV, form.BV, K)
            gl.thread_barrier()
            mbarrier.arrive(barriers.state_free, count=1)
        mbarrier.wait(barriers.made.index(stage), ((done + n) // form.STAGES) & 1)
        store_buffer(
            results + row.to(gl.int64) * (way.HV * V), rings.v.index(stage), way.HV * V, way.limit - row, form.C, form.BV
        )
        gl.thread_barrier()
        mbarrier.arrive(barriers.free.index(stage), count=1)


@gluon.jit
def times_beta(x, rings, stage, form):
    """Errors ``x [BV, C]`` of a chunk times ``beta``, if there is one."""
    if form.BETA:
        x = x * rings.beta.index(stage).load(gl.SliceLayout(0, mma_layout(form.C)))[None, :]
    return x


@gluon.jit
def forward_mma_partition(start, sk, sv, end, rings, barriers, way, form, scale, at, iv, out):
    """The mma partition forwards: the state from chunk to chunk; if ``FOLDED``, outputs go to ``out``."""
    K: gl.constexpr = form.K
    V: gl.constexpr = form.V
    BV: gl.constexpr = form.BV
    wide: gl.constexpr = mma_layout(K)
    by_key: gl.constexpr = gl.SliceLayout(0, wide)
    S = gl.zeros((BV, K), gl.float32, wide)
    columns_k = gl.arange(0, K, by_key)[None, :]
    columns_v = (iv * BV + gl.arange(0, BV, gl.SliceLayout(1, wide)))[:, None]
    transposed = columns_k * V + columns_v
    if form.IDENTITY:
        S = gl.where(columns_k == columns_v, 1.0, S)
    if form.START:
        S = S + gl.load(state_tile(start, columns_k, columns_v, sk, sv)).to(gl.float32)
    S = walk_chunks(S, rings, barriers, way.high - way.low, way.low * form.C, way.limit, 0, way.HV, form, scale, out)
    if form.END == 1:
        gl.store(end + at + transposed, S)
    if form.END == 2:  # noqa: SIM102
        if at >= 0:
            gl.store(end + at + transposed, S)


@gluon.jit
def many_mma_partition(
    start, sn, sk, sv, end, rings, barriers, walk, form, scale, hv, HV, iv, out, PACKED: gl.constexpr
):  # fmt: skip
    """The mma partition, forwards or back, of several sequences; if ``FOLDED``, outputs go to ``out``."""
    K: gl.constexpr = form.K
    V: gl.constexpr = form.V
    done = 0
    asked = ask_bounds(walk.cu, walk.T, walk.i, walk.N, PACKED)
    for i in range(walk.i, walk.N, walk.STEP):
        row, limit = bounds(asked, walk.T, PACKED)
        asked = ask_bounds(walk.cu, walk.T, i + walk.STEP, walk.N, PACKED)
        count = (limit - row + form.C - 1) // form.C
        n = gl.to_tensor(i).to(gl.int64)
        S = gl.zeros((form.BV, K), gl.float32, mma_layout(K))
        if form.START:
            columns_k, columns_v = state_channels(iv, K, form.BV)
            S = S + gl.load(state_tile(start + n * sn, columns_k, columns_v, sk, sv)).to(gl.float32)
        if form.REVERSE:
            S = walk_back(S, rings, barriers, count, done, form, scale)
        else:
            S = walk_chunks(S, rings, barriers, count, row, limit, done, HV, form, scale, out)
        if form.END:
            columns_k, columns_v = state_channels(iv, K, form.BV)
            gl.store(end + (n * HV + hv) * (K * V) + (columns_k * V + columns_v), S)
        done += count


@gluon.jit
def walk_chunks(S, rings, barriers, count, row, limit, done, HV, form, scale, out):
    """The state ``S`` after ``count`` chunks of a sequence, when so many of others are ``done``; if ``FOLDED``, its tokens are
    ``row … limit`` of ``out``.
    """
    K: gl.constexpr = form.K
    V: gl.constexpr = form.V
    C: gl.constexpr = form.C
    BV: gl.constexpr = form.BV
    DECAYS: gl.constexpr = 1 if form.GATE == 1 else K
    narrow: gl.constexpr = mma_layout(C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    by_key: gl.constexpr = gl.SliceLayout(0, mma_layout(K))
    zeros = gl.zeros((BV, C), gl.float32, narrow)
    for n in range(count):
        stage = (done + n) % form.STAGES
        mbarrier.wait(barriers.ready.index(stage), ((done + n) // form.STAGES) & 1)
        fence_async_shared()
        before = S.to(gl.bfloat16)
        if form.GATE > 0:  # while nothing runs: the assembler waits for every product where it meets these registers
            S = S * rings.rates.index(stage).slice(form.DECAY, DECAYS).load(by_key)[None, :]
        old = gl.convert_layout(before, lhs_layout(C))
        r = mma_async(old, rings.k.index(stage).permute((1, 0)), zeros, True)
        if form.SECOND:
            given = rings.v.index(stage).permute((1, 0)).load(lhs_layout(C))
            r = mma_async(given, rings.L2.index(stage).permute((1, 0)), r, False)
        if form.OUT:
            o = mma_async(old, rings.q.index(stage).permute((1, 0)), zeros, True)
        if form.KEEP:
            mbarrier.wait(barriers.state_free, ((done + n) & 1) ^ 1)
            rings.state.store(before)
            gl.thread_barrier()
            mbarrier.arrive(barriers.state_full, count=1)
        if form.FOLDED:
            r, o, old = warpgroup_mma_wait(0, [r, o, old])
        elif form.OUT:
            r = warpgroup_mma_wait(1, [r])
        else:
            r, old = warpgroup_mma_wait(0, [r, old])
        if form.RATED:
            r = r * rings.rates.index(stage).slice(form.READ, C).load(by_token)[None, :]
        if form.FOLDED:
            r = r + rings.v.index(stage).permute((1, 0)).load(narrow).to(gl.float32)
        elif form.IDENTITY or form.SECOND:
            r = -r
        else:
            r = rings.v.index(stage).permute((1, 0)).load(narrow).to(gl.float32) - r
        weighted = gl.convert_layout(times_beta(r, rings, stage, form).to(gl.bfloat16), lhs_layout(C))
        e = mma_async(weighted, rings.M.index(stage).permute((1, 0)), r if form.FOLDED else zeros, not form.FOLDED)
        if form.OUT:
            if not form.FOLDED:
                o, old = warpgroup_mma_wait(1, [o, old])
                o = o * scale
            if form.RATED:
                o = o * rings.rates.index(stage).slice(form.ASKED, C).load(by_token)[None, :]
        e, weighted = warpgroup_mma_wait(0, [e, weighted])
        if not form.FOLDED:
            e = r - e
        x = times_beta(e, rings, stage, form)
        added = x
        if form.RATED:
            added = x * rings.rates.index(stage).slice(form.WRITTEN, C).load(by_token)[None, :]
        added = gl.convert_layout(added.to(gl.bfloat16), lhs_layout(K))
        S = mma_async(added, (rings.write if form.GATE == 2 else rings.k).index(stage), S, False)
        if form.SECOND:
            S = mma_async(gl.convert_layout(given, lhs_layout(K)), rings.write2.index(stage), S, False)
        if form.KEEP:
            rings.v.index(stage).permute((1, 0)).store(e.to(gl.bfloat16))
        if form.OUT:
            x = gl.convert_layout(x.to(gl.bfloat16), lhs_layout(C))
            o = mma_async(x, rings.A.index(stage).permute((1, 0)), o, False)
            if form.SECOND:
                o = mma_async(given, rings.A2.index(stage).permute((1, 0)), o, False)
            S, added = warpgroup_mma_wait(1, [S, added])
            o, x = warpgroup_mma_wait(0, [o, x])
            rings.v.index(stage).permute((1, 0)).store(o.to(gl.bfloat16))
            if form.FOLDED:
                gl.thread_barrier()
                store_tile(rings.v.index(stage), out, row + n * C, HV * V, limit, C, BV)
        else:
            S, added = warpgroup_mma_wait(0, [S, added])
        gl.thread_barrier()
        mbarrier.arrive(barriers.free.index(stage), count=1)
        if (form.OUT or form.KEEP) and not form.FOLDED:
            mbarrier.arrive(barriers.made.index(stage), count=1)
    return S


@gluon.jit
def backward_mma_partition(start, sk, sv, end, rings, barriers, way, form, scale, at, iv):
    """The mma partition backwards: the state's gradient, from the last chunk on."""
    K: gl.constexpr = form.K
    V: gl.constexpr = form.V
    BV: gl.constexpr = form.BV
    wide: gl.constexpr = mma_layout(K)
    by_key: gl.constexpr = gl.SliceLayout(0, wide)
    dS = gl.zeros((BV, K), gl.float32, wide)
    columns_k = gl.arange(0, K, by_key)[None, :]
    columns_v = (iv * BV + gl.arange(0, BV, gl.SliceLayout(1, wide)))[:, None]
    transposed = columns_k * V + columns_v
    if form.START:
        dS = dS + gl.load(state_tile(start, columns_k, columns_v, sk, sv)).to(gl.float32)
    dS = walk_back(dS, rings, barriers, way.high - way.low, 0, form, scale)
    if form.END == 1:
        gl.store(end + at + transposed, dS)
    if form.END == 2:  # noqa: SIM102
        if at >= 0:
            gl.store(end + at + transposed, dS)


@gluon.jit
def walk_back(dS, rings, barriers, count, done, form, scale):
    """The state's gradient before ``count`` chunks of a sequence, ``dS`` after them, when so many of others are ``done``."""
    K: gl.constexpr = form.K
    C: gl.constexpr = form.C
    BV: gl.constexpr = form.BV
    DECAYS: gl.constexpr = 1 if form.GATE == 1 else K
    narrow: gl.constexpr = mma_layout(C)
    by_token: gl.constexpr = gl.SliceLayout(0, narrow)
    by_key: gl.constexpr = gl.SliceLayout(0, mma_layout(K))
    zeros = gl.zeros((BV, C), gl.float32, narrow)
    for n in range(count):
        stage = (done + n) % form.STAGES
        mbarrier.wait(barriers.ready.index(stage), ((done + n) // form.STAGES) & 1)
        fence_async_shared()
        before = dS.to(gl.bfloat16)
        if form.GATE > 0:
            dS = dS * rings.rates.index(stage).slice(form.DECAY, DECAYS).load(by_key)[None, :]
        old = gl.convert_layout(before, lhs_layout(C))
        dx = mma_async(old, (rings.write if form.GATE == 2 else rings.k).index(stage).permute((1, 0)), zeros, True)
        given = rings.v.index(stage).permute((1, 0)).load(lhs_layout(C))
        own = mma_async(given, rings.A.index(stage), zeros, True)
        if form.KEEP:
            mbarrier.wait(barriers.state_free, ((done + n) & 1) ^ 1)
            rings.state.store(before)
            gl.thread_barrier()
            mbarrier.arrive(barriers.state_full, count=1)
        read = given.to(gl.float32) * scale
        if form.RATED:
            read = read * rings.rates.index(stage).slice(form.ASKED, C).load(gl.SliceLayout(0, lhs_layout(C)))[None, :]
        read = gl.convert_layout(read.to(gl.bfloat16), lhs_layout(K))
        dS = mma_async(read, rings.q.index(stage), dS, False)
        dx, own, old, given = warpgroup_mma_wait(1, [dx, own, old, given])
        if form.RATED:
            dx = dx * rings.rates.index(stage).slice(form.WRITTEN, C).load(by_token)[None, :]
        dx = dx + own
        weighted = gl.convert_layout(times_beta(dx, rings, stage, form).to(gl.bfloat16), lhs_layout(C))
        y = mma_async(weighted, rings.M.index(stage), zeros, True)
        dS, read = warpgroup_mma_wait(1, [dS, read])
        y, weighted = warpgroup_mma_wait(0, [y, weighted])
        y = dx - y
        dr = times_beta(-y, rings, stage, form)
        if form.RATED:
            dr = dr * rings.rates.index(stage).slice(form.READ, C).load(by_token)[None, :]
        dr = gl.convert_layout(dr.to(gl.bfloat16), lhs_layout(K))
        dS = mma_async(dr, rings.k.index(stage), dS, False)
        if form.KEEP:
            rings.v.index(stage).permute((1, 0)).store(y.to(gl.bfloat16))
        dS, dr = warpgroup_mma_wait(0, [dS, dr])
        gl.thread_barrier()
        mbarrier.arrive(barriers.free.index(stage), count=1)
        if form.KEEP:
            mbarrier.arrive(barriers.made.index(stage), count=1)
    return dS


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "STEP"])
def delta_state_fwd_sm90(
    q, k, v, beta, write, write2, A, M, A2, L2, rates, start, end, states, errors, out,
    ranges, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, STEP, scale,
    qb, qt, qh, kb, kt, kh, vb, vt, vh, bb, bt, bh, sn, sh, sk, sv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, DPLR: gl.constexpr, UNIT: gl.constexpr, PACKED: gl.constexpr, WHOLE: gl.constexpr,
    START: gl.constexpr, END: gl.constexpr, KEEP: gl.constexpr, OUT: gl.constexpr, IDENTITY: gl.constexpr,
    RANGED: gl.constexpr, MANY: gl.constexpr, PREC: gl.constexpr, DT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One ``[BV, K]`` tile of the state through the chunks of a segment: flags of :func:`.state.delta_state_fwd`.

    Of ``MANY`` sequences, ``STEP`` apart, one after the other.
    """
    wait_for_predecessor()
    iv, hv, i = program_parts(V // BV, HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if gl.load(owner + i) >= N:
            return
    gl.static_assert(not MANY or (WHOLE and not RANGED and not IDENTITY and END < 2 and (KEEP or OUT)))
    if MANY:
        b = i.to(gl.int64) * 0
        bos = b
    else:
        b, bos, L, chunk0, low, high, alone = chunk_range(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
        if PACKED and not WHOLE and END == 1:  # noqa: SIM102
            if alone >= 0:
                return
        if RANGED:
            low, high = load_range(ranges + 2 * (b * HV + hv), low, high)
        low = low.to(gl.int32)
        limit = gl.minimum(L, high * C).to(gl.int32)
    q = head_pointer(q, b, bos, hv, qb, qt, qh, GROUP)
    k = head_pointer(k, b, bos, hv, kb, kt, kh, GROUP)
    if GATE == 2:
        write = head_pointer(write, b, bos, hv, kb, kt, kh, 1)
    if DPLR:
        write2 = head_pointer(write2, b, bos, hv, kb, kt, kh, 1)
    if not IDENTITY:
        v = head_pointer(v, b, bos, hv, vb, vt, vh, 1) + iv * BV
    if BETA:
        beta = head_pointer(beta, b, bos, hv, bb, bt, bh, 1)
    head = ((b * T + bos) * HV + hv) * V + iv * BV
    if OUT:
        out += head
    if KEEP:
        errors += head
        states += iv * BV * K
    if START:
        start += hv.to(gl.int64) * sh

    form = Form(K, V, C, BV, GATE, BETA, DPLR, UNIT, STAGES, KEEP, OUT, IDENTITY, False, START, END)
    sources = Sources(k, write, write2, M, rates, beta, v, q, A, A2, L2, kt, bt, vt, qt)
    rings = allocate_rings(form)
    barriers = allocate_barriers(2 if OUT or KEEP else 1, STAGES)
    results = out if OUT else errors
    if MANY:
        walk = Walk(i, STEP, N, cu, chunk_first, T, (T + C - 1) // C)
        gl.warp_specialize(
            [
                (many_mma_partition, (
                    start, sn, sk, sv, end, rings, barriers, walk, form, scale, hv, HV, iv, None, PACKED
                )),
                (many_load_partition, (sources, rings, barriers, walk, hv, HV, form, PACKED)),
                (many_store_partition, (states, results, rings, barriers, walk, hv, HV, form, PACKED)),
            ],
            [4, 4],
            [112, 112],
        )  # fmt: skip
    else:
        way = Way(chunk0, low, high, limit, hv, HV)
        at = ((alone if END == 2 else i.to(gl.int64)) * HV + hv) * (K * V)
        if START:
            start += i.to(gl.int64) * sn
        mma = (start, sk, sv, end, rings, barriers, way, form, scale, at, iv, None)
        load = (sources, rings, barriers, way, form)
        if OUT or KEEP:
            store = (states, results, rings, barriers, way, form)
            gl.warp_specialize(
                [(forward_mma_partition, mma), (load_partition, load), (store_partition, store)], [4, 4], [112, 112]
            )  # fmt: skip
        else:
            gl.warp_specialize([(forward_mma_partition, mma), (load_partition, load)], [4], [112])
    keep_alive(barriers)


@gluon.jit(do_not_specialize=["T", "PER", "SEGMENT", "N", "HV", "STEP"])
def delta_state_bwd_sm90(
    q, k, do, beta, write, write2, A, M, A2, L2, rates, start, end, states, adjoint, out,
    ranges, owner, first, chunk_first, cu, T, PER, SEGMENT, N, HV, STEP, scale,
    qb, qt, qh, kb, kt, kh, ob, ot, oh, bb, bt, bh, sn, sh, sk, sv,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BK: gl.constexpr, BV: gl.constexpr, GROUP: gl.constexpr,
    GATE: gl.constexpr, BETA: gl.constexpr, DPLR: gl.constexpr, UNIT: gl.constexpr, PACKED: gl.constexpr, WHOLE: gl.constexpr,
    START: gl.constexpr, END: gl.constexpr, KEEP: gl.constexpr, OUT: gl.constexpr, IDENTITY: gl.constexpr,
    RANGED: gl.constexpr, MANY: gl.constexpr, PREC: gl.constexpr, DT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One ``[BV, K]`` tile of the state's gradient, from the last chunk; flags as in :func:`.state.delta_state_bwd`.

    Of ``MANY`` sequences, ``STEP`` apart, one after the other.
    """
    wait_for_predecessor()
    iv, hv, i = program_parts(V // BV, HV)
    if PACKED and not WHOLE:  # noqa: SIM102
        if gl.load(owner + i) >= N:
            return
    gl.static_assert(not MANY or (WHOLE and not RANGED and not IDENTITY and END < 2 and (KEEP or OUT)))
    if MANY:
        b = i.to(gl.int64) * 0
        bos = b
    else:
        b, bos, L, chunk0, low, high, alone = chunk_range(i, owner, first, chunk_first, cu, T, PER, SEGMENT, C, PACKED, WHOLE)
        if PACKED and not WHOLE and END == 1:  # noqa: SIM102
            if alone >= 0:
                return
        if RANGED:
            low, high = load_range(ranges + 2 * (b * HV + hv), low, high)
        low = low.to(gl.int32)
        limit = gl.minimum(L, high * C).to(gl.int32)
    q = head_pointer(q, b, bos, hv, qb, qt, qh, GROUP)
    k = head_pointer(k, b, bos, hv, kb, kt, kh, GROUP)
    if GATE == 2:
        write = head_pointer(write, b, bos, hv, kb, kt, kh, 1)
    do = head_pointer(do, b, bos, hv, ob, ot, oh, 1) + iv * BV
    if BETA:
        beta = head_pointer(beta, b, bos, hv, bb, bt, bh, 1)
    if KEEP:
        adjoint += ((b * T + bos) * HV + hv) * V + iv * BV
        states += iv * BV * K
    if START:
        start += hv.to(gl.int64) * sh

    form = Form(K, V, C, BV, GATE, BETA, DPLR, UNIT, STAGES, KEEP, OUT, IDENTITY, True, START, END)
    sources = Sources(k, write, write2, M, rates, beta, do, q, A, A2, L2, kt, bt, ot, qt)
    rings = allocate_rings(form)
    barriers = allocate_barriers(2 if KEEP else 1, STAGES)
    if MANY:
        walk = Walk(i, STEP, N, cu, chunk_first, T, (T + C - 1) // C)
        gl.warp_specialize(
            [
                (many_mma_partition, (
                    start, sn, sk, sv, end, rings, barriers, walk, form, scale, hv, HV, iv, None, PACKED
                )),
                (many_load_partition, (sources, rings, barriers, walk, hv, HV, form, PACKED)),
                (many_store_partition, (states, adjoint, rings, barriers, walk, hv, HV, form, PACKED)),
            ],
            [4, 4],
            [112, 112],
        )  # fmt: skip
    else:
        way = Way(chunk0, low, high, limit, hv, HV)
        at = ((alone if END == 2 else i.to(gl.int64)) * HV + hv) * (K * V)
        if START:
            start += i.to(gl.int64) * sn
        mma = (start, sk, sv, end, rings, barriers, way, form, scale, at, iv)
        load = (sources, rings, barriers, way, form)
        if KEEP:
            store = (states, adjoint, rings, barriers, way, form)
            gl.warp_specialize(
                [(backward_mma_partition, mma), (load_partition, load), (store_partition, store)], [4, 4], [112, 112]
            )  # fmt: skip
        else:
            gl.warp_specialize([(backward_mma_partition, mma), (load_partition, load)], [4], [112])
    keep_alive(barriers)
