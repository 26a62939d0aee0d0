"""Kernels from the ``.metal`` files beside this one, and the one place where any of them is run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

Constants = Mapping[str, int | mx.Dtype]

THREADS = 32  # lanes of a simdgroup
HEADERS = {
    "recurrent": ("common.metal", "keys.metal"),
    "backward": ("common.metal", "keys.metal", "columns.metal"),
    "chunk": ("common.metal",),
}


@cache
def text(name: str) -> str:
    """The text of one file, the files that it includes in their places: MLX compiles strings, which include nothing."""
    source = files(__package__).joinpath(name).read_text()
    return re.sub(r'^#include "(\w+\.metal)"\n', lambda found: text(found[1]), source, flags=re.MULTILINE)


@cache
def kernel(name: str, defines: tuple[str, ...], inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Any:
    """MLX's kernel object for one file and what the preprocessor keeps of it.

    MLX knows a compiled kernel by its name and template arguments: the name says all the rest that its text depends on.
    """
    unique = "_".join(["linattn", name, *(re.sub(r"\W", "", define) for define in defines)])
    header = "".join(f"#define {define}\n" for define in defines) + "".join(map(text, HEADERS[name]))
    return mx.fast.metal_kernel(
        name=unique, input_names=list(inputs), output_names=list(outputs), source=text(f"{name}.metal"), header=header
    )


def run(kernel: Any, inputs: list[Any], **launch: Any) -> list[mx.array]:
    """Run a kernel on the GPU."""
    return kernel(inputs=inputs, **launch)


def launch(
    name: str,
    defines: list[str],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, tuple[tuple[int, ...], mx.Dtype]],
    constants: Constants,
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> dict[str, mx.array]:
    """Run the kernel of one file on named inputs.

    Args:
        name: The file, less its ending.
        defines: What to define for the preprocessor, e.g. ``"GATE 2"``.
        inputs: Arrays and Python numbers by the names that the kernel has for them.
        outputs: Shape and dtype of each output by name.
        constants: Template arguments.
        grid: Threads in all.
        threadgroup: Threads that share memory.
    """
    arrays = run(
        kernel(name, tuple(defines), tuple(inputs), tuple(outputs)),
        list(inputs.values()),
        template=list(constants.items()),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
    )
    return dict(zip(outputs, arrays, strict=True))
