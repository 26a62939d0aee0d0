"""Checks of what a call may not know of others: each finds what it is for, in a backend that is right otherwise."""

import os
import time
from typing import ClassVar

import linattn
import numpy as np
import pytest
from linattn.plugin import Unsupported
from linattn_conformance.broken.base import Simple
from linattn_conformance.cases import every_case
from linattn_conformance.memory import allocated
from linattn_conformance.runner import Runner

CASES = {(case.op, case.form, case.check): case for case in every_case()}


class Honest(Simple):
    name = "honest-history"


class ReusesBuffers(Simple):
    """Writes results of one shape to one buffer."""

    name = "reuses-buffers"

    def run(self, form, op, given):
        o, state = super().run(form, op, given)
        buffer = self.buffers.setdefault(o.shape, np.empty_like(o))
        buffer[...] = o
        return buffer, state

    buffers: ClassVar[dict] = {}


class CachesByIdentity(Simple):
    """Takes an array that it has seen for what it was."""

    name = "caches-by-identity"

    def run(self, form, op, given):
        key = id(given["v"])
        if key not in self.seen:
            self.seen[key] = (super().run(form, op, given), given["v"])
        return self.seen[key][0]

    seen: ClassVar[dict] = {}


class WrongLater(Simple):
    """Is wrong from the twentieth call on."""

    name = "wrong-later"
    count = 0

    def run(self, form, op, given):
        type(self).count += 1
        o, state = super().run(form, op, given)
        return (o * 1.01 if self.count > 20 else o), state


class FirstShape(Simple):
    """Keeps what it made for the first length."""

    name = "first-shape"
    longest = 0

    def run(self, form, op, given):
        o, state = super().run(form, op, given)
        type(self).longest = self.longest or o.shape[1]
        o[:, self.longest :] = 0.0
        return o, state


class TwoTiles(Simple):
    """Reads 256 channels of keys and no more."""

    name = "two-tiles"

    def run(self, form, op, given):
        wide = given["q"].shape[-1] > 256
        return super().run(form, op, {**given, "q": given["q"] * (np.arange(given["q"].shape[-1]) < 256)} if wide else given)


class Narrow(Simple):
    """Says so of what is wider."""

    name = "narrow"

    def supports(self, call):
        return Unsupported("has 256 channels of keys at most") if call.K > 256 else super().supports(call)


class SharesState(Simple):
    """Leaves its arguments where another thread finds them."""

    name = "shares-state"

    def run(self, form, op, given):
        type(self).given = given
        time.sleep(0.01)
        return super().run(form, op, self.given)


class OneProcess(Simple):
    """Works in the process that loaded it."""

    name = "one-process"
    home = os.getpid()

    def run(self, form, op, given):
        o, state = super().run(form, op, given)
        return (o if os.getpid() == self.home else np.zeros_like(o)), state


class KeepsAPlan(Simple):
    """Keeps 20 KB for each shape."""

    name = "keeps-a-plan"

    def run(self, form, op, given):
        self.plans.setdefault(given["v"].shape, np.zeros(2500))
        return super().run(form, op, given)

    plans: ClassVar[dict] = {}


FAULTS = {
    "held": (ReusesBuffers, "o is off by"),
    "rewritten": (CachesByIdentity, "o is off by"),
    "often": (WrongLater, "o is off by"),
    "shapes": (FirstShape, "o is off by"),
    "threads": (SharesState, "is off by"),
    "forked": (OneProcess, "in a forked process: Differs: o is off by"),
    "keeps": (KeepsAPlan, "24 new shapes hold"),
}


def result_of(kind, check, op="gla", framework="numpy"):
    linattn.register_backend(kind(), replace=True)
    try:
        runner = Runner(kind.name, framework)
        (result,) = runner.run([CASES[op, "chunk", check]])
    finally:
        linattn.unregister_backend(kind.name)
    return result


@pytest.mark.parametrize("check", FAULTS)
def test_a_fault_is_found_by_its_check(check):
    kind, message = FAULTS[check]
    found = result_of(kind, check)
    assert found.status == "failed"
    assert message in found.message


@pytest.mark.parametrize("check", FAULTS)
def test_without_a_fault_it_passes(check):
    found = result_of(Honest, check)
    assert (found.status, found.message) == ("passed", "")


def test_shapes_are_wider_than_any_of_the_factors():
    assert result_of(TwoTiles, "shapes").message.startswith("o is off by")
    assert result_of(Narrow, "shapes").status == "passed"


def test_torchs_defaults_are_no_part_of_a_call():
    torch = pytest.importorskip("torch")
    from linattn_conformance.broken.on_torch import OnTorch

    class TakesDefaults(OnTorch):
        name = "takes-defaults"

        def after(self, given, o, state):
            return (o * torch.ones(o.shape[-1])).to(o.dtype), state

    found = result_of(TakesDefaults, "surroundings", framework="torch")
    assert found.status == "failed"
    assert "with meta as default device" in found.message


def test_a_backward_pass_has_the_inputs_of_its_own_forward_pass():
    torch = pytest.importorskip("torch")
    from linattn_conformance.broken.on_torch import OnTorch

    class Scaled(torch.autograd.Function):
        last = None

        @staticmethod
        def forward(ctx, x):
            Scaled.last = x.detach().abs().mean()
            return x.clone()

        @staticmethod
        def backward(ctx, d):
            return d * (1 + Scaled.last)

    class LastForward(OnTorch):
        name = "last-forward"

        def before(self, given):
            return {**given, "v": Scaled.apply(given["v"])}

    assert result_of(LastForward, "held-backward", framework="torch").status == "failed"


class HoldsItself(Simple):
    """Its outputs are of arrays that eight megabytes go with, which only a look for garbage frees."""

    name = "holds-itself"

    def run(self, form, op, given):
        o, state = super().run(form, op, given)
        return np.asarray(Cyclic(o)), state


class Cyclic:
    SIZE = 8_000_000
    made = 0

    def __init__(self, x):
        Cyclic.made += 1
        self.x, self.me, self.more = np.ascontiguousarray(x), self, np.ones(self.SIZE, np.uint8)

    @property
    def __array_interface__(self):
        return self.x.__array_interface__


def test_results_that_hold_themselves_do_not_pile_up():
    linattn.register_backend(HoldsItself(), replace=True)
    try:
        runner = Runner("holds-itself", "numpy")
        found = [case for case in every_case() if (case.op, case.form, case.check) == ("gla", "chunk", "forward")]
        cases = [case for case in found if runner.applies(case) and case.size["T"] < 200][:20]
        before, made = allocated(), Cyclic.made
        assert [result.status for result in runner.run(cases)] == ["passed"] * 20
    finally:
        linattn.unregister_backend("holds-itself")
    assert allocated() - before < (Cyclic.made - made) * Cyclic.SIZE / 2  # a case may leave those of its own calls
