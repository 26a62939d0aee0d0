"""An operation as segments one after the other, each computed again in the backward pass.

What the backward pass keeps is the inputs and the state before each segment, ``[B, HV, K, V]``; nothing is kept for a token.
MLX differentiates a segment (``mx.vjp``), and ``mx.depends`` has it finished before the next one is begun: a lazy graph would
else be free to compute the parts of all segments that need no state first, and hold them all.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .layout import Bounds, Packed, Rows

Arrays = dict[str, mx.array]


def accumulation(dtype: mx.Dtype) -> mx.Dtype:
    """The dtype of sums and states for operands of ``dtype``."""
    return mx.float64 if dtype == mx.float64 else mx.float32


class Segmented:
    """An operation that carries a state over the chunks of its tokens.

    Attributes:
        places: Where the tokens lie.
        tokens: Names of the arrays that are cut into segments.
        shared: Arrays that every segment gets whole, in the accumulation dtype.
        S0: The initial states ``[N, HV, K, V]``, or None for zeros.
        shape: Of the state that is carried, ``[B, HV, K, V]``.
        dtype: Of sums and states.
    """

    places: Rows | Packed
    tokens: list[str]
    shared: Arrays
    S0: mx.array | None
    shape: tuple[int, ...]
    dtype: mx.Dtype

    def cut(self, name: str, segment: int) -> mx.array:
        """The part of an array in a segment, ``[B, m·C, heads, …]``."""
        raise NotImplementedError

    def compute(self, x: Arrays, S: mx.array, bounds: Bounds | None, segment: int) -> tuple[mx.array, mx.array, list[mx.array]]:
        """``o [B, m·C, HV, V]``, the state after the segment, and the states after each of its chunks."""
        raise NotImplementedError

    # -- one segment -------------------------------------------------------------------------------------------------

    def _first(self) -> mx.array:
        """The state before the first segment; packed sequences bring their own."""
        if self.S0 is None or self.places.packed:
            return mx.zeros(self.shape, self.dtype)
        return self.S0.astype(self.dtype)

    def _inputs(self, segment: int, after: list[mx.array]) -> Arrays:
        """What goes into a segment, not before ``after`` is there."""
        given = {name: self.cut(name, segment) for name in self.tokens} | self.shared
        if self.places.packed and self.S0 is not None:
            given["start"] = self.places.start(self.S0, segment)
        return given if not after else dict(zip(given, mx.depends(list(given.values()), after), strict=True))

    def _run(self, segment: int, S: mx.array, given: Arrays, keep: bool) -> tuple[mx.array, ...]:
        """``o``, the state after the segment and, if they are to be kept, the states after each chunk of packed sequences."""
        bounds = None
        if self.places.packed:
            begins = self.places.begins[slice(*self.places.spans[segment])]
            start = mx.split(given["start"].astype(self.dtype), len(begins)) if "start" in given else None
            bounds = Bounds(begins, start)
        o, S, after = self.compute(given, S, bounds, segment)
        if not keep or bounds is None:
            return o, S
        # Of an array that is returned twice mx.vjp takes one cotangent, and joining one array gives that array.
        return o, S, mx.concatenate(after) if len(after) > 1 else after[0] + 0

    # -- all of them -------------------------------------------------------------------------------------------------

    def forward(self, keep: bool) -> tuple[list[mx.array], mx.array | None, list[mx.array]]:
        """``o`` of each segment, the final states if they are to be kept, and the states before each segment but the first."""
        places, S = self.places, self._first()
        in_pack = keep and places.packed
        final = mx.zeros((places.N, *S.shape[1:]), S.dtype) if in_pack else None
        o: list[mx.array] = []
        kept: list[mx.array] = []
        for i in range(len(places.spans)):
            y, S, *after = self._run(i, S, self._inputs(i, [o[-1], S] if i else []), in_pack)
            o.append(y)
            kept.append(S)
            if in_pack:
                final = places.keep(final, after[0], i, places.last_chunk)
        if in_pack and self.S0 is not None:
            final = mx.where(places.empty, self.S0.astype(S.dtype), final)
        return o, (final if in_pack else S) if keep else None, kept[:-1]

    def backward(
        self, do: Callable[[int], mx.array], dfinal: mx.array | None, kept: list[mx.array]
    ) -> tuple[dict[str, list[mx.array]], mx.array | None]:
        """Gradients of what went into the segments, first to last, and of the initial states.

        Args:
            do: ``do(i)`` is the gradient of the output of segment ``i``.
            dfinal: Of the final states, if they were kept.
            kept: As ``forward`` returned them.
        """
        places, in_pack = self.places, self.places.packed
        before = [self._first(), *kept]
        dS = mx.zeros_like(before[0]) if dfinal is None or in_pack else dfinal
        dS0 = mx.zeros(self.S0.shape, self.dtype) if in_pack and self.S0 is not None else None
        found: dict[str, list[mx.array]] = {name: [] for name in (*self.tokens, *self.shared)}
        done: list[mx.array] = []
        for i in reversed(range(len(places.spans))):
            given = self._inputs(i, done)
            names = list(given)
            d = [do(i), dS] if dfinal is None or not in_pack else [do(i), dS, places.end(dfinal, i)]

            def segment(S: mx.array, *values: mx.array, i: int = i, names: list[str] = names) -> tuple[mx.array, ...]:
                return self._run(i, S, dict(zip(names, values, strict=True)), dfinal is not None)

            _, done = mx.vjp(segment, [before[i], *given.values()], d)
            dS, *gradients = done
            for name, gradient in zip(names, gradients, strict=True):
                if name == "start":
                    dS0 = places.keep(dS0, gradient.astype(self.dtype), i, places.first_chunk)
                else:
                    found[name].insert(0, gradient)
        if in_pack and dS0 is not None and dfinal is not None:
            dS0 = mx.where(places.empty, dfinal, dS0)
        return found, dS0 if in_pack else dS


def total(gradients: list[mx.array], like: mx.array) -> mx.array:
    """The gradient of an array that every segment got, in its dtype."""
    return sum(gradients[1:], gradients[0]).astype(like.dtype)


def to_heads(x: mx.array, C: int, HV: int, dtype: mx.Dtype) -> mx.array:
    """``[B, m·C, H or HV, …]`` as ``[m, B, HV, C, W]``, a query/key head once for each of its value heads."""
    x = x[..., None] if x.ndim == 3 else x
    B, length, H, W = x.shape
    x = x.astype(dtype).reshape(B, length // C, C, H, W).transpose(1, 0, 3, 2, 4)
    return x if H == HV else mx.repeat(x, HV // H, axis=2)


def from_heads(y: mx.array) -> mx.array:
    """``[m, B, HV, C, V]`` as ``[B, m·C, HV, V]``."""
    m, B, HV, C, V = y.shape
    return y.transpose(1, 0, 3, 2, 4).reshape(B, m * C, HV, V)
