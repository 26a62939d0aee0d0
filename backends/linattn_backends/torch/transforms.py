"""What every tracer and transform needs to know of a custom op, said once.

``register`` gives an op its gradient and its vmap rule, and returns the callable that backend code uses. Gradients
registered with PyTorch do not work under ``torch.func`` transforms, whose own way is an ``autograd.Function`` with
``setup_context``: the callable picks by whether such a transform is active, a constant while ``torch.compile`` traces.
An eager call on plain tensors, which nobody watches, takes that way too, past the dispatcher: an op's layers of Python cost
as much as the launch of several kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from linattn.plugin import has_tangents
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

PLAIN = frozenset((type(None), bool, int, float, str))
"""Types of arguments that are no tensors."""
wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
NOT_BY_ROW = ("u", "weight", "bias", "A_log", "rate", "skip", "cu_seqlens")
"""Arguments without a batch dimension: shared by the rows, or their gradient sums over them."""


def register(
    op: Any,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    plain: Callable[..., Any] | None = None,
    operations: bool = False,
    results: int | None = None,
) -> Callable[..., Any]:
    """Register the gradient and the vmap rule of ``op``; return a callable that works under any transform.

    An op without a ``backward`` is itself a gradient: going through it a second time is an error, not a silent zero. ``plain``
    is what an eager call runs in the place of the op, whose outputs are tensors all: its own may be ``None``. Of its outputs
    the first ``results`` are the caller's, default all; those behind are for ``backward``, and a caller may not get them.
    Of ``operations`` of PyTorch, which know what to do with tangents, a call inside a forward-mode derivative takes each by
    itself.
    """
    setup_context, backward = setup_context or _remember_nothing, backward or _refuse
    plain = plain or (lambda *args: op._init_fn(*args))

    def seen_by_all(ctx: Any, inputs: Any, output: Any) -> None:
        if results is not None:
            ctx.mark_non_differentiable(*(x for x in output[results:] if x is not None))
        setup_context(ctx, inputs, output)

    op.register_autograd(backward, setup_context=seen_by_all)
    op.register_vmap(_vmap_rule(op, op))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return tuple(op(*args))

    class Eager(torch.autograd.Function):
        """Without ``setup_context``, which has PyTorch read the signature of ``forward`` in every call."""

        @staticmethod
        def forward(ctx, *args):
            outputs = tuple(plain(*args))
            setup_context(ctx, args, outputs)
            return outputs[:results]  # each that autograd sees takes a microsecond

    Function.__name__ = Eager.__name__ = op._name
    Function.setup_context = staticmethod(lambda ctx, inputs, output: seen_by_all(ctx, inputs, output))
    Function.backward = Eager.backward = staticmethod(backward)
    Function.vmap = staticmethod(_vmap_rule(op, (lambda *args: call(*args)) if operations else Function.apply))

    # Past torch.autograd.Function's own, which unwraps what transforms left behind: unwatched lets none of that by.
    eager: Callable[..., Any] = super(torch.autograd.Function, Eager).apply

    def call(*args: Any) -> Any:
        if operations and forward_ad._current_level >= 0 and not _mapped() and _dual(args):
            return plain(*args)
        if torch._C._are_functorch_transforms_active():
            return Function.apply(*args)
        if torch.compiler.is_compiling() or not unwatched(args):
            return op(*args)
        return without_modes(eager if asks_for_gradients(args) else plain, args)

    return call


def asks_for_gradients(args: Sequence[Any]) -> bool:
    """Whether a gradient of the call will be asked for."""
    if torch.is_grad_enabled():
        for x in args:  # as in unwatched
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def without_modes(run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Run without a default device, which need not see each array that is made."""
    if torch._C._len_torch_function_stack():
        with torch._C.DisableTorchFunction():
            return run(*args)
    return run(*args)


def unwatched(args: Sequence[Any]) -> bool:
    """Whether nothing would see an op go by: nothing traces, and no argument is a tensor's subclass, without data, left behind
    by a transform that is over, or a view whose numbers are to be negated (``x.conj().imag``): these are the dispatcher's.

    ``torch.set_default_device`` is a mode too, which looks at what makes tensors.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
        return False
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    if modes and any(type(mode) is not DeviceContext for mode in modes):
        return False
    for x in args:  # a loop, since every call comes by
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            if x.is_meta or x.is_neg() or wrapped(x):
                return False
        elif kind not in PLAIN and isinstance(x, Tensor):
            return False
    return True


def _dual(args: Sequence[Any]) -> bool:
    """Whether a tensor carries a tangent; the others keep the hand-written gradient, and its memory."""
    return has_tangents(x for x in args if isinstance(x, Tensor))


def _mapped() -> bool:
    """Whether the innermost transform is ``vmap``, which has a rule of its own for the op as a whole."""
    if not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack().key() == functorch.TransformType.Vmap


def _remember_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _refuse(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "the gradient of a linattn operator has no gradient of its own: for a second derivative, take the forward-mode "
        'derivative of it, as torch.func.hessian does, with backend="torch"'
    )


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
