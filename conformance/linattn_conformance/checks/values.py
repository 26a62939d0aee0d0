"""Outputs and gradients against the truth."""

from __future__ import annotations

import numpy as np
from linattn_backends.numpy import oracle

from ..adapters.base import Arrays
from ..bounds import Quantity
from ..calls import Run
from ..cases import GATED

__all__ = ["forward", "gradient", "ungated"]


def forward(run: Run) -> None:
    """``o`` and the final state are right; inputs stay as they were; nothing is read from unwritten memory."""
    arrays = run.arrays()
    before = run.snapshot(arrays)
    run.poison()
    got = called(run, arrays)
    run.check_untouched(before, arrays, but="state")
    run.compare(got, run.truth.outputs)


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
    wanted = {name: truth for name, truth in run.truth.gradients.items() if not run.is_constant(name)}
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
