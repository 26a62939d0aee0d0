"""Scores bytes with the shipped model on every installed backend: prefill by ``chunk_gla``, then token by token.

Every backend runs in float32 on arrays of its own framework, strictly: nothing falls back. The oracle in float64 is the truth
that each is compared with.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import resources
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendError
from ..registry import registry
from .model import State, empty_state, forward

__all__ = ["BLOCK", "DECODED", "NotRun", "Result", "Score", "arrays_of", "parts", "record", "run", "score", "shipped_weights"]

BLOCK = 2048
"""Bytes per call of ``chunk_gla`` in prefill; the state goes from block to block, so memory does not grow with the text."""

DECODED = 256
"""Bytes at the end of the text that are decoded one by one, unless that is more than half of it."""

ORACLE = "numpy"

_NAMESPACES = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "mlx": "mlx.core"}


class Score(NamedTuple):
    """What one run gave.

    Attributes:
        log_probs: Natural-log probability of each byte given those before it, ``[N]`` float64.
        prefill: Bytes per second in prefill.
        decode: Bytes per second in decoding; ``None`` if no byte was decoded.
    """

    log_probs: NDArray[np.float64]
    prefill: float
    decode: float | None

    @property
    def bits_per_byte(self) -> float:
        """Mean over all bytes, those of prefill and of decoding."""
        return float(-self.log_probs.mean() / math.log(2.0))


class Result(NamedTuple):
    """One backend that ran on the arrays of one framework.

    Attributes:
        backend: Its name.
        arrays: The framework and device of the arrays, e.g. ``"torch cpu"``.
        score: What it gave.
        difference: Largest difference of a byte's log probability from the float64 oracle, in nats.
    """

    backend: str
    arrays: str
    score: Score
    difference: float


class NotRun(NamedTuple):
    """One backend without a result, and why. ``failed`` tells a fault from a declared limit or a missing package."""

    backend: str
    reason: str
    failed: bool = False


class Arrays(NamedTuple):
    """What the demo needs of a framework.

    Attributes:
        where: The framework and the device, for people.
        put: Makes an array of the framework from a NumPy array.
        get: The way back; waits for the device.
        compiled: What the framework's users wrap around a step of decoding. Default: nothing.
    """

    where: str
    put: Callable[[NDArray[Any]], Any]
    get: Callable[[Any], NDArray[Any]]
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function


def shipped_weights() -> dict[str, NDArray[np.float16]]:
    """The weights that ship with linattn, by name."""
    with resources.files("linattn.demo").joinpath("byte_lm.npz").open("rb") as file, np.load(file) as arrays:
        return dict(arrays)


def record() -> dict[str, Any]:
    """How the shipped weights were made and what they score on held-out text, as the training script wrote it."""
    return json.loads(resources.files("linattn.demo").joinpath("byte_lm.json").read_text())


def run(
    data: bytes, backends: list[str] | None = None, advance: Callable[[str, int], None] = lambda name, n: None
) -> Iterator[Result | NotRun]:
    """Score ``data`` on every installed backend, the oracle first.

    Args:
        data: The bytes, at least one.
        backends: Names of the backends to run. Default: all that are installed.
        advance: Called with a backend's name and a number of bytes as they are done; :func:`parts` says how many parts there
            will be, each as long as ``data``. The truth counts as one, under the name ``"float64 oracle"``.

    Raises:
        UnknownBackend: A name in ``backends`` that nothing has.
    """
    chosen = parts(backends)
    weights = shipped_weights()

    def scored(arrays: Arrays, dtype: str, backend: str, label: str) -> Score:
        placed = {name: arrays.put(array.astype(dtype)) for name, array in weights.items()}
        return score(data, placed, arrays, backend, lambda n: advance(label, n))

    truth = scored(arrays_of("numpy"), "float64", ORACLE, "float64 oracle")
    for name, framework in chosen:
        try:
            if framework is None:
                registry.load(name)  # raises the reason
            arrays = arrays_of(str(framework))
            result = scored(arrays, "float32", name, name)
        except BackendError as error:
            yield NotRun(name, str(error).rpartition(f"\n  {name}: ")[2])  # the backend's own words, without the call's sizes
        except Exception as error:  # a fault of one backend must not hide the others; the caller reports it as a failure
            yield NotRun(name, f"{type(error).__name__}: {error}", failed=True)
        else:
            difference = float(np.abs(result.log_probs - truth.log_probs).max())
            if math.isfinite(difference):
                yield Result(name, arrays.where, result, difference)
            else:
                yield NotRun(name, "gave log probabilities that are not finite", failed=True)


def parts(backends: list[str] | None = None) -> list[tuple[str, str | None]]:
    """What :func:`run` runs: each backend with each framework it takes; ``None`` for one that cannot be loaded."""
    pairs: list[tuple[str, str | None]] = []
    for name in backends or sorted(registry.records, key=lambda name: (name != ORACLE, name)):
        registry.record(name)
        try:
            pairs += [(name, framework) for framework in registry.load(name).frameworks]
        except BackendError:
            pairs.append((name, None))
    return list(dict.fromkeys(pairs))


def score(
    data: bytes,
    weights: Mapping[str, Any],
    arrays: Arrays,
    backend: str,
    advance: Callable[[int], None] = lambda n: None,
    *,
    block: int = BLOCK,
    decoded: int = DECODED,
) -> Score:
    """Score ``data`` on one backend.

    Args:
        data: The bytes, at least one.
        weights: Weights of the model in the framework's arrays.
        arrays: How to make such arrays.
        backend: A backend's name; strict.
        advance: Called with a number of bytes as they are done.
        block: Bytes per call in prefill.
        decoded: Bytes at the end that are decoded one by one; at most half of the text.
    """
    given = np.frombuffer(b"\0" + data[:-1], np.uint8).astype(np.int32)[None]
    bytes_ = np.frombuffer(data, np.uint8)
    prefilled = len(data) - min(decoded, len(data) // 2)
    log_probs = np.empty(len(data))

    models = {form: arrays.compiled(partial(forward, form=form, backend=backend)) for form in ("chunk", "recurrent")}
    empty = empty_state(weights, arrays.put(given[:, :1]))

    def go(state: State, start: int, stop: int, form: str) -> State:
        logits, state = models[form](weights, arrays.put(given[:, start:stop]), state)
        log_probs[start:stop] = _log_softmax(arrays.get(logits)[0])[np.arange(stop - start), bytes_[start:stop]]
        return state

    edges = [*range(0, prefilled, block), prefilled]
    for length in {stop - start for start, stop in pairwise(edges)}:
        go(empty, 0, length, "chunk")  # compiles, where a framework does, outside of what is timed
    if prefilled < len(data):
        go(empty, 0, 1, "recurrent")

    start_time, state = time.perf_counter(), empty
    for start, stop in pairwise(edges):
        state = go(state, start, stop, "chunk")
        advance(stop - start)
    middle_time = time.perf_counter()
    for position in range(prefilled, len(data)):
        state = go(state, position, position + 1, "recurrent")
        advance(1)
    end_time = time.perf_counter()
    return Score(
        log_probs,
        prefilled / (middle_time - start_time),
        (len(data) - prefilled) / (end_time - middle_time) if prefilled < len(data) else None,
    )


def _log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # the caller looks for what is not finite
        shifted -= shifted.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def arrays_of(framework: str) -> Arrays:
    """Arrays of a framework on its default device; PyTorch's are on a GPU if there is one.

    Raises:
        BackendError: The framework is not installed, or not one that the demo knows.
    """
    if framework not in _NAMESPACES:
        raise BackendError(f"the demo cannot make {framework} arrays")
    if importlib.util.find_spec(framework) is None:
        raise BackendError(f"{framework} is not installed: pip install 'linattn[{framework}]'")
    xp: Any = importlib.import_module(_NAMESPACES[framework])
    if framework == "torch":
        device = "cuda" if xp.cuda.is_available() else "cpu"

        def put(array: NDArray[Any]) -> Any:
            return xp.from_numpy(array.copy()).to(device)

        def get(tensor: Any) -> NDArray[Any]:
            return tensor.cpu().numpy()

        return Arrays(f"torch {device}", put, get)
    if framework == "jax":
        jax = importlib.import_module("jax")
        return Arrays(f"jax {jax.default_backend()}", xp.asarray, np.asarray, jax.jit)
    if framework == "mlx":
        device = "metal" if xp.default_device().type == xp.DeviceType.gpu else "cpu"
        return Arrays(f"mlx {device}", xp.array, np.array)
    return Arrays("numpy cpu", np.asarray, np.asarray)
