"""Which kernels of the delta core run, with which tiles, and why: by what is static of a call. Nothing is tuned at run time.

Kernels for Hopper are imported where one is chosen: they are in a language that one release of the compiler has.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ...chunks import power_of_two, wished
from ..host.tiles import Tile, fit
from ..host.variant import Facts, Stage, Variant, precision_of, unfit
from ..runtime.device import Properties
from .gradients import delta_gate_bwd, delta_gradients_bwd, delta_scores_bwd
from .scores import delta_scores_fwd, delta_solve_fwd
from .state import delta_state_bwd, delta_state_carry, delta_state_fwd
from .vector import delta_vector_gradients_bwd, delta_vector_rows_fwd, delta_vector_scores_fwd, delta_vector_values_bwd

__all__ = ["DeltaVariant", "backward_variant", "chunk_tokens", "forward_variant", "has_whole_heads", "many"]

Stages = dict[str, Stage]

GATES = {"delta_rule": 0, "gated_delta_rule": 1, "kda": 2, "dplr": 2}
"""The gate of each family: 0 none, 1 a scalar, 2 a vector."""

THREE_PROGRAMS = dict(maxnreg=168)
"""Of programs of four warps, three of which share a multiprocessor of Hopper."""

OVERLAP = dict(launch_pdl=True)
"""Of a kernel that may begin while the one before it runs: it waits by itself, by :func:`..lib.sm90.wait_for_predecessor`.

Strong scores and states that write outputs gained by it, backward passes nothing.
"""

FOUND_OUT = 32
"""Chunks in the time of which it is found out on the device whether packed sequences are to be cut, and a few more."""


WHOLE_HEADS = dict(delta_rule=128, gated_delta_rule=128, dplr=64)
"""``K = V`` of the families for which one kernel makes scores and carries the state, on Hopper."""


@dataclass(frozen=True)
class DeltaVariant(Variant):
    """A variant of the delta core, and the numbers that its kernels share.

    Attributes:
        chunk: Tokens a chunk.
        split: bfloat16 terms that stand for a float32 number in a sum of gates.
        range: A chunk that decays by less than ``2^range`` takes the plain products.
        precision: How products of float32 tiles are done.
        num_sms: Multiprocessors of the device.
        scores_chunks: Chunks that a program of the scores takes.
        state_programs: Programs that carry a state and share a multiprocessor.
        makes_lengths: Whether the kernel of the scores makes the reciprocal lengths of rows that are to be unit rows.
    """

    chunk: int
    split: int
    range: float
    precision: str
    num_sms: int
    scores_chunks: int
    state_programs: int
    makes_lengths: bool

    def few(self, count: int) -> int:
        """Programs that fill the device and share ``count`` pieces of work."""
        return min(count, 2 * self.num_sms)

    def segment(self, tokens: int, busy: int, most: int | None = None) -> int:
        """Chunks a segment, if sequences of ``tokens`` that keep ``busy`` programs take less time cut; or 0.

        Of packed ones, which may all be ``most`` but one, ``tokens`` is the mean: that one is long is worth finding out.
        """
        if "segment_carry" not in self.stages or 8 * busy >= 7 * self.num_sms:
            return 0
        chunks = -(-tokens // self.chunk)
        length = max(-(-chunks * busy // (self.state_programs * self.num_sms)), 8)
        possible = most is not None and chunks >= FOUND_OUT and most - self.whole(length) > FOUND_OUT * self.chunk
        return length if possible or tokens > self.whole(length) else 0

    def whole(self, length: int) -> int:
        """Tokens of the longest sequence of those that take no less time in segments of ``length`` chunks.

        A segment is gone through three times, and what comes between costs as much as 16 chunks.
        """
        return (3 * length + 15) * self.chunk


def has_whole_heads(facts: Facts) -> bool:
    """Whether one kernel may make scores and carry the state of such heads."""
    return facts.K == facts.V == WHOLE_HEADS.get(facts.family)


def many(family: str, sequences: int, heads: int, packed: bool, num_sms: int) -> bool:
    """Whether one program for each sequence and value head leaves few multiprocessors idle.

    A walk takes as long as its sequence, and has a multiprocessor of its own; two of ``dplr`` share one, and take less time
    than one after the other. Stages take less time a walk where there are more than one wave of them. Of packed ones only the
    mean length is known: two or three are taken to differ.
    """
    walks = sequences * heads
    if family == "dplr":
        filled = 20 * walks >= 19 * num_sms
    else:
        waves = -(-walks // num_sms)
        filled = 20 * walks >= (14 if waves == 1 else 15) * num_sms * waves
    return (sequences > 3 or not packed) and filled


def most_tokens(dtype: torch.dtype, K: int, beta: int) -> int:
    """Tokens of the longest chunk."""
    return 32 if dtype != torch.bfloat16 or beta == 2 or K > 128 else 64


def chunk_tokens(dtype: torch.dtype, K: int, beta: int, chunk: int) -> int:
    """Tokens a chunk; ``beta`` is 2 for one a value channel, ``chunk`` the caller's wish, or 0."""
    most = most_tokens(dtype, K, beta)
    return wished(chunk, most)


def beta_of(facts: Facts) -> int:
    """What ``beta`` a call has: 0 none, 1 one a token, 2 one a value channel."""
    return 0 if facts.family == "dplr" else facts.strength


def tiles_for(facts: Facts, large_smem: bool) -> dict[str, Tile]:
    """The tile of each stage: a few choices by shape, each checked on the device."""
    _, dtype, K, V, C, *_ = facts
    gate, beta, full = GATES[facts.family], beta_of(facts), dtype != torch.bfloat16
    rows = max(power_of_two(K), 16 if full else 64)
    most, least = (32, 16) if full else (64, 64)  # 16-bit tiles of 32 channels came out wrong on Hopper (Triton 3.6.0)
    keys, values = fit(K, most, least), fit(V, most, least)
    one = full or K > 128 or not large_smem or (beta == 0 and K > 64)  # stage: more do not fit, in general
    # The assembler may give up on parts of 128 keys in float32, and off Hopper on twice as many values: it takes 32 registers
    # and spills 4 to 15 KB a thread, once wrongly. With 8 warps and parts of 128 bfloat16 read past shared memory (Triton 3.6).
    wide = K > 128
    part, halves = 64 if full or wide else 128, 2 if wide and not large_smem else 1
    state = Tile(min(rows, part), max(values // halves, 16), 4, 1 if one else 2)
    usual_size = K == V == 128 and not full and large_smem
    usual = usual_size and beta == 1
    columns = fit(K, 32 if full else 64 if gate == 2 else 128, least)
    # 4 warps spill 1 KB a thread, and on an A100, of whose registers the assembler takes 32, 6 KB
    gradients = Tile(columns, values, 8 if columns == 128 and not large_smem else 4, 1)
    return dict(
        scores=Tile(128 if usual and gate == 1 else keys, 0, 4, 1),
        solve=Tile(0, 0, 1, 1),
        state_fwd=state._replace(stages=3 if gate < 2 else 2) if not one or (usual_size and beta == 0) else state,
        state_bwd=state._replace(stages=3 if usual else 2) if usual_size and (gate == 1 or beta == 0) else state,
        segment_carry=Tile(rows, 16, 4, 1 if K > 128 or not large_smem else 2 if full else 3),
        scores_bwd=Tile(0, 128 if usual else values, 4, 1),
        gradients=Tile(64, 128 if gate else 64, 4, 1 if gate else 2) if usual and gate < 2 else gradients,
        # dplr: 8 warps take a quarter longer than 4, and 0.6 of the compiler's time
        gradients_strong=Tile(keys, values, 8 if beta == 0 and C == 64 else 4, 1),
        gate=Tile(0, 0, 1, 1),
        sm90=Tile(64, 0, 4, 1),
    )


@dataclass(frozen=True)
class Choice:
    """What the stages of a variant follow from.

    Attributes:
        facts: What is static of the call.
        device: What is chosen by, of the device.
        unaligned: Which arrays kernels for Hopper cannot copy as they lie.
    """

    facts: Facts
    device: Properties
    unaligned: tuple[str, ...]

    @property
    def gate(self) -> int:
        """The gate of the family, as in :data:`GATES`."""
        return GATES[self.facts.family]

    @property
    def dplr(self) -> bool:
        """Whether two rows are written a token: its scores have a kernel for Hopper of their own."""
        return self.facts.family == "dplr"

    @functools.cached_property
    def tiles(self) -> dict[str, Tile]:
        """The tile of each stage."""
        return tiles_for(self.facts, self.device.large_smem)

    @property
    def operands(self) -> tuple[str, ...]:
        """The arrays that scores are made of."""
        return ("q", "k", "a", "b", "g") if self.gate == 2 else ("q", "k")

    def why_plain(self, *reads: str) -> str | None:
        """Why no kernel for Hopper takes the arrays that it ``reads``; ``None`` if one does."""
        rough = [name for name in self.unaligned if name in reads]
        return unfit(self.facts) or self.device.not_hopper or (f"{', '.join(rough)} not aligned to 16 bytes" if rough else None)

    def stage(self, name: str, kernel: object) -> Stages:
        """A stage of a plain kernel."""
        return {name: Stage(kernel, self.tiles[name])}

    def scores(self, kept: bool) -> Stages:
        """Scores and solved systems; if the forward pass ``kept`` those, decayed rows alone, where there are any."""
        if kept and self.gate < 2:
            return {}
        if self.why_plain(*self.operands) is None:
            if self.gate < 2:
                return self.scalar_scores_sm90()
            return self.dplr_scores_sm90(kept) if self.dplr else self.kda_scores_sm90(kept)
        if kept:
            return dict(rows=Stage(delta_vector_rows_fwd, self.tiles["scores"]))
        if self.gate < 2:
            return self.stage("scores", delta_scores_fwd) | self.solve()
        return self.stage("scores", delta_vector_scores_fwd) | self.strong_scores() | self.solve()

    def scalar_scores_sm90(self) -> Stages:
        """Scores and solve for at most a scalar gate, in one kernel for Hopper."""
        from .scores_sm90 import delta_scores_fwd_sm90

        return dict(scores=Stage(delta_scores_fwd_sm90, self.tiles["sm90"], THREE_PROGRAMS))

    def kda_scores_sm90(self, kept: bool) -> Stages:
        """Decayed rows of ``kda`` and, unless ``kept``, scores and solve in one, in kernels for Hopper."""
        from .vector_sm90 import delta_vector_scores_fwd_sm90, delta_vector_scores_strong_fwd_sm90

        tile = self.tiles["sm90"]
        if kept:
            return dict(rows=Stage(delta_vector_scores_fwd_sm90, tile))
        return dict(
            scores=Stage(delta_vector_scores_fwd_sm90, tile, THREE_PROGRAMS),
            scores_strong=Stage(delta_vector_scores_strong_fwd_sm90, tile, OVERLAP),
        )

    def dplr_scores_sm90(self, kept: bool) -> Stages:
        """Decayed rows of ``dplr`` and, unless ``kept``, scores; strong chunks have no kernel for Hopper, nor has the solve."""
        from .dplr_sm90 import delta_dplr_scores_fwd_sm90

        made = Stage(delta_dplr_scores_fwd_sm90, self.tiles["sm90"])
        return dict(rows=made) if kept else dict(scores=made) | self.strong_scores() | self.solve()

    def strong_scores(self) -> Stages:
        """Scores of strong chunks, by levels."""
        return dict(scores_strong=Stage(delta_vector_scores_fwd, self.tiles["scores"]))

    def solve(self) -> Stages:
        """The triangular solve, but for a ``beta`` a value channel, whose systems are solved as the state is carried."""
        return {} if beta_of(self.facts) == 2 else self.stage("solve", delta_solve_fwd)

    def state_sm90(self, y: str) -> bool:
        """Whether a kernel for Hopper carries the state, which reads ``y``, or its gradient; decayed rows are aligned."""
        # dplr's two writers were run on a device with these widths only; others compile, but what comes out was not compared
        if self.dplr and not self.facts.K == self.facts.V == 128:
            return False
        return self.why_plain(*(() if self.gate == 2 else self.operands), y) is None

    def fused_sm90(self) -> bool:
        """Whether one kernel makes scores and carries the state."""
        facts = self.facts
        return facts.many and has_whole_heads(facts) and self.why_plain(*self.operands, "v") is None

    def fused(self) -> Stages:
        """Scores, solve and state, in one kernel for Hopper."""
        if self.dplr:
            from .dplr_fused_sm90 import delta_dplr_fused_fwd_sm90

            return dict(fused=Stage(delta_dplr_fused_fwd_sm90, Tile(64, 64, 4, 1), OVERLAP))
        from .fused_sm90 import delta_fused_fwd_sm90

        return dict(fused=Stage(delta_fused_fwd_sm90, Tile(128, 64, 4, 3), dict(STAGES=3, REGISTERS=(192, 104, 24), **OVERLAP)))

    def fused_bwd(self) -> Stages:
        """Scores, solve and the state's gradient of ``dplr``, in one kernel for Hopper."""
        from .dplr_fused_bwd_sm90 import delta_dplr_fused_bwd_sm90

        return dict(fused_bwd=Stage(delta_dplr_fused_bwd_sm90, Tile(64, 64, 4, 1)))

    def state_fwd(self) -> Stage:
        """The state from chunk to chunk."""
        if not self.state_sm90("v"):
            return Stage(delta_state_fwd, self.tiles["state_fwd"])
        from .state_sm90 import delta_state_fwd_sm90

        return Stage(delta_state_fwd_sm90, self.tiles["state_fwd"], dict(STAGES=3 if self.gate < 2 else 2))

    def state_bwd(self) -> Stage:
        """The state's gradient from chunk to chunk."""
        if not self.state_sm90("do"):
            return Stage(delta_state_bwd, self.tiles["state_bwd"])
        from .state_sm90 import delta_state_bwd_sm90

        return Stage(delta_state_bwd_sm90, self.tiles["state_bwd"], dict(STAGES=3 if self.gate < 2 else 2))

    def segments(self, **each: Stage) -> Stages:
        """What runs where sequences are cut into segments.

        Sequences with a ``beta`` a value channel are not cut: what a segment does to the state would be a ``[K, K]`` a channel.
        """
        if beta_of(self.facts) == 2:
            return {}
        if self.dplr:  # kernels for Hopper that go to a segment's end, and write nothing on the way, were not run on a device
            plain = dict(segment_fwd=(delta_state_fwd, "state_fwd"), segment_bwd=(delta_state_bwd, "state_bwd"))
            each = {name: Stage(kernel, self.tiles[tile]) for name, (kernel, tile) in plain.items() if name in each}
        return each | self.stage("segment_carry", delta_state_carry)

    def gradients(self) -> Stages:
        """Gradients of operands and gates."""
        sm90 = self.why_plain(*self.operands, "do", *(("v",) if self.dplr else ())) is None
        if self.gate < 2:
            return self.scalar_gradients_sm90() if sm90 else self.stage("gradients", delta_gradients_bwd)
        if sm90 and not self.dplr:
            return self.kda_gradients_sm90()
        if sm90 and self.facts.K == self.facts.V == 64:
            return self.dplr_gradients_at_once_sm90()
        stages = self.stage("scores_bwd", delta_scores_bwd) | self.stage("gradients", delta_vector_gradients_bwd)
        if sm90:
            stages |= self.dplr_gradients_sm90()
        stages |= self.stage("gradients_strong", delta_vector_gradients_bwd)
        return stages | dict(values=Stage(delta_vector_values_bwd, self.tiles["gradients"])) if self.dplr else stages

    def scalar_gradients_sm90(self) -> Stages:
        """Gradients for at most a scalar gate, for Hopper; each tile leaves a part of the gate's, to be summed."""
        from .gradients_sm90 import delta_gradients_bwd_sm90

        stages = dict(gradients=Stage(delta_gradients_bwd_sm90, self.tiles["gradients"]._replace(BK=64)))
        return stages | self.stage("gate", delta_gate_bwd) if self.gate else stages

    def kda_gradients_sm90(self) -> Stages:
        """Gradients of ``kda`` for Hopper, of scores and values too."""
        from .vector_sm90 import delta_vector_gradients_bwd_sm90

        made = Stage(delta_vector_gradients_bwd_sm90, self.tiles["sm90"])
        return dict(gradients=made, gradients_strong=made)

    def dplr_gradients_at_once_sm90(self) -> Stages:
        """All gradients of ``dplr`` with heads of 64, for Hopper."""
        from .dplr_gradients_sm90 import delta_dplr_chunk_bwd_sm90
        from .dplr_strong_sm90 import delta_dplr_strong_bwd_sm90

        tile = self.tiles["sm90"]
        return dict(gradients=Stage(delta_dplr_chunk_bwd_sm90, tile), gradients_strong=Stage(delta_dplr_strong_bwd_sm90, tile))

    def dplr_gradients_sm90(self) -> Stages:
        """Gradients of the other chunks of ``dplr``, for Hopper; strong chunks have no kernel for it."""
        from .dplr_sm90 import delta_dplr_gradients_bwd_sm90

        return dict(gradients=Stage(delta_dplr_gradients_bwd_sm90, self.tiles["sm90"]))

    def variant(self, stages: Stages) -> DeltaVariant:
        """The variant of these stages."""
        dtype, why = self.facts.dtype, self.why_plain(*self.operands)
        return DeltaVariant(
            stages,
            why,
            chunk=self.facts.chunk,
            split=3 if dtype == torch.float32 else 2,
            range={torch.float16: 10.0, torch.float32: 16.0}.get(dtype, 160.0),  # a longer sum is less exact in float32
            precision=precision_of_delta(dtype, self.facts.K),
            num_sms=self.device.num_sms,
            scores_chunks=4 if self.gate < 2 and why is None else 1,
            state_programs=1 if self.state_sm90("v") else 2,
            makes_lengths=self.facts.family == "kda" and why is None,
        )


def precision_of_delta(dtype: torch.dtype, K: int) -> str:
    """How products of float32 tiles are done: in float16, which is no coarser than tf32, what a solved system makes of factors
    that are cut off shows, so that they are rounded there.
    """
    precision = precision_of(dtype, K)
    return "nearest" if dtype == torch.float16 and precision == "tf32" else precision


@functools.lru_cache(maxsize=1024)
def forward_variant(facts: Facts, device: Properties, unaligned: tuple[str, ...] = ()) -> DeltaVariant:
    """The variant of a forward pass.

    Args:
        facts: What is static of the call.
        device: What is chosen by, of the device.
        unaligned: Which of ``q, k, v, a, b, g`` kernels for Hopper cannot copy as they lie.
    """
    choice = Choice(facts, device, unaligned)
    if choice.fused_sm90():
        return choice.variant(choice.fused())
    state = choice.state_fwd()
    outputs = state._replace(options=dict(state.options, **OVERLAP)) if choice.state_sm90("v") else state
    return choice.variant(choice.scores(kept=False) | choice.segments(segment_fwd=state) | dict(state_fwd=outputs))


@functools.lru_cache(maxsize=1024)
def backward_variant(facts: Facts, kept: str, device: Properties, unaligned: tuple[str, ...] = ()) -> DeltaVariant:
    """The variant of a backward pass.

    Args:
        facts: What is static of the call.
        kept: What the forward pass kept: "scores" or, where one kernel carries the state, "states"; or nothing.
        device: What is chosen by, of the device.
        unaligned: Which of ``q, k, v, a, b, g, do`` kernels for Hopper cannot copy as they lie.
    """
    choice = Choice(facts, device, unaligned)
    if choice.dplr and choice.fused_sm90() and choice.why_plain("do") is None:
        return choice.variant(({} if kept == "states" else choice.fused()) | choice.fused_bwd() | choice.gradients())
    forward, backward = choice.state_fwd(), choice.state_bwd()
    stages = choice.scores(kept == "scores") | choice.segments(segment_fwd=forward, segment_bwd=backward)
    return choice.variant(stages | dict(state_fwd=forward, state_bwd=backward) | choice.gradients())
