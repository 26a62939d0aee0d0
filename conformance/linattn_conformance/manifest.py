"""The manifest: which cases belong to an API version, checked in, so that nobody decides by generating them what is tried.

``python -m linattn_conformance.manifest`` writes it again. A change of the list is a change of the suite, and shows in review.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linattn.plugin import API_VERSION

from .cases import Case, content_hash, generate, neighbours, parsed

__all__ = ["SUITE_VERSION", "Entry", "Manifest", "case_of", "cases_of", "from_cases", "load", "manifest_path", "read"]

SUITE_VERSION = "1.0.0"
"""Of cases, checks, data and bounds, as released.

The first change of any of them after a release is a new version, though the ids may stay: a new patch for checks and bounds
that no right backend notices, else a new minor. Until 1.0.0 is released it stays, and the manifest's hash, which every report
quotes, tells one state of the suite from another.
"""


@dataclass(frozen=True)
class Entry:
    """What a verdict needs to know about a case."""

    operator: str
    gradient: bool
    core: bool
    frameworks: tuple[str, ...]
    memory: int
    host: bool = False
    device: bool = False
    within: str = "training"

    applies = Case.applies


@dataclass(frozen=True)
class Manifest:
    """The cases of an API version.

    Attributes:
        api: The API version.
        suite: Version of the suite.
        content: Hash over all cases, every field.
        entries: ``id → Entry``.
    """

    api: str
    suite: str
    content: str
    entries: dict[str, Entry]

    @functools.cached_property
    def hash(self) -> str:
        """Hash over the manifest itself, a case a line, as a report quotes it."""
        lines = (f"  {json.dumps(name)}: {json.dumps(_packed(entry))}" for name, entry in sorted(self.entries.items()))
        return hashlib.sha256(self._written("{}", lines).encode()).hexdigest()

    def text(self) -> str:
        """As it is checked in: a line for the cases of a family, form and dtype that have the rest in common."""
        groups: dict[str, dict[str, Any]] = {}
        for name, entry in sorted(self.entries.items()):
            of, case = _of(name)
            group = {"of": of, **_packed(entry)}
            groups.setdefault(json.dumps(group), {**group, "cases": []})["cases"].append(case)
        return self._written("[]", (f"  {json.dumps(group)}" for group in groups.values()))

    def _written(self, brackets: str, lines: Iterable[str]) -> str:
        head = json.dumps({"api": self.api, "suite": self.suite, "content": self.content}, indent=1)[:-2]
        body = ",\n".join(lines)
        return f'{head},\n "cases": {brackets[0]}\n{body}\n {brackets[1]}\n}}\n'

    def applicable(self, framework: str, device: str, memory: float = 0.0) -> dict[str, Entry]:
        """The cases for a framework and device."""
        return {name: entry for name, entry in self.entries.items() if entry.applies(framework, device, memory)}


def _of(name: str) -> tuple[str, str]:
    """Family, form and dtype of an id, and the rest."""
    *of, case = name.split("/", 3)
    return "/".join(of), case


def _packed(entry: Entry) -> dict[str, Any]:
    """Only what differs from the usual."""
    packed: dict[str, Any] = {"operator": entry.operator}
    packed |= {name: True for name in ("gradient", "core", "host", "device") if getattr(entry, name)}
    packed |= {"within": entry.within} if entry.within != "training" else {}
    packed |= {"frameworks": list(entry.frameworks)} if entry.frameworks else {}
    return packed | ({"memory": entry.memory} if entry.memory else {})


def _unpacked(packed: dict[str, Any]) -> Entry:
    return Entry(
        packed["operator"],
        packed.get("gradient", False),
        packed.get("core", False),
        tuple(packed.get("frameworks", ())),
        packed.get("memory", 0),
        packed.get("host", False),
        packed.get("device", False),
        packed.get("within", "training"),
    )


def from_cases(cases: tuple[Case, ...]) -> Manifest:
    """The manifest that these cases make."""
    entries = {
        case.id: Entry(
            case.operator,
            case.needs_gradient,
            case.core,
            case.frameworks,
            case.memory,
            case.host,
            case.device,
            case.within,
        )
        for case in cases
    }
    return Manifest(API_VERSION, SUITE_VERSION, content_hash(cases), entries)


def manifest_path(api: str = API_VERSION) -> Path:
    """Where the manifest of an API version lies; one for each major and minor version."""
    return Path(__file__).parent / "manifests" / f"{'.'.join(api.split('.')[:2])}.json"


@functools.cache
def load(api: str = API_VERSION) -> Manifest:
    """The manifest that is checked in."""
    return read(manifest_path(api))


def read(path: Path) -> Manifest:
    """A manifest as :meth:`Manifest.text` wrote it: an earlier one, for the reports that quote it."""
    data = json.loads(path.read_text(encoding="utf-8"))
    entries = {f"{group['of']}/{case}": _unpacked(group) for group in data["cases"] for case in group["cases"]}
    return Manifest(data["api"], data["suite"], data["content"], dict(sorted(entries.items())))


def cases_of(held: Manifest) -> tuple[Case, ...]:
    """The cases of a manifest, in its order."""
    return tuple(case_of(name, entry) for name, entry in held.entries.items())


def case_of(name: str, entry: Entry) -> Case:
    """The case of an id and its entry."""
    return parsed(
        name,
        core=entry.core,
        within=entry.within,
        frameworks=entry.frameworks,
        memory=entry.memory,
        host=entry.host,
        device=entry.device,
    )


def written() -> tuple[Case, ...]:
    """Write the manifest again; the cases that are now in it."""
    cases = neighbours(generate())
    manifest_path().write_text(from_cases(cases).text(), encoding="utf-8")
    return cases


if __name__ == "__main__":
    print(f"wrote {manifest_path()}: {len(written())} cases")
