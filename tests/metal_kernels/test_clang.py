"""Clang accepts the kernels without a warning.

Apple's compiler is a Clang, and Metal is C++ with address spaces. So is C++ for OpenCL, which any Clang checks: a pointer to
the wrong memory, a template that does not fit, a name that is not there would be found in Metal too.
"""

import re
from pathlib import Path

import mlx.core as mx
import pytest
from clang.cindex import Index
from emulator import source_of
from linattn_backends.mlx import metal
from linattn_backends.mlx.metal import launch
from metal_cases import VARIANTS, Options, draw

DECLARATIONS = Path(__file__).with_name("metal.clcpp").read_text()
FLAGS = [
    "-x",
    "clcpp",
    "-cl-std=clc++2021",
    "-cl-no-stdinc",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-attributes",
    "-Wno-unused-parameter",
]
# OpenCL has threadgroup memory in the kernel itself only; here a template is the kernel.
ELSEWHERE = "non-kernel function variable cannot be declared in local address space"


def complaints(source):
    """What Clang says of a kernel, instantiated as MLX asks for it."""
    source = re.sub(r"template \[\[host_name\(.*?\)\]\] \[\[kernel\]\]", "template void", source)
    source = source.replace("template void decltype", "template decltype")
    unit = Index.create().parse("kernel.clcpp", FLAGS, [("kernel.clcpp", DECLARATIONS + source)])
    return [found.spelling for found in unit.diagnostics if found.spelling != ELSEWHERE]


@pytest.fixture
def sources(monkeypatch):
    """Of every kernel that is launched; nothing runs."""
    found = []

    def record(kernel, inputs, **launch):
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        found.append(source_of(kernel, arrays, **launch))
        shapes = zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shapes]

    monkeypatch.setattr(launch, "run", record)
    return found


SIZES = [{}, dict(dtype=mx.bfloat16, lengths=[3, 14]), dict(dtype=mx.float16, K=1, V=1, H=1, HV=1, B=1, T=1)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_clang_accepts_every_kernel(sources, variant):
    for sizes in SIZES:
        case = draw(variant, **({"H": 4} if variant == "dplr" else {}) | sizes)
        for form in ("recurrent", "chunk"):
            metal.forward(case.arrays, Options(form=form))
        case.gradients(Options())
    assert len(sources) == 12
    for source in set(sources):
        assert complaints(source) == [], source


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("typename P>", "typename Q>", "unknown type name 'P'"),
        ("P row, int part", "const device float* row, int part", "no matching function for call to 'load_keys'"),
        ("thread float (&x)[R]", "device float (&x)[R]", "no matching function for call to 'load_keys'"),
        ("const float v_t", "const float unused = 0.0f; const float v_t", "unused variable 'unused'"),
    ],
)
def test_clang_complains(sources, right, wrong, complaint):
    metal.forward(draw("gla", K=1, V=1, H=1, HV=1, B=1, T=1).arrays, Options())  # few numbers: in constant memory
    (source,) = sources
    assert complaint in complaints(source.replace(right, wrong, 1))
