"""Faults on NumPy arrays: the oracle with one small change each."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import linattn
import numpy as np
from linattn.plugin import Backend, Call, Unsupported
from linattn_backends.numpy import NumpyBackend, oracle
from linattn_backends.numpy.backend import cast

from .base import CHUNK, Simple, by_chunks, cut

__all__ = ["FAULTS", "Honest"]

Arrays = dict[str, Any]


class Honest(Simple):
    """No fault: the suite must accept what the others change."""

    name = "honest"
    families = ("gla", "kda")


class WrongScale(Simple):
    """``1/K`` for ``1/√K``, when nothing else was asked for."""

    name = "wrong-scale"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        K = arrays["k"].shape[-1]
        scale = 1.0 / K if options["scale"] == K**-0.5 else options["scale"]
        return super().forward(op, arrays, {**options, "scale": scale})


class ScaleIgnored(Simple):
    """The ``scale`` of the caller is not read."""

    name = "scale-ignored"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        return super().forward(op, arrays, {**options, "scale": None})


class GateDroppedAtBoundary(Simple):
    """The first gate of every chunk but the first is lost."""

    name = "gate-dropped-at-boundary"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        g = arrays["g"].copy()
        g[:, CHUNK::CHUNK] = 0.0
        return super().forward(op, {**arrays, "g": g}, options)


class OffByOneMask(Simple):
    """Outputs do not see their own token: ``s < t`` where ``s ≤ t`` is meant."""

    name = "off-by-one-mask"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        q, k = (np.repeat(arrays[name], o.shape[2] // arrays[name].shape[2], 2) for name in ("q", "k"))
        return o - options["scale"] * (q * k).sum(-1, keepdims=True) * arrays["v"], state


class MaskSeesNext(Simple):
    """Inside a chunk of two, the first token sees the second."""

    name = "mask-sees-next"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        if o.shape[1] > 1:
            k, v = arrays["k"][:, 1:2], arrays["v"][:, 1:2]
            group = o.shape[2] // k.shape[2]
            q, k = (np.repeat(x, group, 2) for x in (arrays["q"][:, :1], k))
            o[:, :1] += 1e-3 * options["scale"] * (q * k).sum(-1, keepdims=True) * v
        return o, state


class StateTransposed(Simple):
    """The state is kept as ``[V, K]`` and returned under the name of ``[K, V]``."""

    name = "state-transposed"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        return o, np.swapaxes(state, -1, -2).reshape(state.shape)


class StateIgnored(Simple):
    """The initial state is not read."""

    name = "state-ignored"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        return super().forward(op, {name: x for name, x in arrays.items() if name != "initial_state"}, options)


class NoGradientToState(Simple):
    """The initial state is taken for a constant."""

    name = "no-gradient-to-state"

    def backward(self, op: str, arrays: Arrays, options: Arrays, d_o: Any, d_state: Any) -> Arrays:
        found = super().backward(op, arrays, options, d_o, d_state)
        return found | ({"initial_state": 0.0 * arrays["initial_state"]} if "initial_state" in arrays else {})


class NoGradientThroughFinalState(Simple):
    """The final state is taken for a constant."""

    name = "no-gradient-through-final-state"

    def backward(self, op: str, arrays: Arrays, options: Arrays, d_o: Any, d_state: Any) -> Arrays:
        return super().backward(op, arrays, options, d_o, None)


class GateGradientWithoutState(Simple):
    """``dg`` is the reverse sum of ``q∘dq − k∘dk`` alone: the term of the final state is missing."""

    name = "gate-gradient-without-state"

    def backward(self, op: str, arrays: Arrays, options: Arrays, d_o: Any, d_state: Any) -> Arrays:
        found = super().backward(op, arrays, options, d_o, d_state)
        return {**found, "g": super().backward(op, arrays, options, d_o, None)["g"]}


class NarrowCarriedState(Simple):
    """The state goes from chunk to chunk in the dtype of the operands."""

    name = "narrow-carried-state"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        self.dtype = given["v"].dtype
        return super().run(form, op, given)

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        return by_chunks(op, arrays, options, lambda state, chunk: state.astype(self.dtype).astype(float), 64)


class PackedLeak(Simple):
    """A packed sequence that has no initial state goes on from the one before it."""

    name = "packed-leak"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        if "cu_seqlens" in arrays and "initial_state" not in arrays:
            whole = {name: x for name, x in arrays.items() if name != "cu_seqlens"}
            return super().forward(op, whole, options)[0], state
        return o, state


class PackedBoundaryLate(Simple):
    """Boundaries of packed sequences are rounded down to chunks of four tokens."""

    name = "packed-boundary-rounded"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        if "cu_seqlens" in arrays:
            bounds = arrays["cu_seqlens"]
            arrays = {**arrays, "cu_seqlens": np.append(bounds[:-1] // 4 * 4, bounds[-1:])}
        return super().forward(op, arrays, options)


class SilentFallback(Simple):
    """What it cannot do, ``gv``, it hands to another backend."""

    name = "silent-fallback"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        if given.get("gv") is None:
            return super().run(form, op, given)
        return NumpyBackend().chunk_gla(**{name: x for name, x in given.items() if name != "self"})


class SilentReentry(Simple):
    """What it cannot do, packed sequences, it hands back to linattn."""

    name = "silent-reentry"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        if given.get("cu_seqlens") is None:
            return super().run(form, op, given)
        return linattn.chunk_gla(**{name: x for name, x in given.items() if name != "self"}, backend="numpy")


class Hollow(Simple):
    """Has every family, and declares everything unsupported."""

    name = "hollow"
    families = ("gla", "simple_gla", "kda")

    def supports(self, call: Call) -> Unsupported | None:
        return Unsupported("not today")


class Zeros(Simple):
    """Returns zeros of the right shape and dtype."""

    name = "zeros"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        return np.zeros_like(o), np.zeros_like(state)


class Nondeterministic(Simple):
    """Adds in another order each time: the last bits change from call to call."""

    name = "nondeterministic"
    calls = 0

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        Nondeterministic.calls += 1
        return o * (1.0 + 2.0**-23 * (self.calls % 2)), state


class NondeterministicBackward(Simple):
    """Gradients are added up atomically: their last bits change from call to call."""

    name = "nondeterministic-backward"
    calls = 0

    def backward(self, op: str, arrays: Arrays, options: Arrays, d_o: Any, d_state: Any) -> Arrays:
        NondeterministicBackward.calls += 1
        found = super().backward(op, arrays, options, d_o, d_state)
        return {**found, "k": found["k"] * (1.0 + 2.0**-23 * (self.calls % 2))}


class InputMutated(Simple):
    """Scales the queries in place."""

    name = "input-mutated"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        found = super().run(form, op, given)
        given["q"] *= given["q"].dtype.type(given["scale"])
        return found


class GroupedHeadsInterleaved(Simple):
    """Value head ``j`` reads query/key head ``j % H``."""

    name = "grouped-heads-interleaved"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        HV = arrays["v"].shape[2]
        spread = {name: np.concatenate([arrays[name]] * (HV // arrays[name].shape[2]), 2) for name in ("q", "k")}
        return super().forward(op, {**arrays, **spread}, options)


class ResetGivesNaN(Simple):
    """Exponents are differences of running sums: ``-inf − -inf``."""

    name = "reset-gives-nan"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        with np.errstate(invalid="ignore"):
            total = np.cumsum(arrays["g"], 1)
            poison = (total - total).sum((1, 3))
        return o + poison.repeat(o.shape[2] // poison.shape[1], 1)[:, None, :, None], state


class RunningSumLoses(Simple):
    """Exponents are differences of float32 running sums over the whole chunk: small gates drown after a large one."""

    name = "running-sum-loses"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        g = arrays["g"].astype(np.float32)
        for start in range(0, g.shape[1], 64):
            total = np.cumsum(g[:, start : start + 64], 1, dtype=np.float32)
            with np.errstate(invalid="ignore"):
                g[:, start + 1 : start + 64] = np.where(
                    np.isfinite(total[:, 1:]), total[:, 1:] - total[:, :-1], g[:, start + 1 : start + 64]
                )
        return super().forward(op, {**arrays, "g": g}, options)


class GateClamped5(Simple):
    """Gates are clamped at -5, so that the factored form does not overflow."""

    name = "gate-clamped-at-5"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        return super().forward(op, {**arrays, "g": np.maximum(arrays["g"], -5.0)}, options)


class GateClamped30(Simple):
    """Gates are clamped at -30, as if ``e^-30`` were nothing whatever it multiplies."""

    name = "gate-clamped-at-30"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        return super().forward(op, {**arrays, "g": np.maximum(arrays["g"], -30.0)}, options)


class WrongOutputDtype(Simple):
    """``o`` stays in the accumulation dtype."""

    name = "wrong-output-dtype"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        o, state = super().run(form, op, given)
        return o.astype(np.float32) if o.dtype == np.float16 else o, state


class NarrowFinalState(Simple):
    """The final state is returned in the dtype of the operands."""

    name = "narrow-final-state"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        o, state = super().run(form, op, given)
        return o, None if state is None else state.astype(o.dtype)


class BetaCapped(Simple):
    """Writing strengths above one are taken for one."""

    name = "beta-capped"
    families: ClassVar[tuple[str, ...]] = ("kda",)

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        return super().forward(op, {**arrays, "beta": np.minimum(arrays["beta"], 1.0)}, options)


class BetaFirstChannel(Simple):
    """Of a writing strength for each channel, the first is used for all."""

    name = "beta-first-channel"
    families: ClassVar[tuple[str, ...]] = ("delta_rule",)

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        beta = arrays["beta"]
        return super().forward(op, {**arrays, "beta": beta[..., 0] if beta.ndim == 4 else beta}, options)


class NormalizeEpsilon(Simple):
    """The denominator has an epsilon added."""

    name = "normalize-epsilon"
    families: ClassVar[tuple[str, ...]] = ("linear_attn",)

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        return o * (1.0 - 1e-3) if options["normalize"] else o, state


class LastChunkPartial(Simple):
    """The last chunk is taken for a whole one: its state is decayed once more than it should be."""

    name = "last-chunk-partial"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        return o, state * 0.999 if arrays["v"].shape[1] % CHUNK else state


class FewBadRows(Simple):
    """One row in a hundred is off by a tenth of a percent: an average would not show it."""

    name = "few-bad-rows"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        o[:, 63::100] *= 1.001
        return o, state


class RaisesInKernel(Simple):
    """Says that it takes any width, and finds out otherwise in the kernel."""

    name = "raises-in-kernel"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        if arrays["k"].shape[-1] > 128:
            raise Unsupported("K must be at most 128")
        return super().forward(op, arrays, options)


class CoreDeclaredAway(Simple):
    """Takes whole chunks only, and says so."""

    name = "core-declared-away"

    def supports(self, call: Call) -> Unsupported | None:
        return Unsupported("T must be a multiple of 16") if call.T is not None and call.T % 16 else None


class EmptySequence(Simple):
    """The final state of a sequence without tokens is zero, not its initial state."""

    name = "empty-sequence-loses-state"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        if "cu_seqlens" in arrays:
            state[np.diff(arrays["cu_seqlens"]) == 0] = 0.0
        return o, state


class UnwrittenRows(Simple):
    """The last rows of a partial chunk are never written: what is returned there was in memory before."""

    name = "unwritten-rows"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        o, state = super().run(form, op, given)
        found = np.empty(o.shape, o.dtype)
        whole = max(o.shape[1] - 1, 0)
        found[:, :whole] = o[:, :whole]
        return found, state


class AssumesContiguous(Simple):
    """Reads memory as if every array were contiguous."""

    name = "assumes-contiguous"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        k = given["k"]
        if not k.flags.c_contiguous and k.size:
            given = {**given, "k": np.ravel(k, order="K").reshape(k.shape)}
        return super().run(form, op, given)


class NaNGoesBack(Simple):
    """A masked matrix product over the whole sequence: NaN times zero reaches earlier tokens."""

    name = "nan-goes-back"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        return o + 0.0 * arrays["v"].sum(1, keepdims=True), state


class OneTileWidth(Simple):
    """The gradient of the keys is wrong in the last tile, for the one width whose last tile is partial: 96."""

    name = "one-tile-width"

    def backward(self, op: str, arrays: Arrays, options: Arrays, d_o: Any, d_state: Any) -> Arrays:
        found = super().backward(op, arrays, options, d_o, d_state)
        if found["k"].shape[-1] == 96:
            found["k"][..., 64:] *= 0.5
        return found


class WholeChunksLoseState(Simple):
    """Where the sequence ends with a chunk, the final state is that before this chunk."""

    name = "whole-chunks-lose-state"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        T = arrays["v"].shape[1]
        if T and T % CHUNK == 0 and "cu_seqlens" not in arrays:
            state = super().forward(op, cut(arrays, 0, T - CHUNK), options)[1]
        return o, state


class LastMaskMissing(Simple):
    """The last chunk, if it is a partial one, is not masked: its tokens see those after them."""

    name = "last-mask-missing"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        T = o.shape[1]
        last = slice(T - T % CHUNK, T)
        if T % CHUNK and "cu_seqlens" not in arrays:
            group = o.shape[2] // arrays["k"].shape[2]
            q, k = (np.repeat(arrays[name][:, last], group, 2) for name in ("q", "k"))
            weights = np.triu(np.einsum("bthk,bshk->bhts", q, k), 1)
            o[:, last] += options["scale"] * np.einsum("bhts,bshv->bthv", weights, arrays["v"][:, last])
        return o, state


class LeakAfter64(Simple):
    """The boundaries of packed sequences are kept in 64 lanes: from the 65th sequence on there are none."""

    name = "packed-leak-after-64"

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        o, state = super().forward(op, arrays, options)
        if "cu_seqlens" in arrays and len(bounds := arrays["cu_seqlens"]) > 65:
            after = cut(arrays, int(bounds[64]), int(bounds[-1]))
            after.pop("cu_seqlens")
            if "initial_state" in after:
                after["initial_state"] = after["initial_state"][64:65]
            o[:, int(bounds[64]) :] = super().forward(op, after, options)[0]
        return o, state


class OffsetsOverflow(Simple):
    """Offsets into an array are 32-bit: what lies beyond 2³¹ elements is read from elsewhere."""

    name = "offsets-overflow"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        k = given["k"]
        reach = np.arange(k.shape[1]) * (k.strides[1] // k.itemsize)
        if reach.size and reach[-1] >= 2**31:
            given = {**given, "k": np.where((reach < 2**31)[:, None, None], k, k[:, :1])}
        return super().run(form, op, given)


class OffsetsOfFourBytes(Simple):
    """Offsets of packed sequences are read as 32-bit numbers, whatever their dtype."""

    name = "int64-offsets-misread"

    def run(self, form: str, op: str, given: Arrays) -> tuple[Any, Any]:
        bounds = given["cu_seqlens"]
        if bounds is not None:
            read = np.ascontiguousarray(bounds).view(np.int32)[: len(bounds)]
            given = {**given, "cu_seqlens": np.append(np.sort(read[:-1]), bounds[-1])}
        return super().run(form, op, given)


class StaleCache(Simple):
    """Keeps what it worked out from the gates for the next call of that shape, which has other gates."""

    name = "stale-cache"

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, Any] = {}

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        g = self.kept.setdefault(arrays["g"].shape, arrays["g"])
        return super().forward(op, {**arrays, "g": g}, options)


class SwallowsKeywords(Backend):
    """Takes any keyword, and ignores those that it does not know."""

    name = "swallows-keywords"
    api = ">=1,<2"
    frameworks = ("numpy",)
    families: ClassVar[tuple[str, ...]] = ("gla",)
    forms: ClassVar[tuple[str, ...]] = ("chunk",)

    def chunk_gla(self, q, k, v, g, gv=None, *, scale=None, output_final_state=False, **ignored):
        return NumpyBackend().chunk_gla(q, k, v, g, gv, scale=scale, output_final_state=output_final_state)


class KeywordIgnored(Simple):
    """Takes ``normalize``, and does not read it."""

    name = "keyword-ignored"
    families: ClassVar[tuple[str, ...]] = ("linear_attn",)

    def forward(self, op: str, arrays: Arrays, options: Arrays) -> tuple[Any, Any]:
        if not options["normalize"]:
            return super().forward(op, arrays, options)
        plain = {name: x[..., :-1] if name == "initial_state" else x for name, x in arrays.items()}
        o, state = super().forward(op, plain, {**options, "normalize": False})
        return o, np.pad(state, [(0, 0)] * 3 + [(0, 1)])


class SummaryWithoutGates(Simple):
    """A summary leaves out what gates do to the state before."""

    name = "summary-without-gates"

    def summary_gla(self, k: Any, v: Any, g: Any, gv: Any = None, *, cu_seqlens: Any = None) -> tuple[Any, Any]:
        given = {"q": k, "k": k, "v": v, "g": g, "gv": gv, "cu_seqlens": cu_seqlens}
        arrays = oracle.float64({name: x for name, x in given.items() if x is not None})
        _, b = self.forward("gla", arrays, {"scale": 1.0, "chunk_size": None})
        A = np.ones((*b.shape[:2], k.shape[-1] + (0 if gv is None else v.shape[-1])))
        return cast(np.float32, A), cast(np.float32, b)


FAULTS = tuple(
    kind
    for kind in list(globals().values())
    if inspect.isclass(kind) and issubclass(kind, Backend) and kind not in (Backend, NumpyBackend, Simple, Honest)
)
"""Every fault on NumPy arrays."""
