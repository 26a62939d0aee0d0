"""Runs this package's kernels in Gluon, which has no interpreter, on NumPy arrays: a thread a warpgroup.

What shows only where things run at once is looked for. Shared memory holds a NaN of its own until a copy's barrier is reached;
the operands of a product must be the same when it is waited for as when it was issued; its result may not be read before; what
is loaded and stored must lie inside the arrays; a barrier takes as many arrivals as it counts, and no warpgroup waits for ever;
and threads pause at random. Layouts, registers and speed are the compiler's matter.
"""

from __future__ import annotations

import ast
import importlib.util
import operator
import random
import threading
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

NOTHING = np.uint32(0x7FC0BEEF).view(np.float32)
"""Shared memory that nobody has written: a NaN that no sum makes."""
PATIENCE = 30
"""Seconds that a warpgroup waits for another."""
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
"""Of the compiler and of a launch."""
OF_TORCH = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}


def rounded(x):
    """float32 numbers as bfloat16 has them."""
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).to(torch.bfloat16).float().numpy()


@dataclass(frozen=True)
class Dtype:
    name: str


def kind_of(x):
    """The dtype's name of a number or an array."""
    if isinstance(x, Value):
        return x.kind
    kind = np.asarray(x).dtype.kind
    return {"f": "f32", "b": "i1"}.get(kind, "i64")


def numbers(x):
    """The NumPy array behind a value."""
    if not isinstance(x, Value):
        return np.asarray(x)
    assert x.done, "a product's result is read before the product was waited for"
    return x.array


class Value:
    """A tensor, or a number, in registers."""

    type = SimpleNamespace(layout=None)

    def __init__(self, array, kind=None):
        self.array = np.asarray(array)
        self.kind = kind or kind_of(self.array)
        self.done = True
        self.dtype = Dtype(self.kind)

    @property
    def shape(self):
        return self.array.shape

    def to(self, dtype):
        x = numbers(self)
        if dtype.name == "bf16":
            return Value(rounded(x), "bf16")
        if dtype.name == "f16":
            return Value(x.astype(np.float16).astype(np.float32), "f16")
        if dtype.name == "u32":
            return Value(x.astype(np.int64) % (1 << 32), "i64")
        return Value(x.astype(np.float32 if dtype.name == "f32" else np.int64), dtype.name)

    def __index__(self):
        return int(numbers(self))

    def __bool__(self):
        return bool(numbers(self))

    def __getitem__(self, key):
        return Value(numbers(self)[key], self.kind)

    def __neg__(self):
        return Value(-numbers(self), self.kind)


def elementwise(function, *operands):
    """Of bfloat16 alone it is bfloat16, as in Gluon; a Python number takes the dtype of the other operand."""
    kinds = {kind_of(x) for x in operands if isinstance(x, Value)} or {kind_of(x) for x in operands}
    result = np.asarray(function(*map(numbers, operands)))
    if result.dtype.kind == "b":
        return Value(result, "i1")
    if kinds - {"i1"} == {"bf16"}:
        return Value(rounded(result), "bf16")
    floating = kinds & {"f32", "f16", "bf16"} or any(isinstance(x, float) for x in operands)
    return Value(result.astype(np.float32), "f32") if floating else Value(result.astype(np.int64), "i64")


def give_operators():
    for name in (
        "add",
        "sub",
        "mul",
        "floordiv",
        "mod",
        "truediv",
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
        "and_",
        "or_",
        "xor",
        "rshift",
    ):
        function, method = getattr(operator, name), name.rstrip("_")

        def forward(self, other, function=function):
            return other + self if isinstance(other, Pointer) else elementwise(function, self, other)

        def backward(self, other, function=function):
            return elementwise(function, other, self)

        setattr(Value, f"__{method}__", forward)
        if method not in ("lt", "le", "gt", "ge", "eq", "ne"):
            setattr(Value, f"__r{method}__", backward)


class Pointer:
    """Into a flat array, at one place or many."""

    def __init__(self, array, kind, places=0):
        self.array, self.kind, self.places = array, kind, places
        self.dtype = SimpleNamespace(element_ty=Dtype(kind))

    def __add__(self, offsets):
        return Pointer(self.array, self.kind, self.places + numbers(offsets))

    def __sub__(self, offsets):
        return Pointer(self.array, self.kind, self.places - numbers(offsets))

    __radd__ = __add__


give_operators()


def inside(p, mask):
    places = np.asarray(p.places)
    wanted = np.ones(places.shape, bool) if mask is None else np.broadcast_to(numbers(mask), places.shape)
    assert ((places[wanted] >= 0) & (places[wanted] < p.array.size)).all(), "past the ends of an array"
    return places, wanted


def load(p, mask=None, other=0.0, cache_modifier=""):
    places, wanted = inside(p, mask)
    found = np.full(places.shape, other, np.int64 if p.kind == "i64" else np.float32)
    found[wanted] = p.array[places[wanted]]
    return Value(found, p.kind)


def store(p, x, mask=None):
    places, wanted = inside(p, mask)
    x = np.broadcast_to(numbers(x), places.shape)[wanted]
    p.array[places[wanted]] = rounded(x) if p.kind == "bf16" else x


def pause():
    if random.random() < 0.02:
        time.sleep(random.random() * 0.001)


class Allocated:
    def _keep_alive(self):
        """Here nobody takes a buffer's memory."""


class Shared(Allocated):
    """Shared memory."""

    def __init__(self, array, kind):
        self.array, self.kind, self.dtype = array, kind, Dtype(kind)

    @property
    def shape(self):
        return self.array.shape

    def index(self, i):
        return Shared(self.array[int(i)], self.kind)

    def slice(self, start, length, dim=0):
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + length),)], self.kind)

    def permute(self, order):
        return Shared(self.array.transpose(order), self.kind)

    def reshape(self, shape):
        found = self.array.reshape(shape)
        assert np.shares_memory(found, self.array)
        return Shared(found, self.kind)

    def _reinterpret(self, dtype, shape, layout):
        """Other memory: who takes the place of something else does so in the order of the program."""
        return Shared(np.full(shape, NOTHING, np.float32), dtype.name)

    def load(self, layout):
        pause()
        return Value(self.array.copy(), self.kind)

    def store(self, x):
        pause()
        assert self.array.shape == x.shape, f"stores {x.shape} to memory of {self.array.shape}"
        assert self.kind == x.kind, f"stores {x.kind} to memory of {self.kind}"
        self.array[...] = numbers(x)


class Barrier(Allocated):
    def __init__(self):
        self.count = self.left = self.phase = 0


class Barriers(Allocated):
    def __init__(self, count):
        self.each = [Barrier() for _ in range(count)]

    def index(self, i):
        return self.each[int(i)]


class Machine:
    """What the warpgroups of one program share, and for each what it has begun."""

    def begin(self, program, programs):
        self.program, self.programs = program, programs
        self.changed, self.errors, self.own = threading.Condition(), [], threading.local()

    def begun(self, what):
        if not hasattr(self.own, what):
            setattr(self.own, what, [])
        return getattr(self.own, what)


machine = Machine()


def allocate(dtype, shape, layout, value=None):
    if dtype.name == "i64":
        return Barriers(shape[0]) if len(shape) > 1 else Barrier()
    found = Shared(np.full(shape, NOTHING, np.float32), dtype.name)
    if value is not None:
        found.store(value)
    return found


class mbarrier:
    @staticmethod
    def MBarrierLayout():
        pass

    @staticmethod
    def init(barrier, count):
        barrier.count = barrier.left = count

    @staticmethod
    def arrive(barrier, count=1):
        pause()
        with machine.changed:
            barrier.left -= count
            assert barrier.left >= 0, "more arrivals than a barrier counts"
            if barrier.left == 0:
                barrier.left = barrier.count
                barrier.phase ^= 1
                machine.changed.notify_all()

    @staticmethod
    def wait(barrier, phase):
        pause()
        with machine.changed:
            moved = machine.changed.wait_for(lambda: barrier.phase != int(phase) or machine.errors, timeout=PATIENCE)
            assert moved, "warpgroups wait for one another"
            if machine.errors:
                raise SystemExit


class async_copy:
    @staticmethod
    def async_copy_global_to_shared(buffer, p, mask=None):
        buffer.array[...] = NOTHING
        machine.begun("copies").append((buffer, load(p, mask)))

    @staticmethod
    def finish(copies):
        for buffer, x in copies:
            buffer.array[...] = x.array
        copies.clear()

    @staticmethod
    def mbarrier_arrive(barrier, increment_count):
        pause()
        async_copy.finish(machine.begun("copies"))
        mbarrier.arrive(barrier, machine.own.threads)

    @staticmethod
    def commit_group():
        machine.begun("groups").append(list(machine.begun("copies")))
        machine.begun("copies").clear()

    @staticmethod
    def wait_group(pending):
        groups = machine.begun("groups")
        while len(groups) > pending:
            async_copy.finish(groups.pop(0))


def operand(x):
    return x.array if isinstance(x, Shared) else numbers(x)


def warpgroup_mma(a, b, acc, use_acc, is_async):
    read = [(x, operand(x).copy()) for x in (a, b)]
    missing = NOTHING.view(np.uint32)
    assert not any((x.astype(np.float32).view(np.uint32) == missing).any() for _, x in read), "an operand that is not there yet"
    result = read[0][1].astype(np.float64) @ read[1][1] + (acc.array if use_acc else 0.0)
    result = Value(result.astype(np.float32))
    result.done = False
    machine.begun("products").append((result, read))
    return result


def warpgroup_mma_wait(pending, deps):
    products = machine.begun("products")
    while len(products) > pending:
        result, read = products.pop(0)
        assert all(np.array_equal(operand(x), then, equal_nan=True) for x, then in read), "an operand was overwritten"
        result.done = True
    return deps[0] if len(deps) == 1 else tuple(deps)


def mma_v2(a, b, acc, precision):
    return Value((numbers(a).astype(np.float64) @ numbers(b) + numbers(acc)).astype(np.float32))


def log2_of_one_and_exp2(x):
    """``log2(1 + 2^x)`` in float32, as ``sm90_gates.LOG_OF_ONE_AND_EXP`` makes it."""
    e = np.exp2(-np.abs(x), dtype=np.float32)
    first, second, third = np.array([1.4426950408889634, -0.7213475204444817, 0.4808983469629878], np.float32)
    found = np.where(e < 2.0**-6, e * (first + e * (second + e * third)), np.log2(np.float32(1) + e))
    return np.maximum(x, np.float32(0)) + found


def in_assembly(assembly, constraints, args, dtype, is_pure, pack):
    """In place of the only instructions of the processor's own: copies of numbers, roundings, and those of ``sm90_gates``."""
    if "mov.b32" in assembly:
        return args[0]
    if "add.u32" in assembly:
        bits = np.ascontiguousarray(numbers(args[0]), np.float32).view(np.uint32)
        return Value((bits + np.uint32(0x1000)).view(np.float32))
    if "lg2.approx" in assembly:
        return elementwise(log2_of_one_and_exp2, *args)
    if assembly.startswith("shl.b32"):
        return args[0].to(dtype)
    if "mul.rn.bf16x2" in assembly:
        x, y, e, first = args
        return elementwise(operator.mul, LANGUAGE.where(first != 0, x, y), e), elementwise(operator.mul, y, e)
    if "setp.lt.u32" in assembly:
        x, y, i, limit = args
        return tuple(LANGUAGE.where(i.to(LANGUAGE.uint32) < limit, each, LANGUAGE.zeros_like(each)) for each in (x, y))
    assert "cvt.rn.bf16x2" in assembly
    if not isinstance(dtype, tuple):
        return args[0].to(dtype)
    first = args[0].to(dtype[0])
    return first, elementwise(operator.sub, args[0], first).to(dtype[1])


def split(x):
    return x[..., 0], x[..., 1]


def broadcast(a, b):
    return tuple(Value(x, y.kind) for x, y in zip(np.broadcast_arrays(numbers(a), numbers(b)), (a, b), strict=True))


def out_of_range():
    """Where numbers may leave float32's range: the kernels mask those."""
    return np.errstate(over="ignore", invalid="ignore")


def warp_specialize(parts, warps, registers):
    assert len(parts) == len(warps) + 1 == len(registers) + 1

    def run(function, arguments, count):
        machine.own.threads = 32 * count
        try:
            with out_of_range():
                function(*arguments)
        except SystemExit:
            pass
        except BaseException:
            machine.errors.append(traceback.format_exc())

    threads = [
        threading.Thread(target=run, args=(*part, count), daemon=True) for part, count in zip(parts, [4, *warps], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not machine.errors, machine.errors[0]


def nothing(*args, **options):
    pass


def reduction(function):
    return lambda x, axis: Value(function(numbers(x), axis=axis), x.kind)


class Language(SimpleNamespace):
    """``gl``, and ``tl`` for what the kernels share with those in Triton."""

    def __init__(self):
        super().__init__(
            load=load, store=store, allocate_shared_memory=allocate, warp_specialize=warp_specialize, thread_barrier=nothing,
            program_id=lambda axis: Value(machine.program), num_programs=lambda axis: Value(machine.programs),
            constexpr=lambda x: x, static_range=range, inline_asm_elementwise=in_assembly,
            to_tensor=lambda x: x if isinstance(x, Value) else Value(x), convert_layout=lambda x, layout: x[...],
            reshape=lambda x, shape: Value(numbers(x).reshape(shape), x.kind),
            permute=lambda x, order: Value(numbers(x).transpose(order), x.kind),
            broadcast=broadcast,
            join=lambda a, b: Value(np.stack([numbers(a), numbers(b)], -1), a.kind), split=split,
            arange=lambda low, high, layout=None: Value(np.arange(low, high)),
            zeros=lambda shape, dtype, layout: Value(np.zeros(shape, np.float32), dtype.name),
            zeros_like=lambda x: Value(np.zeros_like(numbers(x)), x.kind),
            full=lambda shape, x, dtype, layout: Value(np.full(shape, x, np.float32), dtype.name),
            minimum=lambda a, b, **nan: elementwise(np.minimum, a, b),
            maximum=lambda a, b, **nan: elementwise(np.maximum, a, b),
            PropagateNan=SimpleNamespace(ALL=None), static_assert=nothing,
            where=lambda c, a, b: elementwise(lambda a, b: np.where(numbers(c), a, b), a, b),
            exp2=lambda x: elementwise(np.exp2, x), abs=lambda x: elementwise(np.abs, x),
            rsqrt=lambda x: elementwise(lambda a: 1.0 / np.sqrt(a), x),
            sum=reduction(np.sum), min=reduction(np.min), max=reduction(np.max),
            associative_scan=lambda x, axis, add: Value(np.cumsum(numbers(x), axis, dtype=np.float32)),
            int32=Dtype("i64"), int64=Dtype("i64"), uint32=Dtype("u32"), float32=Dtype("f32"), bfloat16=Dtype("bf16"),
            NVMMASharedLayout=SimpleNamespace(get_default_for=nothing),
        )  # fmt: skip

    def __getattr__(self, name):
        if name.endswith("Layout"):
            return nothing
        raise AttributeError(name)


def decorator(function=None, **options):
    return function or (lambda function: function)


def aggregate(cls):
    """Several values that travel as one: ``__init__`` sets the fields that are annotated, all of them and no others."""
    fields, begin = list(cls.__annotations__), cls.__init__

    def __init__(self, *args, **given):
        begin(self, *args, **given)
        found = ", ".join(vars(self))
        assert vars(self).keys() == set(fields), f"{cls.__name__}.__init__ sets {found}, not {', '.join(fields)}"

    cls.__init__ = __init__
    return cls


LANGUAGE = Language()
FAKES = dict(
    tl=LANGUAGE, gl=LANGUAGE, triton=SimpleNamespace(jit=decorator, knobs=importlib.import_module("triton").knobs),
    gluon=SimpleNamespace(jit=decorator, constexpr_function=decorator), async_copy=async_copy, mbarrier=mbarrier, mma_v2=mma_v2,
    fence_async_shared=nothing, gdc_wait=nothing, gdc_launch_dependents=nothing, warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait, NamedTuple=NamedTuple, aggregate=aggregate,
)  # fmt: skip


@cache
def on_numpy(name):
    """The names of a module, its kernels as functions of what is above."""
    file = importlib.util.find_spec(name).origin
    tree, space = ast.parse(Path(file).read_text()), {}
    for node in [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]:
        tree.body.remove(node)
        for alias in node.names:
            known = alias.asname or alias.name.partition(".")[0]
            if isinstance(node, ast.ImportFrom) and node.level:
                within = name.rsplit(".", node.level)[0]
                space[known] = on_numpy(f"{within}.{node.module}")[alias.name]
            elif known in FAKES:
                space[known] = FAKES[known]
    tree.body.insert(0, ast.ImportFrom("__future__", [ast.alias("annotations")], 0))
    exec(compile(ast.fix_missing_locations(tree), file, "exec"), space)
    return space


def memory_of(x):
    """The whole array that a tensor lies in, from its first element on."""
    length = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return torch.as_strided(x, (length,), (1,))


def run(kernel, count, args, config):
    """In place of a launch."""
    function, given, tensors = on_numpy(kernel.fn.__module__)[kernel.__name__], [], []
    for x in args:
        if isinstance(x, torch.Tensor):
            flat, kind = memory_of(x.detach()), OF_TORCH.get(x.dtype, "i64")
            array = flat.to(torch.int64 if kind == "i64" else torch.float32).numpy(force=True).copy()
            given.append(Pointer(array, kind))
            tensors.append((flat, array))
        else:
            given.append(Value(x) if type(x) is int else x)
    config = {name: x for name, x in config.items() if name not in OPTIONS}
    with out_of_range():
        for program in range(count):
            machine.begin(program, count)
            function(*given, **config)
    for flat, array in tensors:
        flat.copy_(torch.from_numpy(array))
