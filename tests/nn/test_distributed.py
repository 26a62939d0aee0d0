"""Layers on two processes: split by heads, by batch, decoding so, and trained with FSDP2."""

from __future__ import annotations

import multiprocessing
import re
import traceback
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from linattn import nn  # noqa: E402
from linattn.context import Context  # noqa: E402
from linattn.errors import OptionError, ShapeError  # noqa: E402

processes = multiprocessing.get_context("forkserver")  # each is a copy of one that has imported everything


def member(check: str, rank: int, file: str, said: Any) -> None:
    """What one process does, and says: nothing if all is well."""
    import distributed_checks

    try:
        distributed_checks.main(check, rank, file)
        said.put("")
    except Exception:
        said.put(traceback.format_exc())


@pytest.mark.parametrize("check", ["by_heads", "by_batch", "context", "decoding", "fsdp"])
def test_two_processes_compute_what_one_does(check, tmp_path):
    said = processes.Queue()
    pair = [processes.Process(target=member, args=(check, rank, str(tmp_path / "store"), said), daemon=True) for rank in (0, 1)]
    for process in pair:
        process.start()
    assert [said.get(timeout=120) for _ in pair] == ["", ""]
    for process in pair:
        process.join()


def test_what_a_call_on_a_shard_cannot_have_is_refused():
    layer, x = nn.GatedLinearAttention(32, num_heads=2), torch.zeros(1, 4, 32)
    offsets = (
        "GatedLinearAttention: context= says where sequences lie among the tokens of all devices: pass their offsets to it"
    )
    wrong = {
        f"{offsets}, and no mask to the call": {"mask": torch.ones(1, 4)},
        f"{offsets}, and no cu_seqlens to the call": {"cu_seqlens": torch.tensor([0, 4])},
        "GatedLinearAttention: a cache holds the states of whole sequences: call with context= or with cache=": {
            "cache": nn.Cache()
        },
    }
    for message, given in wrong.items():
        with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
            layer(x, context=Context(), **given)


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
