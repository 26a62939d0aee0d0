"""Who ran: every operator method of every backend class reports here while a case runs.

So do calls of methods that somebody bound, or took out of their class, before the witness came: while it looks, the functions
of other backends run its code. Classes that are made later are visited before the next case.

A call of the suite must end in a method of the backend under test, and in no other backend's; and nothing that runs inside
may call linattn's public operators again. Either would be a silent fallback, and a verdict on somebody else's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from linattn.plugin import Backend
from linattn.watching import watched

__all__ = ["Witness"]


class Taken(NamedTuple):
    """A function whose code is another while the witness looks.

    Attributes:
        function: The function, to which others may hold references.
        copy: One of its own with the code that it has.
        plain: That code.
        seen: The code that reports to the witness.
    """

    function: FunctionType
    copy: FunctionType
    plain: CodeType
    seen: CodeType

    def seen_by(self, watched: Callable[..., Any]) -> Taken:
        """With the code that calls ``watched``."""
        code = _template.__code__
        consts = tuple((watched,) if const == _MARK else const for const in code.co_consts)
        return self._replace(
            seen=code.replace(co_consts=consts, co_name=self.plain.co_name, co_freevars=self.plain.co_freevars)
        )


_MARK = ("what is called instead",)


def _template(*args: Any, **kwargs: Any) -> Any:
    for function in ("what is called instead",):  # a constant, in whose place another one is put
        return function(*args, **kwargs)  # type: ignore[operator]


def taken_from(function: Any) -> Taken | None:
    """What is needed to have a function run other code; None for what is no plain function."""
    if type(function) is not FunctionType:
        return None
    code = function.__code__
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(vars(function))  # a signature of its own among them, for the registry may look at it meanwhile
    return Taken(function, copy, code, code)


class Witness:
    """Watches one backend.

    Attributes:
        own: Methods of the backend under test that ran, in order.
        foreign: Methods of other backends that ran.
        entries: Public operators called by something other than the suite.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._own = [found for kind in type(backend).__mro__ for found in vars(kind).values()]
        self.permits = 0
        self._watching = False
        self._taken: list[Taken] = []
        self._visit: Callable[[], None] = lambda: None
        self.reset()

    @property
    def watching(self) -> bool:
        """True while calls are looked at."""
        return self._watching

    @watching.setter
    def watching(self, watching: bool) -> None:
        if watching != self._watching:
            self._watching = watching
            for taken in self._taken:
                taken.function.__code__ = taken.seen if watching else taken.plain

    def reset(self) -> None:
        """Forget what was seen."""
        self._visit()
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
        with watched(self._guarded, self._watched, [self.backend]) as self._visit:
            try:
                yield self
            finally:
                self.watching, self._taken, self._visit = False, [], lambda: None

    def _watched(self, owner: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        bound = not isinstance(owner, type)
        mine = bound or isinstance(self.backend, owner) or any(method is found for found in self._own)
        taken = None if mine else taken_from(method)
        if taken is not None:
            method = taken.copy

        @functools.wraps(method)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.watching:
                if bound or args[0] is self.backend:
                    self.own.append(name)
                else:
                    self.foreign.append(f"{type(args[0]).__name__}.{name}")
            return method(*args, **kwargs)

        if taken is not None:
            self._taken.append(taken.seen_by(watched))
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
