"""NaN and inf go forward in time only, as the recurrence sends them.

A matrix product over a chunk does not know that: an earlier token's weight for a later value is zero, and ``0 · NaN`` is NaN.
So where a written operand is not finite, the call runs once more with zeros in its place, and the tokens before the first such
one take their outputs from there. Only in host memory: looking costs one sum of each operand, and on an accelerator it would
make every call wait for the device, so there a NaN may reach the tokens before it in its own chunk.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

GATES = ("g", "gv")  # -inf is a legal value: a reset


def written(arrays: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The operands by token that are not finite (a gate: that hold NaN); empty on an accelerator."""
    return {
        name: x
        for name, x in arrays.items()
        if x is not None and x.device.type == "cpu" and x.dim() > 2 and _suspect(x.sum(dtype=_wide(x)), name)
    }


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _suspect(total: Tensor, name: str) -> bool:
    return bool(total.isnan()) if name in GATES else not bool(total.isfinite())


def bad(x: Tensor, name: str) -> Tensor:
    """Elementwise."""
    return x.isnan() if name in GATES else ~x.isfinite()


def zeroed(arrays: Mapping[str, Tensor | None], found: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The operands with zeros where they are bad."""
    return {name: x.masked_fill(bad(x, name), 0) if name in found else x for name, x in arrays.items()}


def since(found: Mapping[str, Tensor], HV: int, cu_seqlens: Tensor | None) -> Tensor:
    """``[B, T, HV, 1]``: True from the first bad token of each sequence and head on."""
    marks = [bad(x, name).flatten(3).any(-1) if x.dim() > 3 else bad(x, name) for name, x in found.items()]
    mark = torch.stack([m.repeat_interleave(HV // m.shape[2], 2) for m in marks]).any(0)
    count = mark.cumsum(1)
    if cu_seqlens is not None:
        tokens = torch.arange(mark.shape[1], device=mark.device)
        starts = cu_seqlens[torch.searchsorted(cu_seqlens, tokens, right=True) - 1].long()
        count = count - (count - mark.long())[:, starts]  # only what happened in the token's own sequence
    return (count > 0)[..., None]
