"""Forwards of transformers' mixers in which norm, gate and sigmoid are the operator's: ``enable(fuse=True)``.

A mixer of transformers makes log decays and writing strengths out of its projections before it calls a recurrence, and norms
and gates what comes out after it. The forwards here give the projections to the operator as they are, so that a kernel may map
them while it loads, and norm and gate the output in one pass. They compute the same; what is rounded in between may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..gates import BoundedSigmoid, Softplus
from ..ops import decode_gated_delta_rule, decode_kda, gated_delta_rule, gated_rms_norm, kda
from ._slots import wants_gradient
from .causal_conv1d import ACTIVATIONS, causal_conv1d_fn, causal_conv1d_update
from .mamba_ssm import mamba_chunk_scan_combined, rmsnorm_fn, selective_state_update

__all__ = ["FORWARDS", "refused"]


def refused(layer: Any) -> str | None:
    """What a mixer has and the forwards here have not, or ``None``."""
    known = layer.activation in ACTIVATIONS
    return None if known else f"its convolution's activation is {layer.activation!r}, which must be 'silu' or 'swish'"


def gated_delta_net(layer: Any, hidden_states: Any, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """The forward of the gated delta net of Qwen3-Next, Qwen3.5, Qwen4-Exp and OLMo-Hybrid, ``[B, T, D]`` to ``[B, T, D]``."""
    x = _masked(hidden_states, attention_mask)
    qkv, z, b, a = _projections(layer, x)
    qkv, state = _convolved(layer, qkv, cache, kwargs)
    q, k, v = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (part.unflatten(-1, (-1, layer.head_k_dim)) for part in (q, k))
    v, gate = v.unflatten(-1, (-1, layer.head_v_dim)), Softplus(layer.A_log, layer.dt_bias)
    forms = gated_delta_rule, decode_gated_delta_rule
    o = _recurrence(forms, (q, k, v, a, b), gate, state, layer, cache, kwargs)
    norm, last = (layer.norm, layer.out_proj) if hasattr(layer, "out_proj") else (layer.o_norm, layer.o_proj)
    activation = getattr(norm, "activation", "silu")
    return last(gated_rms_norm(o, z.reshape(o.shape), norm.weight, eps=norm.variance_epsilon, activation=activation).flatten(2))


def kimi_delta_attention(layer: Any, hidden_states: Any, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """The forward of the delta attention of Kimi-Linear, GLM-5-next and Bailing-Hybrid, ``[B, T, D]`` to ``[B, T, D]``."""
    x, heads = _masked(hidden_states, attention_mask), (layer.num_heads, layer.head_dim)
    qkv, state = _convolved(layer, _side_by_side(layer, x), cache, kwargs)
    q, k, v = (part.unflatten(-1, heads) for part in qkv.chunk(3, -1))
    a, gate = _decays(layer.forget_gate, x, heads)
    o = _recurrence((kda, decode_kda), (q, k, v, a, layer.b_proj(x)), gate, state, layer, cache, kwargs)
    z = (layer.g_proj(x) if hasattr(layer, "g_proj") else layer.g_b_proj(layer.g_a_proj(x))).unflatten(-1, heads)
    o = gated_rms_norm(o, z, layer.o_norm.weight, eps=layer.o_norm.variance_epsilon, activation="sigmoid")
    return layer.o_proj(o.flatten(2))


def mamba_2(layer: Any, hidden_states: Any, cache: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """The forward of Mamba-2's mixer, and of the models that have it, ``[B, T, D]`` to ``[B, T, D]``."""
    x, widths = _masked(hidden_states, attention_mask), [layer.intermediate_size, layer.conv_dim, layer.num_heads]
    z, xBC, dt = _scaled_projection(layer, x).split(widths, -1)
    xBC, state = _convolved(layer, xBC, cache, kwargs)
    normed = hasattr(layer.norm, "weight")  # else the gate alone follows the scan, as a part of it
    y = _scanned(layer, _masked(xBC, attention_mask), dt, None if normed else z, state, cache, kwargs)
    if normed:
        size, first = layer.intermediate_size // layer.n_groups, getattr(layer.norm, "norm_before_gate", False)
        y = rmsnorm_fn(y, layer.norm.weight, None, z, layer.norm.variance_epsilon, size, first)
    return layer.out_proj(y)


def _scaled_projection(layer: Any, x: Any) -> Any:
    """What Mamba-2's mixer is made of, side by side; Falcon-H1 multiplies before and after."""
    if not hasattr(layer, "mup_vector"):
        return layer.in_proj(x)
    return layer.in_proj(x * layer.ssm_in_multiplier) * layer.mup_vector


def _scanned(layer: Any, xBC: Any, dt: Any, z: Any, state: Any, cache: Any, kwargs: dict[str, Any]) -> Any:
    """Mamba-2's scan ``[B, T, H P]``, multiplied by ``silu(z)`` where that is given. The state it ends in is the cache's."""
    (heads, P), (groups, N) = (layer.num_heads, layer.head_dim), (layer.n_groups, layer.ssm_state_size)
    x, keys, queries = xBC.split([heads * P, groups * N, groups * N], -1)
    x, z = x.unflatten(-1, (heads, P)), z if z is None else z.unflatten(-1, (heads, P))
    keys, queries = (part.unflatten(-1, (groups, N)) for part in (keys, queries))
    rate = -layer.A_log.float().exp()
    if state is not None and x.shape[1] == 1:
        x, dt, keys, queries = (part[:, 0] for part in (x, dt, keys, queries))
        z, rate = z if z is None else z[:, 0], rate[:, None, None].expand(-1, P, N)
        dt, D, bias = (part[..., None].expand(*part.shape, P) for part in (dt, layer.D, layer.dt_bias))
        return selective_state_update(state, x, dt, rate, keys, queries, D, z, bias, dt_softplus=True).flatten(1)[:, None]
    found = mamba_chunk_scan_combined(
        x,
        dt,
        rate,
        keys,
        queries,
        layer.chunk_size,
        layer.D,
        z,
        layer.dt_bias,
        state,
        kwargs.get("seq_idx"),
        dt_softplus=True,
        dt_limit=layer.time_step_limit,
        return_final_states=cache is not None,
    )
    if cache is None:
        return found.flatten(2)
    cache.update_recurrent_state(found[1], layer.layer_idx)
    return found[0].flatten(2)


def _decays(forget: Any, x: Any, heads: tuple[int, int]) -> tuple[Any, Softplus | BoundedSigmoid]:
    """Logits of log decays ``[B, T, H, K]``, and what makes log decays of them."""
    a = forget.f_proj(x) if hasattr(forget, "f_proj") else forget.f_b_proj(forget.f_a_proj(x))
    parameters = forget.A_log.flatten(), forget.dt_bias.unflatten(0, heads)
    bound = forget.lower_bound if getattr(forget, "safe_gate", False) else getattr(forget, "safe_gate_lower_bound", None)
    return a.unflatten(-1, heads), Softplus(*parameters) if bound is None else BoundedSigmoid(*parameters, bound)


def _masked(x: Any, mask: Any) -> Any:
    """Tokens of padding are zero."""
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


def _projections(layer: Any, x: Any) -> tuple[Any, Any, Any, Any]:
    """Queries, keys and values side by side ``[B, T, …]``; output gates; logits of ``beta`` and of decays ``[B, T, HV]``."""
    if hasattr(layer, "q_proj"):
        return _side_by_side(layer, x), layer.g_proj(x), layer.b_proj(x), layer.a_proj(x)
    if not hasattr(layer, "in_proj_qkvz"):
        return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x)
    import torch

    q, k, v, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
    return torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1), z, b, a


def _side_by_side(layer: Any, x: Any) -> Any:
    """Queries, keys and values ``[B, T, …]`` of a layer that has a matrix for each."""
    import torch

    return torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)


def _convolved(layer: Any, qkv: Any, cache: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """``qkv [B, T, D]`` after the short convolution, whose state is the cache's; and the recurrent state, if there is one."""
    weight, bias, tokens = layer.conv1d.weight.squeeze(1), layer.conv1d.bias, qkv.shape[1]
    if cache is None:
        return causal_conv1d_fn(qkv.mT, weight, bias, kwargs.get("seq_idx"), activation=layer.activation).mT, None
    conv_state = cache.get_conv_state(layer.layer_idx, state_idx=0)
    state = cache.get_recurrent_state(layer.layer_idx, state_idx=0)
    if conv_state is not None and tokens == 1 and not _records(cache, layer):
        return causal_conv1d_update(qkv.mT, conv_state, weight, bias, layer.activation).mT, state
    longer = cache.update_conv_state(qkv.mT, layer.layer_idx, conv_kernel_size=layer.conv_kernel_size)
    y = causal_conv1d_fn(longer, weight, bias, kwargs.get("seq_idx"), activation=layer.activation)
    return y[..., -tokens:].mT, state


def _records(cache: Any, layer: Any) -> bool:
    """Whether the cache keeps what a layer's states were, to go back to; those of older versions of transformers do not."""
    recording = getattr(cache, "is_recording_past", None)
    return recording is not None and recording(layer.layer_idx)


def _recurrence(
    forms: tuple[Callable[..., tuple[Any, Any]], Callable[..., Any]],
    arrays: tuple[Any, ...],
    gate: Softplus | BoundedSigmoid,
    state: Any,
    layer: Any,
    cache: Any,
    kwargs: dict[str, Any],
) -> Any:
    """An operator on queries, keys, values, and logits of decays and of ``beta``. The state it ends in is the cache's.

    ``forms`` are the operator and its decoding, which has one more token overwrite the cache's state where it lies.
    """
    beta_map = "2sigmoid" if getattr(layer, "allow_neg_eigval", False) else "sigmoid"
    maps: dict[str, Any] = dict(qk_norm="l2", gate=gate, beta_map=beta_map)
    (operator, decode), offsets, (B, T, *_) = forms, kwargs.get("cu_seq_lens_q"), arrays[0].shape
    one = T == 1 and offsets is None and state is not None and len(state) == B  # of a pool decoding would take some
    if one and not wants_gradient(*arrays, gate.A_log, gate.dt_bias, state):
        return decode(*arrays, **maps, state=state)
    o, state = operator(*arrays, **maps, initial_state=state, output_final_state=cache is not None, cu_seqlens=offsets)
    if cache is not None:
        cache.update_recurrent_state(state, layer.layer_idx)
    return o


FORWARDS: dict[str, Callable[..., Any]] = {
    "BailingHybridDeltaAttention": kimi_delta_attention,
    "BambaMixer": mamba_2,
    "FalconH1Mixer": mamba_2,
    "Glm5NextTextLinearAttention": kimi_delta_attention,
    "GraniteMoeHybridMambaLayer": mamba_2,
    "KimiLinearDeltaAttention": kimi_delta_attention,
    "Mamba2Mixer": mamba_2,
    "NemotronHMamba2Mixer": mamba_2,
    "OlmoHybridGatedDeltaNet": gated_delta_net,
    "Qwen3NextGatedDeltaNet": gated_delta_net,
    "Qwen3_5GatedDeltaNet": gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": gated_delta_net,
    "Qwen4ExpTextGatedDeltaNet": gated_delta_net,
    "Zamba2MambaMixer": mamba_2,
}
"""Class names of transformers' mixers, and the forwards here that compute the same."""
