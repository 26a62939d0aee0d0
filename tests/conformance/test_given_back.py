"""What calls leave behind, by the checks that look at memory in passing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from linattn_conformance.calls import Failure
from linattn_conformance.checks.leak import OLD, OPERATIONS, Before, begin, given_back, in_use, left_by_operation


class Framework:
    """One that leaves so many bytes behind for each operation, and holds what is put on its device."""

    def __init__(self, leaves: int = 0) -> None:
        self.leaves, self.left, self.on_device = leaves, [], 0

    def held(self) -> int:
        return self.on_device

    def from_float64(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return x.astype(dtype)

    def to_float64(self, x: np.ndarray) -> np.ndarray:
        self.left.append(np.ones(self.leaves, np.uint8))
        return x.astype(np.float64)


RUN: Any = SimpleNamespace(adapter=Framework())
RESULTS = {"o": np.zeros((1000, 1000))}


def kept() -> np.ndarray:
    """As many bytes as the results have elements, and twice that."""
    return np.ones(2 * RESULTS["o"].size, np.uint8)


@pytest.fixture(autouse=True)
def _nothing_else_goes() -> Iterator[None]:
    """Objects of other tests are not given back between two looks, except by the check itself; and none of these is frozen
    for the tests that come.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def test_calls_that_each_keep_an_array_fail() -> None:
    left: list[np.ndarray] = []

    def calls(count: int) -> dict[str, np.ndarray]:
        left.extend(kept() for _ in range(count))
        return RESULTS

    with (
        pytest.raises(Failure, match=r"^16 calls hold \d+\.\d KiB more each time, however many there were before$"),
        given_back(RUN, RESULTS, calls),
    ):
        calls(1)


def test_calls_that_keep_arrays_fail_where_older_objects_go_at_the_same_time() -> None:
    left: list[np.ndarray] = []
    old: list[Any] = [np.ones(100 * RESULTS["o"].size, np.uint8)]
    old.append(old)
    gc.freeze()
    del old

    def calls(count: int) -> dict[str, np.ndarray]:
        left.extend(kept() for _ in range(count))
        return RESULTS

    with pytest.raises(Failure, match=r"^16 calls hold"), given_back(RUN, RESULTS, calls):
        calls(1)


SMALL = {"o": np.zeros(100)}


def leaving(operations: int, on_device: int = 0) -> tuple[Any, Callable[[int], dict[str, np.ndarray]]]:
    """A run whose framework leaves 300 bytes behind for each operation, and calls of so many that leave more on its device."""
    run: Any = SimpleNamespace(adapter=Framework(300))

    def calls(count: int) -> dict[str, np.ndarray]:
        for _ in range(operations * count):
            run.adapter.to_float64(np.ones(1))
        run.adapter.on_device += count * on_device
        return SMALL

    return run, calls


def test_what_a_framework_leaves_behind_is_no_leak_of_a_call() -> None:
    run, calls = leaving(20)
    assert 300 <= left_by_operation(run.adapter) < 512
    with given_back(run, SMALL, calls):
        calls(1)


@pytest.mark.parametrize(("operations", "on_device"), [(150, 0), (20, 2000)])
def test_a_call_that_leaves_more_behind_than_its_framework_fails(operations: int, on_device: int) -> None:
    run, calls = leaving(operations, on_device)
    with pytest.raises(Failure, match=r"^16 calls hold"), given_back(run, SMALL, calls):
        calls(1)


def test_there_is_a_most_that_a_framework_may_leave_behind() -> None:
    assert left_by_operation(cast("Any", Framework(5000))) == 512


class Relieved(Framework):
    """One that drops something older in the middle of it."""

    def __init__(self, leaves: int) -> None:
        super().__init__(leaves)
        self.older: np.ndarray | None = np.ones(1_000_000, np.uint8)

    def to_float64(self, x: np.ndarray) -> np.ndarray:
        if len(self.left) == 2 * OPERATIONS:
            self.older = None
        return super().to_float64(x)


def test_something_older_that_goes_does_not_hide_what_a_framework_leaves_behind() -> None:
    assert 300 <= left_by_operation(cast("Any", Relieved(300))) < 512


def test_what_is_made_once_is_no_leak() -> None:
    left: dict[str, np.ndarray] = {}

    def calls(count: int) -> dict[str, np.ndarray]:
        left.setdefault("table", kept())
        return RESULTS

    with given_back(RUN, RESULTS, calls):
        calls(1)
    assert left


def test_results_that_only_hold_each_other_are_no_leak() -> None:
    def calls(count: int) -> dict[str, np.ndarray]:
        for _ in range(count):
            cycle: list[Any] = [kept()]
            cycle.append(cycle)
        return RESULTS

    with given_back(RUN, RESULTS, calls):
        calls(1)


class Cyclic:
    """Eight megabytes that go only when somebody looks for them."""

    def __init__(self) -> None:
        self.held, self.me = np.ones(CYCLIC, np.uint8), self


CYCLIC = 8_000_000


def one_call(count: int) -> dict[str, np.ndarray]:
    return RESULTS


def test_cyclic_results_go_with_their_case() -> None:
    begin(RUN)
    before = in_use(RUN)
    for _ in range(20):
        begin(RUN)
        result = Cyclic()
        with given_back(RUN, RESULTS, one_call):
            pass
        assert result.held.size == CYCLIC
        del result
    begin(RUN)
    assert in_use(RUN) - before < CYCLIC


def test_cyclic_results_that_outlive_their_case_go_as_memory_grows() -> None:
    begin(RUN)
    Before.least = before = in_use(RUN, thoroughly=True)
    last = None
    for _ in range(30):
        begin(RUN)
        last = Cyclic()
    begin(RUN)
    assert last is not None
    assert in_use(RUN) - before < OLD + 2 * CYCLIC
