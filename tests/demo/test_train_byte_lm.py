"""The training script, and what it recorded."""

from __future__ import annotations

import argparse
import importlib.util
import platform
from pathlib import Path

import numpy as np
import pytest
from linattn.demo import model
from linattn.demo.run import arrays_of, record, score, shipped_weights

torch = pytest.importorskip("torch")
topics = pytest.importorskip("pydoc_data.topics").topics

SCRIPT = Path(__file__).parents[2] / "examples" / "train_byte_lm.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_byte_lm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parts(script):
    return script.split(topics)


def test_nothing_held_out_is_trained_on(parts):
    training, validation, test = [
        {" ".join(paragraph.split()) for text in part for paragraph in text.split("\n\n")} for part in parts
    ]
    assert not training & validation
    assert not training & test
    assert not validation & test


def test_same_parts_as_recorded(parts):
    sizes = [sum(len(text.encode()) for text in part) for part in parts]
    assert min(sizes) > 10_000
    if platform.python_version() == record()["versions"]["python"]:
        assert sizes == list(record()["bytes"].values())


def test_model_beats_the_order_2_model_on_held_out_text(script, parts):
    training, validation, test = parts
    ngrams = script.NGrams(training, 2)
    ngrams.tune(validation)
    order_2 = ngrams.bits_per_byte(test, 2)
    if platform.python_version() == record()["versions"]["python"]:
        assert order_2 == pytest.approx(record()["bits_per_byte"]["order_2_test"], abs=1e-3)
    arrays = arrays_of("torch")
    weights = {name: arrays.put(a.astype(np.float32)) for name, a in shipped_weights().items()}
    slices = [text[:1500] for text in test]
    nats = [-score(text.encode(), weights, arrays, "torch", decoded=0).log_probs.sum() for text in slices]
    bits = sum(nats) / np.log(2) / sum(len(text.encode()) for text in slices)
    assert bits < 0.85 * ngrams.bits_per_byte(slices, 2)
    assert bits < 0.85 * order_2


def test_ngram_probabilities_sum_to_one(script):
    ngrams = script.NGrams(["abracadabra"], 2)
    every = [f"ab{chr(byte)}" for byte in range(128)]  # the other 128 bytes never occur alone in UTF-8
    seen = sum(ngrams._probability(text, 2, [0.5, 0.5, 0.5])[-1] for text in every)
    unseen = 128 / 256 * 0.5 / (11 + 0.5) * 0.5 / (2 + 0.5) * 0.5 / (2 + 0.5)
    assert seen + unseen == pytest.approx(1.0)


def test_segments_read_the_rotated_text_once(script):
    text = bytes(range(200))
    inputs, targets = zip(*script.segments(text, 3, 8, offset=50), strict=True)
    assert len(inputs) == 8
    read = torch.cat(inputs, dim=1).flatten().tolist()
    assert read == [(50 + i) % 200 for i in range(192)]
    assert torch.cat(targets, dim=1).flatten().tolist() == [(51 + i) % 200 for i in range(192)]


@pytest.fixture
def trainer(script, monkeypatch, tmp_path):
    monkeypatch.setattr(model, "SIZES", model.Sizes(layers=2, width=16, hidden=16, gate_rank=4))

    def make():
        options = argparse.Namespace(
            out=tmp_path,
            resume=False,
            epochs=2,
            streams=2,
            length=16,
            lr=3e-3,
            weight_decay=0.1,
            dropout=0.1,
            seed=0,
            threads=1,
        )
        return script.Trainer(options, b"the quick brown fox jumps over the lazy dog. " * 4)

    return make


def test_training_learns_and_resumes_exactly(trainer, tmp_path):
    whole, first, second = trainer(), trainer(), trainer()
    bits = [whole.run_epoch(lambda: None) for _ in range(2)]
    assert bits[1] < bits[0]
    first.run_epoch(lambda: None)
    first.keep_best(3.0)
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    second.run_epoch(lambda: None)
    assert (second.epoch, second.best) == (2, 3.0)
    assert all(torch.equal(whole.weights[name], second.weights[name]) for name in whole.weights)


def test_a_checkpoint_of_other_options_is_refused(trainer, tmp_path):
    trainer().save(tmp_path / "checkpoint")
    other = trainer()
    other.options.seed = 1
    with pytest.raises(SystemExit, match="was made with other options"):
        other.load(tmp_path / "checkpoint")
