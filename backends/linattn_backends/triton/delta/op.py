"""The custom ops ``linattn::triton_delta`` and its backward: one opaque node each for every tracer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from linattn_backends.torch.transforms import asks_for_gradients, register

from ..host.maps import GateMap, Maps
from ..host.tails import zero_behind
from ..recurrent.op import Tokens, recurrent_forward
from ..runtime.operator import filled, final_shape, rules
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .call import ANYTHING, NOTHING, SCORES, DeltaCall, Kept
from .chunk import backward, forward

__all__ = ["delta", "delta_backward", "delta_call"]


@torch.library.custom_op("linattn::triton_delta_backward", mutates_args=())
@recorded
@precompiled()
def delta_backward(
    do: Tensor,
    dfinal: Tensor | None,
    A: Tensor | None,
    M: Tensor | None,
    A2: Tensor | None,
    L2: Tensor | None,
    rates: Tensor | None,
    uq: Tensor | None,
    uk: Tensor | None,
    states: Tensor | None,
    errors: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    A_log: Tensor | None,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk: int,
    kind: int,
    number: float,
    unit: bool,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments; both forms have the chunk form's.

    What the forward pass did not keep is made again.
    """
    maps = Maps(GateMap(A_log, bias, kind, number), 0.0, unit)
    call = DeltaCall.of(q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk, maps)
    grads = backward(call, do, dfinal, Kept(A, M, A2, L2, rates, uq, uk, states, errors))
    zero_behind(call, cu_seqlens, *map(grads.get, ("q", "k", "v", "g", "beta", "a", "b")))
    given = dict(q=q, k=k, v=v, g=g, beta=beta, a=a, b=b, A_log=A_log, bias=bias, start=initial_state)
    return [grads[name].to(x.dtype) for name, x in given.items() if x is not None]


@delta_backward.register_fake
def _(
    do, dfinal, A, M, A2, L2, rates, uq, uk, states, errors, q, k, v, g, beta, a, b, A_log, bias, initial_state, *_
):  # fmt: skip
    given = (q, k, v, g, beta, a, b, A_log, bias, initial_state)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given if x is not None]


_backward_call = register(delta_backward)
rule = rules(11, delta_backward, _backward_call, more=3)


@recorded
@precompiled(rule.rehearse)
def computed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
    A_log: Tensor | None, bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None, form: str, scale: float,
    chunk: int, final: bool, kind: int, number: float, unit: bool, keep: int,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What :func:`delta` returns, and ``None`` for what is not wanted."""
    maps = Maps(GateMap(A_log, bias, kind, number), 0.0, unit)
    if form == "recurrent":
        end = v.new_empty(final_shape(q, v, cu_seqlens, True), dtype=torch.float32) if final else None
        tokens = Tokens(q, k, v, g, beta=beta, a=a, b=b)
        return recurrent_forward(tokens, initial_state, end, scale, v.dtype, cu_seqlens, maps=maps), end, *Kept()
    call = DeltaCall.of(q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk, maps)
    o, end, kept = forward(call, final, keep)
    return o, end, *(kept or Kept())


@torch.library.custom_op("linattn::triton_delta", mutates_args=())
def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    A_log: Tensor | None,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    scale: float,
    chunk: int,
    final: bool,
    kind: int,
    number: float,
    unit: bool,
    keep: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, final states and ``Kept``, for the backward pass; what is not wanted is an empty tensor.

    ``A_log, bias, kind, number`` are the map of a raw ``g`` (:class:`..host.maps.GateMap`); ``unit`` says that queries and keys
    are to have unit length.
    """
    return filled(
        v,
        computed(
            q, k, v, g, beta, a, b, A_log, bias, initial_state, cu_seqlens, form, scale, chunk, final, kind, number, unit, keep
        ),
    )  # fmt: skip


@delta.register_fake
def _(q, k, v, g, beta, a, b, A_log, bias, initial_state, cu_seqlens, form, scale, chunk, final, kind, number, unit, keep):
    results = v.new_empty(v.shape), v.new_empty(final_shape(q, v, cu_seqlens, final), dtype=torch.float32)
    if form == "recurrent" or not keep:
        return *results, *(v.new_empty(0) for _ in Kept._fields)
    maps = Maps(GateMap(A_log, bias, kind, number), 0.0, unit)
    kept = Kept.empty(DeltaCall.of(q, k, v, g, beta, a, b, initial_state, cu_seqlens, scale, chunk, maps), keep)
    return *results, *(v.new_empty(0) if x is None else x for x in kept)


_delta_call = register(delta, rule.setup_context, rule.backward, computed, results=2)


def delta_call(*args):
    """``delta``: something is kept where a gradient will be asked for, of ``dplr`` what a tracer can tell."""
    keep, a, cu_seqlens = ANYTHING if asks_for_gradients(args) else NOTHING, args[5], args[10]
    if keep and a is not None and cu_seqlens is not None and torch.compiler.is_compiling():
        keep = ANYTHING if guard_or_false(cu_seqlens.shape[0] > 4) else SCORES
    return _delta_call(*args, keep)[:2]
