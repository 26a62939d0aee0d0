"""The cases at other sizes, for a library that takes some widths or dtypes only.

The cases of the manifest have widths that fit no tile, and their core is float32. A backend that declares those away has shown
nothing yet; here it meets the same checks at sizes of its own. This gives no verdict: a verdict is about the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from .cases import DTYPES, HAVE_BFLOAT16, Case

__all__ = ["resized"]

USUAL = {"K": 24, "V": 40}
"""The widths of every case that is not about widths."""
UNSIZED = ("bad-input", "large", "compile", "export", "fake", "func-grad", "vmap", "autocast")


def resized(cases: Iterable[Case], dtype: str, sizes: Mapping[str, int]) -> Iterator[Case]:
    """The float32 cases of usual widths, with operands in ``dtype`` and other widths.

    Args:
        cases: Cases of the manifest.
        dtype: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        sizes: Sizes by symbol, e.g. ``{"K": 128, "V": 128}``; the other sizes stay.
    """
    for case in cases:
        usual = all(case.size.get(symbol) == size for symbol, size in USUAL.items())
        if case.dtype != "float32" or not usual or case.check in UNSIZED:
            continue
        op, form, _, flags, _, check = case.id.split("/")
        named = tuple((symbol, sizes.get(symbol, size)) for symbol, size in case.sizes)
        written = "-".join(f"{symbol}{size}" for symbol, size in named)
        yield replace(
            case,
            id=f"{op}/{form}/{dtype}/{flags}/{written}/{check}",
            dtype=DTYPES[dtype],
            sizes=named,
            core=False,
            frameworks=HAVE_BFLOAT16 if dtype == "bf16" else case.frameworks,
        )
