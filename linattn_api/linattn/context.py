"""What an operator takes as ``context=``: how its sequences are spread over devices.

:mod:`linattn.distributed` makes them. No backend knows of them: a context turns a call on a shard into summaries, one exchange,
and the ordinary operator with the initial state that comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .feature_maps import FeatureMap
    from .spec import OpSpec

__all__ = ["Context"]


class Context:
    """Base class of what ``context=`` takes: ``context_parallel`` of ``linattn.distributed`` makes one, or ``shard_axis``."""

    def run(
        self,
        spec: OpSpec,
        form: str | None,
        arrays: tuple[Any, ...],
        keywords: dict[str, Any],
        feature_map: str | FeatureMap | None,
        backend: str | Sequence[str] | None,
    ) -> Any:
        """Run one call on this device's shard; arguments as those of ``linattn.dispatch.run``."""
        raise NotImplementedError(f"{type(self).__name__} must define run")

    def positions(self, x: Any) -> Any:
        """The position of each of this device's tokens in its sequence ``[T]``, int32, for ``x [B, T, …]``."""
        raise NotImplementedError(f"{type(self).__name__} must define positions")
