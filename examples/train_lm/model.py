"""Language models of :mod:`linattn.nn`, sharded over devices and compiled."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import torch
from linattn import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

BYTES = 256
KINDS = {
    "gla": ("GatedLinearAttention",),
    "gated-delta-net": ("GatedDeltaNet",),
    "hybrid": ("Mamba2", "GatedDeltaNet"),
}
"""The layers of a model by its name, in turn: GLA (Yang et al. 2024), Gated DeltaNet and its hybrid with Mamba-2 (Yang et al.
2025)."""


def language_model(kind: str, width: int, depth: int, heads: int) -> nn.LanguageModel:
    """A model of ``depth`` blocks, ``width`` wide."""
    options: dict[str, dict[str, Any]] = {
        "GatedLinearAttention": {"num_heads": heads},
        "GatedDeltaNet": {"num_heads": heads, "head_dim": max(8, 3 * width // (4 * heads) // 8 * 8)},
        "Mamba2": {"head_dim": width // heads, "state_size": width // heads},
    }
    names = list(islice(cycle(KINDS[kind]), depth))
    return nn.LanguageModel(BYTES, width, depth, mixer=names, mixer_options=[options[name] for name in names])


def shard(model: nn.LanguageModel, mesh: DeviceMesh) -> None:
    """Give every device its share of the parameters (FSDP2); gradients are summed over devices, as the loss is."""
    blocks = list(model.model.layers.values())
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (*blocks, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # a sum with a factor is NCCL's alone


def compile_blocks(model: nn.LanguageModel, backend: str, whole: bool) -> None:
    """Compile every block.

    Args:
        model: The model.
        backend: Of ``torch.compile``.
        whole: The block as one graph. Otherwise norms and MLP: a plan of spread documents is a constant of the graph, and
            documents end elsewhere in every step.
    """
    for block in model.model.layers.values():
        for module in (block,) if whole else (block.attn_norm, block.mlp_norm, block.mlp):
            module.compile(backend=backend, dynamic=False if not whole else None)


def loss(model: nn.LanguageModel, inputs: torch.Tensor, targets: torch.Tensor, **where: Any) -> torch.Tensor:
    """Sum of the nats of ``targets [T]`` after ``inputs [T]``; ``where`` documents lie is said by keyword."""
    logits = model(inputs[None], **where)[0]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
