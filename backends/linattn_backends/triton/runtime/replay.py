"""Calls that are done again without being thought through again: what a function allocates, computes and launches is written
down once as a program, which later calls like it run.

What host code does follows from the shapes, strides, dtypes and alignment of its arrays and from its options, and never from
numbers in an array. So one of the first calls of a kind is rehearsed on tensors without memory, and what it would do is written
as a Python function of the arrays: memory, PyTorch's operations, launches of compiled kernels by address. It holds no array and
no address itself. A call of a rare kind costs a look-up more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from . import device, launch
from .device import Properties, standing_in

__all__ = ["recorded"]

OFTEN = 4
"""At which call of a kind its program is written, which takes as long as some tens of calls."""
MOST = 1024
"""Kinds of calls that are known; with one more, all are forgotten."""
SMALL = 1 << 20
"""Bytes below which memory that only kernels touch is part of one allocation."""
ALIGNED = 256
"""Bytes: where each part of that allocation begins."""

aten = torch.ops.aten
EMPTY = (
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
)  # fmt: skip
"""Operations that make memory, and write nothing there."""


OPTIONS = frozenset((bool, int, float, str))


class Unlike(Exception):
    """An argument is neither a plain tensor nor an option."""


class Unready(Exception):
    """A kernel of a program is not compiled yet."""


@dataclass(eq=False)
class Value:
    """A tensor of a rehearsal.

    Attributes:
        name: What the program calls it.
        tensor: Itself, without memory.
        root: Whose memory it lies in; itself, unless it is a view.
        made: How to make it, for a view.
    """

    name: str
    tensor: Tensor
    root: Value
    made: Operation | None = None

    @property
    def offset(self) -> int:
        """Bytes from the beginning of its root."""
        return begin(self.tensor) - begin(self.root.tensor)


class Memory(NamedTuple):
    """Memory is asked for."""

    value: Value


class Operation(NamedTuple):
    """An operation of PyTorch; ``results`` are in the order of its own, ``None`` for one that was there before."""

    function: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: Sequence[Value | None]
    several: bool


class Launch(NamedTuple):
    """A kernel is launched."""

    kernel: Any
    count: int
    args: tuple[Any, ...]
    config: dict[str, Any]


def begin(x: Tensor) -> int:
    """Bytes from the beginning of a tensor's storage; its address would be 0 if it has no elements."""
    return x.storage_offset() * x.element_size()


class Recording(TorchDispatchMode):
    """Notes what is done to tensors without memory; the device that they stand for while it does."""

    def __init__(self, where: torch.device, args: Sequence[Any]) -> None:
        super().__init__()
        self.properties: Properties = device.measured(where)
        self.family = ""
        self.steps: list[Memory | Operation | Launch] = []
        self.alive: list[Any] = []  # what is known by its id
        self.values: dict[int, Value] = {}
        self.roots: dict[int, Value] = {}
        self.args = tuple(self.without_memory(f"x{i}", x) if isinstance(x, Tensor) else x for i, x in enumerate(args))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in here, and skipping begins with the import of the compiler

    def without_memory(self, name: str, x: Tensor) -> Tensor:
        """A tensor like an argument, as well aligned; a dense one, whatever it says of axes of one element."""
        offset = (x.data_ptr() & 15) // x.element_size()
        steps = torch.empty(x.shape, device="meta").stride() if x.is_contiguous() else x.stride()
        extent = 1 + sum((n - 1) * step for n, step in zip(x.shape, steps, strict=True)) if x.numel() else 0
        memory = torch.empty_strided((offset + extent,), (1,), dtype=x.dtype, device="meta")
        made = memory.as_strided(x.shape, steps, offset)
        self.root(name, made)
        return made

    def root(self, name: str, x: Tensor) -> Value:
        """A tensor with memory of its own."""
        value = Value(name, x, None)  # type: ignore[arg-type]
        value.root = self.values[id(x)] = self.roots[x.untyped_storage()._cdata] = value
        return value

    def start(self, kernel: Any, count: int, args: tuple[Any, ...], config: dict[str, Any]) -> None:
        """Note a launch."""
        self.steps.append(Launch(kernel, count, args, config))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        several = isinstance(result, (tuple, list))
        self.note(func, args, kwargs, list(result) if several else [result], several)
        return result

    def value(self, x: Tensor) -> Value:
        """What is known of a tensor; an error if it came from nowhere."""
        return self.values[id(x)]

    def note(self, func: Any, args: Any, kwargs: Any, results: list[Any], several: bool) -> None:
        """Note an operation: of memory, a view, or work to be done."""
        self.alive.append((args, results))
        fresh = [x if isinstance(x, Tensor) and id(x) not in self.values else None for x in results]
        name = f"y{len(self.values)}"
        if func in EMPTY:
            self.steps.append(Memory(self.root(name, results[0])))
            return
        if func is aten.detach.default and self.value(args[0]).name[0] == "y":
            self.values[id(results[0])] = self.value(args[0])  # what was made here needs no other name
            return
        lies_in = [None if x is None else self.roots.get(x.untyped_storage()._cdata) for x in fresh]
        if any(x is not None for x in fresh) and all(x is None or root for x, root in zip(fresh, lies_in, strict=True)):
            made = Operation(func, args, kwargs, found := [], several)
            for i, (x, root) in enumerate(zip(fresh, lies_in, strict=True)):
                found.append(None if x is None else Value(f"{name}_{i}", x, root, made))
                if x is not None:
                    self.values[id(x)] = found[-1]
            return
        found = [None if x is None else self.root(f"{name}_{i}", x) for i, x in enumerate(fresh)]
        self.steps.append(Operation(func, args, kwargs, found, several))


def tensors_of(x: Any) -> list[Tensor]:
    """The tensors in an argument or a result."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    return [y for item in x for y in tensors_of(item)] if isinstance(x, (tuple, list, type({}.values()))) else []


@dataclass
class Writer:
    """Writes what was noted as a function ``replay(device, stream, *args)``.

    Attributes:
        note: What was noted.
        result: What the rehearsed function returned.
        device: Where calls of this kind lie.
        direct: Whether kernels are launched by address; else the compiler launches them, on tensors.
    """

    note: Recording
    result: Any
    device: torch.device
    direct: bool
    lines: list[str] = field(default_factory=list[str])
    names: dict[str, Any] = field(default_factory=dict[str, Any])
    bound: set[str] = field(default_factory=set[str])
    views: dict[Value, list[str]] = field(default_factory=dict[Value, list[str]])

    def __post_init__(self) -> None:
        self.kept = {self.note.value(x).root for x in tensors_of(self.result)}
        self.last: dict[Value, int] = {}
        touched = set(self.kept)
        for i, step in enumerate(self.note.steps):
            given = () if isinstance(step, Memory) else (step.args, step.kwargs) if isinstance(step, Operation) else step.args
            for x in tensors_of(given):
                root = self.note.value(x).root
                self.last[root] = i
                if isinstance(step, Operation) or not self.direct:
                    touched.add(root)
        made = [(i, step.value) for i, step in enumerate(self.note.steps) if isinstance(step, Memory)]
        small = [(i, x) for i, x in made if x not in touched and size_of(x) < SMALL]
        self.arena, self.places = arranged([(i, self.last.get(x, i), size_of(x)) for i, x in small])
        self.places = dict(zip([x for _, x in small], self.places, strict=True))

    def constant(self, x: Any) -> str:
        """A number as it is written, or a name for anything else."""
        if x is None or type(x) in (bool, int, str) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        name = f"c{len(self.names)}"
        self.names[name] = x
        return name

    def tensor(self, x: Value) -> str:
        """A tensor's name, once it is made if it is a view."""
        if x.made is not None and x.name not in self.bound:
            self.view(x, x.made)
        return x.name

    def view(self, x: Value, made: Operation) -> None:
        """A view, of memory that is made here in one step, whatever made it."""
        root, y = x.root, x.tensor
        if root.name[0] != "y" or root.tensor.storage_offset() or y.dtype != root.tensor.dtype:
            self.operation(made)
            return
        self.bound.add(x.name)
        self.views.setdefault(root, []).append(x.name)
        self.lines.append(f"{x.name} = {root.name}.as_strided({tuple(y.shape)}, {y.stride()}, {y.storage_offset()})")

    def address(self, x: Value) -> str:
        """An expression of a tensor's address."""
        root, offset = x.root, x.offset
        if root in self.places:
            return f"arena + {self.places[root] + offset}"
        name = f"p_{root.name}"
        if name not in self.bound:
            self.bound.add(name)
            self.lines.append(f"{name} = {root.name}.data_ptr()")
        return f"{name} + {offset}" if offset else name

    def expression(self, x: Any) -> str:
        """An argument of an operation, or a result."""
        if isinstance(x, Tensor):
            return self.tensor(self.note.value(x))
        if isinstance(x, (tuple, list)):
            inside = "".join(f"{self.expression(y)}, " for y in x)
            return f"[{inside}]" if isinstance(x, list) else f"({inside})"
        return "device" if isinstance(x, torch.device) else self.constant(x)

    def operation(self, x: Operation) -> None:
        """One of PyTorch's, and names for what it returns."""
        given = [self.expression(y) for y in x.args] + [f"{name}={self.expression(y)}" for name, y in x.kwargs.items()]
        call = f"{self.constant(x.function)}({', '.join(given)})"
        names = ["_" if y is None else y.name for y in x.results]
        self.bound.update(names)
        for y in x.results:
            if y is not None and y.root is not y:  # which holds the memory of its root
                self.views.setdefault(y.root, []).append(y.name)
        self.lines.append(f"{', '.join(names)}{',' * (x.several and len(names) == 1)} = {call}")

    def memory(self, x: Value) -> None:
        """Memory that is no part of the one allocation."""
        if x in self.places:
            return
        shape, step, dtype = tuple(x.tensor.shape), tuple(x.tensor.stride()), self.constant(x.tensor.dtype)
        self.lines.append(f"{x.name} = empty({shape}, {step}, dtype={dtype}, device=device)")

    def launch(self, x: Launch) -> None:
        """A launch."""
        if not self.direct:
            args = "".join(f"{self.expression(y)}, " for y in x.args)
            self.lines.append(f"start({self.constant(x.kernel)}, {x.count}, device, ({args}), {self.constant(x.config)})")
            return
        key, _ = launch.identity(x.kernel, self.device, x.args, x.config)
        ready = launch.COMPILED.get(key)
        if ready is None:
            raise Unready
        args = [self.address(self.note.value(y)) if isinstance(y, Tensor) else self.constant(y) for y in x.args]
        args += map(self.constant, ready.constants)
        if ready.launcher is None:
            self.lines.append(f"{self.constant(ready.compiled)}[{x.count}, 1, 1]({', '.join(args)})")
        else:
            fixed = map(self.constant, ready.fixed)
            self.lines.append(f"{self.constant(ready.launcher)}({', '.join([str(x.count), '1, 1, stream', *fixed, *args])})")

    def written(self) -> Callable[..., Any]:
        """The function."""
        if self.arena:
            self.lines.append(f"memory = empty(({self.arena},), (1,), dtype=bytes, device=device)")
            self.lines.append("arena = memory.data_ptr()")
        write = {Memory: lambda step: self.memory(step.value), Operation: self.operation, Launch: self.launch}
        for i, step in enumerate(self.note.steps):
            write[type(step)](step)
            over = [x for x, last in self.last.items() if last == i and x not in self.kept and x.name[0] == "y"]
            large = [x for x in over if x not in self.places and size_of(x) >= SMALL]
            self.lines += [f"{name} = None" for x in large for name in (x.name, *self.views.get(x, ()))]
        self.lines.append(f"return {self.expression(self.result)}")
        given = ", ".join(f"x{i}" for i in range(len(self.note.args)))
        source = "\n    ".join([f"def replay(device, stream, {given}):", *self.lines])
        namespace = dict(self.names, empty=torch.empty_strided, bytes=torch.uint8, start=start)
        exec(compile(source, "<linattn triton replay>", "exec"), namespace)
        return namespace["replay"]


def start(*given: Any) -> None:
    """Launch by the compiler's way."""
    launch.start(*given)


def size_of(x: Value) -> int:
    """Bytes of a tensor's memory."""
    return x.tensor.untyped_storage().nbytes()


def arranged(wanted: Sequence[tuple[int, int, int]]) -> tuple[int, list[int]]:
    """The size of one allocation, and where in it each piece of memory lies that is wanted from a first step to a last one.

    Kernels of one stream run one after the other: what the last reader of a piece leaves may be overwritten.
    """
    placed: list[tuple[int, int, int, int]] = []
    for first, last, size in wanted:
        size, at = -(-max(size, 1) // ALIGNED) * ALIGNED, 0
        for begins, ends, _, _ in sorted((p for p in placed if p[2] <= last and first <= p[3]), key=lambda p: p[0]):
            if at + size <= begins:
                break
            at = max(at, ends)
        placed.append((at, at + size, first, last))
    return max((p[1] for p in placed), default=0), [p[0] for p in placed]


class Program(NamedTuple):
    """How calls of a kind are done.

    Attributes:
        replay: What does one.
        device: Where.
        computes: Whether operations of PyTorch are among it, which autocast would take for the caller's own.
        kernels: What is launched.
        of: What a failure is said to be of.
    """

    replay: Callable[..., Any]
    device: torch.device
    computes: bool
    kernels: Sequence[Any]
    of: str

    def fits(self) -> bool:
        """Whether it does what the function would, here and now: nobody watches a kernel, nor changes what operations take."""
        if self.computes and torch.is_autocast_enabled(self.device.type):
            return False
        return not [kernel for kernel in self.kernels if kernel.pre_run_hooks]  # faster than any()

    def __call__(self, args: tuple[Any, ...]) -> Any:
        where = self.device
        try:
            if where.type != "cuda":
                return self.replay(where, None, *args)
            stream = triton.runtime.driver.active.get_current_stream(where.index)
            if where.index == torch._C._cuda_getDevice():
                return self.replay(where, stream, *args)
            with torch.cuda.device(where):
                return self.replay(where, stream, *args)
        except Exception as error:
            error.add_note(f"linattn triton: {self.of}")
            raise

    @classmethod
    def of_call(cls, body: Callable[..., Any], where: torch.device, args: tuple[Any, ...]) -> Program | None:
        """What ``body`` does with such arguments; ``None`` if a kernel is not compiled yet."""
        note = Recording(where, args)
        with standing_in(note), note:
            result = body(*note.args)
        writer = Writer(note, result, where, launch.directly(where))
        try:
            replay = writer.written()
        except Unready:
            return None
        kernels = list(dict.fromkeys(step.kernel for step in note.steps if isinstance(step, Launch)))
        names = ", ".join(kernel.__name__ for kernel in kernels)
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in args if isinstance(x, Tensor))
        computes = any(isinstance(step, Operation) for step in note.steps)
        hooked = kernels if writer.direct else ()
        return cls(replay, where, computes, hooked, f"one of the kernels {names} of {note.family} failed on {shapes}")


def kind_of(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The device and all else that host code may choose by; ``None`` where a call is to be thought through.

    Of one device, as every call is. Steps of dense arrays go without saying.
    """
    if launch.watched():
        return None
    try:
        facts = [
            (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.data_ptr() & 15)
            if type(x) is Tensor or type(x) is Parameter
            else x if x is None or type(x) in OPTIONS else refuse(x)
            for x in args
        ]  # fmt: skip
    except Unlike:
        return None
    where = args[0] if args[0] is not None else next(x for x in args if x is not None)
    where = where.device
    return None if where.type == "meta" else (where, device.measured(where), *launch.settings(), *facts)


def refuse(x: Any) -> None:
    """Of subclasses of a tensor not enough is known."""
    raise Unlike


PROGRAMS: dict[Any, Program | int] = {}
"""By function and kind of call, its program, or so many calls as came before one is written."""


def recorded(body: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of arrays and options that allocates, launches kernels, and reads no number in an array."""

    @functools.wraps(body)
    def run(*args: Any) -> Any:
        kind = kind_of(args)
        if kind is None:
            return body(*args)
        program = PROGRAMS.get((body, kind), 0)
        if isinstance(program, int):
            if len(PROGRAMS) >= MOST:
                PROGRAMS.clear()
            written = Program.of_call(body, kind[0], args) if program + 1 >= OFTEN else None
            PROGRAMS[body, kind] = written or (program + 1) % OFTEN  # again later, if a kernel was not compiled yet
            return body(*args)
        return program(args) if program.fits() else body(*args)

    return run
