"""Launches of :mod:`..lib.spans`: messages of ranks that share sequences, and the states that follow from all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...chunks import power_of_two
from ..lib.spans import KEYS, KEYS_VALUES, MADE, MATRIX, NUMBER, span_message_end, span_states
from ..runtime.launch import Launched, launch
from ..runtime.precompile import precompiled
from ..runtime.replay import recorded
from .tiles import fit, programs
from .variant import precision_of

__all__ = ["Message", "entering", "finish_message", "leaving", "sealed"]

DIGEST = 2
"""Numbers that a digest takes, of float32."""


class Message(NamedTuple):
    """How what a rank tells the others is laid out: transitions ``A``, states ``b``, and behind both a digest, all float32.

    Attributes:
        N, HV, K, V: Of its states.
        kind: How a transition acts, see :mod:`..lib.spans`.
    """

    N: int
    HV: int
    K: int
    V: int
    kind: int

    @classmethod
    def of(cls, v: Tensor, K: int, delta: bool, gate: int, value_gate: bool) -> Message:
        """That of a call whose values are ``v``, as whole sequences."""
        kind = MATRIX if delta else KEYS_VALUES if value_gate else KEYS if gate == 2 else NUMBER
        return cls(v.shape[0], v.shape[2], K, v.shape[3], kind.value)

    @property
    def width(self) -> int:
        """Numbers of a transition."""
        K, V = self.K, self.V
        return {NUMBER.value: 1, KEYS.value: K, KEYS_VALUES.value: K + V, MATRIX.value: K * K}[self.kind]

    @property
    def states(self) -> int:
        """Where states begin: as well aligned as memory of their own."""
        return -(-self.N * self.HV * self.width // 4) * 4

    @property
    def size(self) -> int:
        """Numbers of a message; the digest is the last ones."""
        return -(-(self.states + self.N * self.HV * self.K * self.V + DIGEST) // 4) * 4

    def empty(self, device: torch.device) -> Tensor:
        """Room for one."""
        return torch.empty(self.size, dtype=torch.float32, device=device)

    def A(self, x: Tensor) -> Tensor:
        """The transitions in a message."""
        shape = () if self.width == 1 else (self.K, self.K) if self.kind == MATRIX.value else (self.width,)
        return x[: self.N * self.HV * self.width].view(self.N, self.HV, *shape)

    def b(self, x: Tensor) -> Tensor:
        """The states in a message."""
        there = x[self.states : self.states + self.N * self.HV * self.K * self.V]
        return there.view(self.N, self.HV, self.K, self.V)


def finish_message(
    call: Launched, layout: Message, message: Tensor, digest: Tensor, sums: tuple[Tensor | None, Tensor | None] | None = None
) -> Tensor:
    """Write the digest, and transitions that follow from the sums of gates over the pieces of each sequence; the message."""
    K, V = layout.K, layout.V
    pieces = 0 if sums is None or sums[0] is None else sums[0].shape[0] // layout.N
    launch(
        span_message_end, 1 if sums is None else layout.N * layout.HV, call,
        message, *(sums or (None, None)), digest, pieces, layout.HV, layout.size - DIGEST,
        K=K, V=V, BK=power_of_two(K), BV=power_of_two(V), KIND=MADE.value if sums is None else layout.kind, num_warps=4,
    )  # fmt: skip
    return message


class Values(NamedTuple):
    """What a launch knows of a call: its values, and what an error calls it."""

    v: Tensor
    family: str


@recorded
@precompiled()
def sealed(digest: Tensor, *layout: Any) -> Tensor:
    """A message of nothing but a digest; what else is in it nobody reads."""
    found = Message(*layout)
    return finish_message(Values(digest, "spans"), found, found.empty(digest.device), digest)


@recorded
@precompiled()
def entering(messages: Tensor, digest: Tensor, ever: Tensor, told: Tensor, first: int, count: int, *layout: Any) -> Tensor:
    """The states after ``count`` spans from the ``first`` one on, of the messages ``[ranks, size]`` of all ranks; NaN, and
    ``told``, if a digest is another.
    """
    found = Message(*layout)
    states = messages[:, found.states :]
    rows = first, count, 0, found.size, found.size, found.size - DIGEST
    return chained(messages, states, (digest, ever, told), rows, found, reverse=False)


@recorded
@precompiled()
def leaving(d: Tensor, transitions: Tensor, first: int, count: int, *layout: Any) -> Tensor:
    """The gradients of the states after a rank's span, of those ``[ranks, …]`` before the spans of all: ``count`` of them, from
    the ``first`` one back, whose ``transitions [spans, …]`` but for that first one's they cross.
    """
    found = Message(*layout)
    rows = first, count, first - count + 1, transitions.stride(0), found.N * found.HV * found.K * found.V, 0
    return chained(transitions, d, (None, None, None), rows, found, reverse=True)


def chained(
    A: Tensor, b: Tensor, told: tuple[Tensor | None, ...], rows: tuple[int, ...], layout: Message, reverse: bool
) -> Tensor:  # fmt: skip
    """Launch the walk from span to span."""
    N, HV, K, V, kind = layout
    matrix = kind == MATRIX.value
    BK, BV = (max(power_of_two(K), 16), fit(V, 32)) if matrix else (fit(K, 32), fit(V, 64))
    out = torch.empty((N, HV, K, V), dtype=torch.float32, device=b.device)
    ranks = b.shape[0]
    launch(
        span_states, N * HV * programs(K, V, BK, BV), Values(b, "spans"), A, b, *told, out, *rows, ranks,
        K=K, V=V, BK=BK, BV=BV, WIDTH=layout.width, R=power_of_two(ranks), KIND=kind, REVERSE=reverse,
        PREC=precision_of(torch.float32, K), num_warps=8 if matrix else 4, num_stages=1,
    )  # fmt: skip
    return out
