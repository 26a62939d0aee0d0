"""Calls on parts of a problem, at other sizes: their results are parts of its truth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from linattn.errors import Unsupported

from ..bounds import Quantity, Truth
from ..calls import Declared, Run
from ..data import symbols_of_outputs
from ..parts import Part, draw_parts
from . import values

__all__ = ["parts", "parts_backward"]

EAGER, COMPILED = 16, 3
"""So many parts of a problem, by whether a call at new sizes is compiled first."""
MOST_LEFT_OUT = 0.5
"""The share of its parts that may be declared unsupported while a problem passes: who has one size alone has no parts."""


AGAIN = 4
"""Of so many parts one is called twice."""


class PartRun(Run):
    """A part of what a run has: its arrays, its truth and its options are those of the part."""

    def __init__(self, run: Run, part: Part) -> None:
        sizes = {symbol: size for symbol, size in part.sizes.items() if symbol in run.case.size}
        case = replace(run.case, sizes=tuple({**run.case.size, **sizes}.items()), check="forward")
        super().__init__(case, run.adapter, run.backend, run.witness, run.tighten)
        self.part, whole = part, run.problem
        self.group = whole.sizes["HV"] // whole.sizes["H"] if part.heads else 1
        self.problem = replace(
            whole,
            dtypes={**whole.dtypes, "cu_seqlens": "int64" if part.wide else "int32"},
            options=self._options(run),
            sizes={**whole.sizes, **part.sizes, "HV": len(part.heads) * self.group},
        )
        self.values = {name: part.cut(x, whole.symbols[name], self.group) for name, x in run.values.items()}
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
            {
                name: self._quantity(whole.outputs[name], symbols[name], self.part.scale if name == "o" else 1.0)
                for name in final
            },
            {name: self._quantity(whole.gradients[name], run.problem.symbols[name]) for name in apart},
            {name: self.part.cut(x, symbols[name], self.group) for name, x in whole.cotangents.items()},
        )

    def _quantity(self, whole: Quantity, symbols: tuple[str, ...], factor: float = 1.0) -> Quantity:
        value, noise = (self.part.cut(x, symbols, self.group) for x in (whole.value, whole.noise))
        return Quantity(value * factor, noise * abs(factor), whole.dtype)

    def output_dtype(self, name: str) -> str:
        return self.dtypes[name]

    def laid_out(self, name: str, x: Any) -> Any:
        """As the part lays it out, or else the case."""
        layout, of = self.part.layout
        return getattr(self.adapter, layout)(x) if layout and of == name else super().laid_out(name, x)

    def note(self, name: str, ratio: Any) -> None:
        super().note(f"{name} of the part {self.part}", ratio)


def parts(run: Run) -> None:
    """Outputs of calls on parts, one after the other, are parts of the outputs."""
    each_part(run, gradients=False)


def parts_backward(run: Run) -> None:
    """So are their gradients."""
    each_part(run, gradients=True)


def forward(run: Run, again: bool) -> None:
    """The outputs are right; so are those of a next call, with values and states negated, which leaves them as they are."""
    arrays = run.arrays()
    before = run.snapshot(arrays)
    got = values.called(run, arrays)
    run.check_untouched(before, arrays)
    run.compare(got, run.truth.outputs)
    if not again:
        return
    held = run.snapshot(got)
    values.compare_later(run, got, held, values.called(run, run.arrays(values.negated(run))))


def each_part(run: Run, gradients: bool) -> None:
    """Make a call on each part; those that the backend declares unsupported are left out, unless they are more than half."""
    drawn = draw_parts(run.case, gradients, EAGER if run.adapter.eager else COMPILED)
    reasons = []
    for i, part in enumerate(drawn):
        one = PartRun(run, part)
        try:
            values.gradient(one) if gradients else forward(one, again=i % AGAIN == 0)
        except Unsupported:
            try:
                one.require(one.arrays())
            except Declared as declared:
                reasons.append(declared)
                continue
            raise
        except Exception as error:
            error.add_note(f"of the part {part}")
            raise
        finally:
            run.worst = max(run.worst, one.worst)
    if len(reasons) > len(drawn) * MOST_LEFT_OUT:
        raise reasons[0]
