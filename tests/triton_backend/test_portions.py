"""A backward pass in portions: the same gradients, with the states of one alone in memory."""

from __future__ import annotations

import itertools

import pytest
import torch
from linattn_backends.triton.diagonal import call as of_call
from linattn_backends.triton.diagonal import portions
from linattn_backends.triton.diagonal.backward import backward
from linattn_backends.triton.diagonal.call import DiagonalCall, Portion
from linattn_backends.triton.diagonal.config import DiagonalVariant, backward_variant
from linattn_backends.triton.host.variant import Facts
from linattn_backends.triton.runtime import replay
from linattn_backends.triton.runtime.device import Properties
from triton_cases import BACKEND, arrays, check, pretend


@pytest.fixture
def cut(monkeypatch):
    """However few the states are, and however many multiprocessors wait; what calls were cut into."""
    pretend(monkeypatch, num_sms=1)
    monkeypatch.setattr(portions, "LITTLE", 0)
    monkeypatch.setattr(portions, "LEAST", 1)
    found, portion = [], of_call.ChunkedCall.portion
    monkeypatch.setattr(of_call.ChunkedCall, "portion", lambda run, p, start: found.append(p) or portion(run, p, start))
    return found


SEQUENCES = [Portion(0, 1, 0, 37), Portion(1, 2, 0, 37), Portion(2, 3, 0, 37)]
SPANS = [Portion(0, 1, 0, 64), Portion(0, 1, 64, 70), Portion(0, 1, 32, 64), Portion(0, 1, 0, 32)]
"""Before the first of them, at whose ends states are found, goes all that is before the last one."""
CALLS = [
    (dict(B=3, T=37, HV=4), SEQUENCES),
    (dict(T=70, HV=2, K=32), SPANS),
    (dict(T=70, HV=2, K=32, state=False), SPANS),
    (dict(T=70, HV=2, K=32, kind="mixed"), SPANS),
    (dict(B=2, T=64, HV=4, K=64), [Portion(n, n + 1, low, high) for n in (0, 1) for low, high in ((0, 32), (32, 64), (0, 32))]),
    (dict(T=70, HV=2, cu=[0, 20, 70]), []),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sizes", "wanted"), CALLS, ids=range(len(CALLS)))
def test_gradients(sizes, wanted, dtype, cut):
    check("simple_gla", arrays("simple_gla", dtype=dtype, H=1, V=16, **dict(dict(K=16), **sizes)), chunk_size=16)
    assert cut == wanted


def test_calls_that_are_done_again(cut):
    """As a program that is written at the fourth call of a kind."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, heads, width).requires_grad_() for heads, width in ((1, 32), (1, 32), (2, 16)))
    g, d = -torch.rand(1, 70, 2), torch.randn(1, 70, 2, 16)

    def gradients():
        o, _ = BACKEND.chunk_simple_gla(q, k, v, g, scale=1.0, chunk_size=16)
        return torch.autograd.grad(o, (q, k, v), d)

    first, *others = [gradients() for _ in range(replay.OFTEN + 2)]
    assert len(cut) == len(SPANS) * (replay.OFTEN + 1)  # thought through so often, once on tensors without memory
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_states_take_no_more_memory_than_the_largest_input():
    """But where segments of few heads are scanned at once. Shapes of Mamba-2."""
    wanted = {
        (8, 2048, 1, 80): (3, 1),
        (1, 8192, 8, 128): (1, 2),
        (1, 8192, 1, 48): (1, 2),
        (1, 8192, 1, 44): (1, 1),
        (8, 2048, 1, 8): (1, 1),
        (4, 64, 1, 2): (1, 1),
    }
    for (B, T, H, HV), (groups, spans) in wanted.items():
        found = portions.portions_of(*problem(B, T, H, HV))
        assert (len(found), len(found[0])) == (groups, spans)
        assert [x for group in found for x in group] == covered(found, B, T)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("segment", [0, 1])
def test_a_start_that_is_not_given_has_no_gradient(gated, segment, monkeypatch):
    """Segments have gradients of their own, of which the first's is that of a start."""
    monkeypatch.setattr(DiagonalVariant, "segment", lambda *sizes: segment)
    q, v = (torch.randn(1, 40, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    g = -torch.rand(1, 40, 2) if gated else None
    for start in (None, torch.randn(1, 2, 16, 16)):
        call = DiagonalCall.of(q, q, v, g, None, None, start, None, 1.0, 16)
        variant = call.backward_variant(v)
        assert "scan_dv" in variant.stages
        assert (backward(call, variant, v, None, None)["start"] is None) == (start is None)


def problem(B, T, H, HV, K=128, V=64):
    """A call of bfloat16 without memory, and the variant of its backward pass on an H200."""
    q, v = (
        torch.empty(B, T, H, K, dtype=torch.bfloat16, device="meta"),
        torch.empty(B, T, HV, V, dtype=torch.bfloat16, device="meta"),
    )
    call = DiagonalCall.of(q, q, v, torch.empty(B, T, HV, device="meta"), None, None, None, None, 1.0, 0)
    facts = Facts("simple_gla", torch.bfloat16, K, V, call.chunk)
    return call, backward_variant(facts, torch.bfloat16, HV > H, True, Properties(132, True, None))


def covered(groups, B, T):
    """Parts that cover ``B`` sequences of ``T`` tokens in the order of those given, each beginning where one ended."""
    firsts = [*sorted({x.first for group in groups for x in group}), B]
    lows = [*sorted({x.low for group in groups for x in group}), T]
    return [
        Portion(first, last, low, high) for first, last in itertools.pairwise(firsts) for low, high in itertools.pairwise(lows)
    ]
