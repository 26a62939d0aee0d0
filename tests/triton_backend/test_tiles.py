"""Products of tiles on hardware whose products in tf32 cut off what they do not take."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from linattn_backends.triton.lib import tiles
from triton.runtime import interpreter

SIZE = 16
STEP = 2.0**-10
"""Between two numbers of tf32 from one on."""


@triton.jit
def multiply(x, y, out, PREC: tl.constexpr):
    """``out = x y + x y`` of one tile."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    at = row * 16 + column
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tiles.dot_add(a, b, tiles.dot(a, b, PREC), PREC))


@pytest.fixture
def cutting(monkeypatch):
    """Products as a GPU makes them."""
    whole = interpreter.InterpreterBuilder.create_dot

    def cut(x):
        bits = np.ascontiguousarray(x.data).view(np.uint32) & np.uint32(0xFFFFE000)
        return interpreter.TensorHandle(bits.view(np.float32), x.dtype)

    def create_dot(self, a, b, d, precision, *rest):
        if precision.name == "TF32":
            a, b = cut(a), cut(b)
        return whole(self, a, b, d, precision, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(tiles, "INTERPRETED", tl.constexpr(False))


def product(x, precision):
    """Twice the product of a tile of ``x`` and the unit matrix."""
    out = torch.full((SIZE, SIZE), torch.nan)
    multiply[(1,)](torch.full((SIZE, SIZE), x), torch.eye(SIZE), out, precision)
    return out


@pytest.mark.parametrize(("x", "nearest"), [(0.4, 0.0), (0.6, 1.0), (1.0, 1.0), (-0.6, -1.0), (-1.4, -1.0)])
def test_factors_are_the_nearest_numbers_that_a_product_takes(cutting, x, nearest):
    sign = np.sign(x)
    assert torch.equal(product(sign + x * STEP, "nearest"), torch.full((SIZE, SIZE), 2 * (sign + nearest * STEP)))


def test_other_products_have_their_factors_whole(cutting):
    x = np.float32(1 + 0.6 * STEP)
    assert torch.equal(product(float(x), "ieee"), torch.full((SIZE, SIZE), float(2 * x)))


def test_nan_stays_nan(cutting):
    assert product(float("nan"), "nearest").isnan().all()
