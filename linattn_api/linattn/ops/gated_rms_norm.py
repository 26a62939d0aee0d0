"""A root-mean-square norm with an output gate: what stands after the operator in most models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, TypeVar

from ..spec import Arg, OpSpec, Option, Options
from ._family import companion

Array = TypeVar("Array")


def resolve(options: Options, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """One group of all columns, unless a size is given."""
    group = options["group_size"]
    return {**options, "eps": float(options["eps"]), "group_size": sizes["D"] if group is None else int(group)}


def check(form: str | None, options: Options) -> str | None:
    """What stands under the root is no less than nothing."""
    eps = options["eps"]
    return None if 0 <= eps < inf else f"eps must be a finite number, 0 or larger, got {eps!r}"


def check_sizes(options: Options, sizes: Mapping[str, Any]) -> str | None:
    """Groups have one size."""
    group, D = options["group_size"], sizes["D"]
    if group is not None and (group < 1 or D % group):
        return f"group_size must divide D = {D}, got {group}"
    return None


SPEC = OpSpec(
    name="gated_rms_norm",
    recurrence="norm(x) · weight · act(z);  norm(x) = x · (mean x² + eps)^{-1/2}",
    args=(Arg("x", "... D"), Arg("z", "... D"), Arg("weight", "D", "float")),
    options=(
        Option("activation", (str,), "silu", choices=("silu", "sigmoid")),
        Option("eps", (float, int), 1e-5),
        Option("norm_before_gate", (bool,), True),
        Option("group_size", (int,)),
    ),
    state=lambda options: (),
    index=None,
    mapped=(),
    like="x",
    resolve=resolve,
    check=check,
    check_sizes=check_sizes,
)


@companion(SPEC)
def gated_rms_norm(
    x: Array,
    z: Array,
    weight: Array,
    *,
    activation: str = "silu",
    eps: float = 1e-5,
    norm_before_gate: bool = True,
    group_size: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> Array:
    """Gated RMS norm: ``norm(x) · weight · act(z)``, or ``norm(x · act(z)) · weight``, with
    ``norm(x) = x · (mean x² + eps)^{-1/2}`` (Zhang & Sennrich 2019; gated, Mamba-2, Dao & Gu 2024, §7).

    Computed in float32 (float64 for float64 ``x``), rounded once.

    Args:
        x: What is normed ``[..., D]``.
        z: The gate's projection, of the shape and dtype of ``x``.
        weight: ``[D]``, any float dtype.
        activation: ``"silu"`` or ``"sigmoid"`` of ``z``. Default ``"silu"``.
        eps: Added to the mean of squares. Default 1e-5.
        norm_before_gate: False multiplies by the gate before the norm. Default True.
        group_size: Columns that are normed together; must divide ``D``. Default all of them.
        backend: Array name (strict), a sequence in order of preference, or ``"auto"``. Default: ``use_backend``, else the
            environment variable ``LINATTN_BACKEND``, else ``"auto"``.

    Returns:
        An array of the shape and dtype of ``x``.

    Raises:
        ArgumentError: An argument is wrong: ``ShapeError``, ``DtypeError``, ``DeviceError``, ``FrameworkError``,
            ``OptionError``.
        BackendError: The backend asked for cannot be used; ``Unsupported`` if none can run the call.
    """
    ...
