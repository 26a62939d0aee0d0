"""The recurrence and its gradients, by ``recurrent.metal`` and ``backward.metal``."""

from __future__ import annotations

from math import isqrt
from typing import Any

import mlx.core as mx

from .launch import THREADS, launch

__all__ = ["WIDEST", "backward", "forward"]

Arrays = dict[str, mx.array]

KEYS_A_LANE = 32
WIDEST = KEYS_A_LANE * THREADS  # keys that the lanes of one simdgroup hold
SHARED_FLOATS = 8192  # threadgroup memory: 32 KiB


class Problem:
    """What a call's kernels are made for: the sizes, and which arrays there are."""

    def __init__(self, arrays: Arrays, scale: float):
        self.arrays = arrays
        q, v = arrays["q"], arrays["v"]
        self.B, self.T, self.H, self.K = q.shape
        self.HV, self.V = v.shape[2:]
        self.packed = "cu_seqlens" in arrays
        self.N = arrays["cu_seqlens"].shape[0] - 1 if self.packed else self.B
        self.tokens = self.B * self.T
        self.scale = scale
        self.lanes = next(lanes for lanes in (4, 8, 16, 32) if lanes * KEYS_A_LANE >= self.K)
        self.rows = THREADS // self.lanes
        self.keys = -(-self.K // self.lanes)  # a lane
        self.simdgroups = -(-self.V // self.rows)
        self.segment = 1 << max(4, min(isqrt(max(self.T, 1)).bit_length(), 8))
        self.checkpoints = (self.tokens // self.segment + self.N, self.HV, self.simdgroups, self.keys, THREADS)
        self.state = (self.N, self.HV, self.K, self.V)

    @property
    def gate(self) -> int:
        """0 without one, 1 for a number a head, 2 for a number a key channel."""
        return self.arrays["g"].ndim - 2 if "g" in self.arrays else 0

    @property
    def beta(self) -> int:
        """0 without one, 1 for a number a head, 2 for a number a value channel."""
        return self.arrays["beta"].ndim - 2 if "beta" in self.arrays else 0

    def defines(self, *others: str) -> list[str]:
        present = [f"HAS_{name.upper()}" for name in ("gv", "u", "a", "cu_seqlens", *others) if name in self.arrays]
        return [f"GATE {self.gate}", f"BETA {self.beta}", *present]

    def inputs(self) -> dict[str, Any]:
        """The arrays by name, and the numbers that change from call to call."""
        names = ("q", "k", "v", "g", "gv", "beta", "u", "a", "b", "cu_seqlens")
        given = {name: self.arrays[name] for name in names if name in self.arrays}
        return {**given, "T": self.T, "segment_tokens": self.segment, "scale": self.scale}

    def constants(self) -> dict[str, Any]:
        gate_heads = self.arrays["g"].shape[2] if "g" in self.arrays else 1
        return {"K": self.K, "V": self.V, "H": self.H, "HV": self.HV, "GATE_HEADS": gate_heads, "LANES": self.lanes}


def forward(arrays: Arrays, scale: float, checkpoints: bool = False) -> Arrays:
    """``o [B, T, HV, V]`` and ``final [N, HV, K, V]``, float32.

    Args:
        arrays: ``q``, ``k``, ``v`` and what else there is, ``initial_state`` and ``cu_seqlens`` too, by name.
        scale: Multiplies the output.
        checkpoints: Return the states that :func:`backward` starts from as well.
    """
    p = Problem(arrays, scale)
    v = arrays["v"]
    outputs = {"o": (v.shape, v.dtype), "final_state": (p.state, mx.float32)}
    inputs = p.inputs()
    if "initial_state" in arrays:
        inputs["initial_state"] = arrays["initial_state"]
    defines = p.defines("initial_state")
    if checkpoints:
        defines.append("HAS_CHECKPOINTS")
        outputs["scratch_checkpoints"] = (p.checkpoints, mx.float32)
    together = min(p.simdgroups, 4)
    found = launch(
        "recurrent", defines, inputs, outputs, {**p.constants(), "O": v.dtype},
        (THREADS, p.simdgroups, p.N * p.HV), (THREADS, together, 1),
    )  # fmt: skip
    kept = {"checkpoints": found["scratch_checkpoints"]} if checkpoints else {}
    return {"o": found["o"], "final": found["final_state"], **kept}


def backward(arrays: Arrays, d_o: mx.array, d_final: mx.array | None, scale: float) -> Arrays:
    """The gradient of every float array, in its shape and dtype.

    Runs the recurrence forward once more for the states that segments start from, so that nothing but the inputs is kept
    between a forward and a backward pass: ``√T`` states while it runs.
    """
    p = Problem(arrays, scale)
    v = arrays["v"]
    sums = 5 if "a" in arrays else 3 if p.gate == 2 else 2
    size = -(-p.keys // p.rows) * p.rows
    width = sums * size * p.lanes + 2
    groups = max(1, min(p.simdgroups, 8, SHARED_FLOATS // width))
    blocks = -(-p.simdgroups // groups)
    by_key = ((blocks, p.B, p.T, p.HV, p.K), mx.float32)
    by_head = ((blocks, p.B, p.T, p.HV), mx.float32)
    outputs = {"d_q": by_key, "d_k": by_key, "d_v": (v.shape, v.dtype), "d_initial_state": (p.state, mx.float32)}
    constants = {**p.constants(), "GROUPS": groups, "SUMS": sums, "O": v.dtype}
    if p.gate:
        outputs["d_g"] = by_head if p.gate == 1 else by_key
    if p.beta:
        outputs["d_beta"] = by_head if p.beta == 1 else (v.shape, arrays["beta"].dtype)
        constants["DBETA"] = arrays["beta"].dtype
    if "gv" in arrays:
        outputs["d_gv"] = (v.shape, arrays["gv"].dtype)
        constants["DGV"] = arrays["gv"].dtype
    if "u" in arrays:
        outputs["d_u"] = ((blocks, p.N, p.HV, p.K), mx.float32)
    if "a" in arrays:
        outputs["d_a"] = outputs["d_b"] = by_key
    outputs["scratch_states"] = ((p.N * p.HV * groups * blocks * p.segment * p.keys * THREADS,), mx.float32)
    inputs = {**p.inputs(), "tokens": p.tokens, "N": p.N, "d_o": d_o}
    inputs["checkpoints"] = forward(arrays, scale, checkpoints=True)["checkpoints"]
    defines = p.defines()
    if d_final is not None:
        inputs["d_final_state"] = d_final
        defines.append("HAS_D_FINAL_STATE")
    found = launch(
        "backward", defines, inputs, outputs, constants,
        (THREADS, groups * blocks, p.N * p.HV), (THREADS, groups, 1),
    )  # fmt: skip
    return {name: gathered(found[f"d_{name}"], x) for name, x in arrays.items() if f"d_{name}" in found}


def gathered(found: mx.array, array: mx.array) -> mx.array:
    """A gradient in the shape and dtype of its array: summed over blocks of columns, and over the heads that share a row."""
    if found.shape != array.shape and array.ndim == 2:  # u: over sequences too
        found = found.sum((0, 1))
    elif found.shape != array.shape:
        found = found.sum(0)
        B, T, heads = array.shape[:3]
        if found.shape[2] != heads:
            found = found.reshape(B, T, heads, -1, *found.shape[3:]).sum(3)
    return found.astype(array.dtype)
