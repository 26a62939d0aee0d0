"""What only a host with GPUs can show, run in the minutes that one has.

``python benchmarks/campaign.py FOLDER --within SECONDS [STEP…]`` runs the steps of ``campaign.toml`` in their order. Checks run
beside one another, ``--beside`` on a GPU; what is timed runs alone. A step that has ended well is not run again, so that the
same command goes on where the last one was cut off.

A step has

* ``command``, for a shell in the root of the repository, where ``$OUT`` is its folder, ``$SECONDS_LEFT`` its time, and
  ``$RESUME`` the option ``--resume $OUT/STEP.json``, or nothing before there is such a file,
* ``seconds``, after which it and what it began are ended,
* ``gpus``, how many it wants; 1 by default,
* ``alone``, whether nothing may run beside it; false by default.

FOLDER has a folder for each step, what it printed as ``STEP.log``, and ``campaign.json``: how each ended and how long it took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GRACE = 10.0
"""Seconds between asking a step to end and ending it."""
WORTHWHILE = 0.25
"""The part of its time that must be left for a step to begin."""


@dataclass(frozen=True)
class Step:
    """One command."""

    name: str
    command: str
    seconds: float
    gpus: int = 1
    alone: bool = False


def steps_of(file: Path) -> list[Step]:
    """Those of a file, in its order."""
    return [Step(name, **of) for name, of in tomllib.loads(file.read_text(encoding="utf-8")).items()]


class Run:
    """A step under way."""

    def __init__(self, step: Step, folder: Path, gpus: list[int], seconds: float) -> None:
        self.step, self.gpus, self.began = step, gpus, time.monotonic()
        self.end = self.began + seconds
        self.log = folder / f"{step.name}.log"
        out = folder / step.name
        out.mkdir(parents=True, exist_ok=True)
        results = out.resolve() / f"{step.name}.json"
        variables = {
            "OUT": str(out.resolve()),
            "SECONDS_LEFT": str(int(seconds)),
            "RESUME": f"--resume {results}" if results.exists() else "",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                step.command,
                shell=True,
                cwd=ROOT,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self) -> dict[str, Any] | None:
        """How it ended; ``None`` while it runs. One that is late is ended with all that it began."""
        late = time.monotonic() > self.end
        if self.process.poll() is None and not late:
            return None
        if late:
            self.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        self.signal(signal.SIGKILL)
        status = self.process.wait()
        how = "cut off" if late else "done" if status == 0 else f"failed with status {status}"
        lines = self.log.read_text(errors="replace").splitlines() or [""]
        return {"how": how, "seconds": round(time.monotonic() - self.began, 1), "last line": lines[-1][:200]}

    def signal(self, number: signal.Signals) -> None:
        """Send it to the step and to what it began."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Campaign:
    """Steps on some GPUs until a time."""

    def __init__(self, folder: Path, gpus: int, within: float, beside: int = 1) -> None:
        self.folder, self.count, self.deadline = folder, gpus, time.monotonic() + within
        self.free = dict.fromkeys(range(gpus), beside)
        self.running: list[Run] = []
        self.file = folder / "campaign.json"
        self.kept: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, steps: list[Step]) -> bool:
        """Run what is not done; whether all is."""
        for step in steps:
            if self.kept.get(step.name, {}).get("how") == "done":
                continue
            if step.gpus > self.count:
                self.keep(step, {"how": f"wants {step.gpus} GPUs, there are {self.count}"})
                continue
            self.wait_for(step)
            if (left := self.deadline - time.monotonic()) < WORTHWHILE * step.seconds:
                self.keep(step, {"how": "no time was left"})
                continue
            taken = self.open()[: step.gpus]
            for gpu in taken:
                self.free[gpu] -= 1
            self.running.append(Run(step, self.folder, taken, min(step.seconds, left)))
        while self.running:
            self.look()
        return all(self.kept[step.name]["how"] == "done" for step in steps)

    def open(self) -> list[int]:
        """GPUs that take one more, those first that run fewest."""
        return sorted((gpu for gpu, places in self.free.items() if places), key=lambda gpu: -self.free[gpu])

    def wait_for(self, step: Step) -> None:
        """Until it may begin."""
        while self.running and (step.alone or len(self.open()) < step.gpus or any(one.step.alone for one in self.running)):
            self.look()

    def look(self) -> None:
        """Whether any has ended."""
        for one in list(self.running):
            if (found := one.ended()) is not None:
                self.running.remove(one)
                for gpu in one.gpus:
                    self.free[gpu] += 1
                self.keep(one.step, found)
        time.sleep(0.05)

    def keep(self, step: Step, found: dict[str, Any]) -> None:
        """Write down how it ended, and say it."""
        self.kept[step.name] = found
        self.file.write_text(json.dumps(self.kept, indent=1) + "\n")
        print(f"{step.name:16} {found['how']:24} {found.get('seconds', ''):>6} {found.get('last line', '')}", flush=True)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="STEP", help="default: all")
    parser.add_argument("--within", type=float, required=True, help="seconds for everything")
    parser.add_argument("--gpus", type=int, default=1, help="of this host; default 1")
    parser.add_argument("--beside", type=int, default=1, help="how many checks share a GPU; default 1")
    parser.add_argument("--steps", type=Path, default=Path(__file__).with_name("campaign.toml"))
    given = parser.parse_intermixed_args()
    steps = {step.name: step for step in steps_of(given.steps)}
    if unknown := [name for name in given.names if name not in steps]:
        parser.error(f"unknown step {unknown[0]!r}: there are {', '.join(steps)}")
    chosen = [steps[name] for name in given.names] or list(steps.values())
    sys.exit(not Campaign(given.folder, given.gpus, given.within, given.beside).run(chosen))


if __name__ == "__main__":
    main()
