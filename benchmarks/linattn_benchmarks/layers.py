"""The token mixers of models at their real sizes, between the two big projections: ``linattn bench layer``.

What projects the layer's input onto wide queries, keys, values and gates is replaced by what it made of it, and the last
projection by nothing, in linattn's layer and in the others, which have the same parameters. Short convolutions, norms, small
projections that make gates, the operator, and the gated norm are left. The three big projections of RWKV-7 read the input mixed
with the token before, and as wide as it is: they hand it on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from linattn.errors import OptionError
from torch import Tensor, nn

from .beside import KERNELS, OURS, Compile, Job, Library, Prepared, hide
from .cases import WHAT
from .subjects import fla_refuses, force_fla


@dataclass(frozen=True)
class TokenMixer:
    """One layer.

    Attributes:
        layer: Its name in :mod:`linattn.nn`.
        sizes: Its arguments in the model.
        small: Those that are others at reduced sizes.
        mixed: Whether the big projections read something else than the layer's input, as wide as it.
    """

    layer: str
    sizes: Mapping[str, Any]
    small: Mapping[str, Any]
    mixed: bool = False


MIXERS = {
    "Qwen3-Next": TokenMixer(
        "GatedDeltaNet",
        {"hidden_size": 2048, "num_heads": 16, "num_v_heads": 32, "head_dim": 128, "expand_v": 1.0, "norm_eps": 1e-6},
        {"hidden_size": 256, "num_heads": 2, "num_v_heads": 4, "head_dim": 64},
    ),
    "Kimi Linear": TokenMixer(
        "KimiDeltaAttention",
        {"hidden_size": 2304, "num_heads": 32, "head_dim": 128},
        {"hidden_size": 256, "num_heads": 4, "head_dim": 64},
    ),
    "Mamba-2": TokenMixer("Mamba2", {"hidden_size": 2560}, {"hidden_size": 256, "state_size": 64}),
    "GLA": TokenMixer("GatedLinearAttention", {"hidden_size": 2048, "num_heads": 4}, {"hidden_size": 256, "num_heads": 2}),
    "RWKV-7": TokenMixer("RWKV7", {"hidden_size": 2048, "head_dim": 64}, {"hidden_size": 256}, mixed=True),
}
"""Qwen3-Next-80B-A3B, Kimi-Linear-48B-A3B, Mamba-2 2.7B, GLA and RWKV-7 of the 1.5B class."""
NAMES = tuple(MIXERS)
WHATS = WHAT
"""What can be done; decoding is one token of every sequence, after ``T``."""
SHAPES = {"cpu": {"B": 1, "T": 1024}, "cuda": {"B": 4, "T": 4096}}

BIG = ("q_proj", "k_proj", "v_proj", "r_proj", "g_proj", "in_proj", "in_proj_qkvz")
"""Names of the first projections in all libraries; one that is no single matrix is small."""
LAST = ("o_proj", "out_proj")
PROVED = {"B": 1, "T": 65}
"""The shape at which libraries are compared: not a multiple of a chunk."""

Call = Callable[[nn.Module, Tensor, Any], Tensor]
"""A layer's output for its input and a cache, or none."""


def of_linattn(layer: Any, job: Job) -> tuple[nn.Module, Call, Callable[[], Any]]:
    """Ours: the layer, how it is called, and a new cache."""
    from linattn.nn import Cache

    return layer, lambda module, x, cache: module(x, cache=cache), Cache


def of_fla(layer: Any, job: Job) -> tuple[nn.Module, Call, Callable[[], Any]]:
    """fla's."""
    from fla.models.utils import Cache
    from linattn.nn import to_fla

    if job.device == "cuda" and fla_refuses():
        force_fla()

    def call(module: nn.Module, x: Tensor, cache: Any) -> Tensor:
        return module(x, past_key_values=cache, use_cache=cache is not None)[0]

    return to_fla(layer), call, Cache


def of_mamba_ssm(layer: Any, job: Job) -> tuple[nn.Module, Call, Callable[[], Any]]:
    """mamba_ssm's."""
    from mamba_ssm.modules.mamba2 import Mamba2
    from mamba_ssm.utils.generation import InferenceParams

    sizes = {"d_state": layer.state_size, "headdim": layer.head_dim, "ngroups": layer.n_groups, "layer_idx": 0}
    module = Mamba2(layer.hidden_size, expand=layer.intermediate_size // layer.hidden_size, **sizes)
    module.load_state_dict(layer.state_dict())

    def call(module: nn.Module, x: Tensor, cache: Any) -> Tensor:
        y = module(x, inference_params=cache)
        if cache is not None:
            cache.seqlen_offset += x.shape[1]
        return y

    return module, call, lambda: InferenceParams(max_seqlen=job.T + 1, max_batch_size=job.B)


def of_transformers(layer: Any, job: Job) -> tuple[nn.Module, Call, Callable[[], Any]]:
    """transformers' own, as where no package for it is installed."""
    hide(KERNELS)
    import transformers
    from linattn.integrations.transformers import cache_parameter
    from linattn.nn import to_transformers
    from transformers import DynamicCache

    config, name = TRANSFORMERS[job.name](transformers, layer)
    folder = type(config).__module__.replace("configuration_", "modeling_")
    module = getattr(__import__(folder, fromlist=[name]), name)(config, layer_idx=0)

    def call(module: nn.Module, x: Tensor, cache: Any) -> Tensor:
        found = module(x, **{cache_parameter(module.forward): cache})
        return found[0] if isinstance(found, tuple) else found

    return to_transformers(layer, module), call, lambda: DynamicCache(config=config)


def _qwen3_next(transformers: Any, layer: Any) -> tuple[Any, str]:
    sizes = {"linear_num_key_heads": layer.num_heads, "linear_num_value_heads": layer.num_v_heads}
    heads = {"linear_key_head_dim": layer.head_k_dim, "linear_value_head_dim": layer.head_v_dim}
    kinds = {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}
    config = transformers.Qwen3NextConfig(hidden_size=layer.hidden_size, rms_norm_eps=1e-6, **sizes, **heads, **kinds)
    return config, "Qwen3NextGatedDeltaNet"


def _kimi_linear(transformers: Any, layer: Any) -> tuple[Any, str]:
    sizes = {"linear_num_heads": layer.num_heads, "linear_head_dim": layer.head_k_dim}
    kinds = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]}
    config = transformers.KimiLinearConfig(hidden_size=layer.hidden_size, rms_norm_eps=1e-5, **sizes, **kinds)
    return config, "KimiLinearDeltaAttention"


def _mamba2(transformers: Any, layer: Any) -> tuple[Any, str]:
    sizes = {"hidden_size": layer.hidden_size, "num_heads": layer.num_heads, "head_dim": layer.head_dim}
    states = {"state_size": layer.state_size, "n_groups": layer.n_groups, "num_hidden_layers": 1}
    return transformers.Mamba2Config(**sizes, **states), "Mamba2Mixer"


TRANSFORMERS: dict[str, Callable[[Any, Any], tuple[Any, str]]] = {
    "Qwen3-Next": _qwen3_next,
    "Kimi Linear": _kimi_linear,
    "Mamba-2": _mamba2,
}
"""Configuration and class name of transformers' layer that ours is."""

MAKERS = {OURS: of_linattn, "fla": of_fla, "mamba_ssm": of_mamba_ssm, "transformers": of_transformers}
LIBRARIES = {
    OURS: Library("linattn", "linattn"),
    "fla": Library("flash-linear-attention", "fla", ("cuda",)),
    "mamba_ssm": Library("mamba-ssm", "mamba_ssm", ("cuda",), calls=("causal_conv1d",)),
    "transformers": Library("transformers", "transformers"),
}


def libraries(name: str) -> tuple[str, ...]:
    """Who has the layer, ours first."""
    only = {"mamba_ssm": name == "Mamba-2", "transformers": name in TRANSFORMERS}
    return tuple(library for library in LIBRARIES if only.get(library, True))


def prepared(job: Job) -> Prepared:
    """The calls of one library's layer."""
    mixer = MIXERS[job.name]
    layer, call, cache = MAKERS[job.library](made(mixer, job), job)
    layer = layer.to(job.device)

    def inputs(B: int, T: int) -> Tensor:
        generator = torch.Generator().manual_seed(job.seed)
        return torch.randn(B, T, mixer_width(layer), generator=generator).to(job.device)

    def proof() -> dict[str, Tensor]:
        x = inputs(**PROVED).requires_grad_()
        y = call(layer, x, None)
        (dx,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel(), device=y.device).reshape(y.shape))
        return {"y": y, "dx": dx} | decoded(x.detach())

    @torch.no_grad()
    def decoded(x: Tensor) -> dict[str, Tensor]:
        held = cache()
        call(layer, x[:, :-1], held)
        return {"token": call(layer, x[:, -1:], held)}

    def between(T: int) -> tuple[nn.Module, Tensor]:
        dtype = getattr(torch, job.dtype)
        x = inputs(job.B, T).to(dtype)
        return without_projections(layer, x, dtype, mixer.mixed), x

    def forward(compile_: Compile) -> Callable[[], Any]:
        module, x = between(job.T)
        run = compile_(lambda x: call(module, x, None))
        return torch.no_grad()(lambda: run(x))

    def with_backward(compile_: Compile) -> Callable[[], Any]:
        module, x = between(job.T)
        run, leaves = compile_(lambda x: call(module, x, None)), [x.requires_grad_(), *module.parameters()]
        pulled = torch.randn_like(run(x))
        return lambda: torch.autograd.grad(run(x), leaves, pulled, allow_unused=True)

    def decode(compile_: Compile) -> Callable[[], Any]:
        (module, x), (one, token), held = between(job.T), between(1), cache()
        with torch.no_grad():
            call(module, x, held)
        run = compile_(lambda token: call(one, token, held))
        return torch.no_grad()(lambda: run(token))

    return Prepared(proof, {"fwd": forward, "fwdbwd": with_backward, "decode": decode}, contextlib.nullcontext)


def made(mixer: TokenMixer, job: Job) -> Any:
    """Our layer, the same one in every process. No parameter is zero, but for a bias that not every library has."""
    from linattn import nn as ours

    layer = getattr(ours, mixer.layer)(**mixer.sizes | (mixer.small if job.small else {}))
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
        if mixer.layer == "KimiDeltaAttention":
            layer.g_proj["1"].bias.zero_()
    return layer


def mixer_width(layer: Any) -> int:
    """``D``."""
    return layer.hidden_size if hasattr(layer, "hidden_size") else layer.d_model


class Given(nn.Module):
    """In the place of a projection: what it made of the input, of which a gradient is asked as of any parameter."""

    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y = nn.Parameter(y)

    @property
    def weight(self) -> Tensor:
        """Where libraries look for device and dtype."""
        return self.y

    def forward(self, x: Tensor) -> Tensor:
        return self.y.reshape(*x.shape[:-1], -1)


class Passed(nn.Module):
    """In the place of a projection: nothing. Functions that would project by themselves find no weight."""

    weight = bias = None

    def forward(self, x: Tensor) -> Tensor:
        return x


@torch.no_grad()
def without_projections(layer: nn.Module, x: Tensor, dtype: torch.dtype, mixed: bool) -> nn.Module:
    """A copy of a layer in that dtype, whose big projections are done: of inputs ``x``."""
    found = copy.deepcopy(layer)
    for name, projection in list(found.named_children()):
        if isinstance(projection, nn.Linear) and name in (*BIG, *LAST):
            given = Passed() if name in LAST or mixed else Given(projection(x.to(projection.weight.dtype)))
            setattr(found, name, given)
    if not any(isinstance(module, Passed) for module in found.modules()):
        raise OptionError(f"{type(layer).__name__} has no projection named {' or '.join(LAST)}")
    wide = {name: x.clone() for name, x in layer.named_parameters() if name in WIDE}
    found = found.to(dtype)
    for name, x in wide.items():
        getattr(found, name).data = x
    return found


WIDE = ("A_log", "D", "dt_bias")
"""Parameters that models keep in float32."""
