# pyright: basic
"""Layers for MLX: those of :mod:`linattn.nn`, with the same parameters by name and shape.

>>> layer = linattn.nn.mlx.GatedDeltaNet(1024, num_heads=4, head_dim=128)
>>> y = layer(x)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

try:
    import mlx.core as mx
    from mlx import nn
    from mlx.nn import init
    from mlx.utils import tree_flatten
except ModuleNotFoundError as error:
    raise ImportError("linattn.nn.mlx needs MLX: pip install 'linattn[mlx]'") from error

from . import layers, mixer, model
from .cache import Cache
from .definition import Functional
from .expressions import Expressions

__all__ = ["Block", "Cache", "LanguageModel", "Module", "load_state_dict", "state_dict"]
__all__ += layers.__all__


class Functions(Expressions):
    """Activations, and what else layers compute with."""

    silu = staticmethod(nn.silu)
    sigmoid = staticmethod(mx.sigmoid)
    tanh = staticmethod(mx.tanh)
    relu = staticmethod(nn.relu)


class Tools:
    """What makes the parameters and the parts of a module."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self.dtype = dtype

    def parameter(self, values: Any, wide: bool = False) -> mx.array:
        """A parameter with these values; a ``wide`` one has no fewer bits than float32."""
        return mx.array(values).astype(mx.float32 if wide else self.dtype)

    def given(self, values: Any) -> mx.array:
        """A parameter with the values of the caller's array."""
        return self.parameter(values)

    def assign(self, parameter: mx.array, values: Any) -> None:
        """Give a parameter other values."""
        parameter[...] = mx.array(values).astype(parameter.dtype)

    def full(self, shape: tuple[int, ...], value: float) -> mx.array:
        """A constant."""
        return mx.full(shape, value)

    def uniform(self, shape: tuple[int, ...], least: float, most: float) -> mx.array:
        """Numbers between two."""
        return mx.random.uniform(least, most, shape)

    def normal(self, shape: tuple[int, ...], deviation: float) -> mx.array:
        """Numbers around zero."""
        return deviation * mx.random.normal(shape)

    def orthogonal(self, shape: tuple[int, int], gain: float = 1.0) -> mx.array:
        """A matrix of orthogonal rows or columns."""
        return init.orthogonal(gain)(mx.zeros(shape))

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
        """``x Wᵀ + b``."""
        made = nn.Linear(inputs, outputs, bias)
        made.apply(lambda x: x.astype(self.dtype))
        return made

    def part(self, name: str, *args: Any, **options: Any) -> Any:
        """A part of :mod:`linattn.nn.parts`, or a layer."""
        return PARTS[name](*args, **options, dtype=self.dtype)

    def chain(self, modules: dict[str, Any]) -> Chain:
        """Modules by the names of their places."""
        return Chain([modules.get(str(i), {}) for i in range(max(map(int, modules)) + 1)])


class Chain(list[Any]):
    """Modules by the names of their places; a list, since MLX makes lists of what it loads under numbers."""

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(int(place) if isinstance(place, str) else place)


class Module(Functional, nn.Module):
    """What joins a layer or a part to MLX."""

    functions = Functions
    constant = staticmethod(mx.stop_gradient)

    def begin(self, dtype: mx.Dtype = mx.float32) -> Tools:
        """Begin a module: what makes its parameters."""
        nn.Module.__init__(self)
        return Tools(dtype)


PARTS: dict[str, Any] = {definition.__name__: mixer.joined(definition, Module, __name__) for definition in model.definitions()}
Block, LanguageModel = PARTS["Block"], PARTS["LanguageModel"]
globals().update(PARTS)


def state_dict(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters of a module as NumPy arrays, by the names that they have in PyTorch."""
    return {name: np.array(x) for name, x in tree_flatten(module.parameters())}


def load_state_dict(module: Any, weights: Mapping[str, Any]) -> Any:
    """Give a module parameters that another framework's has: NumPy arrays, or what becomes one, by name.

    Args:
        module: A module of this page.
        weights: All of its parameters, e.g. ``{name: x.numpy() for name, x in layer.state_dict().items()}``.

    Returns:
        ``module``.

    Raises:
        OptionError: A parameter is missing, unknown, or of another shape.
    """
    before = dict(tree_flatten(module.parameters()))
    mixer.check_weights(type(module).__name__, {name: x.shape for name, x in before.items()}, weights)
    module.load_weights([(name, mx.array(np.asarray(x)).astype(before[name].dtype)) for name, x in weights.items()])
    return module
