"""Plain Triton, or kernels in Gluon for Hopper: one decision, made once a call, which its launches take."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tiles import Tile

__all__ = ["Facts", "Stage", "Variant", "described", "precision_of", "unfit", "whole_lines"]

FAMILIES = ("linear_attn", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda", "dplr")
WIDTHS = (64, 128)
WALKS = ("linear_attn", "simple_gla")
"""Families whose walks take wider heads; their gradients' do not."""


class Stage(NamedTuple):
    """One stage of a variant: the kernel that runs, with its tile.

    Attributes:
        kernel: The kernel itself.
        tile: Its tile; ``mixed_attn`` has tiles of its own, with warps and stages like this.
        options: What else it is launched with: options of the compiler, and constants that no other kernel of its stage has.
    """

    kernel: Any
    tile: Tile
    options: Mapping[str, Any] = MappingProxyType({})

    @property
    def config(self) -> dict[str, Any]:
        """The options of its launch: warps, stages of the software pipeline, and its own."""
        return dict(num_warps=self.tile.warps, num_stages=self.tile.stages, **self.options)


@dataclass(frozen=True)
class Variant:
    """Which kernel runs at each stage of a call, with which tile, and why.

    Attributes:
        stages: The stage of each name ("scores", "state_fwd", …), in the order of the launches. Where chunks with strong gates
            have a kernel of their own, it is a stage of its own ("scores_strong"). Stages whose name begins with "segment" run
            where sequences are cut into segments.
        reason: Why no kernel for Hopper runs; ``None`` if one does, or if none is there to choose.
    """

    stages: Mapping[str, Stage]
    reason: str | None

    def __getitem__(self, stage: str) -> Stage:
        return self.stages[stage]

    @property
    def kernels(self) -> str:
        """The kernels' names in the order of the launches, each once; of whole sequences."""
        whole = (stage for name, stage in self.stages.items() if not name.startswith("segment"))
        return ", ".join(dict.fromkeys(stage.kernel.__name__ for stage in whole))

    @property
    def algorithm_said(self) -> str:
        """What ``explain`` says behind the kernels of the way they take together."""
        return ""


def described(forward: Variant, backward: Variant | None = None) -> str:
    """What ``explain`` says of a call: its kernels, those of its gradients if it has any, and why none is for Hopper."""
    said, reason = f"{forward.kernels}{forward.algorithm_said}", forward.reason
    if backward is not None:
        said += f"; gradients {backward.kernels}{backward.algorithm_said}"
        reason = reason or backward.reason
    return said if reason is None or "_sm90" in said else f"{said} (none for Hopper: {reason})"


class Facts(NamedTuple):
    """What is static of a call in chunk form.

    Attributes:
        family: The family whose kernels run.
        dtype: Of the operands.
        K, V: Widths of a head.
        chunk: Tokens a chunk.
        strength: Dimensions of ``beta`` besides batch and time: 2 is one a value channel.
        many: Whether sequences times value heads fill the device, a multiprocessor for each, and no scores are kept.
    """

    family: str
    dtype: torch.dtype
    K: int
    V: int
    chunk: int
    strength: int = 1
    many: bool = False


def precision_of(dtype: torch.dtype, K: int) -> str:
    """How products of float32 tiles are done: of so few terms that the rounding of one shows, exactly."""
    if K < 16 and dtype != torch.bfloat16:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


@functools.lru_cache(maxsize=1024)
def unfit(facts: Facts, out: torch.dtype = torch.bfloat16) -> str | None:
    """Why no kernel in Gluon takes a call on Hopper and writes ``out``; ``None`` if one does."""
    if facts.family not in FAMILIES:
        return f"{facts.family} has none"
    for what, dtype in (("operands", facts.dtype), ("results", out)):
        if dtype != torch.bfloat16:
            return f"{what} are {str(dtype).removeprefix('torch.')}, not bfloat16"
    reason = too_wide(facts)
    if reason:
        return reason
    if facts.strength == 2:
        return "beta has one number a value channel"
    return None if facts.chunk == 64 else f"chunks have {facts.chunk} tokens, not 64"


def too_wide(facts: Facts) -> str | None:
    """Why no kernel has tiles for these heads."""
    if facts.family in WALKS:
        if facts.K not in (*WIDTHS, 256):
            return f"K is {facts.K}, not 64, 128 or 256"
        return f"V is {facts.V}, not a multiple of 64" if facts.V % 64 else None
    for symbol in "K" if facts.family == "gla" else "KV":
        size = getattr(facts, symbol)
        if size not in WIDTHS:
            return f"{symbol} is {size}, not 64 or 128"
    return None


def whole_lines(*arrays: Tensor | None) -> bool:
    """Whether kernels that copy 16 bytes at once can take these arrays, with offsets in a chunk of less than 32 bits."""
    for x in arrays:
        if x is not None:
            batch, token, head = x.stride()[:3]
            if (x.data_ptr() | batch | token | head) % 16 or token >= 1 << 24:
                return False
    return True
