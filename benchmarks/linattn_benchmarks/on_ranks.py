"""Operators timed on several processes that share the tokens of a sequence, one a device.

A row is one operator, one number of ranks and one number of tokens a rank, and takes the time of the slowest rank; or it is one
exchange of bytes without an operator. Ranks meet before each call.
"""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from linattn.errors import OptionError

from .cases import Case, draw
from .clocks import spread
from .fresh import placed
from .runners import Torch

EXCHANGED = (1 << 10, 1 << 22)
"""Bytes of a rank that are gathered by all."""
LEAST, MOST = 3, 200
"""Repeats of a call."""
SILENCE = 600.0
"""Seconds after which a rank that says nothing is taken for dead."""

Row = dict[str, Any]


def devices(kind: str) -> int:
    """How many ranks have a device each; of a CPU, two at least."""
    if kind == "cpu":
        from .environment import environment

        return max(2, environment()["cores"])
    import torch

    return torch.cuda.device_count()


def timed(cases: Sequence[Case], backend: str | None, ranks: int, seconds: float, report: Callable[[], None]) -> list[Row]:
    """The rows of one number of ranks.

    Args:
        cases: ``T`` is that of one rank.
        backend: linattn's, or None for its choice.
        ranks: How many processes.
        seconds: Time to spend on the repeats of one row.
        report: Called after each row.

    Raises:
        OptionError: A rank failed.
    """
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        given = ([case.as_json() for case in cases], backend, seconds)
        processes = [
            context.Process(target=_rank, args=(rank, ranks, meeting, *given, said), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            while (row := _next(said, processes)) is not None:
                rows.append(row)
                report()
        finally:
            for process in processes:
                process.join(timeout=10)
                process.terminate()
    return rows


def _next(said: Any, processes: Sequence[Any]) -> Row | None:
    """What the ranks say next."""
    waited = time.monotonic()
    while time.monotonic() - waited < SILENCE:
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


def _rank(rank: int, ranks: int, meeting: str, cases: Sequence[Row], backend: str | None, seconds: float, said: Any) -> None:
    """One process."""
    import torch
    import torch.distributed as dist

    device = cases[0]["device"]
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        for nbytes in EXCHANGED if ranks > 1 else ():
            ms = _times(_exchange(nbytes, device), device, seconds)
            if rank == 0:
                said.put({"family": None, "what": "exchange", "ranks": ranks, "bytes": nbytes, "ms": spread(ms)})
        for case in map(Case.from_json, cases):
            call = _call(case, backend, ranks)
            ms, peak = _times(call, device, seconds), _peak(call, device)
            del call
            Torch(device).release()
            if rank == 0:
                family, tokens = case.spec.name, case.size["T"]
                row = {"family": family, "what": case.what, "ranks": ranks, "tokens": tokens, "ms": spread(ms)}
                said.put(row | ({} if peak is None else {"peak_bytes": peak}))
        if rank == 0:
            said.put(None)
    except Exception:
        said.put(f"rank {rank} of {ranks}: {traceback.format_exc()}")
    finally:
        dist.destroy_process_group()


def _call(case: Case, backend: str | None, ranks: int) -> Callable[[], Any]:
    """The operator on this rank's tokens."""
    import linattn
    from linattn.distributed import context_parallel

    runner, inputs = Torch(case.device), draw(replace(case, lengths=(case.size["T"],)))  # of many tokens, a period
    arrays = {arg.name: placed(case, runner, arg, inputs.arrays[arg.name]) for arg in case.arrays}
    where = {"context": context_parallel()} if ranks > 1 else {}

    def function(given: dict[str, Any]) -> Any:
        return getattr(linattn, case.operator)(**given, **where, **({"backend": backend} if backend else {}))

    if case.what == "fwd":
        return runner.forward(function, arrays)
    return runner.forward_backward(function, arrays, {"o": placed(case, runner, case.values, inputs.d_o)})


def _exchange(nbytes: int, device: str) -> Callable[[], Any]:
    """Every rank gathers so many bytes of each."""
    import torch
    import torch.distributed as dist

    own = torch.zeros(nbytes // 4, device=device)
    everything = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    return lambda: dist.all_gather(everything, own)


def _peak(call: Callable[[], Any], device: str) -> int | None:
    """Bytes beyond the inputs, of the rank with most; None where nobody counts them."""
    import torch
    import torch.distributed as dist

    if (own := Torch(device).peak(call)) is None:
        return None
    most = torch.tensor(own, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def _times(call: Callable[[], Any], device: str, seconds: float) -> list[float]:
    """Milliseconds of calls, of the slowest rank each; as many on every rank."""
    import torch
    import torch.distributed as dist

    def once() -> float:
        dist.barrier()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    once()
    first = torch.tensor([once()], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    repeats = min(MOST, max(LEAST, round(seconds * 1e3 / first.item())))
    times = torch.tensor([once() for _ in range(repeats)], dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()
