"""PyTorch tensors on any device. Gradients come from autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .base import Adapter, Arrays, Global, far_apart, in_a_thread, repeating

if TYPE_CHECKING:
    from ..cases import Case

__all__ = ["TorchAdapter"]

KEPT = 2**28
"""Bytes of a GPU that a process may keep between two cases."""


def _autocast() -> dict[str, Any]:
    return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}


def _set_autocast(before: dict[str, Any]) -> None:
    for kind, (enabled, dtype) in before.items():
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _cudnn() -> dict[str, bool]:
    return {name: getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")}


def _set_cudnn(before: dict[str, bool]) -> None:
    for name, value in before.items():
        setattr(torch.backends.cudnn, name, value)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TorchAdapter(Adapter):
    """Values travel through float64, which holds those of every narrower dtype exactly."""

    name = "torch"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.eager = torch.device(device).type == "cpu"

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
        index = None if wanted.type == "cpu" else wanted.index
        return x.device.type == wanted.type and (index is None or x.device.index == index)

    def strided(self, x: Any) -> Any:
        if not x.is_floating_point() or x.dim() < 2:
            return x
        gaps = x.new_full((*tuple(x.shape)[::-1][:-1], 2 * x.shape[0]), float("nan"))
        view = gaps[..., ::2].permute(*reversed(range(x.dim())))
        view.copy_(x)
        return view

    def sliced(self, x: Any) -> Any:
        if not x.is_floating_point():
            return x
        whole = x.new_full([size + 3 for size in x.shape], float("nan"))
        return whole[tuple(slice(2, 2 + size) for size in x.shape)].copy_(x)

    def headsfirst(self, x: Any) -> Any:
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x

    def expanded(self, x: Any) -> Any:
        return x[repeating(self.to_float64(x))].expand(x.shape)

    def misaligned(self, x: Any) -> Any:
        room = x.new_empty(x.numel() + 1)
        return room[1:].view(x.shape).copy_(x)

    def mode(self, name: str) -> AbstractContextManager[Any]:
        return torch.no_grad() if name == "no_grad" else torch.inference_mode()

    def set_up(self, case: Case) -> None:
        if case.memory and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def far(self, x: Any) -> Any:
        size, strides = far_apart(tuple(x.shape))
        view = x.new_empty(size).as_strided(x.shape, strides)  # on the host, pages that nobody touches take no memory
        return view.copy_(x)

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
        return self.gradients_again("", call, arrays, cotangents)

    def gradients_again(self, how: str, call: Any, arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        leaves = self.tracked(arrays)
        outputs = call(leaves)
        named = {name: x for name, x in leaves.items() if x.requires_grad}
        used = [name for name in cotangents if self.is_array(outputs.get(name)) and outputs[name].requires_grad]
        if not used:
            return outputs, {}
        ends, starts = [outputs[name] for name in used], [cotangents[name] for name in used]
        if how == "accumulated":
            torch.autograd.backward(ends, starts)
            return outputs, {name: x.grad for name, x in named.items()}
        if how == "retained":
            torch.autograd.grad(ends, list(named.values()), starts, allow_unused=True, retain_graph=True)
        found = torch.autograd.grad(ends, list(named.values()), starts, allow_unused=True)
        return outputs, dict(zip(named, found, strict=True))

    def aside(self, call: Callable[[], Arrays]) -> Arrays:
        return in_a_thread(call)

    def overwrite(self, arrays: Arrays, values: Arrays) -> None:
        for name, x in arrays.items():
            x.copy_(values[name])

    def surroundings(self) -> Mapping[str, Callable[[], AbstractContextManager[Any]]]:
        return {
            "float64 as default dtype": lambda: _default_dtype(torch.float64),
            "bfloat16 as default dtype": lambda: _default_dtype(torch.bfloat16),
            "meta as default device": lambda: torch.device("meta"),
        }

    def in_child(self) -> None:
        torch.set_num_threads(1)

    @contextmanager
    def another_stream(self, arrays: Arrays) -> Iterator[None]:
        stream = torch.cuda.Stream(self.device)
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(10**7)  # what stays on the default stream comes late
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def replayed(self, call: Callable[[], Arrays], change: Callable[[], None]) -> Arrays:
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):  # compilers and autotuners are done before a call is recorded
            for _ in range(3):
                call()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = call()
        change()
        graph.replay()
        torch.cuda.synchronize(self.device)
        return outputs

    def wait(self) -> None:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)

    def give_back(self) -> None:
        if torch.device(self.device).type == "cuda" and torch.cuda.memory_reserved(self.device) > KEPT:
            torch.cuda.empty_cache()

    def transforms(self) -> Any:
        from .torch_transforms import TRANSFORMS

        return TRANSFORMS

    def globals(self) -> tuple[Global, ...]:
        cuda = torch.device(self.device).type == "cuda"
        on_device = Global(
            "random state of PyTorch on the device",
            lambda: torch.cuda.get_rng_state(self.device),
            lambda state: torch.cuda.set_rng_state(state, self.device),
        )
        return (
            *super().globals(),
            Global("default dtype", torch.get_default_dtype, torch.set_default_dtype),
            Global("default device", torch.get_default_device, torch.set_default_device),
            Global("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
            Global("number of threads", torch.get_num_threads, torch.set_num_threads),
            Global("precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
            Global("autocast", _autocast, _set_autocast),
            Global("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
            Global("settings of cuDNN", _cudnn, _set_cudnn),
            Global("determinism", torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
            Global("random state of PyTorch", torch.get_rng_state, torch.set_rng_state),
            *([on_device] if cuda else []),
        )

    def repeated(self, x: Any, axis: int, times: int, rest: int) -> Any:
        return torch.cat([*[x] * times, x.narrow(axis, 0, rest)], axis)

    def lengthened(self, x: Any, axis: int, length: int) -> Any:
        return x.narrow(axis, 0, 1).expand(*(length if i == axis else n for i, n in enumerate(x.shape)))

    def held(self) -> int:
        return torch.cuda.memory_allocated(self.device) if torch.device(self.device).type == "cuda" else 0

    def memory(self) -> float:
        kind = torch.device(self.device)
        return torch.cuda.get_device_properties(kind).total_memory / 2**30 if kind.type == "cuda" else 0.0

    def versions(self) -> dict[str, str]:
        found = {"torch": str(torch.__version__)}
        if torch.device(self.device).type == "cuda":
            found |= {"device": torch.cuda.get_device_name(self.device), "cuda": str(torch.version.cuda)}
        return found
