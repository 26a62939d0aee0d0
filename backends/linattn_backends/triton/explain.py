"""What ``explain`` says of a call: its kernels, from the variants that its launches take them from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from linattn.plugin import Call

from .conv import config as conv
from .delta import config as delta
from .diagonal import config as diagonal
from .host.variant import Facts, Stage, Variant, described
from .maps import config as maps
from .mixed import config as mixed
from .norm import config as norm
from .normalizer import config as normalizer
from .normalizer.config import before_division, operands
from .recurrent import config as recurrent
from .runtime.device import Properties, properties
from .ssd import config as ssd

__all__ = ["details_of"]

DELTA = ("delta_rule", "gated_delta_rule", "kda", "dplr")
CORES = {"ssd": "simple_gla"}
"""Families whose recurrence is another's."""
HOPPER = Properties(num_sms=132, large_smem=True, not_hopper=None)


def details_of(call: Call, device: torch.device | None) -> str:
    """For ``explain``: the kernels that a call takes on ``device``; ``None`` is one of CUDA that this process has not.

    Arrays are taken to be aligned, and sequences to be whole: those that are cut into segments take kernels besides.
    """
    if device is not None:
        return described(*variants_of(call, properties(device)))
    said = described(*variants_of(call, HOPPER))
    return f"{said} (on Hopper; elsewhere plain ones)" if "_sm90" in said else said


def variants_of(call: Call, device: Properties) -> tuple[Variant, Variant | None]:
    """The variants of a call's forward and, if it has gradients, its backward pass."""
    if call.op in ("short_conv", "gated_rms_norm"):
        return companion_variants(call, device)
    if call.op == "mixed_attn":
        return mixed_variants(call, dict(call.dims)["L"])
    if not call.option("causal", True):
        return mixed_variants(call, None)
    chunked = delta_variants if call.op in DELTA else diagonal_variants
    forward, backward = chunked(call, device)
    if call.form != "chunk":  # gradients are the chunk form's
        V = value_width(call) if call.form == "decode" else call.V
        forward = recurrent.variant(call.K, V, call.T == 1 or call.op == "dplr")
    if call.option("normalize") and call.form != "decode":
        return with_normalizer(call, forward, backward)
    if call.op == "ssd":
        return with_surroundings(call, forward, backward)
    mapped = call.form != "decode" and (call.gate is not None or call.option("beta_map") is not None)
    return with_scalar_maps(call, forward, backward) if mapped else (forward, backward)


def with_scalar_maps(call: Call, forward: Variant, backward: Variant | None) -> tuple[Variant, Variant | None]:
    """The variants with those stages before and after that make log decays and writing strengths, and gradients of raw ones."""
    before, after = (maps.variant(call.HV, back).stages for back in (False, True))
    forward = replace(forward, stages={**before, **forward.stages})
    return forward, backward and replace(backward, stages={**backward.stages, **after})


def with_normalizer(call: Call, forward: Variant, backward: Variant | None) -> tuple[Variant, Variant | None]:
    """The variants with the stages of the normaliser: forwards behind the others, backwards around them."""
    ahead, behind = (
        {f"normalizer_{name}": stage for name, stage in normalizer.variant(call.K, call.V, back).stages.items()}
        for back in (False, True)
    )
    first = {"normalizer_quotients": behind.pop("normalizer_quotients")}
    forward = replace(forward, stages={**forward.stages, **ahead})
    return forward, backward and replace(backward, stages={**first, **backward.stages, **behind})


def with_surroundings(call: Call, forward: Variant, backward: Variant | None) -> tuple[Variant, Variant | None]:
    """The core's variants between the stages of ``ssd`` that make what it takes, and go on with what it gives."""
    skip, gated = call.ranks.get("D", 0), call.has("z")
    ahead = ssd.variant(call.V, skip, gated, False, takes_weights(forward)).stages
    forward = replace(forward, stages={**before(ahead), **forward.stages, **after(ahead)})
    if backward is None:
        return forward, None
    softplus, (_, most) = bool(call.option("dt_softplus")), call.option("dt_limit")
    weighted = takes_weights(backward) and ssd.weights_have_slopes(softplus, most, skip)
    again, behind = (ssd.variant(call.V, skip, gated, back, weighted).stages for back in (False, True))
    made = {f"{name}_again": stage for name, stage in before(again).items()}
    return forward, replace(backward, stages={**made, **after(behind), **backward.stages, **before(behind)})


def takes_weights(core: Variant) -> bool:
    """Whether kernels of the diagonal core take weights of values; those of the recurrent form do not."""
    return isinstance(core, diagonal.DiagonalVariant) and core.takes_weights


def before(stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """The stage of step sizes, or of the values that are made with them."""
    return {f"ssd_{name}": stages[name] for name in ("inputs", "steps") if name in stages}


def after(stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """The stage of a skip and a gate, if there is one."""
    return {"ssd_outputs": stages["outputs"]} if "outputs" in stages else {}


def companion_variants(call: Call, device: Properties) -> tuple[Variant, Variant | None]:
    """Variants of a convolution or a norm, forward and backward; a size that a trace leaves open is taken to be large."""
    sizes, width = call.sizes, getattr(torch, call.dtype).itemsize
    D = sizes["D"]
    passes = (False, True) if call.needs_grad else (False,)
    if call.op == "gated_rms_norm":
        group = call.option("group_size") or D
        found = [norm.variant(group, width, backward) for backward in passes]
    elif call.form == "decode":
        found = [conv.token_variant(D)]
    else:
        B, T = (sizes[symbol] or 1 << 12 for symbol in "BT")
        found = [conv.variant(B, T, D, sizes["W"], width, device.num_sms, backward) for backward in passes]
    return found[0], found[1] if len(found) > 1 else None


def mixed_variants(call: Call, L: int | None) -> tuple[Variant, Variant | None]:
    """Variants of ``mixed_attn`` or, without widths ``L``, of the operator that has states alone."""
    widths = (1, call.K, value_width(call)) if L is None else (call.K, L, call.V)
    dtype = getattr(torch, call.dtype)
    one = call.form == "recurrent" and call.T == 1
    forward = mixed.step_variant(*widths) if one else mixed.variant(*widths, dtype, backward=False)
    return forward, mixed.variant(*widths, dtype, backward=True) if call.needs_grad else None


def delta_variants(call: Call, device: Properties) -> tuple[Variant, Variant | None]:
    """Variants of the delta families' chunk form, forward and backward."""
    dtype, beta = getattr(torch, call.dtype), {"none": 0, "scalar": 1, "vector": 2}[call.beta]
    chunk = delta.chunk_tokens(dtype, call.K, beta, int(call.option("chunk_size") or 0))
    packed = call.has("cu_seqlens")
    sequences = (call.N if packed else call.B) or 1
    many = (not call.needs_grad or call.op == "dplr") and delta.many(call.op, sequences, call.HV, packed, device.num_sms)
    facts = Facts(call.op, dtype, call.K, call.V, chunk, beta, many=many)
    forward = delta.forward_variant(facts, device)
    kept = "states" if "fused" in forward.stages else "scores"
    return forward, delta.backward_variant(facts, kept, device) if call.needs_grad else None


def diagonal_variants(call: Call, device: Properties) -> tuple[Variant, Variant | None]:
    """Variants of the chunk form of the families with a diagonal gate, forward and backward."""
    dtype = out = getattr(torch, call.dtype)
    if call.option("normalize"):
        dtype = operands(dtype, call.op != "linear_attn", call.needs_grad is not False)
        out = before_division(dtype)
    family = CORES.get(call.op, call.op)
    family = "gla with gv" if call.has("gv") else family
    chunk = diagonal.chunk_tokens(dtype, int(call.option("chunk_size") or 0))
    facts = Facts(family, dtype, call.K, call.V, chunk)
    forward = diagonal.forward_variant(facts, out, device)
    if not call.needs_grad:
        return forward, None
    return forward, diagonal.backward_variant(facts, dtype, call.HV > call.H or call.op == "ssd", True, device)


def value_width(call: Call) -> int:
    """Value channels of kernels to which a normaliser is one more."""
    return call.V + bool(call.option("normalize"))
