# pyright: basic
"""Layers for Flax (``nnx``): those of :mod:`linattn.nn`, with the same parameters by name and shape.

>>> layer = linattn.nn.flax.GatedDeltaNet(1024, num_heads=4, head_dim=128, rngs=nnx.Rngs(0))
>>> y = layer(x)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    from flax import nnx
except ModuleNotFoundError as error:
    raise ImportError("linattn.nn.flax needs JAX and Flax: pip install 'linattn[jax]' flax") from error

from . import layers, mixer, model
from .cache import Cache
from .definition import Functional
from .jax import Functions, Values, flat_names

__all__ = ["Block", "Cache", "LanguageModel", "Module", "load_state_dict", "state_dict"]
__all__ += layers.__all__


class Tools(Values):
    """What makes the parameters and the parts of a module."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any) -> None:
        super().__init__(rngs.params)
        self.framework = {"rngs": rngs, "dtype": dtype}
        self.dtype = dtype

    def parameter(self, values: Any, wide: bool = False) -> nnx.Param:
        """A parameter with these values; a ``wide`` one has no fewer bits than float32."""
        return nnx.Param(jnp.asarray(values, jnp.promote_types(self.dtype, jnp.float32) if wide else self.dtype))

    def given(self, values: Any) -> nnx.Param:
        """A parameter with the values of the caller's array."""
        return self.parameter(values[...] if isinstance(values, nnx.Param) else values)

    def assign(self, parameter: nnx.Param, values: Any) -> None:
        """Give a parameter other values."""
        parameter[...] = jnp.asarray(values, parameter.dtype)

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> Any:
        """``x Wᵀ + b``."""
        return self.part("Linear", inputs, outputs, bias)

    def part(self, name: str, *args: Any, **options: Any) -> Any:
        """A part of :mod:`linattn.nn.parts`, or a layer."""
        return PARTS[name](*args, **options, **self.framework)

    def chain(self, modules: dict[str, Any]) -> Any:
        """Modules by the names of their places."""
        return nnx.Dict(modules)


class Module(Functional, nnx.Module):
    """What joins a layer or a part to Flax."""

    functions = Functions
    constant = staticmethod(jax.lax.stop_gradient)

    def begin(self, *, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> Tools:
        """Begin a module: what makes its parameters."""
        return Tools(rngs, dtype)

    @staticmethod
    def value(parameter: Any) -> Any:
        """The array of a parameter."""
        return None if parameter is None else parameter[...]


PARTS: dict[str, Any] = {definition.__name__: mixer.joined(definition, Module, __name__) for definition in model.definitions()}
Block, LanguageModel = PARTS["Block"], PARTS["LanguageModel"]
globals().update(PARTS)


def state_dict(module: nnx.Module) -> dict[str, np.ndarray]:
    """The parameters of a module as NumPy arrays, by the names that they have in PyTorch."""
    return {name: np.asarray(x) for name, x in flat_names(nnx.to_pure_dict(nnx.state(module, nnx.Param))).items()}


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
    mixer.check_weights(type(module).__name__, {k: x.shape for k, x in state_dict(module).items()}, weights)
    for name, x in weights.items():
        found = module
        for key in name.split("."):
            found = found[key] if isinstance(found, nnx.Dict) else getattr(found, key)
        found[...] = jnp.asarray(np.asarray(x), found.dtype)
    return module
