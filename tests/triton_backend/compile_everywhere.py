"""What the compiler makes of every plain kernel, one configuration each, for each kind of NVIDIA's GPUs: ``… [CAPABILITY...]``.

Prints, or with ``--write`` writes to compiled.json, where test_compiles.py finds it: by capability and kernel, registers a
thread, bytes of stack, where registers are spilled, and bytes of shared memory.
"""

import argparse
import json
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sys import executable

import compile_for_hopper as compiler
import compile_rows
import linattn_backends.triton as package
import torch
import triton
from linattn_backends.triton.runtime import device, launch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CAPABILITIES = {80: False, 89: False, 90: True, 100: True, 120: False}
"""Compute capabilities, times ten, and whether a block may have 220 KB of shared memory there."""
FILE = Path(__file__).with_name("compiled.json")
HEADER = re.compile(r"(?<=[ ])(\w+\.py):(\w+)")
FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "gated_delta_rule", "kda", "dplr")


def kernels():
    """Names of the plain kernels in the package's map."""
    return {name for file, name in HEADER.findall(package.__doc__) if "_sm90" not in file}


def calls():
    """Calls that between them launch all of them: chunks and single tokens, in segments, of float32, of both directions."""
    backend = package.TritonBackend()
    long = dict(cu_seqlens=torch.tensor([0, 100, 4096], dtype=torch.int32), output_final_state=True)
    for family in FAMILIES:
        chunk = getattr(backend, f"chunk_{family}")
        compiler.differentiate(*chunk(**compiler.arrays(family, 1, 4096), **long))
        if family in ("linear_attn", "simple_gla", "gla"):
            compiler.differentiate(*chunk(**compiler.arrays(family, 2, 256, dict(q=torch.float32))))
    compiler.differentiate(*backend.chunk_delta_rule(**compiler.arrays("delta_rule", 2, 256)))
    token = compiler.arrays("gla", 2, 1)
    backend.recurrent_gla(**{name: x.detach() for name, x in token.items()})
    backend_mixed()
    compile_rows.convolutions()
    compile_rows.norms()


def backend_mixed():
    """Those of ``mixed_attn``."""
    backend, options = package.TritonBackend(), dict(chunk_size=32, output_final_state=True)
    o, state = backend.chunk_mixed_attn(**compiler.arrays("mixed_attn", 1, 64, optional=True), **options)
    compiler.differentiate(o, state)
    backend.recurrent_mixed_attn(**compiler.arrays("mixed_attn", 1, 1), initial_state=state, **options)


def compiled(capability):
    """Registers, stack and shared memory of each kernel on devices of one capability, by its name."""
    target, found = GPUTarget("cuda", capability, 32), {}

    def examine(source, options):
        name = source.fn.__name__
        if name not in found:
            made = triton.compile(source, target=target, options=options)
            found[name] = [*usage(made.asm["cubin"]), made.metadata.shared]

    compiler.whole, compiler.read = False, examine
    JITFunction.run = compiler.compile_instead
    launch.DIRECT = False  # there is nothing to launch
    facts = device.Properties(132, CAPABILITIES[capability], "plain kernels are wanted")
    device.measured = lambda where: facts
    calls()
    assert found.keys() == kernels(), found.keys() ^ kernels()
    return dict(sorted(found.items()))


def usage(cubin):
    """Registers and bytes of stack of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run([compile_rows.CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout).groups()
    return int(registers), int(stack)


def every():
    """All capabilities, two processes at a time."""

    def run(capability):
        command = [executable, __file__, str(capability)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(map(str, CAPABILITIES), threads.map(run, CAPABILITIES), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", nargs="?", type=int, choices=CAPABILITIES)
    parser.add_argument("--write", action="store_true", help=f"all of them, to {FILE.name}")
    given = parser.parse_args()
    if given.write:
        rows = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", json.dumps(every(), indent=1))
        FILE.write_text(rows + "\n")
    else:
        print(json.dumps(every() if given.capability is None else compiled(given.capability)))


if __name__ == "__main__":
    main()
