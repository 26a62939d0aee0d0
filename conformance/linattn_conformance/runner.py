"""Runs cases against a backend and gives each a status."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from linattn.plugin import Backend
from linattn.registry import registry

from .adapters import Adapter, adapter_for
from .adapters.base import Global, changed
from .calls import Declared, Failure, Run
from .cases import Case
from .checks import CHECKS
from .checks.leak import begin
from .witness import Witness

__all__ = ["STATUSES", "Result", "Runner", "Subject", "resolve"]

LONGEST = 4000
"""Characters of a message; compilers say more."""
STATUSES = ("passed", "failed", "declared-unsupported", "known-failure", "not-run")


@dataclass
class Result:
    """How one case ended.

    Attributes:
        id: The case.
        status: One of :data:`STATUSES`; the runner itself gives the first three.
        error: Largest error as a fraction of its bound; None if nothing was compared.
        seconds: How long it took, the truth included if this case was the first to need it.
        message: Why, unless it passed.
    """

    id: str
    status: str
    error: float | None = None
    seconds: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Subject:
    """What is judged and where, as a report says it.

    Attributes:
        name: The backend's name.
        kind: Its class.
        distribution: What installed it; empty for an object that was registered.
        version: Version of the distribution.
        framework: The framework of the arrays.
        device: Their device.
        memory: Memory of the device in GiB; 0 where it does not matter.
        tighten: Factor on every bound.
        versions: Versions of the framework and, on an accelerator, its driver and device.
    """

    name: str
    kind: str
    distribution: str
    version: str
    framework: str
    device: str
    memory: float
    tighten: float
    versions: dict[str, str] = field(default_factory=dict)

    def applies(self, case: Case) -> bool:
        """True if the case is one for this framework and device."""
        return case.applies(self.framework, self.device, self.memory)


def resolve(backend: str) -> str:
    """The name of a backend; a ``module:Class`` is imported and registered first."""
    if ":" not in backend:
        return backend
    module, _, name = backend.partition(":")
    instance = getattr(importlib.import_module(module), name)()
    registry.register(instance, replace=True)
    return instance.name


def adapter_on(framework: str, device: str) -> Adapter:
    """The adapter of a framework, having seen that there is such a device, and that it holds numbers."""
    try:
        adapter = adapter_for(framework, device)
        adapter.to_float64(adapter.from_float64(np.zeros(1), "float32"))
    except (RuntimeError, AssertionError, IndexError) as error:  # what frameworks raise
        text = str(error).partition("\n")[0]
        raise ValueError(f"no {framework} array can be made on device {device!r}: {text}") from error
    return adapter


class Runner:
    """One backend on one framework and device.

    Args:
        backend: Name of the backend, as the registry knows it.
        framework: Which of its frameworks; the first that the suite has an adapter for, unless given.
        device: Device of the arrays.
        tighten: Factor on every bound, in (0, 1].
    """

    def __init__(self, backend: str, framework: str | None = None, device: str = "cpu", tighten: float = 1.0) -> None:
        if not 0.0 < tighten <= 1.0:
            raise ValueError(f"bounds may be tightened, never widened: tighten must be in (0, 1], got {tighten}")
        self.backend: Backend = registry.load(backend)
        self.framework = framework or self.backend.frameworks[0]
        if self.framework not in self.backend.frameworks:
            raise ValueError(f"backend {backend!r} takes {' and '.join(self.backend.frameworks)} arrays, not {self.framework}")
        self.device, self.tighten = device, tighten
        self.adapter: Adapter = adapter_on(self.framework, device)
        self.witness = Witness(self.backend)

    @property
    def subject(self) -> Subject:
        """What this is."""
        kind = type(self.backend)
        entry_points = registry.record(self.backend.name).entry_points
        dist = entry_points[0].dist if entry_points else None
        return Subject(
            name=self.backend.name,
            kind=f"{kind.__module__}.{kind.__qualname__}",
            distribution=dist.name if dist else "",
            version=dist.version if dist else "",
            framework=self.framework,
            device=self.device,
            memory=round(self.adapter.memory(), 1),
            tighten=self.tighten,
            versions=self.adapter.versions(),
        )

    def applies(self, case: Case) -> bool:
        """True if the case is one for this framework and device."""
        return case.applies(self.framework, self.device, self.adapter.memory())

    def run(self, cases: Iterable[Case]) -> Iterator[Result]:
        """Run cases, in order."""
        with self.watching():
            for case in cases:
                yield self.run_one(case)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The witness is there for the time of a ``with`` block; ``run_one`` needs it."""
        with self.witness.installed():
            yield

    def run_one(self, case: Case) -> Result:
        """Run one case."""
        return self._timed(case, check)

    def ask(self, case: Case) -> Result:
        """Ask whether the backend declares a case unsupported, which takes no time; a case that is to be run passes."""
        return self._timed(case, ask)

    def _timed(self, case: Case, act: Callable[[Run], None]) -> Result:
        started = time.perf_counter()
        run = Run(case, self.adapter, self.backend, self.witness, self.tighten)
        status, message = self._judge(run, act)
        error = run.worst if np.isfinite(run.worst) and run.worst else None
        return Result(case.id, status, error, time.perf_counter() - started, printable(message))

    def _judge(self, run: Run, act: Callable[[Run], None]) -> tuple[str, str]:
        """Status and message; global state is as before, whatever the case did to it."""
        self.adapter.set_up(run.case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = [(held, held.read()) for held in self.adapter.globals()]
            status, message = self._run(run, act)
            found = [self._restore(held, was) for held, was in before if not alike(was, held.read())]
        return ("failed", f"changes the {'; the '.join(found)}") if found and status == "passed" else (status, message)

    def _restore(self, held: Global, was: Any) -> str:
        """Put a piece of global state back; what happened to it, as text."""
        now, name = held.read(), held.name
        held.restore(was)
        if isinstance(was, dict):  # of several, the first
            key = changed(was, now)[0]
            name, was, now = f"{name}: {key}", was.get(key), now.get(key)
        told = f": {was} before, {now} after"
        return f"{name}{told}" if len(told) < 100 else name

    def _run(self, run: Run, act: Callable[[Run], None]) -> tuple[str, str]:
        self.witness.reset()
        try:
            act(run)
        except Declared as declared:
            return "declared-unsupported", str(declared)
        except Failure as failure:
            return "failed", self.witness.complaint_about_others() or str(failure)
        except (Exception, SystemExit) as error:
            return "failed", explained(error)
        return "passed", ""


def ask(run: Run) -> None:
    """Raise ``Declared`` if the backend declares the case unsupported."""
    if run.case.check != "bad-input":
        with watching(run.witness):
            run.ask()


def check(run: Run) -> None:
    """Raise ``Declared``, or ``Failure`` if the backend is wrong or did not run."""
    begin(run)
    ask(run)
    if run.case.check not in ("bad-input", "large", "leak"):
        _ = run.truth  # the suite's own work, before anything is watched
    with watching(run.witness):
        CHECKS[run.case.check](run)
    if run.case.check != "bad-input" and (complaint := run.witness.complaint()):
        raise Failure(complaint)


@contextmanager
def watching(witness: Witness) -> Iterator[None]:
    """The witness looks at the calls of a ``with`` block."""
    witness.watching = True
    try:
        yield
    finally:
        witness.watching = False


def explained(error: BaseException) -> str:
    """An exception and what caused it, where compilers say why."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is one for one in found):
        found.append(cause)
        cause = cause.__cause__
    return "\ncaused by ".join(f"{type(one).__name__}: {said(one)}" for one in found)


def said(error: BaseException) -> str:
    """The text of an exception, which may have none, and its notes."""
    try:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    except Exception as other:
        return f"(its text cannot be had: {type(other).__name__})"


def printable(text: str) -> str:
    """A text of the backend's as a report can hold it: its beginning and its end, and no more than it seems to be."""
    shown = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}\n…\n{text[-LONGEST // 2 :]}"
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in shown)


def alike(a: Any, b: Any) -> bool:
    """Equal, arrays inside tuples included."""
    try:
        return a is b or bool(a == b)
    except (ValueError, RuntimeError):  # arrays: no truth value
        inside = isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b)
        return all(map(alike, a, b)) if inside else bool((a == b).all())
