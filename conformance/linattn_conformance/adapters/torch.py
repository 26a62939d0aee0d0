"""PyTorch tensors on any device. Gradients come from autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .base import Adapter, Arrays

__all__ = ["TorchAdapter"]


class TorchAdapter(Adapter):
    """Values travel through float64, which holds those of every narrower dtype exactly."""

    name = "torch"

    def from_float64(self, x: Any, dtype: str) -> Any:
        return torch.from_numpy(np.array(x)).to(getattr(torch, dtype)).to(self.device)

    def to_float64(self, x: Any) -> Any:
        x = x.detach().cpu()
        return (x.double() if x.is_floating_point() else x).numpy().copy()

    def is_array(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def is_same_device(self, x: Any) -> bool:
        wanted = torch.device(self.device)
        return x.device.type == wanted.type and (wanted.index is None or x.device.index == wanted.index)

    def strided(self, x: Any) -> Any:
        if not x.is_floating_point() or x.dim() < 2:
            return x
        gaps = x.new_full((*tuple(x.shape)[::-1][:-1], 2 * x.shape[0]), float("nan"))
        view = gaps[..., ::2].permute(*reversed(range(x.dim())))
        view.copy_(x)
        return view

    def poison(self, sizes: Any) -> None:
        blocks = [
            torch.full((size,), float("nan"), dtype=dtype, device=self.device)
            for size in sizes.values()
            for dtype in (torch.float64, torch.float32, torch.bfloat16)
        ]
        del blocks

    def tracked(self, arrays: Arrays) -> Arrays:
        return {name: x.detach().requires_grad_() if x.is_floating_point() else x for name, x in arrays.items()}

    def gradients(self, call: Any, arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        leaves = self.tracked(arrays)
        outputs = call(leaves)
        named = {name: x for name, x in leaves.items() if x.requires_grad}
        used = [name for name in cotangents if self.is_array(outputs.get(name)) and outputs[name].requires_grad]
        if not used:
            return outputs, {}
        found = torch.autograd.grad(
            [outputs[name] for name in used],
            list(named.values()),
            [cotangents[name] for name in used],
            allow_unused=True,
        )
        return outputs, dict(zip(named, found, strict=True))

    def transforms(self) -> Any:
        from .torch_transforms import TRANSFORMS

        return TRANSFORMS

    def repeated(self, x: Any, axis: int, times: int, rest: int) -> Any:
        return torch.cat([*[x] * times, x.narrow(axis, 0, rest)], axis)

    def memory(self) -> float:
        kind = torch.device(self.device)
        return torch.cuda.get_device_properties(kind).total_memory / 2**30 if kind.type == "cuda" else 0.0

    def versions(self) -> dict[str, str]:
        found = {"torch": str(torch.__version__)}
        if torch.device(self.device).type == "cuda":
            found |= {"device": torch.cuda.get_device_name(self.device), "cuda": str(torch.version.cuda)}
        return found
