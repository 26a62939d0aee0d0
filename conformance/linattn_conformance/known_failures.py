"""Known failures: what a vendor knows to be broken, said in a file, with a reason, a link and a day on which it must be gone.

::

    [[known-failure]]
    pattern = "gla/chunk/bf16/*"
    reason = "the value gate is read in the wrong layout"
    link = "https://example.com/issues/17"
    expires = 2026-12-31

A known failure that passes, that matches no case, or whose day has come is an error: the list can only describe the present.
A known failure still is a failure for the verdict of every profile; it keeps CI green, see :mod:`.verdict`.
"""

from __future__ import annotations

import datetime
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .runner import Result

__all__ = ["COMPLAINT", "KnownFailure", "KnownFailuresError", "apply", "load"]

COMPLAINT = "known failure "
"""What is wrong with the list begins so."""


class KnownFailuresError(ValueError):
    """The file of known failures is wrong."""


@dataclass(frozen=True)
class KnownFailure:
    """One entry: ``pattern`` is matched against case ids as a shell does."""

    pattern: str
    reason: str
    link: str
    expires: datetime.date


def load(path: Path) -> list[KnownFailure]:
    """Read a TOML or JSON file.

    Raises:
        KnownFailuresError: It cannot be read, or holds anything but known failures.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise KnownFailuresError(f"--known-failures {path}: there is no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KnownFailuresError(f"--known-failures {path}: expected a TOML or JSON file: {reason}") from None
    entries = data.get("known-failure", []) if isinstance(data, dict) else None
    if not isinstance(entries, list) or data.keys() - {"known-failure"}:
        raise KnownFailuresError(f"--known-failures {path}: must hold a list called known-failure, and nothing else")
    return [_entry(path, i, entry) for i, entry in enumerate(entries)]


def _entry(path: Path, index: int, entry: Any) -> KnownFailure:
    where = f"{path.name}, known failure {index + 1}"
    wanted = ("pattern", "reason", "link", "expires")
    if not isinstance(entry, dict):
        raise KnownFailuresError(f"{where}: must have {', '.join(wanted)}, got {entry!r}")
    if set(entry) != set(wanted):
        raise KnownFailuresError(f"{where}: must have exactly {', '.join(wanted)}, got {', '.join(sorted(entry)) or 'nothing'}")
    expires = entry["expires"]
    if isinstance(expires, str):
        try:
            expires = datetime.date.fromisoformat(expires)
        except ValueError:
            expires = None
    if type(expires) is not datetime.date:
        raise KnownFailuresError(f"{where}: expires must be a date such as 2026-12-31, got {entry['expires']!r}")
    for name in ("pattern", "reason", "link"):
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise KnownFailuresError(f"{where}: {name} must be a text that is not empty")
    return KnownFailure(entry["pattern"], entry["reason"], entry["link"], expires)


def apply(results: Iterable[Result], known: Sequence[KnownFailure], today: datetime.date) -> tuple[list[Result], list[str]]:
    """Turn failures that are known into known failures; say what is wrong with the list.

    Returns:
        The results, and complaints: one for each entry that has expired, matches no case, or whose cases pass. Of a case that
        was not run nobody knows.
    """
    results, complaints = list(results), []
    for entry in known:
        matching = [i for i, result in enumerate(results) if fnmatchcase(result.id, entry.pattern)]
        passing = [results[i].id for i in matching if results[i].status in ("passed", "declared-unsupported")]
        if today >= entry.expires:
            complaints.append(f"{COMPLAINT}{entry.pattern!r} expired on {entry.expires}: {entry.link}")
        elif not matching:
            complaints.append(f"{COMPLAINT}{entry.pattern!r} matches no case")
        elif passing:
            complaints.append(f"{COMPLAINT}{entry.pattern!r} does not fail: {passing[0]} ({len(passing)} in all)")
        else:
            for i in [i for i in matching if results[i].status != "not-run"]:
                reason = f"{entry.reason} ({entry.link}, until {entry.expires}): {results[i].message}"
                results[i] = replace(results[i], status="known-failure", message=reason)
    return results, complaints
