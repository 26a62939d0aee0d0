"""The first call of a process is one that is recorded: ``python cold.py graph`` or ``python cold.py compile``.

What such a call leaves behind must not lie in the graph's memory: called again, eagerly, after others have written there, it
must still be right.
"""

from __future__ import annotations

import sys

import linattn
import torch

FAMILIES = ("gla", "rwkv6", "simple_gla", "kda")


def arrays(family: str) -> dict[str, torch.Tensor]:
    draw = torch.randn
    given = {name: draw(1, 300, 2, 64, device="cuda").bfloat16() for name in "qkv"}
    given["g"] = torch.nn.functional.logsigmoid(draw((1, 300, 2) if family == "simple_gla" else (1, 300, 2, 64), device="cuda"))
    if family == "rwkv6":
        given["u"] = draw(2, 64, device="cuda")
    if family == "kda":
        given["k"] = torch.nn.functional.normalize(given["k"], dim=-1)
        given["beta"] = torch.rand(1, 300, 2, device="cuda")
    return {name: x.requires_grad_() for name, x in given.items()}


def results(operator, given, d_o, backend):
    o, _ = operator(**given, backend=backend)
    return [o.detach(), *torch.autograd.grad(o, tuple(given.values()), d_o.to(o.dtype))]


def agree(found, wanted):
    for y, x in zip(found, wanted, strict=True):
        assert torch.isfinite(y).all()
        assert (y.double() - x).norm() < 2e-2 * x.norm()


def main(how: str) -> None:
    torch.manual_seed(0)
    for family in FAMILIES:
        operator = getattr(linattn, f"chunk_{family}")
        given = arrays(family)
        d_o = torch.randn(1, 300, 2, 64, device="cuda").bfloat16()
        if how == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                recorded = results(operator, given, d_o, "triton")
            graph.replay()
            found = [x.clone() for x in recorded]
            del graph, recorded
        else:
            compiled = torch.compile(operator, mode="reduce-overhead")
            for _ in range(4):  # eager, warm, recorded, replayed
                found = [x.clone() for x in results(compiled, given, d_o, "triton")]
            torch.compiler.reset()
        garbage = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
        wide = {name: x.detach().double().requires_grad_() for name, x in given.items()}
        wanted = results(operator, wide, d_o, "torch")
        agree(found, wanted)
        agree(results(operator, given, d_o, "triton"), wanted)
        del garbage
        print(family, "agrees", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
