"""Associative recall by feature map (Zhang et al. 2024, table 2 and figures 3 and 4)."""

from collections.abc import Callable

from linattn import feature_maps
from linattn.feature_maps import Cosformer, Exp, FeatureMap, Performer

from ..frame import of
from ..mixers import LEARNED, layer
from ..protocol import Setting, Study
from ..tasks import Recall
from . import rows

FIXED: dict[str, Callable[[], FeatureMap]] = {
    "elu1": feature_maps.Elu1,
    "relu": feature_maps.Relu,
    "performer": lambda: Performer(scale=0.5),
    "cosformer": lambda: Cosformer(M=256),
    "exp, t=1": Exp,
    "exp, t=2": lambda: Exp(t=2.0),
    "taylor2": feature_maps.Taylor2,
}


def mapped(make: Callable[[], FeatureMap]):
    """A model of linear attention with a fixed map."""
    return of(lambda s, i: layer("LinearAttention", hidden_size=s.width, num_heads=s.heads, feature_map=make(), layer_idx=i))


def learned(name: str):
    """A layer with a learned map."""
    return lambda s, i: LEARNED[name](s.width, num_heads=s.heads, layer_idx=i)


STUDY = Study(
    name="recall_by_map",
    question="Which feature maps learn to recall, fewer pairs than a head has channels or more, with or without a convolution?",
    task=lambda s: Recall(s.pairs, s.batch),
    models={
        "softmax": of(rows.softmax),
        **{name: mapped(make) for name, make in FIXED.items()},
        **{name: of(learned(name)) for name in LEARNED},
    },
    full=Setting(heads=4, steps=2000, doublings=5, batch=32),
    small={"width": 32, "pairs": 4, "steps": 4, "batch": 4, "doublings": 0, "seeds": 2, "rates": (3e-3, 1e-2)},
    settings={
        f"{pairs} pairs{'' if convolution else ', no convolution'}": {"pairs": pairs, "convolution": convolution}
        for convolution in (False, True)
        for pairs in (8, 32)
    },
    score="recalled",
    higher=True,
    solved_by="softmax",
)
