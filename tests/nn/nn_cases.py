"""A small layer of every kind, for tests: the name, and arguments besides a width of 32."""

from __future__ import annotations

WIDTH = 32

LAYERS = {
    "DeltaNet": {"num_heads": 2, "use_gate": True},
    "FLASH": {"chunk_size": 8, "key_dim": 8},
    "GAU": {"max_length": 32, "key_dim": 8},
    "GatedDeltaNet": {"num_heads": 2, "head_dim": 8, "num_v_heads": 4},
    "GatedLinearAttention": {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True},
    "HGRN2": {"expand_ratio": 8, "lower_bound": 0.3},
    "Hedgehog": {"num_heads": 2},
    "KimiDeltaAttention": {"num_heads": 2, "head_dim": 8, "num_v_heads": 4},
    "Lightning": {"num_heads": 2},
    "LinearAttention": {"num_heads": 2},
    "Mamba2": {"head_dim": 8, "state_size": 8, "n_groups": 2},
    "RWKV6": {"num_heads": 2},
    "RWKV7": {"head_dim": 8},
    "RetNet": {"num_heads": 2},
}

VARIANTS = {
    "DeltaNet without beta": ("DeltaNet", {"num_heads": 2, "use_beta": False, "qk_norm": "sum", "qk_activation": "elu"}),
    "DeltaNet without convolutions": ("DeltaNet", {"num_heads": 2, "use_short_conv": False, "allow_neg_eigval": True}),
    "GatedDeltaNet without gate": ("GatedDeltaNet", {"num_heads": 2, "head_dim": 8, "use_gate": False}),
    "GLA without gate": ("GatedLinearAttention", {"num_heads": 2, "use_output_gate": False, "feature_map": "elu1"}),
    "HGRN2 with convolutions": ("HGRN2", {"expand_ratio": None, "num_heads": 4, "use_short_conv": True}),
    "Hedgehog of softmax": ("Hedgehog", {"num_heads": 2, "activation": "softmax", "rotary": False}),
    "KDA with a bound": ("KimiDeltaAttention", {"num_heads": 2, "head_dim": 8, "lower_bound": -5.0}),
    "Lightning of MiniMax": ("Lightning", {"num_heads": 2, "decay": "minimax", "num_hidden_layers": 3}),
    "Mamba2 without norm": ("Mamba2", {"head_dim": 8, "state_size": 8, "rmsnorm": False, "D_has_hdim": True}),
    "RetNet of groups": ("RetNet", {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True}),
    "learned maps": ("LinearAttention", {"num_heads": 2, "feature_map": "hedgehog", "norm_q": True, "norm_k": True}),
    "product maps": ("LinearAttention", {"num_heads": 2, "feature_map": "elementwise_product", "normalize": False}),
    "t2r maps": ("LinearAttention", {"num_heads": 2, "feature_map": "t2r", "output_norm": "identity"}),
}

CASES = {**{name: (name, options) for name, options in LAYERS.items()}, **VARIANTS}
