"""What runs kernels in Gluon on NumPy tells a right kernel from a wrong one."""

from __future__ import annotations

import gluon_on_numpy
import pytest
import small_kernels
import torch

W = 16


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(gluon_on_numpy, "PATIENCE", 0.5)


def draw(*shape):
    torch.manual_seed(1)
    return torch.randn(shape).bfloat16()


def multiplied(mistake=None, count=1):
    a, b, out = draw(count, W, W), draw(count, W, W).mT.contiguous(), torch.zeros(count, W, W)
    gluon_on_numpy.run(small_kernels.multiply, count, (a, b, out), dict(MISTAKE=mistake, num_warps=4))
    return out, a.float() @ b.float()


def summed(mistake=None, count=7):
    a, out = draw(count, W, W), torch.zeros(W, W)
    gluon_on_numpy.run(small_kernels.sum_tiles, 1, (a, out, count), dict(MISTAKE=mistake, num_warps=4))
    return out, a.float().sum(0)


def read(mistake=None):
    a, out = draw(W, W), torch.zeros(W, W)
    gluon_on_numpy.run(small_kernels.read, 1, (a, out), dict(MISTAKE=mistake, num_warps=4))
    return out, a.float()


@pytest.mark.parametrize("kernel", [multiplied, summed, read, lambda: multiplied(count=3)])
def test_a_right_kernel_passes(kernel):
    found, wanted = kernel()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("copies past the end", "past the ends of an array"),
        ("waits for one copy of two", "an operand that is not there yet"),
        ("overwrites an operand", "an operand was overwritten"),
        ("reads the result before the wait", "a product's result is read before the product was waited for"),
        ("stores past the end", "past the ends of an array"),
        ("stores float32 as bfloat16", "stores f32 to memory of bf16"),
    ],
)
def test_one_warpgroup_that_is_wrong_is_stopped(mistake, complaint):
    with pytest.raises(AssertionError, match=complaint):
        multiplied(mistake)


@pytest.mark.parametrize("mistake", ["reads what nobody wrote", "reads before the wait"])
def test_what_is_not_there_yet_is_no_number(mistake):
    found, _ = read(mistake)
    assert found.isnan().all()


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("says twice that a place is free", "more arrivals than a barrier counts"),
        ("never says that a place is free", "warpgroups wait for one another"),
        ("never says that a tile is there", "warpgroups wait for one another"),
        ("forgets a field", r"Ring\.__init__ sets buffers, ready, not buffers, ready, free"),
        ("has a field too many", r"Ring\.__init__ sets buffers, ready, free, full, not buffers, ready, free"),
    ],
)
def test_warpgroups_that_do_not_meet_are_stopped(mistake, complaint):
    with pytest.raises(AssertionError, match=complaint):
        summed(mistake)


def test_a_wrong_phase_is_stopped_or_reads_what_is_not_there():
    """Whichever warpgroup comes first."""
    try:
        found, _ = summed("waits for the other phase")
        outcome = "no number" if found.isnan().any() else "passes"
    except AssertionError as error:
        outcome = str(error)
    assert "warpgroups wait for one another" in outcome or outcome == "no number"


def test_numbers_are_rounded_as_bfloat16_has_them():
    x = gluon_on_numpy.Value([1.0, 1.00390625], "f32")
    low = x.to(gluon_on_numpy.Dtype("bf16"))
    assert low.array.tolist() == [1.0, 1.0]
    assert (low + low).kind == "bf16"
    assert (low + x).kind == "f32"
