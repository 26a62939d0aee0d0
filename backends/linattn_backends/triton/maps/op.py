"""The host side of the maps of scalars, and their custom op ``linattn::triton_scalar_maps``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn_backends.torch.transforms import register

from ..host.chunks import strides
from ..host.maps import NO_MAPS, GateMap, Maps
from ..host.sums import sums_of_parts
from ..host.tiles import programs
from ..host.variant import Stage
from ..lib.input_maps import NONE
from ..runtime.device import properties
from ..runtime.launch import launch
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .config import variant

__all__ = ["with_scalars_mapped"]


@dataclass(frozen=True)
class Scalars:
    """A call of the maps.

    Attributes:
        g, beta: Raw ``[B, T, HV]``, any strides; ``None`` for what is not mapped.
        gate: The map of ``g``.
        factor: What multiplies the sigmoid of ``beta``.
    """

    g: Tensor | None
    beta: Tensor | None
    gate: GateMap
    factor: float
    family = "the input maps"

    @property
    def v(self) -> Tensor:
        """An array of its shape, on the device where it is launched."""
        return self.beta if self.g is None else self.g

    def run(self, stage: Stage, count: int, arrays: Sequence[Tensor | None], made: Sequence[Tensor | None]) -> None:
        """Launch ``count`` programs for every block of heads; ``arrays`` come before the call's own, ``made`` after."""
        (B, T, HV), (A_log, bias, kind, number), tile = self.v.shape, self.gate, stage.tile
        launch(
            stage.kernel, count * programs(HV, 1, tile.BH, 1), self,
            *arrays, self.g, self.beta, A_log, bias, *made, B * T, T, HV, number, self.factor,
            *strides(self.g), *strides(self.beta), *self.gate.strides[:2],
            R=tile.R, BH=tile.BH, MAP=kind, STRENGTH=self.beta is not None, **stage.config,
        )  # fmt: skip


def forward(call: Scalars) -> tuple[Tensor | None, Tensor | None]:
    """Log decays and writing strengths, float32."""
    made = [None if x is None else torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (call.g, call.beta)]
    B, T, HV = call.v.shape
    stage = variant(int(HV), False)["scalars"]
    call.run(stage, programs(B * T, 1, stage.tile.R, 1), (), made)
    return made[0], made[1]


def backward(call: Scalars, ddecay: Tensor | None, dstrength: Tensor | None) -> list[Tensor]:
    """Gradients of ``g, beta, A_log, bias``, of those that there are."""
    (B, T, HV), gate = call.v.shape, call.gate
    stage = variant(int(HV), True)["scalars"]
    walks = max(min(programs(B * T, 1, stage.tile.R, 1), 2 * properties(call.v.device).num_sms), 1)
    made = [None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.g, call.beta)]
    learned = gate.A_log is not None or gate.bias is not None
    parts = torch.empty((walks, 2, HV), dtype=torch.float32, device=call.v.device) if learned else None
    call.run(stage, walks, (ddecay, dstrength), (*made, parts))
    if parts is not None:
        sums = zip(sums_of_parts(call, parts), (gate.A_log, gate.bias), strict=True)
        made += [None if x is None else (d if x.dim() else d.sum()).to(x.dtype) for d, x in sums]
    return [x for x in made if x is not None]


@torch.library.custom_op("linattn::triton_scalar_maps_backward", mutates_args=())
@recorded
@precompiled()
def scalars_backward(
    ddecay: Tensor | None,
    dstrength: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    bias: Tensor | None,
    kind: int,
    number: float,
    factor: float,
) -> list[Tensor]:
    """Gradients of the arrays given, in the order of the arguments."""
    call = Scalars(g, beta, GateMap(A_log, bias, kind, number), factor)
    return backward(call, *(None if d is None else d.contiguous() for d in (ddecay, dstrength)))


@scalars_backward.register_fake
def _(ddecay, dstrength, g, beta, A_log, bias, kind, number, factor):
    given = (g, beta, A_log, bias)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given if x is not None]


@recorded
@precompiled()
def computed(
    g: Tensor | None, beta: Tensor | None, A_log: Tensor | None, bias: Tensor | None, kind: int, number: float, factor: float,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """What :func:`scalars` returns, and ``None`` for what is not wanted."""
    return forward(Scalars(g, beta, GateMap(A_log, bias, kind, number), factor))


@torch.library.custom_op("linattn::triton_scalar_maps", mutates_args=())
def scalars(
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    bias: Tensor | None,
    kind: int,
    number: float,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Log decays and writing strengths; what is not wanted is an empty tensor."""
    made = computed(g, beta, A_log, bias, kind, number, factor)
    other = beta if g is None else g
    return tuple(other.new_empty(0, dtype=torch.float32) if x is None else x for x in made)


@scalars.register_fake
def _(g, beta, A_log, bias, kind, number, factor):
    other = beta if g is None else g
    return tuple(other.new_empty((0,) if x is None else x.shape, dtype=torch.float32) for x in (g, beta))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    *arrays, ctx.kind, ctx.number, ctx.factor = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays)


def _backward(ctx: Any, ddecay: Tensor | None, dstrength: Tensor | None) -> tuple[Any, ...]:
    arrays = ctx.saved_tensors
    if ddecay is None and dstrength is None:
        return (None,) * 7
    ddecay, dstrength = (
        None if x is None else torch.zeros(x.shape, dtype=torch.float32, device=x.device) if d is None else d
        for d, x in zip((ddecay, dstrength), arrays, strict=False)
    )
    grads = iter(_backward_call(ddecay, dstrength, *arrays, ctx.kind, ctx.number, ctx.factor))
    return (*(None if x is None else next(grads) for x in arrays), None, None, None)


_backward_call = register(scalars_backward)
_call = register(scalars, _setup_context, _backward, computed)


def with_scalars_mapped(arrays: dict[str, Tensor | None], maps: Maps) -> tuple[dict[str, Tensor | None], Maps]:
    """A call's arrays with those mapped that have one number a token and head, and the maps that are left.

    Args:
        arrays: Those of a call by name.
        maps: Its maps. A gate of key channels is left to the kernels that read it.
    """
    g, beta = arrays.get("g"), arrays.get("beta")
    scalar = maps.gate.kind != NONE.value and g.dim() == 3
    if not scalar and maps.factor == 0:
        return arrays, maps
    gate = maps.gate if scalar else NO_MAPS.gate
    decay, strength = _call(g if scalar else None, beta if maps.factor else None, *gate, maps.factor)
    made = (dict(g=decay) if scalar else {}) | (dict(beta=strength) if maps.factor else {})
    return arrays | made, Maps(NO_MAPS.gate if scalar else maps.gate, 0.0, maps.unit)
