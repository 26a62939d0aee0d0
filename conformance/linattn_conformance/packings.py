"""How sequences are packed: the lengths of the kinds that cases name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["KINDS", "lengths"]

Draw = Callable[[int, np.random.Generator], list[int]]
CHUNKS = (16, 64, 128)


def parts(T: int, count: int, rng: np.random.Generator) -> list[int]:
    """``T`` tokens as so many sequences of any length."""
    cuts = np.sort(rng.integers(0, T + 1, count - 1))
    return np.diff([0, *cuts, T]).tolist()


def one(T: int, rng: np.random.Generator) -> list[int]:
    """A single sequence."""
    return [T]


def several(T: int, rng: np.random.Generator) -> list[int]:
    """Some sequences."""
    return parts(T, int(rng.integers(2, 7)), rng)


def dozens(T: int, rng: np.random.Generator) -> list[int]:
    """Some ten to forty sequences, empty ones among them where there are few tokens."""
    return parts(T, int(rng.integers(8, 45)), rng)


def empties(T: int, rng: np.random.Generator) -> list[int]:
    """Empty ones among them: at one end, and inside."""
    found = several(T, rng)
    for place in (int(rng.integers(1, len(found))), int(rng.choice([0, len(found)]))):
        found.insert(place, 0)
    return found


def adjacent(T: int, rng: np.random.Generator) -> list[int]:
    """Empty ones side by side, at both ends and inside."""
    found = several(T, rng)
    inside = int(rng.integers(1, len(found)))
    return [0, 0, *found[:inside], *[0] * int(rng.integers(2, 6)), *found[inside:], 0, 0, 0]


def chunks(T: int, rng: np.random.Generator) -> list[int]:
    """Whole chunks, and what is left at the end."""
    chunk = int(rng.choice([size for size in CHUNKS if size <= T] or [1]))
    whole = T // chunk
    found = [chunk * n for n in parts(whole, min(3, whole), rng)] if whole else []
    return [*found, T % chunk] if T % chunk or not found else found


def ones(T: int, rng: np.random.Generator) -> list[int]:
    """Single tokens around a longer sequence."""
    single = min(T, int(rng.integers(2, 8)))
    first = single // 2
    return [*[1] * first, T - single, *[1] * (single - first)]


def tail(T: int, rng: np.random.Generator) -> list[int]:
    """Tokens that belong to no sequence stand after the last one."""
    return several(T - int(rng.integers(min(T, 1), min(T, 70) + 1)), rng)


def nothing(T: int, rng: np.random.Generator) -> list[int]:
    """No token belongs to a sequence."""
    return [0] * int(rng.integers(1, 4))


def many(T: int, rng: np.random.Generator) -> list[int]:
    """As many sequences as there are tokens, or more: of none to a few."""
    return parts(T, min(T + 2, 150), rng)


KINDS: dict[str, Draw] = {
    "one": one,
    "several": several,
    "dozens": dozens,
    "empties": empties,
    "adjacent": adjacent,
    "chunks": chunks,
    "ones": ones,
    "tail": tail,
    "nothing": nothing,
    "many": many,
}


def lengths(kind: str, T: int, rng: np.random.Generator) -> list[int]:
    """The lengths of a kind of packing of ``T`` tokens; they sum to ``T``, or less where tokens are left over."""
    return KINDS[kind](T, rng)
