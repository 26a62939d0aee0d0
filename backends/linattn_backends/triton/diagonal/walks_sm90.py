"""Which sequences a program of a scan goes through, in Gluon, for Hopper.

A program scans a segment: a sequence or, where there are few, a piece of one, which it may share with another program. Where
sequences are many and short it scans several (``MANY``), as :mod:`..lib.sm90_walks` has it, and its rings go on from each to
the next.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..lib.indexing import locate_segment
from ..lib.sm90_walks import ask_bounds, bounds


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
def ask_segment(c, walk, m):
    """What :func:`span_of` asks memory for of segment ``m`` of a walk, if there are ``MANY``."""
    if c.PACKED and c.MANY:
        asked = ask_bounds(walk.cu, 0, segment_of(walk, m), walk.N, True)
    else:
        asked = walk.i
    return asked


@gluon.jit
def span_of(c, walk, m, asked):
    """Segment ``m`` of a walk, which was :func:`asked <ask_segment>` for."""
    if c.PACKED and c.MANY:
        n = segment_of(walk, m).to(gl.int64)
        begin, end = bounds(asked, 0, True)
        bos = begin.to(gl.int64)
        L = end.to(gl.int64) - bos
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
    return span_of(c, walk, 0, walk.i)


@gluon.jit
def ask_first_chunk(c, walk, m, chunk_first):
    """What :func:`first_chunk` asks memory for of segment ``m`` of a walk, if there are ``MANY``."""
    if c.PACKED and c.MANY:
        asked = ask_bounds(chunk_first, 0, segment_of(walk, m), walk.N, True)
    else:
        asked = walk.i
    return asked


@gluon.jit
def first_chunk(c, walk, n, chunk_first, asked):
    """The number of sequence ``n``'s first chunk among those of all sequences; of ``MANY``, it was
    :func:`asked <ask_first_chunk>` for.
    """
    if c.PACKED and c.MANY:
        begin, _ = bounds(asked, 0, True)
        return begin.to(gl.int64)
    if c.PACKED:
        return gl.load(chunk_first + n).to(gl.int64)
    return n * ((walk.T + c.C - 1) // c.C)


@gluon.jit
def rows_unless(skipped, count, SHARE: gl.constexpr):
    """``count``; of a scan that two share, zero if this is ``skipped``."""
    if SHARE:
        return gl.where(skipped, 0, count)
    return count
