"""The framework's own transforms: what each must preserve is the adapter's to say."""

from __future__ import annotations

from ..calls import Run
from .values import forward

__all__ = ["transform"]


def transform(run: Run) -> None:
    """An eager call, watched; then the same under the transform, against the same truth.

    Inside a compiler the witness would be traced as well, so it looks at the eager call only.
    """
    forward(run)
    run.witness.watching = False
    run.adapter.transforms()[run.case.check](run)
