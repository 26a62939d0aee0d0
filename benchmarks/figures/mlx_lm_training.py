"""What a training step of a layer of mlx-lm's takes, by itself and on linattn: ``python -m figures.mlx_lm_training``.

The recurrent layer of Qwen3-Next, 2,048 wide, 16 query and 32 value heads of 128, B1, float32: outputs, and the gradients of
all parameters. ``peak`` is what MLX had allocated at most beyond parameters and inputs. mlx-lm keeps states of every token, so
that its memory grows with them: what would not fit in ``--memory`` is not run, and ``needs`` is its peak by the row before. Run
on the CPU; needs mlx-lm.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from linattn.integrations import mlx_lm as integration
from linattn_benchmarks.environment import write
from mlx_lm.models.qwen3_next import ModelArgs, Qwen3NextGatedDeltaNet

from . import RESULTS

WIDTH = 2048
WAYS = {"mlx-lm": contextlib.nullcontext, "linattn": integration.enable}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--memory", type=float, default=5.0, help="GiB that a step may take beyond parameters and inputs")
    options = parser.parse_args()
    layer = qwen3_next_layer()
    results: list[dict[str, Any]] = []
    for way in WAYS:
        before = None
        for T in options.lengths:
            before = step(way, layer, T, before, options.memory * 2**30)
            print(before, flush=True)
            results.append(before)
            write(RESULTS / "mlx_lm_training.json", "mlx_lm_training", sorted(results, key=lambda row: row["T"]))


def qwen3_next_layer() -> Qwen3NextGatedDeltaNet:
    """A recurrent layer of Qwen3-Next's, with weights of one seed."""
    mx.random.seed(0)
    layer = Qwen3NextGatedDeltaNet(
        ModelArgs(
            model_type="qwen3_next",
            hidden_size=WIDTH,
            num_hidden_layers=1,
            intermediate_size=WIDTH,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            num_experts=0,
            num_experts_per_tok=1,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=512,
            mlp_only_layers=[0],
            moe_intermediate_size=512,
            rms_norm_eps=1e-6,
            vocab_size=64,
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            max_position_embeddings=4096,
        )
    )
    layer.train()
    mx.eval(layer.parameters())
    return layer


def step(way: str, layer: nn.Module, T: int, before: dict[str, Any] | None, most: float) -> dict[str, Any]:
    """A training step of ``T`` tokens, after one that compiled what there is to compile; a forecast where it takes too much."""
    if before is not None:
        needs = round((before["peak"] or before["needs"]) * T / before["T"])
        if needs > most:
            return {"way": way, "T": T, "peak": None, "needs": needs, "cpu": None}
    with WAYS[way]():
        taught(layer, drawn(16))
        x = drawn(T)
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        cpu = time.process_time()
        taught(layer, x)
        cpu = round(time.process_time() - cpu, 3)
    return {"way": way, "T": T, "peak": mx.get_peak_memory() - held, "cpu": cpu}


def drawn(T: int) -> mx.array:
    """Inputs of the layer."""
    x = mx.random.normal((1, T, WIDTH))
    mx.eval(x)
    return x


def taught(layer: nn.Module, x: mx.array) -> None:
    """One forward and backward pass."""
    mx.eval(nn.value_and_grad(layer, lambda model, x: mx.square(model(x)).sum())(layer, x))


if __name__ == "__main__":
    main()
