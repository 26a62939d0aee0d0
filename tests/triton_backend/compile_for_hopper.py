"""Compiles every kernel that a call of one family launches, for an H100 or H200, where there is no GPU: ``… FAMILY``.

The interpreter runs Python: it takes a name used twice, or a variable whose type changes in a loop. The compiler does not. Run
by test_compiles.py in a process of its own, because the interpreter is chosen when Triton is imported.

First calls in the usual dtypes, the one with most to do before others: of kernels in Gluon, the first configuration that
computes something of its own all the way; others, and plain kernels, which compile_everywhere.py compiles all the way, through
the compiler's front end. Then calls whose gates, ``beta``, ``a``, ``b``, ``u``, ``bias`` and states have dtypes of their own:
by default three, in which each array has each dtype once, and through the front end, where a difference of types is found.
``--every`` takes all combinations, minutes of work, and ``--whole`` compiles everything all the way.
"""

import argparse
import contextlib
import io
import itertools
import re

import linattn_backends.triton as package
import torch
import triton
from linattn.gates import Softplus
from linattn.spec import FAMILIES
from linattn_backends.triton.runtime import device, launch
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIZES = dict(H=2, HV=4, K=64, V=64, L=128, C=32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
GIVEN = ("PACKED", "START", "END", "UNIT")
"""Flags that say what a kernel is given, and not what it computes."""
compiled: set[str] = set()
"""Configurations of kernels that were compiled or read."""
begun: set[str] = set()
"""Kernels that were compiled all the way, with what they compute."""
whole = True
"""Whether kernels are compiled all the way, or read by the front end."""
every = False
"""Whether all the way in configurations, too, that differ in what a kernel is given."""


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
    name = f"{kernel.fn.__module__}:{kernel.__name__}"
    key = str((name, signature, constants, hints, options))
    if key not in compiled:
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, hints)
        if whole and (every or is_first(name, kernel, constants)):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                made = triton.compile(source, target=HOPPER, options=options).asm
            if given.get("MANY") and forgetful(made["ttgir"]):
                raise AssertionError(f"{name} does not know in each partition how many chunks are done: {constants}")
            for complaint in complaints(made["ptx"], printed.getvalue(), options.get("launch_pdl", False)):
                raise AssertionError(f"{name} {complaint}: {constants}")
        else:
            read(source, options)
        compiled.add(key)
    return Kernel()


def read_plain_kernels(large_smem):
    """From now on plain kernels are read in the place of launches, for blocks that have much shared memory or little."""
    global whole
    whole = False
    JITFunction.run = compile_instead
    launch.DIRECT = False  # there is nothing to launch
    properties = device.Properties(132, large_smem, "plain kernels are wanted")
    device.measured = lambda where: properties


def is_first(name, kernel, constants):
    """Whether a kernel comes for the first time with what it is to compute, and it is noted that it came."""
    flags = {kernel.arg_names[place]: x for (place,), x in constants.items() if isinstance(x, bool)}
    given = () if flags.get("MANY") else GIVEN  # a program of several sequences looks their bounds up
    key = str((name, sorted((flag, x) for flag, x in flags.items() if flag not in given)))
    first = key not in begun
    begun.add(key)
    return first


def read(source, options):
    """Through the compiler's front end and its first stage, which check types, shapes and layouts."""
    next(staged(source, options, HOPPER))


def staged(source, options, target):
    """What is known of a kernel after each of the compiler's stages."""
    backend, context = make_backend(target), ir.context()
    options, stages = backend.parse_options(dict(options, **source.parse_options())), {}
    backend.add_stages(stages, options, source.language)
    ir.load_dialects(context)
    backend.load_dialects(context)
    lowered = backend.get_codegen_implementation(options), backend.get_module_map()
    module, known = source.make_ir(target, options, *lowered, context), dict(target=target, num_warps=options.num_warps)
    for stage in stages.values():
        module = stage(module, known)
        yield known


def forgetful(ttgir):
    """Whether a kernel that scans several sequences has a partition that does not count, from 0, the chunks that are done.

    The compiler drops a sum that does nothing but begin an inner loop.
    """
    parts = re.split(r"^ *(?:default \{|partition\d+\()", ttgir, flags=re.MULTILINE)[1:]
    first = [re.search(r"scf\.for .*", part) for part in parts]
    return len(parts) < 2 or not all(loop and re.search(r"iter_args\(.*= %c0_i32", loop[0]) for loop in first)


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


def complaints(ptx, said, follows):
    """What is wrong with a kernel, of which the assembler ``said`` something.

    It may begin before its predecessor has ended if it ``follows``.
    """
    if lone := re.search(r"wgmma.mma_async instructions are serialized due to (.*)", said):
        yield f"waits for every product before it begins the next: {lone[1]}"
    if lost := overwritten(ptx):
        yield f"stores over its barriers at {lost} of shared memory"
    ahead, waits, _ = ptx.partition("griddepcontrol.wait")
    if follows and not waits:
        yield "waits for no kernel before it"
    if waits and (early := re.findall(r"(?:ld|st|atom|red)\.global\S*|cp\.async\.\S*global\S*", ahead)):
        yield f"does not wait for the kernel before it to {early}"


def type_of(x):
    """The type of an argument in a kernel's signature."""
    if isinstance(x, torch.Tensor):
        return POINTERS[x.dtype]
    if isinstance(x, float):
        return "fp32"
    return "i1" if isinstance(x, bool) else "i32" if -(2**31) <= x < 2**31 else "i64"


def draw(shape, dtype, sizes):
    """One array of a symbolic shape, with a gradient; nobody computes with its elements."""
    return torch.zeros([sizes[symbol] for symbol in shape], dtype=dtype, requires_grad=True)


def arrays(family, B, T, dtypes=None, shape=0, optional=False, **sizes):
    """Arrays of one call, all with gradients; those that may have several shapes have the one of this number."""
    sizes = SIZES | dict(B=B, T=T) | sizes
    dtypes = dict(q=torch.bfloat16, beta=torch.bfloat16, a=torch.bfloat16, b=torch.bfloat16) | (dtypes or {})
    given = {}
    for arg in (*FAMILIES[family].args, *FAMILIES[family].keyword_args):
        if optional or not arg.optional:
            dtype = dtypes["q"] if arg.role == "operand" else dtypes.get(arg.name, torch.float32)
            given[arg.name] = draw(arg.shapes[shape % len(arg.shapes)], dtype, sizes)
    return given


def run(family):
    """Chunk form forward and backward, equal and packed, grouped heads and states; decoding; what only this family has."""
    backend = package.TritonBackend()
    chunk = getattr(backend, f"chunk_{family}")
    if family == "mixed_attn":
        for causal in (True, False):
            given = arrays(family, 1, 64)
            o, state = chunk(**given, chunk_size=32, causal=causal, output_final_state=causal)
            differentiate(o, state)
            if causal:
                token = arrays(family, 1, 1)
                backend.recurrent_mixed_attn(**token, initial_state=state, chunk_size=32, output_final_state=True)
        return
    S = torch.zeros(2, 4, 64, 64, requires_grad=True)
    packed = dict(initial_state=S, cu_seqlens=torch.tensor([0, 100, 256], dtype=torch.int32), output_final_state=True)
    if family in ("simple_gla", "delta_rule", "gated_delta_rule", "kda"):
        differentiate(*chunk(**arrays(family, 1, 256), **maps(family), **packed))
    differentiate(*chunk(**arrays(family, 1, 256), **packed))
    differentiate(*chunk(**arrays(family, 2, 256), output_final_state=True))
    with torch.no_grad():
        if family != "ssd":
            in_stages(backend, family, S.detach())
        token = arrays(family, 2, 1)
        getattr(backend, f"recurrent_{family}")(**token, initial_state=S.detach(), output_final_state=True)
        getattr(backend, f"decode_{family}")(**token, state=S.detach())
    if family == "linear_attn":
        differentiate(*chunk(**arrays(family, 2, 256), causal=False))
    if family in ("linear_attn", "simple_gla", "gla"):
        differentiate(*chunk(**arrays(family, 2, 256), output_final_state=True, normalize=True))
    if family == "ssd":
        differentiate(*chunk(**arrays(family, 2, 256, optional=True), dt_softplus=True))
        differentiate(*chunk(**arrays(family, 1, 256, optional=True, shape=1), **packed))
        with torch.no_grad():
            backend.decode_ssd(**arrays(family, 2, 1, optional=True), state=S.detach(), dt_softplus=True)
    if family == "simple_gla":  # as many heads of values as of keys: one kernel for the gradients
        differentiate(*chunk(**arrays(family, 2, 256, H=4)))
        differentiate(*chunk(**arrays(family, 1, 256, H=4), **packed))
    if family in ("linear_attn", "simple_gla", "ssd"):  # a program scans several sequences
        width, offsets = 128 if family == "simple_gla" else 64, torch.arange(0, 6401, 64, dtype=torch.int32)
        given = dict(initial_state=torch.zeros(100, 4, width, width, requires_grad=True), output_final_state=True)
        differentiate(*chunk(**arrays(family, 1, 6400, H=4, K=width, V=width), **given, cu_seqlens=offsets))
    if family in ("linear_attn", "simple_gla"):  # two programs share a walk; states wider than a warpgroup's part of a product
        differentiate(*chunk(**arrays(family, 36, 512, H=1, HV=1), output_final_state=True))
        differentiate(*chunk(**arrays(family, 2, 256, K=256, V=192)))
        S = torch.zeros(2, 4, 256, 192, requires_grad=True)
        differentiate(*chunk(**arrays(family, 1, 256, K=256, V=192), **packed | dict(initial_state=S)))
    if family in ("delta_rule", "gated_delta_rule", "kda", "dplr"):  # several sequences a program, with and without gradients
        S, offsets = torch.zeros(200, 4, 128, 128, requires_grad=True), torch.arange(0, 12801, 64, dtype=torch.int32)
        given = dict(initial_state=S, cu_seqlens=offsets, output_final_state=True)
        differentiate(*chunk(**arrays(family, 1, 12800, K=128, V=128), **given))
        differentiate(*chunk(**arrays(family, 200, 64, K=128, V=128)))
        unit = {} if family == "dplr" else dict(qk_norm="l2")
        with torch.no_grad():
            chunk(**arrays(family, 1, 12800, K=128, V=128), **given)
            chunk(**arrays(family, 1, 12800, K=128, V=128), **given, **unit)
            chunk(**arrays(family, 200, 64, K=128, V=128))
    if family in ("delta_rule", "gated_delta_rule"):  # many heads in one kernel
        with torch.no_grad():
            chunk(**arrays(family, 25, 256, K=128, V=128))
            chunk(**arrays(family, 25, 256, K=128, V=128), qk_norm="l2", output_final_state=True)
    if family == "dplr":  # wider than the operands
        differentiate(*chunk(**arrays(family, 2, 256, dict(a=torch.float32, b=torch.float32))))
        # the widths whose walks are for Hopper: of segments, too
        S = torch.zeros(2, 4, 128, 128, requires_grad=True)
        differentiate(*chunk(**arrays(family, 1, 256, K=128, V=128), **packed | dict(initial_state=S)))
        differentiate(*chunk(**arrays(family, 2, 4096, K=128, V=128)))
        # many heads of 64, whose states walk in one kernel
        S = torch.zeros(50, 4, 64, 64, requires_grad=True)
        differentiate(*chunk(**arrays(family, 50, 128)))
        differentiate(*chunk(**arrays(family, 50, 128, dict(a=torch.float32)), initial_state=S, output_final_state=True))
    if family in ("gla", "rwkv6"):  # gates in 16 bits
        differentiate(*chunk(**arrays(family, 2, 256, dict(g=torch.bfloat16, u=torch.bfloat16))))


def in_stages(backend, family, S):
    """What runs between the exchanges of ranks."""
    options = dict(cu_seqlens=None, offsets=(), scale=None, chunk_size=None)
    inputs, stages = backend.stages(family, arrays(family, 2, 256), **options)
    layout, digest = stages.layout(inputs), torch.zeros(2)
    made, message = stages.opened(inputs, digest)
    messages = torch.stack((message, message))
    stages.entering(layout, messages, digest, *torch.zeros(2, dtype=torch.uint8).unbind(), 0, 1)
    o, end, kept = stages.finish(inputs, made, S, True)
    made = stages.begin(inputs, kept)
    for dfinal in (None, end):
        d = stages.adjoint(inputs, made, o, dfinal, None)
    stages.leaving(layout, torch.stack((d, d)), stages.crossed(layout, messages, 1, 0), 1, 1)
    stages.gradients(inputs, stages.recall(inputs, made, S), S, o, end)


def maps(family):
    """Every input map that the kernels of a family make, the gate's with all parameters that one has."""
    asked = {} if family == "simple_gla" else dict(qk_norm="l2", beta_map="sigmoid")
    if family == "delta_rule":
        return asked
    heads = [SIZES["HV"], SIZES["K"]] if family == "kda" else [SIZES["HV"]]
    return asked | dict(gate=Softplus(torch.randn(heads[0]).requires_grad_(), torch.randn(heads).requires_grad_()))


def mix(family, every, operands):
    """Forward, backward and recurrent calls in mixed dtypes, split where a sequence can be, with states.

    ``operands`` are the operands' dtypes.
    """
    spec = FAMILIES[family]
    names = [*(arg.name for arg in (*spec.args, *spec.keyword_args) if arg.role == "float"), "state"]
    for shift, (q, *others) in enumerate(combinations(operands, len(names), every)):
        mixed_call(family, dict(zip(names, others, strict=True), q=q), shift)


def combinations(operands, count, every):
    """Of dtypes, for the operands and ``count`` arrays: all, or three in which arrays have each, and neighbours differ."""
    if every:
        return list(itertools.product(operands, *[DTYPES] * count))
    shifts = [[DTYPES[(shift + place) % 3] for place in range(count)] for shift in range(1, 4)]
    return [(operands[n % len(operands)], *others) for n, others in enumerate(shifts)]


def mixed_call(family, dtypes, shift):
    """One such combination; the arrays' alternative shapes, and optional arrays, come in turn."""
    backend = package.TritonBackend()
    forms = {form: getattr(backend, f"{form}_{family}") for form in ("chunk", "recurrent")}
    several = dict(dtypes=dtypes, shape=shift, optional=shift % 2 == 1)
    if family == "mixed_attn":
        given = dict(chunk_size=32, output_final_state=True)
        _, state = forms["chunk"](**arrays(family, 1, 64, **several), **given)
        state = tuple(x.to(dtypes["state"]) if x.is_floating_point() else x for x in state)
        differentiate(*forms["chunk"](**arrays(family, 1, 64, **several), **given, initial_state=state))
        with torch.no_grad():
            forms["recurrent"](**arrays(family, 1, 1, **several), **given, initial_state=state)
        return
    S = draw("NHKV", dtypes["state"], dict(N=2, H=4, K=64, V=64))
    given = arrays(family, 2, 4096, **several)
    differentiate(*forms["chunk"](**given, initial_state=S, output_final_state=True))
    with torch.no_grad():
        token = arrays(family, 2, 1, **several)
        forms["recurrent"](**token, initial_state=S.detach(), output_final_state=True)
        getattr(backend, f"decode_{family}")(**token, state=S.detach())


def differentiate(*results):
    """The backward pass of whatever there is."""
    leaves = [x for result in results if result is not None for x in (result if isinstance(result, tuple) else (result,))]
    sum(x.float().sum() for x in leaves if x.requires_grad).backward()


def main():
    global whole, every
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--every", action="store_true", help="all combinations of dtypes")
    parser.add_argument("--whole", action="store_true", help="all the way in each configuration")
    given = parser.parse_args()
    JITFunction.run = compile_instead
    launch.DIRECT = False  # there is nothing to launch
    triton.knobs.nvidia.dump_ptxas_log = True
    every = given.whole
    counts = []
    for reason, operands in (("the device is another", DTYPES), (None, DTYPES[:1])):
        device.measured = lambda where, reason=reason: device.Properties(132, True, reason)
        before = len(compiled)
        whole = given.whole or reason is None
        run(given.family)
        counts.append(len(compiled) - before)
        before = len(compiled)
        whole = given.whole
        mix(given.family, given.every, operands)
        counts.append(len(compiled) - before)
    plain, mixed, gluon, mixed_gluon = counts
    print(plain, "kernels and", gluon, "in Gluon; in mixed dtypes", mixed, "and", mixed_gluon)


if __name__ == "__main__":
    main()
