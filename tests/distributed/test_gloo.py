"""Every family and flag on 2, 3 and 4 processes is what one device gives: outputs, final states and all gradients."""

from __future__ import annotations

import functools

import pytest
from ranks import Job, run_jobs
from sequence_cases import SPREAD

pytest.importorskip("torch.distributed")

CROSSING = [0, 3, 3, 4, 15, 16, 16, 22]
"""Packed sequences: empty ones, one token, one over three of four ranks, and padding behind them."""
ONE = [0, 24]
KINDS = ("linear_attn", "simple_gla", "gla", "value_gate", "kda", "value_beta", "mixed_biased")
"""One variant for each way in which a summary acts on a state."""


def jobs_of(world: int) -> list[Job]:
    """What the processes of a group run."""
    jobs: list[tuple[str, dict]] = []
    if world == 2:
        jobs += [("compare", dict(name="chunk", variant=variant)) for variant in SPREAD]
        jobs += [("compare", dict(name="chunk", variant=variant, cu_seqlens=CROSSING, layout="zigzag")) for variant in SPREAD]
        jobs += [("compare", dict(name="chunk", variant="value_gate", compiled=True))]
    if world == 3:
        ring = dict(exchange="ring", replicate_states=True)
        jobs += [("compare", dict(name="chunk", variant=variant, cu_seqlens=CROSSING, **ring)) for variant in KINDS]
        jobs += [("compare", dict(name="recurrent", variant=v, layout="zigzag", **ring)) for v in ("kda", "value_gate", "ssd")]
    if world == 4:
        jobs += [("compare", dict(name="chunk", variant=variant, cu_seqlens=CROSSING)) for variant in SPREAD]
        jobs += [("compare", dict(name="", variant=v, layout="zigzag", state=False)) for v in ("linear_attn", "dplr", "rwkv6")]
        jobs += [("compare", dict(name="parallel", variant="gla", cu_seqlens=ONE, replicate_states=True))]
    for packing in (None, CROSSING, ONE):
        for layout in ("contiguous", "zigzag"):
            jobs += [("convolve", dict(cu_seqlens=packing, W=W, layout=layout)) for W in ((1, 4, 8) if world == 3 else (8,))]
            jobs += [("everywhere", dict(cu_seqlens=packing, normalize=n, layout=layout)) for n in (False, True)]
    if world == 2:
        jobs += [("dtensors", dict(variant="simple_gla"))]
    if world == 4:
        jobs += [("dtensors", dict(variant=v, heads=2)) for v in ("value_gate", "mapped_delta", "mixed")]
    return [(f"{world}-{function}-{'-'.join(map(str, keywords.values()))}", function, keywords) for function, keywords in jobs]


@functools.cache
def results(world: int) -> dict[str, list[str]]:
    return run_jobs(world, jobs_of(world))


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in (2, 3, 4) for name, _, _ in jobs_of(world)])
def test_ranks_give_what_one_device_gives(world: int, name: str):
    said = results(world)[name]
    assert said == [""] * world, "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
