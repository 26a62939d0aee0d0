"""Parts of a problem: some of its rows, heads, tokens and channels, of which the result is a part of the whole one.

An output depends on no later token, no other row, head or value channel, nor on key channels in which queries and keys are
zero. So one truth serves for calls of many sizes: each row has a length, and each head widths, beyond which queries and keys
are zero, and so are the gradients that are fed in. Whatever holds that much is a part.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from linattn.plugin import FORMS
from numpy.typing import NDArray

from .cases import Case, problem

__all__ = ["Part", "Support", "beyond", "dealt", "draw_parts", "support_of"]

WIDTHS = ("K", "L", "V")
"""Symbols of the widths of heads."""
LAID_OUT = ("strided", "sliced", "headsfirst", "reversed", "misaligned")
TOKENS = 2**12
"""Tokens of the parts of a problem, beyond which no more are drawn, unless it is long."""
LONG = 1000
"""From so many tokens on a problem is long: the lengths of its parts are edges alone, of which few others are worth a call."""
FIRST_OF_LONG = 256
"""The first of them."""
OF_LONG = 5
"""So many times the length of a long problem are the tokens of all edges up to it."""
WHOLE = 0.2
"""The share of parts that have all tokens of their rows, and so their final states."""
PACKED = 0.4
SEVERAL = 0.7
"""The share of parts with more than one row, and with more than one head, if there is room."""
CHUNKED, LONGEST_CHUNK = 0.8, 300
"""The share of parts with a chunk size, where it changes no result, and the longest."""
MAGNIFIED = 0.4
"""The share of parts with larger values and states, where outputs are multiples of them."""
MAGNITUDES = tuple(2.0**n for n in range(5, 31))
"""By powers of two, which round nothing, and no less than one, as scales."""
SCALES = (0.0, -1.45, 37.0, 2000.0)
"""What a scale is multiplied by: nothing, or no less than one, so that what is flushed to zero counts no more than before. What
is usual for a width is well below one: these are some below zero, between one and thirty, and above.
"""
SCALED = 0.5
"""The share of parts with another scale, where outputs are multiples of it."""
LAID = 0.5
"""The share of parts that have layouts, and of the arrays of such a part those that have one, each its own."""


@dataclass(frozen=True)
class Support:
    """Beyond what there is nothing.

    Attributes:
        tokens: Of each row, into how many a gradient is fed.
        widths: By symbol, of each query/key head how many channels hold something.
    """

    tokens: tuple[int, ...]
    widths: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """A part of a problem, and how it is called.

    Attributes:
        rows: Which rows.
        lengths: So many first tokens of each.
        packed: They are sequences of one row.
        heads: Which query/key heads.
        group: So many first value heads of each.
        widths: By symbol, so many first channels.
        chunk_size: What is asked for, where it changes no result.
        scale: By so much the scale is larger, of which outputs are multiples.
        magnitude: By so much values and states are larger.
        wide: Offsets are int64.
        layouts: By array, unless it is plain.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    packed: bool
    heads: tuple[int, ...]
    group: int
    widths: dict[str, int]
    chunk_size: int | None
    scale: float
    magnitude: float
    wide: bool
    layouts: dict[str, str]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of its call."""
        tokens = {"B": 1, "T": sum(self.lengths)} if self.packed else {"B": len(self.rows), "T": self.lengths[0]}
        heads = {"H": len(self.heads), "HV": len(self.heads) * self.group} if self.heads else {}
        return {**tokens, "N": len(self.rows), **heads, **self.widths}

    def __str__(self) -> str:
        how = ["packed"] if self.packed else []
        how += [f"{layout}.{name}" for name, layout in self.layouts.items()]
        how += [f"C{self.chunk_size}"] if self.chunk_size else []
        how += [f"scale x {self.scale:g}"] if self.scale != 1.0 else []
        how += [f"values x {self.magnitude:g}"] if self.magnitude != 1.0 else []
        return "-".join([*(f"{symbol}{size}" for symbol, size in self.sizes.items()), *how])

    def cut(self, x: Any, symbols: Sequence[str], group: int = 1) -> Any:
        """The part of an array, or of a sealed one; an axis with one entry for all, as noise has, stays.

        Args:
            x: The array.
            symbols: Its axes.
            group: Value heads for each query/key head, of the whole.
        """
        if "T" in symbols:
            x = x[self._tokens()]
        elif symbols[0] in ("N", "B"):
            x = x[list(self.rows)]
        for axis, symbol in enumerate(symbols):
            if (index := self._index(symbol, group)) is not None and x.shape[axis] != 1:
                x = x[(slice(None),) * axis + (index,)]
        return x

    def _tokens(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Of each token of the call, its row and its place there."""
        if self.packed:
            return np.repeat(self.rows, self.lengths)[None], np.concatenate([np.arange(n) for n in self.lengths])[None]
        return np.array(self.rows)[:, None], np.arange(self.lengths[0])[None]

    def _index(self, symbol: str, group: int) -> Any:
        if symbol == "H":
            return list(self.heads)
        if symbol == "HV":
            return [head * group + i for head in self.heads for i in range(self.group)]
        if symbol == "V+1":  # behind values stands the sum of keys
            return [*range(self.widths["V"]), -1]
        return slice(self.widths[symbol]) if symbol in self.widths else None


def generator(case: Case, place: int) -> np.random.Generator:
    """What is drawn with for a case, beside its arrays."""
    return np.random.default_rng(zlib.crc32(repr(problem(case)).encode()) + place)


def is_edge(n: int) -> bool:
    """True for powers of two and their neighbours, where tiles and chunks begin and end."""
    return any((n + i).bit_count() == 1 for i in (-1, 0, 1))


@functools.cache
def edges_between(least: int, most: int) -> tuple[int, ...]:
    """The edges from one size to another."""
    return tuple(n for n in range(least, most + 1) if is_edge(n))


def size_between(rng: np.random.Generator, least: int, most: int) -> int:
    """A size: small ones, and those around powers of two, more often than others."""
    edges = edges_between(least, most)
    if edges and rng.random() < 0.5:
        return edges[rng.integers(len(edges))]
    return min(max(round(2 ** rng.uniform(np.log2(max(least, 1)), np.log2(max(most, 1)))), least), most)


def dealt(case: Case, symbol: str, turn: int, least: int, most: int) -> int:
    """The size that comes in turn: an edge and another one by turns, none of them again before all were dealt; of the tokens of
    a long problem edges alone.
    """
    edge, order = turn % 2 == 0, shuffled(case.op, seed_of(case), symbol, most)
    if symbol == "T" and most >= LONG:
        edge, least = True, max(least, FIRST_OF_LONG)
    else:
        turn //= 2
    chosen = [n for n in order[edge] if n >= least] or [n for n in (*order[0], *order[1]) if n >= least]
    return chosen[turn % len(chosen)]


@functools.cache
def shuffled(op: str, seed: str, symbol: str, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes up to one in the order in which they are dealt: those that are no edges, and those that are."""
    order = (np.random.default_rng(zlib.crc32(repr((op, seed, symbol)).encode())).permutation(most) + 1).tolist()
    return tuple(n for n in order if not is_edge(n)), tuple(n for n in order if is_edge(n))


def seed_of(case: Case) -> str:
    """The seed of a fresh case, or nothing."""
    return next((flag for flag in case.flags if flag.startswith("seed.")), "")


def support_of(case: Case) -> Support:
    """The support of a problem."""
    rng, sizes = generator(case, 3), case.size

    def drawn(count: int, most: int) -> tuple[int, ...]:
        return tuple(most if rng.random() < WHOLE else size_between(rng, 1, most) for _ in range(count))

    tokens = drawn(sizes["B"], sizes["T"])
    widths = {symbol: drawn(sizes["H"], sizes[symbol]) for symbol in WIDTHS if symbol in sizes}
    return Support((sizes["T"],) * sizes["B"] if "noncausal" in case.flags else tokens, widths)


def beyond(x: NDArray[Any], symbols: Sequence[str], case: Case, keys_alone: bool = False) -> NDArray[Any]:
    """An array with zeros beyond the support of a case: in channels of keys, and unless those alone in all others."""
    support = support_of(case)
    for axis, symbol in enumerate(symbols):
        base = symbol.partition("+")[0]
        if base in support.widths and not (keys_alone and base == "V"):
            heads = next(i for i, name in enumerate(symbols) if name in ("H", "HV"))
            ends = np.repeat(support.widths[base], x.shape[heads] // len(support.widths[base]))
            held = np.arange(x.shape[axis]) < ends[:, None]
            held[:, -1] |= symbol == "V+1"
            shape = [x.shape[i] if i in (heads, axis) else 1 for i in range(x.ndim)]
            x = np.where(held.reshape(shape), x, 0.0)
        if symbol == "T" and not keys_alone:
            held = np.arange(x.shape[axis]) < np.array(support.tokens)[:, None]
            x = np.where(held.reshape(*held.shape, *[1] * (x.ndim - 2)), x, 0.0)
        if symbol == "N" and not keys_alone:  # a state behind the last token
            held = np.array(support.tokens) == case.size["T"]
            x = np.where(held.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)
    return x


def draw_parts(case: Case, gradients: bool, count: int, group: int = 1) -> list[Part]:
    """So many parts that hold the support of a case, others in each form, and fewer if they are long. Without gradients only
    keys have a support, and heads of a ``group`` may be left out, whose gradients a head of keys is the sum of.
    """
    support, sizes = support_of(case), case.size
    if not gradients:
        least = (sizes["T"] if "noncausal" in case.flags else 0,) * sizes["B"]
        free = {symbol: (1,) * len(ends) for symbol, ends in support.widths.items() if symbol == "V"}
        support = Support(least, support.widths | free)
    place = FORMS.index(case.form) if case.form in FORMS else 0
    rng, found, tokens, begun = generator(case, 4 + place), [], 0, count * (len(FORMS) * (case.place or 0) + place)
    while len(found) < count and tokens < (OF_LONG * sizes["T"] if sizes["T"] >= LONG else TOKENS):
        turn = begun + len(found)
        found.append(draw_part(rng, case, support, turn, gradients, group))
        tokens += found[-1].sizes["T"] * found[-1].sizes["B"]
    return found


def several(rng: np.random.Generator, most: int) -> int:
    """How many of so many: more than one, mostly, for of a single thing less is seen."""
    return size_between(rng, min(2 if rng.random() < SEVERAL else 1, most), most)


def is_linear(case: Case) -> bool:
    """True for outputs that are multiples of values and states together, and of a scale, and that the dtype holds."""
    flags = {"normalize", "bias", "activation.silu", "large", "vast"}
    narrow = case.dtype not in ("float32", "float64") or any(flag.startswith("fp16.") for flag in case.flags)
    return not narrow and not flags.intersection(case.flags)


def draw_part(rng: np.random.Generator, case: Case, support: Support, turn: int, gradients: bool, group: int) -> Part:
    """A part that holds a row and a head, drawn first, and others for which it has room; its sizes come in turn."""
    sizes, spec = case.size, case.spec
    row, head = (int(rng.integers(sizes.get(symbol, 1))) for symbol in ("B", "H"))
    long = sizes["T"] >= LONG
    whole = rng.random() < WHOLE and not long
    T = sizes["T"] if whole else dealt(case, "T", turn, max(support.tokens[row], 1), sizes["T"])
    widths = {symbol: dealt(case, symbol, turn, ends[head], sizes[symbol]) for symbol, ends in support.widths.items()}
    widths |= {"D": dealt(case, "D", turn, 1, sizes["D"])} if "D" in sizes else {}
    packed = spec.index is not None and rng.random() < PACKED and not long
    rows = [i for i, n in enumerate(support.tokens) if packed or n <= T]
    heads = [i for i in range(sizes.get("H", 0)) if all(ends[i] <= widths[s] for s, ends in support.widths.items())]
    rows, heads = (rng.permutation(x)[: several(rng, len(x))].tolist() for x in (rows, heads))
    lengths = [T if whole or not packed else size_between(rng, support.tokens[i], sizes["T"]) for i in rows]
    names = [arg.name for arg in (*spec.args, *spec.keyword_args)] + ["initial_state"]
    scaled = not gradients and is_linear(case) and "scale" in spec.option_names and rng.random() < SCALED
    magnified = not gradients and is_linear(case) and rng.random() < MAGNIFIED
    chunked = spec.state_type is None and rng.random() < CHUNKED
    chunk_size = dealt(case, "C", turn, 1, LONGEST_CHUNK) if chunked else None
    laid = [name for name in names if rng.random() < LAID] if rng.random() < LAID else []
    return Part(
        rows=tuple(rows),
        lengths=tuple(lengths),
        packed=packed,
        heads=tuple(heads),
        group=group if gradients else 1 + turn % group,
        widths=widths,
        chunk_size=chunk_size,
        scale=float(rng.choice(SCALES)) if scaled else 1.0,
        magnitude=float(rng.choice(MAGNITUDES)) if magnified else 1.0,
        wide=bool(rng.integers(2)),
        layouts={name: str(rng.choice(LAID_OUT)) for name in laid},
    )
