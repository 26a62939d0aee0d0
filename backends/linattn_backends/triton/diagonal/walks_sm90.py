"""Which sequences a program of a scan goes through, in Gluon, for Hopper.

A program scans a segment: a sequence or, where there are few, a piece of one, which it may share with another program. Where
sequences are many and short it scans several, one after the other (``MANY``), and its rings go on from each to the next: what a
program does once is done once for all of them. They are ``STEP`` apart, which is as many as a tile of a head has programs,
so that long sequences among short ones, which often stand together, are different programs'.

So each partition has two loops. The inner one goes through a segment's chunks from 0, and those that are ``done`` are added to
their number inside: Triton drops a sum that does nothing but begin an inner loop.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..lib.indexing import locate_segment
from ..lib.sm90 import mma_layout
from ..lib.sm90_pipeline import opaque


class Walk(NamedTuple):
    """The segments of a program.

    Attributes:
        i: Its first.
        last: Whether it comes to the end of its segments, as the first of two programs that share one does not.
        owner, first, cu, T, PER, SEGMENT: Where segments lie, as :func:`..lib.indexing.locate_segment` has them.
        N: How many sequences there are.
        STEP: Where there are ``MANY``, how far apart those of a program are.
    """

    i: gl.tensor
    last: gl.tensor
    owner: gl.tensor
    first: gl.tensor
    cu: gl.tensor
    T: gl.tensor
    PER: gl.tensor
    SEGMENT: gl.tensor
    N: gl.tensor
    STEP: gl.tensor


class Span(NamedTuple):
    """A segment's place: sequence ``n``, which begins ``bos`` tokens into batch row ``row``, and its chunks ``low … high``.

    Its tokens end before ``limit``; the first ``skip`` chunks are scanned for the state alone.
    """

    n: gl.tensor
    bos: gl.tensor
    row: gl.tensor
    limit: gl.tensor
    low: gl.tensor
    high: gl.tensor
    skip: gl.tensor


@gluon.jit
def walk_of(
    i, owner, first, cu, T, PER, SEGMENT, N, STEP,
    PACKED: gl.constexpr, WHOLE: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """The segments of program ``i`` of a tile of a head."""
    if WHOLE or not PACKED:  # nobody reads these, and a tuple holds no ``None``
        owner = i
        first = i
    if not PACKED:
        cu = i
    last = i * 0 + 1
    if SHARE:
        last = i % 2
        i = i // 2
    return Walk(i, last, owner, first, cu, T, PER, SEGMENT, N, STEP)


@gluon.jit
def segments_of(c, walk):
    """How many segments a program scans."""
    if c.MANY:
        return (walk.N - walk.i + walk.STEP - 1) // walk.STEP
    return 1


@gluon.jit
def segment_of(walk, m):
    """The number of segment ``m`` of a walk among all of them."""
    return walk.i + m * walk.STEP


@gluon.jit
def bounds_of(c, walk, m):
    """Where sequence ``m`` of a walk begins and ends among packed ones, if there are ``MANY``; past the last, where that does.

    A partition asks for them a sequence ahead: it would wait for memory else before each.
    """
    if c.PACKED and c.MANY:
        n = gl.minimum(segment_of(walk, m), walk.N - 1)
        return gl.load(walk.cu + n), gl.load(walk.cu + n + 1)
    return walk.i, walk.i


@gluon.jit
def span_of(c, walk, m, bos, eos):
    """Segment ``m`` of a walk, whose ``bounds_of`` are known."""
    if c.PACKED and c.MANY:
        n = segment_of(walk, m).to(gl.int64)
        bos = bos.to(gl.int64)
        L = eos.to(gl.int64) - bos
        row = n * 0
        low = 0
        high = (L + c.C - 1) // c.C
    else:
        n, bos, L, row, low, high = locate_segment(
            segment_of(walk, m), walk.owner, walk.first, walk.cu, walk.T, walk.PER, walk.SEGMENT, c.C, c.PACKED, c.WHOLE
        )
    low = gl.to_tensor(low).to(gl.int32)
    high = high.to(gl.int32)
    skip = low * 0
    if c.SHARE:
        ahead = (high - low) * c.SHARE // 16
        skip = ahead * walk.last
        if c.REVERSE:
            low = gl.where(walk.last == 1, low, high - ahead)
        else:
            high = gl.where(walk.last == 1, high, low + ahead)
    return Span(n, bos, row, gl.minimum(L, high * c.C).to(gl.int32), low, high, skip)


@gluon.jit
def only_span(c, walk):
    """The one segment of a walk that is not of ``MANY``."""
    return span_of(c, walk, 0, walk.i, walk.i)


@gluon.jit
def first_chunk(c, walk, n, chunk_first):
    """The number of sequence ``n``'s first chunk among those of all sequences."""
    if c.PACKED:
        return gl.load(chunk_first + n).to(gl.int64)
    return n * ((walk.T + c.C - 1) // c.C)


@gluon.jit
def state_channels(tile, W: gl.constexpr, ROWS: gl.constexpr):
    """The channels of a state's tile ``[ROWS, W]``, to be broadcast, made anew: addresses of all are too many to be kept."""
    layout: gl.constexpr = mma_layout(W)
    columns = opaque(gl.to_tensor(0)) + gl.arange(0, W, gl.SliceLayout(0, layout))
    rows = tile * ROWS + opaque(gl.to_tensor(0)) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return columns[None, :], rows[:, None]


@gluon.jit
def rows_unless(skipped, count, SHARE: gl.constexpr):
    """``count``; of a scan that two share, zero if this is ``skipped``."""
    if SHARE:
        return gl.where(skipped, 0, count)
    return count
