"""What a pass allocates on an H200, counted on tensors without memory: as a call that is done again does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linattn_backends.triton.diagonal import op as diagonal
from linattn_backends.triton.runtime import device, replay
from linattn_backends.triton.runtime.device import Properties, standing_in
from linattn_backends.triton.ssd import op as ssd

H200 = torch.device("cuda", 0)
MAMBA2 = {(8, 2048, 1, 80): 708, (1, 8192, 8, 128): 704, (1, 8192, 1, 48): 219}
"""``B, T, H, HV`` with states of 128 and heads of 64, and MiB that mamba_ssm 2.3.2 allocates for a forward and a backward pass
in bfloat16, measured on an H200."""


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch):
    """Kernels and portions are chosen as for one."""
    measured = device.measured
    monkeypatch.setattr(device, "measured", lambda x: Properties(132, True, None) if x == H200 else measured(x))


class Allocated:
    """Of a pass: the bytes at its peak, arguments aside, and its largest array that is no result."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        note = replay.Recording(H200, args)
        with standing_in(note), note:
            result = function(*note.args)
        writer = replay.Writer(note, result, H200, direct=True)
        lives = []
        for i, step in enumerate(note.steps):
            made = [step.value] if isinstance(step, replay.Memory) else getattr(step, "results", ())
            for x in made:
                if x is not None and x.root is x:
                    last = len(note.steps) if x in writer.kept else writer.last.get(x, i)
                    lives.append((i, last, replay.size_of(x), x in writer.kept))
        self.peak = max(sum(size for first, last, size, _ in lives if first <= i <= last) for i in range(len(note.steps)))
        self.temporary = max((size for *_, size, kept in lives if not kept), default=0)


def undecorated(function: Any) -> Any:
    """The host code itself."""
    function = getattr(function, "_init_fn", function)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def array(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def numbers(*shape: int) -> torch.Tensor:
    return array(*shape, dtype=torch.float32)


def passes_of_ssd(B: int, T: int, H: int, HV: int, K: int, V: int) -> tuple[Allocated, Allocated]:
    """A forward and a backward pass of ``ssd``, called as Mamba-2 does."""
    given = array(B, T, H, K), array(B, T, H, K), array(B, T, HV, V), array(B, T, HV), numbers(HV), numbers(HV)
    rest = None, numbers(HV), None, None
    options = True, 0.0, float("inf")
    forward = undecorated(ssd.computed), (*given, *rest, "chunk", 1.0, 0, False, *options, True)
    backward = undecorated(ssd.ssd_backward), (array(B, T, HV, V), None, None, *given, *rest, 1.0, 0, *options)
    return Allocated(*forward), Allocated(*backward)


def passes_of_simple_gla(B: int, T: int, H: int, HV: int, K: int, V: int) -> tuple[Allocated, Allocated]:
    """A forward and a backward pass of ``simple_gla``."""
    given = array(B, T, H, K), array(B, T, H, K), array(B, T, HV, V), numbers(B, T, HV), None, None, None, None
    forward = undecorated(diagonal.computed), (*given, "chunk", 1.0, 0, False, True)
    backward = undecorated(diagonal.diagonal_backward), (array(B, T, HV, V), *[None] * 6, *given, 1.0, 0)
    return Allocated(*forward), Allocated(*backward)


@pytest.mark.parametrize("shape", MAMBA2, ids=str)
def test_ssd_takes_no_more_than_mamba_ssm(shape):
    """Its output, whose gradient comes from outside, lives through the backward pass."""
    B, T, _, HV = shape
    forward, backward = passes_of_ssd(*shape, 128, 64)
    assert max(forward.peak, 2 * B * T * HV * 64 + backward.peak) <= MAMBA2[shape] << 20


GROUPED = [(*shape, 128, 64) for shape in MAMBA2]


@pytest.mark.parametrize("passes", [passes_of_ssd, passes_of_simple_gla])
@pytest.mark.parametrize("shape", GROUPED, ids=str)
def test_no_temporary_is_larger_than_the_largest_input(shape, passes):
    """Where value heads share keys: no gradient of a key is there for each of them, nor are all states."""
    B, T, H, HV, K, V = shape
    largest = 2 * B * T * max(H * K, HV * V)
    assert max(x.temporary for x in passes(*shape)) <= largest
