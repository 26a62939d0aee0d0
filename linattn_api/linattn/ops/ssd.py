"""State-space duality, as Mamba-2 and its models call it: a scalar decay per head, with step sizes, skip and gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..call import Call
from ..context import Context
from ..spec import CHUNK_SIZE, OUTPUT_FINAL_STATE, Arg, Lowered, Lowering, OpSpec, Option, Options, no_resolution, redescribe
from ._family import decoding, family, summary
from ._sequences import of_sequences

Array = TypeVar("Array")

INPUTS = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus", "dt_limit")


def check(form: str | None, options: Options) -> str | None:
    """Step sizes lie between two numbers."""
    limit = options["dt_limit"]
    numbers = len(limit) == 2 and all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in limit)
    if not numbers or not limit[0] <= limit[1]:
        return f"dt_limit must be two numbers, the smaller first, got {limit!r}"
    return None


def steps(xp: Any, dt: Any, dt_bias: Any, options: Options) -> Any:
    """``Δ = clip(softplus?(dt + dt_bias))`` in the accumulation dtype."""
    dt = xp.astype(dt, xp.accumulation(dt))
    if dt_bias is not None:
        dt = dt + xp.astype(dt_bias, xp.dtype(dt))
    dt = xp.softplus(dt) if options["dt_softplus"] else dt
    least, most = options["dt_limit"]
    dt = dt if least == float("-inf") else xp.where(dt < least, xp.full((), float(least), like=dt), dt)
    return dt if most == float("inf") else xp.where(dt > most, xp.full((), float(most), like=dt), dt)


def to_simple_gla(xp: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Lowered:
    """``q = C``, ``k = B``, ``v = Δ x`` and ``g = Δ A`` with ``scale = 1``; the skip and the gate follow."""
    D, z, offsets, slots = options["D"], options["z"], options.get("cu_seqlens"), options.get("state_indices")
    x, dt = (of_sequences(xp, arrays[name], offsets) for name in ("x", "dt"))
    dtype, wide = xp.dtype(x), xp.accumulation(x)
    dt = steps(xp, dt, options["dt_bias"], options)
    g = dt * xp.astype(arrays["A"], xp.dtype(dt))
    v = xp.astype(xp.astype(x, wide) * xp.astype(dt, wide)[..., None], dtype)

    def finish(o: Any, state: Any) -> tuple[Any, Any]:
        if D is None and z is None:
            return o, state
        o = xp.astype(o, wide)
        if D is not None:
            skip = xp.astype(D, wide)
            o = o + (skip[:, None] if len(D.shape) == 1 else skip) * of_sequences(xp, xp.astype(x, wide), None, slots)
        if z is not None:
            gate = of_sequences(xp, xp.astype(z, wide), offsets, slots)
            o = o * gate * xp.exp(xp.log_sigmoid(gate))
        return xp.astype(o, dtype), state

    rest = {name: value for name, value in options.items() if name not in INPUTS}
    return Lowered({"q": arrays["C"], "k": arrays["B"], "v": v, "g": g}, {**rest, "scale": 1.0}, finish)


def as_simple_gla(call: Call) -> Call:
    """What :func:`to_simple_gla` gives, as static facts."""
    dtypes = call.dtypes
    wide = "float64" if dtypes["dt"] == "float64" else "float32"
    operands = {"q": ("B T H K", dtypes["C"]), "k": ("B T H K", dtypes["B"]), "v": ("B T HV V", dtypes["x"])}
    return redescribe(call, "simple_gla", {**operands, "g": ("B T HV", wide)}, drop=INPUTS)


SPEC = OpSpec(
    name="ssd",
    recurrence="Δ = clip(softplus?(dt + dt_bias));  S = e^{ΔA} S⁻ + Δ Bᵀx;  o = (C S + D∘x) ∘ silu(z)",
    args=(
        Arg("x", "B T HV V"),
        Arg("dt", "B T HV", "float"),
        Arg("A", "HV", "float"),
        Arg("B", "B T H K", title="B (input projection)"),
        Arg("C", "B T H K", title="C (output projection)"),
    ),
    keyword_args=(
        Arg("D", "HV|HV V", "float", optional=True, title="D (skip)"),
        Arg("z", "B T HV V", optional=True),
        Arg("dt_bias", "HV", "float", optional=True),
    ),
    options=(
        Option("dt_softplus", (bool,), False),
        Option("dt_limit", (tuple,), (0.0, float("inf"))),
        OUTPUT_FINAL_STATE,
        CHUNK_SIZE,
    ),
    mapped=(),
    like="x",
    resolve=no_resolution,
    check=check,
    lowering=Lowering("simple_gla", to_simple_gla, as_simple_gla),
)


@family(SPEC)
def _ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    context: Context | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array | None]:
    """State-space duality: ``Δ = clip(softplus?(dt + dt_bias))``, ``S_t = e^{Δ_t A} S_{t-1} + Δ_t B_tᵀ x_t``,
    ``o_t = C_t S_t + D∘x_t``, and ``o_t ∘ silu(z_t)`` where ``z`` is given (Mamba-2, Dao & Gu 2024, §§5-7).

    Args:
        x: Inputs ``[B, T, HV, V]``.
        dt: Step sizes, or raw projections of them, ``[B, T, HV]``.
        A: Decay rate ``[HV]``, one number a head, ``≤ 0``: the log decay of a token is ``Δ A``.
        B: Input projection ``[B, T, H, K]``; head ``j`` of ``x`` uses head ``j // (HV / H)``.
        C: Output projection ``[B, T, H, K]``.
        D: Skip ``[HV]`` or ``[HV, V]``; ``None`` adds nothing.
        z: Gate, of the shape of ``x``; ``None`` multiplies by nothing.
        dt_bias: Added to ``dt``, ``[HV]``.
        dt_softplus: Whether ``Δ`` is the softplus of ``dt + dt_bias``. Default False.
        dt_limit: The least and the greatest ``Δ``. Default ``(0.0, inf)``.
    """
    ...


ssd, chunk_ssd, recurrent_ssd, parallel_ssd = _ssd


@decoding
def decode_ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    state: Array,
    state_indices: Array | None = None,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str | Sequence[str] | None = None,
) -> Array:
    """``ssd`` token by token, on states that it overwrites; what others call a selective state update."""
    ...


@summary
def summary_ssd(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    *,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    cu_seqlens: Array | None = None,
    chunk_size: int | None = None,
    backend: str | Sequence[str] | None = None,
) -> tuple[Array, Array]:
    """``ssd`` as an affine map of the state."""
    ...
