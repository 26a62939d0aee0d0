"""Decays inside one chunk: the factors ``e^{sum of g over (s, t]}``, applied to products and differentiated.

Tensors are ``[M, C, W]``: ``M`` chunks (of any head), ``C`` tokens (a power of two), ``W`` channels. A decay ``Γ[t, s]``
answers four questions and their gradients:

* ``start`` ``e^{P}``, what a token reads of the state before the chunk (``start_exclusive`` if it reads ``S⁻``);
* ``end`` ``e^{Q}``, what is left of a token at the chunk's end;
* ``total`` ``e^{P + Q}``, what is left of the state, ``[M, W, 1]``;
* ``pairs`` ``A[t, s] = Σ_k x[t,k] y[s,k] Γ[t,s,k]``, what token ``t`` reads of token ``s ≤ t`` (``s < t`` if exclusive).

No sum of gates is ever subtracted from another, so any gate down to ``-inf`` is exact. With ``P`` the sum from the start of a
block through ``t`` and ``Q`` the sum after ``s`` to the block's end, two neighbouring blocks of ``b`` tokens make one of
``2b``: ``P`` grows by the left total in the right half, ``Q`` by the right total in the left half, and a pair across the
middle has the decay ``P[t] + Q[s]``, both ``≤ 0``: a plain matmul of ``x e^P`` and ``y e^Q``. Levels ``b = 1, 2, 4 … C/2``
cover every pair. The gate gradient runs the same tree downwards; it only ever adds the pairs that a gate lies between,
where the closed form ``Σ (q dq − k dk)`` would cancel the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Pairs = list[list[Tensor]]


@dataclass
class Edges:
    """Gradients with respect to the exponents at the edges of a chunk; ``None`` where nothing flows."""

    start: Tensor | None = None
    start_exclusive: Tensor | None = None
    end: Tensor | None = None
    total: Tensor | None = None


class NoDecay:
    """``Γ = 1``: sums without a gate."""

    start = start_exclusive = end = total = None

    def pairs(self, readers: list[Tensor], writers: list[Tensor], exclusive: tuple[bool, ...]) -> Pairs:
        """Causal products of every reader with every writer."""
        return [[_causal(x @ y.mT, e) for y in writers] for x, e in zip(readers, exclusive, strict=True)]

    def backward(
        self,
        dA: Pairs,
        A: Pairs,
        readers: list[Tensor],
        writers: list[Tensor],
        exclusive: tuple[bool, ...],
        edges: Edges,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Gradients of readers, writers and the gate (none here)."""
        dA = [[_causal(d, e) for d in row] for row, e in zip(dA, exclusive, strict=True)]
        return (*_product_backward(dA, readers, writers), None)


class ScalarDecay:
    """One gate a token, ``g [M, C, 1]``: ``Γ`` is one ``C × C`` matrix for all channels."""

    def __init__(self, g: Tensor):
        M, C, _ = g.shape
        self.shape = (M, C)
        sums = g.new_full((M, C, C), -torch.inf)
        sums.diagonal(dim1=1, dim2=2).zero_()
        P, Q = g[..., 0].clone(), torch.zeros_like(g[..., 0])
        b = 1
        while b < C:
            _corner(sums, b).copy_(_halves(P, b)[1][..., :, None] + _halves(Q, b)[0][..., None, :])
            P, _, Q = _grow(P, None, Q, b)
            b *= 2
        self.gamma = sums.exp_()
        self.start = P.exp()[..., None]
        self.start_exclusive = None
        self.end = Q.exp()[..., None]
        self.total = self.start[:, -1:]

    def pairs(self, readers: list[Tensor], writers: list[Tensor], exclusive: tuple[bool, ...]) -> Pairs:
        """Causal products under ``Γ``. An infinite product beyond the diagonal is dropped, not multiplied by zero."""
        return [[_causal(x @ y.mT, e).mul_(self.gamma) for y in writers] for x, e in zip(readers, exclusive, strict=True)]

    def backward(
        self,
        dA: Pairs,
        A: Pairs,
        readers: list[Tensor],
        writers: list[Tensor],
        exclusive: tuple[bool, ...],
        edges: Edges,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Gradients of readers, writers and the gate."""
        flow = None  # of pair (t, s): what the gates between them receive
        decayed: Pairs = []
        for dA_row, A_row, e in zip(dA, A, exclusive, strict=True):
            decayed.append([_causal(d, e) * self.gamma for d in dA_row])
            for d, a in zip(dA_row, A_row, strict=True):
                flow = d * a if flow is None else flow.addcmul_(d, a)
        dg = self._gate(flow, edges)
        return (*_product_backward(decayed, readers, writers), dg)

    def _gate(self, flow: Tensor | None, edges: Edges) -> Tensor:
        """``dg[r]``: flows of pairs ``s < r ≤ t``, of the state read at ``t ≥ r``, of tokens ``s < r`` kept, of the total."""
        M, C = self.shape
        dg = self.start.new_zeros(M, C)
        if flow is not None:
            written = flow.cumsum(2).roll(1, 2)  # [t, r]: over s < r
            written[..., 0] = 0
            dg += written.tril_().sum(1)
        if edges.start is not None:
            dg += edges.start[..., 0].flip(1).cumsum(1).flip(1)
        if edges.end is not None:
            dg[:, 1:] += edges.end[:, :-1, 0].cumsum(1)
        if edges.total is not None:
            dg += edges.total.reshape(M, 1)
        return dg[..., None]


class VectorDecay:
    """One gate a token and channel, ``g [M, C, W]``."""

    def __init__(self, g: Tensor, inclusive: bool = True, exclusive: bool = False):
        """Build the factors of every level; ``inclusive`` and ``exclusive`` say which kinds of reader there are."""
        _, C, _ = self.shape = g.shape
        P, Q = g.clone(), torch.zeros_like(g)
        X = torch.zeros_like(g) if exclusive else None
        self.reads: list[Tensor | None] = []
        self.reads_exclusive: list[Tensor | None] = []
        self.writes: list[Tensor] = []
        b = 1
        while b < C:
            self.reads.append(_halves(P, b)[1].exp() if inclusive else None)
            self.reads_exclusive.append(_halves(X, b)[1].exp() if X is not None else None)
            self.writes.append(_halves(Q, b)[0].exp())
            P, X, Q = _grow(P, X, Q, b)
            b *= 2
        self.total = P[:, -1].exp()[..., None]
        self.start = P.exp() if inclusive else None
        self.start_exclusive = None if X is None else X.exp()
        self.end = Q.exp()

    def _read(self, level: int, exclusive: bool) -> Tensor:
        factor = (self.reads_exclusive if exclusive else self.reads)[level]
        assert factor is not None
        return factor

    def pairs(self, readers: list[Tensor], writers: list[Tensor], exclusive: tuple[bool, ...]) -> Pairs:
        """Causal products of every reader with every writer under ``Γ``, level by level."""
        M, C, _ = self.shape
        A: Pairs = [[y.new_zeros(M, C, C) for y in writers] for _ in readers]
        for row, x, e in zip(A, readers, exclusive, strict=True):
            for a, y in zip(row, writers, strict=True):
                if not e:
                    a.diagonal(dim1=1, dim2=2).copy_((x * y).sum(-1))
        for level, write in enumerate(self.writes):
            b = 1 << level
            written = [_halves(y, b)[0] * write for y in writers]
            for row, x, e in zip(A, readers, exclusive, strict=True):
                read = _halves(x, b)[1] * self._read(level, e)
                for a, y in zip(row, written, strict=True):
                    _corner(a, b).copy_(read @ y.mT)
        return A

    def apply(self, A: Tensor, y: Tensor) -> Tensor:
        """``o[t] = Σ_{s≤t} A[t, s] Γ[t, s] ∘ y[s]``: the decay on the value side."""
        o = A.diagonal(dim1=1, dim2=2)[..., None] * y
        for level, write in enumerate(self.writes):
            b = 1 << level
            read = _corner(A, b) @ (_halves(y, b)[0] * write)
            _halves(o, b)[1].addcmul_(read, self._read(level, False))
        return o

    def backward(
        self,
        dA: Pairs,
        A: Pairs,
        readers: list[Tensor],
        writers: list[Tensor],
        exclusive: tuple[bool, ...],
        edges: Edges,
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
        """Gradients of readers, writers and the gate, from the whole chunk down to single tokens."""
        M, C, W = self.shape
        dx = [_diagonal_backward(row, writers, e) for row, e in zip(dA, exclusive, strict=True)]
        columns = [list(column) for column in zip(*dA, strict=True)]
        dy = [
            _diagonal_backward([d if not e else None for d, e in zip(column, exclusive, strict=True)], readers, False)
            for column in columns
        ]
        zeros = writers[0].new_zeros
        dP = edges.start if edges.start is not None else zeros(M, C, W)
        dX = edges.start_exclusive if edges.start_exclusive is not None else (zeros(M, C, W) if any(exclusive) else None)
        dQ = edges.end if edges.end is not None else zeros(M, C, W)
        total = zeros(M, 1, W) if edges.total is None else edges.total.reshape(M, 1, W)
        for level in reversed(range(len(self.writes))):
            b = 1 << level
            total = _shrink(dP, dX, dQ, total, b)
            write = self.writes[level]
            written = [_halves(y, b)[0] * write for y in writers]
            halves = [_halves(x, b)[1] for x in readers]
            factors = [self._read(level, e) for e in exclusive]
            reads = [right * factor for right, factor in zip(halves, factors, strict=True)]
            blocks = [[_corner(pair, b) for pair in row] for row in dA]
            for row, right, factor, e, d in zip(blocks, halves, factors, exclusive, dx, strict=True):
                flow = together([block.mT for block in row], written).mul_(factor)
                _halves(d, b)[1].add_(flow)
                _halves(dX if e else dP, b)[1].addcmul_(flow, right)
            for column, y, d in zip(zip(*blocks, strict=True), writers, dy, strict=True):
                flow = together(column, reads).mul_(write)
                _halves(d, b)[0].add_(flow)
                _halves(dQ, b)[0].addcmul_(flow, _halves(y, b)[0])
        return dx, dy, dP + total


Decay = NoDecay | ScalarDecay | VectorDecay


def _halves(x: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Left and right halves, ``[M, C/2b, b, …]`` each, of the blocks of ``2b`` tokens of ``x [M, C, …]``."""
    blocks = x.view(x.shape[0], x.shape[1] // (2 * b), 2, b, *x.shape[2:])
    return blocks[:, :, 0], blocks[:, :, 1]


def _corner(A: Tensor, b: int) -> Tensor:
    """The blocks of ``A [M, C, C]`` that read the left half of a ``2b`` block from its right half, ``[M, C/2b, b, b]``."""
    M, C, _ = A.shape
    m, t, s = A.stride()
    return A.as_strided((M, C // (2 * b), b, b), (m, 2 * b * (t + s), t, s), A.storage_offset() + b * t)


def _grow(P: Tensor, X: Tensor | None, Q: Tensor, b: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """From blocks of ``b`` tokens to blocks of ``2b``, in new arrays. ``X`` is ``P`` without token ``t`` itself."""
    left, right = _halves(P, b)
    total, after = left[:, :, -1:], right[:, :, -1:]
    early, late = _halves(Q, b)
    grown = None
    if X is not None:
        first, second = _halves(X, b)
        grown = _joined(first, second + total)
    return _joined(left, right + total), grown, _joined(early + after, late)


def _joined(left: Tensor, right: Tensor) -> Tensor:
    """The inverse of :func:`_halves`."""
    return torch.stack((left, right), 2).flatten(1, 3)


def _shrink(dP: Tensor, dX: Tensor | None, dQ: Tensor, total: Tensor, b: int) -> Tensor:
    """Transpose of :func:`_grow`: the gradient of the totals of the blocks of ``b`` tokens, ``[M, C/b, …]``."""
    left = total + _halves(dP, b)[1].sum(2)
    if dX is not None:
        left += _halves(dX, b)[1].sum(2)
    right = total + _halves(dQ, b)[0].sum(2)
    return torch.stack((left, right), 2).flatten(1, 2)


def _causal(A: Tensor, exclusive: bool) -> Tensor:
    """Keep ``s ≤ t``, or ``s < t``."""
    return A.tril(-1 if exclusive else 0)


def _plus(total: Tensor | None, x: Tensor) -> Tensor:
    return x if total is None else total.add_(x)


def _product_backward(dA: Pairs, readers: list[Tensor], writers: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of ``A = x yᵀ``, summed over the pairs each operand is in."""
    dx = [together([d.mT for d in row], writers) for row in dA]
    return dx, [together(column, readers) for column in zip(*dA, strict=True)]


def together(As: Sequence[Tensor], xs: Sequence[Tensor]) -> Tensor:
    """``Σ Aᵀ x`` over several arrays, token by token: what one adds to a state another may take away, and sums of either alone
    would grow with the tokens, and their errors with them.
    """
    A, x = (one[0] if len(one) == 1 else torch.stack(tuple(one), -2).flatten(-3, -2) for one in (As, xs))
    return A.mT @ x


def _diagonal_backward(row: Sequence[Tensor | None], others: list[Tensor], exclusive: bool) -> Tensor:
    """Gradient of one operand through the diagonals ``A[t, t] = x[t]·y[t]`` it is in."""
    total = None
    if not exclusive:
        for d, other in zip(row, others, strict=True):
            if d is not None:
                total = _plus(total, d.diagonal(dim1=1, dim2=2)[..., None] * other)
    return torch.zeros_like(others[0]) if total is None else total
