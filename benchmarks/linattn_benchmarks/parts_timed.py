"""What stands around an operator, and operators that take it in: ``linattn bench parts``.

Short convolutions and gated norms move bytes and do little else: they are held against a copy of as many bytes on the same
device. ``ssd``, and the delta families with their input maps, are held against those who fuse as much, against the maps
applied one by one, and against the bare operator. Each is first compared with the PyTorch backend in float64.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import linattn
import torch
from linattn.errors import OptionError
from linattn.gates import Softplus
from torch import Tensor
from torch.nn import functional

from . import ceilings, checks
from .beside import OURS, said
from .runners import RUNNERS
from .sweep import device_times, median, parted, rounded
from .warm import FirstCall

Row = dict[str, Any]
Arrays = dict[str, Tensor]

APART, BARE = "linattn, maps apart", "linattn, bare"
"""The input maps applied one by one before the operator; the operator on what they make, which is not timed."""
PROVED = 192
"""Tokens of one sequence that are compared with float64."""
PACKED = {1: "one sequence", 4: "4 packed", 8: "8 packed"}


class Way(NamedTuple):
    """Who computes it, and how.

    Attributes:
        call: Outputs of arrays.
        given: Makes the arrays of a call, which is not timed.
        shared: The arrays that go into the call as they were drawn; ``None`` for all of them.
        module: What has to be installed.
    """

    call: Callable[[Arrays], Tensor]
    given: Callable[[Arrays], Arrays] = lambda arrays: arrays
    shared: tuple[str, ...] | None = None
    module: str = OURS


@dataclass(frozen=True)
class Part:
    """One operator at one shape.

    Attributes:
        name: The operator's.
        label: Its shape.
        dtype: Of what is drawn wide.
        whats: What is timed: ``fwd``, ``bwd`` (alone), ``fwdbwd`` or ``decode``.
        shapes: Of the arrays.
        ways: By library.
        wide: The arrays that are float32 whatever the dtype.
        sizes: ``B`` and ``T``, by which arrays are cut where it is compared.
        drawn: What becomes of normal numbers, by array.
        copies: Whether it is held against a copy.
    """

    name: str
    label: str
    dtype: str
    whats: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    ways: Mapping[str, Way]
    wide: tuple[str, ...] = ()
    sizes: tuple[int, int] = (1, 1)
    drawn: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    copies: bool = False

    @property
    def title(self) -> str:
        """Its name among rows."""
        return f"{self.name} {self.label} {self.dtype}"

    def arrays(self, device: str, seed: int) -> Arrays:
        """Arrays on the device, where they are drawn."""
        generator = torch.Generator(device).manual_seed(seed)
        drawn = {name: torch.randn(shape, generator=generator, device=device) for name, shape in self.shapes.items()}
        drawn |= {name: make(drawn[name]) for name, make in self.drawn.items()}
        return {name: x if name in self.wide else x.to(getattr(torch, self.dtype)) for name, x in drawn.items()}

    def cut(self, arrays: Arrays) -> Arrays:
        """The first tokens of the first sequence, copied."""
        B, T = self.sizes
        return {
            name: (x[:1, :PROVED] if x.shape[:2] == (B, T) else x[:1] if name == "state" else x).clone()
            for name, x in arrays.items()
        }

    def nbytes(self, arrays: Arrays, out: Tensor, what: str) -> int:
        """Bytes that must move: arrays once, one that is overwritten twice; backward, their gradients and the output's too."""
        given = sum(x.nbytes for x in arrays.values())
        if what == "bwd":
            return 2 * given + out.nbytes
        return given + out.nbytes + (arrays["state"].nbytes if "state" in arrays else 0)


# -- what is timed -----------------------------------------------------------------------------------------------------


def convolution(B: int, T: int, D: int, W: int, dtype: str) -> Part:
    """A short convolution with SiLU."""

    def call(arrays: Arrays) -> Tensor:
        return linattn.short_conv(arrays["x"], arrays["weight"], activation="silu")[0]

    shapes = {"x": (B, T, D), "weight": (D, W)}
    return Part(
        "short_conv", f"B{B} T{T} D{D} W{W}", dtype, ("fwd", "bwd"), shapes, {OURS: Way(call)}, sizes=(B, T), copies=True
    )


def convolution_step(B: int, D: int, W: int, dtype: str) -> Part:
    """One token of it."""

    def call(arrays: Arrays) -> Tensor:
        return linattn.decode_short_conv(arrays["x"], arrays["weight"], state=arrays["state"], activation="silu")

    shapes = {"x": (B, 1, D), "weight": (D, W), "state": (B, D, W - 1)}
    return Part(
        "decode_short_conv", f"B{B} T1 D{D} W{W}", dtype, ("decode",), shapes, {OURS: Way(call)}, sizes=(B, 1), copies=True
    )


def norm(B: int, T: int, D: int, G: int, before: bool, dtype: str) -> Part:
    """A gated norm of groups of ``G`` columns."""

    def call(arrays: Arrays) -> Tensor:
        x, z, weight = arrays.values()
        return linattn.gated_rms_norm(x, z, weight, norm_before_gate=before, group_size=G)

    def theirs(arrays: Arrays) -> Tensor:
        from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

        x, z, weight = arrays.values()
        return rmsnorm_fn(x, weight, None, z=z, eps=1e-5, group_size=G, norm_before_gate=before)

    shapes = {"x": (B, T, D), "z": (B, T, D), "weight": (D,)}
    label = f"B{B} T{T} D{D} groups of {G}, gate {'after' if before else 'before'}"
    ways = {OURS: Way(call), "mamba_ssm": Way(theirs, module="mamba_ssm")}
    return Part("gated_rms_norm", label, dtype, ("fwd", "bwd") if T > 1 else ("fwd",), shapes, ways, sizes=(B, T), copies=True)


def state_space(B: int, T: int, H: int, HV: int, K: int, V: int, dtype: str) -> Part:
    """``ssd`` as Mamba-2 calls it: softplus, a bias on the steps, a skip a head."""

    def call(arrays: Arrays) -> Tensor:
        return linattn.chunk_ssd(**arrays, dt_softplus=True)[0]

    def theirs(arrays: Arrays) -> Tensor:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        x, dt, A, B, C, D, bias = (arrays[name] for name in ("x", "dt", "A", "B", "C", "D", "dt_bias"))
        return mamba_chunk_scan_combined(x, dt, A, B, C, 256, D=D, dt_bias=bias, dt_softplus=True)

    shapes = {
        "x": (B, T, HV, V),
        "dt": (B, T, HV),
        "A": (HV,),
        "B": (B, T, H, K),
        "C": (B, T, H, K),
        "D": (HV,),
        "dt_bias": (HV,),
    }
    drawn = {"A": lambda x: -x.abs().exp(), "dt_bias": lambda x: x - 4}
    ways = {OURS: Way(call), "mamba_ssm": Way(theirs, module="mamba_ssm")}
    label = f"B{B} T{T} H{H}/{HV} N{K} P{V}"
    return Part("ssd", label, dtype, ("fwd", "fwdbwd"), shapes, ways, ("A", "D", "dt_bias"), (B, T), drawn)


def fused_delta(family: str, T: int, H: int, HV: int, N: int, D: int, dtype: str) -> Part:
    """A delta family of raw projections: gate, norm and sigmoid; ``N`` sequences packed."""
    vector = family == "kda"
    operator = getattr(linattn, f"chunk_{family}")
    packed = functools.partial(starts, T, N)

    def fused(arrays: Arrays) -> Tensor:
        q, k, v, g, beta, A_log, dt_bias = arrays.values()
        maps = {"qk_norm": "l2", "gate": Softplus(A_log, dt_bias), "beta_map": "sigmoid"}
        return operator(q, k, v, g, beta, **maps, **packed(q))[0]

    def mapped(arrays: Arrays) -> Arrays:
        q, k, v, g, beta, A_log, dt_bias = arrays.values()
        q, k = (functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
        return {"q": q, "k": k, "v": v, "g": Softplus(A_log, dt_bias)(g), "beta": beta.sigmoid()}

    def bare(arrays: Arrays) -> Tensor:
        return operator(*arrays.values(), **packed(arrays["q"]))[0]

    def by_fla(arrays: Arrays) -> Tensor:
        q, k, v, g, beta, A_log, dt_bias = arrays.values()
        chunk = getattr(importlib.import_module(f"fla.ops.{family}"), f"chunk_{family}")
        maps = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
        if vector:
            dt_bias = dt_bias.flatten()
        return chunk(q, k, v, g, beta.sigmoid(), A_log=A_log, dt_bias=dt_bias, **maps, **packed(q))[0]

    def by_cudnn(arrays: Arrays) -> Tensor:
        from cudnn.linear_attention import kimi_delta_attention

        cu_seqlens = offsets(arrays["q"].shape[1], 1, arrays["q"].device)
        wide = {name: arrays[name].float() for name in ("g", "beta")}
        given = {name: x.flatten(0, 1) for name, x in {**arrays, **wide}.items()}
        found = kimi_delta_attention(**{"cu_seqlens": cu_seqlens, **given, **packed(arrays["q"])})
        return (found[0] if isinstance(found, (tuple, list)) else found)[None]

    gates = (HV, D) if vector else (HV,)
    shapes = {"q": (1, T, H, D), "k": (1, T, H, D), "v": (1, T, HV, D), "g": (1, T, *gates), "beta": (1, T, HV)}
    shapes |= {"A_log": (HV,), "dt_bias": gates}
    drawn = {"A_log": lambda x: 0.25 * x, "dt_bias": lambda x: x - 4}
    ways = {
        OURS: Way(fused),
        APART: Way(lambda arrays: bare(mapped(arrays))),
        BARE: Way(bare, mapped, ("v",)),
        "fla": Way(by_fla, module="fla"),
    }
    if vector:
        ways["cuDNN, maps apart"] = Way(lambda arrays: by_cudnn(mapped(arrays)), module="cudnn")
        ways["cuDNN, bare"] = Way(by_cudnn, mapped, ("v",), module="cudnn")
    return Part(
        f"{family}, fused",
        f"T{T} H{H}/{HV} D{D}, {PACKED[N]}",
        dtype,
        ("fwd", "fwdbwd"),
        shapes,
        ways,
        ("A_log", "dt_bias"),
        (1, T),
        drawn,
    )


def starts(T: int, N: int, like: Tensor) -> dict[str, Tensor]:
    """``cu_seqlens`` of ``N`` sequences as long as each other, if the array has all their tokens."""
    return {} if N == 1 or like.shape[1] != T else {"cu_seqlens": offsets(T, N, like.device)}


@functools.lru_cache(maxsize=64)
def offsets(T: int, N: int, device: torch.device) -> Tensor:
    """Made once, and not in a call that is timed."""
    return torch.arange(0, T + 1, T // N, dtype=torch.int32, device=device)


def at_real_sizes() -> Iterator[Part]:
    """What models have, and what bounds are set for."""
    for W in range(2, 9):
        yield convolution(4, 4096, 4096, W, "bfloat16")
    for B, T, D in ((1, 8192, 2048), (8, 2048, 8192), (1, 32768, 2048), (16, 1024, 4096)):
        yield convolution(B, T, D, 4, "bfloat16")
    yield from (convolution(4, 4096, 4096, 4, dtype) for dtype in ("float16", "float32"))
    yield from (convolution_step(B, D, 4, "bfloat16") for B in (64, 256) for D in (2048, 8192))
    for D, G in ((2048, 2048), (4096, 64), (4096, 128), (4096, 512), (4096, 4096), (8192, 8192)):
        yield from (norm(4, 4096, D, G, before, "bfloat16") for before in (True, False))
    yield from (norm(4, 4096, 4096, 4096, True, dtype) for dtype in ("float16", "float32"))
    yield from (norm(B, T, 4096, 128, True, "bfloat16") for B, T in ((1, 8192), (16, 1024), (256, 1)))
    for B, T, H, HV in ((8, 2048, 1, 80), (1, 8192, 8, 128), (1, 8192, 1, 48)):
        yield state_space(B, T, H, HV, 128, 64, "bfloat16")
    for N in PACKED:
        yield from (fused_delta("kda", 8192, H, H, N, 128, "bfloat16") for H in (24, 32, 64))
        yield from (fused_delta("gated_delta_rule", 8192, 16, HV, N, 128, "bfloat16") for HV in (32, 64))


def at_small_sizes() -> Iterator[Part]:
    """One of each, where there is no accelerator."""
    yield convolution(2, 70, 64, 4, "float32")
    yield convolution_step(4, 64, 4, "float32")
    yield norm(2, 70, 64, 16, True, "float32")
    yield state_space(1, 70, 1, 2, 16, 8, "float32")
    yield from (
        fused_delta(family, 64, 1, 2 if N > 1 else 1, N, 16, "float32") for family, N in (("kda", 1), ("gated_delta_rule", 4))
    )


# -- timing ------------------------------------------------------------------------------------------------------------


def selected(parts: Iterable[Part], words: Sequence[str], patterns: Sequence[str]) -> list[Part]:
    """The parts of those operators whose rows match one of the patterns; all of them where nothing is said."""
    known = list(parts)
    names = list(dict.fromkeys(part.name.partition(",")[0] for part in known))
    if unknown := [word for word in words if word not in names]:
        raise OptionError(f"parts: unknown operator {unknown[0]!r}: known are {', '.join(names)}")
    found = [part for part in known if not words or part.name.partition(",")[0] in words]
    found = [part for part in found if not patterns or any(fnmatchcase(part.title, pattern) for pattern in patterns)]
    if not found:
        raise OptionError(f"--rows {patterns[0]}: no row has such a name; the first is {known[0].title!r}")
    return found


def run(
    parts: Sequence[Part],
    device: str,
    seed: int,
    seconds: float,
    peers: Sequence[str] | None = None,
    check: bool = True,
    report: Callable[[dict[str, Any]], None] = lambda results: None,
    end: float | None = None,
) -> dict[str, Any]:
    """Time every way of every part.

    Args:
        parts: What to time.
        device: Where.
        seed: Makes the arrays.
        seconds: Time to spend on the repeats of one row.
        peers: Which other libraries are called; ``None`` for those that are installed.
        check: Whether results are held against float64 first.
        report: Called with the results so far after each row, which is their last.
        end: When no part is begun any more, on :func:`time.monotonic`'s clock; ``None`` for never.
    """
    measured = ceilings.measure(device, "bfloat16" if device == "cuda" else "float32")
    rows: list[Row] = []
    results = {"ceilings": measured, "rows": rows}
    for part in parts:
        if end is not None and time.monotonic() > end:
            break
        arrays = part.arrays(device, seed)
        proof = Proof(part, arrays) if check else None
        for library, way in asked_of(part, peers):
            for row in rows_of(part, library, way, arrays, proof, seconds, measured["copy_bytes_per_s"]):
                rows.append(row)
                report(results)
    return results


def asked_of(part: Part, peers: Sequence[str] | None) -> list[tuple[str, Way]]:
    """The ways to time: linattn's, and those of the other libraries that are named, or of all."""
    asked = {name: name.partition(",")[0] for name in part.ways}
    return [(name, way) for name, way in part.ways.items() if way.module == OURS or peers is None or asked[name] in peers]


def first_calls(parts: Sequence[Part], device: str, seed: int, peers: Sequence[str] | None, check: bool) -> list[FirstCall]:
    """What is compiled before :func:`run` times it, a way of a part each."""
    return [
        FirstCall(f"{library} {part.title}", first_call, json.dumps([part.title, library, device, seed, check]))
        for part in parts
        for library, _ in asked_of(part, peers)
    ]


def first_call(request: str) -> str | None:
    """Why one way failed; None if it did not."""
    title, library, device, seed, check = json.loads(request)
    part = next(part for part in (*at_real_sizes(), *at_small_sizes()) if part.title == title)
    arrays = part.arrays(device, seed)
    proof = Proof(part, arrays) if check else None
    rows = [*rows_of(part, library, part.ways[library], arrays, proof, seconds=0.01, rate=1.0)]
    return next((row["reason"] for row in rows if row["reason"]), None)


def rows_of(
    part: Part, library: str, way: Way, arrays: Arrays, proof: Proof | None, seconds: float, rate: float
) -> Iterator[Row]:
    """A row for each thing that is timed."""
    for what in part.whats:
        row: Row = {"part": part.name, "label": part.label, "dtype": part.dtype, "what": what, "library": library}
        row |= {"status": "ok", "reason": None, "ms": None, "bytes": None, "share": None, "peak_bytes": None, "error": None}
        if importlib.util.find_spec(way.module) is None:
            yield row | {"status": "skipped", "reason": f"{way.module} is not installed"}
            continue
        try:
            if proof is not None:
                row["error"] = error = proof.error(way, what != "fwd" and what != "decode")
                row["status"] = "ok" if error <= checks.BOUND[part.dtype] else "wrong"
            yield row | figures(part, way, arrays, what, seconds, rate)
        except Exception as error:  # somebody else's code: the row says what happened, and the other rows still run
            yield row | {"status": "failed", "reason": said(error)}
        finally:
            RUNNERS["torch"](next(iter(arrays.values())).device.type).release()


class Proof:
    """What the PyTorch backend makes of a few tokens in float64.

    Args:
        part: Of which operator.
        arrays: Of which the first tokens are taken.
    """

    def __init__(self, part: Part, arrays: Arrays) -> None:
        self.arrays = part.cut(arrays)
        exact = {name: x.double() for name, x in self.arrays.items()}
        with linattn.use_backend("torch"):
            self.wanted = outputs(part.ways[OURS].call, exact, exact)

    def error(self, way: Way, gradients: bool) -> float:
        """The largest difference relative to the largest value, of outputs and, if asked for, of gradients."""
        given = {name: x.clone() for name, x in way.given(self.arrays).items()}
        shared = self.arrays if way.shared is None else way.shared
        found = outputs(way.call, given, shared if gradients else ())
        return max(checks.relative_error(numbers(x), numbers(self.wanted[name])) for name, x in found.items())


def outputs(call: Callable[[Arrays], Tensor], arrays: Arrays, shared: Iterable[str]) -> Arrays:
    """The output of a call, and the gradients of those arrays, by name; of a state nothing, which is overwritten."""
    names = [name for name in shared if "state" not in arrays]
    leaves = {name: x.detach().requires_grad_(bool(names)) for name, x in arrays.items()}
    with torch.set_grad_enabled(bool(names)):
        out = call(leaves)
    if not names:
        return {"out": out}
    pulled = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64).view(out.shape).to(out.dtype)
    gradients = torch.autograd.grad(out, [leaves[name] for name in names], pulled)
    return {"out": out, **dict(zip(names, gradients, strict=True))}


def numbers(x: Tensor) -> Any:
    """As NumPy's float64."""
    return x.detach().double().cpu().numpy()


def figures(part: Part, way: Way, arrays: Arrays, what: str, seconds: float, rate: float) -> Row:
    """Time, memory, and the share of a copy's bandwidth."""
    runner = RUNNERS["torch"](next(iter(arrays.values())).device.type)
    given = way.given(arrays)
    with torch.no_grad():
        out = way.call({name: x.clone() for name, x in given.items()})
    pulled = {} if what in ("fwd", "decode") else {"o": torch.randn_like(out)}

    def function(arrays: Arrays) -> tuple[Tensor, None]:
        return way.call(arrays), None

    copies = [parted(copy, pulled) for copy in runner.copies({**given, **pulled})]
    calls = [runner.forward_backward(function, each, d) if pulled else runner.forward(function, each) for each, d in copies]
    ms, peak = median(device_times(runner, calls, seconds)), runner.peak(calls[0])
    if what == "bwd":
        ms -= median(device_times(runner, [runner.forward_kept(function, each) for each, _ in copies], seconds))
    nbytes = part.nbytes(arrays, out, what) if part.copies else None
    share = None if nbytes is None else rounded(nbytes / (ms / 1e3) / rate, 3)
    return {"ms": rounded(ms), "bytes": nbytes, "share": share, "peak_bytes": peak}
