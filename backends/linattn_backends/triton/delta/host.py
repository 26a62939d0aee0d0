"""Host side of the delta families' chunk form: how sequences are cut, which tiles run, and the launches.

As in :mod:`..diagonal.memory_host`, nothing reads a tensor's data.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..host.chunks import Cut, cut, over_group, places, rows_contiguous, strides
from ..host.tiles import programs
from ..host.variant import Facts, gluon
from ..runtime.device import processors, roomy
from ..runtime.launch import launch
from . import kernels, vector
from .config import DeltaTiles, delta_tiles

__all__ = ["Delta", "backward", "forward"]


FOLLOWS = dict(launch_pdl=True)
"""Of a launch in Gluon: it may begin while the one before it runs; the kernel itself waits, by :func:`..lib.sm90.follow`.

Of ``strong_prepare`` and walks that write outputs: backward passes gained nothing by it.
"""


THREE = dict(maxnreg=168)
"""Of programs of four warps, three of which share a processor of Hopper's."""


@dataclass(frozen=True)
class Delta:
    """One call: its arrays and what the kernels need to know of them.

    ``g`` is ``[B, T, HV]``, ``[B, T, HV, K]`` or ``None``; ``beta`` ``[B, T, HV]``, ``[B, T, HV, V]`` or, for ``dplr``, which
    has ``a`` and ``b``, ``None``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    a: Tensor | None
    b: Tensor | None
    start: Tensor | None
    cu: Tensor | None
    scale: float
    tiles: DeltaTiles

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, a: Tensor | None, b: Tensor | None,
        start: Tensor | None, cu: Tensor | None, scale: float, chunk: int,
    ) -> Delta:  # fmt: skip
        """Take the arrays of a call: the last axis contiguous, tiles chosen."""
        q, k, v, g, beta, a, b = (x if x is None or x.dim() < 4 else rows_contiguous(x) for x in (q, k, v, g, beta, a, b))
        start = None if start is None else start.contiguous()
        gate, strength = 0 if g is None else g.dim() - 2, 0 if beta is None else beta.dim() - 2
        sizes = int(q.shape[-1]), int(v.shape[-1]), q.dtype, gate, strength, int(chunk)  # symbols have no place in a cache
        tiles = delta_tiles(*sizes, processors(q.device), roomy(q.device))
        return cls(q, k, v, g, beta, a, b, start, cu, scale, tiles)

    @property
    def gate(self) -> int:
        """0 none, 1 a scalar, 2 a vector."""
        return 0 if self.g is None else self.g.dim() - 2

    @property
    def family(self) -> str:
        """The family whose recurrence this is."""
        return "dplr" if self.a is not None else ("delta_rule", "gated_delta_rule", "kda")[self.gate]

    @property
    def strength(self) -> int:
        """0 no ``beta``, 1 one a token, 2 one a value channel."""
        return 0 if self.beta is None else self.beta.dim() - 2

    @functools.cached_property  # every launch asks
    def facts(self) -> Facts:
        """By which its kernels are chosen."""
        return Facts(self.family, self.q.dtype, self.q.shape[-1], self.v.shape[-1], self.tiles.chunk, self.strength)

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
        """Of states, errors, scores and ``M`` in memory and in products. float16 has not the range."""
        return torch.bfloat16 if self.v.dtype == torch.bfloat16 else torch.float32

    @property
    def state_type(self) -> Any:
        """The same, as Triton names it."""
        return tl.bfloat16 if self.v.dtype == torch.bfloat16 else tl.float32

    @property
    def count(self) -> int:
        """Chunks, or a bound on their number."""
        T, C = self.v.shape[1], self.tiles.chunk
        return self.N * -(-T // C) if self.cu is None else T // C + self.N

    def chunks(self) -> Cut:
        """Its sequences cut into chunks."""
        return cut(self.v.shape[1], self.N, self.tiles.chunk, self.cu)

    def common(self) -> dict[str, Any]:
        """Compile-time facts that every kernel takes."""
        return dict(
            K=self.q.shape[-1], C=self.tiles.chunk, GROUP=self.group, BETA=self.strength, PACKED=self.cu is not None,
            PREC=self.tiles.precision,
        )  # fmt: skip


class Scores(NamedTuple):
    """What the forward pass leaves for the backward pass: ``A`` and ``M`` ``[chunks, HV, C, C]``, those of ``dplr``'s second
    writer, and with a scalar gate ``rates`` ``[chunks, HV, 3, C]``: ``e^G``, ``e^{G_C - G}`` and ``G log2(e)``.
    """

    A: Tensor
    M: Tensor
    A2: Tensor | None
    L2: Tensor | None
    rates: Tensor | None

    @classmethod
    def empty(cls, call: Delta) -> Scores:
        """Arrays for them."""
        C, HV, dplr = call.tiles.chunk, call.v.shape[2], call.a is not None
        count = call.count
        new = functools.partial(torch.empty, (count, HV, C, C), device=call.v.device)
        M = torch.float32 if call.strength == 2 else call.state_dtype
        return cls(
            new(dtype=call.state_dtype), new(dtype=M), *(new(dtype=call.state_dtype) if dplr else None for _ in range(2)),
            torch.empty((count, HV, 3, C), dtype=torch.float32, device=call.v.device) if call.gate == 1 else None,
        )  # fmt: skip


class Prepared(NamedTuple):
    """What there is to know of every chunk before the walk: scores and ``M``; with a vector gate, decayed rows too."""

    q: Tensor
    k: Tensor
    write: Tensor | None
    write2: Tensor | None
    A: Tensor
    M: Tensor
    A2: Tensor | None
    L2: Tensor | None
    rates: Tensor | None
    ranges: Tensor | None

    @property
    def scores(self) -> Scores:
        """Of this, what is kept for the backward pass."""
        return Scores(self.A, self.M, self.A2, self.L2, self.rates if self.ranges is None else None)


class Pieces(NamedTuple):
    """Sequences cut into segments of ``length`` chunks, and what each does to the state before it, ``[K, K]``."""

    cut: Cut
    length: int
    through: Tensor


def few(call: Delta, count: int) -> int:
    """Programs that fill the device and share ``count`` pieces of work."""
    return min(count, 2 * call.tiles.processors)


def prepared(call: Delta, chunks: Cut, scores: Scores | None = None) -> Prepared:
    """What there is to know before the walk; of the ``scores``, nothing if the forward pass kept them."""
    if call.gate < 2:
        return Prepared(call.q, call.k, None, None, *(scores or scalar_scores(call, chunks)), None)
    (B, T, HV, _), K, dplr = call.v.shape, call.q.shape[-1], call.a is not None
    new = functools.partial(torch.empty, device=call.q.device)
    rows = functools.partial(new, (B, T, HV, K), dtype=call.q.dtype)
    kept = scores or Scores.empty(call)
    ready = Prepared(
        rows(), rows(), rows(), rows() if dplr else None, *kept[:4],
        new((chunks.count, HV, K), dtype=torch.float32), new((chunks.count, HV), dtype=torch.float32),
    )  # fmt: skip
    module = special(call, call.q, call.a, call.b, call.k, call.g)
    make = vector_rows if module is None or dplr else vector_rows_on_hopper
    return make(module, call, chunks, ready, scores is None)


def scalar_scores(call: Delta, chunks: Cut) -> Scores:
    """Scores and ``M`` for at most a scalar gate."""
    made, tile, count = Scores.empty(call), call.tiles.prepare, chunks.count * call.v.shape[2]
    strided = (*strides(call.q), *strides(call.k), *strides(call.g))
    module = special(call, call.q, call.k)
    if module is not None:
        launch(
            module.prepare, -(-count // 4), call,
            call.q, call.k, call.g, call.beta, made.A, made.M, made.rates, *places(call, chunks), count, call.scale, *strided,
            *strides(call.beta), K=call.q.shape[-1], C=call.tiles.chunk, GROUP=call.group, GATE=call.gate,
            PACKED=call.cu is not None, num_warps=4, **THREE,
        )  # fmt: skip
        return made
    L = torch.empty_like(made.M, dtype=torch.float32)
    launch(
        kernels.prepare, count, call,
        call.q, call.k, call.g, made.A, L, made.rates, *places(call, chunks), call.scale, *strided, GATE=call.gate,
        **call.common(), BK=tile.BK, SPLIT=call.tiles.split, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return made._replace(M=solved(call, chunks, L, made.M))


def vector_rows_on_hopper(module: ModuleType, call: Delta, chunks: Cut, ready: Prepared, scores: bool) -> Prepared:
    """Write decayed rows and, if asked for, ``scores``: of chunks that take the plain products, then of those that do not."""
    count = chunks.count * call.v.shape[2]
    given = (call.q, call.k, call.g, call.beta, ready.A, ready.M)
    rows = (ready.q, ready.k, ready.write, ready.ranges)
    strided = tuple(stride for x in (call.q, call.k, call.g, call.beta) for stride in strides(x))
    sizes = dict(
        K=call.q.shape[-1], C=call.tiles.chunk, GROUP=call.group, PACKED=call.cu is not None, RANGE=call.tiles.range,
        num_warps=4,
    )  # fmt: skip
    launch(
        module.vector_prepare, count, call,
        *given, ready.rates, *rows, *places(call, chunks), call.scale, *strided, BK=64, SCORES=scores, **sizes,
        **(THREE if scores else {}),
    )  # fmt: skip
    if scores:
        launch(
            module.strong_prepare, few(call, count), call,
            *given, *rows, *places(call, chunks), count, call.scale, *strided, **sizes, **FOLLOWS,
        )  # fmt: skip
    return ready


def vector_rows(module: ModuleType | None, call: Delta, chunks: Cut, ready: Prepared, scores: bool) -> Prepared:
    """The same in plain Triton, but for ``dplr``'s chunks that take the plain products, if ``module`` has those."""
    tile, count, dplr = call.tiles.prepare, chunks.count * call.v.shape[2], call.a is not None
    given = (call.q, call.a, call.b, call.k, call.g)
    decayed = (ready.rates, ready.q, ready.k, ready.write, ready.write2, ready.ranges)
    strided = tuple(stride for x in (call.q, call.k, call.g, call.a, call.b) for stride in strides(x))
    sizes = dict(K=call.q.shape[-1], C=call.tiles.chunk, GROUP=call.group, PACKED=call.cu is not None)
    plain = dict(sizes, BK=tile.BK, SPLIT=call.tiles.split, DPLR=dplr, num_warps=tile.warps, num_stages=tile.stages)
    L = torch.empty_like(ready.M, dtype=torch.float32) if scores else None
    if module is not None:
        launch(
            module.prepare, count, call,
            *given, ready.A, L, ready.A2, ready.L2, *decayed, *places(call, chunks), call.scale, *strided, BK=64, **sizes,
            SCORES=scores, RANGE=call.tiles.range, num_warps=4,
        )  # fmt: skip
    elif not scores:
        launch(vector.decayed, count, call, *given, *decayed, *places(call, chunks), *strided, **plain)
    if L is None:
        return ready
    for slow in (False, True) if module is None else (True,):
        launch(
            vector.prepare, few(call, count) if slow else count, call,
            *given, ready.A, L, ready.A2, ready.L2, *decayed, *places(call, chunks), count, call.scale, *strided, **plain,
            PREC=call.tiles.precision, SLOW=slow, RANGE=call.tiles.range, DT=call.state_type,
        )  # fmt: skip
    return ready._replace(M=solved(call, chunks, L, ready.M))


def solved(call: Delta, chunks: Cut, L: Tensor, M: Tensor) -> Tensor:
    """``M`` of every chunk; ``L`` itself with a ``beta`` a value channel."""
    if call.strength == 2:
        return L
    launch(
        kernels.solve, chunks.count * call.v.shape[2], call,
        L, M, call.beta, *places(call, chunks), *strides(call.beta),
        C=call.tiles.chunk, BETA=call.strength, PACKED=call.cu is not None, PREC=call.tiles.precision,
        num_warps=call.tiles.solve.warps, num_stages=1,
    )  # fmt: skip
    return M


def special(call: Delta, *arrays: Tensor | None) -> ModuleType | None:
    """The module of kernels in Gluon that take these arrays, if there is one: ``dplr`` has its own, without walks."""
    if not gluon(call, *arrays):
        return None
    if call.a is not None:
        from . import dplr_sm90 as dplr_hopper

        return dplr_hopper
    from . import hopper as delta_hopper

    return delta_hopper


def walks(call: Delta, ready: Prepared, y: Tensor | None) -> ModuleType:
    """The module whose walks take these arrays."""
    found = special(call, ready.q, ready.k, y) if call.a is None else None
    return kernels if found is None else found


def walk(
    kernel: Any, call: Delta, y: Tensor | None, chunks: Cut, ready: Prepared, pieces: Cut | None, length: int,
    start: Tensor | None, end: Tensor | None, outputs: tuple[Tensor | None, ...], width: int, **flags: bool,
) -> None:  # fmt: skip
    """Launch ``forwards`` (``y = v``) or ``backwards`` (``y = do``) over whole sequences, or over ``pieces``."""
    T, HV = call.v.shape[1:3]
    module = walks(call, ready, y)
    tile = call.tiles.forwards if kernel is kernels.forwards else call.tiles.backwards
    count = call.N if pieces is None else pieces.count
    at = pieces or Cut(0, 0, None, None)
    second = (ready.A2, ready.L2) if kernel is kernels.forwards else ()
    written = (ready.write, ready.write2) if kernel is kernels.forwards else (ready.write,)
    shared = call.common()
    if kernel is kernels.forwards:
        shared["DPLR"] = call.a is not None
    if call.gate == 2:
        shared["GROUP"] = 1
    if module is not kernels:
        shared["STAGES"] = call.tiles.ring
        if flags.get("OUT"):
            shared |= FOLLOWS
    launch(
        getattr(module, kernel.__name__), count * HV * programs(1, width, 1, tile.BV), call,
        ready.q, ready.k, y, call.beta, *written, ready.A, ready.M, *second, ready.rates, start, end, *outputs,
        at.owner, at.first, chunks.first, call.cu, T, at.per, length, call.N, HV, call.scale,
        *strides(ready.q), *strides(ready.k), *strides(y), *strides(call.beta), **shared, **flags,
        GATE=call.gate, V=width, BK=tile.BK, BV=tile.BV, WHOLE=pieces is None, START=start is not None, END=end is not None,
        DT=call.state_type, ST=call.state_type, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def pieces_of(call: Delta, chunks: Cut, ready: Prepared) -> Pieces | None:
    """Segments, if there are too few heads to fill the device."""
    T, HV, V = call.v.shape[1:]
    K = call.q.shape[-1]
    each = 2 if walks(call, ready, call.v) is kernels else 1
    length = call.tiles.segment(T, call.N, call.N * HV, programs(1, V, 1, call.tiles.forwards.BV), each)
    if length == 0 or call.strength == 2:  # what it does to the state would be a [K, K] a value channel
        return None
    pieces = cut(T, call.N, length * call.tiles.chunk, call.cu)
    through = torch.empty((pieces.count, HV, K, K), dtype=torch.float32, device=call.q.device)
    walk(
        kernels.forwards, call, None, chunks, ready, pieces, length, None, through, (None, None, None), K,
        KEEP=False, OUT=False, IDENTITY=True,
    )  # fmt: skip
    return Pieces(pieces, length, through)


def carried(call: Delta, pieces: Pieces, local: Tensor, start: Tensor | None, reverse: bool) -> Tensor:
    """Turn what segments make of zero into the states before them; return those after the last."""
    HV, V = call.v.shape[2:]
    K, tile = call.q.shape[-1], call.tiles.carry
    far = torch.empty((call.N, HV, K, V), dtype=torch.float32, device=call.q.device)
    launch(
        kernels.carry, call.N * HV * programs(1, V, 1, tile.BV), call,
        local, pieces.through.mT.contiguous() if reverse else pieces.through, start, far, pieces.cut.first, pieces.cut.per, HV,
        K=K, V=V, BK=tile.BK, BV=tile.BV, REVERSE=reverse, PACKED=call.cu is not None, START=start is not None,
        PREC=call.tiles.precision, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return far


def scan(
    kernel: Any, call: Delta, y: Tensor, chunks: Cut, ready: Prepared, pieces: Pieces | None, start: Tensor | None,
    outputs: tuple[Tensor | None, ...], end: bool, **flags: bool,
) -> Tensor | None:  # fmt: skip
    """Walk every sequence, in segments if there are any; the state at the far end if asked for."""
    HV, V = call.v.shape[2:]
    K = call.q.shape[-1]
    new = functools.partial(torch.empty, dtype=torch.float32, device=call.q.device)
    if pieces is None:
        far = new((call.N, HV, K, V)) if end else None
        walk(kernel, call, y, chunks, ready, None, 1 << 30, start, far, outputs, V, **flags)
        return far
    local = new((pieces.cut.count, HV, K, V))
    silent = dict.fromkeys(flags, False)
    nothing = (None,) * len(outputs)
    walk(kernel, call, y, chunks, ready, pieces.cut, pieces.length, None, local, nothing, V, **silent)
    far = carried(call, pieces, local, start, kernel is kernels.backwards)
    walk(kernel, call, y, chunks, ready, pieces.cut, pieces.length, local, None, outputs, V, **flags)
    return far


def forward(call: Delta, final: bool) -> tuple[Tensor, Tensor | None, Scores]:
    """Outputs, if asked for final states, and what the backward pass can use."""
    chunks = call.chunks()
    ready = prepared(call, chunks)
    out = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    pieces = pieces_of(call, chunks, ready)
    flags = dict(KEEP=False, OUT=True, IDENTITY=False)
    end = scan(kernels.forwards, call, call.v, chunks, ready, pieces, call.start, (None, None, out), final, **flags)
    return out, end, ready.scores


def backward(call: Delta, do: Tensor, dend: Tensor | None, scores: Scores | None) -> dict[str, Tensor | None]:
    """Gradients of ``q, k, v, g, beta`` and the initial state; but for ``scores``, what the forward pass knew is made again."""
    B, T, HV, V = call.v.shape
    K = call.q.shape[-1]
    new = functools.partial(torch.empty, device=call.v.device)
    do = rows_contiguous(do)
    dend = None if dend is None else dend.contiguous()
    chunks = call.chunks()
    ready = prepared(call, chunks, scores)
    pieces = pieces_of(call, chunks, ready)
    kept, dkept = (new((chunks.count, HV, V, K), dtype=call.state_dtype) for _ in range(2))
    errors, adjoint = (new((B, T, HV, V), dtype=call.state_dtype) for _ in range(2))
    flags = dict(KEEP=True, OUT=False, IDENTITY=False)
    scan(kernels.forwards, call, call.v, chunks, ready, pieces, call.start, (kept, errors, None), False, **flags)
    dstart = scan(
        kernels.backwards, call, do, chunks, ready, pieces, dend, (dkept, adjoint), call.start is not None, KEEP=True
    )  # fmt: skip

    shares = gradients if call.gate < 2 else vector_gradients
    return shares(call, do, chunks, ready, kept, dkept, errors, adjoint) | dict(start=dstart)


class ScoreGradients(NamedTuple):
    """Gradients of ``A`` and ``L``, and of those of ``dplr``'s second writer."""

    dA: Tensor
    dL: Tensor
    dA2: Tensor | None
    dL2: Tensor | None


def pairs(
    call: Delta, do: Tensor, chunks: Cut, errors: Tensor, adjoint: Tensor
) -> tuple[ScoreGradients, dict[str, Tensor | None]]:  # fmt: skip
    """Gradients of scores, ``v`` and ``beta``."""
    B, T, HV, V = call.v.shape
    C, dplr, tile = call.tiles.chunk, call.a is not None, call.tiles.pairs
    new = functools.partial(torch.empty, device=call.v.device)
    square = functools.partial(new, (chunks.count, HV, C, C), dtype=call.state_dtype)
    scores = ScoreGradients(square(), square(), square() if dplr else None, square() if dplr else None)
    dv = None if dplr else new((B, T, HV, V), dtype=call.v.dtype)
    grads = dict(v=dv, beta=None if call.beta is None else new(call.beta.shape, dtype=call.beta.dtype))
    launch(
        kernels.pairs, chunks.count * HV, call,
        do, call.beta, call.v, errors, adjoint, *scores, grads["v"], grads["beta"],
        *places(call, chunks), call.scale,
        *(stride for x in (do, call.beta, call.v) for stride in strides(x)),
        V=V, C=C, BV=tile.BV, BETA=call.strength, DPLR=dplr, PACKED=call.cu is not None,
        PREC=call.tiles.precision,
        DT=call.state_type, ST=call.state_type, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return scores, grads


def gradients(
    call: Delta,
    do: Tensor,
    chunks: Cut,
    ready: Prepared,
    kept: Tensor,
    dkept: Tensor,
    errors: Tensor,
    adjoint: Tensor,
) -> dict[str, Tensor | None]:
    """``dq, dk, dv, dg, dbeta`` for at most a scalar gate."""
    B, T, HV, V = call.v.shape
    K, tile = call.q.shape[-1], call.tiles.gradients
    fast = special(call, call.q, call.k, do)
    if fast is not None:
        tile = tile._replace(BK=64)
    new = functools.partial(torch.empty, device=call.v.device)
    tiles_k = programs(K, 1, tile.BK, 1)
    part = turns(call, tiles_k)
    dq, dk = summed(call, part), summed(call, part)
    dv, dbeta = new((B, T, HV, V), dtype=call.v.dtype), new(call.beta.shape, dtype=call.beta.dtype)
    each = (B, T, HV) if fast is None else (chunks.count, HV, 2, call.tiles.chunk)
    shares = new((tiles_k, *each), dtype=torch.float32) if call.gate else None  # of the gate's gradient, a tile
    for turn in range(part):
        launch(
            (fast or kernels).gradients, chunks.count * (HV // part) * tiles_k, call,
            call.q, call.k, do, call.g, call.beta, errors, adjoint, ready.rates, kept, dkept, dq, dk, dv, shares, dbeta,
            *places(call, chunks), turn, call.scale, math.prod(each),
            *strides(call.q), *strides(call.k), *strides(do), *strides(call.g), *strides(call.beta), **call.common(),
            PART=part, GATE=call.gate, V=V, BK=tile.BK, BV=tile.BV, SPLIT=call.tiles.split, DT=call.state_type,
            ST=call.state_type, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    dg = None
    if shares is not None:
        dg = gate_gradients(call, chunks, shares) if fast is not None else shares[0] if tiles_k == 1 else shares.sum(0)
    return dict(q=over_group(call.q, dq), k=over_group(call.q, dk), v=dv, g=dg, beta=dbeta)


def gate_gradients(call: Delta, chunks: Cut, shares: Tensor) -> Tensor:
    """``dg`` of the shares ``[tiles, chunks, HV, 2, C]`` that the tiles of keys left."""
    dg = torch.empty(call.g.shape, dtype=torch.float32, device=call.g.device)
    launch(
        kernels.gate_gradients, chunks.count * call.v.shape[2], call,
        shares, call.g, dg, *places(call, chunks), shares[0].numel(), *strides(call.g),
        C=call.tiles.chunk, TILES=shares.shape[0], PACKED=call.cu is not None, num_warps=1, num_stages=1,
    )  # fmt: skip
    return dg


def vector_gradients(
    call: Delta,
    do: Tensor,
    chunks: Cut,
    ready: Prepared,
    kept: Tensor,
    dkept: Tensor,
    errors: Tensor,
    adjoint: Tensor,
) -> dict[str, Tensor | None]:
    """Every gradient but the state's for a vector gate; chunks by path as in :func:`prepared`."""
    (_, _, HV, V), K, dplr = call.v.shape, call.q.shape[-1], call.a is not None
    module = special(call, call.q, call.a, call.b, call.k, call.v if dplr else None, do, call.g)
    if module is not None and not dplr:
        return vector_gradients_on_hopper(module, call, do, chunks, ready, kept, dkept, errors, adjoint)
    scores, grads = pairs(call, do, chunks, errors, adjoint)
    dg, da, db = (None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.g, call.a, call.b))
    shared = dict(call.common(), V=V, DT=call.state_type, ST=call.state_type)
    given = (call.q, call.a, call.b, call.k, call.v, do, call.g)
    tiles = (call.tiles.gradients, call.tiles.gradients_slow)
    part = turns(call, programs(K, 1, tiles[0].BK, 1))
    dq, dk = summed(call, part), summed(call, part)
    known, wanted = (*scores, kept, dkept), (dq, da, db, dk, dg, ready.ranges)
    strided = tuple(stride for x in (call.q, call.k, call.g, call.a, call.b, call.v, do, call.beta) for stride in strides(x))
    for turn, slow in itertools.product(range(part), (False, True)):
        if module is not None and not slow:
            launch(
                module.gradients, chunks.count * (HV // part) * (K // 64), call,
                *given, errors, adjoint, *known, *wanted, *places(call, chunks), turn, call.scale, *strided[:-3],
                K=K, V=V, C=call.tiles.chunk, BK=64, GROUP=call.group, PACKED=call.cu is not None, RANGE=call.tiles.range,
                PART=part, num_warps=4,
            )  # fmt: skip
            continue
        tile = tiles[slow]
        count = chunks.count * (HV // part) * programs(K, 1, tile.BK, 1)
        launch(
            vector.gradients, few(call, count) if slow else count, call,
            *given, call.beta, errors, adjoint, *known, *wanted, *places(call, chunks), turn, count, call.scale, *strided,
            PART=part, DPLR=dplr, SLOW=slow, RANGE=call.tiles.range, SPLIT=call.tiles.split, **shared, BK=tile.BK, BV=tile.BV,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    grads |= dict(q=over_group(call.q, dq), k=over_group(call.q, dk), g=dg, a=da, b=db)
    return grads | dict(v=values(call, do, chunks, ready, dkept, adjoint)) if dplr else grads


def vector_gradients_on_hopper(
    module: ModuleType, call: Delta, do: Tensor, chunks: Cut, ready: Prepared, kept: Tensor, dkept: Tensor, errors: Tensor,
    adjoint: Tensor,
) -> dict[str, Tensor | None]:  # fmt: skip
    """Those of ``kda``, by one kernel."""
    (_, _, HV, V), K = call.v.shape, call.q.shape[-1]
    part = turns(call, K // 64)
    dq, dk = summed(call, part), summed(call, part)
    dv, dg, dbeta = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.v, call.g, call.beta))
    count = chunks.count * (HV // part) * (K // 64)
    for turn, strong in itertools.product(range(part), (False, True)):
        launch(
            module.vector_gradients, few(call, count) if strong else count, call,
            call.q, call.k, do, call.g, call.beta, errors, adjoint, kept, dkept, dq, dk, dv, dg, dbeta, ready.ranges,
            *places(call, chunks), turn, count, call.scale,
            *(stride for x in (call.q, call.k, do, call.g, call.beta) for stride in strides(x)),
            K=K, V=V, C=call.tiles.chunk, BK=64, GROUP=call.group, PACKED=call.cu is not None, RANGE=call.tiles.range,
            PART=part, STRONG=strong, num_warps=4,
        )  # fmt: skip
    return dict(q=over_group(call.q, dq), k=over_group(call.q, dk), v=dv, g=dg, beta=dbeta)


def values(call: Delta, do: Tensor, chunks: Cut, ready: Prepared, dkept: Tensor, adjoint: Tensor) -> Tensor:
    """``dv`` of ``dplr``."""
    (_, _, HV, V), tile = call.v.shape, call.tiles.gradients
    dv = torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    launch(
        vector.values, chunks.count * HV * programs(1, V, 1, tile.BV), call,
        do, adjoint, ready.A2, ready.L2, ready.write2, dkept, dv, *places(call, chunks), *strides(do),
        K=call.q.shape[-1], V=V, C=call.tiles.chunk, BK=tile.BK, BV=tile.BV, PACKED=call.cu is not None,
        PREC=call.tiles.precision, DT=call.state_type, ST=call.state_type, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dv


def turns(call: Delta, tiles: int) -> int:
    """How many of a group's value heads add their ``dq, dk`` to one sum, a launch after the other.

    All of them, unless that leaves too few programs: then a group has several sums.
    """
    enough = 4 * call.tiles.processors
    divisors = (n for n in range(call.group, 1, -1) if call.group % n == 0)
    return next((n for n in divisors if call.count * (call.v.shape[2] // n) * tiles >= enough), 1)


def summed(call: Delta, part: int) -> Tensor:
    """For ``dq`` or ``dk``: the sums over ``part`` value heads."""
    B, T, HV = call.v.shape[:3]
    kind = call.q.dtype if call.group == 1 else torch.float32
    return torch.empty((B, T, HV // part, call.q.shape[-1]), dtype=kind, device=call.q.device)
