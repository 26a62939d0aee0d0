"""A hook for whoever must see every call: the conformance suite uses it to tell who really ran.

It is no part of the stable API: other tools may use it, and its signature may change in a minor release.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from .call import FORMS
from .ops._family import OPERATORS
from .plugin import Backend
from .registry import registry
from .spec import COMPANIONS, DECODING, FAMILIES, SUMMARIES

__all__ = ["watched"]

METHODS = (
    *(f"{form}_{op}" for form in FORMS for op in FAMILIES),
    *(f"decode_{op}" for op in DECODING),
    *(f"summary_{op}" for op in SUMMARIES),
    *COMPANIONS,
)

Function = Callable[..., Any]


@contextmanager
def watched(
    operator: Callable[[str, Function], Function],
    method: Callable[[Any, str, Function], Function],
    others: Iterable[Backend] = (),
) -> Generator[Callable[[], None]]:
    """Put wrappers around public operators and backends' methods for the time of a ``with`` block, in every thread.

    Args:
        operator: From the name of a public operator and what it calls with its arguments, what it is to call instead.
        method: From the owner, the name and the function of a method that runs an operator, what is to be in its place. The
            owner is a subclass of :class:`linattn.plugin.Backend`, all of which are visited, or one of ``others``.
        others: Backend objects that may have methods of their own.

    The block gets a function that visits the subclasses that there are by now, and were not there before.
    """
    undo: list[Callable[[], None]] = []
    seen: list[Any] = []

    def visit() -> None:
        fresh = [owner for owner in (*_subclasses(Backend), *others) if not any(owner is other for other in seen)]
        seen.extend(fresh)
        for owner in fresh:
            for name in METHODS:
                if callable(found := vars(owner).get(name)):
                    undo.append(functools.partial(setattr, owner, name, found))
                    setattr(owner, name, method(owner, name, _bindable(found)))
        if fresh:
            registry.touch()  # plans hold the methods as they were

    try:
        for name, function in OPERATORS.items():
            namespace = function.__globals__
            undo.append(functools.partial(namespace.__setitem__, "target", namespace["target"]))
            namespace["target"] = operator(name, namespace["target"])
        visit()
        registry.touch()
        yield visit
    finally:
        for step in reversed(undo):
            step()
        registry.touch()


def _bindable(found: Function) -> Function:
    """A static method as one that takes its object, which is how the others are called."""
    if not isinstance(found, staticmethod):
        return found
    function: Function = found.__func__
    signature = inspect.signature(function)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

    @functools.wraps(function)
    def bound(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    bound.__dict__["__signature__"] = signature.replace(parameters=[this, *signature.parameters.values()])
    return bound


def _subclasses(kind: type[Backend]) -> list[type[Backend]]:
    found: list[type[Backend]] = []
    for child in kind.__subclasses__():
        found += [child, *_subclasses(child)]
    return list(dict.fromkeys(found))
