"""FLASH read from both sides (Hua et al. 2022, §5.2): masked language modelling, ``causal=False``."""

from functools import partial

from ..frame import ScaleNorm, of
from ..mixers import Attention
from ..protocol import Setting, Study
from ..tasks import SMALL, Text
from .flash import mixed_chunk, quad, units

BOTH = {"causal": False}

STUDY = Study(
    name="masked",
    question="Is FLASH as good as softmax at telling bytes that are hidden, in contexts of 512 and 2,048 bytes?",
    task=lambda s: Text(s.length, s.batch, scored=s.scored, masked=True),
    models={
        "Transformer++": of(lambda s, i: Attention(s.width, s.heads, causal=False)),
        "local only": of(partial(units, linear=False, **BOTH)),
        "global only": of(partial(units, quadratic=False, **BOTH)),
        "FLASH": of(partial(units, **BOTH)),
        "FLASH, ScaleNorm": of(partial(units, norm=ScaleNorm, **BOTH), norm=ScaleNorm),
        "FLASH-Quad": of(partial(quad, **BOTH)),
        "MC-TFM++": of(partial(mixed_chunk, **BOTH)),
    },
    full=Setting(width=128, heads=4, chunk=128, steps=1000, doublings=1, scored=2**16, half=True, convolution=False),
    small=SMALL | {"chunk": 16},
    settings={"512 bytes": {"length": 512, "batch": 8}, "2,048 bytes": {"length": 2048, "batch": 2}},
)
