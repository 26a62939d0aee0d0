"""Layers and models of fla and of transformers: the same parameters by name and shape, the same outputs, and back."""

from __future__ import annotations

import copy
import re
import sys

import pytest

torch = pytest.importorskip("torch")

from linattn import nn  # noqa: E402
from linattn.errors import OptionError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # both packages warn of what is not installed


@pytest.fixture(scope="module")
def fla():
    """fla's layers."""
    pytest.importorskip("transformers", reason="fla's layers need transformers")
    pytest.importorskip("einops", reason="fla's layers need einops")
    return pytest.importorskip("fla.layers", exc_type=ImportError, reason="flash-linear-attention is not installed")


FLA = {
    "DeltaNet": [
        {"num_heads": 2},
        {"num_heads": 2, "use_gate": True, "use_beta": False, "qk_norm": "sum", "qk_activation": "elu"},
    ],
    "GatedDeltaNet": [
        {"head_dim": 8, "num_heads": 2, "num_v_heads": 4, "allow_neg_eigval": True},
        {"head_dim": 8, "num_heads": 2, "use_gate": False, "use_short_conv": False},
        {"head_dim": 8, "num_heads": 2, "output_gate_activation": "sigmoid", "conv_bias": True},
    ],
    "GatedLinearAttention": [
        {"num_heads": 2},
        {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "conv_bias": True, "gate_low_rank_dim": 4},
        {"num_heads": 2, "use_output_gate": False, "elementwise_affine": False},
    ],
    "HGRN2Attention": [{"expand_ratio": 8}, {"expand_ratio": 8, "use_short_conv": True}],
    "KimiDeltaAttention": [
        {"head_dim": 8, "num_heads": 2},
        {"head_dim": 8, "num_heads": 2, "num_v_heads": 4, "safe_gate": True, "lower_bound": -5.0},
    ],
    "LinearAttention": [
        *({"num_heads": 2, "feature_map": name} for name in ("elu", "relu", "identity", "t2r", "elementwise_product")),
        {"num_heads": 2, "feature_map": "hedgehog", "tie_feature_map_qk": True, "do_feature_map_norm": True},
    ],
    "Mamba2": [
        {"head_dim": 8, "state_size": 8, "n_groups": 2},
        {"head_dim": 8, "state_size": 8, "D_has_hdim": True, "rmsnorm": False, "use_bias": True},
    ],
    "MultiScaleRetention": [{"num_heads": 2}, {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True}],
    "RWKV6Attention": [{"num_heads": 2}],
    "RWKV7Attention": [{"head_dim": 16, "layer_idx": i, "num_hidden_layers": 2} for i in (0, 1)],
}


@pytest.mark.parametrize(("name", "options"), [(name, options) for name, given in FLA.items() for options in given])
def test_fla_layers_come_over_and_go_back(fla, name, options):
    theirs = getattr(fla, name)(hidden_size=32, **options)
    before = {key: x.clone() for key, x in theirs.state_dict().items()}
    ours = nn.from_fla(theirs)
    one = {key: x for key, x in before.items() if not (options.get("tie_feature_map_qk") and "feature_map_k" in key)}
    assert {key: x.shape for key, x in ours.state_dict().items()} == {key: x.shape for key, x in one.items()}
    assert all((ours.state_dict()[key] == x).all() for key, x in one.items())
    assert ours(torch.randn(1, 5, 32), shared={"v_first": torch.zeros(1, 5, 32)}).isfinite().all()
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(1)
    assert all((theirs.state_dict()[key] == x).all() for key, x in before.items())
    back = nn.to_fla(ours)
    assert type(back) is type(theirs)
    assert back.state_dict().keys() == before.keys()
    assert all((back.state_dict()[key] == x).all() for key, x in ours.state_dict().items())
    assert nn.from_fla(back).arguments == ours.arguments


def test_what_fla_has_not_is_refused(fla):
    wrong = {
        "to_fla: fla has no Lightning; it has DeltaNet, GatedDeltaNet, GatedLinearAttention, HGRN2, KimiDeltaAttention, "
        "LinearAttention, Mamba2, RWKV6, RWKV7, RetNet": lambda: nn.to_fla(nn.Lightning(32, num_heads=2)),
        "to_fla: fla's HGRN2Attention has no lower_bound, and this HGRN2 has lower_bound=0.5": lambda: nn.to_fla(
            nn.HGRN2(32, expand_ratio=8, lower_bound=0.5)
        ),
        "to_fla: fla's LinearAttention has no feature map 'exp'": lambda: nn.to_fla(
            nn.LinearAttention(32, num_heads=2, feature_map="exp")
        ),
        "from_fla: GatedLinearAttention with clamp_min=-1.0 has no counterpart here": lambda: nn.from_fla(
            fla.GatedLinearAttention(hidden_size=32, num_heads=2, clamp_min=-1.0)
        ),
        "from_fla: expected one of DeltaNet, GatedDeltaNet, GatedLinearAttention, HGRN2Attention, KimiDeltaAttention, "
        "LinearAttention, Mamba2, RWKV6Attention, RWKV7Attention, MultiScaleRetention, got Linear": lambda: nn.from_fla(
            torch.nn.Linear(2, 2)
        ),
    }
    for message, call in wrong.items():
        with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
            call()


@pytest.mark.parametrize("kind", ["GatedDeltaNet", "GLA", "Mamba2"])
def test_fla_models_come_over(fla, kind):
    models = pytest.importorskip("fla.models")
    sizes = {
        "GLA": {"num_heads": 2},
        "GatedDeltaNet": {"num_heads": 2, "head_dim": 8},
        "Mamba2": {"head_dim": 8, "state_size": 8, "num_heads": 8, "expand": 2},
    }
    config = getattr(models, f"{kind}Config")(hidden_size=32, num_hidden_layers=2, vocab_size=17, **sizes[kind])
    theirs = getattr(models, f"{kind}ForCausalLM")(config)
    ours = nn.from_fla(theirs)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    ids = torch.randint(17, (1, 6))
    assert ours(ids).shape == (1, 6, 17)
    assert ours.generate(ids, 3).shape == (1, 9)


# -- fla's layers on its own plain PyTorch code, since its kernels want a GPU ------------------------------------------


def turned(recurrence):
    """A recurrence that takes heads before time, with time first."""

    def run(*arrays):
        return recurrence(*(x.transpose(1, 2) for x in arrays))[0].transpose(1, 2), None

    return run


@pytest.fixture
def plain(fla, monkeypatch):
    """fla's layers, with what it has as a reference in the place of every kernel that they call."""
    from fla import modules
    from fla.layers import delta_net, gla, hgrn2, multiscale_retention, rwkv6, rwkv7
    from fla.modules.token_shift import token_shift_ref
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.gla.naive import naive_recurrent_gla
    from fla.ops.retention.naive import naive_retention
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6
    from fla.ops.rwkv7.fused_k_update import k_update_ref
    from fla.ops.rwkv7.gate_output_correction import gate_output_correction_ref
    from torch.nn import functional as F

    def gated(norm, x, z, **_):
        act = torch.sigmoid if norm.activation == "sigmoid" else F.silu
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps) * act(z)

    def normed(norm, x, **_):
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)

    def grouped(norm, x, **_):
        flat = x.reshape(-1, x.shape[-1])
        return F.group_norm(flat, norm.num_groups, norm.weight, norm.bias, norm.eps).reshape(x.shape)

    def convolved(conv, x, **_):
        y = F.conv1d(x.mT, conv.weight, conv.bias, padding=conv.kernel_size[0] - 1, groups=x.shape[-1])[..., : x.shape[1]].mT
        return (F.silu(y) if conv.activation else y), None

    def rotated(rotary, q, k, **_):
        angles = torch.outer(torch.arange(q.shape[1]), rotary.inv_freq)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        halves = (x.chunk(2, -1) for x in (q, k))
        return [torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in halves]

    def unit(x):
        return x * (x.square().sum(-1, keepdim=True) + 1e-6) ** -0.5

    monkeypatch.setattr(modules.FusedRMSNormGated, "forward", gated)
    monkeypatch.setattr(modules.RMSNorm, "forward", normed)
    monkeypatch.setattr(modules.GroupNorm, "forward", grouped)
    monkeypatch.setattr(modules.ShortConvolution, "forward", convolved)
    monkeypatch.setattr(multiscale_retention.RotaryEmbedding, "forward", rotated)
    for module in (gla, hgrn2):
        monkeypatch.setattr(module, "fused_recurrent_gla", lambda q, k, v, gk, **_: naive_recurrent_gla(q, k, v, gk))
    monkeypatch.setattr(hgrn2, "swish", F.silu)
    monkeypatch.setitem(rwkv6.ACT2FN, "swish", F.silu)
    monkeypatch.setattr(hgrn2, "rms_norm_linear", lambda x, w, b, o, c: F.linear(F.rms_norm(x, x.shape[-1:], w, 1e-5), o, c))
    retention = turned(lambda q, k, v: (naive_retention(q, k, v),))
    monkeypatch.setattr(multiscale_retention, "fused_recurrent_retention", lambda q, k, v, **_: retention(q, k, v))
    delta = turned(delta_rule_recurrence)
    monkeypatch.setattr(delta_net, "fused_recurrent_delta_rule", lambda q, k, v, beta, **_: delta(unit(q), unit(k), v, beta))
    for module in (rwkv6, rwkv7):
        monkeypatch.setattr(
            module,
            "token_shift",
            lambda x, *_, output_cache=False, **__: (token_shift_ref(x), None) if output_cache else token_shift_ref(x),
        )

    def rwkv6_recurrence(r, k, v, w, u, **_):
        return turned(lambda *arrays: naive_recurrent_rwkv6(*arrays, u, 1.0))(r, k, v, w)

    def rwkv7_recurrence(r, w, k, v, kk, a, **_):
        return turned(dplr_recurrence)(r * r.shape[-1] ** 0.5, k, v, -kk, kk * a, w)

    monkeypatch.setattr(rwkv6, "fused_recurrent_rwkv6", rwkv6_recurrence)
    monkeypatch.setattr(rwkv7, "fused_mul_recurrent_rwkv7", rwkv7_recurrence)
    monkeypatch.setattr(rwkv7, "fused_addcmul_rwkv7", lambda x, delta, *mus: [x + delta * mu for mu in mus])
    monkeypatch.setattr(rwkv7, "fused_k_rwkv7", k_update_ref)
    monkeypatch.setattr(rwkv7, "gate_output_correction", gate_output_correction_ref)
    return fla


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("DeltaNet", {"num_heads": 2, "use_gate": True, "conv_bias": True}),
        ("GatedLinearAttention", {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True}),
        ("HGRN2Attention", {"expand_ratio": 8}),
        ("MultiScaleRetention", {"num_heads": 2}),
        ("RWKV6Attention", {"num_heads": 2}),
        ("RWKV7Attention", {"head_dim": 16, "layer_idx": 0, "num_hidden_layers": 2}),
        ("RWKV7Attention", {"head_dim": 16, "layer_idx": 1, "num_hidden_layers": 2}),
    ],
)
def test_fla_layers_compute_the_same(plain, name, options):
    theirs, x = getattr(plain, name)(hidden_size=32, **options).eval(), torch.randn(1, 13, 32)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(0.1 * torch.randn_like(p))
        first = {"v_first": torch.randn(1, 13, 32)} if options.get("layer_idx") else {}
        expected = theirs(x, **first)[0]
        torch.testing.assert_close(nn.from_fla(theirs)(x, shared=first), expected, rtol=1e-4, atol=2e-5)


def test_the_one_layer_of_an_rwkv7_model_becomes_flas(plain):
    ours, x = nn.RWKV7(32, head_dim=16), torch.randn(1, 13, 32)
    with torch.no_grad():
        torch.testing.assert_close(nn.to_fla(ours).eval()(x)[0], ours(x), rtol=1e-4, atol=2e-5)


# -- transformers, whose layers run on a CPU ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    """Layers of transformers on its own PyTorch code: it takes fla's kernels where it finds them, so it must not."""
    pytest.importorskip("transformers", minversion="5.20", reason="transformers is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fla", None)
        from transformers.models.kimi_linear import modeling_kimi_linear as kimi
        from transformers.models.mamba2 import modeling_mamba2 as mamba2
        from transformers.models.minimax import modeling_minimax as minimax
        from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
    sizes = {"hidden_size": 32, "num_hidden_layers": 4}
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 4}
    state_space = {"head_dim": 8, "num_heads": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "vocab_size": 17}
    return {
        "Qwen3-Next": lambda: qwen3_next.Qwen3NextGatedDeltaNet(qwen3_next.Qwen3NextConfig(**sizes, **heads), 0),
        "Qwen3.5": lambda: qwen3_5.Qwen3_5GatedDeltaNet(qwen3_5.Qwen3_5TextConfig(**sizes, **heads), 0),
        "OLMo-Hybrid": lambda: olmo.OlmoHybridGatedDeltaNet(
            olmo.OlmoHybridConfig(**sizes, **{**heads, "linear_num_key_heads": 4}, **attention), 0
        ),
        "Kimi Linear": lambda: kimi.KimiLinearDeltaAttention(
            kimi.KimiLinearConfig(**sizes, linear_head_dim=8, linear_num_heads=2), 0
        ),
        "MiniMax": lambda: minimax.MiniMaxLightningAttention(minimax.MiniMaxConfig(**sizes, **attention, block_size=8), 1),
        "Mamba-2": lambda: mamba2.Mamba2Mixer(mamba2.Mamba2Config(**sizes, **state_space), 0),
        "Mamba-2 model": lambda: mamba2.Mamba2ForCausalLM(mamba2.Mamba2Config(**sizes, **state_space)),
    }


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "OLMo-Hybrid", "Kimi Linear", "MiniMax", "Mamba-2"])
def test_transformers_layers_compute_the_same(reference, name):
    theirs = reference[name]().float().eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(0.2 * torch.randn_like(p))
    x = torch.randn(2, 21, 32)
    with torch.no_grad():
        expected = theirs(x, None, None)[0] if name == "MiniMax" else theirs(x)
        ours = nn.from_transformers(theirs)
        torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=2e-6)
        empty = copy.deepcopy(theirs)
        for p in empty.parameters():
            p.zero_()
        assert nn.to_transformers(ours, empty) is empty
    assert all((empty.state_dict()[key] == x).all() for key, x in theirs.state_dict().items())


def test_a_model_of_transformers_computes_the_same(reference):
    theirs, ids = reference["Mamba-2 model"]().eval(), torch.randint(17, (2, 9))
    ours = nn.from_transformers(theirs)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
        longer = ours.generate(ids, 4)
        assert (longer[:, 9:] == theirs(longer[:, :-1]).logits[:, 8:].argmax(-1)).all()


@pytest.mark.parametrize("name", ["Qwen3-Next", "Qwen3.5", "OLMo-Hybrid", "Kimi Linear", "MiniMax", "Mamba-2"])
def test_a_layer_of_another_activation_is_refused(reference, name):
    theirs = reference[name]()
    ours = nn.from_transformers(theirs)
    if name == "MiniMax":
        theirs.act_fn = torch.nn.GELU()
    else:
        theirs.activation = "gelu"
    for function, call in {
        "from_transformers": lambda: nn.from_transformers(theirs),
        "to_transformers": lambda: nn.to_transformers(ours, theirs),
    }.items():
        with pytest.raises(OptionError) as caught:
            call()
        said = f"{function}: {type(theirs).__name__} has the activation 'gelu', and ours have 'silu' alone"
        assert str(caught.value) == said


def test_what_transformers_has_not_is_refused(reference):
    theirs = reference["Kimi Linear"]()
    layer = nn.from_transformers(theirs)
    with torch.no_grad():
        layer.g_proj["1"].bias.fill_(1.0)
    wrong = {
        "to_transformers: KimiLinearDeltaAttention has no bias of the output gate, and this layer's is not zero": lambda: (
            nn.to_transformers(layer, theirs)
        ),
        "to_transformers: a KimiLinearDeltaAttention holds a KimiDeltaAttention, got a RetNet": lambda: nn.to_transformers(
            nn.RetNet(32, num_heads=2), theirs
        ),
        "from_transformers: expected one of Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet, OlmoHybridGatedDeltaNet, "
        "Mamba2Mixer, KimiLinearDeltaAttention, MiniMaxLightningAttention, got Linear": lambda: nn.from_transformers(
            torch.nn.Linear(2, 2)
        ),
    }
    for message, call in wrong.items():
        with pytest.raises(OptionError, match=f"^{re.escape(message)}$"):
            call()
