"""A backend on NumPy arrays whose forward and backward passes are one method each, so that a fault is a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from linattn.plugin import Backend, Form, form_methods
from linattn_backends.numpy import oracle
from linattn_backends.numpy.backend import OPTIONS, cast, cast_like, is_float64

from ..pool import TIME_LIMIT

__all__ = ["CHUNK", "Simple", "by_chunks", "cut", "joined"]

CHUNK = 16
"""Length of the chunks of those faults that have chunks."""

Arrays = dict[str, Any]


class Simple(Backend):
    """The oracle. Subclasses override ``forward`` or ``backward``; ``families`` and ``forms`` say what they have.

    ``forward`` and ``backward`` get float64 arrays and return float64 ones.
    """

    name: ClassVar[str] = "honest"
    api = ">=1,<2"
    frameworks = ("numpy",)
    families: ClassVar[tuple[str, ...]] = ("gla",)
    forms: ClassVar[tuple[Form, ...]] = ("chunk",)
    isolated: ClassVar[bool] = False
    """It must be tried in a process of its own."""
    time_limit: ClassVar[float] = TIME_LIMIT
    """Seconds for one case then: few for one that hangs, and else as many as any other backend has."""

    def __init_subclass__(cls) -> None:
        made = [op for op in cls.families if not any(f"{form}_{op}" in vars(cls) for form in cls.forms)]
        form_methods({op: partial(cls().called, op) for op in made}, cls.forms)(cls)

    def called(self, op: str, form: str, arrays: Arrays, *, normalize: bool = False, **keywords: Any) -> tuple[Any, Any]:
        return self.run(form, op, {**arrays, **keywords, "normalize": normalize})

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        options = {name: value for name, value in given.items() if name in OPTIONS}
        arrays = {name: value for name, value in given.items() if name not in OPTIONS and value is not None}
        o, state = self.forward(op, oracle.float64(arrays), options)
        wide = np.float64 if is_float64(arrays["v"]) else np.float32
        return cast_like(arrays["v"], o), cast(wide, state) if options["output_final_state"] else None

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        """``o`` and the final state."""
        return oracle.forward(op, arrays, {**options, "output_final_state": True})

    def backward(self, op: str, arrays: Arrays, options: Arrays, d_o: Any, d_state: Any) -> Arrays:
        """Gradients by name."""
        return oracle.vjp(op, arrays, options, d_o, d_state)

    def vjp(self, op: str, arrays: Mapping[str, Any], options: Mapping[str, Any], d_o: Any, d_state: Any) -> Arrays:
        found = self.backward(op, oracle.float64(arrays), dict(options), d_o, d_state)
        return {name: cast_like(arrays[name], gradient) for name, gradient in found.items()}


TOKENLESS = ("u", "initial_state", "cu_seqlens")


def cut(arrays: Arrays, start: int, stop: int) -> Arrays:
    """A range of tokens of every array that has tokens."""
    return {name: x if name in TOKENLESS or x.ndim == 1 else x[:, start:stop] for name, x in arrays.items()}


def joined(parts: list[Any], like: Any) -> Any:
    return np.concatenate([like[:, :0], *parts], 1)


def by_chunks(op: str, arrays: Arrays, options: Arrays, handed_on: Any, length: int = CHUNK) -> tuple[Any, Any]:
    """The oracle chunk by chunk; ``handed_on(state, chunk)`` is what the next chunk starts from. One sequence a row only."""
    options = {**options, "output_final_state": True}
    if "cu_seqlens" in arrays:
        bounds = arrays["cu_seqlens"].tolist()
        spans = list(pairwise(bounds))
    else:
        spans = [(0, arrays["v"].shape[1])]
    outputs, states = [], []
    for n, (start, stop) in enumerate(spans):
        own = {name: x for name, x in arrays.items() if name != "cu_seqlens"}
        if "cu_seqlens" in arrays and "initial_state" in own:
            own["initial_state"] = own["initial_state"][n : n + 1]
        state = oracle.forward(op, cut(own, start, start), options)[1]
        for at in range(start, stop, length):
            chunk = cut(own, at, min(at + length, stop))
            o, state = oracle.forward(op, {**chunk, "initial_state": state}, options)
            outputs.append(o)
            if at + length < stop:
                state = handed_on(state, chunk)
        states.append(state)
    return joined(outputs, arrays["v"]), np.concatenate(states)
