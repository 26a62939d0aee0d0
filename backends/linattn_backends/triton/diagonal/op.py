"""The custom ops ``linattn::triton_diagonal`` and its backward: one opaque node each for every tracer."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from linattn_backends.torch.transforms import register

from ..recurrent.op import Tokens, filled, final_shape, walk
from ..runtime.operator import rules
from ..runtime.precompile import foreseen
from . import memory_host as launch
from . import resident_host as one_pass
from . import vector_host as vector_launch
from .memory_host import Applied, Diagonal

__all__ = ["diagonal", "diagonal_call"]


def algorithm(call: Diagonal, backward: bool = False) -> ModuleType:
    """Where the chunk form's ``forward`` and ``backward`` are: in one pass if that can, else with states in memory."""
    if call.gate == 2 and call.w is None:
        return vector_launch
    return one_pass if one_pass.fits(call, backward) else launch


@torch.library.custom_op("linattn::triton_diagonal_backward", mutates_args=())
@foreseen()
def diagonal_backward(
    do: Tensor,
    dfinal: Tensor | None,
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
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    chunk: int,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments; both forms have the chunk form's.

    ``Applied`` that was not kept is made again.
    """
    call = Diagonal.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
    kept = (A, read, write, decay, stops)
    if all(x is not None for x in kept):  # of no tokens, some are empty
        call = replace(call, applied=Applied(*kept))
    grads = algorithm(call, backward=True).backward(call, do, dfinal)
    if g is not None and g.dim() == 1:
        grads["g"] = grads["g"].sum((0, 1))
    given = dict(q=q, k=k, v=v, g=g, gv=gv, u=u, start=initial_state)
    return [grads[name].to(x.dtype) for name, x in given.items() if x is not None]


@diagonal_backward.register_fake
def _(do, dfinal, A, read, write, decay, stops, q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk):
    given = (q, k, v, g, gv, u, initial_state)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given if x is not None]


_backward_call = register(diagonal_backward)
rule = rules(8, diagonal_backward, _backward_call)


@foreseen(rule.rehearse)
def computed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, u: Tensor | None, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, form: str, scale: float, chunk: int, final: bool, wide: bool, keep: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """What :func:`diagonal` returns, and ``None`` for what is not wanted."""
    dtype = torch.float32 if wide else v.dtype
    nothing = (None,) * len(Applied._fields)
    if form == "recurrent":
        end = v.new_empty(final_shape(q, v, cu_seqlens, True), dtype=torch.float32) if final else None
        return walk(Tokens(q, k, v, g, gv, u=u), initial_state, end, scale, dtype, cu_seqlens), end, *nothing
    call = Diagonal.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
    o, end, applied = algorithm(call).forward(call, dtype, final)
    return o, end, *(applied if keep and applied is not None else nothing)


@torch.library.custom_op("linattn::triton_diagonal", mutates_args=())
def diagonal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    scale: float,
    chunk: int,
    final: bool,
    wide: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs (float32 if ``wide``), final states and ``Applied``, for the backward pass; what is not wanted is empty."""
    return filled(v, computed(q, k, v, g, gv, u, initial_state, cu_seqlens, form, scale, chunk, final, wide, keep))


@diagonal.register_fake
def _(q, k, v, g, gv, u, initial_state, cu_seqlens, form, scale, chunk, final, wide, keep):
    o = v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype)
    end = v.new_empty(final_shape(q, v, cu_seqlens, final), dtype=torch.float32)
    if keep and form == "chunk":
        call = Diagonal.of(q, k, v, g, gv, u, initial_state, cu_seqlens, scale, chunk)
        if algorithm(call) is vector_launch:
            return o, end, *Applied.empty(call)
    return o, end, *(v.new_empty(0) for _ in Applied._fields)


_diagonal_call = register(diagonal, rule.setup_context, rule.backward, computed)


def diagonal_call(*args):
    """``diagonal``: what a vector gate was applied to is kept where a gradient will be asked for."""
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in args if isinstance(x, Tensor))
    return _diagonal_call(*args, keep)[:2]
