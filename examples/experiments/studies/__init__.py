"""What is asked of the papers, one table a file: each module holds a ``STUDY``, which ``python -m experiments NAME`` runs."""

from __future__ import annotations

import importlib

from ..protocol import Study

NAMES = ("mqar", "recall_by_map", "gates", "extrapolation", "flash", "masked", "size")
"""In the order of what would change a sentence of a page."""


def study(name: str) -> Study:
    """The study of a name."""
    return importlib.import_module(f"{__name__}.{name}").STUDY
