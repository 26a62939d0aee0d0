"""A plug-in of pytest's: fla's tests on a GPU, with linattn's functions in fla.

A call that linattn refuses does not count as fla's: the test fails, unless fla refuses it as well. Neither does a test pass in
which none of linattn's functions ran. What is left of fla's kernels is not tuned. Processes take the devices ``JUDGED_ON`` in
turn.
"""

import functools
import os

import pytest

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
    seams.warn_once = lambda name, reason: reasons.append(reason)
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    ran.clear()
    result = yield
    assert ran, "refused by linattn: none of its functions ran"
    return result
