"""Who has which tokens, and what is said where they do not fit."""

from __future__ import annotations

import warnings
from typing import Any

import linattn
import numpy as np
import pytest
from linattn.distributed import simulate
from linattn.distributed.layout import chain_of, plain_offsets, shard_of
from linattn.errors import ContextError, OptionError
from sequence_cases import draw

OFFSETS = (0, 3, 3, 4, 15, 16, 16, 22)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
def test_every_token_is_held_once(ranks: int, layout: str):
    tokens = 24 // ranks
    shards = [shard_of(ranks, rank, layout, tokens, OFFSETS) for rank in range(ranks)]
    held: list[int] = []
    for shard in shards:
        for segment in shard.segments:
            span = shard.spans[segment.span]
            moved = span.place * (span.stop - span.start) - span.start
            held += range(segment.start + moved, segment.stop + moved)
    assert sorted(held) == list(range(22))
    for n in range(len(OFFSETS) - 1):
        parts = [segment for shard in shards for segment in shard.segments if segment.sequence == n]
        assert (sum(part.first for part in parts), sum(part.last for part in parts)) == (1, 1), n


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("offsets", [None, OFFSETS])
def test_positions_count_from_the_start_of_a_sequence(ranks: int, layout: str, offsets: tuple[int, ...] | None):
    tokens, whole = 24 // ranks, list(range(24))
    for n in range(len(offsets) - 1) if offsets else ():
        whole[offsets[n] : offsets[n + 1]] = range(offsets[n + 1] - offsets[n])
    for rank in range(ranks):
        shard = shard_of(ranks, rank, layout, tokens, offsets)
        length = tokens // len(shard.spans)
        own = [x for span in shard.spans for x in whole[span.place * length : (span.place + 1) * length]]
        live = [j * length + i < 22 or not offsets for j in (span.place for span in shard.spans) for i in range(length)]
        found = [first + i for first, count in shard.runs(tokens) for i in range(count)]
        assert len(found) == tokens
        assert [x for x, one in zip(found, live, strict=True) if one] == [x for x, one in zip(own, live, strict=True) if one]


def test_states_cross_where_sequences_do():
    chain = chain_of(4, "contiguous", 6, OFFSETS)
    assert chain.enters == (False, True, True, True)
    assert chain.starts == (True, False, True, True)
    assert not chain_of(4, "contiguous", 6, (0, 6, 12, 18, 24)).needed


@pytest.mark.parametrize(
    ("offsets", "layout", "tokens", "message"),
    [
        ((0, 9), "contiguous", 4, "cu_seqlens must not pass the tokens of all ranks, 2 · 4 = 8, got 9"),
        ((1, 8), "contiguous", 4, "cu_seqlens must start at 0 and not decrease, got [1, 8]"),
        ((0,), "contiguous", 4, "cu_seqlens must hold the offsets of one sequence or more, got [0]"),
        ((0, 9), "zigzag", 5, "layout 'zigzag' halves a rank's tokens, and 5 are odd: pad them"),
        ((0, 3), "zigzag", 4, "layout 'zigzag' takes padding of less than half of the 8 tokens, got 3 tokens"),
    ],
)
def test_what_does_not_fit_is_said(offsets: tuple[int, ...], layout: str, tokens: int, message: str):
    with pytest.raises(ContextError) as error:
        shard_of(2, 0, layout, tokens, offsets)
    assert str(error.value) == message


def test_a_context_is_one_and_holds_the_offsets():
    x = np.ones((1, 4, 1, 2))
    with pytest.raises(OptionError) as error:
        linattn.chunk_linear_attn(x, x, x, context="cp")
    assert str(error.value) == (
        "chunk_linear_attn: context must be what context_parallel or shard_axis of linattn.distributed makes, got str"
    )
    with pytest.raises(OptionError, match="context= holds the offsets of packed sequences"):
        _with_offsets(x)


def _with_offsets(x: np.ndarray) -> None:
    from linattn.distributed.simulation import _Rank

    rank = _Rank(lambda tokens: shard_of(1, 0, "contiguous", tokens, None), replicate_states=False)
    linattn.chunk_linear_attn(x, x, x, cu_seqlens=np.array([0, 4]), context=rank)


@pytest.mark.parametrize("offsets", [[0, 3.7, 4], "0124", 4, np.array([0.0, 4.0]), np.zeros((2, 2), int)])
def test_offsets_are_integers(offsets: Any):
    with pytest.raises(OptionError) as error:
        plain_offsets("shard_axis", offsets)
    expected = f"shard_axis: cu_seqlens must be integers, the offsets [N+1] of packed sequences, got {offsets!r}"
    assert str(error.value) == expected


def test_offsets_come_from_any_array_of_integers():
    assert plain_offsets("", None) is None
    assert [plain_offsets("", x) for x in ([0, 3, 4], np.array([0, 3, 4], np.uint8))] == [(0, 3, 4)] * 2


def test_an_odd_number_of_tokens_has_no_positions_in_halves():
    with pytest.raises(ContextError) as error:
        shard_of(2, 0, "zigzag", 0, None).runs(5)
    assert str(error.value) == "layout 'zigzag' halves a rank's tokens, and 5 are odd: pad them"


def test_tokens_that_cannot_be_dealt_out_are_refused():
    x = np.ones((1, 5, 1, 2))
    with pytest.raises(ContextError) as error:
        simulate(linattn.chunk_linear_attn, x, x, x, ranks=2)
    assert str(error.value) == "5 tokens cannot be dealt out to 2 ranks in 2 spans of equal length: pad them"


@pytest.mark.parametrize("ranks", [64, 1024])
def test_many_ranks_give_what_one_device_gives(ranks: int):
    rng = np.random.default_rng(ranks)
    q, k, v = rng.standard_normal((3, 1, ranks, 1, 2))
    g = np.where(rng.random((1, ranks, 1)) < 0.01, -np.inf, -0.05 * rng.random((1, ranks, 1)))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = rng.random((1, ranks, 1))
    given = dict(q=q, k=k, v=v, g=g, beta=beta, output_final_state=True)
    expected, found = (
        linattn.recurrent_gated_delta_rule(**given),
        simulate(linattn.recurrent_gated_delta_rule, **given, ranks=ranks),
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


def test_a_compiler_takes_them_for_constants():
    torch = pytest.importorskip("torch")

    def scaled(x):
        return x * len(shard_of(2, 0, "zigzag", 4, (0, 3, 8)).segments)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.compile(scaled, fullgraph=True, backend="eager")(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("offsets", [None, [0, 6, 6, 21, 24]])
def test_chunks_of_whole_sequences_lie_on_one_rank(offsets: list[int] | None):
    case = draw("mixed_biased", cu_seqlens=offsets, state=False)
    arrays = {name: x for name, x in case.arrays.items() if name != "cu_seqlens"}
    whole = linattn.chunk_mixed_attn(**case.arrays | {"bias": case.arrays["bias"][:, :3, :3]}, chunk_size=3, causal=False)[0]
    given = dict(**arrays | {"bias": arrays["bias"][:, :3, :3]}, chunk_size=3, causal=False)
    spread, _ = simulate(linattn.chunk_mixed_attn, **given, ranks=4, cu_seqlens=offsets)
    np.testing.assert_allclose(spread, whole, rtol=1e-10, atol=1e-10)
    with pytest.raises(ContextError) as error:
        simulate(linattn.chunk_mixed_attn, **arrays, chunk_size=5, causal=False, ranks=4, cu_seqlens=offsets)
    assert str(error.value) == (
        "chunk_mixed_attn: causal=False takes chunks that lie on one rank, and one of 5 tokens goes on from a span of 6 to the "
        "next: let spans, and sequences in front of one that goes on, be multiples of chunk_size"
    )


def test_parts_are_added_in_order_and_without_indices():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.distributed")
    from linattn.distributed.collectives import _added
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names: set[str] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    x = torch.arange(1.0, 9.0)[:, None] ** 20
    with Seen():
        found = _added(x, (0, 3, 1, 4, 2, 5, 0, 6, 0, 7, 4, 0), 5)
    assert found[:, 0].tolist() == [(x[3] + x[6] + x[7]).item(), x[4].item(), x[5].item(), 0, x[0].item()]
    assert not Seen.names & {"index", "index_put_", "_to_copy"}
