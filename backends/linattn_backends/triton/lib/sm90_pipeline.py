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


@gluon.jit
def barriers(CONSUMERS: gl.constexpr, STAGES: gl.constexpr):
    """Of the rings: copied, read by all ``CONSUMERS``, results made; of the state's copy: made, stored."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    kept_full = gl.allocate_shared_memory(gl.int64, [1], layout)
    kept_free = gl.allocate_shared_memory(gl.int64, [1], layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=129)  # each thread's copies, and the numbers that threads store
        mbarrier.init(free.index(stage), count=CONSUMERS)
        mbarrier.init(made.index(stage), count=1)
    mbarrier.init(kept_full, count=1)
    mbarrier.init(kept_free, count=1)
    return ready, free, made, kept_full, kept_free


@gluon.jit
def hold(ready, free, made, kept_full, kept_free):
    """Their memory is nobody else's until here.

    Else those that no partition uses give theirs to what partitions are handed, and the first value of a barrier, which is
    written when its unit comes to it, can land on a pointer.
    """
    ready._keep_alive()
    free._keep_alive()
    made._keep_alive()
    kept_full._keep_alive()
    kept_free._keep_alive()


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
    ready, free, made, state_full, state_free = barriers(CONSUMERS, STAGES)
    return Barriers(ready, free, made, state_full, state_free)


@gluon.jit
def keep_alive(barriers):
    """Their memory is nobody else's until here, as :func:`hold` says."""
    hold(barriers.ready, barriers.free, barriers.made, barriers.state_full, barriers.state_free)
