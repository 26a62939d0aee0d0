"""Host side of :mod:`.vector`: forward and backward with a gate per key channel."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..host.chunks import Cut, cut, over_group, places, rows_contiguous, strides, type_of_products
from ..host.tiles import Tile, programs
from ..host.variant import gluon
from ..runtime.launch import launch
from . import gate as gates
from . import vector
from .memory_host import Applied, Diagonal, scan, segment_starts

__all__ = ["backward", "forward"]


@dataclass(frozen=True)
class Prepared:
    """A call whose gate has been applied: ``q, k, g`` are ``read, write, decay``."""

    call: Diagonal
    A: Tensor
    chunks: Cut


def facts(call: Diagonal, tile: Tile) -> dict[str, Any]:
    """Compile-time facts of every kernel here."""
    return dict(
        C=call.tiles.chunk, BK=tile.BK, PACKED=call.cu is not None, PREC=call.tiles.precision, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def gate_facts(call: Diagonal) -> dict[str, Any]:
    """Of those that see the gate."""
    return dict(
        K=call.q.shape[-1], GROUP=call.group, GATE_GROUP=call.v.shape[2] // call.g.shape[2], EXCLUSIVE=call.u is not None,
        SPLIT=call.tiles.split, RANGE=call.range, DT=type_of_products(call.v),
    )  # fmt: skip


def masks_of(call: Diagonal) -> Tensor:
    """Matrices that sum over tokens, in the order that :mod:`.vector` names."""
    C = call.tiles.chunk
    count = vector.LEVELS.value + 2 * (C.bit_length() - 1)
    out = torch.empty((count, C, C), dtype=torch.bfloat16, device=call.q.device)
    launch(gates.sum_matrices, count, call, out, C=C, EXCLUSIVE=call.u is not None, num_warps=4)
    return out


def few(call: Diagonal, count: int) -> int:
    """Programs that fill the device and share ``count`` pieces of work."""
    return min(count, 2 * call.tiles.processors)


def for_hopper(call: Diagonal) -> ModuleType | None:
    """The module with kernels in Gluon that take strong chunks of this call, if there is one."""
    if not gluon(call, call.q, call.k, call.g):
        return None
    from . import vector_sm90 as vector_hopper

    return vector_hopper


def hopper_facts(call: Diagonal) -> dict[str, Any]:
    """Compile-time facts of its kernels."""
    return dict(
        K=call.q.shape[-1], C=call.tiles.chunk, GROUP=call.group, GATE_GROUP=call.v.shape[2] // call.g.shape[2],
        PACKED=call.cu is not None, num_warps=4,
    )  # fmt: skip


def prepare(call: Diagonal) -> Prepared:
    """Scores, and rows that have decayed to the start and the end of their chunks: made, unless ``call`` brings them."""
    C, HV, tile = call.tiles.chunk, call.v.shape[2], call.tiles.scores
    chunks = cut(call.v.shape[1], call.N, C, call.cu)
    made = call.applied
    if made is None:
        made, masks = Applied.empty(call), masks_of(call)
        count = chunks.count * HV
        fast = for_hopper(call)
        for strong in (False,) if fast else (False, True):
            launch(
                vector.scores, few(call, count) if strong else count, call,
                call.q, call.k, call.g, call.u, masks, *made, *places(call, chunks), count, call.scale,
                *strides(call.q), *strides(call.k), *strides(call.g), STRONG=strong, **facts(call, tile), **gate_facts(call),
            )  # fmt: skip
        if fast:
            launch(
                fast.scores, few(call, count), call,
                call.q, call.k, call.g, made.A, made.read, made.write, made.stops, *places(call, chunks), count, call.scale,
                *strides(call.q), *strides(call.k), *strides(call.g), **hopper_facts(call),
            )  # fmt: skip
    applied = replace(call, q=made.read, k=made.write, g=made.decay, u=None, given=call, applied=made)
    return Prepared(applied, made.A, chunks)


def through_memory(made: Prepared, x: Tensor, y: Tensor, kept: Tensor, out: Tensor, reverse: bool) -> None:
    """Outputs, or ``dv``, from states in memory."""
    call, chunks, tile = made.call, made.chunks, made.call.tiles.outputs
    _, T, HV, V = call.v.shape
    launch(
        vector.outputs, chunks.count * HV * programs(1, V, 1, tile.BV), call,
        made.A, x, y, kept, out, chunks.owner, chunks.first, call.cu, T, chunks.per, call.N, HV, *strides(y),
        K=x.shape[-1], V=V, BV=tile.BV, REVERSE=reverse, DT=type_of_products(call.v), **facts(call, tile),
    )  # fmt: skip


def walk(
    made: Prepared, y: Tensor, start: Tensor | None, out: Tensor, final: bool, kept: Tensor | None = None, reverse: bool = False
) -> Tensor | None:
    """Outputs, or ``dv``, with the state in registers; the state at the far end, and in ``kept`` those of the chunks."""
    call, chunks, tile = made.call, made.chunks, made.call.tiles.walk
    (_, T, HV, V), K, N = call.v.shape, call.q.shape[-1], call.N
    meets, makes = (call.k, call.q) if reverse else (call.q, call.k)
    segment = call.tiles.segment(T, N, N * HV * programs(1, V, 1, tile.BV))
    pieces, far = None, None
    if segment:
        pieces, start, far = segment_starts(call, makes, y, chunks, start, reverse, segment)
    end = torch.empty((N, HV, K, V), dtype=torch.float32, device=y.device) if final and not segment else None
    launch(
        vector.walk, (pieces.count if pieces else N) * HV * programs(1, V, 1, tile.BV), call,
        made.A, meets, makes, y, call.g, start, out, end, kept, pieces and pieces.owner, pieces and pieces.first,
        chunks.first, call.cu, T, pieces.per if pieces else 1, segment, N, HV, *strides(y),
        K=K, V=V, BV=tile.BV, REVERSE=reverse, WHOLE=pieces is None, START=start is not None, END=end is not None,
        KEEP=kept is not None, **facts(call, tile),
    )  # fmt: skip
    return far if segment else end


def forward(call: Diagonal, out_dtype: torch.dtype, final: bool) -> tuple[Tensor, Tensor | None, Applied | None]:
    """Outputs, final states if asked for, and what the backward pass may have."""
    made = prepare(call)
    call = made.call
    out = torch.empty(call.v.shape, dtype=out_dtype, device=call.v.device)
    if call.tiles.walk is not None:
        return out, walk(made, call.v, call.start, out, final), call.applied
    kept, end = scan(call, call.k, call.v, made.chunks, call.start, False, final)
    through_memory(made, call.q, call.v, kept, out, False)
    return out, end, call.applied


class Met(NamedTuple):
    """What ``inter`` makes: gradients of scores, their diagonal, and what passes through states of ``dq, dk, dg``."""

    dA: Tensor
    own: Tensor
    dq: Tensor
    dk: Tensor
    dg: Tensor


def through_states(made: Prepared, do: Tensor, dend: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """States at chunk starts, their gradients at chunk ends, ``dv``, and the gradient of the initial state."""
    call, chunks = made.call, made.chunks
    kept, _ = scan(call, call.k, call.v, chunks, call.start, False, False)
    dend = None if dend is None else dend.contiguous()
    dv = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    if call.tiles.walk is not None:
        dkept = torch.empty_like(kept)
        dstart = walk(made, do.to(dv.dtype), dend, dv, call.start is not None, dkept, True)
    else:
        dkept, dstart = scan(call, call.q, do, chunks, dend, True, call.start is not None)
        through_memory(made, call.k, do, dkept, dv, True)
    return kept, dkept, dv, dstart


def between_chunks(call: Diagonal, chunks: Cut, do: Tensor, kept: Tensor, dkept: Tensor) -> Met:
    """Launch ``inter``."""
    (B, T, HV, V), K, C, tile = call.v.shape, call.q.shape[-1], call.tiles.chunk, call.tiles.inter
    new = functools.partial(torch.empty, dtype=torch.float32, device=call.v.device)
    narrow = call.q.dtype if call.group == 1 else torch.float32
    met = Met(
        new((chunks.count, HV, 2, C, C), dtype=call.state_dtype), new((chunks.count, HV, C)), new((B, T, HV, K), dtype=narrow),
        new((B, T, HV, K), dtype=narrow), new((chunks.count, HV, K)),
    )  # fmt: skip
    launch(
        vector.inter, chunks.count * HV * programs(K, 1, tile.BK, 1), call,
        do, call.v, kept, dkept, *met, *places(call, chunks), call.scale, *strides(do), *strides(call.v),
        K=K, V=V, BV=tile.BV, **facts(call, tile),
    )  # fmt: skip
    return met


def inside_chunks(call: Diagonal, chunks: Cut, decay: Tensor, stops: Tensor, met: Met) -> tuple[Tensor, Tensor | None]:
    """Launch ``intra``, which finishes ``dq`` and ``dk`` in place: ``dg`` a value head, and ``du`` a chunk."""
    (B, T, HV, _), K, tile = call.v.shape, call.q.shape[-1], call.tiles.intra
    dg = torch.empty((B, T, HV, K), dtype=call.g.dtype if call.g.shape[2] == HV else torch.float32, device=call.v.device)
    du = None
    if call.u is not None:
        zeros = torch.zeros if call.cu is not None else torch.empty
        du = zeros((chunks.count, HV, K), dtype=torch.float32, device=call.v.device)
    count, masks = chunks.count * HV * programs(K, 1, tile.BK, 1), masks_of(call)
    fast = for_hopper(call)
    for strong in (False,) if fast else (False, True):
        launch(
            vector.intra, few(call, count), call,
            call.q, call.k, call.g, call.u, masks, met.dA, met.own, met.dg, decay, stops, met.dq, met.dk,
            dg, du, *places(call, chunks), count, *strides(call.q), *strides(call.k), *strides(call.g),
            TERMS=1 if call.q.dtype == torch.bfloat16 else call.tiles.split, STRONG=strong,
            STAGES=1 if strong else tile.stages, **facts(call, tile._replace(stages=1)),
            **{name: value for name, value in gate_facts(call).items() if name != "RANGE"},
        )  # fmt: skip
    if fast:
        launch(
            fast.intra, few(call, count), call,
            call.q, call.k, call.g, met.dA, met.own, met.dg, stops, met.dq, met.dk, dg, *places(call, chunks), count,
            *strides(call.q), *strides(call.k), *strides(call.g), BK=64, **hopper_facts(call),
        )  # fmt: skip
    return dg, du


def backward(call: Diagonal, do: Tensor, dend: Tensor | None) -> dict[str, Tensor | None]:
    """Gradients of ``q, k, v, g, u`` and the initial state, each in the shape that the kernels read."""
    made, do = prepare(call), rows_contiguous(do)
    chunks, (*_, decay, stops) = made.chunks, made.call.applied
    kept, dkept, dv, dstart = through_states(made, do, dend)
    del made  # whose arrays are as large as q and k together
    met = between_chunks(call, chunks, do, kept, dkept)
    del kept, dkept
    dg, du = inside_chunks(call, chunks, decay, stops, met)
    if call.g.shape[2] != call.v.shape[2]:
        B, T, H, K = call.q.shape
        dg = dg.view(B, T, H, call.group, K).sum(3)
    du = None if du is None else du.sum(0)
    return dict(q=over_group(call.q, met.dq), k=over_group(call.q, met.dk), v=dv, g=dg, gv=None, u=du, start=dstart)
