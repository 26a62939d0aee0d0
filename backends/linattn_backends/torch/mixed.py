"""``mixed_attn``: squared ReLU attention inside chunks of ``C`` tokens, linear attention over whole chunks.

With ``c(t) = t // C``, ``W[t, s] = relu(quad_scale · q_quad_t·k_quad_s + bias)²`` for ``s ≤ t`` of one chunk, and ``S`` the sum
of ``k_linᵀ v`` over the chunks before: ``o = W v + lin_scale · q_lin S``. Every form runs this chunk algorithm, a few chunks at
a time; one token from a state takes :func:`_decode`. Not causal, ``W`` is not masked and ``S`` is the sum over everything.

A sequence that resumes from a state has the ``p`` tokens held there in front, as keys without queries: a *virtual* sequence of
``p + T`` tokens. Rows of a batch that hold equally many go through together. Reading ``p`` waits for the device, so a resumed
prefill synchronises once; a call without a state, and decoding, do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from linattn.plugin import MixedState
from torch import Tensor

from . import nonfinite
from .layout import ROWS_A_BLOCK, assign, behind_zeros
from .library import accumulation, plain
from .mixed_rules import empty_gradients, empty_results, rules
from .transforms import register

TOKENS_A_SEGMENT = 512


@dataclass(frozen=True)
class Run:
    """Sequences that are worked on together: rows of the batch, their states, tokens ``t0 … t1``, ``p`` tokens held before."""

    rows: slice
    states: slice
    t0: int
    t1: int
    p: int

    @property
    def length(self) -> int:
        """Tokens of the virtual sequence."""
        return self.p + self.t1 - self.t0


@dataclass(frozen=True)
class Held:
    """Tokens a state holds, ``[N, C, H, W]``, next to the new ones ``[B, T, H, W]``; either side may be a gradient."""

    new: Tensor
    old: Tensor | None

    def load(self, run: Run, s0: int, size: int, dtype: torch.dtype) -> Tensor:
        """Virtual tokens ``s0 …`` as ``[rows·H, size, W]``, zeros beyond the end."""
        B, H, W = run.rows.stop - run.rows.start, *self.new.shape[2:]
        buffer = torch.zeros((B, H, size, W), dtype=dtype, device=self.new.device)
        for at, part in self._parts(run, s0, size):
            assign(buffer[:, :, at : at + part.shape[1]], part.transpose(1, 2))
        return buffer.view(B * H, size, W)

    def store(self, run: Run, s0: int, y: Tensor) -> None:
        """The transpose of :meth:`load`."""
        B = run.rows.stop - run.rows.start
        y = y.view(B, -1, *y.shape[-2:])
        for at, part in self._parts(run, s0, y.shape[2]):
            assign(part, y[:, :, at : at + part.shape[1]].transpose(1, 2))

    def _parts(self, run: Run, s0: int, size: int) -> Iterator[tuple[int, Tensor]]:
        """Where in the buffer the held and the new tokens go, and the views they come from."""
        s1 = min(s0 + size, run.length)
        if s0 < run.p and self.old is not None:
            yield 0, self.old[run.states, s0 : min(run.p, s1)]
        first = max(s0, run.p)
        if first < s1:
            yield first - s0, self.new[run.rows, run.t0 + first - run.p : run.t0 + s1 - run.p]


def _runs(B: int, T: int, H: int, cu_seqlens: Tensor | None, length: Tensor | None) -> list[Run]:
    """Every sequence, rows of a batch together where they can be."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        N = len(bounds) - 1
        held = [0] * N if length is None else length.tolist()
        return [Run(slice(0, 1), slice(n, n + 1), bounds[n], bounds[n + 1], held[n]) for n in range(N)]
    held = [0] * B if length is None else length.tolist()
    if len(set(held)) > 1:
        return [Run(slice(n, n + 1), slice(n, n + 1), 0, T, held[n]) for n in range(B)]
    rows = max(ROWS_A_BLOCK // max(H, 1), 1)
    parts = [slice(b, min(b + rows, B)) for b in range(0, B, rows)]
    return [Run(part, part, 0, T, held[0]) for part in parts]


def _end(T: int, cu_seqlens: Tensor | None) -> int:
    """One past the last token that belongs to a sequence."""
    return T if cu_seqlens is None else int(cu_seqlens[-1])


@dataclass
class Segment:
    """Operands of ``m`` chunks ``[Z, m, c, W]`` and what the forward pass makes of them. ``c`` is ``C``, or less if all fit."""

    q_quad: Tensor
    k_quad: Tensor
    q_lin: Tensor
    k_lin: Tensor
    v: Tensor
    bias: Tensor | None
    quad_scale: float
    causal: bool

    def kept(self) -> Tensor:
        """``relu(quad_scale · q kᵀ + bias)``, masked; its square is ``W``."""
        scores = (self.q_quad @ self.k_quad.mT).mul_(self.quad_scale)
        if self.bias is not None:
            c = scores.shape[-1]
            H = self.bias.shape[0]
            rows = scores.view(-1, H, *scores.shape[1:])
            rows += self.bias[:, None, :c, :c]
        scores.clamp_(min=0)
        return scores.tril_() if self.causal else scores

    def sums(self) -> Tensor:
        """``k_linᵀ v`` of each chunk."""
        return self.k_lin.mT @ self.v


class Operands:
    """All arrays of one call, read segment by segment."""

    def __init__(self, new: tuple[Tensor, ...], old: tuple[Tensor, ...] | None, bias: Tensor | None, C: int,
                 quad_scale: float, lin_scale: float, causal: bool):  # fmt: skip
        self.dtype = accumulation(new[4].dtype)
        held = old or (None, None, None)
        self.held = [Held(x, y) for x, y in zip(new, (None, held[0], None, held[1], held[2]), strict=True)]
        self.bias = None if bias is None else bias.to(self.dtype)
        self.C, self.quad_scale, self.lin_scale, self.causal = C, quad_scale, lin_scale, causal

    def segments(self, run: Run) -> list[tuple[int, int, int]]:
        """``(first virtual token, chunks, tokens a chunk)`` of each segment."""
        c = min(self.C, run.length)
        if c == 0:
            return []
        chunks = -(-run.length // c)
        step = max(TOKENS_A_SEGMENT // c, 1)
        return [(i * c, min(step, chunks - i), c) for i in range(0, chunks, step)]

    def load(self, run: Run, s0: int, m: int, c: int) -> Segment:
        """One segment."""
        x = [held.load(run, s0, m * c, self.dtype).unflatten(1, (m, c)) for held in self.held]
        return Segment(*x, self.bias, self.quad_scale, self.causal)

    def whole(self, run: Run, s0: int, m: int, c: int) -> int:
        """How many of the chunks count as whole: their sums enter the state. Not causal, all do."""
        return m if not self.causal else min(m, max(run.length - s0, 0) // c) if c == self.C else 0

    def scan(self, segment: Segment, S: Tensor, whole: int) -> tuple[Tensor, Tensor]:
        """States before each chunk ``[Z, m, L, V]``, and after the last whole one."""
        before = []
        for i, chunk in enumerate(segment.sums().unbind(1)):
            before.append(S)
            if i < whole:
                S = S + chunk
        return torch.stack(before, 1), S

    def total(self, run: Run, S: Tensor) -> Tensor:
        """``S`` plus the sum over every chunk."""
        for at in self.segments(run):
            S = S + self.load(run, *at).sums().sum(1)
        return S

    def starts(self, run: Run, S: Tensor) -> list[Tensor]:
        """The state before each segment; not causal, all read the whole sum."""
        segments = self.segments(run)
        if not self.causal:
            return [self.total(run, S)] * len(segments)
        found = []
        for at in segments:
            found.append(S)
            _, S = self.scan(self.load(run, *at), S, self.whole(run, *at))
        return found

    def scan_back(self, reads: Tensor, dS: Tensor, whole: int) -> tuple[Tensor, Tensor]:
        """Gradients of each chunk's sum, given those of what the chunk reads ``[Z, m, L, V]``; and of the state before."""
        after = [torch.zeros_like(dS)] * reads.shape[1]
        for i, read in reversed(list(enumerate(reads.unbind(1)))):
            if i < whole:
                after[i] = dS
            if self.causal:
                dS = dS + read
        return torch.stack(after, 1), dS


def _flat(states: Tensor, run: Run) -> Tensor:
    return states[run.states].flatten(0, 1)


@torch.library.custom_op("linattn::mixed", mutates_args=())
def mixed(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    bias: Tensor | None,
    kv: Tensor | None,
    held_k_quad: Tensor | None,
    held_k_lin: Tensor | None,
    held_v: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
    C: int,
    quad_scale: float,
    lin_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``o`` and the five arrays of the final state."""
    new = (q_quad, k_quad, q_lin, k_lin, v)
    old = None if kv is None else (held_k_quad, held_k_lin, held_v)
    rest = (old, bias, kv, length, cu_seqlens, C, quad_scale, lin_scale, causal)
    o, *state = _forward(new, *rest)
    named = dict(zip(("q_quad", "k_quad", "q_lin", "k_lin", "v"), new, strict=True))
    found = nonfinite.written({name: named[name] for name in ("k_quad", "k_lin", "v")}) if causal else {}
    if found:
        clean, *_ = _forward(tuple(nonfinite.zeroed(named, found).values()), *rest)
        o = torch.where(nonfinite.since(found, v.shape[2], cu_seqlens), o, clean)
    return o, *state


def _forward(
    new: tuple[Tensor, ...],
    old: tuple[Tensor, ...] | None,
    bias: Tensor | None,
    kv: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
    C: int,
    quad_scale: float,
    lin_scale: float,
    causal: bool,
) -> tuple[Tensor, ...]:
    """What the op returns, on operands that are finite, and on others as matrix products have it."""
    v = new[4]
    op = Operands(new, old, bias, C, quad_scale, lin_scale, causal)
    o, *final, final_length = empty_results(new[1], new[3], v, cu_seqlens, C)
    behind_zeros(o, _end(v.shape[1], cu_seqlens))
    final[0].zero_()
    if kv is not None:
        assign(final[0], kv)
    with plain(v):
        for run in _runs(*v.shape[:3], cu_seqlens, length):
            S = _flat(final[0], run)
            total = None if causal else op.total(run, S)
            for s0, m, c in op.segments(run):
                x = op.load(run, s0, m, c)
                before, S = op.scan(x, S, op.whole(run, s0, m, c))
                W = x.kept().square_()
                y = W @ x.v
                y += (x.q_lin @ (before if total is None else total[:, None])).mul_(lin_scale)
                Held(o, None).store(run, s0, y.flatten(1, 2))
            view = final[0][run.states]
            view.copy_(S.view(view.shape))
            tail = run.length // C * C
            for out, held in zip(final[1:], (op.held[1], op.held[3], op.held[4]), strict=True):
                rows = held.load(run, tail, C, op.dtype)
                assign(out[run.states], rows.view(-1, out.shape[2], *rows.shape[1:]).transpose(1, 2))
            final_length[run.states] = run.length - tail
    return o, *final, final_length


@mixed.register_fake
def _(q_quad, k_quad, q_lin, k_lin, v, bias, kv, held_k_quad, held_k_lin, held_v, length, cu_seqlens, C, *options):
    return empty_results(k_quad, k_lin, v, cu_seqlens, C)


@dataclass(frozen=True)
class Pull:
    """Gradients on their way back: from ``do`` and the tokens held at the end, to ``out`` and ``dbias``."""

    op: Operands
    do: Tensor | None
    dheld: tuple[Tensor | None, ...]
    out: list[Held]
    dbias: Tensor | None

    def sequence(self, run: Run, S: Tensor, dS: Tensor) -> Tensor:
        """From the last segment to the first; the gradient of the state before."""
        op, segments = self.op, self.op.segments(run)
        if not op.causal and self.do is not None:
            for at in segments:
                dS = dS + self.reads(op.load(run, *at), self.load(run, at)).sum(1)
        for at, start in reversed(list(zip(segments, op.starts(run, S), strict=True))):
            dS = self.segment(run, at, start, dS)
        return dS

    def load(self, run: Run, at: tuple[int, int, int]) -> Tensor:
        """``do`` of a segment, ``[Z, m, c, V]``; zeros where none flows in."""
        s0, m, c = at
        if self.do is None:
            v = self.out[4].new
            return v.new_zeros(((run.rows.stop - run.rows.start) * v.shape[2], m, c, v.shape[3]), dtype=self.op.dtype)
        return Held(self.do, None).load(run, s0, m * c, self.op.dtype).unflatten(1, (m, c))

    def reads(self, x: Segment, dy: Tensor) -> Tensor:
        """Gradients of the states that each chunk reads, ``[Z, m, L, V]``."""
        return (x.q_lin.mT @ dy).mul_(self.op.lin_scale)

    def segment(self, run: Run, at: tuple[int, int, int], S: Tensor, dS: Tensor) -> Tensor:
        """Gradients of one segment, stored; the gradient of the state before it."""
        op, (s0, _, c) = self.op, at
        x, dy, whole = op.load(run, *at), self.load(run, at), op.whole(run, *at)
        before = op.scan(x, S, whole)[0] if op.causal else S[:, None]
        dsums, dS = op.scan_back(self.reads(x, dy), dS, whole)
        kept = x.kept()
        dscore = (dy @ x.v.mT).mul_(kept).mul_(2)
        if self.dbias is not None:
            self.dbias[:, :c, :c] += dscore.view(-1, self.dbias.shape[0], *dscore.shape[1:]).sum((0, 2))
        dq_quad = (dscore @ x.k_quad).mul_(op.quad_scale)
        dk_quad = (dscore.mT @ x.q_quad).mul_(op.quad_scale)
        dq_lin = (dy @ before.mT).mul_(op.lin_scale)
        dk_lin = x.v @ dsums.mT
        dv = kept.square_().mT @ dy + x.k_lin @ dsums
        gradients = [y.flatten(1, 2) for y in (dq_quad, dk_quad, dq_lin, dk_lin, dv)]
        self.add_held(run, s0, gradients[1], gradients[3], gradients[4])
        for held, y in zip(self.out, gradients, strict=True):
            held.store(run, s0, y)
        return dS

    def add_held(self, run: Run, s0: int, *gradients: Tensor) -> None:
        """Tokens of the last chunk that the final state holds have gradients from there too."""
        at = run.length // self.op.C * self.op.C - s0
        rows = run.length - s0 - at
        for y, extra in zip(gradients, self.dheld, strict=True):
            if extra is not None and rows and 0 <= at < y.shape[1]:
                y[:, at : at + rows] += extra[run.states, :rows].transpose(1, 2).flatten(0, 1)


@torch.library.custom_op("linattn::mixed_backward", mutates_args=())
def mixed_backward(
    do: Tensor | None,
    dkv: Tensor | None,
    dk_quad: Tensor | None,
    dk_lin: Tensor | None,
    dv: Tensor | None,
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    bias: Tensor | None,
    kv: Tensor | None,
    held_k_quad: Tensor | None,
    held_k_lin: Tensor | None,
    held_v: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
    C: int,
    quad_scale: float,
    lin_scale: float,
    causal: bool,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments."""
    new, held = (q_quad, k_quad, q_lin, k_lin, v), (held_k_quad, held_k_lin, held_v)
    op = Operands(new, None if kv is None else held, bias, C, quad_scale, lin_scale, causal)
    end = _end(v.shape[1], cu_seqlens)
    dnew = [behind_zeros(torch.empty_like(x, memory_format=torch.contiguous_format), end) for x in new]
    dheld = [None if x is None else x.new_zeros(x.shape, dtype=op.dtype) for x in held]
    out = [Held(x, y) for x, y in zip(dnew, (None, dheld[0], None, dheld[1], dheld[2]), strict=True)]
    dbias = None if bias is None else bias.new_zeros(bias.shape, dtype=op.dtype)
    dkv_in = None if kv is None else kv.new_zeros(kv.shape, dtype=op.dtype)
    pull = Pull(op, do, (dk_quad, dk_lin, dv), out, dbias)
    with plain(v):
        for run in _runs(*v.shape[:3], cu_seqlens, length):
            zeros = v.new_zeros(((run.rows.stop - run.rows.start) * v.shape[2], k_lin.shape[3], v.shape[3]), dtype=op.dtype)
            S, dS = (zeros if x is None else _flat(x, run).to(op.dtype) for x in (kv, dkv))
            dS = pull.sequence(run, S, dS)
            if dkv_in is not None:
                view = dkv_in[run.states]
                view.copy_(dS.view(view.shape))
    given = [(bias, dbias), (kv, dkv_in), *zip(held, dheld, strict=True)]
    return [*dnew, *(d.to(x.dtype) for x, d in given if x is not None)]


@mixed_backward.register_fake
def _(do, dkv, dk_quad, dk_lin, dv, *inputs):
    return empty_gradients(inputs)


mixed_call = register(mixed, *rules(register(mixed_backward)), operations=True)


def mixed_attention(
    form: str,
    arrays: dict[str, Tensor],
    *,
    bias: Tensor | None,
    quad_scale: float | None,
    lin_scale: float | None,
    causal: bool,
    initial_state: MixedState[Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
):
    """``(o, final_state)``, the state a ``MixedState``."""
    quad_scale = 1.0 / chunk_size if quad_scale is None else float(quad_scale)
    lin_scale = 1.0 / chunk_size if lin_scale is None else float(lin_scale)
    new = tuple(arrays.values())
    if form == "recurrent" and cu_seqlens is None and initial_state is not None and new[4].shape[1] == 1:
        o, state = _decode(new, bias, initial_state, quad_scale, lin_scale)
    else:
        state = (None,) * 5 if initial_state is None else initial_state
        o, *state = mixed_call(*new, bias, *state, cu_seqlens, chunk_size, quad_scale, lin_scale, causal)
    return o, MixedState(*state) if output_final_state else None


def _decode(
    new: tuple[Tensor, ...], bias: Tensor | None, state: MixedState[Tensor], quad_scale: float, lin_scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One token: written at row ``length`` of the chunk held, which is folded into ``kv`` once full. Nothing is read back."""
    v = new[4]
    dtype = accumulation(v.dtype)
    q_quad, k_quad, q_lin, k_lin, value = (x.to(dtype) for x in new)
    kv, *held = (x.to(dtype) for x in state[:4])
    at = state.length.long()
    here = torch.arange(held[0].shape[1], device=v.device) == at[:, None]  # [N, C]
    seen = torch.arange(held[0].shape[1], device=v.device) <= at[:, None]
    held = [
        torch.where(here[..., None, None], x, y * seen[..., None, None])
        for x, y in zip((k_quad, k_lin, value), held, strict=True)
    ]
    with plain(v):
        scores = quad_scale * torch.einsum("nhk,nchk->nhc", q_quad[:, 0], held[0])
        if bias is not None:
            scores = scores + bias.to(dtype).index_select(1, at).transpose(0, 1)
        W = torch.relu(scores).square() * seen[:, None]
        o = torch.einsum("nhc,nchv->nhv", W, held[2]) + lin_scale * torch.einsum("nhl,nhlv->nhv", q_lin[:, 0], kv)
        full = at + 1 == held[0].shape[1]
        kv = kv + torch.einsum("nchl,nchv->nhlv", held[1] * full[:, None, None, None], held[2])
    held = [x.masked_fill(full[:, None, None, None], 0) for x in held]
    length = torch.where(full, 0, at + 1).to(torch.int32)
    return o[:, None].to(v.dtype), (kv, *held, length)
