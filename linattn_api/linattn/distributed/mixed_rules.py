"""The rules of ``mixed_attn``: spans tell each other the tokens of the chunk that a span's end cuts, and sums of whole chunks.

Where a chunk ends follows from how many tokens a sequence has before a span. So spans first exchange their last ``C−1`` keys
and values, of which each keeps those of the chunk that it goes on with. Then each knows the chunks that end in it, whose sum is
what it adds to the state.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ContextError
from ..frameworks import Framework
from ..plugin import MixedState
from ..spec import FAMILIES
from .exchange import stacked
from .layout import Shard
from .rules import chained, everywhere, initial_rows, operate_on_packed, operate_on_rows, split, starting, unsplit, windows

if TYPE_CHECKING:
    from .lowering import ShardCall

__all__ = ["chunks_everywhere", "whole_chunks"]

HELD = ("k_quad", "k_lin", "v")
"""What a state holds of each token of the chunk that is not yet full."""


class Stretch(NamedTuple):
    """What a span holds of one sequence.

    Attributes:
        sequence: Number of the sequence; −1 for none.
        before: Its tokens before the span.
        start: First of its tokens, from the start of the span.
    """

    sequence: int
    before: int
    start: int


NOTHING = Stretch(-1, 0, 0)


def _entering(shard: Shard, number: int, length: int) -> Stretch:
    """The sequence that comes into a span of ``length`` tokens."""
    place = shard.spans[number].place
    if not shard.chain.enters[place]:
        return NOTHING
    offsets = shard.cu_seqlens or (0, length * len(shard.chain.order))
    first = place * length
    return next(Stretch(n, first - start, 0) for n, (start, stop) in enumerate(pairwise(offsets)) if start < first < stop)


def _leaving(shard: Shard, number: int, length: int) -> Stretch:
    """The sequence that goes on behind a span."""
    span = shard.spans[number]
    if not shard.packed:
        return Stretch(0, 0, 0) if span.place == 0 else _entering(shard, number, length)
    if span.tail is None:
        return NOTHING._replace(start=length)
    return Stretch(span.tail.sequence, 0, span.tail.start - span.start) if span.tail.first else _entering(shard, number, length)


# -- causal ----------------------------------------------------------------------------------------------------------


def whole_chunks(call: ShardCall) -> tuple[Any, Any]:
    """Causal: a state enters each span, with the tokens of a chunk that has begun."""
    if call.shard.packed:
        return operate_on_packed(call, lambda call: _states(call, call.every))
    return operate_on_rows(call, _states)


def _states(call: ShardCall, x: dict[str, Any]) -> MixedState[Any]:
    """The states that enter the spans, each of their arrays ``[spans, B, …]``."""
    xp, m, C, packed = call.xp, len(call.shard.spans), call.keywords["chunk_size"], call.shard.packed
    initial: MixedState[Any] | None = call.keywords["initial_state"]
    rows, T = x["v"].shape[:2]
    B, length = (1, T // m) if packed else (rows // m, T)
    k_quad, k_lin, v = (xp.astype(x[name], xp.accumulation(x["v"])) for name in HELD)
    own = MixedState[Any](None, k_quad, k_lin, v, None)
    held = _flat(xp, initial) if initial is not None else None
    tokens = _flat(xp, own)
    counts = [_counts(call, _entering, i, B, length) for i in range(m)]
    if C > 1:
        before = None if initial is None else _moved(xp, held, initial.length - (C - 1), C - 1)
        window = windows(call, tokens, before, C - 1, length)
        begun = [_moved(xp, window[i], C - 1 - counts[i], C) for i in range(m)]
    else:
        begun = [xp.full((B, 1, tokens.shape[-1]), 0.0, like=tokens)] * m
    spans = [tokens[:, i * length : (i + 1) * length] if packed else tokens[i::m] for i in range(m)]
    added = [_finished(call, own, held, spans[i], begun[i], i) for i in range(m)]
    b = stacked(xp, added)
    start = _starting(call, length)
    kv = chained(call, xp.full(b.shape[:3], 1.0, like=b), b, None if start is None else start.kv)
    parts = _parts(stacked(xp, begun), own)
    return MixedState(kv, *parts, stacked(xp, counts))


def _starting(call: ShardCall, length: int) -> Any:
    """The caller's states of sequences that start in a span and go on behind it, ``[spans, B, …]``; None for zeros."""
    if not call.shard.packed:
        return starting(call)

    def first(shard: Shard) -> list[int]:
        found = [_leaving(shard, i, length) for i in range(len(shard.spans))]
        return [each.sequence if each.before == 0 else -1 for each in found]

    states = initial_rows(call, first)
    return None if states is None else MixedState(*(x[:, None] for x in states))


def _counts(call: ShardCall, stretch: Callable[[Shard, int, int], Stretch], number: int, B: int, length: int) -> Any:
    """Tokens of the chunk that has begun before a stretch ``[B]``."""
    xp, initial = call.xp, call.keywords["initial_state"]
    held = xp.integers([0] * B, like=call.arrays["v"])
    if initial is not None and call.shard.packed:
        held = call.exchange.rows(call, initial.length, lambda shard: [stretch(shard, number, length).sequence])
    elif initial is not None:
        held = call.exchange.rows(call, initial.length[None], lambda shard: [min(stretch(shard, number, length).sequence, 0)])[
            0
        ]
    return (held + call.exchange.number(call, lambda shard: stretch(shard, number, length).before)) % call.keywords[
        "chunk_size"
    ]


def _finished(call: ShardCall, own: MixedState[Any], held: Any, tokens: Any, begun: Any, number: int) -> Any:
    """``Σ k_linᵀ v`` over the chunks that end in a span, of the sequence that leaves it ``[B, H, L, V]``.

    Args:
        call: The call.
        own: Shapes of what tokens have.
        held: What the caller's states hold ``[N, C, D]``, or None.
        tokens: Those of the span ``[B, T, D]``.
        begun: The tokens of the chunk that the span goes on with ``[B, C, D]``.
        number: Of the span.
    """
    xp, C, (B, length) = call.xp, call.keywords["chunk_size"], tokens.shape[:2]
    count = _counts(call, _leaving, number, B, length)
    start = call.exchange.number(call, lambda shard: _leaving(shard, number, length).start)
    whole = (count + (length - start)) // C * C
    t = xp.arange(length, like=count) - start
    ends = (t >= 0)[None] & (count[:, None] + t[None] < whole[:, None])
    _, k, v = _parts(xp.where(ends[..., None], tokens, xp.zeros_like(tokens)), own)
    linear = FAMILIES["linear_attn"]
    _, b = call._replace(spec=linear, keywords={**dict.fromkeys(linear.keywords), **linear.defaults}).summarize(
        {"k": k, "v": v}
    )
    before = call.exchange.rows(call, begun[None], lambda shard: [0 if _leaving(shard, number, length).before else -1])[0]
    if held is not None:
        before = before + _held_at_start(call, held, number, length)
    _, k, v = _parts(xp.where((whole > 0)[:, None, None], before, xp.zeros_like(before)), own)
    return b + xp.matmul_of_states(xp.swapaxes(xp.swapaxes(k, 1, 2), -1, -2), xp.swapaxes(v, 1, 2))


def _held_at_start(call: ShardCall, held: Any, number: int, length: int) -> Any:
    """What the caller's state holds where the sequence that leaves a span starts in it ``[B, C, D]``."""

    def first(shard: Shard) -> int:
        found = _leaving(shard, number, length)
        return found.sequence if found.before == 0 else -1

    if call.shard.packed:
        return call.exchange.rows(call, held, lambda shard: [first(shard)])
    return call.exchange.rows(call, held[None], lambda shard: [first(shard)])[0]


def _flat(xp: Framework, state: MixedState[Any]) -> Any:
    """What tokens have, in one array ``[N, C, D]``."""
    return xp.concat([x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) for x in (state.k_quad, state.k_lin, state.v)], axis=-1)


def _parts(x: Any, like: MixedState[Any]) -> tuple[Any, Any, Any]:
    """The keys and the values of tokens ``[…, H, W]``, of ``x [..., D]``."""
    shapes = [part.shape[2:] for part in (like.k_quad, like.k_lin, like.v)]
    a, b = shapes[0][0] * shapes[0][1], shapes[0][0] * (shapes[0][1] + shapes[1][1])
    found = (x[..., :a], x[..., a:b], x[..., b:])
    k_quad, k_lin, v = (part.reshape(*part.shape[:-1], *shape) for part, shape in zip(found, shapes, strict=True))
    return k_quad, k_lin, v


def _moved(xp: Framework, x: Any, shift: Any, rows: int) -> Any:
    """``[N, rows, D]``: of ``x [N, C, D]``, in row ``r`` what is in row ``r + shift``, zeros where that is none."""
    index = xp.arange(rows, like=shift)[None] + shift[:, None]
    there = (index >= 0) & (index < x.shape[1])
    found = xp.take_along(x, xp.where(there, index, xp.zeros_like(index))[..., None], axis=1)
    return xp.where(there[..., None], found, xp.zeros_like(found))


# -- causal=False ----------------------------------------------------------------------------------------------------


def chunks_everywhere(call: ShardCall) -> tuple[Any, Any]:
    """Every token reads its own chunk, which lies on one rank, and the sum over its whole sequence."""
    xp, shard, m = call.xp, call.shard, len(call.shard.spans)
    C, x = call.keywords["chunk_size"], call.every
    length = x["v"].shape[1] // m
    _check_chunks(call, C, length)
    near = {**x, "k_lin": xp.zeros_like(x["k_lin"])}
    if shard.packed:
        o, _ = call.operate(near, cu_seqlens=call.exchange.offsets(call, lambda shard: shard.offsets))
    else:
        o, _ = call.operate(call.of_tokens(near, lambda x: split(x, m)))
        o = unsplit(o, m)
    linear, scale = FAMILIES["linear_attn"], call.keywords["lin_scale"]
    options = {"scale": 1.0 / C if scale is None else scale, "causal": False}
    far, _ = everywhere(
        call._replace(
            spec=linear,
            form="chunk",
            arrays={"q": x["q_lin"], "k": x["k_lin"], "v": x["v"]},
            keywords={**dict.fromkeys(linear.keywords), **linear.defaults, **options},
        )
    )
    return o + far, None


def _check_chunks(call: ShardCall, C: int, length: int) -> None:
    """No chunk is cut by the end of a span."""
    for peer in call.shard.peers:
        for i in range(len(peer.spans)):
            before = _entering(peer, i, length).before
            if before % C:
                raise ContextError(
                    f"{call.label}: causal=False takes chunks that lie on one rank, and one of {C} tokens goes on from a "
                    f"span of {length} to the next: let spans, and sequences in front of one that goes on, be multiples of "
                    f"chunk_size"
                )
