"""Outside judges: transformers' own tests, unchanged, on a CPU, as it is and with linattn in it; and those of fla.

    python tests/integrations/judges.py --json docs/judges/transformers.json
    python tests/integrations/judges.py --fla flash-linear-attention --json docs/judges/fla.json
    python tests/integrations/judges.py --fla-models flash-linear-attention --json docs/judges/fla-models.json
    python tests/integrations/judges.py --fla-ranks flash-linear-attention --json docs/judges/fla-ranks.json

A case counts by what becomes of it: passed, failed, skipped. linattn may change nothing of that.

The sdist of transformers, from the package index, holds the tests that every model has to pass
(``tests/test_modeling_common.py``), but not the files that apply them to each model. These are made up for by
``judge_models.py`` and ``tiny_models.py``; two modules of further tests that the sdist lacks, by empty classes. With
``--checkout``, a clone of transformers at the same version, ``tests/models/FAMILY/test_modeling_FAMILY.py`` runs as it is.

``--fla``, a clone of flash-linear-attention, runs its operator tests of linattn's families, with linattn's functions in fla:
those of short sequences on a CPU, and all of them where there is a GPU, ``--jobs`` at a time. What is written says at any time
what has ended; after ``--seconds`` all processes end, and the others run next time, if ``--more`` names what was written;
``--fla-models``, its tests of models of these families, of which ``fla_models_on_cpu.py`` says how a CPU runs them;
``--fla-ranks``, those of its context parallelism, on as many GPUs as there are, with ``--seconds`` and ``--more`` as well, and
with ``--as-it-is`` fla's own functions.

Nothing of theirs stays: what was fetched is in a temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import kernel_judges
import suites
import tiny_models
import torch

HERE = Path(__file__).parent

MISSING = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""Modules of the tests that the sdist lacks and its files import."""

FLA_FILES = [
    "gla",
    "simple_gla",
    "gdn",
    "kda",
    "delta",
    "linear_attn",
    "retention",
    "rwkv6",
    "rwkv7",
    "dplr_delta",
    "iplr_delta",
    "lightning_attn",
]
"""fla's test files of the families that linattn has."""
FLA_SHORT = "(T63 or T15 or T16 or T60 or T64 or T100) and not T1000 and not T1024 and not 2048 and not 8192 and not T4"
"""Their cases that a CPU manages, as pytest's -k."""
FLA_MODELS = [
    "linear_attn",
    "retnet",
    "gla",
    "hgrn2",
    "rwkv6",
    "mamba2",
    "deltanet",
    "gated_deltanet",
    "kda",
    "rwkv7",
]
"""fla's test files of models of these families."""
FLA_RANKS = {"gdn": 3, "kda": 3, "dplr": 2, "rwkv7": 1}
"""fla's test files of the families that its ranks share, and how many of its tests run at once: those of kda keep the states of
all tokens, a sixth of a GPU's memory each.
"""
RANKS_OF_CPU = {"JUDGED_CPUS": "8", "JUDGED_TOKENS": "1024"}
"""Ranks on CPUs: at most how many, and of how many tokens together."""

Outcomes = dict[str, str]
"""What became of each case, by its name."""


def from_index(folder: Path) -> Path:
    """transformers' tests of the installed version, out of its sdist, ready to run in ``folder``."""
    root = suites.fetch(f"transformers=={metadata.version('transformers')}", folder, only="/tests/")
    tests = root / "tests"
    for name, text in MISSING.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(text)
        (tests / name).with_name("__init__.py").touch()
    (tests / "__init__.py").touch()
    shutil.copy(HERE / "judge_models.py", tests / "test_judge_models.py")
    return root


def run(root: Path, arguments: list[str], prefix: list[str], plugin: str = "without_kernels") -> Outcomes:
    """What becomes of their tests."""
    cases = suites.run(arguments, root, plugin, prefix=prefix, HF_HUB_OFFLINE="1")
    return {case.node: _outcome(case) for case in cases}


def _outcome(case: suites.Case) -> str:
    """What became of a case. One that came to a kernel, which no CPU runs, was refused by linattn or calls none of its own."""
    return "refused: left to a kernel" if case.ended == "failed" and "0 active drivers" in case.why else case.ended


def judge(root: Path, families: Iterable[str], expression: str = "", checkout: bool = False) -> dict[str, dict[str, Any]]:
    """What becomes of each family's cases, with linattn and without, and which differ."""
    pattern = "tests/models/{0}/test_modeling_{0}.py" if checkout else "tests/test_judge_models.py::Test_{0}"
    chosen = [*(pattern.format(family) for family in families), *(["-k", expression] if expression else [])]
    before = run(root, chosen, [])
    after = run(root, chosen, [sys.executable, "-m", "linattn", "run-with", "transformers", "--"])
    return {family: _compared(_of(family, before), _of(family, after)) for family in families}


def _of(family: str, outcomes: Outcomes) -> Outcomes:
    """A family's cases: their names hold that of its class here, or of its folder in a checkout."""
    marks = (f"::Test_{family}::", f"/models/{family}/")
    return {name: outcome for name, outcome in outcomes.items() if any(mark in name for mark in marks)}


def judge_fla(checkout: Path) -> dict[str, Counter[str]]:
    """What becomes of fla's operator tests of linattn's families, at the lengths that a CPU manages, by file."""
    files = fla_files()
    linattn = [sys.executable, "-m", "linattn", "run-with", "fla", "--"]
    outcomes = run(checkout, [*files, "-k", FLA_SHORT], linattn, "fla_on_cpu")
    return _by_file((_file(name), outcome) for name, outcome in outcomes.items())


def judge_fla_on_gpu(checkout: Path, jobs: int, seconds: float, earlier: Mapping[str, Any]) -> Generator[dict[str, Any]]:
    """What becomes of all of fla's operator tests of linattn's families on a GPU, ``jobs`` at a time.

    Args:
        checkout: A clone of fla's.
        jobs: Processes.
        seconds: After which these end.
        earlier: What a run of this found that left tests for this one; empty if there was none.

    Yields:
        As it goes, ``judges``, counts by file, and ``exceptions``, the cases that did not pass, by what became of them.
    """
    until = time.monotonic() + seconds
    together = ["-pxdist.plugin", f"-n{jobs}", "--dist=worksteal"]  # neighbours in a file compile the same kernels

    def run(tests: list[str]) -> Generator[list[suites.Case]]:
        return suites.progress([*tests, *together], checkout, "fla_on_gpu", until=until, JUDGED_ON=devices())

    return _records([fla_files()], run, earlier)


def _sums(*tables: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    """Counts by file of several tables."""
    names = dict.fromkeys(chain(*tables))
    return {name: sum((table[name] for table in tables if name in table), Counter()) for name in names}


def _ended(case: suites.Case) -> tuple[str, str]:
    """Where a case is from, and what became of it."""
    return case.file, kernel_judges.outcome(case)


def _exceptions(
    cases: Iterable[suites.Case], earlier: Mapping[str, list[str]] | None = None
) -> dict[str, dict[str, list[str]]]:
    """The cases that did not pass, by what became of them, after those of an earlier run."""
    found = dict(earlier or {})
    for case in cases:
        if (reason := _reason(case)) is not None:
            found[reason] = [*found.get(reason, []), case.node]
    return {"exceptions": found}


def devices() -> str:
    """The GPUs of this process, as CUDA is told them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))


def _reason(case: suites.Case) -> str | None:
    """Why a case did not pass; None if it did."""
    found = kernel_judges.outcome(case)
    if found == "skipped":
        return f"skipped: {case.why}"
    return None if found == "passed" else found


def fla_files() -> list[str]:
    """fla's files of operator tests, in a checkout."""
    return [f"tests/ops/test_{name}.py" for name in FLA_FILES]


def judge_fla_models(checkout: Path) -> dict[str, Counter[str]]:
    """What becomes of fla's model tests of linattn's families, at sizes that a CPU manages, by file."""
    files = [f"tests/models/test_modeling_{name}.py" for name in FLA_MODELS]
    where = {"TRITON_INTERPRET": "1", "LINATTN_BACKEND": "torch"}  # else linattn's own kernels, too, were interpreted
    with tempfile.TemporaryDirectory() as folder:
        mamba = [kernel_judges.fetch(package, Path(folder)) for package in kernel_judges.SDISTS]
        cases = suites.run(files, checkout, "fla_models_on_cpu", packages=mamba, **where)
    return _by_file(map(_ended, cases))


def judge_fla_ranks(
    checkout: Path, seconds: float, on_gpu: bool, earlier: Mapping[str, Any], as_it_is: bool = False
) -> Generator[dict[str, Any]]:
    """What becomes of fla's context-parallel tests, whose processes have linattn's functions in fla, or fla ``as_it_is``.

    Without GPUs, ranks are processes of a CPU, gloo is between them, and sequences are shorter; file after file.

    Yields:
        ``judges`` and ``exceptions``, as of :func:`judge_fla_on_gpu`, whose ``seconds`` and ``earlier`` these are too.
    """
    until = time.monotonic() + seconds
    packages = [HERE / "on_ranks", checkout / "tests/context_parallel"]
    where = ({} if on_gpu else RANKS_OF_CPU) | ({"JUDGED_AS_IT_IS": "1"} if as_it_is else {})
    files = {f"tests/context_parallel/test_cp_{name}.py": jobs if on_gpu else 0 for name, jobs in FLA_RANKS.items()}

    def run(tests: list[str]) -> Generator[list[suites.Case]]:
        together = ["-pxdist.plugin", f"-n{files[_file(tests[0])]}"]
        return suites.progress([*tests, *together], checkout, "fla_on_ranks", packages=packages, until=until, **where)

    return _records([[name] for name in files], run, earlier, at_once=len(files) if on_gpu else 1)


def _records(
    groups: Sequence[Sequence[str]],
    run: Callable[[list[str]], Generator[list[suites.Case]]],
    earlier: Mapping[str, Any],
    at_once: int = 1,
) -> Generator[dict[str, Any]]:
    """What becomes of groups of files, as it goes, after what an earlier run found: those that it did not run are run."""
    found = earlier or {"judges": {}, "exceptions": {"not run": list(chain(*groups))}}
    yield {"judges": found["judges"], "exceptions": found["exceptions"]}
    exceptions = dict(found["exceptions"])
    tests = exceptions.pop("not run", [])
    counted = {name: Counter({k: n for k, n in counts.items() if k != "not run"}) for name, counts in found["judges"].items()}
    begun: dict[int, list[suites.Case]] = {}
    left = {i: of_group for i, group in enumerate(groups) if (of_group := [test for test in tests if _file(test) in group])}
    with contextlib.ExitStack() as ends:
        runs = {i: ends.enter_context(contextlib.closing(run(of_group))) for i, of_group in left.items()}
        for i, cases in _in_turn(runs, at_once):
            if cases:
                begun[i] = cases
                left.pop(i, None)
                waiting = {"not run": list(chain(*left.values()))} if left else {}
                every = list(chain(*begun.values()))
                yield {"judges": _sums(counted, _by_file(map(_ended, every))), **_exceptions(every, exceptions | waiting)}


def _in_turn(runs: Mapping[int, Iterator[list[suites.Case]]], at_once: int) -> Iterator[tuple[int, list[suites.Case]]]:
    """What runs say, of which so many go on at once."""
    going = dict(runs)
    while going:
        for i in list(going)[:at_once]:
            if (cases := next(going[i], None)) is None:
                del going[i]
            else:
                yield i, cases


def _file(test: str) -> str:
    """Where a test is, by pytest's name of it."""
    return test.partition("::")[0]


def _fla(checkout: Path, commit: str | None) -> dict[str, str]:
    """What git calls the commit of a clone, by the last release before it (tests import what lies there), and the device."""
    command = ["git", "-C", str(checkout), "describe", "--tags", "--always"]
    commit = commit or subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return {"fla": commit, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}


def _by_file(outcomes: Iterable[tuple[str, str]]) -> dict[str, Counter[str]]:
    """Outcomes of cases of fla's, counted, by their file's name."""
    found: dict[str, Counter[str]] = {}
    for file, outcome in outcomes:
        found.setdefault(f"fla, {Path(file).name}", Counter())[outcome] += 1
    return found


def _compared(before: Outcomes, after: Outcomes) -> dict[str, Any]:
    differing = sorted(name for name in before | after if before.get(name) != after.get(name))
    return {"before": Counter(before.values()), "with linattn": Counter(after.values()), "differing": differing}


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers' own tests, with linattn and without")
    parser.add_argument("--families", default=",".join(tiny_models.FAMILIES), help="with commas between them")
    parser.add_argument("--checkout", type=Path, help="a clone of transformers at the installed version")
    parser.add_argument(
        "--fla", type=Path, help="a clone of fla: run its operator tests instead, with linattn's functions in it"
    )
    parser.add_argument("--fla-models", type=Path, help="a clone of fla: run its tests of models instead")
    parser.add_argument("--fla-ranks", type=Path, help="a clone of fla: run its context-parallel tests instead, on GPUs")
    parser.add_argument("--as-it-is", action="store_true", help="of --fla-ranks: fla's own functions, to compare with")
    parser.add_argument("--commit", help="what to call the commit of fla, where the tests lie there without their history")
    parser.add_argument("--jobs", type=int, default=1, help="processes for fla's operator tests on a GPU")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which these end")
    parser.add_argument("--more", type=Path, help="what was written of these, to go on with the tests that did not run")
    parser.add_argument("-k", dest="expression", default="", help="which tests, as pytest's -k")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    if options.as_it_is and not options.fla_ranks:
        parser.error("--as-it-is: expected with --fla-ranks")
    if options.fla or options.fla_models or options.fla_ranks:
        for record in fla_records(options):
            write(options.json, record)
        print(*(f"{name}: {dict(counts)}" for name, counts in record["judges"].items()), sep="\n")
    else:
        record = transformers_record(options)
        write(options.json, record)
    if any(row["differing"] for row in record.get("families", {}).values()):
        sys.exit("some cases end differently with linattn")


def fla_records(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What there is to write of fla's tests, as it goes."""
    checkout = (options.fla or options.fla_models or options.fla_ranks).resolve()
    earlier = json.loads(options.more.read_text()) if options.more else {}
    if options.fla_ranks:
        found = judge_fla_ranks(checkout, options.seconds, torch.cuda.is_available(), earlier, options.as_it_is)
    elif options.fla_models:
        found = iter([{"judges": judge_fla_models(checkout)}])
    elif torch.cuda.is_available():
        found = judge_fla_on_gpu(checkout, options.jobs, options.seconds, earlier)
    else:
        found = iter([{"judges": judge_fla(checkout)}])
    origin = _fla(checkout, options.commit)
    return (origin | record for record in found)


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    """A record as JSON, whole at any time."""
    if path:
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(record, indent=1) + "\n")
        beside.replace(path)


def transformers_record(options: argparse.Namespace) -> dict[str, Any]:
    """What there is to write of transformers' tests, after saying it."""
    with tempfile.TemporaryDirectory() as folder:
        root = options.checkout.resolve() if options.checkout else from_index(Path(folder))
        families = judge(root, options.families.split(","), options.expression, options.checkout is not None)
    for family, row in families.items():
        print(f"{family}: {dict(row['before'])}, with linattn {dict(row['with linattn'])}, differing {row['differing']}")
    versions = {name: metadata.version(name) for name in ("transformers", "torch")}
    return {"tests": "a checkout" if options.checkout else "the sdist", "versions": versions, "families": families}


if __name__ == "__main__":
    main()
