"""What ``pytest --pyargs linattn_conformance --linattn-backend NAME`` collects: one item for each case id."""

import pytest

from .pytest_plugin import state_of


@pytest.fixture(scope="session")
def linattn_state(pytestconfig):
    """The process that runs the cases, and what it has found so far."""
    state = state_of(pytestconfig)
    if state is None:
        pytest.skip("no --linattn-backend")
    return state


def test_case(linattn_state, linattn_case):
    """One case."""
    result = linattn_state.run_one(linattn_case)
    if result.status == "declared-unsupported":
        pytest.skip(f"declared unsupported: {result.message}")
    if result.status == "failed" and linattn_state.is_known(result.id):
        pytest.xfail(result.message)
    assert result.status == "passed", f"{result.id}: {result.message}"
