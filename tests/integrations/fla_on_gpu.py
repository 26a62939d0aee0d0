"""A plug-in of pytest's: fla's tests on a GPU, with linattn's functions in fla.

A call that linattn refuses does not go to fla's kernels, and a test in which none of linattn's functions ran does not pass.
"""

import functools

import pytest

ran: set[str] = set()
"""The functions of linattn's that the present test has called."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Before fla's tests import its functions by name."""
    from judged_on_cpu import refused
    from linattn.integrations import fla, seams

    seams._warn_once = refused
    fla.FUNCTIONS.update({name: seen(function) for name, function in fla.FUNCTIONS.items()})
    fla.enable()


def seen(function):
    """A function that says in ``ran`` that it was called."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        ran.add(function.__name__)
        return function(*args, **kwargs)

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    ran.clear()
    result = yield
    assert ran, "refused by linattn: none of its functions ran"
    return result
