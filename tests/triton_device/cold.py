"""The first call of a process: ``python cold.py eager FILE``, ``graph FILE``, ``compile FILE`` or ``first``.

``eager`` writes what its calls gave. ``graph`` and ``compile`` record the same calls, as the first of their process: they give
the same bits. What a recorded call leaves behind must not lie in the graph's memory: called again, eagerly, after others have
written there, it gives them still. ``first`` says how many seconds the first forward and backward pass of each family take.
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


def same(found, wanted, family, when):
    for n, (y, x) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(y.cpu(), x), f"{family}: array {n} {when} differs from that of an eager call in another process"


def first() -> None:
    for family in FAMILIES:
        given = arrays(family)
        d_o = torch.randn_like(given["v"])
        torch.cuda.synchronize()
        began = time.perf_counter()
        results(operator_of(family), given, d_o, "triton")
        torch.cuda.synchronize()
        print(f"{family}: {time.perf_counter() - began:.1f}", flush=True)


def drawn(family):
    torch.manual_seed(RECORDED.index(family))
    return operator_of(family), arrays(family), torch.randn(1, 300, 2, 64, device="cuda").bfloat16()


def eager(path: str) -> None:
    torch.save({family: [x.cpu() for x in results(*drawn(family), "triton")] for family in RECORDED}, path)


def from_graph(operator, given, d_o):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = results(operator, given, d_o, "triton")
    graph.replay()
    return [x.clone() for x in recorded]


def compiled(operator, given, d_o):
    called = torch.compile(operator, mode="reduce-overhead")
    for _ in range(4):  # eager, warm, recorded, replayed
        found = [x.clone() for x in results(called, given, d_o, "triton")]
    torch.compiler.reset()
    return found


def recorded(record, path: str) -> None:
    everything = torch.load(path)
    for family in RECORDED:
        operator, given, d_o = drawn(family)
        found, wanted = record(operator, given, d_o), everything[family]
        garbage = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
        same(found, wanted, family, "of the recording")
        same(results(operator, given, d_o, "triton"), wanted, family, "of the eager call after it")
        del garbage
        print(family, "agrees", flush=True)


if __name__ == "__main__":
    how, *rest = sys.argv[1:]
    if how == "first":
        first()
    elif how == "eager":
        eager(*rest)
    else:
        recorded({"graph": from_graph, "compile": compiled}[how], *rest)
