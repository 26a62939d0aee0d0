"""Layers for Flax, Equinox and MLX: PyTorch's weights give PyTorch's outputs, and each framework's own ways work."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import numpy as np
import pytest
from linattn.errors import OptionError, ShapeError
from nn_cases import LAYERS, WIDTH

CHOSEN = ("GatedLinearAttention", "GatedDeltaNet", "KimiDeltaAttention", "Mamba2")
T = 11


class Own:
    """One framework: its module, how a layer is made, and how an array."""

    def __init__(self, name):
        for package in {"flax": ("flax", "jax"), "equinox": ("equinox", "jax"), "mlx": ("mlx.core",)}[name]:
            pytest.importorskip(package)
        self.name, self.nn = name, importlib.import_module(f"linattn.nn.{name}")
        if name == "mlx":
            self.array = importlib.import_module("mlx.core").array
        else:
            self.jax = importlib.import_module("jax")
            self.array = self.jax.numpy.asarray

    def make(self, kind, *args, **options):
        if self.name == "flax":
            options["rngs"] = importlib.import_module("flax.nnx").Rngs(0)
        elif self.name == "equinox":
            options["key"] = self.jax.random.key(0)
        return getattr(self.nn, kind)(*args, **options)

    def compiled(self, function):
        if self.name == "mlx":
            return function
        return self.jax.jit(function)


@pytest.fixture(scope="module", params=["flax", "equinox", "mlx"])
def own(request):
    return Own(request.param)


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", CHOSEN)
def test_weights_of_pytorch_give_its_outputs_and_go_back(own, kind):
    torch = pytest.importorskip("torch")
    from linattn import nn

    reference, x = getattr(nn, kind)(WIDTH, **LAYERS[kind]), drawn(2, T, WIDTH)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.1 * torch.randn_like(p))
    layer = own.make(kind, WIDTH, **LAYERS[kind])
    weights = {name: p.detach().numpy() for name, p in reference.state_dict().items()}
    layer = own.nn.load_state_dict(layer, weights)
    mask = np.ones((2, T), np.int32)
    mask[0, :4] = 0
    call = own.compiled(lambda x, mask: layer(x, mask=mask))
    expected = reference(torch.from_numpy(x), mask=torch.from_numpy(mask)).detach()
    np.testing.assert_allclose(np.asarray(call(own.array(x), own.array(mask))), expected, rtol=1e-4, atol=2e-5)
    back = own.nn.state_dict(layer)
    assert all((back[name] == p).all() for name, p in weights.items())


def test_a_language_model_decodes_what_it_reads(own):
    model = own.make(
        "LanguageModel", 11, WIDTH, 1, mixer="GatedDeltaNet", mixer_options=LAYERS["GatedDeltaNet"], intermediate_size=64
    )
    ids, cache = np.random.default_rng(0).integers(11, size=(2, 7)).astype(np.int32), own.nn.Cache()

    def step(tokens, cache):
        return model(tokens, cache=cache), cache

    step = own.compiled(step)
    found = []
    for tokens in (ids[:, :5], ids[:, 5:6], ids[:, 6:]):
        logits, cache = step(own.array(tokens), cache)
        found.append(np.asarray(logits))
    whole = np.asarray(own.compiled(lambda ids: model(ids))(own.array(ids)))
    np.testing.assert_allclose(np.concatenate(found, 1), whole, rtol=2e-4, atol=2e-5)
    assert np.asarray(cache.lengths).tolist() == [7, 7]
    if own.name == "mlx":  # elsewhere each operation of an uncompiled model compiles by itself
        longer = np.asarray(model.generate(own.array(ids), 3))
        assert (longer[:, 7] == whole[:, -1].argmax(-1)).all()
        assert longer.shape == (2, 10)


def test_gradients_reach_every_parameter(own):
    kind, x = "GatedDeltaNet", drawn(1, T, WIDTH)
    layer = own.make(kind, WIDTH, **LAYERS[kind])
    if own.name == "mlx":
        from mlx import nn
        from mlx.utils import tree_flatten

        gradients = nn.value_and_grad(layer, lambda x: layer(x).square().sum())(own.array(x))[1]
        found = {name: np.array(g) for name, g in tree_flatten(gradients)}
    elif own.name == "equinox":
        import equinox as eqx

        gradients = eqx.filter_jit(eqx.filter_grad(lambda layer, x: (layer(x) ** 2).sum()))(layer, own.array(x))
        found = own.nn.state_dict(gradients)
    else:
        from flax import nnx

        gradients = nnx.jit(nnx.grad(lambda layer, x: (layer(x) ** 2).sum()))(layer, own.array(x))
        found = own.nn.flat_names(nnx.to_pure_dict(gradients))
    assert set(found) == set(own.nn.state_dict(layer))
    assert all(np.abs(np.asarray(g)).max() > 0 for g in found.values())


def test_wrong_weights_are_refused(own):
    layer = own.make("RetNet", WIDTH, num_heads=2)
    weights = own.nn.state_dict(layer)
    short = {name: x for name, x in weights.items() if name != "q_proj.weight"}
    message = "RetNet: missing parameters ['q_proj.weight'], unknown parameters ['r']"
    with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
        own.nn.load_state_dict(layer, {**short, "r": weights["q_proj.weight"]})
    with pytest.raises(ShapeError, match=r"^RetNet: q_proj.weight must be \[32, 32\], got \[32, 31\]$"):
        own.nn.load_state_dict(layer, {**weights, "q_proj.weight": weights["q_proj.weight"][:, :31]})


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("linattn.nn", "torch jax mlx flax equinox"),
        ("linattn.nn.flax", "torch mlx equinox"),
        ("linattn.nn.equinox", "torch mlx flax"),
        ("linattn.nn.mlx", "torch jax flax equinox"),
        ("linattn.nn.torch", "jax mlx flax equinox"),
    ],
)
def test_no_module_imports_the_framework_of_another(module, forbidden):
    own = module.rpartition(".")[2]
    if own != "nn":
        pytest.importorskip("mlx.core" if own == "mlx" else own)
    code = f"import sys, {module}; print([n for n in {forbidden.split()} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_without_pytorch_its_layers_say_what_to_do():
    code = "import sys; sys.modules['torch'] = None; import linattn; linattn.nn.GatedDeltaNet"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    message = (
        "ImportError: linattn.nn.GatedDeltaNet needs PyTorch: pip install 'linattn[torch]'; "
        "linattn.nn.flax, linattn.nn.equinox and linattn.nn.mlx have the layers of other frameworks"
    )
    assert done.stderr.strip().endswith(message)


@pytest.mark.parametrize(
    ("module", "package", "message"),
    [
        ("flax", "flax", "linattn.nn.flax needs JAX and Flax: pip install 'linattn[jax]' flax"),
        ("equinox", "jax", "linattn.nn.equinox needs JAX and Equinox: pip install 'linattn[jax]' equinox"),
        ("mlx", "mlx", "linattn.nn.mlx needs MLX: pip install 'linattn[mlx]'"),
    ],
)
def test_what_a_framework_needs_is_said(module, package, message):
    code = f"import sys; sys.modules[{package!r}] = None; import linattn.nn.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1] == f"ImportError: {message}"


def test_there_is_nothing_else():
    nn = importlib.import_module("linattn.nn")
    with pytest.raises(AttributeError, match=r"^module 'linattn.nn' has no attribute 'Attention'$"):
        _ = nn.Attention
    assert {"GatedDeltaNet", "Cache", "from_fla"} <= set(dir(nn))
