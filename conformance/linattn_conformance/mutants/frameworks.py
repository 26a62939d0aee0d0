"""What faults need of each framework: arrays from NumPy and back, masks, gradients that are touched on their way."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ARRAYS", "Arrays", "JaxArrays", "NumpyArrays", "TorchArrays"]

Change = Callable[[Any], Any]

_draws = itertools.count()
"""Seeds of the noise that faults add, so that it is other noise each time."""


class Arrays:
    """The functions of one framework.

    Attributes:
        name: The framework.
        writable: Whether arrays can be written to.
        dtypes: The float dtypes of its arrays.
    """

    name: str
    writable = True
    dtypes: tuple[str, ...] = ("float32", "float16", "float64", "bfloat16")

    def numpy(self, x: Any) -> NDArray[Any]:
        """The values, in float64; integers as they are."""
        raise NotImplementedError

    def make(self, x: NDArray[Any], dtype: str, layout: str) -> Any:
        """An array of a dtype; ``layout`` is ``"plain"``, ``"transposed"`` or ``"sliced"``."""
        raise NotImplementedError

    def made(self, text: str, dtype: str, layout: str) -> str:
        """The expression that makes such an array, from that of its values."""
        raise NotImplementedError

    def is_array(self, x: Any) -> bool:
        """True for an array of the framework."""
        raise NotImplementedError

    def is_traced(self, x: Any) -> bool:
        """True if the values of an array cannot be looked at."""
        return False

    def is_contiguous(self, x: Any) -> bool:
        """True if elements lie one after the other."""
        return True

    def needs_grad(self, x: Any) -> bool:
        """True if a gradient of the array will be asked for, as far as one can see."""
        return False

    def dtype(self, x: Any) -> str:
        """Name of the dtype."""
        return str(x.dtype).removeprefix("torch.")

    def where(self, mask: NDArray[np.bool_], x: Any, y: Any) -> Any:
        """``x`` where the mask holds, else ``y``."""
        raise NotImplementedError

    def roll(self, x: Any, by: int, axis: int) -> Any:
        """The entries of an axis, each ``by`` places further."""
        raise NotImplementedError

    def clip(self, x: Any, most: float) -> Any:
        """No entry is further from zero than ``most``."""
        raise NotImplementedError

    def cast(self, x: Any, dtype: str) -> Any:
        """The array in another dtype."""
        raise NotImplementedError

    def noise(self, x: Any) -> Any:
        """Normal random numbers in the shape of an array, others each time."""
        return self.make(np.random.default_rng(next(_draws)).standard_normal(tuple(x.shape)), self.dtype(x), "plain")

    def touched(self, x: Any, change: Change) -> Any:
        """The array itself, whose gradient is changed on its way back."""
        return x

    def fed(self, x: Any, note: Change) -> Any:
        """The array itself, which tells the gradient that comes in to ``note``."""
        return x

    def write(self, x: Any, mask: NDArray[np.bool_], y: Any) -> None:
        """Write ``y`` into an array where the mask holds."""
        raise NotImplementedError

    def copy(self, x: Any) -> Any:
        """An array of its own memory."""
        raise NotImplementedError


class NumpyArrays(Arrays):
    """NumPy's."""

    name = "numpy"
    dtypes = ("float32", "float16", "float64")

    def numpy(self, x: Any) -> NDArray[Any]:
        return np.array(x, np.float64) if x.dtype.kind == "f" else np.array(x)

    def make(self, x: NDArray[Any], dtype: str, layout: str) -> Any:
        with np.errstate(over="ignore"):
            x = x.astype(dtype)
        return np.asfortranarray(x) if layout == "transposed" else np.repeat(x, 2, -1)[..., ::2] if layout == "sliced" else x

    def made(self, text: str, dtype: str, layout: str) -> str:
        text = f'({text}).astype("{dtype}")'
        if layout == "sliced":
            return f"np.repeat({text}, 2, -1)[..., ::2]"
        return f"np.asfortranarray({text})" if layout == "transposed" else text

    def is_array(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def is_contiguous(self, x: Any) -> bool:
        return x.flags.c_contiguous

    def where(self, mask: NDArray[np.bool_], x: Any, y: Any) -> Any:
        return np.where(mask, x, y)

    def roll(self, x: Any, by: int, axis: int) -> Any:
        return np.roll(x, by, axis)

    def clip(self, x: Any, most: float) -> Any:
        return np.clip(x, -most, most).astype(x.dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        if dtype == "bfloat16":  # NumPy has none: half a float32
            narrow = np.asarray(x, np.float32)
            return ((narrow.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        with np.errstate(over="ignore"):
            return x.astype(dtype)

    def write(self, x: Any, mask: NDArray[np.bool_], y: Any) -> None:
        x[mask] = np.broadcast_to(y, x.shape)[mask]

    def copy(self, x: Any) -> Any:
        return x.copy()


class TorchArrays(Arrays):
    """PyTorch's."""

    name = "torch"

    @functools.cached_property
    def torch(self) -> Any:
        import torch

        return torch

    def numpy(self, x: Any) -> NDArray[Any]:
        x = x.detach().cpu()
        return (x.double() if x.is_floating_point() else x).numpy().copy()

    def make(self, x: NDArray[Any], dtype: str, layout: str) -> Any:
        made = self.torch.from_numpy(np.array(x)).to(getattr(self.torch, dtype))
        if layout == "sliced" and made.dim():
            return made.repeat_interleave(2, -1)[..., ::2]
        return made.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" and made.dim() else made

    def made(self, text: str, dtype: str, layout: str) -> str:
        text = f"torch.from_numpy(np.array({text})).to(torch.{dtype})"
        if layout == "sliced":
            return f"{text}.repeat_interleave(2, -1)[..., ::2]"
        return f"{text}.transpose(0, -1).contiguous().transpose(0, -1)" if layout == "transposed" else text

    def is_array(self, x: Any) -> bool:
        return isinstance(x, self.torch.Tensor)

    def is_traced(self, x: Any) -> bool:
        torch = self.torch
        if torch.compiler.is_compiling():
            return True
        return type(x) not in (torch.Tensor, torch.nn.Parameter) or torch._C._functorch.is_functorch_wrapped_tensor(x)

    def is_contiguous(self, x: Any) -> bool:
        return x.is_contiguous()

    def needs_grad(self, x: Any) -> bool:
        return x.requires_grad

    def where(self, mask: NDArray[np.bool_], x: Any, y: Any) -> Any:
        return self.torch.where(self.torch.from_numpy(np.array(mask)).to(x.device), x, y)

    def roll(self, x: Any, by: int, axis: int) -> Any:
        return self.torch.roll(x, by, axis)

    def clip(self, x: Any, most: float) -> Any:
        return x.clamp(-most, most)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.to(getattr(self.torch, dtype))

    def touched(self, x: Any, change: Change) -> Any:
        if not (self.torch.is_grad_enabled() and x.requires_grad):
            return x
        seen = x.view_as(x)
        seen.register_hook(change)
        return seen

    def fed(self, x: Any, note: Change) -> Any:
        return self.touched(x, lambda gradient: note(gradient))

    def write(self, x: Any, mask: NDArray[np.bool_], y: Any) -> None:
        with self.torch.no_grad():
            x.detach().copy_(self.where(mask, y, x.detach()))

    def copy(self, x: Any) -> Any:
        return x.detach().clone()


class JaxArrays(Arrays):
    """JAX's, which nobody can write to."""

    name = "jax"
    writable = False

    @functools.cached_property
    def jax(self) -> Any:
        import jax
        import jax.numpy

        return jax

    def numpy(self, x: Any) -> NDArray[Any]:
        found = np.asarray(x)
        return found.astype(np.float64) if found.dtype.kind in "fV" else found

    def make(self, x: NDArray[Any], dtype: str, layout: str) -> Any:
        return self.jax.numpy.asarray(x, dtype)

    def made(self, text: str, dtype: str, layout: str) -> str:
        return f'jnp.asarray({text}, "{dtype}")'

    def is_array(self, x: Any) -> bool:
        return isinstance(x, self.jax.Array)

    def is_traced(self, x: Any) -> bool:
        return isinstance(x, self.jax.core.Tracer)

    def where(self, mask: NDArray[np.bool_], x: Any, y: Any) -> Any:
        return self.jax.numpy.where(mask, x, y)

    def roll(self, x: Any, by: int, axis: int) -> Any:
        return self.jax.numpy.roll(x, by, axis)

    def clip(self, x: Any, most: float) -> Any:
        return self.jax.numpy.clip(x, -most, most)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype)

    def touched(self, x: Any, change: Change) -> Any:
        @self.jax.custom_vjp
        def same(x: Any) -> Any:
            return x

        same.defvjp(lambda x: (x, None), lambda _, gradient: (change(gradient),))
        return same(x)

    def copy(self, x: Any) -> Any:
        return x


ARRAYS: dict[str, type[Arrays]] = {kind.name: kind for kind in (NumpyArrays, TorchArrays, JaxArrays)}
"""By framework."""
