"""Those who work at a time: processes of a CPU, or threads of a process for each GPU that is visible.

Kernels of small models leave most of a GPU idle, and those of several processes take turns; threads with a stream each do not.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context
from typing import Any

import torch

from .batched import on_gpu

Job = tuple[Any, Callable[..., Any], tuple[Any, ...]]
"""What it is, and a function with its arguments, to which the device is added."""
PATIENCE = 5.0
"""Seconds after which it is looked whether all processes live."""


class Crew:
    """``jobs`` at a time on each device; one alone works in this process."""

    def __init__(self, jobs: int, device: str) -> None:
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        self.places = [f"cuda:{i}" for i in range(gpus)] or [device]
        self.threads = jobs if on_gpu(device) else 1
        if not on_gpu(device):
            self.places *= jobs
        self.size = self.threads * len(self.places)
        self.device, self.busy = device, 0

    def __enter__(self) -> Crew:
        if self.size == 1:
            self.asked, self.answers = queue.Queue(), queue.Queue()
            return self
        context = get_context("spawn")
        self.asked, self.answers = context.Queue(), context.Queue()
        self.processes = [
            context.Process(target=serve, args=(place, self.threads, self.asked, self.answers), daemon=True)
            for place in self.places
        ]
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if self.size == 1:
            return
        for process in self.processes:
            if kind is None:
                for _ in range(self.threads):
                    self.asked.put(None)
            else:
                process.terminate()
        for process in self.processes:
            process.join()

    def take(self, waiting: Iterable[Any]) -> Iterator[Any]:
        """As many as there are hands free."""
        return itertools.islice(waiting, self.size - self.busy)

    def begin(self, what: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.busy += 1
        self.asked.put((what, function, arguments))

    def wait(self) -> tuple[Any, Any, float, str]:
        """The next that ends: what it is, what was found, its share of a device's seconds, and its error."""
        if self.size == 1:
            self.answers.put(answer(self.asked.get(), self.device, 1))
        while True:
            try:
                found = self.answers.get(timeout=PATIENCE)
                self.busy -= 1
                return found
            except queue.Empty:
                if dead := [process.exitcode for process in self.processes if not process.is_alive()]:
                    raise RuntimeError(f"a process of the runner ended with {dead[0]}") from None


def serve(place: str, threads: int, asked: Any, answers: Any) -> None:
    """Of a process: do what is asked for, in threads; on a CPU with one of PyTorch's own."""
    if not on_gpu(place):
        torch.set_num_threads(1)

    def work() -> None:
        if on_gpu(place):
            torch.cuda.set_device(place)
            torch.cuda.set_stream(torch.cuda.Stream())  # what this thread launches waits for no other's
        for job in iter(asked.get, None):
            answers.put(answer(job, place, threads))

    hands = [threading.Thread(target=work) for _ in range(threads)]
    for hand in hands:
        hand.start()
    for hand in hands:
        hand.join()


def answer(job: Job, place: str, beside: int) -> tuple[Any, Any, float, str]:
    """What a job is, what was found, its share of the device's seconds, and the error it ended with."""
    what, function, arguments = job
    began = time.perf_counter()
    try:
        found, error = function(*arguments, place), ""
    except Exception:  # goes to the process that asked
        found, error = None, traceback.format_exc()
    return what, found, (time.perf_counter() - began) / beside, error
