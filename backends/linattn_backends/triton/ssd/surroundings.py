"""Launches of :mod:`.kernels`: what the core takes, made of the arrays of ``ssd``, and what follows of what it gives."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..host.chunks import rows_contiguous, strides
from ..host.sums import sums_of_parts
from ..host.tiles import programs
from ..host.variant import Stage
from ..runtime.device import properties
from ..runtime.launch import launch
from .config import variant, walks_for, weights_have_slopes

__all__ = ["Surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """A call but for its core.

    Attributes:
        x, dt, A, D, z, bias: As in the specification, rows contiguous; ``D``, ``z`` and ``bias`` may be ``None``.
        cu: Offsets of packed sequences, or ``None``.
        softplus: Whether step sizes are a softplus.
        least, most: The least and the greatest of them.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    D: Tensor | None
    z: Tensor | None
    bias: Tensor | None
    cu: Tensor | None
    softplus: bool
    least: float
    most: float
    family = "ssd"

    @classmethod
    def of(
        cls, x: Tensor, dt: Tensor, A: Tensor, D: Tensor | None, z: Tensor | None, bias: Tensor | None, cu: Tensor | None,
        softplus: bool, least: float, most: float,
    ) -> Surroundings:  # fmt: skip
        """Take the arrays of an op."""
        D, bias = (None if p is None else p.contiguous() for p in (D, bias))
        z = None if z is None else rows_contiguous(z)
        return cls(rows_contiguous(x), dt, A.contiguous(), D, z, bias, cu, softplus, float(least), float(most))

    @property
    def v(self) -> Tensor:
        """An array of its shape, on the device where it is launched."""
        return self.x

    @property
    def skip(self) -> int:
        """Dimensions of ``D``."""
        return 0 if self.D is None else self.D.dim()

    @property
    def has_slopes(self) -> bool:
        """Whether gradients of weights say those of step sizes."""
        return weights_have_slopes(self.softplus, self.most, self.skip)

    def stage(self, name: str, backward: bool = False, weighted: bool = False) -> Stage | None:
        """That of a name, or ``None`` where nothing is to be done."""
        V = int(self.x.shape[-1])
        return variant(V, self.skip, self.z is not None, backward, weighted).stages.get(name)

    @property
    def places(self) -> tuple[Tensor | None, int, int, int, int]:
        """Arguments that say where tokens lie, and which belong to sequences."""
        B, T, HV, _ = self.x.shape
        return self.cu, B * T, T, HV, 0 if self.cu is None else self.cu.shape[0] - 1

    def new(self, dtype: torch.dtype | None = None) -> Tensor:
        """Room for an array of the shape of ``x``."""
        return torch.empty(self.x.shape, dtype=dtype or self.x.dtype, device=self.x.device)

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Values and log decays for the core."""
        B, T, HV, V = self.x.shape
        v, g = self.new(), torch.empty((B, T, HV), dtype=torch.float32, device=self.x.device)
        stage = self.stage("inputs")
        launch(
            stage.kernel, programs(B * T * HV, 1, stage.tile.R, 1), self,
            self.x, self.dt, self.A, self.bias, v, g, *self.places, self.least, self.most,
            *strides(self.x), *strides(self.dt),
            V=V, BV=stage.tile.BV, R=stage.tile.R, SOFTPLUS=self.softplus, **stage.config,
        )  # fmt: skip
        return v, g

    def steps(self) -> tuple[Tensor, Tensor]:
        """Step sizes, which are weights of values for the core, and log decays."""
        B, T, HV, _ = self.x.shape
        step, g = (torch.empty((B, T, HV), dtype=torch.float32, device=self.x.device) for _ in range(2))
        stage = self.stage("steps", weighted=True)
        launch(
            stage.kernel, programs(B * T * HV, 1, stage.tile.R, 1), self,
            self.dt, self.A, self.bias, step, g, *self.places, self.least, self.most, *strides(self.dt),
            R=stage.tile.R, SOFTPLUS=self.softplus, **stage.config,
        )  # fmt: skip
        return step, g

    def outputs(self, o: Tensor, y: Tensor, slots: Tensor | None = None, P: int = 0) -> Tensor:
        """``y``, written, of the core's outputs; it may be them. ``slots`` are of ``P`` states, others' outputs are zero."""
        B, T, HV, V = self.x.shape
        stage = self.stage("outputs")
        launch(
            stage.kernel, programs(B * T * HV, 1, stage.tile.R, 1), self,
            o, self.x, self.D, self.z, y, slots, P, *self.places, *strides(self.x), *strides(self.z),
            V=V, BV=stage.tile.BV, R=stage.tile.R, SKIP=self.skip, GATED=self.z is not None, **stage.config,
        )  # fmt: skip
        return y

    def output_gradients(self, dy: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the core's outputs and of ``z``."""
        B, T, HV, V = self.x.shape
        do, dz, stage = self.new(), self.new(self.z.dtype), self.stage("outputs", True)
        launch(
            stage.kernel, programs(B * T * HV, 1, stage.tile.R, 1), self,
            dy, o, self.x, self.D, self.z, do, dz, *self.places, *strides(dy), *strides(self.x), *strides(self.z),
            V=V, BV=stage.tile.BV, R=stage.tile.R, SKIP=self.skip, **stage.config,
        )  # fmt: skip
        return do, dz

    def input_gradients(self, do: Tensor, dv: Tensor, dg: Tensor) -> dict[str, Tensor]:
        """Gradients of ``x``, which takes the place of ``dv``, of ``dt`` and of the parameters."""
        B, T, HV, V = self.x.shape
        stage, skip = self.stage("inputs", True), self.skip
        new = functools.partial(torch.empty, device=self.x.device)
        walks = walks_for(int(programs(B * T, 1, stage.tile.R, 1)), int(HV), properties(self.x.device).num_sms)
        ddt, parts = new((B, T, HV), dtype=self.dt.dtype), new((walks, 2 + (skip == 1), HV), dtype=torch.float32)
        skip_parts = new((walks, HV, V), dtype=torch.float32) if skip == 2 else None
        launch(
            stage.kernel, walks * HV, self,
            dv, dg, do, self.x, self.dt, self.A, self.D, self.bias, dv, ddt, parts, skip_parts, *self.places,
            self.least, self.most, *strides(do), *strides(self.x), *strides(self.dt),
            V=V, BV=stage.tile.BV, R=stage.tile.R, SKIP=skip, SOFTPLUS=self.softplus, **stage.config,
        )  # fmt: skip
        found = dict(x=dv, dt=ddt) | dict(zip(("A", "bias", "D"), sums_of_parts(self, parts), strict=False))
        return found if skip_parts is None else found | dict(D=skip_parts.sum(0))

    def step_gradients(self, dg: Tensor, dlog: Tensor, dskip: Tensor | None) -> dict[str, Tensor]:
        """Gradients of ``dt`` and of the parameters.

        From those of what :meth:`steps` made, of step sizes' logarithms, and a token's parts of ``dD``.
        """
        B, T, HV, _ = self.x.shape
        stage = self.stage("steps", True, True)
        new = functools.partial(torch.empty, device=self.x.device)
        blocks = programs(HV, 1, stage.tile.BH, 1)
        walks = walks_for(int(programs(B * T, 1, stage.tile.R, 1)), int(blocks), properties(self.x.device).num_sms)
        ddt, parts = new((B, T, HV), dtype=self.dt.dtype), new((walks, 2 + (dskip is not None), HV), dtype=torch.float32)
        launch(
            stage.kernel, walks * blocks, self,
            dg, dlog, dskip, self.dt, self.A, self.bias, ddt, parts, *self.places, self.least, self.most, *strides(self.dt),
            R=stage.tile.R, BH=stage.tile.BH, SKIP=dskip is not None, SOFTPLUS=self.softplus, **stage.config,
        )  # fmt: skip
        return dict(dt=ddt) | dict(zip(("A", "bias", "D"), sums_of_parts(self, parts), strict=False))
