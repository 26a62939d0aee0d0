"""What a backend can do, by the results of a report alone: coverage, and badges of what all of its cases passed."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from .cases import BACKWARD, TRANSFORMS

__all__ = ["BADGES", "LEAST", "badges", "coverage", "covered", "short"]

LEAST = {"core": 0.5, "inference": 0.5, "training": 0.5, "full": 1.0}
"""Of the cases of a claimed operator in a profile, the share that must not have been declared unsupported."""
WIDE, LONG = 128, 1024
RAN = ("passed", "failed", "known-failure")


class Parts:
    """The parts of an id."""

    def __init__(self, name: str) -> None:
        self.family, self.form, self.dtype, self.flags, self.sizes, self.check = [*name.split("/"), *[""] * 6][:6]

    @property
    def tokens(self) -> int:
        return int(found[1]) if (found := re.search(r"\bT(\d+)", self.sizes)) else 0

    @property
    def widths(self) -> list[int]:
        return [int(size) for size in re.findall(r"\b[KVLD](\d+)", self.sizes)]


PACKING = re.compile(r"\b(varlen|tail|many|pack\.[\d.]+)\b")
BADGES: dict[str, Callable[[Parts], bool]] = {
    "float32": lambda parts: parts.dtype == "fp32",
    "bfloat16": lambda parts: parts.dtype == "bf16",
    "float16": lambda parts: parts.dtype == "fp16",
    "float64": lambda parts: parts.dtype == "fp64",
    "packing": lambda parts: bool(PACKING.search(parts.flags)),
    "wide heads": lambda parts: max(parts.widths, default=0) >= WIDE,
    "long sequences": lambda parts: parts.tokens >= LONG,
    "gradients": lambda parts: parts.check in BACKWARD,
    "decoding": lambda parts: parts.form == "decode",
    "transforms": lambda parts: parts.check in TRANSFORMS,
}
"""Capabilities, and which cases show them."""


def badges(statuses: Mapping[str, str], operators: Mapping[str, str], claimed: Any) -> dict[str, str]:
    """Of each capability that a case of a claimed operator shows: ``"all"``, ``"some"`` of the cases passed, or ``"none"``.

    Args:
        statuses: By id.
        operators: Of each id.
        claimed: The operators that count.
    """
    passed: defaultdict[str, list[bool]] = defaultdict(list)
    families = {name.partition("_")[2] or name for name in claimed}
    for name, operator in operators.items():
        for badge in shown(name):
            if operator in claimed or (badge == "decoding" and Parts(name).family in families):
                passed[badge].append(statuses[name] == "passed")
    return {badge: "all" if all(mine) else "some" if any(mine) else "none" for badge in BADGES if (mine := passed[badge])}


@functools.cache
def shown(name: str) -> frozenset[str]:
    """The capabilities that a case of this id shows."""
    parts = Parts(name)
    return frozenset(badge for badge, shows in BADGES.items() if "/bad-input/" not in name and shows(parts))


def coverage(statuses: Mapping[str, str]) -> tuple[int, int]:
    """How many cases ran, and how many there are."""
    return sum(status in RAN for status in statuses.values()), len(statuses)


def covered(profile: str, operator: str, statuses: Mapping[str, str]) -> str:
    """Why a claimed operator takes too few of its cases; empty if it takes enough.

    Many devices have no float64. A backend that takes no case in it is not held to the others that have a float64 array,
    and its badge says so.
    """
    declared = {name for name, status in statuses.items() if status == "declared-unsupported"}
    without = all(name in declared for name in statuses if Parts(name).dtype == "fp64")
    spared = {name for name in declared if without and "fp64" in name}
    taken, whole, least = len(statuses) - len(declared), len(statuses) - len(spared), LEAST[profile]
    if taken >= least * whole:
        return ""
    end = " that are not float64" if spared else ""
    return (
        f"{operator}: takes {taken} of its {whole} cases{end}, and profile {profile} wants {least:.0%} of a claimed operator's"
    )


def short(ran: int, whole: int) -> str:
    """A coverage in a headline."""
    return f"{ran:,} of {whole:,} run"
