"""Functions that take the place of a package's own, in every module that holds these, and give it back.

A function of a package is known by its dotted name, and found by identity: wherever a loaded module has that very object as
a global, it gets ours. Modules that are imported later take it from where it is defined, and get ours too; a model that is
already built calls the globals of the module it was written in. Ours remembers what it stands for: what it cannot serve
goes there, and giving back is putting it there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import ArgumentError, BackendError, Unsupported
from ..registry import registry

__all__ = [
    "AfterImport",
    "Asked",
    "FallbackWarning",
    "Integration",
    "Stand",
    "Switch",
    "globals_of_modules",
    "serving",
    "stand_of",
    "standing_for",
    "stood_for",
    "warn_once",
    "warned",
]

logger = logging.getLogger("linattn.integrations")

Function = Callable[..., Any]


class FallbackWarning(UserWarning):
    """A call that linattn cannot serve goes where it went before. Said once for each function and reason."""


def serving(before: Function, ours: Function, name: str, unless: Callable[[], bool] | None = None) -> Function:
    """``ours`` in the place of ``before``: a call that linattn refuses goes to ``before``, and a warning says so once.

    Args:
        before: What it stands for, whose name, docstring and signature it has.
        ours: What means the same. It refuses by :class:`linattn.Unsupported` or an ``ArgumentError``, before it writes to
            anything; any other error is raised.
        name: What to call it in a warning.
        unless: Whether a call goes to ``before`` without a word.
    """

    def served(*args: Any, **kwargs: Any) -> Any:
        if unless is not None and unless():
            return before(*args, **kwargs)
        try:
            return ours(*args, **kwargs)
        except (Unsupported, ArgumentError) as reason:
            warn_once(name, str(reason))
        return before(*args, **kwargs)

    return standing_for(before, served, name)


class Stand(NamedTuple):
    """What a function of ours took the place of, and what that is called."""

    before: Function
    name: str


_STANDS: WeakKeyDictionary[Function, Stand] = WeakKeyDictionary()
"""By the function of ours; attributes would be copied to whatever is wrapped around it (``functools.wraps``)."""


def standing_for(before: Function, function: Function, name: str) -> Function:
    """``function`` with the name and docstring of ``before`` and, for :func:`stand_of`, the memory of it."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        if hasattr(before, attribute):
            setattr(function, attribute, getattr(before, attribute))
    function.__dict__["__wrapped__"] = before
    _STANDS[function] = Stand(before, name)
    return function


def warn_once(name: str, reason: str) -> None:
    """Say that a function or a forward stays what it was, and why."""
    warned(f"{name} runs where it ran before, not on linattn: {reason}", FallbackWarning)


@functools.cache
def warned(text: str, kind: type[Warning]) -> None:
    """Warn, of each text once in a process."""
    warnings.warn(text, kind, stacklevel=5)


warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]  # said when compiled


def stand_of(function: object) -> Stand | None:
    """What a function of :func:`standing_for` took the place of, and its name; ``None`` for any other object."""
    if type(function) is not FunctionType:  # MLX has objects that only say they are
        return None
    return _STANDS.get(function)


def stood_for(function: object) -> Function | None:
    """What a function of :func:`standing_for` took the place of; ``None`` for any other object."""
    stand = stand_of(function)
    return None if stand is None else stand.before


OURS = ("linattn", "linattn_backends", "linattn_benchmarks", "linattn_conformance")


def globals_of_modules() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """``(namespace, name, value)`` of whatever loaded modules hold that can be called; linattn's own are left out."""
    for module in list(sys.modules.values()):
        namespace: dict[str, Any] = getattr(module, "__dict__", {})  # some packages leave objects of their own there
        if str(namespace.get("__name__")).partition(".")[0] not in OURS:
            yield from ((namespace, name, value) for name, value in list(namespace.items()) if callable(value))


class AfterImport:
    """A hook that sees modules right after they were imported: a finder that stands before the others.

    Args:
        concerns: Whether a module of this name is of interest.
        visit: What to call with it.
    """

    def __init__(self, concerns: Callable[[str], bool], visit: Callable[[ModuleType], None]) -> None:
        self.concerns = concerns
        self.visit = visit

    def install(self) -> None:
        """Start to see modules. Twice is once."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop to see them."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the other finders find, with a loader that shows the module when it has run it."""
        if not self.concerns(name):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:  # else it was removed while the module was imported
                    self.visit(module)

            spec.loader.exec_module = exec_module
        return spec


class Asked:
    """One call of ``enable()``: as a context manager it is over at the end of the block, and is not for a second one.

    Args:
        switch: What it enabled.
        fuse: Whether it asked for forwards as well.
    """

    def __init__(self, switch: Switch, fuse: bool) -> None:
        self.switch = switch
        self.fuse = fuse
        self.entered = False

    def __enter__(self) -> Asked:
        if self.entered or self not in self.switch.asked:
            raise RuntimeError("this call of enable() has had its block, or is over by disable(): call enable() again")
        self.entered = True
        return self

    def __exit__(self, *exc: object) -> None:
        self.switch.over(self)


class Switch(ABC):
    """Something that is on while anybody asks for it: from ``enable()`` to ``disable()``, or to the end of a block."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def ask(self, fuse: bool = False) -> Asked:
        """One more that asks for it."""
        self.asked.append(Asked(self, fuse))
        return self.asked[-1]

    def over(self, one: Asked) -> None:
        """One that asks for it no more."""
        if one in self.asked:
            self.asked.remove(one)
            self.settle()

    def disable(self) -> None:
        """Give back what ``enable()`` took the place of, whoever asked for it. Does nothing if it was not called."""
        self.asked.clear()
        self.settle()

    @abstractmethod
    def settle(self) -> None:
        """Give back what nobody asks for."""


class Integration(Switch):
    """Functions of one package and ours in their place: enabled, disabled, or for the time of a ``with`` block.

    Args:
        package: The package's import name.
        distribution: What installs it.
        functions: Its functions' dotted names, and ours.
        adapter: linattn's backend that calls the package, if there is one; it keeps the package's own functions.
    """

    def __init__(
        self,
        package: str,
        distribution: str,
        functions: Mapping[str, Function],
        adapter: str | None = None,
    ) -> None:
        super().__init__()
        self.package = package
        self.distribution = distribution
        self.functions = functions
        self.adapter = adapter

    def enable(self) -> Asked:
        """Let ours take the place of the package's functions, wherever a loaded module holds one. Twice is once.

        Returns:
            A context manager: ``with enable():`` gives back at the end of the block what nobody else has enabled.

        Raises:
            ModuleNotFoundError: The package is not installed.
        """
        importlib.import_module(self.package)
        asked = self.ask()
        if self.adapter is not None:
            with contextlib.suppress(BackendError):  # of an adapter that cannot be loaded nothing can call the package
                registry.load(self.adapter)
        found = {name: _find(name) for name in self.functions}
        ours = {
            id(before): serving(before, self.functions[name], name)
            for name, before in found.items()
            if before is not None and stood_for(before) is None
        }
        for namespace, name, value in globals_of_modules():
            if id(value) in ours:
                namespace[name] = ours[id(value)]
        self._say([name for name, before in found.items() if before is None])
        return asked

    def settle(self) -> None:
        """Give back the package's functions if nobody asks for ours."""
        for namespace, name, value in globals_of_modules() if not self.asked else ():
            stand = stand_of(value)
            if stand is not None and stand.name in self.functions:
                namespace[name] = stand.before

    def _say(self, missing: Sequence[str]) -> None:
        served = [name for name in self.functions if name not in missing]
        version = _version(self.package, self.distribution)
        logger.info("%s %s on linattn: %s", self.package, version, ", ".join(served))
        if missing:
            logger.warning("%s %s has no %s: its callers go where they went before", self.package, version, ", ".join(missing))


def _version(package: str, distribution: str) -> str:
    """A package's version, by its own word where it was not installed as that distribution: as a part of it, or a checkout."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return getattr(sys.modules[package], "__version__", "of an unknown version")


def _find(name: str) -> Any:
    """The object of a dotted name, or ``None`` where its module or the name in it is missing."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None
