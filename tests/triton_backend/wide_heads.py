"""What the assembler makes of the kernels that carry the state of wide heads of float32, where there is no GPU: ``… FAMILY``.

Prints a line for each configuration: its name, registers a thread, and bytes of them that are spilled.
"""

import sys

import compile_everywhere
import compile_for_hopper as compiler
import linattn_backends.triton as package
import torch
from linattn_backends.triton.runtime import device, launch
from triton.runtime.jit import JITFunction

STATE = ("delta_state_fwd", "delta_state_bwd")


def show(source, options):
    """Compile a kernel all the way, if it is one of a state."""
    if source.fn.__name__ in STATE:
        registers, spilled, _ = compile_everywhere.usage(source, options, compiler.HOPPER)
        print(source.fn.__name__, registers, spilled)


def main():
    compiler.whole, compiler.read = False, show
    JITFunction.run = compiler.compile_instead
    launch.DIRECT = False  # there is nothing to launch
    device.measured = lambda where: device.Properties(132, True, "plain kernels are wanted")
    family = sys.argv[1]
    given = compiler.arrays(family, 2, 100, dict.fromkeys("qab", torch.float32), K=130, V=90)
    chunk = getattr(package.TritonBackend(), f"chunk_{family}")
    with torch.no_grad():
        chunk(**given)
    compiler.differentiate(*chunk(**given))


if __name__ == "__main__":
    main()
