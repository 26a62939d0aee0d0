"""Layers start as their papers and authors have them: statistics of what is drawn, and parameter counts."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from linattn import nn  # noqa: E402

D = 512


def count(layer):
    return sum(p.numel() for p in layer.parameters())


def test_matrices_are_uniform_in_one_over_the_square_root_of_their_inputs():
    layer = nn.GatedLinearAttention(D, use_short_conv=True)
    for w, inputs in ((layer.q_proj.weight, D), (layer.gk_proj["1"].weight, 16), (layer.q_conv1d.weight, 4)):
        bound = 1 / math.sqrt(inputs)
        assert w.abs().max() <= bound
        assert w.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.06)
        assert abs(w.mean().item()) < 4 * bound / math.sqrt(3 * w.numel())
    assert (layer.g_norm_swish_gate.weight == 1).all()


@pytest.mark.parametrize(
    ("layer", "least", "most"),
    [
        (lambda: nn.GatedDeltaNet(64, num_heads=512, head_dim=1), 0, 16),
        (lambda: nn.KimiDeltaAttention(64, num_heads=512, head_dim=1), 1, 16),
        (lambda: nn.Mamba2(512, head_dim=2), 1, 16),
    ],
)
def test_rates_are_uniform_and_steps_log_uniform(layer, least, most):
    """Mamba-2 §7 and the layers after it: uniform over the range, and Δ from 0.001 to 0.1."""
    made = layer()
    rates, steps = made.A_log.exp().detach(), torch.nn.functional.softplus(made.dt_bias.detach())
    assert least <= rates.min() < least + 0.5
    assert most - 0.5 < rates.max() <= most + 1e-4
    assert rates.mean().item() == pytest.approx((least + most) / 2, rel=0.1)
    assert 0.00099 < steps.min() < 0.0012
    assert 0.085 < steps.max() < 0.1001
    assert steps.log().mean().item() == pytest.approx(math.log(0.01), abs=0.25)
    assert made.A_log.dtype is torch.float32


def test_a_bounded_gate_starts_at_a_slope_of_one():
    assert not nn.KimiDeltaAttention(32, num_heads=4, head_dim=8, lower_bound=-5.0).A_log.any()


def test_gla_keeps_nearly_all_at_first():
    """GLA §4.4 with τ = 16: σ(0)^{1/16} = 0.958."""
    layer, x = nn.GatedLinearAttention(D), torch.randn(1, 50, D)
    decay = torch.nn.functional.logsigmoid(layer.gk_proj["1"](layer.gk_proj["0"](x))) / 16
    assert decay.exp().mean().item() == pytest.approx(0.957, abs=0.01)


def test_mamba2_skips_by_one():
    assert (nn.Mamba2(64, head_dim=8).D == 1).all()


def test_maps_start_as_the_identity():
    assert (torch.eye(8) == nn.Hedgehog(32, num_heads=4).W).all()
    assert (nn.LinearAttention(32, num_heads=4, feature_map="hedgehog").feature_map_q.layer.weight == torch.eye(8)).all()


def test_flash_scales_are_near_one():
    layer = nn.FLASH(D)
    assert layer.gamma.mean().item() == pytest.approx(1, abs=0.01)
    assert layer.gamma.std().item() == pytest.approx(0.02, rel=0.2)
    assert not layer.beta.any()
    assert not layer.bias.any()


def test_rwkv6_starts_by_the_place_of_the_layer():
    """Channels of the first layer decay from e^{-e^{-6}} to e^{-e^{-1}}; the bonus of the last rests on its channel."""
    first, last = (nn.RWKV6(64, num_heads=2, layer_idx=i, num_hidden_layers=4) for i in (0, 3))
    speed = first.w_proj.linear.lora["2"].bias
    assert (speed[0].item(), speed[-1].item()) == (-6, -1)
    assert (first.bonus.abs() <= 0.1 + 1e-6).all()
    assert last.bonus.flatten()[0].item() == pytest.approx(1.0)
    assert not first.x_proj["0"].linear.weight.any()
    bound = 2**-2.5 * math.sqrt(6 / (64 + 32))
    assert bound * 0.9 < first.r_proj.linear.weight.abs().max() <= bound


def test_rwkv7_starts_by_the_place_of_the_layer():
    layers = [nn.RWKV7(128, layer_idx=i, num_hidden_layers=3) for i in range(3)]
    for i, layer in enumerate(layers):
        assert not layer.o_proj.weight.any()
        assert (layer.r_k == -0.04).all()
        assert (layer.k_a == 1.02).all()
        np.testing.assert_allclose(layer.g_norm.weight.detach(), ((i + 1) / 3) ** 0.7, rtol=1e-6)
        eye = torch.eye(128)
        torch.testing.assert_close(layer.r_proj.weight @ layer.r_proj.weight.T, eye, rtol=0, atol=1e-5)
        torch.testing.assert_close(layer.k_proj.weight @ layer.k_proj.weight.T, 0.01 * eye, rtol=0, atol=1e-5)
        assert not layer.w_lora.lora["0"].weight.any()
        assert layer.x_r.flatten()[0] == 1
    assert not hasattr(layers[0], "v_lora")


def test_parameter_counts_of_the_papers():
    """In D²: GLA 4 (§4.4), RetNet 8, Gated DeltaNet 6, HGRN-2 4, two FLASH units as many as a block of 12 (Hua et al., §3)."""
    square = 1024**2
    assert count(nn.GatedLinearAttention()) == pytest.approx(4 * square, rel=0.01)
    assert count(nn.RetNet()) == pytest.approx(8 * square, rel=0.01)
    assert count(nn.GatedDeltaNet(1024, num_heads=3)) == pytest.approx(6 * square, rel=0.01)
    assert count(nn.DeltaNet()) == pytest.approx(4 * square, rel=0.01)
    assert count(nn.HGRN2()) == pytest.approx(4 * square, rel=0.01)
    assert count(nn.LinearAttention()) == pytest.approx(4 * square, rel=0.01)
    assert count(nn.Hedgehog(num_heads=16)) == 4 * square + 16 * 64 * 64
    assert count(nn.FLASH()) == 6 * square + 128 * 1024 + 2 * 4 * 128 + 2 * 256 - 1
    assert count(nn.GAU(max_length=256)) == count(nn.FLASH()) - 2 * 2 * 128
