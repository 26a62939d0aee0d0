"""Outside judges: transformers' own tests, unchanged, on a CPU, once as transformers is and once with linattn in it.

    python tests/integrations/judges.py --json docs/judges.json

A case counts by what becomes of it: passed, failed, skipped. linattn may change nothing of that.

The sdist of transformers, from the package index, holds the tests that every model has to pass
(``tests/test_modeling_common.py``), but not the files that apply them to each model. These are made up for by
``judge_models.py`` and ``tiny_models.py``; two modules of further tests that the sdist lacks, by empty classes. With
``--checkout``, a clone of transformers at the same version, ``tests/models/FAMILY/test_modeling_FAMILY.py`` runs as it is.

Nothing of theirs stays: what was fetched is in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import tiny_models

HERE = Path(__file__).parent

MISSING = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""Modules of the tests that the sdist lacks and its files import."""

CONFTEST = """\
import sys
import torch
if not torch.cuda.is_available():
    # installed, they are called, and no CPU runs their kernels
    sys.modules.update(dict.fromkeys(("fla", "causal_conv1d", "mamba_ssm")))
"""

Outcomes = dict[str, str]
"""What became of each case, by its name."""


def from_index(folder: Path) -> Path:
    """transformers' tests of the installed version, out of its sdist, ready to run in ``folder``."""
    wanted = f"transformers=={metadata.version('transformers')}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        "transformers",
        "-d",
        str(folder),
        wanted,
    ]
    subprocess.run(command, check=True)
    (archive,) = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, [file for file in files if "/tests/" in file.name], filter="data")
    tests = folder / archive.name.removesuffix(".tar.gz") / "tests"
    for name, text in MISSING.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(text)
        (tests / name).with_name("__init__.py").touch()
    (tests / "__init__.py").touch()
    shutil.copy(HERE / "judge_models.py", tests / "test_judge_models.py")
    return tests.parent


def path() -> str:
    """Where their tests find the small models, and all that is found here."""
    return os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(root: Path, arguments: list[str], prefix: list[str]) -> Outcomes:
    """Run their tests in a process of its own."""
    (root / "conftest.py").write_text(CONFTEST)
    report = root / "report.xml"
    report.unlink(missing_ok=True)
    command = [*prefix, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:linattn_conformance"]
    environment = os.environ | {"PYTHONPATH": path(), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = subprocess.run(
        [*command, f"--junitxml={report}", *arguments], cwd=root, env=environment, capture_output=True, text=True
    )
    if not report.exists():
        raise RuntimeError(f"{root}: pytest wrote no report\n{log.stdout[-3000:]}{log.stderr[-3000:]}")
    return {
        f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in ElementTree.parse(report).iter("testcase")
    }


def _outcome(case: ElementTree.Element) -> str:
    names = {child.tag for child in case}
    return "failed" if names & {"failure", "error"} else "skipped" if "skipped" in names else "passed"


def judge(root: Path, families: Iterable[str], expression: str = "", checkout: bool = False) -> dict[str, dict[str, object]]:
    """What becomes of each family's cases, with linattn and without, and which differ."""
    pattern = "tests/models/{0}/test_modeling_{0}.py" if checkout else "tests/test_judge_models.py::Test_{0}"
    chosen = [*(pattern.format(family) for family in families), *(["-k", expression] if expression else [])]
    before = run(root, chosen, [])
    after = run(root, chosen, [sys.executable, "-m", "linattn", "run-with", "transformers", "--"])
    return {family: _compared(_of(family, before), _of(family, after)) for family in families}


def _of(family: str, outcomes: Outcomes) -> Outcomes:
    """A family's cases: their names hold that of its class here, or of its folder in a checkout."""
    marks = (f".Test_{family}::", f".models.{family}.")
    return {name: outcome for name, outcome in outcomes.items() if any(mark in name for mark in marks)}


def _compared(before: Outcomes, after: Outcomes) -> dict[str, object]:
    differing = sorted(name for name in before | after if before.get(name) != after.get(name))
    return {"before": Counter(before.values()), "with linattn": Counter(after.values()), "differing": differing}


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers' own tests, with linattn and without")
    parser.add_argument("--families", default=",".join(tiny_models.FAMILIES), help="with commas between them")
    parser.add_argument("--checkout", type=Path, help="a clone of transformers at the installed version")
    parser.add_argument("-k", dest="expression", default="", help="which tests, as pytest's -k")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = options.checkout or from_index(Path(folder))
        families = judge(root, options.families.split(","), options.expression, options.checkout is not None)
    source = "a checkout" if options.checkout else "the sdist"
    versions = {name: metadata.version(name) for name in ("transformers", "torch")}
    record = {"tests": source, "versions": versions, "families": families}
    for family, row in families.items():
        print(f"{family}: {dict(row['before'])}, with linattn {dict(row['with linattn'])}, differing {row['differing']}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if any(row["differing"] for row in families.values()):
        sys.exit("some cases end differently with linattn")


if __name__ == "__main__":
    main()
