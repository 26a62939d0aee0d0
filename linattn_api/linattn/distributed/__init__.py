"""One sequence over many devices: what operators take as ``context=``.

>>> plan = linattn.distributed.context_parallel(mesh["cp"])
>>> o, _ = linattn.chunk_gla(q, k, v, g, context=plan)  # each rank has its own tokens

>>> axis = linattn.distributed.shard_axis("cp")  # JAX: an axis of the mesh, inside jax.shard_map or outside
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..context import Context
from .simulation import simulate

if TYPE_CHECKING:
    from .on_jax import ShardAxis, shard_axis
    from .on_torch import ContextPlan, context_parallel

__all__ = ["Context", "ContextPlan", "ShardAxis", "context_parallel", "shard_axis", "simulate"]

_HOMES = {"ContextPlan": "on_torch", "context_parallel": "on_torch", "ShardAxis": "on_jax", "shard_axis": "on_jax"}


def __getattr__(name: str) -> Any:
    """Import a framework's part when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
