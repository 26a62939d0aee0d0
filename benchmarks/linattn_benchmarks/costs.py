"""What a call on many ranks costs: a sum of terms that are counted, with factors that are fitted to measured rows.

Of one family and direction, with ``R`` ranks of ``t`` tokens and ``H`` heads each:

``ms = call + token · tH + [R > 1] (join + summary · tH) + hop · n(R−1) + byte · (R−1) m + flop · (R−1) f``

``call``, ``token``, ``join`` and ``summary`` belong to the family; ``hop``, ``byte`` and ``flop`` to the machine. A pass
exchanges ``n`` times (once forward, once backward) ``m`` bytes of each rank: summaries ``(A, b)`` forward, gradients of states
backward, float32. Every rank applies the ``R−1`` transitions of the others, ``f`` operations each. Where the summaries of all
ranks are more than a plan gathers, a ring hands on states instead, and ``m`` is a state both ways.

A factor is never negative: what the rows cannot tell from zero is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .floors import CHUNK, FLOPS

SCALAR = ("linear_attn", "simple_gla")
VECTOR = ("gla", "rwkv6")
MATRIX = ("delta_rule", "gated_delta_rule", "kda", "dplr")
FAMILIES = (*SCALAR, *VECTOR, *MATRIX)
GATHERED = 1 << 28
"""Bytes of summaries of all ranks that ``context_parallel`` gathers at most."""
OF_FAMILY = ("call", "token", "join", "summary")
OF_MACHINE = ("hop", "byte", "flop")

Row = dict[str, Any]
Sizes = dict[str, int]


def transition(family: str, K: int) -> int:
    """Numbers of one head's ``A``."""
    return 1 if family in SCALAR else K if family in VECTOR else K * K


def application(family: str, K: int, V: int) -> int:
    """Operations of ``A ∘ S + b`` of one head."""
    return (2 * K * K * V if family in MATRIX else K * V) + K * V


def states(sizes: Sizes, count: int) -> int:
    """Bytes of so many states of every head."""
    return 4 * sizes["H"] * sizes["K"] * sizes["V"] * count


def exchanged(family: str, what: str, ranks: int, sizes: Sizes) -> int:
    """Bytes of one rank in one call."""
    H, K, V = sizes["H"], sizes["K"], sizes["V"]
    state, summary = states(sizes, 1), 4 * H * (transition(family, K) + K * V)
    forward = state if summary * ranks > GATHERED else summary
    return forward + (state if what == "fwdbwd" else 0)


def terms(row: Row, sizes: Sizes) -> dict[Any, float]:
    """The factors that a row is a sum of, and how often each counts."""
    R = row["ranks"]
    if row["family"] is None:
        return {"hop": R - 1.0, "byte": float((R - 1) * row["bytes"])}
    key, passes = (row["family"], row["what"]), 2 if row["what"] == "fwdbwd" else 1
    work = float(row["tokens"] * sizes["H"])
    found: dict[Any, float] = {(*key, "call"): 1.0, (*key, "token"): work}
    if R == 1:
        return found
    found |= {(*key, "join"): 1.0, (*key, "summary"): work, "hop": passes * (R - 1.0)}
    operations = passes * sizes["H"] * application(row["family"], sizes["K"], sizes["V"])
    return found | {"byte": float((R - 1) * exchanged(*key, R, sizes)), "flop": float((R - 1) * operations)}


@dataclass(frozen=True)
class Costs:
    """Fitted factors, in milliseconds.

    Attributes:
        factors: By name, those of a family with family and direction before it.
        sizes: Heads and widths that they are for.
    """

    factors: dict[Any, float]
    sizes: Sizes

    def ms(self, family: str, what: str, ranks: int, tokens: float) -> float:
        """Of a call on ``ranks`` ranks of ``tokens`` tokens each."""
        return self.of({"family": family, "what": what, "ranks": ranks, "tokens": tokens})

    def of(self, row: Row) -> float:
        """Of what a row measures."""
        return sum(self.factors.get(name, math.nan) * count for name, count in terms(row, self.sizes).items())

    def efficiency(self, family: str, what: str, ranks: int, tokens: float) -> float:
        """Time of a rank alone with its tokens, over that of all ranks together."""
        return self.ms(family, what, 1, tokens) / self.ms(family, what, ranks, tokens)


def fit(rows: Iterable[Row], sizes: Sizes) -> Costs:
    """The factors whose sums are relatively nearest to the medians of the rows, none below zero."""
    measured = list(rows)
    counted = [terms(row, sizes) for row in measured]
    names = list(dict.fromkeys(name for one in counted for name in one))
    times = np.array([row["ms"]["median"] for row in measured])
    matrix = np.array([[one.get(name, 0.0) for name in names] for one in counted]) / times[:, None]
    return Costs(dict(zip(names, nonnegative(matrix, np.ones(len(times))), strict=True)), sizes)


def nonnegative(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    """Least squares without negative unknowns (Lawson & Hanson 1974, algorithm NNLS)."""
    scale = np.linalg.norm(matrix, axis=0)
    A = matrix / np.where(scale > 0, scale, 1)
    x, free = np.zeros(A.shape[1]), np.zeros(A.shape[1], bool)
    for _ in range(10 * A.shape[1]):
        gain = np.where(free, -np.inf, A.T @ (target - A @ x))
        if gain.max(initial=-np.inf) <= 1e-10:
            break
        free[gain.argmax()] = True
        while True:
            wanted = np.zeros_like(x)
            wanted[free] = np.linalg.lstsq(A[:, free], target, rcond=None)[0]
            below = free & (wanted <= 0)
            if not below.any():
                break
            share = np.min(x[below] / (x[below] - wanted[below] + 1e-300))
            x = x + share * (wanted - x)
            free &= x > 1e-14
        x = wanted
    return (x / np.where(scale > 0, scale, 1)).tolist()


# -- from counts alone -----------------------------------------------------------------------------------------------


def share_of_summaries(family: str, K: int, V: int) -> float:
    """Operations of a shard's summary over those of its own forward and backward pass; float arithmetic of chunks of 64.

    A summary reads no queries and writes no outputs: it carries a state of ``V`` columns, and where its transition is a matrix
    ``K`` more, ``4K`` operations a token and column besides the ``2C(2K + V)`` of the triangular systems. The backward pass
    carries the gradient of the state back, which costs as much again.
    """
    C = CHUNK
    forward, backward = FLOPS[family]
    own = sum(x.kv * K * V + x.ck * C * K + x.cv * C * V + x.cc * C * C for x in (forward, backward))
    matrix = family in MATRIX
    one = 4 * K * (V + K) + 2 * C * (2 * K + V) if matrix else 2 * K * V
    return 2 * one / own


@dataclass(frozen=True)
class Scan:
    """One scan over a shard, by a token and head.

    Attributes:
        nbytes: Bytes of what is read.
        flops: Operations.
    """

    nbytes: int
    flops: int

    def ms(self, count: int, ceilings: dict[str, Any]) -> float:
        """The least time of ``count`` tokens and heads: bytes at the speed of a copy, operations at that of a product."""
        return 1e3 * count * max(self.nbytes / ceilings["copy_bytes_per_s"], self.flops / ceilings["matmul_flops_per_s"])


def scans(family: str, sizes: Sizes, operand: int, gate: int) -> tuple[Scan, Scan]:
    """What a rank does for the others, as counted: a summary of keys, values and gates, and the gradient of what enters it.

    ``operand`` and ``gate`` are bytes of a number.
    """
    K, V, C = sizes["K"], sizes["V"], CHUNK
    gates = gate * (0 if family in ("linear_attn", "delta_rule") else K if family in (*VECTOR, "kda", "dplr") else 1)
    strengths = operand * 2 * K if family == "dplr" else gate if family in MATRIX else 0
    forward, backward = 2 * K * V, 2 * K * V
    if family in MATRIX:
        forward, backward = 4 * K * (V + K) + 2 * C * (2 * K + V), 6 * K * V + 4 * C * V
    keys = operand * K * (family in MATRIX)
    return Scan(operand * (K + V) + gates + strengths, forward), Scan(operand * (K + V) + keys + gates + strengths, backward)


def efficiency_of_counts(family: str, sizes: Sizes, ranks: int, own_ms: float, bytes_per_s: float) -> float:
    """What is left of ideal if operations all take as long as a shard's own, which are ``own_ms``, and bytes go at one rate."""
    nbytes = (ranks - 1) * exchanged(family, "fwdbwd", ranks, sizes)
    extra = own_ms * share_of_summaries(family, sizes["K"], sizes["V"]) + nbytes / bytes_per_s * 1e3
    return own_ms / (own_ms + extra)


def ring_attention_bytes(ranks: int, tokens: int, H: int, K: int, V: int, itemsize: int = 2) -> int:
    """What a rank of ring attention sends in a forward pass: its keys and values, to every other rank."""
    return (ranks - 1) * tokens * H * (K + V) * itemsize


def worst(costs: Costs, rows: Sequence[Row]) -> float:
    """The largest factor between a row and what the fit says of it."""
    ratios = [costs.of(row) / row["ms"]["median"] for row in rows]
    return max((max(ratio, 1 / ratio) for ratio in ratios if ratio > 0), default=math.nan)
