"""What every tracer and transform needs to know of a custom op, said once.

``register`` gives an op its gradient and its vmap rule, and returns the callable that backend code uses. Gradients
registered with PyTorch do not work under ``torch.func`` transforms, whose own way is an ``autograd.Function`` with
``setup_context``: the callable picks by whether such a transform is active, a constant while ``torch.compile`` traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NOT_BY_ROW = ("u", "bias", "cu_seqlens")
"""Arguments without a batch dimension: shared by the rows, or their gradient sums over them."""


def register(
    op: Any,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register the gradient and the vmap rule of ``op``; return a callable that works under any transform.

    An op without a ``backward`` is itself a gradient: going through it a second time is an error, not a silent zero.
    """
    setup_context, backward = setup_context or _remember_nothing, backward or _refuse
    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap(_vmap_rule(op, op))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return tuple(op(*args))

    Function.__name__ = op._name
    Function.setup_context = staticmethod(lambda ctx, inputs, output: setup_context(ctx, inputs, output))
    Function.backward = staticmethod(backward)
    Function.vmap = staticmethod(_vmap_rule(op, Function.apply))

    def call(*args: Any) -> Any:
        return Function.apply(*args) if torch._C._are_functorch_transforms_active() else op(*args)

    return call


def _remember_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("the gradient of a linattn torch operator is not itself differentiable")


def _vmap_rule(op: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Fold the mapped dimension into ``B`` where every array has one, else loop over it."""
    schema = op._opoverload._schema
    names = [argument.name for argument in schema.arguments]
    wrap = list if call is op and len(schema.returns) == 1 else tuple

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size
        moved = [x if d is None else x.movedim(d, 0) for x, d in zip(args, in_dims, strict=True)]
        mapped = [d is not None for d in in_dims]
        if any(x is not None for name, x in zip(names, args, strict=True) if name in NOT_BY_ROW):
            results = [call(*(x[i] if m else x for x, m in zip(moved, mapped, strict=True))) for i in range(size)]
            outputs: Sequence[Tensor] = [torch.stack(column) for column in zip(*results, strict=True)]
        else:
            rows = [_rows(x, m, size) for x, m in zip(moved, mapped, strict=True)]
            outputs = [y.unflatten(0, (size, y.shape[0] // size)) for y in call(*rows)]
        return wrap(outputs), wrap([0] * len(outputs))

    return rule


def _rows(x: Any, mapped: bool, size: int) -> Any:
    """``[size, B, …]``, or ``B`` rows repeated ``size`` times, as ``[size·B, …]``."""
    if not isinstance(x, Tensor):
        return x
    return (x if mapped else x.expand(size, *x.shape)).flatten(0, 1)
