"""What looks like a mistake in a valid call: told as a warning that says how to mend it, once a place and kind.

By default this looks at sizes, and in host memory at the first few tokens, on the 1st, 32nd, 1024th … call that a decision
serves: a mistake shows at once or soon, and a look of some ten microseconds costs less than a hundredth of the calls. Inside
:func:`debug` it looks at all of every call, on any device, and at the results as well. Code that is being compiled or
transformed is left alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .call import Call
from .errors import InputWarning, NonFiniteWarning
from .frameworks import Framework
from .spec import OpSpec

__all__ = ["Watch", "check_results", "debug"]

Array = NDArray[Any]

SPARSER = 32
"""How many times more calls pass before the next look."""
LONGEST = 1.01
"""Length of a key above which it is not normalised: rounding to bfloat16 reaches 1.004."""
GROWTH = 1e-6
"""A log decay above which a state grows: rounding the logarithm of 1 in float32 reaches 1.2e-7."""
MANY_HEADS = 64
DELTA = ("delta_rule", "gated_delta_rule", "kda")

debug_was_entered = False
"""Whether any thread ever was inside ``debug``: a plain global, which code that is being compiled may read."""
_debugging: ContextVar[bool] = ContextVar("linattn_debug", default=False)


_told: set[tuple[str, str, str, int]] = set()
"""Operator, kind of complaint, file and line of every warning so far."""


@contextmanager
def debug() -> Generator[None]:
    """Look at everything that goes into and comes out of the calls in a ``with`` block, in this thread or asyncio task only.

    On every call, on any device: whole arrays are copied to the host, so it is slow, and waits for the device. A log decay
    above 0, keys of the delta families that are longer than 1 and arrays with heads before time give an
    :class:`~linattn.errors.InputWarning`, as they do by default where a glance shows them; a result that is not finite gives
    a :class:`~linattn.errors.NonFiniteWarning` that tells the first such token, its head and the likely cause. Calls in code
    that is compiled or transformed (``torch.compile``, ``jax.jit``, ``mx.compile``, ``vmap`` …) are left alone.
    """
    global debug_was_entered
    token = _debugging.set(True)
    debug_was_entered = True
    _told.clear()  # whoever looks again wants to see it again
    try:
        yield
    finally:
        _debugging.reset(token)


class Watch:
    """Looks at the arrays of calls that one decision serves, ever less often.

    Args:
        spec: Their family.
        operator: The public function that was called, e.g. ``"chunk_gla"``.
        call: What they have in common.

    Attributes:
        calls: Calls so far.
        due: The next of them that is looked at.
    """

    __slots__ = ("call", "calls", "due", "operator", "spec")

    def __init__(self, spec: OpSpec, operator: str, call: Call) -> None:
        self.spec, self.operator, self.call = spec, operator, call
        self.calls, self.due = 0, 1

    def __call__(self, framework: Framework, arrays: Sequence[Any]) -> None:
        """Look at the positional arrays of one call, if it is time; whoever calls has counted it."""
        if self.calls >= self.due:
            self.due *= SPARSER
            self._look(framework, arrays)
        elif debug_was_entered and _debugging.get():
            self._look(framework, arrays)

    def _look(self, framework: Framework, arrays: Sequence[Any]) -> None:
        read = framework.fetch if debug_was_entered and _debugging.get() else framework.glance
        named = {arg.name: x for arg, x in zip(self.spec.args, arrays, strict=True) if x is not None}
        for complaint in _complaints(self.call, Reader(named, read)):
            _warn(self.operator, complaint, InputWarning)


class Complaint(NamedTuple):
    """What looks wrong, and of which kind it is."""

    kind: str
    text: str


class Reader:
    """Arrays by name as NumPy's; ``None`` for one that is not given or cannot be read."""

    def __init__(self, arrays: Mapping[str, Any], read: Callable[[Any], Array | None]) -> None:
        self._arrays, self._read = arrays, read
        self.names = tuple(arrays)

    def __call__(self, name: str) -> Array | None:
        x = self._arrays.get(name)
        return None if x is None else self._read(x)


def _complaints(call: Call, read: Reader) -> Iterator[Complaint]:
    yield from _time_second(call)
    with np.errstate(all="ignore"):
        for name in ("g", "gv"):
            if name == "gv" or call.gate is None:  # a projection is no decay yet
                yield from _growing(name, read(name))
        if call.op in DELTA and call.option("qk_norm") is None:
            yield from _long_keys(read("k"))


def _time_second(call: Call) -> Iterator[Complaint]:
    B, T, H = call.B, call.T, call.sizes.get("H")
    if call.form not in ("chunk", "parallel") or call.varlen or B is None or T is None or H is None or not T < H >= MANY_HEADS:
        return
    yield Complaint(
        "time",
        f"{call.arrays[0][0]} has T = {T} tokens and H = {H} heads: time comes second, [B, T, H, K]; "
        "if yours are [B, H, T, K], swap axes 1 and 2 of every array",
    )


def _growing(name: str, g: Array | None) -> Iterator[Complaint]:
    if g is None or not (g > GROWTH).any():
        return
    largest = g[g > GROWTH].max()
    yield Complaint(
        name,
        f"{name} has positive entries, {largest:.3g} among them, and the state grows by e^{name}: pass log decays, log(alpha) "
        "for a decay alpha; linattn.gates makes them from a model's projections",
    )


def _long_keys(k: Array | None) -> Iterator[Complaint]:
    if k is None or not k.size:
        return
    longest = np.fmax.reduce(np.sqrt((k * k).sum(-1)), axis=None)
    if longest > LONGEST:
        yield Complaint(
            "k", f'k has keys longer than 1, {longest:.3g} among them, and the state can grow without bound: pass qk_norm="l2"'
        )


def _warn(operator: str, complaint: Complaint, category: type[Warning]) -> None:
    """Warn at the line that called the operator, once for each such line and kind of complaint."""
    depth, frame = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "linattn").partition(".")[0] == "linattn":
        depth, frame = depth + 1, frame.f_back
    place = (operator, complaint.kind, frame.f_code.co_filename, frame.f_lineno)
    if place not in _told:
        _told.add(place)
        warnings.warn(f"{operator}: {complaint.text}", category, stacklevel=depth + 1)


# -- results ---------------------------------------------------------------------------------------------------------


def check_results(
    spec: OpSpec,
    operator: str,
    framework: Framework,
    arrays: Sequence[Any],
    keywords: Mapping[str, Any],
    results: Any,
) -> None:
    """Inside :func:`debug`, warn of an output or a state that is not finite.

    Args:
        spec: The family.
        operator: The public function that was called.
        framework: Of the arrays.
        arrays: The positional arrays.
        keywords: Every keyword, the state's and other arrays among them.
        results: ``(o, final_state)``, or the output alone.
    """
    if framework.tracing() or not _debugging.get():
        return
    o, state = results if isinstance(results, tuple) else (results, None)  # pyright: ignore[reportUnknownVariableType]
    found = _first_in_output(framework.fetch(o)) or _first_in_state(_fetch_state(framework, state))
    if found:
        given = {arg.name: x for arg, x in zip(spec.args, arrays, strict=True)}
        others = ("cu_seqlens", "state_indices", "state")  # a state of decode_… is overwritten by now
        given |= {name: keywords.get(name) for name in spec.keyword_arrays if name not in others}
        readable = {name: x for name, x in given.items() if hasattr(x, "dtype")}
        if keywords.get("gate") is not None:  # a projection may have any sign
            readable.pop("g", None)
        cause = _cause(spec, Reader(readable, framework.fetch), framework.dtype(o))
        _warn(operator, Complaint("result", f"{found}: {cause}"), NonFiniteWarning)


def _first_in_output(o: Array | None) -> str | None:
    """Where the output ``[B, T, HV, V]`` is first not finite, or that of a companion."""
    bad = None if o is None else ~np.isfinite(o)
    if bad is None or not bad.any():
        return None
    if bad.ndim != 4:
        return f"the output is not finite, at [{', '.join(map(str, np.argwhere(bad)[0]))}] first"
    t, h, b, _ = np.argwhere(np.moveaxis(bad, 0, 2))[0]
    return f"o is not finite from token {t} on, in head {h} of batch entry {b} first"


def _fetch_state(framework: Framework, state: Any) -> Array | None:
    """A state of one array, or the sums of one of several."""
    if state is None:
        return None
    return framework.fetch(state[0] if isinstance(state, tuple) else state)


def _first_in_state(state: Array | None) -> str | None:
    """Where the state ``[N, HV, K, V]`` is not finite, or that of a companion ``[N, D, W-1]``."""
    bad = None if state is None else ~np.isfinite(state).all((-2, -1))
    if bad is None or not bad.any():
        return None
    n, *h = np.argwhere(bad)[0]
    return f"the final state is not finite, in {f'head {h[0]} of ' if h else ''}sequence {n} first"


def _cause(spec: OpSpec, read: Reader, dtype: str) -> str:
    """What most likely made a result not finite."""
    for name in read.names:
        index = _first_bad_input(name, read(name))
        if index is not None:
            return f"{name}[{', '.join(map(str, index))}] is not finite"
    with np.errstate(all="ignore"):
        for name in ("g", "gv"):
            for complaint in _growing(name, read(name)):
                return complaint.text
        for complaint in _long_keys(read("k")) if spec.name in DELTA else ():
            return complaint.text
    if dtype == "float16":
        return "float16 ends at 65504, bfloat16 and float32 do not"
    return "every input is finite, so a sum overflows or the backend is wrong: compare it with another one"


def _first_bad_input(name: str, x: Array | None) -> tuple[int, ...] | None:
    """Index of the first entry that is no number; ``-inf`` is a log decay like any other."""
    if x is None:
        return None
    bad = ~np.isfinite(x) & ~(np.isneginf(x) & (name in ("g", "gv")))
    return tuple(int(i) for i in np.argwhere(bad)[0]) if bad.any() else None
