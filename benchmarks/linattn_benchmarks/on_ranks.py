"""Operators timed on several processes that share the tokens of a sequence, one a device.

A row is one operator, one number of ranks and one number of tokens a rank, and takes the time of the slowest rank; or it is one
exchange of bytes without an operator. Ranks meet before each stretch of calls, some in a row as layers of a model make them:
what the host does ahead of a device is hidden as it is there. A rank that is alone has no context; all are so at once.
"""

from __future__ import annotations

import itertools
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from linattn.errors import OptionError

from . import replays
from .cases import Case, draw
from .clocks import spread
from .fresh import placed
from .runners import Torch

EXCHANGED = {"cpu": (1 << 10, 1 << 22), "cuda": (1 << 10, 1 << 22, 1 << 26)}
"""Bytes of a rank that are gathered by all; between GPUs fewer take no longer than next to none."""
LEAST, MOST = 3, 50
"""Stretches of calls."""
CALLS = 4
"""Of a stretch, on a device that runs behind the host."""
SILENCE = 600.0
"""Seconds after which a rank that says nothing is taken for dead."""
GRACE = 10.0
"""Seconds that a row may take beyond the time at which no more is begun."""

Row = dict[str, Any]
Job = tuple[int, Row | None, int]
"""A row to come: the number of ranks, and the case as JSON or, without one, the bytes that are exchanged."""


def devices(kind: str) -> int:
    """How many ranks have a device each; of a CPU, two at least."""
    if kind == "cpu":
        from .environment import environment

        return max(2, environment()["cores"])
    import torch

    return torch.cuda.device_count()


def jobs(cases: Sequence[Case], counts: Sequence[int], earlier: Sequence[Row] = ()) -> list[Job]:
    """The rows to come, without those that there are: of a case, one number of ranks after the other.

    Args:
        cases: ``T`` is that of one rank.
        counts: Numbers of ranks.
        earlier: Rows of a run that this one goes on with.
    """
    had = {identity(row) for row in earlier}
    exchanges: list[Job] = [(ranks, None, nbytes) for ranks in counts if ranks > 1 for nbytes in EXCHANGED[cases[0].device]]
    calls: list[Job] = [(ranks, case.as_json(), 0) for case in cases for ranks in counts]
    return [job for job in (*exchanges, *calls) if identity(facts(job)) not in had]


def identity(row: Row) -> tuple[Any, ...]:
    """What tells a row from others."""
    return tuple(row.get(name) for name in ("family", "what", "ranks", "tokens", "bytes"))


def facts(job: Job) -> Row:
    """What a row says before it is timed."""
    ranks, told, nbytes = job
    if told is None:
        return {"family": None, "what": "exchange", "ranks": ranks, "bytes": nbytes}
    case = Case.from_json(told)
    return {"family": case.spec.name, "what": case.what, "ranks": ranks, "tokens": case.size["T"]}


def first_calls(jobs: Sequence[Job], device: str, backend: str | None, sets: int, until: float | None) -> int:
    """Make the call of every row once, in so many sets of ranks side by side: what they compile lies in the caches then.

    One that fails, for want of memory beside the others above all, fails again where it is timed, and is reported there.

    Returns:
        How many were made.
    """
    calls = [job for job in jobs if job[1]]
    made = itertools.count()

    def share(number: int) -> None:
        left = calls[number::sets]
        while left and not (until and time.time() > until):
            tried = 0
            try:
                for _ in rows(left, device, backend, 0.0, until):
                    tried += 1
                    next(made)
                return
            except OptionError:
                left = left[tried + 1 :]

    with ThreadPoolExecutor(sets) as pool:
        list(pool.map(share, range(sets)))
    return next(made)


def rows(
    jobs: Sequence[Job], device: str, backend: str | None, seconds: float, until: float | None = None, graph: bool = False
) -> Iterator[Row]:  # fmt: skip
    """Rows as they are timed.

    Args:
        jobs: In this order.
        device: Kind of device.
        backend: linattn's, or None for its choice.
        seconds: Time to spend on the repeats of one row; 0 for one call.
        until: The :func:`time.time` at which no more is begun; None without end.
        graph: Whether operators are also recorded as a CUDA graph, and its replays timed.

    Raises:
        OptionError: A rank failed.
    """
    if not jobs:
        return
    context = get_context("spawn")
    said = context.Queue()
    ranks = max(job[0] for job in jobs)
    with tempfile.TemporaryDirectory() as folder:
        given = (str(Path(folder) / "meeting"), jobs, device, backend, seconds, until, graph, said)
        processes = [context.Process(target=_rank, args=(rank, ranks, *given), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            while (row := _next(said, processes, until)) is not None:
                yield row
        finally:
            for process in processes:
                process.join(timeout=0 if until and time.time() > until else 10)
                process.terminate()


def _next(said: Any, processes: Sequence[Any], until: float | None) -> Row | None:
    """What the ranks say next."""
    silent = time.time() + SILENCE
    while time.time() < silent:
        if until and time.time() > until + GRACE:
            return None
        try:
            row = said.get(timeout=1)
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                break
            continue
        if isinstance(row, str):
            raise OptionError(f"scale: {row}")
        return row
    raise OptionError(f"scale: one of {len(processes)} ranks died, or said nothing for {SILENCE:.0f} s")


def _rank(
    rank: int,
    ranks: int,
    meeting: str,
    jobs: Sequence[Job],
    device: str,
    backend: str | None,
    seconds: float,
    until: float | None,
    graph: bool,
    said: Any,
) -> None:
    """One process."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        groups = {count: dist.new_group(range(count)) for count in sorted({job[0] for job in jobs}) if 1 < count < ranks}
        for job in jobs:
            over = torch.tensor(float(until is not None and time.time() > until), device=device)
            dist.all_reduce(over)
            if over:
                break
            count = job[0]
            if rank < count or count == 1:
                row = _row(job, groups.get(count), device, backend, seconds, graph)
                if rank == 0:
                    said.put(row)
        if rank == 0:
            said.put(None)
    except Exception:
        said.put(f"rank {rank} of {ranks}: {traceback.format_exc()}")
    finally:
        dist.destroy_process_group()


def _row(job: Job, group: Any, device: str, backend: str | None, seconds: float, graph: bool) -> Row:
    """One row, on the ranks that take part; of the first of these, with the times of the slowest.

    On GPUs a backward pass is timed on the thread that asks for it too, which spares the host the hand-over to autograd's own.
    """
    import torch

    ranks, told, nbytes = job

    def prepare() -> Callable[[], Any]:
        return _exchange(nbytes, ranks, group, device) if told is None else _call(Case.from_json(told), backend, ranks, group)

    call = prepare()
    if not seconds:
        call()
        del call
        Torch(device).release()
        return facts(job)
    row = facts(job) | {"ms": spread(_times(call, device, seconds, group))}
    if (peak := None if told is None else _peak(call, device, group)) is not None:
        row["peak_bytes"] = peak
    if told is not None and device == "cuda" and row["what"] == "fwdbwd":
        with torch.autograd.set_multithreading_enabled(False):
            row["one_thread"] = {"ms": spread(_times(call, device, seconds, group))}
    del call
    if graph and told is not None:
        row["graph"] = replays.replayed(prepare, lambda replay: _times(replay, device, seconds, group), group)
    Torch(device).release()
    return row


def _call(case: Case, backend: str | None, ranks: int, group: Any) -> Callable[[], Any]:
    """The operator on this rank's tokens."""
    import linattn
    from linattn.distributed import context_parallel

    runner, inputs = Torch(case.device), draw(replace(case, lengths=(case.size["T"],)))  # of many tokens, a period
    arrays = {arg.name: placed(case, runner, arg, inputs.arrays[arg.name]) for arg in case.arrays}
    where = {"context": context_parallel(group)} if ranks > 1 else {}

    def function(given: dict[str, Any]) -> Any:
        return getattr(linattn, case.operator)(**given, **where, **({"backend": backend} if backend else {}))

    if case.what == "fwd":
        return runner.forward(function, arrays)
    return runner.forward_backward(function, arrays, {"o": placed(case, runner, case.values, inputs.d_o)})


def _exchange(nbytes: int, ranks: int, group: Any, device: str) -> Callable[[], Any]:
    """Every rank gathers so many bytes of each."""
    import torch
    import torch.distributed as dist

    own = torch.zeros(nbytes // 4, device=device)
    everything = [torch.empty_like(own) for _ in range(ranks)]
    return lambda: dist.all_gather(everything, own, group=group)


def _peak(call: Callable[[], Any], device: str, group: Any) -> int | None:
    """Bytes beyond the inputs, of the rank with most; None where nobody counts them."""
    import torch
    import torch.distributed as dist

    if (own := Torch(device).peak(call)) is None:
        return None
    most = torch.tensor(own, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return int(most)


def _times(call: Callable[[], Any], device: str, seconds: float, group: Any) -> list[float]:
    """Milliseconds of a call in each of several stretches, of the slowest rank; as many on every rank."""
    import torch
    import torch.distributed as dist

    calls = CALLS if device == "cuda" else 1

    def once() -> float:
        dist.barrier(group=group)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / calls

    once()
    first = torch.tensor([once()], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX, group=group)
    repeats = min(MOST, max(LEAST, round(seconds * 1e3 / (calls * first.item()))))
    times = torch.tensor([once() for _ in range(repeats)], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
    return times.tolist()
