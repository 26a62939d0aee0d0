"""Finding docstrings by their summaries: pairs, ranks, and what finetuning does, with a bag of words as the encoder."""

from __future__ import annotations

import argparse
import copy
import random
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from experiments import checks, retrieval  # noqa: E402

WORDS = [f"w{i}" for i in range(40)]
CHOSEN = argparse.Namespace(query=3, document=3, steps=150, batch=8, rate=3e-2, seed=0)


class Bag:
    """The sum of what words and their attention's values are, in the place of MiniLM."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.w = {"words": torch.randn(len(WORDS), 12, generator=generator), "place": torch.arange(4)}
        encode = lambda text: SimpleNamespace(ids=[WORDS.index(word) for word in text.split()])  # noqa: E731
        self.tokenizer = SimpleNamespace(encode=encode)

    def with_weights(self, weights):
        found = copy.copy(self)
        found.w = weights
        return found

    def embeddings(self, ids, attend):
        x = self.w["words"][ids].unflatten(-1, (1, 12))
        return attend(0, x, x, x).flatten(2).mean(1)


def reader(encoder, name="softmax"):
    return retrieval.Reader(encoder, name, {key: x for key, x in encoder.w.items() if x.is_floating_point()})


@pytest.mark.parametrize("name", ["softmax", "elu1"])
def test_texts_of_several_lengths_are_read_as_each_alone_and_cut(name):
    read, texts = reader(Bag(0), name), ["w1 w2", "w3", "w2 w1 w5 w6", "w9 w8"]
    together = read(texts, 3)
    torch.testing.assert_close(together, torch.cat([read([text], 3) for text in texts]))
    torch.testing.assert_close(together[2:3], read(["w2 w1 w5"], 3))
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(4))


def test_a_document_is_ranked_among_all():
    """Vectors in which the second query is nearest to the first document, and its own comes next."""
    vectors = {"q0": [1.0, 0.0], "d0": [1.0, 0.0], "q1": [0.8, 0.6], "d1": [0.0, 1.0], "q2": [-1.0, 0.0], "d2": [-1.0, 0.0]}
    found = retrieval.score(
        lambda texts, n: torch.tensor([vectors[t] for t in texts]), [("q0", "d0"), ("q1", "d1"), ("q2", "d2")], CHOSEN
    )
    assert found == pytest.approx({"first": 2 / 3, "reciprocal rank": (1 + 1 / 2 + 1) / 3})


def test_finetuning_brings_documents_to_their_queries_and_leaves_the_encoder_alone():
    encoder, of = Bag(1), [(f"w{i}", f"w{i + 20}") for i in range(20)]
    before = encoder.w["words"].clone()
    tuned = retrieval.finetune(reader(encoder), of, CHOSEN)
    assert retrieval.score(reader(encoder), of, CHOSEN)["first"] < 0.3 < 0.9 < retrieval.score(tuned, of, CHOSEN)["first"]
    assert (encoder.w["words"] == before).all()


def test_held_out_summaries_are_not_trained_on():
    training, held_out = retrieval.pairs(held_out=False), retrieval.pairs(held_out=True)
    assert min(len(training), len(held_out)) > 150
    assert not {summary for summary, _ in training} & {summary for summary, _ in held_out}
    assert not {rest for _, rest in training} & {rest for _, rest in held_out}


@pytest.mark.parametrize(("first", "agrees"), [(0.95, True), (0.2, False)])
def test_a_cell_of_the_table_comes_out_again_or_not(first, agrees, monkeypatch):
    """Of the documents of the table, finetuned from another seed."""
    of = [(f"w{i}", f"w{i + 20}") for i in range(20)]
    monkeypatch.setattr(checks.minilm, "encoder_of", lambda: Bag(1))
    monkeypatch.setattr(retrieval, "pairs", lambda held_out: of)
    whole = {"options": vars(CHOSEN) | {"held_out": 20}, "results": {"maps": {"softmax": {"finetuned": {"first": first}}}}}
    draw = random.Random(0)
    monkeypatch.setattr(draw, "choice", lambda of: of[-1])
    found = checks.of_retrieval(whole, draw)
    assert (found["model"], found["setting"], found["recorded"], found["agrees"]) == (
        "softmax",
        "finetuned",
        [first] * 3,
        agrees,
    )
    assert found["again"][0] > 0.9
