"""Feature maps: what is applied to queries and keys before the recurrence.

Each map is written once against the caller's array framework and is differentiable in its input and its parameters. Use one by
name, ``linattn.gla(..., feature_map="elu1")``, or as an object, ``feature_map=feature_maps.Exp(t=2.0)``.
"""

from .attention import FLOOR, Fidelity, attention_weights, distillation_loss, fidelity
from .base import FeatureMap
from .elementwise import Elu1, Exp, Identity, Relu, Relu2
from .learned import Hedgehog, Rebased, T2r
from .names import MAPS, resolve
from .polynomial import Dpfp, Taylor2
from .positional import Cosformer
from .random_features import Performer, Rfa

__all__ = [
    "FLOOR",
    "MAPS",
    "Cosformer",
    "Dpfp",
    "Elu1",
    "Exp",
    "FeatureMap",
    "Fidelity",
    "Hedgehog",
    "Identity",
    "Performer",
    "Rebased",
    "Relu",
    "Relu2",
    "Rfa",
    "T2r",
    "Taylor2",
    "attention_weights",
    "distillation_loss",
    "fidelity",
    "resolve",
]

# Public names belong to the package, wherever they are defined.
for _name in __all__:
    if hasattr(globals()[_name], "__qualname__"):
        globals()[_name].__module__ = __name__
