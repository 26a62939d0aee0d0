"""What the compiler makes of every plain kernel, one configuration each, for each kind of NVIDIA's GPUs: ``… [CAPABILITY...]``.

Prints of each kernel registers a thread, bytes of a thread's registers that are spilled, and bytes of shared memory, by compute
capability, or what the compiler says against it; ``--write`` writes them to compiled.json, with which test_compiles.py compares
them. A device with less shared memory takes other kernels, so that not every capability has all.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import compile_for_hopper as compiler
import compile_rows
import linattn_backends.triton as package
import torch
import triton
from linattn_backends.triton.runtime import device, launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

FILE = Path(__file__).with_name("compiled.json")
LARGE_SMEM = {"8.0": False, "8.9": False, "9.0": True, "10.0": True, "12.0": False}
"""Compute capabilities, and whether a block may have 220 KB of shared memory there."""
HEADS = dict(K=128, V=128)
"""Widths of a head: those that most models have."""


def calls():
    """Calls that between them launch all plain kernels: in segments, of float32, of single tokens, of both directions, raw."""
    backend = package.TritonBackend()
    packed = dict(cu_seqlens=torch.tensor([0, 100, 8192], dtype=torch.int32), output_final_state=True)
    for family in ("linear_attn", "simple_gla", "gla", "gated_delta_rule", "kda", "dplr"):
        chunk = getattr(backend, f"chunk_{family}")
        compiler.differentiate(*chunk(**compiler.arrays(family, 1, 8192, **HEADS), **packed))
        if family in ("simple_gla", "gla"):
            compiler.differentiate(*chunk(**compiler.arrays(family, 2, 256, dict(q=torch.float32), **HEADS)))
    compiler.differentiate(*backend.chunk_gla(**compiler.arrays("gla", 1, 256, **HEADS), normalize=True))
    raw = compiler.arrays("gated_delta_rule", 1, 128, **HEADS)
    compiler.differentiate(*backend.chunk_gated_delta_rule(**raw, **compiler.maps("gated_delta_rule")))
    for softplus in (False, True):
        given = compiler.arrays("ssd", 1, 128, optional=True, **HEADS)
        compiler.differentiate(*backend.chunk_ssd(**given, dt_softplus=softplus, output_final_state=True))
    compiler.in_stages(backend, "gated_delta_rule", torch.zeros(2, 4, 64, 64))
    token = compiler.arrays("gla", 2, 1, **HEADS)
    backend.recurrent_gla(**{name: x.detach() for name, x in token.items()})
    options = dict(chunk_size=32, output_final_state=True)
    o, state = backend.chunk_mixed_attn(**compiler.arrays("mixed_attn", 1, 64, optional=True, **HEADS), **options)
    compiler.differentiate(o, state)
    backend.recurrent_mixed_attn(**compiler.arrays("mixed_attn", 1, 1, **HEADS), initial_state=state, **options)
    compile_rows.convolutions()
    compile_rows.norms()
    compile_rows.feature_maps()


def calls_on_hopper():
    """A call that launches what follows a kernel for Hopper, and runs nowhere else."""
    given = compiler.arrays("gated_delta_rule", 2, 256, **HEADS)
    compiler.differentiate(*package.TritonBackend().chunk_gated_delta_rule(**given))


def launched(calls, large_smem, not_hopper):
    """The plain kernels that calls launch on such a device: of each one's first configuration source and options, by name."""
    found = {}
    device.measured = lambda where: device.Properties(132, large_smem, not_hopper)
    compiler.compiled.clear()
    compiler.read = lambda source, options: found.setdefault(source.fn.__name__, (source, options))
    calls()
    return {name: each for name, each in found.items() if type(each[0]) is ASTSource}


def compiled(capabilities):
    """Registers, spilled bytes and shared memory of the kernels of each capability, or why there are none, by name."""
    compiler.whole, launch.DIRECT = False, False  # nothing is launched
    JITFunction.run = compiler.compile_instead
    sources = {large: launched(calls, large, "plain kernels are wanted") for large in {LARGE_SMEM[x] for x in capabilities}}
    made = {}
    for capability in capabilities:
        wanted = sources[LARGE_SMEM[capability]]
        if capability == "9.0":
            wanted = launched(calls_on_hopper, True, None) | wanted
        target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
        made[capability] = {name: usage(*wanted[name], target) for name in sorted(wanted)}
    return made


def usage(source, options, target):
    """Registers a thread, bytes of them that are spilled (Triton keeps nothing else on the stack), and of shared memory."""
    try:
        kernel = triton.compile(source, target, options)
    except Exception as error:  # the compiler raises what it likes; the other kernels are wanted all the same
        return f"{type(error).__name__}: {error}"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        said = subprocess.run([compile_rows.CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout).groups()
    return [int(registers), int(stack), kernel.metadata.shared]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capabilities", nargs="*", metavar="CAPABILITY", help=f"of {', '.join(LARGE_SMEM)}, or all")
    parser.add_argument("--write", action="store_true", help=f"all of them, to {FILE.name}")
    given = parser.parse_args()
    made = compiled(LARGE_SMEM if given.write else given.capabilities or LARGE_SMEM)
    if not given.write:
        print(json.dumps(made))
    elif failed := [f"{name} for {which}: {x}" for which, row in made.items() for name, x in row.items() if isinstance(x, str)]:
        raise SystemExit("\n".join([f"{FILE.name} is as it was, for these kernels do not compile:", *failed]))
    else:
        rows = json.dumps(dict(triton=triton.__version__, compiled=made), indent=1)
        FILE.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", rows) + "\n")


if __name__ == "__main__":
    main()
