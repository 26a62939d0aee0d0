"""The surface that a framework must offer to the suite."""

from __future__ import annotations

import gc
import locale
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..cases import Case

__all__ = ["Adapter", "Arrays", "Global", "changed", "far_apart", "in_a_thread", "repeating"]

Arrays = dict[str, Any]


def far_apart(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """Number of elements of a buffer for ``shape``, and strides that spread axis 1 over more than 2³¹ of them."""
    inner = (shape[0], *shape[2:])
    step = 2**31 // max(shape[1] - 1, 1) + int(np.prod(inner))
    first, *rest = (int(np.prod(inner[i + 1 :])) for i in range(len(inner)))
    return step * shape[1], (first, step, *rest)


def in_a_thread(call: Callable[[], Arrays]) -> Arrays:
    """What a call returns, or raises, that a thread of its own makes."""
    found: list[Arrays] = []
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if wrong:
        raise wrong[0]
    return found[0]


def repeating(x: NDArray[Any]) -> tuple[slice, ...]:
    """The part of an array that has all of its values: one entry along each axis along which they repeat."""
    repeats = [x.size > 0 and bool((x == x.take([0], axis)).all()) for axis in range(x.ndim)]
    return tuple(slice(0, 1) if repeat else slice(None) for repeat in repeats)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names whose values differ."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


class Global(NamedTuple):
    """A piece of a process's global state: how it is read and how it is put back."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], Any]


def _environment() -> dict[str, str]:
    """Without what frameworks themselves write there, when they compile for the first time."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FRAMEWORKS_OWN)}


def _set_environment(before: dict[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _handlers() -> dict[str, Any]:
    return {number.name: signal.getsignal(number) for number in signal.Signals}


def _set_handlers(before: dict[str, Any]) -> None:
    for name, handler in before.items():
        if handler is not None and signal.getsignal(signal.Signals[name]) != handler:
            signal.signal(signal.Signals[name], handler)


def _filters() -> list[Any]:
    """The filters of all warnings; such as name a kind, a module or a text come with the first import of a library."""
    return [found for found in warnings.filters if found[1:4] == (None, Warning, None)]


def _streams() -> tuple[Any, ...]:
    return sys.stdin, sys.stdout, sys.stderr


def _set_streams(before: tuple[Any, ...]) -> None:
    sys.stdin, sys.stdout, sys.stderr = before


FRAMEWORKS_OWN = ("TORCH_", "TORCHINDUCTOR_", "KINETO_", "TRITON_", "CUDA_MODULE_LOADING")
OF_THE_PROCESS = (
    Global("working directory", os.getcwd, os.chdir),
    Global("environment", _environment, _set_environment),
    Global("locale", lambda: locale.setlocale(locale.LC_ALL), lambda before: locale.setlocale(locale.LC_ALL, before)),
    Global("handlers of signals", _handlers, _set_handlers),
    Global("standard streams", _streams, _set_streams),
    Global("import path", lambda: list(sys.path), lambda before: sys.path.__setitem__(slice(None), before)),
    Global("filters of warnings", _filters, lambda _: None),  # they are put back with the block that they are read in
    Global("garbage collection", gc.isenabled, lambda before: gc.enable() if before else gc.disable()),
    Global("random state of Python", random.getstate, random.setstate),
    Global("random state of NumPy", np.random.get_state, np.random.set_state),
    Global("floating-point error handling of NumPy", np.geterr, lambda before: np.seterr(**before)),
    Global("print options of NumPy", np.get_printoptions, lambda before: np.set_printoptions(**before)),
    *(
        [Global("processors of the process", lambda: os.sched_getaffinity(0), lambda before: os.sched_setaffinity(0, before))]
        if hasattr(os, "sched_getaffinity")
        else []
    ),
)
"""Global state of any process."""


class Adapter:
    """Arrays of one framework on one device.

    Attributes:
        name: The framework.
        device: The device, as users of the framework write it.
        eager: Calls at sizes that were not there before are not compiled first.
    """

    name: ClassVar[str]
    eager = False

    def __init__(self, device: str) -> None:
        self.device = device

    def set_up(self, case: Case) -> None:
        """Settings of the framework that a case needs."""

    def from_float64(self, x: NDArray[Any], dtype: str) -> Any:
        """An array of ``dtype`` (an integer one as well) on the device."""
        raise NotImplementedError

    def to_float64(self, x: Any) -> NDArray[Any]:
        """The exact values of an array, in float64; integers stay integers."""
        raise NotImplementedError

    def is_array(self, x: Any) -> bool:
        """True for an array of this framework."""
        raise NotImplementedError

    def dtype(self, x: Any) -> str:
        """Name of the dtype, e.g. ``"bfloat16"``."""
        raise NotImplementedError

    def is_same_device(self, x: Any) -> bool:
        """True if ``x`` lives on the device."""
        return True

    def strided(self, x: Any) -> Any:
        """The same values in an array that is not contiguous, NaN in its gaps."""
        return x

    def sliced(self, x: Any) -> Any:
        """The same values as a part of a larger array, NaN around them."""
        return x

    def headsfirst(self, x: Any) -> Any:
        """The same values, with heads (axis 2) before tokens (axis 1) in memory."""
        return x

    def expanded(self, x: Any) -> Any:
        """The same values, there once along every axis along which they repeat."""
        return x

    def reversed(self, x: Any) -> Any:
        """The same values behind negative strides."""
        return x

    def readonly(self, x: Any) -> Any:
        """The same values in memory that cannot be written to."""
        return x

    def misaligned(self, x: Any) -> Any:
        """The same values, beginning one element behind where an allocator would put them."""
        return x

    def far(self, x: Any) -> Any:
        """The same values with tokens (axis 1) so far apart that the last one is more than 2³¹ elements from the first."""
        raise NotImplementedError

    def poison(self, sizes: Mapping[str, int]) -> None:
        """Leave NaN in freed memory: ``sizes`` are numbers of elements by dtype-free name."""

    def mode(self, name: str) -> AbstractContextManager[Any]:
        """The framework's mode of gradients for one call: ``no_grad`` or ``inference``."""
        return nullcontext()

    def aside(self, call: Callable[[], Arrays]) -> Arrays:
        """What a call returns that is made from another thread, where users of the framework make calls from several."""
        return call()

    def gradients_again(
        self, how: str, call: Callable[[Arrays], Arrays], arrays: Arrays, cotangents: Arrays
    ) -> tuple[Arrays, Arrays]:
        """:meth:`gradients`, got in another way: ``retained``, for the second time; ``accumulated``, left in the inputs."""
        return self.gradients(call, arrays, cotangents)

    def gradients(self, call: Callable[[Arrays], Arrays], arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        """Outputs of ``call``, and the gradient of every array in ``arrays`` that has one."""
        raise NotImplementedError

    def tracked(self, arrays: Arrays) -> Arrays:
        """The arrays as ``gradients`` hands them to a call, so that the plan of such a call can be asked for."""
        return arrays

    def overwrite(self, arrays: Arrays, values: Arrays) -> None:
        """Write other values into arrays of the same shapes."""
        raise NotImplementedError

    def surroundings(self) -> Mapping[str, Callable[[], AbstractContextManager[Any]]]:
        """Defaults of the framework that a user may have changed, by name, each for the time of a ``with`` block."""
        return {}

    def in_child(self) -> None:
        """What a forked process does before it uses the framework."""

    def another_stream(self, arrays: Arrays) -> AbstractContextManager[Any]:
        """A stream that is not the default one, on which the arrays are ready, and what it did is waited for at the end."""
        raise NotImplementedError

    def replayed(self, call: Callable[[], Arrays], change: Callable[[], None]) -> Arrays:
        """What a call that was recorded gives when it is replayed after a change."""
        raise NotImplementedError

    def wait(self) -> None:
        """Until the device has done what it was asked for; raise what it could not do."""

    def give_back(self) -> None:
        """Memory that the framework keeps for later, between two cases: other processes share the device."""

    def transforms(self) -> Mapping[str, Callable[[Any], None]]:
        """Checks of the framework's own transforms by name: each takes a ``Run``."""
        return {}

    def globals(self) -> tuple[Global, ...]:
        """Global state that a backend must leave as it is: that of the process, to which frameworks add their own."""
        return OF_THE_PROCESS

    def repeated(self, x: Any, axis: int, times: int, rest: int) -> Any:
        """``x`` joined to itself ``times`` times along an axis, then its first ``rest`` entries."""
        raise NotImplementedError

    def lengthened(self, x: Any, axis: int, length: int) -> Any:
        """An array of that length along an axis, which nobody reads: it need not take the memory of its elements."""
        raise NotImplementedError

    def held(self) -> int:
        """Bytes of device memory that live arrays hold, 0 where that is host memory or cannot be asked."""
        return 0

    def memory(self) -> float:
        """Memory of the device in GiB; 0 where it does not matter."""
        return 0.0

    def versions(self) -> dict[str, str]:
        """Versions of the framework and, on an accelerator, its driver and device."""
        return {}
