"""Whether the suite catches faults: its own cases, run against a backend that carries one fault after the other.

Which calls a case makes is recorded once, with no fault, when the first fault of its family comes to it. A case none of whose
calls can meet a fault's condition is not run for it: the faulty backend would do there what the right one does. What came
before a call, and what is around it, is not recorded: of facts of these kinds every call is taken to meet them.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from linattn.plugin import Backend
from linattn.registry import registry

from .. import calls, manifest, verdict
from ..cases import Case, cost, every_case, is_of, problem
from ..fresh import fresh_cases
from ..memory import installed
from ..runner import Runner
from .backend import Fault, Recorder, carrier, draw_fault
from .conditions import Atom
from .frameworks import ARRAYS
from .visible import Shown, show

__all__ = ["WITHOUT_GRADIENTS", "Bench", "Caught", "Reach", "Tried", "bench", "judged", "profiles_to"]

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
class Reach:
    """How far the calls of some cases came into a fault.

    Attributes:
        called: Some call the method that has it.
        atoms: Those of its facts that some such call has, or that rest on more than a call itself.
        together: Some call has all of them.
        given: Some such call has the array that the effect is on.
        struck: How often it struck.
    """

    called: bool = False
    atoms: frozenset[Atom] = frozenset()
    together: bool = False
    given: bool = False
    struck: int = 0

    def __or__(self, other: Reach) -> Reach:
        return Reach(
            self.called or other.called,
            self.atoms | other.atoms,
            self.together or other.together,
            self.given or other.given,
            self.struck + other.struck,
        )


@dataclass(frozen=True)
class Tried:
    """What came of running the cases of a profile for a fault.

    Attributes:
        ran: How many were run.
        case: The first that failed, and what it said; empty if none did.
        reach: How far they came into the fault.
        left_out: The cases that the right backend fails, and why: they catch nothing.
    """

    ran: int = 0
    case: str = ""
    reach: Reach = Reach()
    left_out: frozenset[str] = frozenset()

    def __or__(self, other: Tried) -> Tried:
        left_out = self.left_out | other.left_out
        return Tried(self.ran + other.ran, self.case or other.case, self.reach | other.reach, left_out)


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
        seed: Of the fresh cases that are run beside those of the manifest.
        share: Of how many benches this is which: it has the cases of some problems, and the others those of the rest.

    Attributes:
        drawn: How many faults were drawn for those asked for last, those that no call showed among them.
        left_out: The cases that the right backend fails, and why, as far as they were come to.
    """

    def __init__(self, backend: str, profile: str, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        self.right: Backend = registry.load(backend)
        framework = self.right.frameworks[0]
        if framework not in ARRAYS:
            raise ValueError(f"faults are made for {', '.join(ARRAYS)}, and {backend!r} takes {framework} arrays")
        self.xp = ARRAYS[framework]()
        self.mutant = carrier(self.right)
        registry.register(self.mutant, replace=True)
        self.runner = Runner("mutant")
        self.profile, self.seed, self.share = profile, seed, share
        self.drawn = 0
        self.left_out: frozenset[str] = frozenset()
        self.cases: dict[str, list[Case]] = {}
        self.track: Callable[[Sequence[Case]], Iterable[Case]] = iter
        self.traces: dict[tuple[str, str], list[Trace]] = {}  # of one family: those of all would fill the memory

    def record(self, track: Callable[[Sequence[Case]], Iterable[Case]] = iter) -> None:
        """Say which cases there are; ``track`` is told of those that are run without a fault, and hands them back in turn."""
        self.track = track
        subject = self.runner.subject
        applicable = manifest.load().applicable(subject.framework, subject.device, subject.memory)
        seen: set[str] = set()
        for profile in profiles_to(self.profile):
            wanted = verdict.cases_of(profile, applicable).keys()
            cases = [case for case in every_case() if case.id in wanted]
            cases += [case for case in self.fresh(profile) if subject.applies(case)]
            self.cases[profile] = [case for case in cases if case.id not in seen and self.has(case)]
            seen |= {case.id for case in self.cases[profile]}

    def traced(self, profile: str, op: str) -> list[Trace]:
        """The cases of a family in a profile, and their calls; those that the right backend fails are left out."""
        if (profile, op) not in self.traces:
            self.traces = {key: traces for key, traces in self.traces.items() if key[1] == op}
            self.mutant.fault = recorder = Recorder(self.xp)
            found = self.traces[profile, op] = []
            for case in self.track([case for case in self.cases[profile] if case.op == op]):
                result = self.runner.run_one(case)
                made = recorder.taken()
                if result.status == "failed":  # which would catch every fault
                    self.left_out |= {f"{case.id}: {result.message}".partition("\n")[0]}
                else:
                    found.append(Trace(case, made))
            self.mutant.fault = None
        return self.traces[profile, op]

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

    def fresh(self, profile: str) -> list[Case]:
        """The fresh cases of a profile; but for those of the core they are the first of the largest one's."""
        found = fresh_cases(self.seed, "core" if profile == "core" else self.profile)
        gradients = profile in WITHOUT_GRADIENTS
        return [case for case in found if is_of(profile, case.within) and not (gradients and case.needs_gradient)]

    def has(self, case: Case) -> bool:
        """Whether a case is of the share of this bench; all cases on the same data are."""
        place, count = self.share
        return zlib.crc32(repr(problem(case)).encode()) % count == place

    def tried(self, fault: Fault, profile: str, ends: Callable[[], bool] = lambda: False) -> Tried:
        """Run the cases of a profile that a fault can be seen in until one of them fails, or something else ``ends`` it."""
        every = self.traced(profile, fault.condition.op)
        fault.reset()
        ran, told = 0, ""
        traces = [trace for trace in every if any(map(fault.condition.may_hold, trace.made))]
        self.mutant.fault = fault
        try:
            for trace in sorted(traces, key=lambda trace: cost(trace.case)):
                if told or ends():
                    break
                ran += 1
                result = self.runner.run_one(trace.case)
                told = f"{result.id}: {result.message}".partition("\n")[0] if result.status == "failed" else ""
        finally:
            self.mutant.fault = None
        return Tried(ran, told, reach(fault, [made for trace in every for made in trace.made]), self.left_out)


def profiles_to(profile: str) -> tuple[str, ...]:
    """The profiles up to one."""
    return verdict.PROFILES[: verdict.PROFILES.index(profile) + 1]


def judged(fault: Fault, shown: Shown, profiles: Sequence[str], tried: Callable[[Fault, str], Tried]) -> Caught:
    """What comes of a fault: it is ``tried`` profile by profile until it is caught."""
    found = Tried()
    for profile in profiles:
        found |= tried(fault, profile)
        if found.case:
            return Caught(str(fault), shown, profile, found.case, found.ran)
    return Caught(str(fault), shown, ran=found.ran, missed=missed(fault, found.reach))


def reach(fault: Fault, made: Sequence[dict[str, Any]]) -> Reach:
    """How far calls of these facts come into a fault that has just been tried on them."""
    condition, effect = fault.condition, fault.effect
    of = [told for told in made if condition.covers(told["op"], told["form"])]
    on_array = effect.kind in ("reads", "writes", "gradient")
    return Reach(
        called=bool(of),
        atoms=frozenset(atom for atom in condition.atoms if atom.past or any(atom.holds(told.get) for told in of)),
        together=any(map(condition.may_hold, of)),
        given=any(not on_array or told.get(f"given {effect.target}", True) for told in of),
        struck=fault.struck,
    )


def missed(fault: Fault, reach: Reach) -> str:
    """Which factor no case has, or that cases had it and saw nothing."""
    atoms = fault.condition.atoms
    if not reach.called:
        return "no case calls it"
    for atom in atoms:
        if atom not in reach.atoms:
            return f"no case has {atom}"
    if not reach.together:
        return f"no case has all of {' and '.join(map(str, atoms))}"
    if not reach.given:
        return f"no case has given {fault.effect.target} is True"
    if not reach.struck:
        past = " and ".join(str(atom) for atom in atoms if atom.past)
        return f"no case has {past}" if past else "no case asks for its gradient"
    return f"cases had it, {reach.struck} calls of them, and none saw it"


@contextlib.contextmanager
def bench(
    backend: str,
    profile: str,
    seed: int,
    track: Callable[[Sequence[Case]], Iterable[Case]] = iter,
    share: tuple[int, int] = (0, 1),
) -> Iterator[Bench]:
    """A bench for the time of a ``with`` block; ``track`` is told of the cases that are recorded."""
    made = Bench(backend, profile, seed, share)
    before = calls.MOST_KEPT, calls.ROOM
    calls.MOST_KEPT, calls.ROOM = 10**6, installed() // 4 // share[1]  # every fault meets the same truths
    try:
        with made.runner.watching():
            made.record(track)
            yield made
    finally:
        calls.MOST_KEPT, calls.ROOM = before
        registry.unregister("mutant")
