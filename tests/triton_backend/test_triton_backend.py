"""What the backend says it can run, and how it behaves under PyTorch's tracers."""

from __future__ import annotations

from contextlib import nullcontext

import linattn
import pytest
import torch
from linattn.plugin import Call
from linattn.registry import check_contract, registry
from linattn_backends.triton import TritonBackend, backend
from linattn_backends.triton.diagonal.op import diagonal, diagonal_backward
from linattn_backends.triton.diagonal.vector import diagonal_vector_outputs
from linattn_backends.triton.normalizer.op import normalized_attention
from linattn_backends.triton.runtime import launch
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.checkpoint import checkpoint
from triton_cases import arrays, call, positive

DIMS = (("B", 1), ("T", 8), ("H", 1), ("HV", 1), ("K", 16), ("V", 16))
ARRAYS = (("q", "B T H K", "float32"), ("k", "B T H K", "float32"), ("v", "B T HV V", "float32"), ("g", "B T HV K", "float32"))


def described(op="gla", form="chunk", device="cpu", given=ARRAYS, dims=DIMS, options=(), needs_grad=None):
    return Call(op, form, "torch", device, given, dims, options, needs_grad)


def test_meets_the_contract():
    check_contract(TritonBackend())


def test_takes_what_it_runs():
    assert TritonBackend().supports(described()) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(device="mps"), "runs on CUDA devices, not mps"),
        (dict(dims=(*DIMS[:4], ("K", 513), ("V", 16))), "K must be at most 512, got 513"),
        (dict(given=(*ARRAYS[:3], ("g", "B T HV K", "float64"))), "has no float64"),
        (
            dict(op="kda", form="recurrent", dims=(*DIMS[:4], ("K", 16), ("V", 257)), needs_grad=False),
            "V must be at most 256, got 257",
        ),
    ],
)
def test_says_why_not(changes, reason):
    assert str(TritonBackend().supports(described(**changes))) == reason


def test_without_the_interpreter_the_cpu_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    assert "TRITON_INTERPRET=1" in str(TritonBackend().supports(described()))


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("3.1.0", "does not run with Triton 3.1.0: it lacks what the kernels use"),
        ("9.9.1+git1234", "does not run with Triton 9.9.1+git1234: seen to give wrong gradients"),
        ("3.6.0", "None"),
    ],
)
def test_a_release_of_triton_that_is_refused_is_named(release, reason, monkeypatch):
    backend._release_complaint.cache_clear()
    monkeypatch.setitem(backend.UNFIT, "==9.9.*", "seen to give wrong gradients")
    monkeypatch.setattr(backend.triton, "__version__", release)
    assert str(TritonBackend().supports(described())) == reason
    backend._release_complaint.cache_clear()


@pytest.mark.usefixtures("registered")
def test_explain_says_that_a_release_is_refused(monkeypatch):
    backend._release_complaint.cache_clear()
    monkeypatch.setattr(backend.triton, "__version__", "3.1.0")
    given = arrays("gla", T=11, state=False)
    said = str(linattn.explain(linattn.chunk_gla, *given.values(), backend=["triton", "torch"]))
    backend._release_complaint.cache_clear()
    assert "triton: does not run with Triton 3.1.0: it lacks what the kernels use" in said
    assert "runs         torch.chunk_gla" in said


REFUSED = (
    "has not been run on {}: LINATTN_UNTESTED_DEVICES=1 in the environment runs the plain kernels there, and what "
    "`linattn conformance --backend triton --device {} --report report.json` says of them is welcome as an issue"
)


def test_devices_that_nobody_tried_are_for_who_wants_to(monkeypatch):
    monkeypatch.setattr(backend, "OPTED_IN", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert backend._architectures() == {"cuda:0": REFUSED.format("AMD's GPUs", "cuda")}
    assert backend._device_complaint("xpu:0") == REFUSED.format("Intel's GPUs", "xpu")
    monkeypatch.setattr(backend, "OPTED_IN", True)
    assert backend._architectures() == {"cuda:0": None}
    assert backend._device_complaint("xpu:0") is None


def test_old_architectures_are_named(monkeypatch):
    monkeypatch.setattr(backend, "_ARCHITECTURES", {"cuda:0": "needs compute capability 8.0 or newer, got 7.5"})
    assert str(TritonBackend().supports(described(device="cuda:0"))).endswith("got 7.5")


def test_a_failed_launch_names_what_failed(monkeypatch):
    start = launch.start

    def broken(kernel, *rest):
        if kernel is diagonal_vector_outputs:
            raise RuntimeError("out of resources")
        start(kernel, *rest)

    monkeypatch.setattr(launch, "start", broken)
    given = arrays("gla", T=5)
    with pytest.raises(RuntimeError, match="out of resources") as caught:
        call("gla", given)
    (note,) = caught.value.__notes__
    assert note.startswith(
        "linattn triton: kernel diagonal_vector_outputs of gla failed on q (1, 5, 1, 5) torch.float32, "
        "k (1, 5, 1, 5) torch.float32, v (1, 5, 1, 7) torch.float32, g (1, 5, 1, 5) torch.float32; "
        "configuration K=5, V=7, BV=16, "
    )
    assert note.endswith("num_warps=4, num_stages=1")


@pytest.fixture
def registered():
    """The backend by name, also where the distribution is not installed."""
    if "triton" in registry.records:
        yield
        return
    linattn.register_backend(TritonBackend)
    yield
    registry.unregister("triton")


@pytest.mark.usefixtures("registered")
def test_through_the_public_function():
    given = arrays("gla", T=9, state=False)
    o, _ = linattn.chunk_gla(*given.values(), backend="triton")
    wanted, _ = call("gla", given)
    assert torch.equal(o, wanted)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", ["simple_gla", "rwkv6"])
def test_opcheck(family, form, keep):
    given = arrays(family, T=5, K=4, V=4)
    for x in given.values():
        x.requires_grad_()
    arguments = [given.get(name) for name in ("q", "k", "v", "g", "gv", "u", "initial_state", "cu_seqlens")]
    torch.library.opcheck(diagonal, (*arguments, form, 0.5, 16, True, keep))


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", ["linear_attn", "gla"])
def test_opcheck_of_normalized_calls(family, form, keep):
    given = positive(arrays(family, T=5, K=4, V=4))
    for x in given.values():
        x.requires_grad_()
    arguments = [given.get(name) for name in ("q", "k", "v", "g", "gv", "initial_state", "cu_seqlens")]
    torch.library.opcheck(normalized_attention, (*arguments, form, 16, True, keep))


def test_opcheck_backward():
    given = arrays("gla", T=5, K=4, V=4)
    arguments = [given.get(name) for name in ("q", "k", "v", "g", "gv", "u", "initial_state", "cu_seqlens")]
    tests = ("test_schema", "test_faketensor")
    with torch.no_grad():
        _, _, *kept = diagonal(*arguments, "chunk", 0.5, 16, False, True)
        for applied in (kept, [None] * len(kept)):
            given_first = (given["v"], given["initial_state"], *applied)
            torch.library.opcheck(diagonal_backward, (*given_first, *arguments, 0.5, 16), test_utils=tests)


def test_compiles_without_a_break():
    torch._dynamo.reset()
    given = arrays("gla", T=9)

    def loss(*x):
        o, final = call("gla", dict(zip(given, x, strict=True)), output_final_state=True, chunk_size=16)
        return o.sum() + final.sum()

    inputs = [x.requires_grad_() for x in given.values()]
    wanted = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs), inputs)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_a_view_to_be_negated():
    given = arrays("simple_gla", T=9)
    view = torch.complex(given["g"], -given["g"]).conj().imag
    assert view.is_neg()
    assert torch.equal(call("simple_gla", {**given, "g": view})[0], call("simple_gla", given)[0])


@pytest.mark.parametrize("gradients", [True, False])
def test_an_array_that_a_transform_left_behind(gradients):
    given, left = arrays("simple_gla", T=9), []
    torch.func.grad(lambda v: (left.append(v), v.sum())[1])(given["v"])
    assert torch._C._functorch.is_dead_tensor_wrapper(left[0])
    q = given["q"].requires_grad_(gradients)
    o, _ = call("simple_gla", {**given, "v": left[0]})
    assert torch.equal(o, call("simple_gla", given)[0])
    if gradients:
        (found,) = torch.autograd.grad(o.sum(), q)
        assert torch.isfinite(found).all()


def test_what_is_kept_for_the_backward_pass_is_no_result():
    """Autograd sees the results, not the arrays behind them."""
    given = arrays("kda", T=20)
    given["q"].requires_grad_()
    o, final = call("kda", given, output_final_state=True)
    assert o.grad_fn is final.grad_fn
    assert len(o.grad_fn._input_metadata) == 2


@pytest.mark.usefixtures("registered")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in jvp
def test_tangents_go_to_another_backend_or_are_refused():
    q, k, v, g = arrays("gla", T=9, state=False).values()

    def output(x, backend="auto"):
        return linattn.chunk_gla(q, k, x, g, backend=backend)[0]

    with pytest.raises(linattn.Unsupported) as caught:
        torch.func.jvp(lambda x: output(x, "triton"), (v,), (v,))
    assert str(caught.value) == (
        "no backend can run chunk_gla on torch cpu float32 B=1 T=9 H=1 K=5 N=1 HV=1 V=7\n"
        "  triton: has no forward-mode derivatives, and the arrays carry tangents"
    )
    found, tangent = torch.func.jvp(output, (v,), (v,))
    torch.testing.assert_close(tangent, found)  # it is linear in v
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, v)
        assert "runs         torch.chunk_gla\n" in str(linattn.explain(linattn.chunk_gla, q, k, dual, g))
        compiled = torch.compile(output, backend="eager")
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(compiled(dual)).tangent, found)


@pytest.mark.usefixtures("registered")
def test_func_transforms():
    q, k, v, g = arrays("gla", T=9, state=False).values()

    def loss(x):
        return linattn.chunk_gla(q, x, v, g, backend="triton")[0].square().sum()

    leaf = k.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(k), wanted)
    torch.testing.assert_close(torch.func.jacrev(loss)(k), wanted)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(k[None]), wanted[None])
    with pytest.raises(
        RuntimeError, match="the gradient of a linattn operator has no gradient of its own: for a second derivative, take"
    ):
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(k)


@pytest.mark.parametrize("mode", [nullcontext, BaseTorchDispatchMode])
@pytest.mark.parametrize("family", ["simple_gla", "gla", "gated_delta_rule", "kda"])
def test_gradient_checkpointing(family, mode):
    """It refuses a backward pass that asks for its saved tensors twice, or saves others when a mode sees it."""
    given = arrays(family, T=9)
    inputs = [x.requires_grad_() for x in given.values()]

    def output(*x):
        return call(family, dict(zip(given, x, strict=True)))[0]

    wanted = torch.autograd.grad(output(*inputs).sum(), inputs)
    result = checkpoint(output, *inputs, use_reentrant=False).sum()
    with mode():
        found = torch.autograd.grad(result, inputs)
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


def test_companions_run_on_kernels_of_their_own():
    torch.manual_seed(0)
    x, z, weight = torch.randn(2, 9, 24), torch.randn(2, 9, 24), torch.randn(24, 4)
    y, end = linattn.short_conv(x, weight, activation="silu", output_final_state=True, backend="triton")
    expected = linattn.short_conv(x, weight, activation="silu", output_final_state=True, backend="torch")
    torch.testing.assert_close((y, end), expected)
    torch.testing.assert_close(
        linattn.gated_rms_norm(x, z, weight[:, 0], backend="triton"),
        linattn.gated_rms_norm(x, z, weight[:, 0], backend="torch"),
    )
    plan = linattn.explain(linattn.short_conv, x.requires_grad_(), weight, backend="triton")
    assert "conv_outputs_fwd" in plan.details
    assert "conv_gradients_bwd" in plan.details
    assert "norm_outputs_fwd" in linattn.explain(linattn.gated_rms_norm, x.detach(), z, weight[:, 0], backend="triton").details
    pool = torch.randn(3, 24, 3)
    plan = linattn.explain(linattn.decode_short_conv, x.detach(), weight, state=pool, backend="triton")
    assert "conv_tokens_fwd" in plan.details


def test_windows_narrower_than_their_tokens_round_what_the_next_call_reads():
    torch.manual_seed(0)
    x, weight, start = torch.randn(2, 5, 24), torch.randn(24, 4), torch.randn(2, 24, 3).half()
    pools = {backend: start.clone() for backend in ("triton", "torch")}
    found, wanted = (linattn.decode_short_conv(x, weight, state=pool, backend=name) for name, pool in pools.items())
    torch.testing.assert_close(found, wanted)
    assert torch.equal(pools["triton"], pools["torch"])
    assert torch.equal(pools["triton"], x[:, 2:].mT.half())
