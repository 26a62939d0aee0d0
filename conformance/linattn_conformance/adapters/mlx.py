"""MLX arrays on the CPU or an Apple GPU. Gradients come from ``mx.vjp`` of the eager call."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from .base import Adapter, Arrays, Global

__all__ = ["MlxAdapter"]


def _set_random_state(before: list[int]) -> None:
    mx.random.state[0][:] = mx.array(before, mx.uint32)


class MlxAdapter(Adapter):
    """Values travel through float64, which holds those of every narrower dtype exactly, and which MLX has on the CPU only.

    Its arrays live on no device: the default device runs the call, and is set when the adapter is made.
    """

    name = "mlx"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        kind = {"cpu": mx.cpu, "gpu": mx.gpu, "metal": mx.gpu}.get(device)
        if kind is None or not mx.is_available(kind):
            raise ValueError(f"MLX has no device {device!r} here: expected cpu, or gpu where there is one")
        mx.set_default_device(kind)

    def from_float64(self, x: Any, dtype: str) -> Any:
        with mx.stream(mx.cpu):
            array = mx.array(np.array(x), mx.float64).astype(getattr(mx, dtype))
            mx.eval(array)
        return array

    def to_float64(self, x: Any) -> Any:
        with mx.stream(mx.cpu):
            return np.array(x.astype(mx.float64) if mx.issubdtype(x.dtype, mx.floating) else x)

    def is_array(self, x: Any) -> bool:
        return isinstance(x, mx.array)

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("mlx.core.")

    def strided(self, x: Any) -> Any:
        if not mx.issubdtype(x.dtype, mx.floating) or x.ndim < 2:
            return x
        with mx.stream(mx.cpu):
            reversed_x = x.transpose()
            gaps = mx.stack([reversed_x, mx.full(reversed_x.shape, np.nan, x.dtype)], -1).flatten(-2)
            view = gaps[..., ::2].transpose()
            mx.eval(view)
        return view

    def poison(self, sizes: Any) -> None:
        blocks = [mx.full((size,), np.nan, dtype) for size in sizes.values() for dtype in (mx.float32, mx.bfloat16) * 2]
        mx.eval(blocks)
        del blocks

    def gradients(self, call: Any, arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        names = [name for name, x in arrays.items() if mx.issubdtype(x.dtype, mx.floating)]
        outputs: Arrays = {}

        def wanted(*floats: Any) -> list[Any]:
            nonlocal outputs
            outputs = call({**arrays, **dict(zip(names, floats, strict=True))})
            return [outputs[name] for name in used]

        used = list(cotangents)
        _, found = mx.vjp(wanted, [arrays[name] for name in names], [cotangents[name] for name in used])
        return outputs, dict(zip(names, found, strict=True))

    def globals(self) -> tuple[Global, ...]:
        return (
            *super().globals(),
            Global("default device", mx.default_device, mx.set_default_device),
            Global("default stream", lambda: mx.default_stream(mx.default_device()), mx.set_default_stream),
            Global("random state of MLX", lambda: np.array(mx.random.state[0]).tolist(), _set_random_state),
        )

    def transforms(self) -> Any:
        from .mlx_transforms import TRANSFORMS

        return TRANSFORMS

    def repeated(self, x: Any, axis: int, times: int, rest: int) -> Any:
        return mx.concatenate([*[x] * times, mx.split(x, [rest], axis)[0]], axis)

    def lengthened(self, x: Any, axis: int, length: int) -> Any:
        return mx.broadcast_to(mx.split(x, [1], axis)[0], [length if i == axis else n for i, n in enumerate(x.shape)])

    def versions(self) -> dict[str, str]:
        found = {"mlx": mx.__version__}
        return found if self.device == "cpu" else {**found, "device": str(mx.device_info()["device_name"])}
