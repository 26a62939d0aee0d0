"""Small random models of transformers' families with a recurrent layer, for the tests and the outside judges."""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any

COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
}
MOE = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 36,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
GDN = HYBRID | {
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
KDA = HYBRID | {
    "mlp_layer_types": ["dense", "sparse"],
    "linear_conv_kernel_dim": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
MAMBA_1 = {"state_size": 16, "time_step_rank": 4, "conv_kernel": 4, "expand": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid": ("BailingHybrid", KDA),
    "bamba": ("Bamba", MAMBA_2 | {"layer_types": ["mamba", "attention"], "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", MAMBA_2 | {"mamba_d_ssm": 64}),
    "glm5_next": ("Glm5Next", KDA | {"qk_rope_head_dim": 0, "index_n_heads": 2, "index_head_dim": 16}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        MAMBA_2 | MOE | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 36, "intermediate_size": 16},
    ),
    "kimi_linear": ("KimiLinear", KDA),
    "falcon_mamba": ("FalconMamba", MAMBA_1),
    "jamba": (
        "Jamba",
        MOE
        | {"intermediate_size": 32, "mamba_d_state": 16, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": ("Lfm2Moe", MOE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "mamba": ("Mamba", MAMBA_1),
    "mamba2": (
        "Mamba2",
        {"state_size": 16, "num_heads": 8, "head_dim": 8, "n_groups": 2, "conv_kernel": 4, "expand": 2, "chunk_size": 16},
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention"],
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 16,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", GDN | {"linear_num_key_heads": 4, "linear_num_value_heads": 4}),
    "qwen3_5": ("Qwen3_5", GDN),
    "qwen3_5_moe": ("Qwen3_5Moe", GDN | MOE),
    "qwen3_next": ("Qwen3Next", GDN | MOE),
    "zamba2": (
        "Zamba2",
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "chunk_size": 16,
        },
    ),
}
"""Folder of a family: the stem of its class names, and the options of a small model."""


VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "projection_intermediate_size": 32,
}
"""The other half of a model that predicts tokens only beside a picture's."""


def config_of(family: str) -> Any:
    """A small model's configuration. Options that a family does not have are left out."""
    import transformers

    stem, options = FAMILIES[family]
    cls = getattr(transformers, f"{stem}TextConfig", None) or getattr(transformers, f"{stem}Config")
    known = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in (COMMON | options).items() if name in known})


def model_of(family: str) -> Any:
    """A small model that predicts tokens, with random weights of the same seed."""
    import torch
    import transformers

    torch.manual_seed(0)
    stem, config = FAMILIES[family][0], config_of(family)
    with without_kernels():
        cls = getattr(transformers, f"{stem}ForCausalLM", None)
        if cls is None:
            config = getattr(transformers, f"{stem}Config")(text_config=config.to_dict(), vision_config=VISION)
            cls = getattr(transformers, f"{stem}ForConditionalGeneration")
    return cls(config).eval()


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Import models as on a machine without fla, whose kernels transformers would call on a CPU too, where they cannot run."""
    hidden = {name: sys.modules.get(name) for name in ("fla", "causal_conv1d", "mamba_ssm")}
    sys.modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name, module in hidden.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
