"""Mixers at 85M parameters, on the text of installed packages.

Rates are chosen at a tenth of the size, and divided by how many times as wide a model is (Yang et al. 2022, μP).
"""

from functools import partial

from ..frame import of
from ..protocol import Setting, Study
from ..tasks import SMALL, Text
from . import rows
from .flash import units

STUDY = Study(
    name="size",
    question="At 85M parameters outside the embedding, which mixer costs the fewest bits after 8.2M bytes of text?",
    task=lambda s: Text(s.length, s.batch, packages=s.packages, scored=s.scored, twice=True),
    models={
        "Transformer++": of(rows.softmax),
        "RetNet": of(rows.retnet),
        "GLA": of(rows.gla),
        "Mamba-2": of(rows.mamba2),
        "Gated DeltaNet": of(rows.gated_delta_net),
        "FLASH": of(partial(units)),
    },
    full=Setting(
        width=768,
        depth=12,
        heads=6,
        length=2048,
        chunk=256,
        batch=8,
        steps=500,
        scored=2**18,
        packages=True,
        half=True,
        doublings=0,
        seeds=1,
        rates=(),
        together=1,
    ),
    small={key: x for key, x in SMALL.items() if key != "rates"} | {"heads": 2, "chunk": 16},
    scout={"width": 256, "depth": 11, "heads": 2, "steps": 200, "rates": (1e-3, 2e-3, 5e-3, 1e-2), "together": 4},
    shown=("bits", "bits again", "tokens per second"),
)
