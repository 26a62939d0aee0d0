"""Truth, and how far from it a result may be.

**Truth** is the oracle in float64, on the inputs as rounded to their dtypes.

**Noise** is what rounding does to a correct chunk algorithm. It is measured, not guessed: the oracle runs again on
some perturbed copies of the inputs, and the root mean square of the changes, over copies and over the last axis
of the array, is the noise of one row (one token's output, one row of a state). Narrow rows have more copies, so that what is
averaged are a dozen changes at least: with three the noise of a row may seem a tenth of what it is. Numbers that are zero
whatever is moved, such as gradients of channels into which none was fed, do not count among those that the mean is of: one
number beside 255 of them would be held to a sixteenth of its noise.

With ``u(d)`` the unit roundoff of a dtype, ``d`` the dtype of the operands and ``a`` that of accumulation, every element is
multiplied by ``1 ± amplitude``, signs at random:

* operands, ``a`` and ``b`` of ``dplr``, ``beta``, ``u``, ``bias`` and incoming gradients: ``u(d) + u(a)·√(T+K)``, of gradients
  ``√(T+K+V)``. The chunk algorithm rounds ``q e^G``, ``k e^{-G}``, the weights, the solved system and the state to ``d``
  before a matrix product; each of these is as large an effect as rounding the operand. Sums of ``T`` or ``K`` terms in ``a``
  add ``√(T+K)`` roundings.
* keys of the delta families, and ``a`` of ``dplr``: ``32 u(a)/K²`` more. Each of the weights ``k·k`` of a chunk's system is
  rounded by itself, and a moved key moves all of its token together, of which little is left where ``K`` is small.
* keys beside ``beta``, in quadrature: ``u(d)`` times the length of the token's row of ``A X β``, of a chunk of 64, where ``A``
  are the decayed products ``k·k`` of a token and those before it and ``X = (1 + β A)⁻¹``. What a token writes is
  ``X β (v − k S)``, and each number of ``X`` is rounded to ``d`` by itself before that product; a moved key moves what its
  token writes by the difference of that token alone. The row is ``√(β/(2−β))`` long, or ``β √(64/K)`` where that is less:
  about a half for betas below one, and up to ``2 √(64/K)`` for betas near two, when nothing fades in a chunk.
* states: ``u(a)·√(T+K)`` only. They are carried in ``a``; a backend that carries them in ``d`` is out of bounds.
* gates: the exponent is moved by ``u(a)·min(64·|g|, 32)``: a running sum over a chunk of 64, rounded in ``a``. The cap says
  that a sum beyond -32 must not cost accuracy to what comes after it: after such a decay nothing older is left to be
  inaccurate about.

Added to it, in quadrature: rounding to the dtype of the result; a quarter of the array's overall noise (a large row's error
reaches small ones through shared sums); for the gradient of an initial state, the rounding of the running sum of all gates
with each token of a chunk, which the cap leaves out; for what the delta families read of an initial state and leave of it, and
its gradient, and for what a token and its gate get of both, what rounding does to the solved system by which they do, though
next to nothing may be left; for the gradient of an input that is mapped, a slope that is flushed to zero; for the gradient of
a gate, the noise of the sums ``Σ q∘dq − k∘dk`` that it is the small difference of; for the gradient of what all tokens share,
as much as a running sum of terms that are alike may lose, which is alike with each of them; and, under ``normalize``, for the
gradients of queries and keys, and of the gates that are made of them, that of one of the two sums which they are the difference
of. On top of all stands the smallest normal number, times ``PARTED`` for gradients of calls with gates: below it, results may
be flushed to zero.

**Bounds.** No element may be off by more than ``ROW`` times the noise of its row, nor an array as a whole (root mean square
over all rows) by more than ``OVERALL`` times its noise, or nearly ``ROW`` times if it has few numbers. An element's own
rounding is granted to it where that is more, as in a wide row of which the rest is zero. The row bound is relative to the
noise at that row, so a few bad rows cannot hide in a good average; each array is held to its own noise, so a small gradient
cannot hide behind a large one.
A fault much smaller than the rounding noise of its own array stays invisible, in this and any other test.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from linattn.spec import COMPANIONS, FAMILIES, spec_of
from linattn_backends.numpy import companions, maps, oracle, ssd
from numpy.typing import NDArray

from .data import Problem
from .sealed import Claim, Sealed

__all__ = ["OVERALL", "ROW", "Quantity", "Truth", "distance", "truth_of", "truth_of_decoding"]

Array = NDArray[Any]
Share = Callable[[], Array]
"""Gives what :func:`_share` says of a call."""

REPLICAS = 3
SOLVED = 32
"""Roundings that the solution of a system of equations adds to keys of one channel, which are all alike."""
CHUNK = 64
"""Tokens of a chunk."""
GONE = -1e3
"""A gate after which nothing is left, and with which sums can be made."""
LEFT = 88.0
"""Gates in sum after which float32 holds nothing of a number near one."""
SHARED = 4
"""Roundings of a chunk's largest gradient that the others share."""
CHANGES = 12
"""In the noise of a row, at least."""
ROW = 12.0
OVERALL = 4.0
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
FLUSHED = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
"""What a result may be off by at any size: below the smallest normal number, devices and compilers may flush to zero.

Numbers of float16 are computed in float32, which holds all of them as normal numbers.
"""
PARTED = float(np.exp(8.0))
"""A decay of a chunk may be two factors, of the token that reads and of the one that wrote, about its middle: what the first
makes subnormal is flushed, and the second lifts the rest by as much.
"""


@dataclass
class Quantity:
    """One array of the truth.

    Attributes:
        value: What it must be.
        noise: Per row (the last axis is kept, with size 1).
        dtype: The dtype it must have; ``int32`` is compared exactly.
    """

    value: Array
    noise: Array
    dtype: str


@dataclass
class Truth:
    """Outputs and gradients by name, with the gradients that were fed in."""

    outputs: dict[str, Quantity]
    gradients: dict[str, Quantity]
    cotangents: dict[str, Array]


def replicas(problem: Problem) -> int:
    """How many perturbed copies there are."""
    sums = [1] if problem.options.get("normalize") else []  # the column of a state that holds them
    narrowest = min(sums + [problem.sizes[symbol] for symbol in ("K", "L", "V", "D") if symbol in problem.sizes])
    return max(REPLICAS, -(-CHANGES // narrowest))


def accumulation(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


# -- comparing -------------------------------------------------------------------------------------------------------


def distance(got: Array, want: Quantity, rows: Any = ...) -> Any:
    """The error as a fraction of its bound: above 1 is out of bounds. NaN is infinitely far.

    Where the truth is sealed, it is a claim, for the judge.
    """
    if isinstance(want.noise, Sealed):
        return Claim(got, want.value, want.noise, want.dtype, rows)
    value = want.value[rows]
    if got.shape != value.shape:
        return np.inf
    if value.size == 0:
        return 0.0
    if want.dtype.startswith("int"):
        return 0.0 if np.array_equal(got, value) else np.inf
    error = np.abs(got - value)
    if not np.isfinite(error).all():
        return np.inf
    noise = np.broadcast_to(want.noise, want.value.shape)[rows]
    each = np.where(noise > 0, np.maximum(ROW * noise, ROUNDOFF[want.dtype] * np.abs(value)), 0.0)
    overall = OVERALL + (ROW - OVERALL) / np.sqrt(value.size)  # few numbers are no average
    return max(_ratio(error, each).max(), _ratio(_rms(error), overall * _rms(noise)))


def _ratio(error: Any, bound: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / bound)


def _rms(x: Array, **axes: Any) -> Any:
    return np.sqrt(np.mean(np.square(x), **axes))


def _rms_of_held(states: Array) -> Array:
    """Of each state's numbers, without channels that hold nothing."""
    return np.sqrt(np.square(states).sum((-1, -2)) / np.maximum(np.count_nonzero(states, (-1, -2)), 1))


# -- truth -----------------------------------------------------------------------------------------------------------


def truth_of(
    problem: Problem,
    op: str,
    arrays: Mapping[str, Array],
    draw_cotangents: Callable[[dict[str, Quantity]], dict[str, Array]] | None,
) -> Truth:
    """Run the oracle, all copies at once: a copy is another group of heads, and heads never meet.

    Args:
        problem: For symbols, dtypes and options.
        op: Family.
        arrays: The arrays as rounded to their dtypes, in float64.
        draw_cotangents: From the outputs, the gradients to feed in, as rounded; None if no gradients are wanted.
    """
    truth = _truth_of(problem, op, arrays, draw_cotangents)
    for name, quantity in truth.gradients.items():
        _add_noise_of_adding_up(problem, name, quantity)
    for name, quantity in (("o", truth.outputs["o"]), *truth.gradients.items()):
        _exact_behind_the_last_sequence(problem, arrays, spec_of(op, None).like if name == "o" else name, quantity)
    return truth


def _add_noise_of_adding_up(problem: Problem, name: str, quantity: Quantity) -> None:
    """The gradient of what all tokens share has a term of each of them. Where these are alike, each addition to a running sum
    may lose alike, and all of them its roundoff times their number.
    """
    if {"T", "N"}.isdisjoint(problem.symbols.get(name, ("T",))):
        low = next(iter(problem.dtypes.values()))
        lost = ROUNDOFF[accumulation(low)] * problem.sizes["B"] * problem.sizes["T"] * np.abs(quantity.value)
        quantity.noise = np.hypot(quantity.noise, lost / ROW)


def _exact_behind_the_last_sequence(problem: Problem, arrays: Mapping[str, Array], name: str, quantity: Quantity) -> None:
    """Rows of tokens that belong to no sequence are zero, and nothing near it."""
    if "cu_seqlens" in arrays and "T" in problem.symbols.get(name, ()):
        quantity.noise = np.where(
            np.arange(quantity.value.shape[1]) < arrays["cu_seqlens"][-1], np.moveaxis(quantity.noise, 1, -1), 0.0
        )
        quantity.noise = np.moveaxis(quantity.noise, -1, 1)


def _truth_of(
    problem: Problem,
    op: str,
    arrays: Mapping[str, Array],
    draw_cotangents: Callable[[dict[str, Quantity]], dict[str, Array]] | None,
) -> Truth:
    """The truth, whatever stands behind the last sequence."""
    if op == "ssd":
        return truth_of_ssd(problem, arrays, draw_cotangents)
    if maps.asked(problem.options):
        return truth_of_mapped(problem, op, arrays, draw_cotangents)
    spec, low = spec_of(op, None), next(iter(problem.dtypes.values()))
    operand = accumulation(low) if op in COMPANIONS else low
    copies, count = _copies(problem, arrays, operand), replicas(problem)
    options = spec.resolve(problem.options, problem.sizes)  # what depends on a width depends on that of one copy
    o, state = oracle.forward(op, structured(copies), options)
    outputs = {"o": (o, _head_axis(problem, spec.like))}
    outputs |= {name: (x, _head_axis_of_state(name)) for name, x in flat_state(state).items()}
    out_dtypes = {"o": low}
    found = {
        name: _quantity(
            x, axis, out_dtypes.get(name, "int32" if x.dtype.kind == "i" else accumulation(low)), count, op in COMPANIONS
        )
        for name, (x, axis) in outputs.items()
    }
    if "final_state" in found and problem.options.get("normalize"):
        rounding = _amplitude(problem, accumulation(low), low)
        found["final_state"] = _with_sums_apart(*outputs["final_state"], found["final_state"].dtype, count, rounding)
    share = functools.cache(lambda: _share(problem, low, arrays))  # of calls with states, and once for all that asks
    _add_noise_of_what_is_left(problem, share, arrays, found.get("final_state"), arrays.get("initial_state"))
    _add_noise_of_reading_what_is_left(problem, share, arrays, found["o"], options.get("scale", 1.0))
    if draw_cotangents is None:
        return Truth(found, {}, {})
    cotangents = draw_cotangents(found)
    moved = {
        name: _perturbed(x, _amplitude(problem, operand, low, "V"), outputs[name][1], name, count)
        for name, x in cotangents.items()
    }
    d_state = structured({name: x for name, x in moved.items() if name != "o"}, "final_state").get("final_state")
    pulled = oracle.vjp(op, structured(copies), options, moved.get("o"), complete(d_state, state))
    flat = flat_gradients(pulled)
    result = {
        name: _quantity(flat[name], _head_axis(problem, name), problem.dtypes[name], count, op in COMPANIONS)
        for name in problem.floats
        if name in flat
    }
    if "initial_state" in result and problem.options.get("normalize"):
        axis = _head_axis(problem, "initial_state")
        result["initial_state"] = _with_sums_apart(flat["initial_state"], axis, problem.dtypes["initial_state"], count)
    least = FLUSHED[accumulation(low)] * (PARTED if {"g", "gv"}.intersection(arrays) else 1.0)
    for quantity in result.values():  # one of float64 may have been computed in float32
        quantity.noise = np.maximum(quantity.noise, least)
    initial = result.get("initial_state")
    _add_noise_of_what_is_left(problem, share, arrays, initial, cotangents.get("final_state"))
    _add_noise_of_being_read(problem, share, arrays, initial, cotangents.get("o"), options.get("scale", 1.0))
    _add_noise_of_all_gates(problem, low, arrays, initial)
    _add_noise_of_neighbours(problem, low, arrays, result)
    _add_noise_of_passing_states(problem, share, arrays, result, cotangents.get("final_state"))
    divided = problem.options.get("normalize") and "o" in cotangents
    terms = _terms_of_quotient(problem, op, arrays, cotangents["o"]) if divided else {}
    _add_noise_of_quotient(problem, low, terms, result)
    _add_noise_of_sums(problem, low, arrays, result, terms)
    if op == "gated_rms_norm":
        _add_noise_of_projection(problem, low, arrays, options, cotangents["o"], result)
    return Truth(found, result, cotangents)


def truth_of_mapped(
    problem: Problem, op: str, arrays: Mapping[str, Array], draw_cotangents: Callable[..., dict[str, Array]] | None
) -> Truth:
    """The truth of what the maps make of the arrays; its gradients, and their noise, pulled back through the maps.

    A map is done in the accumulation dtype, and rounds queries and keys once, as any operand is rounded.
    """
    mapped, options = maps.apply(arrays, problem.options)
    wide = accumulation(next(iter(problem.dtypes.values())))
    dtypes = {name: dtype for name, dtype in problem.dtypes.items() if name in mapped}
    dtypes |= {name: wide for name, option in (("g", "gate"), ("beta", "beta_map")) if problem.options.get(option) is not None}
    inner = truth_of(replace(problem, dtypes=dtypes, options=options), op, mapped, draw_cotangents)
    if not inner.gradients:
        return inner
    values = maps.pull_back(arrays, problem.options, {name: x.value for name, x in inner.gradients.items()})
    found = {}
    for name, value in values.items():
        dtype = problem.dtypes[name]
        noise = inner.gradients[name].noise if name in inner.gradients else np.zeros(())
        noise = noise_through_maps(problem, arrays, inner.gradients, name, noise)
        sums = name == "initial_state" and bool(problem.options.get("normalize"))
        found[name] = Quantity(value, _noise_of(value, dtype, noise, sums), dtype)
    return Truth(inner.outputs, found, inner.cotangents)


def truth_of_ssd(
    problem: Problem, arrays: Mapping[str, Array], draw_cotangents: Callable[..., dict[str, Array]] | None
) -> Truth:
    """The truth of ``simple_gla`` inside, and of what stands around it; noise is carried along, element by element."""
    low, wide = problem.dtypes["x"], accumulation(problem.dtypes["x"])
    given, options = ssd.inner(arrays, problem.options)
    names = dict(q="C", k="B", v="x", initial_state="initial_state", cu_seqlens="cu_seqlens")
    dtypes = {name: problem.dtypes[old] for name, old in names.items() if name in given} | {"g": wide}
    symbols = {name: problem.symbols[old] for name, old in names.items() if name in given} | {"g": problem.symbols["dt"]}
    fed: dict[str, Array] = {}
    around: dict[str, Array] = {}

    def feed(outputs: dict[str, Quantity]) -> dict[str, Array]:
        fed.update(draw_cotangents({**outputs, "o": outside(outputs["o"])}))
        around.update({"o": np.zeros(outputs["o"].value.shape), **fed})
        return {**around, "o": ssd.pull_back_output(arrays, around["o"])}

    def outside(o: Quantity) -> Quantity:
        value, gate = ssd.after(arrays, o.value), ssd.pull_back_output(arrays, np.ones_like(o.value))
        noise = _noise_of(value, low, o.noise * _rms(gate, axis=-1, keepdims=True))
        # channels are products with those of z, which are not of one size
        return Quantity(value, np.hypot(noise, ROUNDOFF[low] * np.abs(value)) if "z" in arrays else noise, low)

    order = ("q", "k", "v", "g", "initial_state", "cu_seqlens")
    inner = replace(
        problem,
        arrays={name: given[name] for name in order if name in given},
        dtypes={name: dtypes[name] for name in order if name in dtypes},
        symbols=symbols,
        options={**options, "causal": True},
    )
    truth = truth_of(inner, "simple_gla", given, None if draw_cotangents is None else feed)
    outputs = {**truth.outputs, "o": outside(truth.outputs["o"])}
    if draw_cotangents is None:
        return Truth(outputs, {}, {})
    found = _gradients_of_ssd(problem, arrays, truth, around["o"])
    return Truth(outputs, found, fed)


def _gradients_of_ssd(problem: Problem, arrays: Mapping[str, Array], truth: Truth, do: Array) -> dict[str, Quantity]:
    """Gradients of ``ssd`` from those of ``simple_gla``: linear in them, so noise adds up in squares."""
    inside = {name: x.value for name, x in truth.gradients.items()}
    o = truth.outputs["o"]
    values = ssd.pull_back(arrays, problem.options, o.value, do, inside)
    squared = {name: np.square(x) if x.dtype.kind == "f" else x for name, x in arrays.items()}
    dt, slope = (np.square(x) for x in ssd.steps(arrays, problem.options))
    low = problem.dtypes["x"]
    noise = {name: np.square(np.broadcast_to(x.noise, x.value.shape)) for name, x in truth.gradients.items()}
    d_in = ssd.of_sequences({**arrays, "x": ssd.pull_back_output(arrays, do)})
    d_in = np.square(d_in * _amplitude(problem, low, low))
    step = ((noise["v"] * squared["x"]).sum(-1) + noise["g"] * squared["A"]) * slope
    squares = dict(x=dt[..., None] * noise["v"], dt=step, A=(noise["g"] * dt).sum((0, 1)), B=noise["k"], C=noise["q"])
    if "z" in arrays:
        rounding = _amplitude(problem, accumulation(low), low) * ssd.skipped(arrays, o.value)
        squares["z"] = np.square(do) * (np.square(np.broadcast_to(o.noise, do.shape)) + np.square(rounding))
    if "D" in arrays:
        by_head = arrays["D"].ndim == 1
        squares["x"] = squares["x"] + d_in * (squared["D"][:, None] if by_head else squared["D"])
        total = (d_in * squared["x"]).sum((0, 1))
        squares["D"] = total.sum(-1) if by_head else total
    if "dt_bias" in arrays:
        squares["dt_bias"] = step.sum((0, 1))
    if "initial_state" in noise:
        squares["initial_state"] = noise["initial_state"]
    rows = {name: np.sqrt(x.mean(-1, keepdims=True)) for name, x in squares.items()}
    for name in ("x", "z") if "z" in arrays else ():  # channels are products, with what is not of one size
        rows[name] = np.hypot(rows[name], ROUNDOFF[low] * np.abs(values[name]))
    return {
        name: Quantity(value, _noise_of(value, problem.dtypes[name], rows[name]), problem.dtypes[name])
        for name, value in values.items()
    }


def _noise_of(value: Array, dtype: str, noise: Array, sums: bool = False) -> Array:
    """The noise of a row, and its rounding to a dtype; of a state that ends with ``sums`` of keys, that of its two parts."""
    if sums:
        noise = np.broadcast_to(noise, value.shape)
        parts = (slice(None, -1), slice(-1, None))
        return np.concatenate([_noise_of(value[..., part], dtype, noise[..., part]) for part in parts], -1)
    return np.hypot(noise, ROUNDOFF[dtype] * _rms(value, axis=-1, keepdims=True)) + FLUSHED[dtype]


def noise_through_maps(
    problem: Problem, arrays: Mapping[str, Array], gradients: Mapping[str, Quantity], name: str, noise: Array
) -> Array:
    """The noise of a raw array's gradient, a row at a time, from that of the mapped array's.

    Signs are unknown: squares add up over the tokens that share a parameter.
    """
    options = problem.options
    if name in ("q", "k") and options.get("qk_norm"):
        return noise * maps.inverse_length(arrays[name])
    if name == "beta" and options.get("beta_map"):
        s = maps.sigmoid(arrays[name])
        return _rms(_through_slope(gradients[name], maps.factor(options) * s * (1 - s)), axis=-1, keepdims=True)
    if options.get("gate") is None or not (name == "g" or name.startswith("gate.")):
        return noise
    each = _through_slope(gradients["g"], np.broadcast_to(maps.gate_of(arrays, options).slopes[name], arrays["g"].shape))
    if name == "g":
        return _rms(each, axis=-1, keepdims=True)
    total = np.sqrt(maps.over_tokens(np.square(each), arrays[name].shape))
    return _rms(total, axis=-1, keepdims=True)


def _through_slope(gradient: Quantity, slope: Array) -> Array:
    """The noise of a gradient times a map's slope, element by element. A slope is made of exponentials, of which the smallest
    may be flushed to zero before a gradient larger than one is multiplied by them.
    """
    flushed = FLUSHED[gradient.dtype] * max(1.0, np.abs(slope).max(initial=0.0))
    return np.hypot(gradient.noise * slope, flushed * gradient.value)


def truth_of_decoding(problem: Problem, op: str, arrays: Mapping[str, Array]) -> Truth:
    """The recurrence from the states of the slots: ``o``, zero in padding, and the whole pool, other states as they were."""
    pool = arrays["state"]
    slots = arrays.get("state_indices", np.arange(problem.sizes["N"]))
    live = slots >= 0
    tokens = {name: x for name, x in arrays.items() if not name.startswith("state")}
    inner = replace(
        problem,
        symbols={**problem.symbols, "initial_state": ("N", *problem.symbols["state"][1:])},
        dtypes={**problem.dtypes, "initial_state": problem.dtypes["state"]},
        options={**problem.options, "output_final_state": True},
    )
    before = pool[np.where(live, slots, 0)]
    past = before[..., before.shape[-1] - problem.sizes["W"] + 1 :] if op == "short_conv" else before
    outputs = truth_of(inner, op, {**tokens, "initial_state": past}, None).outputs
    o, final = outputs["o"], outputs["final_state"]
    o.value[~live], o.noise[~live] = 0.0, 0.0
    if op == "short_conv":  # a window may be longer than a state
        shifted = np.concatenate([before, np.moveaxis(tokens["x"], 1, 2)], -1)[..., tokens["x"].shape[1] :]
        final = Quantity(shifted, np.zeros((*shifted.shape[:-1], 1)), final.dtype)
    dtype = problem.dtypes["state"]
    value, noise = pool.copy(), np.zeros(pool.shape)
    if pool.size:
        rounded = _noise_of(final.value, dtype, final.noise, bool(problem.options.get("normalize")))
        rounded = np.broadcast_to(rounded, final.value.shape)
        value[slots[live]], noise[slots[live]] = final.value[live], rounded[live]
    return Truth({"o": o, "state": Quantity(value, noise, dtype)}, {}, {})


def complete(d_state: Any, state: Any) -> Any:
    """A gradient for every array of the final state; the count of keys has none."""
    if isinstance(state, tuple) and d_state is not None:
        return type(state)(**d_state, length=None)
    return d_state


def structured(arrays: Mapping[str, Any], prefix: str = "initial_state") -> dict[str, Any]:
    """``initial_state.kv`` and its siblings as one ``MixedState``, or, of a final state, as a dictionary."""
    parts = {name.partition(".")[2]: x for name, x in arrays.items() if name.startswith(f"{prefix}.")}
    rest = {name: x for name, x in arrays.items() if not name.startswith(f"{prefix}.")}
    if not parts:
        return rest
    state_type = FAMILIES["mixed_attn"].state_type
    return {**rest, prefix: parts if prefix != "initial_state" else state_type(**parts)}


def flat_state(state: Any, prefix: str = "final_state") -> dict[str, Any]:
    """Every array of a state by name."""
    if state is None:
        return {}
    return {f"{prefix}.{name}": x for name, x in state._asdict().items()} if isinstance(state, tuple) else {prefix: state}


def flat_gradients(pulled: Mapping[str, Any]) -> dict[str, Array]:
    """Gradients by name; that of the count of keys is left out."""
    flat = {name: x for name, x in pulled.items() if name != "initial_state"}
    flat |= flat_state(pulled.get("initial_state"), "initial_state")
    return {name: x for name, x in flat.items() if x is not None}


def _head_axis(problem: Problem, name: str) -> int:
    """Where the heads are in an array, or the channels where they are what never meets; -1 if it has none."""
    apart = ("D",) if "D" in problem.sizes else ("H", "HV", "G")
    return next((i for i, symbol in enumerate(problem.symbols[name]) if symbol in apart), -1)


def _head_axis_of_state(name: str) -> int:
    return {"k_quad": 2, "k_lin": 2, "v": 2, "length": -1}.get(name.partition(".")[2], 1)


def _amplitude(problem: Problem, dtype: str, low: str, more: str = "") -> float:
    """Of an array that the algorithm may round to ``dtype``, and of which sums are made over tokens, ``K`` and ``more``."""
    sizes = problem.sizes
    width = next(sizes[symbol] for symbol in ("K", "W", "D") if symbol in sizes)
    return ROUNDOFF[dtype] + ROUNDOFF[accumulation(low)] * np.sqrt(sizes["T"] + width + sizes.get(more, 0))


def _solving(problem: Problem, wide: str, arrays: Mapping[str, Array]) -> Array:
    """What the solution of a chunk's system adds to the amplitude of each head of keys."""
    return ROUNDOFF[wide] * SOLVED / _channels_in_use(problem, arrays) ** 2


def _channels_in_use(problem: Problem, arrays: Mapping[str, Array]) -> Array:
    """How many channels of each head of keys hold anything, or all where none does."""
    used = arrays["a" if "a" in arrays else "k"].any((0, 1)).sum(-1)
    return np.where(used, used, problem.sizes["K"])


def rows_of_inverses(arrays: Mapping[str, Array]) -> Array:
    """For each token and head of keys the length of its row of ``A X β``, of its chunk, as ``[B, T, H, 1]``: of what heads and
    channels of values have, the longest.
    """
    k, beta = arrays["k"], arrays["beta"]
    B, T, H = k.shape[:3]
    HV = arrays["v"].shape[2]
    chunks = [(at, min(at + CHUNK, own.stop)) for own in _sequences(T, arrays) for at in range(own.start, own.stop, CHUNK)]
    found = np.zeros((B, T, H, 1))
    if not chunks or not found.size:
        return found
    size = max(end - at for at, end in chunks)
    tokens = np.array([[min(at + i, end) for i in range(size)] for at, end in chunks])
    there = tokens < np.array([[end] for _, end in chunks])
    tokens = np.where(there, tokens, 0)

    def by_chunk(x: Array) -> Array:
        """``[B, chunks, HV, tokens, …]``, and zero where a chunk has fewer tokens."""
        taken = np.where(there.reshape(1, *there.shape, *[1] * (x.ndim - 2)), x[:, tokens], 0.0)
        return np.repeat(np.moveaxis(taken, 2, 3), HV // x.shape[2], 2)

    keys, strengths = by_chunk(k), by_chunk(beta if beta.ndim == 3 else np.abs(beta).max(-1))
    A = np.tril(keys @ keys.swapaxes(-1, -2), -1)
    if "g" in arrays:
        G = np.cumsum(np.maximum(by_chunk(_weakest(arrays)), GONE), -1)
        A = A * np.exp(np.minimum(G[..., :, None] - G[..., None, :], 0.0))
    X = np.linalg.inv(np.eye(size) + strengths[..., None] * A)
    rows = np.sqrt(np.square(A @ X * strengths[..., None, :]).sum(-1))
    longest = rows.reshape(B, len(chunks), H, HV // H, size).max(3)
    found[..., 0][:, tokens[there]] = np.moveaxis(longest, 2, 3)[:, there]
    return found


def _copies(problem: Problem, arrays: Mapping[str, Array], operand: str) -> dict[str, Array]:
    """Each array with its perturbed copies, joined along the heads; ``operand`` is what operands may be rounded to."""
    low = next(iter(problem.dtypes.values()))
    wide = accumulation(low)
    copies, count = {}, replicas(problem)
    for name, x in arrays.items():
        axis = _head_axis(problem, name)
        if axis < 0:
            copies[name] = x
        elif "W" in problem.sizes and name in ("x", "initial_state"):  # each term has a weight, and states are copies
            copies[name] = np.concatenate([x] * (1 + count), axis)
        elif name in ("g", "gv"):
            copies[name] = _perturbed_gate(x, ROUNDOFF[wide], axis, name, count)
        else:
            carried = name == "initial_state" or name.endswith(".kv")
            amplitude = _amplitude(problem, wide if carried else operand, low)
            if name == ("a" if "a" in arrays else "k" if "beta" in arrays else ""):
                amplitude = amplitude + _solving(problem, wide, arrays)[:, None]
            if name == "k" and "beta" in arrays:
                amplitude = np.hypot(amplitude, ROUNDOFF[operand] * rows_of_inverses(arrays))
            copies[name] = _perturbed(x, amplitude, axis, name, count)
    return copies


def _signs(shape: tuple[int, ...], name: str, count: int) -> NDArray[np.uint32]:
    """For each element of so many copies, 0 for minus and 1 for plus."""
    rng = np.random.default_rng(len(name) + sum(map(ord, name)))
    n = count * math.prod(shape)
    halves = rng.bit_generator.random_raw(-(-n // 2)).astype("<u8").view("<u4")[:n]  # as integers(0, 2) takes
    return (halves >> 31).reshape(count, *shape)


def _perturbed(x: Array, amplitude: float | Array, axis: int, name: str, count: int) -> Array:
    """``x`` and ``count`` copies of it, each element times ``1 ± amplitude``."""
    if isinstance(amplitude, np.ndarray):
        return np.concatenate(
            [x, *(x * (1.0 + amplitude * (signs * 2.0 - 1.0)) for signs in _signs(x.shape, name, count))], axis
        )
    factors = np.array([1.0 - amplitude, 1.0 + amplitude])
    return np.concatenate([x, *(x * factors.take(signs) for signs in _signs(x.shape, name, count))], axis)


def _perturbed_gate(x: Array, roundoff: float, axis: int, name: str, count: int) -> Array:
    """``x`` and ``count`` copies of it, each exponent moved by what a running sum in the accumulation dtype loses."""
    lost = np.where(np.isfinite(x), roundoff * np.minimum(64 * np.abs(x), 32), 0.0)
    return np.concatenate([x, *(x + lost * (signs * 2.0 - 1.0) for signs in _signs(x.shape, name, count))], axis)


def _quantity(stacked: Array, axis: int, dtype: str, count: int, by_element: bool = False) -> Quantity:
    """The first copy, and the noise that the others show; rounded row by row, or each element by itself: channels of a
    companion's row are products of numbers that are not of one size.
    """
    if dtype == "int32" or axis < 0:
        return Quantity(stacked, np.zeros(1), "int32")
    value, *copies = np.split(stacked, 1 + count, axis)
    moved = sum(np.square(copy - value) for copy in copies) / count
    rounding = np.square(ROUNDOFF[dtype] * value)
    square = moved if by_element else moved + rounding
    held = np.count_nonzero(square, -1, keepdims=True)
    rows = square.sum(-1, keepdims=True) / np.maximum(held, 1)
    rows = rows + rounding if by_element else rows
    overall = rows.mean() if rows.size else 0.0
    return Quantity(value, np.sqrt(rows + overall / 16) + FLUSHED[dtype], dtype)


def _with_sums_apart(stacked: Array, axis: int, dtype: str, count: int, rounding: float = 0.0) -> Quantity:
    """A state whose last column holds the sums of keys: they have a noise of their own, for they may be of another size.

    Every term of such a sum is above zero, so that each of its roundings is one of the whole sum, not of a term.
    """
    parts = [_quantity(part, axis, dtype, count) for part in (stacked[..., :-1], stacked[..., -1:])]
    parts[1].noise = np.hypot(parts[1].noise, rounding * np.abs(parts[1].value))
    noise = [np.broadcast_to(part.noise, part.value.shape) for part in parts]
    return Quantity(np.concatenate([part.value for part in parts], -1), np.concatenate(noise, -1), dtype)


def _add_noise_of_what_is_left(
    problem: Problem, share: Share, arrays: Mapping[str, Array], quantity: Quantity | None, carried: Array | None
) -> None:
    """What the delta families leave of a state is ``1 − Σ``, and as far off as the sum, though next to nothing may be left:
    of one channel every token takes its share, of many a small part. Of what gates took away nothing is left to be off.
    """
    if quantity is None or carried is None or not {"beta", "a"}.intersection(arrays) or not carried.size:
        return
    kept = carried * _left_by_gates(problem, arrays)
    quantity.noise = np.hypot(quantity.noise, share()[:, None, None] * _rms_of_held(kept)[..., None, None])


def _add_noise_of_reading_what_is_left(
    problem: Problem, share: Share, arrays: Mapping[str, Array], o: Quantity, scale: float
) -> None:
    """Outputs read what the delta families have left of a state so far, where values add next to nothing to it."""
    state = arrays.get("initial_state")
    if state is None or not {"beta", "a"}.intersection(arrays) or not o.value.size:
        return
    read = _lengths(problem, arrays["q"]) * _left_at_tokens(problem, arrays, _rms_of_held(state))
    o.noise = np.hypot(o.noise, (share() * np.abs(scale) * read)[..., None])


def _add_noise_of_being_read(
    problem: Problem, share: Share, arrays: Mapping[str, Array], d_state: Quantity | None, do: Array | None, scale: float
) -> None:
    """What an initial state gets from outputs is as far off as they are by reading it."""
    if d_state is None or do is None or not {"beta", "a"}.intersection(arrays) or not do.size:
        return
    reach = _lengths(problem, arrays["q"]) * _left_at_tokens(problem, arrays, np.ones(d_state.value.shape[:2]))
    fed = np.square(reach * _rms(do, axis=-1))
    sums = [fed[:, own].sum(1) for own in _sequences(problem.sizes["T"], arrays)]
    fed = np.sqrt(np.concatenate(sums) if "cu_seqlens" in arrays else sums[0])
    d_state.noise = np.hypot(d_state.noise, (share() * np.abs(scale) * fed)[..., None, None])


def _lengths(problem: Problem, x: Array) -> Array:
    """Those of a token's queries or keys, for each head of values: ``[B, T, HV]``."""
    lengths = np.sqrt(np.square(x).sum(-1))
    return np.repeat(lengths, problem.sizes["HV"] // lengths.shape[2], axis=2)


def _left_at_tokens(problem: Problem, arrays: Mapping[str, Array], whole: Array, back: bool = False) -> Array:
    """What gates alone leave of something of each sequence, ``[N, HV]``, once it has passed each token's, or as it comes
    ``back`` to each token from the end: ``[B, T, HV]``.
    """
    left = np.zeros((*arrays["v"].shape[:2], problem.sizes["HV"]))
    for n, own in enumerate(_sequences(problem.sizes["T"], arrays)):
        left[:, own] = whole[n] if "cu_seqlens" in arrays else whole[:, None]
        if "g" in arrays:
            gates = _weakest(arrays)[:, own]
            if back:
                later = np.concatenate([gates[:, 1:], np.zeros_like(gates[:, :1])], 1)
                passed = np.cumsum(later[:, ::-1], 1)[:, ::-1]
            else:
                passed = np.cumsum(gates, 1)
            left[:, own] *= np.exp(passed)
    return left


def _share(problem: Problem, low: str, arrays: Mapping[str, Array]) -> Array:
    """What rounding does to the share of a state that is left, of each head of values: the solution of systems, and sums in the
    accumulation dtype; and each number of the solution by itself, to the dtype of the operands. Where ``beta`` is above one and
    keys are alike, the solution is longer than what it solves for, and what is left is a difference of so much more.
    """
    wide, used = accumulation(low), _channels_in_use(problem, arrays)
    of_keys = (_amplitude(problem, wide, low) + _solving(problem, wide, arrays) + ROUNDOFF[low]) / used
    if "beta" in arrays and arrays["beta"].size:
        of_keys = of_keys * np.maximum(1.0, rows_of_inverses(arrays).max((0, 1, 3)))
    return np.repeat(of_keys, problem.sizes["HV"] // len(of_keys))


def _weakest(arrays: Mapping[str, Array]) -> Array:
    """Of a token's gates the weakest, for keys take channels to one another; of ``dplr``, whose rank-one term is added to its
    gates, that term where it is larger, but nothing that would let a state grow.
    """
    gates: Array = arrays["g"] if arrays["g"].ndim == 3 else arrays["g"].max(-1)
    if "a" not in arrays:
        return gates
    term = np.sqrt(np.square(arrays["a"]).sum(-1) * np.square(arrays["b"]).sum(-1))
    return np.minimum(np.maximum(gates, np.log(np.maximum(term, np.exp(GONE / 2)))), 0.0)


def _sequences(T: int, arrays: Mapping[str, Array]) -> list[slice]:
    """The tokens of each packed sequence; all of them, where none are packed."""
    ends = arrays["cu_seqlens"].tolist() if "cu_seqlens" in arrays else [0, T]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _left_by_gates(problem: Problem, arrays: Mapping[str, Array]) -> Array:
    """What the gates of each sequence leave of a state at most, in a shape that broadcasts to that of states."""
    if "g" not in arrays:
        return np.ones(())
    sums = [_weakest(arrays)[:, own].sum(1) for own in _sequences(problem.sizes["T"], arrays)]
    return np.exp(np.concatenate(sums) if "cu_seqlens" in arrays else sums[0])[..., None, None]


def _add_noise_of_all_gates(problem: Problem, low: str, arrays: Mapping[str, Array], quantity: Quantity | None) -> None:
    """What comes back to a state has passed all gates: each token of a chunk rounds their running sum, as far down as anything
    is left.
    """
    if quantity is None or "g" not in arrays or not quantity.value.size:
        return
    T, g = problem.sizes["T"], np.abs(arrays["g"])
    if g.ndim == 1:
        sums = g[None] * T
    else:
        found = [g[:, own].sum(1) for own in _sequences(T, arrays)]
        sums = np.concatenate(found) if "cu_seqlens" in arrays else found[0]
        sums = np.repeat(sums, quantity.value.shape[1] // sums.shape[1], 1)
    sums = sums.reshape(*sums.shape[:2], -1, 1)  # [N, HV, K or 1, 1]
    moved = ROUNDOFF[accumulation(low)] * np.minimum(sums, LEFT) * np.sqrt(min(T, CHUNK))
    quantity.noise = np.hypot(quantity.noise, moved * _rms(quantity.value, axis=-1, keepdims=True))


def _add_noise_of_neighbours(
    problem: Problem, low: str, arrays: Mapping[str, Array], gradients: Mapping[str, Quantity]
) -> None:
    """The delta families solve for the gradients of a chunk's tokens together: each is as far off as the largest of its
    sequence, be it next to nothing itself. The gradient of a chunk's system, times betas, may be flushed to zero, and keys
    larger than one would have lifted it.
    """
    if not {"beta", "a"}.intersection(arrays):
        return
    for name in {"k", "a", "b"}.intersection(gradients):
        lifted = FLUSHED[accumulation(low)] * np.abs(arrays[name]).max(initial=1.0)
        gradients[name].noise = np.hypot(gradients[name].noise, lifted)
    for name, quantity in gradients.items():
        if problem.symbols[name][1:2] == ("T",) and quantity.value.size:
            rows = _rms(quantity.value, axis=-1, keepdims=True)
            largest = np.zeros_like(rows)
            for own in _sequences(problem.sizes["T"], arrays):
                largest[:, own] = rows[:, own].max(1, keepdims=True, initial=0.0)
            quantity.noise = np.hypot(quantity.noise, SHARED * ROUNDOFF[accumulation(low)] * largest)


def _add_noise_of_passing_states(
    problem: Problem, share: Share, arrays: Mapping[str, Array], gradients: Mapping[str, Quantity], d_state: Array | None
) -> None:
    """A token of the delta families gets what is left of the initial state times what is left of the final one's gradient, each
    as far off as the share of it that is left, though next to nothing may be left of either; and so does its gate.
    """
    state = arrays.get("initial_state")
    if "beta" not in arrays or state is None or d_state is None or not state.size or not arrays["v"].size:
        return
    V, keys = problem.sizes["V"], _lengths(problem, arrays["k"])
    strengths = arrays["beta"] if arrays["beta"].ndim == 3 else np.abs(arrays["beta"]).max(-1)
    before = _left_at_tokens(problem, arrays, _rms_of_held(state))
    after = _left_at_tokens(problem, arrays, _rms_of_held(d_state), back=True)
    through = share() * keys * after
    found = {"v": through * strengths, "k": through * strengths * before * np.sqrt(V), "beta": through * keys * before}
    if arrays["beta"].ndim == 3:
        found["beta"] = found["beta"] * np.sqrt(V)
    if "g" in arrays:
        found["g"] = share() * before * after * np.sqrt(V if arrays["g"].ndim == 4 else V * problem.sizes["K"])
    for name, noise in found.items():
        if name in gradients:
            quantity = gradients[name]
            squares = np.square(noise)
            if name == "k":
                squares = squares.reshape(*noise.shape[:2], arrays["k"].shape[2], -1).sum(-1)
            added = np.sqrt(squares.reshape(*squares.shape, *[1] * (quantity.value.ndim - 3)))
            quantity.noise = np.hypot(quantity.noise, added)


def _add_noise_of_sums(
    problem: Problem,
    low: str,
    arrays: Mapping[str, Array],
    gradients: dict[str, Quantity],
    terms_of_quotient: Mapping[str, Array],
) -> None:
    """The gradient of a gate is a sum over later tokens of products with either sign: count each of them. Where ``dq`` and
    ``dk`` are differences of terms themselves, count these: what rounding leaves of the two is not alike, and stays in the sum.
    """
    pairs = {"g": ("q", "k", "a", "b", "initial_state"), "gv": ("v", "initial_state")}
    for gate, names in pairs.items():
        if gate not in gradients:
            continue
        factors = {
            name: np.square(gradients[name].value) + terms_of_quotient.get(name, 0.0) for name in names if name in gradients
        }
        products = [np.square(arrays[name]) * factor for name, factor in factors.items()]
        per_token = sum(product.sum() for product in products) / max(products[0][..., 0].size, 1)
        tokens = problem.sizes["B"] if len(problem.symbols[gate]) == 1 else 1
        reach = min(problem.sizes["T"], 64) if tokens == 1 else problem.sizes["T"] * tokens
        width = problem.sizes["K" if gate == "g" else "V"] if problem.symbols[gate][-1] in ("K", "V") else 1
        noise = _amplitude(problem, low, low) * np.sqrt(per_token * reach / width)
        quantity = gradients[gate]
        quantity.noise = np.sqrt(np.square(quantity.noise) + noise**2)


def _add_noise_of_quotient(problem: Problem, low: str, terms: Mapping[str, Array], gradients: Mapping[str, Quantity]) -> None:
    """Gradients that are differences of two ``terms``: count one of them."""
    for name, term in terms.items():
        noise = _amplitude(problem, low, low) * np.sqrt(term)
        gradients[name].noise = np.hypot(gradients[name].noise, noise)


def _terms_of_quotient(problem: Problem, op: str, arrays: Mapping[str, Array], d_o: Array) -> dict[str, Array]:
    """The gradients of ``n / d`` with respect to queries and keys are differences of two terms. Of one of them, ``∂n / d``, the
    mean square of a row, by the squares of what it is the sum of, which may itself be close to zero.

    For the first token of a sequence without a state, and for ``K = V = 1``, the two are equal, whatever is perturbed.
    """
    options = {**problem.options, "normalize": False, "scale": 1.0}
    parts = {name: x for name, x in arrays.items() if name != "initial_state"}
    state = arrays.get("initial_state")
    values, counts = ({}, {}) if state is None else ({"initial_state": state[..., :-1]}, {"initial_state": state[..., -1:]})
    ones = {name: x for name, x in parts.items() if name != "gv"} | {"v": np.ones_like(parts["v"][..., :1])}
    d = oracle.forward(op, {**ones, **counts}, options)[0]
    squares = {name: _squared(name, x) for name, x in {**parts, **values}.items()}
    pulled = np.square(np.divide(d_o, d, where=d != 0, out=np.zeros_like(d_o)))
    terms = oracle.vjp(op, squares, options, pulled, None)
    return {name: terms[name].mean(-1, keepdims=True) for name in ("q", "k")}


def _add_noise_of_projection(
    problem: Problem,
    low: str,
    arrays: Mapping[str, Array],
    options: Mapping[str, Any],
    d_o: Array,
    gradients: dict[str, Quantity],
) -> None:
    """The gradient of what is normed is a difference, of a vector and of its part along another: count the vector."""
    amplitude = _amplitude(problem, accumulation(low), low)
    for name, term in companions.norm_unprojected(arrays, options, d_o).items():
        noise = amplitude * _rms(term, axis=-1, keepdims=True)
        gradients[name].noise = np.hypot(gradients[name].noise, noise)


def _squared(name: str, x: Array) -> Array:
    """What stands for an array in a sum of the squares of terms: twice the logarithm of a decay, and offsets as they are."""
    if name in ("g", "gv"):
        return 2 * x
    return np.square(x) if x.dtype.kind == "f" else x
