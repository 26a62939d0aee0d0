"""Triton's autotuners of other libraries, within the time of a benchmark.

They compile and time every configuration of a kernel, one after another: hundreds a layer. Here a kernel's configurations are
compiled side by side, may be held to a number of them, and are timed while no other process times its own.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")

TIMES = {"warmup": 5, "rep": 20}
"""Milliseconds for one configuration."""
THREADS = 4
"""That compile the configurations of a kernel."""


@contextlib.contextmanager
def together(turns: Path, at_most: int | None) -> Iterator[None]:
    """Tune as processes do that tune at the same time.

    Args:
        turns: A file that stands for the device: who has locked it times.
        at_most: Configurations of a kernel; None for all.
    """
    autotuner = triton_autotuner()
    if autotuner is None:
        yield
        return
    prune, bench = autotuner.prune_configs, autotuner._bench

    def pruned(self: Any, given: dict[str, Any]) -> list[Any]:
        configs = some(prune(self, given), at_most)
        compile_all(self, configs, given)
        return configs

    def timed(self: Any, *args: Any, config: Any, **given: Any) -> Any:
        import fcntl  # where there is Triton, there is this

        from triton.testing import do_bench

        self._do_bench = lambda call, quantiles: do_bench(call, quantiles=quantiles, **TIMES)
        self.__dict__.pop("do_bench", None)
        with turns.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return bench(self, *args, config=config, **given)

    with mock.patch.multiple(autotuner, prune_configs=pruned, _bench=timed):
        yield


@contextlib.contextmanager
def untuned() -> Iterator[None]:
    """Take the first configuration of every kernel that can run: where results count and no time does."""
    autotuner = triton_autotuner()
    if autotuner is None:
        yield
        return
    bench, run = autotuner._bench, autotuner.run

    def first(self: Any, *args: Any, config: Any, **given: Any) -> Any:
        if self._runs:
            return [float("inf")] * 3
        self._do_bench = lambda call, quantiles: (call(), [0.0] * 3)[1]
        self.__dict__.pop("do_bench", None)
        found = bench(self, *args, config=config, **given)
        self._runs = found[0] == 0
        return found

    def run_untuned(self: Any, *args: Any, **given: Any) -> Any:
        kept = {"cache": self.cache, "cache_results": self.cache_results}
        self.__dict__.update(cache=self.__dict__.setdefault("_untuned", {}), cache_results=False, _runs=False)
        try:
            return run(self, *args, **given)
        finally:
            self.__dict__.update(kept)

    with mock.patch.multiple(autotuner, _bench=first, run=run_untuned):
        yield


def triton_autotuner() -> Any:
    """Triton's class, or None without Triton."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return None
    return Autotuner


def some(found: Sequence[T], at_most: int | None) -> list[T]:
    """So many of them, always the same ones and the first among them; all of them where there are no more."""
    if at_most is None or len(found) <= at_most:
        return list(found)
    first, *others = found
    return [first, *random.Random(0).sample(others, at_most - 1)]


def compile_all(autotuner: Any, configs: Sequence[Any], given: dict[str, Any]) -> None:
    """Compile a kernel's configurations side by side. One that cannot be compiled is met again where it is timed."""
    from triton import AsyncCompileMode

    named = {**autotuner.nargs, **{name: x for name, x in given.items() if name != "warmup"}}
    with (
        contextlib.suppress(Exception),
        ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool,
        AsyncCompileMode(pool, ignore_errors=True),
    ):
        for config in configs:
            autotuner.fn.warmup(**{**named, **config.all_kwargs()})
