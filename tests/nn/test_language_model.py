"""The language model: it generates what the parallel pass says, learns, and has fla's names."""

from __future__ import annotations

import math
import re

import pytest

torch = pytest.importorskip("torch")

from linattn import nn  # noqa: E402
from linattn.errors import OptionError  # noqa: E402
from nn_cases import LAYERS  # noqa: E402

SYMBOLS, WIDTH = 11, 32


def model(mixer, depth=2, **options):
    given = {"mixer": mixer, "mixer_options": LAYERS[mixer] if isinstance(mixer, str) else [LAYERS[name] for name in mixer]}
    return nn.LanguageModel(SYMBOLS, WIDTH, depth, **given, **{"intermediate_size": 64, **options})


@pytest.mark.parametrize("mixer", ["FLASH", "GatedDeltaNet", "RWKV6"])
def test_it_learns_and_generates_what_follows(mixer):
    """Sequences that go round and round: the next symbol follows from the last two."""
    made = model(mixer, initializer_range=0.2)
    optimiser = torch.optim.Adam(made.parameters(), lr=5e-3)
    for _ in range(40):
        start, step = torch.randint(SYMBOLS, (16, 1)), torch.randint(1, 4, (16, 1))
        ids = (start + step * torch.arange(25)) % SYMBOLS
        loss = torch.nn.functional.cross_entropy(made(ids[:, :-1])[:, 2:].flatten(0, 1), ids[:, 3:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.6 * math.log(SYMBOLS)
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())
    longer = made.generate(ids[:, :8], 5)
    assert (longer[:, :8] == ids[:, :8]).all()
    assert (longer[:, 8:] == made(longer[:, :-1])[:, 7:].argmax(-1)).all()


@pytest.mark.parametrize("mixer", LAYERS)
def test_every_layer_generates_what_the_parallel_pass_says(mixer):
    made, ids = model(mixer).double(), torch.randint(SYMBOLS, (2, 6))
    longer = made.generate(ids, 4)
    assert (longer[:, 6:] == made(longer[:, :-1])[:, 5:].argmax(-1)).all()


def test_prompts_of_different_lengths_continue_as_each_would_alone():
    made, ids = model(["GatedDeltaNet", "RetNet"]).double(), torch.randint(SYMBOLS, (2, 9))
    left, right = torch.ones(2, 9), torch.ones(2, 9)
    left[0, :3] = 0
    right[0, 6:] = 0
    alone = made.generate(ids[1:], 5)[:, 9:]
    assert (made.generate(ids, 5, mask=left)[:, 9:] == torch.cat([made.generate(ids[:1, 3:], 5)[:, 6:], alone])).all()
    assert (made.generate(ids, 5, mask=right)[:, 9:] == torch.cat([made.generate(ids[:1, :6], 5)[:, 6:], alone])).all()


def test_what_ends_a_sequence_is_repeated_after_it():
    made, ids = model("GatedDeltaNet"), torch.randint(SYMBOLS, (1, 5))
    free = made.generate(ids, 6)[0, 5:].tolist()
    end = free[2]
    first = free.index(end)
    assert made.generate(ids, 6, eos_token_id=end)[0, 5:].tolist() == free[: first + 1] + [end] * (5 - first)


def test_sampling_keeps_to_the_likeliest():
    made, ids = model("GatedDeltaNet", initializer_range=0.5), torch.randint(SYMBOLS, (1, 5)).repeat(200, 1)
    probabilities = made(ids)[0, -1].detach().softmax(-1)
    ordered = probabilities.argsort(descending=True)
    drawn = {
        name: set(made.generate(ids, 1, temperature=1.0, **{name: x})[:, 5].tolist())
        for name, x in (("top_k", 3), ("top_p", 0.5))
    }
    assert drawn["top_k"] == set(ordered[:3].tolist())
    enough = int((probabilities[ordered].cumsum(0) < 0.5).sum()) + 1
    assert drawn["top_p"] <= set(ordered[:enough].tolist())
    assert (made.generate(ids[:1], 4, temperature=0.7, top_k=1) == made.generate(ids[:1], 4)).all()
    same = [made.generate(ids[:1], 8, temperature=1.0, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert (same[0] == same[1]).all()


def test_a_cache_goes_on_where_generation_stopped():
    made, ids, cache = model("GatedDeltaNet"), torch.randint(SYMBOLS, (2, 5)), nn.Cache()
    whole = made.generate(ids, 8)
    first = made.generate(ids, 3, cache=cache)
    assert (torch.cat([first, made.generate(first[:, -1:], 5, cache=cache)[:, 1:]], 1) == whole).all()


def test_checkpointed_blocks_have_the_same_gradients():
    made, ids = model(["RWKV7", "RWKV7", "GatedDeltaNet"], 3), torch.randint(SYMBOLS, (2, 9))
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn_like(p))
    expected = torch.autograd.grad(made(ids).square().sum(), list(made.parameters()))
    made.gradient_checkpointing = True
    torch.testing.assert_close(torch.autograd.grad(made(ids).square().sum(), list(made.parameters())), expected)


def test_names_are_those_of_fla():
    made = model("GatedDeltaNet", 1)
    names = {re.sub(r"attn\..*", "attn.…", name) for name in made.state_dict()}
    assert names == {
        "lm_head.weight",
        "model.embeddings.weight",
        "model.layers.0.attn.…",
        "model.layers.0.attn_norm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp_norm.weight",
        "model.norm.weight",
    }
    assert "lm_head.weight" not in model("GatedDeltaNet", 1, tie_word_embeddings=True).state_dict()
    assert not any("mlp" in name for name in model("Mamba2", 1, intermediate_size=0).state_dict())
    assert (
        nn.LanguageModel(SYMBOLS, 96, 1, mixer_options=LAYERS["GatedDeltaNet"]).model.layers["0"].mlp.up_proj.out_features
        == 256
    )


def test_wrong_mixers_are_refused():
    wrong = {
        "LanguageModel: unknown mixer 'GatedDeltanet': did you mean 'GatedDeltaNet'? known are FLASH, GAU, HGRN2, RWKV6, "
        "RWKV7, DeltaNet, GatedDeltaNet, GatedLinearAttention, Hedgehog, KimiDeltaAttention, Lightning, LinearAttention, "
        "Mamba2, RetNet": (lambda: nn.LanguageModel(SYMBOLS, WIDTH, 1, mixer="GatedDeltanet")),
        "LanguageModel: mixer must be one for each of num_hidden_layers = 3, got 2": lambda: model(["RetNet", "RetNet"], 3),
    }
    for message, call in wrong.items():
        with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
            call()
