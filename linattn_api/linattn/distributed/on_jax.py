# pyright: basic
"""Context parallelism over an axis of a JAX mesh: one program for all ranks, with the collectives of ``jax.lax``.

Which rank runs is not known while the program is traced. What differs between ranks is in tables of all of them, and the rank
reads its own row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec

from ..affine import act, act_transposed, gradient_of
from ..context import Context
from ..errors import ContextError, OptionError
from ..feature_maps import FeatureMap
from ..frameworks import framework_of
from ..spec import OpSpec
from . import lowering
from .exchange import Exchange, Sources, taken
from .layout import LAYOUTS, Chain, Layout, Shard, plain_offsets, shard_of, tokens_of_rank

__all__ = ["ShardAxis", "arrays_in", "shard_axis"]

Array = Any


class ShardAxis(Context, Exchange):
    """An axis of a mesh that shares the tokens: what operators on JAX arrays take as ``context=``. Made by :func:`shard_axis`.

    Attributes:
        name: Name of the axis.
        layout: ``"contiguous"`` or ``"zigzag"``.
        cu_seqlens: Offsets of packed sequences among the tokens of all ranks, or None.
        replicate_states: Whether every rank gets every final state.
        mesh: Of calls outside ``shard_map``; None for the mesh that ``jax.set_mesh`` set.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        cu_seqlens: tuple[int, ...] | None,
        replicate_states: bool,
        mesh: jax.sharding.Mesh | None,
    ) -> None:
        self.layout: Layout = layout
        self.name, self.cu_seqlens = name, cu_seqlens
        self.replicate_states, self.mesh = replicate_states, mesh

    def __repr__(self) -> str:
        packed = (
            "" if self.cu_seqlens is None else f", {len(self.cu_seqlens) - 1} packed sequences of {self.cu_seqlens[-1]} tokens"
        )
        return f"<ShardAxis {self.name!r}, {self.layout}{packed}{', states replicated' if self.replicate_states else ''}>"

    def run(
        self,
        spec: OpSpec,
        form: str | None,
        arrays: tuple[Any, ...],
        keywords: dict[str, Any],
        feature_map: str | FeatureMap | None,
        backend: str | Sequence[str] | None,
    ) -> Any:
        """Run one call: on this rank's tokens inside ``shard_map``, on those of all ranks outside."""
        if not isinstance(arrays[0], jax.Array):
            raise ContextError(f"{spec.name}: shard_axis takes JAX arrays, got {type(arrays[0]).__name__}")
        if self._is_on_a_rank():
            return self._on_a_rank(self.replicate_states, spec, form, arrays, keywords, feature_map, backend)
        return self._on_all(spec, form, arrays, keywords, feature_map, backend)

    def positions(self, x: Array) -> Array:
        """The position of each token of ``x [B, T, …]`` in its sequence ``[T]``, int32; of all ranks outside ``shard_map``."""
        here = self._is_on_a_rank()
        ranks = lax.axis_size(self.name) if here else self._mesh_of("positions").shape[self.name]
        tokens = x.shape[1] if here else tokens_of_rank(x.shape[1], ranks, self.layout)
        table = [
            np.concatenate([np.arange(first, first + count) for first, count in peer.runs(tokens)])
            for peer in self._shard(ranks, tokens).peers
        ]
        return self._own(table) if here else jnp.asarray(np.concatenate(table), jnp.int32)

    def replicated(self) -> ShardAxis:
        """The same, with every final state on every rank."""
        return ShardAxis(self.name, self.layout, self.cu_seqlens, True, self.mesh)

    def _is_on_a_rank(self) -> bool:
        """Whether this is traced inside ``shard_map`` over the axis."""
        return self.name in jax.sharding.get_abstract_mesh().manual_axes

    def _shard(self, ranks: int, tokens: int) -> Shard:
        """What rank 0 has of the tokens, and who its peers are."""
        return shard_of(ranks, 0, self.layout, 0 if self.cu_seqlens is None else tokens, self.cu_seqlens)

    def _mesh_of(self, owner: str) -> Any:
        """The mesh of a call outside ``shard_map``."""
        here = jax.sharding.get_abstract_mesh()
        # inside shard_map over other axes of the same mesh, it is known by what is manual there
        mesh = here if self.mesh is None or self.mesh.shape_tuple == here.shape_tuple else self.mesh
        if self.name not in mesh.axis_names:
            raise ContextError(
                f"{owner}: no mesh with an axis {self.name!r} is known here, only the axes {list(mesh.axis_names)}: call "
                f"inside jax.shard_map over that axis, under jax.set_mesh(mesh), or with shard_axis({self.name!r}, mesh=mesh)"
            )
        return mesh

    def _on_a_rank(self, replicate_states: bool, *call: Any) -> Any:
        return lowering.run(self, partial(self._shard, lax.axis_size(self.name)), replicate_states, *call)

    def _on_all(
        self,
        spec: OpSpec,
        form: str | None,
        arrays: tuple[Any, ...],
        keywords: dict[str, Any],
        feature_map: str | FeatureMap | None,
        backend: str | Sequence[str] | None,
    ) -> Any:
        """``shard_map`` around the call: along the axis each rank has its tokens. The other axes are followed where the arrays'
        types say what lies along them, and stay the compiler's where they do not.
        """
        from .by_type import context_of  # which imports this module

        mesh = self._mesh_of(spec.name)
        by_token = {arg.name: arg for arg in (*spec.args, *spec.keyword_args)}
        named = {**dict(zip((arg.name for arg in spec.args), arrays, strict=True)), **keywords}
        objects = {"feature_map": feature_map, **{name: keywords[name] for name, _ in spec.holders}}
        held = {name: arrays_in(x) for name, x in objects.items()}
        given = {name: x for name, x in named.items() if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))}
        tokens, anywhere = PartitionSpec(None, self.name), PartitionSpec()
        specs = {
            name: tokens if name in by_token and lowering.has_tokens(by_token[name], x) else anywhere
            for name, x in given.items()
        }

        offsets = None if self.cu_seqlens is None else jnp.zeros(len(self.cu_seqlens), jnp.int32)

        def put_together(given: dict[str, Any], held: dict[str, dict[str, Any]]) -> tuple[Any, Any, Any]:
            local = {
                **named,
                **given,
                **{name: replace(objects[name], **held[name]) if held[name] else objects[name] for name in objects},
            }
            return tuple(local[arg.name] for arg in spec.args), {name: local[name] for name in keywords}, local["feature_map"]

        def refuse(given: dict[str, Any], held: dict[str, dict[str, Any]]) -> None:
            own, rest, phi = put_together(given, held)
            if phi is None:  # a map is applied on the ranks, and what comes of it is looked at there
                lowering.check(spec, form, own, rest, backend, offsets)

        @jax.shard_map(mesh=mesh, in_specs=(specs, anywhere), out_specs=(tokens, anywhere), axis_names={self.name})
        def on_a_rank(given: dict[str, Any], held: dict[str, dict[str, Any]]) -> Any:
            own, rest, phi = put_together(given, held)
            return self._on_a_rank(True, spec, form, own, rest, phi, backend)

        jax.eval_shape(refuse, given, held)  # by shapes alone: arrays may lie anywhere
        tokens_of_rank(arrays[0].shape[1], mesh.shape[self.name], self.layout)
        if (followed := context_of(spec, arrays, keywords, self)) is not None:
            return followed.run(spec, form, arrays, keywords, feature_map, backend)
        return on_a_rank(given, held)

    # -- what differs between ranks ----------------------------------------------------------------------------------

    def always(self, call: lowering.ShardCall, fact: Callable[[Shard], bool]) -> bool:
        """Whether a fact is true of every rank."""
        return all(map(fact, call.shard.peers))

    def number(self, call: lowering.ShardCall, fact: Callable[[Shard], int]) -> Array:
        """A number of the rank, int32."""
        return self._own([fact(peer) for peer in call.shard.peers])

    def offsets(self, call: lowering.ShardCall, fact: Callable[[Shard], Sequence[int]]) -> Array:
        """``cu_seqlens`` of the rank; one with fewer sequences than others has empty ones behind them."""
        offsets = [tuple(fact(peer)) for peer in call.shard.peers]
        most = max(map(len, offsets))
        return self._own([(*own, *[own[-1]] * (most - len(own))) for own in offsets])

    def rows(self, call: lowering.ShardCall, x: Array, fact: Callable[[Shard], Sequence[int]], axis: int = 0) -> Array:
        """The rows of ``x`` with the rank's numbers, and zeros for −1, and for what other ranks have more of."""
        numbers = [tuple(fact(peer)) for peer in call.shard.peers]
        if len(set(numbers)) == 1:
            return taken(call.xp, x, numbers[0], axis)
        most = max(map(len, numbers))
        own = self._own([(*each, *[-1] * (most - len(each))) for each in numbers])
        return _taken(x, own, axis)

    def tails(self, call: lowering.ShardCall) -> tuple[Array, Array]:
        """``(A, b) [spans, 1, ...]``: where a tail starts differs, so the tokens before it are sequences of their own."""
        ends = lambda shard: [  # noqa: E731
            token
            for span in shard.spans
            for token in ((span.tail.start, span.tail.stop) if span.tail else (span.stop, span.stop))
        ]
        A, b = call.summarize(call.every, self.offsets(call, lambda shard: [0, *ends(shard)]))
        return A[1::2][:, None], b[1::2][:, None]

    def _own(self, table: Any) -> Array:
        """This rank's row of a table of integers."""
        return jnp.asarray(np.asarray(table, np.int32))[lax.axis_index(self.name)]

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def chain(self, call: lowering.ShardCall, A: Array, b: Array) -> Array:
        """The states that enter this rank's spans."""
        rank = lax.axis_index(self.name)
        return _chain(self.name, call.shard.chain, _varying(A, b, rank), _varying(b, A, rank))

    def combine(self, call: lowering.ShardCall, x: Array, sources: Sources) -> Array:
        """This rank's sums of what all ranks contribute."""
        return _combine(self.name, sources, _turned(sources, x.shape[0]), _varying(x, lax.axis_index(self.name)))

    def total(self, call: lowering.ShardCall, x: Array) -> Array:
        """The sum over all ranks, which all of them have."""
        return lax.psum(_varying(x, lax.axis_index(self.name)), self.name)


def arrays_in(x: Any) -> dict[str, Array]:
    """The arrays that a gate or a feature map holds, by the names of its fields."""
    if not is_dataclass(x):
        return {}
    return {field.name: value for field in fields(x) if isinstance(value := getattr(x, field.name), jax.Array)}


def _taken(x: Array, numbers: Array, axis: int = 0) -> Array:
    """The rows of ``x`` with these numbers along an axis, and zeros for −1."""
    found = jnp.take(x, jnp.maximum(numbers, 0), axis=axis)
    there = (numbers >= 0).reshape(-1, *[1] * (x.ndim - axis - 1))
    return jnp.where(there, found, 0)


def _varying(x: Array, *like: Array) -> Array:
    """``x``, marked as differing between ranks wherever one of the others does.

    How the marks of ``shard_map`` are read has changed from version to version; that a sum has those of its terms has not,
    and a sum over nothing is zero, whatever the values.
    """
    return x + sum(jnp.sum(y.reshape(-1)[:0]).astype(x.dtype) for y in like)


# -- chain: the formulas are those of collectives.py -----------------------------------------------------------------


def _by_span(x: Array, name: str, chain: Chain) -> Array:
    """``[all spans, ...]`` in their order, from ``[spans, ...]`` of each rank."""
    x = lax.all_gather(x, name)
    if x.shape[1] == 1:
        return x[:, 0]
    ranks, numbers = np.asarray(chain.order).T
    return x[ranks, numbers]


def _own_spans(x: Array, name: str, chain: Chain) -> Array:
    """``[spans, ...]`` of this rank, from ``[all spans, ...]``."""
    places: dict[int, list[int]] = {}
    for j, (rank, _) in enumerate(chain.order):
        places.setdefault(rank, []).append(j)
    table = jnp.asarray(np.asarray([places[rank] for rank in range(len(places))], np.int32))
    return x[table[lax.axis_index(name)]]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chain(name: str, chain: Chain, A: Array, b: Array) -> Array:
    """What enters this rank's spans."""
    return _chain_forward(name, chain, A, b)[0]


def _chain_forward(name: str, chain: Chain, A: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
    xp = framework_of(b)

    def step(state: Array, span: tuple[Array, ...]) -> tuple[Array, Array]:
        A, b, enters, starts = span
        return jnp.where(starts, b, act(xp, A, state) + b), jnp.where(enters, state, 0)

    all_A, all_b = _by_span(A, name, chain), _by_span(b, name, chain)
    spans = (all_A, all_b, jnp.asarray(chain.enters), jnp.asarray(chain.starts))
    _, entering = lax.scan(step, _varying(jnp.zeros_like(b[0]), b), spans)
    own = _own_spans(entering, name, chain)
    return own, (A, all_A, own)


def _chain_backward(name: str, chain: Chain, kept: tuple[Array, ...], d: Array) -> tuple[Array, Array]:
    A, all_A, entering = kept
    xp = framework_of(d)

    def step(flow: Array, span: tuple[Array, ...]) -> tuple[Array, Array]:
        A, d, enters, starts = span
        before = jnp.where(enters, d, 0)
        return jnp.where(starts, before, before + act_transposed(xp, A, flow)), flow

    spans = (all_A, _by_span(d, name, chain), jnp.asarray(chain.enters), jnp.asarray(chain.starts))
    _, flow = lax.scan(step, _varying(jnp.zeros_like(d[0]), d), spans, reverse=True)
    db = _own_spans(flow, name, chain)
    counts = ~_own_spans(jnp.asarray(chain.starts), name, chain)
    dA = gradient_of(xp, A, entering, db)
    return jnp.where(counts.reshape(-1, *[1] * (dA.ndim - 1)), dA, 0), db


_chain.defvjp(_chain_forward, _chain_backward)


# -- combine ---------------------------------------------------------------------------------------------------------


def _turned(sources: Sources, parts: int) -> Sources:
    """For every rank and part, the outputs that it goes into, as ``rank · outputs + output``."""
    outputs = len(sources[0])
    found: list[list[list[int]]] = [[[] for _ in range(parts)] for _ in sources]
    for rank, own in enumerate(sources):
        for output, parts_of in enumerate(own):
            for source in parts_of:
                found[source // parts][source % parts].append(rank * outputs + output)
    return tuple(tuple(map(tuple, own)) for own in found)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _combine(name: str, wanted: Sources, given: Sources, x: Array) -> Array:
    """For each of this rank's outputs, the sum of its sources, in their order."""
    most = max((len(parts) for own in wanted for parts in own), default=0)
    table = np.full((len(wanted), most, len(wanted[0])), -1, np.int32)
    for rank, own in enumerate(wanted):
        for output, parts in enumerate(own):
            table[rank, : len(parts), output] = parts
    everyone = lax.all_gather(x, name).reshape(-1, *x.shape[1:])
    own = jnp.asarray(table)[lax.axis_index(name)]
    nothing = _varying(jnp.zeros((len(wanted[0]), *x.shape[1:]), x.dtype), x)
    return lax.scan(lambda total, numbers: (total + _taken(everyone, numbers), None), nothing, own)[0]


def _combine_forward(name: str, wanted: Sources, given: Sources, x: Array) -> tuple[Array, None]:
    return _combine(name, wanted, given, x), None


def _combine_backward(name: str, wanted: Sources, given: Sources, _: None, d: Array) -> tuple[Array]:
    return (_combine(name, given, wanted, d),)


_combine.defvjp(_combine_forward, _combine_backward)


def shard_axis(
    name: str,
    cu_seqlens: Sequence[int] | None = None,
    layout: Layout = "contiguous",
    *,
    replicate_states: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> ShardAxis:
    """Let the devices along an axis of a mesh share the tokens of sequences: what operators on JAX arrays take as ``context=``.

    Inside ``jax.shard_map`` over the axis, a call is of each rank's own tokens. Anywhere else, in ``jax.jit`` or not, it is of
    the tokens of all ranks: the operator maps itself over the axis, and leaves the other axes of the mesh to the compiler.

    Args:
        name: Name of the axis.
        cu_seqlens: Offsets ``[N+1]`` of sequences packed end to end over the tokens of *all* ranks, as plain integers; each
            rank has as many tokens, ``B`` is 1, and what is behind the last sequence is padding. Default: ``B`` sequences, each
            over all ranks.
        layout: ``"contiguous"``: rank ``r`` has the ``r``-th of equal parts. ``"zigzag"``: of twice as many, the ``r``-th and
            the ``r``-th from the end, one behind the other.
        replicate_states: Return every final state on every rank, as outside ``shard_map`` it always is. Default: a final state
            belongs to the rank of a sequence's last token, and the others have zeros in its place.
        mesh: For calls outside ``shard_map``. Default: the mesh that ``jax.set_mesh`` set.

    Returns:
        What operators take as ``context=``. An initial state ``[N, HV, K, V]`` has a row for every sequence, and is the same on
        every rank, or on each that holds the first token of a sequence.

    Raises:
        OptionError: An option is wrong.
    """
    if layout not in LAYOUTS:
        raise OptionError(f"shard_axis: layout must be 'contiguous' or 'zigzag', got {layout!r}")
    if not isinstance(name, str):
        raise OptionError(f"shard_axis: name must be that of an axis of a mesh, got {type(name).__name__}")
    if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh, type(None))):
        raise OptionError(f"shard_axis: mesh must be a jax.sharding.Mesh or None, got {type(mesh).__name__}")
    if isinstance(cu_seqlens, Tracer):
        raise OptionError("shard_axis: cu_seqlens must be plain integers, which the program is made for, got a traced array")
    return ShardAxis(name, layout, plain_offsets("shard_axis", cu_seqlens), replicate_states, mesh)
