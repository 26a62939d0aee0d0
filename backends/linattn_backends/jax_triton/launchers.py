"""How a kernel is run for the JAX arrays behind a host's tensors: compiled, by jax-triton; or in Triton's interpreter.

A kernel takes its arguments in any order, some of them absent, and writes where it likes among them. jax-triton wants inputs,
numbers and then outputs, which are new arrays, and knows no absent ones. :func:`arranged` makes a kernel of that order, which
does nothing but call the other; what is read and written is both, an input and an output that share their memory.
"""

from __future__ import annotations

import functools
import linecache
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from .devices import target
from .host import Memory, Pointer, as_torch
from .kept import OURS

__all__ = ["compiled", "interpreted"]

Config = dict[str, Any]

INTERPRETER = threading.Lock()
"""There is one interpreter, and XLA runs what is independent at once."""


def read(args: Sequence[Any]) -> list[Pointer]:
    """Tensors among the arguments that bring values."""
    return [x for x in args if isinstance(x, Pointer) and (x.memory.array is not None or not x.memory.own)]


def written(args: Sequence[Any]) -> list[Pointer]:
    """Those that the kernel may write; some are both."""
    return [x for x in args if isinstance(x, Pointer) and x.memory.own]


# -- compiled ----------------------------------------------------------------------------------------------------------


def compiled(kernel: Any, count: int, args: Sequence[Any], config: Config) -> None:
    """Put a call of a kernel into the JAX program that is being traced."""
    from .compat import triton_call

    inputs, outputs = read(args), whole(written(args))
    numbers, kinds = [], []
    for parameter, x in zip(kernel.params, args, strict=False):
        kind, number = described(x, parameter.do_not_specialize)
        kinds.append(kind)
        numbers += [] if number is None else [number]
    options = {name: config[name] for name in ("num_warps", "num_stages") if name in config}
    constants = {name: x for name, x in config.items() if name not in options}
    found = triton_call(
        *(begin(x) for x in inputs),
        *numbers,
        kernel=arranged(kernel, tuple(kinds)),
        out_shape=[jax.ShapeDtypeStruct((x.memory.size,), x.memory.dtype) for x in outputs],
        input_output_aliases={inputs.index(x): i for i, x in enumerate(outputs) if x in inputs},
        grid=(count,),
        name=OURS + kernel.__name__,
        compute_capability=target().capability,
        **options,
        **constants,
    )
    for x, array in zip(outputs, found, strict=True):
        x.memory.array = array


def whole(outputs: list[Pointer]) -> list[Pointer]:
    """The same, if each is an array of its own, from its beginning."""
    if any(x.offset for x in outputs):
        raise NotImplementedError("linattn jax_triton: a kernel may write from the middle of an array")
    if len({id(x.memory) for x in outputs}) < len(outputs):
        raise NotImplementedError("linattn jax_triton: a kernel may write two of its arguments, which are one array")
    return outputs


def begin(x: Pointer) -> Any:
    """The array from where a pointer points."""
    return x.memory.read()[x.offset :]


def described(x: Any, as_it_comes: bool) -> tuple[str, Any]:
    """How an argument reaches the kernel, and the number that is passed for it, if any.

    What Triton compiles a kernel for, it does here, too: an integer that is one, or a multiple of 16, unless ``as_it_comes``.
    """
    if isinstance(x, Pointer):
        how = "read" if not x.memory.own else "written" if x.memory.array is None else "both"
        return f"{how} wide" if x.memory.wide else how, None
    if x is None:
        return "None", None
    if isinstance(x, float):
        return (f"tl.full((), {x!r}, tl.float32)", None) if x == 1 else ("float", np.float32(x))
    wide = "tl.int64" if x.bit_length() > 31 else "tl.int32"
    if x == 1:
        return f"tl.full((), 1, {wide})" if as_it_comes else "1", None
    if as_it_comes or x % 16:
        return "int", x
    return f"16 {wide}", x // 16


@functools.cache
def arranged(kernel: Any, kinds: tuple[str, ...]) -> Any:
    """``kernel`` with the arrays read first, then numbers, then the arrays written.

    Args:
        kernel: A Triton kernel.
        kinds: Of its arguments that are no compile-time constants, from :func:`described`.
    """
    import triton
    import triton.language as tl

    names = [parameter.name for parameter in kernel.params]
    inputs, numbers, outputs, passed = [], [], [], []
    for name, kind in zip(names, kinds, strict=False):
        how, _, rest = kind.partition(" ")
        if how in ("read", "both"):
            inputs.append(f"{name}_in" if how == "both" else name)
        if how in ("written", "both"):
            outputs.append(name)
        if how in ("int", "float", "16"):
            numbers.append(name)
        passed.append(name)
        if how == "16":
            passed[-1] = f"tl.cast({name}, {rest}) * 16"
        elif rest == "wide":
            passed[-1] = f"tl.cast({name}, tl.pointer_type(tl.float64), bitcast=True)"
        elif how not in ("read", "written", "both", "int", "float"):
            passed[-1] = kind
    constants = names[len(kinds) :]
    header = ", ".join([*inputs, *numbers, *outputs, *(f"{name}: tl.constexpr" for name in constants)])
    name = OURS + kernel.__name__
    source = f"def {name}({header}):\n    kernel({', '.join([*passed, *constants])})\n"
    place = f"<linattn jax_triton {kernel.__module__}.{kernel.__name__} {kinds}>"
    linecache.cache[place] = len(source), None, source.splitlines(keepends=True), place  # where Triton looks for the source
    scope = {"kernel": kernel, "tl": tl, "__name__": __name__}
    exec(compile(source, place, "exec"), scope)
    return triton.jit(scope[name])


# -- interpreted -------------------------------------------------------------------------------------------------------


def interpreted(kernel: Any, count: int, args: Sequence[Any], config: Config) -> None:
    """Put a call back into Python, where Triton's interpreter runs the kernel, into the JAX program that is being traced."""
    memories = list({id(x.memory): x.memory for x in (*read(args), *written(args))}.values())
    targets = [memory for memory in memories if memory.own]

    def run(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        storages = {id(m): storage(m, next(given) if m in sources else None) for m in memories}
        views = [
            torch.as_strided(storages[id(x.memory)], x.shape, x.strides, x.offset) if isinstance(x, Pointer) else x
            for x in args
        ]
        with INTERPRETER:
            kernel[(count,)](*views, **config)
        return [as_numpy(storages[id(memory)]).view(memory.dtype) for memory in targets]

    sources = [memory for memory in memories if memory.array is not None]
    shapes = [jax.ShapeDtypeStruct((memory.size,), memory.dtype) for memory in targets]
    found = jax.pure_callback(run, shapes, *(memory.array for memory in sources))
    for memory, array in zip(targets, found, strict=True):
        memory.array = array


def storage(memory: Memory, array: Any) -> torch.Tensor:
    """A copy of an array as PyTorch has it."""
    dtype = torch.float64 if memory.wide else as_torch(memory.dtype)
    if array is None:
        size = memory.size * memory.dtype.itemsize // dtype.itemsize
        return torch.full((size,), memory.unwritten, dtype=dtype)
    array = np.array(array)
    return torch.from_numpy(array.view(np.int16) if dtype == torch.bfloat16 else array).view(dtype)


def as_numpy(x: torch.Tensor) -> Any:
    """As NumPy has it; bfloat16 as bits."""
    return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
