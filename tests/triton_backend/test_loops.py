"""A loop that the compiler gets wrong, and which neither the interpreter nor NumPy shows, is in no kernel."""

from __future__ import annotations

import ast
from pathlib import Path

import linattn_backends.triton
import pytest

FILES = sorted(Path(linattn_backends.triton.__file__).parent.rglob("*.py"))


def begun_by_a_sum(source: str) -> list[int]:
    """Lines of loops that begin at a sum which the loop around them adds to: Triton 3.6.0 takes it for what it was at first.

    Where such a sum is in nothing but the bounds, the compiler's canonicalisation counts from zero, finds the sum unused, and
    drops what is added to it.
    """
    return [
        inner.lineno
        for outer in ast.walk(ast.parse(source))
        if isinstance(outer, ast.For)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.For) and inner is not outer and names(begin_of(inner)) & sums_of(outer)
    ]


def sums_of(loop: ast.For) -> set[str]:
    """Names that a loop adds to."""
    return {x.target.id for x in ast.walk(loop) if isinstance(x, ast.AugAssign) and isinstance(x.target, ast.Name)}


def begin_of(loop: ast.For) -> ast.expr | None:
    """Where ``range`` begins, if that is said."""
    return loop.iter.args[0] if isinstance(loop.iter, ast.Call) and len(loop.iter.args) > 1 else None


def names(expression: ast.expr | None) -> set[str]:
    """Names in an expression."""
    return set() if expression is None else {x.id for x in ast.walk(expression) if isinstance(x, ast.Name)}


WRONG = """
for m in range(N):
    for n in range(done, done + 3):
        pass
    done += 3
"""


def test_finds_such_a_loop():
    assert begun_by_a_sum(WRONG) == [3]
    assert begun_by_a_sum(WRONG.replace("range(done, done + 3)", "range(3)")) == []


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_no_kernel_has_one(file):
    assert begun_by_a_sum(file.read_text()) == []
