"""When a fault strikes: facts of a call that hold together, drawn over what valid calls can be."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from linattn.spec import OpSpec

from .frameworks import Arrays

__all__ = ["Atom", "Condition", "draw_condition"]

RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "is": operator.eq,
    "is not": operator.ne,
    "above": operator.gt,
    "below": operator.lt,
    "is a multiple of": lambda found, value: found % value == 0,
    "is no multiple of": lambda found, value: found % value != 0,
}
PAST = ("calls", "around", "cotangent")
"""Kinds of facts that no call has by itself."""
FLOATS = ("operand", "float")


@dataclass(frozen=True)
class Atom:
    """One fact and what it must be."""

    fact: str
    relation: str
    value: Any

    def holds(self, get: Callable[[str], Any]) -> bool:
        """True if a call is so; a fact that it does not have is never so."""
        found = get(self.fact)
        if found is None or (self.relation in ("above", "below") and not isinstance(found, int | float)):
            return False
        return bool(RELATIONS[self.relation](found, self.value))

    @property
    def past(self) -> bool:
        """True if it rests on more than the call itself."""
        return self.fact.partition(" ")[0] in PAST

    @property
    def later(self) -> bool:
        """True if it rests on the gradients that come in, which a call does not know yet."""
        return self.fact.startswith("cotangent ")

    def __str__(self) -> str:
        return (
            f"{self.fact} {self.relation} {self.value:g}"
            if isinstance(self.value, float)
            else (f"{self.fact} {self.relation} {self.value}")
        )


@dataclass(frozen=True)
class Condition:
    """Where a fault is, and facts that must hold together.

    Attributes:
        op: The family.
        form: The form; empty for all of them.
        atoms: The facts; none: always.
    """

    op: str
    form: str
    atoms: tuple[Atom, ...]

    def covers(self, op: str, form: str) -> bool:
        """True for a method that has the fault. A ``vjp`` method is of no form."""
        return op == self.op and (not self.form or form in (self.form, "vjp"))

    def holds(self, get: Callable[[str], Any]) -> bool:
        """True for a call of such a method that is so, as far as it is known when it is made."""
        return all(atom.later or atom.holds(get) for atom in self.atoms)

    def fed(self, get: Callable[[str], Any]) -> bool:
        """True for gradients that come in and are so."""
        return all(atom.holds(get) for atom in self.atoms if atom.later)

    def may_hold(self, told: Mapping[str, Any]) -> bool:
        """True for a call of these facts, whatever came before it."""
        return self.covers(told["op"], told["form"]) and all(atom.past or atom.holds(told.get) for atom in self.atoms)

    def __str__(self) -> str:
        where = f"{self.form}_{self.op}" if self.form not in ("", "direct") else self.op
        return f"{where} if {' and '.join(map(str, self.atoms))}" if self.atoms else f"{where} always"


def draw_condition(rng: np.random.Generator, spec: OpSpec, form: str, xp: Arrays, tokens: int) -> Condition:
    """A condition on calls of a family of at most so many tokens: mostly one fact, often two, seldom none or three."""
    count = int(rng.choice([0, 1, 2, 3], p=[0.05, 0.5, 0.38, 0.07]))
    kinds = list(KINDS)
    weights = np.array([KINDS[kind] for kind in kinds], float)
    atoms: list[Atom] = []
    while len(atoms) < count:
        draw = kinds[rng.choice(len(kinds), p=weights / weights.sum())]
        atom = draw(rng, spec, xp, tokens)
        if atom is not None and atom.fact not in {other.fact for other in atoms}:
            atoms.append(atom)
    return Condition(spec.name, form, tuple(atoms))


# -- kinds of facts ----------------------------------------------------------------------------------------------------


def _number(rng: np.random.Generator, most: int) -> int:
    """A number up to ``most``, small ones and powers of two, and their neighbours, more often than others."""
    number = round(2 ** rng.uniform(0, np.log2(most)))
    if rng.random() < 0.5:
        number = 2 ** int(rng.integers(0, int(np.log2(most)) + 1)) + int(rng.integers(-1, 2))
    return min(max(number, 1), most)


LARGEST = {"K": 256, "V": 256, "L": 128, "D": 300, "B": 9, "H": 9, "N": 40, "group": 5, "W": 8}


def size(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """The size of a symbol, or how many value heads share a key head."""
    arrays = spec.arrays(spec.defaults)
    symbols = {symbol for arg in arrays for shape in arg.shapes for symbol in shape if symbol in LARGEST or symbol == "T"}
    symbols |= {"group"} if "HV" in {symbol for arg in arrays for shape in arg.shapes for symbol in shape} else set()
    symbols |= {"T"} if "T" in symbols else set()
    if not symbols:
        return None
    listed = [*sorted(symbols), *["T"] * (2 if "T" in symbols else 0)]
    symbol = listed[rng.integers(len(listed))]
    most = tokens if symbol == "T" else min(LARGEST[symbol], max(tokens // 4, 8))
    relation = str(rng.choice(["is", "above", "below", "is a multiple of", "is no multiple of"]))
    number = _number(rng, most)
    if relation in ("is a multiple of", "is no multiple of"):
        number = max(min(number, 128), 2)
    if relation == "above":
        number = min(number, most - 1)
    return Atom(f"size {symbol}", relation, max(number, 2) if relation == "below" else number)


def option(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """What an option is."""
    options = [option for option in spec.options if option.name not in ("gate", "dt_limit", "eps", "group_size")]
    chosen = options[rng.integers(len(options))]
    name = f"option {chosen.name}"
    if bool in chosen.types:
        return Atom(name, "is", bool(rng.integers(2)))
    if chosen.choices:
        return Atom(name, "is", str(rng.choice(chosen.choices)))
    if int in chosen.types and float not in chosen.types:
        return Atom(name, str(rng.choice(["is", "above", "below"])), _number(rng, min(256, tokens)))
    return Atom(name, *[("below", 0.0), ("is", 0.0), ("above", 1.0), ("above", 30.0)][rng.integers(4)])


def _floats(spec: OpSpec) -> list[str]:
    return [arg.name for arg in spec.arrays(spec.defaults) if arg.role in FLOATS and "." not in arg.name]


def _one(rng: np.random.Generator, names: list[str]) -> str:
    return names[rng.integers(len(names))]


def given(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """Whether an optional array is given."""
    names = [arg.name for arg in spec.arrays(spec.defaults) if arg.optional and "." not in arg.name]
    return Atom(f"given {_one(rng, names)}", "is", bool(rng.integers(2))) if names else None


def dtype(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """The dtype of one array."""
    return Atom(f"dtype {_one(rng, _floats(spec))}", "is", _one(rng, list(xp.dtypes)))


def index_dtype(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """The dtype of the offsets."""
    return Atom("dtype cu_seqlens", "is", _one(rng, ["int32", "int64"])) if spec.index else None


def layout(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """Whether one array's elements lie one after the other."""
    if not xp.writable:
        return None
    return Atom(f"layout {_one(rng, _floats(spec))}", "is", "strided")


def gradient(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """Whether a gradient of one array is asked for."""
    return Atom(f"gradient {_one(rng, _floats(spec))}", "is", bool(rng.integers(2))) if xp.name == "torch" else None


def values(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """What the values of one array are like."""
    name = _one(rng, _floats(spec))
    kind = rng.integers(5)
    if kind == 0:
        return Atom(f"largest {name}", "above", float(2.0 ** rng.integers(3, 30)))
    if kind == 1:
        return Atom(f"largest {name}", "below", float(2.0 ** -rng.integers(3, 40)))
    if kind == 2:
        return Atom(f"zeros {name}", "is", str(rng.choice(["all", "rows"])))
    gates = [gate for gate in ("g", "gv") if gate in _floats(spec)]
    if not gates:
        return None
    if kind == 3:
        return Atom(f"infinite {_one(rng, gates)}", "is", True)
    return Atom(f"largest {_one(rng, gates)}", "above", float(rng.choice([1.0, 5.0, 20.0, 50.0, 90.0, 500.0, 1e4])))


def packing(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """How sequences are packed."""
    if spec.index is None:
        return None
    kind = rng.integers(6)
    if kind < 2:
        return Atom("sequence shortest", "is", int(kind))
    if kind == 2:
        return Atom("sequence longest", str(rng.choice(["above", "below"])), _number(rng, max(tokens // 2, 4)) + 1)
    if kind == 3:
        return Atom("sequence tail", "is", True)
    return Atom("sequence whole", "is", True) if kind == 4 else Atom("size N", "above", _number(rng, 30))


def history(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """What came before."""
    kind = rng.integers(3)
    if kind == 0:
        return Atom("calls so-far", "above", _number(rng, 20))
    return Atom("calls alike", "above", _number(rng, 10)) if kind == 1 else Atom("calls changed", "is", True)


def surroundings(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """What is around the call."""
    facts = ["thread", *(["grad", "autocast", "inference"] if xp.name == "torch" else [])]
    fact = _one(rng, facts)
    return Atom(f"around {fact}", "is", fact != "grad")


def cotangent(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Atom | None:
    """What gradients come in: of which outputs, all zero, or in a layout of their own."""
    if not xp.writable:  # traced, wherever there are gradients
        return None
    outputs = ["o", *(["state"] if spec.state_name == "initial_state" and spec.state(spec.defaults) else [])]
    return Atom(f"cotangent {_one(rng, outputs)}", "is", _one(rng, ["none", "zeros", "strided"]))


KINDS: dict[Callable[..., Atom | None], float] = {
    size: 9, option: 4, given: 2, dtype: 3, index_dtype: 0.5, layout: 1.5, gradient: 2, values: 3, packing: 2, history: 2,
    surroundings: 0.8, cotangent: 1,
}  # fmt: skip
"""Kinds of facts, and how often each is drawn."""
