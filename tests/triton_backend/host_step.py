"""What a compiled token of a hybrid model costs the host, where there is no GPU: ``… [MODEL…] [--layers LAYERS]``.

Models of ``linattn bench model``, with layers so narrow that their products take no time to speak of, compiled as one graph and
decoding into a cache of one size, on the Triton kernels as :mod:`host_work` launches them. Prints of each, on linattn and on
linattn with fused mixers, processor microseconds of a step in the fastest of many rounds, how many functions of Python it
calls, how many of linattn's nodes, and how many kernels of linattn's it launches.
"""

import argparse
import time
from dataclasses import replace

import host_work
import torch
from linattn_backends.triton.runtime import device, replay
from linattn_benchmarks import clocks, models
from linattn_benchmarks.beside import Job

NARROW = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1, "num_experts_per_token": 1, "n_routed_experts": 2,
}  # fmt: skip
MIXERS = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16},
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 32},
    "olmo_hybrid": {"linear_num_key_heads": 2, "linear_num_value_heads": 2},
}


def step_of(name, library, layers):
    """A compiled step, and what to be in while it is made and called."""
    models.MODELS[name] = replace(models.MODELS[name], small=NARROW | MIXERS[name])
    job = Job("model", name, library, 1, 8, "cpu", "float32", 0, ("decode",), ("compiled",), small=True, layers=layers)
    prepared = models.prepared(job)
    with prepared.timed():
        step = prepared.calls["decode"](lambda model: torch.compile(model, fullgraph=True, dynamic=False))
        for _ in range(2 * replay.OFTEN):
            step()
    return step, prepared.timed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help=f"of {', '.join(MIXERS)}; default: all")
    parser.add_argument("--layers", type=int, default=4, help="the last one is of softmax attention")
    parser.add_argument("--seconds", type=float, default=3.0, help="for one figure")
    asked = parser.parse_args()
    host_work.stand_in()
    properties = device.Properties(132, True, None)
    device.measured = lambda where: properties
    for name in asked.model or MIXERS:
        for library in (models.OURS, models.FUSED):
            step, inside = step_of(name, library, asked.layers)
            with inside():
                us = min(clocks.queueing_times(step, lambda result: None, asked.seconds, time.process_time)) * 1e3
                (called, kernels), done = host_work.functions(step), host_work.operations(step)
            nodes = sum(count for operation, count in done.items() if operation.startswith("linattn::"))
            print(
                f"{name:12} {library:15} {us:7.1f} µs {called.total():4} functions {nodes:3} nodes {kernels:3} kernels",
                flush=True,
            )


if __name__ == "__main__":
    main()
