"""A part of what ``kernel_judges.py`` runs: tests and references of causal_conv1d and mamba_ssm, from the package index."""

from pathlib import Path

import kernel_judges
import pytest
import suites

for needed in ("torch", "triton", "einops"):
    pytest.importorskip(needed, reason="the packages that judge need it")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdists")
    try:
        return {package: kernel_judges.fetch(package, folder) for package in kernel_judges.SDISTS}
    except OSError as error:
        pytest.skip(str(error))


def test_every_fortieth_of_causal_conv1ds_own_cases_passes(packages):
    tests = packages["causal_conv1d"] / "tests/test_causal_conv1d.py"
    found = kernel_judges.run([tests], list(packages.values()), every=40)
    assert set(found) <= {"passed", "skipped"}, found
    assert found["passed"] > 50


def test_mamba_ssms_references_agree_with_linattn(packages):
    tests = Path(__file__).with_name("judge_scan.py")
    assert kernel_judges.run([tests], list(packages.values())) == {"passed": 12 + 2 + 16}


@pytest.mark.parametrize(
    "why", ["torch.OutOfMemoryError: CUDA out of memory. Tried", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"]
)
def test_a_case_without_memory_is_still_to_be_run(why):
    assert kernel_judges.outcome(suites.Case("a.py::b", "failed", why)) == "not run"
    assert (
        kernel_judges.outcome(suites.Case("a.py::b", "failed", "AssertionError: 1 is not 2"))
        == "failed: AssertionError: 1 is not 2"
    )
