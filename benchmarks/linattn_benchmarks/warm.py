"""First calls, side by side in processes of their own: what they compile lies in the caches when calls are timed."""

from __future__ import annotations

import json
import multiprocessing
import random
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from . import fresh, tuning
from .cases import Case
from .subjects import Subject, subject_named


class Warmed(NamedTuple):
    """What came of first calls.

    Attributes:
        calls: How many there were to make.
        left: Who had not answered when the time was over: library, operator and what is done, each once.
    """

    calls: int
    left: list[str]


def first_calls(
    cases: Sequence[Case],
    subjects: Sequence[Subject],
    processes: int,
    told: Callable[[int, int], None] = lambda done, of: None,
    *,
    seconds: float | None = None,
    tune: int | None = None,
) -> Warmed:
    """Call every subject on every case once. A call that fails here fails again where it is timed, and is reported there.

    Args:
        cases: What to call.
        subjects: Who is called.
        processes: How many do it at once.
        told: Hears how many calls are done, of how many.
        seconds: After which no more is waited for; None for as long as it takes.
        tune: Configurations that a kernel's autotuner may choose among; None for all.
    """
    pairs = [(case, subject) for case in cases for subject in subjects if subject.refusal(case) is None]
    random.Random(0).shuffle(pairs)  # neighbours compile the same kernels, and should not do so at once
    with tempfile.TemporaryDirectory() as folder:
        begun = (str(Path(folder, "turns")), tune)
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), tune_together, begun)
        waiting = {pool.submit(first_call, request(case, subject)): spoken(case, subject) for case, subject in pairs}
        try:
            for done, call in enumerate(as_completed(waiting, timeout=seconds), start=1):
                told(done, len(pairs))
                del waiting[call]
        except TimeoutError:
            for process in multiprocessing.active_children():  # none but these: who compiles does not listen
                process.kill()
        finally:
            pool.shutdown(cancel_futures=True)
    return Warmed(len(pairs), sorted(set(waiting.values())))


def tune_together(turns: str, at_most: int | None) -> None:
    """Have autotuners in this process tune as :func:`.tuning.together` has them."""
    tuning.together(Path(turns), at_most).__enter__()


def spoken(case: Case, subject: Subject) -> str:
    """Who is called on what."""
    return f"{subject.label} {case.operator} {case.what}"


def request(case: Case, subject: Subject) -> str:
    """Both, for another process."""
    return json.dumps({"case": case.as_json(), "subject": identity(subject)})


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
