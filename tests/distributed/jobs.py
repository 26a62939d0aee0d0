"""The jobs of groups: every family and flag, dealt out over groups of 2, 3 and 4 processes; and those of two devices."""

from __future__ import annotations

from linking import LINKED
from ranks import Job
from sequence_cases import SPREAD, VARIANTS

CROSSING = [0, 3, 3, 4, 15, 16, 16, 22]
"""Packed sequences: empty ones, one token, one over three of four ranks, and padding behind them."""
ONE = [0, 24]
KINDS = ("linear_attn", "simple_gla", "gla", "value_gate", "kda", "value_beta", "mixed_biased")
"""One variant for each way in which a summary acts on a state."""


def jobs_of(world: int) -> list[Job]:
    """What the processes of a group run."""
    jobs: list[tuple[str, dict]] = []
    if world == 2:
        jobs += [("compare", dict(name="chunk", variant=variant)) for variant in SPREAD]
        jobs += [("compare", dict(name="chunk", variant=variant, cu_seqlens=CROSSING, layout="zigzag")) for variant in SPREAD]
        jobs += [("compare", dict(name="chunk", variant="value_gate", compiled=True))]
        linked = [name for name, (family, flags) in VARIANTS.items() if family in LINKED and "normalize" not in flags]
        jobs += [("compare", dict(name="chunk", variant=v, backend="linking")) for v in linked]
        jobs += [("compare", dict(name="chunk", variant=v, backend="linking", state=False)) for v in ("gla", "kda")]
        others = [("gather", [0, 4, 16]), ("gather", [0, 8, 16]), ("ring", [0, 4, 16])]
        jobs += [("other_offsets", dict(exchange=exchange, offsets=offsets)) for exchange, offsets in others]
        jobs += [("hold_nothing", {}), ("wait_for_no_offsets", {})]
        states = [f"initial_state.{name}" for name in ("kv", "k_quad", "v")]
        jobs += [("compare", dict(name="chunk", variant="mixed", wanted=[name])) for name in states]
        jobs += [("compare", dict(name="chunk", variant="mapped_keys", wanted=["gate.A_log"]))]
        for v in ("kda", "mixed"):
            jobs += [("compare", dict(name="chunk", variant=v, of_outputs=False, replicate_states=r)) for r in (False, True)]
            jobs += [("compare", dict(name="chunk", variant=v, of_outputs=False, cu_seqlens=CROSSING))]
    if world == 3:
        ring = dict(exchange="ring", replicate_states=True)
        jobs += [("compare", dict(name="chunk", variant=variant, cu_seqlens=CROSSING, **ring)) for variant in KINDS]
        jobs += [("compare", dict(name="recurrent", variant=v, layout="zigzag", **ring)) for v in ("kda", "value_gate", "ssd")]
        linked = dict(cu_seqlens=CROSSING, layout="zigzag", backend="linking")
        jobs += [("compare", dict(name="chunk", variant=v, **linked, **way)) for v in KINDS[:-1] for way in ({}, ring)]
        jobs += [("compare", dict(name="chunk", variant=v, layout="zigzag", backend="linking")) for v in KINDS[:-1]]
    if world == 4:
        jobs += [("compare", dict(name="chunk", variant=variant, cu_seqlens=CROSSING)) for variant in SPREAD]
        jobs += [("compare", dict(name="", variant=v, layout="zigzag", state=False)) for v in ("linear_attn", "dplr", "rwkv6")]
        jobs += [("compare", dict(name="parallel", variant="gla", cu_seqlens=ONE, replicate_states=True))]
    for packing in (None, CROSSING, ONE):
        for layout in ("contiguous", "zigzag"):
            jobs += [("convolve", dict(cu_seqlens=packing, W=W, layout=layout)) for W in ((1, 4, 8) if world == 3 else (8,))]
            jobs += [("everywhere", dict(cu_seqlens=packing, normalize=n, layout=layout)) for n in (False, True)]
    if world == 3:
        functions = {"chunk_gated_delta_rule": "gated_delta_rule", "chunk_kda": "kda", "chunk_dplr_delta_rule": "dplr"}
        jobs += [("through_fla", dict(name=name, variant=v, cu_seqlens=[0, 5, 8, 24])) for name, v in functions.items()]
        jobs += [("refused_through_fla", {}), ("compiled_through_fla", {})]
    if world == 2:
        jobs += [("dtensors", dict(variant="simple_gla"))]
    if world == 4:
        jobs += [("dtensors", dict(variant=v, heads=2)) for v in ("value_gate", "mapped_delta", "mixed")]
        jobs += [("dtensors", dict(variant="simple_gla", heads=2, H=1)), ("misplaced", {})]
        sizes = dict(num_heads=2, head_dim=4)
        layers = {"GatedDeltaNet": sizes | dict(num_v_heads=4), "KimiDeltaAttention": sizes}
        meshes = [
            ("GatedDeltaNet", (1, 2, 2), [0, 3, 3, 11, 14]),
            ("KimiDeltaAttention", (1, 2, 2), None),
            ("GatedDeltaNet", (2, 2, 1), None),
        ]
        jobs += [("fully_sharded", dict(layer=n, options=layers[n], axes=axes, cu_seqlens=c)) for n, axes, c in meshes]
    return named(world, jobs)


def named(world: int, jobs: list[tuple[str, dict]]) -> list[Job]:
    """Jobs with their ids."""
    return [(f"{world}-{function}-{'-'.join(map(str, keywords.values()))}", function, keywords) for function, keywords in jobs]


def jobs_of_devices(world: int) -> list[Job]:
    """What devices run: all that as many processes do, and what others do of rings, forms and further mesh axes."""
    jobs: list[tuple[str, dict]] = []
    for ring in (dict(exchange="ring", replicate_states=True),):
        jobs += [("compare", dict(name="chunk", variant=variant, cu_seqlens=CROSSING, **ring)) for variant in SPREAD]
        jobs += [("compare", dict(name="recurrent", variant=v, layout="zigzag", **ring)) for v in ("kda", "value_gate", "ssd")]
    jobs += [("compare", dict(name="", variant=v, layout="zigzag", state=False)) for v in ("linear_attn", "dplr", "rwkv6")]
    jobs += [("compare", dict(name="parallel", variant="gla", cu_seqlens=ONE, replicate_states=True))]
    jobs += [("dtensors", dict(variant=v)) for v in ("value_gate", "mapped_delta", "mixed")]
    jobs += [("dtensors", dict(variant=v, heads=2)) for v in ("value_gate", "mapped_delta")]
    return list({job[0]: job for job in (*jobs_of(world), *named(world, jobs))}.values())


def jobs_of_kernels(world: int, backend: str) -> list[Job]:
    """One family of each kind of kernel of a backend, as a batch or packed, with longer sequences; in float32 and bfloat16."""
    offsets = {256: [0, 30, 30, 31, 150, 161, 161, 231], 2048: [0, 30, 30, 31, 900, 1500, 1500, 2048]}
    kinds = ("gated_delta_rule", "simple_gla", "gla", "kda", "rwkv6", "linear_attn", "dplr", "value_gate", "mapped_delta")
    jobs = [
        ("compare", dict(name="chunk", variant=variant, cu_seqlens=packed, T=T, backend=backend, dtype=dtype))
        for dtype, T in (("float32", 256), ("bfloat16", 2048))
        for packed in (None, offsets[T])
        for variant in kinds
    ]
    return named(world, jobs)
