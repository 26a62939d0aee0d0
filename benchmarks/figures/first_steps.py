"""The path of a new user, from an empty environment: ``python -m figures.first_steps``.

The commands are those of the page ``docs/first-steps.md``. They run one after another in a fresh copy of the checkout, as in a
terminal; what each took and said is written down. PyTorch has one thread, which a busy machine hinders least.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from linattn.progress import bars
from linattn_benchmarks.environment import write

from . import RESULTS

ROOT = RESULTS.parents[1]
PAGE = ROOT / "docs" / "first-steps.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "first_steps.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bars() as progress:
        copy_checkout(Path(folder))
        write(options.out, "first_steps", [step(line, folder) for line in progress.track(commands(), description="steps")])


def commands() -> list[str]:
    """Every command in the ``shell`` blocks of the page, in order."""
    blocks = re.findall(r"^```shell\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def copy_checkout(folder: Path) -> None:
    """The files that git would commit: no environment, no cache."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def step(command: str, folder: str) -> dict[str, Any]:
    """One command: how long it took and what it said, or the error that ended it."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "LINATTN_BACKEND")}
    environment = kept | {"PIP_QUIET": "2", "PIP_NO_CACHE_DIR": "1", "OMP_NUM_THREADS": "1"}
    start, used = time.perf_counter(), processor_time()
    done = subprocess.run(shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True)
    seconds, used = time.perf_counter() - start, processor_time() - used
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout}{done.stderr}")
    return {"command": command, "seconds": round(seconds, 1), "processor_s": round(used, 1), "said": done.stdout.strip()}


def processor_time() -> float:
    """Seconds of all cores in the processes that ended so far."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


if __name__ == "__main__":
    main()
