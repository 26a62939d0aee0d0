"""Custom ops of matrix states: their results, and how what an op keeps reaches its backward pass, for autograd and rehearsals.

Such an op takes ``n`` arrays, the last of them ``cu_seqlens``, then ``form, scale, chunk, final`` and more, ``keep`` last; it
returns ``o``, final states, and what is kept. The op of its gradients takes ``do, dfinal``, what was kept, the arrays,
``scale``, ``chunk`` and the first ``more`` of those that follow ``final``. An op that overwrites states has nothing to keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn_backends.torch.transforms import asks_for_gradients, unwatched, without_modes

__all__ = ["Rules", "filled", "final_shape", "in_place", "not_empty", "rules"]


class Rules(NamedTuple):
    """The rules of an op: ``rehearse`` is for :func:`.precompile.precompiled`, the others are for ``register``, as is that two
    results are the caller's.
    """

    rehearse: Callable[..., None]
    setup_context: Callable[..., None]
    backward: Callable[..., tuple[Any, ...]]


def rules(n: int, gradients: Any, call: Callable[..., Any], more: int = 0) -> Rules:
    """The rules of an op of ``n`` arrays; ``call`` runs ``gradients``, the op of its gradients, under any transform."""
    shared = slice(n + 4, n + 4 + more)

    def rehearse(args: tuple[Any, ...], results: tuple[Tensor | None, ...]) -> None:
        """The backward pass of a call that keeps something for it, unless it may bring a final state's gradient or not."""
        (_, scale, chunk, final, *_, keep), (o, _, *kept) = args[n:], results
        if keep and not final:
            gradients._init_fn(o, None, *not_empty(kept), *args[:n], scale, chunk, *args[shared])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.scale, ctx.chunk, ctx.final = inputs[n + 1 : n + 4]
        ctx.rest, ctx.shared = len(inputs) - n + 1, inputs[shared]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:n], *not_empty(output[2:]))  # as many of the op's outputs as of an eager call's

    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: each time unpacks, which checkpointing refuses to do twice
        (*floats, cu_seqlens), kept = saved[:n], saved[n:]
        dfinal = dfinal if ctx.final else None
        if do is None and dfinal is None:
            return (None,) * (n - 1 + ctx.rest)
        do = torch.zeros_like(floats[2]) if do is None else do
        grads = iter(call(do, dfinal, *kept, *floats, cu_seqlens, ctx.scale, ctx.chunk, *ctx.shared))
        return (*[None if x is None else next(grads) for x in floats], *(None,) * ctx.rest)

    return Rules(rehearse, setup_context, backward)


def final_shape(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, final: bool) -> tuple[int, ...]:
    """The shape of the final states; of an empty tensor unless ``final``."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (N, v.shape[2], q.shape[3], v.shape[3]) if final else (0,)


def filled(v: Tensor, outputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The results of an op, ``o``, final states and what is kept, with empty tensors for ``None``, which no op can return."""
    o, end, *kept = outputs
    end = v.new_empty(0, dtype=torch.float32) if end is None else end
    return o, end, *(v.new_empty(0) if x is None else x for x in kept)


def not_empty(kept: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """What was kept for the backward pass, ``None`` for the rest."""
    return [x if x is not None and x.numel() else None for x in kept]


def in_place(op: Any, name: str, state: int, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Complete an op that overwrites its argument number ``state``; the callable that backend code uses.

    ``vmap`` runs it call after call, each on states where they lie. A call that nobody watches runs ``plain``, past the
    dispatcher, which spends on such an op several times what the launch takes.
    """
    count_writes(op, state)

    @op.register_vmap
    def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        if in_dims[state] is None:
            raise RuntimeError(f"vmap of {name} needs state mapped as well: every one of its calls overwrites it")
        given = list(zip(args, in_dims, strict=True))
        rows = ([x if d is None else x.select(d, i) for x, d in given] for i in range(info.batch_size))
        return torch.stack([op(*row) for row in rows]), 0

    def call(*args: Any) -> Tensor:
        if torch.compiler.is_compiling() or not unwatched(args) or asks_for_gradients(args):
            return op(*args)
        if args[state].is_inference():
            return plain(*args) if torch.is_inference_mode_enabled() else op(*args)
        torch.autograd.graph.increment_version(args[state])
        return without_modes(plain, args)

    return call


def count_writes(op: Any, state: int) -> None:
    """Let autograd know of what an op writes to its argument number ``state``, in the place of PyTorch's own way.

    That reads the schema once for each argument to find out what is written, which takes longer than all else that a compiled
    program does to call the op.
    """

    def counted(keyset: Any, *args: Any) -> Tensor:
        torch.autograd.graph.increment_version(args[state])
        return op._opoverload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # that a kernel is replaced
        op._lib.impl(op._name, counted, "ADInplaceOrView", with_keyset=True, allow_override=True)
