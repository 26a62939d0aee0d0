"""A right backend with one fault in it, or with a recorder of the calls that reach it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from linattn.call import FORMS
from linattn.plugin import Backend
from linattn.spec import COMPANIONS, DECODING, FAMILIES, spec_of

from .conditions import Condition, draw_condition
from .effects import Effect, act, draw_effect, pulled
from .facts import Facts, History, fact_of_cotangent
from .frameworks import Arrays

__all__ = ["Fault", "Recorder", "carrier", "draw_fault", "forms_of"]

METHODS = {f"{form}_{op}": (op, form) for form in FORMS for op in FAMILIES}
METHODS |= {f"decode_{op}": (op, "decode") for op in DECODING} | {op: (op, "direct") for op in COMPANIONS}
"""Every method of a backend, and of what it is."""


class Fault:
    """A condition and an effect; what a carrier does with its calls.

    Attributes:
        condition: When it strikes.
        effect: What is wrong then.
        struck: How often it has.
    """

    def __init__(self, condition: Condition, effect: Effect, xp: Arrays) -> None:
        self.condition, self.effect, self.xp = condition, effect, xp
        self.reset()

    def reset(self) -> None:
        """Forget every call."""
        self.struck, self.history, self.memory = 0, History(), {}
        if any(atom.later for atom in self.condition.atoms):
            self.memory["fed"] = self._fed

    def __str__(self) -> str:
        return f"{self.condition}: {self.effect}"

    def called(self, op: str, form: str, given: dict[str, Any], run: Callable[[dict[str, Any]], Any]) -> Any:
        """A call of an operator's method: ``given`` is every argument by name, ``run`` the right method."""
        if not self.condition.covers(op, form):
            return run(given)
        facts = self._noted(op, form, given)
        if facts is None or not self.condition.holds(facts.get) or self._elsewhere:
            found = run(given)
        else:
            self.struck += 1
            found = act(self.effect, self.xp, spec_of(op, form), given, run, self.memory)
        if self.effect.kind == "stale" and facts is not None and not facts.traced:
            self.memory["o"] = found[0] if isinstance(found, tuple) else found
        return found

    def pulled(self, op: str, given: dict[str, Any], fed: dict[str, Any], run: Callable[[], Any]) -> Any:
        """A call of a ``vjp`` method, into which the gradients ``fed`` go."""
        found = run()
        if self.effect.kind != "gradient" or not self.condition.covers(op, "vjp"):
            return found
        facts = self._noted(op, "vjp", given)
        if facts is None or not self.condition.holds(facts.get) or not self._fed(fed):
            return found
        self.struck += 1
        return pulled(self.effect, self.xp, found)

    def _fed(self, came: dict[str, Any]) -> bool:
        """Whether the gradients that came in, by output, are those of the condition."""
        facts = {f"cotangent {name}": fact_of_cotangent(self.xp, came.get(name)) for name in ("o", "state")}
        return self.condition.fed(facts.get)

    @property
    def _elsewhere(self) -> bool:
        """True if the effect is one of ``vjp`` methods."""
        return self.effect.kind == "gradient" and self.xp.name == "numpy"

    def _noted(self, op: str, form: str, given: dict[str, Any]) -> Facts | None:
        """The facts of a call that has become one of the history; None where a compiler is looking."""
        facts = Facts(op, form, given, self.xp, self.history)
        if facts.traced and self.xp.name == "torch":
            return None
        self.history.note(facts.shape)
        return facts


class Recorder:
    """In the place of a fault: writes down the facts of every call, once each, and changes none."""

    def __init__(self, xp: Arrays) -> None:
        self.xp, self.seen = xp, []

    def called(self, op: str, form: str, given: dict[str, Any], run: Callable[[dict[str, Any]], Any]) -> Any:
        facts = Facts(op, form, given, self.xp, History())
        if not (facts.traced and self.xp.name == "torch"):
            self._note(facts)
        return run(given)

    def pulled(self, op: str, given: dict[str, Any], fed: dict[str, Any], run: Callable[[], Any]) -> Any:
        self._note(Facts(op, "vjp", given, self.xp, History()))
        return run()

    def _note(self, facts: Facts) -> None:
        told = facts.all()
        if told not in self.seen:
            self.seen.append(told)

    def taken(self) -> list[dict[str, Any]]:
        """The facts of the calls since."""
        seen, self.seen = self.seen, []
        return seen


def carrier(right: Backend) -> Any:
    """A backend named ``mutant``, right as ``right`` is but for what its ``fault`` does."""
    kind = type(right)
    made = {name: _method(name, kind) for name in METHODS if hasattr(kind, name)}
    if hasattr(kind, "vjp"):
        made["vjp"] = _vjp(kind)
    mutant = type("Mutant", (kind,), {**made, "name": "mutant", "implementation": None})
    found = mutant()
    found.fault = None
    return found


def _method(name: str, kind: type) -> Callable[..., Any]:
    op, form = METHODS[name]
    positional = [arg.name for arg in spec_of(op, form).args]
    raw = inspect.getattr_static(kind, name)
    function = raw.__func__ if isinstance(raw, staticmethod) else raw
    static = isinstance(raw, staticmethod)

    def run(self: Any, given: dict[str, Any]) -> Any:
        first = [given[name] for name in positional if name in given]
        rest = {name: value for name, value in given.items() if name not in positional}
        return function(*first, **rest) if static else function(self, *first, **rest)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        if self.fault is None:
            return run(self, given)
        return self.fault.called(op, form, given, functools.partial(run, self))

    signature = inspect.signature(function)
    if static:
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = signature.replace(parameters=[first, *signature.parameters.values()])
    method.__name__, method.__signature__ = name, signature  # type: ignore[attr-defined]
    return method


def _vjp(kind: Any) -> Callable[..., Any]:
    def vjp(self: Any, op: str, arrays: Any, options: Any, d_o: Any, d_state: Any) -> Any:
        def run() -> Any:
            return kind.vjp(self, op, arrays, options, d_o, d_state)

        if self.fault is None:
            return run()
        return self.fault.pulled(op, {**arrays, **options}, {"o": d_o, "state": d_state}, run)

    return vjp


def forms_of(right: Backend, op: str) -> tuple[str, ...]:
    """The forms in which a backend has a family."""
    return tuple(form for name, (other, form) in METHODS.items() if other == op and hasattr(right, name))


def draw_fault(rng: np.random.Generator, right: Backend, xp: Arrays, tokens: int) -> Fault:
    """Any fault of a backend, in one form of a family or in all of them."""
    ops = [op for op in (*FAMILIES, *COMPANIONS) if forms_of(right, op)]
    op = ops[rng.integers(len(ops))]
    forms = forms_of(right, op)
    form = forms[rng.integers(len(forms))] if rng.random() < 0.6 else ""
    spec = spec_of(op, form or None)
    condition = draw_condition(rng, spec, form, xp, tokens)
    effect = draw_effect(rng, spec, xp, tokens)
    while effect.kind != "gradient" and any(atom.later for atom in condition.atoms):
        effect = draw_effect(rng, spec, xp, tokens)
    return Fault(condition, effect, xp)
