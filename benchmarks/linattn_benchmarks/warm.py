"""First calls, side by side in processes of their own: what they compile lies in the caches when calls are timed."""

from __future__ import annotations

import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple

from . import fresh, tuning
from .cases import Case
from .subjects import Subject, subject_named

NEIGHBOURS = 8
"""How many calls, times the processes, are made in any order, so that few processes compile the same at once."""


class Warmed(NamedTuple):
    """What came of first calls.

    Attributes:
        calls: How many there were to make.
        left: Who had not answered when the time was over: library, operator and what is done, each once.
        ended: Why no more were made, where that was not for want of time.
    """

    calls: int
    left: list[str]
    ended: str | None = None


class FirstCall(NamedTuple):
    """A call for another process.

    Attributes:
        spoken: Who is called on what.
        function: Makes it; a module's own, since a process looks it up by name.
        request: What the function is told.
        builds: What it may have to build before anything else: while the first call of one name is made, no other of that name
            is. A library that compiles all it has at once, behind a lock, would have every process wait for it.
    """

    spoken: str
    function: Callable[[str], str | None]
    request: str
    builds: str = ""


def first_calls(
    calls: Sequence[FirstCall],
    processes: int,
    told: Callable[[int, int], None] = lambda done, of: None,
    *,
    seconds: float | None = None,
    tune: int | None = None,
) -> Warmed:
    """Make every call once. One that fails here fails again where it is timed, and is reported there.

    Args:
        calls: What to call, first what is timed first: what is not made in time should be what is not timed, either.
        processes: How many do it at once.
        told: Hears how many calls are done, of how many.
        seconds: After which no more is waited for; None for as long as it takes.
        tune: Configurations that a kernel's autotuner may choose among; None for all.
    """
    line = mixed(calls, NEIGHBOURS * processes)
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    making: dict[Future[str | None], FirstCall] = {}
    built, ended = {""}, None
    with tempfile.TemporaryDirectory() as folder:
        begun = (str(Path(folder, "turns")), tune)
        pool = ProcessPoolExecutor(processes, get_context("spawn"), tune_together, begun)
        try:
            while line or making:
                for call in may_begin(line, list(making.values()), built, processes):
                    making[pool.submit(call.function, call.request)] = call
                    line.remove(call)
                left = deadline - time.monotonic()
                done = wait(making, None if left == math.inf else max(left, 0.0), FIRST_COMPLETED).done
                if not done:
                    break
                for future in done:
                    if isinstance(error := future.exception(), BrokenProcessPool):
                        raise error
                    built.add(making.pop(future).builds)
                    told(len(calls) - len(line) - len(making), len(calls))
        except BrokenProcessPool as error:
            ended = str(error)
        finally:
            if making:
                for process in active_children():  # none but these: who compiles does not listen
                    process.kill()
            pool.shutdown(cancel_futures=True)
    return Warmed(len(calls), sorted({call.spoken for call in (*making.values(), *line)}), ended)


def may_begin(line: Sequence[FirstCall], making: Sequence[FirstCall], built: Set[str], processes: int) -> list[FirstCall]:
    """Of those in line the next for which there is a process, and of which nobody else is building what they need."""
    building = {call.builds for call in making} - built
    found: list[FirstCall] = []
    for call in line:
        if len(making) + len(found) == processes:
            break
        if call.builds not in building:
            found.append(call)
            building |= {call.builds} - built
    return found


def mixed(calls: Sequence[FirstCall], together: int) -> list[FirstCall]:
    """Calls in another order, so many after so many: neighbours compile the same kernels, and should not do so at once."""
    chance = random.Random(0)
    parts = (calls[i : i + together] for i in range(0, len(calls), together))
    return [call for part in parts for call in chance.sample(part, len(part))]


def tune_together(turns: str, at_most: int | None) -> None:
    """Have autotuners in this process tune as :func:`.tuning.together` has them."""
    tuning.together(Path(turns), at_most).__enter__()


def of_cases(pairs: Iterable[tuple[Case, Subject]]) -> list[FirstCall]:
    """Each subject on its case, if it takes that."""
    return [
        FirstCall(
            f"{subject.label} {case.operator} {case.what}",
            first_call,
            json.dumps({"case": case.as_json(), "subject": identity(subject)}),
            builds="" if subject.library == "linattn" else subject.label,
        )
        for case, subject in pairs
        if subject.refusal(case) is None
    ]


def identity(subject: Subject) -> dict[str, Any]:
    """What :func:`.subjects.subject_named` makes it of."""
    return {"library": subject.library, "backend": subject.backend, "framework": subject.framework}


def first_call(job: str) -> str | None:
    """Why one call failed; None if it did not."""
    request = json.loads(job)
    case, subject = Case.from_json(request["case"]), subject_named(**request["subject"])
    try:
        runner, arrays, pulled = fresh.prepared(case, subject)
        runner.wait(fresh.call_of(case, subject, runner, arrays, pulled)())
        del arrays, pulled
        runner.release()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
