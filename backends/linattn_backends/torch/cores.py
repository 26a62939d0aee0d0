"""The chunk form of every matrix-state family, one segment at a time, forward and backward.

With ``P, Q, Γ`` of :mod:`.decay`, ``S`` the state before a chunk, ``q̃ = q e^P``, ``k̂ = k e^Q`` and ``A = pairs(q, k)``:

* diagonal (``linear_attn simple_gla gla rwkv6``): ``o = q̃ S + A v``, ``S ← e^{P+Q} S + k̂ᵀ v``. A value gate does to ``v``'s
  channels what ``g`` does to ``k``'s; the bonus of ``rwkv6`` is the diagonal of ``A``.
* delta (``delta_rule gated_delta_rule kda``): the values written are ``x = beta ∘ (v − k̃ S − tril(pairs(k, k), −1) x)``,
  a unit lower triangular system; then as above with ``x`` for ``v``.
* dplr: ``w = ã S + pairs(a, k) v + pairs(a, b) w`` with ``a`` reading ``S⁻``; ``o = q̃ S + A v + pairs(q, b) w``,
  ``S ← e^{P+Q} S + k̂ᵀ v + b̂ᵀ w``.

Arrays are ``[M, C, W]`` with ``M = Z·n`` chunks; a scan walks over the ``n`` chunks of a segment with ``S [Z, K, V]``.
``backward`` computes the forward intermediates again from the state at the segment's start. ``scale`` is outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .decay import Decay, Edges, NoDecay, ScalarDecay, VectorDecay, together
from .inverse import substitute, substitute_transposed, unit_lower_inverse
from .layout import Block, Layout, Segment

Arrays = dict[str, Tensor]


@dataclass
class Scan:
    """Hands chunks the state they start from and takes the one they end with; sequences begin and end on the way.

    Forward, ``source`` holds initial states and ``sink`` final ones; backward, gradients of the final and initial states.
    """

    layout: Layout
    block: Block
    segment: Segment
    source: Tensor | None
    sink: Tensor | None
    state: Tensor
    reverse: bool = False

    def enter(self, chunk: int) -> Tensor:
        """State (or gradient) on the near side of ``chunk``."""
        sequence = (self.segment.ends if self.reverse else self.segment.begins).get(chunk)
        if sequence is not None:
            if self.source is None:
                self.state = torch.zeros_like(self.state)
            else:
                view = self.layout.state(self.source, sequence, self.block)
                self.state = view.reshape(self.state.shape).to(self.state.dtype)
        return self.state

    def leave(self, chunk: int, state: Tensor) -> None:
        """Pass on the state (or gradient) on the far side of ``chunk``."""
        self.state = state
        sequence = (self.segment.begins if self.reverse else self.segment.ends).get(chunk)
        if sequence is not None and self.sink is not None:
            view = self.layout.state(self.sink, sequence, self.block)
            view.copy_(state.view(view.shape))


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    """``x ∘ factor``; ``None`` is one."""
    return x if factor is None else x * factor


def _per_chunk(x: Tensor | None, Z: int) -> list[Tensor | None]:
    """Split ``[Z·n, …]`` into the ``n`` steps of a scan."""
    if x is None:
        return []
    return list(x.unflatten(0, (Z, -1)).unbind(1))


def _at(steps: list[Tensor], i: int) -> Tensor | None:
    return steps[i] if steps else None


def _joined(steps: list[Tensor]) -> Tensor:
    """The inverse of :func:`_per_chunk`."""
    return torch.stack(steps, 1).flatten(0, 1)


def _sum_product(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


class Core:
    """One segment of one block of heads: operands and the decay they share."""

    exclusive: tuple[bool, ...] = (False,)

    def __init__(self, x: Arrays, lengths: list[int]):
        self.lengths = lengths
        self.Z, self.n = x["q"].shape[:2]
        self.x = {name: value.flatten(0, 1) for name, value in x.items()}
        self.decay = self._decay(self.x.get("g"))

    def _decay(self, g: Tensor | None) -> Decay:
        if g is None:
            return NoDecay()
        if g.shape[-1] == 1 and not any(self.exclusive):
            return ScalarDecay(g)
        return VectorDecay(g, inclusive=not all(self.exclusive), exclusive=any(self.exclusive))

    def _flow_of_total(self, S: Tensor, dS: Tensor) -> Tensor | None:
        """Gradient of the exponent of ``e^{P+Q}`` from states before and gradients after each chunk."""
        total = self.decay.total
        if total is None:
            return None
        flow = (S * dS).sum(-1, keepdim=True) if total.shape[1] > 1 else (S * dS).sum((-2, -1), keepdim=True)
        return flow * total

    def _edge(self, x: Tensor, dx: Tensor) -> Tensor | None:
        """Gradient of the exponent that ``x`` was multiplied with, for the width of the gate."""
        g = self.x.get("g")
        return None if g is None else (_sum_product(x, dx) if g.shape[-1] == 1 and dx.shape[-1] > 1 else x * dx)


class Diagonal(Core):
    """Gates only. ``u`` marks the exclusive reading of ``rwkv6``."""

    def __init__(self, x: Arrays, lengths: list[int]):
        self.exclusive = ("u" in x,)
        super().__init__(x, lengths)
        self.values = VectorDecay(self.x["gv"]) if "gv" in x else NoDecay()

    def _read(self) -> Tensor | None:
        return self.decay.start_exclusive if self.exclusive[0] else self.decay.start

    def _states(self, k_end: Tensor, v_end: Tensor, scan: Scan) -> Tensor:
        """States before each chunk."""
        written = _per_chunk(k_end.mT @ v_end, self.Z)
        totals, value_totals = _per_chunk(self.decay.total, self.Z), _per_chunk(self.values.total, self.Z)
        states = []
        for i in range(self.n):
            S = scan.enter(i)
            states.append(S)
            kept = _times(S, _at(totals, i))
            if value_totals:
                kept = kept * value_totals[i].mT
            scan.leave(i, kept + written[i])
        return _joined(states)

    def forward(self, scan: Scan) -> Tensor:
        """Outputs ``[M, C, V]``."""
        q, k, v = self.x["q"], self.x["k"], self.x["v"]
        ((A,),) = self.decay.pairs([q], [k], self.exclusive)
        states = self._states(_times(k, self.decay.end), _times(v, self.values.end), scan)
        o = _times(_times(q, self._read()) @ states, self.values.start)
        o += self.values.apply(A, v) if isinstance(self.values, VectorDecay) else A @ v
        if "u" in self.x:
            o.addcmul_(_sum_product(q * self.x["u"], k), v)
        return o

    def backward(self, do: Tensor, scan: Scan, reverse: Scan) -> Arrays:
        """Gradients of the operands, ``[M, C, W]`` each."""
        q, k, v = self.x["q"], self.x["k"], self.x["v"]
        decay, values = self.decay, self.values
        read = self._read()
        q_read, k_end, v_end = _times(q, read), _times(k, decay.end), _times(v, values.end)
        states = self._states(k_end, v_end, scan)
        do_read = _times(do, values.start)
        totals, value_totals = _per_chunk(decay.total, self.Z), _per_chunk(values.total, self.Z)
        flows = _per_chunk(q_read.mT @ do_read, self.Z)
        after: list[Tensor] = [do] * self.n
        for i in reversed(range(self.n)):
            dS = after[i] = reverse.enter(i)
            dS = _times(dS, _at(totals, i))
            if value_totals:
                dS = dS * value_totals[i].mT
            reverse.leave(i, dS + flows[i])
        dS = _joined(after)

        dq_read, dk_end, dv_end = do_read @ states.mT, v_end @ dS.mT, k_end @ dS
        start = self._edge(q_read, dq_read)
        edges = Edges(
            start=None if self.exclusive[0] else start,
            start_exclusive=start if self.exclusive[0] else None,
            end=self._edge(k_end, dk_end),
            total=self._flow_of_total(states if values.total is None else states * values.total.mT, dS),
        )
        ((A,),) = decay.pairs([q], [k], self.exclusive)
        grads = {}
        if isinstance(values, VectorDecay):
            ((dA,),) = values.pairs([do], [v], (False,))
            value_total = (_times(states, decay.total) * dS).sum(-2) * values.total[..., 0]
            value_edges = Edges(start=do_read * (q_read @ states), end=v_end * dv_end, total=value_total)
            _, (dv,), grads["gv"] = values.backward([[A]], [[dA]], [do], [v], (False,), value_edges)
        else:
            dA = do @ v.mT
            dv = A.mT @ do
        dv += _times(dv_end, values.end)
        (dq,), (dk,), dg = decay.backward([[dA]], [[A]], [q], [k], self.exclusive, edges)
        dq += _times(dq_read, read)
        dk += _times(dk_end, decay.end)
        if "u" in self.x:
            u = self.x["u"]
            dbonus = _sum_product(do, v)
            dv.addcmul_(_sum_product(q * u, k), do)
            dq.addcmul_(dbonus, u * k)
            dk.addcmul_(dbonus, u * q)
            grads["u"] = (dbonus * q * k).sum(1, keepdim=True)
        return {"q": dq, "k": dk, "v": dv, **({} if dg is None else {"g": dg}), **grads}


class Delta(Core):
    """The delta rule under any gate, ``beta [M, C, 1]`` or ``[M, C, V]``.

    With one ``beta`` a token the system has one inverse for all columns; with one a value channel every column has a system of
    its own, solved by substitution over the chunk's tokens: as many multiplications, but ``C`` small steps.
    """

    exclusive = (False, False)

    def __init__(self, x: Arrays, lengths: list[int]):
        super().__init__(x, lengths)
        q, k, beta = self.x["q"], self.x["k"], self.x["beta"]
        (self.A,), (within,) = self.decay.pairs([q, k], [k], self.exclusive)
        self.L = within.tril(-1)
        self.shared = beta.shape[-1] == 1
        self.inverse = unit_lower_inverse(beta * self.L) if self.shared else None
        self.q_read, self.k_read = _times(q, self.decay.start), _times(k, self.decay.start)
        self.k_end = _times(k, self.decay.end)

    def _written(self, scan: Scan) -> tuple[Tensor, Tensor]:
        """States before each chunk, and the values ``x`` written in it."""
        beta, totals = _per_chunk(self.x["beta"], self.Z), _per_chunk(self.decay.total, self.Z)
        v, k_read, k_end = (_per_chunk(y, self.Z) for y in (self.x["v"], self.k_read, self.k_end))
        L, inverse = _per_chunk(self.L, self.Z), _per_chunk(self.inverse, self.Z)
        states, written = [], []
        for i in range(self.n):
            S = scan.enter(i)
            r = torch.baddbmm(v[i], k_read[i], S, alpha=-1)
            x = inverse[i] @ (beta[i] * r) if self.shared else substitute(L[i], beta[i], r, self.lengths[i])
            states.append(S)
            written.append(x)
            scan.leave(i, torch.baddbmm(_times(S, _at(totals, i)), k_end[i].mT, x))
        return _joined(states), _joined(written)

    def forward(self, scan: Scan) -> Tensor:
        """Outputs ``[M, C, V]``."""
        states, x = self._written(scan)
        return torch.baddbmm(self.q_read @ states, self.A, x)

    def backward(self, do: Tensor, scan: Scan, reverse: Scan) -> Arrays:
        """Gradients of the operands, ``[M, C, W]`` each."""
        q, k, v, beta = (self.x[name] for name in ("q", "k", "v", "beta"))
        decay, Z = self.decay, self.Z
        states, x = self._written(scan)
        totals, betas = _per_chunk(decay.total, Z), _per_chunk(beta, Z)
        L, inverse = _per_chunk(self.L, Z), _per_chunk(self.inverse, Z)
        reads = self.A @ self.inverse if self.shared else self.A  # of written values: what follows a token forgets it
        direct, flows = _per_chunk(reads.mT @ do, Z), _per_chunk(self.q_read.mT @ do, Z)
        k_read, k_end = _per_chunk(self.k_read, Z), _per_chunk(self.k_end, Z)
        after: list[Tensor] = [do] * self.n
        adjoint: list[Tensor] = [do] * self.n
        for i in reversed(range(self.n)):
            dS = after[i] = reverse.enter(i)
            dx = k_end[i] @ dS
            if self.shared:
                y = torch.baddbmm(direct[i], inverse[i].mT, dx)
            else:
                y = substitute_transposed(L[i], betas[i], direct[i] + dx, self.lengths[i])
            adjoint[i] = y
            dS = torch.baddbmm(_times(dS, _at(totals, i)), k_read[i].mT, betas[i] * y, alpha=-1)
            reverse.leave(i, dS + flows[i])
        dS, y = _joined(after), _joined(adjoint)

        dv = beta * y  # = dr
        error = torch.baddbmm(v, self.k_read, states, alpha=-1)
        error = torch.baddbmm(error, self.L, x, alpha=-1)
        dbeta = _sum_product(y, error) if self.shared else y * error
        dq_read, dk_read, dk_end = do @ states.mT, (dv @ states.mT).neg_(), x @ dS.mT
        dA, dL = do @ x.mT, (dv @ x.mT).neg_().tril_(-1)
        if "g" in self.x:
            start = self._edge(self.q_read, dq_read) + self._edge(self.k_read, dk_read)
        else:
            start = None
        edges = Edges(start=start, end=self._edge(self.k_end, dk_end), total=self._flow_of_total(states, dS))
        (dq, dk_reader), (dk,), dg = decay.backward([[dA], [dL]], [[self.A], [self.L]], [q, k], [k], self.exclusive, edges)
        dq += _times(dq_read, decay.start)
        dk += dk_reader
        dk += _times(dk_read, decay.start)
        dk += _times(dk_end, decay.end)
        return {"q": dq, "k": dk, "v": dv, "beta": dbeta, **({} if dg is None else {"g": dg})}


class Dplr(Core):
    """Diagonal plus low rank; ``a`` reads the state before the token."""

    exclusive = (False, True)

    def __init__(self, x: Arrays, lengths: list[int]):
        super().__init__(x, lengths)
        q, k, a, b = (self.x[name] for name in "qkab")
        (self.Aqk, self.Aqb), (self.Aak, Aab) = self.decay.pairs([q, a], [k, b], self.exclusive)
        self.Aab = Aab
        self.inverse = unit_lower_inverse(-Aab)
        self.q_read, self.a_read = q * self.decay.start, a * self.decay.start_exclusive
        self.k_end, self.b_end = k * self.decay.end, b * self.decay.end

    def _written(self, scan: Scan) -> tuple[Tensor, Tensor]:
        """States before each chunk, and ``w = a S⁻`` of its tokens."""
        v, Z = self.x["v"], self.Z
        read, written = _per_chunk((self.inverse @ self.Aak) @ v, Z), _per_chunk(self.k_end.mT @ v, Z)
        a_read, b_end, inverse = (_per_chunk(y, Z) for y in (self.a_read, self.b_end, self.inverse))
        totals = _per_chunk(self.decay.total, Z)
        states, ws = [], []
        for i in range(self.n):
            S = scan.enter(i)
            w = torch.baddbmm(read[i], inverse[i], a_read[i] @ S)
            states.append(S)
            ws.append(w)
            scan.leave(i, torch.baddbmm(torch.addcmul(written[i], S, totals[i]), b_end[i].mT, w))
        return _joined(states), _joined(ws)

    def forward(self, scan: Scan) -> Tensor:
        """Outputs ``[M, C, V]``."""
        states, w = self._written(scan)
        return (self.q_read @ states).add_(together([self.Aqk.mT, self.Aqb.mT], [self.x["v"], w]))

    def backward(self, do: Tensor, scan: Scan, reverse: Scan) -> Arrays:
        """Gradients of the operands, ``[M, C, W]`` each."""
        q, k, v, a, b = (self.x[name] for name in "qkvab")
        decay, Z = self.decay, self.Z
        states, w = self._written(scan)
        reads = self.Aqb @ self.inverse  # as in the delta rule
        direct, flows = _per_chunk(reads.mT @ do, Z), _per_chunk(self.q_read.mT @ do, Z)
        a_read, b_end, inverse = (_per_chunk(y, Z) for y in (self.a_read, self.b_end, self.inverse))
        totals = _per_chunk(decay.total, Z)
        after: list[Tensor] = [do] * self.n
        adjoint: list[Tensor] = [do] * self.n
        for i in reversed(range(self.n)):
            dS = after[i] = reverse.enter(i)
            y = adjoint[i] = torch.baddbmm(direct[i], inverse[i].mT, b_end[i] @ dS)
            reverse.leave(i, torch.baddbmm(torch.addcmul(flows[i], dS, totals[i]), a_read[i].mT, y))
        dS, y = _joined(after), _joined(adjoint)

        dv = together([self.Aqk, self.Aak], [do, y]).baddbmm_(self.k_end, dS)
        dq_read, da_read, dk_end, db_end = do @ states.mT, y @ states.mT, v @ dS.mT, w @ dS.mT
        edges = Edges(
            start=self.q_read * dq_read,
            start_exclusive=self.a_read * da_read,
            end=(self.k_end * dk_end).addcmul_(self.b_end, db_end),
            total=self._flow_of_total(states, dS),
        )
        dA = [[do @ v.mT, do @ w.mT], [y @ v.mT, y @ w.mT]]
        A = [[self.Aqk, self.Aqb], [self.Aak, self.Aab]]
        (dq, da), (dk, db), dg = decay.backward(dA, A, [q, a], [k, b], self.exclusive, edges)
        dq.addcmul_(dq_read, decay.start)
        da.addcmul_(da_read, decay.start_exclusive)
        dk.addcmul_(dk_end, decay.end)
        db.addcmul_(db_end, decay.end)
        return {"q": dq, "k": dk, "v": dv, "g": dg, "a": da, "b": db}


def core_of(arrays: Arrays) -> type[Diagonal] | type[Delta] | type[Dplr]:
    """The core for the operands given: only ``dplr`` has ``a``, only the delta families ``beta``."""
    return Dplr if "a" in arrays else Delta if "beta" in arrays else Diagonal
