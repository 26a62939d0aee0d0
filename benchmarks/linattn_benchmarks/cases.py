"""What is timed: one operator, one shape, one thing done with it; and the arrays it is done on."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from linattn.errors import OptionError
from linattn.ops._family import operator_named
from linattn.spec import DECODING, FAMILIES, SYMBOLS, Arg, OpSpec

from . import packing

WHAT = ("fwd", "fwdbwd", "decode")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4}

GATES = {"weak": 1 / 64, "mixed": 1 / 16, "model": 1.0, "strong": 8.0}
"""Factors on the gates of a fresh model: a log decay near zero, the model's own, one that forgets within a token or two.

Of mixed gates the last quarter of the heads has none, and never forgets, as in FlashQLA's benchmark.
"""

TIMED = {name: spec for name, spec in FAMILIES.items() if any(arg.name == "v" for arg in spec.args)}
"""Families of queries, keys and values: arrays, floors and peers are known of these."""

SWEPT = {**TIMED, "ssd": FAMILIES["ssd"]}
"""Families that are timed over shapes and of the host: of ``ssd``, whose arrays have names of their own, no floor is known."""

PERIOD = 1021
"""Tokens after which arrays of packed sequences repeat: making them takes no time. A prime, so that no two chunks are equal."""

DIVISOR = {"gla": 16.0}
"""What a fresh model divides ``logsigmoid(x)`` by: the temperature of GLA; one elsewhere."""

DEFAULT_SIZES = {"B": 1, "T": 1024, "H": 4, "K": 64, "V": 64, "C": 256}
DECODE_SHAPES = {"cpu": ("B=16,T=1/4,H=4,K=64,V=64",), "cuda": ("B=256,T=1/4,H=16,K=128,V=128",)}
"""Of operators named ``decode_*``; a family's decoding step has one token."""
DEFAULT_SHAPES = {
    "cpu": ("B=1,T=1024/4096,H=4,K=64,V=64",),
    "cuda": ("B=4,T=4096,H=16,K=128,V=128", "B=1,T=32768,H=4,K=128,V=128"),
}


@dataclass(frozen=True)
class Case:
    """One operator at one shape.

    Attributes:
        operator: Public name, e.g. ``"chunk_gla"``.
        what: ``"fwd"``, ``"fwdbwd"``, or ``"decode"``: from a state, which is then written.
        sizes: ``(symbol, size)`` of every symbol.
        device: Kind of device, e.g. ``"cpu"``.
        dtype: Of the operands.
        gate_dtype: Of the other float arrays, the state apart.
        gates: A key of :data:`GATES`.
        seed: Makes the arrays, the same ones in every process.
        lengths: Of sequences packed end to end, ``B`` is one and ``T`` their sum; none for a batch.
        states: Whether initial states are given and final ones asked for, besides decoding.
        periodic: Whether tokens of a batch repeat as those of packed sequences do.
    """

    operator: str
    what: str
    sizes: tuple[tuple[str, int], ...]
    device: str = "cpu"
    dtype: str = "float32"
    gate_dtype: str = "float32"
    gates: str = "model"
    seed: int = 0
    lengths: tuple[int, ...] = ()
    states: bool = False
    periodic: bool = False

    @property
    def spec(self) -> OpSpec:
        """The family's description."""
        return operator_named(self.operator).spec

    @property
    def size(self) -> dict[str, int]:
        """Sizes by symbol; ``N`` and ``P`` are ``B`` unless packed, and a decoding step has one token unless ``decode_*``."""
        sizes = dict(self.sizes)
        count = len(self.lengths) or sizes["B"]
        one = self.what == "decode" and not self.in_place
        return {**sizes, "N": count, "P": count} | ({"T": 1} if one else {})

    @property
    def offsets(self) -> np.ndarray | None:
        """``cu_seqlens`` of packed sequences."""
        return np.cumsum((0, *self.lengths), dtype=np.int32) if self.lengths else None

    @property
    def in_place(self) -> bool:
        """Whether the state is overwritten."""
        return operator_named(self.operator).form == "decode"

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call."""
        final = self.states or (self.what == "decode" and not self.in_place)
        options: dict[str, Any] = {"output_final_state": True} if final else {}
        return options | ({"chunk_size": self.size["C"]} if self.spec.name == "mixed_attn" else {})

    @property
    def arrays(self) -> tuple[Arg, ...]:
        """The arrays of the call that are no state: every one that the family requires."""
        return tuple(arg for arg in self.spec.args if not arg.optional)

    @property
    def values(self) -> Arg:
        """The array that the output is like."""
        return next(arg for arg in self.arrays if arg.name in ("v", "x"))

    @property
    def state(self) -> tuple[Arg, ...]:
        """The arrays of the state that is given."""
        defaults = {option.name: option.default for option in self.spec.options}
        return self.spec.state(defaults | self.options) if self.what == "decode" or self.states else ()

    def shape(self, arg: Arg) -> tuple[int, ...]:
        """Shape of an array, in the first form that the spec allows."""
        parts = (symbol.partition("+") for symbol in arg.shapes[0])
        return tuple(self.size[symbol] + int(extra or 0) for symbol, _, extra in parts)

    def dtype_of(self, arg: Arg) -> str:
        """Dtype of an array."""
        if arg.role == "index":
            return "int32"
        if arg in self.state:
            return "float64" if self.dtype == "float64" else "float32"
        return self.dtype if arg.role == "operand" else self.gate_dtype

    def nbytes(self, arg: Arg) -> int:
        """Bytes of an array."""
        return math.prod(self.shape(arg)) * ITEMSIZE[self.dtype_of(arg)]

    @property
    def label(self) -> str:
        """The sizes that this family has, e.g. ``"B1 T1024 H4 K64 V64"``."""
        used = {symbol.partition("+")[0] for arg in (*self.arrays, *self.state) for symbol in arg.shapes[0]} - {"N", "P"}
        used |= {"C"} if "chunk_size" in self.options else set()
        used -= {"HV"} if self.size["HV"] == self.size["H"] else set()
        sizes = " ".join(f"{symbol}{size}" for symbol, size in self.size.items() if symbol in used)
        return f"{sizes}, {packing.name(self.lengths)}" if self.lengths else sizes

    def as_json(self) -> dict[str, Any]:
        """What a results file and a worker process are told."""
        fields = asdict(self) | {"sizes": self.size}
        return {name: x for name, x in fields.items() if x or name not in ("lengths", "states", "periodic")}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Case:
        """The inverse of :meth:`as_json`."""
        sizes = {symbol: size for symbol, size in fields["sizes"].items() if symbol not in ("N", "P")}
        return Case(**{**fields, "sizes": tuple(sizes.items()), "lengths": tuple(fields.get("lengths", ()))})


def cases(operators: Sequence[str], whats: Sequence[str], shapes: Sequence[Mapping[str, int]], **settings: Any) -> list[Case]:
    """Every combination. A family's decoding step is one, whichever of its forms was named; ``decode_*`` does nothing else."""
    combinations = itertools.product(operators, shapes, whats)
    return list(dict.fromkeys(one_case(name, sizes, what, settings) for name, sizes, what in combinations))


def one_case(name: str, sizes: Mapping[str, int], what: str, settings: Mapping[str, Any]) -> Case:
    """One operator at one shape: what is decoding is done by the function for it."""
    operator = timed_operator(name)
    if operator.form == "decode":
        return Case(name, "decode", tuple(sizes.items()), **settings)
    if what != "decode":
        return Case(name, what, tuple(sizes.items()), **settings)
    family = operator.spec.name
    step = f"{'decode' if family in DECODING else 'recurrent'}_{family}"
    return Case(step, what, tuple({**sizes, "T": 1}.items()), **settings)


def timed_operator(name: str) -> Any:
    """The operator of that name; ``OptionError`` if there is none, or if it is not of :data:`TIMED`."""
    operator = operator_named(name)
    if operator.spec.name not in TIMED:
        raise OptionError(f"{name} is not timed: expected an operator of {', '.join(TIMED)}")
    return operator


def parse_shape(text: str) -> list[dict[str, int]]:
    """``"B=1,T=1024/4096,H=4,K=64,V=64"``: one shape for every combination of sizes; what is left out has a default."""
    given: dict[str, list[int]] = {}
    for part in text.split(","):
        symbol, equals, values = part.strip().partition("=")
        if not equals:
            raise OptionError(f"--shape {text}: expected SYMBOL=SIZE, got {part.strip()!r}")
        if symbol not in set_of_symbols():
            raise OptionError(f"--shape {text}: unknown symbol {symbol!r}: known are {', '.join(set_of_symbols())}")
        given[symbol] = [parse_size(text, symbol, value) for value in values.split("/")]
    return [complete(dict(zip(given, sizes, strict=True))) for sizes in itertools.product(*given.values())]


@functools.cache
def set_of_symbols() -> tuple[str, ...]:
    """The symbols that a shape may set: those of the arrays and states of :data:`TIMED`, the number of sequences apart."""
    arrays = (arg for spec in TIMED.values() for arg in (*spec.args, *spec.state(spec.defaults)))
    used = {symbol.partition("+")[0] for arg in arrays for shape in arg.shapes for symbol in shape}
    return tuple(symbol for symbol in SYMBOLS if symbol in used - {"N", "P"})


def parse_size(text: str, symbol: str, value: str) -> int:
    """A positive whole number."""
    if not value.isdecimal() or int(value) < 1:
        raise OptionError(f"--shape {text}: {symbol} must be a positive whole number, got {value!r}")
    return int(value)


def complete(sizes: dict[str, int]) -> dict[str, int]:
    """Defaults for what is left out, in the order of ``SYMBOLS``."""
    full = DEFAULT_SIZES | sizes
    full = {"HV": full["H"], "L": full["K"]} | full
    return {symbol: full[symbol] for symbol in set_of_symbols()}


# -- the arrays ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """Float32 NumPy arrays, not yet rounded to the dtypes of the call.

    Attributes:
        arrays: By parameter name.
        state: The arrays of the state that is given.
        d_o: The gradient of the output.
    """

    arrays: dict[str, np.ndarray]
    state: tuple[np.ndarray, ...]
    d_o: np.ndarray


def draw(case: Case) -> Inputs:
    """Fresh random arrays from the case's seed; keys of the delta families have unit length.

    No gate is zero, but for mixed ones. Packed sequences, and periodic ones, get the first :data:`PERIOD` tokens only.
    """
    if case.what == "decode":
        return drawn(case)
    inputs = drawn(replace(case, what="fwd", sizes=one_period(case), lengths=(), states=False, periodic=False))
    rng = np.random.default_rng((case.seed, len(case.lengths)))
    return replace(inputs, state=tuple(draw_state(case, arg, rng) for arg in case.state))


def one_period(case: Case) -> tuple[tuple[str, int], ...]:
    """The sizes of the arrays that are drawn."""
    sizes = dict(case.sizes)
    tokens = min(sizes["B"] * sizes["T"], PERIOD)
    return tuple((sizes | {"B": 1, "T": tokens}).items()) if case.lengths or case.periodic else case.sizes


@functools.lru_cache(maxsize=1)  # every subject of a case gets the same arrays, and copies them
def drawn(case: Case) -> Inputs:
    """The arrays of a case, whatever is done with them. Each has a generator of its own, so that they can be drawn at once."""
    seeds = np.random.SeedSequence(case.seed).spawn(len(case.arrays) + 3)
    low_rank_seed, state_seed, output_seed = (np.random.default_rng(seed) for seed in seeds[-3:])
    with ThreadPoolExecutor() as pool:  # NumPy draws without holding the interpreter's lock
        waiting = {
            arg.name: pool.submit(draw_array, case, arg, np.random.default_rng(seed))
            for arg, seed in zip(case.arrays, seeds, strict=False)
        }
        d_o = pool.submit(output_seed.standard_normal, case.shape(case.values), np.float32)
        arrays = {name: future.result() for name, future in waiting.items()}
    if case.spec.name == "dplr":
        arrays |= low_rank(arrays, low_rank_seed)
    state = tuple(draw_state(case, arg, state_seed) for arg in case.state)
    return Inputs(arrays, state, d_o.result())


def draw_array(case: Case, arg: Arg, rng: np.random.Generator) -> np.ndarray:
    """One array by the role that its name gives it."""
    x = rng.standard_normal(case.shape(arg), np.float32)
    if arg.name == "g":
        g = log_decay(x, GATES[case.gates] / DIVISOR.get(case.spec.name, 1.0))
        if case.gates == "mixed":
            g[:, :, math.ceil(0.75 * g.shape[2]) :] = 0
        return g
    if arg.name == "beta":
        return 1 / (1 + np.exp(-x))
    if arg.name == "dt":  # of a fresh Mamba-2, as its rates are
        return np.logaddexp(0, x - 4, dtype=np.float32)
    if arg.name == "A":
        return np.float32(-GATES[case.gates]) * rng.uniform(1, 16, x.shape).astype(np.float32)
    unit = case.spec.name in ("delta_rule", "gated_delta_rule", "kda", "dplr") and arg.name in ("q", "k")
    return normalised(x) if unit else x


def log_decay(x: np.ndarray, factor: float) -> np.ndarray:
    """``factor · logsigmoid(x)``."""
    return -np.logaddexp(0, -x, dtype=np.float32) * np.float32(factor)


def normalised(x: np.ndarray) -> np.ndarray:
    """Rows of unit length."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def low_rank(arrays: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """``a = −κ``, ``b = α ∘ κ`` with ``κ`` of unit length and ``α`` in (0, 1), as in RWKV-7."""
    direction = normalised(arrays["a"])
    return {"a": -direction, "b": direction * rng.random(direction.shape, np.float32)}


def draw_state(case: Case, arg: Arg, rng: np.random.Generator) -> np.ndarray:
    """One array of a state; that of ``mixed_attn`` is in the middle of a chunk, rows after it zero."""
    half = case.size["C"] // 2
    if arg.role == "index":
        return np.full(case.shape(arg), half, np.int32)
    x = rng.standard_normal(case.shape(arg), np.float32)
    if arg.shapes[0][:2] == ("N", "C"):
        x[:, half:] = 0
    return x
