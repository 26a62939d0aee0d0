"""A backend that makes summaries and adjoints by itself, of PyTorch's operators: what links of ranks are tried with."""

from __future__ import annotations

from typing import Any

import linattn
import torch
from linattn.plugin import form_methods
from linattn_backends.torch import TorchBackend
from sequence_cases import AFFINE

LINKED = tuple(family for family in AFFINE if family != "ssd")


def summary_of(family: str) -> Any:
    """By way of the wider call."""

    def summarise(form: str, arrays: dict[str, Any], *, cu_seqlens: Any) -> Any:
        return getattr(linattn, f"summary_{family}")(**arrays, cu_seqlens=cu_seqlens, backend="torch")

    return summarise


@form_methods({family: summary_of(family) for family in LINKED}, forms=("summary",))
class Linking(TorchBackend):
    """The backend."""

    name = "linking"

    @staticmethod
    def adjoint(family: str, arrays: dict[str, Any], do: Any, dfinal: Any, **options: Any) -> Any:
        """By PyTorch's own gradients."""
        K, (B, _, HV, V) = arrays["k"].shape[-1], arrays["v"].shape
        start = torch.zeros((B, HV, K, V), dtype=do.dtype, device=do.device, requires_grad=True)
        operator = getattr(linattn, f"chunk_{family}")
        with torch.enable_grad():
            o, final = operator(**arrays, **options, initial_state=start, output_final_state=True, backend="torch")
        outputs, gradients = ((o, final), (do, dfinal)) if dfinal is not None else ((o,), (do,))
        return torch.autograd.grad(outputs, start, gradients)[0]


def register() -> None:
    """Make it known to this process."""
    linattn.register_backend(Linking, replace=True)
