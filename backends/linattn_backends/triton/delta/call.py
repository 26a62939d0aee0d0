"""A call of the delta core: as it came, cut into chunks, and what stages make of it.

Nothing here or in the launches reads a tensor's data, so no launch waits for the device and all of them can be captured in a
graph.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..host.call import MatrixStateCall, unaligned
from ..host.chunks import Cut, cut, places, room_for, rows_contiguous
from ..host.lengths import Lengths, empty_lengths, kept_lengths, lengths_of
from ..host.maps import NO_MAPS, Maps
from ..host.variant import Facts
from ..runtime.device import Properties, properties
from .config import DeltaVariant, backward_variant, chunk_tokens, forward_variant, has_whole_heads, many

__all__ = [
    "ANYTHING",
    "NOTHING",
    "SCORES",
    "ChunkedCall",
    "DeltaCall",
    "Kept",
    "ScoreGradients",
    "Scores",
    "StateOperands",
    "States",
]


NOTHING, ANYTHING, SCORES = range(3)
"""What a forward pass leaves for a backward pass: scores alone where a tracer does not know how many sequences there are."""


@dataclass(frozen=True)
class DeltaCall(MatrixStateCall):
    """A call as it came.

    Attributes:
        q, k, v: As in the specification, the last axis contiguous.
        g: ``[B, T, HV]``, ``[B, T, HV, K]`` or ``None``.
        beta: ``[B, T, HV]``, ``[B, T, HV, V]`` or, for ``dplr``, ``None``.
        a, b: Those of ``dplr``, ``[B, T, HV, K]``, or ``None``.
        start: Initial states ``[N, HV, K, V]``, of any strides; zeros if ``None``.
        cu: Offsets of packed sequences, or ``None``.
        scale: Factor on the outputs.
        chunk: Tokens a chunk.
        maps: What is made of raw ``q``, ``k`` and, with a vector gate, ``g``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    start: Tensor | None
    cu: Tensor | None
    scale: float
    chunk: int
    maps: Maps

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
        start: Tensor | None, cu: Tensor | None, scale: float, chunk: int, maps: Maps = NO_MAPS,
    ) -> DeltaCall:  # fmt: skip
        """Take the arrays of an op; ``chunk`` is the caller's wish, or 0."""
        q, k, v, g, beta, a, b = (x if x is None or x.dim() < 4 else rows_contiguous(x) for x in (q, k, v, g, beta, a, b))
        tokens = chunk_tokens(q.dtype, int(q.shape[-1]), 0 if beta is None else beta.dim() - 2, int(chunk))
        return cls(q, k, v, g, beta, a, b, start, cu, scale, tokens, maps)

    @property
    def strength(self) -> int:
        """The kind of ``beta``: 0 none, 1 one a token, 2 one a value channel."""
        return 0 if self.beta is None else self.beta.dim() - 2

    @property
    def dplr(self) -> bool:
        """Whether ``b`` and ``k`` are both written, and ``a`` reads."""
        return self.a is not None

    @property
    def family(self) -> str:
        """The family whose recurrence this is."""
        return "dplr" if self.dplr else ("delta_rule", "gated_delta_rule", "kda")[self.gate]

    @property
    def rate_rows(self) -> int:
        """Rows of numbers a token by which products with queries and keys are multiplied, if any (:class:`Scores`)."""
        return 6 if self.maps.unit and self.gate < 2 else 3 if self.gate == 1 else 0

    @property
    def facts(self) -> Facts:
        """The facts by which its kernels are chosen."""
        K, V = int(self.q.shape[-1]), int(self.v.shape[-1])  # symbols have no place in a cache
        return Facts(self.family, self.q.dtype, K, V, self.chunk, self.strength)

    def forward_variant(self, keep: int, staged: bool = False) -> DeltaVariant:
        """The variant of its forward pass, or of its stages, that leaves what ``keep`` says, as :data:`SCORES` does."""
        device = properties(self.q.device)
        return forward_variant(self._facts(device, keep, staged), device, unaligned(device, self.facts, self._copied()))

    def backward_variant(self, do: Tensor | None, kept: str, staged: bool = False) -> DeltaVariant:
        """The variant of its backward pass, or of its stages, from the outputs' gradient, if that is there yet."""
        device, facts = properties(self.q.device), self.facts
        return backward_variant(self._facts(device, ANYTHING, staged), kept, device, unaligned(device, facts, self._copied(do)))

    def keeps_states(self, keep: int) -> bool:
        """Whether its forward pass leaves states and not scores: a tracer, which knows of no array where it lies, can tell."""
        device = properties(self.q.device)
        return "fused" in forward_variant(self._facts(device, keep, False), device).stages

    def _facts(self, device: Properties, keep: int, staged: bool) -> Facts:
        """The facts, and whether one kernel may carry the state: not in stages, and ``dplr``'s alone can keep something."""
        facts = self.facts
        fits = has_whole_heads(facts) and device.not_hopper is None
        whole = fits and not staged and (keep == NOTHING or (self.dplr and keep == ANYTHING))
        filled = whole and many(self.family, self.N, self.v.shape[2], self.cu is not None, device.num_sms)
        return facts._replace(many=bool(filled))  # symbols of a trace have no place in a cache

    def _copied(self, do: Tensor | None = None) -> dict[str, Tensor | None]:
        """The arrays that kernels copy in whole lines."""
        return dict(q=self.q, k=self.k, v=self.v, a=self.a, b=self.b, do=do, g=self.g if self.gate == 2 else None)


@dataclass(frozen=True)
class ChunkedCall(DeltaCall):
    """A call whose sequences are cut into chunks, with the kernels that run on them.

    Attributes:
        variant: What runs.
        chunks: Where chunks lie.
        lengths: Reciprocal lengths of queries and keys that are to be unit rows.
    """

    variant: DeltaVariant
    chunks: Cut
    lengths: Lengths

    @classmethod
    def cut(
        cls, call: DeltaCall, variant: DeltaVariant, lengths: Lengths | None = None, out: Tensor | None = None
    ) -> ChunkedCall:
        """Cut a call's sequences; ``lengths`` may be known, or not asked for by what is to run, or made with the scores.

        Behind packed sequences, rows of ``out`` become zeros.
        """
        if lengths is None:
            lengths = (empty_lengths if variant.makes_lengths else lengths_of)(call)
        return cls(**vars(call), variant=variant, chunks=cut(call, call.chunk, out=out), lengths=lengths)

    @property
    def chunk_heads(self) -> int:
        """Pairs of a chunk and a value head."""
        return self.chunks.count * self.v.shape[2]

    @property
    def places(self) -> tuple[Any, ...]:
        """Arguments that say where a chunk lies."""
        return places(self, self.chunks)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time facts that most kernels take."""
        return dict(K=self.q.shape[-1], C=self.chunk, GROUP=self.group, PACKED=self.cu is not None, PREC=self.variant.precision)

    @property
    def products(self) -> dict[str, Any]:
        """What products take states and scores in, as Triton names it."""
        return dict(DT=tl.bfloat16 if self.v.dtype == torch.bfloat16 else tl.float32)


class Scores(NamedTuple):
    """What the forward pass makes of the tokens of each chunk, and keeps for the backward pass.

    Attributes:
        A: Scores of queries ``[chunks, HV, C, C]``.
        M: Solved systems, likewise; with a ``beta`` a value channel, scores ``L`` of keys in float32.
        A2, L2: Scores with the second row that ``dplr`` writes, or ``None``.
        rates: With a scalar gate ``[chunks, HV, 3, C]``: ``e^G``, ``e^{G_C - G}`` and ``G log2(e)``. With unit rows, which
            stand as they came, and at most a scalar gate ``[chunks, HV, 6, C]``: then ``u e^G`` with a query's reciprocal
            length ``u``, and with a key's ``u e^G`` and ``u e^{G_C - G}``.
        uq, uk: Reciprocal lengths of queries and keys that are to be unit rows (:class:`..host.lengths.Lengths`).
    """

    A: Tensor
    M: Tensor
    A2: Tensor | None
    L2: Tensor | None
    rates: Tensor | None
    uq: Tensor | None
    uk: Tensor | None

    @classmethod
    def empty(cls, call: DeltaCall, lengths: Lengths) -> Scores:
        """Arrays for those of a call, beside the ``lengths`` of its rows."""
        T, HV, C = call.v.shape[1], call.v.shape[2], call.chunk
        count = room_for(T, call.N, C, call.cu is not None)
        new = functools.partial(torch.empty, device=call.v.device)
        square = functools.partial(new, (count, HV, C, C))
        return cls(
            square(dtype=call.state_dtype),
            square(dtype=torch.float32 if call.strength == 2 else call.state_dtype),
            *(square(dtype=call.state_dtype) if call.dplr else None for _ in range(2)),
            new((count, HV, call.rate_rows, C), dtype=torch.float32) if call.rate_rows else None,
            *lengths,
        )

    @property
    def lengths(self) -> Lengths | None:
        """Reciprocal lengths of queries and keys, where there are any."""
        return kept_lengths(self.uq, self.uk)


class Kept(NamedTuple):
    """What the forward pass leaves for the backward pass: its scores or, where one kernel makes those and carries the state,
    the states before chunks and errors; ``None`` for what is not left.

    Attributes:
        A, M, A2, L2, rates, uq, uk: As in :class:`Scores`.
        states, errors: As in :class:`States`.
    """

    A: Tensor | None = None
    M: Tensor | None = None
    A2: Tensor | None = None
    L2: Tensor | None = None
    rates: Tensor | None = None
    uq: Tensor | None = None
    uk: Tensor | None = None
    states: Tensor | None = None
    errors: Tensor | None = None

    @classmethod
    def of(cls, scores: Scores) -> Kept:
        """Scores."""
        return cls(*scores)

    @classmethod
    def states_of(cls, call: DeltaCall) -> Kept:
        """Arrays for the states and errors of a call."""
        states, errors = States.empty(call)
        return cls(states=states, errors=errors)

    @classmethod
    def empty(cls, call: DeltaCall, keep: int) -> Kept:
        """Arrays for what the forward pass of a call leaves."""
        return cls.states_of(call) if call.keeps_states(keep) else cls.of(Scores.empty(call, empty_lengths(call)))

    @property
    def what(self) -> str:
        """What was left: "scores", "states" or nothing; of no tokens there are no errors."""
        return "scores" if self.A is not None else "states" if self.errors is not None else ""

    @property
    def scores(self) -> Scores | None:
        """The scores, if those are what was left."""
        if self.A is None or self.M is None:
            return None
        return Scores(self.A, self.M, self.A2, self.L2, self.rates, self.uq, self.uk)


class StateOperands(NamedTuple):
    """What carries a state over the chunks.

    Attributes:
        read, compare: Queries and the keys that read, with a vector gate ``q ∘ e^G`` and ``k ∘ e^G`` of every value head.
        write: With a vector gate, the keys that write: ``k ∘ e^{G_C - G}``.
        write2: The second row that ``dplr`` writes, likewise.
        scores: Scores and solved systems.
        rates: With a scalar gate the scores' own, with a vector gate ``e^{G_C}``, ``[chunks, HV, K]``.
        log_decays: With a vector gate, the strongest sum of a channel's gates over each chunk, base 2: ``[chunks, HV]``.
    """

    read: Tensor
    compare: Tensor
    write: Tensor | None
    write2: Tensor | None
    scores: Scores
    rates: Tensor | None
    log_decays: Tensor | None


class States(NamedTuple):
    """What the state and its gradient, carried over the chunks, leave for the other gradients.

    Attributes:
        states: The state before each chunk, transposed: ``[chunks, HV, V, K]``.
        dstates: The gradient of the state after each chunk, likewise.
        errors: What values lack, ``e`` ``[B, T, HV, V]``.
        adjoint: Their adjoint ``y``, likewise.
    """

    states: Tensor
    dstates: Tensor
    errors: Tensor
    adjoint: Tensor

    @classmethod
    def empty(cls, call: DeltaCall) -> tuple[Tensor, Tensor]:
        """Arrays for those of one way through the chunks."""
        T, HV, V = call.v.shape[1:]
        count = room_for(T, call.N, call.chunk, call.cu is not None)
        new = functools.partial(torch.empty, dtype=call.state_dtype, device=call.v.device)
        return new((count, HV, V, call.q.shape[-1])), new(call.v.shape)


class ScoreGradients(NamedTuple):
    """Gradients of ``A`` and ``L``, and with the second row that ``dplr`` writes; ``None`` where no stage reads them."""

    dA: Tensor | None
    dL: Tensor | None
    dA2: Tensor | None
    dL2: Tensor | None
