"""Kernels whose partitions of warps hand over to one another, right by their form: each has one feature of the backend's own.

One partition gives tile after tile of ``x [n, …]`` in a ring of places in shared memory, another takes it. What keeps them
apart is the same everywhere. A place has two barriers (PTX's ``mbarrier``), and each of these completes a phase a round of the
ring: ``full``, when its giver is done, and ``free``, when all that read it are. The giver of round r waits for round r - 1 of
``free``, a taker for round r of ``full``. Who arrives for all warps of a partition does so behind a barrier of these warps;
an arrival releases what was written and read before it, and a wait acquires it. So between any two accesses of a place of
which one writes there is an arrival and a wait for it, whatever the feature.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait


class Places(NamedTuple):
    """A ring in shared memory, and barriers of its places; ``made`` is where a third partition waits for a second."""

    ring: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    made: gl.shared_memory_descriptor


@gluon.constexpr_function
def by_thread():
    """A number a thread of a partition's 128."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.constexpr_function
def by_row():
    """A tile ``[W, W]`` as it is copied, 16 bytes of bfloat16 a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def of_product(width):
    """Results ``[64, width]`` of a product, in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.jit
def barriers_of(ring, GIVERS: gl.constexpr, TAKERS: gl.constexpr):
    """A ring with its barriers, for so many arrivals."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    STAGES: gl.constexpr = ring.shape[0]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=GIVERS)
        mbarrier.init(free.index(stage), count=TAKERS)
        mbarrier.init(made.index(stage), count=1)
    return Places(ring, full, free, made)


@gluon.jit
def places_of(TILE: gl.constexpr, STAGES: gl.constexpr, GIVERS: gl.constexpr, TAKERS: gl.constexpr):
    """Places for ``TILE`` numbers each."""
    ring = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return barriers_of(ring, GIVERS, TAKERS)


@gluon.jit
def keep_alive(places):
    """The barriers' memory is nobody else's until here."""
    places.full._keep_alive()
    places.free._keep_alive()
    places.made._keep_alive()


@gluon.jit
def wait_free(places, i):
    """The place of tile ``i``, once it is free."""
    STAGES: gl.constexpr = places.ring.shape[0]
    mbarrier.wait(places.free.index(i % STAGES), ((i // STAGES) & 1) ^ 1)
    return i % STAGES


@gluon.jit
def wait_full(places, i):
    """The place of tile ``i``, once it is full."""
    STAGES: gl.constexpr = places.ring.shape[0]
    mbarrier.wait(places.full.index(i % STAGES), (i // STAGES) & 1)
    return i % STAGES


@gluon.jit
def arrive(barrier):
    """One arrival, when all warps of the partition have come here."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def give(x, places, n):
    """Store tile after tile."""
    TILE: gl.constexpr = places.ring.shape[1]
    columns = gl.arange(0, TILE, by_thread())
    for i in range(n):
        stage = wait_free(places, i)
        places.ring.index(stage).store(gl.load(x + i * TILE + columns))
        arrive(places.full.index(stage))


@gluon.jit
def take(out, places, n):
    """``out[c] = Σ_i x[i, c]``."""
    TILE: gl.constexpr = places.ring.shape[1]
    total = gl.zeros([TILE], gl.float32, by_thread())
    for i in range(n):
        stage = wait_full(places, i)
        total += places.ring.index(stage).load(by_thread())
        arrive(places.free.index(stage))
    gl.store(out + gl.arange(0, TILE, by_thread()), total)


@gluon.jit
def handover_control(x, y, out, n, TILE: gl.constexpr):
    """Nothing besides: one place, two partitions."""
    places = places_of(TILE, 1, 1, 1)
    gl.warp_specialize([(take, (out, places, n)), (give, (x, places, n))], [4], [112])
    keep_alive(places)


@gluon.jit
def ring_control(x, y, out, n, TILE: gl.constexpr):
    """A ring of places, each with barriers of its own."""
    places = places_of(TILE, 3, 1, 1)
    gl.warp_specialize([(take, (out, places, n)), (give, (x, places, n))], [4], [112])
    keep_alive(places)


@gluon.jit
def give_with(x, many, places, n):
    """Store tile after tile, each plus what the partition was handed."""
    TILE: gl.constexpr = places.ring.shape[1]
    columns = gl.arange(0, TILE, by_thread())
    for i in range(n):
        tile = gl.load(x + i * TILE + columns)
        for j in gl.static_range(len(many)):
            tile += many[j]
        stage = wait_free(places, i)
        places.ring.index(stage).store(tile)
        arrive(places.full.index(stage))


@gluon.jit
def captures_control(x, y, out, n, TILE: gl.constexpr):
    """Many numbers that a partition is handed, which it gets through shared memory: written once, before the partitions begin.

    No round follows in which they were written again.
    """
    places = places_of(TILE, 1, 1, 1)
    many = ()
    for j in gl.static_range(48):
        many = many + (gl.load(y + j),)  # noqa: RUF005
    gl.warp_specialize([(take, (out, places, n)), (give_with, (x, many, places, n))], [4], [112])
    keep_alive(places)


@gluon.jit
def double(places, n):
    """Twice what is in a place, in this place: a thread writes what it alone has read."""
    for i in range(n):
        stage = wait_full(places, i)
        place = places.ring.index(stage)
        place.store(2.0 * place.load(by_thread()))
        gl.thread_barrier()
        mbarrier.arrive(places.made.index(stage), count=1)
        mbarrier.arrive(places.free.index(stage), count=1)


@gluon.jit
def take_made(out, places, n):
    """As :func:`take`, what a second partition has made."""
    TILE: gl.constexpr = places.ring.shape[1]
    STAGES: gl.constexpr = places.ring.shape[0]
    total = gl.zeros([TILE], gl.float32, by_thread())
    for i in range(n):
        mbarrier.wait(places.made.index(i % STAGES), (i // STAGES) & 1)
        total += places.ring.index(i % STAGES).load(by_thread())
        arrive(places.free.index(i % STAGES))
    gl.store(out + gl.arange(0, TILE, by_thread()), total)


@gluon.jit
def third_control(x, y, out, n, TILE: gl.constexpr):
    """A third partition, for which the second leaves its results in their operand's place: it is free when both arrived."""
    places = places_of(TILE, 1, 1, 2)
    gl.warp_specialize(
        [(double, (places, n)), (give, (x, places, n)), (take_made, (out, places, n))], [4, 4], [112, 112]
    )  # fmt: skip
    keep_alive(places)


@gluon.jit
def give_copies(x, places, n):
    """Copy tile after tile: each thread's arrival comes when its own copies are there, without anybody's waiting."""
    TILE: gl.constexpr = places.ring.shape[1]
    columns = gl.arange(0, TILE, by_thread())
    for i in range(n):
        stage = wait_free(places, i)
        async_copy.async_copy_global_to_shared(places.ring.index(stage), x + i * TILE + columns)
        async_copy.mbarrier_arrive(places.full.index(stage), increment_count=False)


@gluon.jit
def copies_control(x, y, out, n, TILE: gl.constexpr):
    """Tiles that are copied asynchronously (PTX's ``cp.async``): ``full`` counts 128 threads."""
    places = places_of(TILE, 1, 128, 1)
    gl.warp_specialize([(take, (out, places, n)), (give_copies, (x, places, n))], [4], [112])
    keep_alive(places)


@gluon.jit
def give_both(x, y, places, n):
    """Copy one half of a place, and store the other."""
    TILE: gl.constexpr = places.ring.shape[1] // 2
    columns = gl.arange(0, TILE, by_thread())
    for i in range(n):
        stored = gl.load(y + columns)
        stage = wait_free(places, i)
        place = places.ring.index(stage)
        async_copy.async_copy_global_to_shared(place.slice(0, TILE), x + i * TILE + columns)
        place.slice(TILE, TILE).store(stored)
        async_copy.mbarrier_arrive(places.full.index(stage), increment_count=False)
        arrive(places.full.index(stage))


@gluon.jit
def take_both(out, places, n):
    """``out[c] = Σ_i (x[i, c] + y[c])``."""
    TILE: gl.constexpr = places.ring.shape[1] // 2
    total = gl.zeros([TILE], gl.float32, by_thread())
    for i in range(n):
        stage = wait_full(places, i)
        place = places.ring.index(stage)
        total += place.slice(0, TILE).load(by_thread()) + place.slice(TILE, TILE).load(by_thread())
        arrive(places.free.index(stage))
    gl.store(out + gl.arange(0, TILE, by_thread()), total)


@gluon.jit
def copies_and_stores_control(x, y, out, n, TILE: gl.constexpr):
    """Copies, and numbers that threads store: ``full`` counts 128 threads' copies, and all stores once."""
    places = places_of(2 * TILE, 1, 129, 1)
    gl.warp_specialize([(take_both, (out, places, n)), (give_both, (x, y, places, n))], [4], [112])
    keep_alive(places)


@gluon.jit
def take_sums(out, places, n):
    """``out[c] = Σ_i (x[i, c] + Σ_d x[i, d])``."""
    TILE: gl.constexpr = places.ring.shape[1]
    total = gl.zeros([TILE], gl.float32, by_thread())
    for i in range(n):
        stage = wait_full(places, i)
        tile = places.ring.index(stage).load(by_thread())
        total += tile + gl.sum(tile, 0)
        arrive(places.free.index(stage))
    gl.store(out + gl.arange(0, TILE, by_thread()), total)


@gluon.jit
def sums_control(x, y, out, n, TILE: gl.constexpr):
    """Warps of one partition that exchange numbers through shared memory, between barriers of their own."""
    places = places_of(TILE, 1, 1, 1)
    gl.warp_specialize([(take_sums, (out, places, n)), (give, (x, places, n))], [4], [112])
    keep_alive(places)


@gluon.jit
def tile_places(p, W: gl.constexpr):
    """Places of a tile ``[W, W]`` of an array."""
    rows = gl.arange(0, W, gl.SliceLayout(1, by_row()))[:, None]
    return p + (rows * W + gl.arange(0, W, gl.SliceLayout(0, by_row()))[None, :])


@gluon.jit
def give_tiles(x, places, n):
    """Store tiles: that products read them, which is asynchronous, is what the fence is for."""
    W: gl.constexpr = places.ring.shape[1]
    for i in range(n):
        tile = gl.load(tile_places(x + i * W * W, W))
        stage = wait_free(places, i)
        places.ring.index(stage).store(tile)
        fence_async_shared()
        arrive(places.full.index(stage))


@gluon.jit
def copy_tiles(x, places, n):
    """Copy tiles; who reads them has the fence."""
    W: gl.constexpr = places.ring.shape[1]
    for i in range(n):
        stage = wait_free(places, i)
        async_copy.async_copy_global_to_shared(places.ring.index(stage), tile_places(x + i * W * W, W))
        async_copy.mbarrier_arrive(places.full.index(stage), increment_count=False)


@gluon.jit
def multiply(y, out, places, n, FENCE: gl.constexpr):
    """``out = Σ_i y x[i]``: a place is free when the product that reads it was waited for by all warps."""
    W: gl.constexpr = places.ring.shape[1]
    results: gl.constexpr = of_product(W)
    y = gl.convert_layout(gl.load(tile_places(y, W)), gl.DotOperandLayout(0, results, 2))
    total = gl.zeros((W, W), gl.float32, results)
    for i in range(n):
        stage = wait_full(places, i)
        if FENCE:
            fence_async_shared()
        total = warpgroup_mma(y, places.ring.index(stage), total, use_acc=True, is_async=True)
        total = warpgroup_mma_wait(0, [total])
        arrive(places.free.index(stage))
    gl.store(tile_places(out, W), gl.convert_layout(total, by_row()))


@gluon.jit
def tiles_of(W: gl.constexpr, GIVERS: gl.constexpr):
    """Two places for operands ``[W, W]`` of products."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([W, W], gl.bfloat16)
    return barriers_of(gl.allocate_shared_memory(gl.bfloat16, [2, W, W], layout), GIVERS, 1)


@gluon.jit
def product_control(x, y, out, n, TILE: gl.constexpr):
    """Products (PTX's ``wgmma``) that read from shared memory what another partition stored."""
    places = tiles_of(TILE, 1)
    gl.warp_specialize([(multiply, (y, out, places, n, False)), (give_tiles, (x, places, n))], [4], [112])
    keep_alive(places)


@gluon.jit
def product_of_copies_control(x, y, out, n, TILE: gl.constexpr):
    """Products that read what another partition copied."""
    places = tiles_of(TILE, 128)
    gl.warp_specialize([(multiply, (y, out, places, n, True)), (copy_tiles, (x, places, n))], [4], [112])
    keep_alive(places)
