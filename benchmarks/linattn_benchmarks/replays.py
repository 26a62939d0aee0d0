"""Calls of ranks recorded as CUDA graphs and replayed: what is left of their time is the device's and the links'.

Every rank records the same call, collectives among it, and all replay it or none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .clocks import spread

__all__ = ["replayed"]

WARM = 8
"""Calls before one is recorded: they compile kernels, compare what ranks say, and bring offsets and digests to the device."""

Call = Callable[[], Any]


def replayed(prepare: Callable[[], Call], times: Callable[[Call], list[float]], group: Any) -> dict[str, Any]:
    """``{"ms": …}`` of replays; where a rank cannot record the call ``{"failed": …}``, what it said.

    Args:
        prepare: Makes the call, with arrays of its own, which replays read.
        times: Milliseconds of a call.
        group: The ranks.
    """
    import torch.distributed as dist

    replay, said = None, None
    try:
        replay = recorded(prepare)
    except RuntimeError as error:  # what of it CUDA does not take; all ranks must hear of it before one replays
        said = f"rank {dist.get_rank(group)}: {str(error).strip().splitlines()[0]}"
    everyone: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, said, group=group)
    failed = next((text for text in everyone if text), None)
    if failed is not None or replay is None:
        return {"failed": failed}
    return {"ms": spread(times(replay))}


def recorded(prepare: Callable[[], Call]) -> Call:
    """What replays a call, which is prepared and made beforehand on the stream where it is recorded.

    A backward pass would have the default stream wait, were its leaves first used there.
    """
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = prepare()
        for _ in range(WARM):
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's watchdog asks CUDA meanwhile
        outputs = call()

    def replay() -> tuple[Any, ...]:
        graph.replay()
        return call, outputs  # the memory that the graph reads and writes

    return replay
