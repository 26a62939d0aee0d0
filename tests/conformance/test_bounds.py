"""Bounds let a correct low-precision chunk algorithm pass, and are tight enough that a coarser one does not."""

import re
from typing import ClassVar

import linattn
import numpy as np
import pytest
import torch
from linattn_conformance import bounds, calls
from linattn_conformance.adapters import adapter_for
from linattn_conformance.bounds import Quantity, Truth, distance
from linattn_conformance.broken.base import Simple
from linattn_conformance.calls import drawn, truth
from linattn_conformance.cases import BACKWARD, every_case, named
from linattn_conformance.checks import CHECKS
from linattn_conformance.checks.values import compare_gradients
from linattn_conformance.runner import Runner


class Rounded(Simple):
    """The chunk algorithm with operands of every matrix product rounded to a dtype, and sums in float32: tensor cores."""

    name = "rounded"
    families: ClassVar[tuple[str, ...]] = ("simple_gla", "delta_rule")
    coarse = 1

    def run(self, form, op, given):
        self.dtype = given["v"].dtype
        return super().run(form, op, given)

    def low(self, x):
        """Rounded to the dtype of the operands; a coarse backend drops three more bits."""
        y = x.astype(self.dtype)
        return (
            y.astype(np.float32) if self.coarse == 1 else (y * self.dtype.type(9) - y * self.dtype.type(8)).astype(np.float32)
        )

    def matmul(self, x, y):
        return self.low(x) @ self.low(y)

    def forward(self, op, arrays, options):
        x = {name: np.asarray(value, np.float32) for name, value in arrays.items() if name != "cu_seqlens"}
        B, T, HV, V = x["v"].shape
        K, group = x["k"].shape[-1], HV // x["k"].shape[2]
        heads = {name: np.repeat(x[name], group, 2) for name in ("q", "k")} | {"v": x["v"]}
        q, k, v = (heads[name].transpose(0, 2, 1, 3) for name in ("q", "k", "v"))
        g = np.broadcast_to(x["g"], (B, T, HV)).transpose(0, 2, 1) if "g" in x else np.zeros((B, HV, T), np.float32)
        beta = x["beta"].transpose(0, 2, 1) if "beta" in x else None
        bounds = arrays["cu_seqlens"].tolist() if "cu_seqlens" in arrays else [0, T]
        N = len(bounds) - 1
        state = x.get("initial_state", np.zeros((N if "cu_seqlens" in arrays else B, HV, K, V), np.float32)).copy()
        o = np.zeros_like(v)
        for n in range(N):
            own = slice(n, n + 1) if "cu_seqlens" in arrays else slice(None)
            for at in range(bounds[n], bounds[n + 1], 64):
                part = slice(at, min(at + 64, bounds[n + 1]))
                o[:, :, part], state[own] = self.chunk(
                    *(y[:, :, part] for y in (q, k, v, g)), None if beta is None else beta[:, :, part], state[own]
                )
        return options["scale"] * o.transpose(0, 2, 1, 3), state

    def chunk(self, q, k, v, g, beta, S):
        G = np.cumsum(g, -1, dtype=np.float32)
        decay = np.tril(np.exp(np.minimum(G[..., :, None] - G[..., None, :], 0)))
        if beta is not None:
            L = np.tril(self.matmul(beta[..., None] * k, k.swapaxes(-1, -2)), -1)
            inverse = np.linalg.inv(np.eye(L.shape[-1], dtype=np.float32) + L)
            U, W = self.matmul(inverse, beta[..., None] * v), self.matmul(inverse, beta[..., None] * k)
            v = U - self.matmul(W, S)
        weights = self.matmul(q, k.swapaxes(-1, -2)) * decay
        o = self.matmul(q * np.exp(G)[..., None], S) + self.matmul(weights, v)
        kept = k * np.exp(G[..., -1:] - G)[..., None]
        return o, np.exp(G[..., -1])[..., None, None] * S + self.matmul(kept.swapaxes(-1, -2), v)


class Coarse(Rounded):
    name = "coarse"
    coarse = 8


def forward_cases(runner, *dtypes):
    # this little algorithm takes plain running sums, and does not normalise nor map
    unusual = {"reset", "huge", "long", "mixed", "deep", "normalize", "qk_norm", "gate", "beta_map", "vast", "large"}
    unusual |= {"beta.BTHVV", "scale.large"}
    return [
        case
        for case in every_case()
        if runner.applies(case)
        and case.op in Rounded.families
        and (case.form, case.check) == ("chunk", "forward")
        and case.id.split("/")[2] in dtypes
        and not unusual.intersection((*case.flags, *(flag.partition(".")[0] for flag in case.flags)))
    ]


@pytest.fixture
def run():
    registered = []

    def run(kind, *dtypes):
        linattn.register_backend(kind())
        registered.append(kind.name)
        runner = Runner(kind.name)
        return list(runner.run(forward_cases(runner, *dtypes)))

    yield run
    for name in registered:
        linattn.unregister_backend(name)


def test_tensor_core_rounding_is_within_bounds(run):
    results = run(Rounded, "fp16", "fp32")
    assert len(results) > 40
    assert [(result.id, result.message) for result in results if result.status != "passed"] == []
    assert 0.1 < max(result.error or 0.0 for result in results) < 0.8


def test_three_bits_less_are_not(run):
    results = run(Coarse, "fp16")
    assert any(result.status == "failed" for result in results)


VALUE = np.linspace(1, 2, 80).reshape(20, 4)
WANT = Quantity(VALUE, np.full((20, 1), 1e-3), "float32")


def test_distance_is_relative_to_the_bound():
    assert distance(VALUE, WANT) == 0
    assert distance(VALUE + 2e-3, WANT) == pytest.approx(2 / (4 + 8 / 80**0.5))  # as a whole
    whole = Quantity(np.ones((2000, 4)), np.full((2000, 1), 1e-3), "float32")
    assert distance(whole.value + 2e-3, whole) == pytest.approx(0.5, rel=0.03)
    one = VALUE.copy()
    one[7, 2] += 6e-3
    assert distance(one, WANT) == pytest.approx(0.5)  # a row: 12 times the noise


def test_one_bad_row_does_not_hide():
    bad = VALUE.copy()
    bad[7] += 13e-3
    assert distance(bad, WANT) > 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_is_out_of_bounds(value):
    bad = VALUE.copy()
    bad[0, 0] = value
    assert distance(bad, WANT) == np.inf


def test_another_shape_is_out_of_bounds():
    assert distance(VALUE.T, WANT) == np.inf


def test_without_noise_only_the_exact_value_will_do():
    exact = Quantity(VALUE, np.zeros((20, 1)), "float32")
    assert distance(VALUE, exact) == 0
    assert distance(VALUE + 1e-300, exact) == 0  # lost in the value
    assert distance(VALUE + 1e-15, exact) == np.inf


def test_gradients_in_float64_may_be_those_of_float32():
    """Which flushes what is left of a state after many tokens."""
    case = named("gla/chunk/fp32/fp64.initial_state-loss.state-state/T4000-K2-V2/gradient")
    quantity = truth(case, adapter_for("numpy", "cpu")).gradients["initial_state"]
    assert quantity.dtype == "float64"
    assert quantity.noise.min() >= bounds.FLUSHED["float32"]


def test_a_truth_without_gradients_is_a_part_of_that_with_them(monkeypatch):
    adapter = adapter_for("numpy", "cpu")
    forward, gradient = (named(f"kda/chunk/fp32/state-varlen/T65-K24-V40/{check}") for check in ("forward", "gradient"))
    monkeypatch.setattr(calls, "_kept", {})
    alone = truth(forward, adapter)
    monkeypatch.setattr(calls, "_kept", {})
    whole = truth(gradient, adapter)
    part = truth(forward, adapter)
    assert part.outputs is whole.outputs
    assert whole.gradients
    assert not part.gradients
    for name, want in alone.outputs.items():
        np.testing.assert_array_equal(part.outputs[name].value, want.value)
        np.testing.assert_array_equal(part.outputs[name].noise, want.noise)


def test_gradients_are_never_compared_with_a_truth_that_has_none(monkeypatch):
    case = named("kda/chunk/fp32/state-varlen/T65-K24-V40/gradient")
    run = calls.Run(case, adapter_for("numpy", "cpu"), None, None)
    arrays, made = run.arrays(), truth(case, run.adapter)
    found = {name: run.adapter.from_float64(x.value, x.dtype) for name, x in made.gradients.items()}
    compare_gradients(run, arrays, found)
    monkeypatch.setitem(run.__dict__, "truth", Truth(made.outputs, {}, {}))
    expected = f"the truth of {case.id} was made without gradients, which gradient compares"
    with pytest.raises(RuntimeError, match=f"^{re.escape(expected)}$"):
        compare_gradients(run, arrays, found)


def test_what_has_no_use_for_gradients_is_a_check_that_asks_for_none():
    assert set(CHECKS) > calls.WITHOUT_GRADIENT
    assert not calls.WITHOUT_GRADIENT & set(BACKWARD)
    assert all(calls.with_gradients(case) for case in every_case() if case.needs_gradient)


def test_a_single_number_of_a_wide_row_may_be_rounded():
    """As in the gradient of a bias, of whose rows short sequences reach the beginning alone."""
    value = np.zeros((1, 1024))
    value[0, 0] = 1 + 2.0**-24
    noise = np.full((1, 1), 2.0**-24 / 32)
    assert distance(value.astype(np.float32).astype(float), Quantity(value, noise, "float32")) == pytest.approx(1.0, rel=1e-6)
    value[0, 0] = 1 + 2.0**-23
    assert distance(np.where(value, 1.0, 0.0), Quantity(value, noise, "float32")) > 1.9


def test_a_number_among_zeros_has_the_noise_that_it_has_alone():
    """Of a row that ends with channels into which no gradient was fed."""
    narrow = np.array([[[[1.0, 2.0]], [[1.0 + 1e-6, 2.0 - 3e-6]]]]).reshape(1, 1, 2, 2)
    wide = np.concatenate([narrow, np.zeros((1, 1, 2, 30))], -1)
    alone, among = (bounds._quantity(x, 2, "float32", 1) for x in (narrow, wide))
    assert among.noise.item() == pytest.approx(alone.noise.item())
    nothing = bounds._quantity(np.zeros((1, 1, 2, 4)), 2, "float32", 1)
    assert nothing.noise.item() == bounds.FLUSHED["float32"]


def test_the_gradient_of_a_quotient_is_held_to_what_its_terms_are_summed_of():
    """With one key and one value channel that of queries is zero: a difference of sums, at token 4 of terms that cancel."""
    name = "linear_attn/recurrent/fp32/normalize-scale-narrow-seed.0/T13-K1-V1-B1-H1/gradient"
    adapter = adapter_for("numpy", "cpu")
    values, held = drawn(named(name), adapter), truth(named(name), adapter)
    q, k, v, d_o = (x.ravel() for x in (values["q"], values["k"], values["v"], held.cotangents["o"]))
    sums, keys = np.cumsum(k * v), np.cumsum(k)
    assert abs(sums[4]) < 0.05 * np.abs(k * v)[:5].sum()
    summands = np.sqrt(np.cumsum(np.square(k * v))) * np.abs(d_o / (q * keys))
    noise = held.gradients["q"].noise.ravel()
    assert (noise >= 2.0**-24 * summands).all()
    assert (noise <= 2.0**-20 * (summands + summands.max())).all()


@pytest.mark.parametrize("pack", ["varlen.dozens/T2-K256-V16-C101-B1-H4", "varlen.many/T3-K130-V64-C500-B1-H2"])
def test_the_gradient_of_a_gate_may_take_what_rounding_leaves_of_those_of_a_quotient(pack):
    """It is ``Σ q∘dq − k∘dk``, here of tokens alone in their sequences: 0 − 0, by the quotient rule and states in float32."""
    name, adapter = f"gla/chunk/fp32/normalize-{pack}/gradient", adapter_for("numpy", "cpu")
    case = named(name)
    values, held = drawn(case, adapter), truth(case, adapter)
    assert set(np.diff(values["cu_seqlens"])) == {0, 1}
    q, k, v, d_o = (np.float32(x) for x in (values["q"], values["k"], values["v"], held.cotangents["o"]))
    state = k[..., :, None] * np.concatenate([v, np.ones_like(v[..., :1])], -1)[..., None, :]
    read = np.einsum("bthk,bthkv->bthv", q, state)
    d_n = d_o / read[..., -1:]
    d_read = np.concatenate([d_n, -(d_n * read[..., :-1]).sum(-1, keepdims=True) / read[..., -1:]], -1)
    dq = np.einsum("bthkv,bthv->bthk", state, d_read)
    d_state = q[..., :, None] * d_read[..., None, :]
    dk = np.einsum("bthkv,bthv->bthk", d_state[..., :-1], v) + d_state[..., -1]
    dg, wanted = (q * dq - k * dk).astype(float), held.gradients["g"]
    assert not wanted.value.any()
    assert 0 < distance(dg, wanted) < 0.5
    unlike = np.abs(values["q"]) * np.abs(held.gradients["v"].value).max()
    assert distance(2.0**-14 * unlike, wanted) > 1


def test_what_a_chunk_leaves_of_a_state_may_be_as_far_off_as_its_solution_is_long():
    """``dS₀ = dS − Wᵀ(K dS)``, ``W = (I + β∘tril(K Kᵀ, −1))⁻¹ β∘K``, in float32: 36 keys of five channels, beta up to two."""
    flags = "misaligned.initial_state-reversed.cotangents-scale.large-state-strong-subnormal.v-tiny.q-tracked-zero-zeros.v"
    case = named(f"gated_delta_rule/chunk/fp32/loss.state-{flags}/T36-K5-V44-B3-H2/gradient")
    adapter = adapter_for("numpy", "cpu")
    values, held = drawn(case, adapter), truth(case, adapter)
    k, beta = (np.float32(values[name]).swapaxes(1, 2) for name in ("k", "beta"))
    d_state, wanted = np.float32(held.cotangents["final_state"]), held.gradients["initial_state"]
    assert not values["g"].any()
    X = np.linalg.inv(np.eye(k.shape[2], dtype=np.float32) + beta[..., None] * np.tril(k @ k.swapaxes(-1, -2), -1))
    W = (X @ (beta[..., None] * k)).swapaxes(-1, -2)
    for found in (d_state - W @ (k @ d_state), d_state - (W @ k) @ d_state):
        assert found.dtype == np.float32
        assert distance(found.astype(float), wanted) < 0.7
    assert distance(wanted.value + 2.0**-17, wanted) > 1


def test_a_gate_may_get_what_a_chunk_leaves_of_two_states():
    """An initial state of 1e18 is overwritten within 217 tokens, as the final one's gradient is on its way back: half-way each
    chunk of 64 of a right algorithm leaves rounding errors of both.
    """
    flags = (
        "accumulated-beta_map.sigmoid-deep-fp32.initial_state-only.g-scale.tiny-state-strided-subnormal.q-tracked-varlen.several-"
        "zeros.d_o-zeros.k-seed.272001"
    )
    (result,) = Runner("torch").run([named(f"kda/parallel/fp64/{flags}/T255-K4-V8-C16-B1-H2/gradient")])
    assert result.status == "passed", result.message
    assert result.error < 0.5
    wanted = truth(named("kda/chunk/fp32/state/T64-K16-V16-B1-H2/gradient"), adapter_for("numpy", "cpu")).gradients["g"]
    assert distance(wanted.value * (1 + 2.0**-10), wanted) > 1


def test_gradients_may_lose_what_a_factor_of_their_decay_made_subnormal():
    flags = "constant.u-gate.Softplus-gate.dt_bias.GK-scale.tiny-sliced.cotangents-strided.u-tiny-varlen.tail-zeros.q"
    case = named(f"rwkv6/chunk/fp32/{flags}/T139-K3-V39-C16-B1-H2/gradient")
    wanted = truth(case, adapter_for("numpy", "cpu")).gradients["q"]
    first = wanted.value * np.exp(-8.0)
    flushed = np.where(np.abs(first) < 2.0**-126, 0.0, first) * np.exp(8.0)
    assert (flushed != wanted.value).any()
    assert distance(flushed, wanted) < 1
    assert distance(wanted.value + 2.0**-110, wanted) > 1


def test_generated_keys_of_delta_families_amplify_nothing():
    """Whatever ``beta`` below two: with a feature map as without, they are no longer than one."""
    for flags, K in (("strong-phi.relu-seed.1", 1), ("strong-phi.relu-seed.2", 8), ("strong-seed.3", 5)):
        values = drawn(named(f"delta_rule/chunk/fp32/{flags}/T51-K{K}-V1-B1-H2/forward"), adapter_for("numpy", "cpu"))
        k = np.maximum(values["k"], 0.0) if "phi" in flags else values["k"]
        assert np.linalg.norm(k, axis=-1).max() <= 1 + 1e-6


def test_each_number_of_a_rounded_inverse_counts_where_nothing_fades():
    """Two channels and betas near two: the roundings of a token's row are many, and independent."""
    name = "delta_rule/chunk/fp16/final-strong/T1031-K2-V2-B1-H2/forward"
    linattn.register_backend(Rounded())
    try:
        (result,) = Runner("rounded").run([named(name)])
    finally:
        linattn.unregister_backend("rounded")
    assert result.status == "passed", result.message
    assert 0.3 < result.error < 0.8


def rows(beta, k, **more):
    k = np.asarray(k, float)
    arrays = {"k": k, "v": np.zeros(k.shape), "beta": np.asarray(beta, float), **more}
    return bounds.rows_of_inverses(arrays)[..., 0]


@pytest.mark.parametrize(
    "name",
    [
        # keys of one channel, of which every token takes its share, and a running sum of gates about -60
        "kda/parallel/fp32/beta_map.2sigmoid-constant.k-deep-grouped.5-loss.state-no_grad-parts.2-readonly.initial_state-"
        "scale.tiny-small-state-strided.cotangents-zeros.g/T16-K8-V256-B5-H2/parts-backward",
        # gradients are fed into one of 256 channels
        "mixed_attn/recurrent/fp32/parts.10/T16-K8-L8-V256-C16-B5-H2/parts-backward",
        # slopes of gates of about e^-100, times gradients of 1e16 and of 1e12
        "kda/parallel/fp32/gate.BoundedSigmoid-only.g-varlen.one-vast/T63-K1-V4-C9-B1-H7/gradient",
        "simple_gla/parallel/fp32/final-gate.Softplus-large.k-misaligned.g-only.g-scale.large-varlen.adjacent-zeros.d_state-"
        "zeros.q/T512-K8-V16-C256-B1-H2/gradient",
        # betas beside long keys, which would be subnormal times the scale if they were smaller still
        "delta_rule/chunk/fp32/beta.BTHVV-expanded.cotangents-final-fp64.beta-grouped.3-large.k-loss.o-misaligned.v-only.q-"
        "parts-retained-scale.tiny-subnormal.q-tiny.beta-zeros.q-seed.4/T40-K32-V32-B5-H9/parts-backward",
        # a sum over 256 channels of values, for one token of three keys
        "simple_gla/parallel/fp32/plain-seed.55103/T1-K3-V256-C16-B3-H16/gradient",
        # two numbers, each the sum of what a head's tokens have
        "ssd/chunk/fp64/expanded.initial_state-fp32.initial_state-inference-initial-only.A-readonly.cotangents-tiny-varlen.ones-"
        "zeros.A/T705-K3-V4-C32-B1-H2/gradient",
        # what tokens before one leave of a state, times what those after it leave of a gradient: nearly nothing of either
        "delta_rule/chunk/fp64/constant.initial_state-edges-fp32.initial_state-large.k-misaligned.beta-scale.one-state-tracked-"
        "zeros.d_o-zeros.k-seed.20261/T127-K3-V256-B2-H2/gradient",
        # a token whose gate forgets all, and whose rank-one term does not
        "dplr/recurrent/bf16/bf16.a-bf16.b-bf16.g-bf16.initial_state-constant.k-gate.LogSigmoid-grouped.4-headsfirst.g-state-"
        "tiny.q-zeros.d_o-zeros.g-seed.271130/T31-K1-V16-C13-B4-H1/gradient",
        # a bias whose gradient is a thousand times the same number
        "short_conv/direct/fp32/bias-constant.weight-expanded-expanded.cotangents-initial-tiny.weight-zeros.bias-seed.271130/"
        "T128-D24-W3-B8/gradient",
        # one channel of a gate's gradient is large, and a product with what was rounded before
        "ssd/parallel/fp16/D-D.HVV-fp16.A-fp16.D-fp16.dt-fp16.initial_state-grouped.6-only.z-parts.2-state-tracked-z-"
        "zeros.d_state-zeros.x-seed.271140/T16-K8-V256-B5-H2/parts-backward",
    ],
)
def test_a_right_backend_is_well_within_bounds(name):
    (result,) = Runner("torch").run([named(name)])
    assert (result.status, result.message) == ("passed", "")
    assert result.error < 0.5


def test_a_running_sum_may_lose_alike_with_each_term_that_is_alike():
    """192 tokens, whose gradients of a bias are one number, added one after the other in float32."""
    case = named(
        "short_conv/direct/fp32/accumulated-activation.silu-bias-blank.bias-constant.x-expanded.cotangents-final-fp64.bias-"
        "fp64.weight-loss.o-reversed.weight-subnormal.x-tiny.weight-tracked/T64-D16-W2-B3/gradient"
    )
    bias = truth(case, adapter_for("torch", "cpu")).gradients["bias"]
    term = (bias.value / 192).astype(np.float32)
    found = np.zeros_like(term)
    for _ in range(192):
        found += term
    error = distance(found.astype(float), bias)
    assert 0.02 < error < 0.6
    assert distance(bias.value * (1 + 1e-4), bias) > 1


def test_a_backend_may_flush_what_long_keys_would_have_lifted():
    """Betas of 2^-60 square, times outputs of 2^-40, are subnormal, and keys of 2^28 come after them."""
    name = (
        "kda/recurrent/fp32/beta.BTHVV-final-gate.Softplus-gate.dt_bias.GK-large.k-loss.o-only.k-reversed.beta-scale.tiny-strong-"
        "subnormal.v-varlen.many-zeros.k/T15-K66-V16-C16-B1-H4/gradient"
    )
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        (result,) = Runner("torch").run([named(name)])
    finally:
        torch.set_flush_denormal(False)
    assert (result.status, result.message) == ("passed", "")
    assert result.error < 0.5


def test_what_is_left_of_a_gradient_is_as_far_off_as_what_the_channels_that_hold_some_were_fed():
    """Two channels of eight keys and seven of 256 values hold any, and sixteen strong betas leave a fiftieth of them."""
    name = (
        "gated_delta_rule/parallel/fp32/constant.q-deep-grouped.5-inference-loss.state-parts.2-scale.tiny-small-state-strided.q-"
        "strong-subnormal.v/T16-K8-V256-B5-H2/parts-backward"
    )
    (result,) = Runner("torch").run([named(name)])
    assert result.status == "passed", result.message
    assert 0.3 < result.error < 0.9


def test_what_a_state_gets_from_outputs_is_as_far_off_as_what_they_read():
    """Of a hundred tokens of two channels, the last ones read nothing of it: what chunks in bfloat16 leave is rounding."""
    adapter = adapter_for("torch", "cpu")
    case = named("delta_rule/chunk/bf16/bf16.beta-bf16.initial_state-state/T127-K2-V18-B2-H3/gradient")
    values = {name: torch.tensor(x).transpose(1, 2) for name, x in drawn(case, adapter).items()}
    q, k, v, beta, state = (values[name] for name in ("q", "k", "v", "beta", "initial_state"))
    state = state.transpose(1, 2).requires_grad_()
    o, end = [], state
    for own in (slice(0, 64), slice(64, 127)):
        of, strength = k[:, :, own], beta[:, :, own, None]
        system = torch.eye(of.shape[2], dtype=torch.float64) + torch.tril(of @ of.mT * strength, -1)
        inverse = Low.apply(torch.linalg.inv(system))
        written = inverse @ Low.apply(v[:, :, own] * strength) - Low.apply(inverse @ Low.apply(of * strength)) @ Low.apply(end)
        scores = Low.apply(torch.tril(q[:, :, own] @ of.mT))
        o.append((q[:, :, own] @ Low.apply(end) + scores @ Low.apply(written)) * 2**-0.5)
        end = end + of.mT @ Low.apply(written)
    true = truth(case, adapter)
    fed = [torch.tensor(true.cotangents[name]) for name in ("o", "final_state")]
    (found,) = torch.autograd.grad([torch.cat(o, 2).transpose(1, 2), end], [state], fed)
    assert 0.1 < distance(found.numpy(), true.gradients["initial_state"]) < 0.5


class Low(torch.autograd.Function):
    """Rounds to bfloat16, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().double()

    @staticmethod
    def backward(ctx, d):
        return d.bfloat16().double()


def test_what_may_be_flushed_of_a_slope_hides_no_other():
    """Slopes of e^-100 stand beside those of other tokens."""
    g = truth(named("kda/chunk/fp32/gate.BoundedSigmoid/T65-K24-V40/gradient"), adapter_for("numpy", "cpu")).gradients["g"]
    size = np.abs(g.value)
    assert size.min() < 1e-35 < 1e-3 < np.median(size)
    assert distance(np.where(size > 1e-3, g.value * (1 + 2.0**-12), g.value), g) > 1


def test_rows_of_inverses_are_those_of_the_system():
    rng = np.random.default_rng(0)
    k, beta = rng.standard_normal((2, 70, 1, 3)), rng.random((2, 70, 1))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    found = rows(beta, k)
    for row, own in ((0, slice(0, 64)), (1, slice(64, 70))):
        keys, strengths = k[row, own, 0], beta[row, own, 0]
        A = np.tril(keys @ keys.T, -1)
        X = np.linalg.inv(np.eye(len(A)) + strengths[:, None] * A)
        np.testing.assert_allclose(found[row, own, 0], np.linalg.norm(A @ X * strengths, axis=-1), rtol=1e-12)


def test_rows_of_inverses_end_with_sequences_and_with_what_gates_leave():
    k, beta = np.ones((1, 8, 1, 1)), np.full((1, 8, 1), 2.0)
    np.testing.assert_allclose(rows(beta, k)[0, :, 0], 2 * np.sqrt(np.arange(8)))
    packed = rows(beta, k, cu_seqlens=np.array([0, 3, 3, 7]))[0, :, 0]
    np.testing.assert_allclose(packed, 2 * np.sqrt([0, 1, 2, 0, 1, 2, 3, 0]))
    gates = np.where(np.arange(8) == 5, -np.inf, 0.0).reshape(1, 8, 1)
    np.testing.assert_allclose(rows(beta, k, g=gates)[0, :, 0], 2 * np.sqrt([0, 1, 2, 3, 4, 0, 1, 2]))
