"""Host code that is written for PyTorch, run for JAX arrays while JAX traces.

The host code of the Triton kernels reads no data: it allocates, launches, and does a few tensor operations between. Here it
runs on ``meta`` tensors, which have shapes and strides alone, and behind the storage of each stands a flat JAX array:

* a kernel that is launched becomes a call of the kernel in the JAX program (:mod:`.launchers`). It may write whatever the host
  code allocated, and never what it was given;
* a view is a view: tensors share a storage, and so an array;
* any other operation is done to the arrays by its entry in :mod:`.operations`.

So there is one host code, and what it asks for is what both frameworks run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linattn_backends.triton.runtime.device import Properties

from .operations import ALLOCATIONS, OPERATIONS

__all__ = ["Host", "Memory", "as_torch"]

Array = Any

DTYPES: dict[Any, torch.dtype] = {
    np.dtype(name): getattr(torch, name) for name in ("float16", "float32", "float64", "int8", "int32", "int64", "bool")
}
DTYPES[jnp.dtype(jnp.bfloat16)] = torch.bfloat16
OF_TORCH = {theirs: ours for ours, theirs in DTYPES.items()}


def of_torch(dtype: torch.dtype) -> Any:
    """JAX's: 32 bits where it was not told to have 64."""
    return jax.dtypes.canonicalize_dtype(OF_TORCH[dtype])


def as_torch(dtype: Any) -> torch.dtype:
    """PyTorch's name of a dtype."""
    return DTYPES[jnp.dtype(dtype)]


class Memory:
    """The array behind a storage, flat; ``None`` until something is written. ``own`` is what the host code allocated.

    ``wide`` is float64 where JAX was not told to have it: what one kernel leaves for the next, in two int32 a number.
    ``unwritten`` is what stands where nothing was written, which must not be read: NaN, or -1 among integers.
    """

    def __init__(self, storage: Any, dtype: torch.dtype, array: Array | None, own: bool):
        self.storage = storage  # kept, or another storage could get its address
        self.array, self.own = array, own
        self.wide = dtype == torch.float64 and of_torch(dtype) != np.float64
        self.dtype = np.dtype(np.int32) if self.wide else of_torch(dtype)
        self.size = storage.nbytes() // (4 if self.wide else dtype.itemsize)
        self.unwritten = math.nan if dtype.is_floating_point else -1

    def read(self) -> Array:
        """The array."""
        return jnp.full(self.size, self.unwritten, self.dtype) if self.array is None else self.array


class Pointer(NamedTuple):
    """A tensor among a kernel's arguments: where it begins, and how it lies for who must know."""

    memory: Memory
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Launcher = Callable[[Any, int, Sequence[Any], dict[str, Any]], None]
"""Runs ``(kernel, programs, arguments, configuration)``; tensors among the arguments are :class:`Pointer`."""


class Host(TorchDispatchMode):
    """While entered, runs host code on the tensors that it made of JAX arrays.

    Args:
        launcher: Runs kernels, and replaces the arrays of what they write.
        properties: The properties of the device that kernels and tiles are chosen for.
    """

    def __init__(self, launcher: Launcher, properties: Properties):
        super().__init__()
        self.launcher, self.properties = launcher, properties
        self.memories: dict[int, Memory] = {}
        self.family = ""

    def tensor(self, x: Array) -> Tensor:
        """A tensor that stands for ``x``."""
        found = torch.empty(x.shape, dtype=as_torch(x.dtype), device="meta")
        self._remember(found, x.reshape(-1), own=False)
        return found

    def array(self, x: Tensor) -> Array:
        """What ``x`` holds, dense."""
        flat, axes = self._numbers(x).read(), spread(x)
        if axes is None:
            return flat[places(x)]
        sizes = [x.shape[axis] for axis in axes]
        dense = flat[x.storage_offset() :][: math.prod(sizes)].reshape(sizes)
        dense = dense.transpose([axes.index(axis) for axis in sorted(axes)])
        return jnp.broadcast_to(jnp.expand_dims(dense, [axis for axis in range(x.dim()) if axis not in axes]), x.shape)

    def memory(self, x: Tensor) -> Memory:
        """What is behind a tensor."""
        return self.memories[x.untyped_storage()._cdata]

    def start(self, kernel: Any, count: int, args: tuple[Any, ...], config: dict[str, Any]) -> None:
        """Launch a kernel, as :func:`linattn_backends.triton.runtime.launch.start` is asked to."""
        self.launcher(kernel, count, [self._pointer(x) if isinstance(x, Tensor) else x for x in args], config)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        out = func(*args, **kwargs)
        tensors = [x for x in jax.tree.leaves(out) if isinstance(x, Tensor)]
        fresh = [x for x in tensors if x.untyped_storage()._cdata not in self.memories]
        for x in fresh:
            self._remember(x, None, own=True)
        if name not in ALLOCATIONS and (fresh or func._schema.is_mutable):  # else they are views
            for x, value in zip(tensors, self._compute(func, name, out, args, kwargs), strict=True):
                self._write(x, jnp.broadcast_to(jnp.asarray(value, of_torch(x.dtype)), x.shape))
        return out

    def _compute(self, func: Any, name: str, out: Any, args: Any, kwargs: dict[str, Any]) -> list[Array]:
        """The values of the tensors in ``out``."""
        if name not in OPERATIONS:
            raise NotImplementedError(f"linattn jax_triton: the host code asks for {func}, which has no entry in OPERATIONS")
        given = jax.tree.map(lambda x: self.array(x) if isinstance(x, Tensor) else x, list(args))
        return jax.tree.leaves(OPERATIONS[name](*given, **{key: x for key, x in kwargs.items() if key != "out"}, like=out))

    def _remember(self, x: Tensor, array: Array | None, own: bool) -> None:
        storage = x.untyped_storage()
        self.memories[storage._cdata] = Memory(storage, x.dtype, array, own)

    def _numbers(self, x: Tensor) -> Memory:
        """What is behind a tensor, as JAX can compute with it."""
        memory = self.memory(x)
        if memory.wide:
            raise NotImplementedError("linattn jax_triton: the host code computes in float64, which only kernels can here")
        return memory

    def _write(self, x: Tensor, value: Array) -> None:
        memory, dense = self._numbers(x), x.is_contiguous()
        if dense and x.numel() == memory.size:
            memory.array = value.reshape(-1)
        elif dense:
            begin = x.storage_offset()
            memory.array = memory.read().at[begin : begin + x.numel()].set(value.reshape(-1))
        else:
            memory.array = memory.read().at[places(x)].set(value)

    def _pointer(self, x: Tensor) -> Pointer:
        return Pointer(self.memory(x), x.storage_offset(), tuple(x.shape), x.stride())


def spread(x: Tensor) -> list[int] | None:
    """The axes of a view along which its elements differ, outermost first; ``None`` if there are gaps between elements."""
    axes = [axis for axis, (n, step) in enumerate(zip(x.shape, x.stride(), strict=True)) if n != 1 and step != 0]
    axes.sort(key=lambda axis: -x.stride(axis))
    sizes = [x.shape[axis] for axis in axes]
    steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return axes if all(x.stride(axis) == step for axis, step in zip(axes, steps, strict=True)) else None


def places(x: Tensor) -> Any:
    """Of a view's elements in its storage: a constant of the size of ``x``, for views that are small."""
    axes = [np.arange(n) * step for n, step in zip(x.shape, x.stride(), strict=True)]
    return x.storage_offset() + sum(np.ix_(*axes), np.zeros((), np.int64))
