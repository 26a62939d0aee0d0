# pyright: basic
"""Layers with fewer heads of one kind than of another: queries that share keys, values that share them."""

from __future__ import annotations

from typing import Any

from .mixer import Mixer, groups, width

__all__ = ["SharedByQueries", "SharedByValues"]


class SharedByQueries(Mixer):
    """A layer whose ``num_kv_heads`` heads of keys and values are each shared by a group of ``num_heads`` queries."""

    q_proj: Any
    k_proj: Any
    v_proj: Any
    use_output_gate: bool
    g_norm: Any
    g_norm_swish_gate: Any
    g_proj: Any

    def project(
        self,
        make: Any,
        expand_k: float,
        expand_v: float,
        num_heads: int,
        num_kv_heads: int | None,
        convolution: tuple[int, bool] | None = None,
        even: bool = False,
    ) -> tuple[int, int]:
        """Make projections, and convolutions of that width and bias after them.

        Returns:
            The widths of all keys and of all values that are projected.
        """
        owner = type(self).__name__
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        group = groups(owner, "num_kv_heads", self.num_kv_heads, "num_heads", num_heads)
        keys = width(owner, "expand_k", self.hidden_size, expand_k, (2 if even else 1) * num_heads)
        values = width(owner, "expand_v", self.hidden_size, expand_v, num_heads)
        self.head_k_dim, self.head_v_dim = keys // num_heads, values // num_heads
        self.use_short_conv = convolution is not None
        make_projections(self, make, (keys, keys // group, values // group), convolution)
        self.o_proj = make.linear(values, self.hidden_size)
        return keys // group, values

    def make_norm(self, make: Any, values: int, gated: bool, eps: float, affine: bool) -> None:
        """Make the norm of each head, with a gate or without."""
        self.use_output_gate = gated
        if gated:
            self.g_proj = make.linear(self.hidden_size, values)
            self.g_norm_swish_gate = make.part("GatedRMSNorm", self.head_v_dim, eps, affine=affine)
        else:
            self.g_norm = make.part("RMSNorm", self.head_v_dim, eps, affine)

    def output(self, o: Any, x: Any) -> Any:
        """``[B, T, D]`` of the heads ``o [B, T, H, V]``, normed and gated."""
        if self.use_output_gate:
            o = self.g_norm_swish_gate(o, self.heads(self.g_proj(x), self.head_v_dim))
        else:
            o = self.g_norm(o)
        return self.o_proj(self.flat(o))


class SharedByValues(Mixer):
    """A layer whose ``num_heads`` heads of queries and keys are each shared by a group of ``num_v_heads`` values."""

    def project(
        self,
        make: Any,
        head_dim: int,
        expand_v: float,
        num_heads: int,
        num_v_heads: int | None,
        convolution: tuple[int, bool] | None,
    ) -> int:
        """Make projections, and convolutions of that width and bias after them.

        Returns:
            The width of all values.
        """
        owner = type(self).__name__
        self.num_heads, self.num_v_heads = num_heads, num_v_heads or num_heads
        groups(owner, "num_heads", num_heads, "num_v_heads", self.num_v_heads)
        self.head_k_dim, self.head_v_dim = head_dim, width(owner, "expand_v", head_dim, expand_v, 1)
        keys, values = num_heads * head_dim, self.num_v_heads * self.head_v_dim
        self.use_short_conv = convolution is not None
        make_projections(self, make, (keys, keys, values), convolution)
        self.b_proj = make.linear(self.hidden_size, self.num_v_heads)
        self.o_proj = make.linear(values, self.hidden_size)
        return values

    def split(self, x: Any, span: Any) -> tuple[Any, Any, Any]:
        """Queries, keys ``[B, T, H, K]`` and values ``[B, T, HV, V]``."""
        q, k, v = self.projected(x, span, "qkv", activation="silu")
        return self.heads(q, self.head_k_dim), self.heads(k, self.head_k_dim), self.heads(v, self.head_v_dim)


def make_projections(
    layer: Any,
    make: Any,
    widths: tuple[int, ...],
    convolution: tuple[int, bool] | None,
    names: str = "qkv",
    activations: tuple[str | None, ...] = ("silu", "silu", "silu"),
) -> None:
    """Give a layer its projections, and the convolutions after them where it has those."""
    for name, size, activation in zip(names, widths, activations, strict=True):
        setattr(layer, f"{name}_proj", make.linear(layer.hidden_size, size))
        if convolution is not None:
            size_and_bias = convolution
            setattr(layer, f"{name}_conv1d", make.part("ShortConvolution", size, *size_and_bias, activation))
