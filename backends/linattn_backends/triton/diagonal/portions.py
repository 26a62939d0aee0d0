"""A backward pass in portions, one after the other, so that the states of one alone are in memory.

A portion is some of the sequences or, of one sequence, a span of its tokens. It lies without gaps in every array of the call,
so kernels write its gradients into place. Spans are gone through from the last to the first: each leaves the gradient of the
state that it started from to the one before. The states themselves come from one scan that keeps nothing else.
"""

from __future__ import annotations

from ..host.tiles import programs
from .call import DiagonalCall, Portion
from .config import DiagonalVariant
from .gate import SCALAR

__all__ = ["portions_of"]

LITTLE = 16 << 20
"""Bytes of states that nobody misses."""
LEAST = 8
"""Chunks of the shortest span: less is no work for a device."""


def portions_of(call: DiagonalCall, variant: DiagonalVariant) -> list[tuple[Portion, ...]]:
    """The spans of the sequences that go together; one of everything where states are few, or are not kept under a gate.

    As many portions as leave states no larger than the largest input, nor their gradients; of sequences, which cost nothing to
    take apart, as many as leave both together so. But sequences stay together that are scanned in the same time, for a
    multiprocessor scans one head; and a sequence with so few heads that its segments are scanned at once is whole: spans are
    scanned one after the other. The lengths of packed sequences are not known here, so they are one portion.
    """
    B, T, HV, V = call.v.shape
    K, length = call.q.shape[-1], variant.chunk
    states = B * -(-T // length) * HV * K * V * call.state_dtype.itemsize
    if call.cu is not None or call.gate != SCALAR.value or "states" not in variant.stages or 2 * states <= LITTLE:
        return [(Portion(0, B, 0, T),)]
    largest = max(x.numel() * x.element_size() for x in (call.q, call.v))
    least, each = max(B // -(-2 * states // largest), 1), HV * programs(1, V, 1, variant.stages["states"].tile.BV)
    rounds = programs(least * each, 1, variant.num_sms, 1)
    together = min(max(rounds * variant.num_sms // each, least), B)
    spans = -(-states // (largest * B)) if together == 1 and not variant.segment(T, each) else 1
    step = max(-(-T // (spans * length)), LEAST) * length
    return [
        tuple(Portion(first, min(first + together, B), low, min(low + step, T)) for low in range(0, T, step))
        for first in range(0, B, together)
    ]
