"""First calls, side by side in processes of their own: what they compile lies in the caches when calls are timed."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from . import fresh
from .cases import Case
from .subjects import Subject, subject_named


def first_calls(
    cases: Sequence[Case], subjects: Sequence[Subject], processes: int, told: Callable[[int, int], None] = lambda done, of: None
) -> int:
    """Call every subject on every case once, and return how many calls there were. ``told`` hears how many of them are done.

    A call that fails here fails again where it is timed, and is reported there.
    """
    jobs = [
        json.dumps({"case": case.as_json(), "subject": identity(subject)})
        for case in cases
        for subject in subjects
        if subject.refusal(case) is None
    ]
    random.Random(0).shuffle(jobs)  # neighbours compile the same kernels, and should not do so at once
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for done, _ in enumerate(pool.map(first_call, jobs), start=1):
            told(done, len(jobs))
    return len(jobs)


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
