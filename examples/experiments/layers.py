"""What attention costs by length of the context, alone, as a layer and as a block: GLA (Yang et al. 2024, §5.3), Hedgehog
(Zhang et al. 2024, §5.4) and FLASH (Hua et al. 2022, §5.2) by softmax.

As many tokens, cut into contexts of growing length; a forward pass, and one with its backward pass. Softmax is PyTorch's
FlashAttention-2, and alone cuDNN's kernel too. Milliseconds, and the memory that a pass needs. On a GPU. Called one operation
at a time, or compiled, by a compiler of ``torch.compile``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any

import linattn
import torch
from linattn.feature_maps import Hedgehog
from linattn.progress import bars
from linattn_benchmarks.runners import RUNNERS
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .frame import Block
from .mixers import Attention, Unit
from .record import COLOURS, Record, Tables, axes, numbers, options

HEAD = 64  # width of the heads of softmax and Hedgehog
CHUNK = 256  # of FLASH


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


class Operator(nn.Module):
    """An operator without projections, on ``x [B, T, …]`` that is cut into its arrays: heads and width of each."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.function, self.shapes = function, shapes

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([heads * width for heads, width in self.shapes], -1)
        return self.function(*(y.unflatten(-1, shape) for y, shape in zip(parts, self.shapes, strict=True)))[0]


def gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    return linattn.gla(q, k, v, g, gate=linattn.gates.LogSigmoid(16))


def mixed(*arrays: Tensor) -> Any:
    return linattn.mixed_attn(*arrays, chunk_size=CHUNK, quad_scale=1 / CHUNK, lin_scale=1 / CHUNK)


KINDS: dict[str, tuple[float, Callable[[int], nn.Module]]] = {
    "softmax": (1, lambda D: Attention(D, D // HEAD)),
    "GLA": (1, lambda D: linattn.nn.GatedLinearAttention(D)),
    "Hedgehog": (1, lambda D: linattn.nn.Hedgehog(D, num_heads=D // HEAD)),
    "FLASH": (1, lambda D: linattn.nn.FLASH(D, chunk_size=CHUNK)),
    "softmax block": (1, lambda D: Block(D, Attention(D, D // HEAD), convolution=False)),
    "GLA block": (1, lambda D: Block(D, linattn.nn.GatedLinearAttention(D), convolution=False)),
    "Hedgehog block": (1, lambda D: Block(D, linattn.nn.Hedgehog(D, num_heads=D // HEAD), convolution=False)),
    "FLASH block": (1, lambda D: Unit(D, lambda: linattn.nn.FLASH(D, chunk_size=CHUNK), nn.RMSNorm)),
    "softmax alone": (3, lambda D: Alone()),
    "linear_attn alone": (3, lambda D: Operator(linattn.linear_attn, *[(D // HEAD, HEAD)] * 3)),
    "GLA alone": (2.5, lambda D: Operator(gla, (4, D // 8), (4, D // 8), (4, D // 4), (4, D // 8))),
    "Hedgehog alone": (3, lambda D: Alone(torch.from_numpy(Hedgehog.init(D // HEAD, HEAD)["W"]))),
    "FLASH alone": (2.5, lambda D: Operator(mixed, *[(1, D // 8)] * 4, (1, 2 * D))),
    "softmax alone, cuDNN": (3, lambda D: Alone()),
}
"""The width of the input in that of the model, and what is timed: layers, blocks with their MLPs (of FLASH two layers, which
have as many parameters), and attention without projections, of the sizes that it has in its layer."""


def softmax_by(kind: str, device: str) -> Any:
    """PyTorch's kernel for softmax is not left to it on a GPU."""
    if device != "cuda":
        return nullcontext()
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION if kind.endswith("cuDNN") else SDPBackend.FLASH_ATTENTION)


def cost(kind: str, T: int, chosen: Any) -> dict[str, float]:
    """Milliseconds of both passes, and MiB that they need beyond the input and the layer."""
    with softmax_by(kind, chosen.device):
        return measured(kind, T, chosen)


def measured(kind: str, T: int, chosen: Any) -> dict[str, float]:
    torch.manual_seed(chosen.seed)
    wide, make = KINDS[kind]
    dtype = torch.bfloat16 if chosen.device == "cuda" else torch.float32
    layer = make(chosen.width).to(chosen.device, dtype)
    if chosen.compiler:
        torch._dynamo.reset()
        layer.compile(fullgraph=True, dynamic=False, backend=chosen.compiler)
    x = torch.randn(chosen.tokens // T, T, int(wide * chosen.width), device=chosen.device, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(layer(x))

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        torch.autograd.grad(layer(x), [x, *layer.parameters()], gradient)

    found = {"forward": milliseconds(forward, chosen), "with backward": milliseconds(both, chosen)}
    if chosen.device == "cuda":
        peak = RUNNERS["torch"]("cuda").peak
        found["MiB"] = max(peak(both) for _ in range(3)) / 2**20  # what a thread has not yet given back counts as there before
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
        contexts="512,1024,2048,4096,8192,16384,32768",
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
    colours = dict(zip(dict.fromkeys(kind.split()[0] for kind in costs), COLOURS, strict=False))
    for ax, what in zip(found, ("forward", "with backward"), strict=True):
        for kind, of in costs.items():
            style = "-." if "cuDNN" in kind else "--" if " alone" in kind else ":" if kind.endswith(" block") else "-"
            colour = colours[kind.split()[0]]
            ax.plot([int(T) for T in of], [one[what] for one in of.values()], style, color=colour, marker=".", label=kind)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter("{x:g}")
        ax.set_title(what, loc="left", fontsize=10)
        ax.set_xlabel("context length")
    found[0].set_ylabel("milliseconds")
    found[-1].legend(frameon=False, fontsize=8, handlelength=4, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


if __name__ == "__main__":
    main()
