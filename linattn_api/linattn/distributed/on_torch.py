# pyright: basic
"""Context parallelism on torch's process groups: a plan that says who has which tokens, and runs calls on them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from ..call import method_name
from ..context import Context
from ..errors import ContextError, OptionError
from ..feature_maps import FeatureMap
from ..plugin import MixedState
from ..spec import Arg, OpSpec
from . import collectives, lowering
from .agreement import agree
from .exchange import Exchange, Sources
from .layout import LAYOUTS, Layout, Shard, plain_offsets, shard_of
from .linked import Link, link_of
from .messages import Route
from .rules import each

__all__ = ["ContextPlan", "context_parallel", "cpu_group_of"]

Way = Literal["auto", "gather", "ring"]
GATHERED = 1 << 28
"""Bytes of summaries that ``"auto"`` gathers at most; beyond them a ring takes less memory and time."""


class ContextPlan(Context, Exchange):
    """Who has which tokens: what operators on torch tensors take as ``context=``. Made by :func:`context_parallel`.

    Attributes:
        ranks: Number of ranks that share the tokens.
        rank: This one.
        layout: ``"contiguous"`` or ``"zigzag"``.
        cu_seqlens: Offsets of packed sequences among the tokens of all ranks, or None.
        replicate_states: Whether every rank gets every final state.
        way: ``"auto"``, ``"gather"`` or ``"ring"``.
        said: All that every rank must say of its plan alike.
        routes: How messages go, by kind of call.
    """

    def __init__(
        self,
        group: Any,
        layout: Layout,
        cu_seqlens: tuple[int, ...] | None,
        replicate_states: bool,
        way: Way,
        mesh: DeviceMesh | None,
    ) -> None:
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.layout: Layout = layout
        self.cu_seqlens = cu_seqlens
        self.replicate_states, self.way = replicate_states, way
        self.group_name, self.mesh = group.group_name, mesh
        packed = "no packed sequences" if cu_seqlens is None else f"packed sequences at {_shown(cu_seqlens)}"
        states = "replicated states" if replicate_states else "states of their own"
        self.said = f"layout {layout!r}, exchange {way!r}, {states}, {packed}"
        self._offsets: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self.routes: dict[tuple[Any, ...], Route] = {}

    def __repr__(self) -> str:
        packed = (
            "" if self.cu_seqlens is None else f", {len(self.cu_seqlens) - 1} packed sequences of {self.cu_seqlens[-1]} tokens"
        )
        states = ", states replicated" if self.replicate_states else ""
        return f"<ContextPlan: rank {self.rank} of {self.ranks}, {self.layout}{packed}, exchange {self.way!r}{states}>"

    def shard(self, tokens: int) -> Shard:
        """What this rank holds if it has ``tokens`` of them."""
        counted = 0 if self.cu_seqlens is None else operator.index(tokens)  # of one that is symbolic, the size traced for
        return shard_of(self.ranks, self.rank, self.layout, counted, self.cu_seqlens)

    def run(
        self,
        spec: OpSpec,
        form: str | None,
        arrays: tuple[Any, ...],
        keywords: dict[str, Any],
        feature_map: str | FeatureMap | None,
        backend: str | Sequence[str] | None,
    ) -> Any:
        """Run one call on this rank's tokens."""
        if not isinstance(arrays[0], Tensor):
            raise ContextError(f"{spec.name}: a plan of context_parallel takes torch tensors, got {type(arrays[0]).__name__}")
        if [x for x in (*arrays, *keywords.values()) if isinstance(x, DTensor)]:  # faster than any()
            return self._run_dtensors(spec, form, arrays, keywords, feature_map, backend)
        return self._run_tensors(spec, form, arrays, keywords, feature_map, backend)

    def _run_tensors(
        self,
        spec: OpSpec,
        form: str | None,
        arrays: tuple[Any, ...],
        keywords: dict[str, Any],
        feature_map: str | FeatureMap | None,
        backend: str | Sequence[str] | None,
    ) -> Any:
        """On plain tensors; the final state is contiguous."""
        if self.ranks > 1 and not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            raise ContextError(
                f"{method_name(form, spec.name)}: transforms of torch.func do not pass what ranks exchange: take gradients by "
                f"torch.autograd"
            )
        o, final = lowering.run(self, self.shard, self.replicate_states, spec, form, arrays, keywords, feature_map, backend)
        given = keywords["initial_state"]
        states = [x for x in (given if isinstance(given, tuple) else (given,)) if x is not None and x.requires_grad]
        if states and torch.is_grad_enabled():  # a rank that reads none of its rows gives it a gradient of zeros
            o = _Tied.apply(o, *states)
        # a collective adds memory to memory: the state of one rank and the zeros of the others must have the same strides
        return o, None if final is None else each(lambda x: x.contiguous(), final)

    def positions(self, x: Tensor) -> Tensor:
        """The position of each of this rank's tokens in its sequence ``[T]``, int32, for ``x [B, T, …]``."""
        runs = self.shard(x.shape[1]).runs(x.shape[1])
        return torch.cat(
            [torch.arange(first, first + count, dtype=torch.int32, device=x.device) for first, count in runs if count]
        )

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def offsets(self, call: lowering.ShardCall, fact: Callable[[Shard], Sequence[int]]) -> Tensor:
        """``cu_seqlens`` of the rank, where its arrays are; kept, so that a device is waited for once."""
        like = next(iter(call.arrays.values()))
        if type(like) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
            return super().offsets(call, fact)
        key = tuple(fact(call.shard)), like.device
        if key not in self._offsets:
            with torch.inference_mode(False), torch._C._DisableFuncTorch():
                self._offsets[key] = super().offsets(call, fact)
        return self._offsets[key]

    def chain(self, call: lowering.ShardCall, A: Tensor, b: Tensor) -> Tensor:
        """The states that enter this rank's spans."""
        return collectives.chain(A, _of_inputs(call, b), call.length, self.said, *self.way_of(call, A, b))

    def way_of(self, call: lowering.ShardCall, A: Tensor, b: Tensor) -> tuple[Any, ...]:
        """How summaries go from span to span, as :mod:`.collectives` takes it."""
        chain, ring = call.shard.chain, self.in_a_ring([(A.shape, A.dtype), (b.shape, b.dtype)])
        order = [rank for rank, _ in chain.order]
        return order, list(chain.enters), list(chain.starts), self.group_name, call.label, ring

    def in_a_ring(self, summaries: Sequence[tuple[torch.Size, torch.dtype]]) -> bool:
        """Whether states are handed from span to span, of which this rank's summaries have such shapes and dtypes."""
        if self.way != "auto":
            return self.way == "ring"
        return self.ranks * sum(shape.numel() * dtype.itemsize for shape, dtype in summaries) > GATHERED

    def crosses(self, call: lowering.ShardCall) -> bool:
        """Whether anything is exchanged; also where no state crosses, since by another rank's offsets one might."""
        return self.ranks > 1 or super().crosses(call)

    def link(self, call: lowering.ShardCall) -> Link | None:
        """What crosses apart from the operator's own gradients, where a backend makes gradients of entering states alone."""
        return link_of(self, call)

    def combine(self, call: lowering.ShardCall, x: Tensor, sources: Sources) -> Tensor:
        """This rank's sums of what all ranks contribute."""
        return collectives.combine(_of_inputs(call, x), call.length, self.said, sources, self.rank, self.group_name, call.label)

    def total(self, call: lowering.ShardCall, x: Tensor) -> Tensor:
        """The sum over all ranks."""
        if self.ranks == 1:
            return x
        names = self.group_name, call.label
        return collectives.total(_of_inputs(call, x), call.length, self.said, self.ranks, self.rank, *names)

    def rows(self, call: lowering.ShardCall, x: Tensor, fact: Callable[[Shard], Sequence[int]], axis: int = 0) -> Tensor:
        """The rows that have the rank's numbers, and zeros for −1; with a gradient wherever ``x`` has one, though all be
        zeros: ranks exchange gradients only if each of them comes by.
        """
        found = super().rows(call, x, fact, axis)
        return _Tied.apply(found, x) if x.requires_grad and not found.requires_grad else found

    # -- DTensor -----------------------------------------------------------------------------------------------------

    def _run_dtensors(
        self,
        spec: OpSpec,
        form: str | None,
        arrays: tuple[Any, ...],
        keywords: dict[str, Any],
        feature_map: str | FeatureMap | None,
        backend: str | Sequence[str] | None,
    ) -> Any:
        """On the local tensors; the output is placed as the values are, and states along with their heads."""
        label = spec.name
        if self.mesh is None:
            raise ContextError(f"{label}: DTensors need a plan of a DeviceMesh: context_parallel(mesh[name])")
        kinds = spec.state(keywords)
        args = {arg.name: arg for arg in (*spec.args, *spec.keyword_args, *kinds)}
        named = {**dict(zip((arg.name for arg in spec.args), arrays, strict=True)), **keywords}
        like = named[spec.like]
        if not isinstance(like, DTensor):
            raise ContextError(
                f"{label}: {spec.like} is a plain tensor and another array is a DTensor: make all of them DTensors"
            )
        own = like.device_mesh.mesh_dim_names.index(self._axis(like))  # type: ignore[union-attr]
        along = _symbols_along(_symbols(args[spec.like], like), like.placements)
        along[own] = "T"

        def local(name: str, x: Any) -> Any:
            """What this device has of an array, or of each in an object that holds some."""
            if isinstance(x, MixedState):
                return MixedState(*(local(f"{name}.{part}", y) for part, y in zip(x._fields, x, strict=True)))
            if is_dataclass(x) and not isinstance(x, type):
                held = {field.name: getattr(x, field.name) for field in fields(x)}
                changed = {part: local(f"{name}.{part}", y) for part, y in held.items() if isinstance(y, DTensor)}
                return replace(x, **changed) if changed else x
            if not isinstance(x, DTensor):
                return x
            if name in args:
                _check_places(label, name, x, _symbols(args[name], x), like.device_mesh, along)
            elif x.placements[own].is_shard():
                raise ContextError(
                    f"{label}: {name} must be Replicate() along {self._axis(like)!r}, got {_shown_place(x.placements[own])}"
                )
            # what every device has of an array, while each has other tokens or heads of the values, gets a part of its gradient
            places = zip(x.placements, like.placements, strict=True)
            gradients = [Partial() if mine.is_replicate() and other.is_shard() else mine for mine, other in places]
            return x.to_local(grad_placements=gradients)

        given = tuple(local(arg.name, x) for arg, x in zip(spec.args, arrays, strict=True))
        rest = {name: local(name, x) for name, x in keywords.items()}
        o, final = self._run_tensors(spec, form, given, rest, local("feature_map", feature_map), backend)
        o = DTensor.from_local(o, like.device_mesh, like.placements)
        if final is None:
            return o, None

        def whole(arg: Arg, x: Tensor) -> DTensor:
            """A state, with its heads where those of the values are."""
            places: list[Placement] = [_place_of(arg.shapes[0], x.shape, symbol) for symbol in along]
            places[own] = Replicate() if self.replicate_states else Partial()
            return DTensor.from_local(x, like.device_mesh, places)

        if isinstance(final, tuple):
            return o, type(final)(*(whole(arg, x) for arg, x in zip(kinds, final, strict=True)))
        return o, whole(kinds[0], final)

    def _axis(self, like: DTensor) -> str:
        names = self.mesh.mesh_dim_names if self.mesh is not None else None
        known = like.device_mesh.mesh_dim_names or ()
        if not names or names[0] not in known:
            raise ContextError(
                f"the plan is of mesh axis {names and names[0]!r}, and the arrays are on a mesh of {list(known)}"
            )
        return names[0]


class _Tied(torch.autograd.Function):
    """An array that has a gradient wherever one of others has, and gives them none."""

    @staticmethod
    def forward(x: Tensor, *others: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *d: Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes]
        return d[0], *zeros


def _of_inputs(call: lowering.ShardCall, x: Tensor) -> Tensor:
    """What a rank contributes, with a gradient wherever an input of the call has one: the same on every rank."""
    if x.requires_grad or not x.is_floating_point() or not torch.is_grad_enabled():
        return x
    given = (y for value in (*call.arrays.values(), *call.keywords.values()) for y in _tensors(value))
    first = next((y for y in given if y.requires_grad), None)
    return x if first is None else _Tied.apply(x, first)


def _tensors(value: Any) -> Iterator[Tensor]:
    """What an argument holds: a tensor, a state of several, or an object such as a gate."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from (x for x in value if isinstance(x, Tensor))
    elif is_dataclass(value):
        yield from (x for field in fields(value) if isinstance(x := getattr(value, field.name), Tensor))


def _symbols(arg: Arg, x: Tensor) -> tuple[str, ...]:
    """What the dimensions of an array are, by their symbols; nothing of one that has too many or too few."""
    return next((shape for shape in arg.shapes if len(shape) == x.dim()), ())


def _symbols_along(symbols: tuple[str, ...], placements: Sequence[Placement]) -> list[str | None]:
    """What lies along each axis of a mesh, by its symbol; None where an array is whole there."""
    dims = [next((dim for dim in range(len(symbols)) if place.is_shard(dim)), None) for place in placements]
    return [None if dim is None else symbols[dim] for dim in dims]


TOGETHER = {"B": ("B", "N"), "HV": ("HV", "H"), "H": ("HV", "H")}
"""Symbols that lie along an axis where one of them does: a batch entry with its state, a value head with its key head."""


def _place_of(symbols: Sequence[str], shape: Sequence[int], along: str | None) -> Placement:
    """How an array is to lie along an axis of a mesh: a single key head is whole beside all of its value heads."""
    from torch.distributed.tensor import Shard as Sharded

    kin = TOGETHER.get(along or "", (along,))
    dim = next((i for i, symbol in enumerate(symbols) if symbol in kin), None)
    return Replicate() if dim is None or (symbols[dim] != along and symbols[dim] == "H" and shape[dim] == 1) else Sharded(dim)


def _check_places(
    label: str, name: str, x: DTensor, symbols: Sequence[str], mesh: DeviceMesh, along: Sequence[str | None]
) -> None:  # fmt: skip
    """An array lies as the values do, in parts of one size: each device then has what its values need, and no more."""
    if x.device_mesh != mesh:
        raise ContextError(f"{label}: {name} must be on the mesh of the values, {mesh}, got {x.device_mesh}")
    for axis, symbol, place in zip(mesh.mesh_dim_names or (), along, x.placements, strict=True):
        expected, devices = _place_of(symbols, x.shape, symbol), mesh[axis].size()
        if devices > 1 and place != expected:
            raise ContextError(f"{label}: {name} must be {_shown_place(expected)} along {axis!r}, got {_shown_place(place)}")
        if place.is_shard() and x.shape[place.dim] % devices:  # type: ignore[attr-defined]
            raise ContextError(
                f"{label}: dimension {place.dim} of {name} must be a multiple of the {devices} devices along {axis!r}, "  # type: ignore[attr-defined]
                f"got {list(x.shape)}"
            )


def _shown_place(place: Placement) -> str:
    return f"Shard({place.dim})" if place.is_shard() else "Replicate()" if place.is_replicate() else str(place)  # type: ignore[attr-defined]


def context_parallel(
    mesh_or_group: Any = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: Layout = "contiguous",
    *,
    replicate_states: bool = False,
    exchange: Way = "auto",
    check: bool = True,
    timeout: timedelta | None = None,
) -> ContextPlan:
    """Plan how ranks share the tokens of sequences; every one of them calls this with the same arguments.

    Args:
        mesh_or_group: A one-dimensional ``DeviceMesh``, such as ``mesh["cp"]``, or a process group, of gloo or NCCL. Default:
            the default group.
        cu_seqlens: Offsets ``[N+1]`` of sequences packed end to end over the tokens of *all* ranks; each rank then has as many
            tokens, ``B`` is 1, and what is behind the last sequence is padding. Default: ``B`` sequences, each over all ranks.
        layout: ``"contiguous"``: rank ``r`` has the ``r``-th of equal parts. ``"zigzag"``: of twice as many, the ``r``-th and
            the ``r``-th from the end, one behind the other.
        replicate_states: Return every final state on every rank. Default: a final state belongs to the rank of a sequence's
            last token, and the others have zeros in its place.
        exchange: ``"gather"`` all summaries; hand one state on in a ``"ring"``; ``"auto"`` takes a ring where the summaries
            of all ranks are more than 256 MiB.
        check: Compare the plan across ranks, over a CPU group. Default True; without it, the first call of each signature is
            compared all the same.
        timeout: How long the CPU group waits for a rank. Default: as long as the group if that is of gloo, else torch's.

    Returns:
        What operators take as ``context=``. An initial state ``[N, HV, K, V]`` has a row for every sequence, of which a rank
        reads those whose first token it has. The loss is taken to be the sum of what the ranks compute.

    Raises:
        ContextError: The ranks do not agree; said on each of them. Or the sequences do not fit.
        OptionError: An option is wrong.
    """
    if layout not in LAYOUTS:
        raise OptionError(f"context_parallel: layout must be 'contiguous' or 'zigzag', got {layout!r}")
    if exchange not in ("auto", "gather", "ring"):
        raise OptionError(f"context_parallel: exchange must be 'auto', 'gather' or 'ring', got {exchange!r}")
    if not dist.is_initialized():
        raise ContextError(
            "context_parallel: torch.distributed is not initialised: call torch.distributed.init_process_group()"
        )
    mesh = mesh_or_group if isinstance(mesh_or_group, DeviceMesh) else None
    if mesh is not None and mesh.ndim != 1:
        raise ContextError(
            f"context_parallel: the mesh has {mesh.ndim} dimensions {list(mesh.mesh_dim_names or ())}: pass mesh[name], the "
            f"one that shares the tokens"
        )
    offsets = plain_offsets("context_parallel", cu_seqlens)
    group: Any = mesh.get_group() if mesh is not None else mesh_or_group or dist.group.WORLD
    cpu_group = cpu_group_of(group, timeout)
    collectives.watch(group.group_name, cpu_group)
    plan = ContextPlan(group, layout, offsets, replicate_states, exchange, mesh)
    if check:
        agree(cpu_group, "context_parallel", plan.said)
    return plan


def _shown(offsets: tuple[int, ...]) -> str:
    """All offsets, or of many the first and a number that tells others apart."""
    if len(offsets) <= 16:
        return str(list(offsets))
    return f"[{', '.join(map(str, offsets[:8]))} … {offsets[-1]}] ({len(offsets) - 1} of them, {hash(offsets):x})"


_groups: dict[tuple[str, timedelta | None], tuple[Any, Any]] = {}
"""By name and timeout, a group and that of :func:`cpu_group_of`; a later group may have the name of one that is gone."""


def cpu_group_of(group: Any, timeout: timedelta | None = None) -> Any:
    """A group of the same ranks that talks through the CPU, about nothing but plans and calls: of ranks that do not make the
    same call, one waits here, and none reads what another meant for something else.
    """
    key = group.group_name, timeout
    if key not in _groups or _groups[key][0] is not group:
        if timeout is None and "gloo" in dist.get_backend_config(group):
            timeout = group._get_backend(torch.device("cpu")).options._timeout
        ranks = dist.get_process_group_ranks(group)
        _groups[key] = group, dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
    return _groups[key][1]
