"""A call of ``mixed_attn``, or of ``linear_attn`` with ``causal=False``: as it came, and with its sequences cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from linattn.plugin import MixedState
from torch import Tensor

from ..host.chunks import Cut, cut, rows_contiguous, type_of_products
from ..host.variant import Stage, Variant
from .config import variant

__all__ = ["Chunked", "MixedCall"]


@dataclass(frozen=True)
class MixedCall:
    """A call as it came: rows contiguous, states whole.

    Attributes:
        q_quad, k_quad: Quadratic heads; ``None`` where there are states alone.
        q_lin, k_lin, v: Linear heads, and values.
        bias: Added to the scores inside a chunk; or ``None``.
        state: The state to go on from; or ``None``.
        cu: Offsets of packed sequences; or ``None``.
        C: Tokens a chunk.
        quad_scale, lin_scale: Factors on the quadratic scores and on the linear outputs.
        causal: Whether a token reads those before it alone.
    """

    q_quad: Tensor | None
    k_quad: Tensor | None
    q_lin: Tensor
    k_lin: Tensor
    v: Tensor
    bias: Tensor | None
    state: MixedState[Tensor] | None
    cu: Tensor | None
    C: int
    quad_scale: float
    lin_scale: float
    causal: bool

    @classmethod
    def of(
        cls, heads: Sequence[Tensor | None], bias: Tensor | None, state: Sequence[Tensor | None] | None, cu: Tensor | None,
        C: int, quad_scale: float, lin_scale: float, causal: bool,
    ) -> MixedCall:  # fmt: skip
        """Take the arrays of a call; a ``state`` of ``None`` alone is none."""
        rows = [None if x is None else rows_contiguous(x) for x in heads]
        whole = None if state is None or state[0] is None else MixedState(*(x.contiguous() for x in state))
        return cls(*rows, None if bias is None else bias.contiguous(), whole, cu, C, quad_scale, lin_scale, causal)

    @property
    def heads(self) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor]:
        """The arrays of the new tokens."""
        return self.q_quad, self.k_quad, self.q_lin, self.k_lin, self.v

    @property
    def family(self) -> str:
        """The family whose outputs these are."""
        return "linear_attn" if self.q_quad is None else "mixed_attn"

    @property
    def widths(self) -> dict[str, int]:
        """Widths of quadratic heads, 1 where there are none, of linear heads and of values."""
        return dict(K=1 if self.q_quad is None else self.q_quad.shape[-1], L=self.k_lin.shape[-1], V=self.v.shape[-1])

    @property
    def N(self) -> int:
        """Number of sequences."""
        return self.v.shape[0] if self.cu is None else self.cu.shape[0] - 1

    @property
    def group(self) -> int:
        """Value heads that share a linear query/key head."""
        return self.v.shape[2] // self.k_lin.shape[2]

    @property
    def held(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Quadratic keys, linear keys and values of the chunk that the state is in the middle of."""
        return (None, None, None) if self.state is None else self.state[1:4]

    def new_states(self, count: int, narrow: bool = False) -> Tensor:
        """An array of states ``[count, HV, L, V]``, float32; ``narrow`` ones are only read by products."""
        kind = torch.bfloat16 if narrow and self.v.dtype == torch.bfloat16 else torch.float32
        return self.v.new_empty((count, self.v.shape[2], self.k_lin.shape[3], self.v.shape[3]), dtype=kind)


@dataclass(frozen=True)
class Chunked:
    """A call whose sequences are cut into chunks, and the kernels that take it.

    Attributes:
        call: The call as it came.
        chunks: All chunks, and with packed sequences room for more.
        blocks: Blocks of tokens in the longest chunk that there can be.
        variant: The kernels of a forward or a backward pass.
    """

    call: MixedCall
    chunks: Cut
    blocks: int
    variant: Variant

    @classmethod
    def of(cls, call: MixedCall, backward: bool) -> Chunked:
        """Cut the sequences of a call."""
        T, C = call.v.shape[1], call.C
        chosen = variant(**call.widths, dtype=call.v.dtype, backward=backward)
        longest = min(C, T + (0 if call.state is None else C))
        return cls(call, chunks_of(call), -(-longest // chosen["sums"].tile.BT), chosen)

    @property
    def place(self) -> tuple[Any, ...]:
        """Arguments of a kernel: whose each chunk is, then ``T``, chunks a sequence, ``N``, ``HV`` and ``C``."""
        call, chunks = self.call, self.chunks
        length = None if call.state is None else call.state.length
        sizes = call.v.shape[1], max(chunks.per, 1), call.N, call.v.shape[2], call.C
        return chunks.owner, chunks.first, call.cu, length, *sizes

    @property
    def flags(self) -> dict[str, Any]:
        """Compile-time facts of every kernel that multiplies."""
        precision = "tf32x3" if self.call.v.dtype == torch.float32 else "tf32"
        return dict(PACKED=self.call.cu is not None, HELD=self.call.state is not None, PREC=precision)

    def inside(self, stage: Stage) -> dict[str, Any]:
        """The configuration of a kernel that looks inside chunks."""
        call, tile = self.call, stage.tile
        return dict(
            call.widths, BT=tile.BT, BK=tile.BK, BL=tile.BL, BV=tile.BV, CAUSAL=call.causal, QUAD=call.q_quad is not None,
            BIAS=call.bias is not None, DT=type_of_products(call.v), **self.flags, **stage.config,
        )  # fmt: skip

    def programs(self, tiles: int = 1) -> int:
        """Programs of a kernel that takes a block of a chunk of a head, in so many tiles."""
        return self.chunks.count * self.call.v.shape[2] * self.blocks * tiles


def chunks_of(call: MixedCall) -> Cut:
    """The chunks of a call's sequences; the first of one that goes on from a state begins with the tokens held there."""
    if call.state is None:
        return cut(call, call.C)
    if call.cu is None:
        per = -(-(call.v.shape[1] + call.C - 1) // call.C)
        return Cut(call.N * per, per, None, None)
    return cut(call, call.C, call.state.length)
