"""The gated norm on a CPU: ``norm(x) · weight · act(z)``, or ``norm(x · act(z)) · weight``, by blocks of rows.

With ``n = h r``, ``r = (mean h² + eps)^{-1/2}`` over a group: ``dh = r (dn − n · mean(dn ∘ n))``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import companions
from . import blocks
from .library import accumulation, plain

__all__ = ["gated_rms_norm"]


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    *,
    activation: str = "silu",
    eps: float = 1e-5,
    norm_before_gate: bool = True,
    group_size: int | None = None,
) -> Tensor:
    """The gated norm as the specification has it."""
    norm = GatedNorm(activation, eps, norm_before_gate, group_size or x.shape[-1])
    if x.numel() == 0 or not blocks.serves(x, z, weight):
        return norm.operations(x, z, weight)
    D = x.shape[-1]
    with plain(x):
        return blocks.run(norm, x.reshape(-1, D), z.reshape(-1, D), weight).view(x.shape)


@dataclass(frozen=True)
class GatedNorm:
    """A pass over ``x`` and ``z``, both ``[R, D]``, with ``weight [D]``."""

    activation: str
    eps: float
    norm_before_gate: bool
    group_size: int

    def forward(self, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        dtype = accumulation(x.dtype)
        weight, y = weight.to(dtype), x.new_empty(x.shape)
        for rows in blocks.spans(*x.shape):
            gate = self._gate(z[rows].to(dtype))
            if self.norm_before_gate:
                n, _ = self._unit(x[rows].to(dtype))
                y[rows] = n.mul_(weight).mul_(gate)
            else:
                n, _ = self._unit(gate.mul_(x[rows]))
                y[rows] = n.mul_(weight)
        return y

    def backward(self, dy: Tensor, x: Tensor, z: Tensor, weight: Tensor) -> blocks.Arrays:
        dtype = accumulation(x.dtype)
        scale, dweight = weight.to(dtype), weight.new_zeros(weight.shape, dtype=dtype)
        dx, dz = x.new_empty(x.shape), z.new_empty(z.shape)
        for rows in blocks.spans(*x.shape):
            h, logits, d = x[rows].to(dtype), z[rows].to(dtype), dy[rows].to(dtype)
            gate = self._gate(logits)
            if self.norm_before_gate:
                n, r = self._unit(h)
                dweight += (d * n * gate).sum(0)
                dx[rows] = self._of_unit(d * scale * gate, n, r)
                dgate = d * scale * n
            else:
                n, r = self._unit(h * gate)
                dweight += (d * n).sum(0)
                both = self._of_unit(d * scale, n, r)
                dx[rows] = both * gate
                dgate = both * h
            dz[rows] = self._of_gate(dgate, logits, gate)
        return dx, dz, dweight.to(weight.dtype)

    def operations(self, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        given = dict(activation=self.activation, eps=self.eps, group_size=self.group_size)
        return companions.gated_rms_norm(x, z, weight, norm_before_gate=self.norm_before_gate, **given)

    def _gate(self, z: Tensor) -> Tensor:
        """``act(z)``."""
        return torch.nn.functional.silu(z) if self.activation == "silu" else torch.sigmoid(z)

    def _of_gate(self, d: Tensor, z: Tensor, gate: Tensor) -> Tensor:
        """The gradient of ``z``, of the gate's ``d``."""
        return torch.ops.aten.silu_backward(d, z) if self.activation == "silu" else torch.ops.aten.sigmoid_backward(d, gate)

    def _unit(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """``n``, and ``r`` of each group."""
        groups = h.unflatten(1, (-1, self.group_size))
        r = groups.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (groups * r).flatten(1), r

    def _of_unit(self, dn: Tensor, n: Tensor, r: Tensor) -> Tensor:
        """``dh``."""
        dn, n = (part.unflatten(1, (-1, self.group_size)) for part in (dn, n))
        return ((dn - n * (dn * n).mean(-1, keepdim=True)) * r).flatten(1)
