"""Mixed chunk attention and sums over whole sequences, forward and backward, against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from linattn.plugin import MixedState
from linattn_backends.numpy import oracle
from linattn_backends.triton.mixed.bidirectional import bidirectional
from linattn_backends.triton.mixed.op import mixed
from triton_cases import BACKEND, TOLERANCE, arrays, distance

NAMES = ("q_quad", "k_quad", "q_lin", "k_lin", "v")


def draw(T=37, B=1, H=1, K=6, L=5, V=7, C=16, dtype=torch.float32, held=None, cu=None, bias=False, seed=0):
    """Seeded arguments by name; ``held`` are the lengths of the state gone on from."""
    torch.manual_seed(seed)
    given = {name: torch.randn(B, T, H, {"q": K, "k": K}[name[0]] if "quad" in name else L).to(dtype) for name in NAMES[:4]}
    given["v"] = torch.randn(B, T, H, V).to(dtype)
    if bias:
        given["bias"] = torch.randn(H, C, C) / 2
    if held is not None:
        N, length = len(held), torch.tensor(held, dtype=torch.int32)
        there = (torch.arange(C) < length[:, None])[..., None, None]
        rows = (torch.randn(N, C, H, W) * there for W in (K, L, V))
        given["initial_state"] = MixedState(torch.randn(N, H, L, V), *rows, length)
    if cu is not None:
        given["cu_seqlens"] = torch.tensor(cu)
    return given


def leaves(given):
    """Every float array by name, those of the state too."""
    flat = {name: x for name, x in given.items() if name not in ("initial_state", "cu_seqlens")}
    state = given.get("initial_state")
    return flat | (
        {} if state is None else {f"initial_state.{name}": x for name, x in state._asdict().items() if name != "length"}
    )


def exact(x):
    if isinstance(x, tuple):
        return type(x)(*map(exact, x))
    return x.detach().double().numpy() if x.is_floating_point() else x.numpy()


def run(given, C=16, final=True, form="chunk", **options):
    given = dict(given)
    positional = [given.pop(name) for name in NAMES]
    return getattr(BACKEND, f"{form}_mixed_attn")(*positional, **given, chunk_size=C, output_final_state=final, **options)


def compare(given, C=16, final=True, form="chunk", **options):
    """Outputs, final state and every gradient."""
    tolerance = TOLERANCE[given["v"].dtype]
    inputs = leaves(given)
    for x in inputs.values():
        x.requires_grad_()
    o, state = run(given, C, final, form, **options)
    keywords = dict(options, chunk_size=C, output_final_state=final)
    truth = {name: exact(x) for name, x in given.items()}
    wanted_o, wanted = oracle.forward("mixed_attn", truth, keywords)
    errors = {"o": distance(o, wanted_o)}
    outputs, cotangents, d_state = [o], [torch.randn(o.shape).to(o.dtype)], None
    if final:
        assert torch.equal(state.length, torch.from_numpy(np.asarray(wanted.length)).to(torch.int32))
        errors |= {name: distance(getattr(state, name), getattr(wanted, name)) for name in state._fields[:4]}
        outputs += state[:4]
        cotangents += [torch.randn(x.shape) for x in state[:4]]
        d_state = MixedState(*(x.double().numpy() for x in cotangents[1:]), None)
    found = torch.autograd.grad(outputs, list(inputs.values()), cotangents)
    pulled = oracle.vjp("mixed_attn", truth, keywords, cotangents[0].double().numpy(), d_state)
    for (name, x), gradient in zip(inputs.items(), found, strict=True):
        assert gradient.dtype == x.dtype
        outer, _, inner = name.partition(".")
        errors[f"d{name}"] = distance(gradient, getattr(pulled[outer], inner) if inner else pulled[outer])
    assert all(error < tolerance for error in errors.values()), errors


def test_plain():
    compare(draw(B=2, H=2, T=20))


def test_without_a_final_state():
    compare(draw(), final=False)


@pytest.mark.parametrize("held", [[3], [0], [15]])
@pytest.mark.parametrize("T", [1, 13, 37])
def test_going_on_from_a_state(held, T):
    compare(draw(T=T, held=held))


def test_sequences_that_hold_different_numbers_of_tokens():
    compare(draw(T=20, B=3, held=[0, 5, 12], bias=True))


def test_packed():
    compare(draw(T=60, cu=[0, 0, 5, 5, 38, 60]))


def test_packed_going_on_from_states():
    compare(draw(T=40, cu=[0, 0, 5, 30, 40], held=[4, 15, 0, 7], bias=True))


def test_bias_and_scales():
    compare(draw(B=2, bias=True), quad_scale=0.37, lin_scale=-0.21)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token(dtype):
    """Of sequences whose chunks are empty, part full and about to be full; two blocks of a chunk, two tiles of values."""
    given = draw(T=1, B=3, H=2, K=5, L=70, V=70, C=40, held=[0, 20, 39], bias=True, dtype=dtype)
    compare(given, 40, form="recurrent", quad_scale=0.3, lin_scale=0.3)


@pytest.mark.parametrize("options", [dict(T=9, held=[12]), dict(T=1), dict(T=1, held=[15], final=False), dict(T=1, cu=[0, 1])])
def test_other_calls_of_the_recurrent_form(options):
    final = options.pop("final", True)
    compare(draw(**options), form="recurrent", final=final)


@pytest.mark.parametrize("cu", [None, [0, 0, 5, 37]])
def test_not_causal(cu):
    compare(draw(cu=cu, bias=True), causal=False, final=False)


@pytest.mark.parametrize(("C", "T"), [(1, 5), (7, 30), (40, 75), (80, 75)])
def test_chunk_sizes(C, T):
    compare(draw(T=T, C=C, bias=True), C)


def test_flash_quad_may_say_any_length():
    compare(draw(T=20), 5000, final=False, quad_scale=0.3, lin_scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype):
    compare(draw(T=90, C=70, dtype=dtype), 70, quad_scale=0.3, lin_scale=0.3)


@pytest.mark.parametrize(("K", "L", "V"), [(1, 1, 1), (40, 70, 33)])
def test_widths(K, L, V):
    compare(draw(T=21, H=1, K=K, L=L, V=V, held=[5]))


def test_strided_inputs():
    given = draw(B=2, T=20)
    given = {name: torch.stack((x, x + 1), -1)[..., 0].detach() for name, x in given.items()}
    assert not given["v"].is_contiguous()
    compare(given)


@pytest.mark.parametrize("held", [None, [3]])
def test_no_tokens(held):
    given = draw(T=0, held=held)
    o, state = run(given)
    assert o.shape == (1, 0, 1, 7)
    before = given.get("initial_state")
    assert all(
        torch.equal(x, torch.zeros_like(x) if before is None else y) for x, y in zip(state, before or state, strict=True)
    )


def test_gradient_of_the_state_alone():
    given = draw(T=21)
    for x in given.values():
        x.requires_grad_()
    _, state = run(given)
    (found,) = torch.autograd.grad(state.v.sum(), [given["v"]])
    assert torch.equal(found[:, 16:], torch.ones_like(found[:, 16:]))
    assert torch.equal(found[:, :16], torch.zeros_like(found[:, :16]))


@pytest.mark.parametrize("T", [1, 2])
def test_opcheck(T):
    given = draw(T=T, C=4, held=[2], bias=True)
    state = given["initial_state"]
    named = [given[name] for name in (*NAMES, "bias")]
    for x in leaves(given).values():
        x.requires_grad_()
    torch.library.opcheck(mixed, (*named, *state, None, 4, 0.5, 0.5, True, True, True))


@pytest.mark.parametrize("cu", [None, [0, 0, 260, 270]])
@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attention_that_is_not_causal(cu, normalize):
    given = arrays("linear_attn", T=270, H=1, HV=2, state=False, cu=cu)
    for name in ("q", "k") if normalize else ():
        given[name] = given[name].abs() + 0.1
    inputs = [x.requires_grad_() for x in given.values() if x.is_floating_point()]
    options = dict(causal=False, normalize=normalize, output_final_state=False)
    o, final = BACKEND.chunk_linear_attn(**given, **options)
    truth = {name: exact(x) for name, x in given.items()}
    wanted, _ = oracle.forward("linear_attn", truth, options)
    d_o = torch.randn(o.shape)
    found = torch.autograd.grad(o, inputs, d_o)
    pulled = oracle.vjp("linear_attn", truth, options, d_o.double().numpy(), None)
    assert final is None
    assert distance(o, wanted) < 3e-6
    assert all(distance(x, pulled[name]) < 3e-6 for name, x in zip("qkv", found, strict=True))


def test_opcheck_linear_attention_that_is_not_causal():
    given = arrays("linear_attn", T=5, state=False)
    torch.library.opcheck(bidirectional, (*(x.requires_grad_() for x in given.values()), None, 0.5, False))


def test_weights_beyond_the_range_of_float16():
    given = draw(dtype=torch.float16)
    given |= dict(q_quad=60 * given["q_quad"], k_quad=60 * given["k_quad"], v=given["v"] / 100)
    o, _ = run(given)
    wanted, _ = oracle.forward(
        "mixed_attn", {name: exact(x) for name, x in given.items()}, dict(chunk_size=16, output_final_state=True)
    )
    assert distance(o, wanted) < TOLERANCE[torch.float16]
