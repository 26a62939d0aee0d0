"""The judge: it draws the data of a case, works out its truth, and holds what comes back against it, far from the backend."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .bounds import Quantity, Truth, distance
from .calls import Differs, Run, drawn, key, truth
from .cases import Case
from .runner import Result
from .sealed import Claim, Sealed, opened

__all__ = ["Judge"]

SILENT = frozenset({"bad-input", "leak", "leak-backward", "repeat-backward", "fake", "eval-shape", "keeps"})
"""Checks that compare nothing with the truth."""
SAID = ("passed", "failed", "declared-unsupported")
"""The statuses that a backend's process gives."""
FALLS_BACK = "falls back: "


class Paper:
    """What data and truth need of a framework's adapter: arrays rounded to a dtype, as values."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device

    def from_float64(self, x: NDArray[Any], dtype: str) -> NDArray[Any]:
        """The values that an array of this dtype has."""
        with np.errstate(over="ignore"):
            if dtype == "bfloat16":
                return bfloat16(np.asarray(x, np.float64))
            made = np.array(x, dtype=dtype)
        return made.astype(np.float64) if made.dtype.kind == "f" else made

    def to_float64(self, x: NDArray[Any]) -> NDArray[Any]:
        """The values."""
        return x


def bfloat16(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rounded to eight bits of significand, to even where both are as near."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isfinite(x), rounded, x).astype(np.float64).reshape(np.shape(x))


class Judge:
    """Judges the cases of one subject.

    Args:
        framework: The framework of its arrays.
        device: Their device.
        tighten: Factor on every bound.
    """

    groups: ClassVar[tuple[str, ...]] = ("outputs", "gradients")

    def __init__(self, framework: str, device: str, tighten: float) -> None:
        self.paper: Any = Paper(framework, device)
        self.tighten = tighten
        self.truths: dict[int, Truth] = {}
        self.truths_before: dict[int, Truth] = {}
        self.numbers: dict[Any, int] = {}

    def begin(self, case: Case) -> None:
        """A case is to be judged, by truths that are asked for from now on or were while the case before was."""
        self.truths_before, self.truths = self.truths, {}
        self.case, self.worst, self.wrong, self.began = case, 0.0, "", time.perf_counter()
        self.shown: set[tuple[str, str]] = set()
        self.claims = 0

    def drawn(self, case: Case) -> Any:
        """The inputs of a case as rounded to their dtypes."""
        return drawn(case, self.paper)

    def truth(self, case: Case) -> Truth:
        """The truth of a case, sealed, but for the gradients that go in."""
        found = truth(case, self.paper)
        number = self.numbers.setdefault(key("truth", case), len(self.numbers))
        self.truths[number] = found
        sealed = {
            group: {name: self._sealed(number, group, name, quantity) for name, quantity in getattr(found, group).items()}
            for group in self.groups
        }
        return Truth(sealed["outputs"], sealed["gradients"], found.cotangents)

    def _sealed(self, number: int, group: str, name: str, quantity: Quantity) -> Quantity:
        value, noise = (Sealed((number, group, name, part), np.shape(getattr(quantity, part))) for part in ("value", "noise"))
        return Quantity(value, noise, quantity.dtype)  # type: ignore[arg-type]

    def hear(self, claim: Claim) -> None:
        """Hold a claim against the truth; the first that does not hold is what the case failed of."""
        self.claims += 1
        try:
            if complaint := claim.complaint:
                raise ValueError(complaint)
            if claim.dtype != self._quantity(claim.noise.place).dtype:
                raise ValueError("its dtype is not that of the truth")
            if claim.whole and claim.whole[0] == self.numbers.get(key("truth", self.case)):
                self.shown.add(claim.whole[1:])
            value, noise = (opened(x, self._value) for x in (claim.value, claim.noise))
            ratio = distance(np.asarray(claim.got), Quantity(value, noise, claim.dtype), claim.rows)
            self.worst = max(self.worst, Run.judged(claim.name, ratio, self.tighten))
        except Differs as failure:
            self.worst = max(self.worst, failure.ratio)
            self.wrong = self.wrong or str(failure)
        except Exception as error:  # what no check of the suite claims
            self.wrong = self.wrong or f"what is claimed cannot be judged: {type(error).__name__}: {error}"

    def _value(self, place: tuple[int, str, str, str]) -> Any:
        return getattr(self._quantity(place), place[3])

    def _quantity(self, place: tuple[int, str, str, str]) -> Quantity:
        number, group, name, _ = place
        return getattr(self.truths.get(number) or self.truths_before[number], group)[name]

    def asked(self, told: Result) -> Result:
        """The result of a case that was asked about."""
        status = told.status if told.status in SAID else "failed"
        return Result(self.case.id, status, None, time.perf_counter() - self.began, str(told.message))

    def end(self, told: Result) -> Result:
        """The result of a case that was run, from what the backend's process says of it."""
        error = self.worst if np.isfinite(self.worst) and self.worst else None
        asked = self.asked(told)
        status, message = asked.status, asked.message
        if self.wrong and status in ("passed", "failed") and not message.startswith(FALLS_BACK):
            status, message = "failed", self.wrong
        elif status == "passed" and (missing := self._missing()):
            status, message = "failed", f"nothing was compared: no result came for {missing}"
        return Result(self.case.id, status, error if status in ("passed", "failed") else None, asked.seconds, message)

    def _missing(self) -> str:
        """What a case that passed must have shown, and has not."""
        if self.case.check in SILENT:
            return ""
        if not self.claims and self.case.size.get("T") != 0:  # two calls without tokens need not be held together
            return "any comparison"
        if self.case.check not in ("forward", "gradient"):
            return ""
        found = truth(self.case, self.paper)
        wanted = {("outputs", name) for name in found.outputs}
        if self.case.check == "gradient":
            run = Run(self.case, self.paper, None, None)  # type: ignore[arg-type]
            wanted |= {("gradients", name) for name in found.gradients if not run.is_constant(name)}
        return ", ".join(sorted(name for _, name in wanted - self.shown))
