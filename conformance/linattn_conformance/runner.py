"""Runs cases against a backend and gives each a status."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from linattn.plugin import Backend
from linattn.registry import registry

from .adapters import Adapter, adapter_for
from .calls import Declared, Failure, Run
from .cases import Case
from .checks import CHECKS
from .witness import Witness

__all__ = ["STATUSES", "Result", "Runner"]

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
        self.adapter: Adapter = adapter_for(self.framework, device)
        self.device, self.tighten = device, tighten
        self.witness = Witness(self.backend)

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
        started = time.perf_counter()
        run = Run(case, self.adapter, self.backend, self.witness, self.tighten)
        status, message = self._judge(run)
        error = run.worst if np.isfinite(run.worst) and run.worst else None
        return Result(case.id, status, error, time.perf_counter() - started, message)

    def _judge(self, run: Run) -> tuple[str, str]:
        try:
            if run.case.check != "bad-input":
                _ = run.truth if run.case.check != "large" else None  # the suite's own work, before anything is watched
            self.witness.reset()
            self.witness.watching = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                CHECKS[run.case.check](run)
        except Declared as declared:
            return "declared-unsupported", str(declared)
        except Failure as failure:
            return "failed", self.witness.complaint_about_others() or str(failure)
        except Exception as error:
            return "failed", f"{type(error).__name__}: {error}"
        finally:
            self.witness.watching = False
        complaint = None if run.case.check == "bad-input" else self.witness.complaint()
        return ("failed", complaint) if complaint else ("passed", "")
