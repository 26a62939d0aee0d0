"""Kernels in Gluon that are right, and each wrong in one way if told which: what :mod:`gluon_on_numpy` must tell apart."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

W = gl.constexpr(16)


@gluon.jit
def places():
    """Offsets of a tile ``[W, W]``."""
    r = gl.arange(0, W, gl.SliceLayout(1, None))
    return r[:, None] * W + gl.arange(0, W, gl.SliceLayout(0, None))[None, :]


@gluon.jit
def multiply(a, b, out, MISTAKE: gl.constexpr):
    """``out = a b`` of one tile a program."""
    at = gl.program_id(0) * W * W + places()
    x = gl.allocate_shared_memory(gl.bfloat16, [W, W], None)
    y = gl.allocate_shared_memory(gl.bfloat16, [W, W], None)
    if MISTAKE == "copies past the end":
        at += W
    async_copy.async_copy_global_to_shared(x, a + at)
    async_copy.commit_group()
    async_copy.async_copy_global_to_shared(y, b + at)
    async_copy.commit_group()
    if MISTAKE == "waits for one copy of two":
        async_copy.wait_group(1)
    else:
        async_copy.wait_group(0)
    zeros = gl.zeros((W, W), gl.float32, None)
    acc = warpgroup_mma(x, y, zeros, use_acc=False, is_async=True)
    if MISTAKE == "overwrites an operand":
        x.store(zeros.to(gl.bfloat16))
    if MISTAKE == "reads the result before the wait":
        acc = acc + zeros
    acc = warpgroup_mma_wait(0, [acc])
    if MISTAKE == "stores past the end":
        gl.store(out + (at + W), acc)
    elif MISTAKE == "stores float32 as bfloat16":
        x.store(acc)
    else:
        gl.store(out + at, acc)


@gluon.jit
def read(a, out, MISTAKE: gl.constexpr):
    """``out = a`` of one tile, through shared memory."""
    x = gl.allocate_shared_memory(gl.bfloat16, [W, W], None)
    if MISTAKE != "reads what nobody wrote":
        async_copy.async_copy_global_to_shared(x, a + places())
        async_copy.commit_group()
        if MISTAKE != "reads before the wait":
            async_copy.wait_group(0)
    gl.store(out + places(), x.load(None).to(gl.float32))


@aggregate
class Ring:
    """Two places, with the barriers that say which are full, and which free."""

    buffers: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, buffers, ready, free, MISTAKE):
        self.buffers = buffers
        self.ready = ready
        if MISTAKE != "forgets a field":
            self.free = free
        if MISTAKE == "has a field too many":
            self.full = free

    @gluon.jit
    def place(self, i):
        """The place of tile ``i``, its barriers, and their phase."""
        return self.buffers.index(i % 2), self.ready.index(i % 2), self.free.index(i % 2), i // 2 & 1


@gluon.jit
def load_partition(ring, a, COUNT, MISTAKE: gl.constexpr):
    """Copy tiles as places become free."""
    for i in range(COUNT):
        buffer, ready, free, phase = ring.place(i)
        mbarrier.wait(free, phase ^ 1)
        async_copy.async_copy_global_to_shared(buffer, a + (i * W * W + places()))
        if MISTAKE != "never says that a tile is there":
            async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def sum_partition(ring, out, COUNT, MISTAKE: gl.constexpr):
    """Sum the tiles as they come."""
    total = gl.zeros((W, W), gl.float32, None)
    for i in range(COUNT):
        buffer, ready, free, phase = ring.place(i)
        if MISTAKE == "waits for the other phase":
            phase = phase ^ 1
        mbarrier.wait(ready, phase)
        total = total + buffer.load(None).to(gl.float32)
        if MISTAKE == "says twice that a place is free":
            mbarrier.arrive(free, count=2)
        elif MISTAKE != "never says that a place is free":
            mbarrier.arrive(free, count=1)
    gl.store(out + places(), total)


@gluon.jit
def sum_tiles(a, out, COUNT, MISTAKE: gl.constexpr):
    """``out``, the sum of ``COUNT`` tiles of ``a``, which one warpgroup copies and another adds."""
    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, W, W], None)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(ready.index(place), count=128)
        mbarrier.init(free.index(place), count=1)
    ring = Ring(buffers, ready, free, MISTAKE)
    gl.warp_specialize([(load_partition, (ring, a, COUNT, MISTAKE)), (sum_partition, (ring, out, COUNT, MISTAKE))], [4], [24])
