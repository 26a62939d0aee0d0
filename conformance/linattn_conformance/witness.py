"""Who ran: every operator method of every backend class reports here while a case runs.

A call of the suite must end in a method of the backend under test, and in no other backend's; and nothing that runs inside
may call linattn's public operators again. Either would be a silent fallback, and a verdict on somebody else's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from linattn.plugin import Backend
from linattn.watching import watched

__all__ = ["Witness"]


class Witness:
    """Watches one backend.

    Attributes:
        own: Methods of the backend under test that ran, in order.
        foreign: Methods of other backends that ran.
        entries: Public operators called by something other than the suite.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.watching = False
        self.permits = 0
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.own: list[str] = []
        self.foreign: list[str] = []
        self.entries: list[str] = []

    def complaint(self) -> str | None:
        """What is wrong with what was seen, if anything."""
        if not self.own and not self.complaint_about_others():
            return f"no method of backend {self.backend.name!r} ran"
        return self.complaint_about_others()

    def complaint_about_others(self) -> str | None:
        """Who else ran."""
        if self.foreign:
            return f"falls back: {', '.join(sorted(set(self.foreign)))} ran inside a call of backend {self.backend.name!r}"
        if self.entries:
            return f"falls back: {', '.join(sorted(set(self.entries)))} of the public API was called from inside the backend"
        return None

    @contextmanager
    def permit(self) -> Iterator[None]:
        """One public call made by the suite itself."""
        self.permits += 1
        try:
            yield
        finally:
            self.permits = 0

    @contextmanager
    def installed(self) -> Iterator[Witness]:
        """Wrap the methods of every backend class, and the public operators, for the time of a ``with`` block."""
        with watched(self._guarded, self._watched, [self.backend]):
            yield self

    def _watched(self, owner: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        bound = not isinstance(owner, type)

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.watching:
                if bound or args[0] is self.backend:
                    self.own.append(name)
                else:
                    self.foreign.append(f"{type(args[0]).__name__}.{name}")
            return method(*args, **kwargs)

        return watched

    def _guarded(self, name: str, target: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(target)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.watching:
                if self.permits:
                    self.permits -= 1
                else:
                    self.entries.append(name)
            return target(*args, **kwargs)

        return guarded
