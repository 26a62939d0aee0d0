"""What can be known of a call inside a backend: its sizes, dtypes, options, layouts and values, its history and surroundings.

A fact has a name of two words: a kind and what it is of, such as ``size T``, ``dtype g``, ``largest q``, ``calls alike``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from linattn.spec import OpSpec, spec_of

from .frameworks import Arrays

__all__ = ["Facts", "History", "fact_of_cotangent", "names_of", "sizes_of"]


@dataclass
class History:
    """The calls of a backend so far."""

    calls: int = 0
    alike: Counter[Any] = field(default_factory=Counter)
    last: Any = None
    before: Any = None
    backward: int = 0

    def note(self, shape: Any) -> None:
        """A call begins."""
        self.calls += 1
        self.alike[shape] += 1
        self.before, self.last = self.last, shape


def sizes_of(spec: OpSpec, given: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the symbols of a spec's arrays, from those that are given."""
    found: dict[str, int] = {}
    for arg in spec.arrays({**spec.defaults, **{name: given.get(name) for name in spec.option_names}}):
        x = given.get(arg.name)
        if x is None or not hasattr(x, "shape") or arg.shapes[0][0] == "...":
            continue
        for symbols in arg.shapes:
            if len(symbols) == len(x.shape):
                for symbol, size in zip(symbols, x.shape, strict=True):
                    if symbol.isalpha() and isinstance(size, int):
                        found.setdefault(symbol, size)
                break
    if given.get("cu_seqlens") is not None:
        found["N"] = len(given["cu_seqlens"]) - 1
    elif "B" in found:
        found["N"] = found["B"]
    if found.get("H"):
        found["group"] = found.get("HV", found["H"]) // found["H"]
    return found


def names_of(spec: OpSpec) -> list[str]:
    """Every array of a family but those of gate objects."""
    return [arg.name for arg in spec.arrays(spec.defaults) if "." not in arg.name]


def fact_of_cotangent(xp: Arrays, x: Any) -> str:
    """``"none"``, ``"zeros"``, ``"strided"`` or ``"dense"``."""
    if x is None:
        return "none"
    if not xp.is_contiguous(x):
        return "strided"
    return "dense" if xp.numpy(x).any() else "zeros"


class Facts:
    """The facts of one call, looked up by name; ``None`` for one that a call does not have, or that cannot be known."""

    def __init__(self, op: str, form: str, given: Mapping[str, Any], xp: Arrays, history: History) -> None:
        self.op, self.form, self.given, self.xp, self.history = op, form, given, xp, history
        self.spec = spec_of(op, None if form == "vjp" else form)
        self._found: dict[str, Any] = {}

    @property
    def shape(self) -> Any:
        """What calls of one shape share."""
        return self.op, self.form, tuple(sorted(self.sizes.items()))

    @property
    def sizes(self) -> dict[str, int]:
        if "sizes" not in self._found:
            self._found["sizes"] = sizes_of(self.spec, self.given)
        return self._found["sizes"]

    @property
    def traced(self) -> bool:
        """True if values cannot be looked at."""
        return any(self.xp.is_array(x) and self.xp.is_traced(x) for x in self.given.values())

    def get(self, name: str) -> Any:
        """One fact."""
        if name not in self._found:
            kind, _, of = name.partition(" ")
            self._found[name] = getattr(self, f"_{kind}")(of)
        return self._found[name]

    def all(self) -> dict[str, Any]:
        """Every fact that can be told by its name alone."""
        names = [f"size {symbol}" for symbol in self.sizes]
        names += [f"option {name}" for name in self.spec.option_names]
        for name in self.given:
            if self.xp.is_array(self.given[name]):
                names += [f"{kind} {name}" for kind in ("dtype", "layout", "gradient", "largest", "infinite", "zeros")]
        for name in names_of(self.spec):
            names.append(f"given {name}")
        names += [f"sequence {what}" for what in ("shortest", "longest", "whole", "tail")]
        names += ["around thread", "around grad", "around autocast", "around inference"]
        found = {name: self.get(name) for name in names}
        return {**found, "op": self.op, "form": self.form}

    def _array(self, name: str) -> Any:
        x = self.given.get(name)
        return x if self.xp.is_array(x) else None

    def _size(self, symbol: str) -> int | None:
        return self.sizes.get(symbol)

    def _option(self, name: str) -> Any:
        return self.given.get(name, self.spec.defaults.get(name))

    def _given(self, name: str) -> bool:
        return self.given.get(name) is not None

    def _dtype(self, name: str) -> str | None:
        x = self._array(name)
        return None if x is None else self.xp.dtype(x)

    def _layout(self, name: str) -> str | None:
        x = self._array(name)
        return None if x is None or self.xp.is_traced(x) else "plain" if self.xp.is_contiguous(x) else "strided"

    def _gradient(self, name: str) -> bool | None:
        x = self._array(name)
        return None if x is None else self.form == "vjp" or self.xp.needs_grad(x)

    def _values(self, name: str) -> Any:
        x = self._array(name)
        return None if x is None or self.xp.is_traced(x) else np.abs(self.xp.numpy(x).astype(np.float64))

    def _largest(self, name: str) -> float | None:
        values = self._values(name)
        finite = None if values is None else values[np.isfinite(values)]
        return None if finite is None or not finite.size else float(finite.max())

    def _infinite(self, name: str) -> bool | None:
        values = self._values(name)
        return None if values is None else bool(np.isinf(values).any())

    def _zeros(self, name: str) -> str | None:
        """``"all"``, ``"rows"`` or ``"none"``."""
        values = self._values(name)
        if values is None or not values.size or not values.ndim:
            return None
        return "all" if not values.any() else "none" if values.any(-1).all() else "rows"

    def _sequence(self, what: str) -> int | bool | None:
        offsets = self._values("cu_seqlens")
        if offsets is None:
            return None
        lengths = np.diff(offsets).astype(int)
        if what == "tail":
            return bool(offsets[-1] < self.sizes.get("T", 0))
        if what == "whole":
            return bool(len(lengths) and (lengths % 16 == 0).any() and lengths.any())
        return int(lengths.min() if what == "shortest" else lengths.max()) if len(lengths) else None

    def _calls(self, what: str) -> Any:
        if what == "so-far":
            return self.history.calls
        if what == "alike":
            return self.history.alike[self.shape]
        return self.history.before is not None and self.history.before != self.history.last

    def _around(self, what: str) -> bool:
        if what == "thread":
            return threading.current_thread() is not threading.main_thread()
        if self.xp.name != "torch":
            return False
        torch = self.xp.torch  # type: ignore[attr-defined]
        if what == "grad":
            return torch.is_grad_enabled()
        return torch.is_autocast_enabled("cpu") if what == "autocast" else torch.is_inference_mode_enabled()
