"""Calls that are wrong. Both checkers must report the lines that end in ``# wrong``, and no others."""

import linattn
import numpy as np
from linattn.feature_maps import Exp
from linattn.plugin import Backend, Call
from numpy.typing import NDArray

Array = NDArray[np.float32]


def operators(q: Array, k: Array, v: Array, g: Array) -> None:
    linattn.gla(q, k, v)  # wrong
    linattn.gla(q, k, v, g, scales=1.0)  # wrong
    linattn.gla(q, k, v, g, None, 1.0)  # wrong
    linattn.gla(q, k, v, g, scale="1")  # wrong
    linattn.chunk_gla(q, k, v, g, output_final_state=1.5)  # wrong
    linattn.recurrent_delta_rule(q, k, v, beta=g, causal=False)  # wrong
    linattn.parallel_kda(q, k, v, g, g, chunk_size="auto")  # wrong
    linattn.mixed_attn(q, k, q, k, v, chunk_size=None)  # wrong
    linattn.linear_attn(q, k, v, feature_map=Exp)  # wrong
    linattn.linear_attn(q, k, v, backend=3)  # wrong
    linattn.chunk_glaa(q, k, v, g)  # wrong


def choosing(q: Array) -> None:
    linattn.use_backend(1)  # wrong
    linattn.explain(3, q)  # wrong
    linattn.register_backend("mine")  # wrong
    linattn.gates.retnet("4")  # wrong


class Mine(Backend):
    frameworks = "numpy"  # wrong

    def supports(self, call: Call) -> bool:  # wrong
        return True
