# pyright: basic
"""What layers are made of: linear maps, short convolutions, norms, projections of low rank; written once for all frameworks.

A part says what its parameters are with the tools that ``begin`` gives it, and computes with what every framework has.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np

import linattn

from ..errors import OptionError
from ..feature_maps.base import FeatureMap, bounded_softmax, learned
from ..frameworks import framework_of
from .definition import Definition, Functional
from .span import Span

__all__ = [
    "Embedding",
    "GatedRMSNorm",
    "GroupNorm",
    "HedgehogMap",
    "LearnedMap",
    "LerpLinear",
    "Linear",
    "LowRank",
    "ProductMap",
    "RMSNorm",
    "ShortConvolution",
    "SwiGLU",
    "T2rMap",
]


class Linear(Definition):
    """``x Wᵀ + b`` with ``weight [out, in]``, drawn uniformly from ``±1/√in`` as PyTorch does."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, **framework: Any) -> None:
        make = self.begin(**framework)
        bound = 1 / math.sqrt(inputs)
        self.weight = make.parameter(make.uniform((outputs, inputs), -bound, bound))
        self.bias = make.parameter(make.uniform((outputs,), -bound, bound)) if bias else None

    def forward(self, x: Any) -> Any:
        weight, bias = self.value(self.weight), self.value(self.bias)
        y = x @ weight.T.astype(x.dtype)  # PyTorch and MLX have their own
        return y if bias is None else y + bias.astype(x.dtype)


class ShortConvolution(Definition):
    """Causal depthwise convolution: ``weight [D, 1, W]``, as ``Conv1d`` names and draws it (uniformly from ``±1/√W``)."""

    def __init__(self, width: int, size: int, bias: bool = False, activation: str | None = "silu", **framework: Any) -> None:
        make = self.begin(**framework)
        bound = 1 / math.sqrt(size)
        self.activation = activation
        self.weight = make.parameter(make.uniform((width, 1, size), -bound, bound))
        self.bias = make.parameter(make.uniform((width,), -bound, bound)) if bias else None

    def forward(self, x: Any, span: Span) -> Any:
        """``[B, T, D]`` of ``x [B, T, D]``."""
        return span.convolve(x, self.value(self.weight)[:, 0], self.value(self.bias), self.activation)


class RMSNorm(Definition):
    """``x · (mean x² + ε)^{-1/2} · weight`` over the last axis (Zhang & Sennrich 2019), in at least float32."""

    def __init__(self, width: int, eps: float = 1e-5, affine: bool = True, **framework: Any) -> None:
        make = self.begin(**framework)
        self.eps = eps
        self.weight = make.parameter(make.full((width,), 1.0)) if affine else None

    def forward(self, x: Any) -> Any:
        xp = framework_of(x)
        wide = xp.astype(x, xp.accumulation(x))
        wide = wide * ((wide * wide).mean(-1)[..., None] + self.eps) ** -0.5
        weight = self.value(self.weight)
        return xp.astype(wide if weight is None else wide * xp.astype(weight, xp.dtype(wide)), xp.dtype(x))


class GatedRMSNorm(Definition):
    """``norm(x) · weight · act(z)``, or ``norm(x · act(z)) · weight``: :func:`linattn.gated_rms_norm` with its weight."""

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        activation: str = "silu",
        norm_before_gate: bool = True,
        group_size: int | None = None,
        affine: bool = True,
        **framework: Any,
    ) -> None:
        make = self.begin(**framework)
        self.width, self.eps, self.activation = width, eps, activation
        self.norm_before_gate, self.group_size = norm_before_gate, group_size
        self.weight = make.parameter(make.full((width,), 1.0)) if affine else None

    def forward(self, x: Any, z: Any) -> Any:
        """``[…, D]`` of ``x`` and ``z``, both ``[…, D]``."""
        weight = self.value(self.weight)
        weight = framework_of(x).full((self.width,), 1.0, like=x) if weight is None else weight
        options = {"eps": self.eps, "activation": self.activation, "norm_before_gate": self.norm_before_gate}
        return self.run(linattn.gated_rms_norm, (x, z, weight), {**options, "group_size": self.group_size})


class GroupNorm(Definition):
    """Layer norm of each head by itself, with ``weight`` and ``bias [H·V]``."""

    def __init__(self, heads: int, width: int, eps: float, affine: bool = True, **framework: Any) -> None:
        make = self.begin(**framework)
        self.num_groups, self.eps = heads, eps
        self.weight = make.parameter(make.full((width,), 1.0)) if affine else None
        self.bias = make.parameter(make.full((width,), 0.0)) if affine else None

    def forward(self, x: Any) -> Any:
        """``[B, T, H·V]`` of ``x [B, T, H, V]``."""
        return self.functions.group_norm(x, self.value(self.weight), self.value(self.bias), self.eps)


class LowRank(Definition):
    """``act(x W₁) W₂ + b``: RWKV's projections of low rank. ``W₁`` starts at zero, ``W₂`` orthogonal, ten times smaller."""

    def __init__(
        self, inputs: int, outputs: int, rank: int, bias: bool = True, activation: str | None = "tanh", **framework: Any
    ) -> None:
        make = self.begin(**framework)
        self.activation = activation
        first, last = make.linear(inputs, rank), make.linear(rank, outputs, bias)
        make.assign(first.weight, make.full((rank, inputs), 0.0))
        gain = math.sqrt(rank / outputs) if rank > outputs else 1.0
        make.assign(last.weight, make.orthogonal((outputs, rank), 0.1 * gain))
        if bias:
            make.assign(last.bias, make.full((outputs,), 0.0))
        self.lora = make.chain({"0": first, "2": last})

    def forward(self, x: Any) -> Any:
        y = self.lora["0"](x)
        return self.lora["2"](y if self.activation is None else getattr(self.functions, self.activation)(y))


class LerpLinear(Definition):
    """A linear map of a token mixed with the one before: ``(x + δ ∘ μ) W``, ``δ = x⁻ − x`` (RWKV-6, Peng et al. 2024, §3).

    Args:
        inputs: Width of ``x``.
        outputs: Width of the result.
        rank: Of the map; ``None`` for a full one.
        learned: Whether ``μ`` is a parameter, and the same for every token; else it is given.
    """

    def __init__(self, inputs: int, outputs: int, rank: int | None = None, learned: bool = False, **framework: Any) -> None:
        make = self.begin(**framework)
        self.linear = make.linear(inputs, outputs) if rank is None else make.part("LowRank", inputs, outputs, rank)
        self.mu = make.parameter(make.full((inputs,), 0.0)) if learned else None

    def forward(self, x: Any, delta: Any, mu: Any = None) -> Any:
        """``[B, T, out]`` of tokens and their differences ``[B, T, in]``."""
        return self.linear(self.functions.multiply_add(x, delta, self.value(self.mu) if mu is None else mu))


class SwiGLU(Definition):
    """``(silu(x G) ∘ x U) W`` (Shazeer 2020)."""

    def __init__(self, width: int, hidden: int, **framework: Any) -> None:
        make = self.begin(**framework)
        self.gate_proj = make.linear(width, hidden)
        self.up_proj = make.linear(width, hidden)
        self.down_proj = make.linear(hidden, width)

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.functions.silu(self.gate_proj(x)) * self.up_proj(x))


class HedgehogMap(Definition):
    """Hedgehog's map with a matrix that all heads share: ``softmax([2y, −2y])``, ``y = x W + b``, ``W`` the identity at first
    (Zhang et al. 2024, eq. 3); no feature is below ``e^−35``."""

    def __init__(self, width: int, **framework: Any) -> None:
        make = self.begin(**framework)
        self.layer = make.linear(width, width, True)
        make.assign(self.layer.weight, np.eye(width, dtype=np.float32))
        make.assign(self.layer.bias, make.full((width,), 0.0))

    def forward(self, x: Any) -> Any:
        xp, y = framework_of(x), 2 * self.layer(x)
        return bounded_softmax(xp, xp.concat([y, -y], axis=-1))


class T2rMap(Definition):
    """T2R's map with a matrix that all heads share: ``relu(x W)`` (Kasai et al. 2021, eq. 4)."""

    def __init__(self, width: int, **framework: Any) -> None:
        make = self.begin(**framework)
        self.layer = make.linear(width, width)

    def forward(self, x: Any) -> Any:
        return self.functions.relu(self.layer(x))


class LearnedMap(Definition):
    """A feature map whose parameters are those of this module, under the names that the map has for them.

    The map is made of them in each call, and so has them as they are by then: moved, loaded, traced, distributed.

    Raises:
        OptionError: A name is one that modules have for something else.
    """

    def __init__(self, phi: Any, **framework: Any) -> None:
        make = self.begin(**framework)
        arrays = learned(phi)
        taken = [name for name in arrays if hasattr(self, name) or hasattr(Functional, name)]
        if taken:
            raise OptionError(
                f"{type(phi).__name__}: a layer has its arrays as parameters, and modules have something else called "
                f"{', '.join(taken)}: give the field another name"
            )
        self._kind, self._names = type(phi), tuple(arrays)
        # As pairs: what is in a dictionary would be taken for modules.
        self._options = tuple((f.name, getattr(phi, f.name)) for f in fields(phi) if f.init and f.name not in arrays)
        for name, x in arrays.items():
            setattr(self, name, make.given(x))

    def map(self) -> FeatureMap:
        """The map with the parameters of now."""
        return self._kind(**dict(self._options), **{name: self.value(getattr(self, name)) for name in self._names})

    def forward(self, x: Any) -> Any:
        return self.map()(x)


class ProductMap(Definition):
    """The product of two affine maps, ``(x W₁ + b₁) ∘ (x W₂ + b₂)``, which all heads share."""

    def __init__(self, width: int, **framework: Any) -> None:
        make = self.begin(**framework)
        self.layer1 = make.linear(width, width, True)
        self.layer2 = make.linear(width, width, True)

    def forward(self, x: Any) -> Any:
        return self.layer1(x) * self.layer2(x)


class Embedding(Definition):
    """A row of ``weight [vocab_size, D]`` for each token, drawn normally around zero."""

    def __init__(self, tokens: int, width: int, deviation: float, **framework: Any) -> None:
        make = self.begin(**framework)
        self.weight = make.parameter(make.normal((tokens, width), deviation))

    def forward(self, ids: Any) -> Any:
        """``[B, T, D]`` of ``ids [B, T]``."""
        return self.value(self.weight)[ids]
