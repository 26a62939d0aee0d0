"""What two processes check together; ``test_distributed.py`` starts them. Each check prints nothing, or fails."""

from __future__ import annotations

import copy
from datetime import timedelta

import torch
import torch.distributed as dist
from linattn import nn
from linattn.distributed import context_parallel
from linattn.feature_maps import Cosformer, Hedgehog
from nn_cases import LAYERS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.functional import cross_entropy

WIDTH, T = 32, 13
PACKED = [0, 3, 3, 11, 14]
"""Offsets among 16 tokens: an empty sequence, one over both processes, and padding."""
SPLIT = {
    "DeltaNet": {"num_heads": 2},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 8, "num_v_heads": 4},
    "GatedLinearAttention": {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True},
    "KimiDeltaAttention": {"num_heads": 2, "head_dim": 8},
    "LinearAttention": {"num_heads": 2},
    "RetNet": {"num_heads": 2},
}
MAPPED = (
    ("LinearAttention", {"num_heads": 2, "feature_map": Cosformer(16)}),
    ("LinearAttention", {"num_heads": 2, "feature_map": "rebased"}),
    ("RetNet", {"num_heads": 2, "feature_map": Hedgehog(**Hedgehog.init(2, 16))}),
)
"""Maps that depend on positions, and that have parameters for each head."""


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def compare(layer, x, split, inputs):
    """Outputs and every gradient of a distributed layer are those of the whole one."""
    y = layer(x)
    gradients = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
    found = split(inputs)
    close(found.full_tensor(), y)
    for (name, _), g, expected in zip(
        split.named_parameters(), torch.autograd.grad(found.square().sum(), list(split.parameters())), gradients, strict=True
    ):
        torch.testing.assert_close(g.full_tensor(), expected, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def by_heads(mesh):
    for name, options in (*SPLIT.items(), *MAPPED):
        layer = getattr(nn, name)(WIDTH, **options, dtype=torch.float64)
        split = nn.shard_by_heads(copy.deepcopy(layer), mesh)
        local = split.q_proj.weight.to_local()
        assert 2 * len(local) == len(layer.q_proj.weight), name
        for sequences in (4, 1):
            x = torch.randn(sequences, T, WIDTH, dtype=torch.float64)
            compare(layer, x, split, distribute_tensor(x, mesh, [Replicate()]))


def by_batch(mesh):
    others = {"Mamba2": {"head_dim": 8, "state_size": 8}, "Lightning": {"num_heads": 2}}
    for name, options in (*SPLIT.items(), *others.items(), *MAPPED):
        layer, x = getattr(nn, name)(WIDTH, **options, dtype=torch.float64), torch.randn(4, T, WIDTH, dtype=torch.float64)
        compare(layer, x, distribute_module(copy.deepcopy(layer), mesh), distribute_tensor(x, mesh, [Shard(0)]))


def decoding(mesh):
    layer, x = nn.GatedDeltaNet(WIDTH, num_heads=2, head_dim=8, dtype=torch.float64), torch.randn(2, 4, WIDTH).double()
    split, cache = nn.shard_by_heads(copy.deepcopy(layer), mesh), nn.Cache()
    with torch.no_grad():
        inputs = distribute_tensor(x, mesh, [Replicate()])
        pieces = [split(inputs[:, :2], cache=cache), *(split(inputs[:, t : t + 1], cache=cache) for t in (2, 3))]
        close(torch.cat([y.full_tensor() for y in pieces], 1), layer(x))
    assert cache.layers[0]["recurrent_state"].to_local().shape[1] == 1


def context(mesh):
    """Outputs on this process's tokens, and sums of gradients over both, of every layer that takes a context."""
    mine = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
    for name, options in (*LAYERS.items(), *MAPPED, ("LinearAttention", {**MAPPED[0][1], "norm_q": True, "norm_k": True})):
        if name in ("FLASH", "GAU"):
            continue
        layer = getattr(nn, name)(WIDTH, **options, dtype=torch.float64)
        for offsets in (None, PACKED):
            x = torch.randn(1 if offsets else 2, 16, WIDTH, dtype=torch.float64)
            y = layer(x, cu_seqlens=None if offsets is None else torch.tensor(offsets))
            expected = torch.autograd.grad(y.square().sum(), list(layer.parameters()))
            found = layer(x[:, mine], context=context_parallel(mesh, offsets))
            torch.testing.assert_close(found, y[:, mine], rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
            for g, whole in zip(torch.autograd.grad(found.square().sum(), list(layer.parameters())), expected, strict=True):
                dist.all_reduce(g)
                close(g, whole)


def fsdp(mesh):
    options = {"mixer": "GatedDeltaNet", "mixer_options": {"num_heads": 2, "head_dim": 8}, "intermediate_size": 64}
    whole = nn.LanguageModel(11, WIDTH, 2, **options, dtype=torch.float64)
    sharded = copy.deepcopy(whole)
    for block in sharded.model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ids = torch.randint(11, (4, T))
    mine = ids[2 * dist.get_rank() :][:2]
    for model, read in ((whole, ids), (sharded, mine)):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            loss = cross_entropy(model(read[:, :-1]).flatten(0, 1), read[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    for name, p in sharded.named_parameters():
        torch.testing.assert_close(p.full_tensor(), whole.get_parameter(name), rtol=1e-9, atol=1e-11)


def main(check: str, rank: int, file: str) -> None:
    """Run one check as one of two processes that meet at a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=90))
    try:
        globals()[check](init_device_mesh("cpu", (2,)))
    finally:
        dist.destroy_process_group()
