"""The truth as the process of a backend has it: names, shapes and dtypes, and no values.

Checks run where the backend is. What they compare a result with is *sealed* there: it can be cut and multiplied, as an array
can, and a comparison with it is a *claim*, which goes to the judge's process, the only one that has the values and the bounds.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

__all__ = ["Claim", "Sealed", "opened", "receive", "send"]


@dataclass(frozen=True)
class Sealed:
    """An array whose values only the judge has.

    Attributes:
        place: Where the judge finds it: number of the truth, ``outputs`` or ``gradients``, name, ``value`` or ``noise``.
        shape: Its shape.
        cuts: The indices that were applied to it, one after the other.
        factor: What it was multiplied by.
    """

    place: tuple[int, str, str, str]
    shape: tuple[int, ...]
    cuts: tuple[Any, ...] = ()
    factor: float = 1.0

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __getitem__(self, rows: Any) -> Sealed:
        shape = np.broadcast_to(np.zeros(()), self.shape)[rows].shape
        return Sealed(self.place, shape, (*self.cuts, rows), self.factor)

    def __mul__(self, factor: float) -> Sealed:
        return Sealed(self.place, self.shape, self.cuts, self.factor * factor)


def opened(x: Any, values: Callable[[tuple[int, str, str, str]], Any]) -> Any:
    """An array, or what a sealed one stands for."""
    if not isinstance(x, Sealed):
        return x
    found = values(x.place)
    for rows in x.cuts:
        found = found[rows]
    return found if x.factor == 1.0 else found * x.factor


@dataclass
class Claim:
    """That a result is near what it must be; where a check has the distance otherwise.

    Attributes:
        got: The result.
        value: What it must be near.
        noise: The noise of that.
        dtype: Its dtype.
        rows: The part of it that is meant.
        name: What the check calls it.
    """

    got: Any
    value: Any
    noise: Any
    dtype: str
    rows: Any = field(default=...)
    name: str = ""

    @property
    def whole(self) -> tuple[int, str, str] | None:
        """What truth the claim is about all of, if so: its number, ``outputs`` or ``gradients``, and a name."""
        value, noise = self.value, self.noise
        whole = self.rows is ... and all(isinstance(x, Sealed) and not x.cuts and x.factor == 1.0 for x in (value, noise))
        return value.place[:3] if whole else None

    @property
    def complaint(self) -> str:
        """Why no check makes such a claim: the bound is always that of the truth, and of what the result is held against, where
        that is the truth. Empty if one may.
        """
        value, noise = self.value, self.noise
        if not isinstance(noise, Sealed) or noise.place[3] != "noise":
            return "its bound is not that of the truth"
        if not isinstance(value, Sealed):
            return "" if noise.factor == 1.0 else "its bound is not that of the truth"
        if (*value.place[:3], "noise") != noise.place or value.place[3] != "value":
            return "its bound is that of another result"
        return "" if abs(value.factor) == noise.factor else "its bound is not that of the truth"


# -- messages ------------------------------------------------------------------------------------------------------------

TAKEN = {
    ("builtins", "slice"), ("builtins", "Ellipsis"), ("builtins", "complex"), ("_codecs", "encode"),
    ("numpy", "ndarray"), ("numpy", "dtype"),
    *(("numpy." + core, name) for core in ("core.multiarray", "_core.multiarray") for name in ("_reconstruct", "scalar")),
    *(("numpy." + core, "_frombuffer") for core in ("core.numeric", "_core.numeric")),
    ("linattn_conformance.sealed", "Sealed"), ("linattn_conformance.sealed", "Claim"),
    ("linattn_conformance.runner", "Result"), ("linattn_conformance.runner", "Subject"), ("linattn_conformance.cases", "Case"),
}  # fmt: skip
"""What a message of a backend's process may be made of: reading one runs none of its code."""


class Reader(pickle.Unpickler):
    """Reads messages of a process that is not trusted."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in TAKEN:
            raise pickle.UnpicklingError(f"{module}.{name} is part of no message")
        return super().find_class(module, name)


def send(connection: Connection, message: Any) -> None:
    """Send a message."""
    connection.send_bytes(pickle.dumps(message, protocol=5))


def receive(connection: Connection) -> Any:
    """A message of a process that is not trusted.

    Raises:
        EOFError, OSError: The process is gone, or what it began to say did not come to its end.
        UnpicklingError: It is no message.
    """
    return Reader(io.BytesIO(connection.recv_bytes())).load()
