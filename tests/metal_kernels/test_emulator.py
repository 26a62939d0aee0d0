"""The emulator refuses what a GPU would answer with a wrong number."""

import mlx.core as mx
import numpy as np
import pytest
from emulator import Emulator, EmulatorError, source_of

RIGHT = """
    threadgroup float tile[64];
    const uint i = thread_position_in_grid.x;
    const uint mine = thread_index_in_threadgroup;
    tile[mine] = static_cast<float>(x[i]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float sum = simd_sum(tile[63 - mine]);
    y[i] = static_cast<Y>(sum + offsets[1] * factor);
"""


def kernel(source):
    return mx.fast.metal_kernel(name="trial", input_names=["x", "offsets", "factor"], output_names=["y"], source=source)


def launch(emulator, source, dtype=mx.float32):
    x = mx.arange(128).astype(dtype)
    shapes = dict(output_shapes=[(128,)], output_dtypes=[dtype], template=[("Y", dtype)])
    (y,) = emulator(kernel(source), [x, mx.array([5, 7]), 0.5], grid=(128, 1, 1), threadgroup=(64, 1, 1), **shapes)
    return np.array(y.astype(mx.float32))


@pytest.fixture
def emulator(programs):
    return Emulator(programs)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_right_kernel_gives_right_numbers_in_every_order(emulator, dtype):
    sums = np.arange(128.0).reshape(2, 2, 32).sum(-1)[:, ::-1].repeat(32) + 3.5
    wanted = np.array(mx.array(sums).astype(dtype).astype(mx.float32))
    for _ in range(3):
        np.testing.assert_array_equal(launch(emulator, RIGHT, dtype), wanted)


def test_the_source_is_what_mlx_compiles():
    given = [mx.zeros(128), mx.array([5, 7]), mx.array(0.5)]
    source = source_of(
        kernel(RIGHT), given, grid=(128, 1, 1), threadgroup=(64, 1, 1), output_shapes=[(128,)], output_dtypes=[mx.float32],
        template=[("Y", mx.float32)],
    )  # fmt: skip
    assert RIGHT in source
    assert "const device float* x [[buffer(0)]]" in source
    assert "const constant int32_t* offsets [[buffer(1)]]" in source  # fewer than 8 elements
    assert "const constant float& factor [[buffer(2)]]" in source


WRONG = {
    "no barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", r"tile\[\d+\] is read"),
    "barrier for other memory": ("mem_threadgroup)", "mem_device)", r"tile\[\d+\] is read, and no barrier orders that"),
    "barrier of a simdgroup": ("threadgroup_barrier", "simdgroup_barrier", r"tile\[\d+\] is read"),
    "barrier that some do not reach": (
        "const float sum",
        "if (mine < 40) threadgroup_barrier(mem_flags::mem_none); const float sum",
        "at threadgroup_barrier",
    ),
    "threads that have returned": ("const float sum", "if (mine == 3) return; const float sum", "thread 3 has returned"),
    "read beyond the end": ("x[i]", "x[i + 1]", r"x\[128\] is read, but x has 128 elements"),
    "read before the beginning": ("x[i]", "(x + (-1))[i]", r"x\[-1\] is read, but x has 128 elements"),
    "read beyond threadgroup memory": ("tile[63 - mine]", "tile[64 - mine]", r"tile\[64\] is read, but tile has 64 elements"),
    "write beyond the end": ("y[i]", "y[i + 1]", r"y\[128\] is written, but y has 128 elements"),
    "two writers": ("y[i]", "y[i / 2]", r"y\[\d+\] is written, and no barrier orders that after thread \d+ wrote it"),
    "write after read": (
        "const float sum",
        "tile[mine] = 0.0f; const float sum",
        r"tile\[\d+\] is (written|read), and no barrier",
    ),
    "a place that is not written": ("y[i] =", "if (i != 77) y[i] =", r"y\[77\] was never written"),
    "a lane that does not exist": (
        "simd_sum(tile[63 - mine])",
        "simd_shuffle_xor(tile[mine], 32)",
        "takes a value from lane 32 of 32",
    ),
    "lanes at different shuffles": (
        "simd_sum(tile[63 - mine])",
        "mine % 2 ? simd_shuffle_xor(tile[mine], 1) : simd_shuffle_xor(tile[mine], 2)",
        "waits at simd_shuffle_xor",
    ),
    "too much threadgroup memory": ("tile[64]", "tile[9000]", "36000 bytes of threadgroup memory"),
    "arithmetic in 16 bits": ("static_cast<float>(x[i])", "x[i] * x[i]", "no match for .operator"),
    "a pointer to another address space": (
        "const float sum",
        "const device int* p = offsets; const float sum",
        "conversion from",
    ),
    "double": ("const float sum", "const double sum", "linattn_metal_has_no_double"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_refused(emulator, wrong):
    right, instead, message = WRONG[wrong]
    assert right in RIGHT
    with pytest.raises(EmulatorError, match=message):
        launch(emulator, RIGHT.replace(right, instead), mx.float16 if "16 bits" in wrong else mx.float32)


def test_matrices_of_a_simdgroup_multiply(emulator):
    source = """
        simdgroup_matrix<float, 8, 8> A, B, C = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_load(A, a, 16, ulong2(8, 0));
        simdgroup_load(B, a, 16, 0, true);
        simdgroup_multiply_accumulate(C, A, B, C);
        simdgroup_store(C, c, 8);
        const uint lane = thread_index_in_simdgroup;
    """
    product = mx.fast.metal_kernel(name="product", input_names=["a"], output_names=["c"], source=source)
    a = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    (c,) = emulator(
        product, [mx.array(a)], grid=(32, 1, 1), threadgroup=(32, 1, 1), output_shapes=[(8, 8)], output_dtypes=[mx.float32]
    )
    sizes = np.abs(a[:, 8:]) @ np.abs(a[:, :8]).T + 1  # of the terms: a sum may be much smaller
    assert (np.abs(np.array(c) - (a[:, 8:] @ a[:, :8].T + 1)) < 1e-6 * sizes).all()
