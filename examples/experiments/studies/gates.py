"""What a gate is worth (Yang et al. 2024, table 4): one layer, rotary positions in all, and one thing changed."""

from ..frame import of
from ..mixers import GATES, GatedMixer
from ..protocol import Setting, Study
from ..tasks import SMALL, Text


def gated(gate: str):
    """A model of GLA's layer with another gate."""
    return of(lambda s, i: GatedMixer(s.width, s.heads, gate, layer_idx=i))


STUDY = Study(
    name="gates",
    question="What is each kind of gate worth, everything else being equal, and how many heads should there be?",
    task=lambda s: Text(s.length, s.batch, scored=s.scored),
    models={gate: gated(gate) for gate in GATES},
    full=Setting(width=128, batch=8, steps=2000, doublings=1, scored=2**17, convolution=False),
    small=SMALL,
    settings={f"{heads} head{'s' * (heads > 1)}": {"heads": heads} for heads in (1, 4, 8)},
)
