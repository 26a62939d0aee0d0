"""Outputs and gradients against the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
from linattn_backends.numpy import oracle

from ..adapters.base import Arrays
from ..bounds import Quantity, distance
from ..calls import Failure, Run
from ..cases import GATED
from .leak import given_back

__all__ = [
    "MANY", "called", "compare_later", "forward", "gradient", "is_negated", "is_odd", "is_value", "least",
    "negated", "signs", "ungated",
]  # fmt: skip

CHEAPEST, CHEAP, FEW = 2**9, 2**11, 16
"""Product of the sizes of a call but that of chunks up to which there are many of it; of calls of few tokens; and so few."""
MANY = 11


def forward(run: Run) -> None:
    """``o`` and the final state are right; inputs stay as they were; nothing is read from unwritten memory. So are those of the
    next call of that shape, which leaves them as they are.
    """
    arrays = run.arrays()
    before = run.snapshot(arrays)
    run.poison()
    got = called(run, arrays)
    run.check_untouched(before, arrays, but="state")
    run.compare(got, run.truth.outputs)
    if run.case.check == "forward":
        mirrored(run, got)


def mirrored(run: Run, got: Arrays) -> None:
    """More calls of that shape, from another thread, with values and states negated, in every other if they are many: so must
    the results be, and they must be written neither to ``got``, those of the first, nor to those of one another, nor to inputs,
    and leave nothing behind. Where calls are cheap, it is the last of many that is looked at.
    """
    held, changed = run.snapshot(got), negated(run)
    sizes = {symbol: max(size, 1) for symbol, size in run.case.sizes if symbol != "C"}  # states there are without tokens
    many = np.prod(list(sizes.values())) <= (CHEAP if sizes["T"] <= FEW else CHEAPEST)

    def made(count: int) -> Arrays:
        earlier: list[tuple[Arrays, dict[str, Any]]] = []
        for left in reversed(range(count)):
            arrays = run.arrays(changed if is_negated(run, left) else {})
            found = called(run, arrays)
            earlier.append((found, run.snapshot(found)))
        run.check_untouched(run.values | (changed if is_negated(run, 0) else {}), arrays, but="state")
        for results, was in earlier:
            check_unwritten(run, results, was)
        return found

    def calls(count: int) -> Arrays:
        return run.adapter.aside(lambda: made(count))

    with given_back(run, got, calls):
        compare_later(run, got, held, calls(MANY if many else least(run)))


def negated(run: Run) -> dict[str, Any]:
    """Values and states with the other sign."""
    return {name: signs(run, name, x) * x for name, x in run.values.items() if is_value(run, name)}


def least(run: Run) -> int:
    """So many later calls show what changes from call to call, one of them with negated values."""
    return 1 if is_odd(run) else 2


def is_negated(run: Run, left: int) -> bool:
    """Whether a call has negated values that so many others come after: every other one, and the last if that says what its
    output must be.
    """
    return (left % 2 == 0) == is_odd(run)


def compare_later(run: Run, got: Arrays, held: dict[str, Any], again: Arrays) -> None:
    """Results of a last call, with values negated if outputs are odd, are right; those of a first are as they were ``held``."""
    check_unwritten(run, got, held)
    for name, want in run.truth.outputs.items():
        run.check_kind(name, again.get(name), want)
        found = run.adapter.to_float64(again[name])
        found = signs(run, name, found) * found if is_odd(run) else found
        if not np.array_equal(found, held[name], equal_nan=True):  # which has been compared
            run.note(f"{name} of a later call", distance(found, want))


def check_unwritten(run: Run, got: Arrays, held: dict[str, Any]) -> None:
    """Results are as they were ``held``."""
    for name, x in got.items():
        if not np.array_equal(held[name], run.adapter.to_float64(x), equal_nan=True):
            raise Failure(f"{name} is written to by the next call")


def is_odd(run: Run) -> bool:
    """True if the output of negated values is the negated output: of all but what a bias or an activation comes to."""
    return run.case.op != "short_conv" or not {"bias", "activation.silu"}.intersection(run.case.flags)


def is_value(run: Run, name: str) -> bool:
    """True for the values of a call, and for states that are sums of such."""
    whole, _, part = name.partition(".")
    return name == run.case.spec.like or (whole in ("state", "initial_state", "final_state") and part in ("", "v", "kv"))


def signs(run: Run, name: str, x: Any) -> Any:
    """What an array is multiplied by when values are negated: sums of keys, which a normalised state ends with, stay."""
    if name != "o" and not is_value(run, name):
        return 1
    found = np.full(x.shape[-1:], -1.0)
    if run.problem.options.get("normalize") and name not in ("o", run.case.spec.like):
        found[-1:] = 1.0
    return found


def called(run: Run, arrays: Arrays) -> Arrays:
    """The call, in the mode of gradients that the case asks for."""
    for mode in ("no_grad", "inference"):
        if mode in run.case.flags:
            with run.adapter.mode(mode):
                return run.call(arrays)
    return run.call({**arrays, **run.adapter.tracked(run.trained(arrays))} if "tracked" in run.case.flags else arrays)


def gradient(run: Run) -> None:
    """The gradients of every float input, from ``o`` and from the final state, are right."""
    arrays = run.arrays()
    before = run.snapshot(arrays)
    run.poison()
    got, gradients = run.gradients(arrays)
    run.check_untouched(before, arrays)
    run.compare(got, run.truth.outputs)
    compare_gradients(run, arrays, gradients)


def compare_gradients(run: Run, arrays: dict, gradients: dict) -> None:
    """Every float input but constants has a gradient; none at all counts as zero."""
    wanted = {name: truth for name, truth in run.true_gradients.items() if not run.is_constant(name)}
    for name, truth in wanted.items():
        if gradients.get(name) is None:
            gradients[name] = run.adapter.from_float64(np.zeros(truth.value.shape), run.problem.dtypes[name])
    run.compare(gradients, wanted, prefix="")


def ungated(run: Run) -> None:
    """With every gate zero, the result is that of the family without gates."""
    arrays = run.arrays()
    got = run.call(arrays)
    plain = {name: x for name, x in run.values.items() if name != "g"}
    o, state = oracle.forward(GATED[run.case.op], plain, run.problem.options)
    for name, value in {"o": o, "final_state": state}.items():
        run.compare({name: got[name]}, {name: Quantity(value, run.truth.outputs[name].noise, run.truth.outputs[name].dtype)})
