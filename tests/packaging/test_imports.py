"""What an import costs, shown in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

FRAMEWORKS = ("torch", "jax", "jaxlib", "mlx", "triton", "tensorflow")


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after running ``code``."""
    report = "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_linattn_loads_no_framework():
    loaded = modules_after("import linattn")
    assert not loaded.intersection(FRAMEWORKS)


def test_importing_linattn_loads_no_plugin_machinery_and_no_backend():
    loaded = modules_after("import linattn")
    assert not loaded.intersection({"stevedore", "packaging", "typer", "linattn_backends", "linattn_conformance"})


def test_a_call_loads_only_the_framework_of_its_arrays():
    call = "import numpy, linattn; x = numpy.ones((1, 2, 1, 3), 'f4'); linattn.gla(x, x, x, -x)"
    assert not modules_after(call).intersection(FRAMEWORKS)


def test_the_command_line_starts_without_a_framework():
    assert not modules_after("import linattn.cli").intersection(FRAMEWORKS)


def test_conformance_and_backends_are_not_needed_by_the_api():
    blocked = "import sys; sys.modules['linattn_conformance'] = sys.modules['linattn_backends'] = None; import linattn"
    assert "linattn" in modules_after(blocked)
