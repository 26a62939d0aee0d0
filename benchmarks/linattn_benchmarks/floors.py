"""The least time that an operator can take on a device: bytes that must move, floating-point operations that must be done.

Forward: every array is read once and the output written once. Backward, in two sweeps because the state runs forwards for
``dq`` and backwards for the others: the first reads all but the queries and writes ``dq``; the second reads everything, and
``dq`` again if there is a gate (``dG = q ∘ dq − k ∘ dk``), and writes the other gradients. A decoding step reads and writes
the state. In bf16 this is ``2(2K+2V) + γ`` bytes per token and head forward, ``γ`` the bytes of the gates.

Operations are those of the chunk form with chunks of 64 (``mixed_attn``: its own), whatever is timed; a multiply-add is two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .cases import Case

CHUNK = 64


class Flops(NamedTuple):
    """Operations per token and value head, as factors of ``K V``, ``C K``, ``C V`` and ``C²``."""

    kv: int
    ck: int
    cv: int
    cc: int = 0


DIAGONAL = (Flops(4, 2, 2), Flops(10, 6, 6))
DELTA = (Flops(6, 6, 4, 2), Flops(16, 18, 10, 8))
LOW_RANK = (Flops(8, 8, 8, 2), Flops(22, 24, 24, 8))
FLOPS = {
    **dict.fromkeys(("linear_attn", "simple_gla", "gla", "rwkv6", "mixed_attn"), DIAGONAL),
    **dict.fromkeys(("delta_rule", "gated_delta_rule", "kda"), DELTA),
    "dplr": LOW_RANK,
}
"""Forward and backward."""


def traffic(case: Case) -> int:
    """Bytes that must move."""
    sizes = {arg.name: case.nbytes(arg) for arg in case.arrays}
    output, total = sizes["v"], sum(sizes.values())
    queries = sum(size for name, size in sizes.items() if name.startswith("q"))
    state = sum(case.nbytes(arg) for arg in case.state)
    forward = total + output + 2 * state
    if case.what != "fwdbwd":
        return forward
    gated = any(arg.role == "float" for arg in case.arrays)
    first = (total - queries) + output + queries
    second = total + output + (queries if gated else 0) + (total - queries)
    return forward + first + second


def work(case: Case) -> int:
    """Floating-point operations."""
    forward, backward = FLOPS[case.spec.name]
    passes = (forward, backward) if case.what == "fwdbwd" else (forward,)
    size = case.size
    tokens = size["B"] * size["T"] * (size["H"] if case.spec.name == "mixed_attn" else size["HV"])
    return tokens * sum(per_token(case, flops) for flops in passes)


def per_token(case: Case, flops: Flops) -> int:
    """Operations per token and value head."""
    size, mixed = case.size, case.spec.name == "mixed_attn"
    C = min(size["T"], size["C"] if mixed else CHUNK)
    width = size["L"] if mixed else size["K"]
    return flops.kv * width * size["V"] + flops.ck * C * size["K"] + flops.cv * C * size["V"] + flops.cc * C * C


def floor(case: Case, ceilings: dict[str, Any]) -> dict[str, Any]:
    """The larger of both times, at the bandwidth and rate measured in the same run."""
    nbytes, flops = traffic(case), work(case)
    bytes_ms = nbytes / ceilings["copy_bytes_per_s"] * 1e3
    flops_ms = flops / ceilings["matmul_flops_per_s"] * 1e3
    return {
        "bytes": nbytes,
        "flops": flops,
        "bytes_ms": bytes_ms,
        "flops_ms": flops_ms,
        "ms": max(bytes_ms, flops_ms),
        "bound": "bytes" if bytes_ms >= flops_ms else "flops",
    }
