# pyright: basic
"""Layers for Equinox: those of :mod:`linattn.nn`, with the same parameters by name and shape.

>>> layer = linattn.nn.equinox.GatedDeltaNet(1024, num_heads=4, head_dim=128, key=jax.random.key(0))
>>> y = layer(x)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

try:
    import equinox as eqx
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError as error:
    raise ImportError("linattn.nn.equinox needs JAX and Equinox: pip install 'linattn[jax]' equinox") from error

from . import layers, mixer, model
from .cache import Cache
from .definition import Functional
from .jax import Functions, Values, flat_names

__all__ = ["Block", "Cache", "LanguageModel", "Module", "load_state_dict", "state_dict"]
__all__ += layers.__all__


def keys_of(key: Any) -> Iterator[Any]:
    """One key after the other."""
    while True:
        key, this = jax.random.split(key)
        yield this


class Parameter:
    """An array that can still be given other values while a module is being made."""

    def __init__(self, values: Any, dtype: Any) -> None:
        self.array = jnp.asarray(values, dtype)


class Tools(Values):
    """What makes the parameters and the parts of a module."""

    def __init__(self, keys: Iterator[Any], dtype: Any) -> None:
        super().__init__(lambda: next(keys))
        self.framework = {"keys": keys, "dtype": dtype}
        self.dtype = dtype

    def parameter(self, values: Any, wide: bool = False) -> Parameter:
        """A parameter with these values; a ``wide`` one has no fewer bits than float32."""
        return Parameter(values, jnp.promote_types(self.dtype, jnp.float32) if wide else self.dtype)

    def given(self, values: Any) -> Parameter:
        """A parameter with the values of the caller's array."""
        return self.parameter(values)

    def assign(self, parameter: Parameter, values: Any) -> None:
        """Give a parameter other values."""
        parameter.array = jnp.asarray(values, parameter.array.dtype)

    def linear(self, inputs: int, outputs: int, bias: bool = False) -> Any:
        """``x Wᵀ + b``."""
        return self.part("Linear", inputs, outputs, bias)

    def part(self, name: str, *args: Any, **options: Any) -> Draft:
        """A part of :mod:`linattn.nn.parts`, or a layer."""
        return DRAFTS[name](*args, **options, **self.framework)

    def chain(self, modules: dict[str, Any]) -> dict[str, Any]:
        """Modules by the names of their places."""
        return modules


class Draft:
    """A module while it is being made, when attributes can be set; :func:`finished` makes a module of it."""

    functions = Functions

    def begin(self, *, key: Any = None, keys: Iterator[Any] | None = None, dtype: Any = jnp.float32) -> Tools:
        """Begin a module: what makes its parameters."""
        return Tools(keys_of(key) if keys is None else keys, dtype)


def finished(x: Any) -> Any:
    """The array of a parameter, the module of a draft, and what else there is as it is."""
    if isinstance(x, Parameter):
        return x.array
    if isinstance(x, Draft):
        return PARTS[type(x).__name__](x)
    return {name: finished(y) for name, y in x.items()} if isinstance(x, dict) else x


NODES = (Parameter, Draft, dict)
"""What of a draft becomes a node of the module's tree."""


class Module(Functional, eqx.Module):
    """What joins a layer or a part to Equinox: a pytree of its parameters and of the modules in it.

    Attributes:
        children: Parameters and modules by name; ``module.q_proj`` is ``module.children["q_proj"]``.
        settings: Everything else.
    """

    children: dict[str, Any]
    settings: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __init__(self, *args: Any, **options: Any) -> None:
        given = args[0] if args else None
        made = vars(given if isinstance(given, Draft) else DRAFTS[type(self).__name__](*args, **options))
        self.children = {name: finished(x) for name, x in made.items() if isinstance(x, NODES)}
        self.settings = tuple((name, x) for name, x in made.items() if not isinstance(x, NODES))

    def __getattr__(self, name: str) -> Any:
        if name in ("children", "settings") or name.startswith("__"):
            raise AttributeError(name)
        if name in self.children:
            return self.children[name]
        for key, value in self.settings:
            if key == name:
                return value
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    functions = Functions
    constant = staticmethod(jax.lax.stop_gradient)


def _joined(base: type, **members: Any) -> dict[str, Any]:
    return {definition.__name__: mixer.joined(definition, base, __name__, **members) for definition in model.definitions()}


DRAFTS = _joined(Draft)
PARTS = _joined(Module, __init__=Module.__init__)
Block, LanguageModel = PARTS["Block"], PARTS["LanguageModel"]
globals().update(PARTS)


def state_dict(module: eqx.Module) -> dict[str, np.ndarray]:
    """The parameters of a module as NumPy arrays, by the names that they have in PyTorch."""
    return {name: np.asarray(x) for name, x in flat_names(nested(module)).items()}


def nested(x: Any) -> Any:
    """A module as dictionaries."""
    children = x.children if isinstance(x, Module) else x
    return {name: nested(y) for name, y in children.items()} if isinstance(children, dict) else children


def load_state_dict(module: Any, weights: Mapping[str, Any]) -> Any:
    """A module like this one with parameters that another framework's has: NumPy arrays, or what becomes one, by name.

    Args:
        module: A module of this page.
        weights: All of its parameters, e.g. ``{name: x.numpy() for name, x in layer.state_dict().items()}``.

    Raises:
        OptionError: A parameter is missing, unknown, or of another shape.
    """
    before = flat_names(nested(module))
    mixer.check_weights(type(module).__name__, {name: x.shape for name, x in before.items()}, weights)
    names = list(before)
    after = [jnp.asarray(np.asarray(weights[name]), before[name].dtype) for name in names]
    return eqx.tree_at(lambda m: [flat_names(nested(m))[name] for name in names], module, after)
