"""Which tiles run for the delta families: a few choices by shape, each checked on the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..host.tiles import Tile, fit, power_of_two

__all__ = ["DeltaTiles", "delta_tiles"]


@dataclass(frozen=True)
class DeltaTiles:
    """Everything that is chosen for a call.

    Attributes:
        chunk: Tokens a chunk.
        split: bfloat16 terms that stand for a float32 number in a sum of gates.
        range: A chunk that decays by less than ``2^range`` takes the plain products.
        precision: How products of float32 tiles are done.
        processors: Multiprocessors of the device.
        ring: Chunks that a walk for Hopper has in shared memory.
        carry: Of the kernel that goes from segment to segment; ``None`` where no block's shared memory holds what it reads.
    """

    chunk: int
    split: int
    range: float
    precision: str
    processors: int
    ring: int
    prepare: Tile
    solve: Tile
    forwards: Tile
    backwards: Tile
    carry: Tile | None
    pairs: Tile
    gradients: Tile
    gradients_slow: Tile

    def segment(self, T: int, N: int, heads: int, tiles: int, each: int) -> int:
        """Chunks a segment, if ``heads`` sequences of ``tiles`` programs must be split to give processors ``each``; else 0."""
        busy = heads * tiles
        if self.carry is None or 8 * busy >= 7 * self.processors or N == 0:
            return 0
        chunks = -(-T // self.chunk)
        length = max(-(-chunks * busy // (each * self.processors)), 8)
        return length if 3 * length <= chunks else 0


def precise(K: int) -> str:
    """How products of float32 are done: of so few terms that the rounding of one shows, exactly."""
    return "tf32x3" if K >= 16 else "ieee"


@functools.lru_cache(maxsize=1024)
def delta_tiles(
    K: int, V: int, dtype: torch.dtype, gate: int, beta: int, chunk: int, processors: int, roomy: bool
) -> DeltaTiles:  # fmt: skip
    """Tiles for widths ``K`` and ``V``, a gate (0 none, 1 scalar, 2 vector), a ``beta`` (0 none: ``dplr``, 1 a token, 2 a value
    channel) and, unless 0, the caller's ``chunk``; ``roomy`` is a device with Hopper's shared memory.
    """
    full = dtype != torch.bfloat16
    usual = 32 if full or beta == 2 or K > 128 else 64
    C = min(max(power_of_two(chunk), 16), usual) if chunk else usual
    rows = max(power_of_two(K), 16 if full else 64)
    least = 16 if full else 64  # 16-bit tiles of 32 channels came out wrong on Hopper (Triton 3.6.0)
    one = full or K > 128 or not roomy or (beta == 0 and K > 64)  # stage: more do not fit, in general
    walk = Tile(rows, fit(V, 32 if full else 64, least), 4, 1 if one else 2)
    usual_size = K == V == 128 and not full and roomy
    usual = usual_size and beta == 1
    return DeltaTiles(
        chunk=C,
        split=3 if dtype == torch.float32 else 2,
        range={torch.float16: 10.0, torch.float32: 40.0}.get(dtype, 160.0),  # a longer sum is less exact in float32
        precision="tf32" if dtype != torch.float32 else precise(K),
        processors=processors,
        ring=3 if gate < 2 else 2,
        prepare=Tile(128 if usual and gate == 1 else fit(K, 32 if full else 64, least), 0, 4, 1),
        solve=Tile(0, 0, 1, 1),
        forwards=walk._replace(stages=3 if gate < 2 else 2) if walk.stages == 2 or (usual_size and beta == 0) else walk,
        backwards=walk._replace(stages=3 if usual else 2) if usual_size and (gate == 1 or beta == 0) else walk,
        carry=Tile(rows, 16, 4, 1 if not roomy else 2 if full else 3) if K <= 128 else None,  # [K, K], float32
        pairs=Tile(0, 128 if usual else fit(V, 32 if full else 64, least), 4, 1),
        gradients=Tile(64, 128 if gate else 64, 4, 1 if gate else 2)
        if usual and gate < 2
        else Tile(fit(K, 32 if full else 64 if gate == 2 else 128, least), fit(V, 32 if full else 64, least), 4, 1),
        gradients_slow=Tile(  # dplr: 8 warps take a quarter longer than 4, and 0.6 of the compiler's time
            fit(K, 32 if full else 64, least), fit(V, 32 if full else 64, least), 8 if beta == 0 and C == 64 else 4, 1
        ),
    )
