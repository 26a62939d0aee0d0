"""The backend: which calls it takes, and its methods."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jax  # noqa: F401 - without it nothing here can be called, and the registry says what to install
from linattn.plugin import Call, Unsupported, form_methods

from .. import JaxTriton

DIAGONAL = ("linear_attn", "simple_gla", "gla", "rwkv6")
DELTA = ("delta_rule", "gated_delta_rule", "kda", "dplr")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")
"""Whether kernels run in Triton's interpreter, and so on the CPU; decided when the backend is imported."""

NEEDED = {"triton": "triton", "torch": "torch"} | ({} if INTERPRETED else {"jax_triton": "jax-triton"})
MISSING = [package for module, package in NEEDED.items() if find_spec(module) is None]


def later(family: str) -> Callable[..., Any]:
    """A function of :mod:`.calls`. PyTorch and Triton take a while to import, and who has no GPU never needs them."""

    def run(form: str, arrays: dict[str, Any], **options: Any) -> Any:
        from . import calls

        return getattr(calls, family)(form, arrays, **options)

    return run


@form_methods({"mixed_attn": later("mixed_attn")}, forms=("chunk", "recurrent"))
@form_methods(
    {**dict.fromkeys(DIAGONAL, later("diagonal")), **dict.fromkeys(DELTA, later("delta")), "linear_attn": later("linear_attn")},
    forms=("chunk", "recurrent"),
)
class JaxTritonBackend(JaxTriton):
    """The Triton kernels on JAX arrays, through jax-triton, on NVIDIA GPUs."""

    def supports(self, call: Call) -> Unsupported | None:
        """Whether the kernels take this call."""
        complaint = device_complaint(call) or call_complaint(call)
        return None if complaint is None else Unsupported(complaint)

    def missing_device(self) -> str | None:
        from .devices import present

        return None if INTERPRETED or present() else "NVIDIA GPUs"


def device_complaint(call: Call) -> str | None:
    """Kernels are compiled for NVIDIA GPUs, and interpreted elsewhere if asked."""
    device = call.device.partition(":")[0]
    if device == "cpu" and not INTERPRETED:
        return "runs on NVIDIA GPUs (on cpu only in Triton's interpreter: TRITON_INTERPRET=1)"
    if device not in ("cpu", "gpu", "cuda"):
        return f"runs on NVIDIA GPUs, not {device}"
    if MISSING:
        return f"needs {', '.join(MISSING)}: pip install 'linattn[jax_triton]'"
    if device == "cpu":
        return None
    from .devices import complaint

    return complaint()


def call_complaint(call: Call) -> str | None:
    """What the kernels have no form for."""
    if None in call.sizes.values():
        return "takes no symbolic sizes"
    from linattn_backends.triton.backend import call_complaint

    return call_complaint(call)
