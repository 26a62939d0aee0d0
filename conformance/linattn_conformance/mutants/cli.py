"""``linattn conformance-mutants``: the share of generated faults that the suite catches, and those that it misses."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
import typer
from linattn.errors import LinattnError
from linattn.progress import bars
from linattn.registry import registry

from ..cases import Case
from ..fresh import MOST
from ..options import check_number
from ..verdict import PROFILES
from .team import Team
from .trial import WITHOUT_GRADIENTS, Bench, Caught, bench, judged, profiles_to

__all__ = ["conformance_mutants"]

EVERY = 10.0
"""Seconds from one line to the next of how far a recording is."""
TARGETS = {"core": 85.0, "training": 95.0, "full": 98.0}
"""Shares that the suite is to catch of faults that show on a call of at most 4,096 tokens, in per cent."""


def conformance_mutants(
    seed: Annotated[
        int | None, typer.Option(help="Of the faults, and of the fresh cases; drawn anew, and said, if it is not given.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many faults that show on some valid call.")] = 100,
    profile: Annotated[str, typer.Option(help=f"The largest profile to run: {', '.join(PROFILES)}.")] = "core",
    backend: Annotated[str, typer.Option(help="The right backend that is broken: numpy, torch or jax.")] = "numpy",
    tokens: Annotated[int, typer.Option(help="Tokens of a call on which a fault must show, at most.")] = 4096,
    workers: Annotated[int, typer.Option("--workers", "-n", help="Processes, among which the cases are shared out.")] = 1,
    least: Annotated[float, typer.Option(help="Exit with status 1 if a smaller share is caught, in per cent.")] = 0.0,
) -> None:
    """Break a right backend in ways that nobody chose, and say which share of the faults the suite catches."""
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    try:
        check_number("--count", count, positive=True)
        check_number("--tokens", tokens, positive=True)
        check_number("--workers", workers, positive=True)
        if profile not in PROFILES:
            raise ValueError(f"unknown profile {profile!r}: known are {', '.join(PROFILES)}")
        rng = np.random.default_rng(seed)
        started = time.perf_counter()
        profiles = profiles_to(profile)
        fresh = 1 + seed % (MOST - 1)
        with bench(backend, profile, fresh, tracked) if workers == 1 else team(backend, profile, fresh, workers) as made:
            drawn = sorted(made.faults(rng, count, tokens), key=lambda of: of[0].condition.op)  # a family is recorded once
            listed = [told(judged(fault, shown, profiles, made.tried)) for fault, shown in drawn]
            tell(made, listed, seed, count, tokens, time.perf_counter() - started)
    except (LinattnError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    caught = 100.0 * sum(bool(found.profile) for found in listed) / count
    if caught < least:
        print(f"expected at least {least:g} % caught, got {caught:.1f} %: --seed {seed} draws the same faults again")
    raise typer.Exit(int(caught < least))


@contextlib.contextmanager
def team(backend: str, profile: str, seed: int, workers: int) -> Iterator[Team]:
    """A bench of several processes for the time of a ``with`` block."""
    made = Team(backend, profile, seed, workers)
    try:
        with made.runner.watching():
            made.record(tracked)
            yield made
    finally:
        made.close()
        registry.unregister("mutant")


def tracked(cases: Sequence[Case]) -> Iterator[Case]:
    """Cases that are recorded, under a bar; where there is no terminal for one, a line says every few seconds how many were."""
    due = time.monotonic() + EVERY
    with bars() as progress:
        for i, case in enumerate(progress.track(cases, description="recording")):
            if progress.disable and time.monotonic() >= due:
                print(f"recording: {i} of {len(cases)} cases", file=sys.stderr, flush=True)
                due = time.monotonic() + EVERY
            yield case


def told(found: Caught) -> Caught:
    """A fault and what came of it, as soon as it is known."""
    print(f"{f'caught by {found.profile}' if found.profile else 'MISSED':20}  {found.fault}", flush=True)
    if found.profile:
        print(f"{'':20}  {found.case:.160}", flush=True)
    return found


def tell(made: Bench, listed: list[Caught], seed: int, count: int, tokens: int, seconds: float) -> None:
    """The survivors with a public call each, the factors that are missing, and the shares."""
    survivors = [found for found in listed if not found.profile]
    for found in survivors:
        print(f"\nmissed: {found.fault}\n  {found.missed}; {found.ran} cases were run; here {found.shown.wrong}:")
        print("\n".join(f"    {line}" for line in found.shown.draft.text(made.xp, made.right.name).splitlines()))
    print()
    for why, number in Counter(found.missed.partition(",")[0] for found in survivors).most_common():
        print(f"{number:4}  {why}")
    print(
        f"\nseed {seed}: {count} faults of the {made.right.name} backend that show on a call of at most {tokens} tokens, "
        f"of {made.drawn} drawn, in {seconds:.0f} s"
    )
    for case in sorted(made.left_out):
        print(f"left out, because the backend without a fault fails it: {case}")
    tried: list[str] = []
    for profile in profiles_to(made.profile):
        tried.append(profile)
        target = f"; the target is {TARGETS[profile]:g} %" if profile in TARGETS else ""
        print(f"{profile:10}  {share(listed, tried)}{target}")
        forward = [found for found in listed if not found.shown.wrong.startswith("d ")]
        if profile in WITHOUT_GRADIENTS and 0 < len(forward) < count:
            print(f"{'':10}  {share(forward, tried)} that show without a gradient")


def share(listed: list[Caught], profiles: list[str]) -> str:
    """How many faults these profiles catch."""
    caught = sum(found.profile in profiles for found in listed)
    return f"{100 * caught / len(listed):5.1f} %  {caught} of {len(listed)}"
