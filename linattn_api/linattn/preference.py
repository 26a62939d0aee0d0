"""Which backends a call prefers, and who said so: the argument, else ``use_backend``, else the environment, else auto.

The context variable is the truth. Compilers cannot read it: Dynamo guards on a thread-local instead, and ``jax.jit`` on a
user context, so both mirror it (see ``Framework.mirror``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

from .errors import OptionError

__all__ = ["ENVIRONMENT_VARIABLE", "Preference", "context", "names", "preference_of", "thread"]

ENVIRONMENT_VARIABLE = "LINATTN_BACKEND"

context: ContextVar[tuple[str, ...] | None] = ContextVar("linattn_backend", default=None)


class _Thread(threading.local):
    # Set in __init__: Dynamo misses a class-level default and the compiled code would go stale.
    def __init__(self) -> None:
        self.backends: tuple[str, ...] | None = None


thread = _Thread()


class Preference(NamedTuple):
    """Which backends to try, in order, and who said so."""

    backends: tuple[str, ...]
    source: str

    @property
    def strict(self) -> bool:
        """True if one backend was named, and it is that one or an error."""
        return len(self.backends) == 1 and self.backends != ("auto",)


def preference_of(backend: str | Sequence[str] | None, context: tuple[str, ...] | None, environment: str | None) -> Preference:
    """The argument, else ``use_backend``, else the environment, else auto."""
    if backend is not None:
        return Preference(names(backend), "argument")
    if context is not None:
        return Preference(context, "use_backend")
    if environment:
        return Preference(tuple(name.strip() for name in environment.split(",")), ENVIRONMENT_VARIABLE)
    return Preference(("auto",), "default")


def names(backend: str | Sequence[str]) -> tuple[str, ...]:
    """One name, or several in order, as a tuple."""
    if isinstance(backend, str):
        return (backend,)
    given = list(backend) if isinstance(backend, Sequence) else []  # pyright: ignore[reportUnnecessaryIsInstance]
    if not given or not all(isinstance(name, str) for name in given):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"backend must be a name or a sequence of names, got {backend!r}")
    return tuple(given)
