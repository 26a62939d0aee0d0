"""Analytic gradients of input maps, ``ssd`` and the companions against central finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from linattn.gate_maps import GateKind
from linattn_backends.numpy import forward, vjp

B, T, H, HV, K, V, D, W = 2, 6, 2, 4, 3, 5, 6, 4
OFFSETS = np.array([0, 2, 2, 5])
STEP = 1e-6

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "kda": dict(q=(B, T, H, K), k=(B, T, H, K), v=(B, T, HV, V), g=(B, T, HV, K), beta=(B, T, HV), initial_state=(B, HV, K, V)),
    "gated_delta_rule": dict(q=(B, T, H, K), k=(B, T, H, K), v=(B, T, HV, V), g=(B, T, HV), beta=(B, T, HV)),
    "gla": dict(q=(B, T, H, K), k=(B, T, H, K), v=(B, T, HV, V), g=(B, T, H, K), gv=(B, T, HV, V)),
    "ssd": dict(
        x=(B, T, HV, V), dt=(B, T, HV), A=(HV,), B=(B, T, H, K), C=(B, T, H, K), D=(HV,), z=(B, T, HV, V), dt_bias=(HV,),
        initial_state=(B, HV, K, V),
    ),
    "short_conv": dict(x=(B, T, D), weight=(D, W), bias=(D,), initial_state=(B, D, W - 1)),
    "gated_rms_norm": dict(x=(B, T, D), z=(B, T, D), weight=(D,)),
}  # fmt: skip

CASES: list[tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = [
    ("kda", dict(qk_norm="l2", beta_map="sigmoid"), {}),
    (
        "kda",
        dict(qk_norm="l2", gate=GateKind("Softplus", ("A_log", "dt_bias"))),
        {"gate.A_log": (HV,), "gate.dt_bias": (HV, K)},
    ),
    ("kda", dict(qk_norm="l2", gate=GateKind("Softplus", ("A_log",))), {"gate.A_log": ()}),
    ("gated_delta_rule", dict(qk_norm="l2", beta_map="2sigmoid", gate=GateKind("LogSigmoid", (), 4.0)), {}),
    ("gla", dict(gate=GateKind("BoundedSigmoid", ("A_log", "dt_bias"), -3.0)), {"gate.A_log": (H,), "gate.dt_bias": (H,)}),
    ("gla", dict(gate=GateKind("NegExp", ("bias",))), {"gate.bias": (H, K)}),
    ("ssd", dict(dt_softplus=True, dt_limit=(0.2, 1.5)), {}),
    ("ssd", dict(dt_softplus=True), {"D": (HV, V)}),
    ("short_conv", dict(activation="silu"), {}),
    ("short_conv", dict(), {}),
    *(
        ("gated_rms_norm", dict(activation=activation, norm_before_gate=first, group_size=size), {})
        for activation in ("silu", "sigmoid")
        for first in (True, False)
        for size in (None, 2)
    ),
]


def packed(shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """The shape in a pack of three sequences."""
    if name == "initial_state":
        return (len(OFFSETS) - 1, *shape[1:])
    return (1, *shape[1:]) if shape[:2] == (B, T) else shape


@pytest.mark.parametrize(("op", "options", "more"), CASES, ids=lambda value: str(value))
@pytest.mark.parametrize("varlen", [False, True])
def test_vjp_is_the_derivative(op, options, more, varlen):
    """In packs too, behind whose last sequence there is a token that belongs to none."""
    rng = np.random.default_rng(5)
    varlen = varlen and op != "gated_rms_norm"
    shapes = {**SHAPES[op], **more}
    shapes = {name: packed(shape, name) if varlen else shape for name, shape in shapes.items()}
    arrays: dict[str, Any] = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if "A" in arrays:
        arrays["A"] = -np.exp(arrays["A"])
    if "gv" in arrays:
        arrays["gv"] = -np.abs(arrays["gv"])
    if "g" in arrays and "gate" not in options:
        arrays["g"] = -np.abs(arrays["g"])
    floats = list(arrays)
    if varlen:
        arrays["cu_seqlens"] = OFFSETS
    options = options if op == "gated_rms_norm" else {**options, "output_final_state": True}
    outputs = forward(op, arrays, options)
    d_o, d_state = (None if x is None else rng.standard_normal(x.shape) for x in outputs)
    found = vjp(op, arrays, options, d_o, d_state)
    assert set(found) == set(floats)

    def paired(given: dict[str, Any]) -> float:
        o, state = forward(op, given, options)
        return np.vdot(o, d_o) + (0.0 if state is None else np.vdot(state, d_state))

    for name in floats:
        assert found[name].shape == shapes[name]
        for _ in range(3):
            direction = rng.standard_normal(shapes[name])
            up, down = (paired({**arrays, name: arrays[name] + sign * STEP * direction}) for sign in (1, -1))
            np.testing.assert_allclose(
                np.vdot(found[name], direction), (up - down) / (2 * STEP), rtol=1e-5, atol=1e-6, err_msg=name
            )
        if varlen and shapes[name][:2] == (1, T):
            assert not found[name][:, OFFSETS[-1] :].any()
