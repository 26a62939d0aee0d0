"""The convolution's host side, and its custom ops ``linattn::triton_short_conv`` and ``linattn::triton_decode_short_conv``.

Nothing here reads a tensor's data, so no launch waits for the device and all of them can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn_backends.torch.transforms import register

from ..host.chunks import rows_contiguous, strides
from ..host.tiles import programs
from ..host.variant import Stage, Variant
from ..runtime.device import properties
from ..runtime.launch import launch
from ..runtime.operator import in_place
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .config import token_variant, variant

__all__ = ["decode_short_conv", "short_conv"]


@dataclass(frozen=True)
class Convolution:
    """One call: its arrays, and what the kernels need to know of them.

    ``x`` is ``[B, T, D]`` with channels next to each other, ``weight`` ``[D, W]`` without gaps, ``start`` the initial states
    ``[N, D, W-1]``, or a pool of them, as they lie.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    start: Tensor | None
    cu: Tensor | None
    silu: bool
    family = "short_conv"

    @classmethod
    def of(
        cls, x: Tensor, weight: Tensor, bias: Tensor | None, start: Tensor | None, cu: Tensor | None, silu: bool
    ) -> Convolution:  # fmt: skip
        """Take the arrays of a call."""
        return cls(rows_contiguous(x), weight.contiguous(), bias, start, cu, silu)

    @property
    def v(self) -> Tensor:
        """The array on whose device kernels are launched."""
        return self.x

    @property
    def sizes(self) -> tuple[int, int, int]:
        """``T``, the number of sequences, and ``D``."""
        B, T, D = self.x.shape
        return T, B if self.cu is None else self.cu.shape[0] - 1, D

    @property
    def W(self) -> int:
        """The filter's width."""
        return self.weight.shape[1]

    @property
    def shift(self) -> int:
        """The bias's stride."""
        return 0 if self.bias is None else self.bias.stride(0)

    def flags(self, *names: str) -> dict[str, bool]:
        """Constants of these names that kernels are compiled for."""
        known = dict(SILU=self.silu, BIAS=self.bias is not None, START=self.start is not None, PACKED=self.cu is not None)
        return {name: known[name] for name in names}

    def variant(self, backward: bool) -> Variant:
        """The kernels and tiles of a pass."""
        sizes = [int(n) for n in (*self.x.shape, self.W)]  # symbols have no place in a cache
        return variant(*sizes, self.x.element_size(), properties(self.x.device).num_sms, backward)

    def run(self, stage: Stage, count: int, *args: Any, **constants: Any) -> None:
        """Launch ``count`` programs of a stage's kernel."""
        launch(stage.kernel, count, self, *args, **constants, **stage.config)


def forward(call: Convolution, final: bool) -> tuple[Tensor, Tensor | None]:
    """Outputs and, if asked for, final states."""
    x, (T, N, D), W, stages = call.x, call.sizes, call.W, call.variant(backward=False)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stage, tile = stages["outputs"], stages["outputs"].tile
    call.run(
        stage, x.shape[0] * programs(T, D, tile.piece, tile.BD),
        x, call.weight, call.bias, call.start, y, call.cu, T, N, D, tile.piece,
        *x.stride()[:2], call.shift, *strides(call.start),
        W=W, BD=tile.BD, UNROLL=tile.unroll, **call.flags("SILU", "BIAS", "START", "PACKED"),
    )  # fmt: skip
    end = torch.empty((N, D, W - 1), dtype=torch.float32, device=x.device) if final else None
    if final and W > 1:
        stage, BD = stages["final"], stages["final"].tile.BD
        call.run(
            stage, N * programs(1, D, 1, BD),
            x, call.start, end, call.cu, T, N, D, *x.stride()[:2], *strides(call.start),
            W=W, BD=BD, **call.flags("START", "PACKED"),
        )  # fmt: skip
    return y, end


def backward(call: Convolution, dy: Tensor, dend: Tensor | None) -> list[Tensor]:
    """Gradients of the arrays given, in the order ``x, weight, bias, initial_state``."""
    x, (T, N, D), W, stages = call.x, call.sizes, call.W, call.variant(backward=True)
    stage, tile = stages["gradients"], stages["gradients"].tile
    dy = rows_contiguous(dy)
    pieces = x.shape[0] * programs(T, 1, tile.piece, 1)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty((pieces, W + (call.bias is not None), D), dtype=torch.float32, device=x.device)
    given = (*x.stride()[:2], *dy.stride()[:2], call.shift, *strides(call.start), *strides(dend))
    call.run(
        stage, pieces * programs(1, D, 1, tile.BD),
        x, dy, call.weight, call.bias, call.start, dend, dx, parts, call.cu, T, N, D, tile.piece, *given,
        W=W, BD=tile.BD, UNROLL=tile.unroll, **call.flags("SILU", "BIAS", "START"), FINAL=dend is not None,
        **call.flags("PACKED"),
    )  # fmt: skip
    grads = [dx, *parameter_gradients(call, parts, stages["sums"])]
    if call.start is not None:
        dstart = torch.empty(call.start.shape, dtype=call.start.dtype, device=x.device)
        stage, BD = stages["initial"], stages["initial"].tile.BD
        call.run(
            stage, N * programs(1, D, 1, BD) * (W > 1),
            x, dy, call.weight, call.bias, call.start, dend, dstart, call.cu, T, N, D, *given,
            W=W, BD=BD, **call.flags("SILU", "BIAS"), FINAL=dend is not None, **call.flags("PACKED"),
        )  # fmt: skip
        grads.append(dstart)
    return grads


def parameter_gradients(call: Convolution, parts: Tensor, stage: Stage) -> list[Tensor]:
    """Gradients of the weight and of the bias, if there is one, from those of pieces ``[pieces, rows, D]``."""
    pieces, rows, D = parts.shape
    given = [x for x in (call.weight, call.bias) if x is not None]
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]
    dbias = None if call.bias is None else grads[1]
    BP, BD = stage.tile[:2]
    call.run(stage, rows * programs(1, D, 1, BD), parts, grads[0], dbias, None, pieces, D, ROWS=rows, J=call.W, BP=BP, BD=BD)
    return grads


@torch.library.custom_op("linattn::triton_short_conv_backward", mutates_args=())
@recorded
@precompiled()
def conv_backward(
    dy: Tensor,
    dfinal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments."""
    return backward(Convolution.of(x, weight, bias, initial_state, cu_seqlens, silu), dy, dfinal)


@conv_backward.register_fake
def _(dy, dfinal, x, weight, bias, initial_state, cu_seqlens, silu):
    return [a.new_empty(a.shape) for a in (x, weight, bias, initial_state) if a is not None]


@recorded
@precompiled()
def computed(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, silu: bool,
    final: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What :func:`conv` returns, and ``None`` for final states that are not wanted."""
    return forward(Convolution.of(x, weight, bias, initial_state, cu_seqlens, silu), final)


@torch.library.custom_op("linattn::triton_short_conv", mutates_args=())
def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    final: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs, and the final states, empty unless ``final``."""
    y, end = computed(x, weight, bias, initial_state, cu_seqlens, silu, final)
    return y, x.new_empty(0, dtype=torch.float32) if end is None else end


@conv.register_fake
def _(x, weight, bias, initial_state, cu_seqlens, silu, final):
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (N, x.shape[2], weight.shape[1] - 1) if final else (0,)
    return x.new_empty(x.shape), x.new_empty(shape, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    *arrays, ctx.silu, ctx.final = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays)


def _backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:
    *floats, cu_seqlens = ctx.saved_tensors
    dfinal = dfinal if ctx.final else None
    if dy is None and dfinal is None:
        return (None,) * 7
    dy = torch.zeros_like(floats[0]) if dy is None else dy
    grads = iter(_backward_call(dy, dfinal, *floats, cu_seqlens, ctx.silu))
    return (*(None if x is None else next(grads) for x in floats), None, None, None)


_backward_call = register(conv_backward)
_call = register(conv, _setup_context, _backward, computed)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(y, final_state)``.

    Args:
        x: Inputs ``[B, T, D]`` of any strides; float16, bfloat16 or float32, like ``y``.
        weight: Filters ``[D, W]``, the present token's tap last; ``W`` is 1 to 8.
        bias: ``[D]``.
        activation: ``None`` or ``"silu"``.
        initial_state: The ``W - 1`` inputs before the first, oldest first: ``[N, D, W-1]``, any strides; zeros if ``None``.
        output_final_state: Whether to return the last ``W - 1`` inputs, float32 ``[N, D, W-1]``; else ``None`` is returned.
        cu_seqlens: Offsets ``[N+1]`` of sequences packed along ``T`` of one row.
    """
    y, final = _call(x, weight, bias, initial_state, cu_seqlens, activation == "silu", output_final_state)
    return y, final if output_final_state else None


@torch.library.custom_op("linattn::triton_decode_short_conv", mutates_args=("state",))
def decode(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, state_indices: Tensor | None, silu: bool) -> Tensor:
    """Outputs; ``state`` is overwritten."""
    return decoded(x, weight, bias, state, state_indices, silu)


@decode.register_fake
def _(x, weight, bias, state, state_indices, silu):
    return x.new_empty(x.shape)


@recorded
def decoded(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, state_indices: Tensor | None, silu: bool
) -> Tensor:  # fmt: skip
    """What :func:`decode` returns."""
    slots = None if state_indices is None else state_indices.contiguous()
    call, stage = Convolution.of(x, weight, bias, state, None, silu), token_variant(int(x.shape[2]))["tokens"]
    (B, T, D), (P, _, L), BD = x.shape, state.shape, stage.tile.BD
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    call.run(
        stage, B * programs(1, D, 1, BD),
        call.x, call.weight, bias, state, slots, y, T, P, D, *call.x.stride()[:2], call.shift, *state.stride(),
        W=call.W, L=L, BD=BD, **call.flags("SILU", "BIAS"), SLOTS=slots is not None,
        SHIFT=T == 1 and L > 0 and state.stride()[1:] == (L, 1),
    )  # fmt: skip
    return y


_decode_call = in_place(decode, "decode_short_conv", 3, decoded)


def decode_short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor,
    state_indices: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """``y`` of the next tokens ``x [B, T, D]``; what was read of ``state`` is overwritten with what the next call reads.

    Args:
        x: Inputs of any strides, ``T ≥ 1`` tokens a sequence.
        weight, bias, activation: As :func:`short_conv` takes them.
        state: ``[P, D, L]``, ``L ≥ W - 1``, any strides and float dtype: the last ``L`` inputs, oldest first.
        state_indices: Which slot is each sequence's, ``[B]``; none of ``0 … P-1``, as -1, is padding: its outputs are zeros.
    """
    return _decode_call(x, weight, bias, state, state_indices, activation == "silu")
