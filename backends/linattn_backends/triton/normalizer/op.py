"""The custom ops ``linattn::triton_normalized`` and its backward: a family with a diagonal gate and its normaliser in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn_backends.torch.transforms import asks_for_gradients, register

from ..diagonal.backward import backward
from ..diagonal.call import DiagonalCall, VectorOperands
from ..diagonal.forward import forward
from ..host.tails import zero_behind
from ..recurrent.op import Tokens, recurrent_forward
from ..runtime.operator import filled, final_shape, not_empty
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .config import before_division, operands
from .launch import Kept, Normalizer

__all__ = ["normalized"]


def split(state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A state ``[N, HV, K, V+1]`` as the family's and the sum of the keys."""
    return (None, None) if state is None else (state[..., :-1], state[..., -1])


def joined(state: Tensor | None, sums: Tensor | None) -> Tensor | None:
    """What :func:`split` takes."""
    return None if state is None or sums is None else torch.cat((state, sums.unsqueeze(-1)), -1)


def call_of(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, start: Tensor | None, cu: Tensor | None, chunk: int
) -> DiagonalCall:  # fmt: skip
    """The family's call; the scale, which cancels, is the default, so that sums of many keys stay small."""
    return DiagonalCall.of(q, k, v, g, gv, None, start, cu, q.shape[-1] ** -0.5, chunk)


@torch.library.custom_op("linattn::triton_normalized_backward", mutates_args=())
@recorded
@precompiled()
def normalized_backward(
    do: Tensor,
    dfinal: Tensor | None,
    o: Tensor,
    d: Tensor,
    before: Tensor,
    decays: Tensor,
    A: Tensor | None,
    read: Tensor | None,
    write: Tensor | None,
    decay: Tensor | None,
    stops: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments; both forms have the chunk form's.

    ``VectorOperands`` that were not kept are made again.
    """
    operands = A, read, write, decay, stops
    made = VectorOperands(*operands) if all(x is not None for x in operands) else None
    (start, sums), (dend, dsums) = split(initial_state), split(dfinal)
    call = call_of(q, k, v, g, gv, start, cu_seqlens, chunk)
    normalizer = Normalizer.of(call, True)
    dn, e = normalizer.quotients(do, o, d)
    grads = backward(call, call.backward_variant(dn), dn, dend, made)
    del dn, made
    dfirst = normalizer.add_gradients(e, Kept(d, before, decays), dsums, grads, sums is not None)
    zero_behind(call, cu_seqlens, *map(grads.get, ("q", "k", "v", "g", "gv")))
    if g is not None and g.dim() == 1:
        grads["g"] = grads["g"].sum((0, 1))
    grads["start"] = joined(grads["start"], dfirst)
    given = dict(q=q, k=k, v=v, g=g, gv=gv, start=initial_state)
    return [grads[name].to(x.dtype) for name, x in given.items() if x is not None]


@normalized_backward.register_fake
def _(do, dfinal, o, d, before, decays, A, read, write, decay, stops, q, k, v, g, gv, initial_state, cu_seqlens, chunk):
    given = (q, k, v, g, gv, initial_state)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given if x is not None]


_backward_call = register(normalized_backward)


def rehearse(args: tuple[Any, ...], results: tuple[Tensor | None, ...]) -> None:
    """The backward pass, if there will be one, unless it may bring a final state's gradient or not."""
    (*given, _, chunk, final, keep), (o, _, *kept) = args, results
    if keep and not final:
        normalized_backward._init_fn(o, None, o, *kept, *given, chunk)


@recorded
@precompiled(rehearse)
def computed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, form: str, chunk: int, final: bool, keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What :func:`normalized_attention` returns, and ``None`` for what is not wanted."""
    (start, sums), made = split(initial_state), None
    call = call_of(q, k, v, g, gv, start, cu_seqlens, chunk)
    wide = before_division(v.dtype)
    if form == "recurrent":
        end = v.new_empty(final_shape(q, v, cu_seqlens, True), dtype=torch.float32) if final else None
        n = recurrent_forward(Tokens(call.q, call.k, call.v, call.g, call.gv), start, end, call.scale, wide, cu_seqlens)
    else:
        n, end, made = forward(call, call.forward_variant(wide), wide, final)
    o = n if n.dtype == v.dtype else torch.empty_like(n, dtype=v.dtype)
    kept, last = Normalizer.of(call, False).outputs(n, o, sums, final)
    zero_behind(call, cu_seqlens, o)
    return o, joined(end, last), *kept, *(made if keep and made is not None else (None,) * len(VectorOperands._fields))


@torch.library.custom_op("linattn::triton_normalized", mutates_args=())
def normalized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    chunk: int,
    final: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final states, and for the backward pass ``Kept`` and ``VectorOperands``; empty where not wanted."""
    return filled(v, computed(q, k, v, g, gv, initial_state, cu_seqlens, form, chunk, final, keep))


@normalized_attention.register_fake
def _(q, k, v, g, gv, initial_state, cu_seqlens, form, chunk, final, keep):
    N, *state = final_shape(q, v, cu_seqlens, True)
    end = v.new_empty((N, *state[:-1], state[-1] + 1) if final else (0,), dtype=torch.float32)
    call = call_of(q, k, v, g, gv, None, cu_seqlens, chunk)
    applied = keep and form == "chunk" and call.applies_gate
    made = VectorOperands.empty(call) if applied else (v.new_empty(0) for _ in VectorOperands._fields)
    return v.new_empty(v.shape), end, *Kept.empty(call), *made


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arrays, _, ctx.chunk, ctx.final, _ = inputs
    o, _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays, o, *kept[:3], *not_empty(kept[3:]))


def _backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: each time unpacks, which checkpointing refuses to do twice
    (*floats, cu_seqlens), (o, *kept) = saved[:7], saved[7:]
    dfinal = dfinal if ctx.final else None
    if do is None and dfinal is None:
        return (None,) * 11
    do = torch.zeros_like(o) if do is None else do
    grads = iter(_backward_call(do, dfinal, o, *kept, *floats, cu_seqlens, ctx.chunk))
    return (*(None if x is None else next(grads) for x in floats), *(None,) * 5)


_call = register(normalized_attention, _setup_context, _backward, computed, results=2)


def normalized(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, form: str, chunk: int, final: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs and final states, from the arguments of :func:`normalized_attention` without the last."""
    rest, dtype = (g, gv, initial_state, cu_seqlens), v.dtype
    keep = asks_for_gradients((q, k, v, *rest))
    differentiated = keep or torch._C._are_functorch_transforms_active()
    wide = operands(dtype, g is not None, differentiated)
    q, k, v = (x.to(wide) for x in (q, k, v))
    o, end = _call(q, k, v, *rest, form, chunk, final, keep)[:2]
    return o.to(dtype), end
