"""Operators over an axis of a JAX mesh are what one device gives: four devices of one process, and two processes."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("torch")
jax_ranks = pytest.importorskip("jax_ranks")

SECONDS = 900


def program(devices: int, *arguments: str) -> subprocess.Popen[str]:
    """One process with so many devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, str(Path(__file__).with_name("jax_ranks.py")), *arguments]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said_by(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=SECONDS)[0]
    finally:
        process.kill()


@functools.cache
def on_four_devices() -> str:
    return said_by(program(4))


@functools.cache
def by_two_processes() -> tuple[str, ...]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return tuple(map(said_by, [program(1, address, str(rank)) for rank in range(2)]))


def assert_equal(name: str, said: str) -> None:
    if f"equal {name}\n" not in said:
        raise AssertionError(said.partition(f"FAILED {name}\n")[2].partition("FAILED ")[0] or said[-3000:])


@pytest.mark.parametrize(
    "name",
    [
        *(run.name for run in jax_ranks.runs()),
        *(f"followed-{name}" for name in jax_ranks.FOLLOWED),
        *("export", "positions", "placed", "left", "beside", "unspread", "transforms", "refused", "ill-shaped"),
    ],
)
def test_ranks_give_what_one_device_gives(name: str):
    assert_equal(name, on_four_devices())


@pytest.mark.parametrize("name", jax_ranks.TWO_PROCESSES)
def test_processes_give_what_one_device_gives(name: str):
    for said in by_two_processes():
        assert_equal(name, said)


def test_errors_say_what_is_missing():
    import jax.numpy as jnp
    import linattn
    from linattn.distributed import shard_axis
    from linattn.errors import ContextError, OptionError

    x = jnp.ones((1, 4, 1, 2))
    with pytest.raises(ContextError) as error:
        linattn.chunk_linear_attn(x, x, x, context=shard_axis("cp"))
    assert str(error.value) == (
        "linear_attn: no mesh with an axis 'cp' is known here, only the axes []: call inside jax.shard_map over that axis, "
        "under jax.set_mesh(mesh), or with shard_axis('cp', mesh=mesh)"
    )
    with pytest.raises(OptionError) as error:
        shard_axis("cp", layout="striped")
    assert str(error.value) == "shard_axis: layout must be 'contiguous' or 'zigzag', got 'striped'"
    with pytest.raises(OptionError) as error:
        shard_axis("cp", mesh="cp")
    assert str(error.value) == "shard_axis: mesh must be a jax.sharding.Mesh or None, got str"
