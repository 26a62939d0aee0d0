"""A plug-in of pytest's: fla's tests of ranks, whose processes find linattn's functions by ``on_ranks/sitecustomize.py``.

Tests end with the processes that they started. Several run at once: the processes of each meet in a file of their own.
``JUDGED_TOKENS`` is the most tokens of a test, in float32: its sequences are cut in proportion.
"""

import functools
import multiprocessing
import os
import shutil
import tempfile

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

RUN = "run_cp_test_with_spawn"
"""What starts the ranks of a test, in every file."""


def pytest_collection_modifyitems(items):
    most = int(os.environ.get("JUDGED_TOKENS", "0"))
    for module in {item.module for item in items} if most else ():
        setattr(module, RUN, cut(getattr(module, RUN), most))


def cut(run, most):
    """Ranks that share no more than so many tokens, in float32: fla's references round in what they are given."""

    @functools.wraps(run)
    def fewer(*, T, lengths, **others):
        tokens = min(T, most)
        others["dtype"] = torch.float32
        return run(T=tokens, lengths=[length * tokens // T for length in lengths], **others)

    return fewer


def pytest_runtest_setup(item):
    os.environ["JUDGED_MEETING"] = os.path.join(tempfile.mkdtemp(), "meeting")


def pytest_runtest_teardown(item):
    shutil.rmtree(os.path.dirname(os.environ["JUDGED_MEETING"]), ignore_errors=True)  # a rank may still delete the file


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except ProcessRaisedException as error:
        raise AssertionError(said(error)) from error
    finally:
        for process in multiprocessing.active_children():
            process.kill()


def said(error):
    """What the error of a rank says, without the way to it."""
    return str(error).strip().splitlines()[-1].removeprefix("AssertionError: ")
