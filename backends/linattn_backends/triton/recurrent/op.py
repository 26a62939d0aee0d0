"""Launch of the recurrence for every matrix-state family, and the custom op ``linattn::triton_decode``.

The op overwrites the states that it is given. Nothing reads a tensor's data, so launches can be captured in a graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..host.chunks import rows_contiguous, state_strides, strides
from ..host.maps import NO_MAPS, GateMap, Maps
from ..host.tails import zero_behind
from ..host.tiles import programs
from ..runtime.launch import launch
from ..runtime.operator import in_place
from ..runtime.replay import recorded
from .config import variant

__all__ = ["Tokens", "decode", "decode_call", "recurrent_forward"]


class Tokens(NamedTuple):
    """The arrays of a call's tokens, of the specification's names and shapes; ``None`` where a family has none."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    gv: Tensor | None = None
    beta: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    u: Tensor | None = None

    @property
    def family(self) -> str:
        """The family whose recurrence this is."""
        dims = 0 if self.g is None else self.g.dim()
        if self.a is not None:
            return "dplr"
        if self.beta is not None:
            return "kda" if dims == 4 else "gated_delta_rule" if dims else "delta_rule"
        if self.u is not None:
            return "rwkv6"
        return "gla" if dims == 4 or self.gv is not None else "simple_gla" if dims else "linear_attn"

    def laid_out(self) -> Tokens:
        """The arrays with rows contiguous, and a fixed decay expanded over tokens."""
        g, u = self.g, self.u
        if g is not None and g.dim() == 1:
            g = g.expand(self.v.shape[:3])
        rows = (x if x is None or x.dim() < 4 else rows_contiguous(x) for x in (*self[:3], g, *self[4:8]))
        return Tokens(*rows, None if u is None else u.contiguous())


def recurrent_forward(
    tokens: Tokens, start: Tensor | None, end: Tensor | None, scale: float, out_dtype: torch.dtype,
    cu: Tensor | None = None, slots: Tensor | None = None, maps: Maps = NO_MAPS,
) -> Tensor:  # fmt: skip
    """Outputs; the states after the last tokens go to ``end``, which may be ``start``.

    Args:
        tokens: Arrays of ``B`` rows.
        start: States before the first tokens ``[P, HV, K, V]``, any strides; zeros if ``None``.
        end: Where to write states; nowhere if ``None``.
        scale: Factor on the output.
        out_dtype: Dtype of the output.
        cu: Offsets of packed sequences.
        slots: Which state is each sequence's; a sequence whose slot is none of ``0 … P-1`` writes zeros and no state.
        maps: What the kernel makes of raw projections.
    """
    tokens = tokens.laid_out()
    q, _, v, g, gv, beta, a, _, u = tokens
    B, T, HV, V = v.shape
    K, N = q.shape[-1], B if cu is None else cu.shape[0] - 1
    out = torch.empty((B, T, HV, V), dtype=out_dtype, device=v.device)
    stage = variant(K, V, T == 1 or a is not None)["tokens"]
    launch(
        stage.kernel, N * HV * programs(1, V, 1, stage.tile.BV), tokens,
        *tokens, maps.gate.A_log, maps.gate.bias, start, out, end, cu, slots, T, HV, 0 if slots is None else start.shape[0],
        scale, maps.gate.number, maps.factor,
        *(stride for x in tokens[:8] for stride in strides(x)), *maps.gate.strides, *state_strides(start), *state_strides(end),
        K=K, V=V, BK=stage.tile.BK, BV=stage.tile.BV, GROUP=HV // q.shape[2], GATE_GROUP=1 if g is None else HV // g.shape[2],
        GATE=0 if g is None else g.dim() - 2, VALUE_GATE=gv is not None, BETA=0 if beta is None else beta.dim() - 2,
        LOW_RANK=a is not None, EXCLUSIVE=u is not None, UNIT=maps.unit, MAP=maps.gate.kind, STRENGTH=maps.factor > 0,
        PACKED=cu is not None, SLOTS=slots is not None,
        START=start is not None, END=end is not None,
        WIDE_STRIDES=far_apart(start) or (end is not start and far_apart(end)), **stage.config,
    )  # fmt: skip
    zero_behind(tokens, cu, out)
    return out


def far_apart(state: Tensor | None) -> bool:
    """Whether offsets inside one head's state take more than 32 bits."""
    if state is None:
        return False
    (_, _, K, V), (_, _, k, v) = state.shape, state.stride()
    return (K - 1) * k >= 1 << 30 or (V - 1) * v >= 1 << 30


@torch.library.custom_op("linattn::triton_decode", mutates_args=("state",))
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    u: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
    scale: float,
    wide: bool,
    A_log: Tensor | None,
    bias: Tensor | None,
    kind: int,
    number: float,
    factor: float,
    unit: bool,
) -> Tensor:
    """Outputs (float32 if ``wide``); ``state`` is overwritten. Input maps are as :class:`..host.maps.Maps` has them."""
    return computed(q, k, v, g, gv, beta, a, b, u, state, state_indices, scale, wide, A_log, bias, kind, number, factor, unit)


@decode.register_fake
def _(q, k, v, g, gv, beta, a, b, u, state, state_indices, scale, wide, *maps):
    return v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype)


@recorded
def computed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, beta: Tensor | None, a: Tensor | None,
    b: Tensor | None, u: Tensor | None, state: Tensor, state_indices: Tensor | None, scale: float, wide: bool,
    A_log: Tensor | None, bias: Tensor | None, kind: int, number: float, factor: float, unit: bool,
) -> Tensor:  # fmt: skip
    """What :func:`decode` returns."""
    slots = None if state_indices is None else state_indices.contiguous()
    tokens, maps = Tokens(q, k, v, g, gv, beta, a, b, u), Maps(GateMap(A_log, bias, kind, number), factor, unit)
    return recurrent_forward(tokens, state, state, scale, torch.float32 if wide else v.dtype, slots=slots, maps=maps)


decode_call = in_place(decode, "decode_…", len(Tokens._fields), computed)
