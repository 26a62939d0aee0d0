"""Runs ``decode_*``: tokens on states that are overwritten where they lie.

A backend with a method ``decode_{family}`` gets the pool of states and the slots as they are. For any other, the states of the
sequences are copied out of the pool, its recurrent form runs, and what comes out is written back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from . import dispatch, guards
from .errors import ArgumentError, OptionError
from .feature_maps import FeatureMap
from .frameworks import BY_TYPE, Framework, framework_of
from .planning import Plan
from .spec import FAMILIES, OpSpec

__all__ = ["explain_call", "run"]


def run(
    spec: OpSpec,
    form: str,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
    feature_map: str | FeatureMap | None,
    backend: str | Sequence[str] | None,
) -> Any:
    """Run one call and return ``o``; arguments as those of :func:`linattn.dispatch.run`."""
    _check_writable(spec, arrays, keywords["state"])
    function, rewriting, framework, arrays, keywords = dispatch.resolve(spec, form, arrays, keywords, feature_map, backend)
    o = _decoded(spec, function, rewriting, framework, arrays, keywords)
    if guards.debug_was_entered:
        guards.check_results(spec, f"decode_{spec.name}", framework, arrays, keywords, o)
    return o


def _decoded(
    spec: OpSpec,
    function: Any,
    rewriting: dispatch.Rewriting | None,
    framework: Framework,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """Run the method that was chosen: one of ``decode_…``, or the recurrent form on copies of the states."""
    if rewriting is None:
        return function(*arrays, **keywords)
    if rewriting.form != "decode":
        return _by_recurrence(spec, function, rewriting, framework, arrays, keywords)

    def with_state(*args: Any, **options: Any) -> tuple[Any, Any]:
        return function(*args, **options), None

    return dispatch.run_rewritten(with_state, rewriting, framework, arrays, keywords)[0]


def explain_call(
    spec: OpSpec,
    form: str,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
    feature_map: str | FeatureMap | None,
    backend: str | Sequence[str] | None,
) -> Plan:
    """The plan of a call, from the same arguments as :func:`run`."""
    _check_writable(spec, arrays, keywords["state"])
    return dispatch.explain_call(spec, form, arrays, keywords, feature_map, backend)


def _check_writable(spec: OpSpec, arrays: tuple[Any, ...], state: Any) -> None:
    """What can only be seen on the arrays themselves; all else is validated with the call."""
    if state is None:
        return
    op = f"decode_{spec.name}"
    framework = BY_TYPE.get(type(state)) or framework_of(state, "state", f"{op}: ")
    if framework.tracing():
        _check_apart(op, framework.constant_facts(state)[0], framework.strides(state))
        return
    reason = framework.unwritable(state)
    if reason:
        raise ArgumentError(f"{op}: state cannot be written to: {reason}")
    strides = framework.strides(state)
    if strides:
        _check_apart(op, state.shape, strides)
    if framework.forward_mode([*arrays, state]):
        raise OptionError(
            f"{op}: has no forward-mode derivative, because it overwrites state: "
            f"call recurrent_{spec.name} with initial_state and output_final_state=True"
        )


def _check_apart(op: str, shape: tuple[int | None, ...], strides: tuple[int | None, ...]) -> None:
    """No two elements in one place."""
    if not strides:
        return
    known = [(abs(step), n) for step, n in zip(strides, shape, strict=False) if step is not None and n is not None]
    if 0 in [n for _, n in known]:
        return
    dimensions = tuple(sorted((step, n) for step, n in known if n > 1))
    if _meet(dimensions):
        how = "it is expanded" if dimensions[0][0] == 0 else f"its strides are {strides}"
        raise ArgumentError(f"{op}: state cannot be written to: {how}: some of its elements share their memory")


@functools.lru_cache(maxsize=1024)
def _meet(dimensions: tuple[tuple[int, int], ...]) -> bool:
    """Whether two elements lie in one place: whether differences of two indices, not all zero, can sum to no distance.

    Args:
        dimensions: Step and size, the smallest step first. Where each step is longer than the smaller ones reach, as in most
            arrays, there is but one difference to try in each dimension.
    """
    reach = list(itertools.accumulate((step * (n - 1) for step, n in dimensions), initial=0))

    def summed(i: int, rest: int, moved: bool) -> bool:
        """Whether dimensions before ``i`` can make up for ``rest``."""
        if i == 0:
            return moved and rest == 0
        step, n = dimensions[i - 1]
        least, most = (1 - n, n - 1)
        if step:
            least, most = max(least, -((reach[i - 1] + rest) // step)), min(most, (reach[i - 1] - rest) // step)
        return any(summed(i - 1, rest + d * step, moved or d != 0) for d in range(least, most + 1))

    return summed(len(dimensions), 0, False)


# Dynamo calls it with constants while it traces, and keeps the result: an error comes out as it is.
_check_apart._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _by_recurrence(
    spec: OpSpec,
    function: Any,
    rewriting: dispatch.Rewriting,
    xp: Framework,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """Copy the states out, run the recurrent form, and write what comes out back. Nothing waits for a device."""
    state, indices = keywords.pop("state"), keywords.pop("state_indices")
    options = {**FAMILIES[spec.name].defaults, **keywords, "cu_seqlens": None, "output_final_state": True}
    N, dtype = arrays[0].shape[0], xp.dtype(state)

    def recurrent(start: Any) -> tuple[Any, Any]:
        o, final = dispatch.run_rewritten(function, rewriting, xp, arrays, {**options, "initial_state": start})
        return o, xp.astype(final, dtype)

    if indices is None:
        o, final = recurrent(state[:N])
        state[:N] = final
        return o
    indices = xp.astype(indices, "int64")
    live = (indices >= 0) & (indices < state.shape[0])
    slots = xp.where(live, indices, xp.zeros_like(indices))  # padding reads slot 0
    start = state[slots]
    o, final = recurrent(start)
    if N == 0:
        return o
    final = xp.where(live[:, None, None, None], final, start)
    # Padding writes what the first sequence that is none writes; if all are, slot 0 gets what it had.
    rows = xp.where(live, xp.arange(N, like=indices), xp.astype(live, "int32").argmax())
    state[slots[rows]] = final[rows]
    return xp.where(live[:, None, None, None], o, xp.zeros_like(o))
