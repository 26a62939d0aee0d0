"""A plug-in of pytest's under which tests that were written for a GPU run on a CPU, with linattn's functions in their package.

What they make on ``"cuda"`` is made on the CPU. Extensions that are compiled for a GPU are empty modules, so that a call that
would go to one fails. Of the cases, those are run whose sizes a CPU manages, each ``JUDGED_EVERY``-th of them.
"""

import os
import sys
import types
import zlib

import pytest
from torch.overrides import TorchFunctionMode

MOST = {"dim": 2048, "d": 2048, "seqlen": 512}
"""The largest sizes that are run, by parameter."""
LOOPS = ("race_condition",)
"""Tests that repeat a call ten thousand times to catch a GPU in a race."""


class OnCpu(TorchFunctionMode):
    """Whatever asks for ``"cuda"`` gets the CPU."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        args = tuple("cpu" if isinstance(x, str) and x == "cuda" else x for x in args)
        return function(*args, **{name: "cpu" if name == "device" else x for name, x in (kwargs or {}).items()})


def package(name):
    """The package of that name without its ``__init__``, which needs more than its functions do."""
    module = types.ModuleType(name)
    module.__path__ = [f"{folder}/{name}" for folder in sys.path if os.path.isdir(f"{folder}/{name}")]
    sys.modules[name] = module


def refused(name, reason):
    """In the place of the warning that a call goes where it went before."""
    raise AssertionError(f"refused by linattn: {name}: {reason}")


def pytest_configure(config):
    from linattn.integrations import causal_conv1d, mamba_ssm, seams

    sys.modules["causal_conv1d_cuda"] = types.ModuleType("causal_conv1d_cuda")
    package("mamba_ssm")
    seams.warn_once = refused
    for integration in (causal_conv1d, mamba_ssm):
        integration.enable()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    with OnCpu():
        yield


def pytest_collection_modifyitems(config, items):
    every = int(os.environ["JUDGED_EVERY"])
    chosen = [item for item in items if manageable(item) and zlib.crc32(item.name.encode()) % every == 0]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def manageable(item):
    """Whether a CPU has done with it soon."""
    sizes = item.callspec.params if hasattr(item, "callspec") else {}
    return not any(loop in item.name for loop in LOOPS) and all(sizes.get(name, 0) <= most for name, most in MOST.items())
