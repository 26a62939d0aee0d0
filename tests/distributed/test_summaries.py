"""``summary_*`` and ``compose`` against the oracle, in every framework, forward and backward."""

from __future__ import annotations

import importlib.util
from typing import Any

import linattn
import numpy as np
import pytest
from linattn.plugin import Backend
from linattn_backends.numpy import oracle, summaries
from sequence_cases import AFFINE, VARIANTS, Case, arguments, draw, operator, oracle_options

FRAMEWORKS = [name for name in ("numpy", "torch", "jax", "mlx") if importlib.util.find_spec(name)]
PACKED = [0, 5, 5, 17, 22]
PAIRS = [
    *[("torch", variant, packed) for variant in VARIANTS for packed in (False, True)],
    *[("numpy", variant, True) for variant in VARIANTS],
    *[
        (name, variant, True)
        for name in ("jax", "mlx")
        for variant in ("linear_attn", "value_gate", "kda", "ssd", "value_beta")
    ],
]


def given(variant: str, packed: bool) -> Case:
    case = draw(variant, T=24 if packed else 9, cu_seqlens=PACKED if packed else None, state=False)
    taken = operator(f"summary_{case.family}").spec.parameters
    return case._replace(arrays={name: x for name, x in case.arrays.items() if name in taken or name.startswith("gate.")})


def to(framework: str, x: np.ndarray) -> Any:
    if framework == "numpy":
        return x
    if framework == "torch":
        return pytest.importorskip("torch").from_numpy(np.array(x))
    x = x.astype(np.int32 if x.dtype.kind == "i" else np.float32)
    return pytest.importorskip("jax.numpy").asarray(x) if framework == "jax" else pytest.importorskip("mlx.core").array(x)


def run(case: Case, arrays: dict[str, Any]) -> tuple[Any, Any]:
    function = operator(f"summary_{case.family}")
    return function(**arguments(case, arrays, function))


def pulled_back(framework: str, case: Case, dA: np.ndarray, db: np.ndarray) -> tuple[Any, dict[str, Any]]:
    """``(A, b)`` and the gradients of every float array, by the framework's own differentiation."""
    arrays = {name: to(framework, x) for name, x in case.arrays.items()}
    names = [name for name in arrays if name != "cu_seqlens"]
    weights = [to(framework, x) for x in (dA, db)]
    if framework == "torch":
        import torch

        for name in names:
            arrays[name].requires_grad_()
        found = run(case, arrays)
        torch.autograd.backward(found, weights) if found[0].requires_grad else torch.autograd.backward(found[1], weights[1])
        return found, {name: arrays[name].grad for name in names}

    def loss(*leaves: Any) -> Any:
        A, b = run(case, arrays | dict(zip(names, leaves, strict=True)))
        return (A * weights[0]).sum() + (b * weights[1]).sum()

    every = tuple(range(len(names)))
    if framework == "jax":
        import jax as module
    else:
        import mlx.core as module

    def both(*leaves: Any) -> Any:
        return run(case, arrays | dict(zip(names, leaves, strict=True))), module.grad(loss, argnums=every)(*leaves)

    if framework == "jax":
        both = module.jit(both)  # one program compiles sooner than each of its operations
    found, gradients = both(*[arrays[name] for name in names])
    return found, dict(zip(names, gradients, strict=True))


def assert_close(found: Any, expected: np.ndarray, tolerance: float, what: str = "") -> None:
    found = np.asarray(found.detach() if hasattr(found, "detach") else found, np.float64)
    assert found.shape == expected.shape, what
    np.testing.assert_allclose(
        found, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max(initial=0.0)), err_msg=what
    )


@pytest.mark.parametrize(("framework", "variant", "packed"), PAIRS)
def test_a_summary_is_the_oracles(framework: str, variant: str, packed: bool):
    if framework not in FRAMEWORKS:
        pytest.skip(f"{framework} is not installed")
    case, tolerance = given(variant, packed), 1e-10 if framework in ("numpy", "torch") else 2e-5
    A, b = summaries.forward(case.family, case.arrays, oracle_options(case))
    rng = np.random.default_rng(1)
    dA, db = rng.standard_normal(A.shape), rng.standard_normal(b.shape)
    if framework == "numpy":
        found, gradients = run(case, case.arrays), {}
    else:
        found, gradients = pulled_back(framework, case, dA, db)
    assert_close(found[0], A, tolerance, "A")
    assert_close(found[1], b, tolerance, "b")
    expected = summaries.vjp(case.family, case.arrays, oracle_options(case), dA, db)
    for name, gradient in gradients.items():
        value = np.zeros(case.arrays[name].shape) if gradient is None else gradient
        assert_close(value, expected[name], 10 * tolerance, f"gradient of {name}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_summary_says_what_the_operator_does_to_any_state(variant: str):
    case = draw(variant, cu_seqlens=PACKED)
    start = case.arrays["initial_state"]
    A, b = summaries.forward(case.family, {k: x for k, x in case.arrays.items() if k != "initial_state"}, oracle_options(case))
    _, final = oracle.forward(case.family, case.arrays, oracle_options(case) | {"output_final_state": True})
    composed, moved = linattn.compose((np.zeros_like(A), start), (A, b))
    assert not composed.any() or A.ndim == 2
    assert_close(moved, final, 1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_oracles_vjp_is_that_of_finite_differences(variant: str):
    case = given(variant, packed=True)
    case.arrays.update(given(variant, packed=True).arrays)
    options, rng = oracle_options(case), np.random.default_rng(2)
    for name in ("g", "gv"):
        if name in case.arrays:
            case.arrays[name] = np.maximum(case.arrays[name], -2.0)
    A, b = summaries.forward(case.family, case.arrays, options)
    dA, db = rng.standard_normal(A.shape), rng.standard_normal(b.shape)
    gradients = summaries.vjp(case.family, case.arrays, options, dA, db)
    for name, gradient in gradients.items():
        step = 1e-6 * rng.standard_normal(gradient.shape)
        ends = [
            summaries.forward(case.family, {**case.arrays, name: case.arrays[name] + sign * step}, options) for sign in (1, -1)
        ]
        difference = sum((d * (up - down)).sum() for d, up, down in zip((dA, db), *ends, strict=True)) / 2
        assert difference == pytest.approx((gradient * step).sum(), rel=1e-5, abs=1e-11), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_compose_to_the_whole(variant: str):
    case = draw(variant, T=13, state=False)

    def piece(tokens: slice) -> tuple[np.ndarray, np.ndarray]:
        cut = {name: x[:, tokens] if x.ndim > 2 else x for name, x in case.arrays.items()}
        return run(case, cut)

    whole = piece(slice(None))
    first, second, third = piece(slice(0, 4)), piece(slice(4, 4)), piece(slice(4, 13))
    for found in (
        linattn.compose(linattn.compose(first, second), third),
        linattn.compose(first, linattn.compose(second, third)),
    ):
        assert_close(found[0], whole[0], 1e-12, "A")
        assert_close(found[1], whole[1], 1e-12, "b")


def test_compose_is_differentiable():
    torch = pytest.importorskip("torch")
    for variant in ("simple_gla", "gla", "value_gate", "kda", "value_beta"):
        case = draw(variant, T=4, HV=2, state=False)
        pairs = [run(case, {name: to("torch", x) for name, x in case.arrays.items()}) for _ in range(2)]
        leaves = [x.detach().requires_grad_() for pair in pairs for x in pair]
        assert torch.autograd.gradcheck(lambda A1, b1, A2, b2: linattn.compose((A1, b1), (A2, b2)), leaves)


def test_autocast_does_not_round_states():
    torch = pytest.importorskip("torch")
    case = draw("kda", T=4, HV=2, state=False)
    arrays = {name: to("torch", x).float() for name, x in case.arrays.items()}
    pair = run(case, arrays)
    plain = linattn.compose(pair, pair)
    with torch.autocast("cpu", torch.bfloat16):
        found = linattn.compose(pair, pair)
    assert all(torch.equal(x, y) for x, y in zip(found, plain, strict=True))


def test_summaries_compile_without_a_break():
    torch = pytest.importorskip("torch")
    for variant in ("mapped_delta", "value_gate", "ssd"):
        case = draw(variant, state=False)
        arrays = {name: to("torch", x) for name, x in case.arrays.items()}
        expected = run(case, arrays)
        found = torch.compile(lambda arrays, case=case: run(case, arrays), fullgraph=True, backend="eager")(arrays)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_backends_own_method_comes_first():
    class Own(Backend):
        name, api, frameworks = "own", ">=1,<2", ("numpy",)

        def summary_gla(self, k, v, g, gv=None):
            return "A", k.shape

    case = draw("gla", state=False)
    arrays = {name: case.arrays[name] for name in ("k", "v", "g")}
    linattn.register_backend(Own())
    try:
        assert linattn.summary_gla(**arrays, backend="own") == ("A", arrays["k"].shape)
        assert linattn.summary_gla(**arrays, qk_norm="l2", chunk_size=4, backend="own") == ("A", arrays["k"].shape)
    finally:
        linattn.unregister_backend("own")


def test_a_chunk_method_is_given_what_it_is_always_given():
    """``scale`` is a number for every backend, though a summary reads no output."""
    seen: dict[str, Any] = {}

    class Chunks(Backend):
        name, api, frameworks = "chunks", ">=1,<2", ("numpy",)

        def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state):
            seen.update(scale=scale, output_final_state=output_final_state)
            return v, initial_state

    case = draw("gla", state=False)
    linattn.register_backend(Chunks())
    try:
        linattn.summary_gla(*(case.arrays[name] for name in ("k", "v", "g")), backend="chunks")
    finally:
        linattn.unregister_backend("chunks")
    assert seen == {"scale": 1.0, "output_final_state": True}


def test_explain_says_how_it_is_made():
    case = given("gla", packed=False)
    plan = linattn.explain("summary_gla", **case.arrays)
    assert (plan.backend, plan.method) == ("numpy", "chunk_gla")
    assert "numpy.chunk_gla (read off the state of a wider call)" in str(plan)


def test_errors_name_the_summary():
    case = given("gla", packed=False)
    with pytest.raises(
        linattn.errors.ShapeError, match=r"^summary_gla: g must be \[B, T, HV, K\] = \[2, 9, 4, 4\] or .*, got \[2, 9, 4\]$"
    ):
        linattn.summary_gla(**{**case.arrays, "g": case.arrays["g"][..., 0]})
    A, b = linattn.summary_gla(**case.arrays)
    with pytest.raises(linattn.errors.ShapeError) as error:
        linattn.compose((A, b), (A[:, :2], b))
    assert str(error.value) == (
        "compose: both summaries must have the same shapes, got A [2, 4, 4] and b [2, 4, 4, 3], "
        "then A [2, 2, 4] and b [2, 4, 4, 3]"
    )
    with pytest.raises(linattn.errors.ShapeError) as error:
        linattn.compose((b, A), (b, A))
    assert str(error.value) == ("compose: no summary has A [2, 4, 4, 3] and b [2, 4, 4]: pass what linattn.summary_… returns")


def test_every_affine_family_has_one():
    assert {f"summary_{family}" for family in AFFINE} == {name for name in linattn.__all__ if name.startswith("summary_")}
