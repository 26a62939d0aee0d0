"""The launch that makes scores and carries the state at once, where nothing is kept and there are heads enough."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host.chunks import state_strides, strides
from ..host.lengths import lengths_of
from ..runtime.launch import launch
from .call import DeltaCall
from .config import DeltaVariant

__all__ = ["fused_forward"]


def fused_forward(call: DeltaCall, variant: DeltaVariant, final: bool) -> tuple[Tensor, Tensor | None]:
    """Outputs and, if asked for, final states."""
    (_, T, HV, V), K, stage = call.v.shape, call.q.shape[-1], variant["fused"]
    lengths = lengths_of(call)
    out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    end = torch.empty((call.N, HV, K, V), dtype=torch.float32, device=call.v.device) if final else None
    launch(
        stage.kernel, call.N * HV, call,
        call.q, call.k, call.v, *lengths, call.g, call.beta, call.start, end, out, call.cu, T, HV, call.scale,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(call.g), *strides(call.beta), *state_strides(call.start),
        K=K, V=V, C=call.chunk, BV=stage.tile.BV, GROUP=call.group, GATE=call.gate, UNIT=call.maps.unit,
        PACKED=call.cu is not None, START=call.start is not None, END=final, **stage.config,
    )  # fmt: skip
    return out, end
