"""A first call says what it waits for, once and only where it takes a while."""

from __future__ import annotations

import io
import logging
import time
from types import SimpleNamespace

import pytest
import torch
from linattn_backends.triton.runtime import notice, precompile
from triton_cases import arrays, call

SAID = "linattn: compiling gla for this GPU, once"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=shown))
    return shown


def wait_in(what, seconds, monkeypatch):
    monkeypatch.setattr(notice, "AFTER", 0.05)
    with notice.compiling(what):
        time.sleep(seconds)


def test_a_terminal_is_told(terminal, monkeypatch):
    wait_in("gla", 0.5, monkeypatch)
    assert terminal.getvalue() == f"{SAID}\n"


def test_a_log_that_takes_it_is_told_instead(terminal, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "linattn"):
        wait_in("gla", 0.5, monkeypatch)
    assert caplog.messages == [SAID]
    assert terminal.getvalue() == ""


def test_nobody_is_told_in_a_pipe(capfd, monkeypatch):
    wait_in("gla", 0.5, monkeypatch)
    assert capfd.readouterr() == ("", "")


def test_what_lies_in_the_cache_is_not_spoken_of(terminal, monkeypatch):
    monkeypatch.setattr(notice, "AFTER", 60)
    with notice.compiling("gla"):
        pass
    assert terminal.getvalue() == ""


def test_the_family_is_that_of_the_call(monkeypatch):
    """As a first launch on a GPU does it: the host code is rehearsed, and what compiles is told by the family's name."""
    told = []
    monkeypatch.setattr(precompile, "compiling", lambda what: told.append(what) or notice.compiling(what))
    monkeypatch.setattr(precompile, "warm_up", lambda device, launches: None)
    start = precompile.precompile

    def first(kernel, count, device, args, config):
        if device.type == "cpu" and not told:
            start(device)
        plain(kernel, count, device, args, config)

    from linattn_backends.triton.runtime import launch

    plain = launch.start
    monkeypatch.setattr(launch, "start", first)
    call("kda", arrays("kda", T=20, HV=2, K=16, V=16, dtype=torch.float32))
    assert told == ["kda"]
