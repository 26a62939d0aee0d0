"""The families: one module each, with the signature, the recurrence and how it lowers to a more general one."""

from .delta_rule import (
    chunk_delta_rule,
    decode_delta_rule,
    delta_rule,
    parallel_delta_rule,
    recurrent_delta_rule,
    summary_delta_rule,
)
from .dplr import chunk_dplr, decode_dplr, dplr, parallel_dplr, recurrent_dplr, summary_dplr
from .gated_delta_rule import (
    chunk_gated_delta_rule,
    decode_gated_delta_rule,
    gated_delta_rule,
    parallel_gated_delta_rule,
    recurrent_gated_delta_rule,
    summary_gated_delta_rule,
)
from .gated_rms_norm import gated_rms_norm
from .gla import chunk_gla, decode_gla, gla, parallel_gla, recurrent_gla, summary_gla
from .kda import chunk_kda, decode_kda, kda, parallel_kda, recurrent_kda, summary_kda
from .linear_attn import (
    chunk_linear_attn,
    decode_linear_attn,
    linear_attn,
    parallel_linear_attn,
    recurrent_linear_attn,
    summary_linear_attn,
)
from .mixed_attn import chunk_mixed_attn, mixed_attn, parallel_mixed_attn, recurrent_mixed_attn
from .rwkv6 import chunk_rwkv6, decode_rwkv6, parallel_rwkv6, recurrent_rwkv6, rwkv6, summary_rwkv6
from .short_conv import decode_short_conv, short_conv
from .simple_gla import (
    chunk_simple_gla,
    decode_simple_gla,
    parallel_simple_gla,
    recurrent_simple_gla,
    simple_gla,
    summary_simple_gla,
)
from .ssd import chunk_ssd, decode_ssd, parallel_ssd, recurrent_ssd, ssd, summary_ssd

__all__ = [
    "chunk_delta_rule",
    "chunk_dplr",
    "chunk_gated_delta_rule",
    "chunk_gla",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_mixed_attn",
    "chunk_rwkv6",
    "chunk_simple_gla",
    "chunk_ssd",
    "decode_delta_rule",
    "decode_dplr",
    "decode_gated_delta_rule",
    "decode_gla",
    "decode_kda",
    "decode_linear_attn",
    "decode_rwkv6",
    "decode_short_conv",
    "decode_simple_gla",
    "decode_ssd",
    "delta_rule",
    "dplr",
    "gated_delta_rule",
    "gated_rms_norm",
    "gla",
    "kda",
    "linear_attn",
    "mixed_attn",
    "parallel_delta_rule",
    "parallel_dplr",
    "parallel_gated_delta_rule",
    "parallel_gla",
    "parallel_kda",
    "parallel_linear_attn",
    "parallel_mixed_attn",
    "parallel_rwkv6",
    "parallel_simple_gla",
    "parallel_ssd",
    "recurrent_delta_rule",
    "recurrent_dplr",
    "recurrent_gated_delta_rule",
    "recurrent_gla",
    "recurrent_kda",
    "recurrent_linear_attn",
    "recurrent_mixed_attn",
    "recurrent_rwkv6",
    "recurrent_simple_gla",
    "recurrent_ssd",
    "rwkv6",
    "short_conv",
    "simple_gla",
    "ssd",
    "summary_delta_rule",
    "summary_dplr",
    "summary_gated_delta_rule",
    "summary_gla",
    "summary_kda",
    "summary_linear_attn",
    "summary_rwkv6",
    "summary_simple_gla",
    "summary_ssd",
]
