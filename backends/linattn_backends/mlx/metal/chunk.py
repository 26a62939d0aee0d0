"""The chunk form, by ``chunk.metal``: eight tokens at a time."""

from __future__ import annotations

from math import ceil

import mlx.core as mx

from .launch import THREADS, launch
from .recurrent import Arrays, Problem

__all__ = ["fits", "forward"]

WIDEST = 256  # keys: an eighth as many 8 × 8 matrices of the state are in registers, and rows of them in threadgroup memory
TOKENS = 8  # a chunk


def fits(arrays: Arrays) -> bool:
    """True for gates and betas that are the same in every column of the state, and more tokens than one chunk has."""
    by_column = "beta" in arrays and arrays["beta"].ndim == 4
    other = not arrays.keys().isdisjoint(("gv", "u", "a"))
    _, T, _, K = arrays["k"].shape
    return not by_column and not other and K <= WIDEST and T > TOKENS


def forward(arrays: Arrays, scale: float) -> Arrays:
    """``o [B, T, HV, V]`` and ``final [N, HV, K, V]``, float32: as :func:`.recurrent.forward`."""
    p = Problem(arrays, scale)
    v = arrays["v"]
    inputs = p.inputs()
    del inputs["segment_tokens"]
    if "initial_state" in arrays:
        inputs["initial_state"] = arrays["initial_state"]
    simdgroups = ceil(p.V / 8)
    groups = min(simdgroups, 8)
    constants = p.constants()
    del constants["LANES"]
    found = launch(
        "chunk", p.defines("initial_state"), inputs,
        {"o": (v.shape, v.dtype), "final_state": (p.state, mx.float32)},
        {**constants, "GROUPS": groups, "O": v.dtype},
        (THREADS, groups * ceil(simdgroups / groups), p.N * p.HV), (THREADS, groups, 1),
    )  # fmt: skip
    return {"o": found["o"], "final": found["final_state"]}
