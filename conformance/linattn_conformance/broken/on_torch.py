"""Faults on PyTorch tensors: the PyTorch backend with one small change each."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from linattn.plugin import Backend
from linattn_backends.torch import TorchBackend

__all__ = ["FAULTS"]


class OnTorch(Backend):
    """``chunk_gla`` of the PyTorch backend, with ``before`` and ``after`` to be changed."""

    api = ">=1,<2"
    frameworks = ("torch",)
    families: ClassVar[tuple[str, ...]] = ("gla",)
    forms: ClassVar[tuple[str, ...]] = ("chunk",)

    def chunk_gla(
        self, q, k, v, g, gv=None, *, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, chunk_size=None
    ):
        given = dict(q=q, k=k, v=v, g=g, gv=gv, scale=scale, initial_state=initial_state)
        given |= dict(output_final_state=output_final_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
        given = self.before(given)
        return self.after(given, *self.kernel(given))

    def kernel(self, given: dict[str, Any]) -> Any:
        # the plain function, as if this backend had been written from it
        method = TorchBackend.chunk_gla
        return getattr(method, "__wrapped__", method)(self, **given)

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        return given

    def after(self, given: dict[str, Any], o: Any, state: Any) -> Any:
        return o, state


class DetachedState(OnTorch):
    """The initial state is detached from the graph."""

    name = "torch-detached-state"

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        state = given["initial_state"]
        return {**given, "initial_state": None if state is None else state.detach()}


class OutputInFloat32(OnTorch):
    """bfloat16 in, float32 out."""

    name = "torch-output-dtype"

    def after(self, given: dict[str, Any], o: Any, state: Any) -> Any:
        return o.float() if o.dtype == torch.bfloat16 else o, state


class Narrowed(OnTorch):
    """Computes in bfloat16, whatever came."""

    name = "torch-narrowed"

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "q": given["q"].bfloat16().to(given["q"].dtype)}


class CarriedNarrow(OnTorch):
    """The state crosses from one half of the sequence to the other in the dtype of the operands."""

    name = "torch-narrow-carried-state"

    def kernel(self, given: dict[str, Any]) -> Any:
        T = given["q"].shape[1]
        if given["cu_seqlens"] is not None or T < 2:
            return super().kernel(given)
        names = [name for name in ("q", "k", "v", "g", "gv") if given[name] is not None]
        left = {**given, **{name: given[name][:, : T // 2] for name in names}, "output_final_state": True}
        right = {**given, **{name: given[name][:, T // 2 :] for name in names}}
        o, state = super().kernel(left)
        rest, final = super().kernel({**right, "initial_state": state.to(given["v"].dtype)})
        return torch.cat([o, rest], 1), final


class GraphBreak(OnTorch):
    """Looks at values in Python, which breaks the graph under ``torch.compile``."""

    name = "torch-graph-break"

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        if given["g"].numel() and given["g"].max().item() > 0:
            raise ValueError("gates must be at most 0")
        return given


class FollowsAutocast(OnTorch):
    """Its projections run in whatever dtype autocast says."""

    name = "torch-follows-autocast"

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        g = given["g"]
        eye = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
        return {**given, "g": torch.matmul(g, eye).to(g.dtype)}


class FallsBack(OnTorch):
    """Calls the PyTorch backend where it has no kernel of its own: for packed sequences."""

    name = "torch-silent-fallback"

    def kernel(self, given: dict[str, Any]) -> Any:
        return super().kernel(given) if given["cu_seqlens"] is None else TorchBackend().chunk_gla(**given)


class ChangesDefaultDtype(OnTorch):
    """Sets PyTorch's default dtype, and leaves it so."""

    name = "torch-changes-default-dtype"

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        torch.set_default_dtype(given["q"].dtype)
        return given


class SwitchesGradientsOff(OnTorch):
    """Switches gradients off where it needs none, and not on again."""

    name = "torch-switches-gradients-off"

    def after(self, given: dict[str, Any], o: Any, state: Any) -> Any:
        if not o.requires_grad:
            torch.set_grad_enabled(False)
        return o, state


class Seeds(OnTorch):
    """Sets the global seed, so that its own random numbers repeat."""

    name = "torch-seeds"

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        torch.manual_seed(7)  # no seed that others choose: what is as it was before has not changed
        return given


class MisreadsStrides(OnTorch):
    """Reads the values as if they were contiguous, whatever their strides."""

    name = "torch-misreads-strides"

    def before(self, given: dict[str, Any]) -> dict[str, Any]:
        v = given["v"]
        size = v.size()
        contiguous = torch.empty(size, device="meta").stride()
        fits = v.untyped_storage().nbytes() >= v.numel() * v.element_size()
        return {**given, "v": v.as_strided(size, contiguous, v.storage_offset())} if fits else given


FAULTS = (
    DetachedState,
    OutputInFloat32,
    Narrowed,
    CarriedNarrow,
    GraphBreak,
    FollowsAutocast,
    FallsBack,
    ChangesDefaultDtype,
    SwitchesGradientsOff,
    Seeds,
    MisreadsStrides,
)
"""Every fault on PyTorch tensors."""
