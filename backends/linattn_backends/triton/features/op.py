"""The map's host side, and its custom op ``linattn::triton_hedgehog``."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from linattn.feature_maps import FeatureMap, Hedgehog
from torch import Tensor

from linattn_backends.torch.transforms import register

from ..host.rows import Rows
from ..host.tiles import programs
from ..host.variant import precision_of
from ..runtime.device import properties
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .config import WIDEST, variant, walks_for

__all__ = ["features"]

FAMILY = "hedgehog"


def products(x: Tensor, weight: Tensor) -> dict[str, Any]:
    """What products take rows and weights in, and how."""
    half = x.dtype == weight.dtype == torch.bfloat16
    return dict(DT=tl.bfloat16 if half else tl.float32, PREC="tf32" if half else precision_of(torch.float32, weight.shape[1]))


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, softmax: bool, negation: bool) -> Tensor:
    """Features."""
    rows, (H, K, D), stage = (
        Rows.of(FAMILY, x, heads=True),
        weight.shape,
        variant(*weight.shape[1:], softmax, False)["features"],
    )
    out, tile = torch.empty((*x.shape[:-1], (2 if negation else 1) * D), dtype=x.dtype, device=x.device), stage.tile
    rows.run(
        stage, programs(rows.M, 1, tile.R, 1) * H,
        *rows.arrays, weight, bias, out, rows.M, H, *rows.strides,
        K=K, D=D, R=tile.R, BK=tile.BK, BD=tile.BD, SOFTMAX=softmax, NEGATION=negation, **products(x, weight),
    )  # fmt: skip
    return out


def backward(dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, softmax: bool, negation: bool) -> list[Tensor]:
    """Gradients of ``x``, ``weight`` and ``bias``."""
    given = [a for a in (x, weight, bias) if a is not None]
    dx, *parameters = (torch.empty(a.shape, dtype=a.dtype, device=a.device) for a in given)
    rows, (H, K, D), stages = Rows.of(FAMILY, x, dout, heads=True), weight.shape, variant(*weight.shape[1:], softmax, True)
    stage, tile = stages["features"], stages["features"].tile
    walks = walks_for(int(programs(rows.M, 1, tile.R, 1)), H, properties(x.device).num_sms)
    parts = [torch.empty((walks, a.numel()), dtype=torch.float32, device=x.device) for a in parameters]
    x, dout = rows.arrays
    rows.run(
        stage, walks * H,
        x, weight, bias, dout, dx, *(parts if bias is not None else (*parts, None)), rows.M, H, *rows.strides,
        K=K, D=D, R=tile.R, BK=tile.BK, BD=tile.BD, SOFTMAX=softmax, NEGATION=negation, **products(x, weight),
    )  # fmt: skip
    sums = stages["sums"]
    for part, gradient in zip(parts, parameters, strict=True):
        width, (BP, BD) = gradient.numel(), sums.tile[:2]
        rows.run(sums, programs(1, width, 1, BD), part, gradient, None, None, walks, width, ROWS=1, J=1, BP=BP, BD=BD)
    return [dx, *parameters]


@torch.library.custom_op("linattn::triton_hedgehog_backward", mutates_args=())
@recorded
@precompiled()
def map_backward(dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, softmax: bool, negation: bool) -> list[Tensor]:
    """Gradients of the arrays that are there, in the order of the arguments."""
    return backward(dout, x, weight, bias, softmax, negation)


@map_backward.register_fake
def _(dout, x, weight, bias, softmax, negation):
    return [a.new_empty(a.shape) for a in (x, weight, bias) if a is not None]


@recorded
@precompiled()
def computed(x: Tensor, weight: Tensor, bias: Tensor | None, softmax: bool, negation: bool) -> tuple[Tensor, ...]:
    """What :func:`mapped` returns, and nothing more."""
    return (forward(x, weight, bias, softmax, negation),)


@torch.library.custom_op("linattn::triton_hedgehog", mutates_args=())
def mapped(x: Tensor, weight: Tensor, bias: Tensor | None, softmax: bool, negation: bool) -> tuple[Tensor, Tensor]:
    """Features; and nothing, since a node has several results."""
    return *computed(x, weight, bias, softmax, negation), x.new_empty(0)


@mapped.register_fake
def _(x, weight, bias, softmax, negation):
    return x.new_empty((*x.shape[:-1], (2 if negation else 1) * weight.shape[-1])), x.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arrays, ctx.softmax, ctx.negation = inputs
    ctx.save_for_backward(*arrays)


def _backward(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
    dx, dweight, *dbias = _backward_call(dout, *ctx.saved_tensors, ctx.softmax, ctx.negation)
    return dx, dweight, dbias[0] if dbias else None, None, None


_backward_call = register(map_backward)
_call = register(mapped, _setup_context, _backward, computed)


def features(phi: FeatureMap, x: Tensor) -> Tensor | None:
    """``phi(x)`` of ``x [..., T, H, K]`` for Hedgehog's map; ``None`` for what is left to the map itself.

    That is any other map, heads or projections wider than 128, float64, whatever a transform of PyTorch watches, and what
    the map refuses.
    """
    if type(phi) is not Hedgehog or torch._C._are_functorch_transforms_active() or not fits(phi, x):
        return None
    bias = None if phi.b is None else phi.b.contiguous()
    return _call(x, phi.W.contiguous(), bias, phi.softmax, phi.negation)[0]


def fits(phi: Hedgehog, x: Tensor) -> bool:
    """Whether the kernels take the map's arrays."""
    arrays = (x, phi.W) if phi.b is None else (x, phi.W, phi.b)
    if any(not isinstance(a, Tensor) or a.device != x.device or a.dtype not in FLOATS for a in arrays):
        return False
    shape = tuple(phi.W.shape)
    whole = x.dim() >= 3 and len(shape) == 3 and shape[:2] == tuple(x.shape[-2:]) and x.numel() > 0
    return whole and 0 < shape[2] <= WIDEST >= shape[1] and (phi.b is None or tuple(phi.b.shape) == (shape[0], shape[2]))


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
