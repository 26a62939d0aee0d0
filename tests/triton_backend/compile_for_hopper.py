"""Compiles every kernel that a call of one family launches, for an H100 or H200, where there is no GPU: ``… FAMILY``.

The interpreter runs Python: it takes a name used twice, or a variable whose type changes in a loop. The compiler does not. Run
by test_compiles.py in a process of its own, because the interpreter is chosen when Triton is imported.
"""

import importlib
import pkgutil
import re
import sys

import linattn_backends.triton as package
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
compiled: set[str] = set()


class Kernel:
    """Stands for a compiled kernel; launching it does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **config: None


def compile_instead(kernel, *args, grid, warmup, **config):
    """In place of ``JITFunction.run``: what it would compile for these arguments."""
    options = {name: config.pop(name) for name in OPTIONS if name in config}
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **config}
    signature, constants, hints = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        x = given.get(parameter.name, parameter.default)
        kind = "constexpr" if parameter.is_constexpr or x is None else type_of(x)
        if kind == "i32" and x == 1 and not parameter.do_not_specialize:
            kind = "constexpr"
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[(place,)] = x
        elif isinstance(x, torch.Tensor) or (kind == "i32" and x % 16 == 0 and not parameter.do_not_specialize):
            hints[(place,)] = [["tt.divisibility", 16]]
    key = str((kernel.__name__, signature, constants, hints, options))
    if key not in compiled:
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        ptx = triton.compile(source(kernel, signature, constants, hints), target=HOPPER, options=options).asm["ptx"]
        lost = overwritten(ptx)
        assert not lost, f"{kernel.__name__} stores over its barriers at {lost} of shared memory: {constants}"
        assert not early(ptx), f"{kernel.__name__} touches memory before it has waited for the kernel before: {constants}"
        assert "griddepcontrol.wait" in ptx or not options.get("launch_pdl"), f"{kernel.__name__} waits for no kernel before it"
        compiled.add(key)
    return Kernel()


def overwritten(ptx):
    """Where a kernel stores to the memory of a barrier that it has initialised, at an address that the compiler knows.

    A barrier that no partition uses is dead, and what partitions are given takes its place; but its initial value may be
    written later than that, and no program may use a barrier's memory again.
    """
    places = dict(re.findall(r"add\.s32 \s*(%r\d+), %r\d+, (\d+);", ptx))
    barriers = {int(places.get(register, 0)) for register in re.findall(r"mbarrier\.init\.\S+ \[(%r\d+)\]", ptx)}
    stores = re.findall(r"st\.shared(?:\.v(\d))?\.b(\d+) \s*\[global_smem\+?(\d*)\]", ptx)
    spans = [(int(place or 0), int(place or 0) + int(count or 1) * int(bits) // 8) for count, bits, place in stores]
    return sorted(at for at in barriers if any(low < at + 8 and at < high for low, high in spans))


def early(ptx):
    """What a kernel that may begin before its predecessor has ended does to memory before it waits for that."""
    ahead, waits, _ = ptx.partition("griddepcontrol.wait")
    return re.findall(r"(?:ld|st|atom|red)\.global\S*|cp\.async\.\S*global\S*", ahead) if waits else []


def type_of(x):
    """The type of an argument in a kernel's signature."""
    if isinstance(x, torch.Tensor):
        return POINTERS[x.dtype]
    if isinstance(x, float):
        return "fp32"
    return "i1" if isinstance(x, bool) else "i32" if -(2**31) <= x < 2**31 else "i64"


def operands(family, B, T, H, HV, K, V):
    """Arrays of one call, all with gradients."""
    draw = lambda *shape, dtype=torch.bfloat16: torch.randn(shape).to(dtype).requires_grad_()  # noqa: E731
    gate = lambda *shape: draw(*shape, dtype=torch.float32)  # noqa: E731
    if family == "mixed_attn":
        return [draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, 2 * K), draw(B, T, H, 2 * K), draw(B, T, H, V)]
    arrays = [draw(B, T, H, K), draw(B, T, H, K), draw(B, T, HV, V)]
    vectors = dict.fromkeys(("gla", "rwkv6", "kda", "dplr"), (B, T, HV, K))
    scalars = dict.fromkeys(("simple_gla", "gated_delta_rule"), (B, T, HV))
    arrays += [gate(*shape) for name, shape in {**vectors, **scalars}.items() if name == family]
    if family == "rwkv6":
        arrays.append(gate(HV, K))
    if family in ("delta_rule", "gated_delta_rule", "kda"):
        arrays.append(draw(B, T, HV))
    return [*arrays, draw(B, T, HV, K), draw(B, T, HV, K)] if family == "dplr" else arrays


def run(family):
    """Chunk form forward and backward, equal and packed, grouped heads and states; decoding; what only this family has."""
    backend, sizes = package.TritonBackend(), dict(H=2, HV=4, K=64, V=64)
    chunk = getattr(backend, f"chunk_{family}")
    if family == "mixed_attn":
        for causal in (True, False):
            o, state = chunk(*operands(family, 1, 64, **sizes), chunk_size=32, causal=causal, output_final_state=causal)
            differentiate(o, state)
            if causal:
                given = dict(initial_state=state, chunk_size=32, output_final_state=True)
                backend.recurrent_mixed_attn(*operands(family, 1, 1, **sizes), **given)
        return
    differentiate(*chunk(*operands(family, 2, 256, **sizes), output_final_state=True))
    S = torch.zeros(2, 4, 64, 64, requires_grad=True)
    packed = dict(initial_state=S, cu_seqlens=torch.tensor([0, 100, 256], dtype=torch.int32), output_final_state=True)
    differentiate(*chunk(*operands(family, 1, 256, **sizes), **packed))
    with torch.no_grad():
        token = operands(family, 2, 1, **sizes)
        getattr(backend, f"recurrent_{family}")(*token, initial_state=S.detach(), output_final_state=True)
        getattr(backend, f"decode_{family}")(*token, state=S.detach(), scale=None, state_indices=None)
    if family == "linear_attn":
        differentiate(*chunk(*operands(family, 2, 256, **sizes), causal=False))
        differentiate(*chunk(*operands(family, 2, 256, **sizes), normalize=True))
    if family == "simple_gla":  # as many heads of values as of keys: one kernel for the gradients
        alone = sizes | dict(H=4)
        differentiate(*chunk(*operands(family, 2, 256, **alone)))
        differentiate(*chunk(*operands(family, 1, 256, **alone), **packed))
    if family == "dplr":  # wider than the operands
        *arrays, a, b = operands(family, 2, 256, **sizes)
        differentiate(*chunk(*arrays, *(x.detach().float().requires_grad_() for x in (a, b))))
    if family in ("gla", "rwkv6"):  # gates in 16 bits
        differentiate(*chunk(*(x.detach().bfloat16().requires_grad_() for x in operands(family, 2, 256, **sizes))))


def differentiate(*results):
    """The backward pass of whatever there is."""
    leaves = [x for result in results if result is not None for x in (result if isinstance(result, tuple) else (result,))]
    sum(x.float().sum() for x in leaves if x.requires_grad).backward()


def main():
    JITFunction.run = compile_instead
    modules = []
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        if hasattr(loaded, "processors"):
            loaded.processors = lambda device: 132
        if hasattr(loaded, "DIRECT"):
            loaded.DIRECT = False  # there is nothing to launch
        modules.append(loaded)
    run(sys.argv[1])
    plain = len(compiled)
    for loaded in modules:
        if hasattr(loaded, "hopper"):
            loaded.hopper = lambda device: True
    run(sys.argv[1])
    print(plain, "kernels and", len(compiled) - plain, "in Gluon")


if __name__ == "__main__":
    main()
