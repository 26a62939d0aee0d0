"""Sequences that one program goes through one after the other, in Gluon, for Hopper: what it does but once is done for all.

They are ``STEP`` apart, which is as many as there are such programs of a head, so that long sequences among short ones, which
often stand together, are different programs'. A partition has two loops then. The inner one goes through a sequence's chunks
from 0, and those that are ``done`` are added to their number inside: Triton drops a sum that does nothing but begin an inner
loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .sm90 import mma_layout
from .sm90_pipeline import opaque

__all__ = ["ask_bounds", "bounds", "state_channels"]


@gluon.jit
def ask_bounds(offsets, each, n, N, PACKED: gl.constexpr):
    """What :func:`bounds` makes of it where item ``n`` begins and ends; past the last of ``N``, where that does.

    Packed items are between ``offsets``, and a partition asks for them an item ahead: it would wait for memory else before
    each. Half of the lanes ask for either end, because what all lanes ask for the assembler holds in uniform registers, and
    waits for it at once. Other items have a size, ``each``.
    """
    n = gl.minimum(n, N - 1)
    if PACKED:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [4], [0]))
        found = gl.load(offsets + n + lane // 16).to(gl.int32)
    else:
        found = n * each
    return found


@gluon.jit
def bounds(asked, each, PACKED: gl.constexpr):
    """Where an item begins and ends that was :func:`asked <ask_bounds>` for."""
    if PACKED:
        begin = gl.min(asked, 0)
        end = gl.max(asked, 0)
    else:
        begin = asked
        end = asked + each
    return begin, end


@gluon.jit
def state_channels(tile, W: gl.constexpr, ROWS: gl.constexpr):
    """The channels of a state's tile ``[ROWS, W]``, to be broadcast, made anew: addresses of all are too many to be kept."""
    layout: gl.constexpr = mma_layout(W)
    columns = opaque(gl.to_tensor(0)) + gl.arange(0, W, gl.SliceLayout(0, layout))
    rows = tile * ROWS + opaque(gl.to_tensor(0)) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return columns[None, :], rows[:, None]
