"""What is this array, and where does it live? One small class per framework; none is imported before its arrays appear.

A framework also offers the few array functions that lowerings, gates and feature maps need, under one spelling.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import preference
from .errors import FrameworkError, OptionError

if TYPE_CHECKING:
    from .context import Context
    from .spec import OpSpec

__all__ = ["FLOAT_DTYPES", "Facts", "Framework", "check_device", "framework_of", "has_tangents"]

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


class Facts(NamedTuple):
    """Static facts of one array. A batch or a length that is symbolic under tracing is ``None``.

    An array that is not ``placed`` has no device of its own: it runs where its call does.
    """

    shape: tuple[int | None, ...]
    dtype: str
    device: str
    placed: bool = True


def _sizes(shape: Sequence[Any], known: Callable[[Any], bool]) -> tuple[int | None, ...]:
    """A batch and a length may stay symbolic; for heads and widths a kernel is chosen, so the trace is made for their sizes.

    Those are the axes from the third on, and the second of a matrix, whose rows are tokens, heads or channels.
    """
    first = 1 if len(shape) == 2 else 2
    return tuple([operator.index(n) if axis >= first or known(n) else None for axis, n in enumerate(shape)])


class Framework:
    """Array facts and array functions of one framework.

    Attributes:
        name: What users call it.
        roots: Top-level modules whose classes are its arrays.
        devices: The kinds of device that its arrays can be on.
        numbered: Whether a device may have a number, as in ``"cuda:1"``.
        module: The namespace of its array functions.
    """

    name: str
    roots: tuple[str, ...]
    import_name: str
    devices: tuple[str, ...]
    numbered: bool = False

    def __init__(self) -> None:
        # Whoever has an array has imported its framework. (An import statement would break a torch.compile trace.)
        self.module: Any = sys.modules[self.import_name]

    # -- static facts ------------------------------------------------------------------------------------------------

    def key(self, arrays: Iterable[Any]) -> tuple[Any, ...]:
        """A cheap key, equal only if all facts and derivatives asked for are equal; not hashable while a size is symbolic."""
        return tuple([None if x is None else (type(x), tuple(x.shape), x.dtype) for x in arrays])

    def facts(self, x: Any) -> Facts:
        """The static facts of ``x``."""
        shape = _sizes(x.shape, lambda n: type(n) is int)
        return Facts(shape, self.dtype(x), self.device(x))

    def dtype(self, x: Any) -> str:
        """Name of the dtype of ``x``, e.g. ``"bfloat16"``."""
        return str(x.dtype)

    def device(self, x: Any) -> str:
        """The device that holds ``x``: its kind, a colon and its number where it has one."""
        return "cpu"

    def placement(self, x: Any) -> str | None:
        """The device that holds ``x``; ``None`` for an array that runs where its call does."""
        return self.device(x)

    def tracing(self) -> bool:
        """True while this very Python code is being compiled, when only static facts may be touched."""
        return False

    def needs_grad(self, arrays: Iterable[Any]) -> bool | None:
        """True if a gradient of these arrays will be asked for; ``None`` where nobody can say."""
        return None

    def context(self, spec: OpSpec, arrays: tuple[Any, ...], keywords: dict[str, Any]) -> Context | None:
        """How the arrays of a call are spread over devices, if their types say it."""
        return None

    def offsets(self, x: Any) -> Sequence[int] | None:
        """The integers in ``x``; ``None`` where reading them would wait for a device or break a trace."""
        return None

    def glance(self, x: Any) -> NDArray[Any] | None:
        """The first tokens of ``x``, as NumPy's floats; ``None`` where reading would wait for a device or disturb a trace."""
        return None

    def fetch(self, x: Any) -> NDArray[Any] | None:
        """All of ``x``, as NumPy's floats, whatever holds it; ``None`` where a trace or a transform has no numbers."""
        return None

    def unwritable(self, x: Any) -> str | None:
        """Why ``x`` cannot be written to; ``None`` if it can."""
        return None

    def strides(self, x: Any) -> tuple[int | None, ...]:
        """How many elements apart the entries of each dimension lie, ``None`` where that is symbolic under tracing.

        Nothing for an array whose elements lie one after the other.
        """
        return ()

    def autocast(self, x: Any) -> str | None:
        """The dtype that operands like ``x`` are to be cast to here, as the framework casts those of its own attention."""
        return None

    def forward_mode(self, arrays: Iterable[Any]) -> bool:
        """True if a forward-mode derivative of these arrays is being computed."""
        return False

    def mirror(self, backends: tuple[str, ...] | None) -> None:
        """Let compiled functions notice that the preferred backends changed."""

    # -- array functions ---------------------------------------------------------------------------------------------

    def accumulation(self, x: Any) -> str:
        """The dtype that ``x`` is accumulated in: float64 for float64, else float32."""
        return "float64" if self.dtype(x) == "float64" else "float32"

    def astype(self, x: Any, dtype: str) -> Any:
        """``x`` in another dtype."""
        return x.astype(getattr(self.module, dtype))

    def full(self, shape: tuple[int, ...], value: float, like: Any, dtype: str | None = None) -> Any:
        """A constant array with the dtype (unless given) and device of ``like``."""
        return self.module.full(shape, value, dtype=getattr(self.module, dtype or self.dtype(like)))

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        """Arrays joined along an axis."""
        return self.module.concatenate(arrays, axis=axis)

    def arange(self, stop: int, like: Any) -> Any:
        """``0 … stop-1`` with the dtype and device of ``like``."""
        return self.module.arange(stop).astype(like.dtype)

    def numbers(self, values: Sequence[float], like: Any) -> Any:
        """A new float32 array of these numbers on the device of ``like``."""
        return self.module.array(values, dtype=self.module.float32)

    def integers(self, values: Sequence[int], like: Any) -> Any:
        """A new int32 array of these numbers on the device of ``like``."""
        return self.module.array(values, dtype=self.module.int32)

    def repeat_heads(self, x: Any, heads: int) -> Any:
        """``[B, T, H, …]`` to ``[B, T, heads, …]``: value head ``j`` reads head ``j // (heads / H)``."""
        B, T, H, *rest = x.shape
        return self.module.broadcast_to(x[:, :, :, None], (B, T, H, heads // H, *rest)).reshape(B, T, heads, *rest)

    def matmul(self, x: Any, y: Any) -> Any:
        """``x y``, in the precision of the operands."""
        return x @ y

    def matmul_of_states(self, x: Any, y: Any) -> Any:
        """``x y`` of what is accumulated, which autocast is not to round."""
        return self.matmul(x, y)

    def minimum(self, x: Any, most: int) -> Any:
        """The elements of an array of integers, ``most`` at most."""
        return self.module.minimum(x, most)

    def count_up_to(self, ascending: Any, stop: int) -> Any:
        """For each of ``0 … stop-1``, how many of ascending integers do not exceed it, with their dtype."""
        return self.module.searchsorted(ascending, self.arange(stop, like=ascending), side="right").astype(ascending.dtype)

    def take_along(self, x: Any, index: Any, axis: int) -> Any:
        """Along an axis, the elements of ``x`` with these numbers; the other axes of both meet as in arithmetic."""
        return self.module.take_along_axis(x, index, axis=axis)

    def split(self, x: Any, sizes: Sequence[int]) -> list[Any]:
        """``x`` cut along the last axis into parts of these sizes."""
        return [x[..., end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    def softplus(self, x: Any) -> Any:
        """``log(1 + e^x)`` without overflow, and with the right gradient at zero."""
        return self.logaddexp(x, self.zeros_like(x))

    def log_sigmoid(self, x: Any) -> Any:
        """``−log(1 + e^−x)`` likewise."""
        return -self.softplus(-x)

    def softmax(self, x: Any) -> Any:
        """``e^x / Σ e^x`` along the last axis."""
        powers = self.module.exp(x - self.module.max(x, axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)

    def magnitude(self, x: Any) -> Any:
        """The largest ``|x|`` along the last axis, which is kept with size 1; no gradient comes through it."""
        return self.module.max(self.module.abs(x), axis=-1, keepdims=True)

    def constant(self, draw: Draw, args: tuple[Any, ...], like: Any) -> Any:
        """The NumPy array ``draw(*args)``, drawn once, with the dtype and device of ``like``."""
        return self.module.asarray(_drawn(draw, args), dtype=like.dtype)

    def __getattr__(self, name: str) -> Any:
        """Array functions with one spelling everywhere (``exp``, ``where``, ``logaddexp`` …) come from the framework."""
        if name in _SHARED_FUNCTIONS:
            return getattr(self.module, name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


_SHARED_FUNCTIONS = frozenset(
    {
        "abs",
        "broadcast_to",
        "cos",
        "exp",
        "expm1",
        "log",
        "logaddexp",
        "maximum",
        "sign",
        "sin",
        "swapaxes",
        "where",
        "zeros_like",
    }
)

GLANCE = 4096
"""Elements, about, that are read at a glance: a few microseconds."""


def _first(x: Any) -> Any:
    """The first tokens of the first batch entry; of an array without tokens, its first rows."""
    if len(x.shape) < 3:
        return x[:GLANCE]
    return x[:1, : max(1, GLANCE // max(1, math.prod(x.shape[2:])))]


def _wide(x: NDArray[Any]) -> NDArray[Any]:
    """In float32, but for float64."""
    return x if x.dtype == np.float64 else x.astype(np.float32, copy=False)


Draw = Callable[..., NDArray[Any]]


@functools.cache
def _drawn(draw: Draw, args: tuple[Any, ...]) -> NDArray[Any]:
    drawn = draw(*args)
    drawn.flags.writeable = False
    return drawn


def _drawn_for_torch(draw: Draw, args: tuple[Any, ...], dtype: str, device: str) -> Any:
    """A tensor of what is drawn: no inference tensor, so that it may be saved for a backward; and none of a
    transform of ``torch.func`` that is under way, in which it would be made a wrapper that other threads cannot touch."""
    torch = sys.modules["torch"]
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        return torch.tensor(_drawn(draw, args), dtype=getattr(torch, dtype), device=device)


def _array(*values: float) -> NDArray[Any]:
    return np.array(values)


class _Kept:
    """The arrays that are kept for PyTorch, so that each is copied to a device once: behind functions, which are attributes."""

    names: ClassVar[dict[tuple[Any, ...], str]] = {}
    making = threading.Lock()


def _name_of_kept(draw: Draw, args: tuple[Any, ...], dtype: str, device: str) -> str:
    """The attribute of :class:`_Kept` that gives this array."""
    key = draw, args, dtype, device
    if key not in _Kept.names:
        with _Kept.making:
            if key not in _Kept.names:
                _Kept.names[key] = _kept(*key)
    return _Kept.names[key]


def _kept(draw: Draw, args: tuple[Any, ...], dtype: str, device: str) -> str:
    """That attribute, with its function: traced arrays are named after the code that gave them, and compilers take two of one
    name for one.
    """

    def get(x: Any = None) -> Any:
        return x

    said = repr((getattr(draw, "__module__", ""), getattr(draw, "__qualname__", ""), args, dtype, device))
    name = f"kept_{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    while hasattr(_Kept, name):  # of another function that is called the same
        name += "_"
    made = _drawn_for_torch(draw, args, dtype, device)
    function = FunctionType(get.__code__.replace(co_name=name), get.__globals__, name, (made,))
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    setattr(_Kept, name, staticmethod(function))
    return name


def _torch_constant(draw: Draw, args: tuple[Any, ...], dtype: str, device: str) -> Any:
    return getattr(_Kept, _name_of_kept(draw, args, dtype, device))()


def _can_cast(kind: str) -> bool:
    """Whether PyTorch has autocast for a kind of device; without it, asking whether it is on is an error."""
    return sys.modules["torch"].amp.is_autocast_available(kind)


# What torch._dynamo.assume_constant_result does, without importing torch: Dynamo calls them and keeps the result. Before
# PyTorch 2.13 it cannot look into what tells of autocast.
for each in (_name_of_kept, _can_cast):
    each._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Numpy(Framework):
    """NumPy arrays, and the bfloat16 that ml_dtypes adds to them."""

    name, roots, import_name = "numpy", ("numpy",), "numpy"
    devices = ("cpu",)

    def key(self, arrays: Iterable[Any]) -> tuple[Any, ...]:
        return tuple([None if x is None else (type(x), x.shape, x.dtype) for x in arrays])

    def astype(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype)

    def full(self, shape: tuple[int, ...], value: float, like: Any, dtype: str | None = None) -> Any:
        return np.full(shape, value, dtype=dtype or like.dtype)

    def offsets(self, x: Any) -> Sequence[int] | None:
        return x.tolist()

    def glance(self, x: Any) -> NDArray[Any] | None:
        return _wide(_first(x))

    def fetch(self, x: Any) -> NDArray[Any] | None:
        return _wide(x)

    def unwritable(self, x: Any) -> str | None:
        return None if x.flags.writeable else "it is read-only"

    def strides(self, x: Any) -> tuple[int | None, ...]:
        return () if x.flags.c_contiguous else tuple([step // x.itemsize for step in x.strides])


class Torch(Framework):
    """PyTorch tensors: eager, under ``torch.compile``, fake, and inside ``torch.func`` transforms."""

    name, roots, import_name = "torch", ("torch",), "torch"
    devices, numbered = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "npu", "privateuseone"), True

    def __init__(self) -> None:
        super().__init__()
        BY_TYPE[self.module.nn.Parameter] = self  # Dynamo cannot walk the base classes of this one
        # looked up here, because every call asks them
        self._compiler, self._forward_ad, self._C = self.module.compiler, self.module.autograd.forward_ad, self.module._C

    def key(self, arrays: Iterable[Any]) -> tuple[Any, ...]:
        facts = [None if x is None else (x.shape, x.dtype, x.device, x.requires_grad) for x in arrays]
        forward_mode = self._forward_ad._current_level >= 0 and self.forward_mode(arrays)
        return self.module.is_grad_enabled(), forward_mode, *facts

    def dtype(self, x: Any) -> str:
        return str(x.dtype)[len("torch.") :]

    def device(self, x: Any) -> str:
        return str(x.device)

    def tracing(self) -> bool:
        return self._compiler.is_dynamo_compiling()

    def constant_facts(self, x: Any) -> tuple[tuple[int | None, ...], str, str]:
        """The facts of ``x`` in code that is being compiled."""
        shape = _sizes(x.shape, self.module.fx.experimental.symbolic_shapes.has_static_value)
        return shape, self.dtype(x), self.device(x)

    def constant_option(self, value: Any) -> Any:
        """An option in code that is being compiled: the trace is made for this value of a symbolic number, in a tuple too."""
        if isinstance(value, tuple):
            return tuple([self.constant_option(part) for part in value])  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        number = isinstance(value, (int, float))
        return self.module.fx.experimental.symbolic_shapes.guard_scalar(value) if number else value

    def needs_grad(self, arrays: Iterable[Any]) -> bool | None:
        return self.module.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays)

    def offsets(self, x: Any) -> Sequence[int] | None:
        plain = type(x) is self.module.Tensor and x.device.type == "cpu"
        if not plain or self.module._C._functorch.is_functorch_wrapped_tensor(x):
            return None
        return x.tolist()

    def glance(self, x: Any) -> NDArray[Any] | None:
        return self.fetch(_first(x.detach())) if x.device.type == "cpu" and self._has_numbers(x) else None

    def fetch(self, x: Any) -> NDArray[Any] | None:
        if not self._has_numbers(x):
            return None
        dtype = self.module.float64 if x.dtype == self.module.float64 else self.module.float32
        return x.detach().to("cpu", dtype).numpy()

    def _has_numbers(self, x: Any) -> bool:
        """Whether ``x`` is a tensor like any other, and nobody records or replaces what is done with it."""
        torch = self.module
        plain = not self._stands_in(x) and x.device.type != "meta"
        watched = torch._C._len_torch_dispatch_stack() or torch._C._functorch.is_functorch_wrapped_tensor(x)
        return plain and not watched and not torch.jit.is_tracing()

    def autocast(self, x: Any) -> str | None:
        if not self._C._is_any_autocast_enabled():
            return None
        torch = self.module
        kind = x.device.type
        enabled = _can_cast(kind) and torch.is_autocast_enabled(kind)
        return str(torch.get_autocast_dtype(kind))[len("torch.") :] if enabled else None

    def matmul_of_states(self, x: Any, y: Any) -> Any:
        return self._without_autocast(x, lambda: x @ y)

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        # autocast's own joins float32 and one other dtype, and fails with a third
        return self._without_autocast(arrays[0], lambda: self.module.concatenate(arrays, axis))

    def _without_autocast(self, x: Any, call: Callable[[], Any]) -> Any:
        """What a call returns that works on arrays like ``x``, in their own dtypes."""
        if self.autocast(x) is None:
            return call()
        with self.module.autocast(x.device.type, enabled=False):
            return call()

    def unwritable(self, x: Any) -> str | None:
        if x.is_inference() and not self.module.is_inference_mode_enabled():
            return "it was made in inference mode, and this is outside of it"
        return None

    def strides(self, x: Any) -> tuple[int | None, ...]:
        if not self._compiler.is_dynamo_compiling():
            return () if x.is_contiguous() else x.stride()
        static = self.module.fx.experimental.symbolic_shapes.has_static_value
        return tuple([operator.index(step) if static(step) else None for step in x.stride()])

    def forward_mode(self, arrays: Iterable[Any]) -> bool:
        if self._forward_ad._current_level < 0:
            return False
        if self.tracing():  # which does not see the tangents of what comes into a graph
            return True
        functorch = self.module._C._functorch
        stack = functorch.get_interpreter_stack() or ()
        levels = [layer.level() for layer in stack if layer.key() == functorch.TransformType.Jvp]
        return any(x is not None and self._has_tangent(x, levels) for x in arrays)

    def _has_tangent(self, x: Any, levels: Sequence[int]) -> bool:
        """Whether ``torch.func.jvp`` of one of these ``levels`` knows ``x``, or it is dual without any transform."""
        functorch = self.module._C._functorch
        while functorch.is_functorch_wrapped_tensor(x):
            if functorch.maybe_get_level(x) in levels:
                return True
            x = functorch.get_unwrapped(x)
        return self.module.autograd.forward_ad.unpack_dual(x).tangent is not None

    def astype(self, x: Any, dtype: str) -> Any:
        return x.to(getattr(self.module, dtype))

    def full(self, shape: tuple[int, ...], value: float, like: Any, dtype: str | None = None) -> Any:
        return self.module.full(shape, value, dtype=getattr(self.module, dtype or self.dtype(like)), device=like.device)

    def arange(self, stop: int, like: Any) -> Any:
        return self.module.arange(stop, dtype=like.dtype, device=like.device)

    def minimum(self, x: Any, most: int) -> Any:
        return x.clamp(max=most)

    def count_up_to(self, ascending: Any, stop: int) -> Any:
        return self.module.searchsorted(ascending, self.arange(stop, like=ascending), right=True).to(ascending.dtype)

    def take_along(self, x: Any, index: Any, axis: int) -> Any:
        return self.module.take_along_dim(x, index.long(), axis)

    def numbers(self, values: Sequence[float], like: Any) -> Any:
        if self._stands_in(like):
            return self.module.tensor(values, dtype=self.module.float32, device=like.device)
        # A copy of what is kept on the device: a graph that is being recorded can take nothing from the host.
        return _torch_constant(_array, tuple(values), "float32", self.device(like)).clone()

    def integers(self, values: Sequence[int], like: Any) -> Any:
        return self.module.tensor(values, dtype=self.module.int32, device=like.device)

    def split(self, x: Any, sizes: Sequence[int]) -> list[Any]:
        return list(self.module.split(x, list(sizes), -1))  # the gradients of slices would be made as large as x, and added

    def softplus(self, x: Any) -> Any:
        return self.module.nn.functional.softplus(x, threshold=80)  # e^80 is finite; by default it is linear from 20 on

    def log_sigmoid(self, x: Any) -> Any:
        return self.module.nn.functional.logsigmoid(x)

    def softmax(self, x: Any) -> Any:
        return self.module.softmax(x, -1)

    def magnitude(self, x: Any) -> Any:
        return x.detach().abs().amax(-1, keepdim=True)

    def constant(self, draw: Draw, args: tuple[Any, ...], like: Any) -> Any:
        if self._stands_in(like):
            return self.module.tensor(_drawn(draw, args), dtype=like.dtype, device=like.device)
        return _torch_constant(draw, args, self.dtype(like), self.device(like))

    def _stands_in(self, x: Any) -> bool:
        """Whether ``x`` is of another type than arrays are: a fake tensor meets fake tensors only, so nothing may be kept."""
        return type(x) not in (self.module.Tensor, self.module.nn.Parameter)


class Jax(Framework):
    """JAX arrays and tracers."""

    name, roots, import_name = "jax", ("jax", "jaxlib"), "jax.numpy"
    devices, numbered = ("cpu", "gpu", "cuda", "rocm", "tpu"), True

    def __init__(self) -> None:
        super().__init__()
        self.jax: Any = sys.modules["jax"]
        self._explicit: Any = self.jax.sharding.AxisType.Explicit
        self._preference: Any = self.jax.make_user_context()  # part of jit's cache key, so a change retraces
        self.mirror(preference.context.get())

    def key(self, arrays: Iterable[Any]) -> tuple[Any, ...]:
        devices = tuple([None if x is None else self.device(x) for x in arrays])
        return self.forward_mode(arrays), devices, *super().key(arrays)

    def facts(self, x: Any) -> Facts:
        return super().facts(x)._replace(placed=self._placed(x))

    def context(self, spec: OpSpec, arrays: tuple[Any, ...], keywords: dict[str, Any]) -> Context | None:
        for x in arrays:
            type_of_x = getattr(x, "aval", None)
            if type_of_x is not None and self._explicit in type_of_x.sharding.mesh.axis_types:
                from .distributed.by_type import context_of

                return context_of(spec, arrays, keywords)
        return None

    def _placed(self, x: Any) -> bool:
        """False for a tracer, which runs where jit puts it, and for a ``ShapeDtypeStruct``."""
        return hasattr(x, "devices") and not isinstance(x, self.jax.core.Tracer)

    def device(self, x: Any) -> str:
        if not self._placed(x):
            default = self.jax.config.jax_default_device
            return self.jax.default_backend() if default is None else getattr(default, "platform", default)
        devices = sorted(x.devices(), key=lambda device: device.id)
        return devices[0].platform if len(devices) > 1 else f"{devices[0].platform}:{devices[0].id}"

    def placement(self, x: Any) -> str | None:
        return self.device(x) if self._placed(x) else None

    def forward_mode(self, arrays: Iterable[Any]) -> bool:
        return any(type(layer).__name__ == "JVPTracer" for x in arrays for layer in self._layers(x))

    def _layers(self, x: Any) -> Iterator[Any]:
        """The tracers that are wrapped around an array; ``jit``'s does not say what comes in."""
        while isinstance(x, self.jax.core.Tracer):
            yield x
            x = getattr(x, "val", getattr(x, "primal", None))

    def offsets(self, x: Any) -> Sequence[int] | None:
        on_host = self._placed(x) and self.device(x).startswith("cpu")
        return np.asarray(x).tolist() if on_host else None

    def glance(self, x: Any) -> NDArray[Any] | None:
        on_host = self._placed(x) and len(x.devices()) == 1 and self.device(x).startswith("cpu")
        return _wide(_first(np.asarray(x))) if on_host else None  # a view: nothing is copied

    def fetch(self, x: Any) -> NDArray[Any] | None:
        return _wide(np.asarray(x)) if self._placed(x) and x.is_fully_addressable else None

    def numbers(self, values: Sequence[float], like: Any) -> Any:
        made = super().numbers(values, like)
        one_place = self._placed(like) and len(like.devices()) == 1
        return self.jax.device_put(made, *like.devices()) if one_place else made

    def matmul(self, x: Any, y: Any) -> Any:
        return self.module.matmul(x, y, precision="highest")  # an accelerator's default rounds float32 operands

    def magnitude(self, x: Any) -> Any:
        return super().magnitude(self.jax.lax.stop_gradient(x))

    def count_up_to(self, ascending: Any, stop: int) -> Any:
        # its binary search is refused inside shard_map over some of a mesh's axes, where the others stay the compiler's
        ended = self.module.zeros(stop, ascending.dtype).at[ascending].add(1, mode="drop")
        return self.module.cumsum(ended, dtype=ascending.dtype)

    def mirror(self, backends: tuple[str, ...] | None) -> None:
        # Entered and never left: leaving would restore what another asyncio task of this thread had set meanwhile.
        self._preference(backends).__enter__()


class Mlx(Framework):
    """MLX arrays."""

    name, roots, import_name = "mlx", ("mlx",), "mlx.core"
    devices = ("cpu", "metal", "cuda")

    def key(self, arrays: Iterable[Any]) -> tuple[Any, ...]:
        return self.device(None), *super().key(arrays)  # its arrays live nowhere: the default device runs the call

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("mlx.core.")

    def device(self, x: Any) -> str:
        if self.module.default_device().type != self.module.DeviceType.gpu:
            return "cpu"
        return "metal" if self.module.metal.is_available() else "cuda"

    def offsets(self, x: Any) -> Sequence[int] | None:
        if self.device(x) != "cpu":
            return None
        try:
            return x.tolist()
        except ValueError:  # how MLX says that mx.compile or mx.vmap is tracing: nothing else tells
            return None

    def glance(self, x: Any) -> NDArray[Any] | None:
        return self.fetch(_first(x)) if self.device(x) == "cpu" else None

    def fetch(self, x: Any) -> NDArray[Any] | None:
        wide = x if x.dtype == self.module.float64 else x.astype(self.module.float32)
        try:
            return np.array(wide)
        except ValueError:  # as above
            return None

    def concat(self, arrays: Sequence[Any], axis: int) -> Any:
        return self.module.concatenate(list(arrays), axis=axis)

    def count_up_to(self, ascending: Any, stop: int) -> Any:
        return (ascending <= self.arange(stop, like=ascending)[:, None]).sum(-1).astype(ascending.dtype)  # no binary search

    def exp(self, x: Any) -> Any:
        """``e^x``. MLX's own is a float32 approximation for float64 as well (up to 0.32 at least); its power is not."""
        mx = self.module
        return mx.power(mx.array(math.e, mx.float64), x) if x.dtype == mx.float64 else mx.exp(x)

    def logaddexp(self, x: Any, y: Any) -> Any:
        """``log(e^x + e^y)``, by :meth:`exp`.

        Near each other, ``x`` and ``y`` are summed without a kink, so that second derivatives are right; else so that no small
        slope is left of ``1 - 1``.
        """
        mx = self.module
        if x.dtype != mx.float64:
            return mx.logaddexp(x, y)
        near = mx.abs(x - y) < 1
        half = mx.where(near, x - y, 0) / 2
        apart = mx.where(x == y, 0, mx.abs(x - y))  # equal infinities are 0 apart
        together = (x + y) / 2 + mx.log(self.exp(half) + self.exp(-half))
        return mx.where(near, together, mx.maximum(x, y) + mx.log1p(self.exp(-apart)))

    def magnitude(self, x: Any) -> Any:
        return super().magnitude(self.module.stop_gradient(x))

    def constant(self, draw: Draw, args: tuple[Any, ...], like: Any) -> Any:
        return self.module.array(_drawn(draw, args).tolist(), dtype=like.dtype)


_CLASSES: tuple[type[Framework], ...] = (Numpy, Torch, Jax, Mlx)
KNOWN = tuple(framework.name for framework in _CLASSES)
IMMUTABLE = ("jax", "mlx")
"""Frameworks whose arrays cannot be written to."""
LOADED: dict[str, Framework] = {}
BY_TYPE: dict[Any, Framework] = {}
"""The framework of every array type seen so far."""


def check_device(framework: str, device: str) -> None:
    """Refuse a device that no array of a framework can be on: ``OptionError`` that lists those there are."""
    cls = _CLASSES[KNOWN.index(framework)]
    kind, colon, number = device.partition(":")
    if kind in cls.devices and (not colon or (cls.numbered and number.isdecimal())):
        return
    numbers = ", each with a number after a colon or without" if cls.numbered else ""
    raise OptionError(f"{framework} arrays cannot be on {device!r}: expected one of {', '.join(cls.devices)}{numbers}")


def framework_of(x: Any, argument: str = "array", where: str = "") -> Framework:
    """The framework of an array; ``FrameworkError``, starting with ``where``, if it is none of a known framework."""
    return BY_TYPE.get(type(x)) or _recognise(x, argument, where)


def has_tangents(arrays: Iterable[Any]) -> bool:
    """True if a forward-mode derivative of these arrays, ``None`` among them aside, is being computed: they carry tangents."""
    given = [x for x in arrays if x is not None]
    return framework_of(given[0]).forward_mode(given)


def _recognise(x: Any, argument: str, where: str) -> Framework:
    """First array of its type: look at the modules of its base classes, so that nothing is imported to find out.

    One after the other, no further than needed: ``torch.compile`` may be tracing this, and older ones (2.11) cannot read the
    module of the last base of ``torch.Tensor``.
    """
    for base in type(x).__mro__ if hasattr(x, "shape") and hasattr(x, "dtype") else ():
        root = base.__module__.partition(".")[0]
        for candidate in _CLASSES:
            if root in candidate.roots:
                framework = LOADED.get(candidate.name) or LOADED.setdefault(candidate.name, candidate())
                BY_TYPE[type(x)] = framework
                return framework
    raise FrameworkError(where + _not_an_array(x, argument))


def _not_an_array(x: Any, argument: str) -> str:
    kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    if hasattr(x, "__dlpack__"):
        return (
            f"{argument}: {kind} is not an array of a framework that linattn knows ({', '.join(KNOWN)}), but it speaks DLPack: "
            f"convert it first, e.g. torch.from_dlpack({argument}) or numpy.from_dlpack({argument})"
        )
    return f"{argument}: expected an array of {', '.join(KNOWN[:-1])} or {KNOWN[-1]}, got {kind}"
