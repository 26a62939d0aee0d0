"""Plain Triton, or kernels in Gluon for Hopper: one decision, which launches take and ``explain`` tells."""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from linattn.plugin import Call
from torch import Tensor

from ..delta.config import delta_tiles
from ..diagonal.config import tiles_for
from ..runtime.device import hopper, not_hopper

__all__ = ["Facts", "details_of", "gluon", "on_hopper"]

FAMILIES = ("linear_attn", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda", "dplr")
WIDTHS = (64, 128)
WALKS = ("linear_attn", "simple_gla")
"""Families whose walks take wider heads; their gradients' do not."""


class Facts(NamedTuple):
    """What is static of a call in chunk form.

    Attributes:
        family: The family whose kernels run.
        dtype: Of the operands.
        K, V: Widths of a head.
        chunk: Tokens a chunk.
        strength: Dimensions of ``beta`` besides batch and time: 2 is one a value channel.
    """

    family: str
    dtype: torch.dtype
    K: int
    V: int
    chunk: int
    strength: int = 1


class Described(Protocol):
    """A call on the host."""

    @property
    def facts(self) -> Facts:
        """Its static facts."""
        ...


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


def gluon(call: Described, *arrays: Tensor | None, out: torch.dtype = torch.bfloat16) -> bool:
    """Whether kernels in Gluon take these ``arrays`` of a call, the first on its device, and write ``out``."""
    return on_hopper(call, arrays[0].device, out) and whole_lines(*arrays)


def on_hopper(call: Described, device: torch.device, out: torch.dtype = torch.bfloat16) -> bool:
    """Whether kernels in Gluon take such a call on ``device``, if its arrays lie as they need them."""
    return unfit(call.facts, out) is None and hopper(device)


def whole_lines(*arrays: Tensor | None) -> bool:
    """Whether kernels that copy 16 bytes at once can take these arrays, with offsets in a chunk of less than 32 bits."""
    for x in arrays:
        if x is not None:
            batch, token, head = x.stride()[:3]
            if (x.data_ptr() | batch | token | head) % 16 or token >= 1 << 24:
                return False
    return True


def facts_of(call: Call) -> Facts:
    """The facts that a call's arrays will have on the host."""
    dtype, chunk = getattr(torch, call.dtype), int(call.option("chunk_size") or 0)
    V = call.V + bool(call.option("normalize"))  # a normaliser is one more value column
    dims = {name: len(shape.split()) - 2 for name, shape in call.shapes.items()}
    gate, strength = (max(dims[name], 1) if name in dims else 0 for name in ("g", "beta"))
    family = "gla with gv" if call.has("gv") else call.op if call.option("causal", True) else f"{call.op} of both directions"
    choose = (
        functools.partial(delta_tiles, beta=strength)
        if call.op in ("delta_rule", "gated_delta_rule", "kda", "dplr")
        else tiles_for
    )
    tiles = choose(K=call.K, V=V, dtype=dtype, gate=gate, chunk=chunk, processors=1, roomy=True)
    return Facts(family, dtype, call.K, V, tiles.chunk, strength or 1)


def details_of(call: Call, device: torch.device | None) -> str:
    """For ``explain``: which kernels a call takes on ``device``; ``None`` is one of CUDA that this process has not."""
    plain, special = "plain Triton", "Gluon kernels for Hopper"
    steps = call.form != "chunk"  # whose gradients are the chunk form's
    if call.op in ("mixed_attn", "rwkv6") or (steps and not call.needs_grad):
        return plain
    facts = facts_of(call)
    out = torch.float32 if call.option("normalize") else facts.dtype
    reason = unfit(facts, out) or (device and not_hopper(device))
    if reason:
        return f"{plain} (no Gluon kernels: {reason})"
    if call.op == "gla":
        said = f"{plain}; {'gradients ' if steps else ''}under strong gates, {special}"
    elif call.op in WALKS and call.needs_grad and max(call.K, call.V) > max(WIDTHS):
        said = f"{plain}; gradients of values, {special}" if steps else f"{special}; gradients of queries and keys, {plain}"
    else:
        said = f"{plain}; gradients, {special}" if steps else special
        if call.op == "dplr":
            said = f"{said}; walks and strong gates, {plain}"
        elif call.needs_grad and call.HV > call.H and call.op in WALKS:
            said = f"{said}; gradients of shared heads, {plain}"
    return said if device else f"{said}, {plain} elsewhere"
