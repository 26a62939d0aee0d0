"""Outside judges: the own tests of ``causal_conv1d`` and ``mamba_ssm``, unchanged, on a CPU, with linattn's functions in them.

    python tests/integrations/kernel_judges.py --checkout mamba --json docs/judges/kernels.json

causal_conv1d's tests are in its sdist, which comes from the package index. Those of mamba_ssm's operators are in its repository
only: ``--checkout`` is a clone of it. How tests for a GPU run on a CPU is in ``judged_on_cpu.py``. Nothing of theirs stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import suites
from case_journal import NOT_RUN

SDISTS = {"causal_conv1d": "causal-conv1d==1.7.0", "mamba_ssm": "mamba-ssm==2.3.2.post1"}
NO_KERNELS = {"CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE", "MAMBA_SKIP_CUDA_BUILD": "TRUE"}
OPERATORS = ("test_selective_state_update", "test_layernorm_gated")
"""Of mamba_ssm's test files, those of functions that linattn has; the others are of kernels."""

NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What cases say that found none on a device."""


def fetch(package: str, folder: Path) -> Path:
    """The sdist of a package, unpacked in ``folder``; ``OSError`` where it cannot be had."""
    return suites.fetch(SDISTS[package], folder, **NO_KERNELS)


def run(tests: list[Path], packages: list[Path], every: int = 1) -> Counter[str]:
    """What becomes of their cases: passed, skipped, refused by linattn, failed."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-W", "ignore", *map(str, tests)]
        cases = suites.run(arguments, Path(folder), "judged_on_cpu", packages=packages, JUDGED_EVERY=str(every))
    return Counter(map(outcome, cases))


def outcome(case: suites.Case) -> str:
    """What became of a case: of one that linattn refuses, by which reason; that it did not run, where no time was left.

    Nor did it where the device had no memory left: those that ran beside it had taken it.
    """
    if "refused by linattn: " in case.why:
        return "refused: " + case.why.partition("refused by linattn: ")[2].partition(" must ")[0]
    if case.ended == "failed" and any(words in case.why for words in NO_MEMORY):
        return "not run"
    if case.ended == "failed":
        return f"failed: {case.why[:120]}"
    return "not run" if case.why == NOT_RUN else case.ended


def counts_of(found: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Cases that ran, and of these those that passed, that linattn refused, and that failed."""
    passed, refused, failed = (
        sum(n for name, n in found.items() if name.startswith(kind)) for kind in ("passed", "refused", "failed")
    )
    return passed + refused + failed, passed, refused, failed


def main() -> None:
    parser = argparse.ArgumentParser(description="the tests of causal_conv1d and mamba_ssm, with linattn's functions in them")
    parser.add_argument("--checkout", type=Path, help="a clone of state-spaces/mamba")
    parser.add_argument("--every", type=int, default=1, help="run one case of so many. Default: all that a CPU manages")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        conv, mamba = (fetch(package, Path(folder)) for package in SDISTS)
        found["causal_conv1d 1.7.0, test_causal_conv1d.py"] = run(
            [conv / "tests/test_causal_conv1d.py"], [conv, mamba], options.every
        )
        if options.checkout:
            for name in OPERATORS:
                tests = options.checkout.resolve() / "tests/ops/triton" / f"{name}.py"
                found[f"mamba_ssm, {name}.py"] = run([tests], [conv, mamba], options.every)
    for judge, outcomes in found.items():
        print(judge, *(f"{n} {name}" for name, n in outcomes.items()), sep="\n  ")
    if options.json:
        options.json.write_text(json.dumps({"every": options.every, "judges": found}, indent=1) + "\n")
    if any(counts_of(outcomes)[-1] for outcomes in found.values()):
        sys.exit("some cases fail")


if __name__ == "__main__":
    main()
