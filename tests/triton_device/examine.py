"""Whether every kernel of the Triton backend is right, writes nothing it should not, and gives the same bits beside others.

``python examine.py right FILE`` compares each call of ``roads.py`` with float64 and names the kernels that it ran.
``python examine.py sanitized FILE [--tool racecheck]`` runs each in a process under NVIDIA's ``compute-sanitizer``, and first
the kernels of ``controls.py``, which are right, and says which of them the tool reports. If any, it does not look at kernels
whose partitions of warps wait for one another.
``python examine.py together FILE [--processes 8] [--seconds 60]`` runs them all over and over in several processes on one GPU.

What is found is written into FILE, JSON, as it comes; what stands there already is not run again. Names of roads choose among
them. The exit status is 1 if anything is amiss, or was not run within ``--within`` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import linattn_backends.triton
import torch
from roads import ROADS, Road

CLOSE = 3e-2
"""Relative error of an array of bfloat16 operands, in the norm: chunks round what they multiply to eight bits."""
FOUND = 9
"""The exit status of a sanitizer that found something."""


def right(road: Road, device: str, backend: str) -> dict[str, Any]:
    """Relative errors of a call by array, and the kernels that it ran."""
    given = road.arrays(device)
    exact = {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in given.items()}
    wanted = road(exact, "torch")
    with torch.profiler.profile(acc_events=True) as profile:
        found = road(given, backend)
    errors = {name: float((found[name].double() - x).norm() / x.norm().clamp_min(1e-9)) for name, x in wanted.items()}
    ran = {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
    kernels = sorted(name for name in ran if "at::" not in name)
    return {"ok": all(x < CLOSE for x in errors.values()), "errors": errors, "kernels": kernels}


def finite(road: Road, device: str, backend: str) -> dict[str, Any]:
    """Whether all results are numbers; a sanitizer looks on."""
    found = road(road.arrays(device), backend)
    return {"ok": all(bool(x.isfinite().all()) for x in found.values())}


def over_and_over(names: list[str], device: str, backend: str, seconds: float) -> dict[str, Any]:
    """Calls in turn for some time: how many, and which did not give the bits of their first."""
    given = {name: ROADS[name].arrays(device) for name in names}
    first = {name: ROADS[name](given[name], backend) for name in names}
    calls, differ, end = 0, set(), time.monotonic() + seconds
    while time.monotonic() < end:
        for name in names:
            found = ROADS[name](given[name], backend)
            if not all(torch.equal(found[key], x) for key, x in first[name].items()):
                differ.add(name)
            calls += 1
    return {"ok": not differ, "calls": calls, "differ": sorted(differ)}


def one(how: str, names: list[str], given: argparse.Namespace) -> dict[str, Any]:
    """What this process finds."""
    if how == "together":
        return over_and_over(names, given.device, given.backend, given.seconds)
    look = right if how == "right" else finite
    return look(ROADS[names[0]], given.device, given.backend)


def asked(how: str, names: list[str], given: argparse.Namespace, before: tuple[str, ...] = ()) -> dict[str, Any]:
    """The same of a process of its own, behind the command ``before``; ``ok`` is false where it failed or found no time."""
    options = [f"--device={given.device}", f"--backend={given.backend}", f"--seconds={given.seconds}"]
    command = [*before, sys.executable, __file__, how, "-", *names, "--here", *options]
    left = given.deadline - time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 0.01))
    except subprocess.TimeoutExpired:
        return {"ok": False, "said": f"not within {given.within:g} s"}
    if done.returncode:
        return {"ok": False, "said": (done.stdout + done.stderr)[-2000:]}
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # among a sanitizer's own


def sanitizer(tool: str, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Exits with status ``FOUND`` if it finds anything. Every array has memory of its own: in a shared block, none has an end.

    Args:
        tool: Which of ``compute-sanitizer``'s.
        without: Kernels that it does not look at, beside PyTorch's.
    """
    left_out = [f"--kernel-name-exclude=kernel_substring={name}" for name in ("at::", *without)]
    return (
        "env",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
        "compute-sanitizer",
        f"--tool={tool}",
        f"--error-exitcode={FOUND}",
        *left_out,
    )


def specialised() -> tuple[str, ...]:
    """Kernels that hand work from one partition of warps to another."""
    folder = Path(linattn_backends.triton.__file__).parent
    found = set()
    for file in folder.rglob("*.py"):
        kernels = re.split(r"^@gluon\.jit", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        found |= {re.search(r"def (\w+)", text)[1] for text in kernels if "gl.warp_specialize(" in text}
    return tuple(sorted(found))


def reported(name: str, given: argparse.Namespace) -> bool:
    """Whether the tool finds fault with a kernel of ``controls.py``."""
    command = [*sanitizer(given.tool), sys.executable, str(Path(__file__).with_name("controls.py")), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=max(given.deadline - time.monotonic(), 0.01))
    if done.returncode not in (0, FOUND):
        raise RuntimeError(f"control {name!r} under {given.tool}: {done.stdout}{done.stderr}")
    return done.returncode == FOUND


def controls(given: argparse.Namespace, kept: dict[str, Any]) -> dict[str, bool]:
    """Which controls the tool reports; what is kept is not asked again."""
    from controls import CONTROLS

    found = kept.setdefault("controls", {})
    with ThreadPoolExecutor(given.processes) as pool:
        jobs = {pool.submit(reported, name, given): name for name in CONTROLS if name not in found}
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            given.file.write_text(json.dumps(kept, indent=1) + "\n")
    for name in CONTROLS:
        print(f"control {name:20} {'reported' if found[name] else 'not reported'}")
    return found


def examine(given: argparse.Namespace) -> bool:
    """Run what is not there yet, several processes at a time; whether all is well."""
    kept = json.loads(given.file.read_text()) if given.file.exists() else {}
    names = given.names or list(ROADS)
    if given.how == "together":
        work = {f"process {i}": names for i in range(given.processes)}
    else:
        work = {name: [name] for name in names}
    before = ()
    if given.how == "sanitized":
        without = specialised() if any(controls(given, kept).values()) else ()
        print(f"{given.tool} looks at all kernels{' but ' + ', '.join(without) if without else ''}", flush=True)
        before = sanitizer(given.tool, without)
    due = {name: of for name, of in work.items() if not kept.get(name, {}).get("ok")}
    with ThreadPoolExecutor(given.processes) as pool:
        jobs = {pool.submit(asked, given.how, of, given, before): name for name, of in due.items()}
        for job in as_completed(jobs):
            name, found = jobs[job], job.result()
            kept[name] = found
            given.file.write_text(json.dumps(kept, indent=1) + "\n")
            print("ok " if found["ok"] else "BAD", name, told(found), flush=True)
    well = [name for name in work if kept[name]["ok"]]
    print(f"{given.how}: {len(well)} of {len(work)}")
    return len(well) == len(work)


def told(found: dict[str, Any]) -> str:
    """What there is to say of a road or a process."""
    if "said" in found:
        return found["said"]
    if "differ" in found:
        return f"{found['calls']} calls{''.join(f', bits of {name} differ' for name in found['differ'])}"
    return f"off by {max(found['errors'].values()):.1e}" if "errors" in found else ""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=["right", "sanitized", "together"])
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *ROADS], metavar="ROAD")
    parser.add_argument("--tool", default="memcheck", help="of compute-sanitizer")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=60.0, help="that processes run together")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds for everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.here:
        print(json.dumps(one(given.how, given.names, given)))
        return
    given.deadline = time.monotonic() + given.within
    sys.exit(not examine(given))


if __name__ == "__main__":
    main()
