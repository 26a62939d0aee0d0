"""Linear attention, defined once: one API over the arrays of every framework that a backend takes.

>>> o, state = linattn.chunk_gla(q, k, v, g, output_final_state=True)
"""

from . import errors, feature_maps, gates, ops, plugin
from .dispatch import use_backend
from .errors import LinattnError, Unsupported
from .guards import debug
from .ops import (
    chunk_delta_rule,
    chunk_dplr,
    chunk_gated_delta_rule,
    chunk_gla,
    chunk_kda,
    chunk_linear_attn,
    chunk_mixed_attn,
    chunk_rwkv6,
    chunk_simple_gla,
    decode_delta_rule,
    decode_dplr,
    decode_gated_delta_rule,
    decode_gla,
    decode_kda,
    decode_linear_attn,
    decode_rwkv6,
    decode_simple_gla,
    delta_rule,
    dplr,
    gated_delta_rule,
    gla,
    kda,
    linear_attn,
    mixed_attn,
    parallel_delta_rule,
    parallel_dplr,
    parallel_gated_delta_rule,
    parallel_gla,
    parallel_kda,
    parallel_linear_attn,
    parallel_mixed_attn,
    parallel_rwkv6,
    parallel_simple_gla,
    recurrent_delta_rule,
    recurrent_dplr,
    recurrent_gated_delta_rule,
    recurrent_gla,
    recurrent_kda,
    recurrent_linear_attn,
    recurrent_mixed_attn,
    recurrent_rwkv6,
    recurrent_simple_gla,
    rwkv6,
    simple_gla,
)
from .ops._family import explain
from .planning import Plan
from .plugin import API_VERSION, MixedState
from .registry import register_backend, unregister_backend

__version__ = API_VERSION

__all__ = [
    "API_VERSION",
    "LinattnError",
    "MixedState",
    "Plan",
    "Unsupported",
    "chunk_delta_rule",
    "chunk_dplr",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_mixed_attn",
    "chunk_rwkv6",
    "chunk_simple_gla",
    "debug",
    "decode_delta_rule",
    "decode_dplr",
    "decode_gated_delta_rule",
    "decode_gla",
    "decode_kda",
    "decode_linear_attn",
    "decode_rwkv6",
    "decode_simple_gla",
    "delta_rule",
    "dplr",
    "errors",
    "explain",
    "feature_maps",
    "gated_delta_rule",
    "gates",
    "gla",
    "kda",
    "linear_attn",
    "mixed_attn",
    "ops",
    "parallel_delta_rule",
    "parallel_dplr",
    "parallel_gated_delta_rule",
    "parallel_gla",
    "parallel_kda",
    "parallel_linear_attn",
    "parallel_mixed_attn",
    "parallel_rwkv6",
    "parallel_simple_gla",
    "plugin",
    "recurrent_delta_rule",
    "recurrent_dplr",
    "recurrent_gated_delta_rule",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_linear_attn",
    "recurrent_mixed_attn",
    "recurrent_rwkv6",
    "recurrent_simple_gla",
    "register_backend",
    "rwkv6",
    "simple_gla",
    "unregister_backend",
    "use_backend",
]

# Public names belong to the package, wherever they are defined.
for _name in __all__:
    if not isinstance(globals()[_name], (str, type(ops))):
        globals()[_name].__module__ = "linattn"
