"""Faults that reach beyond the case that shows them: a process that hangs, ends, prints or is not as it was before.

Each strikes at sequences of :data:`STRIKES` tokens only, so that it can be seen that the other cases go on.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
import time
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from .base import Simple

__all__ = ["FAULTS", "OnProcess"]

Arrays = dict[str, Any]
STRIKES = 97
EMPTY = "gla/chunk/fp32/plain/T0-K24-V40/forward"


class OnProcess(Simple):
    """The oracle, which does something else as well."""

    isolated: ClassVar[bool] = True

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        if arrays["v"].shape[1] == STRIKES:
            self.strike()
        return super().forward(op, arrays, options)

    def strike(self) -> None:
        raise NotImplementedError


class Hangs(OnProcess):
    """Waits for ever."""

    name = "hangs"
    time_limit: ClassVar[float] = 5.0

    def strike(self) -> None:
        while True:
            time.sleep(60.0)


class Crashes(OnProcess):
    """Reads memory that is not there."""

    name = "crashes"

    def strike(self) -> None:
        ctypes.string_at(0)


class EndsTheProcess(OnProcess):
    """Calls ``os._exit``, with the status of success."""

    name = "ends-the-process"

    def strike(self) -> None:
        os._exit(0)


class Exits(OnProcess):
    """Calls ``sys.exit``."""

    name = "exits"

    def strike(self) -> None:
        sys.exit(3)


class Interrupts(OnProcess):
    """Raises what no handler of exceptions catches."""

    name = "interrupts"

    def strike(self) -> None:
        raise KeyboardInterrupt


class Prints(OnProcess):
    """Prints to standard output."""

    name = "prints"

    def strike(self) -> None:
        print("autotuning chunk_gla ...")


class PrintsNatively(OnProcess):
    """Writes to standard output past Python."""

    name = "prints-natively"

    def strike(self) -> None:
        os.write(1, b"\xff\x00 garbage\n")


class ChangesErrorHandling(OnProcess):
    """Tells NumPy to raise where a division by zero gave infinity."""

    name = "changes-error-handling"
    isolated = False

    def strike(self) -> None:
        np.seterr(divide="raise")


class DrawsFromGlobalState(OnProcess):
    """Draws from NumPy's global random state."""

    name = "draws-from-global-state"
    isolated = False

    def strike(self) -> None:
        np.random.random()


class ChangesEnvironment(OnProcess):
    """Sets an environment variable, and leaves it so."""

    name = "changes-environment"
    isolated = False

    def strike(self) -> None:
        os.environ["ACME_PRECISION"] = "low"


class Grows(OnProcess):
    """Takes memory until there is none."""

    name = "grows"

    def strike(self) -> None:
        kept = []
        while True:
            kept.append(np.ones(2**20))
            time.sleep(0.001)


class AgainstTheSuite(Simple):
    """Returns zeros, and changes what would find that out."""

    isolated: ClassVar[bool] = True

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        self.strike()
        o, state = super().forward(op, arrays, options)
        return 0.0 * o, 0.0 * state

    def strike(self) -> None:
        raise NotImplementedError


class PatchesTheDistance(AgainstTheSuite):
    """Returns zeros, and has the suite's distance be zero in its process."""

    name = "patches-the-distance"

    def strike(self) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("linattn_conformance") and hasattr(module, "distance"):
                module.distance = lambda *_: 0.0  # type: ignore[attr-defined]


class PatchesTheChecks(AgainstTheSuite):
    """Returns zeros, and has the suite compare nothing in its process."""

    name = "patches-the-checks"

    def strike(self) -> None:
        from ..calls import Run

        Run.compare = Run.note = Run.near = lambda *_, **__: None  # type: ignore[assignment, method-assign]


class PatchesTheBounds(AgainstTheSuite):
    """Returns zeros, and makes every bound infinite in its process."""

    name = "patches-the-bounds"

    def strike(self) -> None:
        from .. import bounds

        bounds.ROW = bounds.OVERALL = float("inf")


class ClaimsBoundsOfItsOwn(AgainstTheSuite):
    """Returns zeros, and claims that the noise is as large as can be."""

    name = "claims-bounds-of-its-own"

    def strike(self) -> None:
        from .. import calls

        if calls.claimed.__name__ != "forged":
            claimed = calls.claimed

            def forged(claim: Any) -> None:
                claimed(replace(claim, noise=np.full(claim.noise.shape, 1e30)))

            calls.claimed = forged


class ClaimsOfAnotherCase(AgainstTheSuite):
    """Returns zeros, and has them held against what is true of a case without tokens."""

    name = "claims-of-another-case"

    def strike(self) -> None:
        from .. import calls
        from ..cases import named

        if calls.claimed.__name__ != "forged":
            claimed = calls.claimed
            empty = calls.truth(named(EMPTY), None).outputs  # type: ignore[arg-type]

            def forged(claim: Any) -> None:
                other = empty[claim.value.place[2]]
                claimed(replace(claim, got=np.zeros(other.value.shape), value=other.value, noise=other.noise))

            calls.claimed = forged


class Leaks(Simple):
    """Keeps every result."""

    name = "leaks"
    isolated: ClassVar[bool] = True
    kept: ClassVar[list[Any]] = []

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        found = super().forward(op, arrays, options)
        self.kept.append(found[0].astype(np.float32))
        return found


class LeaksFiles(Simple):
    """Opens a file in every call, and closes none."""

    name = "leaks-files"
    isolated: ClassVar[bool] = True
    kept: ClassVar[list[int]] = []

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        self.kept.append(os.open(os.devnull, os.O_RDONLY))
        return super().forward(op, arrays, options)


FAULTS = tuple(
    kind
    for kind in list(globals().values())
    if inspect.isclass(kind) and issubclass(kind, Simple) and kind not in (Simple, OnProcess, AgainstTheSuite)
)
"""Every fault that needs a process of its own."""
