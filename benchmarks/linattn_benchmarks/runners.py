"""How each framework makes arrays, differentiates, waits and is timed. One small class per framework."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from linattn.errors import OptionError

from .clocks import wall_times

Arrays = dict[str, Any]
Function = Callable[[Arrays], tuple[Any, Any]]
"""A subject: arrays by parameter name to ``(o, final_state)``."""
Outputs = dict[str, Any]
"""``o``, ``final_state`` where there is one, and the gradient of ``x`` as ``dx``."""
Pulled = dict[str, Any]
"""Gradients of ``o`` and of a ``final_state``, by these names."""
Call = Callable[[], Outputs]


def outputs_of(result: tuple[Any, Any]) -> Outputs:
    """``(o, final_state)`` by name."""
    o, state = result
    return {"o": o} | ({} if state is None else {"final_state": state})


REPLAYS = 10
"""How often ``do_bench_cudagraph`` replays what it recorded."""
MOST_COPIES = 64
JAX_BATCH = 20
"""Calls that are queued before waiting, where they run beside the host."""


class Runner:
    """What the benchmark needs of a framework.

    Attributes:
        name: The framework's.
        devices: Kinds of device it can put arrays on.
    """

    name: str
    devices: tuple[str, ...] = ("cpu",)

    def __init__(self, device: str):
        self.device = device

    def refusal(self) -> str | None:
        """Why this machine cannot run it on this device; None if it can."""
        if importlib.util.find_spec(self.name) is None:
            return f"{self.name} is not installed"
        if self.device not in self.devices:
            return f"{self.name} arrays live on {' or '.join(self.devices)} here, not on {self.device}"
        return None

    def array(self, x: np.ndarray, dtype: str) -> Any:
        """``x`` on the device, rounded to ``dtype``."""
        raise NotImplementedError

    def numpy(self, x: Any) -> np.ndarray:
        """``x`` in float64."""
        return np.asarray(x).astype(np.float64)

    def without_gradients(self) -> AbstractContextManager[None]:
        """A block whose calls keep nothing for gradients."""
        return nullcontext()

    def forward(self, function: Function, arrays: Arrays) -> Call:
        """A call that runs ``function``; it may return before the device is done."""
        return lambda: outputs_of(function(arrays))

    def repeated(self, x: Any, count: int) -> Any:
        """``x`` with ``count`` tokens (axis 1), its own again and again."""
        return x[:, np.arange(count) % x.shape[1]]

    def forward_kept(self, function: Function, arrays: Arrays) -> Call:
        """As :meth:`forward`, where gradients of every array may be asked for: what they need is kept."""
        raise OptionError(f"{self.name} arrays carry no gradient")

    def forward_backward(self, function: Function, arrays: Arrays, pulled: Pulled) -> Call:
        """A call that also pulls the gradients of outputs back to every array."""
        raise OptionError(f"{self.name} arrays carry no gradient")

    def times(self, call: Call, seconds: float) -> list[float]:
        """Milliseconds of calls."""
        return wall_times(call, seconds)

    def graph_times(self, call: Call, seconds: float = 0.2) -> list[float] | None:
        """Milliseconds without the host's share, where the device can replay a recorded call; else None."""
        return None

    def copies(self, arrays: Arrays) -> list[Arrays]:
        """As many copies of the arrays, themselves among them, as no cache can hold: by turns, each is cold."""
        return [arrays]

    def release(self) -> None:
        """Give memory that is no longer used back to the device."""

    def wait(self, result: Any) -> None:
        """Wait until the device has computed ``result``."""

    def peak(self, call: Call) -> int | None:
        """Bytes that the device's allocator held beyond the inputs at most; None where nobody counts them."""
        return None


class Numpy(Runner):
    name = "numpy"

    def array(self, x: np.ndarray, dtype: str) -> Any:
        if dtype == "bfloat16":
            import ml_dtypes

            return x.astype(ml_dtypes.bfloat16)
        return x.astype(dtype)


class Torch(Runner):
    name = "torch"
    devices = ("cpu", "cuda")

    def refusal(self) -> str | None:
        missing = super().refusal()
        if missing is None and self.device == "cuda":
            import torch

            return None if torch.cuda.is_available() else "torch sees no CUDA device"
        return missing

    def array(self, x: np.ndarray, dtype: str) -> Any:
        import torch

        # A reversed axis of length one is contiguous to NumPy, with a negative stride that PyTorch refuses.
        return torch.from_numpy(np.array(x, order="C")).to(self.device, getattr(torch, dtype))

    def numpy(self, x: Any) -> np.ndarray:
        return x.detach().double().cpu().numpy()

    def without_gradients(self) -> AbstractContextManager[None]:
        import torch

        return torch.no_grad()

    def forward(self, function: Function, arrays: Arrays) -> Call:
        def call() -> Outputs:
            with self.without_gradients():
                return outputs_of(function(arrays))

        return call

    def forward_kept(self, function: Function, arrays: Arrays) -> Call:
        leaves = {name: x.detach().requires_grad_() for name, x in arrays.items()}
        return lambda: outputs_of(function(leaves))

    def forward_backward(self, function: Function, arrays: Arrays, pulled: Pulled) -> Call:
        import torch

        leaves = {name: x.detach().requires_grad_() for name, x in arrays.items()}
        names = [f"d{name}" for name in leaves]

        def call() -> Outputs:
            outputs = outputs_of(function(leaves))
            outer = tuple(outputs[name] for name in pulled)
            gradients = torch.autograd.grad(outer, tuple(leaves.values()), tuple(pulled.values()))
            return {**outputs, **dict(zip(names, gradients, strict=True))}

        return call

    def times(self, call: Call, seconds: float) -> list[float]:
        """On a GPU: by events after a warm-up, with the second-level cache flushed before each call."""
        if self.device != "cuda":
            return super().times(call, seconds)
        from triton.testing import do_bench

        return do_bench(call, warmup=25, rep=max(100, int(seconds * 1e3)), return_mode="all")

    def graph_times(self, call: Call, seconds: float = 0.2) -> list[float] | None:
        if self.device != "cuda":
            return None
        from triton.testing import do_bench_cudagraph

        try:
            return do_bench_cudagraph(call, rep=seconds * 1e3 / REPLAYS, return_mode="all")
        except RuntimeError:  # a call that waits for the device cannot be recorded
            return None

    def copies(self, arrays: Arrays) -> list[Arrays]:
        if self.device != "cuda":
            return [arrays]
        import torch

        cache = torch.cuda.get_device_properties().L2_cache_size
        count = min(MOST_COPIES, -(-2 * cache // sum(x.nbytes for x in arrays.values())))
        return [arrays, *({name: x.clone() for name, x in arrays.items()} for _ in range(count - 1))]

    def release(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def wait(self, result: Any) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def peak(self, call: Call) -> int | None:
        if self.device != "cuda":
            return None
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del result
        return peak


class Jax(Runner):
    name = "jax"
    devices = ("cpu", "cuda", "tpu")

    def refusal(self) -> str | None:
        missing = super().refusal()
        if missing is None:
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave room for the others
            try:
                self.place()
            except RuntimeError as error:
                return str(error).splitlines()[0]
        return missing

    def place(self) -> Any:
        """The first device of this kind."""
        import jax

        return jax.devices(self.device)[0]

    def array(self, x: np.ndarray, dtype: str) -> Any:
        import jax

        if dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        return jax.device_put(jax.numpy.asarray(x, dtype), self.place())

    def forward(self, function: Function, arrays: Arrays) -> Call:
        import jax

        compiled = jax.jit(lambda x: outputs_of(function(x)))
        return lambda: compiled(arrays)

    def forward_backward(self, function: Function, arrays: Arrays, pulled: Pulled) -> Call:
        import jax

        @jax.jit
        def both(x: Arrays, d: Pulled) -> Outputs:
            outputs, pull = jax.vjp(lambda leaves: {name: outputs_of(function(leaves))[name] for name in d}, x)
            return outputs | {f"d{name}": gradient for name, gradient in pull(d)[0].items()}

        return lambda: both(arrays, pulled)

    def times(self, call: Call, seconds: float) -> list[float]:
        """On an accelerator: batches of calls in a row, so that the host's share overlaps with the device's."""
        size = 1 if self.device == "cpu" else JAX_BATCH

        def batch() -> None:
            self.wait([call() for _ in range(size)][-1])

        return [ms / size for ms in wall_times(batch, seconds)]

    def wait(self, result: Any) -> None:
        import jax

        jax.block_until_ready(result)


class Mlx(Runner):
    name = "mlx"
    devices = ("cpu", "metal")

    def refusal(self) -> str | None:
        missing = super().refusal()
        if missing is None:
            import mlx.core as mx

            here = "metal" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
            return None if here == self.device else f"the default device of mlx is {here} here, not {self.device}"
        return missing

    def array(self, x: np.ndarray, dtype: str) -> Any:
        import mlx.core as mx

        return mx.array(x).astype(getattr(mx, dtype))

    def numpy(self, x: Any) -> np.ndarray:
        import mlx.core as mx

        return np.array(x.astype(mx.float32)).astype(np.float64)

    def forward(self, function: Function, arrays: Arrays) -> Call:
        return lambda: evaluated(outputs_of(function(arrays)))

    def forward_backward(self, function: Function, arrays: Arrays, pulled: Pulled) -> Call:
        import mlx.core as mx

        names = list(arrays)

        def only(*x: Any) -> list[Any]:
            outputs = outputs_of(function(dict(zip(names, x, strict=True))))
            return [outputs[name] for name in pulled]

        def call() -> Outputs:
            outputs, gradients = mx.vjp(only, list(arrays.values()), list(pulled.values()))
            found = dict(zip(pulled, outputs, strict=True))
            return evaluated({**found, **{f"d{name}": x for name, x in zip(names, gradients, strict=True)}})

        return call


def evaluated(outputs: Outputs) -> Outputs:
    """The same, computed."""
    import mlx.core as mx

    mx.eval(outputs)
    return outputs


RUNNERS: dict[str, type[Runner]] = {runner.name: runner for runner in (Numpy, Torch, Jax, Mlx)}
