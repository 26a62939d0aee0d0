# pyright: basic
"""What every layer shares, whatever its framework: a mixer of tokens, ``[B, T, D]`` to ``[B, T, D]``."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any, ClassVar

from ..context import Context
from ..errors import OptionError, ShapeError
from ..feature_maps.base import learned
from ..feature_maps.names import resolve
from ..frameworks import framework_of
from ..positions import rotary
from .cache import Cache
from .definition import Definition
from .expressions import joined_heads
from .packing import Packing
from .parts import LearnedMap
from .span import Span

__all__ = ["Mixer"]


class Mixer(Definition):
    """Base class of layers; :mod:`linattn.nn.torch` and its siblings join it with the modules of their framework.

    A layer says in ``__init__`` what its parameters are, and in ``mix`` what it computes, in terms that every framework has.

    Attributes:
        operator: The family of :mod:`linattn` that it runs.
        paper: Where it comes from.
        hidden_size: ``D``.
        layer_idx: Which layer of a model it is: under this index its states are in the cache.
    """

    operator: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    hidden_size: int
    layer_idx: int
    use_short_conv: bool
    feature_map: Any

    def start(self, hidden_size: int, layer_idx: int, framework: dict[str, Any]) -> Any:
        """Begin a layer: what makes its parameters."""
        make = self.begin(**framework)
        self.hidden_size, self.layer_idx = hidden_size, layer_idx
        return make

    def forward(
        self,
        x: Any,
        *,
        cache: Cache | None = None,
        mask: Any = None,
        cu_seqlens: Any = None,
        context: Context | None = None,
        shared: dict[str, Any] | None = None,
    ) -> Any:
        """Mix the tokens of ``x``.

        Args:
            x: ``[B, T, D]``.
            cache: Goes on from the states that it holds, and leaves in it those after the last token. Default none: every
                sequence starts anew, and nothing is kept.
            mask: ``[B, T]``, nonzero where a token is one and zero where there is padding, on whichever side: a batch of
                sequences of different lengths. Rows of padding are zero in the result.
            cu_seqlens: Offsets ``[N+1]``, int32 or int64, of sequences packed end to end along ``T``; ``B`` must be 1.
            context: How the tokens are spread over devices, from :mod:`linattn.distributed`: ``x`` has this one's own, and
                packed sequences are part of the plan. Default none: ``x`` has all of them.
            shared: What layers of one model tell each other in this call (RWKV-7's first values).

        Returns:
            ``[B, T, D]``, in the dtype of ``x``.

        Raises:
            ShapeError: A shape is wrong, or the cache holds another number of sequences.
            OptionError: Two of ``mask``, ``cu_seqlens`` and ``context`` are given, or ``cache`` and ``context``.
        """
        if len(x.shape) != 3 or x.shape[-1] != self.hidden_size:
            raise ShapeError(f"{type(self).__name__}: x must be [B, T, D] = [B, T, {self.hidden_size}], got {list(x.shape)}")
        if mask is not None and cu_seqlens is not None:
            raise OptionError(f"{type(self).__name__}: mask and cu_seqlens both say where sequences lie: give one of them")
        if context is not None:
            self._check_context(mask, cu_seqlens, cache)
        if mask is None:
            return self._mix(x, cache, cu_seqlens, context, shared)
        packing = Packing.of(mask, x)
        return packing.unpack(self._mix(packing.pack(x), cache, packing.offsets, None, shared))

    def _check_context(self, mask: Any, cu_seqlens: Any, cache: Cache | None) -> None:
        """What a call on one device's tokens cannot have beside them."""
        owner = type(self).__name__
        if mask is not None or cu_seqlens is not None:
            given = "mask" if cu_seqlens is None else "cu_seqlens"
            raise OptionError(
                f"{owner}: context= says where sequences lie among the tokens of all devices: pass their offsets to it, and no "
                f"{given} to the call"
            )
        if cache is not None:
            raise OptionError(f"{owner}: a cache holds the states of whole sequences: call with context= or with cache=")

    def _mix(self, x: Any, cache: Cache | None, offsets: Any, context: Context | None, shared: dict[str, Any] | None) -> Any:
        span = Span(self, x, cache, offsets, {} if shared is None else shared, self.decodes_in_place(), context)
        y = self.mix(x, span)
        span.finish()
        return y

    def mix(self, x: Any, span: Span) -> Any:
        """``[B, T, D]`` of ``x``; states come from ``span``, and go there."""
        raise NotImplementedError(f"{type(self).__name__} must define mix")

    # -- what layers have in common ------------------------------------------------------------------------------------

    def heads(self, x: Any, width: int) -> Any:
        """``[B, T, H·K]`` to ``[B, T, H, K]``."""
        return x.reshape(*x.shape[:2], x.shape[2] // width, width)  # sizes are said: there may be no tokens to infer them of

    def flat(self, x: Any) -> Any:
        """``[B, T, H, V]`` to ``[B, T, H·V]``."""
        return joined_heads(x)

    def make_map(self, make: Any, feature_map: Any) -> None:
        """Keep the feature map of queries and keys, or none; its arrays are the first values of parameters of the layer."""
        phi = None if feature_map is None else resolve(feature_map)
        self.feature_map = make.part("LearnedMap", phi) if phi is not None and learned(phi) else phi

    def phi(self, span: Span, by_operator: bool = True) -> Any:
        """The feature map of this call: with the layer's parameters, and told where tokens are if it depends on that.

        Args:
            span: The call.
            by_operator: Whether an operator applies it, which moves a ``start`` along the spans of a context itself.
        """
        phi = self.feature_map.map() if isinstance(self.feature_map, LearnedMap) else self.feature_map
        told = by_operator and span.context is not None and hasattr(phi, "start")
        return phi if phi is None or not phi.positional or told else phi.at(span.positions())

    def rotated(self, x: Any, positions: Any) -> Any:
        """Queries or keys ``[B, T, H, K]`` with rotary positions ``[B, T]``."""
        return self.run(rotated, (x, positions), {})

    def grouped(self, x: Any, heads: int) -> Any:
        """Heads of keys and values, repeated for the queries of their group: ``[B, T, heads, …]``."""
        return x if x.shape[2] == heads else framework_of(x).repeat_heads(x, heads)

    def whole(self, span: Span) -> dict[str, Any]:
        """The option of an operator that reads the whole sequence in both directions, which leaves no state."""
        if span.cache is not None:
            raise OptionError(f"{type(self).__name__}: causal=False reads the whole sequence at once: call it without a cache")
        return {"causal": False}

    def projected(self, x: Any, span: Span, names: str, activation: str | None = None) -> list[Any]:
        """Projections ``{name}_proj`` of ``x``, each through ``{name}_conv1d`` where the layer has convolutions."""
        found = [getattr(self, f"{name}_proj")(x) for name in names]
        if self.use_short_conv:
            return [getattr(self, f"{name}_conv1d")(y, span) for name, y in zip(names, found, strict=True)]
        return found if activation is None else [getattr(self.functions, activation)(y) for y in found]


def rotated(x: Any, positions: Any) -> Any:
    """Queries or keys ``[B, T, H, K]`` with rotary positions ``[B, T]``, or ``[1, T]`` for all rows."""
    return rotary(x, positions=positions if positions.shape[0] == x.shape[0] else positions[0])


def width(owner: str, name: str, hidden_size: int, expand: float, heads: int) -> int:
    """``hidden_size · expand``, which must be a whole number of heads."""
    total = round(hidden_size * expand)
    if not math.isclose(total, hidden_size * expand) or total % heads:
        raise OptionError(f"{owner}: hidden_size · {name} must be a multiple of {heads} heads, got {hidden_size} · {expand:g}")
    return total


def groups(owner: str, fewer: str, few: int, more: str, many: int) -> int:
    """How many of ``many`` heads share one of ``few``."""
    if few < 1 or many % few:
        raise OptionError(f"{owner}: {more} must be a multiple of {fewer} = {few}, got {many}")
    return many // few


def choice(owner: str, name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """``value``, one of ``choices``."""
    if value not in choices:
        raise OptionError(f"{owner}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def joined(definition: type, base: type, module: str, **members: Any) -> Any:
    """The class of a framework, ``base``, that is what ``definition`` says."""
    members |= {"__doc__": definition.__doc__, "__module__": module}
    return types.new_class(definition.__name__, (definition, base), exec_body=lambda namespace: namespace.update(members))


def check_weights(owner: str, expected: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Every parameter of a module is there, no other, and each has its shape."""
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unknown:
        raise OptionError(f"{owner}: missing parameters {missing}, unknown parameters {unknown}")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != tuple(shape):
            raise ShapeError(f"{owner}: {name} must be {list(shape)}, got {list(weights[name].shape)}")
