"""Two processes that share sequences, whose kernels are interpreted: what messages carry is what one device gives."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from jobs import CROSSING, named
from ranks import run_jobs

KERNELS = dict(backend="triton", dtype="float32")
JOBS = named(
    2,
    [
        ("compare", dict(name="chunk", variant="gated_delta_rule", **KERNELS)),
        ("compare", dict(name="chunk", variant="gated_delta_rule", cu_seqlens=CROSSING, **KERNELS)),
        ("compare", dict(name="chunk", variant="simple_gla", state=False, **KERNELS)),
        ("compare", dict(name="chunk", variant="simple_gla", layout="zigzag", **KERNELS)),
        ("other_offsets", dict(exchange="gather", offsets=[0, 4, 16], backend="triton", laid_out=", in 12 numbers")),
        ("other_offsets", dict(exchange="gather", offsets=[0, 8, 16], backend="triton", laid_out=", in 12 numbers")),
    ],
)


@functools.cache
def results() -> dict[str, list[str]]:
    return run_jobs(2, JOBS)


@pytest.mark.parametrize("name", [name for name, *_ in JOBS])
def test_ranks_that_run_kernels_give_what_one_device_gives(name: str):
    said = results()[name]
    assert said == ["", ""], "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
