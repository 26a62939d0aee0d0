"""What the assembler makes of the kernels that carry the state of wide heads, where there is no GPU.

Its arguments are family, compute capability, ``K``, ``V`` and dtype. Prints a line for each configuration: its name, registers
and bytes spilled a thread.
"""

import sys

import compile_everywhere
import compile_for_hopper as compiler
import linattn_backends.triton as package
import torch
from triton.backends.compiler import GPUTarget

STATE = ("delta_state_fwd", "delta_state_bwd")


def show(source, options, target):
    """Compile a kernel all the way, if it is one of a state."""
    if source.fn.__name__ in STATE:
        registers, spilled, _ = compile_everywhere.usage(source, options, target)
        print(source.fn.__name__, registers, spilled)


def main():
    family, capability, K, V = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    compiler.read = lambda source, options: show(source, options, target)
    compiler.read_plain_kernels(compile_everywhere.LARGE_SMEM[capability])
    given = compiler.arrays(family, 2, 100, dict.fromkeys("qab", getattr(torch, sys.argv[5])), K=K, V=V)
    chunk = getattr(package.TritonBackend(), f"chunk_{family}")
    with torch.no_grad():
        chunk(**given)
    compiler.differentiate(*chunk(**given))


if __name__ == "__main__":
    main()
