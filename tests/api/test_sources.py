"""What is compiled from text can be read: by a debugger, in a traceback, by ``inspect``."""

from __future__ import annotations

import inspect
import traceback

import linattn
import numpy as np
import pytest
from backends_for_tests import named
from linattn.ops._family import OPERATORS
from linattn.plugin import Backend, form_methods


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_has_lines(name):
    operator = OPERATORS[name]
    first = operator.spec.args[0].name
    assert inspect.getsource(operator).startswith(f"def {name}({first}")
    assert "# declared in linattn.ops." in inspect.getsource(operator)
    assert inspect.getsource(operator.explain).startswith(f"def explain({first}")


def test_so_has_a_method_that_is_made_of_a_function():
    def run(form, arrays, *, scale):
        raise AssertionError

    made = [
        form_methods({"gla": run}, forms=("chunk",))(type(name, (Backend,), {"name": name, "__module__": "acme"}))
        for name in ("One", "Two")
    ]
    for kind in made:
        assert inspect.getsource(kind.chunk_gla).startswith("def chunk_gla(self, q, k, v, g, gv=None, *, scale=None):")
        assert inspect.getsourcefile(kind.chunk_gla) == f"<acme.{kind.__name__}.chunk_gla>"


def test_a_traceback_shows_them():
    def chunk_gla(self, q, k, v, g, gv=None, *, scale):
        raise ZeroDivisionError

    linattn.register_backend(named("broken", chunk_gla=chunk_gla))
    x = np.ones((1, 2, 1, 3))
    with pytest.raises(ZeroDivisionError) as caught:
        linattn.chunk_gla(x, x, x, x, backend="broken")
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any(frame.filename == "<linattn.chunk_gla>" and "return target(spec, form" in frame.line for frame in frames)
    assert [frame.name for frame in frames[1:]] == ["chunk_gla", "run", "chunk_gla"]
