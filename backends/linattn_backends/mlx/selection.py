"""Which of its two ways the backend takes: Metal kernels, or MLX operations.

An engine is a module with two functions on dicts of arrays, both with :class:`.operations.Options` last:

* ``forward(arrays, options)`` → ``{"o": …, "kept": [states, …]}``, with ``"final"`` states if ``options.keep``;
* ``backward(arrays, cotangents, outputs, options)`` → a gradient for every array.

``arrays`` holds the operands by name, ``initial_state`` and ``cu_seqlens`` where they are given; there is a token at least.
``kept`` is what the engine's own backward pass wants again: arrays that begin with a batch dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx
from linattn.plugin import Call

from . import metal, operations
from .cores import Arrays


@dataclass(frozen=True)
class Facts:
    """The static facts of a call of a matrix-state family, read off a ``Call`` or off arrays: equal, they select alike.

    Attributes:
        form: ``"recurrent"``, ``"chunk"`` or ``"parallel"``.
        device: ``"cpu"``, ``"metal"`` or ``"cuda"``.
        dtypes: Dtype of each array given, by name, states and offsets too.
        K: Key width.
    """

    form: str
    device: str
    dtypes: Mapping[str, str]
    K: int


def facts_of_call(call: Call) -> Facts:
    """What :func:`facts_of_arrays` will say of the call's arrays."""
    return Facts(call.form, call.device, call.dtypes, call.K)


def facts_of_arrays(arrays: Arrays, form: str) -> Facts:
    """The same, of the arrays that a method got."""
    dtypes = {name: str(x.dtype).removeprefix("mlx.core.") for name, x in arrays.items()}
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    device = "cpu" if not on_gpu else "metal" if mx.metal.is_available() else "cuda"
    return Facts(form, device, dtypes, arrays["k"].shape[-1])


def unfit(facts: Facts) -> str | None:
    """Why Metal kernels cannot run a call; ``None`` if they can."""
    if facts.device != "metal":
        return f"the device is {facts.device}"
    return metal.unfit(facts)


def engine_of(facts: Facts) -> ModuleType:
    """The module that runs a call."""
    return metal if unfit(facts) is None else operations


def details_of(call: Call) -> str:
    """For ``explain``."""
    if call.op == "mixed_attn" or not call.option("causal", True):
        return "MLX operations"
    reason = unfit(facts_of_call(call))
    return "Metal kernels" if reason is None else f"MLX operations (no Metal kernels: {reason})"
