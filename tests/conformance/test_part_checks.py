"""Calls on parts of a problem: they are those of a right backend, they have many sizes, and one of each may be wrong."""

import math
import zlib
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from linattn.errors import Unsupported
from linattn.registry import registry
from linattn_conformance.adapters import adapter_for
from linattn_conformance.broken.base import Simple
from linattn_conformance.calls import drawn, truth
from linattn_conformance.cases import every_case, named, problem
from linattn_conformance.checks.parts import AGAIN, EAGER
from linattn_conformance.mutants.backend import Fault, carrier
from linattn_conformance.mutants.conditions import Atom, Condition
from linattn_conformance.mutants.effects import Effect, Region
from linattn_conformance.mutants.frameworks import ARRAYS
from linattn_conformance.parts import Part, dealt, draw_parts, support_of
from linattn_conformance.runner import Runner

PLAIN = "gla/chunk/fp32/parts-state/T40-K32-V32-B5-H4/parts"
BACKWARD = "gla/chunk/fp32/parts-state/T40-K32-V32-B5-H4/parts-backward"


class Honest(Simple):
    name = "honest-parts"


class Wrong(Simple):
    """Loses the last value channel at one kind of sizes."""

    name = "wrong-parts"
    wrong: ClassVar = staticmethod(lambda given: False)

    def run(self, form, op, given):
        o, state = super().run(form, op, given)
        if self.wrong(given):
            o = o.copy()
            o[..., -1] = 0.0
        return o, state


def outcome(backend, name):
    runner = Runner(backend)
    with runner.watching():
        return runner.run_one(named(name))


@pytest.mark.parametrize("op", ["gla", "delta_rule", "mixed_attn", "ssd", "short_conv"])
def test_a_right_backend_is_right_in_every_part(op):
    cases = [case for case in every_case() if case.op == op and case.check.startswith("parts") and case.within == "core"]
    assert {case.check for case in cases} == {"parts", "parts-backward"}
    runner = Runner("numpy")
    with runner.watching():
        found = [runner.run_one(case) for case in cases[:6] if runner.applies(case)]
    assert [result.message for result in found if result.status != "passed"] == []


def test_parts_have_many_sizes_and_hold_what_they_must():
    case = named(BACKWARD)
    support, drawn_parts = support_of(case), draw_parts(case, True, 16)
    assert len({(part.sizes["T"], part.sizes["K"], part.sizes["V"], part.sizes["H"]) for part in drawn_parts}) > 12
    assert {part.packed for part in drawn_parts} == {True, False}
    for part in drawn_parts:
        assert all(support.tokens[row] <= length for row, length in zip(part.rows, part.lengths, strict=True))
        assert all(support.widths[symbol][head] <= part.widths[symbol] for symbol in ("K", "V") for head in part.heads)


def test_sizes_come_in_turn():
    """Edges and others by turns, and none again before all were dealt; other problems of the same sizes go on."""
    case = named(PLAIN)
    sizes = [dealt(case, "T", turn, 1, 40) for turn in range(80)]
    edges, others = sizes[::2], sizes[1::2]
    assert sorted(edges[:14]) == [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33]
    assert len(set(others[:26])) == 26
    assert not set(edges) & set(others)
    assert case.place == 0
    assert named(PLAIN.replace("parts-state", "parts.3-state")).place == 3


def test_nothing_hides_what_parts_are_to_show():
    """Neither zeros, nor a scale beside which float16 holds nothing."""
    cases = [case for case in every_case() if case.place is not None]
    flags = {flag for case in cases for flag in case.flags}
    assert not {"blank.q", "blank.k", "blank.v", "scale.zero", "zeros.cotangents"} & flags
    assert not any({"float16", "scale.tiny"} <= {*case.flags, case.dtype} for case in cases)


def test_a_part_of_an_array_is_that_of_its_rows_heads_tokens_and_channels():
    x = np.arange(2 * 5 * 4 * 3).reshape(2, 5, 4, 3)
    plain = Part((1, 0), (2, 2), False, (1,), 2, {"V": 2}, None, 1.0, 1.0, False, {})
    assert np.array_equal(plain.cut(x, ("B", "T", "HV", "V"), 2), x[[1, 0], :2, 2:, :2])
    packed = Part((1, 0), (2, 3), True, (0, 1), 2, {"V": 3}, None, 1.0, 1.0, False, {})
    assert np.array_equal(packed.cut(x, ("B", "T", "HV", "V"), 2), np.concatenate([x[1:, :2], x[:1, :3]], 1))
    sums = Part((0,), (2,), False, (0,), 4, {"V": 2}, None, 1.0, 1.0, False, {})
    assert np.array_equal(sums.cut(x, ("N", "T", "HV", "V+1"), 4)[..., -1], x[:1, :2, :, -1])


def test_keys_and_gradients_that_are_fed_in_end_with_the_support():
    case, adapter = named(BACKWARD), adapter_for("numpy", "cpu")
    support, values, fed = support_of(case), drawn(case, adapter), truth(case, adapter).cotangents
    for head, (keys, channels) in enumerate(zip(support.widths["K"], support.widths["V"], strict=True)):
        assert not values["q"][:, :, head, keys:].any()
        assert not values["k"][:, :, head, keys:].any()
        assert not fed["o"][:, :, head, channels:].any()
        assert not fed["final_state"][:, head, keys:].any()
    for row, tokens in enumerate(support.tokens):
        assert fed["o"][row, :tokens].any()
        assert not fed["o"][row, tokens:].any()
        assert fed["final_state"][row].any() == (tokens == 40)


def test_the_first_of_some_parts_and_the_smallest_are_called_again(monkeypatch):
    seen, drawn_parts = [], draw_parts(named(PLAIN), False, EAGER)
    smallest = min(drawn_parts, key=lambda part: math.prod(part.sizes.values()))
    monkeypatch.setattr("linattn_conformance.checks.values.compare_later", lambda run, *given: seen.append(run.part))
    registry.register(Honest(), replace=True)
    try:
        assert outcome("honest-parts", PLAIN).status == "passed"
    finally:
        registry.unregister("honest-parts")
    assert seen == [part for i, part in enumerate(drawn_parts) if i % AGAIN == 0 or part is smallest]


FAULTS = {
    "packed": lambda given: given.get("cu_seqlens") is not None,
    "three heads": lambda given: given["q"].shape[2] == 3,
    "an odd width beside an even length": lambda given: given["q"].shape[3] % 2 and given["q"].shape[1] % 2 == 0,
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_at_other_sizes_than_the_problem_has_is_seen(what, monkeypatch):
    monkeypatch.setattr(Wrong, "wrong", staticmethod(FAULTS[what]))
    for backend in (Honest(), Wrong()):
        registry.register(backend, replace=True)
    try:
        assert outcome("honest-parts", PLAIN).status == "passed"
        told = outcome("wrong-parts", PLAIN)
    finally:
        for name in ("honest-parts", "wrong-parts"):
            registry.unregister(name)
    assert told.status == "failed"
    assert "of the part" in told.message


class Selective(Honest):
    """Declares all but some sizes unsupported."""

    name = "selective-parts"
    takes: ClassVar = staticmethod(lambda T: True)

    def supports(self, call):
        T = dict(call.dims)["T"]
        return super().supports(call) or (None if self.takes(T) else Unsupported("no kernel for this length"))


@pytest.mark.parametrize(
    ("takes", "status"),
    [(lambda T: True, "passed"), (lambda T: T == 40 or T % 3 > 0, "passed"), (lambda T: T == 40, "declared-unsupported")],
    ids=["all", "most", "one"],
)
def test_a_backend_that_takes_few_of_the_parts_has_not_passed(takes, status, monkeypatch):
    monkeypatch.setattr(Selective, "takes", staticmethod(takes))
    registry.register(Selective(), replace=True)
    try:
        told = outcome("selective-parts", PLAIN)
    finally:
        registry.unregister("selective-parts")
    assert told.status == status, told.message


# -- of what there is more in a call of parts -----------------------------------------------------------------------------


def test_a_long_problem_has_the_lengths_around_large_powers_of_two():
    case = named("gla/chunk/fp32/parts-state/T4096-K4-V4-B1-H2/parts")
    lengths = {part.sizes["T"] for part in draw_parts(case, False, 16) if not part.packed}
    edges = {256, 257, *(2**i + n for i in (9, 10, 11) for n in (-1, 0, 1)), 4095, 4096}
    assert lengths <= edges
    assert len(lengths) > 5
    assert case in every_case()


def test_parts_of_grouped_heads_have_groups_of_every_size():
    case = named("gla/chunk/fp32/grouped.5-parts-state/T40-K32-V32-B5-H2/parts")
    assert {part.group for part in draw_parts(case, False, 16, 5)} == {1, 2, 3, 4, 5}
    assert {part.group for part in draw_parts(case, True, 16, 5)} == {5}
    assert outcome("numpy", case.id).status == "passed"


def test_each_form_has_parts_of_its_own():
    drawn_parts = [draw_parts(named(PLAIN.replace("chunk", form)), False, 16) for form in ("chunk", "recurrent", "parallel")]
    lengths = [{part.sizes["T"] for part in found} for found in drawn_parts]
    assert len(set.union(*lengths)) > max(map(len, lengths)) + 5


class Forgetful(Simple):
    """Is right ten times for each shape, and loses the last value channel then."""

    name = "forgetful-parts"
    calls: ClassVar = Counter()

    def run(self, form, op, given):
        o, state = super().run(form, op, given)
        shape = tuple(given["v"].shape), given["k"].shape[-1]
        self.calls[shape] += 1
        if self.calls[shape] > 10:
            o = o.copy()
            o[..., -1] = 0.0
        return o, state


def test_one_part_of_a_problem_is_called_many_times():
    registry.register(Forgetful(), replace=True)
    try:
        told = outcome("forgetful-parts", PLAIN)
    finally:
        registry.unregister("forgetful-parts")
    assert told.message.startswith("o of a later call of the part")


NORM = "gated_rms_norm/direct/fp32/plain/T6-D40-B2/widths"
WIDTH_OF_ONE = dealt(named(NORM), "D", zlib.crc32(repr(problem(named(NORM))).encode()) % 600 + 7, 1, 300)


def test_a_norm_is_called_at_many_widths():
    assert outcome("numpy", NORM).status == "passed"
    mutant = carrier(registry.load("numpy"))
    mutant.fault = Fault(
        Condition("gated_rms_norm", "direct", (Atom("size D", "is", WIDTH_OF_ONE),)),
        Effect("returns", "o", ("...", "D"), Region(), "scaled by", 1.5),
        ARRAYS["numpy"](),
    )
    registry.register(mutant, replace=True)
    try:
        told = outcome("mutant", NORM)
    finally:
        registry.unregister("mutant")
    assert told.status == "failed"
    assert f"of the width {WIDTH_OF_ONE}" in told.message
