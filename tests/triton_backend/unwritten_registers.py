"""Registers that kernels for Hopper read before any instruction has written them, where there is no GPU, for gates of a DTYPE.

ptxas of CUDA 12.8 makes such code out of the addresses of tiles of several widths that warp groups multiply; what is read
through them lies anywhere. Prints each kernel that a call with a gate per value channel and chunks of 64 tokens launches, and
those of its uniform registers, in which such addresses are.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import compile_for_hopper as compiler
import compile_rows
import linattn_backends.triton as package
import torch
import triton
from linattn_backends.triton.runtime import device, launch
from triton.runtime.jit import JITFunction

NVDISASM = Path(compile_rows.CUOBJDUMP).with_name("nvdisasm")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)\s*(.*?) ;", re.MULTILINE)
WRITES = ("U", "S2UR", "R2UR", "REDUX", "VOTEU")
"""How the names of instructions begin that write a uniform register, their first operand."""


def unwritten(assembly):
    """Uniform registers that are read first; descriptors, ``gdesc[UR4]``, are of registers that were read as they were made."""
    written = set()
    for name, operands in INSTRUCTION.findall(assembly):
        target, _, rest = operands.partition(",")
        writes = name.startswith(WRITES) and re.fullmatch(r"UR\d+", target)
        for register in re.findall(r"(?<!\[)\bUR(\d+)\b", rest if writes else operands):
            if int(register) not in written:
                yield f"UR{register}"
        if writes:
            first = int(target[2:])
            written |= {first, first + 1} if re.search(r"\.(?:64|WIDE)", name) else {first}


def look(source, options):
    """Compile all the way and print what is read unwritten."""
    made = triton.compile(source, target=compiler.HOPPER, options=options).asm
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made["cubin"])
        assembly = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    print(source.fn.__name__, *sorted(set(unwritten(assembly))))


def main():
    dtype = getattr(torch, sys.argv[1])
    compiler.whole, compiler.read = False, look
    JITFunction.run = compiler.compile_instead
    launch.DIRECT = False  # there is nothing to launch
    device.measured = lambda where: device.Properties(132, True, None)
    given = compiler.arrays("gla", 1, 130, dict(q=torch.float32, g=dtype), K=25, V=2)
    gv = torch.zeros_like(given["v"], dtype=dtype).requires_grad_()
    offsets = torch.tensor([0, 30, 130])
    compiler.differentiate(*package.TritonBackend().chunk_gla(**given, gv=gv, cu_seqlens=offsets, chunk_size=64))


if __name__ == "__main__":
    main()
