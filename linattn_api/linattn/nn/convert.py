# pyright: basic
"""Layers and models of fla (flash-linear-attention) and transformers as those here, and back.

Parameters are named as fla names them, so its layers are a matter of arguments. Layers of transformers keep some projections
in one matrix; what stands where is told by a function for each way.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import OptionError
from . import torch as ours

__all__ = ["from_fla", "from_transformers", "to_fla", "to_transformers"]

Weights = dict[str, Tensor]

# -- fla's layers ------------------------------------------------------------------------------------------------------

FLA = {
    "DeltaNet": "DeltaNet",
    "GatedDeltaNet": "GatedDeltaNet",
    "GatedLinearAttention": "GatedLinearAttention",
    "HGRN2": "HGRN2Attention",
    "KimiDeltaAttention": "KimiDeltaAttention",
    "LinearAttention": "LinearAttention",
    "Mamba2": "Mamba2",
    "RWKV6": "RWKV6Attention",
    "RWKV7": "RWKV7Attention",
    "RetNet": "MultiScaleRetention",
}
"""The layers that fla has too, by our name."""
NORMS = ("g_norm_swish_gate", "g_norm", "o_norm", "norm")
"""What fla calls the norm of a layer's output."""
FEATURE_MAPS = {"elu": "elu1", "relu": "relu", "identity": "identity"}
"""Maps without parameters, by fla's name. (Its ``dpfp`` takes another number of products.)"""


def from_fla(module: nn.Module) -> Any:
    """A layer, or a causal language model, of fla as one of ours, with the same parameters in storage of its own.

    Args:
        module: One of ``DeltaNet, GatedDeltaNet, GatedLinearAttention, HGRN2Attention, KimiDeltaAttention, LinearAttention,
            Mamba2, RWKV6Attention, RWKV7Attention, MultiScaleRetention``, or a ``…ForCausalLM`` whose blocks hold one of the
            first five, ``LinearAttention``, ``Mamba2`` or ``MultiScaleRetention``.

    Raises:
        OptionError: It is no such module, or it has an option that ours has not: the message names it.
    """
    if hasattr(module, "lm_head"):
        return _model_from_fla(module)
    made = _made_like(module)
    made.load_state_dict(_named_as(made.state_dict(), module.state_dict()), strict=True)
    return made.to(next(module.parameters()).device).train(module.training)


def to_fla(layer: Any) -> Any:
    """A layer of ours as one of fla, which must be installed, with the same parameters in storage of its own.

    Raises:
        OptionError: fla has no such layer, or it has not its option: the message names it.
    """
    name = type(layer).__name__
    if name not in FLA:
        raise OptionError(f"to_fla: fla has no {name}; it has {', '.join(FLA)}")
    theirs: Any = importlib.import_module("fla.layers")
    made = getattr(theirs, FLA[name])(**_fla_arguments(name, layer.arguments, layer))
    made.load_state_dict(_named_as(made.state_dict(), layer.state_dict()), strict=True)
    first = next(layer.parameters())
    return made.to(first.device, first.dtype).train(layer.training)


def _named_as(wanted: Weights, weights: Weights) -> Weights:
    """Parameters by the names that another layer, or model, wants: fla has a map that is tied by two, ours by one."""
    of_keys, of_queries = "feature_map_k.", "feature_map_q."
    found = {name: x for name, x in weights.items() if of_keys not in name or name in wanted}
    second = {name for name in wanted if of_keys in name and name not in weights}
    return found | {name: weights[name.replace(of_keys, of_queries)] for name in second}


def _made_like(module: Any) -> Any:
    """One of our layers with the sizes and options of fla's."""
    name = next((name for name, theirs in FLA.items() if theirs == type(module).__name__), None)
    if name is None:
        raise OptionError(f"from_fla: expected one of {', '.join(FLA.values())}, got {type(module).__name__}")
    cls = getattr(ours, name)
    for option, harmless in UNSERVED.items():
        if getattr(module, option, harmless) != harmless:
            raise OptionError(
                f"from_fla: {type(module).__name__} with {option}={getattr(module, option)!r} has no counterpart here"
            )
    found = {key: read(module) for key, read in READ.get(name, {}).items()}
    for key in inspect.signature(cls).parameters:
        if key not in found and hasattr(module, key) and not isinstance(getattr(module, key), nn.Module):
            found[key] = getattr(module, key)
    found["layer_idx"] = module.layer_idx or 0
    if found.get("num_hidden_layers", 1) is None:
        found["num_hidden_layers"] = 1
    norm = next((getattr(module, key) for key in NORMS if getattr(module, key, None) is not None), None)
    if norm is not None and hasattr(norm, "eps"):
        found["norm_eps"] = norm.eps / (module.head_dim if name == "RWKV7" else 1)
        if "elementwise_affine" in inspect.signature(cls).parameters:
            found["elementwise_affine"] = norm.weight is not None
    if getattr(module, "use_short_conv", False) and "conv_bias" in inspect.signature(cls).parameters:
        found["conv_bias"] = module.state_dict().get("q_conv1d.bias") is not None
    dtype = next(module.parameters()).dtype
    return cls(**found, dtype=dtype)


UNSERVED: dict[str, Any] = {"clamp_min": None, "feature_map_fn": None}
"""Options of fla's layers that ours have not, and their values where they do nothing."""


def _linear_attention_map(module: Any) -> str:
    kinds = {"HedgehogFeatureMap": "hedgehog", "T2RFeatureMap": "t2r", "HadamardFeatureMap": "elementwise_product"}
    names = {**kinds, "ReLU": "relu", "Identity": "identity"}
    found = module.feature_map_q
    if isinstance(found, nn.Module) and type(found).__name__ not in names:
        raise OptionError(f"from_fla: LinearAttention with a {type(found).__name__} has no counterpart here")
    return names[type(found).__name__] if isinstance(found, nn.Module) else "elu1"


Read = Callable[[Any], Any]

READ: dict[str, dict[str, Read]] = {
    "GatedLinearAttention": {"feature_map": lambda m: None, "gate_low_rank_dim": lambda m: m.gk_proj[0].out_features},
    "RetNet": {"feature_map": lambda m: None},
    "HGRN2": {"num_heads": lambda m: None},
    "KimiDeltaAttention": {"lower_bound": lambda m: m.lower_bound if m.safe_gate or m.lower_bound is not None else None},
    "GatedDeltaNet": {"output_gate_activation": lambda m: getattr(m.o_norm, "activation", "silu")},
    "LinearAttention": {
        "feature_map": _linear_attention_map,
        "normalize": lambda m: m.do_feature_map_norm,
        "tie_feature_map_qk": lambda m: isinstance(m.feature_map_q, nn.Module) and m.feature_map_q is m.feature_map_k,
        "output_norm": lambda m: "identity" if isinstance(m.norm, nn.Identity) else "rmsnorm",
        "expand_k": lambda m: m.key_dim / m.hidden_size,
        "expand_v": lambda m: m.value_dim / m.hidden_size,
    },
    "Mamba2": {
        "conv_kernel": lambda m: m.conv_kernel_size,
        "state_size": lambda m: m.ssm_state_size,
        "dt_limit": lambda m: tuple(m.dt_limit),
    },
    "RWKV7": {"num_heads": lambda m: None},
}
"""Arguments of ours that fla's layers keep under another name, or not at all."""

OURS_ALONE = {"HGRN2": {"lower_bound": 0.0}, "RWKV6": {"num_hidden_layers": None}, "Mamba2": {"num_hidden_layers": None}}
"""Arguments that fla's layers have not, and the value that goes over; ``None`` where any does."""


def _fla_arguments(name: str, given: Mapping[str, Any], layer: Any) -> dict[str, Any]:
    """The arguments of fla's layer."""
    found = dict(given)
    for key, harmless in OURS_ALONE.get(name, {}).items():
        value = found.pop(key, harmless)
        if harmless is not None and value != harmless:
            raise OptionError(f"to_fla: fla's {FLA[name]} has no {key}, and this {name} has {key}={value!r}")
    if name == "LinearAttention":
        learned = isinstance(given["feature_map"], str) and given["feature_map"] in ours.layers.linear_attention.LEARNED
        back = {here: there for there, here in FEATURE_MAPS.items()}
        if not learned and given["feature_map"] not in back:
            raise OptionError(f"to_fla: fla's LinearAttention has no feature map {given['feature_map']!r}")
        found["feature_map"] = given["feature_map"] if learned else back[given["feature_map"]]
        found["do_feature_map_norm"] = found.pop("normalize")
    elif found.get("feature_map") is not None:
        raise OptionError(f"to_fla: fla's {FLA[name]} has no feature map {found['feature_map']!r}")
    if name == "KimiDeltaAttention":
        found["safe_gate"] = given["lower_bound"] is not None
    if name == "RWKV7":  # fla's first values divide by the number of layers below the last; they are overwritten
        found["num_hidden_layers"] = max(2, given["num_hidden_layers"])
    return found


# -- fla's language models ---------------------------------------------------------------------------------------------

MODELS = ("attn", "mixer")


def _model_from_fla(module: Any) -> Any:
    """A causal language model with the parameters of fla's, or of transformers' Mamba-2."""
    config, body = module.config, getattr(module, "model", None) or module.backbone
    block = body.layers[0]
    theirs: list[Any] = [getattr(each, "attn", None) or getattr(each, "mixer", None) for each in body.layers]
    plain = {"attn_norm", "attn", "mlp_norm", "mlp"}, {"norm", "mixer"}
    if {name for name, _ in block.named_children()} not in plain or hasattr(body, "lower_bounds"):
        raise OptionError(f"from_fla: the blocks of {type(module).__name__} are not of a mixer and a SwiGLU alone")
    layers = [_made_like(each) if type(each).__module__.startswith("fla") else from_transformers(each) for each in theirs]
    options = [{k: v for k, v in layer.arguments.items() if k != "hidden_size"} for layer in layers]
    has_mlp = hasattr(block, "mlp")
    norm = block.attn_norm if has_mlp else block.norm
    made = ours.LanguageModel(
        config.vocab_size,
        config.hidden_size,
        len(layers),
        mixer=[type(layer).__name__ for layer in layers],
        mixer_options=options,
        intermediate_size=block.mlp.gate_proj.out_features if has_mlp else 0,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        norm_eps=norm.eps if hasattr(norm, "eps") else norm.variance_epsilon,
        dtype=module.lm_head.weight.dtype,
    )
    made.load_state_dict(_named_as(made.state_dict(), _renamed(module.state_dict(), made)), strict=True)
    return made.to(module.lm_head.weight.device).train(module.training)


def _renamed(weights: Mapping[str, Tensor], model: Any) -> Weights:
    """Parameters of a language model by our names."""
    found: Weights = {}
    for name, x in weights.items():
        name = name.replace("backbone.", "model.", 1).replace("model.norm_f.", "model.norm.", 1)
        name = re.sub(r"^(model\.layers\.\d+)\.norm\.", r"\1.attn_norm.", name)
        name = re.sub(r"^(model\.layers\.\d+)\.mixer\.", r"\1.attn.", name)
        if name != "lm_head.weight" or not model.tied:
            found[name] = x
    return found


# -- transformers' layers ----------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """How a layer of transformers is one of ours.

    Attributes:
        name: Our layer.
        arguments: From their module, the arguments of ours.
        read: From their parameters and our layer, ours.
        write: The other way round.
    """

    name: str
    arguments: Callable[[Any], dict[str, Any]]
    read: Callable[[Weights, Any], Weights]
    write: Callable[[Weights, Any], Weights]


def from_transformers(module: nn.Module) -> Any:
    """A layer of transformers, or its ``Mamba2ForCausalLM``, as one of ours, with the same parameters in storage of its own.

    Args:
        module: A Gated DeltaNet of Qwen3-Next, Qwen3.5 or OLMo-Hybrid, ``Mamba2Mixer``, ``KimiLinearDeltaAttention`` or
            ``MiniMaxLightningAttention``.

    Raises:
        OptionError: It is none of these, or it has another activation than SiLU.
    """
    if type(module).__name__ == "Mamba2ForCausalLM":
        return _model_from_fla(module)
    pair = _pair("from_transformers", module)
    first = next(module.parameters())
    made = getattr(ours, pair.name)(**pair.arguments(module), layer_idx=module.layer_idx, dtype=first.dtype)
    made.load_state_dict(pair.read(dict(module.state_dict()), made), strict=True)
    return made.to(first.device).train(module.training)


def to_transformers(layer: nn.Module, module: nn.Module) -> nn.Module:
    """Copy the parameters of a layer of ours into a layer of transformers that was made with the same sizes.

    Args:
        layer: One of ours.
        module: One that :func:`from_transformers` takes.

    Returns:
        ``module``.

    Raises:
        OptionError: ``module`` is none of those, or no counterpart of ``layer``.
    """
    pair = _pair("to_transformers", module)
    if type(layer).__name__ != pair.name:
        raise OptionError(f"to_transformers: a {type(module).__name__} holds a {pair.name}, got a {type(layer).__name__}")
    buffers = {name: x for name, x in module.state_dict().items() if name in dict(module.named_buffers())}
    module.load_state_dict({**pair.write(dict(layer.state_dict()), layer), **buffers}, strict=True)
    return module


def _pair(function: str, module: nn.Module) -> Pair:
    name = type(module).__name__
    if name not in PAIRS:
        raise OptionError(f"{function}: expected one of {', '.join(PAIRS)}, got {name}")
    _check_activation(function, module)
    return PAIRS[name]


def _check_activation(function: str, module: Any) -> None:
    """Refuse a layer with another activation than ours have."""
    found = module.activation if hasattr(module, "activation") else type(module.act_fn).__name__.lower()
    if found.removesuffix("activation") not in ("silu", "swish"):
        raise OptionError(f"{function}: {type(module).__name__} has the activation {found!r}, and ours have 'silu' alone")


def _renaming(names: Mapping[str, str]) -> tuple[Callable[[Weights, Any], Weights], Callable[[Weights, Any], Weights]]:
    """Read and write parameters whose modules have other names there; ``names`` are theirs by ours."""

    def renamed(weights: Weights, table: Mapping[str, str]) -> Weights:
        found: Weights = {}
        for name, x in weights.items():
            path, _, leaf = name.rpartition(".")
            found[".".join(filter(None, (table.get(path, path), leaf)))] = x
        return found

    back = {there: here for here, there in names.items()}
    return lambda weights, _: renamed(weights, back), lambda weights, _: renamed(weights, names)


def _one_convolution(widths: Callable[[Any], tuple[int, ...]], rename: Mapping[str, str]) -> tuple[Any, Any]:
    """Read and write layers whose three convolutions are one there."""
    read_names, write_names = _renaming(rename)

    def read(weights: Weights, layer: Any) -> Weights:
        parts = weights.pop("conv1d.weight").split(widths(layer))
        convolutions = {f"{name}_conv1d.weight": x for name, x in zip("qkv", parts, strict=True)}
        return {**read_names(weights, layer), **convolutions}

    def write(weights: Weights, layer: Any) -> Weights:
        joined = torch.cat([weights.pop(f"{name}_conv1d.weight") for name in "qkv"])
        return {**write_names(weights, layer), "conv1d.weight": joined}

    return read, write


def _qkv(layer: Any) -> tuple[int, ...]:
    return tuple(getattr(layer, f"{name}_proj").out_features for name in "qkv")


def _split_rows(weights: Weights, joined: str, names: tuple[str, ...], sizes: tuple[int, ...], heads: int) -> None:
    """Take a matrix apart whose rows are those of several, one head after the other."""
    matrix = weights.pop(joined)
    parts = matrix.reshape(heads, -1, matrix.shape[-1]).split([size // heads for size in sizes], 1)
    weights.update({name: x.reshape(-1, x.shape[-1]) for name, x in zip(names, parts, strict=True)})


def _join_rows(weights: Weights, joined: str, names: tuple[str, ...], heads: int) -> None:
    """Put such a matrix together."""
    parts = [weights.pop(name) for name in names]
    weights[joined] = torch.cat([x.reshape(heads, -1, x.shape[-1]) for x in parts], 1).reshape(-1, parts[0].shape[-1])


JOINED_NAMES = {"o_norm": "norm", "o_proj": "out_proj"}
QKVZ = tuple(f"{name}_proj.weight" for name in "qkvg")
BA = ("b_proj.weight", "a_proj.weight")
_read_joined, _write_joined = _one_convolution(_qkv, JOINED_NAMES)


def _read_qwen3_next(weights: Weights, layer: Any) -> Weights:
    q, k, v = _qkv(layer)
    _split_rows(weights, "in_proj_qkvz.weight", QKVZ, (q, k, v, v), layer.num_heads)
    _split_rows(weights, "in_proj_ba.weight", BA, (layer.num_v_heads,) * 2, layer.num_heads)
    return _read_joined(weights, layer)


def _write_qwen3_next(weights: Weights, layer: Any) -> Weights:
    _join_rows(weights, "in_proj_qkvz.weight", QKVZ, layer.num_heads)
    _join_rows(weights, "in_proj_ba.weight", BA, layer.num_heads)
    return _write_joined(weights, layer)


QWEN3_5 = {**JOINED_NAMES, "g_proj": "in_proj_z", "a_proj": "in_proj_a", "b_proj": "in_proj_b"}
_read_one, _write_one = _one_convolution(_qkv, QWEN3_5)


def _read_qwen3_5(weights: Weights, layer: Any) -> Weights:
    _split_rows(weights, "in_proj_qkv.weight", QKVZ[:3], _qkv(layer), 1)
    return _read_one(weights, layer)


def _write_qwen3_5(weights: Weights, layer: Any) -> Weights:
    _join_rows(weights, "in_proj_qkv.weight", QKVZ[:3], 1)
    return _write_one(weights, layer)


KIMI = {
    "f_proj.0": "forget_gate.f_a_proj",
    "f_proj.1": "forget_gate.f_b_proj",
    "g_proj.0": "g_a_proj",
    "g_proj.1": "g_b_proj",
}
_read_kimi_names, _write_kimi_names = _one_convolution(_qkv, KIMI)


def _read_kimi(weights: Weights, layer: Any) -> Weights:
    dt_bias, A_log = weights.pop("forget_gate.dt_bias"), weights.pop("forget_gate.A_log").reshape(-1)
    own = {"dt_bias": dt_bias, "A_log": A_log, "g_proj.1.bias": torch.zeros_like(layer.g_proj["1"].bias)}
    return {**_read_kimi_names(weights, layer), **own}


def _write_kimi(weights: Weights, layer: Any) -> Weights:
    if weights.pop("g_proj.1.bias").any():
        raise OptionError(
            "to_transformers: KimiLinearDeltaAttention has no bias of the output gate, and this layer's is not zero"
        )
    gate = {"forget_gate.dt_bias": weights.pop("dt_bias"), "forget_gate.A_log": weights.pop("A_log")[None, None, :, None]}
    return {**_write_kimi_names(weights, layer), **gate}


def _read_lightning(weights: Weights, layer: Any) -> Weights:
    return {name: weights[name] for name in layer.state_dict()}


def _gated_delta_net(module: Any) -> dict[str, Any]:
    norm = module.norm if hasattr(module, "norm") else module.o_norm
    return {
        "hidden_size": module.hidden_size,
        "expand_v": module.head_v_dim / module.head_k_dim,
        "head_dim": module.head_k_dim,
        "num_heads": module.num_k_heads,
        "num_v_heads": module.num_v_heads,
        "allow_neg_eigval": getattr(module, "allow_neg_eigval", False),
        "conv_size": module.conv_kernel_size,
        "norm_eps": norm.variance_epsilon,
    }


def _mamba2(module: Any) -> dict[str, Any]:
    return {
        "hidden_size": module.hidden_size,
        "head_dim": module.head_dim,
        "state_size": module.ssm_state_size,
        "expand": module.intermediate_size / module.hidden_size,
        "n_groups": module.n_groups,
        "conv_kernel": module.conv_kernel_size,
        "use_conv_bias": module.use_conv_bias,
        "dt_limit": tuple(module.time_step_limit),
        "use_bias": module.use_bias,
        "norm_eps": module.layer_norm_epsilon,
    }


def _kimi(module: Any) -> dict[str, Any]:
    sizes = {"hidden_size": module.hidden_size, "head_dim": module.head_dim, "num_heads": module.num_heads}
    return {**sizes, "conv_size": module.conv_kernel_size, "norm_eps": module.layer_norm_epsilon}


def _lightning(module: Any) -> dict[str, Any]:
    return {
        "hidden_size": module.qkv_proj.in_features,
        "num_heads": module.num_attention_heads,
        "head_dim": module.head_dim,
        "decay": "minimax",
        "norm_eps": module.norm.variance_epsilon,
        "num_hidden_layers": module.num_hidden_layers,
    }


PAIRS = {
    "Qwen3NextGatedDeltaNet": Pair("GatedDeltaNet", _gated_delta_net, _read_qwen3_next, _write_qwen3_next),
    "Qwen3_5GatedDeltaNet": Pair("GatedDeltaNet", _gated_delta_net, _read_qwen3_5, _write_qwen3_5),
    "OlmoHybridGatedDeltaNet": Pair("GatedDeltaNet", _gated_delta_net, *_one_convolution(_qkv, {})),
    "Mamba2Mixer": Pair("Mamba2", _mamba2, *_renaming({})),
    "KimiLinearDeltaAttention": Pair("KimiDeltaAttention", _kimi, _read_kimi, _write_kimi),
    "MiniMaxLightningAttention": Pair("Lightning", _lightning, _read_lightning, lambda weights, _: weights),
}
"""The layers of transformers that ours serve."""
