"""Fresh cases: other rows, sizes and values in every run, from a seed that its report tells.

The manifest can be read, and a backend made to pass it; these nobody has seen. Their ids hold the seed.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from linattn.spec import COMPANIONS, DECODING, FAMILIES

from .cases import Case, covering, covering_of_decoding, neighbours, parts, widths

__all__ = ["draw_seed", "fresh_cases", "is_fresh", "problems", "seed_of", "seeds_of", "strangers", "wanted"]

MOST = 10**6
"""Seeds are below it, so that ids stay short."""


def draw_seed() -> int:
    """A seed that nobody knows."""
    return 1 + secrets.randbelow(MOST - 1)


@functools.lru_cache(2)  # as a run that is written down asks for them, and then who reads it
def fresh_cases(seed: int, profile: str = "full") -> tuple[Case, ...]:
    """As many cases as the covering arrays of a profile have, with other rows, sizes and values, all from ``seed``."""
    if not 0 < seed < MOST:
        raise ValueError(f"--seed {seed}: expected a number from 1 to {MOST - 1}")
    found: list[Case] = []
    for spec in (*FAMILIES.values(), *COMPANIONS.values()):
        found += [*covering(spec, seed, profile), *parts(spec, seed, profile), *widths(spec, seed, profile)]
        found += covering_of_decoding(spec, seed, profile) if spec.name in DECODING else ()
    return neighbours(case for case in found if profile in ("training", "full") or not case.needs_gradient)


def seed_of(name: str) -> int:
    """The seed that an id holds; 0 if there is none."""
    flags = name.split("/")[3].split("-") if name.count("/") == 5 else []
    return next((int(flag.partition(".")[2]) for flag in flags if flag.startswith("seed.")), 0)


def seeds_of(names: Iterable[str]) -> list[int]:
    """The seeds that ids hold, each once."""
    return sorted({seed for name in names if (seed := seed_of(name))})


def wanted(seed: int, profile: str, report: Mapping[str, Any]) -> list[str]:
    """The ids of a seed that a run of a profile has, on the framework and device that a report is of."""
    place = report["framework"], report["device"], report["memory"]
    return [case.id for case in fresh_cases(seed, profile) if case.applies(*place)]


def is_fresh(name: str) -> bool:
    """True for the id of a fresh case."""
    return seed_of(name) > 0


def problems(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """What fresh cases say against a backend: a failure of theirs is a failure."""
    accepted = ("passed", "declared-unsupported", "known-failure")
    failed = [result for result in results if is_fresh(result["id"]) and result["status"] not in accepted]
    return [f"{result['id']}: {result['status']}: {result['message']}" for result in failed]


def strangers(names: Iterable[str], profile: str) -> list[str]:
    """Of ids that no manifest holds, those that no run of a profile draws."""
    listed = list(names)
    seeds = seeds_of(listed)
    if len(seeds) != 1:
        return listed
    known = {case.id for case in fresh_cases(*seeds, profile)}
    return [name for name in listed if name not in known]
