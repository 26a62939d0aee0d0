"""Inputs for every operator that may be spread over ranks, as NumPy arrays: families, and what is unusual about a call."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import linattn
import numpy as np
from linattn import gates
from linattn.plugin import MixedState
from linattn.spec import COMPANIONS, FAMILIES

AFFINE = tuple(name for name in FAMILIES if name != "mixed_attn")
GROUPED = tuple(name for name in AFFINE if name != "ssd")

VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{family: (family, ()) for family in AFFINE},
    "fixed_decay": ("simple_gla", ("fixed",)),
    "shared_gate": ("gla", ("shared",)),
    "value_gate": ("gla", ("gv",)),
    "value_beta": ("kda", ("beta_v",)),
    "value_beta_alone": ("delta_rule", ("beta_v",)),
    "normalized": ("linear_attn", ("normalize",)),
    "normalized_value_gate": ("gla", ("gv", "normalize")),
    "mapped_decay": ("simple_gla", ("gate", "qk_norm")),
    "mapped_delta": ("gated_delta_rule", ("gate", "qk_norm", "beta_map")),
    "mapped_value_beta": ("gated_delta_rule", ("gate", "beta_map", "beta_v")),
    "mapped_keys": ("kda", ("gate",)),
    "softplus_steps": ("ssd", ("steps",)),
}

"""Of the families that are affine in their state."""
MIXED = {"mixed": ("mixed_attn", ()), "mixed_biased": ("mixed_attn", ("bias",))}
SPREAD = VARIANTS | MIXED
"""Every kind of call that ranks may share."""


class Case(NamedTuple):
    """One call: the family, its arrays and its options.

    The arrays of the gate object are among the arrays as ``gate.…``, those of a state of several as ``initial_state.…``.
    """

    family: str
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]


def draw(
    variant: str,
    B: int = 2,
    T: int = 24,
    H: int = 2,
    HV: int = 4,
    K: int = 4,
    V: int = 3,
    cu_seqlens: list[int] | None = None,
    resets: bool = True,
    state: bool = True,
) -> Case:
    """Random inputs of a variant; ``resets`` puts ``-inf`` and ``-1e4`` among the log decays, of one batch entry or half."""
    family, flags = SPREAD[variant]
    rng = np.random.default_rng(zlib.crc32(f"{variant} {T} {cu_seqlens}".encode()))
    B = 1 if cu_seqlens is not None else B
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    new = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    if family == "mixed_attn":
        return _mixed(flags, new, rng, (B, N, T, H, K, V), cu_seqlens, state)
    if family == "ssd":
        arrays = dict(x=new(B, T, HV, V), dt=np.abs(new(B, T, HV)), A=-np.exp(new(HV)), B=new(B, T, H, K), C=new(B, T, H, K))
        arrays |= dict(D=new(HV), z=new(B, T, HV, V), dt_bias=0.1 * np.abs(new(HV)))
        options: dict[str, Any] = {
            "dt_softplus": "steps" in flags,
            "dt_limit": (0.01, 3.0) if "steps" in flags else (0.0, np.inf),
        }
    else:
        arrays, options = _operands(family, flags, new, rng, (B, T, H, HV, K, V), resets)
    if state:
        arrays["initial_state"] = new(N, HV, K, V + ("normalize" in flags))
        if "normalize" in flags:
            arrays["initial_state"] = np.abs(arrays["initial_state"])
    if cu_seqlens is not None:
        arrays["cu_seqlens"] = np.array(cu_seqlens)
    return Case(family, arrays, options)


def _mixed(flags, new, rng, sizes, cu_seqlens, state) -> Case:
    B, N, T, H, K, V = sizes
    L, C = K + 1, 5
    arrays = dict(
        q_quad=new(B, T, H, K), k_quad=new(B, T, H, K), q_lin=new(B, T, H, L), k_lin=new(B, T, H, L), v=new(B, T, H, V)
    )
    if "bias" in flags:
        arrays["bias"] = new(H, C, C)
    if state:
        length = rng.integers(0, C, N).astype(np.int32)
        held = (np.arange(C) < length[:, None])[..., None, None]
        kept = dict(kv=new(N, H, L, V), k_quad=held * new(N, C, H, K), k_lin=held * new(N, C, H, L), v=held * new(N, C, H, V))
        arrays |= {f"initial_state.{name}": x for name, x in kept.items()} | {"initial_state.length": length}
    if cu_seqlens is not None:
        arrays["cu_seqlens"] = np.array(cu_seqlens)
    return Case("mixed_attn", arrays, {"chunk_size": C})


def _operands(family, flags, new, rng, sizes, resets) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    B, T, H, HV, K, V = sizes
    arrays: dict[str, np.ndarray] = dict(q=new(B, T, H, K), k=new(B, T, H, K), v=new(B, T, HV, V))
    arrays["k"] /= np.linalg.norm(arrays["k"], axis=-1, keepdims=True)
    options: dict[str, Any] = {}
    names = [arg.name for arg in FAMILIES[family].args]

    def decay(*shape: int) -> np.ndarray:
        g = -0.3 * np.abs(new(*shape))
        if resets and "gate" not in flags:
            g[rng.random(shape) < 0.03] = -np.inf
            g[rng.random(shape) < 0.03] = -1e4
        return g

    if "g" in names:
        head = (
            (B, T, H, K) if "shared" in flags else (B, T, HV) if family in ("simple_gla", "gated_delta_rule") else (B, T, HV, K)
        )
        arrays["g"] = -np.abs(new(HV)) if "fixed" in flags else new(*head) if "gate" in flags else decay(*head)
    if "gv" in flags:
        arrays["gv"] = decay(B, T, HV, V)
    if "beta" in names:
        beta = new(B, T, HV, V) if "beta_v" in flags else new(B, T, HV)
        arrays["beta"] = beta if "beta_map" in flags else 1 / (1 + np.exp(-beta))
    if "u" in names:
        arrays["u"] = new(HV, K)
    if "a" in names:
        unit = arrays["k"].repeat(HV // H, axis=2)
        arrays["a"], arrays["b"] = -unit, 0.4 * unit
    if "gate" in flags:
        arrays["gate.A_log"] = 0.3 * new(HV)
        arrays["gate.dt_bias"] = new(*arrays["g"].shape[2:])
    if "qk_norm" in flags:
        options["qk_norm"] = "l2"
    if "beta_map" in flags:
        options["beta_map"] = "2sigmoid"
    if "normalize" in flags:
        options["normalize"] = True
        arrays["q"], arrays["k"] = np.abs(arrays["q"]) + 0.1, np.abs(arrays["k"]) + 0.1
    return arrays, options


def arguments(case: Case, arrays: dict[str, Any], operator: Any) -> dict[str, Any]:
    """The keywords of a call of ``operator``: of ``arrays`` those that it takes, with the gate and the state as objects."""
    spec = operator.spec
    taken = {name: x for name, x in arrays.items() if name in spec.parameters}
    if "gate.A_log" in arrays:
        taken["gate"] = gates.Softplus(arrays["gate.A_log"], arrays["gate.dt_bias"])
    if "initial_state.kv" in arrays:
        taken["initial_state"] = MixedState(*(arrays[f"initial_state.{name}"] for name in MixedState._fields))
    return taken | {name: value for name, value in case.options.items() if name in spec.parameters}


def oracle_options(case: Case) -> dict[str, Any]:
    """The options as the oracle takes them."""
    if "gate.A_log" not in case.arrays:
        return case.options
    return case.options | {"gate": gates.Softplus(case.arrays["gate.A_log"], case.arrays["gate.dt_bias"]).kind}


def parts(state: Any) -> list[Any]:
    """The arrays of a state: none, one, or several."""
    return [] if state is None else list(state) if isinstance(state, tuple) else [state]


def operator(name: str) -> Any:
    """A public operator by name."""
    return getattr(linattn, name)


__all__ = ["AFFINE", "COMPANIONS", "SPREAD", "VARIANTS", "Case", "arguments", "draw", "operator", "oracle_options", "parts"]
