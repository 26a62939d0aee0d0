"""FLASH (Hua et al. 2022): local attention, global attention and both, by the size of chunks and by the block around them."""

from functools import partial
from typing import Any

from torch import nn

from ..frame import ScaleNorm, of
from ..mixers import MixedChunkAttention, Quad, Unit, flash
from ..protocol import Setting, Study
from ..tasks import SMALL, Text
from . import rows

KEYS = 64


def units(s: Setting, i: int, causal: bool = True, norm: Any = nn.RMSNorm, **options: Any) -> nn.Module:
    """Two FLASH layers."""
    given = {"key_dim": KEYS, "chunk_size": s.chunk, **options}
    given["expand"] = expansion(s, given["chunk_size"])
    return Unit(s.width, partial(flash, s.width, s.length, causal, **given), norm)


def expansion(s: Setting, chunk_size: int) -> float:
    """Width over ``D`` of a unit with ``6 D²`` parameters, its bias of distances among them: two have those of a block."""
    return 2 - KEYS / (3 * s.width) - (2 * chunk_size - 1) / (3 * s.width**2)


def quad(s: Setting, i: int, causal: bool = True) -> nn.Module:
    """Two units whose one chunk holds the sequence."""
    options = {"key_dim": KEYS, "expand": expansion(s, s.length), "max_length": s.length, "causal": causal}
    return Unit(s.width, lambda: Quad(s.width, **options), nn.RMSNorm)


def mixed_chunk(s: Setting, i: int, causal: bool = True, chunk_size: int | None = None) -> nn.Module:
    """Mixed chunk attention in an ordinary block."""
    return MixedChunkAttention(s.width, s.heads, s.length, chunk_size or s.chunk, causal)


STUDY = Study(
    name="flash",
    question="What are attention within chunks and attention across them each worth, in contexts of 2,048 bytes?",
    task=lambda s: Text(s.length, s.batch, scored=s.scored),
    models={
        "Transformer++": of(rows.softmax),
        "FLASH-Quad": of(quad),
        "FLASH, chunks of 256, ScaleNorm": of(partial(units, norm=ScaleNorm, chunk_size=256), norm=ScaleNorm),
        **{
            f"{name}, chunks of {chunk}": of(partial(mixer, chunk_size=chunk))
            for name, mixer, chunks in (
                ("local only", partial(units, linear=False), (64, 128, 256, 512)),
                ("global only", partial(units, quadratic=False), (64, 512)),
                ("FLASH", units, (64, 128, 256, 512)),
                ("MC-TFM++", mixed_chunk, (64, 256)),
            )
            for chunk in chunks
        },
    },
    full=Setting(width=128, heads=4, length=2048, batch=2, steps=1000, doublings=1, scored=2**16, half=True, convolution=False),
    small=SMALL | {"chunk": 16},
)
