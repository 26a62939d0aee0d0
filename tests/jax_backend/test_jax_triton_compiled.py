"""The Triton kernels on JAX arrays, compiled for Hopper without one: what jax-triton makes of them in a program for CUDA.

It needs jax-triton and the library with which JAX describes kernels to CUDA (``pip install --no-deps jax-cuda13-plugin``).
"""

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linattn_backends.jax_triton import JaxTritonBackend, backend, devices, kept

triton = pytest.importorskip("triton")
if find_spec("jax_triton") is None or find_spec("jax_cuda13_plugin") is None or backend.INTERPRETED:
    pytest.skip("needs jax-triton and jax-cuda13-plugin, and not Triton's interpreter", allow_module_level=True)

jax_triton = pytest.importorskip("jax_triton")  # before a test says where Triton's cache is, because its import empties that

B, T, H, W = 2, 100, 2, 64
f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
TOKENS = jax.ShapeDtypeStruct((B, T, H, W), jnp.bfloat16)
SCALAR, GATE, STATE = f32((B, T, H)), f32((B, T, H, W)), f32((B, H, W, W))
CASES = {"gla": (GATE,), "gated_delta_rule": (SCALAR, SCALAR)}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(devices, "present", lambda: None)
    devices.target.cache_clear()
    yield
    devices.target.cache_clear()


def program(function, *arrays):
    """Of a function, for CUDA."""
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("family", CASES)
def test_a_training_step(family):
    """Launches are calls in the program, and what a second launch writes again is the memory of the first."""
    operator = getattr(JaxTritonBackend(), f"chunk_{family}")

    def step(S, *arrays):
        outputs, pull = jax.vjp(lambda S, *x: operator(*x, initial_state=S, output_final_state=True), S, *arrays)
        return pull(outputs)

    text = program(step, STATE, *(TOKENS,) * 3, *CASES[family])
    assert text.count("@triton_kernel_call(") > 4
    assert "output_operand_alias" in text


def test_packed_sequences():
    tokens = jax.ShapeDtypeStruct((1, T, H, W), jnp.bfloat16)
    operator = JaxTritonBackend().chunk_simple_gla
    text = program(
        lambda q, g, cu: operator(q, q, q, g, cu_seqlens=cu)[0], tokens, f32((1, T, H)), jax.ShapeDtypeStruct((4,), np.int32)
    )
    assert text.count("@triton_kernel_call(") > 1


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The names of kernels as they are compiled; what was compiled before this test is forgotten, but for what disks keep."""
    from triton.backends.nvidia.compiler import CUDABackend

    found, make = [], CUDABackend.make_ptx

    def noted(self, src, metadata, *rest):
        ptx = make(self, src, metadata, *rest)
        found.append(metadata["name"])
        return ptx

    kept.keep_compiled()
    monkeypatch.setattr(CUDABackend, "make_ptx", noted)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return found


def anew(W):
    """A program for CUDA, in a process that has compiled no kernel yet, or so jax-triton thinks."""
    jax_triton.triton_lib._COMPILED_KERNEL_CACHE.clear()
    jax.clear_caches()
    tokens = f32((1, 64, 2, W))
    return program(lambda q: JaxTritonBackend().chunk_linear_attn(q, q, q)[0], tokens)


def test_compiled_kernels_are_kept(compiled):
    text = anew(32)
    first = sorted(compiled)
    assert first
    assert all(name.startswith("linattn_") for name in first)
    assert anew(32) == text
    assert sorted(compiled) == first
    assert anew(64) != text
    assert len(compiled) > len(first)


@pytest.mark.parametrize("emptied", [False, True])
def test_where_compiled_kernels_are_kept(emptied, compiled, monkeypatch, tmp_path):
    """In Triton's cache; in its usual place where the folder's name is empty, which an import of jax-triton makes of it."""
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    if emptied:
        monkeypatch.setenv("TRITON_CACHE_DIR", "")
    anew(32)
    place = tmp_path / ("home/.triton/cache" if emptied else "cache")
    assert len(list(place.glob("*/jax_triton.json"))) == len(compiled) > 0


def test_nothing_is_kept_where_nothing_can_be_written(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    text = anew(32)
    count = len(compiled)
    assert anew(32) == text
    assert len(compiled) == 2 * count > 0


@pytest.mark.parametrize(("name", "value"), [("always_compile", True), ("instrumentation_mode", "consan")])
def test_no_kept_kernel_is_taken_that_is_to_be_looked_into(name, value, compiled, monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.compilation, name, value)
    anew(32)
    count = len(compiled)
    anew(32)
    assert len(compiled) == 2 * count > 0
    assert not list(tmp_path.glob("cache/*/jax_triton.json"))


def test_a_kept_kernel_is_of_what_it_was_compiled_with(compiled, monkeypatch):
    """Of the environment that the compiler reads, and of options."""
    anew(32)
    count = len(compiled)
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    anew(32)
    assert len(compiled) == 2 * count > 0
    monkeypatch.delenv("DISABLE_LLVM_OPT")
    call = jax_triton.triton_call
    monkeypatch.setattr(jax_triton, "triton_call", lambda *args, **options: call(*args, **options, enable_fp_fusion=False))
    anew(32)
    assert len(compiled) == 3 * count


@pytest.mark.parametrize("text", ["", "[", "{}"])
def test_what_cannot_be_read_is_compiled_and_kept_again(text, compiled, tmp_path):
    program = anew(32)
    count = len(compiled)
    files = list(tmp_path.glob("cache/*/jax_triton.json"))
    for file in files:
        file.write_text(text)
    for _ in range(2):
        assert anew(32) == program
        assert len(compiled) == 2 * count == 2 * len(files) > 0


def test_kernels_of_others_are_not_kept(compiled):
    import triton.language as tl

    @triton.jit
    def double(x, y):
        tl.store(y, 2 * tl.load(x))

    for count in (1, 2):
        jax_triton.triton_lib._COMPILED_KERNEL_CACHE.clear()
        program(lambda x: jax_triton.triton_call(x, kernel=double, out_shape=x, grid=1, compute_capability=90), f32((1,)))
        assert compiled == ["double"] * count


def test_gates_in_float32_are_summed_in_float64():
    """JAX has not been told of it: what lies between two kernels is twice as many numbers of 32 bits."""
    tokens = f32((B, T, H, W))
    operator = JaxTritonBackend().chunk_simple_gla
    text = program(lambda q, g: operator(q, q, q, g)[0], tokens, SCALAR)
    assert text.count("@triton_kernel_call(") == 3
    assert f"-> tensor<{2 * B * T * H}xi32>" in text


def test_a_program_for_a_cpu():
    """What jit of arrays committed to the CPU beside a GPU comes to."""
    operator = jax.jit(lambda x: JaxTritonBackend().chunk_linear_attn(x, x, x)[0])
    with pytest.raises(NotImplementedError) as error:
        operator.trace(TOKENS).lower(lowering_platforms=("cpu",))
    assert str(error.value) == (
        "the jax_triton backend has no kernels for a CPU, and this program is compiled for one: a traced call is taken to run"
        " on JAX's default device, a GPU. Trace it under jax.default_device('cpu'), or pass backend='jax'"
    )


def test_export_asks_for_leave():
    """JAX gives no promise that programs with Triton's kernels run with its later releases."""
    operator = jax.jit(lambda x: JaxTritonBackend().chunk_linear_attn(x, x, x)[0])
    with pytest.raises(ValueError, match="triton_kernel_call"):
        jax.export.export(operator, platforms=("cuda",))(TOKENS)
    allowed = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")
    exported = jax.export.export(operator, platforms=("cuda",), disabled_checks=[allowed])(TOKENS)
    assert [x.shape for x in exported.out_avals] == [TOKENS.shape]


def test_its_import_leaves_the_cache_of_triton_alone():
    assert triton.knobs.cache.dir
