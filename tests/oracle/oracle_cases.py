"""Random inputs for any family, and the list of calls that the gradient and splitting tests go through."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from linattn import MixedState

DELTA = ("delta_rule", "gated_delta_rule", "kda")
SCALAR_GATE = ("simple_gla", "gated_delta_rule")
VECTOR_GATE = ("gla", "rwkv6", "kda", "dplr")
MATRIX = ("linear_attn", *SCALAR_GATE, *VECTOR_GATE, "delta_rule")
FAMILIES = (*MATRIX, "mixed_attn")


class Case(NamedTuple):
    """One call; ``str()`` of it is the test's id, and with the seed enough to repeat it."""

    op: str
    options: Mapping[str, Any] = MappingProxyType({})
    H: int = 2
    group: int = 1
    gate: str = "head"
    beta: str = "head"
    gv: bool = False
    bias: bool = False
    state: bool = True
    lengths: tuple[int, ...] | None = None
    T: int = 7

    def __str__(self):
        changed = {name: value for name, value in self._asdict().items() if value != DEFAULTS.get(name, self.op)}
        return "-".join([self.op, *(f"{name}={value}" for name, value in changed.items())]).replace("'", "").replace(" ", "")


DEFAULTS = Case._field_defaults

GRADIENTS = [
    *(Case(op) for op in MATRIX),
    *(Case(op, H=1, group=3) for op in MATRIX),
    *(Case(op, group=2, lengths=(3, 0, 4)) for op in MATRIX),
    *(Case(op, state=False, options={"scale": 0.7}) for op in MATRIX),
    *(Case(op, beta="channel", group=2) for op in DELTA),
    Case("simple_gla", gate="fixed"),
    Case("simple_gla", gate="fixed", group=2, lengths=(3, 0, 4)),
    Case("gla", gate="key", group=2),
    Case("gla", gate="key", group=2, gv=True, lengths=(2, 5)),
    Case("gla", gv=True),
    Case("linear_attn", {"normalize": True}),
    Case("linear_attn", {"normalize": True}, group=2, lengths=(3, 0, 4)),
    Case("simple_gla", {"normalize": True}, group=2, lengths=(3, 0, 4)),
    Case("simple_gla", {"normalize": True}, gate="fixed"),
    Case("gla", {"normalize": True}, gv=True),
    Case("gla", {"normalize": True}, gate="key", group=2, gv=True, lengths=(2, 5)),
    Case("linear_attn", {"causal": False}, state=False),
    Case("linear_attn", {"causal": False}, state=False, group=2, lengths=(3, 0, 4)),
    Case("linear_attn", {"causal": False, "normalize": True}, state=False, group=2, lengths=(3, 0, 4)),
    *(Case("linear_attn", T=T) for T in (1, 64, 65, 130)),  # around the pieces of the walk backward
    *(Case("mixed_attn", bias=bias) for bias in (False, True)),
    *(Case("mixed_attn", bias=bias, lengths=(4, 0, 1, 9)) for bias in (False, True)),
    Case("mixed_attn", {"quad_scale": 0.6, "lin_scale": -0.4}, state=False, bias=True),
    *(Case("mixed_attn", {"causal": False}, state=False, bias=bias) for bias in (False, True)),
    Case("mixed_attn", {"causal": False}, state=False, lengths=(4, 0, 1, 9)),
    Case("mixed_attn", {"chunk_size": 16}, bias=True, state=False),  # C ≥ T
]


def draw(case, rng):
    """``(arrays, options)`` of a call."""
    T = sum(case.lengths) if case.lengths else case.T
    B = 1 if case.lengths else 2
    N = len(case.lengths) if case.lengths else B
    make = draw_mixed if case.op == "mixed_attn" else draw_matrix
    arrays, options = make(case, rng, B, T, N)
    if case.lengths:
        arrays["cu_seqlens"] = np.cumsum((0, *case.lengths), dtype=np.int32)
    return arrays, {"output_final_state": options.get("causal", True), **options}


def draw_matrix(case, rng, B, T, N):
    op, H, HV, K, V = case.op, case.H, case.H * case.group, 2, 3
    gates = {"head": (B, T, HV), "fixed": (HV,), "key": (B, T, H)}[case.gate]
    normal = rng.standard_normal
    arrays = {"q": normal((B, T, H, K)), "k": normal((B, T, H, K)), "v": normal((B, T, HV, V))}
    if op in SCALAR_GATE:
        arrays["g"] = -rng.random(gates)
    if op in VECTOR_GATE:
        arrays["g"] = -rng.random((*gates, K))
    if case.gv:
        arrays["gv"] = -rng.random((B, T, HV, V))
    if op == "rwkv6":
        arrays["u"] = normal((HV, K))
    if op == "dplr":
        arrays |= {"a": normal((B, T, HV, K)) / 2, "b": normal((B, T, HV, K)) / 2}
    if op in DELTA:
        arrays["beta"] = rng.random((B, T, HV) if case.beta == "head" else (B, T, HV, V))
    if case.options.get("normalize"):  # positive, to keep the denominator away from zero
        arrays |= {"q": rng.random((B, T, H, K)) + 0.1, "k": rng.random((B, T, H, K)) + 0.1}
    if case.state:
        arrays["initial_state"] = rng.random((N, HV, K, V + bool(case.options.get("normalize"))))
    return arrays, case.options


def draw_mixed(case, rng, B, T, N):
    H, K, L, V, C = case.H, 2, 4, 3, case.options.get("chunk_size", 3)
    widths = {"q_quad": K, "k_quad": K, "q_lin": L, "k_lin": L, "v": V}
    arrays = {name: rng.standard_normal((B, T, H, width)) for name, width in widths.items()}
    if case.bias:
        arrays["bias"] = rng.standard_normal((H, C, C))
    if case.state:
        length = np.arange(N, dtype=np.int32)[::-1] % C  # each sequence elsewhere in its chunk
        held = (np.arange(C)[:, None, None] < length[:, None, None, None]) * rng.standard_normal((3, N, C, H, L))
        kv = rng.standard_normal((N, H, L, V))
        arrays["initial_state"] = MixedState(kv, held[0][..., :K], held[1], held[2][..., :V], length)
    return arrays, {"chunk_size": C, "quad_scale": 0.8, "lin_scale": 0.3, **case.options}


def floats(tree):
    """``{name: array}`` of the float arrays in a dictionary of arrays, those of a ``MixedState`` by dotted name."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, MixedState):
            flat |= floats({f"{name}.{field}": array for field, array in value._asdict().items()})
        elif value is not None and np.asarray(value).dtype.kind not in "iu":
            flat[name] = np.asarray(value)
    return flat


def replaced(arrays, name, value):
    """``arrays`` with the one of that (dotted) name replaced."""
    name, _, field = name.partition(".")
    return {**arrays, name: arrays[name]._replace(**{field: value}) if field else value}
