"""Whether a fault shows at all: a valid call, found without the suite, on which a right backend and the faulty one differ."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from linattn.errors import LinattnError
from linattn.plugin import Backend
from linattn.spec import spec_of
from numpy.typing import NDArray

from .backend import Fault, forms_of
from .drafts import Draft, draw_draft, meeting
from .frameworks import Arrays

__all__ = ["Shown", "show"]

ATTEMPTS = 12
DIFFERENCE = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""What a user would call wrong, as a fraction of a row."""
MOST = 1e12
"""Results above it are of calls that no rounding leaves as they are."""


@dataclass(frozen=True)
class Shown:
    """A call on which a fault shows, and what is wrong there."""

    draft: Draft
    wrong: str


@dataclass
class Seen:
    """What came of a call and of those around it, as values.

    Attributes:
        outputs: Right after the call.
        later: The same arrays after one more call.
        dtypes: Of the outputs.
        written: The inputs that are others than they were.
        error: What was raised instead.
        around: Global state after it.
    """

    outputs: dict[str, NDArray[Any]]
    later: dict[str, NDArray[Any]]
    dtypes: dict[str, str]
    written: list[str]
    error: str = ""
    around: Any = None


def show(
    fault: Fault, right: Backend, mutant: Any, rng: np.random.Generator, tokens: int, gradients: bool = True
) -> Shown | None:
    """A valid call of at most so many tokens on which the fault shows; None if none was found.

    Args:
        fault: The fault.
        right: The backend without it.
        mutant: The one that can carry it.
        rng: What calls are drawn with.
        tokens: How many they have at most.
        gradients: Whether they may be calls whose gradients are asked for.
    """
    condition = fault.condition
    forms = (condition.form,) if condition.form else forms_of(right, condition.op)
    for _ in range(ATTEMPTS):
        draft = meeting(
            draw_draft(rng, spec_of(condition.op, condition.form or None), forms, fault.xp, tokens), condition, rng, tokens
        )
        draft.gradient |= fault.effect.kind == "gradient" and not draft.around
        draft.gradient &= gradients
        if draft.sizes["T"] * draft.sizes["B"] > tokens:
            continue
        fault.reset()
        mutant.fault = None
        try:
            want = observe(draft, fault.xp, mutant)
        except (LinattnError, ValueError, TypeError, FloatingPointError):  # no valid call
            continue
        if not all(np.isfinite(x).all() and (not x.size or np.abs(x).max() < MOST) for x in want.outputs.values()):
            continue
        mutant.fault = fault
        got = observed(draft, fault, mutant)
        if fault.struck and (wrong := difference(want, got, fault)):
            return Shown(draft, wrong)
    return None


def observed(draft: Draft, fault: Fault, mutant: Any) -> Seen:
    """What comes of a call of the faulty backend, an exception included."""
    before = state_around()
    try:
        return observe(draft, fault.xp, mutant)
    except Exception as error:
        return Seen({}, {}, {}, [], f"{type(error).__name__}: {error}".partition("\n")[0])
    finally:
        restore(before)


def observe(draft: Draft, xp: Arrays, backend: Any) -> Seen:
    """Make the calls that come before, the call itself and one after it."""

    def act() -> Seen:
        for i in range(draft.alike):
            draft.call(xp, backend, draft.arrays(xp, draft.seed + 1 + i))
        if draft.changed:
            other = copy.deepcopy(draft)
            other.sizes["H"], other.sizes["HV"] = (
                other.sizes["H"] + 1,
                other.sizes["HV"] // other.sizes["H"] * (other.sizes["H"] + 1),
            )
            other.call(xp, backend, other.arrays(xp, draft.seed + 1))
        arrays = draft.arrays(xp, draft.seed)
        before = {name: xp.numpy(x) for name, x in arrays.items()}
        found = draft.call(xp, backend, arrays)
        outputs = {name: xp.numpy(x) for name, x in found.items()}
        around = state_around()
        draft.call(xp, backend, draft.arrays(xp, draft.seed + 1))
        later = {name: xp.numpy(x) for name, x in found.items()}
        written = [
            name
            for name, x in arrays.items()
            if name != "state" and not np.array_equal(before[name], xp.numpy(x), equal_nan=True)
        ]
        return Seen(outputs, later, {name: xp.dtype(x) for name, x in found.items()}, written, around=around)

    with np.errstate(all="ignore"):
        return draft.in_place(act)


def state_around() -> Any:
    """Global state that effects change."""
    return np.geterr(), os.environ.get("ACME_CALLS"), np.random.get_state()


def restore(before: Any) -> None:
    """Put it back."""
    np.seterr(**before[0])
    os.environ.pop("ACME_CALLS", None)
    np.random.set_state(before[2])


def difference(want: Seen, got: Seen, fault: Fault) -> str:
    """What a user would call wrong; empty if nothing is."""
    if got.error:
        return f"raises {got.error}"
    if got.written:
        return f"{got.written[0]} was written to"
    if fault.effect.kind in ("keeps", "sets"):
        return f"{fault.effect.kind} {fault.effect.target}".strip()
    for name, x in want.outputs.items():
        if name not in got.outputs or got.outputs[name].shape != x.shape or got.dtypes[name] != want.dtypes[name]:
            return f"{name} has another shape or dtype"
        if far(x, got.outputs[name], want.dtypes[name]):
            return f"{name} is wrong"
        if far(want.later[name], got.later[name], want.dtypes[name]):
            return f"{name} changes with the next call"
    return ""


def far(want: NDArray[Any], got: NDArray[Any], dtype: str) -> bool:
    """True if a row is off by more than :data:`DIFFERENCE`."""
    if not want.size:
        return False
    want, got = want.astype(np.float64), got.astype(np.float64)
    if not np.isfinite(got).all():
        return True
    whole = np.sqrt(np.square(want).mean())
    rows = np.sqrt(np.square(want).mean(-1, keepdims=True)) if want.ndim else np.abs(want)
    return bool((np.abs(got - want) > DIFFERENCE.get(dtype, 0.0) * (rows + 1e-3 * whole)).any())
