"""What a caller may rely on beyond the numbers: forms agree, splits resume, inputs stay, results repeat."""

import inspect

import pytest
import torch
from linattn import MixedState
from linattn.plugin import FORMS
from linattn.spec import FAMILIES as SPECS
from linattn_backends.torch import TorchBackend
from torch_cases import FAMILIES, VARIANTS, draw, error, forms, gradients, leaves, outputs, run

STATEFUL = [v for v, (_, flags) in VARIANTS.items() if "everywhere" not in flags]


def test_signatures_match_the_specs():
    """Every parameter but the options that linattn applies itself, ``normalize`` and the maps of inputs."""
    for family in FAMILIES:
        applied = {option.name for option in SPECS[family].options if option.lowering}
        assert applied <= {"qk_norm", "gate", "beta_map", "normalize"}
        for form in FORMS:
            parameters = inspect.signature(getattr(TorchBackend(), f"{form}_{family}")).parameters
            assert tuple(parameters) == tuple(name for name in SPECS[family].parameters if name not in applied)


def cut(arrays, t0, t1):
    def part(name, x):
        whole = name in ("u", "bias") or (name == "g" and x.dim() == 1)
        return x if whole else x[:, t0:t1]

    return {name: part(name, x) for name, x in arrays.items() if name != "initial_state"}


@pytest.mark.parametrize("splits", [(1,), (64,), (3, 40, 41, 130)], ids=str)
@pytest.mark.parametrize("variant", STATEFUL)
def test_split_and_resume(variant, splits):
    T = 150
    family, arrays, options = draw(variant, T, kind="harsh")
    o, final = run("chunk", family, arrays, options)
    state, parts = arrays["initial_state"], []
    for t0, t1 in zip((0, *splits), (*splits, T), strict=True):
        form = "recurrent" if t1 - t0 == 1 else "chunk"
        part, state = run(form, family, {**cut(arrays, t0, t1), "initial_state": state}, options)
        parts.append(part)
    assert error(torch.cat(parts, 1), o) < 1e-11
    for name, x in outputs((o, final)).items():
        if name != "o":
            assert error(outputs((o, state))[name], x) < 1e-11
    if isinstance(final, MixedState):
        assert torch.equal(final.length, state.length)


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunk_size_is_only_a_hint(variant):
    if VARIANTS[variant][0] == "mixed_attn":
        pytest.skip("part of the meaning there")
    family, arrays, options = draw(variant, 150, kind="harsh")
    o = run("chunk", family, arrays, options)[0]
    for size in (1, 16, 24, 128, 4096):
        assert error(run("chunk", family, arrays, {**options, "chunk_size": size})[0], o) < 1e-11


@pytest.mark.parametrize("variant", VARIANTS)
def test_strided_inputs_unchanged_and_deterministic(variant):
    family, arrays, options = draw(variant, 70, dtype=torch.float32)
    wrt = leaves(arrays)
    strided = {}
    for name, x in arrays.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 1:
            wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan).transpose(0, 1).contiguous().transpose(0, 1)
            wide[..., 1::2] = x
            strided[name] = wide[..., 1::2]
        else:
            strided[name] = x
    before = {name: x.clone() for name, x in leaves(strided).items()}
    for form in forms(variant):
        weights = {
            name: torch.ones(x.shape, dtype=torch.float64) for name, x in outputs(run(form, family, arrays, options)).items()
        }
        first = gradients(form, family, arrays, options, weights)
        again = gradients(form, family, arrays, options, weights)
        other = gradients(form, family, strided, options, weights)
        for results in zip(first, again, other, strict=True):
            for name in results[0]:
                assert torch.equal(results[0][name], results[1][name]), name
                assert torch.equal(results[0][name], results[2][name]), name
    for name, x in leaves(strided).items():
        assert torch.equal(x, before[name])
    assert wrt.keys() == before.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_no_views_of_inputs(variant):
    for T in (0, 1, 5):
        family, arrays, options = draw(variant, T)
        for form in forms(variant):
            taken = {x.data_ptr() for x in leaves(arrays).values() if x.numel()}
            assert not taken & {y.data_ptr() for y in outputs(run(form, family, arrays, options)).values() if y.numel()}


@pytest.mark.parametrize("variant", ["gla", "rwkv6", "kda", "dplr", "mixed_attn"])
def test_causality(variant):
    family, arrays, options = draw(variant, 100)
    o = run("chunk", family, arrays, options)[0]
    for t in (1, 16, 37, 64, 99):
        later = {name: x if isinstance(x, tuple) or x.dim() < 3 else x.clone() for name, x in arrays.items()}
        for name, x in cut(later, t, 100).items():
            if x.dim() > 2:
                x.copy_(torch.randn_like(x) if name != "g" else -torch.rand_like(x))
        assert torch.equal(run("chunk", family, later, options)[0][:, :t], o[:, :t])


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("variant", ["delta_rule", "kda", "delta_rule_vector_beta"])
def test_repeated_and_long_keys(variant, beta):
    """Equal keys make the triangular system as coupled as it gets; long ones make it grow."""
    for size in (1.0, 1.1 if beta == 2.0 else 1.3):
        family, arrays, options = draw(variant, 70, kind="zero", dtype=torch.float32, K=16)
        arrays["k"] = arrays["k"][:, :1].expand_as(arrays["k"]) * size
        arrays["beta"] = torch.full_like(arrays["beta"], beta)
        double = {name: x.double() for name, x in arrays.items()}
        expected = outputs(run("recurrent", family, double, options))
        for form in ("chunk", "parallel"):
            for name, y in outputs(run(form, family, arrays, options)).items():
                assert error(y, expected[name]) < 1e-4, (form, name, size, error(y, expected[name]))


def test_extreme_gates_stay_finite():
    for value in (-1e4, -1e30, -torch.inf):
        for variant in ("simple_gla", "gla", "gla_value_gate", "rwkv6", "gated_delta_rule", "kda", "dplr"):
            family, arrays, options = draw(variant, 70, dtype=torch.float32)
            for name in ("g", "gv"):
                if name in arrays:
                    arrays[name] = torch.full_like(arrays[name], value)
            weights = {
                name: torch.ones(x.shape, dtype=torch.float64)
                for name, x in outputs(run("chunk", family, arrays, options)).items()
            }
            for form in forms(variant):
                found, grads = gradients(form, family, arrays, options, weights)
                assert all(x.isfinite().all() for x in (*found.values(), *grads.values())), (variant, form, value)
                assert not grads["g"].any()
