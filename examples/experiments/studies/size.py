"""Mixers at 25M parameters, on the text of installed packages; rates are chosen at a tenth of the size."""

from functools import partial

from ..frame import of
from ..protocol import Setting, Study
from ..tasks import SMALL, Text
from . import rows
from .flash import units

STUDY = Study(
    name="size",
    question="At 25M parameters outside the embedding and as many bytes of text, which mixer costs the fewest bits?",
    task=lambda s: Text(s.length, s.batch, packages=s.packages, scored=s.scored),
    models={
        "Transformer++": of(rows.softmax),
        "RetNet": of(rows.retnet),
        "GLA": of(rows.gla),
        "Mamba-2": of(rows.mamba2),
        "Gated DeltaNet": of(rows.gated_delta_net),
        "FLASH": of(partial(units)),
    },
    full=Setting(
        width=512,
        depth=8,
        heads=4,
        length=2048,
        chunk=256,
        batch=16,
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
    scout={"width": 256, "depth": 3, "heads": 2, "batch": 8, "steps": 300, "rates": (1e-3, 2e-3, 5e-3, 1e-2)},
)
