"""Finds backends, loads the one that is asked for, and checks it against the plug-in contract.

Entry points are enumerated with ``importlib.metadata`` (always fresh, and each knows its distribution) and loaded by
stevedore. A plug-in that fails stays in the list with its error: it never breaks the others.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .call import FORMS
from .errors import (
    BackendConflict,
    BackendContractError,
    BackendError,
    BackendLoadError,
    BackendVersionError,
    UnknownBackend,
)
from .frameworks import KNOWN
from .plugin import API_VERSION, Backend
from .spec import COMPANIONS, DECODING, FAMILIES, SUMMARIES, OpSpec
from .suggestions import closest

if TYPE_CHECKING:  # importing it takes as long as the rest of linattn, and only discovery needs it
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "Registry", "check_contract", "register_backend", "registry", "told", "unregister_backend"]

GROUP = "linattn.backends"
_NAME = re.compile(r"(?!auto$)[a-z0-9][a-z0-9_-]*")


@dataclass
class Record:
    """What is known about one backend name.

    Attributes:
        name: The backend's name.
        entry_points: Where it was found; more than one is a conflict, none means ``register_backend``.
        error: Why it cannot be used, once that is known.
    """

    name: str
    entry_points: list[EntryPoint] = field(default_factory=lambda: [])
    error: BackendError | None = None

    @property
    def origin(self) -> str:
        """The distribution it comes from, for people."""
        if not self.entry_points:
            return "register_backend"
        return " and ".join(sorted({_distribution(ep) for ep in self.claims}))

    @property
    def built_in(self) -> bool:
        """True for a backend that ships with linattn."""
        return any(_is_built_in(ep) for ep in self.entry_points)

    @functools.cached_property  # distributions parse what they know of themselves whenever they are asked
    def claims(self) -> list[EntryPoint]:
        """The entry points that count: a package that claims the name of a built-in backend does not disturb it."""
        return [ep for ep in self.entry_points if _is_built_in(ep)] or self.entry_points

    @property
    def passed_over(self) -> str:
        """The distributions that claim the name of a built-in backend in vain, for people; mostly none."""
        return " and ".join(sorted({_distribution(ep) for ep in self.entry_points if ep not in self.claims}))


class Registry:
    """The backends of this process. ``linattn.registry.registry`` is the one that dispatch uses.

    Threads may use it while others change it: a change puts a new dictionary in the place of the old one, under a lock, so that
    whoever is going through the old one comes to its end.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.loaded: dict[str, Backend] = {}
        """Backends by name, once loaded or registered."""
        self._records: dict[str, Record] | None = None
        self._built_in: tuple[type[Backend], ...] | None = None
        self._changing = threading.RLock()

    @property
    def records(self) -> dict[str, Record]:
        """Every known backend by name; discovered on first use."""
        found = self._records
        if found is None:
            with self._changing:
                found = self._records  # another thread may have been here, and registered a backend since
                if found is None:
                    found = self._records = _discover()
        return found

    @property
    def built_in(self) -> tuple[type[Backend], ...]:
        """What the distribution ``linattn`` registers, in its order. Looking at these classes imports no framework."""
        if self._built_in is None:
            self._built_in = _built_in(_discover())
        return self._built_in

    def order(self, framework: str) -> Iterator[str]:
        """What auto tries for arrays of a framework: the built-in backends that take them, then the others by name.

        So installing a package never changes a call that worked.
        """
        ours = {kind.name: kind for kind in self.built_in}
        yield from (name for name, kind in ours.items() if framework in kind.frameworks and name in self.records)
        yield from sorted(name for name, record in self.records.items() if name not in ours and not record.built_in)

    def refresh(self) -> None:
        """Forget what was discovered and loaded, registered objects included; the next use looks again."""
        with self._changing:
            self._records = self._built_in = None
            self._changed({})

    def register(self, backend: Backend | type[Backend], *, replace: bool = False) -> None:
        """Make a backend known without an entry point; see :func:`linattn.register_backend`."""
        instance = backend() if isinstance(backend, type) else backend
        check_contract(instance)
        name = instance.name
        with self._changing:
            if name in self.records and not replace:
                taken = self.records[name].origin
                raise BackendConflict(f"backend {name!r} is already provided by {taken}; pass replace=True to replace it")
            self._records = {**self.records, name: Record(name)}
            self._changed({**self.loaded, name: instance})

    def unregister(self, name: str) -> None:
        """Drop a backend that ``register`` added; what an entry point provides under that name comes back."""
        with self._changing:
            record = self.record(name)
            if record.entry_points:
                raise BackendError(
                    f"backend {name!r} is provided by {record.origin}, not by register_backend: uninstall it instead"
                )
            others = {other: found for other, found in self.records.items() if other != name}
            found = _discover()
            self._records = others | ({name: found[name]} if name in found else {})
            self._changed({other: backend for other, backend in self.loaded.items() if other != name})

    def touch(self) -> None:
        """Have every decision made again: the methods of backends are others than they were."""
        with self._changing:
            self._changed(self.loaded)

    def _changed(self, loaded: dict[str, Backend]) -> None:
        self.loaded = loaded
        self.generation += 1

    def record(self, name: str) -> Record:
        """What is known about ``name``; ``UnknownBackend`` with close matches if nothing is."""
        records = self.records
        if name not in records:
            close = closest(name, records)
            hint = f"did you mean {close!r}? " if close else ""
            raise UnknownBackend(f"unknown backend {name!r}: {hint}known are {', '.join(sorted(records))}")
        return records[name]

    def load(self, name: str) -> Backend:
        """The backend of that name, imported on first use. The error that made it unusable is raised every time."""
        with self._changing:
            record, loaded = self.record(name), self.loaded
        if len(record.claims) > 1:
            raise BackendConflict(
                f"backend {name!r} is claimed by {record.origin}: uninstall one of them, or register the one you want with "
                "linattn.register_backend(..., replace=True)"
            )
        if name not in loaded and record.error is None:
            try:
                made = _load(name, record.claims[0])
            except BackendError as error:
                record.error = error
                if isinstance(error, BackendLoadError) and not record.built_in:
                    _say_once(f"linattn: {error}")
            else:
                return loaded.setdefault(name, made)  # two threads that load at once end with one object
        if record.error is not None:
            raise record.error
        return loaded[name]


def _say_once(text: str) -> None:
    """Warn. Where warnings are errors, it is written down instead: a plug-in that nobody asked for breaks no call."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        print(text, file=sys.stderr)


def told(error: BaseException) -> str:
    """An exception of somebody else's code on one line, even one whose text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as other:
        return f"{type(error).__name__} (its text cannot be had: {type(other).__name__})"


def _discover() -> dict[str, Record]:
    """Group entry points by name, whatever their order; an editable install may list one twice."""
    from importlib.metadata import entry_points

    records: dict[str, Record] = {}
    for ep in entry_points(group=GROUP):
        found = records.setdefault(ep.name, Record(ep.name)).entry_points
        if (_distribution(ep), ep.value) not in {(_distribution(other), other.value) for other in found}:
            found.append(ep)
    return records


def _built_in(records: dict[str, Record]) -> tuple[type[Backend], ...]:
    """The classes of the built-in backends in the order of their module's ``__all__``: tools that build distributions sort
    entry points."""
    ours = [ep for record in records.values() for ep in record.entry_points if _is_built_in(ep)]
    places = {ep: (ep.module, import_module(ep.module).__all__.index(ep.attr)) for ep in ours}
    return tuple(ep.load() for ep in sorted(ours, key=places.__getitem__))


def _is_built_in(ep: EntryPoint) -> bool:
    return ep.dist is not None and ep.dist.name == "linattn"


def _distribution(ep: EntryPoint) -> str:
    return "an unknown distribution" if ep.dist is None else f"{ep.dist.name} {ep.dist.version}"


def _load(name: str, ep: EntryPoint) -> Backend:
    _refuse_other_versions(ep)
    backend = _import(ep)
    try:
        check_contract(backend)
    except BackendError:
        raise
    except Exception as failure:  # what a property of it raises
        raise _failed(ep, failure) from failure
    if backend.name != name:
        raise BackendContractError(
            f"entry point {name!r} of {_distribution(ep)} gives a backend named {backend.name!r}: expected the same name"
        )
    return backend


def _refuse_other_versions(ep: EntryPoint) -> None:
    """A distribution's requirement on linattn is its API specifier, and can be read before anything is imported."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for text in (ep.dist.requires if ep.dist is not None else None) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # another tool's spelling; the class's own specifier is checked after the import
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if (
            canonicalize_name(requirement.name) == "linattn"
            and applies
            and not requirement.specifier.contains(API_VERSION, prereleases=True)
        ):
            raise BackendVersionError(
                f"backend {ep.name!r} of {_distribution(ep)} requires linattn {requirement.specifier}, and this is API "
                f"{API_VERSION}: it was not imported; install a version of it built for this API"
            )


def _import(ep: EntryPoint) -> Backend:
    """Let stevedore import and create the one chosen plug-in; report what went wrong as this plug-in's error."""
    from stevedore.extension import ExtensionManager

    class OneEntryPoint(ExtensionManager[Any]):
        # stevedore's own listing may come from a stale disk cache
        def list_entry_points(self) -> list[EntryPoint]:
            return [ep]

    failures: list[BaseException] = []

    def note(manager: Any, entry_point: Any, failure: BaseException) -> None:
        failures.append(failure)

    manager: Any = None
    try:
        manager = OneEntryPoint(GROUP, invoke_on_load=True, on_load_failure_callback=note)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # stevedore lets these through: SystemExit, AssertionError, a panic in Rust
        failures.append(failure)
    if failures:
        (failure,) = failures
        missing = str(failure.name).partition(".")[0] if isinstance(failure, ModuleNotFoundError) else None
        if missing and _is_built_in(ep) and not missing.startswith("linattn"):
            raise BackendLoadError(f"needs the package {missing}: pip install 'linattn[{ep.name}]'") from failure
        raise _failed(ep, failure) from failure
    return manager[ep.name].obj


def _failed(ep: EntryPoint, failure: BaseException) -> BackendLoadError:
    return BackendLoadError(f"backend {ep.name!r} of {_distribution(ep)} failed to load: {told(failure)}")


def check_contract(backend: Backend) -> None:
    """Check a backend object against the plug-in contract.

    Raises:
        BackendContractError: An attribute is missing or wrong, a method is of no known operator, or a signature differs from
            the spec; expected and found stand side by side.
        BackendVersionError: Its ``api`` specifier does not admit this API version.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    if not isinstance(backend, Backend):  # pyright: ignore[reportUnnecessaryIsInstance] - plug-ins may return anything
        raise BackendContractError(f"expected an instance of linattn.plugin.Backend, got {type(backend).__qualname__}")
    kind = type(backend).__qualname__
    for attribute in ("name", "api", "frameworks"):
        if not hasattr(backend, attribute):
            raise BackendContractError(f"{kind} must define {attribute}")
    if not isinstance(backend.name, str) or not _NAME.fullmatch(backend.name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BackendContractError(
            f"{kind}.name must be lower case letters, digits, '_' and '-', and not 'auto', got {backend.name!r}"
        )
    known = isinstance(backend.frameworks, tuple) and all(name in KNOWN for name in backend.frameworks)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not known or not backend.frameworks:
        raise BackendContractError(
            f"{kind}.frameworks must be a tuple of names among {', '.join(KNOWN)}, got {backend.frameworks!r}"
        )
    try:
        specifier = SpecifierSet(backend.api)
    except (InvalidSpecifier, TypeError, AttributeError):
        raise BackendContractError(f"{kind}.api must be a version specifier such as '>=1,<2', got {backend.api!r}") from None
    if not specifier.contains(API_VERSION, prereleases=True):
        raise BackendVersionError(f"backend {backend.name!r} is for plug-in API {backend.api}, and this is API {API_VERSION}")
    _check_methods(backend)


def _check_methods(backend: Backend) -> None:
    known = {f"{form}_{op}": spec for op, spec in FAMILIES.items() for form in FORMS}
    known |= {f"decode_{op}": spec for op, spec in DECODING.items()} | COMPANIONS
    known |= {f"summary_{op}": spec for op, spec in SUMMARIES.items()}
    prefixes = tuple(f"{form}_" for form in (*FORMS, "decode", "summary"))
    names = [name for name in dir(backend) if name in COMPANIONS or name.startswith(prefixes)]
    kind = type(backend).__qualname__
    if not names:
        raise BackendContractError(f"{kind} defines no operator: it needs at least one method such as chunk_gla")
    for name in names:
        if name not in known:
            close = closest(name, known)
            hint = f", did you mean {close}?" if close else ""
            raise BackendContractError(f"{kind}.{name} is no operator of API {API_VERSION}{hint}")
        _check_signature(f"{kind}.{name}", getattr(backend, name), known[name])


def _check_signature(where: str, method: Any, spec: OpSpec) -> None:
    try:
        found = inspect.signature(method)
    except (TypeError, ValueError) as error:
        raise BackendContractError(f"{where} must be a method with a signature: {error}") from None
    positional = [arg.name for arg in spec.args]
    parameters = found.parameters.values()
    given = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise BackendContractError(f"{where} must name the arguments that it takes, not collect them: {_with_self(found)}")
    if given == positional and keywords <= set(spec.keywords) and keywords >= set(spec.required_keywords):
        return
    optional = {arg.name for arg in spec.args if arg.optional}
    wanted = ", ".join([f"{name}=None" if name in optional else name for name in positional] + ["*", *spec.keywords])
    raise BackendContractError(
        f"{where} does not match the spec\n  expected: (self, {wanted})\n  found:    {_with_self(found)}"
    )


def _with_self(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    inner = str(signature.replace(parameters=bare, return_annotation=signature.empty))[1:-1]
    return f"(self, {inner})" if inner else "(self)"


registry = Registry()
"""The backends that dispatch uses."""


def register_backend(backend: Backend | type[Backend], *, replace: bool = False) -> None:
    """Make a backend known to this process without an entry point.

    Args:
        backend: An instance of a :class:`linattn.plugin.Backend` subclass, or the subclass itself.
        replace: Take over a name that is already provided. Default False.

    Raises:
        BackendContractError: The class does not meet the plug-in contract; expected and found stand side by side.
        BackendVersionError: It is for another version of the plug-in API.
        BackendConflict: The name is taken and ``replace`` is False.
    """
    registry.register(backend, replace=replace)


def unregister_backend(name: str) -> None:
    """Forget a backend that :func:`register_backend` added.

    Args:
        name: The backend's name.

    Raises:
        UnknownBackend: No backend has this name.
        BackendError: It comes from an installed distribution.
    """
    registry.unregister(name)
