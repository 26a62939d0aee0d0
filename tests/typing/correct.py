"""Calls that are right. Both checkers must accept every line, and infer these types."""

from collections.abc import Callable
from typing import Any, assert_type

import linattn
import numpy as np
from linattn import Plan, Unsupported
from linattn.feature_maps import Exp
from linattn.plugin import Backend, Call
from numpy.typing import NDArray

Array = NDArray[np.float32]


def operators(q: Array, k: Array, v: Array, g: Array, u: Array) -> None:
    o, state = linattn.gla(q, k, v, g)
    assert_type(o, Array)
    assert_type(state, Array | None)
    assert_type(linattn.chunk_gla(q, k, v, g, g, scale=1.0, backend=["numpy", "auto"]), tuple[Array, Array | None])
    assert_type(linattn.recurrent_rwkv6(q, k, v, g=g, u=u, initial_state=state), tuple[Array, Array | None])
    assert_type(linattn.parallel_linear_attn(q, k, v, causal=False, feature_map=Exp(t=2.0)), tuple[Array, Array | None])
    o, mixed = linattn.mixed_attn(q, k, q, k, v, chunk_size=128, output_final_state=True)
    assert_type(mixed, linattn.MixedState[Array] | None)


def choosing(q: Array) -> None:
    assert_type(linattn.explain("gla", q, q, q, q), Plan)
    assert_type(linattn.explain(linattn.chunk_gla, q, q, q, q).backend, str | None)
    with linattn.use_backend(("numpy", "auto")):
        pass


def gates(x: Array) -> None:
    assert_type(linattn.gates.gla(x), Array)
    assert_type(linattn.gates.hgrn2(x, 0.5), tuple[Array, Array])


class Mine(Backend):
    name = "mine"
    api = ">=1,<2"
    frameworks = ("numpy",)

    def supports(self, call: Call) -> Unsupported | None:
        return Unsupported("too wide") if call.K > 64 else None


linattn.register_backend(Mine)
linattn.register_backend(Mine(), replace=True)
same_shape: Callable[..., Any] = linattn.chunk_kda
