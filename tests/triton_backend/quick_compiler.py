"""What the front end of Triton's compiler finds out anew for every line that it reads, found out once: the same code sooner."""

from __future__ import annotations

import ast
import functools
import inspect
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

from quick_interpreter import describe_types
from triton.compiler import code_generator
from triton.runtime.jit import JITFunction

__all__ = ["quicken"]


def quicken() -> None:
    """Let the compiler of this process remember."""
    describe_types()
    code_generator.inspect = SimpleNamespace(**vars(inspect) | dict(signature=signature))
    code_generator.warnings = SimpleNamespace(**vars(warnings) | dict(catch_warnings=nullcontext, simplefilter=nothing))
    JITFunction.parse = lambda self: parsed(self.src)


parsed = functools.cache(ast.parse)
"""The tree of a kernel's source, which the front end walks and leaves as it is."""
of_function = functools.cache(inspect.signature)


def signature(function):
    """Parameters of what a kernel calls; of a method, ``self`` as well."""
    return of_function(getattr(function, "__func__", function))


def nothing(*which):
    """Filters of warnings for each line; the front end raises none of those that it filters."""
