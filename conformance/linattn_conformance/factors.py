"""The factors: what calls differ in, each with its levels, declared once; which of them may meet; and the rows of cases.

A family's factors follow from its :class:`~linattn.spec.OpSpec`: an array that is optional is one, an array of free dtype is
one, an option is one. A level is a class of calls that kernels are likely to treat alike, such as the lengths from 66 to 126;
which of its members stands in a row is drawn, so that each stands in as many as any other that a row has room for.

``python -m linattn_conformance.factors`` writes, as JSON, what each family's rows cover and what they do not, and why.
"""

from __future__ import annotations

import functools
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import log2, prod
from typing import Any

import numpy as np
from linattn.spec import COMPANIONS, DECODING, FAMILIES, OpSpec

from .covering import FIRST_OF_A_HIDING_LEVEL, FIRST_OF_A_RARE_LEVEL, Covering, Factor, Pairs, Row, cover
from .packings import KINDS

__all__ = ["COTANGENTS", "LAYOUTS", "Call", "Level", "Plan", "kind_of", "plan_of", "table"]

COST = 2**20
"""Most multiplications of keys by values in a call."""
USUAL_COST = 2**16
"""Most in a call with the least sizes of its levels, unless the two levels that it is made for have more."""
LEAST_ROWS = {"companion": 480, "decode": 240, "family": 0}
"""So many rows an operator has, though fewer would cover its pairs: where a row is tried in one form, and factors are few, each
size would stand in too few calls.
"""
ROOM = 2
"""So many times as many there may be with the sizes that are drawn."""
COSTLY = ("T", "K", "V", "B", "H", "G", "D")
"""Symbols whose product it is; ``G`` are value heads for a query/key head."""
LEAST = {"K": 8, "V": 8, "D": 64, "B": 2, "H": 2}
"""A token costs as much as if it had these widths, rows and heads at least: there is more to see of two than of one."""
ONE = 256
"""That is so many multiplications."""
LATE = frozenset({"bf16"})
LAYOUTS = ("strided", "sliced", "headsfirst", "expanded", "reversed", "readonly", "misaligned")
GATES = ("gate.Softplus", "gate.BoundedSigmoid", "gate.LogSigmoid", "gate.NegExp")
MADE_IN_FLOAT32 = ("g", "beta", "dt", "A", "D", "dt_bias")
"""Arrays from which others are made in float32 unless they are float64 themselves."""
VANISHING = {f"{kind}.{name}" for kind in ("zeros", "blank") for name in ("q", "k", "initial_state")}
"""Flags of arrays that are zero, or that hold nothing else."""
NARROW = frozenset(f"{short}.{name}" for short in ("fp16", "bf16") for name in MADE_IN_FLOAT32)
DEEP = ("simple_gla", "gla", "gated_delta_rule", "kda")
LONG = "a long call is dear: a few rows have it"
HIDES = "little is seen of anything beside it: a few rows have it"
HIDING = frozenset({"scale.zero", "varlen.nothing", "padding", "zeros.cotangents"})
BLANK = "blank."
"""What the flags of arrays begin with that are zero throughout, which hide as much, unless nothing is multiplied by them."""
ADDED = "initial_state"
DECAYS = ("gv", "A")
HIDES_NOTHING = frozenset(f"{BLANK}{name}" for name in (ADDED, "bias", "D", "dt_bias", "u", *DECAYS))

MANY_BY = {"rows": "packing", "heads": "groups"}
"""What makes many of a single row, and of a single head."""
NOT_THIN = frozenset({"filter"})
"""Factors of which a single one hides nothing."""
COTANGENTS = ("d_o", "d_state")
"""What is fed into a backward pass, by output."""
OF_AN_ARRAY = (
    "of", "only", "constant", "zeros", "blank", "subnormal", "tiny", "large", "fp16", "fp32", "fp64", "bf16",
)  # fmt: skip
"""What the flags about one array begin with."""
TRIPLES = (
    ("packing", "state", "normalize"),
    ("dtype", "dtype of initial_state", "state"),
    ("slots", "tokens", "dtype"),
)
"""Of these factors ``full`` has all triples."""


@dataclass(frozen=True)
class Level:
    """A level of a factor.

    Attributes:
        name: Its name in the table.
        flags: What the id of a case says of it.
        sizes: By symbol, the sizes to draw from.
    """

    name: str
    flags: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def least(self) -> dict[str, int]:
        return {symbol: min(sizes) for symbol, sizes in self.sizes.items()}

    @property
    def cost(self) -> float:
        """The logarithm of how many times as many products a call has."""
        grouped = [int(flag.partition(".")[2] or 2) for flag in self.flags if flag.partition(".")[0] == "grouped"]
        widths = {symbol: max(self.least[symbol] / n, 1) for symbol, n in LEAST.items() if symbol in self.least}
        return log2(max(prod([(self.least | widths).get(symbol, 1) for symbol in COSTLY] + grouped), 1))


@dataclass(frozen=True)
class Call:
    """A row, as the parts of the ids of its cases."""

    dtype: str
    flags: str
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Dimension:
    """A factor and its levels.

    Attributes:
        long: From so many tokens on a level is rare.
    """

    name: str
    levels: tuple[Level, ...]
    varied: bool = False
    long: int = 258

    @cached_property
    def factor(self) -> Factor:
        names = tuple(level.name for level in self.levels)
        hiding = frozenset(level.name for level in self.levels if any(map(hides, level.flags)) or level.sizes.get("T") == (0,))
        rare = {level.name: LONG for level in self.levels if level.least.get("T", 0) >= self.long}
        rare |= dict.fromkeys(hiding, HIDES)
        single = [level.name for level in self.levels if set(level.sizes.values()) == {(1,)}]
        thin = {} if self.name in NOT_THIN else dict.fromkeys(single, MANY_BY.get(self.name, ""))
        late = frozenset(level.name for level in self.levels if {flag.partition(".")[0] for flag in level.flags} & LATE)
        costs = {level.name: level.cost for level in self.levels}
        return Factor(self.name, names, self.varied, costs, rare, hiding, thin, late)


def hides(flag: str) -> bool:
    """Whether little is seen of anything beside a flag."""
    return flag in HIDING or (flag.startswith(BLANK) and flag not in HIDES_NOTHING)


def span(symbol: str, sizes: Sequence[int]) -> Level:
    """A level of sizes of a symbol."""
    name = str(sizes[0]) if len(sizes) == 1 else f"{min(sizes)}..{max(sizes)}"
    return Level(name, (), {symbol: tuple(sizes)})


def choice(*flags: str) -> Level:
    """A level that flags stand for, joined by blanks where they come together."""
    return Level(flags[0], flags)


USUAL = Level("usual")


def optional(name: str, *levels: Level) -> Dimension:
    """A factor whose usual level is that nothing is said."""
    return Dimension(name, (USUAL, *levels))


# -- the factors -----------------------------------------------------------------------------------------------------

EDGES = frozenset(2**i + n for i in range(3, 13) for n in (-1, 0, 1))
"""Powers of two and their neighbours, where tiles and chunks begin and end."""
AS_OFTEN = 3
"""An edge stands in so many times as many rows as another size of its level."""


def edged(sizes: Iterable[int]) -> list[int]:
    """Sizes of a level, its edges as often as they are to stand in rows."""
    return [n for size in sizes for n in [size] * (AS_OFTEN if size in EDGES else 1)]


# Sizes by symbol: levels of neighbours, the usual ones first. K and V have the same.
TOKENS = (
    range(66, 127), [0], [1], [2], range(3, 15), [15, 16, 17], range(18, 31), [31, 32, 33], range(34, 63), [63, 64, 65],
    [127, 128, 129], range(130, 255), [255, 256, 257], range(258, 512),
    edged([*range(512, 515), *range(600, 1023, 7), *range(1023, 1026), *range(1030, 1100, 7)]),
    edged([*range(1500, 2047, 11), *range(2047, 2050), *range(2055, 4095, 11), 4095, 4096]),
)  # fmt: skip
TOKENS_OF_A_STEP = ([1], [2, 3], [4, 5, 6, 7], [8, 16], range(9, 33), [0], range(33, 130), edged(range(130, 258)))
PARTIAL = (80, 96, 112)
"""Widths whose last tile is a part of one, for most tiles."""
WIDTHS = (
    edged(range(9, 32)), [1], range(2, 8), [8, 16], [32, 64], edged(range(33, 64)), PARTIAL,
    edged(n for n in range(65, 128) if n not in PARTIAL), [128], edged(range(129, 256)), [256],
)  # fmt: skip
CHANNELS = (
    edged(range(9, 32)), [1], range(2, 8), [8, 16, 32, 64], edged(range(33, 64)), edged(range(65, 128)), [128, 256],
    edged([*range(129, 256), *range(257, 301)]), [512, 1000, 1024],
)  # fmt: skip
HEADS = ([2], [1], [3], [4], [5, 6, 7, 8], range(9, 18))
ROWS = ([2], [1], [3], [4, 5, 6, 7], [8, 16, *range(9, 16), *range(17, 20)])
CHUNKS = ([16], [32], [64], [128, 256, 500, 4096], [1, 2, *edged(range(3, 16))], edged([*range(17, 64), *range(65, 256, 3)]))
CHUNKS_OF_MIXED = (
    [16], [1], [2, *edged(range(3, 16))], [32, 64], edged([*range(17, 32), *range(33, 64)]),
    [100, 128, 256, *edged(range(65, 128, 3))],
)  # fmt: skip
"""Of an operator whose result depends on it."""
FILTERS = ([4], [1], [2], [3], [5], [6], [7], [8])
WINDOWS = ([7], [8], [9], [12], range(13, 130))


def spans(symbol: str, sizes: Iterable[Sequence[int]]) -> tuple[Level, ...]:
    """Levels of sizes of a symbol."""
    return tuple(span(symbol, found) for found in sizes)


def widths(symbol: str, most: int = 256) -> tuple[Level, ...]:
    """Widths that do and do not fit tiles."""
    return spans(symbol, (sizes for sizes in WIDTHS if max(sizes) <= most))


def dimensions(spec: OpSpec, form: str) -> list[Dimension]:
    """The factors of an operator."""
    of_a_step = (*TOKENS_OF_A_STEP, *(TOKENS[-2:] if "W" in symbols_of(spec) else ()))  # a filter sees few at a time
    tokens = spans("T", of_a_step if form == "decode" else TOKENS)
    found = [Dimension("tokens", tokens, varied=True, long=33 if form == "decode" else 258)]
    found += sizes_of(spec, form)
    found += sequences_of(spec, form)
    found += dtypes_of(spec, form)
    found += options_of(spec)
    found += values_of(spec, form)
    found += layouts_of(spec, form)
    found += calls_of(spec, form)
    return [dimension for dimension in found if len(dimension.levels) > 1]


def symbols_of(spec: OpSpec) -> set[str]:
    """The symbols of a spec's arrays."""
    return {symbol for arg in spec.arrays(spec.defaults) for shape in arg.shapes for symbol in shape}


def sizes_of(spec: OpSpec, form: str) -> list[Dimension]:
    """Widths, heads, rows and chunks."""
    symbols = symbols_of(spec)
    found = []
    if "K" in symbols:
        found += [Dimension("key width", widths("K"), varied=True), Dimension("value width", widths("V"), varied=True)]
        found.append(Dimension("heads", spans("H", HEADS), varied=True))
    if "L" in symbols and "W" not in symbols:
        found.append(Dimension("linear width", widths("L", 64), varied=True))
    if "D" in symbols:
        found.append(Dimension("channels", spans("D", CHANNELS), varied=True))
    if "W" in symbols:
        found.append(Dimension("filter", spans("W", FILTERS), varied=True))
        found += [Dimension("window", spans("L", WINDOWS), varied=True)] if form == "decode" else []
    if "HV" in symbols:
        found.append(optional("groups", choice("grouped"), choice("grouped.3"), Level("4..6", (), {"G": (4, 5, 6)})))
    if any(shape[0] == "..." for arg in spec.args for shape in arg.shapes):
        found.append(optional("dimensions", *(choice(f"rank.{rank}") for rank in (1, 2, 4))))
        found.append(Dimension("group", (USUAL, *(choice(f"group_size.{size}") for size in (1, 4, 8))), varied=False))
    found.append(Dimension("rows", spans("B", ROWS), varied=True))
    if spec.state_type is not None:
        found.append(Dimension("chunk size", spans("C", CHUNKS_OF_MIXED)))
    elif "chunk_size" in spec.option_names:
        found.append(Dimension("chunk size", (USUAL, *spans("C", CHUNKS)), varied=True))
    return found


def sequences_of(spec: OpSpec, form: str) -> list[Dimension]:
    """Packings and their offsets, and states."""
    index = optional("indices", choice("i64"))
    if form == "decode":
        return [optional("slots", choice("slots"), choice("slots.all"), choice("padding")), index]
    if "output_final_state" not in spec.option_names:
        return []
    states = optional("state", choice("state"), choice("initial"), choice("final"))
    return [states, optional("packing", *(choice(f"varlen.{kind}") for kind in KINDS)), index]


def dtypes_of(spec: OpSpec, form: str) -> list[Dimension]:
    """The dtype of the operands, and of every array whose dtype is its own."""
    found = [Dimension("dtype", tuple(Level(short, (short,)) for short in ("fp32", "fp16", "fp64", "bf16")))]
    for name in floats(spec, form):
        shorts = ("fp16", "fp64", "bf16") if name in MADE_IN_FLOAT32 else ("fp16", "fp64", "fp32", "bf16")
        found.append(optional(f"dtype of {name}", *(choice(f"{short}.{name}") for short in shorts)))
    return found


def floats(spec: OpSpec, form: str) -> list[str]:
    """Arrays whose dtype is free; a state of several arrays has one."""
    names = [arg.name for arg in spec.arrays(spec.defaults) if arg.role == "float"]
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def options_of(spec: OpSpec) -> list[Dimension]:
    """Optional arrays, shapes to choose from, and the static options."""
    found = []
    for arg in (*spec.args, *spec.keyword_args):
        levels = [choice(arg.name)] if arg.optional else []
        for shape in arg.shapes[1:]:
            name = f"{arg.name}.{''.join(shape)}"
            levels.append(Level(name, (arg.name, name) if arg.optional else (name,)))
        found += [optional(arg.name, *levels)] if levels else []
    for option in spec.options:
        if option.name in ("output_final_state", "chunk_size", "group_size", "eps"):
            continue
        if option.name.endswith("scale"):
            kinds = ("given", "negative", "zero", "one", "large", "tiny")
            found.append(optional(option.name, *(choice(f"{option.name}.{kind}") for kind in kinds)))
        elif option.types == (bool,):
            found.append(optional(option.name, choice(f"non{option.name}" if option.default else option.name)))
        elif option.name == "dt_limit":
            found.append(optional("dt_limit", choice("limits")))
        elif option.name == "gate":
            by_channel = [Level("gate.Softplus by channel", ("gate.Softplus", "gate.dt_bias.GK"))] if vector(spec) else []
            found.append(optional("gate", *map(choice, GATES), *by_channel))
        elif option.choices:
            found.append(
                optional(option.name, *(choice(f"{option.name}.{one}") for one in option.choices if one != option.default))
            )
    return found


def group_size(flags: Iterable[str]) -> int:
    """The size of a group of channels, 1 if there are none."""
    return next((int(flag.partition(".")[2]) for flag in flags if flag.startswith("group_size.")), 1)


def vector(spec: OpSpec) -> bool:
    """Whether gates have a number for each key channel."""
    return any(arg.name == "g" and "K" in arg.shapes[0] for arg in spec.args)


def values_of(spec: OpSpec, form: str) -> list[Dimension]:
    """Magnitudes and special values."""
    names = [arg.name for arg in spec.args]
    squared = "eps" in spec.option_names  # and float32 does not hold the squares of vast numbers
    kinds = ["small", "large", "tiny", f"large.{spec.like}" if squared else "vast"]
    kinds += [f"{kind}.{name}" for name in others(spec) for kind in ("tiny", "large")]
    found = [optional("magnitude", *map(choice, kinds))]
    if "g" in names:
        kinds = ("zero", "reset", "huge", "long", "mixed", *(("deep",) if spec.name in DEEP and form != "decode" else ()))
        found.append(optional("gates", *map(choice, kinds)))
    if "beta" in names:
        found.append(optional("beta values", choice("strong"), choice("edges"), choice("tiny.beta")))
    given = [arg.name for arg in (*spec.args, *spec.keyword_args)]
    arrays = [name for name in given if name != "g"]
    arrays += [ADDED] if form != "decode" and spec.state_type is None and "output_final_state" in spec.option_names else []
    zeros = [f"zeros.{name}" for name in (*arrays, *({"g"}.intersection(given)))]
    found.append(optional("zeros", *map(choice, zeros), *(choice(f"{BLANK}{name}") for name in arrays)))
    found.append(optional("subnormals", *(choice(f"subnormal.{name}") for name in dict.fromkeys((spec.like, arrays[0])))))
    return found


def others(spec: OpSpec) -> list[str]:
    """What products are made with beside what states are sums of: queries, keys, weights and what stands for them."""
    more = [name for name in ("a", "weight", "u") if name in {arg.name for arg in (*spec.args, *spec.keyword_args)}]
    return [arg.name for arg in spec.args if arg.role == "operand" and arg.name != spec.like] + more


def layouts_of(spec: OpSpec, form: str) -> list[Dimension]:
    """How arrays lie in memory, and which of them lie so."""
    arrays = [arg.name for arg in (*spec.args, *spec.keyword_args)]
    arrays += [spec.state_name] if spec.state(spec.defaults) else []
    arrays += [spec.index.name] if spec.index is not None else []
    return [
        optional("layout", *(Level(kind, (f"layout.{kind}",)) for kind in LAYOUTS)),
        Dimension("laid out", (Level("all"), *(Level(name, (f"of.{name}",)) for name in arrays))),
    ]


def calls_of(spec: OpSpec, form: str) -> list[Dimension]:
    """Gradients: which inputs train, what the loss reads, the layout of cotangents; and how a call is made."""
    modes = optional("mode", choice("no_grad"), choice("inference"), *([] if form == "decode" else [choice("tracked")]))
    if form == "decode":
        return [modes]
    names = [arg.name for arg in (*spec.args, *spec.keyword_args)]
    names += ["initial_state"] if "output_final_state" in spec.option_names else []
    trains = optional("trains", *(choice(f"only.{name}") for name in names), *(choice(f"constant.{name}") for name in names))
    kinds = [f"{kind}.cotangents" for kind in (*LAYOUTS, "zeros")]
    kinds += [f"zeros.{name}" for name in COTANGENTS] if "output_final_state" in spec.option_names else []
    cotangents = optional("cotangents", *map(choice, kinds))
    loss = [optional("loss", choice("loss.o"), choice("loss.state"))] if "output_final_state" in spec.option_names else []
    return [modes, trains, *loss, cotangents, optional("graph", choice("retained"), choice("accumulated"))]


# -- what may meet ---------------------------------------------------------------------------------------------------


class Rules:
    """Which levels of an operator may meet."""

    def __init__(self, spec: OpSpec, form: str, found: Sequence[Dimension]) -> None:
        self.spec, self.form, self.dimensions = spec, form, tuple(found)
        self.levels = {(dimension.name, level.name): level for dimension in found for level in dimension.levels}
        self.arrays = {arg.name: arg for arg in (*spec.args, *spec.keyword_args)}

    def __call__(self, chosen: Mapping[str, str]) -> str:
        """Why these levels do not meet; empty if they may."""
        flags = {flag for item in chosen.items() for flag in self.levels[item].flags}
        return self.of_the_spec(flags) or self.of_what_is_given(chosen, flags) or self.of_values(chosen, flags)

    def of_the_spec(self, flags: set[str]) -> str:
        """What the operator itself refuses."""
        if "chunk_size" not in self.spec.option_names:
            return ""
        options = {**self.spec.defaults, "initial_state": True if flags & {"state", "initial"} else None, "chunk_size": 16}
        options |= {"output_final_state": bool(flags & {"state", "final"})}
        options |= {"causal": "noncausal" not in flags} if "causal" in self.spec.option_names else {}
        return self.spec.check(None, options) or ""

    def of_what_is_given(self, chosen: Mapping[str, str], flags: set[str]) -> str:
        """Levels about an array or a choice that is not there."""
        packed = any(flag.startswith("varlen") for flag in flags)
        if packed and chosen.get("rows", "1") != "1":
            return "packed sequences are one row"
        if "i64" in flags and "usual" in (chosen.get("packing"), chosen.get("slots")):
            return "there are no indices"
        if chosen.get("layout") == "usual" and chosen.get("laid out", "all") != "all":
            return "no layout is asked for"
        if "layout.headsfirst" in flags and any(f"of.{name}" in flags and self.rank(name) < 3 for name in self.arrays):
            return "it has no heads"
        if any(flag.startswith("loss.") for flag in flags) and chosen.get("state", "state") not in ("state", "final"):
            return "there is no final state"
        if any(f"zeros.{name}" in flags for name in COTANGENTS) and chosen.get("loss", "usual") != "usual":
            return "the loss reads one output"
        for flag in flags:
            prefix, _, name = flag.partition(".")
            if prefix in OF_AN_ARRAY and self.lacks(name, chosen):
                return f"{name} is not given"
        if chosen.get("dtype") == "fp64" and any(flag.startswith("fp64.") for flag in flags):
            return "that is its usual dtype"
        if chosen.get("dtype") in ("fp32", "fp16", "bf16") and any(flag.startswith("fp32.") for flag in flags):
            return "that is its usual dtype"
        return ""

    def rank(self, name: str) -> int:
        return len(self.arrays[name].shapes[0]) + ("..." in self.arrays[name].shapes[0])

    def lacks(self, name: str, chosen: Mapping[str, str]) -> bool:
        """True if an array is known not to be given."""
        if name == "initial_state":
            return chosen.get("state", "state") not in ("state", "initial")
        if name in COTANGENTS:
            return chosen.get("state", "state") not in ("state", "final")
        if name == "cu_seqlens":
            return chosen.get("packing") == "usual"
        if name == "state_indices":
            return chosen.get("slots") == "usual"
        return name in self.arrays and self.arrays[name].optional and chosen.get(name) == "usual"

    def of_values(self, chosen: Mapping[str, str], flags: set[str]) -> str:
        """Values that are not defined together, or that a dtype does not hold."""
        half = "fp16" in flags or any(flag.startswith("fp16.") for flag in flags)
        sized = {flag.partition(".")[0] for flag in flags} & {"tiny", "vast", "large"}
        if half and sized:
            return "float16 does not hold such numbers"
        if half and "small" in flags and "dt" in self.arrays:
            return "values times steps would be smaller than float16 holds"
        if half and any(flag.endswith("scale.large") for flag in flags):
            return "results would be larger than float16 holds"
        if flags & {"layout.expanded", "layout.readonly"} and "of.state" in flags:
            return "the pool of states is written to"
        if "deep" in flags and (half or chosen.get("state", "state") not in ("state", "initial") or sized):
            return "there is no state that holds such numbers"
        if "deep" in flags and "normalize" in flags:
            return "what is normalised by is no longer above zero"
        if "normalize" in flags and (
            flags & {*VANISHING, "scale.zero"} or any(flag.startswith("subnormal.q") for flag in flags)
        ):
            return "0 / 0"
        if "qk_norm.l2" in flags and flags & {*VANISHING, "subnormal.q", "tiny.q", "tiny.k"}:
            return "the length of nothing has no gradient worth comparing"
        mapped = any(flag.startswith("gate.") for flag in flags)
        if mapped and (chosen.get("gates", "usual") != "usual" or "g.HV" in flags):
            return "a gate object makes the gates"
        if "fp64" in flags and flags & NARROW:
            return "what is made of narrower numbers is made in float32"
        if {"g.HV", "fp16.g"} <= flags:
            return "a gradient that all tokens add to would be larger than float16 holds"
        if "g.HV" in flags and chosen.get("gates", "usual") not in ("usual", "zero"):
            return "a fixed decay is one number a head"
        if any(flag.startswith("beta_map.") for flag in flags) and (
            chosen.get("beta values", "usual") != "usual" or ("large.k" in flags and "beta" in self.arrays)
        ):
            return "a map makes beta"
        size = group_size(flags)
        level = self.levels.get(("channels", chosen.get("channels", "")))
        if level and not any(D % size == 0 for D in level.sizes["D"]):
            return "groups must divide the channels"
        return ""


# -- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The rows of an operator.

    Attributes:
        covering: The rows as levels.
        calls: The same as parts of ids.
    """

    dimensions: tuple[Dimension, ...]
    covering: Covering
    calls: tuple[Call, ...]

    def spanning(self, first: int) -> set[int]:
        """The places of the ``first`` rows, and of some rows of each rare level."""
        factors = [dimension.factor for dimension in self.dimensions]
        hiding = sum(len(factor.hiding) for factor in factors)
        rare = sum(len(factor.rare) for factor in factors) - hiding
        start = self.covering.usual
        count = FIRST_OF_A_HIDING_LEVEL * hiding + FIRST_OF_A_RARE_LEVEL * rare
        return {*range(min(first, start)), *range(start, min(start + count, self.covering.early))}


def plan_of(spec: OpSpec, form: str = "", seed: int = 0, most: int = 0, triples: bool = True) -> Plan:
    """The rows of a family, or of its decoding.

    Args:
        spec: What it takes; that of decoding for ``decode``.
        form: ``"decode"``, or empty.
        seed: Of all that is drawn.
        most: At most so many rows; 0 for as many as it takes.
        triples: Cover triples as well as pairs.
    """
    rules, pairs = asked(spec.name, form)
    begun = zlib.crc32(f"{spec.name}/{form}/{seed}".encode())
    covering = cover(pairs, begun, TRIPLES if triples else (), most, LEAST_ROWS[kind_of(spec, form)])
    rng = np.random.default_rng(begun + 1)
    dealt: Counter[tuple[Any, ...]] = Counter()
    calls = tuple(call_of(row, rules, rng, dealt) for row in covering.rows)
    return Plan(rules.dimensions, covering, calls)


def kind_of(spec: OpSpec, form: str) -> str:
    """What kind of operator has rows: ``"family"``, ``"companion"``, or ``"decode"``."""
    return form or ("companion" if spec.name in COMPANIONS else "family")


@functools.cache
def asked(name: str, form: str) -> tuple[Rules, Pairs]:
    """What rows of an operator hold, and which two levels of it are to meet, whatever the seed."""
    spec = DECODING[name] if form == "decode" else (FAMILIES | COMPANIONS)[name]
    rules = Rules(spec, form, dimensions(spec, form))
    return rules, Pairs([dimension.factor for dimension in rules.dimensions], rules, log2(COST / ONE), log2(USUAL_COST / ONE))


def call_of(row: Row, rules: Rules, rng: np.random.Generator, dealt: Counter[tuple[Any, ...]]) -> Call:
    """A row with sizes drawn, no more of them than it may cost, those first that were ``dealt`` least so far to such rows: of
    its dtype, and as much to be seen in.
    """
    levels = [rules.levels[item] for item in row.items()]
    flags = [flag for level in levels for flag in level.flags]
    dtype = next(flag for flag in flags if flag in ("fp32", "fp16", "fp64", "bf16"))
    such = dtype, any(row[dimension.name] in dimension.factor.hiding for dimension in rules.dimensions)
    drawn: dict[str, int] = {}
    choices = {symbol: sizes for level in levels for symbol, sizes in level.sizes.items()}
    size = group_size(flags)
    most = min(ROOM * max(products({symbol: min(sizes) for symbol, sizes in choices.items()}), USUAL_COST), COST)
    if "D" in choices:
        choices["D"] = tuple(n for n in choices["D"] if n % size == 0)
    for symbol in sorted(choices, key=lambda symbol: len(choices[symbol])):
        others = {**{name: min(sizes) for name, sizes in choices.items() if name != symbol}, **drawn}
        each = products(others) if symbol in COSTLY else 0
        fits = [n for n in choices[symbol] if each * max(n, LEAST.get(symbol, 1)) <= most] or [min(choices[symbol])]
        shares = {n: dealt[symbol, n, such] / count for n, count in Counter(fits).items()}
        seldom = min(shares.values())
        least = [n for n, share in shares.items() if share == seldom]
        drawn[symbol] = least[rng.integers(len(least))]
        dealt[symbol, drawn[symbol], such] += 1
    groups = drawn.pop("G", None)
    flags += [f"grouped.{groups}"] if groups else []
    return Call(dtype, "-".join(sorted(_laid_out(set(flags) - {dtype}))) or "plain", tuple(drawn.items()))


def products(sizes: Mapping[str, int]) -> int:
    """What a call of these sizes costs, as multiplications."""
    return prod(max(n, LEAST.get(symbol, 1)) for symbol, n in sizes.items() if symbol in COSTLY)


def _laid_out(flags: set[str]) -> set[str]:
    """A layout and its array as one flag."""
    kind = next((flag.partition(".")[2] for flag in flags if flag.startswith("layout.")), "")
    name = next((flag.partition(".")[2] for flag in flags if flag.startswith("of.")), "")
    rest = {flag for flag in flags if not flag.startswith(("layout.", "of."))}
    return rest | ({f"{kind}.{name}" if name else kind} if kind else set())


# -- the table -------------------------------------------------------------------------------------------------------


def operators() -> Iterable[tuple[str, OpSpec, str]]:
    """Whatever has rows of its own: a name, what it takes, and the form if it is decoding."""
    for spec in (*FAMILIES.values(), *COMPANIONS.values()):
        yield spec.name, spec, ""
    for name, spec in DECODING.items():
        yield f"decode_{name}", spec, "decode"


def table(seed: int = 0) -> dict[str, Any]:
    """By operator: factors and levels, rows, how many pairs are covered, and those that are not, by reason."""
    return {name: coverage(plan_of(spec, form, seed)) for name, spec, form in operators()}


def coverage(plan: Plan) -> dict[str, Any]:
    """What rows cover, counted in the rows themselves."""
    pairs = {frozenset(pair) for row in plan.covering.rows for pair in combinations(row.items(), 2)}
    counts = [len(dimension.levels) for dimension in plan.dimensions]
    reasons: dict[str, list[str]] = {}
    for told, reason in plan.covering.missing.items():
        reasons.setdefault(reason, []).append(" × ".join(told))
    return {
        "factors": {dimension.name: [level.name for level in dimension.levels] for dimension in plan.dimensions},
        "rows": {"training": plan.covering.pairs, "full": len(plan.calls)},
        "pairs": sum(counts) ** 2 // 2 - sum(n * n for n in counts) // 2,
        "covered": len(pairs),
        "not covered": {reason: sorted(told) for reason, told in sorted(reasons.items())},
    }


if __name__ == "__main__":
    json.dump(table(int(sys.argv[1]) if len(sys.argv) > 1 else 0), sys.stdout, indent=1, ensure_ascii=False)
    print()
