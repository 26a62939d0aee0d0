"""Calls on parts of a problem, at other sizes: their results are parts of its truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from linattn.errors import Unsupported

from ..bounds import Quantity, Truth
from ..calls import Declared, Run
from ..data import symbols_of_outputs
from ..parts import Part, draw_parts
from . import values

__all__ = ["each", "parts", "parts_backward"]

EAGER, COMPILED = 14, 3
"""So many parts of a problem, by whether a call at new sizes is compiled first."""
MOST_LEFT_OUT = 0.5
"""The share of its calls that may be declared unsupported while a case passes: who has one size alone has no parts."""
AGAIN = 4
"""Of so many parts one is called twice, and the smallest many times."""


class PartRun(Run):
    """A part of what a run has: its arrays, its truth and its options are those of the part."""

    def __init__(self, run: Run, part: Part) -> None:
        sizes = {symbol: size for symbol, size in part.sizes.items() if symbol in run.case.size}
        case = replace(run.case, sizes=tuple({**run.case.size, **sizes}.items()), check="forward")
        super().__init__(case, run.adapter, run.backend, run.witness, run.tighten)
        self.part, whole = part, run.problem
        self.group = group_of(run)
        self.problem = replace(
            whole,
            dtypes={**whole.dtypes, "cu_seqlens": "int64" if part.wide else "int32"},
            options=self._options(run),
            sizes={**whole.sizes, **part.sizes},
        )
        self.values = {name: part.cut(x, whole.symbols[name], self.group) for name, x in run.values.items()}
        self.values |= {name: x * part.magnitude for name, x in self.values.items() if values.is_value(run, name)}
        if part.packed:
            self.values["cu_seqlens"] = np.cumsum([0, *part.lengths], dtype=np.int32)
        self.truth = self._truth(run)
        self.dtypes = {name: x.dtype for name, x in run.truth.outputs.items()}

    def _options(self, run: Run) -> dict[str, Any]:
        """A default that follows from a width is that of the whole."""
        options = dict(run.problem.options)
        if "chunk_size" in options and self.part.chunk_size is not None:
            options["chunk_size"] = self.part.chunk_size
        if "scale" in options and (self.part.scale != 1.0 or self.part.widths["K"] != run.problem.sizes["K"]):
            usual = run.problem.sizes["K"] ** -0.5
            options["scale"] = self.part.scale * (usual if options["scale"] is None else options["scale"])
        return options

    def _truth(self, run: Run) -> Truth:
        """The part of the truth: final states where all tokens are in it, and the gradients of what no other row shares."""
        whole = run.truth
        ends = set(self.part.lengths) == {run.problem.sizes["T"]}
        symbols = symbols_of_outputs(run.case)
        final = [name for name in whole.outputs if name == "o" or ends]
        apart = [name for name in whole.gradients if run.problem.symbols[name][0] in ("B", "N")]
        return Truth(
            {name: self._quantity(whole.outputs[name], symbols[name], self._factor(name)) for name in final},
            {name: self._quantity(whole.gradients[name], run.problem.symbols[name]) for name in apart},
            {name: self.part.cut(x, symbols[name], self.group) for name, x in whole.cotangents.items()},
        )

    def _factor(self, name: str) -> float:
        """By what an output is larger than that of the whole."""
        return self.part.magnitude * (self.part.scale if name == "o" else 1.0)

    def _quantity(self, whole: Quantity, symbols: tuple[str, ...], factor: float = 1.0) -> Quantity:
        value, noise = (self.part.cut(x, symbols, self.group) for x in (whole.value, whole.noise))
        return Quantity(value * factor, noise * abs(factor), whole.dtype)

    def output_dtype(self, name: str) -> str:
        return self.dtypes[name]

    def laid_out(self, name: str, x: Any) -> Any:
        """As the part lays it out, or else the case."""
        layout = self.part.layouts.get(name)
        return getattr(self.adapter, layout)(x) if layout else super().laid_out(name, x)

    def note(self, name: str, ratio: Any) -> None:
        super().note(f"{name} of the part {self.part}", ratio)


def group_of(run: Run) -> int:
    """Value heads for each query/key head of a run."""
    sizes = run.problem.sizes
    return sizes["HV"] // sizes["H"] if "H" in sizes else 1


def parts(run: Run) -> None:
    """Outputs of calls on parts, one after the other, are parts of the outputs."""
    each_part(run, gradients=False)


def parts_backward(run: Run) -> None:
    """So are their gradients."""
    each_part(run, gradients=True)


def forward(run: Run, later: int) -> None:
    """The outputs are right; so are those of the last of some ``later`` calls, with values and states negated in every other,
    which leave them as they are.
    """
    arrays = run.arrays()
    before = run.snapshot(arrays)
    got = values.called(run, arrays)
    run.check_untouched(before, arrays)
    run.compare(got, run.truth.outputs)
    if later:
        held, negated = run.snapshot(got), values.negated(run)
        for left in reversed(range(later)):
            again = values.called(run, run.arrays(negated if values.is_negated(run, left) else {}))
        values.compare_later(run, got, held, again)


def each_part(run: Run, gradients: bool) -> None:
    """Make a call on each part, and later ones on some."""
    drawn = draw_parts(run.case, gradients, EAGER if run.adapter.eager else COMPILED, group_of(run))
    smallest = min(range(len(drawn)), key=lambda i: math.prod(drawn[i].sizes.values()))

    def act(one: Run, i: int) -> None:
        later = values.MANY if i == smallest else values.least(one) if i % AGAIN == 0 else 0
        values.gradient(one) if gradients else forward(one, later)

    each(run, ((f"of the part {part}", PartRun(run, part)) for part in drawn), act)


def each(run: Run, calls: Iterable[tuple[str, Run]], act: Callable[[Run, int], None]) -> None:
    """Do something with each of some calls, which are told by what they are of; those that the backend declares unsupported are
    left out, unless they are more than half.
    """
    reasons: list[Declared] = []
    for i, (of, one) in enumerate(calls):
        try:
            act(one, i)
        except Unsupported:
            try:
                one.require(one.arrays())
            except Declared as declared:
                reasons.append(declared)
                continue
            raise
        except Exception as error:
            error.add_note(of)
            raise
        finally:
            run.worst = max(run.worst, one.worst)
    if reasons and len(reasons) > (i + 1) * MOST_LEFT_OUT:
        raise reasons[0]
