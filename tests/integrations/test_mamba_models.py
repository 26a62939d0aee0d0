"""Tiny models of every family of transformers that has a Mamba-2 layer, with our functions as their modules' fast path."""

import contextlib
import importlib
import inspect

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from linattn.integrations.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from linattn.integrations.mamba_ssm import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    selective_state_update,
)
from linattn.integrations.transformers import cache_parameter

OURS = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "mamba2_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    "mamba2_selective_state_update": selective_state_update,
    "mamba2_chunk_scan": mamba_chunk_scan_combined,
}
"""What a module of transformers calls them, and ours."""

COMMON = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
ATTENTION = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8
)
FAMILIES = {
    "mamba2": ("Mamba2", dict(num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=8, expand=2)),
    "bamba": ("Bamba", dict(**ATTENTION, **MAMBA, attn_layer_indices=[1])),
    "falcon_h1": ("FalconH1", dict(**ATTENTION, **MAMBA, mamba_d_ssm=64, head_dim=8)),
    "falcon_h1 with a norm": (  # its fused call gates before the norm, whatever the configuration says
        "FalconH1",
        dict(**ATTENTION, **MAMBA, mamba_d_ssm=64, head_dim=8, mamba_rms_norm=True, mamba_norm_before_gate=False),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        dict(**ATTENTION, **MAMBA, layer_types=["mamba", "attention"], num_local_experts=0, shared_intermediate_size=48),
    ),
    "nemotron_h": (
        "NemotronH",
        dict(
            **ATTENTION, layers_block_type=["mamba", "attention"], head_dim=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2,
            ssm_state_size=16, conv_kernel=4, chunk_size=8, expand=2,
        ),
    ),
    "zamba2": (
        "Zamba2",
        dict(
            **ATTENTION, layers_block_type=["mamba", "hybrid"], mamba_headdim=8, n_mamba_heads=8, mamba_ngroups=2,
            mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, chunk_size=8, num_mem_blocks=1, attention_hidden_size=64,
            attention_head_dim=16, use_shared_attention_adapter=False, adapter_rank=4,
        ),
    ),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request):
    """A model in evaluation mode, its module, and its Mamba-2 calls."""
    name, config = FAMILIES[request.param]
    package = request.param.split()[0]
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    configuration = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    torch.manual_seed(1)
    model = getattr(modeling, f"{name}ForCausalLM")(getattr(configuration, f"{name}Config")(**COMMON, **config)).eval()
    for parameter in model.parameters():  # norms and biases that are ones and zeros hide an error
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model, modeling


@contextlib.contextmanager
def ours(modeling, monkeypatch):
    """The module with our functions, called as its decorator would call them; yields the names of those that were."""
    called = set()

    def passing(name, function):
        taken = inspect.signature(function).parameters

        def call(*args, **kwargs):
            called.add(name)
            return function(*args, **{key: value for key, value in kwargs.items() if key in taken})

        return call

    with monkeypatch.context() as patch:
        for name, function in OURS.items():
            patch.setattr(modeling, name, passing(name, function))
        yield called


def close(got, expected, rtol=1e-4):
    scale = expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol * max(scale, 1e-3))


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_logits_and_gradients_are_those_of_the_slow_path(family, monkeypatch, training):
    model, modeling = family
    model.train(training)
    tokens = torch.randint(3, 64, (2, 21))

    def run():
        model.zero_grad()
        result = model(tokens, labels=tokens, use_cache=False)
        result.loss.backward()
        return result.logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    logits, grads = run()
    with ours(modeling, monkeypatch) as called:
        fast, fast_grads = run()
    assert called == ({"mamba2_split_conv1d_scan_combined"} if training else {"causal_conv1d_fn", "mamba2_chunk_scan"})
    close(fast, logits)
    assert fast_grads.keys() == grads.keys()
    for name, grad in grads.items():
        close(fast_grads[name], grad, rtol=1e-3)


@pytest.mark.parametrize("gradients", [False, True], ids=["no_grad", "enable_grad"])
def test_tokens_after_a_prefill_are_those_of_the_slow_path(family, monkeypatch, gradients):
    model, modeling = family
    tokens = torch.randint(3, 64, (2, 16))

    def run():
        given = {cache_parameter(model.forward): transformers.DynamicCache(config=model.config), "use_cache": True}
        return torch.cat([model(part, **given).logits for part in tokens.split([9, *[1] * 7], 1)], 1)

    with torch.set_grad_enabled(gradients):
        expected = run()
        with ours(modeling, monkeypatch) as called:
            fast = run()
    assert called == set(OURS) - {"mamba2_split_conv1d_scan_combined"}
    close(fast, expected)


def test_generation_gives_the_same_tokens(family, monkeypatch):
    model, modeling = family
    tokens = torch.randint(3, 64, (2, 7))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0  # padding on the left
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    expected = model.generate(tokens, **options)
    with ours(modeling, monkeypatch):
        assert torch.equal(model.generate(tokens, **options), expected)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_packed_sequences_are_kept_apart_by_seq_idx(family, monkeypatch, training):
    model, modeling = family
    model.train(training)
    mixer = next(m for m in model.modules() if hasattr(m, "A_log") and hasattr(m, "conv1d"))
    x = torch.randn(1, 15, mixer.in_proj.in_features)
    seq_idx = torch.tensor([[0] * 6 + [1] * 2 + [2] * 7]).int()
    apart = torch.cat([mixer(piece) for piece in x.split([6, 2, 7], 1)], 1)
    with ours(modeling, monkeypatch):
        close(mixer(x, seq_idx=seq_idx), apart)
