"""What only a GPU can show of the Triton backend: recorded graphs, calls that never wait, compiled calls, memory.

That the results are right is the conformance suite's matter (``linattn conformance --backend triton --device cuda``), but for
sequences longer than its own, which are cut into segments.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import linattn
import pytest
from linattn_benchmarks import fresh
from linattn_benchmarks.cases import Case
from linattn_benchmarks.subjects import Linattn

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("these tests need an NVIDIA GPU", allow_module_level=True)

pytestmark = [  # what PyTorch says of its own tools, which an error would leave switched on
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # Inductor calls it
]
FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
SIZES = dict(B=1, T=1000, H=2, HV=2, K=64, V=128, L=64, C=256)
SUBJECT = Linattn("triton", "torch")


def case_of(operator: str, what: str = "fwdbwd", **sizes: int) -> Case:
    return Case(operator, what, tuple((SIZES | sizes).items()), "cuda", "bfloat16", seed=1)


def prepared(case: Case, packed: bool = False):
    """Arrays, and a call that reads them wherever they are when it runs."""
    runner, arrays, d_o = fresh.prepared(case, SUBJECT)
    offsets = {"cu_seqlens": torch.tensor([0, 17, 17, 600, 1000], device="cuda", dtype=torch.int32)} if packed else {}
    function = SUBJECT.function(case)

    def with_offsets(given):
        return function(given | offsets)

    if case.what == "fwdbwd":
        return arrays, runner.forward_backward(with_offsets, arrays, d_o)
    return arrays, runner.forward(with_offsets, arrays)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, y in expected.items():
        assert torch.isfinite(y).all(), name
        assert torch.equal(found[name], y), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, "mixed_attn"])
def test_a_recorded_graph_computes_from_what_it_finds(family, packed):
    """Recording fails at any call that waits for the device; the replay must read the arrays, not what they held."""
    case = case_of(f"chunk_{family}")
    arrays, call = prepared(case, packed)
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    fresh_arrays, _ = prepared(replace(case, seed=2))
    with torch.no_grad():
        for name, x in arrays.items():
            x.copy_(fresh_arrays[name])
    graph.replay()
    same(found, call())


def cold(*arguments, **options):
    """What ``cold.py`` prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("cold.py"), *arguments], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("how", ["graph", "compile"])
def test_the_first_call_of_a_process_is_recorded(how, tmp_path):
    """Eager calls are compared with float64 elsewhere; a recording has their bits."""
    cold("eager", tmp_path / "eager.pt")
    cold(how, tmp_path / "eager.pt")


def test_the_first_call_takes_under_fifteen_seconds(tmp_path):
    """Forward and backward, with nothing compiled before; of each family, on an idle machine of several processors."""
    printed = cold("first", env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)})
    seconds = {family: float(number) for family, number in (line.split(": ") for line in printed.splitlines())}
    assert max(seconds.values()) < 15, seconds


def close_to_float64(case: Case, arrays, offsets, d_o: float = 1.0):
    """Outputs, final states and gradients; ``d_o`` is the size of the outputs' gradient."""

    def results(given, backend):
        leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
        options = case.options | dict(cu_seqlens=offsets, output_final_state=True, backend=backend)
        o, final = getattr(linattn, case.operator)(**leaves, **options)
        torch.manual_seed(3)
        do, d_final = d_o * torch.randn(o.shape, device="cuda"), torch.randn(final.shape, device="cuda")
        grads = torch.autograd.grad([o, final], tuple(leaves.values()), [do.to(o.dtype), d_final.to(final.dtype)])
        return {"o": o, "final": final} | dict(zip(leaves, grads, strict=True))

    found = results(arrays, "triton")
    wanted = results({name: x.double() for name, x in arrays.items()}, "torch")
    for name, x in wanted.items():
        assert torch.isfinite(found[name]).all(), name
        assert (found[name].double() - x).norm() < 2e-2 * x.norm(), name


@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("family", ["linear_attn", "simple_gla", "gla", "gated_delta_rule", "kda"])
def test_long_packed_sequences(family, K):
    """In segments where there is room for that, the last sequence empty: outputs and gradients are those of float64."""
    case = case_of(f"chunk_{family}", T=4096, K=K)
    arrays, _ = prepared(case)
    close_to_float64(case, arrays, torch.tensor([0, 700, 700, 4096, 4096], device="cuda", dtype=torch.int32))


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla"])
def test_two_programs_share_a_walk(family):
    """Of heads that are half as many as the device has processors."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count // 2
    arrays, _ = prepared(case := case_of(f"chunk_{family}", H=heads, HV=heads, V=64))
    close_to_float64(case, arrays, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_beyond_the_range_of_float16(family):
    """Outputs and gradients have room where ``q·k`` has none; with ``beta``, errors are below the range instead."""
    case = replace(case_of(f"chunk_{family}", T=128), dtype="float16")
    arrays, _ = prepared(case)
    scales = dict(q=1000, k=1000, beta=1e-6) if "beta" in arrays else dict(q=1000, k=1000, v=1e-4, u=1e-3)
    with torch.no_grad():
        for name, factor in scales.items():
            if name in arrays:
                arrays[name].mul_(factor)
    close_to_float64(case, arrays, None, d_o=10.0 if "beta" in arrays else 1e-3)


@pytest.mark.parametrize("offsets", [None, [0, 17, 17, 600, 1000]])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("family", ["gla", "rwkv6", "kda", "dplr"])
def test_strong_gates(family, K, offsets):
    """Chunks that decay by more than one product takes, beside others, and resets."""
    case = case_of(f"chunk_{family}", K=K)
    arrays, _ = prepared(case)
    tokens = torch.arange(case.size["T"], device="cuda")[None, :, None, None]
    arrays["g"] = torch.where(tokens // 100 % 2 == 0, 20 * arrays["g"], arrays["g"])
    arrays["g"] = arrays["g"].masked_fill(torch.rand(arrays["g"].shape, device="cuda") < 0.01, -torch.inf)
    close_to_float64(case, arrays, offsets and torch.tensor(offsets, device="cuda", dtype=torch.int32))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_decoding_step_walks_on(family):
    case = case_of(f"decode_{family}", "decode", B=3, T=1)
    arrays, call = prepared(case)
    start = arrays["state"].clone()
    call()
    expected = [call()["o"].clone() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    arrays["state"].copy_(start)
    graph.replay()
    for o in expected:
        graph.replay()
        assert torch.equal(found["o"], o)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_does_not_wait_for_the_device(family, form):
    _, call = prepared(case_of(f"{form}_{family}"), packed=True)
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["simple_gla", "gla", "gated_delta_rule", "kda", "mixed_attn"])
def test_compiled_whole(family):
    """By Inductor, in one graph, under autocast: the same bits."""
    case = case_of(f"chunk_{family}", T=300)
    arrays, call = prepared(case)
    leaves = {name: x.detach().requires_grad_() for name, x in arrays.items()}
    operator, options = getattr(linattn, case.operator), case.options

    @torch.compile(fullgraph=True)
    def compiled(given):
        with torch.autocast("cuda", torch.bfloat16):
            return operator(**given, **options, backend="triton")[0]

    o = compiled(leaves)
    expected = call()
    torch.manual_seed(3)
    d_o = torch.randn_like(o)
    gradients = torch.autograd.grad(o, tuple(leaves.values()), d_o)
    eager = {name: x.detach().requires_grad_() for name, x in arrays.items()}
    again = torch.autograd.grad(operator(**eager, **options, backend="triton")[0], tuple(eager.values()), d_o)
    same({"o": o}, {"o": expected["o"]})
    same(dict(zip(leaves, gradients, strict=True)), dict(zip(eager, again, strict=True)))


@pytest.mark.parametrize("family", FAMILIES)
def test_strided_arrays_are_not_copied(family):
    """``q, k, v`` as parts of one projection take no more memory than arrays of their own."""
    case = case_of(f"chunk_{family}", "fwd", T=4096, V=64)
    arrays, _ = prepared(case)
    together = torch.cat([arrays[name] for name in "qkv"], -1)
    parts = dict(zip("qkv", together.split(64, -1), strict=True))
    assert not parts["k"].is_contiguous()

    def peak(given):
        def call():
            with torch.no_grad():
                return getattr(linattn, case.operator)(**given, backend="triton")

        first = call()
        del first
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        o, _ = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, o

    (whole, expected), (strided, found) = peak(arrays), peak(arrays | parts)
    assert strided <= whole
    assert torch.equal(found, expected)


def operands(family, T):
    """Arrays of a delta family, ``K = V = 128``, which run on the kernels for Hopper if this is one."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, T, 1, 128, device="cuda").unbind()
    given = {name: x.bfloat16() for name, x in dict(q=q, k=torch.nn.functional.normalize(k, dim=-1), v=v).items()}
    width = {"gated_delta_rule": (1, T, 1), "kda": (1, T, 1, 128)}.get(family)
    if width:
        given["g"] = torch.nn.functional.logsigmoid(torch.randn(width, device="cuda")) / 16
    return given | dict(beta=(2 * torch.rand(1, T, 1, device="cuda")).bfloat16())


def differentiated(family, given, d_o, backend, **options):
    """Output and gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    o, _ = getattr(linattn, f"chunk_{family}")(**leaves, backend=backend, **options)
    return dict(zip(("o", *leaves), (o.detach(), *torch.autograd.grad(o, tuple(leaves.values()), d_o)), strict=True))


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule", "kda"])
def test_long_packed_sequences_in_segments(family):
    """One is longer than a segment, one shorter, and the last is empty."""
    given, cu = operands(family, 4096), torch.tensor([0, 100, 4096, 4096], device="cuda")
    d_o = torch.randn(1, 4096, 1, 128, device="cuda").bfloat16()
    found = differentiated(family, given, d_o, "triton", cu_seqlens=cu)
    exact = differentiated(family, {n: x.double() for n, x in given.items()}, d_o.double(), "torch", cu_seqlens=cu)
    for name, x in exact.items():
        assert (found[name].double() - x).norm() <= 0.015 * x.norm(), name


@pytest.mark.parametrize("family", ["gated_delta_rule", "kda"])
def test_a_gate_that_is_no_number_reaches_the_output(family):
    given = operands(family, 200)
    expected, _ = getattr(linattn, f"chunk_{family}")(**given, backend="triton")
    given["g"][0, 130] = torch.nan
    found, _ = getattr(linattn, f"chunk_{family}")(**given, backend="triton")
    assert found[0, 130:].isnan().all()
    assert torch.equal(found[0, :128], expected[0, :128])


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule"])
def test_tokens_that_lie_far_apart(family):
    """64 tokens' strides of ``beta`` and ``g`` are more than 32 bits hold."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("15 GiB for tokens far apart")
    given = operands(family, 70)
    d_o = torch.randn(1, 70, 1, 128, device="cuda").bfloat16()
    expected = differentiated(family, given, d_o, "triton")
    for name in given.keys() & {"beta", "g"}:
        x = given[name]
        given[name] = x.new_empty(70 << 25)[:: 1 << 25].view(1, 70, 1).copy_(x)
    same(differentiated(family, given, d_o, "triton"), expected)
