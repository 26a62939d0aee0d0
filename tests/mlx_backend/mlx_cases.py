"""Problems of the conformance suite as MLX arrays: inputs, a call, and its gradient."""

from __future__ import annotations

from typing import Any

import linattn
import mlx.core as mx
import numpy as np
from linattn.spec import FAMILIES
from linattn_conformance.bounds import flat_state, structured
from linattn_conformance.cases import DTYPES, Case
from linattn_conformance.data import draw

EVERY = list(FAMILIES)


class Problem:
    """One family on random arrays with a state, ``T`` tokens of them."""

    def __init__(self, op: str, flags: str = "state", dtype: str = "fp32", form: str = "chunk", **sizes: int) -> None:
        sizes = {"T": 70, "K": 5, "V": 7, "L": 4, "C": 16} | sizes
        used = {symbol: n for symbol, n in sizes.items() if op == "mixed_attn" or symbol not in ("L", "C")}
        drawn = draw(Case("", op, form, DTYPES[dtype], tuple(flags.split("-")), tuple(used.items()), ""))
        self.op, self.form, self.options = op, form, drawn.options
        self.arrays = {name: mx.array(np.array(x)).astype(getattr(mx, drawn.dtypes[name])) for name, x in drawn.arrays.items()}
        self.symbols = drawn.symbols

    @property
    def floats(self) -> list[str]:
        return [name for name, x in self.arrays.items() if mx.issubdtype(x.dtype, mx.floating)]

    def call(self, arrays: dict[str, mx.array] | None = None, form: str | None = None, **options: Any) -> dict[str, mx.array]:
        """``o`` and the arrays of the final state, by name."""
        operator = getattr(linattn, f"{form or self.form}_{self.op}")
        o, state = operator(**structured(arrays or self.arrays), **{**self.options, **options}, backend="mlx")
        return {"o": o, **flat_state(state)}

    def loss(self, *floats: mx.array, form: str | None = None, **options: Any) -> mx.array:
        """A number that depends on every output, from the float arrays."""
        arrays = {**self.arrays, **dict(zip(self.floats, floats, strict=True))}
        found = self.call(arrays, form, **options)
        return sum(mx.sin(x.astype(mx.float32) * (1 + i)).sum() for i, x in enumerate(found.values()) if x.dtype != mx.int32)

    @property
    def leaves(self) -> list[mx.array]:
        return [self.arrays[name] for name in self.floats]

    def gradient(self, function: Any = None) -> Any:
        """``mx.grad`` of the loss with respect to every float array."""
        return mx.grad(function or self.loss, argnums=tuple(range(len(self.floats))))


def error(found: Any, expected: Any) -> float:
    """Largest difference of any array relative to its largest value; NaN counts as infinite."""
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.size:
            x, y = (np.array(a.astype(mx.float64)) for a in (x, y))
            worst = max(worst, float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-3))) if np.isfinite(x).all() else np.inf
    return worst
