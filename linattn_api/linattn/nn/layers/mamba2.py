# pyright: basic
"""Mamba-2 (Dao & Gu 2024)."""

from __future__ import annotations

from typing import Any

from ...errors import OptionError
from ..initial import decay_rates, inverse_softplus_steps
from ..mixer import Mixer, groups
from ..span import Span


class Mamba2(Mixer):
    """Mamba-2: ``S = e^{ΔA} S⁻ + Δ Bᵀx``, ``o = C S + D∘x``, ``Δ = softplus(x W_Δ + b)``, ``A = −e^{A_log}``
    (Dao & Gu 2024, §7 and figure 6).

    One projection gives gate ``z``, ``x``, ``B``, ``C`` and ``Δ``; ``x``, ``B`` and ``C`` go through one short convolution; the
    output is normed together with the gate and projected. Rates ``−A`` are drawn uniformly from 1 to 16, steps
    ``softplus(b)`` log-uniformly from 0.001 to 0.1, ``D`` is one, matrices are drawn uniformly from ``±1/√in``.

    Args:
        hidden_size: ``D``. Default 2048.
        head_dim: Width of a head of ``x``. Default 64.
        state_size: Width of ``B`` and ``C``. Default 128.
        expand: Width of ``x`` over that of the layer. Default 2.
        n_groups: Heads of ``B`` and ``C``, each shared by as many heads of ``x``. Default 1.
        conv_kernel: Width ``W`` of the convolution. Default 4.
        use_conv_bias: Whether it has a bias. Default True.
        A_init_range: Least and greatest ``−A`` at first. Default ``(1, 16)``.
        D_has_hdim: Whether ``D`` is a number a channel; else one a head. Default False.
        rmsnorm: Whether the output is normed; else it is gated alone. Default True.
        norm_before_gate: Whether the gate follows the norm. Default False.
        dt_limit: The least and the greatest ``Δ``. Default ``(0, inf)``.
        use_bias: Whether the two projections have a bias. Default False.
        norm_eps: ``ε`` of the norm. Default 1e-5.
        layer_idx: Index of the layer in its model. Default 0.
    """

    operator, paper = "ssd", "Dao & Gu 2024, §7"

    def __init__(
        self,
        hidden_size: int = 2048,
        *,
        head_dim: int = 64,
        state_size: int = 128,
        expand: float = 2,
        n_groups: int = 1,
        conv_kernel: int = 4,
        use_conv_bias: bool = True,
        A_init_range: tuple[float, float] = (1.0, 16.0),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        use_bias: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        **framework: Any,
    ) -> None:
        make = self.start(hidden_size, layer_idx, framework)
        inner = int(expand * hidden_size)
        if inner % head_dim:
            raise OptionError(f"Mamba2: expand · hidden_size must be a multiple of head_dim = {head_dim}, got {inner}")
        self.head_dim, self.state_size, self.intermediate_size = head_dim, state_size, inner
        self.num_heads, self.n_groups = inner // head_dim, n_groups
        groups("Mamba2", "n_groups", n_groups, "num_heads = expand · hidden_size / head_dim", self.num_heads)
        self.D_has_hdim, self.rmsnorm = D_has_hdim, rmsnorm
        self.dt_limit = (float(dt_limit[0]), float(dt_limit[1]))
        convolved = inner + 2 * n_groups * state_size

        self.conv1d = make.part("ShortConvolution", convolved, conv_kernel, use_conv_bias)
        self.in_proj = make.linear(hidden_size, inner + convolved + self.num_heads, use_bias)
        self.dt_bias = make.parameter(inverse_softplus_steps(make, self.num_heads), wide=True)
        self.A_log = make.parameter(decay_rates(make, self.num_heads, *A_init_range), wide=True)
        if rmsnorm:
            group = inner // n_groups
            self.norm = make.part("GatedRMSNorm", inner, norm_eps, "silu", norm_before_gate, group)
        self.D = make.parameter(make.full((inner if D_has_hdim else self.num_heads,), 1.0), wide=True)
        self.out_proj = make.linear(inner, hidden_size, use_bias)

    def mix(self, x: Any, span: Span) -> Any:
        inner, states = self.intermediate_size, self.n_groups * self.state_size
        z, convolved, dt = span.xp.split(self.in_proj(x), (inner, inner + 2 * states, self.num_heads))
        u, B, C = span.xp.split(self.conv1d(convolved, span), (inner, states, states))
        D = self.value(self.D)
        o = span.attend(
            "ssd",
            self.heads(u, self.head_dim),
            dt,
            -span.xp.exp(span.xp.astype(self.value(self.A_log), span.xp.accumulation(self.value(self.A_log)))),
            self.heads(B, self.state_size),
            self.heads(C, self.state_size),
            D=D.reshape(-1, self.head_dim) if self.D_has_hdim else D,
            z=None if self.rmsnorm else self.heads(z, self.head_dim),
            dt_bias=self.value(self.dt_bias),
            dt_softplus=True,
            dt_limit=self.dt_limit,
        )
        o = self.flat(o)
        return self.out_proj(self.norm(o, z) if self.rmsnorm else o)
