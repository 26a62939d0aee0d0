"""A plug-in of pytest's: fla's tests of ranks, whose processes find linattn's functions by ``on_ranks/sitecustomize.py``.

Tests end as those of ``fla_on_gpu.py`` do, with the processes that they started.
"""

import multiprocessing

import pytest
from fla_on_gpu import interrupted, pytest_runtest_setup

__all__ = ["pytest_runtest_setup"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        with interrupted():
            return (yield)
    finally:
        for process in multiprocessing.active_children():
            process.kill()
