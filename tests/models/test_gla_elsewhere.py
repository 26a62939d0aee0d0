"""The GLA Transformer in JAX and MLX computes what it does in PyTorch, decodes as it reads, and learns."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from models import blocks  # noqa: E402
from models import gla as torch_gla  # noqa: E402

SYMBOLS, WIDTH, HEADS, DEPTH = 11, 32, 2, 1


def torch_model():
    model = blocks.transformer(SYMBOLS, WIDTH, DEPTH, lambda: torch_gla.GatedLinearAttention(WIDTH, HEADS))
    for p in model.parameters():  # so that no weight is zero or one
        p.data += 0.1 * torch.randn_like(p)
    for norm in (model.norm, *(n for layer in model.layers for n in (layer.norm_mixer, layer.norm_mlp))):
        norm.eps = 1e-6
    return model


def weights(model):
    """NumPy arrays by the names that the other frameworks use."""
    names = {"layers.": "blocks.", "mixer.decay.0": "mixer.decay_in", "mixer.decay.1": "mixer.decay_out"}
    found = {}
    for name, p in model.named_parameters():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = p.detach().numpy()
    return found


def circles(rng, batch=16, length=25):
    """Sequences that go round: the next symbol follows from the last two."""
    start, step = rng.integers(SYMBOLS, size=(batch, 1)), rng.integers(1, 4, size=(batch, 1))
    return ((start + step * np.arange(length)) % SYMBOLS).astype(np.int32)


def decode(model, ids, convert):
    """The prompt in one call, the rest token by token."""
    logits, states = model(convert(ids[:, :13]))
    found = [np.asarray(logits)]
    for t in range(13, ids.shape[1]):
        logits, states = model(convert(ids[:, t : t + 1]), states)
        found.append(np.asarray(logits))
    return np.concatenate(found, 1)


class TestJax:
    @pytest.fixture
    def jax(self):
        pytest.importorskip("equinox")
        return pytest.importorskip("jax")

    def model(self, jax):
        from models.gla_jax import LanguageModel

        return LanguageModel(jax.random.key(0), SYMBOLS, WIDTH, DEPTH, HEADS)

    def loaded(self, jax, given):
        import equinox as eqx

        renamed = {}
        for name, x in given.items():
            for old, new in {".norm.bias": ".norm_bias", "decay_out.bias": "decay_bias", ".weight": ""}.items():
                name = name.replace(old, new)
            renamed[name] = x.T if x.ndim == 2 and "embed" not in name else x
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.model(jax))
        named = [jax.tree_util.keystr(path).replace("[", ".").replace("]", "").lstrip(".") for path, _ in leaves]
        assert sorted(named) == sorted(renamed)
        assert eqx.is_array(leaves[0][1])
        return jax.tree_util.tree_unflatten(structure, [jax.numpy.asarray(renamed[name]) for name in named])

    def test_it_computes_what_the_pytorch_model_does(self, jax):
        reference, ids = torch_model(), circles(np.random.default_rng(0))
        found, _ = jax.jit(self.loaded(jax, weights(reference)).__call__)(jax.numpy.asarray(ids))
        np.testing.assert_allclose(found, reference(torch.from_numpy(ids).long())[0].detach(), rtol=2e-4, atol=2e-4)

    def test_decoding_equals_the_parallel_pass(self, jax):
        import equinox as eqx

        model, ids = eqx.filter_jit(self.model(jax)), circles(np.random.default_rng(0), 2, 18)
        whole, _ = model(jax.numpy.asarray(ids))
        np.testing.assert_allclose(decode(model, ids, jax.numpy.asarray), whole, rtol=2e-4, atol=2e-4)

    def test_it_learns(self, jax):
        import equinox as eqx

        model, rng = self.model(jax), np.random.default_rng(0)

        @eqx.filter_value_and_grad
        def loss_of(model, ids):
            logits = jax.nn.log_softmax(model(ids[:, :-1])[0][:, 2:])
            return -jax.numpy.take_along_axis(logits, ids[:, 3:, None], -1).mean()

        @eqx.filter_jit
        def step(model, speed, ids):
            """Adam without its averages of squares: signs of averaged gradients (Lion, Chen et al. 2023)."""
            loss, gradients = loss_of(model, ids)
            moved = jax.tree.map(lambda p, m, g: p - 3e-3 * jax.numpy.sign(0.9 * m + 0.1 * g), model, speed, gradients)
            return loss, moved, jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g, speed, gradients)

        speed = jax.tree.map(jax.numpy.zeros_like, model)
        for _ in range(50):
            loss, model, speed = step(model, speed, jax.numpy.asarray(circles(rng)))
        assert float(loss) < 0.6 * math.log(SYMBOLS)


class TestMlx:
    @pytest.fixture
    def mx(self):
        return pytest.importorskip("mlx.core")

    def model(self):
        from models.gla_mlx import LanguageModel

        return LanguageModel(SYMBOLS, WIDTH, DEPTH, HEADS)

    def test_it_computes_what_the_pytorch_model_does(self, mx):
        reference, ids, model = torch_model(), circles(np.random.default_rng(0)), self.model()
        model.load_weights([(name, mx.array(x)) for name, x in weights(reference).items()])
        found, _ = model(mx.array(ids))
        np.testing.assert_allclose(found, reference(torch.from_numpy(ids).long())[0].detach(), rtol=2e-4, atol=2e-4)

    def test_decoding_equals_the_parallel_pass(self, mx):
        model, ids = self.model(), circles(np.random.default_rng(0), 2, 18)
        whole, _ = model(mx.array(ids))
        np.testing.assert_allclose(decode(model, ids, mx.array), whole, rtol=2e-4, atol=2e-4)

    def test_it_learns(self, mx):
        from mlx import nn, optimizers

        model, rng = self.model(), np.random.default_rng(0)
        optimiser = optimizers.Adam(learning_rate=5e-3)

        def loss_of(ids):
            return nn.losses.cross_entropy(model(ids[:, :-1])[0][:, 2:], ids[:, 3:], reduction="mean")

        step = nn.value_and_grad(model, loss_of)
        for _ in range(50):
            loss, gradients = step(mx.array(circles(rng)))
            optimiser.update(model, gradients)
            mx.eval(model.parameters(), optimiser.state)
        assert loss.item() < 0.6 * math.log(SYMBOLS)
