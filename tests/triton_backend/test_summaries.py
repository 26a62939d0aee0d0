"""Summaries, and gradients of entering states alone, beside what the oracle's operators give; and what is left to others."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import linattn
import pytest
import torch
from linattn.affine import act, act_transposed
from linattn.frameworks import framework_of
from linattn_backends.triton.delta.config import DeltaVariant
from linattn_backends.triton.diagonal.config import DiagonalVariant
from linattn_backends.triton.host.chunks import Cut
from linattn_backends.triton.host.reach import proved, ranges_of, replace
from linattn_backends.triton.lib.reach import DECAYS
from linattn_backends.triton.runtime import replay
from triton_cases import BACKEND

FAMILIES = ("linear_attn", "simple_gla", "gla", "gla gv", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
T, H, HV, K, V = 40, 1, 2, 16, 8


def drawn(name: str) -> tuple[str, dict[str, torch.Tensor]]:
    """The family, and its arrays; one head's gates reset the state in the middle."""
    family, _, gv = name.partition(" ")
    x = {"q": torch.randn(2, T, H, K), "k": torch.nn.functional.normalize(torch.randn(2, T, H, K), dim=-1)}
    x["v"] = torch.randn(2, T, HV, V)
    if family not in ("linear_attn", "delta_rule"):
        scalar = family in ("simple_gla", "gated_delta_rule")
        x["g"] = -0.3 * torch.rand(2, T, HV) if scalar else -0.3 * torch.rand(2, T, HV, K)
        x["g"][0, T // 2] = -torch.inf
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        x["beta"] = torch.rand(2, T, HV)
    if family == "rwkv6":
        x["u"] = torch.randn(HV, K)
    if family == "dplr":
        unit = x["k"].repeat_interleave(HV // H, 2)
        x |= {"a": -unit, "b": 0.4 * unit}
    if gv:
        x["gv"] = -0.3 * torch.rand(2, T, HV, V)
    return family, x


@pytest.mark.parametrize("name", FAMILIES)
def test_a_summary_is_that_of_the_wider_call(name):
    family, x = drawn(name)
    operator = getattr(linattn, f"summary_{family}")
    given = {name: y for name, y in x.items() if name not in ("q", "u")}
    assert "read off" not in str(operator.explain(**given, backend="triton"))
    for found, expected in zip(operator(**given, backend="triton"), operator(**given, backend="torch"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def in_stages(family: str, x: dict[str, torch.Tensor], offsets: tuple[int, ...] = ()):
    """Its stages, with the inputs, what they make before any state is known, and what of that is kept and made again."""
    cu = torch.tensor(offsets, dtype=torch.int32) if offsets else None
    inputs, stages = BACKEND.stages(family, x, cu_seqlens=cu, offsets=offsets, scale=None, chunk_size=None)
    made = stages.begin(inputs)
    start = torch.zeros(max(len(offsets) - 1, 0) or 2, HV, K, V)
    _, _, kept = stages.finish(inputs, made, start, False)
    return stages, inputs, made, stages.begin(inputs, kept)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adjoint_is_the_gradient_of_the_states_before(name):
    family, x = drawn(name)
    start = torch.randn(2, HV, K, V, requires_grad=True)
    o, final = getattr(linattn, f"chunk_{family}")(**x, initial_state=start, output_final_state=True, backend="torch")
    do, dfinal = torch.randn_like(o), torch.randn_like(final)
    stages, inputs, _, again = in_stages(family, x)
    for given in (dfinal, None):
        outputs = ((o, final), (do, dfinal)) if given is not None else ((o,), (do,))
        (expected,) = torch.autograd.grad(outputs[0], start, outputs[1], retain_graph=True)
        found = stages.adjoint(inputs, again, do, given, None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("offsets", [(), (0, 5, 38)])
@pytest.mark.parametrize("segment", [0, 1])
def test_stages_are_the_operator(name, offsets, segment, monkeypatch):
    """In segments of one chunk too, as where heads are few."""
    for variant in (DeltaVariant, DiagonalVariant):
        monkeypatch.setattr(variant, "segment", lambda *sizes: segment)
    family, x = drawn(name)
    x = {name: (y[:1] if y.shape[0] == 2 and name != "u" else y) if offsets else y for name, y in x.items()}
    stages, inputs, made, again = in_stages(family, x, offsets)
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    start = torch.randn(2, HV, K, V, requires_grad=True)
    packed = {"cu_seqlens": torch.tensor(offsets)} if offsets else {}
    operator = getattr(linattn, f"chunk_{family}")
    expected = operator(**leaves, **packed, initial_state=start, output_final_state=True, backend="torch")
    found = stages.finish(inputs, made, start.detach(), True)[:2]
    given = [torch.randn_like(y) for y in expected]
    if offsets:
        given[0][:, offsets[-1] :] = 0
    gradients = [
        y
        for y in stages.gradients(inputs, stages.recall(inputs, again, start.detach()), start.detach(), *given)
        if y is not None
    ]
    names = [name for name in ("q", "k", "v", "g", "beta", "a", "b", "gv", "u") if name in leaves]
    wanted = torch.autograd.grad(expected, [*(leaves[name] for name in names), start], given)
    for one, other in zip((*found, *gradients), (*expected, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    for number, (first, last) in enumerate(itertools.pairwise(offsets)):  # one of several, as if alone
        alone = {name: y[:, first:last] for name, y in x.items() if name not in ("q", "u")}
        wanted = getattr(linattn, f"summary_{family}")(**alone, backend="torch")
        for one, other in zip(stages.summary(inputs, made, number), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["simple_gla", "gla", "rwkv6", "gated_delta_rule", "kda", "dplr"])
@pytest.mark.parametrize("strength", [0.02, 20.0])
def test_chunks_that_are_forgotten_are_not_read(name, strength):
    family, x = drawn(name)
    tokens, forgotten = 400, 200
    x = {name: y if name == "u" else y.repeat(1, 10, *[1] * (y.dim() - 2)) for name, y in x.items()}
    x["g"] = -strength * (0.5 + torch.rand_like(x["g"]))
    assert x["v"].shape[1] == tokens
    given = {name: y for name, y in x.items() if name not in ("q", "u")}
    wanted = getattr(linattn, f"summary_{family}")(**given, backend="torch")
    stages, inputs, made, again = in_stages(family, x)
    do = torch.randn_like(x["v"])
    start = torch.zeros(2, HV, K, V, requires_grad=True)
    o, _ = getattr(linattn, f"chunk_{family}")(**x, initial_state=start, backend="torch")
    wanted = *wanted, *torch.autograd.grad(o, start, do)
    found = *stages.summary(inputs, made), stages.adjoint(inputs, again, do, None, None)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if strength > 1 and family != "dplr":  # what is not read may be anything
        inputs[2][:, :forgotten] = torch.nan
        do[:, -forgotten:] = torch.nan
        found = *stages.summary(inputs, made), stages.adjoint(inputs, again, do, None, None)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_transition_that_is_not_zero_is_gone_through_to_its_beginning():
    """A head whose gates promise that all is forgotten, and whose writes undo it."""
    torch.manual_seed(1)
    tokens = 320
    k = torch.nn.functional.normalize(torch.randn(1, tokens, 1, K), dim=-1)
    q, v = torch.randn(1, tokens, 1, K), torch.randn(1, tokens, 2, V)
    g = torch.full((1, tokens, 2), -1.4)
    beta = torch.full((1, tokens, 2), 0.5)
    k[:, 1:], beta[..., 0] = k[:, :1], 5.05  # (1 - beta) e^g is -0.999 along k
    x = dict(q=q, k=k, v=v, g=g, beta=beta)
    expected = linattn.summary_gated_delta_rule(k, v, g, beta, backend="torch")
    inputs, stages = BACKEND.stages("gated_delta_rule", x, cu_seqlens=None, offsets=(), scale=None, chunk_size=None)
    made = stages.begin(inputs)
    found = stages.summary(inputs, made)
    assert found[0][0, 0].abs().max() > 0.01
    assert not found[0][0, 1].any()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    start, do = torch.zeros(1, 2, K, V, requires_grad=True), torch.randn_like(v)
    o, _ = linattn.chunk_gated_delta_rule(**x, initial_state=start, backend="torch")
    (wanted,) = torch.autograd.grad(o, start, do)
    again = stages.begin(inputs, stages.finish(inputs, made, start.detach(), False)[2])
    torch.testing.assert_close(stages.adjoint(inputs, again, do, None, None), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_decay_that_is_no_number_is_not_forgotten(reverse):
    """Of two heads with the same decays of chunks, one has a NaN, with which nothing is known of those beyond."""
    decays = torch.full((9, 2, 3), 2.0**-100)
    decays[4, 1, 1] = torch.nan
    decays[2:7:4, :, 2] = 0
    call = SimpleNamespace(v=torch.empty(1, 9 * 16, 2, V), cu=None, N=1, family="kda")
    (found,) = ranges_of(call, Cut(9, 9, None, None), 16, decays, DECAYS.value, reverse).tolist()
    assert found == ([[0, 3], [0, 9]] if reverse else [[6, 9], [0, 9]])


def test_only_transitions_that_are_zero_prove_a_range():
    """Of four heads one loses all in two chunks; one has a number left and one a NaN, and of one all chunks count."""
    call = SimpleNamespace(v=torch.empty(1, 16, 4, V), family="kda")
    ranges = torch.tensor([[[7, 9], [7, 9], [7, 9], [0, 9]]], dtype=torch.int32)
    whole, again = torch.zeros(1, 4, 70, 70), torch.empty_like(ranges)
    whole[0, 1, 69, 69], whole[0, 2, 0, 0], whole[0, 3] = 1e-45, torch.nan, 1
    assert proved(call, 9, ranges, whole, again).tolist() == [[[7, 9], [0, 9], [0, 9], [0, 9]]]
    assert again.tolist() == [[[0, 0], [0, 9], [0, 9], [0, 0]]]
    replace(call, whole, torch.full_like(whole, 2.0), again)
    assert [x.unique().tolist() for x in whole[0]] == [[0], [2], [2], [1]]


@pytest.mark.parametrize("name", FAMILIES)
def test_final_states_that_nobody_asks_for_are_none(name, monkeypatch):
    """Segments, of few heads, leave them all the same."""
    for variant in (DeltaVariant, DiagonalVariant):
        monkeypatch.setattr(variant, "segment", lambda *sizes: 1)
    family, x = drawn(name)
    inputs, stages = BACKEND.stages(family, x, cu_seqlens=None, offsets=(), scale=None, chunk_size=None)
    start = torch.zeros(2, HV, K, V)
    assert stages.finish(inputs, stages.begin(inputs), start, False)[1] is None


def test_no_tokens_change_nothing():
    for name in FAMILIES:
        family, x = drawn(name)
        given = {name: y[:, :0] for name, y in x.items() if name not in ("q", "u")}
        operator = getattr(linattn, f"summary_{family}")
        for found, expected in zip(operator(**given, backend="triton"), operator(**given, backend="torch"), strict=True):
            assert found.shape == expected.shape
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"cu_seqlens": torch.tensor([0, 10, T])}, "makes summaries of whole batches, not of packed sequences"),
        ({"beta": torch.rand(1, T, HV, V)}, "makes summaries of delta families with K up to 128 and one beta a token"),
        ({"v": torch.randn(1, T, HV, V, requires_grad=True)}, "makes summaries without gradients"),
    ],
)
def test_other_summaries_are_read_off_a_wider_call(changed, reason):
    _, x = drawn("kda")
    given = {name: y[:1] for name, y in x.items() if name != "q"} | changed
    said = linattn.summary_kda.explain(**given, backend="triton")
    assert "read off the state of a wider call" in str(said), reason


@pytest.mark.parametrize("name", FAMILIES)
def test_later_calls_are_replayed(name):
    family, x = drawn(name)
    given = {name: y for name, y in x.items() if name not in ("q", "u")}
    start, do, dfinal = torch.randn(2, HV, K, V), torch.randn(2, T, HV, V), torch.randn(2, HV, K, V)

    def all_of_them():
        stages, inputs, made, again = in_stages(family, x)
        outputs = stages.finish(inputs, made, start, True)[:2]
        gradients = [
            y for y in stages.gradients(inputs, stages.recall(inputs, again, start), start, do, dfinal) if y is not None
        ]
        adjoint = stages.adjoint(inputs, again, do, None, None)
        summary = getattr(linattn, f"summary_{family}")(**given, backend="triton")
        return *summary, *stages.summary(inputs, made), *outputs, adjoint, *gradients

    replay.PROGRAMS.clear()
    first = all_of_them()
    for _ in range(replay.OFTEN):
        for found, expected in zip(all_of_them(), first, strict=True):
            assert torch.equal(found, expected)
    assert {type(program) for program in replay.PROGRAMS.values()} == {replay.Program}


def digests(*numbers: int) -> list[torch.Tensor]:
    """As messages hold them."""
    return [torch.tensor([number]).view(torch.float32) for number in numbers]


@pytest.mark.parametrize("name", FAMILIES)
def test_messages_of_ranks_say_what_enters_and_leaves_their_spans(name):
    """Of four with tokens of their own; the third one begins with a sequence of its own."""
    found = [in_stages(*drawn(name)) for _ in range(4)]
    stages, inputs, *_ = found[0]
    layout, (digest,) = stages.layout(inputs), digests(-(2**40) - 1)
    pairs = [stages.summary(inputs, made) for _, inputs, made, _ in found]
    messages = torch.stack([stages.opened(inputs, digest)[1] for _, inputs, *_ in found])
    assert messages.shape == (4, layout.size)
    for message, pair in zip(messages, pairs, strict=True):
        assert torch.equal(message[-2:].view(torch.int64), digest.view(torch.int64))
        for one, other in zip(stages.parts(layout, message), pair, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    ever, told = torch.zeros(2, dtype=torch.uint8).unbind()
    xp = framework_of(messages)
    for first, count in ((0, 0), (0, 1), (0, 3), (2, 1), (2, 2)):
        expected = torch.zeros_like(pairs[0][1])
        for A, b in pairs[first : first + count]:
            expected = act(xp, A, expected) + b
        state = stages.entering(layout, messages, digest, ever, told, first, count)
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)
    d = torch.randn(4, *pairs[0][1].shape)
    for last, count in ((3, 0), (3, 1), (3, 3), (1, 1), (2, 2)):
        expected = torch.zeros_like(d[0])
        for j in range(last, last - count, -1):
            expected = act_transposed(xp, pairs[j][0], expected) + d[j]
        crossed = stages.crossed(layout, messages, last - max(count - 1, 0), max(count - 1, 0))
        torch.testing.assert_close(stages.leaving(layout, d, crossed, last, count), expected, rtol=1e-5, atol=1e-5)
    assert (ever.item(), told.item()) == (0, 0)


@pytest.mark.parametrize("name", ["linear_attn", "gla", "gated_delta_rule"])
@pytest.mark.parametrize("number", [5 + (1 << 32), 6])
def test_a_digest_that_is_another_leaves_nothing_but_nan(name, number):
    """Whichever half of it differs, and whether or not anything enters."""
    stages, inputs, *_ = in_stages(*drawn(name))
    layout, (own, other) = stages.layout(inputs), digests(5, number)
    message = stages.opened(inputs, own)[1]
    for messages, odd in (((message, message), False), ((message, stages.sealed(layout, other)), True)):
        for count in (0, 1):
            ever, told = torch.zeros(2, dtype=torch.uint8).unbind()
            state = stages.entering(layout, torch.stack(messages), own, ever, told, 0, count)
            assert state.isnan().all() if odd else state.isfinite().all()
            assert (ever.item(), told.item()) == (odd, odd)
