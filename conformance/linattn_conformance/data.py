"""The arrays of a case: drawn in float64 from a seed that its id determines, before any rounding.

Values are chosen so that every fault shows: rows of comparable size, states that remember about ten tokens and so reach over
chunk boundaries, keys of the delta families of length one so that no error is amplified.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from linattn.gate_maps import GATES, GateKind
from linattn.spec import Arg
from numpy.typing import NDArray

from .cases import DTYPES, Case, problem
from .maps import MAPS, width
from .packings import lengths
from .parts import beyond

__all__ = ["Problem", "blank", "draw", "grouping", "offsets", "outline", "packed", "symbols_of_outputs"]

Array = NDArray[Any]
NUMBERS = {"LogSigmoid": 4.0, "BoundedSigmoid": -5.0}
"""The static numbers of gate objects."""
SCALES = {"": 0.37, "given": 2.37, "negative": -0.45, "zero": 0.0, "one": 1, "large": 2.0**12, "tiny": 2.0**-40}
"""The values of a scale, by what a flag calls them."""
MAGNITUDES = {"tiny": 2.0**-80, "small": 2.0**-8, "large": 2.0**8, "vast": 2.0**80}
"""Of values and states, by flag."""
ALONE = {"tiny": 2.0**-42, "large": 2.0**30}
"""Of one array among others of the usual size."""
BALANCES = {"beta": "k", "b": "a"}
"""Arrays that are smaller by the square of what others of the delta families are larger, or the state would grow."""
HUGE = (-1e4, -3e4, -1e6, -1e9)
"""Gates after which nothing is left, and small ones follow."""
MIXED = (0.0, -1e-8, -1e-3, -0.1, -0.5, -1.0, -5.0, -30.0, -90.0, -1e4, -np.inf)


@dataclass
class Problem:
    """What a case computes with, by the names of the spec; arrays in float64 (indices in int32).

    Attributes:
        arrays: ``name → values``.
        dtypes: ``name → dtype`` that each array is rounded to.
        symbols: ``name → symbolic shape`` as a tuple, e.g. ``("B", "T", "HV")``.
        shapes: ``name → shape``.
        options: The static keywords.
        feature_map: Name of a feature map, or None.
        sizes: Sizes of the symbols, after the feature map.
    """

    arrays: dict[str, Array]
    dtypes: dict[str, str]
    symbols: dict[str, tuple[str, ...]]
    shapes: dict[str, tuple[int, ...]]
    options: dict[str, Any]
    feature_map: str | None
    sizes: dict[str, int]

    @property
    def floats(self) -> list[str]:
        """Names of the float arrays: those with a gradient."""
        return [name for name, dtype in self.dtypes.items() if dtype.startswith(("float", "bfloat"))]


def outline(case: Case) -> Problem:
    """The problem of a case, but for its arrays: the same for every form and check."""
    flags, spec = case.flags, case.spec
    options = static_options(case)
    phi = map_name(flags)
    raw = all_sizes(case)
    sizes = mapped_sizes(case, phi, raw)
    found = Problem({}, {}, {}, {}, options, phi, sizes)
    for arg in spec.arrays({**options, "initial_state": None}):
        if not given(arg, flags):
            continue
        known = raw if arg.name in spec.mapped else sizes
        if arg.name.startswith("gate."):
            known = sizes | {"G": found.shapes["g"][2]}
        chosen = chosen_shape(arg, flags)
        found.symbols[arg.name], found.dtypes[arg.name] = chosen, dtype_of(arg, case)
        found.shapes[arg.name] = tuple(size_of(symbol, known) for symbol in chosen)
    return found


def symbols_of_outputs(case: Case) -> dict[str, tuple[str, ...]]:
    """The symbolic shape of each output, where the state is one array."""
    shapes = {arg.name: arg.shapes[0] for arg in case.spec.arrays({**static_options(case), "initial_state": None})}
    return {"o": shapes[case.spec.like], "final_state": shapes.get("initial_state", ())}


def draw(case: Case) -> Problem:
    """The problem of a case."""
    found = outline(case)
    rng = np.random.default_rng(zlib.crc32(repr(problem(case)).encode()))
    for name, shape in found.shapes.items():
        x = indices(case, name, found)
        if x is None:
            x = flagged(values(rng, case, name, shape, found.arrays), name, found.symbols[name], case, found.dtypes[name])
            x = beyond(x, found.symbols[name], case, keys_alone=True) if case.place is not None and reads(case, name) else x
        found.arrays[name] = x
    return found


def reads(case: Case, name: str) -> bool:
    """True for what states are read and written with."""
    return name == "a" or any(arg.name == name and arg.role == "operand" for arg in case.spec.args)


def blank(case: Case, found: Problem) -> dict[str, Array]:
    """Arrays that are of the kind of a problem's, indices among them, and of floats one value only."""
    known = {name: indices(case, name, found) for name in found.shapes}
    return {name: np.full(found.shapes[name], 0.5) if x is None else x for name, x in known.items()}


def indices(case: Case, name: str, found: Problem) -> Array | None:
    """The values of an array of indices; None for any other array."""
    sizes = found.sizes
    if name == "cu_seqlens":
        return packing(case)
    if name == "state_indices":
        return slots(sizes["N"], sizes["P"], case.flags)
    return counts(sizes["N"], sizes["C"]) if name == "initial_state.length" else None


def map_name(flags: tuple[str, ...]) -> str | None:
    """The feature map that a flag names."""
    return next((flag.removeprefix("phi.") for flag in flags if flag.startswith("phi.")), None)


def static_options(case: Case) -> dict[str, Any]:
    """The options that the flags stand for; those absent keep their default."""
    options: dict[str, Any] = {**case.spec.defaults}
    for name in options:
        if name.endswith("scale") and "scale" in case.flags:
            options[name] = 0.37 if name != "lin_scale" else -0.21
        elif name.endswith("scale"):
            kind = next((flag.partition(".")[2] for flag in case.flags if flag.startswith(f"{name}.")), None)
            options[name] = None if kind is None else SCALES[kind]
        elif name in case.flags:
            options[name] = True
        elif name == "dt_limit" and "limits" in case.flags:
            options[name] = (0.05, 0.5)
        elif f"non{name}" in case.flags:
            options[name] = False
    choices = {option.name: option.choices for option in case.spec.options}
    for name, value in (flag.split(".")[:2] for flag in case.flags if "." in flag):
        if name == "gate" and value in GATES:
            options[name] = GateKind(value, tuple(GATES[value].shapes), NUMBERS.get(value))
        elif value in choices.get(name, ()):
            options[name] = value
        elif name == "group_size":
            options[name] = int(value)
    asked = {"output_final_state": bool({"state", "final"} & set(case.flags)), "chunk_size": case.size.get("C")}
    return options | {name: value for name, value in asked.items() if name in options}


def all_sizes(case: Case) -> dict[str, int]:
    """Every symbol; two rows of two heads unless the case says otherwise."""
    flags, given_sizes = case.flags, case.size
    found = packed(flags)
    sizes = {"B": 1 if found else 2, "H": 2} | given_sizes
    sizes["N"] = len(packing(case)) - 1 if found else sizes["B"]
    sizes["P"] = sizes["N"] + 2
    shared = any(flag.partition(".")[2] == "BTHK" for flag in flags)
    sizes["HV"] = sizes["H"] * max(grouping(flags), 2 if shared else 1)
    return sizes


def grouping(flags: tuple[str, ...]) -> int:
    """Value heads for each query/key head."""
    return next((int(flag.partition(".")[2] or 2) for flag in flags if flag.partition(".")[0] == "grouped"), 1)


def packed(flags: tuple[str, ...]) -> str:
    """The flag of packed sequences; empty if there are none."""
    return next((flag for flag in flags if flag.partition(".")[0] == "varlen"), "")


def packing(case: Case) -> Array:
    """The offsets of a case whose sequences are packed."""
    T = case.size["T"]
    told = next((flag.split(".")[1:] for flag in case.flags if flag.startswith("pack.")), None)
    if told is not None:
        return np.cumsum([0, *map(int, told)], dtype=np.int32)
    kind = packed(case.flags).partition(".")[2]
    if kind:
        rng = np.random.default_rng(zlib.crc32(repr(problem(case)).encode()) + 2)
        return np.cumsum([0, *lengths(kind, T, rng)], dtype=np.int32)
    if "many" not in case.flags:
        return offsets(T - min(T, 7) if "tail" in case.flags else T)
    assert T % 6 == 0, T
    return np.cumsum([0, *(1, 2, 0, 3) * (T // 6)], dtype=np.int32)


def mapped_sizes(case: Case, phi: str | None, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes that the recurrence sees: a feature map changes the width of what it is applied to."""
    if phi is None:
        return sizes
    symbol = next(arg.shapes[0][-1] for arg in case.spec.args if arg.name in case.spec.mapped)
    return {**sizes, symbol: width(phi, sizes[symbol])}


def offsets(T: int) -> Array:
    """Zero-length sequences at both ends and inside, one of a single token, two longer ones."""
    first = T // 4 + 1 if T >= 4 else 0
    single = 1 if T >= 2 else 0
    lengths = [0, first, 0, single, T - first - single, 0]
    return np.cumsum([0, *lengths], dtype=np.int32)


def slots(N: int, P: int, flags: tuple[str, ...]) -> Array:
    """A state for each sequence, none in order; every third sequence, every one, or none is padding."""
    found = (np.arange(N) * 2 + 3) % P if P % 2 else (P - 1 - np.arange(N))
    empty = ("padding" in flags) | (("slots" in flags) & (np.arange(N) % 3 == 1))
    return np.where(empty, -1, found).astype(np.int32)


def given(arg: Arg, flags: tuple[str, ...]) -> bool:
    """Whether an array is given: required, or its flag is there."""
    if arg.name == "cu_seqlens":
        return bool(packed(flags))
    if arg.name == "state_indices":
        return bool({"slots", "slots.all", "padding"}.intersection(flags))
    if arg.name.partition(".")[0] == "initial_state":
        return bool({"state", "initial"}.intersection(flags))
    return not arg.optional or arg.name in flags


def chosen_shape(arg: Arg, flags: tuple[str, ...]) -> tuple[str, ...]:
    """The shape that a flag such as ``g.HV`` names, else the first of the spec."""
    chosen = next((shape for shape in arg.shapes if f"{arg.name}.{''.join(shape)}" in flags), arg.shapes[0])
    if chosen[0] != "...":
        return chosen
    rank = next((int(flag.removeprefix("rank.")) for flag in flags if flag.startswith("rank.")), 3)
    return (*{1: (), 2: ("T",), 3: ("B", "T"), 4: ("B", "T", "H")}[rank], *chosen[1:])


def size_of(symbol: str, sizes: dict[str, int]) -> int:
    base, _, extra = symbol.replace("-", "+-").partition("+")
    return sizes[base] + int(extra or 0)


def dtype_of(arg: Arg, case: Case) -> str:
    """Operands have the dtype of the case; gates, beta and states float32 (float64) unless ``narrow`` or ``wide``."""
    if arg.role == "index":
        wide = "wide" in case.flags and arg.name == "cu_seqlens"
        wide = wide or ("i64" in case.flags and arg.name in ("cu_seqlens", "state_indices"))
        return "int64" if wide else "int32"
    own = (flag.partition(".") for flag in case.flags)
    for short in (short for short, _, name in own if short in DTYPES and name == arg.name.partition(".")[0]):
        return DTYPES[short]
    if arg.role == "operand":
        return case.dtype
    if "narrow" in case.flags:
        return "float16" if case.dtype == "float32" else case.dtype
    return "float64" if "wide" in case.flags or case.dtype == "float64" else "float32"


# -- values ----------------------------------------------------------------------------------------------------------


def values(rng: np.random.Generator, case: Case, name: str, shape: tuple[int, ...], before: dict[str, Array]) -> Array:
    """Values of one array. ``before`` holds the arrays drawn so far."""
    x = rng.standard_normal(shape)
    flags = case.flags
    delta = case.op in ("delta_rule", "gated_delta_rule", "kda", "dplr")
    phi = map_name(flags)
    if phi and name in case.spec.mapped:
        generated = any(flag.startswith("seed.") for flag in flags)  # beside any beta, a chunk of any length
        return unit(x) if generated and delta and name == "k" else x * MAPS[phi].scale
    if name in ("q", "k"):
        if "normalize" in flags:  # a denominator that stays away from zero
            return np.abs(x) + 0.1
        if name == "k" and delta and "qk_norm.l2" not in flags:
            x = unit(x)
        if "carry" in flags:
            x = x * 2.0**-10
        return x
    if name.startswith("gate."):
        return 0.3 * x - (2.5 if name == LONGEST[mapping_gate(flags)] else 0.0)
    if name == "g" and mapping_gate(flags):
        return far(rng, x, *((-FAR, FAR) if mapping_gate(flags) == "Softplus" else (-FAR,)))
    if name in ("g", "gv"):
        return gate(rng, x, case, name)
    if case.op == "ssd" and name in ("dt", "dt_bias"):
        return 0.5 * x - (1.0 if name == "dt" else 0.0) if "dt_softplus" in flags else np.abs(x) * 0.3
    if case.op == "ssd" and name in ("B", "C"):
        return x * 2.0**-10 if "carry" in flags else x
    if case.op == "ssd" and name == "A":
        return -np.exp(0.5 * x - 1.0) * (0.03 if "carry" in flags else 1.0)
    if name == "beta" and any(flag.startswith("beta_map.") for flag in flags):
        return x
    if name == "beta":
        strength = 1 / (1 + np.exp(-2 * x))
        if "edges" in flags:
            return np.where(rng.random(shape) < 0.3, rng.choice((0.0, 1.0, 2.0), shape), strength)
        return 1 + 0.95 * strength if "strong" in flags else strength
    if name == "a":
        return -unit(x)
    if name == "b":
        return -before["a"] / (1 + np.exp(-x[..., :1]))
    if name == "initial_state" and "deep" in flags:
        return x * 2.0**60
    if name.startswith("initial_state."):
        return held(x, name, case)
    if name in ("state", "initial_state") and "normalize" in flags:  # the sums of keys
        return np.abs(x) + 0.1
    if name in ("u", "weight"):
        return 0.5 * x
    return x


def flagged(x: Array, name: str, symbols: tuple[str, ...], case: Case, dtype: str) -> Array:
    """What flags ask of an array by its name: magnitudes, zeros, the smallest numbers, repetition."""
    flags = case.flags
    scaled = name == case.spec.like or name == "state" or name.partition(".")[0] == "initial_state"
    for flag in set(MAGNITUDES).intersection(flags) if scaled else ():
        if name.rpartition(".")[2] not in ("k_quad", "k_lin"):
            x = sums_kept(x, x * MAGNITUDES[flag], case)
    small = name in BALANCES and ("tiny" in flags or f"large.{BALANCES[name]}" in flags)
    for size in ALONE:  # what is small beside long keys, or multiplies tiny values, is no smaller: products were subnormal
        x = x * ALONE[size] if f"{size}.{name}" in flags and not small else x
        x = x / ALONE[size] ** 2 if f"{size}.{BALANCES.get(name)}" in flags and ALONE[size] > 1 else x
    if f"blank.{name}" in flags:
        x = np.zeros_like(x)
    if f"zeros.{name}" in flags:
        axis = next((i for i, symbol in enumerate(symbols) if symbol in ("T", "N")), 0)
        third = np.arange(x.shape[axis]) % 3 == 1
        x = np.where(np.expand_dims(third, [i for i in range(x.ndim) if i != axis]), 0.0, x)
    if f"subnormal.{name}" in flags:
        x = np.where(np.indices(x.shape).sum(0) % 5 == 2, np.sign(x) * 3 * SMALLEST[dtype], x)
    if any(flag in ("expanded", f"expanded.{name}") for flag in flags) and x.size and name != "state":
        # not along tokens: of equal terms the roundings are equal, and do not average out
        for axis in [i for i, symbol in enumerate(symbols) if symbol != "T" and x.shape[i] > 1][:1]:
            x = np.repeat(x.take([0], axis), x.shape[axis], axis)
    return x


def sums_kept(x: Array, scaled: Array, case: Case) -> Array:
    """A scaled state whose last column is as it was, where that holds the sums of keys."""
    if "normalize" not in case.flags or (x.ndim == 4 and x.shape[-1] != case.size.get("V", 0) + 1):
        return scaled
    return np.concatenate([scaled[..., :-1], x[..., -1:]], -1)


SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}

LONGEST = {"Softplus": "gate.A_log", "BoundedSigmoid": "gate.dt_bias", "NegExp": "gate.bias"}
"""Of each gate object, the parameter that makes memories long."""


FAR = 100.0
"""Float32 does not hold the exponential of it."""


def far(rng: np.random.Generator, x: Array, *ends: float) -> Array:
    """Projections, some of them at ends where a map overflows that is not careful. A sigmoid near one is no such end: of its
    slope, a difference, nothing is left.
    """
    return np.where(rng.random(x.shape) < 0.04, rng.choice(ends, x.shape), x)


def mapping_gate(flags: tuple[str, ...]) -> str | None:
    """The gate object that a flag names."""
    named = (flag.split(".") for flag in flags if flag.startswith("gate."))
    return next((value for _, value, *_ in named if value in GATES), None)


def unit(x: Array) -> Array:
    return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-6)


def gate(rng: np.random.Generator, x: Array, case: Case, name: str) -> Array:
    """Log decays: memories from two to a hundred tokens, or what a flag asks for."""
    flags = case.flags
    if "zero" in flags:
        return np.zeros_like(x)
    if x.ndim == 1:
        return np.log1p(-(2.0 ** (-2.0 - np.arange(len(x)))))
    g = -np.exp(1.2 * x - 2.5)
    if "carry" in flags:
        return 0.03 * g
    if "deep" in flags:
        g[:, :1] = -60.0
        return g
    draw = rng.random(x.shape)
    if "long" in flags:
        return np.where(draw < 0.1, -30.0 - 100.0 * rng.random(x.shape), g)
    # a whole token, and single channels
    token = rng.random(x.shape[:3] + (1,) * (x.ndim - 3)) < 0.1
    token[:1, :1, :1] = True  # a state that is forgotten before anything is read of it
    if "reset" in flags or case.check == "large":
        return np.where(token | (draw < 0.02), -np.inf, g)
    if "mixed" in flags:
        return rng.choice(MIXED, x.shape)
    if "huge" in flags:
        return np.where(token | (draw < 0.02), rng.choice(HUGE, token.shape), g)
    return g


def held(x: Array, name: str, case: Case) -> Array:
    """The state of ``mixed_attn``: rows of the current chunk from ``length`` on are zero."""
    if name.endswith(".kv"):
        return x
    C = case.size["C"]
    return x * (np.arange(C) < counts(len(x), C)[:, None])[:, :, None, None]


def counts(N: int, C: int) -> Array:
    """How many tokens of a chunk each of ``N`` states holds."""
    return np.array([(5 * n + 3) % C for n in range(N)], dtype=np.int32)
