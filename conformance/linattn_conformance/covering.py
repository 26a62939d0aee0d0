"""Covering arrays: few rows, each one level of every factor, in which every two levels that may meet do meet.

Rows are made one at a time, each begun with two levels that have not met and filled greedily, so that the first rows cover most
(AETG: Cohen, Dalal, Fredman and Patton, 1997). Equal arguments give equal rows.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np

__all__ = ["Covering", "Factor", "Pairs", "Row", "cover"]

Row = dict[str, str]
"""A level of each factor, by name."""
Refuses = Callable[[Mapping[str, str]], str]
"""Why levels may not meet, of some of the factors; empty if they may."""
TRIES = 3
"""Rows that are made for each one that is kept."""
OF_A_RARE_LEVEL = 6
"""Rows that have it."""
OF_A_HIDING_LEVEL = 5
"""Rows that have it."""
FIRST_OF_A_RARE_LEVEL = 2
"""Those of them that a part of an array has."""
FIRST_OF_A_HIDING_LEVEL = 1
"""Those of them that such a part has."""


@dataclass(frozen=True)
class Factor:
    """Something that rows differ in.

    Attributes:
        name: Its name.
        levels: Names of its levels, the usual one first.
        varied: Where nothing is left to cover, any level is taken; else the usual one.
        costs: What a level adds to the cost of a row; 0 if it is not named.
        rare: Levels that stand in a few rows only, with other levels each time. By name, why.
        hiding: Those of them beside which little can be seen of other levels: only pairs of their own are covered there.
        thin: Levels of a single thing, beside which some of what goes wrong cannot be seen: they stand in a row that is made
            for them, or where nothing else has room. By name, a factor at whose other levels one is many; empty for none.
        late: Levels that come in rows of their own, after all others, because not every subject of a trial knows them.
    """

    name: str
    levels: tuple[str, ...]
    varied: bool = False
    costs: Mapping[str, float] = field(default_factory=dict)
    rare: Mapping[str, str] = field(default_factory=dict)
    hiding: frozenset[str] = frozenset()
    thin: Mapping[str, str] = field(default_factory=dict)
    late: frozenset[str] = frozenset()


@dataclass
class Covering:
    """What was made.

    Attributes:
        rows: The rows, in the order in which they were made.
        usual: How many of them have no rare level and no late one. Behind them stand those with a rare level, the first
            rows of each level first.
        early: How many of them have no late level.
        pairs: How many of them cover all pairs; those after them are for the triples.
        missing: What meets in no row, as ``factor=level`` texts, and why.
    """

    rows: list[Row]
    usual: int
    early: int
    pairs: int
    missing: dict[tuple[str, ...], str]


class Pairs:
    """Which two levels may meet: ``wanted[i, j]`` of the levels ``of[i]`` and ``of[j]``, and of the others why not.

    Args:
        factors: What rows differ in.
        refuses: Which two levels may not meet.
        limit: Most that a row may cost.
        usual: Most that one costs, unless the levels that it is made for cost more.
    """

    def __init__(self, factors: Sequence[Factor], refuses: Refuses, limit: float, usual: float = math.inf) -> None:
        self.factors, self.limit, self.usual = factors, limit, min(usual, limit)
        self.of = [(factor, level) for factor in factors for level in factor.levels]
        self.costs = [factor.costs.get(level, 0.0) for factor, level in self.of]
        self.wanted = np.zeros((len(self.of), len(self.of)), bool)
        self.missing: dict[tuple[str, ...], str] = {}
        for (i, (f, a)), (j, (g, b)) in combinations(enumerate(self.of), 2):
            if f is g:
                continue
            reason = refuses({f.name: a, g.name: b})
            if not reason and self.costs[i] + self.costs[j] > limit:
                reason = "it would cost too much"
            if reason:
                self.missing[self.told(i, j)] = reason
            else:
                self.wanted[i, j] = self.wanted[j, i] = True

    def told(self, *places: int) -> tuple[str, ...]:
        return tuple(f"{self.of[i][0].name}={self.of[i][1]}" for i in places)


def cover(asked: Pairs, seed: int, triples: Iterable[tuple[str, str, str]] = (), most: int = 0, least: int = 0) -> Covering:
    """Rows in which every two levels meet that may, and every three levels of some factors.

    Args:
        asked: Which two may.
        seed: Of the choices between equals.
        triples: Names of three factors each.
        most: Only so many rows, without late levels, and beside them a few of each rare level; 0 for as many as it takes.
        least: So many rows for pairs at least, in which levels meet once more, where fewer would do.
    """
    made = _Maker(asked, np.random.default_rng(seed), most)
    made.pass_over_pairs(late=False)
    while not most and len(made.rows) < least and made.once_more(least):
        pass
    usual = len(made.rows)
    made.add_rare()
    early = len(made.rows)
    if not most:
        made.pass_over_pairs(late=True)
    pairs = len(made.rows)
    made.pass_over_triples(() if most else triples)
    return Covering(made.rows, usual, early, pairs, made.missing | made.missing_of_rare())


class _Maker:
    """Rows so far, and what they have left to cover: ``open[i, j]`` is true of two levels that are still to meet."""

    def __init__(self, asked: Pairs, rng: np.random.Generator, most: int) -> None:
        self.factors, self.limit, self.usual, self.rng, self.most = asked.factors, asked.limit, asked.usual, rng, most
        self.of, self.costs, self.wanted, self.told = asked.of, asked.costs, asked.wanted, asked.told
        self.index = {(factor.name, level): i for i, (factor, level) in enumerate(self.of)}
        self.by_name = {factor.name: factor for factor in self.factors}
        self.rows: list[Row] = []
        self.missing = dict(asked.missing)
        self.late = np.array([level in factor.late for factor, level in self.of])
        # Each factor, the place of its first level, how many it has, and whether any of them costs something.
        self.kinds = [
            (each, self.index[each.name, each.levels[0]], len(each.levels), any(each.costs.values())) for each in self.factors
        ]
        self.rare = rare = np.array([level in factor.rare for factor, level in self.of])
        self.open = self.wanted & ~rare[:, None] & ~rare[None, :]
        self.dear = self.wanted & ~self.open
        # Sets of levels as numbers, a bit each: rows are filled one level at a time, a million of them.
        self.beside = _bits_of_rows(self.wanted)
        self.usable = _bits_of_rows(np.stack((~rare & ~self.late, ~rare)))  # without late levels, and with them

    @property
    def full(self) -> bool:
        return bool(self.most) and len(self.rows) >= self.most

    def pass_over_pairs(self, late: bool) -> None:
        """Rows until every pair is covered; without late levels unless ``late``."""
        asked = self.open if late else self.open & ~self.late[:, None] & ~self.late[None, :]
        hopeless = np.zeros_like(asked)
        while (left := asked & self.open & ~hopeless).any() and not self.full:
            begun = self._begin(left)
            row = self._best({self.of[i][0].name: self.of[i][1] for i in begun}, left, late)
            if row is None:
                hopeless[begun] = hopeless[begun[::-1]] = True
                self.missing[self.told(*begun)] = "no row has room for both"
                self.open[begun] = self.open[begun[::-1]] = False
            else:
                self.add(row)

    def once_more(self, most: int) -> bool:
        """Rows in which the pairs of levels meet again that are neither rare nor late, but no more rows than ``most``; whether
        there are more rows now.
        """
        before, left, missing = len(self.rows), self.open, dict(self.missing)
        self.most = most
        self.open = self.wanted & ~self.rare[:, None] & ~self.rare[None, :] & ~self.late[:, None] & ~self.late[None, :]
        self.pass_over_pairs(late=False)
        self.open, self.missing, self.most = left, missing, 0
        return len(self.rows) > before

    def add_rare(self) -> None:
        """Some rows of each rare level, with other levels every time, those first that a part of an array has."""
        rare = sorted((self.of[i] for i in np.flatnonzero(self.rare)), key=lambda item: item[1] in item[0].hiding)
        for n in range(FIRST_OF_A_RARE_LEVEL if self.most else OF_A_RARE_LEVEL):
            for factor, level in rare:
                rows = FIRST_OF_A_HIDING_LEVEL if self.most else OF_A_HIDING_LEVEL
                if level in factor.hiding and n >= rows:
                    continue
                row = self._best({factor.name: level}, self.dear, False)
                if row is not None:
                    self.add(row)

    def missing_of_rare(self) -> dict[tuple[str, ...], str]:
        """What rare levels have not met, and why."""
        found = {}
        for i in np.flatnonzero(self.rare):
            factor, level = self.of[i]
            found |= {self.told(*sorted((i, j))): factor.rare[level] for j in np.flatnonzero(self.dear[i])}
        return found

    def pass_over_triples(self, triples: Iterable[tuple[str, str, str]]) -> None:
        """Rows until every triple of these factors that may meet has met."""
        for names in triples:
            chosen = [self.by_name[name] for name in names if name in self.by_name]
            if len(chosen) < 3:
                continue
            met = {tuple(row[factor.name] for factor in chosen) for row in self.rows}
            for levels in product(*(factor.levels for factor in chosen)):
                begun = {factor.name: level for factor, level in zip(chosen, levels, strict=True)}
                if levels in met or any(level in f.rare for f, level in zip(chosen, levels, strict=True)):
                    continue
                places = self._places(begun)
                together = all(self.wanted[i, j] for i, j in combinations(places, 2))
                row = self._best(begun, self.wanted, True) if together else None
                if row is not None:
                    self.add(row)
                else:
                    self.missing[self.told(*places)] = (
                        "no row has room for all three" if together else "two of them may not meet"
                    )

    def add(self, row: Row) -> None:
        self.rows.append(row)
        places = np.ix_(*[self._places(row)] * 2)
        self.dear[places] = False
        if not any(row[factor.name] in factor.hiding for factor in self.factors):
            self.open[places] = False

    def _places(self, row: Row) -> list[int]:
        return [self.index[item] for item in row.items()]

    def _begin(self, left: np.ndarray) -> tuple[int, int]:
        """Two levels that have not met: those that have most left."""
        counts = left.sum(1)
        i = int(np.argmax(counts))
        others = np.flatnonzero(left[i])
        j = int(others[np.argmax(counts[others])])
        return (i, j) if i < j else (j, i)

    def _best(self, begun: Row, left: np.ndarray, late: bool) -> Row | None:
        """Of some rows that begin so the one that covers most."""
        partners = _bits_of_rows(left)
        found = [row for _ in range(TRIES) if (row := self._fill(begun, partners, late)) is not None]
        return max(found, key=lambda row: self._covered(row, partners)) if found else None

    def _covered(self, row: Row, partners: list[int]) -> int:
        """How many of the pairs of a row are among those of ``partners``, each counted twice."""
        places = self._places(row)
        together = sum(1 << place for place in places)
        return sum((partners[place] & together).bit_count() for place in places)

    def _fill(self, begun: Row, partners: list[int], late: bool) -> Row | None:
        row, chosen = dict(begun), self._places(begun)
        spent = sum(self.costs[place] for place in chosen)
        if spent > self.limit:
            return None
        limit = max(self.usual, spent)
        may = functools.reduce(operator.and_, (self.beside[place] for place in chosen), self.usable[late])
        together = sum(1 << place for place in chosen)
        rest = [each for each in self.kinds if each[0].name not in row]
        for k in self.rng.permutation(len(rest)).tolist():
            factor, start, count, costly = rest[k]
            fits = _places_of(may >> start & (1 << count) - 1)
            if costly:
                fits = [n for n in fits if self.costs[start + n] <= limit - spent]
            if not fits:
                return None
            if factor.thin:
                fits = self._broad(row, factor, fits)
            ties = self.rng.random(count)
            n = fits[0]
            if len(fits) > 1:  # the level that covers most; of equals the usual one, or, where it varies, any
                worth = ties.tolist()
                if not factor.varied:
                    worth[0] = 1.8
                found = [(partners[start + n] & together).bit_count() + worth[n] / 2 for n in fits]
                n = fits[found.index(max(found))]
            row[factor.name] = factor.levels[n]
            spent += self.costs[start + n]
            may &= self.beside[start + n]
            together |= 1 << start + n
        return {factor.name: row[factor.name] for factor in self.factors}

    def _broad(self, row: Row, factor: Factor, fits: Sequence[int]) -> Sequence[int]:
        """Of the levels that fit those that are not thin, if there are any."""
        thin = {level for level, lifts in factor.thin.items() if not self._is_many(row, lifts)}
        return [n for n in fits if factor.levels[n] not in thin] or fits

    def _is_many(self, row: Row, lifts: str) -> bool:
        """Whether a row has that factor at another level than its usual one."""
        return lifts in row and row[lifts] != self.by_name[lifts].levels[0]


@functools.cache
def _places_of(levels: int) -> list[int]:
    """The bits of a number that are one."""
    return [n for n in range(levels.bit_length()) if levels >> n & 1]


def _bits_of_rows(levels: np.ndarray) -> list[int]:
    """A number for each row, whose bit ``i`` says whether its level ``i``."""
    width = -(-levels.shape[1] // 8)
    packed = np.packbits(levels, axis=1, bitorder="little").tobytes()
    return [int.from_bytes(packed[at : at + width], "little") for at in range(0, len(packed), width)]
