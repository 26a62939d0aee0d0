"""The first call of a process: ``python cold.py graph``, ``python cold.py compile`` or ``python cold.py first``.

What a recorded call leaves behind must not lie in the graph's memory: called again, eagerly, after others have written there,
it must still be right. ``first`` says how many seconds the first forward and backward pass of each family take.
"""

from __future__ import annotations

import functools
import sys
import time

import linattn
import torch

RECORDED = ("gla", "rwkv6", "simple_gla", "kda")
FAMILIES = ("linear_attn", "simple_gla", "gla", "gla with gv", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")


def arrays(family: str) -> dict[str, torch.Tensor]:
    draw = functools.partial(torch.randn, device="cuda")
    rows, tokens = (1, 300, 2, 64), (1, 300, 2)
    given = {name: draw(rows).bfloat16() for name in "qkv"}
    if family not in ("linear_attn", "delta_rule"):
        given["g"] = torch.nn.functional.logsigmoid(draw(tokens if family in ("simple_gla", "gated_delta_rule") else rows))
    if family == "gla with gv":
        given["gv"] = torch.nn.functional.logsigmoid(draw(rows))
    if family == "rwkv6":
        given["u"] = draw(2, 64)
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        given["k"] = torch.nn.functional.normalize(given["k"], dim=-1)
        given["beta"] = torch.rand(tokens, device="cuda")
    if family == "dplr":
        given["a"] = -torch.nn.functional.normalize(draw(rows), dim=-1).bfloat16()
        given["b"] = -given["a"]
    return {name: x.requires_grad_() for name, x in given.items()}


def operator_of(family: str):
    return getattr(linattn, f"chunk_{family.split()[0]}")


def results(operator, given, d_o, backend):
    o, _ = operator(**given, backend=backend)
    return [o.detach(), *torch.autograd.grad(o, tuple(given.values()), d_o.to(o.dtype))]


def agree(found, wanted):
    for y, x in zip(found, wanted, strict=True):
        assert torch.isfinite(y).all()
        assert (y.double() - x).norm() < 2e-2 * x.norm()


def first() -> None:
    for family in FAMILIES:
        given = arrays(family)
        d_o = torch.randn_like(given["v"])
        torch.cuda.synchronize()
        began = time.perf_counter()
        results(operator_of(family), given, d_o, "triton")
        torch.cuda.synchronize()
        print(f"{family}: {time.perf_counter() - began:.1f}", flush=True)


def recorded(how: str) -> None:
    torch.manual_seed(0)
    for family in RECORDED:
        operator = operator_of(family)
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
    first() if sys.argv[1] == "first" else recorded(sys.argv[1])
