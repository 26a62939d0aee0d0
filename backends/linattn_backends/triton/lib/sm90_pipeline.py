"""Barriers and buffers of kernels whose warpgroups load, multiply and store at once, on Hopper."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .sm90 import copy_layout


@gluon.jit
def store_buffer(p, buffer, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Store the first ``count`` rows of ``buffer [C, W]`` from ``p`` on."""
    layout: gl.constexpr = copy_layout(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    gl.store(p + (r[:, None] * stride + columns[None, :]), buffer.load(layout), mask=(r < count)[:, None])


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


class Barriers(NamedTuple):
    """Barriers of a program's rings, and of its copy of the state.

    ``ready``: a place is copied; ``free``: read by all; ``made``: results stand in it. ``state_full, state_free``: the state is
    copied, and stored.
    """

    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    made: gl.shared_memory_descriptor
    state_full: gl.shared_memory_descriptor
    state_free: gl.shared_memory_descriptor


@gluon.jit
def allocate_barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Barriers of rings whose places ``CONSUMERS`` partitions read."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    state_full = gl.allocate_shared_memory(gl.int64, [1], layout)
    state_free = gl.allocate_shared_memory(gl.int64, [1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129)  # each thread's copies, and the numbers that threads store
        mbarrier.init(free.index(stage), count=CONSUMERS)
        mbarrier.init(made.index(stage), count=1)
    mbarrier.init(state_full, count=1)
    mbarrier.init(state_free, count=1)
    return Barriers(ready, free, made, state_full, state_free)


@gluon.jit
def keep_alive(barriers):
    """The barriers' memory is nobody else's until here.

    Else those that no partition uses give theirs to what partitions are handed, and the first value of a barrier, which is
    written when its unit comes to it, can land on a pointer.
    """
    barriers.ready._keep_alive()
    barriers.free._keep_alive()
    barriers.made._keep_alive()
    barriers.state_full._keep_alive()
    barriers.state_free._keep_alive()
