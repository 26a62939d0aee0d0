"""A causal, depthwise convolution over a few tokens: what stands before the operator in most models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ..context import Context
from ..spec import DECODING, OUTPUT_FINAL_STATE, STATE_INDICES, Arg, OpSpec, Option, Options, no_resolution
from ._family import companion, decoding

Array = TypeVar("Array")

ACTIVATION = Option("activation", (str,), choices=("silu",))


def window(options: Options) -> tuple[Arg, ...]:
    """The past inputs that decoding goes on from."""
    return (Arg("state", "P D L", "float"),)


SPEC = OpSpec(
    name="short_conv",
    recurrence="y_t = act(bias + Σ_{i<W} weight[:, i] · x_{t−W+1+i})",
    args=(Arg("x", "B T D"), Arg("weight", "D W", "float"), Arg("bias", "D", "float", optional=True)),
    options=(ACTIVATION, OUTPUT_FINAL_STATE),
    state=lambda options: (Arg("initial_state", "N D W-1", "float", optional=True),),
    mapped=(),
    like="x",
    limits={"W": (1, 8)},
    resolve=no_resolution,
)

DECODING["short_conv"] = replace(
    SPEC,
    options=(ACTIVATION,),
    state=window,
    state_name="state",
    index=STATE_INDICES,
    longest=("L", "W-1"),
)


@companion(SPEC)
def short_conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    context: Context | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array | None]:
    """Causal depthwise convolution: ``y_t = act(bias + Σ_{i<W} weight[:, i] · x_{t−W+1+i})`` (Mamba, Gu & Dao 2023, §3.4).

    Accumulation is float32 (float64 for float64 ``x``).

    Args:
        x: Inputs ``[B, T, D]``.
        weight: Filters ``[D, W]``, ``W`` from 1 to 8; the present token's tap comes last. Any float dtype.
        bias: ``[D]``; ``None`` adds nothing.
        activation: ``"silu"``, or ``None`` for none.
        initial_state: The ``W−1`` inputs before the first of each sequence ``[N, D, W−1]``, oldest first. Default zeros.
        output_final_state: Return the last ``W−1`` inputs ``[N, D, W−1]``, else ``None`` in their place. Default False.
        cu_seqlens: Offsets ``[N+1]``, int32 or int64, of sequences packed end to end along ``T``; ``B`` must be 1.
        context: How the tokens are spread over devices, from ``linattn.distributed``: this call has one device's own.
            Default: they are all here.
        backend: Array name (strict), a sequence in order of preference, or ``"auto"``. Default: ``use_backend``, else the
            environment variable ``LINATTN_BACKEND``, else ``"auto"``.

    Returns:
        ``(y, final_state)``: ``y`` has the shape and dtype of ``x``; the state is float32 (float64 for float64 inputs).

    Raises:
        ArgumentError: An argument is wrong: ``ShapeError``, ``DtypeError``, ``DeviceError``, ``FrameworkError``,
            ``OptionError``.
        BackendError: The backend asked for cannot be used; ``Unsupported`` if none can run the call.
    """
    ...


@decoding
def decode_short_conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    activation: str | None = None,
    state: Array,
    state_indices: Array | None = None,
    backend: str | Sequence[str] | None = None,
) -> Array:
    """``short_conv`` token by token, on windows of past inputs that it overwrites. Inference only.

    Args:
        x: Inputs ``[B, T, D]``, one token a sequence, or a few.
        weight: Filters ``[D, W]``, as in ``short_conv``.
        bias: ``[D]``, as in ``short_conv``.
        activation: ``"silu"``, or ``None`` for none.
        state: The last ``L ≥ W−1`` inputs of each sequence ``[P, D, L]``, oldest first, any float dtype and strides; all
            ``L`` columns are shifted.
        state_indices: Which of the ``P`` windows is each sequence's, ``[N]`` with ``N = B``, int32 or int64, distinct. ``-1``
            is padding: that row of ``y`` is zero and nothing is written. Default: window ``n`` for sequence ``n``.
        backend: As in ``short_conv``.

    Returns:
        ``y``, of the shape and dtype of ``x``.

    Raises:
        ArgumentError: An argument is wrong, as for ``short_conv``; a gradient is asked for; ``state`` cannot be written to, as
            no array of JAX or MLX can: there, call ``short_conv`` with initial_state and output_final_state=True.
        BackendError: The backend asked for cannot be used; ``Unsupported`` if none can run the call.
    """
    ...
