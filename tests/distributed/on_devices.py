"""Every family and flag on two GPUs with NCCL between them: ``python tests/distributed/on_devices.py FILE [BACKEND [GROUPS]]``.

Without a backend in float64, and what ranks that disagree say; with one, its kernels in float32 and bfloat16. The jobs are
shared among ``GROUPS`` pairs of processes, which compile side by side. FILE gets how many were equal, and what was said of the
others. Exits with 1 if there are any.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch
from jobs import jobs_of_devices, jobs_of_kernels
from ranks import Job, run_jobs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Record:
    """What ranks said so far, in a file.

    Args:
        file: Where it is kept.
        jobs: How many there are.
    """

    def __init__(self, file: str, jobs: int) -> None:
        self.path, self.jobs, self.started = Path(file), jobs, time.monotonic()
        self.said: dict[str, list[str]] = {}
        self.lock = Lock()

    def add(self, found: dict[str, list[str]]) -> None:
        """Keep what a group said, from whichever thread."""
        with self.lock:
            self.said |= found
            facts = {"device": DEVICE, "jobs": self.jobs, "equal": len(self.said) - len(self.wrong), "seconds": self.seconds}
            self.path.write_text(json.dumps({**facts, "wrong": self.wrong, "names": [*self.said]}, indent=1) + "\n")

    @property
    def wrong(self) -> dict[str, list[str]]:
        """Jobs of which a rank said something."""
        return {name: texts for name, texts in self.said.items() if any(texts)}

    @property
    def seconds(self) -> int:
        """Since the start."""
        return round(time.monotonic() - self.started)


def run_share(left: Sequence[Job], record: Record) -> None:
    """Run jobs one after another, those behind a failure in a group of their own, for that one is out of step."""
    while left:
        found = run_jobs(2, left, timeout=60, device=DEVICE)
        record.add({name: texts for name, texts in found.items() if texts != ["not run"] * 2})
        left = [job for job in left if job[0] not in record.said]


def main() -> int:
    """Run the jobs, and say what came of them."""
    file, *more = sys.argv[1:]
    backend, groups = (*more, None)[0], int((*more[1:], 1)[0])
    jobs = jobs_of_kernels(backend) if backend else jobs_of_devices()
    record = Record(file, len(jobs))
    with ThreadPoolExecutor(groups) as pool:
        for _ in pool.map(lambda share: run_share(share, record), [jobs[start::groups] for start in range(groups)]):
            pass
    for name, texts in record.wrong.items():
        print(f"FAILED {name}\n{texts[0][-1500:]}")
    equal = len(jobs) - len(record.wrong)
    print(f"{equal} of {len(jobs)} are equal to one device's, on two {DEVICE}, {record.seconds} s")
    if not backend:
        for fault in ("other_plan", "other_shape"):
            texts = run_jobs(2, [(fault, fault, {})], timeout=20, device=DEVICE)[fault]
            print(fault, *(text.strip().splitlines()[-3:] for text in texts))
    return 1 if record.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
