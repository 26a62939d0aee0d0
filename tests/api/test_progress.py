"""Bars are on a terminal, and nowhere else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import pytest

pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")

WORK = """\
from linattn.progress import bars

with bars() as progress:
    for i in progress.track(range(3), description="counting"):
        print("line", i)
"""


def on_terminal(code: str, stdout: bool) -> tuple[str, str]:
    """What a program writes to a terminal that is its standard error, and its output too or a pipe."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunk = os.read(ours, 4096)
            except OSError:  # Linux, when the other side is closed
                return
            if not chunk:
                return
            shown.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    piped = theirs if stdout else subprocess.PIPE
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", code], stdout=piped, stderr=theirs, env=environment, text=True, check=True)
    os.close(theirs)
    reader.join(10)
    os.close(ours)
    return b"".join(shown).decode(), done.stdout


def test_a_terminal_has_a_bar_and_a_pipe_what_was_printed():
    shown, printed = on_terminal(WORK, stdout=False)
    assert "counting" in shown
    assert "3/3" in shown
    assert printed == "line 0\nline 1\nline 2\n"


def test_what_is_printed_on_a_terminal_stays():
    shown, _ = on_terminal(WORK, stdout=True)
    assert "counting" in shown
    assert all(f"line {i}" in shown for i in range(3))


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}], ids=["plain", "colours in a log"])
def test_a_log_has_nothing(environment):
    done = subprocess.run(
        [sys.executable, "-c", WORK], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    assert (done.stdout, done.stderr) == ("line 0\nline 1\nline 2\n", "")


SOAK = """\
from linattn.cli import main
from linattn_conformance import search
import sys

search.EXAMPLES = 30

sys.argv = ["linattn", "conformance-soak", "--backend", "numpy", "--minutes", "0", "--seed", "3", "--family", "linear_attn"]
main()
"""


def test_a_search_tells_how_far_it_is():
    pytest.importorskip("hypothesis")
    shown, printed = on_terminal(SOAK, stdout=False)
    assert re.search(r"searching: \d+ cases, 0 found wrong", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown))
    assert printed.startswith("seed 3\n")
