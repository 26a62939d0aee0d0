"""Every family and flag on GPUs with NCCL between them: ``python tests/distributed/on_devices.py FILE [BACKEND [GROUPS]]``.

Without a backend in float64, and what ranks that disagree say; with one, its kernels in float32 and bfloat16. ``--ranks 4``
takes four GPUs, and not two. The jobs are shared among ``GROUPS`` sets of processes, which compile side by side. FILE gets,
job by job, how many were equal, and what was said of the others; those that are equal there already are not run again. Exits
with 1 if any is not equal.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock

import torch
from jobs import jobs_of_devices, jobs_of_kernels
from ranks import NOT_RUN, Job, run_jobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Record:
    """What ranks said so far, in a file, with what an earlier run found to be equal.

    Args:
        file: Where it is kept.
        jobs: How many there are.
    """

    def __init__(self, file: Path, jobs: int) -> None:
        self.path, self.jobs, self.started = file, jobs, time.monotonic()
        before = json.loads(file.read_text()) if file.exists() else {"device": DEVICE, "seconds": 0, "names": [], "wrong": {}}
        if before["device"] != DEVICE:
            raise SystemExit(f"{file} is of {before['device']}, and this is {DEVICE}: give another file")
        self.said: dict[str, list[str]] = {name: [] for name in before["names"] if name not in before["wrong"]}
        self.spent = before["seconds"]
        self.lock = Lock()

    def add(self, name: str, texts: list[str]) -> None:
        """Keep what a group said to a job, from whichever thread."""
        with self.lock:
            self.said[name] = texts
            facts = {"device": DEVICE, "jobs": self.jobs, "equal": self.equal, "seconds": self.seconds}
            written = self.path.with_suffix(".part")
            written.write_text(json.dumps({**facts, "wrong": self.wrong, "names": [*self.said]}, indent=1) + "\n")
            written.replace(self.path)

    @property
    def wrong(self) -> dict[str, list[str]]:
        """Jobs of which a rank said something."""
        return {name: texts for name, texts in self.said.items() if any(texts)}

    @property
    def equal(self) -> int:
        """How many jobs are equal."""
        return len(self.said) - len(self.wrong)

    @property
    def seconds(self) -> int:
        """Of this run and those before it."""
        return self.spent + round(time.monotonic() - self.started)


def run_share(ranks: int, record: Record, left: Sequence[Job]) -> None:
    """Run jobs one after another, those behind a failure in a group of their own, for that one is out of step."""
    while left:
        found = run_jobs(ranks, left, timeout=60, device=DEVICE, heard=record.add)
        for name, texts in found.items():
            if name not in record.said and texts != [NOT_RUN] * ranks:
                record.add(name, texts)
        left = [job for job in left if job[0] not in record.said]


def asked() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("backend", nargs="?")
    parser.add_argument("groups", nargs="?", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    """Run the jobs, and say what came of them."""
    given = asked()
    jobs = jobs_of_kernels(given.ranks, given.backend) if given.backend else jobs_of_devices(given.ranks)
    record = Record(given.file, len(jobs))
    left = [job for job in jobs if job[0] not in record.said]
    with ThreadPoolExecutor(given.groups) as pool:
        shares = [left[start :: given.groups] for start in range(given.groups)]
        list(pool.map(partial(run_share, given.ranks, record), shares))
    for name, texts in record.wrong.items():
        print(f"FAILED {name}\n{texts[0][-1500:]}")
    print(f"{record.equal} of {len(jobs)} are equal to one device's, on {given.ranks} {DEVICE}, {record.seconds} s")
    if not given.backend:
        for fault in ("other_plan", "other_shape"):
            texts = run_jobs(2, [(fault, fault, {})], timeout=20, device=DEVICE)[fault]
            print(fault, *(text.strip().splitlines()[-3:] for text in texts))
    return 1 if record.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
