"""The layers, one file each, in terms that every framework has; :mod:`linattn.nn` and its siblings make modules of them."""

from .delta_net import DeltaNet
from .flash import FLASH, GAU
from .gated_delta_net import GatedDeltaNet
from .gated_linear_attention import GatedLinearAttention
from .hedgehog import Hedgehog
from .hgrn2 import HGRN2
from .kimi_delta_attention import KimiDeltaAttention
from .lightning import Lightning
from .linear_attention import LinearAttention
from .mamba2 import Mamba2
from .retnet import RetNet
from .rwkv6 import RWKV6
from .rwkv7 import RWKV7

__all__ = [
    "FLASH",
    "GAU",
    "HGRN2",
    "RWKV6",
    "RWKV7",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "Hedgehog",
    "KimiDeltaAttention",
    "Lightning",
    "LinearAttention",
    "Mamba2",
    "RetNet",
]
