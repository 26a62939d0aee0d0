"""Linear attention, defined once: one API over arrays of NumPy, PyTorch and whatever else a backend takes.

>>> o, state = linattn.chunk_gla(q, k, v, g, output_final_state=True)
"""

from . import errors, feature_maps, gates, ops, plugin
from .dispatch import Plan, use_backend
from .errors import LinattnError, Unsupported
from .ops import *  # noqa: F403 - every operator, as ops.__all__ lists them
from .ops import __all__ as _operators
from .ops._family import explain
from .plugin import API_VERSION
from .registry import register_backend, unregister_backend

__version__ = API_VERSION

__all__ = sorted(
    [
        *_operators,
        "API_VERSION",
        "LinattnError",
        "Plan",
        "Unsupported",
        "errors",
        "explain",
        "feature_maps",
        "gates",
        "ops",
        "plugin",
        "register_backend",
        "unregister_backend",
        "use_backend",
    ]
)

# Public names belong to the package, wherever they are defined.
for _name in __all__:
    _value = globals()[_name]
    if hasattr(_value, "__module__") and isinstance(_value.__module__, str):
        _value.__module__ = "linattn"
del _name, _value
