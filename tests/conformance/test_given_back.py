"""What calls leave behind, by the checks that look at memory in passing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from linattn_conformance.calls import Failure
from linattn_conformance.checks.leak import given_back

RUN: Any = SimpleNamespace(adapter=SimpleNamespace(held=lambda: 0))
RESULTS = {"o": np.zeros((1000, 1000))}


def kept() -> np.ndarray:
    """As many bytes as the results have elements, and twice that."""
    return np.ones(2 * RESULTS["o"].size, np.uint8)


@pytest.fixture(autouse=True)
def _nothing_else_goes() -> Iterator[None]:
    """Objects of other tests are not given back between two looks, except by the check itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


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
    gc.collect()
    del old

    def calls(count: int) -> dict[str, np.ndarray]:
        left.extend(kept() for _ in range(count))
        return RESULTS

    with pytest.raises(Failure, match=r"^16 calls hold"), given_back(RUN, RESULTS, calls):
        calls(1)


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
