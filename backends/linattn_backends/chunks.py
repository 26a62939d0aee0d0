"""How many tokens a chunk has: what a caller wishes for, as far as the algorithm and the sequence allow."""

from __future__ import annotations

CHUNK = 64
SHORTEST = 16
LONGEST = 256  # tokens that a caller may wish for
SYSTEM = 64  # of a triangular system at most: it reads a state in full, however much of it its tokens have overwritten
CHUNKS_A_SEGMENT = 8  # worked on at once


def power_of_two(n: int) -> int:
    """The least power of two that is ``≥ n``."""
    return 1 << max(n - 1, 0).bit_length()


def widest(solves: bool) -> int:
    """Tokens of a chunk at most: fewer where it ``solves`` a triangular system."""
    return SYSTEM if solves else LONGEST


def wished(chunk_size: int | None, most: int) -> int:
    """The caller's wish, a power of two in 16 … ``most``."""
    return min(max(power_of_two(chunk_size or CHUNK), SHORTEST), most)


def chunk_length(form: str, chunk_size: int | None, longest: int, packed: bool, most: int) -> int:
    """Tokens a chunk, none longer than a sequence: a power of two in 16 … ``most``, or that of a shorter sequence.

    The parallel form has all of a sequence in one chunk; the longest chunks where these are limited, and of packed sequences,
    which have no static length.
    """
    if form == "parallel":
        wanted = most if packed or most < LONGEST else power_of_two(longest)
    else:
        wanted = wished(chunk_size, most)
    return min(wanted, power_of_two(longest))
