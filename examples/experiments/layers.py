"""What a layer costs by length of the context: GLA (Yang et al. 2024, §5.3) and Hedgehog (Zhang et al. 2024, §5.4) by softmax.

As many tokens, cut into contexts of growing length; a forward pass, and one with its backward pass, of whole layers and of the
attention in them alone. Softmax is PyTorch's fused attention. Milliseconds, and the memory that a pass needs. On a GPU.
Called one operation at a time, or compiled, by a compiler of ``torch.compile``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import linattn
import torch
from linattn.feature_maps import Hedgehog
from linattn.progress import bars
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from .mixers import Attention
from .record import COLOURS, Record, Tables, axes, numbers, options

HEAD = 64  # width of the heads of softmax and Hedgehog


class Alone(nn.Module):
    """Attention without projections, on ``x [B, T, 3 D]``; ``W`` is Hedgehog's, without it it is softmax."""

    def __init__(self, W: Tensor | None = None) -> None:
        super().__init__()
        self.W = None if W is None else nn.Parameter(W)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, -1, HEAD)).unbind(2)
        if self.W is None:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return linattn.linear_attn(q, k, v, feature_map=Hedgehog(self.W), normalize=True)[0]


KINDS: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    "softmax": (1, lambda D: Attention(D, D // HEAD)),
    "GLA": (1, lambda D: linattn.nn.GatedLinearAttention(D)),
    "Hedgehog": (1, lambda D: linattn.nn.Hedgehog(D, num_heads=D // HEAD)),
    "softmax alone": (3, lambda D: Alone()),
    "Hedgehog alone": (3, lambda D: Alone(torch.from_numpy(Hedgehog.init(D // HEAD, HEAD)["W"]))),
}
"""The width of the input in that of the model, and the layer."""


def cost(kind: str, T: int, chosen: Any) -> dict[str, float]:
    """Milliseconds of both passes, and MiB that they need beyond the input and the layer."""
    torch.manual_seed(chosen.seed)
    wide, make = KINDS[kind]
    dtype = torch.bfloat16 if chosen.device == "cuda" else torch.float32
    layer = make(chosen.width).to(chosen.device, dtype)
    if chosen.compiler:
        torch._dynamo.reset()
        layer.compile(fullgraph=True, dynamic=False, backend=chosen.compiler)
    x = torch.randn(chosen.tokens // T, T, wide * chosen.width, device=chosen.device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(layer(x))

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        torch.autograd.grad(layer(x), [x, *layer.parameters()], gradient)

    found = {"forward": milliseconds(forward, chosen), "with backward": milliseconds(both, chosen)}
    if chosen.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        found["MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found


def milliseconds(work: Callable[[], None], chosen: Any) -> float:
    """The median, after two calls that set things up."""
    found = []
    for _ in range(chosen.repeats + 2):
        wait(chosen.device)
        start = time.perf_counter()
        work()
        wait(chosen.device)
        found.append(1e3 * (time.perf_counter() - start))
    return median(found[2:])


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    chosen = options(
        __doc__, device="cuda" if torch.cuda.is_available() else "cpu", width=1024, tokens=32768, seed=0, repeats=10,
        contexts="1024,2048,4096,8192,16384,32768",
        compiler="",
    )  # fmt: skip
    record, contexts = Record("layers", chosen, shown), numbers(chosen.contexts)
    costs: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    with bars(count=False) as progress:
        for kind in progress.track(KINDS, description="layers"):
            for T in contexts:
                costs[kind][str(T)] = record.once(f"{kind} at {T}", lambda k=kind, n=T: cost(k, n, chosen))
    device = torch.cuda.get_device_name() if chosen.device == "cuda" else "CPU"
    record.finish({"device": device, "costs": costs})


def shown(results: dict[str, Any], chosen: dict[str, Any]) -> tuple[Tables, Figure]:
    costs = results["costs"]
    first, *_, last = costs["softmax"]
    columns = [(what, T) for what in costs["softmax"][first] for T in (first, last)]
    rows = [(kind, *(of[T][what] for what, T in columns)) for kind, of in costs.items()]
    return {"": (["layer", *(f"{what}, {T}" for what, T in columns)], rows)}, plot(costs)


def plot(costs: dict[str, dict[str, Any]]) -> Figure:
    """Milliseconds by length of the context."""
    figure, found = axes(2)
    colours = {kind: COLOURS[i] for i, kind in enumerate(("softmax", "GLA", "Hedgehog"))}
    for ax, what in zip(found, ("forward", "with backward"), strict=True):
        for kind, of in costs.items():
            alone = kind.endswith(" alone")
            style, colour = "--" if alone else "-", colours[kind.removesuffix(" alone")]
            ax.plot([int(T) for T in of], [one[what] for one in of.values()], style, color=colour, marker=".", label=kind)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_title(what, loc="left", fontsize=10)
        ax.set_xlabel("context length")
    found[0].set_ylabel("milliseconds")
    found[-1].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    main()
