"""The page on arrays of other libraries, on TensorFlow's tensors where it is installed, and on a bare DLPack array."""

from __future__ import annotations

import re
from pathlib import Path

import linattn
import numpy as np
import pytest
from linattn import errors

PAGE = (Path(__file__).parents[2] / "docs" / "other-arrays.md").read_text(encoding="utf-8")
THERE_AND_BACK, WITH_GRADIENTS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def drawn() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    q, k, v, x = (rng.standard_normal((1, 20, 2, 8), dtype=np.float32) for _ in range(4))
    return [q, k, v, linattn.gates.gla(x)]


class Foreign:
    """An array that speaks DLPack and nothing else."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_the_refusal_says_what_to_type():
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.chunk_gla(*map(Foreign, drawn()))
    assert str(caught.value).endswith(
        "is not an array of a framework that linattn knows (numpy, torch, jax, mlx), but it speaks DLPack: "
        "convert it first, e.g. torch.from_dlpack(q) or numpy.from_dlpack(q)"
    )


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
def test_any_array_that_speaks_dlpack_goes_through(module):
    namespace = pytest.importorskip(module)
    arrays = drawn()
    o, _ = linattn.chunk_gla(*map(namespace.from_dlpack, map(Foreign, arrays)))
    np.testing.assert_allclose(np.from_dlpack(o), linattn.chunk_gla(*arrays)[0], rtol=1e-4, atol=1e-5)


@pytest.fixture
def tensorflow():
    pytest.importorskip("torch")
    return pytest.importorskip("tensorflow")


def names(tf) -> dict:
    import torch

    tensors = dict(zip("qkvg", map(tf.constant, drawn()), strict=True))
    return {"tf": tf, "torch": torch, "linattn": linattn, **tensors}


def test_tensorflow_there_and_back(tensorflow):
    space = names(tensorflow)
    exec(THERE_AND_BACK, space)
    o, state = linattn.chunk_gla(*drawn(), output_final_state=True)
    np.testing.assert_allclose(space["o"].numpy(), o, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(space["state"].numpy(), state, rtol=1e-4, atol=1e-5)


def test_tensorflow_gradients(tensorflow):
    space = names(tensorflow)
    exec(WITH_GRADIENTS, space)
    torch = space["torch"]
    inputs = [torch.tensor(x, requires_grad=True) for x in drawn()]
    linattn.chunk_gla(*inputs)[0].square().sum().backward()
    for name, x in zip("qkvg", inputs, strict=True):
        np.testing.assert_allclose(space["d" + name].numpy(), x.grad.numpy(), rtol=1e-4, atol=1e-4)
