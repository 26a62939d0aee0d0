"""More elements than an int32 can count."""

from __future__ import annotations

import numpy as np

from ..adapters.base import Arrays
from ..bounds import Quantity, distance
from ..calls import Run
from ..cases import BLOCK

__all__ = ["large"]


def large(run: Run) -> None:
    """A block of tokens that begins with a reset, over and over: every block of the output is the first one.

    The truth is worked out for one block; the last blocks lie beyond the 2³¹-th element.
    """
    small = Run(run.case.block, run.adapter, run.backend, run.witness, run.tighten)
    values = dict(small.values)
    values["g"] = values["g"].copy()
    values["g"][:, 0] = -np.inf
    times, rest = divmod(run.case.size["T"], BLOCK)
    arrays: Arrays = {
        name: run.adapter.repeated(run.adapter.from_float64(x, small.problem.dtypes[name]), 1, times, rest)
        for name, x in values.items()
    }
    o = small.call(arrays)["o"]
    want = small.truth.outputs["o"]
    for block in (0, times // 2, times - 1):
        got = run.adapter.to_float64(o[:, block * BLOCK : (block + 1) * BLOCK])
        run.note(f"o in block {block}", distance(got, Quantity(want.value, want.noise, want.dtype)))
    run.note(
        "o in the last tokens", distance(run.adapter.to_float64(o[:, times * BLOCK :]), want, (slice(None), slice(0, rest)))
    )
