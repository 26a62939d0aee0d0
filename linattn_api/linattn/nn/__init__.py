"""Layers: what models put around the operators, ``[B, T, D]`` to ``[B, T, D]``.

The names here are PyTorch's modules, and PyTorch is imported when the first of them is asked for. ``linattn.nn.flax``,
``linattn.nn.equinox`` and ``linattn.nn.mlx`` have the same layers for their frameworks, with the same parameters by name, and
import no other.

>>> layer = linattn.nn.GatedDeltaNet(1024, num_heads=4, head_dim=128)
>>> y = layer(x)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .convert import from_fla, from_transformers, to_fla, to_transformers
    from .sharding import shard_by_heads
    from .torch import (
        FLASH,
        GAU,
        HGRN2,
        RWKV6,
        RWKV7,
        Block,
        Cache,
        DeltaNet,
        GatedDeltaNet,
        GatedLinearAttention,
        Hedgehog,
        KimiDeltaAttention,
        LanguageModel,
        Lightning,
        LinearAttention,
        Mamba2,
        RetNet,
        TokenMixer,
    )

__all__ = [
    "FLASH",
    "GAU",
    "HGRN2",
    "RWKV6",
    "RWKV7",
    "Block",
    "Cache",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "Hedgehog",
    "KimiDeltaAttention",
    "LanguageModel",
    "Lightning",
    "LinearAttention",
    "Mamba2",
    "RetNet",
    "TokenMixer",
    "from_fla",
    "from_transformers",
    "shard_by_heads",
    "to_fla",
    "to_transformers",
]

_ELSEWHERE = {
    "from_fla": "convert",
    "from_transformers": "convert",
    "shard_by_heads": "sharding",
    "to_fla": "convert",
    "to_transformers": "convert",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'torch')}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"linattn.nn.{name} needs PyTorch: pip install 'linattn[torch]'; "
            "linattn.nn.flax, linattn.nn.equinox and linattn.nn.mlx have the layers of other frameworks"
        ) from error
    found = getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
