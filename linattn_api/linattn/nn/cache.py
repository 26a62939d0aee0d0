# pyright: basic
"""The memory of a model between two calls: what every layer has to know of the tokens before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from ..errors import OptionError, ShapeError

__all__ = ["Cache"]


class Cache:
    """The states of a model after the tokens that it has read: of the operators, of the convolutions, and the positions.

    A new one is empty. A model that is called with it goes on from what it holds and leaves in it what it then knows, so that
    reading a prompt, reading it in pieces and decoding are one call. Every array has the sequences of the batch as its first
    axis. In JAX it is a pytree: a compiled function takes it, and returns it.

    >>> cache = Cache()
    >>> y = layer(prompt, cache=cache)
    >>> y = layer(token, cache=cache)

    Attributes:
        layers: The arrays of every layer, by its ``layer_idx`` and their names: ``recurrent_state`` (``recurrent_state.kv`` and
            so on where a state has parts), ``conv_state.0`` and so on, one for each convolution, and ``length``, how many
            tokens of each sequence the layer has read, ``[N]`` int32.
    """

    def __init__(self, layers: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        self.layers: dict[int, dict[str, Any]] = {index: dict(arrays) for index, arrays in (layers or {}).items()}

    @property
    def lengths(self) -> Any:
        """Tokens read of each sequence ``[N]``, ``None`` before the first call."""
        return next((arrays["length"] for arrays in self.layers.values()), None)

    def reorder(self, indices: Any) -> Self:
        """Let row ``n`` of the batch go on from what row ``indices[n]`` holds: beams, or another number of sequences.

        Args:
            indices: Rows ``[N']``, an array of integers of the cache's framework; one may come several times, or not at all.

        Returns:
            This cache.
        """
        return self._replace(lambda x: x[indices])

    def copy(self) -> Cache:
        """A cache of its own, with copies of the arrays, to go on from one prompt in several ways."""
        return Cache(self.layers)._replace(lambda x: x.clone() if hasattr(x, "clone") else x + 0)

    def detach(self) -> Self:
        """Let no gradient reach what was read before (PyTorch): training on segments of a long text. Returns this cache."""
        return self._replace(lambda x: x.detach())

    def to(self, device: Any) -> Self:
        """Move every array to a device (PyTorch). Returns this cache."""
        return self._replace(lambda x: x.to(device=device))

    def state_dict(self) -> dict[str, Any]:
        """Every array by one name, ``{layer}.{name}``: to be stored with ``torch.save``, safetensors or ``numpy.savez``."""
        return {f"{index}.{name}": x for index, arrays in self.layers.items() for name, x in arrays.items()}

    @classmethod
    def from_state_dict(cls, arrays: Mapping[str, Any]) -> Self:
        """The cache that :meth:`state_dict` made these arrays of.

        Raises:
            OptionError: A name is none that :meth:`state_dict` gives.
        """
        cache = cls()
        for key, x in arrays.items():
            index, dot, name = key.partition(".")
            if not dot or not index.isdecimal():
                raise OptionError(f"Cache: expected names such as '0.recurrent_state', got {key!r}")
            cache.layers.setdefault(int(index), {})[name] = x
        return cache

    def of_layer(self, layer_idx: int, sequences: int) -> dict[str, Any]:
        """The arrays of one layer, none before its first call.

        Raises:
            ShapeError: It holds another number of sequences than the call has.
        """
        arrays = self.layers.get(layer_idx, {})
        held = arrays["length"].shape[0] if arrays else sequences
        if held != sequences:
            raise ShapeError(f"the cache holds {held} sequences, but this call has {sequences}: reorder(indices) picks rows")
        return arrays

    def _replace(self, function: Callable[[Any], Any]) -> Self:
        for arrays in self.layers.values():
            arrays.update({name: function(x) for name, x in arrays.items()})
        return self

    def __repr__(self) -> str:
        lengths = self.lengths
        return f"Cache({len(self.layers)} layers, {0 if lengths is None else lengths.shape[0]} sequences)"
