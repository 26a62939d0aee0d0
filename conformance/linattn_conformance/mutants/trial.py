"""Whether the suite catches faults: its own cases, run against a backend that carries one fault after the other.

Which calls a case makes is recorded once, with no fault. A case none of whose calls can meet a fault's condition is not run for
it: the faulty backend would do there what the right one does. What came before a call, and what is around it, is not recorded:
of facts of these kinds every call is taken to meet them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from linattn.plugin import Backend
from linattn.registry import registry

from .. import calls, manifest, verdict
from ..cases import Case, cost, every_case
from ..memory import installed
from ..runner import Runner
from .backend import Fault, Recorder, carrier, draw_fault
from .frameworks import ARRAYS
from .visible import Shown, show

__all__ = ["WITHOUT_GRADIENTS", "Bench", "Caught", "bench"]


WITHOUT_GRADIENTS = ("core", "inference")
"""Profiles that say nothing about gradients: a fault that shows in these alone is none of theirs."""


@dataclass(frozen=True)
class Caught:
    """What came of a fault.

    Attributes:
        fault: The fault, as text.
        shown: A valid call on which it shows.
        profile: The smallest profile that catches it; empty if none of those tried does.
        case: The first case that caught it, and what it said.
        ran: How many cases were run for it.
        missed: Why no case caught it.
    """

    fault: str
    shown: Shown
    profile: str = ""
    case: str = ""
    ran: int = 0
    missed: str = ""


@dataclass(frozen=True)
class Trace:
    """A case and the calls that it makes."""

    case: Case
    made: list[dict[str, Any]]


class Bench:
    """A right backend, one that carries faults, and what the cases of the suite call.

    Args:
        backend: Name of the right backend.
        profile: The largest profile that is run.

    Attributes:
        drawn: How many faults were drawn for those asked for last, those that no call showed among them.
        left_out: The cases that the right backend fails, and why: they catch nothing.
    """

    def __init__(self, backend: str, profile: str) -> None:
        self.right: Backend = registry.load(backend)
        framework = self.right.frameworks[0]
        if framework not in ARRAYS:
            raise ValueError(f"faults are made for {', '.join(ARRAYS)}, and {backend!r} takes {framework} arrays")
        self.xp = ARRAYS[framework]()
        self.mutant = carrier(self.right)
        registry.register(self.mutant, replace=True)
        self.runner = Runner("mutant")
        self.profile = profile
        self.drawn = 0
        self.left_out: list[str] = []
        self.traces: dict[str, list[Trace]] = {}

    def record(self, track: Callable[[Sequence[Case]], Iterable[Case]] = iter) -> None:
        """Run every case without a fault; ``track`` is told of them, and hands them back one after the other."""
        subject = self.runner.subject
        applicable = manifest.load().applicable(subject.framework, subject.device, subject.memory)
        seen: set[str] = set()
        self.mutant.fault = recorder = Recorder(self.xp)
        for profile in verdict.PROFILES[: verdict.PROFILES.index(self.profile) + 1]:
            wanted = verdict.cases_of(profile, applicable).keys() - seen
            seen |= wanted
            self.traces[profile] = []
            for case in track([case for case in every_case() if case.id in wanted]):
                result = self.runner.run_one(case)
                if result.status == "failed":  # which would catch every fault
                    self.left_out.append(f"{case.id}: {result.message}".partition("\n")[0])
                    recorder.taken()
                    continue
                self.traces[profile].append(Trace(case, recorder.taken()))
        self.mutant.fault = None

    def faults(self, rng: np.random.Generator, count: int, tokens: int) -> Iterator[tuple[Fault, Shown]]:
        """So many faults, each with a valid call on which it shows."""
        found = self.drawn = 0
        while found < count:
            self.drawn += 1
            fault = draw_fault(rng, self.right, self.xp, tokens)
            shown = show(fault, self.right, self.mutant, rng, tokens, self.profile not in WITHOUT_GRADIENTS)
            if shown is not None:
                found += 1
                yield fault, shown

    def tried(self, fault: Fault, shown: Shown) -> Caught:
        """Run the cases that a fault can be seen in, profile by profile, until one of them fails."""
        fault.reset()
        ran = 0
        self.mutant.fault = fault
        try:
            for profile, traces in self.traces.items():
                reached = [trace for trace in traces if any(map(fault.condition.may_hold, trace.made))]
                for trace in sorted(reached, key=lambda trace: cost(trace.case)):
                    ran += 1
                    result = self.runner.run_one(trace.case)
                    if result.status == "failed":
                        told = f"{result.id}: {result.message}".partition("\n")[0]
                        return Caught(str(fault), shown, profile, told, ran)
        finally:
            self.mutant.fault = None
        every = [made for traces in self.traces.values() for trace in traces for made in trace.made]
        return Caught(str(fault), shown, ran=ran, missed=missed(fault, every))


def missed(fault: Fault, made: Sequence[dict[str, Any]]) -> str:
    """Which factor no case has, or that cases had it and saw nothing."""
    condition = fault.condition
    of = [told for told in made if condition.covers(told["op"], told["form"])]
    if not of:
        return "no case calls it"
    for atom in condition.atoms:
        if not atom.past and not any(atom.holds(told.get) for told in of):
            return f"no case has {atom}"
    if not any(map(condition.may_hold, of)):
        return f"no case has all of {' and '.join(map(str, condition.atoms))}"
    effect = fault.effect
    if effect.kind in ("reads", "writes", "gradient") and not any(told.get(f"given {effect.target}", True) for told in of):
        return f"no case has given {effect.target} is True"
    if not fault.struck:
        past = " and ".join(str(atom) for atom in condition.atoms if atom.past)
        return f"no case has {past}" if past else "no case asks for its gradient"
    return f"cases had it, {fault.struck} calls of them, and none saw it"


@contextlib.contextmanager
def bench(backend: str, profile: str, track: Callable[[Sequence[Case]], Iterable[Case]] = iter) -> Iterator[Bench]:
    """A bench for the time of a ``with`` block, its cases recorded; ``track`` is told of them."""
    made = Bench(backend, profile)
    before = calls.MOST_KEPT, calls.ROOM
    calls.MOST_KEPT, calls.ROOM = 10**6, installed() // 4  # every fault meets the same truths
    try:
        with made.runner.watching():
            made.record(track)
            yield made
    finally:
        calls.MOST_KEPT, calls.ROOM = before
        registry.unregister("mutant")
