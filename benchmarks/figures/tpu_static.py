"""Static cost of the TPU kernels, without a TPU: ``python -m figures.tpu_static``.

Every kernel is compiled in full by ``libtpu`` (a development tool under its own terms, never a dependency) for a named
generation. The compiler's own listing gives the VLIW bundles of one grid step, what goes before and after the loop included,
and the VMEM that it set aside. Bundles are a cost to hold kernels to, and to choose a chunk length by; they are not a time.

One process a generation: ``libtpu`` reads where to put its listings once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from linattn_backends.pallas.backend import FAMILIES
from linattn_benchmarks.environment import write

from . import RESULTS

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2"}
KERNELS = ("forward", "states", "backward")
RESULT = RESULTS / "tpu_static.json"

Case = dict[str, Any]


def grid() -> Iterator[Case]:
    """What the table holds: every kernel at the default chunk, and other chunks and the other dtype on one generation."""
    for generation in TOPOLOGIES:
        for family in FAMILIES:
            for kernel in KERNELS:
                yield case(generation, family, kernel)
            yield case(generation, family, "decode", C=1, dtype="float32")
    for family in FAMILIES:
        for kernel in KERNELS:
            for C in (32, 64):
                yield case("v5e", family, kernel, C=C)
            yield case("v5e", family, kernel, dtype="float32")


def attempts() -> Iterator[Case]:
    """What the inverse of the delta families costs when its products take six passes, or one, instead of three."""
    for inverse in ("EXACT", "ONE"):
        for kernel in KERNELS:
            yield case("v5e", "gated_delta_rule", kernel) | {"inverse": inverse}


def case(generation: str, family: str, kernel: str, C: int = 128, dtype: str = "bfloat16", K: int = 128, V: int = 128) -> Case:
    """One kernel to compile."""
    return dict(generation=generation, family=family, kernel=kernel, dtype=dtype, C=C, K=K, V=V)


def measure(cases: Iterable[Case]) -> list[Case]:
    """The cases with ``bundles`` and ``vmem_bytes``; each generation in a process of its own."""
    by_generation: dict[str, list[Case]] = {}
    for one in cases:
        by_generation.setdefault(one["generation"], []).append(one)
    return [row for generation, own in by_generation.items() for row in _in_a_process(generation, own)]


def _in_a_process(generation: str, cases: list[Case]) -> list[Case]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, "-m", "figures.tpu_static", "--worker", folder]
        done = subprocess.run(command, input=json.dumps(cases), env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {generation} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def work(folder: Path) -> None:
    """Compile the cases given on standard input; their figures go to standard output."""
    print(json.dumps([{**one, **compiled(one, folder)} for one in json.load(sys.stdin)]))


def compiled(one: Case, folder: Path) -> dict[str, int]:
    """Compile one kernel and read the compiler's listings of it, which are then dropped."""
    compile_case(one)
    name = f"linattn_{one['kernel']}"
    bundles = _listing(folder, f"*{name}*schedule-analysis_final_bundles.txt")
    memory = _listing(folder, f"*{name}*-original.txt")
    for path in folder.iterdir():
        path.unlink()
    total = re.search(r"total scheduled bundles:\s+(\d+)", bundles)
    assert total is not None, bundles
    sizes = re.findall(r"#allocation\d+ \[[^\]]*\](?:\{[^}]*\})?[^\n]*?space=vmem, size = 0x([0-9a-f]+)", memory)
    return {"bundles": int(total[1]), "vmem_bytes": sum(int(size, 16) for size in sizes)}


def compile_case(one: Case) -> None:
    """The whole compiler, for the generation that the case names."""
    import jax
    from jax.experimental import topologies

    device = topologies.get_topology_desc(TOPOLOGIES[one["generation"]], "tpu").devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    function, arguments = program(one)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",)).compile()


def _listing(folder: Path, pattern: str) -> str:
    (path,) = folder.glob(pattern)
    return path.read_text(errors="replace")


def program(one: Case) -> tuple[Any, tuple[Any, ...]]:
    """A function that runs the kernel, and what it takes, as shapes."""
    import jax
    import jax.numpy as jnp
    from linattn_backends.pallas import chunk, decode, layout, tiles, walk

    chunk.THREE = getattr(tiles, one.get("inverse", "THREE"))

    G, HV, n, C, K, V = 2, 4, 4, one["C"], one["K"], one["V"]
    dtype = jnp.dtype(one["dtype"])

    def shape(*sizes: int, of: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, of)

    family = one["family"]
    extra = {"simple_gla": "g", "gla": "G", "rwkv6": "Gu", "delta_rule": "b", "gated_delta_rule": "gb", "kda": "Gb"}
    names = extra.get(family, "")
    if one["kernel"] == "decode":
        x = {name: shape(G, HV, 1, W) for name, W in (("q", K), ("k", K), ("v", V))}
        x |= {"g": shape(G, HV, 1, 1)} if "g" in names else {"g": shape(G, HV, 1, K)} if "G" in names else {}
        x |= {"beta": shape(G, HV, 1, 1)} if "b" in names else {}
        x |= {"u": shape(G, HV, 1, K)} if "u" in names else {}
        return (lambda x, S: decode.step(x, S, scale=0.1, interpret=False)), (x, shape(G, HV, K, V))
    x = {name: shape(G, HV, n * C, W, of=dtype) for name, W in (("q", K), ("k", K), ("v", V))}
    x |= {"g": shape(G, HV, n, 1, C)} if "g" in names else {"g": shape(G, HV, n * C, K)} if "G" in names else {}
    x |= {"beta": shape(G, HV, n, 1, C, of=dtype)} if "b" in names else {}
    x |= {"u": shape(HV, 1, K)} if "u" in names else {}
    flags = shape(G * n, of=jnp.int32)
    index = layout.Index(flags, flags, flags, shape(G + 1, 1, 1, 1, of=jnp.bool_))
    static = walk.Static(C, 0.1)
    states = shape(G + 1, HV, V, K)
    if one["kernel"] == "backward":
        before, d_o = shape(G, HV, n, V, K), shape(G, HV, n * C, V, of=dtype)
        return (lambda *a: walk.backward(static, *a)), (x, before, index, d_o, states)
    wanted = ("o", "final") if one["kernel"] == "forward" else ("before",)
    return (lambda *a: walk.forward(static, *a, wanted)), (x, states, index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        return
    write(RESULT, "tpu_static", measure([*grid(), *attempts()]))


if __name__ == "__main__":
    main()
