"""A plug-in of pytest's: fla's tests on a GPU, with linattn's functions in fla.

A call that linattn refuses does not count as fla's: the test fails, unless fla refuses it as well. Neither does a test pass in
which none of linattn's functions ran. What is left of fla's kernels is not tuned. Processes take the devices ``JUDGED_ON`` in
turn. At the time ``JUDGED_UNTIL``, in seconds since the epoch, tests that run are interrupted, and no more are begun.
"""

import contextlib
import functools
import os
import signal
import time

import pytest

LONG = 1e6
"""Seconds that no test takes."""
ran: set[str] = set()
"""The functions of linattn's that the present test has called."""
reasons: list[str] = []
"""Why linattn refused calls, the last one last."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Before fla's tests import its functions by name, and anything looks for a device."""
    os.environ["CUDA_VISIBLE_DEVICES"] = device_of(os.environ.get("PYTEST_XDIST_WORKER", "gw0"))
    enable()


def enable():
    """Put linattn's functions into fla; what linattn refuses is an error, whatever fla answers."""
    from linattn.integrations import fla, seams

    serving = seams.serving
    seams._warn_once = lambda name, reason: reasons.append(reason)
    seams.serving = lambda before, ours, name: serving(answered(before, name), ours, name)
    fla.FUNCTIONS.update({name: seen(function) for name, function in fla.FUNCTIONS.items()})
    fla.enable()


def device_of(worker):
    """The device of one of several processes, by its name."""
    devices = os.environ["JUDGED_ON"].split(",")
    return devices[int(worker.removeprefix("gw")) % len(devices)]


def seen(function):
    """A function that says in ``ran`` that it was called."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        ran.add(function.__name__)
        return function(*args, **kwargs)

    return run


def answered(before, name):
    """A function of fla's in the place of which linattn has refused a call: what it answers does not count."""

    @functools.wraps(before)
    def run(*args, **kwargs):
        before(*args, **kwargs)
        raise AssertionError(f"refused by linattn: {name}: {reasons[-1]}")

    return run


@pytest.fixture(autouse=True, scope="session")
def untuned():
    from linattn_benchmarks import tuning

    with tuning.untuned():
        yield


def pytest_runtest_setup(item):
    if left() <= 0:
        not_run()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    ran.clear()
    with interrupted():
        result = yield
    assert ran, "refused by linattn: none of its functions ran"
    return result


@contextlib.contextmanager
def interrupted():
    """What is not done in time did not run."""
    signal.signal(signal.SIGALRM, not_run)
    signal.setitimer(signal.ITIMER_REAL, min(max(left(), 1e-3), LONG))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def left():
    """Seconds."""
    return float(os.environ.get("JUDGED_UNTIL", "inf")) - time.time()


def not_run(*_):
    pytest.skip("not run: no time was left")
