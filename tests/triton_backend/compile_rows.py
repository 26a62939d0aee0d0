"""What the compiler makes of the short convolution, the gated norm and Hedgehog's map, without a GPU: ``… CAPABILITY FOLDER``.

Prints a line for each kernel: its name, registers a thread, bytes of stack, where registers are spilled, and how many bytes the
widest access to memory has. Run by test_compiles.py in a process of its own.
"""

import re
import subprocess
import sys
from pathlib import Path

import compile_for_hopper as compiler
import torch
import triton
from linattn.feature_maps import Hedgehog
from linattn_backends.triton import conv, norm
from linattn_backends.triton.features import features
from linattn_backends.triton.runtime import device, launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
BF16, T, D = torch.bfloat16, 8192, 4096


def examine(source: ASTSource, options, target, folder):
    """Compile all the way, and print what became of a kernel."""
    made = triton.compile(source, target=target, options=options).asm
    ptx, name = made["ptx"], source.fn.__name__
    assert not re.search(r"\b(atom|red)\.", ptx), f"{name} adds in no fixed order"
    file = Path(folder) / f"{name}.cubin"
    file.write_bytes(made["cubin"])
    said = subprocess.run([CUOBJDUMP, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    accesses = re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    print(name, registers, stack, max(int(count or 1) * int(bits) // 8 for count, bits in accesses))


def drawn(*shape):
    return torch.zeros(shape, dtype=BF16, requires_grad=True)


def convolutions():
    """Of equal and of packed sequences, with all there may be; and decoding on pools of two kinds."""
    x, weight, bias = drawn(1, T, D), drawn(D, 4), drawn(D)
    conv.short_conv(x, weight, activation="silu")[0].sum().backward()
    given = dict(initial_state=drawn(2, D, 3), cu_seqlens=torch.tensor([0, 100, T], dtype=torch.int32), output_final_state=True)
    y, end = conv.short_conv(x, weight, bias, activation="silu", **given)
    (y.float().sum() + end.sum()).backward()
    conv.short_conv(drawn(1, T, D), drawn(D, 8), bias)[0].sum().backward()
    slots, token = torch.zeros(2, dtype=torch.int32), drawn(2, 1, D).detach()
    for pool in (torch.zeros(2, D, 4, dtype=BF16), torch.zeros(2, 3, D, dtype=BF16).transpose(1, 2)):
        conv.decode_short_conv(token, weight.detach(), state=pool, state_indices=slots)


def norms():
    """Of wide rows, of groups, and of heads; both orders."""
    for columns, group_size, before in ((D, D, True), (D, D, False), (5120, 5120, True), (8192, 1024, False), (128, 128, True)):
        x, z, weight = drawn(64, columns), drawn(64, columns), drawn(columns)
        norm.gated_rms_norm(x, z, weight, norm_before_gate=before, group_size=group_size).sum().backward()


def feature_maps():
    """Of usual heads, with softmax and without."""
    x, W, b = drawn(1, 256, 16, 64), drawn(16, 64, 64), drawn(16, 64)
    for softmax in (False, True):
        features(Hedgehog(W, b, softmax=softmax), x).sum().backward()


def main():
    target, folder = GPUTarget("cuda", int(sys.argv[1]), 32), sys.argv[2]
    compiler.whole, compiler.read = False, lambda source, options: examine(source, options, target, folder)
    JITFunction.run = compiler.compile_instead
    launch.DIRECT = False  # there is nothing to launch
    device.measured = lambda where: device.Properties(132, True, "plain kernels are wanted")
    convolutions()
    norms()
    feature_maps()


if __name__ == "__main__":
    main()
