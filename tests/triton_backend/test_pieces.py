"""Packed sequences cut into pieces on the device."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from linattn_backends.triton.host.chunks import cut


def packed(lengths, T, dtype=torch.int32):
    """A call of sequences of these lengths among ``T`` tokens."""
    cu = torch.tensor([0, *accumulate(lengths)], dtype=dtype)
    return SimpleNamespace(v=torch.zeros(1, T, 1, 1), cu=cu, N=len(lengths), family="gla")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[], [0], [5], [64], [0, 0, 65, 0], [1] * 200, [9000], [3, 700] * 40, [0] * 130 + [1]])
def test_pieces_of_packed_sequences(lengths, dtype):
    T = sum(lengths) + 7
    found = cut(packed(lengths, T, dtype), 64)
    filled = [-(-n // 64) for n in lengths]
    assert found.count == T // 64 + len(lengths) >= sum(filled)
    assert found.first.tolist() == [0, *accumulate(filled)]
    owners = np.repeat(np.arange(len(lengths)), filled).tolist()
    assert found.owner.tolist() == owners + [len(lengths)] * (found.count - len(owners))


def test_the_first_piece_begins_with_what_is_held():
    held = torch.tensor([63, 0, 1], dtype=torch.int32)
    found = cut(packed([2, 64, 63], 130), 64, held)
    assert found.first.tolist() == [0, 2, 3, 4]
    assert found.count == 130 // 64 + 6
    assert found.owner.tolist() == [0, 0, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("lengths", [[5, 0, 129], [1] * 70 + [130] + [200] * 2])
def test_sequences_are_cut_if_one_is_long(lengths):
    longest = max(lengths)
    for whole, pieces in ((longest, [min(n, 1) for n in lengths]), (longest - 1, [-(-n // 64) for n in lengths])):
        found = cut(packed(lengths, sum(lengths)), 64, whole=whole)
        assert found.first.tolist() == [0, *accumulate(pieces)]
        assert found.owner.tolist()[: sum(pieces)] == np.repeat(np.arange(len(lengths)), pieces).tolist()


def test_sequences_that_are_rows_are_cut_by_arithmetic():
    found = cut(SimpleNamespace(v=torch.zeros(3, 130, 1, 1), cu=None, N=3, family="gla"), 64)
    assert (found.count, found.per, found.owner, found.first) == (9, 3, None, None)


@pytest.mark.parametrize("lengths", [[], [5, 0, 129], [1] * 200])
def test_rows_behind_the_last_sequence_become_zeros(lengths):
    T = sum(lengths) + 300
    out = torch.full((1, T, 3, 5), torch.nan)
    call = packed(lengths, T)
    found, alone = cut(call, 64, out=out), cut(call, 64)
    assert out[:, : sum(lengths)].isnan().all()
    assert not out[:, sum(lengths) :].any()
    assert torch.equal(found.owner, alone.owner)
    assert torch.equal(found.first, alone.first)
