"""The functions of ``mamba_ssm`` (2.3) that are Mamba-2's, on ``linattn.ssd``, ``decode_ssd`` and ``gated_rms_norm``.

>>> from linattn.integrations.mamba_ssm import mamba_chunk_scan_combined, selective_state_update

Its states have values before keys, ``[B, H, P, N]``; what linattn gets is a transposed view of them. Mamba-1 has a decay for
each entry of its state, which is no linear attention: ``selective_scan_fn`` is not here, and a ``selective_state_update``
whose ``A`` is not one number a head is refused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError, ShapeError, Unsupported
from ..frameworks import framework_of
from ..ops import decode_ssd, gated_rms_norm, recurrent_ssd, simple_gla, ssd
from ..ops.ssd import to_simple_gla
from ._slots import Slots, wants_gradient
from .causal_conv1d import causal_conv1d_fn
from .seams import Integration

__all__ = [
    "FUNCTIONS",
    "RMSNormGated",
    "disable",
    "enable",
    "layernorm_fn",
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "rmsnorm_fn",
    "selective_state_update",
]

UNLIMITED = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = UNLIMITED,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """State-space duality, as ``mamba_ssm.ops.triton.ssd_combined`` calls it.

    Args:
        x: Inputs ``[B, L, H, P]``.
        dt: Step sizes, or projections of them, ``[B, L, H]``.
        A: Decay rate ``[H]``, one number a head, ``≤ 0``.
        B: Input projection ``[B, L, G, N]``; head ``j`` uses group ``j // (H / G)``.
        C: Output projection ``[B, L, G, N]``.
        chunk_size: Changes nothing here: the backend chooses its own.
        D: Skip ``[H]`` or ``[H, P]``. Default nothing.
        z: Gate, like ``x``: the output is multiplied by ``silu(z)``. Default nothing.
        dt_bias: Added to ``dt``, ``[H]``. Default nothing.
        initial_states: States before the first token ``[B, H, P, N]``, any strides. Default zeros.
        seq_idx: Which sequence each token is of ``[B, L]``, integers that change where one begins: the state starts from zeros
            there. An initial state is of a sequence ``0``, as it is in the package. Stays on its device. Default: one a row.
        cu_seqlens: Where the sequences of ``seq_idx`` begin, and the last one ends ``[N+1]``; read for
            ``return_varlen_states`` only.
        dt_softplus: Whether a step is the softplus of ``dt + dt_bias``. Default False.
        dt_limit: The least and the greatest step. Default ``(0.0, inf)``.
        return_final_states: Return the states after the last tokens as well. Default False.
        return_varlen_states: Return the states after the last token of every sequence as well. Default False.
        state_dtype: Changes nothing here: states between chunks are float32 (float64 for float64 inputs).

    Returns:
        ``y``, of the shape and dtype of ``x``, or a tuple of it, of final states ``[B, H, P, N]`` and of states
        ``[N, H, P, N]``, as far as these are asked for. States are float32, transposed views.

    Raises:
        Unsupported: ``A`` is not one number a head.
        OptionError: ``return_varlen_states`` without ``cu_seqlens`` and ``seq_idx``.
        ArgumentError: As :func:`linattn.ssd` raises.
    """
    _one_rate_a_head("mamba_chunk_scan_combined", A)
    values, keys, queries, gate = _of_one_dtype(x, B, C, z)
    arrays: dict[str, Any] = dict(x=values, dt=dt, A=A, B=keys, C=queries)
    options: dict[str, Any] = dict(D=D, z=gate, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=tuple(dt_limit))
    start = None if initial_states is None else initial_states.mT
    if return_varlen_states:
        y, states = _packed(arrays, options, start, seq_idx, cu_seqlens)
        return (y.to(x.dtype), states[-1:], states) if return_final_states else (y.to(x.dtype), states)
    if seq_idx is None:
        y, final = ssd(**arrays, **options, initial_state=start, output_final_state=return_final_states)
    else:
        y, final = _with_resets(arrays, options, start, seq_idx, return_final_states)
    return y.to(x.dtype) if final is None else (y.to(x.dtype), final.mT)


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """:func:`mamba_chunk_scan_combined` without states: arguments, result and errors are those of it."""
    return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus=dt_softplus)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = UNLIMITED,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """A Mamba-2 mixer between its projections, as ``mamba_ssm.ops.triton.ssd_combined`` calls it.

    Args:
        zxbcdt: What the input projection gives ``[B, L, 2 F + 2 H P + 2 G N + H]``: the two halves of a SwiGLU, ``F`` columns
            each and none in most models; the gate; what is convolved: values, ``B`` and ``C``; the step sizes.
        conv1d_weight: Filters ``[H P + 2 G N, W]``.
        conv1d_bias: ``[H P + 2 G N]``, or ``None``.
        dt_bias: Added to the step sizes ``[H]``, whose softplus is taken.
        A: Decay rate ``[H]``.
        D: Skip ``[H]`` or ``[H, P]``.
        chunk_size: Changes nothing here: the backend chooses its own.
        initial_states: States before the first token ``[B, H, P, N]``, any strides. Default zeros.
        seq_idx: Which sequence each token is of ``[B, L]``, for convolution and states. Default: one a row.
        dt_limit: The least and the greatest step. Default ``(0.0, inf)``.
        return_final_states: Return the states after the last tokens as well. Default False.
        activation: Of the convolution: ``"silu"`` or ``"swish"``, which are one, or ``None``.
        rmsnorm_weight: Weight ``[H P]`` of the norm over each of the ``G`` groups of columns. Default: no norm, only the gate.
        rmsnorm_eps: Added to the mean of squares. Default 1e-6.
        outproj_weight: Output projection ``[E, F + H P]``. Default: none is made.
        outproj_bias: ``[E]``. Default nothing.
        headdim: ``P``, needed where ``D`` is ``[H]``.
        ngroups: ``G``. Default 1.
        norm_before_gate: False multiplies by the gate before the norm. Default True.
        state_dtype: Changes nothing here: states between chunks are float32 (float64 for float64 inputs).

    Returns:
        ``y [B, L, E]``, or ``[B, L, F + H P]`` without a projection; ``(y, final_states)`` if these are asked for.

    Raises:
        OptionError: ``D`` is ``[H]`` and ``headdim`` is missing; a bias of no projection.
        ShapeError: The columns of ``zxbcdt`` are not those of the other arguments.
        ArgumentError: As :func:`linattn.short_conv`, :func:`linattn.ssd` and :func:`linattn.gated_rms_norm` raise.
    """
    function = "mamba_split_conv1d_scan_combined"
    if outproj_weight is None and outproj_bias is not None:
        raise OptionError(f"{function}: outproj_bias needs outproj_weight")
    H, P = _heads(function, D, headdim)
    width, mixed = H * P, conv1d_weight.shape[0]
    N = (mixed - width) // ngroups // 2
    rest = zxbcdt.shape[-1] - width - mixed - H
    if rest < 0 or rest % 2 or N < 1 or mixed != width + 2 * ngroups * N:
        raise ShapeError(
            f"{function}: zxbcdt must have 2 F + 2 H P + 2 G N + H columns and conv1d_weight H P + 2 G N rows, "
            f"got {zxbcdt.shape[-1]} and {mixed} with H = {H}, P = {P}, G = {ngroups}"
        )
    mlp, z, xBC, dt = torch.split(zxbcdt, [rest, width, mixed, H], dim=-1)
    xBC = causal_conv1d_fn(xBC.mT, conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation).mT
    x, keys, queries = torch.split(xBC, [width, ngroups * N, ngroups * N], dim=-1)
    heads, groups = (H, P), (ngroups, N)
    scanned = mamba_chunk_scan_combined(
        x.reshape(*x.shape[:2], *heads),
        dt,
        A,
        keys.reshape(*x.shape[:2], *groups),
        queries.reshape(*x.shape[:2], *groups),
        chunk_size,
        D=D,
        z=z.reshape(*x.shape[:2], *heads) if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
    )
    y, final = scanned if return_final_states else (scanned, None)
    y = y.flatten(-2)
    if rmsnorm_weight is not None:
        y = rmsnorm_fn(y, rmsnorm_weight, None, z, rmsnorm_eps, width // ngroups, norm_before_gate)
    if rest:
        gate, up = torch.split(mlp, [rest // 2, rest // 2], dim=-1)
        y = torch.cat([F.silu(gate) * up, y], dim=-1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, final) if return_final_states else y


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One more token, as ``mamba_ssm.ops.triton.selective_state_update`` calls it.

    ``A``, ``dt`` and ``dt_bias`` are one number a head, expanded; that they are is seen from their strides, and nothing is
    read. Without heads, ``H`` is 1 and its dimension is missing everywhere. Where a gradient is asked for, it flows through
    the token and, by what is written to ``state``, from call to call.

    Args:
        state: States ``[P, H, V, K]``, any strides and float dtype; overwritten.
        x: Inputs ``[B, H, V]``.
        dt: Step sizes, or projections of them, ``[B, H, V]``, expanded along ``V``.
        A: Decay rate ``[H, V, K]``, expanded along ``V`` and ``K``.
        B: Input projection ``[B, G, K]``; head ``j`` uses group ``j // (H / G)``.
        C: Output projection ``[B, G, K]``.
        D: Skip ``[H, V]``. Default nothing.
        z: Gate, like ``x``: the output is multiplied by ``silu(z)``. Default nothing.
        dt_bias: Added to ``dt``, ``[H, V]``, expanded along ``V``. Default nothing.
        dt_softplus: Whether a step is the softplus of ``dt + dt_bias``. Default False.
        state_batch_indices: Which state is each sequence's ``[B]``. A negative one is padding: its output is zero and nothing
            is written. Default: state ``n`` for sequence ``n``.

    Returns:
        Outputs, of the shape and dtype of ``x``.

    Raises:
        Unsupported: ``A``, ``dt`` or ``dt_bias`` is not expanded from one number a head, as in Mamba-1.
        ArgumentError: As :func:`linattn.decode_ssd` raises.
    """
    if state.dim() == 3:
        tokens: Any = [None if a is None else a[:, None] for a in (state, x, dt, B, C, z)]
        parameters: Any = [None if a is None else a[None] for a in (A, D, dt_bias)]
        (pool, values, step, keys, queries, gate), (rate, skip, bias) = tokens, parameters
        heads = (pool, values, step, rate, keys, queries, skip, gate, bias)
        return selective_state_update(*heads, dt_softplus, state_batch_indices)[:, 0]
    rate = _one_number(_one_number(A, "A"), "A")
    step = _one_number(dt, "dt")
    bias = None if dt_bias is None else _one_number(dt_bias, "dt_bias")
    values, keys, queries, gate = (None if a is None else a[:, None] for a in _of_one_dtype(x, B, C, z))
    arrays: dict[str, Any] = dict(x=values, dt=step[:, None], A=rate, B=keys, C=queries)
    options: dict[str, Any] = dict(D=D, z=gate, dt_bias=bias, dt_softplus=dt_softplus)
    if wants_gradient(state, *arrays.values(), D, gate, bias):
        slots = Slots(state, x.shape[0], state_batch_indices)
        y, final = recurrent_ssd(**arrays, **options, initial_state=slots.read().mT, output_final_state=True)
        assert final is not None
        slots.write(final.mT)
        y = slots.masked(y)
    else:
        y = decode_ssd(**arrays, **options, state=state.mT, state_indices=state_batch_indices)
    return y[:, 0].to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Gated RMS norm, as ``mamba_ssm.ops.triton.layernorm_gated`` calls it: ``(norm(x) · weight + bias) · silu(z)``, or
    ``norm(x · silu(z)) · weight + bias``.

    Args:
        x: What is normed ``[..., D]``.
        weight: ``[D]``.
        bias: ``[D]``, or ``None``.
        z: The gate's projection, like ``x``. Default: no gate.
        eps: Added to the mean of squares. Default 1e-6.
        group_size: Columns that are normed together; must divide ``D``. Default all of them.
        norm_before_gate: False multiplies by the gate before the norm. Default True.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Raises:
        ArgumentError: As :func:`linattn.gated_rms_norm` raises.
    """
    if z is not None and (bias is None or not norm_before_gate):
        values, gate = _of_one_dtype(x, z)
        y = gated_rms_norm(values, gate, weight, eps=eps, norm_before_gate=norm_before_gate, group_size=group_size)
        return (y if bias is None else y + bias).to(x.dtype)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    size = group_size or x.shape[-1]
    y = F.rms_norm(x.to(dtype).reshape(*x.shape[:-1], -1, size), (size,), eps=eps).flatten(-2) * weight
    y = y if bias is None else y + bias
    return (y if z is None else y * F.silu(z.to(dtype))).to(x.dtype)


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """:func:`rmsnorm_fn` where ``is_rms_norm``, with arguments and result as there.

    Raises:
        Unsupported: It is not: linattn has no norm that takes the mean away.
    """
    if not is_rms_norm:
        raise Unsupported("layernorm_fn takes the mean away unless is_rms_norm=True: linattn has RMS norms only")
    return rmsnorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate)


class RMSNormGated(torch.nn.Module):
    """A gated RMS norm with a weight, as ``mamba_ssm.ops.triton.layernorm_gated.RMSNorm``.

    Args:
        hidden_size: ``D``.
        eps: Added to the mean of squares. Default 1e-5.
        group_size: Columns that are normed together; must divide ``D``. Default all of them.
        norm_before_gate: False multiplies by the gate before the norm. Default True.
        device: Of the weight.
        dtype: Of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Ones."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """``x [..., D]`` normed, and multiplied by ``silu(z)`` where ``z`` is given."""
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)


def _one_rate_a_head(function: str, A: Tensor) -> None:
    if A.dim() != 1:
        raise Unsupported(
            f"{function}: A must be one number a head, [H], got shape {tuple(A.shape)}: with a decay for each entry of the "
            "state (Mamba-1) there is no chunk form"
        )


def _one_number(x: Tensor, name: str) -> Tensor:
    """Without its last dimension, along which it is one number, expanded."""
    if x.shape[-1] > 1 and x.stride(-1) != 0:
        raise Unsupported(
            f"selective_state_update: {name} must be one number a head, expanded, got shape {tuple(x.shape)} with strides "
            f"{x.stride()}: a decay for each entry of the state (Mamba-1) is no linear attention"
        )
    return x[..., 0]


def _of_one_dtype(*tensors: Tensor | None) -> list[Any]:
    """All in the widest dtype among them."""
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in tensors if x is not None])
    return [None if x is None else x.to(dtype) for x in tensors]


def _heads(function: str, D: Tensor, headdim: int | None) -> tuple[int, int]:
    """``H`` and ``P``."""
    if D.dim() == 2:
        return D.shape[0], D.shape[1]
    if headdim is None:
        raise OptionError(f"{function}: headdim is needed where D is [H], got D of shape {tuple(D.shape)} and headdim=None")
    return D.shape[0], headdim


def _with_resets(
    arrays: dict[str, Any], options: dict[str, Any], start: Tensor | None, seq_idx: Tensor, output_final_state: bool
) -> tuple[Any, Any]:
    """``ssd`` as a scalar decay per head, which is none at all (``-inf``) where a sequence begins."""
    lowered = to_simple_gla(framework_of(seq_idx), arrays, options)
    begins = torch.cat([seq_idx[:, :1] != 0, seq_idx[:, 1:] != seq_idx[:, :-1]], dim=1)
    lowered.arrays["g"] = lowered.arrays["g"].masked_fill(begins[..., None], float("-inf"))
    result = simple_gla(**lowered.arrays, scale=1.0, initial_state=start, output_final_state=output_final_state)
    return lowered.finish(result[0], result[1])


def _packed(
    arrays: dict[str, Any],
    options: dict[str, Any],
    start: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Any, Any]:
    """Outputs, and the states after every sequence."""
    if cu_seqlens is None or seq_idx is None:
        raise OptionError("mamba_chunk_scan_combined: return_varlen_states needs cu_seqlens and seq_idx")
    if start is not None:  # of the first sequence
        start = F.pad(start, (0, 0, 0, 0, 0, 0, 0, cu_seqlens.shape[0] - 2))
    y, states = ssd(**arrays, **options, initial_state=start, output_final_state=True, cu_seqlens=cu_seqlens)
    assert states is not None
    return y, states.mT


_SSD = "mamba_ssm.ops.triton.ssd_combined"
_NORM = "mamba_ssm.ops.triton.layernorm_gated"

FUNCTIONS = {
    f"{_SSD}.mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    f"{_SSD}.mamba_chunk_scan": mamba_chunk_scan,
    f"{_SSD}.mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    "mamba_ssm.ops.triton.selective_state_update.selective_state_update": selective_state_update,
    f"{_NORM}.rmsnorm_fn": rmsnorm_fn,
    f"{_NORM}.layernorm_fn": layernorm_fn,
}
"""Of the package's functions, those that are served, and by which of ours."""

_integration = Integration("mamba_ssm", "mamba-ssm", FUNCTIONS)
enable = _integration.enable
disable = _integration.disable
