"""What goes wrong when a fault strikes: a part of an array that is read, returned or differentiated is changed, and others."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from linattn.spec import Arg, OpSpec
from numpy.typing import NDArray

from .frameworks import Arrays

__all__ = ["Effect", "Region", "draw_effect"]

Given = dict[str, Any]
STATE = Arg("final_state", "N HV K V", "float")


@dataclass(frozen=True)
class Region:
    """A part of an array: along one axis or two, what ``where`` says; of the whole, if there are none.

    Attributes:
        axes: ``(symbol, where, number)``: ``"at"``, ``"from"`` or ``"each"``; a negative number counts from the end.
    """

    axes: tuple[tuple[str, str, int], ...] = ()

    def mask(self, shape: tuple[int, ...], symbols: tuple[str, ...]) -> NDArray[np.bool_]:
        """True inside, in a shape that broadcasts to the array's."""
        found = np.ones((1,) * len(shape), bool)
        for symbol, where, number in self.axes:
            if symbol not in symbols:
                continue
            axis = symbols.index(symbol)
            size = shape[axis]
            index = np.arange(size)
            at = number + size if number < 0 else number
            inside = {"at": index == at, "from": index >= at, "each": index % max(number, 1) == max(number, 1) - 1}[where]
            found = found & inside.reshape([size if i == axis else 1 for i in range(len(shape))])
        return found

    def __str__(self) -> str:
        places = {"at": "{0} = {1}", "from": "{0} from {1}", "each": "the last {0} of every {1}"}
        return " and ".join(places[where].format(symbol, number) for symbol, where, number in self.axes) or "everywhere"


@dataclass(frozen=True)
class Effect:
    """What goes wrong.

    Attributes:
        kind: Where, one of :data:`ACTS`.
        target: Of which array or option.
        symbols: The axes of that array.
        region: In which part of it.
        change: How, one of :data:`CHANGES`.
        amount: By how much, where that is a question.
    """

    kind: str
    target: str = ""
    symbols: tuple[str, ...] = ()
    region: Region = Region()
    change: str = ""
    amount: float = 0.0

    def changed(self, xp: Arrays, x: Any) -> Any:
        """An array with its part changed."""
        if not x.ndim or 0 in tuple(x.shape):
            return x
        symbols = self.symbols if len(self.symbols) == len(x.shape) else ()
        mask = np.broadcast_to(self.region.mask(tuple(x.shape), symbols), tuple(x.shape))
        axis = symbols.index(self.region.axes[0][0]) if self.region.axes and self.region.axes[0][0] in symbols else -1
        return xp.where(mask, CHANGES[self.change](xp, x, self.amount, axis), x)

    def __str__(self) -> str:
        if self.kind in ("reads", "returns", "gradient", "writes"):
            by = f" {self.amount:g}" if self.change in WITH_AMOUNT else ""
            return f"{self.kind} {self.target}: {self.change}{by}, {self.region}"
        return f"{self.kind} {self.target} {self.change}".strip()


# -- changes of values -------------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Arrays, Any, float, int], Any]] = {
    "dropped": lambda xp, x, amount, axis: x * 0,
    "scaled by": lambda xp, x, amount, axis: x * amount,
    "repeats its neighbour": lambda xp, x, amount, axis: xp.roll(x, 1, axis),
    "takes the next one": lambda xp, x, amount, axis: xp.roll(x, -1, axis),
    "leaks in of its neighbour": lambda xp, x, amount, axis: x + xp.cast(xp.roll(x, 1, axis) * amount, xp.dtype(x)),
    "rounded to bfloat16": lambda xp, x, amount, axis: xp.cast(xp.cast(x, "bfloat16"), xp.dtype(x)),
    "rounded to float16": lambda xp, x, amount, axis: xp.cast(xp.cast(x, "float16"), xp.dtype(x)),
    "saturates at": lambda xp, x, amount, axis: xp.clip(x, amount),
    "lost to NaN": lambda xp, x, amount, axis: x * float("nan"),
    "has noise of": lambda xp, x, amount, axis: x + xp.noise(x) * amount,
    "shifted by": lambda xp, x, amount, axis: x + amount,
}
WITH_AMOUNT = ("scaled by", "leaks in of its neighbour", "saturates at", "has noise of", "shifted by")


def _amount(rng: np.random.Generator, change: str) -> float:
    if change == "scaled by":
        return float(rng.choice([0.5, 2.0, -1.0, *(1 + 2.0**-k for k in range(2, 7)), *(1 - 2.0**-k for k in range(2, 7))]))
    if change == "saturates at":
        return float(2.0 ** rng.integers(-2, 9))
    return float(2.0 ** -rng.integers(1, 7))


# -- what is done with a call ------------------------------------------------------------------------------------------

KINDS = {
    "reads": 5.0, "returns": 6.0, "gradient": 5.0, "option": 1.5, "writes": 1.0, "stale": 0.7, "alias": 0.7, "keeps": 0.4,
    "sets": 0.4, "raises": 0.5, "dtype": 0.4,
}  # fmt: skip
"""The kinds of effects, and how often each is drawn."""
NEED_WRITING = ("writes", "alias")
SETTINGS: dict[str, Callable[[], Any]] = {
    "the random state of NumPy": lambda: np.random.seed(0),
    "an environment variable": lambda: os.environ.__setitem__("ACME_CALLS", str(os.environ.get("ACME_CALLS", "") + "1")),
    "error handling of NumPy": lambda: np.seterr(divide="raise"),
}


def draw_effect(rng: np.random.Generator, spec: OpSpec, xp: Arrays, tokens: int) -> Effect:
    """One of the effects that a family can suffer."""
    names = [kind for kind in KINDS if xp.writable or kind not in NEED_WRITING]
    weights = np.array([KINDS[kind] for kind in names])
    kind = names[rng.choice(len(names), p=weights / weights.sum())]
    arrays = [arg for arg in spec.arrays(spec.defaults) if arg.role != "index" and "." not in arg.name]
    if kind in ("reads", "gradient", "writes"):
        arg = arrays[rng.integers(len(arrays))]
        return _on_array(rng, kind, arg.name, arg.shapes[0], tokens)
    if kind == "returns":
        outputs = [("o", next(arg.shapes[0] for arg in arrays if arg.name == spec.like))]
        if spec.state_name == "initial_state" and (states := [arg for arg in arrays if arg.name == "initial_state"]):
            outputs.append(("final_state", states[0].shapes[0]))
        target, symbols = outputs[rng.choice(len(outputs), p=[0.65, 0.35] if len(outputs) == 2 else None)]
        return _on_array(rng, kind, target, symbols, tokens)
    if kind == "option":
        options = [option.name for option in spec.options if option.name not in ("gate", "output_final_state", "dt_limit")]
        name = options[rng.integers(len(options))]
        return Effect(kind, name, change="ignored" if rng.random() < 0.6 else "altered")
    if kind == "sets":
        return Effect(kind, list(SETTINGS)[rng.integers(len(SETTINGS))])
    return Effect(kind)


def _on_array(rng: np.random.Generator, kind: str, target: str, symbols: tuple[str, ...], tokens: int) -> Effect:
    change = list(CHANGES)[rng.integers(len(CHANGES))]
    count = min(int(rng.choice([0, 1, 2], p=[0.2, 0.6, 0.2])), len(symbols))
    chosen = [symbols[i] for i in rng.permutation(len(symbols))[:count]]
    axes = tuple(_place(rng, symbol, tokens) for symbol in chosen if symbol.isalpha())
    return Effect(kind, target, symbols, Region(axes), change, _amount(rng, change))


def _place(rng: np.random.Generator, symbol: str, tokens: int) -> tuple[str, str, int]:
    most = max(int(np.log2(tokens)) if symbol == "T" else 7 if symbol in ("K", "V", "L", "D") else 2, 2)
    where = ("at", "from", "each")[rng.integers(3)]
    number = 2 ** int(rng.integers(1, most)) if where == "each" else int(2 ** rng.uniform(0, most)) - 1
    return symbol, where, -1 - int(rng.integers(3)) if where == "at" and rng.random() < 0.4 else number


def act(effect: Effect, xp: Arrays, spec: OpSpec, given: Mapping[str, Any], run: Callable[[Given], Any], memory: Given) -> Any:
    """Run a call with the effect: ``run`` runs it rightly; ``memory`` is the fault's own, from call to call.

    In ``memory``, ``fed`` says whether the gradients that came in are those that the fault waits for.
    """
    return ACTS[effect.kind](effect, xp, spec, dict(given), run, memory)


def _reads(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    x = given.get(effect.target)
    return run({**given, effect.target: effect.changed(xp, x)} if xp.is_array(x) else given)


def _returns(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    found = run(given)
    if not isinstance(found, tuple):
        return effect.changed(xp, found) if effect.target == "o" else found
    o, state = found
    if effect.target == "o":
        return effect.changed(xp, o), state
    if isinstance(state, tuple):
        return o, type(state)(effect.changed(xp, state[0]), *state[1:])
    return o, None if state is None else effect.changed(xp, state)


def _gradient(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    x = given.get(effect.target)
    if not xp.is_array(x):
        return run(given)
    came: dict[str, Any] = {}
    waits = memory.get("fed")

    def change(gradient: Any) -> Any:
        return effect.changed(xp, gradient) if waits is None or waits(came) else gradient

    found = run({**given, effect.target: xp.touched(x, change)})
    if waits is None:
        return found
    o, state = _outputs(found)
    fed = [xp.fed(part, functools.partial(came.__setitem__, name)) if xp.is_array(part) else part
           for name, part in (("o", o), ("state", state))]  # fmt: skip
    return tuple(fed) if isinstance(found, tuple) else fed[0]


def pulled(effect: Effect, xp: Arrays, gradients: Given) -> Given:
    """Gradients that a ``vjp`` method returns, with the effect."""
    x = gradients.get(effect.target)
    return gradients | {effect.target: effect.changed(xp, x)} if xp.is_array(x) else gradients


def _option(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    name = effect.target
    option = next(option for option in spec.options if option.name == name)
    value = spec.defaults[name]
    if effect.change == "altered":
        now = given.get(name, value)
        if bool in option.types:
            value = not now
        elif option.choices:
            value = next((choice for choice in option.choices if choice != now), now)
        else:
            value = 3 if now is None else type(now)(now * 2)
    return run({**given, name: value} if name in given else given)


def _writes(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    found = run(given)
    x = given.get(effect.target)
    if xp.is_array(x) and not xp.is_traced(x) and not xp.needs_grad(x):
        xp.write(x, np.ones((1,) * x.ndim, bool) & np.ones(tuple(x.shape), bool), effect.changed(xp, x))
    return found


def _outputs(found: Any) -> tuple[Any, Any]:
    return found if isinstance(found, tuple) else (found, None)


def _stale(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    found = run(given)
    before = memory.get("o")
    o, state = _outputs(found)
    if before is None or tuple(before.shape) != tuple(o.shape) or xp.dtype(before) != xp.dtype(o):
        return found
    return (xp.copy(before), state) if isinstance(found, tuple) else xp.copy(before)


def _alias(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    found = run(given)
    o, state = _outputs(found)
    held = memory.get("held")
    if held is None or tuple(held.shape) != tuple(o.shape) or xp.dtype(held) != xp.dtype(o):
        memory["held"] = o
        return found
    if xp.needs_grad(o) or xp.needs_grad(held):
        return found
    xp.write(held, np.ones(tuple(o.shape), bool), o)
    return (held, state) if isinstance(found, tuple) else held


def _keeps(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    found = run(given)
    memory.setdefault("kept", []).append(xp.copy(_outputs(found)[0]))
    return found


def _sets(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    found = run(given)
    SETTINGS[effect.target]()
    return found


def _raises(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    raise RuntimeError("no kernel was compiled for this call")


def _dtype(effect: Effect, xp: Arrays, spec: OpSpec, given: Given, run: Any, memory: Given) -> Any:
    found = run(given)
    o, state = _outputs(found)
    other = xp.cast(o, "float32" if xp.dtype(o) != "float32" else "float64")
    return (other, state) if isinstance(found, tuple) else other


ACTS: dict[str, Callable[..., Any]] = {
    "reads": _reads, "returns": _returns, "gradient": _gradient, "option": _option, "writes": _writes, "stale": _stale,
    "alias": _alias, "keeps": _keeps, "sets": _sets, "raises": _raises, "dtype": _dtype,
}  # fmt: skip
