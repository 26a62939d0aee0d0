"""How tests of others run: what becomes of each is known as it ends, and all of them end in time."""

import contextlib
import time
from pathlib import Path

import pytest
import suites
from case_journal import NOT_RUN

TESTS = """
import subprocess, sys, time
import pytest

@pytest.mark.parametrize("x", ["a::b", "c"])
def test_right(x):
    pass

class TestIn:
    def test_wrong(self):
        assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="no such thing")
def test_left():
    pass

@pytest.fixture
def broken():
    raise OSError("no disk")

def test_set_up(broken):
    pass

def test_coloured():
    raise RuntimeError("\\x1b[31mred\\x1b[0m\\0 and\\nanother line")

def test_long():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("child", "w").write(str(child.pid))
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_of_others.py").write_text(TESTS)
    return tmp_path


def ended(cases: list[suites.Case]) -> dict[str, tuple[str, str]]:
    """How each case ended, and why."""
    return {case.node.removeprefix("test_of_others.py::"): (case.ended, case.why) for case in cases}


def test_each_case_is_known_by_how_it_ended(folder: Path) -> None:
    cases = suites.run(["test_of_others.py", "-k", "not long"], folder, "")
    assert ended(cases) == {
        "test_right[a::b]": ("passed", ""),
        "test_right[c]": ("passed", ""),
        "TestIn::test_wrong": ("failed", "AssertionError: one is not two"),
        "test_left": ("skipped", "no such thing"),
        "test_set_up": ("failed", "OSError: no disk"),
        "test_coloured": ("failed", "RuntimeError: \x1b[31mred\x1b[0m\0 and\nanother line"),
    }


@pytest.mark.parametrize("together", [[], ["-pxdist.plugin", "-n2"]])
def test_a_file_that_cannot_be_collected_fails_and_the_others_run(folder: Path, together: list[str]) -> None:
    (folder / "test_broken.py").write_text("raise OSError('no such device')")
    cases = suites.run([".", "-k", "right or broken", *together], folder, "")
    assert [(case.node, case.ended) for case in sorted(cases)] == [
        ("test_broken.py", "failed"),
        ("test_of_others.py::test_right[a::b]", "passed"),
        ("test_of_others.py::test_right[c]", "passed"),
    ]
    assert "no such device" in min(cases).why


def test_of_a_run_that_a_process_of_xdists_started_all_is_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    assert ended(suites.run(["test_of_others.py", "-k", "left"], folder, "")) == {"test_left": ("skipped", "no such thing")}


@pytest.mark.parametrize("together", [[], ["-pxdist.plugin", "-n2"]])
def test_at_its_time_all_processes_end_and_what_ended_before_stays(
    folder: Path, together: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "EVERY", 0.2)
    left: list[str] = []
    with contextlib.closing(suites.progress(["test_of_others.py", *together], folder, "", until=time.monotonic() + 100)) as run:
        for latest in run:
            left = [name for name, (_, why) in ended(latest).items() if why == NOT_RUN]
            if (folder / "child").exists() and (folder / "child").read_text() and len(left) == 1 < len(latest):
                break
    assert left == ["test_long"]
    child = int((folder / "child").read_text())
    for _ in range(50):
        if gone(child):
            return
        time.sleep(0.1)
    pytest.fail("what a test started still runs")


def gone(process: int) -> bool:
    """Whether a process has ended; one of which nobody took note has ended as well."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_run_that_ends_before_it_began_says_nothing(folder: Path) -> None:
    begun = time.monotonic()
    assert suites.run(["test_of_others.py"], folder, "", until=begun) == []
    assert time.monotonic() - begun < 20


def test_what_pytest_says_when_it_begins_nothing_is_told(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"pytest ended with 4\n[^$]*unrecognized arguments: --no-such-thing"):
        suites.run(["--no-such-thing"], folder, "")


def test_a_run_that_is_ended_from_outside_keeps_what_ended_before_and_says_so(folder: Path) -> None:
    (folder / "test_last.py").write_text("import os, signal\ndef test_end():\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    run = suites.progress(["test_of_others.py", "test_last.py", "-k", "right or end"], folder, "")
    found: list[list[suites.Case]] = []
    with pytest.raises(RuntimeError, match="pytest ended with -9"):
        found.extend(run)
    assert ended(found[-1]) == {
        "test_right[a::b]": ("passed", ""),
        "test_right[c]": ("passed", ""),
        "test_last.py::test_end": ("skipped", NOT_RUN),
    }
