"""Which tiles run: a few choices by shape, each checked on the device. Nothing is tuned at run time."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..host.tiles import Tile, fit, power_of_two

__all__ = ["Tiles", "tiles_for"]


@dataclass(frozen=True)
class Tiles:
    """Everything that is chosen for a call.

    Attributes:
        chunk: Tokens a chunk.
        split: bfloat16 terms that stand for a float32 number in a sum of gates.
        range: A chunk that decays by less than ``2^range`` takes the plain products.
        precision: How products of float32 tiles are done.
        processors: Multiprocessors of the device.
        fused: Of the kernel that keeps the state in registers; ``None`` where states go through memory on any device. ``walk``
            likewise, of a vector gate.
    """

    chunk: int
    split: int
    range: float
    precision: str
    processors: int
    states: Tile
    carries: Tile
    outputs: Tile
    outputs_levels: Tile
    gradients: Tile
    gradients_levels: Tile
    fused: Tile | None
    scores: Tile
    walk: Tile | None
    inter: Tile
    intra: Tile

    def segment(self, T: int, N: int, busy: int) -> int:
        """Chunks a segment, if sequences must be split to fill the device with more than ``busy`` programs; else 0."""
        if 8 * busy >= 7 * self.processors or N == 0:
            return 0
        chunks = -(-T // self.chunk)
        wanted = -(-2 * self.processors // max(busy, 1))
        length = max(-(-chunks // wanted), 8)
        return length if 2 * length <= chunks else 0

    def halves(self, T: int, busy: int) -> bool:
        """Whether two programs are to share each walk, because ``busy`` pairs of them fill the device."""
        return 2 * busy <= self.processors < 4 * busy and 8 * self.chunk <= T


@functools.lru_cache(maxsize=1024)
def tiles_for(K: int, V: int, dtype: torch.dtype, gate: int, chunk: int, processors: int, roomy: bool) -> Tiles:
    """Tiles for widths ``K`` and ``V``, a gate (0 none, 1 scalar, 2 vector) and, unless 0, the caller's ``chunk``.

    Only a ``roomy`` device, with Hopper's shared memory, holds what a walk with the state in registers fetches ahead.
    """
    full = dtype == torch.float32
    C = min(max(power_of_two(chunk), 16), 64) if chunk else 32 if full else 64
    most = 32 if full else 64
    least = 16 if full else 64  # 16-bit tiles of 32 channels came out wrong on Hopper (Triton 3.6.0)
    wide = 32 if full else 128
    return Tiles(
        chunk=C,
        split=3 if full else 2,
        range={torch.float16: 10.0, torch.float32: 40.0}.get(dtype, 180.0),  # a longer sum is less exact in float32
        precision="tf32x3" if full else "tf32",
        processors=processors,
        states=Tile(fit(K, most, least), fit(V, wide if gate else most, least), 4, 2 if full else 3 if gate else 4),
        carries=Tile(fit(K, 32), fit(V, 32), 4, 2),
        outputs=Tile(fit(K, most, least), fit(V, wide, least), 4, 1 if full or gate == 2 else 3),
        outputs_levels=Tile(fit(K, most, least), fit(V, wide, least), 4, 1),
        gradients=Tile(fit(K, most, least), fit(V, most, least), 4, 3 if gate and not full else 1),
        gradients_levels=Tile(fit(K, most, least), fit(V, most, least), 4, 1),
        fused=Tile(fit(max(K, V), 128, 64), 64, 4, 3) if gate < 2 and not full and roomy else None,
        scores=Tile(fit(K, most, least), 0, 4, 1),
        walk=Tile(fit(K, 128, 64), 64, 4, 3) if K <= 128 and not full and roomy else None,
        inter=Tile(fit(K, most, least), fit(V, most, least), 4, 1 if full else 3),
        intra=Tile(fit(K, most, least), 0, 4, 2 if roomy and dtype != torch.float16 else 1),  # products in float32: no room
    )
