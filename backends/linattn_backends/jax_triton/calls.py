"""The Triton backend's custom ops as JAX functions: their bodies run in a :class:`~.host.Host`, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.custom_batching import custom_vmap
from linattn.plugin import MixedState

from linattn_backends.jax.scales import mixed_scale, scale_of
from linattn_backends.torch.transforms import NOT_BY_ROW
from linattn_backends.triton.delta import op as delta_library
from linattn_backends.triton.diagonal import op as library
from linattn_backends.triton.host.maps import NO_MAPS
from linattn_backends.triton.mixed import bidirectional as bidirectional_library
from linattn_backends.triton.mixed import op as mixed_library
from linattn_backends.triton.runtime.device import standing_in

from . import backend
from .compat import alike, refuse_forward_mode, varying
from .devices import INTERPRETER, target
from .host import Host
from .launchers import compiled, interpreted

__all__ = ["delta", "diagonal", "linear_attn", "mixed_attn"]

Array = Any
Options = tuple[tuple[str, Any], ...]
Result = tuple[Array, Any]


class Op(NamedTuple):
    """A custom op and that of its gradient, which takes gradients of outputs, the same arrays, and some of the options.

    The last ``kept`` outputs are for the gradient alone, which takes them in the place of gradients of them; they are empty
    unless the option ``keep`` asks for them.
    """

    forward: Any
    backward: Any
    kept: int = 0


OPS = {
    "diagonal": Op(library.diagonal, library.diagonal_backward, kept=len(library.VectorOperands._fields)),
    "delta": Op(delta_library.delta, delta_library.delta_backward, kept=len(delta_library.Kept._fields)),
    "mixed": Op(mixed_library.mixed, mixed_library.mixed_backward),
    "bidirectional": Op(bidirectional_library.bidirectional, bidirectional_library.bidirectional_backward),
}


def names(op: Any, arrays: bool) -> list[str]:
    """Of an op's arguments: the arrays, or the options."""
    return [x.name for x in op._opoverload._schema.arguments if ("Tensor" in str(x.type)) == arrays]


# -- gradients ---------------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def call(name: str, options: Options, arrays: tuple[Array | None, ...]) -> tuple[Array, ...]:
    """The outputs of an op."""
    return outputs(name, options, arrays, False)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 3))
def outputs(name: str, options: Options, arrays: tuple[Array | None, ...], keep: bool) -> tuple[Any, Any]:
    """The outputs of an op, and those that are for its gradient."""
    op = OPS[name]
    found = run(op.forward, (*options, ("keep", keep)), arrays)
    count = len(found) - op.kept
    return found[:count], found[count:]


def _forward(name: str, options: Options, arrays: tuple[Array | None, ...]) -> tuple[Any, Any]:
    found, kept = outputs(name, options, arrays, True)
    return found, (arrays, kept)


def _backward(name: str, options: Options, remembered: tuple[Any, Any], d: tuple[Array, ...]) -> tuple[Any]:
    arrays, kept = remembered
    wanted = len(names(OPS[name].backward, True)) - len(arrays) - len(kept)
    before = (None if x.shape == (0,) else x for x in (*d[:wanted], *kept))  # of a state that nobody asked for
    found = iter(gradients(name, options, (*before, *arrays)))
    return (tuple(next(found) if is_float(x) else None for x in arrays),)


call.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gradients(name: str, options: Options, arrays: tuple[Array | None, ...]) -> tuple[Array, ...]:
    """Of the float arrays given, in their order; with none of their own."""
    return run(OPS[name].backward, options, arrays)


def _no_gradients(*_: Any) -> Any:
    raise NotImplementedError("the jax_triton backend has first derivatives only: pass backend='jax' for those of a gradient")


gradients.defvjp(lambda *given: (gradients(*given), None), _no_gradients)
outputs.defvjp(lambda *given: (outputs(*given), None), _no_gradients)


def is_float(x: Array | None) -> bool:
    """Whether an array has a gradient."""
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


# -- one op ------------------------------------------------------------------------------------------------------------


def run(op: Any, options: Options, arrays: tuple[Array | None, ...]) -> tuple[Array, ...]:
    """The outputs of an op, on arrays that may be mapped by ``vmap``."""
    given = {name: x for name, x in zip(names(op, True), arrays, strict=True) if x is not None}
    traced = custom_vmap(lambda *values: trace(op, options, dict(zip(given, values, strict=True))))
    traced.def_vmap(partial(_mapped, traced, [name in NOT_BY_ROW for name in given]))
    return traced(*given.values())


def _mapped(traced: Any, shared: list[bool], size: int, mapped: list[bool], *arrays: Array) -> tuple[Any, Any]:
    """Fold the mapped dimension into ``B`` where every array has one, else loop over it."""
    each = [x if m else jnp.broadcast_to(x, (size, *x.shape)) for x, m in zip(arrays, mapped, strict=True)]
    if any(shared):
        found = jax.lax.map(lambda row: traced(*row), each)
    else:
        rows = traced(*(x.reshape(size * x.shape[1], *x.shape[2:]) for x in each))
        found = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in rows)
    return found, (True,) * len(found)


def trace(op: Any, options: Options, given: dict[str, Array]) -> tuple[Array, ...]:
    """Run the body of an op on what stands for the arrays."""
    host = Host(interpreted, INTERPRETER) if backend.INTERPRETED else Host(compiled, target().properties)
    tensors = {name: host.tensor(x) for name, x in given.items()}
    chosen = dict(options)
    with host, standing_in(host):
        found = op._init_fn(*map(tensors.get, names(op, True)), *map(chosen.get, names(op, False)))
    results: Iterable[Any] = [found] if isinstance(found, torch.Tensor) else found
    return tuple(varying(host.array(x), *given.values()) for x in results)


@partial(jax.jit, static_argnames=("name", "options"))
def jitted(name: str, options: Options, arrays: tuple[Array | None, ...]) -> tuple[Array, ...]:
    """One program for all launches of an op: run one by one, none could write where another wrote before."""
    return call(name, options, alike(arrays))


def launched(name: str, options: Options, arrays: tuple[Array | None, ...]) -> tuple[Array, ...]:
    """The outputs of an op, for arrays that are not being differentiated forward."""
    refuse_forward_mode("jax_triton", arrays)
    return jitted(name, options, arrays)


# -- families ----------------------------------------------------------------------------------------------------------


def matrix_state(
    op: str,
    operands: tuple[str, ...],
    form: str,
    arrays: dict[str, Array | None],
    *,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    cu_seqlens: Array | None,
    chunk_size: int | None,
) -> Result:
    """Any family with a matrix for a state."""
    g, v = arrays.get("g"), arrays["v"]
    if g is not None and g.ndim == 1:  # a fixed decay; its gradient is a sum over the tokens
        arrays = {**arrays, "g": jnp.broadcast_to(g.astype(jnp.float32), v.shape[:3])}
    options = dict(form=form, scale=scale_of(arrays["q"], scale), chunk=chunk_size or 0, final=output_final_state)
    options |= dict(kind=NO_MAPS.gate.kind, number=NO_MAPS.gate.number, unit=NO_MAPS.unit)  # the dispatcher has applied them
    given = (*map(arrays.get, operands), initial_state, cu_seqlens)
    o, final = launched(op, tuple(options.items()), given)
    return o, final if output_final_state else None


diagonal = partial(matrix_state, "diagonal", ("q", "k", "v", "g", "gv", "u"))
delta = partial(matrix_state, "delta", ("q", "k", "v", "g", "beta", "a", "b", "A_log", "bias"))


def linear_attn(form: str, arrays: dict[str, Array], *, causal: bool, **options: Any) -> Result:
    """The ungated family."""
    if causal:
        return diagonal(form, arrays, **options)
    given = (*(arrays[name] for name in ("q", "k", "v")), options["cu_seqlens"])
    o, _ = launched("bidirectional", (("scale", scale_of(arrays["q"], options["scale"])), ("wide", False)), given)
    return o, None


def mixed_attn(
    form: str,
    arrays: dict[str, Array],
    *,
    bias: Array | None,
    quad_scale: float | None,
    lin_scale: float | None,
    causal: bool,
    initial_state: MixedState[Array] | None,
    output_final_state: bool,
    cu_seqlens: Array | None,
    chunk_size: int,
) -> Result:
    """``(o, final_state)``, the state a ``MixedState``."""
    scales = mixed_scale(chunk_size, quad_scale), mixed_scale(chunk_size, lin_scale)
    C = chunk_size
    if bias is None and initial_state is None and not output_final_state:
        C = min(C, arrays["v"].shape[1] + 1)  # nothing has this size: FLASH-Quad may say any number
    options = dict(C=C, quad_scale=scales[0], lin_scale=scales[1], causal=causal, final=output_final_state)
    options["recurrent"] = form == "recurrent"
    state = (None,) * 5 if initial_state is None else initial_state
    o, *final = launched("mixed", tuple(options.items()), (*arrays.values(), bias, *state, cu_seqlens))
    return o, MixedState(*final) if output_final_state else None
