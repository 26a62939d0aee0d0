"""Every family and flag on two GPUs with NCCL between them: ``python tests/distributed/on_devices.py FILE [BACKEND]``.

Without a backend in float64, and what ranks that disagree say; with one, its kernels in float32. FILE gets how many were equal,
and what was said of the others. Exits with 1 if there are any.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from jobs import jobs_of_devices, jobs_of_kernels
from ranks import run_jobs


def main() -> int:
    """Run the jobs, those behind a failure in a group of their own, for that one is out of step."""
    file, *backend = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left = jobs_of_kernels(*backend) if backend else jobs_of_devices()
    jobs, started, said = len(left), time.monotonic(), {}
    while left:
        found = run_jobs(2, left, timeout=60, device=device)
        said |= {name: texts for name, texts in found.items() if texts != ["not run"] * 2}
        if not (left := [job for job in left if job[0] not in said]):
            break
        keep(file, device, jobs, said, started)
    wrong = keep(file, device, jobs, said, started)
    for name, texts in wrong.items():
        print(f"FAILED {name}\n{texts[0][-1500:]}")
    print(f"{jobs - len(wrong)} of {jobs} are equal to one device's, on two {device}, {time.monotonic() - started:.0f} s")
    if not backend:
        for fault in ("other_plan", "other_shape"):
            texts = run_jobs(2, [(fault, fault, {})], timeout=20, device=device)[fault]
            print(fault, *(text.strip().splitlines()[-3:] for text in texts))
    return 1 if wrong else 0


def keep(file: str, device: str, jobs: int, said: dict[str, list[str]], started: float) -> dict[str, list[str]]:
    """Write what was said so far; return what is wrong."""
    wrong = {name: texts for name, texts in said.items() if any(texts)}
    facts = {"device": device, "jobs": jobs, "equal": len(said) - len(wrong), "seconds": round(time.monotonic() - started)}
    Path(file).write_text(json.dumps({**facts, "wrong": wrong, "names": [*said]}, indent=1) + "\n")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
