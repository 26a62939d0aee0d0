# pyright: basic
"""What a class that is written once for all frameworks may count on.

Frameworks leave much of their types unknown, so this folder is checked at pyright's basic level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Definition", "Functional"]


class Definition:
    """Base class of what frameworks make modules of; these attributes are what the framework's own base class brings.

    Attributes:
        begin: Begins a module, and gives the tools that make its parameters and parts.
        functions: Activations by name, and :class:`.expressions.Expressions`.
        value: The array of a parameter.
        run: Calls an operator.
        constant: An array through which no gradient flows.
        decodes_in_place: Whether states may be overwritten where they lie.
    """

    begin: Any
    functions: Any
    value: Any
    run: Any
    constant: Any
    decodes_in_place: Any
    __call__: Callable[..., Any]


class Functional:
    """What the base classes of frameworks share whose arrays are never written to, and whose modules are called by
    ``__call__``."""

    forward: Any

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call ``forward``."""
        return self.forward(*args, **options)

    @staticmethod
    def run(function: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """``function(*arrays, **options)``."""
        return function(*arrays, **options)

    @staticmethod
    def value(parameter: Any) -> Any:
        """The array of a parameter."""
        return parameter

    @staticmethod
    def decodes_in_place() -> bool:
        """Whether states may be overwritten where they lie: they never are."""
        return False
