"""Layers on two processes: split by heads, by batch, decoding so, and trained with FSDP2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from linattn import nn  # noqa: E402
from linattn.errors import OptionError, ShapeError  # noqa: E402

CHECKS = Path(__file__).with_name("distributed_checks.py")


@pytest.mark.parametrize("check", ["by_heads", "by_batch", "decoding", "fsdp"])
def test_two_processes_compute_what_one_does(check, tmp_path):
    given = [sys.executable, str(CHECKS), check]
    processes = [
        subprocess.Popen(
            [*given, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


class Mesh:
    """As much of a mesh as is looked at before anything is split."""

    @staticmethod
    def size():
        return 2


def test_what_cannot_be_split_is_refused():
    pytest.importorskip("torch.distributed.tensor")
    wrong = {
        "shard_by_heads: expected one of DeltaNet, GatedDeltaNet, GatedLinearAttention, KimiDeltaAttention, LinearAttention, "
        "RetNet, got RWKV6": nn.RWKV6(32, num_heads=2),
        "shard_by_heads: num_heads = 3 cannot be split over 2 devices": nn.RetNet(48, num_heads=3),
    }
    for message, layer in wrong.items():
        with pytest.raises((OptionError, ShapeError), match=f"^{re.escape(message)}$"):
            nn.shard_by_heads(layer, Mesh())
