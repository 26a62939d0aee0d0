"""Hybrid models of transformers at the sizes of their layers, few layers of them: ``linattn bench model NAME…``.

A model runs five ways: on linattn as :func:`linattn.integrations.transformers.enable` puts it there, and with the mixers'
forwards replaced as well; with the package that transformers calls by itself, fla or mamba_ssm; and on transformers' own code,
as where no package is installed. Parameters are random. A training step is a forward pass, the loss and a backward pass. One
without the mixers, which then hand on what they are given, says how much of it is theirs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from linattn.integrations import transformers as integration
from torch import Tensor, nn

from .beside import KERNELS, OURS, REST, WHOLE, Compile, Job, Library, Prepared, hide, is_ours
from .subjects import fla_refuses, force_fla

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Hybrid:
    """A family of models.

    Attributes:
        stem: What its class names begin with.
        package: What transformers calls for it by itself.
        of_layers: Options of the configuration for a number of layers.
        small: Options at reduced sizes.
    """

    stem: str
    package: str
    of_layers: Callable[[int], Options]
    small: Options

    def config(self, layers: int, small: bool) -> Any:
        """The configuration: that of the published model, but for the number of layers."""
        import transformers

        cls = getattr(transformers, f"{self.stem}TextConfig", None) or getattr(transformers, f"{self.stem}Config")
        return cls(**{**self.of_layers(layers), **(self.small if small else {}), "pad_token_id": 0, "eos_token_id": None})


def alternating(layers: int) -> Options:
    """Three recurrent layers, one of softmax attention, as the families have it; and that one at the end of fewer layers."""
    kinds = ["full_attention" if i % 4 == 3 or i + 1 == layers > 1 else "linear_attention" for i in range(layers)]
    return {"num_hidden_layers": layers, "layer_types": kinds}


def kimi_linear(layers: int) -> Options:
    """The same, with experts in every layer: of the published model in all but the first."""
    return {**alternating(layers), "mlp_layer_types": ["sparse"] * layers}


def bamba(layers: int) -> Options:
    """The last layer is one of softmax attention, where there are more than one."""
    return {"num_hidden_layers": layers, "attn_layer_indices": [layers - 1] if layers > 1 else []}


def nemotron_h(layers: int) -> Options:
    """Mamba-2, a feed-forward layer, Mamba-2, softmax attention, and so on."""
    pattern = ("linear_attention", "mlp", "linear_attention", "full_attention")
    return {"layers_block_type": [pattern[i % 4] for i in range(layers)]}


FEW_TOKENS = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
DELTA = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "num_experts_per_token": 2}

MODELS = {
    "qwen3_next": Hybrid("Qwen3Next", "fla", alternating, {**FEW_TOKENS, **DELTA, **EXPERTS}),
    "qwen3_5": Hybrid("Qwen3_5", "fla", alternating, {**FEW_TOKENS, **DELTA}),
    "kimi_linear": Hybrid("KimiLinear", "fla", kimi_linear, {**FEW_TOKENS, **EXPERTS, "linear_num_heads": 16}),
    "bamba": Hybrid("Bamba", "mamba_ssm", bamba, {**FEW_TOKENS, "mamba_n_heads": 32}),
    "nemotron_h": Hybrid("NemotronH", "mamba_ssm", nemotron_h, {**FEW_TOKENS, "mamba_num_heads": 32}),
    "olmo_hybrid": Hybrid(
        "OlmoHybrid", "fla", alternating, {**FEW_TOKENS, "linear_num_key_heads": 8, "linear_num_value_heads": 8}
    ),
}
NAMES = tuple(MODELS)
WHATS = ("decode", "prefill", WHOLE, REST)
"""What can be done, in the order of first calls, which have a deadline together: what compiles fast comes first. Decoding is
one token of every sequence, after ``T``."""
SHAPES = {"cpu": {"B": 1, "T": 1024}, "cuda": {"B": 2, "T": 4096}}
PROVED = 65
"""Tokens of the sequence on which ways are compared."""

FUSED, OWN = "linattn, fused", "transformers"
LIBRARIES = {
    OURS: Library("linattn", "transformers"),
    FUSED: Library("linattn", "transformers"),
    "fla": Library("flash-linear-attention", "fla", ("cuda",), calls=("causal_conv1d",)),
    "mamba_ssm": Library("mamba-ssm", "mamba_ssm", ("cuda",), calls=("causal_conv1d",)),
    OWN: Library("transformers", "transformers"),
}


def libraries(name: str) -> tuple[str, ...]:
    """The ways in which a model runs, ours first; fused where linattn has a forward for its mixer."""
    found = MODELS[name]
    fused = any(mixer.startswith(found.stem) for mixer in integration.FORWARDS)
    return (OURS, *([FUSED] if fused else []), found.package, OWN)


def prepared(job: Job) -> Prepared:
    """The calls of a model in one of its ways. What is compared is the model at reduced sizes."""
    if not job.library.startswith(MODELS[job.name].package):
        hide(KERNELS)
    if job.library == MODELS[job.name].package:
        importlib.import_module(job.library)  # transformers would run its own code where that fails, and say nothing
    if job.library == "fla" and job.device == "cuda" and fla_refuses():
        force_fla()

    def tokens(model: Any, B: int, T: int) -> Tensor:
        generator = torch.Generator().manual_seed(job.seed)
        return torch.randint(1, model.config.vocab_size, (B, T), generator=generator).to(job.device)

    def proof() -> dict[str, Tensor]:
        model = made(job, small=True, dtype=torch.float32)
        some = tokens(model, 1, PROVED)
        with way(job.library):
            found = model(some, labels=some, use_cache=False)
            found.loss.backward()
        gradients = {name: p.grad.norm() for name, p in model.named_parameters() if p.grad is not None}
        return {"logits": found.logits, "gradients": torch.stack([gradients[name] for name in sorted(gradients)])}

    @functools.cache
    def whole() -> tuple[Any, Tensor]:
        model = made(job, job.small, getattr(torch, job.dtype))
        return model, tokens(model, job.B, job.T)

    def train(compile_: Compile, changed: Callable[[Any], Any] = lambda model: model) -> Callable[[], Any]:
        model, ids = whole()
        run = compile_(changed(model))

        def step() -> Any:
            model.zero_grad(set_to_none=True)
            loss = run(ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss.detach()

        return step

    def rest(compile_: Compile) -> Callable[[], Any]:
        return train(compile_, without_mixers)

    def prefill(compile_: Compile) -> Callable[[], Any]:
        model, ids = whole()
        run = compile_(model)
        return torch.no_grad()(lambda: run(ids, use_cache=True, logits_to_keep=1).logits)

    def decode(compile_: Compile) -> Callable[[], Any]:
        model, ids = whole()
        run, token = compile_(model), ids[:, -1:]
        cache = growing(model) if run is model else still(model, job.T + 1)
        given = {integration.cache_parameter(model.forward): cache, "use_cache": True}
        with torch.no_grad():
            model(ids, **given, logits_to_keep=1)

        def step() -> Any:
            rewind(cache, job.T)
            return run(token, **given).logits

        return torch.no_grad()(step)

    def idle() -> None:
        if whole.cache_info().currsize:
            whole()[0].zero_grad(set_to_none=True)

    calls = {WHOLE: train, REST: rest, "prefill": prefill, "decode": decode}
    return Prepared(proof, calls, lambda: way(job.library, compiled=set(job.modes) != {"eager"}), idle)


def made(job: Job, small: bool, dtype: torch.dtype) -> Any:
    """The model, the same one in every process."""
    import transformers

    found = MODELS[job.name]
    cls = getattr(transformers, f"{found.stem}ForCausalLM")
    torch.manual_seed(job.seed)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(job.device):
            return cls(found.config(job.layers, small)).to(job.device, dtype).train()
    finally:
        torch.set_default_dtype(usual)


def growing(model: Any) -> Any:
    """A cache that has room for as many tokens as there are, as models make by themselves."""
    import transformers

    return transformers.DynamicCache(config=model.config)


def still(model: Any, tokens: int) -> Any:
    """A cache of one size, as generation makes for a compiled model: a graph for each length is none for decoding."""
    import transformers

    return transformers.StaticCache(config=model.config, max_cache_len=tokens)


def rewind(cache: Any, tokens: int) -> None:
    """Let the layers of a cache of :func:`still` go on after so many tokens; one that grows goes on where it is."""
    import transformers

    for number, layer in enumerate(cache.layers):
        length = getattr(layer, "cumulative_length", None)
        if isinstance(length, Tensor):
            length.fill_(tokens)
        elif isinstance(cache, transformers.StaticCache) and hasattr(layer, "keys"):
            raise TypeError(
                f"layer {number} of the cache, a {type(layer).__name__}, keeps keys and has no tensor cumulative_length: "
                f"it cannot go on after {tokens} tokens again with transformers {transformers.__version__}"
            )


class HandsOn(nn.Module):
    """In the place of a mixer: nothing."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def without_mixers(model: Any) -> Any:
    """A model of the same parameters whose recurrent mixers hand on what they are given."""
    shared = {id(x): x for x in (*model.parameters(), *model.buffers())}
    found = copy.deepcopy(model, shared)
    for module in list(found.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in integration.FORWARDS:
                setattr(module, name, HandsOn())
    return found


@contextlib.contextmanager
def way(library: str, compiled: bool = False) -> Iterator[None]:
    """Run models as a library has them run; with ``compiled`` where they are compiled, too."""
    with contextlib.ExitStack() as stack:
        if compiled:
            stack.enter_context(exports_alone())
        if is_ours(library):
            stack.enter_context(integration.enable(fuse=library == FUSED))
        yield


@contextlib.contextmanager
def exports_alone() -> Iterator[None]:
    """Have ``torch.compiler.is_exporting()`` be true of exports alone, as from PyTorch 2.12 on. Before, it is of all that is
    compiled, where transformers then calls no package, and makes masks that it leaves out otherwise.
    """
    usual = torch.compiler.is_exporting
    torch.compile(lambda x: x + usual(), backend="eager")(torch.ones(1))  # the compiler knows its own functions from here on
    torch.compiler.is_exporting = lambda: torch.compiler._is_exporting_flag
    try:
        yield
    finally:
        torch.compiler.is_exporting = usual
