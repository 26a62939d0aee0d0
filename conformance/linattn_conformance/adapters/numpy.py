"""NumPy arrays. Gradients come from the backend's own ``vjp`` method; there are no transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .base import Adapter, Arrays, far_apart, in_a_thread, repeating

__all__ = ["NumpyAdapter"]


class NumpyAdapter(Adapter):
    """NumPy has no bfloat16 of its own: those cases are not for it."""

    name = "numpy"
    eager = True

    def __init__(self, device: str) -> None:
        super().__init__(device)
        if device not in ("cpu", "cpu:0"):
            raise ValueError(f"NumPy has no device {device!r}: expected cpu")

    def from_float64(self, x: Any, dtype: str) -> Any:
        with np.errstate(over="ignore"):
            return np.array(x, dtype=dtype)

    def to_float64(self, x: Any) -> Any:
        return np.array(x, dtype=np.float64) if x.dtype.kind == "f" else np.array(x)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, np.ndarray)

    def dtype(self, x: Any) -> str:
        return x.dtype.name

    def strided(self, x: Any) -> Any:
        if x.dtype.kind != "f" or x.ndim < 2:
            return x
        gaps = np.full((*x.shape[::-1][:-1], 2 * x.shape[0]), np.nan, x.dtype)
        view = gaps[..., ::2].transpose()
        view[...] = x
        return view

    def sliced(self, x: Any) -> Any:
        if x.dtype.kind != "f":
            return x
        whole = np.full([size + 3 for size in x.shape], np.nan, x.dtype)
        view = whole[tuple(slice(2, 2 + size) for size in x.shape)]
        view[...] = x
        return view

    def headsfirst(self, x: Any) -> Any:
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if x.ndim > 2 else x

    def expanded(self, x: Any) -> Any:
        return np.broadcast_to(x[repeating(x)], x.shape)

    def reversed(self, x: Any) -> Any:
        flip = (slice(None, None, -1),) * x.ndim
        return np.ascontiguousarray(x[flip])[flip]

    def readonly(self, x: Any) -> Any:
        x.flags.writeable = False
        return x

    def misaligned(self, x: Any) -> Any:
        room = np.zeros(x.nbytes + 1, np.uint8)
        view = room[1:].view(x.dtype).reshape(x.shape)
        view[...] = x
        return view

    def far(self, x: Any) -> Any:
        size, strides = far_apart(x.shape)
        room = np.empty(size, x.dtype)  # pages that nobody touches take no memory
        view = np.lib.stride_tricks.as_strided(room, x.shape, [stride * x.itemsize for stride in strides])
        view[...] = x
        return view

    def poison(self, sizes: Any) -> None:
        blocks = [np.full(size, np.nan, dtype) for size in sizes.values() for dtype in (np.float64, np.float32) * 2]
        del blocks

    def aside(self, call: Callable[[], Arrays]) -> Arrays:
        return in_a_thread(call)

    def overwrite(self, arrays: Arrays, values: Arrays) -> None:
        for name, x in arrays.items():
            x[...] = values[name]

    def gradients(self, call: Any, arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        outputs = call(arrays)
        return outputs, call.vjp(arrays, cotangents)

    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}
