"""Inputs for every family as NumPy arrays, the oracle's answer to them, and the backend's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import linattn
import numpy as np
from linattn import MixedState
from linattn_backends.jax import JaxBackend
from linattn_backends.numpy import forward, vjp

backend = JaxBackend()

VARIANTS = {  # family and what is unusual about it
    "linear_attn": ("linear_attn", ()),
    "simple_gla": ("simple_gla", ()),
    "gla": ("gla", ()),
    "rwkv6": ("rwkv6", ()),
    "delta_rule": ("delta_rule", ()),
    "gated_delta_rule": ("gated_delta_rule", ()),
    "kda": ("kda", ()),
    "dplr": ("dplr", ()),
    "mixed_attn": ("mixed_attn", ()),
    "fixed_decay": ("simple_gla", ("fixed",)),
    "gla_value_gate": ("gla", ("gv", "shared")),
    "kda_vector_beta": ("kda", ("beta_v",)),
    "normalized": ("linear_attn", ("normalize",)),
    "normalized_scalar_gate": ("simple_gla", ("normalize",)),
    "normalized_value_gate": ("gla", ("gv", "normalize")),
    "bidirectional": ("linear_attn", ("everywhere",)),
    "mixed_bias": ("mixed_attn", ("bias",)),
    "mixed_bidirectional": ("mixed_attn", ("bias", "everywhere")),
}
GATES = ("zero", "weak", "ordinary", "harsh")
GATED = ("simple_gla", "gla", "rwkv6", "gated_delta_rule", "kda", "dplr", "gla_value_gate", "kda_vector_beta")
DELTA = ("delta_rule", "gated_delta_rule", "kda")


def gate(rng, kind, *shape):
    """Log decays. ``harsh`` mixes weak gates with ``-1e4`` and hard resets."""
    g = -np.logaddexp(0, rng.standard_normal(shape))
    if kind == "zero":
        return np.zeros(shape)
    if kind in ("weak", "harsh"):
        g = g / 32
    if kind == "harsh":
        which = rng.random(shape)
        g = np.where(which < 0.08, -1e4, np.where(which > 0.92, -np.inf, g))
    return g


def draw(variant, T=70, *, B=2, H=2, HV=4, K=5, V=7, kind="ordinary", lengths=None, state=True, seed=0):
    """``(family, arrays, options)`` in float64; ``lengths`` packs sequences, ``T`` is then their sum."""
    family, flags = VARIANTS[variant]
    rng = np.random.default_rng([seed, *variant.encode()])
    N = B
    if lengths is not None:
        B, T, N = 1, sum(lengths), len(lengths)
    make = _mixed if family == "mixed_attn" else _matrix
    arrays, options = make(rng, family, flags, B, T, N, H, HV, K, V, kind, state)
    if lengths is not None:
        arrays["cu_seqlens"] = np.cumsum([0, *lengths], dtype=np.int32)
    return family, arrays, options


def _matrix(rng, family, flags, B, T, N, H, HV, K, V, kind, state):
    normal = rng.standard_normal
    arrays: dict[str, Any] = {"q": normal((B, T, H, K)), "k": normal((B, T, H, K)), "v": normal((B, T, HV, V))}
    if family in DELTA:
        arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    scalar = (HV,) if "fixed" in flags else (B, T, HV)
    shapes = {"simple_gla": scalar, "gated_delta_rule": scalar, "gla": (B, T, H if "shared" in flags else HV, K)}
    shapes |= dict.fromkeys(("rwkv6", "kda", "dplr"), (B, T, HV, K))
    if family in shapes:
        arrays["g"] = gate(rng, kind, *shapes[family])
    if "gv" in flags:
        arrays["gv"] = gate(rng, kind, B, T, HV, V)
    if family == "rwkv6":
        arrays["u"] = normal((HV, K))
    if family in DELTA:
        arrays["beta"] = 2 / (1 + np.exp(-normal((B, T, HV, V) if "beta_v" in flags else (B, T, HV))))
    if family == "dplr":
        direction = normal((B, T, HV, K))
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
        arrays |= {"a": -direction, "b": direction * rng.random((B, T, HV, 1))}
    options: dict[str, Any] = {"output_final_state": "everywhere" not in flags}
    if "normalize" in flags:
        options["normalize"] = True
        arrays |= {"q": abs(arrays["q"]) + 0.1, "k": abs(arrays["k"]) + 0.1}
    if "everywhere" in flags:
        options["causal"] = False
    elif state:
        arrays["initial_state"] = abs(normal((N, HV, K, V + ("normalize" in flags))))
    return arrays, options


def _mixed(rng, family, flags, B, T, N, H, HV, K, V, kind, state, C=16, L=4):
    normal = rng.standard_normal
    widths = {"q_quad": K, "k_quad": K, "q_lin": L, "k_lin": L, "v": V}
    arrays: dict[str, Any] = {name: normal((B, T, H, W)) for name, W in widths.items()}
    options = {"chunk_size": C, "quad_scale": 0.3, "lin_scale": 0.2, "causal": "everywhere" not in flags}
    options["output_final_state"] = options["causal"]
    if "bias" in flags:
        arrays["bias"] = normal((H, C, C))
    if state and options["causal"]:
        length = (np.arange(N) * 5 % C).astype(np.int32)
        held = (np.arange(C) < length[:, None])[..., None, None]
        arrays["initial_state"] = MixedState(normal((N, H, L, V)), *(normal((N, C, H, W)) * held for W in (K, L, V)), length)
    return arrays, options


def convert(tree, dtype):
    """NumPy arrays as JAX arrays, floats in ``dtype``."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype if x.dtype.kind == "f" else x.dtype), tree)


def forms(variant):
    return ("chunk", "parallel") if "everywhere" in VARIANTS[variant][1] else ("recurrent", "chunk", "parallel")


def split(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Float arrays, and the others; a ``MixedState`` goes to the floats, its ``length`` to the others."""
    floats, others = {}, {}
    for name, x in arrays.items():
        if isinstance(x, MixedState):
            floats[name], others[name] = tuple(x[:4]), x.length
        elif jnp.issubdtype(x.dtype, jnp.floating):
            floats[name] = x
        else:
            others[name] = x
    return floats, others


def merge(floats, others):
    arrays = {**others, **floats}
    if isinstance(arrays.get("initial_state"), tuple):
        arrays["initial_state"] = MixedState(*floats["initial_state"], others["initial_state"])
    return arrays


def float_outputs(result):
    """``o``, and the float arrays of the state."""
    o, state = result
    return {"o": o} if state is None else {"o": o, "final_state": tuple(state[:4]) if isinstance(state, tuple) else state}


_compiled: dict[Any, Any] = {}


def method(form, family, options, backend=backend):
    """The backend's method, or what is on the way to it: it applies the normaliser."""
    if options.get("normalize"):
        return partial(getattr(linattn, f"{form}_{family}"), backend=backend.name)
    return getattr(backend, f"{form}_{family}")


def outputs_and_gradients(form, family, options, backend=backend):
    """A jitted function of ``(floats, others, weights)``; one for each call that differs in static facts."""
    key = backend.name, form, family, tuple(sorted(options.items()))

    def run(floats, others, weights):
        def outputs(floats):
            return float_outputs(method(form, family, options, backend)(**merge(floats, others), **options))

        found, pull = jax.vjp(outputs, floats)
        return found, pull(jax.tree.map(lambda w, x: w.astype(x.dtype), weights, found))[0]

    return _compiled.setdefault(key, jax.jit(run))


def truth(family, arrays, options, seed=1):
    """The oracle's outputs, random gradients for them, and the oracle's gradients of the float inputs."""
    rng = np.random.default_rng(seed)
    expected = float_outputs(forward(family, arrays, options))
    weights = jax.tree.map(lambda x: rng.standard_normal(x.shape), expected)
    d_state = weights.get("final_state")
    if isinstance(d_state, tuple):
        d_state = MixedState(*d_state, None)
    grads = vjp(family, arrays, options, weights["o"], d_state)
    grads = {name: tuple(x[:4]) if isinstance(x, tuple) else x for name, x in grads.items()}
    return expected, weights, grads


def error(found, expected):
    """Largest difference of any array relative to its largest value; NaN counts as infinite."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape
        if y.size:
            x = np.asarray(x, np.float64)
            worst = max(worst, float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-3))) if np.isfinite(x).all() else np.inf
    return worst


def compare(form, variant, bound, dtype=jnp.float64, backend=backend, **how):
    """The backend against the oracle, forward and backward; returns what it gave."""
    family, arrays, options = draw(variant, **how)
    given = convert(arrays, dtype)
    rounded = jax.tree.map(lambda x: np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype), given)
    expected, weights, grads = truth(family, rounded, options)
    floats, others = split(given)
    found, dfound = outputs_and_gradients(form, family, options, backend)(floats, others, weights)
    assert found["o"].dtype == given["v"].dtype
    assert error(found, expected) < bound, (form, "outputs", error(found, expected))
    assert dfound.keys() == grads.keys()
    for name, x in dfound.items():
        assert jax.tree.leaves(x)[0].dtype == jax.tree.leaves(given[name])[0].dtype, name
        assert error(x, grads[name]) < bound, (form, name, error(x, grads[name]))
    return found, dfound
