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
    def stages(family: str, arrays: dict[str, Any], **options: Any) -> Any:
        """By the operators themselves, and PyTorch's own gradients."""
        return tuple(arrays.values()), Staged(family, tuple(arrays), **options)


class Staged:
    """A call in stages. What it makes before any state is known it only marks, and sees that it comes back."""

    def __init__(self, family: str, names: tuple[str, ...], cu_seqlens: Any, offsets: tuple[int, ...], **options: Any) -> None:
        self.family, self.names, self.cu_seqlens, self.offsets, self.options = family, names, cu_seqlens, offsets, options

    def begin(self, inputs: Any, kept: Any = None) -> Any:
        if kept is None:
            return (inputs[0].sum(),)
        assert torch.equal(*kept, inputs[0].sum())
        return kept

    def summary(self, inputs: Any, made: Any, number: int | None) -> Any:
        arrays, _ = self.only(inputs, made, number)
        given = {name: x for name, x in arrays.items() if name not in ("q", "u")}
        return getattr(linattn, f"summary_{self.family}")(**given, **self.maps(), backend="torch")

    def finish(self, inputs: Any, made: Any, start: Any, final: bool) -> Any:
        assert torch.equal(*made, inputs[0].sum())
        o, end = self.run(dict(zip(self.names, inputs, strict=True)), start, self.cu_seqlens)
        return o, end if final else None, made

    def adjoint(self, inputs: Any, made: Any, do: Any, dfinal: Any, number: int | None) -> Any:
        arrays, cut = self.only(inputs, made, number)
        K, (B, _, HV, V) = arrays["k"].shape[-1], arrays["v"].shape
        start = torch.zeros((B, HV, K, V), dtype=do.dtype, device=do.device, requires_grad=True)
        return self.derived(arrays, start, None, cut(do), dfinal, [start])[0]

    def recall(self, inputs: Any, made: Any, start: Any) -> Any:
        return [*made, start.sum()]

    def gradients(self, inputs: Any, made: Any, start: Any, do: Any, dfinal: Any) -> Any:
        assert torch.equal(torch.stack(made), torch.stack((inputs[0].sum(), start.sum())))
        made.clear()
        leaves = [None if x is None else x.detach().requires_grad_() for x in (*inputs, start)]
        arrays = dict(zip(self.names, leaves, strict=False))
        wanted = [x for x in leaves if x is not None]
        found = iter(self.derived(arrays, leaves[-1], self.cu_seqlens, do, dfinal, wanted))
        return tuple(None if x is None else next(found) for x in leaves)

    def derived(self, arrays: Any, start: Any, cu_seqlens: Any, do: Any, dfinal: Any, wanted: Any) -> Any:
        with torch.enable_grad():
            o, final = self.run(arrays, start, cu_seqlens)
        outputs, gradients = ((o, final), (do, dfinal)) if dfinal is not None else ((o,), (do,))
        return torch.autograd.grad(outputs, wanted, gradients, allow_unused=True, materialize_grads=True)

    def run(self, arrays: Any, start: Any, cu_seqlens: Any) -> Any:
        keywords = dict(cu_seqlens=cu_seqlens, initial_state=start, output_final_state=True, backend="torch")
        return getattr(linattn, f"chunk_{self.family}")(**arrays, **self.options, **keywords)

    def maps(self) -> dict[str, Any]:
        """The options that a summary has."""
        return {name: x for name, x in self.options.items() if name not in ("scale", "chunk_size")}

    def only(self, inputs: Any, made: Any, number: int | None) -> Any:
        """The arrays of one of packed sequences, and what cuts others likewise."""
        assert torch.equal(*made, inputs[0].sum())
        arrays = dict(zip(self.names, inputs, strict=True))
        if number is None:
            return arrays, lambda x: x
        tokens = slice(*self.offsets[number : number + 2])
        alone = {name: x if x is None or x.dim() < 3 else x[:, tokens] for name, x in arrays.items()}
        return alone, lambda x: x[:, tokens]


def register() -> None:
    """Make it known to this process."""
    linattn.register_backend(Linking, replace=True)
