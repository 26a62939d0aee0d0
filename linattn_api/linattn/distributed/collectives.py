# pyright: basic
"""The exchanges as custom ops on torch's process groups: one node each for every tracer, with their gradients.

States, summaries and their gradients are gathered, small as they are, and every rank computes what it needs in the order of the
spans. So results repeat bit for bit, and so do gradients. A ring hands one state from span to span instead, which takes less
memory and fewer bytes, and a round trip for every span.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..affine import act, act_transposed, gradient_of
from ..errors import ContextError
from ..frameworks import framework_of
from .agreement import agree, rank_is_gone
from .digests import Doubt, differ, digest, signed, spoilt
from .layout import remembered

__all__ = [
    "Said", "all_of", "carried", "chain", "combine", "crossed", "flowing_back", "gathered", "in_step", "said_of", "total",
    "watch",
]  # fmt: skip

_resolve_process_group: Any = vars(distributed_c10d)["_resolve_process_group"]
"""A group by its name, which is what a custom op can take of it; PyTorch has no public way."""

_all_gather: Any = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
"""Into one tensor; the second name is that of older PyTorch."""


class _Watch:
    """What the ranks of a group compare.

    Attributes:
        cpu_group: That of CPU tensors, over which they do.
        agreed: By what tells the kinds of calls apart that they have compared, what they said of them.
        doubts: By device, whether an exchange there was of ranks that do not agree.
    """

    def __init__(self, cpu_group: Any) -> None:
        self.cpu_group = cpu_group
        self.agreed: dict[tuple[Any, ...], str] = {}
        self.doubts: dict[torch.device, Doubt] = {}

    def doubt(self, device: torch.device) -> Doubt:
        """That of exchanges of a device."""
        if device not in self.doubts:
            self.doubts[device] = Doubt(device)
        return self.doubts[device]


_watched: dict[str, _Watch] = {}
"""By name of a group."""


def watch(name: str, cpu_group: Any) -> None:
    """Compare the first call of each signature over ``cpu_group``; ``name`` is that of the group which the calls use."""
    if name not in _watched or _watched[name].cpu_group is not cpu_group:
        _watched[name] = _Watch(cpu_group)


class Said(NamedTuple):
    """What a rank says of a call.

    Attributes:
        group_name: The name of its group.
        group: The group of the exchange.
        watch: What its ranks compare.
        label: What messages call the call.
        call: What the rank contributes.
        plan: Who has which tokens.
    """

    group_name: str
    group: Any
    watch: _Watch
    label: str
    call: str
    plan: str

    @property
    def number(self) -> int:
        """The digest of it."""
        return digest(self.call, self.plan)

    def refuse(self) -> None:
        """Raise what every rank said, which do not agree; all of them must come here."""
        agree(self.watch.cpu_group, self.label, f"{self.call}; {self.plan}")
        raise ContextError(f"{self.label}: in an earlier exchange the ranks did not agree, and what came of it is NaN")


def said_of(
    group_name: str, label: str, tokens: int, plan: str, kinds: Sequence[tuple[Sequence[int], torch.dtype]], how: str = ""
) -> Said:
    """What a rank says of a call; of a kind that they have not made yet the ranks compare it.

    Args:
        group_name: Name of the process group.
        label: What messages call the call.
        tokens: How many this rank has.
        plan: What it says of its plan.
        kinds: Shapes and dtypes of what it contributes.
        how: How it sends that, if not one part behind the other.
    """
    watch = _watched[group_name]
    key = (label, tokens, *kinds, how)
    if key not in watch.agreed:
        facts = ", ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in kinds)
        call = f"{label} of {tokens} tokens, with states and summaries of {facts}{how}"
        agree(watch.cpu_group, label, call)
        watch.agreed[key] = call
    return Said(group_name, _resolve_process_group(group_name), watch, label, watch.agreed[key], plan)


def in_step(said: Said) -> bool:
    """Whether what was said still holds, and not of a group that is gone; an error if the ranks were out of step meanwhile."""
    if _watched.get(said.group_name) is not said.watch:
        return False
    for doubt in said.watch.doubts.values():
        if doubt:
            said.refuse()
    return True


def _said(group_name: str, label: str, tokens: int, plan: str, *tensors: Tensor) -> Said:
    """What a rank says of a call that contributes these."""
    said = said_of(group_name, label, tokens, plan, [(x.shape, x.dtype) for x in tensors])
    in_step(said)
    return said


class _waiting:
    """Around a collective: says which operator waited on which rank, and whether another one is gone."""

    def __init__(self, label: str, group: Any) -> None:
        self.label, self.group = label, group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, RuntimeError) and (gone := rank_is_gone(self.label, self.group, error)):
            raise gone from error


def all_of(x: Tensor, group: Any, label: str) -> Tensor:
    """What every rank has ``[ranks, ...]``. Nothing runs beside it, so NCCL needs no stream of its own; its kernel holds
    processors until all ranks have come, which a scan would lack.
    """
    x = x.contiguous()
    found = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    with _waiting(label, group):
        _all_gather(found, x, group=group)
    return found.view(-1, *x.shape)


def gathered(said: Said, message: Tensor) -> Tensor:
    """The messages of all ranks ``[ranks, size]``, of which the last 8 bytes are a digest; an error if one is another, or if a
    device would be waited for, nothing yet.
    """
    found = all_of(message, said.group, said.label)
    if not _is_waited_for(found.device) and differ(found[:, -8 // found.element_size() :], said.number):
        said.refuse()
    return found


def _gathered(said: Said, *parts: Tensor) -> tuple[list[Tensor], Tensor]:
    """Of every part ``[ranks, ...]``: what every rank has, by one collective; and whether the ranks do not agree, which is an
    error here, or if a device would be waited for, in a later call.
    """
    number, ranks = said.number, said.group.size()
    flat = [*(x.reshape(-1) for x in parts), signed(number, parts[-1])]
    found = all_of(torch.cat(flat), said.group, said.label)
    *columns, digests = torch.split_with_sizes(found, [x.numel() for x in flat], dim=1)
    odd = differ(digests, number)
    if _is_waited_for(found.device):
        said.watch.doubt(found.device).add(odd)
    elif odd:
        said.refuse()
    return [of_ranks.view(ranks, *x.shape) for of_ranks, x in zip(columns, parts, strict=True)], odd


def _is_waited_for(device: torch.device) -> bool:
    """Whether the host would wait for what is read of a device."""
    return device.type != "cpu"


# -- chain -----------------------------------------------------------------------------------------------------------
#
# The state after span j is S_j = A_j ∘ S_{j-1} + b_j, and S_j = b_j where the sequence that leaves it started in it. What
# enters span j is S_{j-1} where a sequence comes in. Backward, with D_j the gradient of S_j:
# D_{j-1} = dE_j + A_jᵀ D_j, dE_j being the gradient of what enters; db_j = D_j and dA_j that of A_j ∘ S_{j-1}.


def _rounds(order: Sequence[int]) -> list[tuple[int, int]]:
    """Rank, and number among its spans, of every span; ``order`` has the ranks of the spans, as a flat list of integers."""
    return _numbered(tuple(order))


@functools.lru_cache(maxsize=64)
def _numbered(order: tuple[int, ...]) -> list[tuple[int, int]]:
    seen: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for rank in order:
        found.append((rank, seen.get(rank, 0)))
        seen[rank] = seen.get(rank, 0) + 1
    return found


def carried(
    A: Tensor,
    b: Tensor,
    tokens: int,
    plan: str,
    order: list[int],
    enters: list[bool],
    starts: list[bool],
    group_name: str,
    label: str,
    ring: bool,
) -> tuple[Tensor, Tensor]:
    """What enters this rank's spans, and the ``A`` of all spans ``[ranks, spans, ...]``, or in a ring of its own."""
    said = _said(group_name, label, tokens, plan, A, b)
    if ring:
        _, odd = _gathered(said, b[:0])
        return spoilt(_handed_on(A, b, order, enters, starts, said.group, label), odd), A
    (all_A, all_b), odd = _gathered(said, A, b)
    me, xp = said.group.rank(), framework_of(b)
    state: Any = None
    entering: list[Tensor] = []
    for j, (rank, number) in enumerate(_rounds(order)):
        if rank == me:
            entering.append(state if enters[j] else torch.zeros_like(b[0]))
        if len(entering) == b.shape[0]:
            break
        state = all_b[rank, number] if starts[j] else act(xp, all_A[rank, number], state) + all_b[rank, number]
    return spoilt(torch.stack(entering), odd), all_A


def _handed_on(A: Tensor, b: Tensor, order: Any, enters: Any, starts: Any, group: Any, label: str) -> Tensor:
    """What enters this rank's spans, from the rank before."""
    places, me, xp = _rounds(order), dist.get_rank(group), framework_of(b)
    entering = torch.zeros_like(b)
    state: Any = None
    for j, (rank, number) in enumerate(places):
        if rank != me:
            continue
        if enters[j]:
            state = _received(state, places[j - 1][0], me, b[number], group, label)
            entering[number] = state
        state = b[number] if starts[j] else act(xp, A[number], entering[number]) + b[number]
        if j + 1 < len(places) and enters[j + 1]:
            _sent(state, places[j + 1][0], me, group, label)
    return entering


@functools.wraps(carried)  # of which the op has its signature
def _owned(*args: Any) -> tuple[Tensor, Tensor]:
    """As :func:`carried`, in memory of its own."""
    entering, transitions = carried(*args)
    return entering, transitions.clone(memory_format=torch.contiguous_format)


_chain = torch.library.custom_op("linattn::chain", _owned, mutates_args=())


@_chain.register_fake
def _(A: Tensor, b: Tensor, tokens: int, plan: str, order: Any, *rest: Any) -> Any:
    ranks = len(order) // A.shape[0]
    return torch.empty_like(b), A.new_empty(A.shape if rest[-1] else (ranks, *A.shape))


def _sent(state: Tensor, there: int, me: int, group: Any, label: str) -> None:
    if there != me:
        with _waiting(label, group):
            dist.send(state.contiguous(), group_dst=there, group=group)


def _received(state: Any, there: int, me: int, like: Tensor, group: Any, label: str) -> Tensor:
    if there == me:
        return state
    found = torch.empty_like(like, memory_format=torch.contiguous_format)
    with _waiting(label, group):
        dist.recv(found, group_src=there, group=group)
    return found


def crossed(A: Tensor, order: Sequence[int], rank: int) -> Tensor:
    """The transitions ``[places, ...]`` that gradients cross on their way to a rank's spans, of those of all ``[ranks, spans,
    ...]``: of the spans behind its first one but for the last, which no gradient comes to from behind.
    """
    places = _rounds(order)[order.index(rank) + 1 : -1]
    return torch.stack([A[place] for place in places]) if places else A.new_empty((0, *A.shape[2:]))


def flowing_back(
    d: Tensor,
    A: Tensor,
    order: list[int],
    enters: list[bool],
    starts: list[bool],
    group_name: str,
    label: str,
    ring: bool,
) -> Tensor:
    """Gradients of the states after this rank's spans ``[spans, ...]``, of those of what entered them.

    ``A`` are the transitions that they cross, see :func:`crossed`; in a ring, those of this rank.
    """
    group = _resolve_process_group(group_name)
    if ring:
        return _handed_back(d, A, order, enters, starts, group, label)
    me, xp, places = group.rank(), framework_of(d), _rounds(order)
    all_d = all_of(d, group, label)
    first, last = order.index(me), len(order) - 1
    after = [torch.zeros_like(d[0])] if order[last] == me else []
    flow: Any = None
    for j in range(last, first, -1):
        before = all_d[places[j]] if enters[j] else torch.zeros_like(d[0])
        flow = before if starts[j] or j == last else before + act_transposed(xp, A[j - first - 1], flow)
        if places[j - 1][0] == me:
            after.append(flow)
    return torch.stack(after[::-1])


def _handed_back(d: Tensor, A: Tensor, order: Any, enters: Any, starts: Any, group: Any, label: str) -> Tensor:
    """Gradients of the states after this rank's spans, from the rank behind."""
    places, me, xp = _rounds(order), dist.get_rank(group), framework_of(d)
    after = torch.zeros_like(d)
    flow: Any = None
    for j, (rank, number) in reversed(list(enumerate(places))):
        if rank != me:
            continue
        leaves = j + 1 < len(places) and enters[j + 1]
        flow = _received(flow, places[j + 1][0], me, d[number], group, label) if leaves else torch.zeros_like(d[number])
        after[number] = flow
        before = d[number] if starts[j] else d[number] + act_transposed(xp, A[number], flow)
        if enters[j]:
            _sent(before, places[j - 1][0], me, group, label)
            flow = before
    return after


@torch.library.custom_op("linattn::chain_backward", mutates_args=())
def _chain_backward(
    d: Tensor,
    entering: Tensor,
    A: Tensor,
    order: list[int],
    enters: list[bool],
    starts: list[bool],
    group_name: str,
    label: str,
    ring: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of ``A`` and ``b``, in the shape of this rank's own."""
    places, me, xp = _rounds(order), dist.get_rank(_resolve_process_group(group_name)), framework_of(d)
    db = flowing_back(d, A if ring else crossed(A, order, me), order, enters, starts, group_name, label, ring)
    dA = torch.zeros_like(A if ring else A[0])
    for j, (rank, number) in enumerate(places):
        if rank == me and not starts[j]:
            dA[number] = gradient_of(xp, A[number] if ring else A[rank, number], entering[number], db[number])
    return dA, db


@_chain_backward.register_fake
def _(d: Tensor, entering: Tensor, A: Tensor, *rest: Any) -> Any:
    return A.new_empty(A.shape if rest[-1] else A.shape[1:]), torch.empty_like(d)


def _keep_chain(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.rest = inputs[4:]
    ctx.save_for_backward(*output)


def _chain_vjp(ctx: Any, d: Tensor, _: Any) -> tuple[Any, ...]:
    entering, A = ctx.saved_tensors
    return *_chain_backward(d.contiguous(), entering, A, *ctx.rest), None, None, *(None for _ in ctx.rest)


_chain.register_autograd(_chain_vjp, setup_context=_keep_chain)


def chain(
    A: Tensor,
    b: Tensor,
    tokens: int,
    plan: str,
    order: list[int],
    enters: list[bool],
    starts: list[bool],
    group_name: str,
    label: str,
    ring: bool,
) -> Tensor:
    """The states that enter this rank's spans, differentiable in ``A`` and ``b`` of all ranks.

    Args:
        A: Transitions of its spans ``[spans, ...]``.
        b: What they leave behind ``[spans, ..., K, V]``.
        tokens: How many this rank has; every one must have as many.
        plan: What this rank says of its plan; every one must say as much.
        order: For every span of all ranks, in order, its rank.
        enters: For every span, whether a state comes in.
        starts: For every span, whether what leaves it started in it.
        group_name: Name of the process group.
        label: What messages call the call.
        ring: Hand one state from span to span, instead of gathering all summaries.
    """
    return _chain(A, b, tokens, plan, order, enters, starts, group_name, label, ring)[0]


# -- combine ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _stretches(pairs: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Pairs of target and source, in order, as slices of both: those take no indices, which a device would wait for."""
    found: list[tuple[slice, slice]] = []
    for target, source in zip(pairs[::2], pairs[1::2], strict=True):
        into, of = found[-1] if found else (slice(0, -1), slice(0, -1))
        if (into.stop, of.stop) == (target, source):
            found[-1] = slice(into.start, target + 1), slice(of.start, source + 1)
        else:
            found.append((slice(target, target + 1), slice(source, source + 1)))
    return found


def _added(x: Tensor, pairs: Sequence[int], count: int) -> Tensor:
    """``[count, ...]``: of ``x``, for each target the sum of its sources, added up in the order of the pairs."""
    found = x.new_zeros((count, *x.shape[1:]))
    for targets, sources in _stretches(tuple(pairs)):
        found[targets] += x[sources]
    return found


@torch.library.custom_op("linattn::combine", mutates_args=())
def _combine(
    x: Tensor, tokens: int, plan: str, wanted: list[int], given: list[int], outputs: int, group_name: str, label: str
) -> Tensor:  # fmt: skip
    """``wanted``: pairs of this rank's output, and part of all ranks. ``given``: pairs of its part, and output of all ranks."""
    (found,), odd = _gathered(_said(group_name, label, tokens, plan, x), x)
    return spoilt(_added(found.flatten(0, 1), wanted, outputs), odd)


@_combine.register_fake
def _(x: Tensor, tokens: int, plan: str, wanted: Any, given: Any, outputs: int, group_name: str, label: str) -> Tensor:
    return x.new_empty((outputs, *x.shape[1:]))


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.tokens, ctx.plan, ctx.wanted, ctx.given, _, *ctx.names = inputs
    ctx.parts = x.shape[0]


def _combine_vjp(ctx: Any, d: Tensor) -> tuple[Any, ...]:
    dx = _combine(d.contiguous(), ctx.tokens, ctx.plan, ctx.given, ctx.wanted, ctx.parts, *ctx.names)
    return dx, None, None, None, None, None, None, None


_combine.register_autograd(_combine_vjp, setup_context=_keep_combine)


def combine(x: Tensor, tokens: int, plan: str, sources: Any, rank: int, group_name: str, label: str) -> Tensor:
    """This rank's sums of what all ranks contribute, differentiable.

    Args:
        x: What it contributes ``[parts, ...]``.
        tokens: How many this rank has; every one must have as many.
        plan: What this rank says of its plan; every one must say as much.
        sources: For every rank and output, the parts that it is the sum of, as ``rank · parts + part``.
        rank: This rank.
        group_name: Name of the process group.
        label: What messages call the call.
    """
    parts, outputs = x.shape[0], len(sources[rank])
    wanted, given = _pairs(sources, rank, parts)
    return _combine(x, tokens, plan, list(wanted), list(given), outputs, group_name, label)


@remembered
def _pairs(sources: Any, rank: int, parts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    wanted = [i for output, own in enumerate(sources[rank]) for source in own for i in (output, source)]
    given = [
        i
        for other, outputs in enumerate(sources)
        for output, own in enumerate(outputs)
        for source in own
        if source // parts == rank
        for i in (source % parts, other * len(outputs) + output)
    ]
    return tuple(wanted), tuple(given)


def total(x: Tensor, tokens: int, plan: str, ranks: int, rank: int, group_name: str, label: str) -> Tensor:
    """The sum over all ranks, in their order, differentiable."""
    everyone = ((tuple(range(ranks)),),) * ranks
    return combine(x[None], tokens, plan, everyone, rank, group_name, label)[0]
