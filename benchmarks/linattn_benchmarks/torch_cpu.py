"""The torch backend on the CPU against plain ``torch.bmm`` of as many FLOPs: time, peak memory, and how both grow with T.

Reference per token and head, ``C = 64``: forward ``4KV + 2C(K + V)``, backward ``10KV + 6C(K + V)``, as the matmuls of the
chunk form on ``[tokens / C]`` batches of ``C × K × V``. Timed runs of the operator and the reference alternate, so that both
see the same machine. Peak memory is the growth of the resident set of a fresh process during the call.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

C = 64
SHAPE = {"B": 1, "H": 4, "K": 128, "V": 128}
FAMILIES = ("linear_attn", "simple_gla", "gla", "gla_strong", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
REPEATS = 7


def inputs(family: str, T: int, grad: bool) -> list[Tensor]:
    """Arrays of one call. Gates are GLA's ``logsigmoid(x) / 16``; of ``gla_strong`` and scalar gates, ``logsigmoid(x)``."""
    B, H, K, V = SHAPE.values()
    torch.manual_seed(0)
    x = [torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V)]
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        x[1] = normalize(x[1], dim=-1)
    if family in ("simple_gla", "gated_delta_rule"):
        x.append(logsigmoid(torch.randn(B, T, H)))
    if family in ("gla", "gla_strong", "rwkv6", "kda", "dplr"):
        x.append(logsigmoid(torch.randn(B, T, H, K)).div_(1 if family == "gla_strong" else 16))
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        x.append(torch.rand(B, T, H))
    if family == "rwkv6":
        x.append(torch.randn(H, K))
    if family == "dplr":
        direction = normalize(torch.randn(B, T, H, K), dim=-1)
        x += [-direction, direction * torch.rand(B, T, H, 1)]
    return [y.requires_grad_() for y in x] if grad else x


def operator(family: str) -> Callable[..., Any]:
    from linattn_backends.torch import TorchBackend

    return getattr(TorchBackend(), f"chunk_{family.removesuffix('_strong')}")


def call(family: str, T: int, backward: bool) -> Callable[[], Any]:
    x, method = inputs(family, T, backward), operator(family)
    if not backward:
        return lambda: method(*x)
    do = torch.randn(x[2].shape)
    return lambda: (lambda o: (o, torch.autograd.grad(o, x, do)))(method(*x)[0])


def bmm(T: int, backward: bool) -> Callable[[], None]:
    """As many FLOPs as the chunk form needs, as plain batched matmuls."""
    B, H, K, V = SHAPE.values()
    M = B * H * T // C
    k, S, v, A = torch.randn(M, C, K), torch.randn(M, K, V), torch.randn(M, C, V), torch.randn(M, C, C)
    states, scores = (2, 1) if not backward else (7, 4)

    def reference() -> None:
        for _ in range(states):
            torch.bmm(k, S)
        for _ in range(scores):
            torch.bmm(k, k.mT)
            torch.bmm(A, v)

    return reference


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def timed(family: str, T: int, backward: bool) -> dict[str, Any]:
    function, reference = call(family, T, backward), bmm(T, backward)
    function(), reference()
    pairs = [(seconds(function), seconds(reference)) for _ in range(REPEATS)]
    own, others = zip(*pairs, strict=True)
    return {
        "family": family,
        "T": T,
        "backward": backward,
        "median_s": statistics.median(own),
        "spread_s": [min(own), max(own)],
        "bmm_median_s": statistics.median(others),
        "bmm_spread_s": [min(others), max(others)],
        "ratio": statistics.median(a / b for a, b in pairs),
        "ratio_of_minima": min(own) / min(others),
    }


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def measure_memory(family: str, T: int, backward: bool) -> dict[str, Any]:
    """In this process: growth of the resident set during the call, next to the bytes of inputs and outputs."""
    call(family, 128, backward)()  # libraries and thread pools
    function = call(family, T, backward)
    tensors = inputs(family, 128, False)
    given = sum(x.numel() * x.element_size() for x in tensors) * T // 128
    written = T * SHAPE["B"] * SHAPE["H"] * SHAPE["V"] * 4
    before = peak = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    result = function()
    done.set()
    thread.join()
    peak = max(peak, resident())
    del result
    own = given + written + (given if backward else 0)
    held = given + (written if backward else 0)  # inputs, and the output's gradient, are there before the call
    return {
        "family": family,
        "T": T,
        "backward": backward,
        "inputs_outputs_bytes": own,
        "growth_bytes": peak - before,
        "peak_over_inputs_outputs": (peak - before + held) / own,
    }


def memory(family: str, T: int, backward: bool) -> dict[str, Any]:
    """:func:`measure_memory` in a fresh process."""
    code = f"import json; from {__name__} import measure_memory as m; print(json.dumps(m({family!r}, {T}, {backward})))"
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(answer.stdout)


def decode() -> dict[str, Any]:
    """One token of ``recurrent_gla`` from a state."""
    from linattn_backends.torch import TorchBackend

    x, method = inputs("gla", 1, False), TorchBackend().recurrent_gla
    state = torch.zeros(SHAPE["B"], SHAPE["H"], SHAPE["K"], SHAPE["V"])
    runs = [seconds(lambda: method(*x, initial_state=state, output_final_state=True)) for _ in range(300)]
    return {"median_s": statistics.median(runs), "spread_s": [min(runs), max(runs)]}


def run(quick: bool = False) -> dict[str, Any]:
    """Measure everything."""
    families = ("gla", "gla_strong", "simple_gla", "kda") if quick else FAMILIES
    lengths = (2048, 8192, 65536) if quick else (2048, 8192, 16384, 65536)
    result = {
        "shape": SHAPE,
        "chunk": C,
        "dtype": "float32",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "load_before": os.getloadavg(),
        "times": [timed(family, 8192, backward) for family in families for backward in (False, True)],
        "memory": [memory("gla", T, backward) for T in lengths for backward in (False, True)],
        "growth": [timed("gla", T, False) for T in lengths if T != 8192],
        "decode": decode(),
    }
    result["load_after"] = os.getloadavg()
    return result
