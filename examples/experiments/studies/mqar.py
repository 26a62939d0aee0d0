"""Associative recall by mixer (Yang et al. 2024, figure 3; Zhang et al. 2024, table 2)."""

from ..frame import of
from ..protocol import Setting, Study
from ..tasks import Recall
from . import rows

STUDY = Study(
    name="mqar",
    question="Which mixers learn to recall, by width and by the number of pairs, with and without a short convolution?",
    task=lambda s: Recall(s.pairs, s.batch),
    models={
        "softmax": of(rows.softmax),
        "linear attention": of(rows.linear),
        "RetNet": of(rows.retnet),
        "GLA": of(rows.gla),
        "Mamba-2": of(rows.mamba2),
        "DeltaNet": of(rows.delta_net),
        "Gated DeltaNet": of(rows.gated_delta_net),
    },
    full=Setting(steps=2000, doublings=5, batch=32),
    small={"width": 32, "pairs": 4, "steps": 4, "batch": 4, "doublings": 1, "seeds": 2, "rates": (3e-3, 1e-2)},
    settings={
        f"width {width}, {pairs} pairs{'' if convolution else ', no convolution'}": {
            "width": width,
            "pairs": pairs,
            "convolution": convolution,
        }
        for width, pairs, convolution in (
            (64, 8, True),
            (64, 16, True),
            (32, 16, True),
            (64, 32, True),
            (64, 8, False),
            (64, 32, False),
        )
    },
    score="recalled",
    higher=True,
    solved_by="softmax",
)
