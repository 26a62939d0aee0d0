"""Barriers and buffers of kernels whose warpgroups load, multiply and store at once, on Hopper."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .sm90 import copy_layout


@gluon.jit
def store_buffer(p, buffer, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Store the first ``count`` rows of ``buffer [C, W]`` from ``p`` on."""
    layout: gl.constexpr = copy_layout(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    gl.store(p + (r[:, None] * stride + columns[None, :]), buffer.load(layout), mask=(r < count)[:, None])


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
