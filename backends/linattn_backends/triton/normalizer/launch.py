"""Launches of :mod:`.kernels`: sums of keys, outputs divided by what queries meet of them, and gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..diagonal.call import DiagonalCall
from ..host.chunks import Cut, cut, places, room_for, rows_contiguous, strides
from ..host.tiles import programs
from ..host.variant import Variant
from ..runtime.launch import launch
from .config import CHUNK, CHUNKS, variant

__all__ = ["Kept", "Normalizer"]


class Kept(NamedTuple):
    """What the backward pass has of the forward pass, float32.

    Attributes:
        d: What outputs were divided by, ``[B, T, HV]``.
        before: Sums of the keys before each chunk, ``[chunks, HV, K]``.
        decays: Of each chunk, likewise; empty without a gate.
    """

    d: Tensor
    before: Tensor
    decays: Tensor

    @classmethod
    def empty(cls, call: DiagonalCall) -> Kept:
        """Arrays for those of a call."""
        B, T, HV = call.v.shape[:3]
        shape = room_for(T, call.N, CHUNK, call.cu is not None), HV, call.q.shape[-1]
        new = functools.partial(torch.empty, dtype=torch.float32, device=call.v.device)
        return cls(new((B, T, HV)), new(shape), new(shape if call.gate else (0,)))


@dataclass(frozen=True)
class Normalizer:
    """The normaliser of a call.

    Attributes:
        call: The call whose outputs are divided.
        chunks: Where its chunks lie.
        stages: The kernels of the pass.
    """

    call: DiagonalCall
    chunks: Cut
    stages: Variant

    @classmethod
    def of(cls, call: DiagonalCall, backward: bool) -> Normalizer:
        """Cut a call."""
        return cls(call, cut(call, CHUNK), variant(int(call.q.shape[-1]), int(call.v.shape[-1]), backward))

    def outputs(self, n: Tensor, out: Tensor, start: Tensor | None, final: bool) -> tuple[Kept, Tensor | None]:
        """Write ``n`` divided to ``out``; and sums of the keys at the ends, if asked for."""
        call, kept = self.call, Kept.empty(self.call)
        end = self.walk(call.k, None, kept.decays, start, kept.before, final, False)
        tile = self.stages["outputs"].tile
        self.run(
            "outputs", self.chunks.count * call.v.shape[2],
            call.q, call.k, call.g, kept.before, n, out, kept.d, *places(call, self.chunks), call.scale,
            *strides(call.q), *strides(call.k), *strides(call.g),
            K=call.q.shape[-1], V=call.v.shape[-1], BK=tile.BK, BV=tile.BV, GROUP=call.group, **self.gate(),
        )  # fmt: skip
        return kept, end

    def quotients(self, do: Tensor, o: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of what was divided, in its dtype, and of ``q·z``, float32 ``[B, T, HV]``."""
        call, dn, e, do = self.call, torch.empty_like(o), torch.empty_like(d), rows_contiguous(do)
        self.run(
            "quotients", self.chunks.count * call.v.shape[2],
            do, o, d, dn, e, *places(call, self.chunks), call.scale, *strides(do),
            V=call.v.shape[-1], BV=self.stages["quotients"].tile.BV,
        )  # fmt: skip
        return dn, e

    def add_gradients(self, e: Tensor, kept: Kept, dend: Tensor | None, into: dict[str, Any], first: bool) -> Tensor | None:
        """Add to the gradients of ``q, k, g``; and that of the first sums, if there are any."""
        call, behind, tile = self.call, torch.empty_like(kept.before), self.stages["gradients"].tile
        start = self.walk(call.q, e, kept.decays, dend, behind, first, True)
        (B, T, HV), (H, K) = e.shape, call.q.shape[2:]
        tiles, dg = programs(K, 1, tile.BK, 1), into["g"]
        parts = e.new_empty((tiles, B, T, HV)) if call.gate == 1 else dg
        owner, first, cu, T, per, N, _ = places(call, self.chunks)
        self.run(
            "gradients", self.chunks.count * H * tiles,
            call.q, call.k, call.g, e, kept.before, behind, into["q"], into["k"], parts,
            owner, first, cu, T, per, N, H, B * T * HV, *strides(call.q), *strides(call.k), *strides(call.g),
            K=K, BK=tile.BK, GROUP=call.group, **self.gate(),
        )  # fmt: skip
        if call.gate == 1:
            into["g"] = dg + (parts[0] if tiles == 1 else parts.sum(0))
        return start

    def walk(
        self, x: Tensor, e: Tensor | None, decays: Tensor, start: Tensor | None, before: Tensor, final: bool, reverse: bool
    ) -> Tensor | None:  # fmt: skip
        """Write sums ``before`` each chunk, or behind it in reverse; and return those at the ends, if asked for.

        Decays are written forwards, and read in reverse.
        """
        call, chunks, (HV, K), sums = self.call, self.chunks, before.shape[1:], torch.empty_like(before)
        tile, end = self.stages["sums"].tile, before.new_empty((call.N, HV, K)) if final else None
        self.run(
            "sums", chunks.count * HV * programs(K, 1, tile.BK, 1),
            x, e, call.g, sums, None if reverse or not call.gate else decays, *places(call, chunks),
            *strides(x), *strides(call.g),
            K=K, BK=tile.BK, GROUP=call.group, REVERSE=reverse, **self.gate(),
        )  # fmt: skip
        tile = self.stages["carries"].tile
        self.run(
            "carries", call.N * HV * programs(K, 1, tile.BK, 1),
            sums, decays if call.gate else None, start, before, end, chunks.first, chunks.per, HV, *strides(start),
            K=K, P=CHUNKS, BK=tile.BK, GATE=call.gate, REVERSE=reverse, START=start is not None,
        )  # fmt: skip
        return end

    def gate(self) -> dict[str, int]:
        """Compile-time facts of the gate."""
        g = self.call.g
        return dict(GATE=self.call.gate, GATE_GROUP=1 if g is None else self.call.v.shape[2] // g.shape[2])

    def run(self, name: str, count: int, *args: Any, **constants: Any) -> None:
        """Launch a stage."""
        stage, cuts = self.stages[name], {} if name == "carries" else dict(C=CHUNK)
        launch(stage.kernel, count, self.call, *args, **constants, **cuts, PACKED=self.call.cu is not None, **stage.config)
