# pyright: basic
"""One call of a layer: the tokens it is given, the states they go on from, and the states after them."""

from __future__ import annotations

from typing import Any

import linattn

from ..context import Context
from ..frameworks import framework_of
from ..plugin import MixedState
from .cache import Cache
from .packing import positions, zeros

__all__ = ["Span"]

STATE = "recurrent_state"


class Span:
    """What a layer's parts know of the call besides their input; every one of them reads and leaves its state here.

    Attributes:
        offsets: ``cu_seqlens``, ``None`` for sequences that are rows.
        context: How the tokens are spread over devices, ``None`` where they are not.
        shared: What one layer of a model leaves for later ones in this call.
    """

    def __init__(
        self,
        layer: Any,
        x: Any,
        cache: Cache | None,
        offsets: Any,
        shared: dict[str, Any],
        in_place: bool,
        context: Context | None = None,
    ) -> None:
        self.layer, self.x, self.cache, self.offsets, self.shared = layer, x, cache, offsets, shared
        self.context = context
        self.xp = framework_of(x, "x")
        self.sequences = x.shape[0] if offsets is None else offsets.shape[0] - 1
        self.before = cache.of_layer(layer.layer_idx, self.sequences) if cache is not None else {}
        self.after: dict[str, Any] = {}
        # One token a sequence, as in decoding, goes on from states that are overwritten where they lie.
        self.in_place = in_place and x.shape[1] == 1 and offsets is None and len(self.before) > 0

    def positions(self) -> Any:
        """The position of each token in its sequence ``[B, T]`` or ``[1, T]``, int32."""
        if self.context is not None:
            return self.context.positions(self.x)[None]
        return positions(self.xp, self.x, self.offsets, self.before.get("length"))

    def attend(self, operator: str, *arrays: Any, **options: Any) -> Any:
        """Output ``[B, T, HV, V]`` of an operator of :mod:`linattn`."""
        if self.in_place and operator != "mixed_attn":
            state = self.after[STATE] = self.before[STATE]
            return self.run(getattr(linattn, f"decode_{operator}"), arrays, {**options, "state": state})
        keep = self.cache is not None
        o, final = self.run(getattr(linattn, operator), arrays, {**options, **self._states(self._state())})
        if isinstance(final, MixedState):
            self.after.update({f"{STATE}.{name}": x for name, x in final._asdict().items()})
        elif keep:
            self.after[STATE] = final
        return o

    def _state(self) -> Any:
        parts = {name: self.before.get(f"{STATE}.{name}") for name in MixedState._fields}
        return self.before.get(STATE) if parts["kv"] is None else MixedState(**parts)

    def mixed(self, x: Any, weights: list[Any]) -> list[Any]:
        """``x + δ ∘ μ`` for each ``μ [1, 1, D]``, ``δ`` the token before minus the present one.

        That is a convolution with the taps ``μ, 1 - μ``; all go on from one state, so that states left where they lie do not
        move on with each.
        """
        functions = self.layer.functions
        if self.in_place or self.context is not None or not functions.convolves(x):
            delta = self.step(x)
            return [functions.multiply_add(x, delta, mu) for mu in weights]
        mu = self.xp.concat([self.xp.astype(mu, self.xp.dtype(x)).reshape(1, -1, 1) for mu in weights], axis=0)
        taps = self.xp.concat([mu, 1 - mu], axis=-1)
        states = {**self._states(self.before.get(self._convolution())), "output_final_state": False}
        others = [self.run(linattn.short_conv, (x, taps[i]), states)[0] for i in range(1, len(weights))]
        return [self.convolve(x, taps[0], None, None), *others]

    def _convolution(self) -> str:
        """The name of the next convolution's state."""
        return f"conv_state.{sum(key.startswith('conv_state') for key in self.after)}"

    def convolve(self, x: Any, weight: Any, bias: Any, activation: str | None) -> Any:
        """Output ``[B, T, D]`` of a short convolution; a layer has them in one order, and that tells their states apart."""
        name = self._convolution()
        options: dict[str, Any] = {"bias": bias, "activation": activation}
        if self.in_place:
            state = self.after[name] = self.before[name]
            return self.run(linattn.decode_short_conv, (x, weight), {**options, "state": state})
        y, final = self.run(linattn.short_conv, (x, weight), {**options, **self._states(self.before.get(name))})
        if self.cache is not None:
            self.after[name] = final
        return y

    def _states(self, before: Any) -> dict[str, Any]:
        """The options of an operator that say what its sequences go on from, and where they lie."""
        states = {"initial_state": before, "output_final_state": self.cache is not None, "cu_seqlens": self.offsets}
        return states if self.context is None else {**states, "context": self.context}

    def run(self, function: Any, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call an operator as the layer's framework has it called."""
        return self.layer.run(function, arrays, options)

    def step(self, x: Any) -> Any:
        """The token before minus the present one, ``[B, T, D]``; before the first of a sequence stands zero."""
        taps = self.xp.astype(self.xp.numbers([1.0, -1.0], like=x), self.xp.dtype(x))
        return self.convolve(x, self.xp.broadcast_to(taps, (x.shape[-1], 2)), None, None)

    def lengths(self) -> Any:
        """Tokens of each sequence with those of this call ``[N]`` int32."""
        read = self.before.get("length")
        if self.offsets is None:
            new = zeros(self.xp, self.sequences, self.x) + self.x.shape[1]
        else:
            new = self.xp.astype(self.offsets[1:] - self.offsets[:-1], "int32")
        return new if read is None else read + new

    def finish(self) -> None:
        """Leave the states after the last token, and how many there were, in the cache."""
        if self.cache is not None:
            self.cache.layers[self.layer.layer_idx] = {**self.after, "length": self.lengths()}
