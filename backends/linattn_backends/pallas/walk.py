"""The kernels: one walks the chunks of a sequence forward with the state in VMEM, one walks them back with its gradient.

The grid is (row, value head, chunk), the last axis in order. Both kernels run the same :func:`~.chunk.chunk`: the backward one
asks JAX for its pullback, inside the kernel, chunk by chunk from the last. It needs the state before each chunk,
``[G, HV, n, V, K]``, which the forward kernel writes when it is run again for it: a call keeps its inputs, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .chunk import chunk
from .compat import compiler_params, out_shape
from .layout import Index
from .tiles import EXACT, ONE, Array, Passes

Operands = dict[str, Array]


class Static(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        C: Tokens a chunk.
        scale: Multiplies the output.
        interpret: ``False`` on a TPU; ``True`` or ``pltpu.InterpretParams`` elsewhere.
    """

    C: int
    scale: float
    interpret: Any = False


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def walk(static: Static, x: Operands, initial: Array, index: Index) -> tuple[Array, Array]:
    """``o [G, HV, n·C, V]`` and the states after every sequence, ``[N + 1, HV, V, K]`` float32.

    Args:
        static: What is compiled in.
        x: Operands as :class:`~.layout.Layout` cuts them; ``u [HV, 1, K]``.
        initial: States before every sequence, ``[N + 1, HV, V, K]`` float32.
        index: Of every chunk.
    """
    o, final = forward(static, x, initial, index, ("o", "final"))
    return o, jnp.where(index.visited, final, initial)


def _walk_forward(static: Static, x: Operands, initial: Array, index: Index) -> tuple[Any, Any]:
    return walk(static, x, initial, index), (x, initial, index)


def _walk_backward(static: Static, kept: Any, d: tuple[Array, Array]) -> tuple[Operands, Array, None]:
    return *gradients(static, *kept, *d), None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gradients(static: Static, x: Operands, initial: Array, index: Index, d_o: Array, d_final: Array) -> tuple[Operands, Array]:
    """Of the operands and the states before; with none of their own."""
    (before,) = forward(static, x, initial, index, ("before",))
    *found, d_initial = backward(static, x, before, index, d_o, d_final)
    d_x = {name: as_operand(d, x[name]) for name, d in zip(x, found, strict=True)}
    return d_x, jnp.where(index.visited, d_initial, d_final)


def _no_gradients(static: Static, kept: Any, d: Any) -> Any:
    raise NotImplementedError("the pallas backend has first derivatives only: pass backend='jax' for those of a gradient")


gradients.defvjp(lambda static, *given: (gradients(static, *given), None), _no_gradients)


walk.defvjp(_walk_forward, _walk_backward)


def as_operand(d: Array, x: Array) -> Array:
    """Sum what the value heads of one query/key head, or the rows that share a bonus, give."""
    if x.ndim == 3:
        d = d.sum(0)
    elif d.shape[1] != x.shape[1]:
        d = d.reshape(d.shape[0], x.shape[1], -1, *d.shape[2:]).sum(2)
    return d.astype(x.dtype)


def forward(static: Static, x: Operands, initial: Array, index: Index, wanted: Sequence[str]) -> list[Array]:
    """The outputs named: ``o``, the ``final`` states, the states ``before`` each chunk."""
    grid = Grid(static, x)
    states, v = initial.shape, x["v"]
    outputs = {
        "o": (v.shape, v.dtype, grid.tokens(v)),
        "final": (states, jnp.float32, grid.states()),
        "before": ((*v.shape[:2], grid.n, *states[2:]), jnp.float32, grid.states_of_chunks()),
    }

    def kernel(refs: dict[str, Any], S: Any, begins: Any, _: Any) -> None:
        @pl.when(begins)
        def _() -> None:
            S[...] = refs["initial"][...]

        before = S[...]
        o, after = chunk(loaded(refs, x), before, passes(x))
        S[...] = after
        for name, value in (("o", o * static.scale), ("final", after), ("before", before)):
            if name in wanted:
                refs[name][...] = value.astype(refs[name].dtype)

    inputs = {**x, "initial": initial}
    specs = {**grid.operands(x), "initial": grid.states()}
    name = "forward" if "o" in wanted else "states"
    return grid.call(name, kernel, index, inputs, specs, {output: outputs[output] for output in wanted})


def backward(static: Static, x: Operands, before: Array, index: Index, d_o: Array, d_final: Array) -> list[Array]:
    """Gradients of the operands, each with the value heads, then of the states before every sequence."""
    grid = Grid(static, x, reverse=True)
    outputs = {f"d_{name}": grid.gradient(array) for name, array in x.items()}
    outputs["d_initial"] = (d_final.shape, jnp.float32, grid.states())

    def kernel(refs: dict[str, Any], dS: Any, _: Any, ends: Any) -> None:
        @pl.when(ends)
        def _() -> None:
            dS[...] = refs["d_final"][...]

        _, pull = jax.vjp(partial(chunk, passes=passes(x)), loaded(refs, x), refs["before"][...])
        d_x, d_before = pull((refs["d_o"][...].astype(jnp.float32) * static.scale, dS[...]))
        dS[...] = refs["d_initial"][...] = d_before
        for name, d in d_x.items():
            if x[name].ndim == 3:
                accumulate(refs[f"d_{name}"], d)
            else:
                refs[f"d_{name}"][...] = d.astype(refs[f"d_{name}"].dtype)

    inputs = {**x, "before": before, "d_o": d_o, "d_final": d_final}
    specs = {"before": grid.states_of_chunks(), "d_o": grid.tokens(d_o), "d_final": grid.states()}
    return grid.call("backward", kernel, index, inputs, {**grid.operands(x), **specs}, outputs)


def loaded(refs: dict[str, Any], x: Operands) -> Operands:
    """The chunk's operands in float32."""
    return {name: refs[name][...].astype(jnp.float32) for name in x}


def passes(x: Operands) -> Passes | None:
    """Of products of operands as they came."""
    return ONE if x["q"].dtype == jnp.bfloat16 else EXACT


def accumulate(ref: Any, d: Array) -> None:
    """Over the chunks of a row: the block stays in VMEM until the head changes."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        ref[...] = jnp.zeros_like(ref)

    ref[...] += d


Output = tuple[tuple[int, ...], Any, pl.BlockSpec]
"""Shape, dtype and blocks of an output."""


class Grid:
    """Rows, value heads and chunks, and which block of every array a step works on. ``reverse`` walks from the last chunk."""

    def __init__(self, static: Static, x: Operands, reverse: bool = False):
        self.static, self.C, self.reverse = static, static.C, reverse
        self.G, self.HV, length, self.V = x["v"].shape
        self.n, self.K = length // static.C, x["q"].shape[3]

    def chunk(self, step: Any) -> Any:
        """The chunk of a step."""
        return self.n - 1 - step if self.reverse else step

    def block(self, shape: tuple[int | None, ...], place: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        """Of ``shape``, at ``place(row, head, chunk, sequence)``."""

        def at(g: Any, h: Any, step: Any, sequence: Any, *_: Any) -> tuple[Any, ...]:
            c = self.chunk(step)
            return place(g, h, c, sequence[g * self.n + c])

        return pl.BlockSpec(shape, at)

    def tokens(self, x: Array) -> pl.BlockSpec:
        """Of ``[G, heads, n·C, W]``."""
        group = self.HV // x.shape[1]
        return self.block((None, None, self.C, x.shape[3]), lambda g, h, c, _: (g, jax.lax.div(h, jnp.int32(group)), c, 0))

    def operand(self, x: Array) -> pl.BlockSpec:
        """Of any operand, told by its rank: ``[HV, 1, K]``, ``[G, heads, n·C, W]`` or ``[G, HV, n, 1, C]``."""
        if x.ndim == 3:
            return self.block((None, 1, self.K), lambda g, h, c, _: (h, 0, 0))
        if x.ndim == 5:
            return self.block((None, None, None, 1, self.C), lambda g, h, c, _: (g, h, c, 0, 0))
        return self.tokens(x)

    def operands(self, x: Operands) -> dict[str, pl.BlockSpec]:
        """Of each."""
        return {name: self.operand(array) for name, array in x.items()}

    def gradient(self, x: Array) -> Output:
        """Of an operand; each value head writes its own, and each row its own of a bonus."""
        if x.ndim == 3:
            spec = self.block((None, None, 1, self.K), lambda g, h, c, _: (g, h, 0, 0))
            return (self.G, *x.shape), jnp.float32, spec
        shape = (x.shape[0], self.HV, *x.shape[2:])
        d = jax.ShapeDtypeStruct(shape, x.dtype if shape == x.shape else jnp.float32)
        return d.shape, d.dtype, self.operand(d)

    def states(self) -> pl.BlockSpec:
        """Of ``[N + 1, HV, V, K]``: that of the chunk's sequence."""
        return self.block((None, None, self.V, self.K), lambda g, h, c, sequence: (sequence, h, 0, 0))

    def states_of_chunks(self) -> pl.BlockSpec:
        """Of ``[G, HV, n, V, K]``."""
        return self.block((None, None, None, self.V, self.K), lambda g, h, c, _: (g, h, c, 0, 0))

    def call(
        self,
        name: str,
        kernel: Callable[..., None],
        index: Index,
        inputs: dict[str, Array],
        specs: dict[str, pl.BlockSpec],
        outputs: dict[str, Output],
    ) -> list[Array]:
        """Run ``kernel(refs by name, the state in VMEM, begins, ends)`` at every step."""

        def at_step(sequence: Any, begins: Any, ends: Any, *refs: Any) -> None:
            *named, S = refs
            place = pl.program_id(0) * self.n + self.chunk(pl.program_id(2))
            kernel(dict(zip((*inputs, *outputs), named, strict=True)), S, begins[place] == 1, ends[place] == 1)

        shapes = [out_shape(shape, dtype, *inputs.values()) for shape, dtype, _ in outputs.values()]
        call = pl.pallas_call(
            at_step,
            out_shape=shapes,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                grid=(self.G, self.HV, self.n),
                in_specs=[specs[name] for name in inputs],
                out_specs=[spec for _, _, spec in outputs.values()],
                scratch_shapes=[pltpu.VMEM((self.V, self.K), jnp.float32)],
            ),
            compiler_params=compiler_params("parallel", "parallel", "arbitrary"),
            interpret=self.static.interpret,
            name=f"linattn_{name}",
        )
        return call(*index[:3], *inputs.values())
