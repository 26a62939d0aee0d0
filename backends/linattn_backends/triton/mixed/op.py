"""Custom ops of ``mixed_attn``: ``linattn::triton_mixed`` and its backward, one opaque node each for every tracer."""

from __future__ import annotations

import torch
from linattn.plugin import MixedState
from torch import Tensor

from linattn_backends.torch.mixed_rules import empty_gradients, empty_results, rules
from linattn_backends.torch.transforms import register

from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .call import MixedCall
from .launch import FinalGradients, backward, forward, held_after, step

__all__ = ["mixed", "mixed_attention", "mixed_backward"]


@torch.library.custom_op("linattn::triton_mixed", mutates_args=())
@recorded
@precompiled()
def mixed(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    bias: Tensor | None,
    kv: Tensor | None,
    held_k_quad: Tensor | None,
    held_k_lin: Tensor | None,
    held_v: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
    C: int,
    quad_scale: float,
    lin_scale: float,
    causal: bool,
    final: bool,
    recurrent: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``o`` and the five arrays of the final state, empty unless ``final``. ``recurrent`` takes one token in one step."""
    heads, state = (q_quad, k_quad, q_lin, k_lin, v), (kv, held_k_quad, held_k_lin, held_v, length)
    call = MixedCall.of(heads, bias, state, cu_seqlens, C, quad_scale, lin_scale, causal)
    if recurrent and final and call.state is not None and cu_seqlens is None and v.shape[1] == 1:
        o, after = step(call)
        return o, *after
    end = call.new_states(call.N) if final else None
    o = forward(call, v.dtype, end)
    nothing = [v.new_empty(0, dtype=torch.float32) for _ in range(4)]
    return (o, end, *held_after(call)) if final else (o, *nothing, v.new_empty(0, dtype=torch.int32))


@mixed.register_fake
def _(q_quad, k_quad, q_lin, k_lin, v, bias, kv, hk, hl, hv, length, cu_seqlens, C, quad_scale, lin_scale, causal, final, one):
    o, *state = empty_results(k_quad, k_lin, v, cu_seqlens, C)
    return (o, *state) if final else (o, *(x.new_empty(0) for x in state))


@torch.library.custom_op("linattn::triton_mixed_backward", mutates_args=())
@recorded
@precompiled()
def mixed_backward(
    do: Tensor | None,
    dkv: Tensor | None,
    dk_quad: Tensor | None,
    dk_lin: Tensor | None,
    dv: Tensor | None,
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    bias: Tensor | None,
    kv: Tensor | None,
    held_k_quad: Tensor | None,
    held_k_lin: Tensor | None,
    held_v: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
    C: int,
    quad_scale: float,
    lin_scale: float,
    causal: bool,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments."""
    heads, state = (q_quad, k_quad, q_lin, k_lin, v), (kv, held_k_quad, held_k_lin, held_v, length)
    call = MixedCall.of(heads, bias, state, cu_seqlens, C, quad_scale, lin_scale, causal)
    do = torch.zeros_like(v) if do is None else do
    dheads, dbias, dstate = backward(call, do, FinalGradients(dkv, dk_quad, dk_lin, dv))
    given = zip((*heads, bias, *state[:4]), (*dheads, dbias, *dstate), strict=True)
    return [gradient.to(x.dtype) for x, gradient in given if x is not None]


@mixed_backward.register_fake
def _(do, dkv, dk_quad, dk_lin, dv, *inputs):
    return empty_gradients(inputs)


mixed_call = register(mixed, *rules(register(mixed_backward)))


def mixed_attention(
    form: str,
    arrays: dict[str, Tensor],
    *,
    bias: Tensor | None,
    quad_scale: float | None,
    lin_scale: float | None,
    causal: bool,
    initial_state: MixedState[Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, MixedState[Tensor] | None]:
    """``(o, final_state)``, the state a ``MixedState``."""
    scales = [1.0 / chunk_size if scale is None else float(scale) for scale in (quad_scale, lin_scale)]
    C = chunk_size
    if bias is None and initial_state is None and not output_final_state:
        C = min(C, arrays["v"].shape[1] + 1)  # nothing has this size: FLASH-Quad may say any number
    state = (None,) * 5 if initial_state is None else initial_state
    flags = causal, output_final_state, form == "recurrent"
    o, *final = mixed_call(*arrays.values(), bias, *state, cu_seqlens, C, *scales, *flags)
    return o, MixedState(*final) if output_final_state else None
