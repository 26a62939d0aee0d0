"""Every family and flag on 2, 3 and 4 processes is what one device gives: outputs, final states and all gradients."""

from __future__ import annotations

import functools

import pytest
from jobs import jobs_of
from ranks import run_jobs

pytest.importorskip("torch.distributed")


@functools.cache
def results(world: int) -> dict[str, list[str]]:
    return run_jobs(world, jobs_of(world))


@pytest.mark.parametrize(("world", "name"), [(world, name) for world in (2, 3, 4) for name, _, _ in jobs_of(world)])
def test_ranks_give_what_one_device_gives(world: int, name: str):
    said = results(world)[name]
    assert said == [""] * world, "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
