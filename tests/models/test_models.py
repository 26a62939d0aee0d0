"""The models of examples/models: parameter counts of the papers, decoding equal to the parallel pass, and learning."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from models.blocks import Attention, Block, LanguageModel, SwiGLU, generate, parameter_count, transformer  # noqa: E402
from models.delta import DeltaNet, GatedDeltaNet  # noqa: E402
from models.flash import GatedAttentionUnit, flash, flash_quad  # noqa: E402
from models.gla import GatedLinearAttention, RetNet, ScalarGate, Ungated  # noqa: E402
from models.hedgehog import HedgehogAttention  # noqa: E402

SYMBOLS, WIDTH, HEADS = 11, 32, 2

MODELS = {
    "softmax": lambda: transformer(SYMBOLS, WIDTH, 2, lambda: Attention(WIDTH, HEADS)),
    "gla": lambda: transformer(SYMBOLS, WIDTH, 2, lambda: GatedLinearAttention(WIDTH, HEADS)),
    "scalar gate": lambda: transformer(SYMBOLS, WIDTH, 2, lambda: ScalarGate(WIDTH, HEADS)),
    "retnet": lambda: transformer(SYMBOLS, WIDTH, 2, lambda: RetNet(WIDTH, HEADS)),
    "ungated": lambda: transformer(SYMBOLS, WIDTH, 2, lambda: Ungated(WIDTH, HEADS)),
    "delta": lambda: transformer(SYMBOLS, WIDTH, 2, lambda: DeltaNet(WIDTH, HEADS)),
    "gated delta": lambda: transformer(SYMBOLS, WIDTH, 2, lambda: GatedDeltaNet(WIDTH, HEADS)),
    "hedgehog": lambda: transformer(SYMBOLS, WIDTH, 2, lambda: HedgehogAttention(WIDTH, HEADS)),
    "hedgehog softmax": lambda: transformer(SYMBOLS, WIDTH, 2, lambda: HedgehogAttention(WIDTH, HEADS, softmax=True)),
    "flash": lambda: flash(SYMBOLS, WIDTH, 2, chunk_size=8, keys=16),
    "flash local": lambda: flash(SYMBOLS, WIDTH, 2, chunk_size=8, keys=16, linear=False),
    "flash global": lambda: flash(SYMBOLS, WIDTH, 2, chunk_size=8, keys=16, quadratic=False),
    "flash quad": lambda: flash_quad(SYMBOLS, WIDTH, 2, longest=32, keys=16),
}


@pytest.mark.parametrize("name", MODELS)
def test_decoding_token_by_token_equals_the_parallel_pass(name):
    model = MODELS[name]().double()
    for p in model.parameters():  # so that no part of the model is silent, the bias of FLASH among them
        p.data += 0.1 * torch.randn_like(p)
    ids = torch.randint(SYMBOLS, (2, 21))
    whole, _ = model(ids)
    logits, states = model(ids[:, :13])
    found = [logits]
    for t in range(13, 21):
        logits, states = model(ids[:, t : t + 1], states, t)
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_no_token_sees_the_future(name):
    model = MODELS[name]()
    ids = torch.randint(SYMBOLS, (1, 20))
    changed = ids.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % SYMBOLS
    torch.testing.assert_close(model(ids)[0][:, :12], model(changed)[0][:, :12])


@pytest.mark.parametrize("name", MODELS)
def test_it_learns(name):
    """Sequences that go round and round: the next symbol follows from the last two. The loss falls below half that of guessing,
    or three quarters where the model sees whole chunks of the past only."""
    model = MODELS[name]()
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(40):
        start, step = torch.randint(SYMBOLS, (16, 1)), torch.randint(1, 4, (16, 1))
        ids = (start + step * torch.arange(25)) % SYMBOLS
        logits, _ = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[:, 2:].flatten(0, 1), ids[:, 3:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < (0.75 if name == "flash global" else 0.5) * math.log(SYMBOLS)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_generate_continues_what_it_was_given():
    model, ids = MODELS["gla"](), torch.randint(SYMBOLS, (2, 5))
    longer = generate(model, ids, 4)
    assert longer.shape == (2, 9)
    assert (longer[:, :5] == ids).all()
    assert (longer[:, 5:] == model(longer[:, :-1])[0][:, 4:].argmax(-1)).all()


# -- parameter counts ------------------------------------------------------------------------------------------------

D = 1024


@pytest.mark.parametrize(
    ("mixer", "extra"),
    [
        (lambda: GatedLinearAttention(D), 16 * D + 16 * D // 2 + D // 2),  # the decay's projection of rank 16, with bias
        (lambda: ScalarGate(D), 4 * D + 4),
        (lambda: RetNet(D), 0),
        (lambda: Ungated(D), 0),
        (lambda: DeltaNet(D), 4 * D),
        (lambda: GatedDeltaNet(D), 8 * D + 8),
    ],
)
def test_a_linear_mixer_has_4_d_squared_parameters(mixer, extra):
    """Yang et al. 2024, §4.4: as many as softmax attention, and little more for the gate."""
    count, norm = parameter_count(mixer()), 2 * D // 4
    assert count == 4 * D * D + extra + norm
    assert count == pytest.approx(4 * D * D, rel=0.01)


def test_a_block_has_12_d_squared_parameters():
    assert parameter_count(Attention(D, 8)) == 4 * D * D
    assert parameter_count(SwiGLU(D)) == pytest.approx(8 * D * D, rel=1e-3)
    assert parameter_count(Block(D, GatedLinearAttention(D))) == pytest.approx(12 * D * D, rel=0.01)


def test_two_gated_attention_units_have_as_many_parameters_as_a_block():
    """Hua et al. 2022, §3: ``3 D e + D s`` with ``e = 2D`` and ``s = 128``, scales, offsets, biases and norm besides."""
    unit = GatedAttentionUnit(D, chunk_size=256)
    assert parameter_count(unit) == 6 * D * D + 128 * D + 2 * 4 * 128 + (2 * 256 - 1) + 2 * D
    quad = GatedAttentionUnit(D, chunk_size=256, linear=False)
    assert parameter_count(quad) == parameter_count(unit) - 2 * 2 * 128
    assert 2 * parameter_count(unit) == pytest.approx(parameter_count(Block(D, Attention(D, 8))), rel=0.03)


def test_hedgehog_adds_one_matrix_a_head():
    assert parameter_count(HedgehogAttention(D, 16)) == 4 * D * D + 16 * 64 * 64


# -- conversion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_hedgehog_distilled_from_softmax_comes_closer_to_it(causal):
    attention = Attention(WIDTH, HEADS, causal)
    with torch.no_grad():
        attention.q.weight *= 3
        attention.k.weight *= 3
    x = torch.randn(4, 24, WIDTH)
    target = attention(x)[0].detach()
    student = HedgehogAttention.from_softmax(attention)
    before = (student(x)[0] - target).square().mean().item()
    optimiser = torch.optim.Adam([student.W], lr=0.02)
    for _ in range(60):
        optimiser.zero_grad()
        student.distillation_loss(x).backward()
        optimiser.step()
    assert all(p.grad is None for name, p in student.named_parameters() if name != "W")
    assert (student(x)[0] - target).square().mean().item() < 0.6 * before


def test_flash_quad_says_when_a_sequence_is_too_long():
    model, ids = flash_quad(SYMBOLS, WIDTH, 1, longest=20, keys=16), torch.randint(SYMBOLS, (1, 20))
    _, states = model(ids)
    for call in (lambda: model(ids.repeat(1, 2)[:, :21]), lambda: model(ids[:, :1], states, 20)):
        with pytest.raises(ValueError, match=r"^this FLASH-Quad is for sequences up to longest=20, got 21 tokens$"):
            call()


def test_flash_encoders_see_the_whole_sequence():
    model = LanguageModel(SYMBOLS, WIDTH, [GatedAttentionUnit(WIDTH, 8, causal=False, keys=16)])
    ids = torch.randint(SYMBOLS, (1, 20))
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % SYMBOLS
    assert (model(ids)[0][:, 0] != model(changed)[0][:, 0]).any()
