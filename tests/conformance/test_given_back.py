"""What calls leave behind, by the checks that look at memory in passing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from linattn_conformance.calls import Failure
from linattn_conformance.checks.leak import given_back

RUN: Any = SimpleNamespace(adapter=SimpleNamespace(held=lambda: 0))
RESULTS = {"o": np.zeros((100, 100))}


def kept() -> np.ndarray:
    """As many bytes as the results have elements, and twice that."""
    return np.ones(2 * RESULTS["o"].size, np.uint8)


def test_calls_that_each_keep_an_array_fail() -> None:
    left: list[np.ndarray] = []

    def calls(count: int) -> dict[str, np.ndarray]:
        left.extend(kept() for _ in range(count))
        return RESULTS

    with (
        pytest.raises(Failure, match=r"^8 calls hold \d+\.\d KiB more each time, however many there were before$"),
        given_back(RUN, RESULTS, calls),
    ):
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
