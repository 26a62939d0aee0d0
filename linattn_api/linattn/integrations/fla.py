"""Functions of flash-linear-attention 0.6 under their own names and signatures, and its layers on them.

>>> from linattn.integrations.fla import chunk_gated_delta_rule  # where it was: from fla.ops.gated_delta_rule import ...

Every parameter of theirs is named here, also those that they take out of ``**kwargs``. What differs from linattn's own
operators is only what fla's callers count on:

* ``q``, ``k`` and ``v`` of different dtypes are computed in the widest, and the output has the dtype of ``q``.
* ``state_v_first=True`` (once ``transpose_state_layout``) takes and gives states ``[N, HV, V, K]``: transposed views.
* ``cu_seqlens_cpu``, ``chunk_indices``, ``chunk_size``, ``disable_recompute``, ``safe_gate``, ``use_graph`` and
  ``max_num_seqs`` say how fla is to compute, never what. They are taken, and change nothing; chunk sizes that ``chunk_kda``
  refuses in fla it refuses here.
* ``reverse=True`` walks from the last token to the first.
* ``cp_context`` brings offsets of its own, and no states go in or out, as in fla; of its layouts the contiguous one is served.
* ``head_first=True``, ``gv`` of a delta rule, ``output_attentions=True`` and ``return_intermediate_states=True`` are refused
  by name, as :class:`linattn.Unsupported`; after :func:`enable` such a call goes to fla.

No parameter is read on the host, but for new offsets of a ``cp_context``, and a state goes in and out with no copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import linattn
from linattn.gates import BoundedSigmoid, Softplus

from ..errors import OptionError, Unsupported
from .seams import Integration

__all__ = [
    "FUNCTIONS",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "disable",
    "enable",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
]

Tensor = Any
Result = tuple[Any, Any]


# --- what all of them share


def _run(
    operator: Callable[..., Result],
    tokens: dict[str, Tensor],
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """An operator on ``tokens``, arrays ``[B, T, ...]`` by name, with what fla's callers count on around it."""
    dtype = tokens["q"].dtype
    tokens |= _in_one_dtype(tokens["q"], tokens["k"], tokens["v"])
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    if reverse:
        tokens = {name: x.flip(1) for name, x in tokens.items()}
        cu_seqlens, initial_state = _backwards(cu_seqlens, initial_state)
    o, state = operator(
        **tokens,
        initial_state=initial_state,
        output_final_state=bool(output_final_state),
        cu_seqlens=cu_seqlens,
        **options,
    )
    if reverse:
        o = o.flip(1)
        cu_seqlens, state = _backwards(cu_seqlens, state)
    if state_v_first and state is not None:
        state = state.transpose(-1, -2)
    return o.to(dtype), state


def _in_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """``q``, ``k`` and ``v`` in the widest dtype of the three."""
    if q.dtype == k.dtype == v.dtype:
        return {"q": q, "k": k, "v": v}
    from torch import promote_types

    dtype = promote_types(promote_types(q.dtype, k.dtype), v.dtype)
    return {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}


def _backwards(cu_seqlens: Tensor | None, state: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Offsets and states of packed sequences whose tokens are flipped, the last sequence first. A batch keeps its order."""
    if cu_seqlens is None:
        return None, state
    return (cu_seqlens[-1] - cu_seqlens).flip(0), None if state is None else state.flip(0)


def _v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """The state's layout, under its present name or its former one."""
    if state_v_first and transpose_state_layout is not None:
        raise OptionError("state_v_first: transpose_state_layout is its former name; pass one of the two")
    if transpose_state_layout is not None:
        warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=3)
    return bool(state_v_first or transpose_state_layout)


def _refuse(function: str, **given: Any) -> None:
    """Refuse by name what was given and would change the result."""
    for name, value in given.items():
        if value is not None and value is not False:
            shown = "=True" if value is True else ""
            raise Unsupported(f"{function}: {name}{shown} is not served by linattn")


def _placed(
    function: str, v: Tensor, cp_context: Any, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None
) -> dict[str, Any]:
    """Which tokens are whose: ``cp_context`` as linattn's ``context``, or else ``cu_seqlens``; and the states."""
    if cp_context is None:
        return {"initial_state": initial_state, "output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
    if initial_state is not None or output_final_state:
        raise Unsupported(f"{function}: initial_state and output_final_state do not go with cp_context")
    from .fla_ranks import plan_of

    return {"context": plan_of(cp_context, v.shape[1])}


def _beta_map(sigmoid: bool, allow_neg_eigval: bool) -> str | None:
    """``use_beta_sigmoid_in_kernel`` and ``allow_neg_eigval`` as linattn's ``beta_map``."""
    if allow_neg_eigval and not sigmoid:
        raise OptionError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True: it doubles the sigmoid")
    return ("2sigmoid" if allow_neg_eigval else "sigmoid") if sigmoid else None


def _gate(
    function: str, asked: bool, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None = None
) -> Softplus | BoundedSigmoid | None:
    """``use_gate_in_kernel`` and its parameters as a gate object; ``None`` where ``g`` is the log decay already."""
    if not asked:
        return None
    if A_log is None and lower_bound is None:
        raise OptionError(f"{function}: use_gate_in_kernel=True needs A_log, one number a head")
    heads = g.shape[2]
    A_log = g.new_zeros(heads) if A_log is None else A_log.reshape(-1)
    if dt_bias is not None:
        dt_bias = dt_bias.reshape(heads, -1).squeeze(-1)
    if lower_bound is None:
        return Softplus(A_log, dt_bias)
    return BoundedSigmoid(A_log, g.new_zeros(heads) if dt_bias is None else dt_bias, lower_bound)


# --- one decay a head, or none


def _simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None, reverse: bool = False, **options: Any
) -> Result:
    """The decays of tokens ``g [B, T, H]`` and of heads ``g_gamma [H]`` together, either, or none."""
    if g is not None:
        decays = g if g_gamma is None else g + g_gamma
        return _run(linattn.simple_gla, {"q": q, "k": k, "v": v, "g": decays}, reverse=reverse, **options)
    if g_gamma is not None:
        return _run(linattn.simple_gla, {"q": q, "k": k, "v": v}, g=g_gamma, reverse=reverse, **options)
    return _run(linattn.linear_attn, {"q": q, "k": k, "v": v}, reverse=reverse, **options)


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> Result:
    """:func:`linattn.simple_gla` as ``fla.ops.simple_gla.chunk_simple_gla``: decays ``g [B, T, H]``, ``g_gamma [H]``."""
    _refuse("chunk_simple_gla", head_first=head_first)
    return _simple_gla(
        q,
        k,
        v,
        g,
        g_gamma,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.simple_gla` as ``fla.ops.simple_gla.fused_chunk_simple_gla``; see :func:`chunk_simple_gla`."""
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.simple_gla` as ``fla.ops.simple_gla.fused_recurrent_simple_gla``; see :func:`chunk_simple_gla`."""
    return _simple_gla(
        q,
        k,
        v,
        g,
        g_gamma,
        reverse=reverse,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """:func:`linattn.simple_gla` as ``fla.ops.simple_gla.parallel_simple_gla``. Returns ``(o, None)``."""
    _refuse("parallel_simple_gla", output_attentions=output_attentions)
    return chunk_simple_gla(q, k, v, g, scale=scale, cu_seqlens=cu_seqlens)


def _retnet(q: Tensor) -> Tensor:
    return linattn.gates.retnet(q.shape[2], like=q)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> Result:
    """:func:`linattn.simple_gla` with RetNet's decays, as ``fla.ops.retention.chunk_retention``."""
    _refuse("chunk_retention", head_first=head_first)
    return chunk_simple_gla(q, k, v, None, _retnet(q), scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.simple_gla` with RetNet's decays, as ``fla.ops.retention.fused_chunk_retention``."""
    return chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.simple_gla` with RetNet's decays, as ``fla.ops.retention.fused_recurrent_retention``."""
    v_first = _v_first(state_v_first, transpose_state_layout)
    return fused_recurrent_simple_gla(
        q, k, v, None, _retnet(q), scale, initial_state, output_final_state, reverse, v_first, cu_seqlens
    )


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.simple_gla` with RetNet's decays, as ``fla.ops.retention.parallel_retention``. Returns ``(o, None)``."""
    _refuse("parallel_retention", output_attentions=output_attentions)
    return chunk_retention(q, k, v, scale, cu_seqlens=cu_seqlens)


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> Result:
    """:func:`linattn.simple_gla` with Lightning's decays, as ``fla.ops.lightning_attn.chunk_lightning_attn``."""
    _refuse("chunk_lightning_attn", head_first=head_first)
    decays = linattn.gates.lightning(q.shape[2], layer_idx, num_layers, like=q)
    return chunk_simple_gla(q, k, v, None, decays, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.simple_gla` with Lightning's decays, as ``fla.ops.lightning_attn.fused_recurrent_lightning_attn``."""
    decays = linattn.gates.lightning(q.shape[2], layer_idx, num_layers, like=q)
    return fused_recurrent_simple_gla(
        q, k, v, None, decays, scale, initial_state, output_final_state, reverse, cu_seqlens=cu_seqlens
    )


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.linear_attn` as ``fla.ops.linear_attn.fused_recurrent_linear_attn``.

    With ``normalize`` a state is a pair: the sum of ``kᵀv`` ``[N, H, K, V]`` and that of ``k`` ``[N, 1, H, K]``; a single
    array is the first of them, beside zeros.
    """
    given: dict[str, Any] = {
        "scale": scale,
        "output_final_state": output_final_state,
        "reverse": reverse,
        "cu_seqlens": cu_seqlens,
    }
    if not normalize:
        return _run(linattn.linear_attn, {"q": q, "k": k, "v": v}, initial_state=initial_state, **given)
    joined = None if initial_state is None else _join(*_pair(initial_state))
    o, state = _run(linattn.linear_attn, {"q": q, "k": k, "v": v}, normalize=True, initial_state=joined, **given)
    return o, (None, None) if state is None else (state[..., :-1], state[..., -1][:, None])


def _pair(state: Any) -> tuple[Tensor, Tensor]:
    """A normalised state as fla has it; one that came without its sum of keys has zeros."""
    kv, z = state if _is_pair(state) else (state, None)
    return kv, kv.new_zeros(kv.shape[0], 1, *kv.shape[1:3]) if z is None else z


def _is_pair(state: object) -> bool:
    return isinstance(state, tuple)


def _join(kv: Tensor, z: Tensor) -> Tensor:
    """Both sums as linattn has them: that of the keys is one more value column."""
    import torch

    return torch.cat([kv, z[:, 0, :, :, None].to(kv.dtype)], -1)


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.linear_attn` as ``fla.ops.linear_attn.chunk_linear_attn``, which normalises by default; see
    :func:`fused_recurrent_linear_attn`.
    """
    return fused_recurrent_linear_attn(q, k, v, scale, initial_state, output_final_state, False, normalize, cu_seqlens)


def fused_chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.linear_attn` as ``fla.ops.linear_attn.fused_chunk_linear_attn``; see :func:`chunk_linear_attn`."""
    return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


# --- a decay for each channel


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """:func:`linattn.gla` as ``fla.ops.gla.chunk_gla``: log decays ``g [B, T, H, K]``."""
    return fused_recurrent_gla(q, k, v, g, None, scale, initial_state, output_final_state, False, state_v_first, cu_seqlens)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.gla` as ``fla.ops.gla.fused_recurrent_gla``: log decays ``gk [B, T, H, K]``, ``gv [B, T, H, V]``."""
    tokens = {"q": q, "k": k, "v": v}
    if gk is not None or gv is not None:
        tokens["g"] = q.new_zeros(1).expand(q.shape) if gk is None else gk
    if gv is not None:
        tokens["gv"] = gv
    return _run(
        linattn.gla if "g" in tokens else linattn.linear_attn,
        tokens,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.rwkv6` as ``fla.ops.rwkv6.fused_recurrent_rwkv6``: log decays ``w [B, T, H, K]``, bonus ``u [H, K]``."""
    return _run(
        linattn.rwkv6,
        {"q": r, "k": k, "v": v, "g": w},
        u=u,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )


def chunk_rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> Result:
    """:func:`linattn.rwkv6` as ``fla.ops.rwkv6.chunk_rwkv6``; see :func:`fused_recurrent_rwkv6`."""
    _refuse("chunk_rwkv6", head_first=head_first)
    return fused_recurrent_rwkv6(r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


# --- delta rules


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    l2norm: bool,
    **options: Any,
) -> Result:
    """The delta rule of a decay's shape: none, one a head, one a channel. No ``beta`` is a ``beta`` of one."""
    tokens = {"q": q, "k": k, "v": v, "beta": v.new_ones(1).expand(v.shape[:3]) if beta is None else beta}
    if g is None:
        return _run(linattn.delta_rule, tokens, qk_norm="l2" if l2norm else None, **options)
    operator = linattn.kda if len(g.shape) == 4 else linattn.gated_delta_rule
    return _run(operator, {**tokens, "g": g}, qk_norm="l2" if l2norm else None, **options)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> Result:
    """:func:`linattn.delta_rule` as ``fla.ops.delta_rule.chunk_delta_rule``, in float32 too."""
    _refuse("chunk_delta_rule", head_first=head_first)
    return fused_recurrent_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.delta_rule` as ``fla.ops.delta_rule.fused_recurrent_delta_rule``; ``beta`` is one by default."""
    return _delta(
        q,
        k,
        v,
        None,
        beta,
        use_qk_l2norm_in_kernel,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
) -> Result:
    """:func:`linattn.gated_delta_rule` as ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``.

    Args:
        q: Queries ``[B, T, H, K]``.
        k: Keys ``[B, T, H, K]``.
        v: Values ``[B, T, HV, V]``.
        g: Log decays ``[B, T, HV]``; with ``use_gate_in_kernel``, what ``−exp(A_log) · softplus(g + dt_bias)`` makes one of.
        beta: Writing strengths ``[B, T, HV]``, or their logits with ``use_beta_sigmoid_in_kernel``.
        scale: Default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``, or ``[N, HV, V, K]`` with ``state_v_first``.
        output_final_state: Return the state after the last token, in the same layout, float32; else ``None``.
        use_qk_l2norm_in_kernel: Queries and keys of length one.
        use_beta_sigmoid_in_kernel: ``beta`` is a logit.
        allow_neg_eigval: Twice the sigmoid.
        state_v_first: The layout of states. ``transpose_state_layout`` is its former name.
        cu_seqlens: Offsets ``[N+1]`` of packed sequences.
        cu_seqlens_cpu: Changes nothing.
        chunk_indices: Changes nothing.
        cp_context: Of ``fla.ops.cp.build_cp_context``: who has which tokens; no states then, and no ``cu_seqlens``.
        use_gate_in_kernel: ``g`` is a raw projection.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``.
        chunk_size: Changes nothing.
        transpose_state_layout: See ``state_v_first``.
        head_first: Refused, if true.

    Returns:
        ``(o, final_state)``, ``o [B, T, HV, V]``.
    """
    _refuse("chunk_gated_delta_rule", head_first=head_first)
    return _delta(
        q,
        k,
        v,
        g,
        beta,
        use_qk_l2norm_in_kernel,
        gate=_gate("chunk_gated_delta_rule", use_gate_in_kernel, g, A_log, dt_bias),
        beta_map=_beta_map(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        **_placed("chunk_gated_delta_rule", v, cp_context, initial_state, output_final_state, cu_seqlens),
    )


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.gated_delta_rule`, or :func:`linattn.kda` with ``gk [B, T, HV, K]``, as
    ``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule``; for its parameters see :func:`chunk_gated_delta_rule`.
    """
    name = "fused_recurrent_gated_delta_rule"
    _refuse(name, gv=gv)
    gate = None
    if use_gate_in_kernel:
        if g is None:
            raise OptionError(f"{name}: use_gate_in_kernel=True needs g, the raw projection")
        gate = _gate(name, True, g, A_log, dt_bias)
    if gk is not None and gate is not None:  # the decay of the head is a gate's, that of the channel is there already
        g, gate = gate(g), None
    decay = g if gk is None else gk if g is None else g[..., None] + gk
    return _delta(
        q,
        k,
        v,
        decay,
        beta,
        use_qk_l2norm_in_kernel,
        **({} if gate is None else {"gate": gate}),
        beta_map=_beta_map(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


# their short names, for the same two functions
chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    chunk_indices: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
) -> Result:
    """:func:`linattn.kda` as ``fla.ops.kda.chunk_kda``: log decays ``g [B, T, HV, K]``.

    With ``use_gate_in_kernel``, ``g`` is a raw projection of ``−exp(A_log) · softplus(g + dt_bias)``, ``dt_bias [HV · K]``, or
    with ``lower_bound`` of ``lower_bound · sigmoid(exp(A_log) · (g + dt_bias))``. A ``chunk_size`` that fla has not is an error
    here as well. The other parameters are those of :func:`chunk_gated_delta_rule`.
    """
    name = "chunk_kda"
    _refuse(name, return_intermediate_states=return_intermediate_states, head_first=head_first)
    if chunk_size not in (None, 32, 64):
        raise OptionError(f"{name}: chunk_size must be 32 or 64, got {chunk_size}")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise OptionError(f"{name}: safe_gate=True with use_gate_in_kernel=True needs lower_bound")
    return _delta(
        q,
        k,
        v,
        g,
        beta,
        use_qk_l2norm_in_kernel,
        gate=_gate(name, use_gate_in_kernel, g, A_log, dt_bias, lower_bound),
        beta_map=_beta_map(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        **_placed(name, v, cp_context, initial_state, output_final_state, cu_seqlens),
    )


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.kda` as ``fla.ops.kda.fused_recurrent_kda``, with gradients; see :func:`chunk_kda`."""
    return _delta(
        q,
        k,
        v,
        g,
        beta,
        use_qk_l2norm_in_kernel,
        gate=_gate("fused_recurrent_kda", use_gate_in_kernel, g, A_log, dt_bias, lower_bound),
        beta_map=_beta_map(use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=_v_first(state_v_first, transpose_state_layout),
        cu_seqlens=cu_seqlens,
    )


# --- diagonal plus low rank


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.dplr` as ``fla.ops.generalized_delta_rule.fused_recurrent_dplr_delta_rule``: ``a``, ``b`` and log decays
    ``gk``, each ``[B, T, H, K]``.
    """
    return _run(
        linattn.dplr,
        {"q": q, "k": k, "v": v, "g": gk, "a": a, "b": b},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
    *,
    head_first: bool | None = None,
) -> Result:
    """:func:`linattn.dplr` as ``fla.ops.generalized_delta_rule.chunk_dplr_delta_rule``, whose ``lower_bound`` promises
    something of ``gk`` and changes nothing; see :func:`fused_recurrent_dplr_delta_rule`.
    """
    name = "chunk_dplr_delta_rule"
    _refuse(name, head_first=head_first)
    tokens = {"q": q, "k": k, "v": v, "g": gk, "a": a, "b": b}
    placed = _placed(name, v, cp_context, initial_state, output_final_state, cu_seqlens)
    return _run(linattn.dplr, tokens, scale=scale, **placed)


def chunk_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
    head_first: bool | None = None,
) -> Result:
    """:func:`linattn.dplr` that never decays, as ``fla.ops.generalized_delta_rule.chunk_iplr_delta_rule``."""
    _refuse("chunk_iplr_delta_rule", head_first=head_first)
    return fused_recurrent_iplr_delta_rule(q, k, v, a, b, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.dplr` that never decays, as ``fla.ops.generalized_delta_rule.fused_recurrent_iplr_delta_rule``."""
    never = k.new_zeros(1).expand(k.shape)
    return fused_recurrent_dplr_delta_rule(
        q, k, v, a, b, never, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
) -> Result:
    """:func:`linattn.dplr` as ``fla.ops.rwkv7.chunk_rwkv7``: log decays ``w [B, T, H, K]``; ``scale`` is 1 by default."""
    return chunk_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens, cp_context=cp_context)


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.dplr` as ``fla.ops.rwkv7.fused_recurrent_rwkv7``, which returns the final state by default."""
    return fused_recurrent_dplr_delta_rule(r, k, v, a, b, w, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """:func:`linattn.dplr` as ``fla.ops.rwkv7.fused_mul_recurrent_rwkv7``: removal keys ``kk`` and rates ``a``, which make
    ``a = −kk`` and ``b = kk ∘ a``.
    """
    return fused_recurrent_dplr_delta_rule(
        r, k, v, -kk, kk * a, w, scale, initial_state, output_final_state, reverse, cu_seqlens
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"fla.ops.{module}.{function.__name__}": function
    for module, functions in {
        "delta_rule": (chunk_delta_rule, fused_recurrent_delta_rule),
        "gated_delta_rule": (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
        "generalized_delta_rule": (
            chunk_dplr_delta_rule,
            chunk_iplr_delta_rule,
            fused_recurrent_dplr_delta_rule,
            fused_recurrent_iplr_delta_rule,
        ),
        "gla": (chunk_gla, fused_recurrent_gla),
        "kda": (chunk_kda, fused_recurrent_kda),
        "lightning_attn": (chunk_lightning_attn, fused_recurrent_lightning_attn),
        "linear_attn": (chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn),
        "retention": (chunk_retention, fused_chunk_retention, fused_recurrent_retention, parallel_retention),
        "rwkv6": (chunk_rwkv6, fused_recurrent_rwkv6),
        "rwkv7": (chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7),
        "simple_gla": (chunk_simple_gla, fused_chunk_simple_gla, fused_recurrent_simple_gla, parallel_simple_gla),
    }.items()
    for function in functions
}
"""Dotted names of fla, and the functions here that mean the same."""


_INTEGRATION = Integration("fla", "flash-linear-attention", FUNCTIONS, adapter="fla")
enable = _INTEGRATION.enable
disable = _INTEGRATION.disable
