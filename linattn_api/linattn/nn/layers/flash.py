# pyright: basic
"""The gated attention unit and FLASH (Hua et al. 2022)."""

from __future__ import annotations

from typing import Any

from ...errors import ShapeError
from ...frameworks import framework_of
from ..mixer import Mixer
from ..packing import counted
from ..span import Span


class FLASH(Mixer):
    """FLASH: a gated attention unit with squared ReLU attention inside chunks and linear attention over whole chunks before
    (Hua et al. 2022, §§3-4, eqs. 7 and 8).

    Attention and MLP in one: ``u = silu(x W_u)`` and ``v = silu(x W_v)`` are wide, one narrow ``z = silu(x W_z)`` gives queries
    and keys by scales and offsets, ``y = (u ∘ A v) W_o``. With ``6 D² + 128 D`` parameters, two such layers, without MLPs,
    take the place of a Transformer block. Scales are drawn normally around one with deviation 0.02, offsets and the bias of
    distances are zero, matrices are drawn uniformly from ``±1/√in``.

    Args:
        hidden_size: ``D``. Default 1024.
        expand: Width of ``u`` and ``v`` over ``D``. Default 2.
        key_dim: Width ``s`` of queries and keys, even. Default 128.
        chunk_size: ``C``. Default 256.
        causal: Whether a token sees those before it only; else there is no cache. Default True.
        quadratic: Whether tokens attend inside their chunk. Default True.
        linear: Whether they attend to the chunks before. Default True.
        lin_scale: Of the sum over those. Default ``1 / C``. Where it is not causal the sum is one over all tokens: ``1 / T``,
            of the longest text, keeps it from growing with the length.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "mixed_attn", "Hua et al. 2022, eqs. 7-8"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        expand: float = 2.0,
        key_dim: int = 128,
        chunk_size: int = 256,
        causal: bool = True,
        quadratic: bool = True,
        linear: bool = True,
        lin_scale: float | None = None,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        self.chunk_size, self.causal, self.linear = chunk_size, causal, linear
        self.quad_scale = 1 / chunk_size if quadratic else 0.0
        self.lin_scale = (1 / chunk_size if lin_scale is None else lin_scale) if linear else 0.0
        inner, roles = int(expand * hidden_size), 4 if linear else 2
        self.u_proj = make.linear(hidden_size, inner)
        self.v_proj = make.linear(hidden_size, inner)
        self.z_proj = make.linear(hidden_size, key_dim)
        self.gamma = make.parameter(make.normal((roles, key_dim), 0.02) + 1)
        self.beta = make.parameter(make.full((roles, key_dim), 0.0))
        self.bias = make.parameter(make.full((2 * chunk_size - 1,), 0.0)) if quadratic else None
        self.o_proj = make.linear(inner, hidden_size)

    def mix(self, x: Any, span: Span) -> Any:
        silu = self.functions.silu
        u, v, z = silu(self.u_proj(x)), silu(self.v_proj(x)), silu(self.z_proj(x))
        roles = z[:, :, None] * self.value(self.gamma) + self.value(self.beta)
        roles = span.xp.astype(self.rotated(roles, span.positions()), span.xp.dtype(v))
        q_quad, k_quad, *lin = (roles[:, :, i : i + 1] for i in range(roles.shape[2]))
        q_lin, k_lin = lin or (q_quad, k_quad)  # without linear attention they have no weight
        options = {"quad_scale": self.quad_scale, "lin_scale": self.lin_scale, "chunk_size": self.chunk_size}
        options |= {} if self.causal else self.whole(span)
        o = span.attend("mixed_attn", q_quad, k_quad, q_lin, k_lin, v[:, :, None], bias=self.distances(), **options)
        return self.o_proj(u * o[:, :, 0])

    def distances(self) -> Any:
        """The bias of each pair of places in a chunk, ``[1, C, C]``."""
        if self.bias is None:
            return None
        C, bias = self.chunk_size, self.value(self.bias)
        places = counted(framework_of(bias), bias, C)
        return bias[places[:, None] - places + C - 1][None]


class GAU(FLASH):
    """A gated attention unit with squared ReLU attention over the whole sequence, quadratic in its length (FLASH-Quad, Hua et
    al. 2022, §3 and eq. 4).

    One chunk holds the sequence; longer ones are refused.

    Args:
        hidden_size: ``D``. Default 1024.
        expand: Width of ``u`` and ``v`` over ``D``. Default 2.
        key_dim: Width ``s`` of queries and keys, even. Default 128.
        max_length: The longest sequence. Default 512.
        causal: Whether a token sees those before it only. Default True.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "mixed_attn", "Hua et al. 2022, eq. 4"

    def __init__(
        self,
        hidden_size: int = 1024,
        *,
        expand: float = 2.0,
        key_dim: int = 128,
        max_length: int = 512,
        causal: bool = True,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        options = {"expand": expand, "key_dim": key_dim, "chunk_size": max_length, "causal": causal, "linear": False}
        super().__init__(hidden_size, **options, layer_idx=layer_idx, **framework)
        self.max_length = max_length

    def mix(self, x: Any, span: Span) -> Any:
        self.check_length(span)
        return super().mix(x, span)

    def check_length(self, span: Span) -> None:
        """Refuse tokens that the one chunk has no room for; lengths are looked at in host memory alone."""
        lengths = None if span.xp.tracing() else span.xp.offsets(span.lengths())
        if lengths is not None and max(lengths, default=0) > self.max_length:
            raise ShapeError(
                f"this GAU is for sequences up to max_length={self.max_length}, got {max(lengths)} tokens: "
                "make it with a larger max_length, or take FLASH"
            )
