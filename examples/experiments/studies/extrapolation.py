"""Reading further than trained (Yang et al. 2024, §5.2 and figure 5): windows of their own, or states that are carried.

Carried states are detached (truncated backpropagation through time), over 16 segments in a row. Rates are those that are best
within the length of training.
"""

from functools import partial

from ..frame import of
from ..protocol import Setting, Study
from ..tasks import SMALL, Text
from . import rows


def task(s: Setting, segments: int = 1) -> Text:
    return Text(s.length, s.batch, longest=16 * s.length, segments=segments, scored=s.scored, octaves=True)


STUDY = Study(
    name="extrapolation",
    question="Up to 16 times the length that they were trained on, what do bytes cost, and does it help to carry states?",
    task=task,
    models={
        "softmax": of(rows.softmax),
        "RetNet": of(rows.retnet),
        "GLA": of(rows.gla),
        "Gated DeltaNet": of(rows.gated_delta_net),
        "RetNet, carried": of(rows.retnet, carries=True),
        "GLA, carried": of(rows.gla, carries=True),
        "Gated DeltaNet, carried": of(rows.gated_delta_net, carries=True),
    },
    tasks={f"{name}, carried": partial(task, segments=16) for name in ("RetNet", "GLA", "Gated DeltaNet")},
    full=Setting(width=128, heads=4, batch=8, steps=2000, doublings=1, scored=2**17, convolution=False),
    small=SMALL | {"length": 32},
    score="512",
    shown=("bits", *(str(512 * 2**i // 4) for i in range(8))),
)
