"""What ``pytest --pyargs linattn_conformance --linattn-backend NAME`` collects: one item for each case id."""

import pytest

from .pytest_plugin import state_of


@pytest.fixture(scope="session")
def linattn_state(pytestconfig):
    """The runner and what it has found so far, watched for the whole session."""
    state = state_of(pytestconfig)
    if state is None:
        pytest.skip("no --linattn-backend")
    with state.runner.watching():
        yield state


def test_case(linattn_state, linattn_case):
    """One case."""
    result = linattn_state.runner.run_one(linattn_case)
    linattn_state.results.append(result)
    if result.status == "declared-unsupported":
        pytest.skip(f"declared unsupported: {result.message}")
    if result.status == "failed" and linattn_state.is_known(result.id):
        pytest.xfail(result.message)
    assert result.status == "passed", f"{result.id}: {result.message}"
