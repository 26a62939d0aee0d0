"""Faults of decoding in place, on NumPy arrays: where a state is read, where it is written, and what becomes of padding."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from linattn.plugin import Backend
from linattn_backends.numpy import oracle

__all__ = ["FAULTS", "InPlace"]


class InPlace(Backend):
    """No fault: ``decode_gla`` by the oracle, sequence by sequence."""

    name: ClassVar[str] = "in-place"
    api = ">=1,<2"
    frameworks = ("numpy",)
    families: ClassVar[tuple[str, ...]] = ("gla",)
    forms: ClassVar[tuple[str, ...]] = ("decode",)

    def decode_gla(self, q, k, v, g, gv=None, *, state, state_indices, scale):
        slots = np.arange(len(q)) if state_indices is None else state_indices
        o = self.output(v)
        for n, slot in enumerate(slots.tolist()):
            tokens = {"q": q, "k": k, "v": v, "g": g, "gv": gv}
            row = {name: x[n : n + 1] for name, x in tokens.items() if x is not None}
            self.sequence(n, slot, row, state, o, {"scale": scale, "output_final_state": True})
        self.finish(state, slots)
        return o

    def output(self, v: Any) -> Any:
        return np.zeros_like(v)

    def sequence(self, n: int, slot: int, row: dict[str, Any], state: Any, o: Any, options: dict[str, Any]) -> None:
        """One sequence."""
        if slot < 0:
            return
        o[n], final = self.step(row, state[self.read(n, slot)], options)
        state[self.written(n, slot)] = final

    def step(self, row: dict[str, Any], start: Any, options: dict[str, Any]) -> tuple[Any, Any]:
        found, final = oracle.forward("gla", oracle.float64({**row, "initial_state": start[None]}), options)
        return found[0], final[0]

    def read(self, n: int, slot: int) -> int:
        return slot

    def written(self, n: int, slot: int) -> int:
        return slot

    def finish(self, state: Any, slots: Any) -> None:
        pass


class StateLeftOld(InPlace):
    """The state is read and not written."""

    name = "decode-state-left-old"

    def sequence(self, n, slot, row, state, o, options):
        super().sequence(n, slot, row, state.copy(), o, options)


class WrongSlotWritten(InPlace):
    """State ``n`` is written, whatever slot sequence ``n`` has."""

    name = "decode-wrong-slot-written"

    def written(self, n, slot):
        return n


class WrongSlotRead(InPlace):
    """State ``n`` is read, whatever slot sequence ``n`` has."""

    name = "decode-wrong-slot-read"

    def read(self, n, slot):
        return n


class PaddingIsTheLast(InPlace):
    """A slot of -1 is the last state, as NumPy has it."""

    name = "decode-padding-is-the-last"

    def sequence(self, n, slot, row, state, o, options):
        super().sequence(n, slot % len(state), row, state, o, options)


class PaddingUnwritten(InPlace):
    """Rows of padding are never written: what is returned there was in memory before."""

    name = "decode-padding-unwritten"

    def output(self, v):
        return np.full_like(v, np.nan)


class NeighboursCleared(InPlace):
    """States that no sequence has are set to zero."""

    name = "decode-neighbours-cleared"

    def finish(self, state, slots):
        state[np.setdiff1d(np.arange(len(state)), slots)] = 0.0


class FirstTokenKept(InPlace):
    """Of several tokens, the state after the first is written."""

    name = "decode-first-token-kept"

    def step(self, row, start, options):
        found, _ = super().step(row, start, options)
        return found, super().step({name: x[:, :1] for name, x in row.items()}, start, options)[1]


class StateReplaced(InPlace):
    """Works on a copy of a state that is not contiguous."""

    name = "decode-writes-a-copy"

    def decode_gla(self, q, k, v, g, gv=None, *, state, state_indices, scale):
        state = np.ascontiguousarray(state)
        return super().decode_gla(q, k, v, g, gv, state=state, state_indices=state_indices, scale=scale)


FAULTS = (
    StateLeftOld,
    WrongSlotWritten,
    WrongSlotRead,
    PaddingIsTheLast,
    PaddingUnwritten,
    NeighboursCleared,
    FirstTokenKept,
    StateReplaced,
)
"""Every fault of decoding in place."""
