"""Cells of the tables that no study makes, worked out again by other random numbers.

Their programs have one seed and so no spread: each check says how far two such figures may lie apart.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from typing import Any

import torch

from . import estimators, minilm, retrieval

Found = dict[str, Any]


def agreement(model: str, setting: str, score: str, recorded: float, again: float, apart: float) -> Found:
    """What a check says, as that of a study does."""
    cell = {"model": model, "setting": setting, "score": score, "recorded": [recorded] * 3, "again": [again] * 3}
    return {**cell, "apart": apart, "agrees": abs(again - recorded) <= apart}


def of_estimators(whole: dict[str, Any], draw: random.Random) -> Found:
    """With other directions; 3 % apart at most, many times what as many maps leave to chance."""
    name, cosine = draw.choice(list(estimators.WAYS)), draw.choice(estimators.COSINES[1:-1])
    chosen = argparse.Namespace(**{**whole["options"], "seed": draw.randrange(1, 10**6)})
    recorded = whole["results"][name][str(cosine)]
    again = estimators.error(name, cosine, chosen)
    return agreement(name, f"cos={cosine:g}", "error", recorded, again, 0.03 * recorded)


@torch.no_grad()
def of_minilm(whole: dict[str, Any], draw: random.Random) -> Found:
    """Distilled in another order, where the map is learned, and measured on other passages; a tenth apart at most."""
    options, encoder = whole["options"], minilm.encoder_of()
    name = draw.choice([name for name in whole["results"]["maps"] if name in minilm.FIXED or name in minilm.LEARNED])
    count = options["test_short"]
    text = minilm.read(encoder, minilm.passages(encoder, minilm.SHORT, held_out=True)[count : 2 * count])
    maps = [minilm.FIXED[name]()] * minilm.LAYERS if name in minilm.FIXED else distilled(name, encoder, options, draw)
    again = minilm.measure(maps, encoder, {minilm.SHORT: text})["kl 128"]
    recorded = whole["results"]["maps"][name]["kl 128"]
    return agreement(name, "", "kl 128", recorded, again, 0.1 * recorded)


def distilled(name: str, encoder: minilm.Encoder, options: dict[str, Any], draw: random.Random) -> list[Any]:
    read = minilm.queries_and_keys(encoder, minilm.passages(encoder, minilm.SHORT, held_out=False)[: options["train"]])
    found, seed = [], draw.randrange(1, 10**6)
    with torch.enable_grad():
        for layer in range(minilm.LAYERS):
            of = minilm.distil(name, read, layer, options["steps"], options["batch"], seed)["parameters"]
            found.append(minilm.LEARNED[name][0](**{key: torch.tensor(p) for key, p in of.items()}))
    return found


def of_retrieval(whole: dict[str, Any], draw: random.Random) -> Found:
    """Distilled and finetuned in another order, of the same documents; two standard errors of the difference apart at most.

    Others would have to be as many: the fewer there are, the oftener the right one comes first.
    """
    options, encoder = whole["options"], minilm.encoder_of()
    name, stage = draw.choice(list(whole["results"]["maps"])), draw.choice(("frozen", "finetuned"))
    chosen = argparse.Namespace(**{**options, "seed": draw.randrange(1, 10**6)})
    reader = retrieval.reader(name, encoder, chosen)
    if stage == "finetuned":
        reader = retrieval.finetune(reader, retrieval.pairs(held_out=False), chosen)
    held_out = retrieval.pairs(held_out=True)[: chosen.held_out]
    again, recorded = retrieval.score(reader, held_out, chosen)["first"], whole["results"]["maps"][name][stage]["first"]
    variance = sum(p * (1 - p) / len(held_out) for p in (recorded, again))
    return agreement(name, stage, "first", recorded, again, 2 * math.sqrt(variance))


CHECKS: dict[str, Callable[[dict[str, Any], random.Random], Found]] = {
    "estimators": of_estimators,
    "minilm": of_minilm,
    "retrieval": of_retrieval,
}
