"""What must hold between calls, whatever the values are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from linattn.affine import act
from linattn.frameworks import framework_of
from linattn.plugin import FORMS

from ..bounds import Quantity, distance
from ..calls import Declared, Failure, Run
from ..cases import forbidden

__all__ = ["agree", "causal", "forgets", "nan", "packed", "repeat", "repeat_backward", "split", "steps", "summary"]


def tokens(run: Run, arrays: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """A range of tokens of every array that has tokens."""
    axes = {name: symbols.index("T") for name, symbols in run.problem.symbols.items() if "T" in symbols}
    return {name: x[(slice(None),) * axes[name] + (slice(start, stop),)] if name in axes else x for name, x in arrays.items()}


def without(arrays: dict[str, Any], *prefixes: str) -> dict[str, Any]:
    return {name: x for name, x in arrays.items() if not name.startswith(prefixes)}


def carried(got: dict[str, Any]) -> dict[str, Any]:
    """A final state as the initial state of the next call."""
    return {name.replace("final_state", "initial_state"): x for name, x in got.items() if name != "o"}


def state_of(got: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a final state."""
    return {name: x for name, x in got.items() if name != "o"}


def agree(run: Run) -> None:
    """All forms that the backend has give the same result."""
    arrays = run.arrays()
    results = {}
    for form in FORMS:
        if forbidden(run.case.spec, form, run.case.flags):
            continue
        try:
            run.require(arrays, form)
        except Declared:
            continue
        results[form] = run.call(arrays, form)
    for found in results.values():  # of one form there is nothing else to compare
        run.compare(found, run.truth.outputs)
    for (first, a), (second, b) in pairwise(results.items()):
        for name, quantity in run.truth.outputs.items():
            left, right = run.adapter.to_float64(a[name]), run.adapter.to_float64(b[name])
            run.note(f"{name} ({first} against {second})", distance(left, Quantity(right, quantity.noise, quantity.dtype)))


def split(run: Run) -> None:
    """Stopping and going on from the state is the same as not stopping: at a token, after one, at a chunk boundary."""
    arrays = run.arrays()
    T = run.problem.sizes["T"]
    for cut in (1, 37, 64):
        first = run.call(tokens(run, arrays, 0, cut))
        second = run.call({**tokens(run, arrays, cut, T), **carried(first)})
        both = [run.adapter.to_float64(part["o"]) for part in (first, second)]
        run.note(f"o (cut at {cut})", distance(np.concatenate(both, 1), run.truth.outputs["o"]))
        run.compare(state_of(second), {name: x for name, x in run.truth.outputs.items() if name != "o"})


def summary(run: Run) -> None:
    """What a summary says that tokens do to the state, they do to the initial one: ``S' = A ∘ S + b``, in float32."""
    arrays = run.arrays()
    run.require(arrays)
    found = run.summary(arrays)
    for name, x in zip("Ab", found, strict=True):
        if not run.adapter.is_array(x) or run.adapter.dtype(x) != "float32":
            raise Failure(f"{name} is {type(x).__name__}, expected an array of float32")
    A, b = map(run.adapter.to_float64, found)
    start = run.values["initial_state"].astype(np.float64)
    run.near("final_state", act(framework_of(start), A, start) + b)


def steps(run: Run) -> None:
    """Decoding one token at a time is the same as decoding all of them at once."""
    arrays = run.arrays()
    found = [run.call(tokens(run, arrays, t, t + 1))["o"] for t in range(run.problem.sizes["T"])]
    run.near("o", np.concatenate([run.adapter.to_float64(o) for o in found], 1))
    run.compare(arrays, {"state": run.truth.outputs["state"]})


def packed(run: Run) -> None:
    """Packed sequences give what each of them gives alone."""
    arrays = run.arrays()
    got = run.call(arrays)
    run.compare(got, run.truth.outputs)
    bounds = run.values["cu_seqlens"].tolist()
    for n, (start, stop) in enumerate(pairwise(bounds)):
        alone = tokens(run, without(arrays, "cu_seqlens"), start, stop)
        alone = {name: x[n : n + 1] if name.startswith("initial_state") else x for name, x in alone.items()}
        single = run.call(alone)
        for name in got:
            rows = (slice(None), slice(start, stop)) if name == "o" else slice(n, n + 1)
            mine = run.adapter.to_float64(single[name])
            want = run.truth.outputs[name]
            noise = want.noise if want.noise.ndim < 2 else want.noise[rows]
            run.note(f"{name} (sequence {n} alone)", distance(mine, Quantity(want.value[rows], noise, want.dtype)))
            theirs = run.adapter.to_float64(got[name])[rows]
            run.note(f"{name} (sequence {n} alone against packed)", distance(mine, Quantity(theirs, noise, want.dtype)))


def causal(run: Run) -> None:
    """Another token ``t`` changes nothing before it, and something at it."""
    arrays = run.arrays()
    first = run.adapter.to_float64(run.call(arrays)["o"])
    want = run.truth.outputs["o"]
    for t in (20, 64):
        changed = {name: swapped(x, run.problem.symbols[name], t) for name, x in run.values.items()}
        other = run.adapter.to_float64(run.call(run.arrays(changed))["o"])
        before = (slice(None), slice(0, t))
        run.note(
            f"o before token {t}, which was changed,",
            distance(other[before], Quantity(first[before], want.noise[before], want.dtype)),
        )
        if np.array_equal(other[:, t], first[:, t]):
            raise Failure(f"o at token {t} does not depend on that token")


def swapped(x: Any, symbols: tuple[str, ...], t: int) -> Any:
    """Tokens from ``t`` on in reverse order: other values of the same kind."""
    if "T" not in symbols:
        return x
    axis = symbols.index("T")
    head, tail = np.split(x, [t], axis)
    return np.concatenate([head, np.flip(tail, axis)], axis)


def forgets(run: Run) -> None:
    """After a gate of -inf, nothing before it matters: neither tokens nor the initial state."""
    t = 70
    reset = {**run.values, "g": run.values["g"].copy()}
    reset["g"][:, t] = -np.inf
    if "a" in reset:  # the low-rank term reads the state past the gate
        reset["a"] = reset["a"].copy()
        reset["a"][:, t] = 0.0
    other = {name: past_changed(x, run.problem.symbols[name], t) for name, x in reset.items()}
    arrays = run.arrays(reset)
    first, second = run.call(arrays), run.call(run.arrays(other))
    start = t + 1 if run.case.op == "rwkv6" else t  # rwkv6 reads before it forgets
    for name, rows in (("o", (slice(None), slice(start, None))), ("final_state", ...)):
        a, b = (run.adapter.to_float64(got[name])[rows] for got in (first, second))
        want = run.truth.outputs[name]
        run.note(f"{name} after a reset at token {t}", distance(a, Quantity(b, want.noise[rows], want.dtype)))


def past_changed(x: Any, symbols: tuple[str, ...], t: int) -> Any:
    """Everything before token ``t`` in reverse order; a state with its sign changed."""
    if "T" not in symbols:
        return -x if symbols[0] == "N" else x
    axis = symbols.index("T")
    head, tail = np.split(x, [t], axis)
    return np.concatenate([np.flip(head, axis), tail], axis)


def nan(run: Run) -> None:
    """NaN in one token's value is seen in its output, and stays in its row and head (or channel), and out of the past.

    A masked matrix product multiplies later values by zero, and zero times NaN is NaN: the chunk form may let it reach the
    tokens of its own chunk, 256 at most, and the parallel form any token of its row and head. The recurrent form may not.
    """
    T, head = run.problem.sizes["T"], 1
    t = T - 20
    like = run.case.spec.like
    v = run.values[like].copy()
    v[0, t, head] = np.nan
    arrays = run.arrays({like: v})
    o = run.adapter.to_float64(run.call(arrays)["o"])
    if not np.isnan(o[0, t, head]).all():
        raise Failure(f"NaN in {like} at token {t} does not reach o at that token")
    clean = np.ones(o.shape[:3], bool)
    clean[0, max(t - reach(run), 0) :, head] = False
    if np.isnan(o[clean]).any():
        spoiled = np.isnan(o).reshape(*clean.shape, -1).any(-1)
        b, s, h = (int(found[0]) for found in np.nonzero(spoiled & clean))
        raise Failure(f"NaN in {like} at row 0, token {t}, head {head} reaches o at row {b}, token {s}, head {h}")
    run.near("o", o[clean], clean)


def reach(run: Run) -> int:
    """How many earlier tokens a NaN may reach."""
    if run.case.form == "parallel":
        return run.problem.sizes["T"]
    if run.case.op == "mixed_attn":
        return run.case.size["C"] - 1
    return 256 if run.case.form == "chunk" else 0


def repeat(run: Run) -> None:
    """Two calls give the same bits."""
    first = run.snapshot(run.call(run.arrays()))
    for _ in range(2):
        run.poison()
        same(first, run.snapshot(run.call(run.arrays())))
    run.note("o", distance(first["o"], run.truth.outputs["o"]))


def repeat_backward(run: Run) -> None:
    """Two backward passes give the same bits."""
    arrays = run.arrays()
    first = run.snapshot(present(run.gradients(arrays)[1]))
    for _ in range(2):
        run.poison()
        same(first, run.snapshot(present(run.gradients(arrays)[1])))


def present(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in arrays.items() if x is not None}


def same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, x in first.items():
        if not np.array_equal(x, second[name], equal_nan=True):
            raise Failure(f"{name} differs from call to call with equal inputs")
