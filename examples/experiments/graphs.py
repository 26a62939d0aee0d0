"""Steps of training recorded as CUDA graphs: a small model takes longer to call than to compute."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CALLS = 2
"""As they come, before one is recorded: they compile kernels and make the optimiser's moments."""
RECORDING = threading.Lock()
"""Held by the thread that records: one at a time can."""
Kind = tuple[tuple[str, torch.Size, torch.dtype], ...]


class Recorded:
    """Calls of one function of arrays on a GPU, recorded for each kind of arrays that it is given, and replayed from then on.

    What it changes besides (parameters, moments) must keep its place in memory. What it returns is overwritten by the next
    call.
    """

    def __init__(self) -> None:
        self.calls: Counter[Kind] = Counter()
        self.graphs: dict[Kind, tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Any]] = {}

    def __call__(self, function: Callable[..., Any], **given: Tensor) -> Any:
        kind = tuple((name, x.shape, x.dtype) for name, x in given.items())
        self.calls[kind] += 1
        if self.calls[kind] <= CALLS:
            return function(**given)
        if kind not in self.graphs:
            self.graphs[kind] = record(function, given)
        graph, held, found = self.graphs[kind]
        for name, x in given.items():
            held[name].copy_(x)
        graph.replay()
        return found

    def forget(self) -> None:
        """End all graphs together: the first that ends takes the memory along in which products of its stream add up."""
        for graph, _, _ in self.graphs.values():
            graph.reset()
        self.graphs.clear()


def record(function: Callable[..., Any], given: dict[str, Tensor]) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor], Any]:
    """The graph of a call, the arrays that it reads, and what it returns; nothing is computed.

    It is recorded on the stream of the thread, if that has one of its own. PyTorch gives all matrix products of a stream one
    workspace, in which their parts are added up; all backward passes run in one thread with one handle of cuBLAS, so that
    graphs of several threads, recorded on one stream, would write there at the same time.
    """
    held, graph = {name: x.clone() for name, x in given.items()}, torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    own = None if current == torch.cuda.default_stream() else current
    with RECORDING, torch.cuda.graph(graph, stream=own, capture_error_mode="thread_local"):
        return graph, held, function(**held)
