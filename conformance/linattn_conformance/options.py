"""What the commands ask of their options, before anything is run."""

from __future__ import annotations

from pathlib import Path

__all__ = ["check_number", "check_writable"]


def check_number(option: str, value: float, positive: bool = False) -> None:
    """Raise ``ValueError`` unless an option is a number from 0 on, or above 0 if it must be ``positive``."""
    if not (value > 0 if positive else value >= 0):
        raise ValueError(f"{option} {value:g}: expected a number {'above' if positive else 'not below'} 0")


def check_writable(option: str, path: Path) -> None:
    """Raise ``ValueError`` if a file cannot be written: now, not after an hour."""
    there = path.exists() or path.is_symlink()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from None
    if not there:
        path.unlink()
