"""``mixed_attn``."""
