"""The backend: which calls it takes, and its methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from linattn.plugin import Backend, Call, Unsupported
from packaging.version import Version
from torch import Tensor

from .library import diagonal

__all__ = ["TritonBackend"]

WIDEST = 512
OLDEST = Version("3.2")
FORMS = ("chunk", "recurrent")

INTERPRETED = bool(triton.knobs.runtime.interpret) if hasattr(triton, "knobs") else False
"""Whether kernels run in Triton's interpreter, on the CPU too; decided when the backend is imported."""

Result = tuple[Tensor, Tensor | None]


def _run(
    form: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    u: Tensor | None = None,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    wide: bool = False,
) -> Result:
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    o, final = diagonal(q, k, v, g, gv, u, initial_state, cu_seqlens, form, scale, chunk_size or 0, output_final_state, wide)
    return o, final if output_final_state else None


def _linear_attn(form, q, k, v, *, scale=None, causal=True, normalize=False, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    options = dict(scale=scale, initial_state=initial_state, output_final_state=output_final_state,
                   cu_seqlens=cu_seqlens, chunk_size=chunk_size)  # fmt: skip
    if not causal:
        raise Unsupported("causal=False is left to the torch backend")
    if not normalize:
        return _run(form, q, k, v, **options)
    v1 = torch.cat((v, torch.ones_like(v[..., :1])), -1)  # the sums of keys are one more value column, of ones
    o, final = _run(form, q, k, v1, wide=True, **options)
    numerator, denominator = o[..., :-1], o[..., -1:]
    zero = denominator == 0
    return (numerator / denominator.masked_fill(zero, 1.0)).masked_fill(zero, 0.0).to(v.dtype), final


def _simple_gla(form, q, k, v, g, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    return _run(form, q, k, v, g, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
                cu_seqlens=cu_seqlens, chunk_size=chunk_size)  # fmt: skip


def _gla(form, q, k, v, g, gv=None, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    return _run(form, q, k, v, g, gv, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
                cu_seqlens=cu_seqlens, chunk_size=chunk_size)  # fmt: skip


def _rwkv6(form, q, k, v, g, u, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None):  # fmt: skip  # noqa: E501
    return _run(form, q, k, v, g, None, u, scale=scale, initial_state=initial_state,
                output_final_state=output_final_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size)  # fmt: skip


_FAMILIES: dict[str, Callable[..., Any]] = {
    "linear_attn": _linear_attn,
    "simple_gla": _simple_gla,
    "gla": _gla,
    "rwkv6": _rwkv6,
}


def _method(form: str, family: str) -> Callable[..., Any]:
    """The backend method of one form of a family: its function's parameters with ``self`` for the form."""
    function = _FAMILIES[family]

    def method(self, *args, **kwargs):
        return function(form, *args, **kwargs)

    first, *others = inspect.signature(function).parameters.values()
    method.__signature__ = inspect.Signature([first.replace(name="self"), *others])
    method.__name__ = method.__qualname__ = f"{form}_{family}"
    method.__doc__ = f"{form.capitalize()} form of ``{family}``."
    return method


def _device_complaint(device: str) -> str | None:
    """Why kernels cannot run on a device: what there is to know before any array arrives."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return None if INTERPRETED else "runs on CUDA devices (on cpu only in Triton's interpreter: TRITON_INTERPRET=1)"
    if kind != "cuda":
        return f"runs on CUDA devices, not {kind}"
    return _ARCHITECTURES.get(device, _ARCHITECTURES.get("cuda:0"))


def _architectures() -> dict[str, str | None]:
    """For each device present at import, the reason why it cannot be used, or ``None``."""
    if not torch.cuda.is_available():
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        new_enough = major >= 8 or torch.version.hip is not None
        found[f"cuda:{index}"] = None if new_enough else f"needs compute capability 8.0 or newer, got {major}.{minor}"
    return found


_ARCHITECTURES: dict[str, str | None] = _architectures()


class TritonBackend(Backend):
    """Triton kernels for the families with a diagonal gate, on NVIDIA GPUs."""

    name = "triton"
    api = ">=1,<2"
    frameworks = ("torch",)

    def supports(self, call: Call) -> Unsupported | None:
        """Whether the kernels take this call."""
        complaint = self._complaint(call)
        return None if complaint is None else Unsupported(complaint)

    @staticmethod
    def _complaint(call: Call) -> str | None:
        if Version(triton.__version__.partition("+")[0]) < OLDEST:
            return f"needs Triton {OLDEST} or newer, got {triton.__version__}"
        complaint = _device_complaint(call.device)
        if complaint:
            return complaint
        if "float64" in call.dtypes.values():
            return "has no float64"
        extra = int(call.op == "linear_attn" and bool(call.option("normalize")))
        for symbol, size in (("K", call.K), ("V", call.V)):
            most = WIDEST - extra * (symbol == "V")
            if size is not None and not 1 <= size <= most:
                return f"{symbol} must be at most {most}, got {size}"
        if call.op == "linear_attn" and not call.option("causal", True):
            return "has no causal=False"
        if call.op == "gla" and call.has("gv") and (call.form != "recurrent" or call.needs_grad is not False):
            return "takes gv in the recurrent form without gradients only"
        return None


for _form in FORMS:
    for _family in _FAMILIES:
        setattr(TritonBackend, f"{_form}_{_family}", _method(_form, _family))
