"""Which kernels of the diagonal core run, with which tiles, and why: by what is static of a call. Nothing is tuned at run time.

Three algorithms make the chunk form:

* ``resident`` (:mod:`.resident`) keeps the state in registers: no gate, or a scalar one, and 16-bit operands;
* ``vector`` (:mod:`.vector`) applies a gate per key channel, and then does the same, or goes through memory;
* ``memory`` (:mod:`.memory`) has a state a chunk in memory, and takes every other call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from ...chunks import wished
from ..host.tiles import Tile, fit
from ..host.variant import Facts, Stage, Variant, precision_of, unfit
from ..runtime.device import Properties
from .gate import NONE, SCALAR, VECTOR, diagonal_running_sums_fwd, diagonal_sum_matrices_fwd
from .memory import diagonal_carries, diagonal_gradients_bwd, diagonal_outputs, diagonal_scalar_gradients_bwd, diagonal_states
from .resident import diagonal_scan
from .vector import (
    diagonal_vector_inter_bwd,
    diagonal_vector_intra_bwd,
    diagonal_vector_outputs,
    diagonal_vector_scan,
    diagonal_vector_scores_fwd,
)

__all__ = ["DiagonalVariant", "backward_variant", "chunk_tokens", "forward_variant", "scores_tile"]

Stages = dict[str, Stage]

GATES = {
    "linear_attn": NONE.value,
    "simple_gla": SCALAR.value,
    "gla": VECTOR.value,
    "rwkv6": VECTOR.value,
    "gla with gv": VECTOR.value,
}
"""The gate on the keys of each family; ``gv`` is one on the values."""
RESIDENT = 128
"""Channels of the widest head whose state plain kernels have in registers."""

TAKE_WEIGHTS = frozenset((
    "diagonal_running_sums_fwd", "diagonal_scan", "diagonal_scan_sm90", "diagonal_states", "diagonal_carries",
    "diagonal_scalar_gradients_bwd",
))  # fmt: skip
"""Kernels that take values with weights; other kernels are given the products."""


@dataclass(frozen=True)
class DiagonalVariant(Variant):
    """A variant of the diagonal core, and the numbers that its kernels share.

    Attributes:
        algorithm: See :mod:`.config`.
        chunk: Tokens a chunk.
        split: bfloat16 terms that stand for a float32 number in a sum of gates.
        range: A chunk that decays by less than ``2^range`` takes the plain products.
        precision: How products of float32 tiles are done.
        num_sms: Multiprocessors of the device.
        shareable: Whether the kernels let two programs share a scan.
    """

    algorithm: Literal["resident", "vector", "memory"]
    chunk: int
    split: int
    range: float
    precision: str
    num_sms: int
    shareable: bool

    @property
    def takes_weights(self) -> bool:
        """Whether all kernels take weights of values, and a skip."""
        return all(stage.kernel.__name__ in TAKE_WEIGHTS for stage in self.stages.values())

    @property
    def algorithm_said(self) -> str:
        """Which of the two algorithms of Yang et al. 2024 (§3.3) it is."""
        return ", states materialised" if "states" in self.stages else ", states not materialised"

    def segment(self, tokens: int, busy: int) -> int:
        """Chunks a segment, if sequences of ``tokens`` that keep ``busy`` programs take less time cut; else 0.

        A program for each multiprocessor goes through a segment twice, and what comes between costs as much as 16 chunks.
        """
        chunks = -(-tokens // self.chunk)
        pieces = max(self.num_sms // max(busy, 1), 1)
        length = max(-(-chunks // pieces), 4)
        return length if 2 * length + 16 <= chunks else 0

    def shares(self, T: int, busy: int) -> bool:
        """Whether two programs are to share each scan: ``busy`` pairs of them find room on the device, and sequences are not
        so long that cutting them, which fills it, takes less time.
        """
        room, cut = 2 * busy <= self.num_sms, 4 * busy <= self.num_sms and self.segment(T, busy) > 0
        return self.shareable and room and not cut and 8 * self.chunk <= T


def chunk_tokens(dtype: torch.dtype, chunk: int) -> int:
    """Tokens a chunk of operands of this dtype; ``chunk`` is the caller's wish, or 0.

    Of float32 at most 32, whose products are not those of Hopper's warp groups. Where a kernel has such products of tiles of
    several widths, ptxas (CUDA 12.8, which Triton 3.6 brings) may read the register of a tile's address before it is written.
    """
    most = 32 if dtype == torch.float32 else 64
    return wished(chunk, most)


def tiles_for(facts: Facts, large_smem: bool) -> dict[str, Tile]:
    """The tile of each stage: a few choices by shape, each checked on the device."""
    _, dtype, K, V, *_ = facts
    gate, full = GATES[facts.family], dtype == torch.float32
    # 16-bit tiles of 32 channels came out wrong on Hopper (Triton 3.6.0)
    least, most, broad = (16, 32, 32) if full else (64, 64, 128)
    keys, values, many_values = fit(K, most, least), fit(V, most, least), fit(V, broad, least)
    return dict(
        running_sums=Tile(0, 0, 2, 1),
        sum_matrices=Tile(0, 0, 4, 1),
        states=Tile(keys, many_values if gate else values, 4, 2 if full else 3 if gate else 4),
        carries=Tile(fit(K, 32), fit(V, 32), 4, 2),
        outputs=Tile(keys, many_values, 4, 1 if full or gate == VECTOR.value else 3),
        gradients=Tile(keys, values, 4, 1),
        scalar_gradients=Tile(keys, values, 4, 3 if values < V else 2),  # of one tile, what is loaded ahead is the next head's
        scan=Tile(fit(max(K, V), RESIDENT, 64), 64, 4, 3),
        scan_gradients=Tile(keys, 0, 4, 1),
        scores=scores_tile(facts),
        vector_scan=Tile(fit(K, RESIDENT, 64), 64, 4, 3),
        inter=Tile(keys, values, 4, 1 if full else 3),
        intra=Tile(keys, 0, 4, 2 if large_smem and dtype != torch.float16 else 1),  # products in float32: no room
        strong=Tile(64, 0, 4, 1),
    )


def scores_tile(facts: Facts) -> Tile:
    """The tile of the scores under a gate per key channel, on any device."""
    least, most = (16, 32) if facts.dtype == torch.float32 else (64, 64)
    return Tile(fit(facts.K, most, least), 0, 4, 1)


def common_numbers(facts: Facts, device: Properties) -> dict[str, object]:
    """The numbers of a variant."""
    full = facts.dtype == torch.float32
    # Operands are multiplied by up to 2^(limit/2) either way, and tiny ones must keep their bits: values and states, where the
    # gate is theirs, may be smaller still than queries and keys. A longer sum is less exact in float32. With u, neighbours
    # have no gate between them: they cancel in the gate's gradient, and where gates are strong they are most of its terms.
    of_values = facts.family in ("simple_gla", "gla with gv")
    limit = {torch.float16: 10.0, torch.float32: 16.0}.get(facts.dtype, 40.0 if of_values else 100.0)
    return dict(
        chunk=facts.chunk,
        split=3 if full else 2,
        range=limit,
        precision=precision_of(facts.dtype, facts.K),
        num_sms=device.num_sms,
    )


def why_plain(
    facts: Facts, out: torch.dtype, device: Properties, unaligned: tuple[str, ...], reads: tuple[str, ...]
) -> str | None:
    """Why no kernel for Hopper takes the arrays that it ``reads`` and writes ``out``; ``None`` if one does."""
    rough = [name for name in unaligned if name in reads]
    return unfit(facts, out) or device.not_hopper or (f"{', '.join(rough)} not aligned to 16 bytes" if rough else None)


def in_registers(facts: Facts, device: Properties) -> bool:
    """Whether the state of a call fits into registers, tile by tile, if need be in kernels for Hopper."""
    return GATES[facts.family] != VECTOR.value and facts.dtype != torch.float32 and device.large_smem


def is_wide(facts: Facts) -> bool:
    """Whether plain kernels would have states in memory."""
    return max(facts.K, facts.V) > RESIDENT


def segment_stages(tiles: dict[str, Tile]) -> Stages:
    """Stages that run where sequences are cut into segments: each one's own state, and what it starts from."""
    return dict(
        segment_states=Stage(diagonal_states, tiles["states"]), segment_carries=Stage(diagonal_carries, tiles["carries"])
    )


def gate_stages(facts: Facts, tiles: dict[str, Tile]) -> Stages:
    """The stage before all others that a scalar gate has."""
    if GATES[facts.family] != SCALAR.value:
        return {}
    return dict(running_sums=Stage(diagonal_running_sums_fwd, tiles["running_sums"]))


def scan_stage(facts: Facts, tiles: dict[str, Tile], why: str | None) -> Stage:
    """The scan with the state in registers."""
    if why is not None:
        return Stage(diagonal_scan, tiles["scan"])
    from .resident_sm90 import diagonal_scan_sm90
    from .resident_wide_sm90 import diagonal_scan_wide_sm90

    return Stage(diagonal_scan_wide_sm90 if facts.K > RESIDENT else diagonal_scan_sm90, tiles["scan"])


@functools.lru_cache(maxsize=1024)
def forward_variant(facts: Facts, out: torch.dtype, device: Properties, unaligned: tuple[str, ...] = ()) -> DiagonalVariant:
    """The variant of a forward pass.

    Args:
        facts: What is static of the call.
        out: Dtype of the outputs.
        device: What is chosen by, of the device.
        unaligned: Which of ``q, k, v, g`` kernels for Hopper cannot copy as they lie.
    """
    if facts.family in ("gla", "rwkv6"):
        return vector_forward(facts, device, unaligned)
    tiles, numbers = tiles_for(facts, device.large_smem), common_numbers(facts, device)
    stages, why = gate_stages(facts, tiles), why_plain(facts, out, device, unaligned, ("q", "k", "v"))
    if in_registers(facts, device) and (why is None or not is_wide(facts)):
        stages |= dict(scan=scan_stage(facts, tiles, why)) | segment_stages(tiles)
        shareable = why is None and facts.V <= 64 and not is_wide(facts)  # wider: not measured
        return DiagonalVariant(stages, why, "resident", shareable=shareable, **numbers)
    stages |= dict(states=Stage(diagonal_states, tiles["states"]), outputs=Stage(diagonal_outputs, tiles["outputs"]))
    return DiagonalVariant(stages | segment_stages(tiles), why, "memory", shareable=False, **numbers)


@functools.lru_cache(maxsize=1024)
def backward_variant(
    facts: Facts, do: torch.dtype, grouped: bool, divides: bool, device: Properties, unaligned: tuple[str, ...] = ()
) -> DiagonalVariant:
    """The variant of a backward pass.

    Args:
        facts: What is static of the call.
        do: Dtype of the outputs' gradient.
        grouped: Whether value heads share query/key heads, whose gradients are summed in float32, or values have weights:
            either is for kernels that do not have the state in registers.
        divides: Whether a state's gradient may be divided by the scale: one very small, or large, could take it out of
            float32's range.
        device: What is chosen by, of the device.
        unaligned: Which of ``q, k, v, do, g`` kernels for Hopper cannot copy as they lie.
    """
    if facts.family in ("gla", "rwkv6"):
        return vector_backward(facts, device, unaligned)
    if in_registers(facts, device) and divides and not is_wide(facts):
        return resident_backward(facts, grouped, device, unaligned)
    tiles = tiles_for(facts, device.large_smem)
    states, outputs = Stage(diagonal_states, tiles["states"]), Stage(diagonal_outputs, tiles["outputs"])
    gradients = Stage(diagonal_gradients_bwd, tiles["gradients"])
    stages = gate_stages(facts, tiles) | dict(states=states) | segment_stages(tiles)
    why = why_plain(facts, do, device, unaligned, ("q", "k", "do"))
    why = why or (None if divides else "a state's gradient cannot be divided by the scale")
    if why is None and in_registers(facts, device):
        stages |= dict(scan_dv=scan_stage(facts, tiles, why))
    elif facts.family != "gla with gv":
        stages |= dict(outputs=outputs)
    if GATES[facts.family] == SCALAR.value and facts.dtype != torch.float32:
        stages |= dict(scalar_gradients=Stage(diagonal_scalar_gradients_bwd, tiles["scalar_gradients"]))
    else:
        stages |= dict(gradients=gradients)
    if facts.family == "gla with gv":  # keys and values change places
        tile = gradients.tile
        stages |= dict(value_gradients=gradients._replace(tile=tile._replace(BK=tile.BV, BV=tile.BK)))
    return DiagonalVariant(stages, why, "memory", shareable=False, **common_numbers(facts, device))


def resident_backward(facts: Facts, grouped: bool, device: Properties, unaligned: tuple[str, ...]) -> DiagonalVariant:
    """The variant of a backward pass with the state, and then its gradient, in registers."""
    tiles = tiles_for(facts, device.large_smem)
    narrow = torch.float32 if grouped else facts.dtype
    why = functools.partial(why_plain, facts, device=device, unaligned=unaligned)
    everywhere, dv = why(narrow, reads=("q", "k", "v", "do")), why(facts.dtype, reads=("k", "q", "do"))
    stages = gate_stages(facts, tiles) | dict(scan_dv=scan_stage(facts, tiles, dv)) | segment_stages(tiles)
    if GATES[facts.family] == NONE.value:
        stages |= dict(
            scan_dk=scan_stage(facts, tiles, why(narrow, reads=("v", "do", "q"))),
            scan_dq=scan_stage(facts, tiles, why(narrow, reads=("do", "v", "k"))),
        )
    elif everywhere is None:
        from .gradients_sm90 import diagonal_scalar_gradients_bwd_sm90

        stages |= dict(scan_gradients=Stage(diagonal_scalar_gradients_bwd_sm90, tiles["scan_gradients"]))
    else:
        stages |= dict(
            states=Stage(diagonal_states, tiles["states"]),
            scalar_gradients=Stage(diagonal_scalar_gradients_bwd, tiles["scalar_gradients"]),
        )
    shareable = max(facts.K, facts.V) <= 64 and everywhere is None  # wider: not measured
    if "scalar_gradients" in stages:
        shareable = dv is None and facts.V <= 64
    return DiagonalVariant(stages, dv, "resident", shareable=shareable, **common_numbers(facts, device))


def vector_scan_stages(facts: Facts, device: Properties, tiles: dict[str, Tile]) -> Stages:
    """Outputs, or ``dv``, and states: in one scan if a tile of the state fits into registers, else through memory."""
    if facts.K <= RESIDENT and facts.dtype != torch.float32 and device.large_smem:
        return dict(scan=Stage(diagonal_vector_scan, tiles["vector_scan"]))
    return dict(states=Stage(diagonal_states, tiles["states"]), outputs=Stage(diagonal_vector_outputs, tiles["outputs"]))


def vector_forward(facts: Facts, device: Properties, unaligned: tuple[str, ...]) -> DiagonalVariant:
    """The variant of a forward pass with a gate per key channel."""
    tiles, why = tiles_for(facts, device.large_smem), why_plain(facts, torch.bfloat16, device, unaligned, ("q", "k", "g"))
    stages = dict(
        sum_matrices=Stage(diagonal_sum_matrices_fwd, tiles["sum_matrices"]),
        scores=Stage(diagonal_vector_scores_fwd, tiles["scores"]),
    )
    if why is None:
        from .vector_sm90 import diagonal_vector_scores_strong_fwd_sm90

        stages |= dict(scores_strong=Stage(diagonal_vector_scores_strong_fwd_sm90, tiles["strong"]))
    stages |= vector_scan_stages(facts, device, tiles) | segment_stages(tiles)
    return DiagonalVariant(stages, why, "vector", shareable=False, **common_numbers(facts, device))


def vector_backward(facts: Facts, device: Properties, unaligned: tuple[str, ...]) -> DiagonalVariant:
    """The variant of a backward pass with a gate per key channel; operands that were not kept are the forward variant's."""
    tiles, why = tiles_for(facts, device.large_smem), why_plain(facts, torch.bfloat16, device, unaligned, ("q", "k", "g"))
    stages = dict(states=Stage(diagonal_states, tiles["states"]))
    stages |= vector_scan_stages(facts, device, tiles) | segment_stages(tiles)
    stages |= dict(
        inter=Stage(diagonal_vector_inter_bwd, tiles["inter"]),
        sum_matrices=Stage(diagonal_sum_matrices_fwd, tiles["sum_matrices"]),
        intra=Stage(diagonal_vector_intra_bwd, tiles["intra"]),
    )
    if why is None:
        from .vector_sm90 import diagonal_vector_intra_strong_bwd_sm90

        stages |= dict(intra_strong=Stage(diagonal_vector_intra_strong_bwd_sm90, tiles["strong"]))
    return DiagonalVariant(stages, why, "vector", shareable=False, **common_numbers(facts, device))
