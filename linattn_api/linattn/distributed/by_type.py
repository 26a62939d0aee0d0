# pyright: basic
"""JAX arrays whose types say how they are sharded, over axes of a mesh in explicit mode: an operator follows them by itself.

It maps itself over the axes along which batch, tokens and heads of its values lie, and brings its other arguments there. Along
the tokens' axis ranks exchange summaries; elsewhere they have nothing to tell each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from .. import dispatch
from ..call import method_name
from ..context import Context
from ..errors import ContextError
from ..feature_maps import FeatureMap
from ..plugin import MixedState
from ..spec import Arg, OpSpec
from .on_jax import ShardAxis, arrays_in

__all__ = ["context_of"]

Axes = Any
"""What lies along one dimension: no axis of the mesh, one, or several."""
FOLLOWED = ("B", "T", "H", "HV", "D")


def context_of(
    spec: OpSpec, arrays: tuple[Any, ...], keywords: dict[str, Any], axis: ShardAxis | None = None
) -> Followed | None:
    """How the values of a call are sharded, as far as their type says it; None if it says nothing of any use, which beside the
    axis that shares the tokens, where the caller names it, is nothing of other axes.
    """
    names = tuple(arg.name for arg in spec.args)
    like = dict(zip(names, arrays, strict=True))[spec.like]
    if not hasattr(like, "aval") or not followable(spec, arrays, keywords):
        return None
    sharding, args = like.aval.sharding, dict(zip(names, spec.args, strict=True))
    mesh = sharding.mesh
    explicit = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit}
    entries = (*sharding.spec, *[None] * (like.ndim - len(sharding.spec)))
    along = {
        symbol: entry
        for symbol, entry in zip(args[spec.like].shapes[0], entries, strict=False)
        if symbol in FOLLOWED and entry is not None and explicit.issuperset(named(entry))
    }
    if "HV" in along:  # a value head and its keys stay together
        heads = [x.shape[2] for x, arg in zip(arrays, spec.args, strict=True) if x is not None and "H" in arg.shapes[0][2:3]]
        if any(count % mesh.shape[name] for count in heads for name in named(along["HV"])):
            del along["HV"]
    if axis is not None:
        along = {symbol: entry for symbol, entry in along.items() if symbol != "T" and axis.name not in named(entry)}
        return Followed(mesh, along | {"T": axis.name}, axis.replicated()) if along and axis.name in explicit else None
    return Followed(mesh, along) if along else None


def followable(spec: OpSpec, arrays: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether an operator has a state, and every array as many dimensions as its symbols, by which it is followed.

    Where one has not, the call is refused as any other.
    """
    states: tuple[Arg, ...] = spec.state(keywords)
    state: Any = keywords.get("initial_state")
    given: list[tuple[Arg, Any]] = [
        *zip(spec.args, arrays, strict=True),
        *((arg, keywords[arg.name]) for arg in spec.keyword_args),
    ]
    if spec.state_type is None:
        given += [(arg, state) for arg in states]
    elif isinstance(state, spec.state_type):
        given += zip(states, state, strict=True)
    elif state is not None:
        return False
    fits = (x is None or any(getattr(x, "ndim", None) == len(shape) for shape in arg.shapes) for arg, x in given)
    return bool(states) and all(fits)


def named(entry: Axes) -> list[str]:
    """The axes along one dimension."""
    return [] if entry is None else list(entry) if isinstance(entry, tuple) else [entry]


class Followed(Context):
    """A mesh, and which of its axes lie along the dimensions of the values.

    Attributes:
        mesh: The mesh.
        along: By symbol, those of query/key heads being those of the value heads.
        axis: That of the tokens, where the caller names it.
    """

    def __init__(self, mesh: Any, along: dict[str, Axes], axis: ShardAxis | None = None) -> None:
        self.mesh, self.axis = mesh, axis
        self.along = along | ({"H": along["HV"]} if "HV" in along else {})

    def run(
        self,
        spec: OpSpec,
        form: str | None,
        arrays: tuple[Any, ...],
        keywords: dict[str, Any],
        feature_map: str | FeatureMap | None,
        backend: str | Sequence[str] | None,
    ) -> Any:
        """``shard_map`` around the call."""
        rank = self._rank(spec, form, keywords)
        objects = {"feature_map": feature_map, **{name: keywords[name] for name, _ in spec.holders}}
        given = dict(zip((arg.name for arg in spec.args), arrays, strict=True)) | keywords
        args = {arg.name: arg for arg in (*spec.args, *spec.keyword_args)}
        states = self._states(spec, keywords)
        here: dict[str, Any] = {}
        for name, x in given.items():
            if name in args and x is not None:
                here[name] = self._spec(args[name], x)
        if keywords["initial_state"] is not None:
            here["initial_state"] = states
        if keywords["cu_seqlens"] is not None:
            here["cu_seqlens"] = PartitionSpec()
        placed = {name: self._placed(given[name], spec) for name, spec in here.items()}
        held = {name: arrays_in(x) for name, x in objects.items()}
        heads = given[spec.like].shape[2]
        of_held = {
            name: {field: self._of_field(objects[name], field, x, heads) for field, x in of.items()}
            for name, of in held.items()
        }

        def on_a_rank(placed: dict[str, Any], held: dict[str, dict[str, Any]]) -> Any:
            local = {**given, **placed}
            local |= {name: replace(x, **held[name]) if held[name] else x for name, x in objects.items()}
            own, rest = tuple(local[arg.name] for arg in spec.args), {name: local[name] for name in keywords}
            if rank is None:
                return dispatch.run(spec, form, own, rest, local["feature_map"], backend)
            return rank.run(spec, form, own, rest, local["feature_map"], backend)

        out = here[spec.like], states if keywords["output_final_state"] else PartitionSpec()
        axes = {name for entry in self.along.values() for name in named(entry)}
        mapped = jax.shard_map(on_a_rank, mesh=self.mesh, in_specs=(here, of_held), out_specs=out, axis_names=axes)
        return mapped(placed, jax.tree.map(self._placed, held, of_held))

    def _rank(self, spec: OpSpec, form: str | None, keywords: dict[str, Any]) -> ShardAxis | None:
        """What connects the ranks along the tokens; None where each has all of them."""
        entry, label = named(self.along.get("T")), method_name(form, spec.name)
        if self.axis is not None or not entry:
            return self.axis
        if len(entry) > 1:
            raise ContextError(f"{label}: the tokens lie along the axes {entry}, and ranks exchange along one of them")
        if keywords["cu_seqlens"] is not None:
            raise ContextError(
                f"{label}: the tokens lie along the axis {entry[0]!r}, and which sequences its ranks share must be known while "
                f"they are traced: pass context=shard_axis({entry[0]!r}, cu_seqlens=...) with plain integers"
            )
        return ShardAxis(entry[0], "contiguous", None, True, None)

    def _states(self, spec: OpSpec, keywords: dict[str, Any]) -> Any:
        """Where states lie: their rows and heads with those of the values."""
        packed = keywords["cu_seqlens"] is not None or (self.axis is not None and self.axis.cu_seqlens is not None)
        found = tuple(self._of_symbols(arg.shapes[0], not packed) for arg in spec.state(keywords))
        return found[0] if spec.state_type is None else MixedState(*found)

    def _spec(self, arg: Arg, x: Any) -> PartitionSpec:
        """Where an array is to lie."""
        return self._of_symbols(next(shape for shape in arg.shapes if len(shape) == x.ndim), True)

    def _of_symbols(self, shape: Sequence[str], rows: bool) -> PartitionSpec:
        along = self.along | ({"N": self.along.get("B")} if rows else {})
        return PartitionSpec(*(along.get(symbol) for symbol in shape))

    def _of_field(self, holder: Any, field: str, x: Any, heads: int) -> PartitionSpec:
        """Where an array of a gate or a feature map is to lie: by the axes that a map names, or else by heads."""
        axes = holder.axes if isinstance(holder, FeatureMap) else {}
        if field not in axes:
            return self._of_heads(x, heads)
        symbols = axes[field].split()[: x.ndim]
        return PartitionSpec(*(self.along.get(symbol) if n > 1 else None for symbol, n in zip(symbols, x.shape, strict=True)))

    def _of_heads(self, x: Any, heads: int) -> PartitionSpec:
        """Where an array of a gate or a feature map is to lie, which may have a row for each head."""
        return PartitionSpec(self.along.get("HV")) if x.ndim and x.shape[0] == heads else PartitionSpec()

    def _placed(self, x: Any, spec: Any) -> Any:
        """An array, or each of a state, brought to where it is to lie."""
        if isinstance(x, tuple):
            return type(x)(*(self._placed(y, each) for y, each in zip(x, spec, strict=True)))
        return reshard(x, NamedSharding(self.mesh, spec))
