"""What the gated delta rules of MLX and of mlx-lm, which two backends adapt, have no argument for."""

from __future__ import annotations

from linattn.plugin import Call

__all__ = ["complaint"]


def complaint(call: Call) -> str | None:
    """Why neither of them can run a call; ``None`` if one of them may."""
    if call.beta != "scalar":
        return "takes one beta for a token and head"
    if call.T == 0:
        return "takes one token at least"
    return None
