"""Metal kernels for the families whose state is a matrix: an engine beside the one of MLX operations.

``forward`` and ``backward`` take dicts of arrays, as every engine of this backend does; ``unfit`` says which calls they take.
Nothing is kept between them but the inputs: the backward pass runs the recurrence again for the states that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import mlx.core as mx

from . import chunk, recurrent
from .recurrent import WIDEST, Arrays

__all__ = ["backward", "forward", "unfit"]

DTYPES = ("float16", "bfloat16", "float32", "int32", "int64")


class Facts(Protocol):
    """The static facts of a call: see :class:`linattn_backends.mlx.selection.Facts`."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Dtype of each array, by name."""
        ...

    @property
    def K(self) -> int:
        """Key width."""
        ...


BY_TOKEN = ("q", "k", "v", "g", "gv", "beta", "a", "b")
"""Arrays with a row for every token."""


class Options(Protocol):
    """What is static about a call besides: see :class:`linattn_backends.mlx.operations.Options`."""

    @property
    def form(self) -> str:
        """``"recurrent"``, ``"chunk"`` or ``"parallel"``."""
        ...

    @property
    def scale(self) -> float:
        """Multiplies the output."""
        ...

    @property
    def keep(self) -> bool:
        """The final states are wanted."""
        ...


def unfit(facts: Facts) -> str | None:
    """Why the kernels cannot run a call on an Apple GPU; ``None`` if they can."""
    for name, dtype in facts.dtypes.items():
        if dtype not in DTYPES:
            return f"{name} is {dtype}"
    if facts.K > WIDEST:
        return f"K must be at most {WIDEST}, got {facts.K}"
    return None


def forward(arrays: Arrays, options: Options) -> dict[str, Any]:
    """``o``, the ``final`` states if they are to be kept, and nothing else for the backward pass."""
    kernel = chunk if options.form != "recurrent" and chunk.fits(arrays) else recurrent
    found = kernel.forward(arrays, options.scale)
    final = {"final": found["final"]} if options.keep else {}
    return {"o": of_sequences(found["o"], arrays), "kept": [], **final}


def backward(arrays: Arrays, cotangents: dict[str, Any], outputs: dict[str, Any], options: Options) -> Arrays:
    """The gradient of every array."""
    gradients = recurrent.backward(arrays, cotangents["o"], cotangents.get("final"), options.scale)
    gradients |= {name: of_sequences(x, arrays) for name, x in gradients.items() if name in BY_TOKEN}
    if "cu_seqlens" in arrays:
        gradients["cu_seqlens"] = mx.zeros_like(arrays["cu_seqlens"])
    return gradients


def of_sequences(x: mx.array, arrays: Arrays) -> mx.array:
    """``x [B, T, …]``, zero behind the last packed sequence, where the kernels write nothing."""
    if "cu_seqlens" not in arrays:
        return x
    live = mx.arange(x.shape[1]) < arrays["cu_seqlens"][-1]
    return mx.where(live.reshape(1, -1, *(1,) * (x.ndim - 2)), x, 0)
