"""Custom ops of ``mixed_attn``: ``linattn::triton_mixed`` and its backward, one opaque node each for every tracer."""

from __future__ import annotations

import torch
from linattn.plugin import MixedState
from torch import Tensor

from linattn_backends.torch.transforms import register

from ..runtime.precompile import precompiled
from .call import MixedCall
from .host import FinalGradients, backward, forward, held_after, step

__all__ = ["mixed", "mixed_attention", "mixed_backward"]


@torch.library.custom_op("linattn::triton_mixed", mutates_args=())
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
    B, _, H, K = k_quad.shape
    L, V = k_lin.shape[3], v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shapes = ((N, H, L, V), (N, C, H, K), (N, C, H, L), (N, C, H, V)) if final else ((0,),) * 4
    arrays = (v.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return v.new_empty(v.shape), *arrays, v.new_empty((N,) if final else (0,), dtype=torch.int32)


@torch.library.custom_op("linattn::triton_mixed_backward", mutates_args=())
@precompiled()
def mixed_backward(
    do: Tensor,
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
    dheads, dbias, dstate = backward(call, do, FinalGradients(dkv, dk_quad, dk_lin, dv))
    given = zip((*heads, bias, *state[:4]), (*dheads, dbias, *dstate), strict=True)
    return [gradient.to(x.dtype) for x, gradient in given if x is not None]


@mixed_backward.register_fake
def _(do, dkv, dk_quad, dk_lin, dv, *inputs):
    return [x.new_empty(x.shape) for x in inputs[:10] if x is not None]


def _setup_context(ctx, inputs, output):
    *arrays, ctx.C, ctx.quad_scale, ctx.lin_scale, ctx.causal, ctx.final, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[5])
    ctx.save_for_backward(*arrays)


def _backward(ctx, do, *dfinal):
    arrays = ctx.saved_tensors
    none = (None,) * 8  # length, cu_seqlens and the six options
    dfinal = dfinal[:4] if ctx.final else (None,) * 4
    if do is None and all(d is None for d in dfinal):
        return (*(None for _ in arrays[:10]), *none)
    do = torch.zeros_like(arrays[4]) if do is None else do
    grads = iter(_backward_call(do, *dfinal, *arrays, ctx.C, ctx.quad_scale, ctx.lin_scale, ctx.causal))
    return (*(None if x is None else next(grads) for x in arrays[:10]), *none)


_backward_call = register(mixed_backward)
mixed_call = register(mixed, _setup_context, _backward)


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
