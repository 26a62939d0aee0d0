"""The checks by name: each takes a :class:`~linattn_conformance.calls.Run` and raises ``Failure`` or ``Declared``."""

from __future__ import annotations

from collections.abc import Callable

from ..calls import Run
from ..cases import TRANSFORMS
from . import history, inputs, large, leak, parts, properties, transforms, values, widths

__all__ = ["CHECKS"]

CHECKS: dict[str, Callable[[Run], None]] = {
    "forward": values.forward,
    "gradient": values.gradient,
    "ungated": values.ungated,
    "parts": parts.parts,
    "parts-backward": parts.parts_backward,
    "widths": widths.widths,
    "widths-backward": widths.widths_backward,
    "agree": properties.agree,
    "split": properties.split,
    "steps": properties.steps,
    "summary": properties.summary,
    "packed": properties.packed,
    "causal": properties.causal,
    "forgets": properties.forgets,
    "nan": properties.nan,
    "repeat": properties.repeat,
    "repeat-backward": properties.repeat_backward,
    "held": history.held,
    "held-backward": history.held_backward,
    "rewritten": history.rewritten,
    "often": history.often,
    "shapes": history.shapes,
    "threads": history.threads,
    "surroundings": history.surroundings,
    "forked": history.forked,
    "streams": history.streams,
    "replayed": history.replayed,
    "keeps": history.keeps,
    "bad-input": inputs.bad_input,
    "large": large.large,
    "leak": leak.leak,
    "leak-backward": leak.leak_backward,
    **dict.fromkeys(TRANSFORMS, transforms.transform),
}
