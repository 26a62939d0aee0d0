"""What every operator of linattn means, one token at a time.

A family of linear attention is a short list of *moves* on a state ``S``. A token arrives, the moves are made in order,
one of them reads the output ``o`` from the state, and the state goes on to the next token. ``FAMILIES`` lists the moves
of each family; the moves are defined above it, each with its vector-Jacobian product (VJP); the walks over the tokens,
forward and backward, come last. There is nothing else.

Vectors are rows, as in the papers: ``kᵀv`` is an outer product, ``q S`` reads the state with a query. Every array has
the leading axes ``[N, HV]`` (sequences, value heads), so that one move serves all heads of all sequences at once::

    S [N, HV, K, V]    q, k, g, a, b, u [N, HV, K]    v, gv, beta [N, HV, V]    o [N, HV, V]

Everything is float64, and no state is written to once it is there. ``scale``, grouped heads, gates that channels or
tokens share, packed sequences and the normaliser belong to ``oracle.py``.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

__all__ = ["FAMILIES", "Move", "walk", "walk_vjp", "whole", "whole_vjp"]

Array = NDArray[np.float64]
Arrays = Mapping[str, Array]


# The three products that everything is made of.


def outer(k: Array, v: Array) -> Array:
    """``kᵀv``: ``[..., K], [..., V] → [..., K, V]``."""
    return k[..., :, None] * v[..., None, :]


def row_times(q: Array, S: Array) -> Array:
    """``q S``: ``[..., K], [..., K, V] → [..., V]``."""
    return np.einsum("...k,...kv->...v", q, S)


def times_column(S: Array, v: Array) -> Array:
    """``S vᵀ``: ``[..., K, V], [..., V] → [..., K]``."""
    return np.einsum("...kv,...v->...k", S, v)


# The moves. In a VJP, dX is the gradient of X. It is given that of what the move returns, and returns those of S and of
# every input, in the order of the parameters.


class Move:
    """One change of the state, ``move(S, *inputs) → S``, or, with ``reads``, one look at it, ``move(S, *inputs) → o``.

    Attributes:
        inputs: Names of the arrays it takes besides the state: the names of its parameters.
        reads: True if it returns the output and leaves the state as it is.
        vjp: ``vjp(d_result, S, *inputs) → (dS, *d_inputs)``, set by decorating it with ``with_vjp``.
    """

    def __init__(self, function: Callable[..., Array], reads: bool = False) -> None:
        self.function, self.reads = function, reads
        self.inputs = tuple(inspect.signature(function).parameters)[1:]
        self.vjp: Callable[..., tuple[Array, ...]] = NotImplemented
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def with_vjp(self, vjp: Callable[..., tuple[Array, ...]]) -> None:
        """Attach the VJP."""
        self.vjp = vjp

    def pick(self, token: Arrays) -> list[Array]:
        """Its inputs, in order."""
        return [token[name] for name in self.inputs]

    def __call__(self, S: Array, token: Arrays) -> Array:
        """Make the move with the inputs of one token."""
        return self.function(S, *self.pick(token))


def reading(function: Callable[..., Array]) -> Move:
    """Make a move that reads."""
    return Move(function, reads=True)


@Move
def decay(S: Array, g: Array) -> Array:
    """``S' = Diag(e^g) S``: each key channel forgets at its own rate (GLA, Yang et al. 2024, §4)."""
    return np.exp(g)[..., :, None] * S


@decay.with_vjp
def _(dS: Array, S: Array, g: Array) -> tuple[Array, ...]:
    kept = np.exp(g)[..., :, None]
    return kept * dS, (dS * (kept * S)).sum(-1)


@Move
def decay_values(S: Array, gv: Array) -> Array:
    """``S' = S Diag(e^gv)``: each value channel forgets at its own rate (Mao 2022)."""
    return S * np.exp(gv)[..., None, :]


@decay_values.with_vjp
def _(dS: Array, S: Array, gv: Array) -> tuple[Array, ...]:
    kept = np.exp(gv)[..., None, :]
    return kept * dS, (dS * (kept * S)).sum(-2)


@Move
def write(S: Array, k: Array, v: Array) -> Array:
    """``S' = S + kᵀv``: add the value under its key (Katharopoulos et al. 2020, eq. 18)."""
    return S + outer(k, v)


@write.with_vjp
def _(dS: Array, S: Array, k: Array, v: Array) -> tuple[Array, ...]:
    return dS, times_column(dS, v), row_times(k, dS)


@Move
def correct(S: Array, k: Array, v: Array, beta: Array) -> Array:
    """``S' = S + kᵀ(beta ∘ (v − k S))``: what the key recalls moves to the value (DeltaNet, Schlag et al. 2021)."""
    return S + outer(k, beta * (v - row_times(k, S)))


@correct.with_vjp
def _(dS: Array, S: Array, k: Array, v: Array, beta: Array) -> tuple[Array, ...]:
    error = v - row_times(k, S)
    written = row_times(k, dS)  # gradient of beta ∘ error
    d_error = beta * written
    return (
        dS - outer(k, d_error),
        times_column(dS, beta * error) - times_column(S, d_error),
        d_error,
        written * error,
    )


@Move
def transform(S: Array, g: Array, a: Array, b: Array) -> Array:
    """``S' = Diag(e^g) S + bᵀ(a S)``: a diagonal plus a low-rank transition (RWKV-7, Peng et al. 2025, eq. 2)."""
    return np.exp(g)[..., :, None] * S + outer(b, row_times(a, S))


@transform.with_vjp
def _(dS: Array, S: Array, g: Array, a: Array, b: Array) -> tuple[Array, ...]:
    kept = np.exp(g)[..., :, None]
    d_recalled = row_times(b, dS)  # gradient of a S
    return (
        kept * dS + outer(a, d_recalled),
        (dS * (kept * S)).sum(-1),
        times_column(S, d_recalled),
        times_column(dS, row_times(a, S)),
    )


@reading
def read(S: Array, q: Array) -> Array:
    """``o = q S`` (Katharopoulos et al. 2020, eq. 20)."""
    return row_times(q, S)


@read.with_vjp
def _(do: Array, S: Array, q: Array) -> tuple[Array, ...]:
    return outer(q, do), times_column(S, do)


@reading
def read_with_bonus(S: Array, q: Array, k: Array, v: Array, u: Array) -> Array:
    """``o = q (S + Diag(u) kᵀv)``: the token, not yet written, weighs ``u`` (RWKV-6, Peng et al. 2024, eq. 15)."""
    return row_times(q, S + outer(u * k, v))


@read_with_bonus.with_vjp
def _(do: Array, S: Array, q: Array, k: Array, v: Array, u: Array) -> tuple[Array, ...]:
    dS = outer(q, do)
    d_key = times_column(dS, v)  # gradient of u ∘ k
    return dS, times_column(S + outer(u * k, v), do), u * d_key, row_times(u * k, dS), k * d_key


Moves = tuple[Move, ...]

# The families. A move whose inputs were not given is not made: gla without gv keeps every value channel.

# fmt: off
FAMILIES: dict[str, Moves] = {
    "linear_attn":      (write, read),                       # S = S⁻ + kᵀv                       o = q S
    "simple_gla":       (decay, write, read),                # S = e^g S⁻ + kᵀv                   o = q S
    "gla":              (decay, decay_values, write, read),  # S = Diag(e^g) S⁻ Diag(e^gv) + kᵀv  o = q S
    "rwkv6":            (read_with_bonus, decay, write),     # S = Diag(e^g) S⁻ + kᵀv       o = q (S⁻ + Diag(u) kᵀv)
    "delta_rule":       (correct, read),                     # S = S⁻ + kᵀ(beta ∘ (v − k S⁻))     o = q S
    "gated_delta_rule": (decay, correct, read),              # S' = e^g S⁻, then as delta_rule    o = q S
    "kda":              (decay, correct, read),              # S' = Diag(e^g) S⁻, then likewise   o = q S
    "dplr":             (transform, write, read),            # S = Diag(e^g) S⁻ + bᵀ(a S⁻) + kᵀv  o = q S
}
# fmt: on


# The walk. Here arrays have all tokens: x["v"] is [N, T, HV, V].


def step(moves: Moves, token: Arrays, S: Array) -> tuple[Array, Array]:
    """One token: its inputs and the state before it → ``o``, and the state after it."""
    for move in moves:
        if move.reads:
            o = move(S, token)
        else:
            S = move(S, token)
    return o, S


def passed(moves: Moves, token: Arrays, S: Array) -> Array:
    """The state after one token, of whose output nothing is wanted."""
    for move in moves:
        S = S if move.reads else move(S, token)
    return S


def step_vjp(moves: Moves, token: Arrays, S: Array, do: Array, dS: Array) -> tuple[dict[str, Array], Array]:
    """One token backward: gradients of ``o`` and the state after it → those of its inputs and the state before it."""
    found = []  # the state that each move finds
    for move in moves:
        found.append(S)
        S = S if move.reads else move(S, token)
    d_token: dict[str, Array] = {}
    for move, S in zip(reversed(moves), reversed(found), strict=True):
        d_found, *d_inputs = move.vjp(do if move.reads else dS, S, *move.pick(token))
        dS = dS + d_found if move.reads else d_found
        for name, d_input in zip(move.inputs, d_inputs, strict=True):
            d_token[name] = d_token[name] + d_input if name in d_token else d_input
    return d_token, dS


def walk(moves: Moves, x: Arrays, S: Array) -> tuple[Array, Array]:
    """All tokens in order: the inputs and the initial state → ``o [N, T, HV, V]``, and the final state."""
    o = np.empty_like(x["v"])
    for t in range(o.shape[1]):
        o[:, t], S = step(moves, at(x, t), S)
    return o, S


PIECE = 64  # tokens; the walk backward holds every state inside one piece, and one state for each piece


def walk_vjp(moves: Moves, x: Arrays, S: Array, do: Array, dS: Array) -> tuple[dict[str, Array], Array]:
    """All tokens backward: gradients of ``o`` and of the final state → those of the inputs and of the initial state."""
    dx = {name: np.zeros_like(array) for name, array in x.items()}
    pieces = [range(do.shape[1])[start : start + PIECE] for start in range(0, do.shape[1], PIECE)]

    def states(tokens: Iterable[int], S: Array) -> Iterator[Array]:
        """The state before each of them, and the one after all."""
        return accumulate(tokens, lambda S, t: passed(moves, at(x, t), S), initial=S)

    entering = accumulate(pieces, lambda S, tokens: deque(states(tokens, S), 1).pop(), initial=S)
    for tokens, S in reversed(list(zip(pieces, entering, strict=False))):
        before = states(tokens, S)
        for t, S in reversed(list(zip(tokens, before, strict=False))):
            d_token, dS = step_vjp(moves, at(x, t), S, do[:, t], dS)
            for name, d_input in d_token.items():
                dx[name][:, t] = d_input
    return dx, dS


def at(x: Arrays, tokens: int | slice) -> dict[str, Array]:
    """The inputs of one token, or of a range of them."""
    return {name: array[:, tokens] for name, array in x.items()}


# No walk: with causal=False every token reads the state that holds the whole sequence (Hua et al. 2022, eq. 7).


def whole(x: Arrays) -> Array:
    """``o_t = q_t Σ_s k_sᵀ v_s``, over all ``s``: ``[N, T, HV, V]``."""
    S = sum_outer(x["k"], x["v"])[:, None]
    return row_times(x["q"], S)


def whole_vjp(x: Arrays, do: Array) -> dict[str, Array]:
    """Gradient of ``o`` → those of ``q``, ``k`` and ``v``."""
    S, dS = sum_outer(x["k"], x["v"])[:, None], sum_outer(x["q"], do)[:, None]
    return {"q": times_column(S, do), "k": times_column(dS, x["v"]), "v": row_times(x["k"], dS)}


def sum_outer(k: Array, v: Array) -> Array:
    """``Σ_t k_tᵀ v_t``: ``[..., T, HV, K], [..., T, HV, V] → [..., HV, K, V]``."""
    return np.einsum("...thk,...thv->...hkv", k, v)
