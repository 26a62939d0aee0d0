"""Commands that look at every backend, beside plug-ins that take their process with them."""

from __future__ import annotations

import linattn
import pytest
from backends_for_tests import GOOD
from linattn import apart, cli
from linattn.plugin import API_VERSION
from typer.testing import CliRunner

CRASH = "import ctypes; ctypes.string_at(0)"
EXIT = "import os; os._exit(3)"
HANG = "import time; time.sleep(600)"
IN_INIT = """
    def __init__(self):
        {fault}
"""
IN_SUPPORTS = """
    def supports(self, call):
        {fault}
"""
IN_DETAILS = """
    def details(self, call):
        {fault}
"""
IN_DEVICE = """
    def missing_device(self):
        {fault}
"""
SAID = {
    CRASH: "backend 'acme' of acme 1.2 crashed (SIGSEGV) the process that asked it",
    EXIT: "backend 'acme' of acme 1.2 ended (exit status 3) the process that asked it",
    HANG: "backend 'acme' of acme 1.2 did not answer within 2 s: its process was ended",
}

LIMIT = {HANG: {"limit": 2.0}}
"""Of the command, where it is not its own."""


@pytest.fixture
def run(monkeypatch):
    runner = CliRunner()

    def invoke(*words, limit=60.0):
        """A limit that a busy machine keeps, or one that what hangs is ended by."""
        monkeypatch.setattr(apart, "TIME_LIMIT", limit)
        return runner.invoke(cli.app, list(words))

    return invoke


def source(where, fault):
    """The source of a plug-in with a fault in a method, or, without one, on import."""
    return GOOD + where.replace("{fault}", fault) if where else f"{fault}\n{GOOD}"


@pytest.mark.parametrize(("where", "fault"), [("", CRASH), ("", HANG), (IN_INIT, EXIT), (IN_DEVICE, CRASH)])
def test_the_list_of_backends_names_one_that_takes_its_process_with_it(install, run, where, fault):
    install("acme", source=source(where, fault))
    done = run("backends", **LIMIT.get(fault, {}))
    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert f"acme: {SAID[fault]}" in lines
    assert [line.split() for line in lines if line.startswith("acme ")] == [["acme", "acme", "1.2", "unusable"]]
    assert any(line.startswith("numpy ") and line.rstrip().endswith("ready") for line in lines)


def test_doctor_names_one_that_crashes(install, run):
    install("acme", source=source("", CRASH))
    assert f"acme: {SAID[CRASH]}" in run("doctor").stdout.splitlines()


@pytest.mark.parametrize(("where", "fault"), [("", HANG), (IN_SUPPORTS, CRASH), (IN_DETAILS, EXIT)])
def test_explain_names_one_that_takes_its_process_with_it(install, run, where, fault):
    install("acme", source=source(where, fault))
    done = run(
        "explain", "chunk_gla", "--framework", "numpy", "--backend", "acme", "--backend", "numpy", **LIMIT.get(fault, {})
    )
    assert done.exit_code == 0
    assert done.stdout.splitlines()[2:] == ["  runs         numpy.chunk_gla", f"  passed over  acme: {SAID[fault]}"]


def test_explain_names_one_whose_supports_raises(install, run):
    install("acme", source=source(IN_SUPPORTS, "return 1 / 0"))
    done = run("explain", "chunk_gla", "--framework", "numpy", "--backend", "acme")
    assert done.exit_code == 1
    said = "backend 'acme': supports raised ZeroDivisionError: division by zero"
    assert done.stdout.splitlines()[2:] == ["  runs         nothing: no candidate can", f"  passed over  acme: {said}"]


def test_a_plug_in_that_is_in_order_is_shown_as_ever(install, run):
    install("acme", source=source(IN_DETAILS, "return 'slowly'"))
    assert [line.split() for line in run("backends").stdout.splitlines() if line.startswith("acme ")] == [
        ["acme", "acme", "1.2", "numpy", "gla", "(chunk)", "ready"]
    ]
    done = run("explain", "chunk_gla", "--framework", "numpy", "--backend", "acme")
    assert done.stdout.splitlines()[2] == "  runs         acme.chunk_gla: slowly"


def test_the_list_says_who_claims_the_name_of_a_built_in_backend(install, run):
    install("acme", name="numpy", source=source("", CRASH))
    lines = run("backends").stdout.splitlines()
    assert "numpy: acme 1.2 claims this name too, and is not used" in lines
    assert [line.split() for line in lines if line.startswith("numpy ")] == [["numpy", "linattn", "numpy", "all", "ready"]]
    assert linattn.registry.registry.record("numpy").origin == f"linattn {API_VERSION}"
