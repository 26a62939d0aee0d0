"""Shared memory of the plain kernels of one call, forward and backward, where there is no GPU.

Its arguments are family, compute capability, width and dtype. Prints the most that a kernel asks for: a launch fails if that is
more than a block of the device may have. The sequences are long and the heads few, so that sequences are cut into segments.
"""

import sys

import compile_for_hopper as compiler
import linattn_backends.triton as package
import torch
from triton.backends.compiler import GPUTarget

most: dict[str, int] = {}


def measure(source, options, target):
    """Compile as far as shared memory is allocated."""
    size = next(known["shared"] for known in compiler.staged(source, options, target) if "shared" in known)
    name = f"{source.fn.fn.__module__}:{source.fn.__name__}"
    most[name] = max(most.get(name, 0), size)


def main():
    family, capability, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    target = GPUTarget("cuda", capability, 32)
    compiler.read = lambda source, options: measure(source, options, target)
    compiler.read_plain_kernels(capability == 90)
    chunk = getattr(package.TritonBackend(), f"chunk_{family}")
    offsets = torch.tensor([0, 100, 4096], dtype=torch.int32)
    given = compiler.arrays(family, 1, 4096, dict(q=getattr(torch, sys.argv[4])), K=width, V=width)
    options = dict(chunk_size=compiler.SIZES["C"]) if family == "mixed_attn" else {}
    compiler.differentiate(*chunk(**given, cu_seqlens=offsets, **options))
    print(*max((size, name) for name, size in most.items()))


if __name__ == "__main__":
    main()
