"""JSON with a row a line: a file of results is short, and a change of it is a list of the rows that changed."""

from __future__ import annotations

import json
from typing import Any

WIDTH = 120


def text(content: Any) -> str:
    """``content`` as JSON; ``ValueError`` for numbers that are not finite.

    An item of a list is a line, and so is an object that fits in one, unless a list of objects lies in it.
    """
    return f"{_written(content, '')}\n"


def _written(value: Any, indent: str, width: float = WIDTH) -> str:
    """``value``, on a line of its own if that is no longer than ``width`` and nothing in it wants lines."""
    flat, deeper = json.dumps(value, allow_nan=False), f"{indent} "
    parts = _parts(value)
    if not any(map(_parts, parts)) or (len(indent) + len(flat) <= width and not _holds_rows(value)):
        return flat
    if isinstance(value, dict):
        lines = [f"{json.dumps(name)}: {_written(part, deeper)}" for name, part in value.items()]
    else:
        lines = [_written(part, deeper, float("inf")) for part in value]
    inside = ",\n".join(f"{deeper}{line}" for line in lines)
    return f"{flat[0]}\n{inside}\n{indent}{flat[-1]}"


def _parts(value: Any) -> list[Any]:
    """What lies in an object or a list."""
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def _holds_rows(value: Any) -> bool:
    """Whether a list of objects lies in it."""
    return any((isinstance(value, list) and isinstance(part, dict)) or _holds_rows(part) for part in _parts(value))
