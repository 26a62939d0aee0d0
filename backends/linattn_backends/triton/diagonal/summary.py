"""What tokens do to the state that enters them, ``S' = A ∘ S + b``, and the gradient of that state: one scan, nothing a token.

``A`` is the exponential of the gates' sums, ``b`` the state that the tokens leave of zero. In reverse the same scan of queries
and ``do`` gives the gradient of the state before the tokens. Sequences are cut into segments, enough to fill the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..host.chunks import rows_contiguous
from ..host.tiles import programs
from ..runtime.replay import recorded
from . import vector_launch
from .call import ChunkedCall, DiagonalCall, Update
from .gate_launch import chunked
from .memory_launch import far_states

__all__ = ["adjoint", "summary"]

PROGRAMS = 4
"""Scans that a multiprocessor runs at once: each waits for memory most of the time."""


@recorded
def summary(k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, u: Tensor | None) -> tuple[Tensor, Tensor]:
    """``A`` and ``b`` of whole sequences, in float32; ``A`` as :mod:`linattn.affine` reads it."""
    call = DiagonalCall.of(k, k, v, g, gv, u, None, None, 1.0, 0)
    run = chunked(call, call.forward_variant(call.v.dtype))
    b, decay, value_decay = scanned(run, Update(call.k, call.v, call.gate, run.g, call.gv), None, reverse=False)
    N, HV = b.shape[:2]
    if decay is None:
        return torch.ones((N, HV), dtype=torch.float32, device=b.device), b
    A = decay.view(N, -1, *decay.shape[1:]).sum(1)
    if call.gate == 1:
        A = A[..., 0]
    if value_decay is not None:
        A = torch.cat((A, value_decay.view(N, -1, *value_decay.shape[1:]).sum(1)), -1)
    return A.exp2(), b


@recorded
def adjoint(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, gv: Tensor | None, u: Tensor | None,
    scale: float, chunk: int,
) -> Tensor:  # fmt: skip
    """The gradient of the states before the tokens, from those of outputs and of the states after them."""
    call, do = DiagonalCall.of(q, k, v, g, gv, u, None, None, scale, chunk), rows_contiguous(do.to(v.dtype))
    run = chunked(call, call.forward_variant(call.v.dtype))
    if call.u is None:
        update = Update(call.q, do, call.gate, run.g, call.gv)
    else:  # a token reads the state before its own gate
        made = vector_launch.make_operands(run)
        update = vector_launch.update(made, made.read, do)
    return scanned(run, update, dfinal, reverse=True)[0]


def scanned(
    run: ChunkedCall, update: Update, start: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The state at the far end of each sequence, and the sums of both gates over every segment."""
    call, tile = run.call, run.variant["segment_states"].tile
    T, HV, V = call.v.shape[1:]
    busy = call.N * HV * programs(call.q.shape[-1], V, tile.BK, tile.BV)
    pieces = max(PROGRAMS * run.variant.num_sms // max(busy, 1), 1)
    length = max(-(-T // (run.variant.chunk * pieces)), 4)
    return far_states(run, update, start, reverse, length)
