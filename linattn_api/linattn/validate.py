"""Checks the static facts of a call against its spec and describes it as a ``Call``.

Every message names the argument, what was expected in the spec's symbols with their bound sizes, and what came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from .call import Call, method_name
from .errors import DeviceError, DtypeError, FrameworkError, OptionError, ShapeError
from .frameworks import FLOAT_DTYPES, IMMUTABLE, Facts
from .spec import COMPANIONS, CU_SEQLENS, STATE_INDICES, SYMBOLS, Arg, OpSpec

__all__ = ["check_offsets", "check_packing", "check_slots", "describe"]

INDEX_DTYPES = ("int32", "int64")

Given = Sequence[tuple[str, Facts]]


def describe(
    spec: OpSpec,
    form: str | None,
    framework: str,
    given: Given,
    options: Mapping[str, Any],
    needs_grad: bool | None,
    forward_mode: bool,
) -> tuple[Call, dict[str, Any]]:
    """Validate a call; return it as a :class:`Call`, and its options with defaults that depend on sizes filled in.

    Args:
        spec: The family.
        form: ``None`` for the bare name: picks a form from the shape.
        framework: Name of the framework that all arrays were found to belong to.
        given: ``(name, facts)`` of every array that is not ``None``.
        options: Every static keyword argument; ``initial_state`` as well where there is one, so that combinations can be
            checked.
        needs_grad: See :class:`Call`.
        forward_mode: See :class:`Call`.

    Raises:
        ShapeError, DtypeError, DeviceError, OptionError: See each.
    """
    op = method_name(form, spec.name)
    _check_options(op, spec, form, options)
    if options.get("chunk_size") is not None:  # a NumPy integer is one here, and not in a framework's kernel
        options = {**options, "chunk_size": int(options["chunk_size"])}
    facts = dict(given)
    _check_required(op, spec, options, facts)
    _check_dtypes(op, spec, options, facts)
    device = _check_devices(op, spec, options, facts)
    _check_query_groups(op, framework, facts)
    shapes, sizes = _bind(op, spec, options, facts)
    if form == "decode":
        _check_decoding(op, spec, framework, facts, sizes, needs_grad)
    resolved = spec.resolve(options, sizes)
    static = tuple((name, options[name]) for name in spec.option_names)
    call = Call(
        op=spec.name,
        form=form or pick_form(options, sizes),  # type: ignore[arg-type]
        framework=framework,
        device=device.partition(":")[0],
        arrays=tuple((name, shapes[name], facts[name].dtype) for name in facts),
        dims=tuple(sizes.items()),
        options=static,
        needs_grad=needs_grad,
        forward_mode=forward_mode,
    )
    return call, resolved


def pick_form(options: Mapping[str, Any], sizes: Mapping[str, int | None]) -> str:
    """One token is a recurrence step; anything longer is worth chunking."""
    return "recurrent" if sizes["T"] == 1 and options.get("causal", True) else "chunk"


def _check_options(op: str, spec: OpSpec, form: str | None, options: Mapping[str, Any]) -> None:
    for option in spec.options:
        value = options[option.name]
        if option.admits(value):
            continue
        expected = " or ".join(option.expected)
        none = " or None" if option.default is None else ""
        raise OptionError(f"{op}: {option.name} must be {expected}{none}, a static Python value, got {_show(value)}")
    chunk_size = options.get("chunk_size")
    if chunk_size is not None and chunk_size < 1:
        raise OptionError(f"{op}: chunk_size must be at least 1, got {chunk_size}")
    for option in spec.options:
        if option.name.endswith("scale") and not math.isfinite(options[option.name] or 0):
            raise OptionError(f"{op}: {option.name} must be a finite number, got {options[option.name]}")
    complaint = spec.check(form, options)
    if complaint:
        raise OptionError(f"{op}: {complaint}")


def _check_required(op: str, spec: OpSpec, options: Mapping[str, Any], facts: Mapping[str, Facts]) -> None:
    """Arrays that may not be ``None``, and every array of a state that is given."""
    state = spec.state(options) if options.get("initial_state") is not None else ()
    for arg in spec.arrays(options):
        if arg.name not in facts and (arg in state or not arg.optional):
            raise FrameworkError(f"{op}: {arg.title} is required, got None")


def _check_dtypes(op: str, spec: OpSpec, options: Mapping[str, Any], facts: Mapping[str, Facts]) -> None:
    first, shared = None, ""
    for arg in spec.arrays(options):
        if arg.name not in facts:
            continue
        dtype = facts[arg.name].dtype
        allowed = INDEX_DTYPES if arg.role == "index" else FLOAT_DTYPES
        if dtype not in allowed:
            raise DtypeError(f"{op}: {arg.title} must be {_either(allowed)}, got {dtype}")
        if arg.role != "operand":
            continue
        if first is None:
            first, shared = arg.title, dtype
        elif dtype != shared:
            raise DtypeError(f"{op}: {arg.title} must have the dtype of {first}, {shared}, got {dtype}")


def _check_devices(op: str, spec: OpSpec, options: Mapping[str, Any], facts: Mapping[str, Facts]) -> str:
    """The one device of all arrays that are placed; where none is, the framework's default."""
    placed = {name: fact.device for name, fact in facts.items() if fact.placed}
    (first, device), *others = placed.items() or [(name, fact.device) for name, fact in facts.items()]
    for name, other in others:
        if other != device:
            titles = {arg.name: arg.title for arg in spec.arrays(options)}
            raise DeviceError(
                f"{op}: {titles[name]} is on {other} but {titles[first]} is on {device}: move it, nothing is copied for you"
            )
    return device


REPEAT = {
    "numpy": "np.repeat(x, {n}, axis=2)",
    "torch": "x.repeat_interleave({n}, 2)",
    "jax": "jnp.repeat(x, {n}, axis=2)",
    "mlx": "mx.repeat(x, {n}, axis=2)",
}


def _check_query_groups(op: str, framework: str, facts: Mapping[str, Facts]) -> None:
    """Queries in groups that share a key head, as softmax attention has them: here every head has a state of its own."""
    if "q" not in facts or "k" not in facts:
        return
    q, k = facts["q"].shape, facts["k"].shape
    if len(q) != 4 or len(k) != 4 or (*q[:2], q[3]) != (*k[:2], k[3]):
        return
    H, fewer = q[2], k[2]
    if H and fewer and fewer < H and H % fewer == 0:
        repeated = REPEAT[framework].format(n=H // fewer)
        raise ShapeError(
            f"{op}: q has {H} heads and k has {fewer}: queries in groups are not taken, so repeat the heads of k and v, and of "
            f"gates that have as few: k, v = ({repeated} for x in (k, v))"
        )


def _bind(
    op: str, spec: OpSpec, options: Mapping[str, Any], facts: Mapping[str, Facts]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Bind the symbols to sizes, in order of the arguments; check every shape; return symbolic shapes and sizes."""
    sizes: dict[str, Any] = {}
    if "C" in {symbol for arg in spec.arrays(options) for shape in arg.shapes for symbol in shape}:
        sizes["C"] = options["chunk_size"]
    shapes: dict[str, str] = {}
    for arg in spec.arrays(options):
        if arg.name in facts:
            shape = facts[arg.name].shape
            fit = [symbols for symbols in arg.shapes if _matches(_written_out(symbols, len(shape)), shape, sizes)]
            if not fit:
                _shape_error(op, arg, shape, sizes)
            shapes[arg.name] = " ".join(fit[0])
            if arg.name == "g" and options.get("gate") is not None:
                sizes["G"] = _mapped_heads(op, shape)
            for symbol, size in zip(_written_out(fit[0], len(shape)), shape, strict=True):
                if symbol.isalpha() or symbol.startswith("..."):
                    sizes.setdefault(symbol, size)
        if "N" not in sizes and "B" in sizes:
            sizes["N"] = _count_sequences(op, facts, sizes)
    _check_sizes(op, spec, options, sizes)
    return shapes, {symbol: size for symbol, size in sizes.items() if not symbol.startswith("...")}


def _written_out(symbols: Sequence[str], rank: int) -> tuple[str, ...]:
    """Symbols of an array of ``rank`` dimensions: ``...`` becomes one symbol for each that it stands for."""
    if symbols[:1] != ("...",):
        return tuple(symbols)
    return (*(f"...{axis}" for axis in range(rank - len(symbols) + 1)), *symbols[1:])


def _mapped_heads(op: str, shape: Sequence[int | None]) -> int | None:
    """The heads of a projection ``g`` that a gate object maps."""
    if len(shape) < 3:
        raise OptionError(
            f"{op}: gate maps a projection g of every token, and g is a fixed decay {_list(shape)}: call the gate object "
            f"yourself, or drop it"
        )
    return shape[2]


def _count_sequences(op: str, facts: Mapping[str, Facts], sizes: Mapping[str, Any]) -> int | None:
    """``N`` is the batch, or the number of packed sequences."""
    if CU_SEQLENS.name not in facts:
        return sizes["B"]
    shape = facts[CU_SEQLENS.name].shape
    check_packing(op, shape, sizes["B"])
    return None if shape[0] is None else shape[0] - 1


def check_packing(op: str, shape: Sequence[int | None], batch: int | None) -> None:
    """``cu_seqlens`` of this shape fits a batch."""
    if len(shape) != 1 or shape[0] == 0:
        raise ShapeError(f"{op}: cu_seqlens must be [N+1] with N the number of packed sequences, got {_list(shape)}")
    if batch not in (1, None):
        raise ShapeError(f"{op}: cu_seqlens packs sequences along T and needs B = 1, got B = {batch}")


def _matches(symbols: Sequence[str], shape: Sequence[int | None], sizes: Mapping[str, Any]) -> bool:
    return len(symbols) == len(shape) and all(
        size is None or _size(symbol, sizes) in (None, size) for symbol, size in zip(symbols, shape, strict=True)
    )


def _size(symbol: str, sizes: Mapping[str, Any]) -> int | None:
    """Size of ``K`` or ``V+1``; ``None`` while it is unbound or symbolic."""
    base, more, extra = symbol.replace("-", "+-").partition("+")
    size = sizes.get(base)
    return None if size is None else size + int(extra) if more else size


def _check_sizes(op: str, spec: OpSpec, options: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    for symbol in ("H", "HV", "K", "V", "L", "D"):
        if sizes.get(symbol) == 0 and symbol not in (spec.longest or ()):
            raise ShapeError(f"{op}: {symbol} must be at least 1, got 0")
    for symbol, (least, most) in spec.limits.items():
        if not least <= sizes[symbol] <= most:
            raise ShapeError(f"{op}: {symbol}, the {SYMBOLS[symbol]}, must be {least} … {most}, got {sizes[symbol]}")
    if spec.longest is not None:
        longer, shorter = (_size(symbol, sizes) for symbol in spec.longest)
        if longer is not None and shorter is not None and longer < shorter:
            raise ShapeError(f"{op}: {spec.longest[0]} must be at least {spec.longest[1]} = {shorter}, got {longer}")
    complaint = spec.check_sizes(options, sizes)
    if complaint:
        raise OptionError(f"{op}: {complaint}")
    H, HV = sizes.get("H"), sizes.get("HV")
    if H and HV and HV % H:
        raise ShapeError(f"{op}: the value heads HV must be a multiple of the query/key heads H = {H}, got HV = {HV}")


def _shape_error(op: str, arg: Arg, shape: Sequence[int | None], sizes: Mapping[str, Any]) -> NoReturn:
    leading = sum(symbol.startswith("...") for symbol in sizes)
    ranks = [len(alternative) - 1 + leading if alternative[:1] == ("...",) else 0 for alternative in arg.shapes]
    expected = " or ".join(_expected(alternative, rank, sizes) for alternative, rank in zip(arg.shapes, ranks, strict=True))
    raise ShapeError(f"{op}: {arg.title} must be {expected}, got {_list(shape)}")


def _expected(symbols: Sequence[str], rank: int, sizes: Mapping[str, Any]) -> str:
    text, symbols = _list(symbols), _written_out(symbols, rank)
    bound = [_size(symbol, sizes) for symbol in symbols]
    if all(size is None for size in bound):
        return text
    return f"{text} = {_list([symbol if size is None else size for symbol, size in zip(symbols, bound, strict=True)])}"


def check_offsets(op: str, offsets: Sequence[int], total: int | None) -> None:
    """The values of ``cu_seqlens``, where they can be read without waiting for a device."""
    if offsets[0] != 0:
        raise ShapeError(f"{op}: cu_seqlens must start at 0, got {offsets[0]}")
    for i in range(1, len(offsets)):
        if offsets[i] < offsets[i - 1]:
            raise ShapeError(f"{op}: cu_seqlens must not decrease, got {offsets[i - 1]} then {offsets[i]} at index {i}")
    if total is not None and offsets[-1] > total:
        raise ShapeError(f"{op}: cu_seqlens must not pass T = {total}, got {offsets[-1]} at the end")


def _check_decoding(
    op: str, spec: OpSpec, framework: str, facts: Mapping[str, Facts], sizes: Mapping[str, Any], needs_grad: bool | None
) -> None:
    """A state that can be overwritten, with a slot for every sequence."""
    same = spec.name if spec.name in COMPANIONS else f"recurrent_{spec.name}"
    instead = f"{same} with initial_state and output_final_state=True"
    if framework in IMMUTABLE:
        raise FrameworkError(f"{op}: state is written to, and {framework} arrays cannot be: call {instead}")
    if needs_grad:
        raise OptionError(f"{op}: has no gradient, because it overwrites state: call it under torch.no_grad(), or {instead}")
    N, P = sizes["N"], sizes["P"]
    if P == 0:
        raise ShapeError(f"{op}: P must be at least 1, got 0")
    if STATE_INDICES.name not in facts and N is not None and P is not None and P < N:
        raise ShapeError(f"{op}: state must have a slot for each of N = {N} sequences without state_indices, got P = {P}")


def check_slots(op: str, slots: Sequence[int], count: int) -> None:
    """The values of ``state_indices``, where they can be read without waiting for a device."""
    seen: dict[int, int] = {}
    for i, slot in enumerate(slots):
        if not -1 <= slot < count:
            raise ShapeError(f"{op}: state_indices must be slots below P = {count}, or -1, got {slot} at index {i}")
        if slot >= 0 and seen.setdefault(slot, i) != i:
            raise ShapeError(f"{op}: state_indices must be distinct, got {slot} at index {seen[slot]} and at index {i}")


def _list(items: Sequence[Any]) -> str:
    return "[" + ", ".join("any" if item is None else str(item) for item in items) + "]"


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _show(value: Any) -> str:
    return f"{value!r}" if value is None or isinstance(value, (bool, int, float, str, np.generic)) else type(value).__name__
