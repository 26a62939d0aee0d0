"""The norm's host side, and its custom op ``linattn::triton_gated_rms_norm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn_backends import companions
from linattn_backends.torch.transforms import asks_for_gradients, register

from ..host.rows import Rows
from ..host.tiles import programs
from ..runtime.device import properties
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .config import variant, walks_for

__all__ = ["gated_rms_norm"]


def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, G: int, silu: bool, before: bool) -> Tensor:
    """Outputs."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, D, stage = Rows.of("gated_rms_norm", x, z), int(x.shape[-1]), variant(int(G), x.element_size(), False)["outputs"]
    rows.run(
        stage, programs(rows.M, 1, stage.tile.R, 1) * rows.H * (D // G),
        *rows.arrays, weight, y, rows.M, rows.H, D, G, eps, *rows.strides, weight.stride(0),
        BG=stage.tile.BG, R=stage.tile.R, SILU=silu, BEFORE=before,
    )  # fmt: skip
    return y


def backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, G: int, silu: bool, before: bool
) -> list[Tensor]:  # fmt: skip
    """Gradients of ``x``, ``z`` and ``weight``."""
    dx, dz, dweight = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for a in (x, z, weight))
    rows, D, stages = Rows.of("gated_rms_norm", x, z, dy), int(x.shape[-1]), variant(int(G), x.element_size(), True)
    stage, tile, groups = stages["gradients"], stages["gradients"].tile, D // G
    blocks = programs(rows.M, 1, tile.R, 1) * rows.H
    walks = walks_for(int(blocks), groups, tile.warps, properties(x.device).num_sms)
    parts = torch.empty((walks, D), dtype=torch.float32, device=x.device)
    x, z, dy = rows.arrays
    rows.run(
        stage, walks * groups,
        x, z, weight, dy, dx, dz, parts, rows.M, rows.H, D, G, eps, *rows.strides, weight.stride(0),
        BG=tile.BG, R=tile.R, SILU=silu, BEFORE=before,
    )  # fmt: skip
    BP, BD = stages["sums"].tile[:2]
    rows.run(stages["sums"], programs(1, D, 1, BD), parts, dweight, None, None, walks, D, ROWS=1, J=1, BP=BP, BD=BD)
    return [dx, dz, dweight]


@torch.library.custom_op("linattn::triton_gated_rms_norm_backward", mutates_args=())
@recorded
@precompiled()
def norm_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, silu: bool, before: bool
) -> list[Tensor]:  # fmt: skip
    """Gradients of the float arrays, in the order of the arguments."""
    return backward(dy, x, z, weight, eps, group_size, silu, before)


@norm_backward.register_fake
def _(dy, x, z, weight, eps, group_size, silu, before):
    return [a.new_empty(a.shape) for a in (x, z, weight)]


@recorded
@precompiled()
def computed(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, silu: bool, before: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    """What :func:`norm` returns, and nothing more."""
    return (forward(x, z, weight, eps, group_size, silu, before),)


@torch.library.custom_op("linattn::triton_gated_rms_norm", mutates_args=())
def norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, silu: bool, before: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs; and nothing, since a node has several results."""
    return *computed(x, z, weight, eps, group_size, silu, before), x.new_empty(0)


@norm.register_fake
def _(x, z, weight, eps, group_size, silu, before):
    return x.new_empty(x.shape), x.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, z, weight, *ctx.options = inputs
    ctx.save_for_backward(x, z, weight)


def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    return (*_backward_call(dy, *ctx.saved_tensors, *ctx.options), *(None for _ in ctx.options))


_backward_call = register(norm_backward)
_call = register(norm, _setup_context, _backward, computed)


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Tensor:
    """``norm(x) · weight · act(z)``, or ``norm(x · act(z)) · weight``, ``norm`` of each group of columns by itself.

    Args:
        x: ``[…, D]``, any strides; float16, bfloat16 or float32, like the result.
        z: The gate before its activation, of the shape of ``x``, any strides and float dtype.
        weight: ``[D]``.
        eps: Added to the mean square.
        activation: ``"silu"`` or ``"sigmoid"``.
        norm_before_gate: Whether ``x`` is normed, or what the gate lets through of it.
        group_size: Columns of a group, a divisor of ``D``; all of them if ``None``.

    Of PyTorch's operations its compiler makes one kernel as well, which costs the host less than a node of ours: where no
    gradient is asked for, a graph gets these.
    """
    size = group_size or x.shape[-1]
    if torch.compiler.is_compiling() and not asks_for_gradients((x, z, weight)):
        given = dict(activation=activation, eps=eps, norm_before_gate=norm_before_gate, group_size=size)
        return companions.gated_rms_norm(x, z, weight, **given)
    return _call(x, z, weight, float(eps), size, activation == "silu", norm_before_gate)[0]
