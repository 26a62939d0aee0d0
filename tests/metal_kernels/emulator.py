"""Runs MLX's Metal kernels without a Mac: the very text that MLX would hand to Apple's compiler, built with a C++ compiler.

``metal.hpp`` says what runs it and what it refuses. What this cannot show: that Apple's compiler accepts the kernel, how
many registers it takes, and how fast it is.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

__all__ = ["Emulator", "EmulatorError", "source_of"]

HEADER = Path(__file__).with_name("metal.hpp")
FLAGS = ("-std=c++17", "-O0", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-w")
SECONDS = 300
MOST_BUFFERS = 31

POSITIONS = {
    "thread_position_in_grid": "thread_.in_grid",
    "thread_position_in_threadgroup": "thread_.in_threadgroup",
    "thread_index_in_threadgroup": "thread_.index",
    "thread_index_in_simdgroup": "thread_.lane",
    "simdgroup_index_in_threadgroup": "thread_.simdgroup",
    "threadgroup_position_in_grid": "emulator::group_position",
    "threadgroups_per_grid": "emulator::groups",
    "threads_per_threadgroup": "emulator::threads_in_group",
}


class EmulatorError(AssertionError):
    """The kernel did what a GPU must not be asked to do, or did not compile."""


def source_of(kernel: Any, inputs: Sequence[mx.array], **launch: Any) -> str:
    """The Metal source that MLX compiles for one call of a kernel made by ``mx.fast.metal_kernel``.

    MLX records it when a function is exported, with or without Metal; nothing runs.
    """
    found: list[str] = []

    def record(event: dict[str, Any]) -> None:
        if event.get("name") == "CustomKernel":
            found.extend(text for text in event["arguments"] if isinstance(text, str) and "[[kernel]]" in text)

    mx.export_function(record, lambda *arrays: kernel(inputs=list(arrays), **launch), *(mx.zeros_like(x) for x in inputs))
    (source,) = found
    return source


def translated(source: str) -> str:
    """The source with address spaces as types: the only part of these kernels that is Metal and not C++."""
    source = source.partition("\ntemplate [[host_name(")[0]
    source = re.sub(
        r"(const\s+)?\b(device|threadgroup|constant)\s+(\w+)\s*\*", r"emulator::Pointer<\1 \3, emulator::\2>", source
    )
    source = re.sub(r"\bthreadgroup\s+(\w+)\s+(\w+)\[([^\]]+)\];", r'static emulator::Shared<\1> \2("\2", \3);', source)
    return re.sub(r"\bconstant\s+(\w+)\s*&", r"\1&", source)


def program_text(source: str) -> str:
    """A C++ program around a kernel's source: it reads buffers from a file, launches, and writes the outputs to another."""
    function = re.search(r"\[\[kernel\]\] decltype\((.*)\) ", source) or re.search(r"\[\[kernel\]\] void (\w+)", source)
    signature = re.search(r"\[\[kernel\]\] void \w+\(\n(.*?)\) \{\n", source, re.DOTALL)
    assert function
    assert signature
    arguments, buffers = [], []
    for line in signature[1].split(",\n"):
        buffer = re.fullmatch(r"\s*(const )?(device|constant) (\w+)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]", line)
        if buffer:
            const, space, kind, pointer, name, index = buffer.groups()
            if pointer == "*":
                arguments.append(f"launch.pointer<{const or ''}{kind}, {space}>({index})")
            else:
                arguments.append(f"launch.value<{kind}>({index})")
            buffers.append(f'{{"{name}", sizeof({kind}), {space}, {"false" if const else "true"}}}')
        else:
            arguments.append(POSITIONS[re.search(r"\[\[(\w+)\]\]", line)[1]])
    if len(buffers) > MOST_BUFFERS:
        raise EmulatorError(f"{len(buffers)} buffers, and Metal has {MOST_BUFFERS}")
    return f"""#include "{HEADER.name}"
{translated(source)}
using namespace emulator;
static void entry(const Thread& thread_) {{ {function[1]}({", ".join(arguments)}); }}
int main(int count, char** argument) {{ return run_program(count, argument, entry, {{{", ".join(buffers)}}}); }}
"""


def shape_buffers(source: str, name: str, array: mx.array) -> list[bytes]:
    """What MLX passes after an input whose shape, strides or rank the kernel mentions. Only its shape is provided for."""
    assert f"{name}_strides" not in source
    assert f"{name}_ndim" not in source
    return [np.array(array.shape, np.int32).tobytes()] if f"int* {name}_shape" in source else []


class Emulator:
    """Stands where the GPU would: call it with a kernel and what the kernel would be called with.

    Args:
        folder: Where programs and their data go. A program is built once for each source.
        mutate: Changes the source of every kernel before it is built: how tests take a barrier out.
        seed: The order in which threads and threadgroups run; every launch takes another.
        incomplete: Whether places of an output may stay unwritten. They hold NaN.
    """

    def __init__(
        self, folder: Path, mutate: Callable[[str], str] = lambda source: source, seed: int = 0, incomplete: bool = False
    ) -> None:
        self.folder, self.mutate, self.seed, self.incomplete = folder, mutate, seed, incomplete
        self.launches: list[str] = []

    def __call__(self, kernel: Any, inputs: Sequence[Any], **launch: Any) -> list[mx.array]:
        inputs = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        source = source_of(kernel, inputs, **launch)
        self.launches.append(source)
        contents = []
        for name, x in zip(re.findall(r"const (?:device|constant) \w+[*&] (\w+)", source_inputs(source)), inputs, strict=True):
            contents += [raw(x), *shape_buffers(source, name, x)]
        outputs = list(zip(launch["output_shapes"], launch["output_dtypes"], strict=True))
        sizes = [len(content) for content in contents] + [int(np.prod(shape)) * dtype.size for shape, dtype in outputs]
        self.seed += 1
        into, out = self.folder / "in.bin", self.folder / "out.bin"
        into.write_bytes(b"".join(contents))
        command = [self.program(self.mutate(source)), into, out, self.seed, *launch["grid"], *launch["threadgroup"], *sizes]
        environment = {**os.environ, **({"INCOMPLETE": "1"} if self.incomplete else {})}
        done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise EmulatorError(done.stderr.strip() or f"the kernel's program ended with {done.returncode}")
        return unraw(out.read_bytes(), outputs)

    def program(self, source: str) -> Path:
        """The built program of a source."""
        text = program_text(source)
        path = self.folder / hashlib.sha256(text.encode()).hexdigest()[:20]
        if not path.exists():
            header = self.folder / HEADER.name
            if not header.exists():  # most of the time goes into it: build it once
                header.write_text(HEADER.read_text())
                build("-x", "c++-header", header, "-o", header.with_suffix(".hpp.gch"))
            code = path.with_suffix(".cpp")
            code.write_text(text)
            build(code, "-o", path)
        return path


def build(*arguments: str | Path) -> None:
    """Call the C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "the tests of Metal kernels need a C++ compiler: looked for g++ and c++"
    done = subprocess.run([compiler, *FLAGS, *arguments], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise EmulatorError(done.stderr)


def source_inputs(source: str) -> str:
    """The lines of a kernel's signature that are its inputs: not shapes, not outputs."""
    lines = re.search(r"\[\[kernel\]\] void \w+\(\n(.*?)\) \{\n", source, re.DOTALL)[1].split(",\n")
    return "\n".join(line for line in lines if "const " in line and not re.search(r"_(shape|strides|ndim) \[\[", line))


def raw(x: mx.array) -> bytes:
    """The bytes of an array, row by row; NumPy has no bfloat16."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).tobytes()


def unraw(content: bytes, outputs: Sequence[tuple[Sequence[int], mx.Dtype]]) -> list[mx.array]:
    """The arrays that follow each other in ``content``."""
    arrays, start = [], 0
    for shape, dtype in outputs:
        end = start + int(np.prod(shape)) * dtype.size
        numbers = np.frombuffer(content[start:end], np.uint8)
        arrays.append(mx.array(numbers).view(dtype).reshape(shape))
        start = end
    return arrays
