"""Host side of the diagonal-gate kernels: how the sequences are cut, which tiles run, and the launches.

Nothing here reads a tensor's data, so no launch waits for the device and all of them can be captured in a graph. Packed
sequences are cut on the device: the number of pieces is bounded by sizes (``T`` and ``N``), pieces past the last one exit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import kernels
from .tuning import Tiles, programs, tiles_for

__all__ = ["Diagonal", "backward", "forward"]


@dataclass(frozen=True)
class Cut:
    """Sequences cut into pieces of ``length`` tokens: ``owner`` says whose a piece is, ``first`` where a sequence's begin."""

    count: int
    per: int
    owner: Tensor | None
    first: Tensor | None


def cut(T: int, N: int, length: int, cu_seqlens: Tensor | None) -> Cut:
    """Cut ``N`` sequences of ``T`` tokens, or those that ``cu_seqlens`` describes among ``T`` tokens."""
    if cu_seqlens is None:
        per = -(-T // length)
        return Cut(N * per, per, None, None)
    count = T // length + N
    pieces = (cu_seqlens.diff() + (length - 1)) // length
    first = torch.zeros(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    torch.cumsum(pieces, 0, dtype=torch.int32, out=first[1:])
    at = torch.arange(count, dtype=torch.int32, device=cu_seqlens.device)
    owner = torch.searchsorted(first[1:], at, right=True, out_int32=True)
    return Cut(count, 0, owner, first)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device; an interpreter counts as one."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Diagonal:
    """One call: its arrays and what the kernels need to know of them.

    ``g`` is ``[B, T, HV]``, ``[B, T, HV, K]``, ``[B, T, H, K]`` or ``None``; a fixed decay arrives expanded over tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    u: Tensor | None
    start: Tensor | None
    cu: Tensor | None
    scale: float
    tiles: Tiles

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, u: Tensor | None, start: Tensor | None,
        cu: Tensor | None, scale: float, chunk: int,
    ) -> Diagonal:  # fmt: skip
        """Take the arrays of a call: the last axis contiguous, a fixed decay expanded, tiles chosen."""
        if g is not None and g.dim() == 1:
            g = g.expand(v.shape[:3])
        gate = 0 if g is None else g.dim() - 2
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        if gate == 2:
            g = rows_contiguous(g)
        u = None if u is None else u.contiguous()
        start = None if start is None else start.contiguous()
        tiles = tiles_for(q.shape[-1], v.shape[-1], q.dtype, gate, chunk, processors(q.device))
        return cls(q, k, v, g, u, start, cu, scale, tiles)

    @property
    def gate(self) -> int:
        """0 none, 1 a scalar, 2 a vector."""
        return 0 if self.g is None else self.g.dim() - 2

    @property
    def N(self) -> int:
        """Number of sequences."""
        return self.q.shape[0] if self.cu is None else self.cu.shape[0] - 1

    @property
    def group(self) -> int:
        """Value heads that share a query/key head."""
        return self.v.shape[2] // self.q.shape[2]

    @property
    def state_dtype(self) -> torch.dtype:
        """Of states in memory: what a product takes them in. float16 has not the range."""
        return torch.bfloat16 if self.v.dtype == torch.bfloat16 else torch.float32

    def common(self) -> dict[str, Any]:
        """Compile-time facts that every chunk kernel takes."""
        tiles = self.tiles
        return dict(
            K=self.q.shape[-1], V=self.v.shape[-1], C=tiles.chunk, GROUP=self.group,
            GATE_GROUP=1 if self.g is None else self.v.shape[2] // self.g.shape[2], GATE=self.gate,
            EXCLUSIVE=self.u is not None, PACKED=self.cu is not None, SPLIT=tiles.split, PREC=tiles.precision,
        )  # fmt: skip


class Kept(NamedTuple):
    """States at chunk starts, and for a vector gate by how much the chunks decay."""

    states: Tensor | None
    ranges: Tensor | None

    @property
    def parts(self) -> int:
        """Tiles of channels that noted a chunk's decay."""
        return 0 if self.ranges is None else self.ranges.shape[2]


def rows_contiguous(x: Tensor) -> Tensor:
    """``x``, copied only if its last axis is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(x: Tensor | None) -> tuple[int, int, int]:
    """Of batch, token and head."""
    return (0, 0, 0) if x is None else x.stride()[:3]


def launch(kernel: Any, count: int, call: Diagonal, *args: Any, **config: Any) -> None:
    """Launch on ``call``'s device; an error names the kernel, the shapes and the configuration."""
    if count == 0:
        return
    try:
        device = call.q.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                kernel[(count,)](*args, **config)
        else:
            kernel[(count,)](*args, **config)
    except Exception as error:
        shapes = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name in "qkvg" if (x := getattr(call, name)) is not None)
        error.add_note(f"linattn triton kernel {kernel.__name__!r} failed on {shapes}; configuration {config}")
        raise


def scan(
    call: Diagonal, x: Tensor, y: Tensor, chunks: Cut, start: Tensor | None, reverse: bool, keep: bool, end: bool
) -> tuple[Kept, Tensor | None]:
    """States at chunk starts (gradients at chunk ends, in reverse), and the state at the far end of each sequence."""
    _, T, HV, V = call.v.shape
    K, N, tiles = call.q.shape[-1], call.N, call.tiles
    new = functools.partial(torch.empty, device=call.q.device)
    kept = new((chunks.count, HV, K, V), dtype=call.state_dtype) if keep else None
    far = new((N, HV, K, V), dtype=torch.float32) if end else None
    tile = tiles.states
    ranges = new((chunks.count, HV, programs(K, 1, tile.BK, 1)), dtype=torch.float32) if keep and call.gate == 2 else None
    per_tile = programs(K, V, tile.BK, tile.BV)
    segment = tiles.segment(T, N, N * HV * per_tile)
    shared = dict(call.common(), BK=tile.BK, BV=tile.BV, REVERSE=reverse, num_warps=tile.warps, num_stages=tile.stages)
    strided = (*strides(x), *strides(y), *strides(call.g))

    def run(count, pieces, begin, finish, decay, kept, span, whole):
        launch(
            kernels.states, count * HV * per_tile, call,
            x, y, call.g, begin, finish, decay, kept, ranges,
            pieces and pieces.owner, pieces and pieces.first, chunks.first, call.cu, T, pieces.per if pieces else 1, span, N,
            HV, call.scale, *strided, **shared, WHOLE=whole, START=begin is not None, END=finish is not None,
            KEEP=kept is not None,
        )  # fmt: skip

    if segment == 0:
        run(N, None, start, far, None, kept, 1 << 30, True)
        return Kept(kept, ranges), far
    pieces = cut(T, N, segment * tiles.chunk, call.cu)
    local = new((pieces.count, HV, K, V), dtype=torch.float32)
    decay = None if call.g is None else new((pieces.count, HV, K), dtype=torch.float32)
    far = new((N, HV, K, V), dtype=torch.float32) if far is None else far
    run(pieces.count, pieces, None, local, decay, None, segment, False)
    tile = tiles.carries
    launch(
        kernels.carries, N * HV * programs(K, V, tile.BK, tile.BV), call,
        local, decay, start, far, pieces.first, pieces.per, HV,
        K=K, V=V, BK=tile.BK, BV=tile.BV, GATE=call.gate, REVERSE=reverse, PACKED=call.cu is not None,
        START=start is not None, num_warps=tile.warps,
    )  # fmt: skip
    if keep:
        run(pieces.count, pieces, local, None, None, kept, segment, False)
    return Kept(kept, ranges), far


def emit(call: Diagonal, y: Tensor, kept: Kept, out: Tensor, chunks: Cut, reverse: bool) -> None:
    """``o`` from ``v``, or ``dv`` from ``do``."""
    _, T, HV, V = call.v.shape
    tiles = call.tiles
    for slow in (False, True) if call.gate == 2 else (False,):
        tile = tiles.outputs_slow if slow else tiles.outputs
        count = chunks.count * HV * programs(1, V, 1, tile.BV)
        launch(
            kernels.outputs, min(count, 2 * tiles.processors) if slow else count, call,
            call.q, call.k, y, call.g, call.u, kept.states, out, kept.ranges, chunks.owner, chunks.first, call.cu,
            T, chunks.per, call.N, HV, count, call.scale,
            *strides(call.q), *strides(call.k), *strides(y), *strides(call.g), **call.common(),
            BK=tile.BK, BV=tile.BV, REVERSE=reverse, PARTS=kept.parts, SLOW=slow, RANGE=tiles.range, DT=dtype(call.v),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def dtype(x: Tensor) -> Any:
    """Triton's name of a dtype."""
    return {torch.bfloat16: triton.language.bfloat16, torch.float16: triton.language.float16}.get(
        x.dtype, triton.language.float32
    )


def forward(call: Diagonal, out_dtype: torch.dtype, final: bool) -> tuple[Tensor, Tensor | None]:
    """Outputs and, if asked for, final states."""
    B, T, HV, V = call.v.shape
    tile = call.tiles.fused
    if tile is not None and call.N * HV * programs(1, V, 1, tile.BV) >= call.tiles.fused_from:
        return fused_forward(call, out_dtype, final)
    chunks = cut(T, call.N, call.tiles.chunk, call.cu)
    kept, end = scan(call, call.k, call.v, chunks, call.start, False, True, final)
    out = torch.empty((B, T, HV, V), dtype=out_dtype, device=call.v.device)
    emit(call, call.v, kept, out, chunks, False)
    return out, end


def fused_forward(call: Diagonal, out_dtype: torch.dtype, final: bool) -> tuple[Tensor, Tensor | None]:
    """The same in one pass, when there are enough heads to fill the device."""
    B, T, HV, V = call.v.shape
    out = torch.empty((B, T, HV, V), dtype=out_dtype, device=call.v.device)
    end = torch.empty((call.N, HV, call.q.shape[-1], V), dtype=torch.float32, device=call.v.device) if final else None
    tile = call.tiles.fused
    common = call.common()
    del common["EXCLUSIVE"]
    launch(
        kernels.fused, call.N * HV * programs(1, V, 1, tile.BV), call,
        call.q, call.k, call.v, call.g, call.start, out, end, call.cu, T, HV, call.scale,
        *strides(call.q), *strides(call.k), *strides(call.v), *strides(call.g),
        **dict(common, C=call.tiles.fused_chunk), BK=tile.BK, BV=tile.BV, START=call.start is not None, END=final,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, end


def backward(call: Diagonal, do: Tensor, dend: Tensor | None) -> dict[str, Tensor | None]:
    """Gradients of ``q, k, v, g, u`` and the initial state, each in the shape that the kernels read."""
    B, T, HV, V = call.v.shape
    H, K = call.q.shape[2:]
    new = functools.partial(torch.empty, device=call.v.device)
    do = rows_contiguous(do)
    chunks = cut(T, call.N, call.tiles.chunk, call.cu)
    kept, _ = scan(call, call.k, call.v, chunks, call.start, False, True, False)
    dend = None if dend is None else dend.contiguous()
    dkept, dstart = scan(call, call.q, do, chunks, dend, True, True, call.start is not None)
    dv = new((B, T, HV, V), dtype=call.v.dtype)
    emit(call, do, dkept, dv, chunks, True)

    tile = call.tiles.gradients
    tiles_k = programs(K, 1, tile.BK, 1)
    narrow = call.q.dtype if call.group == 1 else torch.float32
    dq, dk = new((B, T, HV, K), dtype=narrow), new((B, T, HV, K), dtype=narrow)
    dg = du = None
    if call.gate == 1:
        dg = new((tiles_k, B, T, HV), dtype=torch.float32)
    elif call.gate == 2:
        dg = new((B, T, HV, K), dtype=call.g.dtype if call.g.shape[2] == HV else torch.float32)
    if call.u is not None:
        zeros = torch.zeros if call.cu is not None else torch.empty
        du = zeros((chunks.count, HV, K), dtype=torch.float32, device=call.v.device)
    for slow in (False, True) if call.gate == 2 else (False,):
        tile = call.tiles.gradients_slow if slow else call.tiles.gradients
        count = chunks.count * HV * programs(K, 1, tile.BK, 1)
        launch(
            kernels.gradients, min(count, 2 * call.tiles.processors) if slow else count, call,
            call.q, call.k, call.v, do, call.g, call.u, kept.states, dkept.states, dq, dk, dg, du,
            kept.ranges, chunks.owner, chunks.first, call.cu, T, chunks.per, call.N, HV, count, call.scale, B * T * HV,
            *strides(call.q), *strides(call.k), *strides(call.v), *strides(do), *strides(call.g), **call.common(),
            BK=tile.BK, BV=tile.BV, PARTS=kept.parts, SLOW=slow, RANGE=call.tiles.range, DT=dtype(call.v),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if call.group > 1:
        dq, dk = (x.view(B, T, H, call.group, K).sum(3).to(call.q.dtype) for x in (dq, dk))
    if call.gate == 1:
        dg = dg[0] if tiles_k == 1 else dg.sum(0)
    elif call.gate == 2 and call.g.shape[2] != HV:
        dg = dg.view(B, T, H, call.group, K).sum(3)
    return dict(q=dq, k=dk, v=dv, g=dg, u=None if du is None else du.sum(0), start=dstart)
