"""Where a program's sequence, chunk, segment and head lie."""

import triton
import triton.language as tl


@triton.jit
def locate_sequence(i, owner, first, cu, T, PER, PACKED: tl.constexpr):
    """Piece ``i`` (a chunk or a segment): its sequence, its number in it, first token, length, and batch row."""
    if PACKED:
        n = tl.load(owner + i).to(tl.int64)
        piece = i - tl.load(first + n)
        start = tl.load(cu + n).to(tl.int64)
        length = tl.load(cu + n + 1).to(tl.int64) - start
        return n, piece, start, length, n * 0
    n = (i // PER).to(tl.int64)
    return n, i % PER, n * 0, n * 0 + T, n


@triton.jit
def items_there(COUNT, first, N, EACH, PACKED: tl.constexpr):
    """How many of ``COUNT`` items, ``EACH`` a piece, belong to pieces that there are: for programs that share them all.

    There is room for more pieces than packed sequences have; those of sequences come first.
    """
    if PACKED:
        return tl.minimum(COUNT, tl.load(first + N) * EACH)
    return COUNT


@triton.jit
def locate_segment(i, owner, first, cu, T, PER, SEGMENT, C: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr):
    """Segment ``i``: its sequence, first token, length and batch row, first chunk and the one past its last.

    ``WHOLE`` says that a segment is a sequence; otherwise it is ``SEGMENT`` chunks of one.
    """
    if PACKED and WHOLE:
        n = i.to(tl.int64)
        bos = tl.load(cu + n).to(tl.int64)
        L = tl.load(cu + n + 1).to(tl.int64) - bos
        b = n * 0
        low = 0
    else:
        n, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
        low = piece * SEGMENT
    chunks = ((L + C - 1) // C).to(tl.int32)
    if WHOLE:
        high = chunks
    else:
        high = tl.minimum(low + SEGMENT, chunks)
    return n, bos, L, b, low, high


@triton.jit
def head_pointer(x, b, bos, hv, stride_b, stride_t, stride_h, GROUP: tl.constexpr):
    """Where a head's rows of ``x [B, T, heads, width]`` begin: token ``bos`` of row ``b``, for value head ``hv``."""
    return x + b * stride_b + bos * stride_t + (hv // GROUP).to(tl.int64) * stride_h


@triton.jit
def state_tile(p, columns_k, columns_v, sk, sv):
    """Places of a tile of a state at ``p``, whose rows and columns lie so far apart; columns as they are to be broadcast."""
    return p + (columns_k.to(tl.int64) * sk + columns_v.to(tl.int64) * sv)


@triton.jit
def load_state(x, i, hv, columns_k, columns_v, inside, sn, sh, sk, sv):
    """A tile, float32, of head ``hv`` of state ``i`` of ``x [states, heads, K, V]``; columns as they are to be broadcast."""
    p = x + i.to(tl.int64) * sn + hv.to(tl.int64) * sh
    return tl.load(state_tile(p, columns_k, columns_v, sk, sv), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def chunk_at(step, low, high, REVERSE: tl.constexpr):
    """The chunk of a step of a walk through ``low … high``."""
    if REVERSE:
        return low + high - 1 - step
    return step


@triton.jit
def state_offsets(columns_k, columns_v, K: tl.constexpr, V: tl.constexpr):
    """Offsets of a tile of a state ``[K, V]``, and which of them are inside."""
    inside = (columns_k < K)[:, None] & (columns_v < V)[None, :]
    return columns_k[:, None] * V + columns_v[None, :], inside
