"""Functions that are compiled from text, with lines that tracebacks, debuggers and ``inspect.getsource`` can show."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

__all__ = ["compiled"]


def compiled(path: str, source: str, namespace: dict[str, Any]) -> Callable[..., Any]:
    """The function that ``source`` defines.

    Args:
        path: Its name, and where it belongs, with dots: no other function may have the same.
        source: A ``def`` statement, of the name that ends the path.
        namespace: Its globals.
    """
    file = f"<{path}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # None: there is no file to check
    exec(compile(source, file, "exec"), namespace)
    return namespace[path.rpartition(".")[2]]
