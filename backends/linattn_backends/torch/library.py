"""The custom ops ``linattn::matrix_state`` and its backward: one node each for every tracer.

``torch.compile``, ``torch.export`` and FakeTensor see opaque calls with known output shapes; ``torch.func.grad`` and ``vmap``
use the rules registered here. Autocast does not reach inside: operands arrive as they are and are accumulated in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from . import nonfinite, recurrent
from .cores import Scan, core_of
from .layout import Block, Layout, Segment, assign, checkpoint_count
from .transforms import register

OPERANDS = ("q", "k", "v", "g", "gv", "beta", "a", "b", "u")


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and states for operands of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def plain(x: Tensor) -> Iterator[None]:
    """No autocast inside, whatever the caller has on."""
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        yield


def _wide(arrays: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The operands given, each as ``[B, T, heads, W]`` (``u`` as it is)."""
    given = {name: x for name, x in arrays.items() if x is not None}
    return {name: x if x.dim() != 3 else x[..., None] for name, x in given.items()}


def _load(arrays: dict[str, Tensor], layout: Layout, segment: Segment, block: Block) -> dict[str, Tensor]:
    """A segment of every operand, in the accumulation dtype."""
    dtype = accumulation(arrays["v"].dtype)
    x = {name: layout.load(y, segment, block, dtype) for name, y in arrays.items() if name != "u"}
    if "u" in arrays:
        Z, n, _, K = x["q"].shape
        u = arrays["u"][block.hv].to(dtype)
        x["u"] = u.expand(Z // u.shape[0], *u.shape).reshape(Z, 1, 1, K).expand(Z, n, 1, K)
    return x


def _layout(form: str, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> Layout:
    B, T, H, _ = q.shape
    return Layout(form, B, T, H, v.shape[2], cu_seqlens, chunk, q.device)


def _sizes(form: str, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the final states and of the checkpoints."""
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    N = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # Segments and K share a dimension: one of their own, of size 1 or more, would make tracers guard on its size.
    return (B if N is None else N, HV, K, V), (B, HV, checkpoint_count(form, T, N, chunk) * K, V)


@torch.library.custom_op("linattn::matrix_state", mutates_args=())
def matrix_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final states and the states at segment starts."""
    named = dict(zip(OPERANDS, (q, k, v, g, gv, beta, a, b, u), strict=True))
    o, final, checkpoints = _forward(named, initial_state, cu_seqlens, form, scale, chunk)
    found = nonfinite.written({name: x for name, x in named.items() if name not in ("q", "u")}) if form != "recurrent" else {}
    if found:
        clean, _, _ = _forward(nonfinite.zeroed(named, found), initial_state, cu_seqlens, form, scale, chunk)
        o = torch.where(nonfinite.since(found, v.shape[2], cu_seqlens), o, clean)
    return o, final, checkpoints


def _forward(
    named: dict[str, Tensor | None],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the op returns, on operands that are finite, and on others as matrix products have it."""
    arrays, q, v = _wide(named), named["q"], named["v"]
    layout = _layout(form, q, v, cu_seqlens, chunk)
    dtype = accumulation(v.dtype)
    state_shape, checkpoint_shape = _sizes(form, q, v, cu_seqlens, chunk)
    o = layout.empty(v)
    final = v.new_zeros(state_shape, dtype=dtype)
    if initial_state is not None:
        assign(final, initial_state)
    checkpoints = v.new_zeros(checkpoint_shape, dtype=dtype)
    Core, K = core_of(arrays), q.shape[3]
    with plain(v):
        for block in layout.blocks():
            kept = checkpoints[block.b, block.hv].unflatten(2, (checkpoints.shape[2] // K, K))
            rows = kept.shape[0] * kept.shape[1]
            state = kept.new_zeros((rows, *state_shape[2:]))
            for segment in layout.segments:
                x = _load(arrays, layout, segment, block)
                kept[:, :, segment.index].copy_(state.view(kept[:, :, 0].shape))
                scan = Scan(layout, block, segment, initial_state, final, state)
                if form == "recurrent":
                    y = recurrent.forward(x, segment.lengths, scan)
                else:
                    y = Core(x, segment.lengths).forward(scan)
                state = scan.state
                layout.store(o, segment, block, y.mul_(scale).unflatten(0, x["v"].shape[:2]))
    return o, final, checkpoints


@matrix_state.register_fake
def _(q, k, v, g, gv, beta, a, b, u, initial_state, cu_seqlens, form, scale, chunk):
    state_shape, checkpoint_shape = _sizes(form, q, v, cu_seqlens, chunk)
    dtype = accumulation(v.dtype)
    return v.new_empty(v.shape), v.new_empty(state_shape, dtype=dtype), v.new_empty(checkpoint_shape, dtype=dtype)


@torch.library.custom_op("linattn::matrix_state_backward", mutates_args=())
def matrix_state_backward(
    do: Tensor,
    dfinal: Tensor | None,
    checkpoints: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    beta: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    u: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    form: str,
    scale: float,
    chunk: int,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments. Every form has the chunk form's gradient."""
    named = dict(zip(OPERANDS, (q, k, v, g, gv, beta, a, b, u), strict=True))
    arrays = _wide(named)
    layout = _layout(form, q, v, cu_seqlens, chunk)
    dtype = accumulation(v.dtype)
    grads = {name: layout.empty(x) for name, x in arrays.items() if name != "u"}
    if u is not None:
        grads["u"] = u.new_zeros(u.shape, dtype=dtype)
    dinitial = None
    if initial_state is not None:
        dinitial = checkpoints.new_zeros(initial_state.shape)
        if dfinal is not None:
            assign(dinitial, dfinal)
    Core, K = core_of(arrays), q.shape[3]
    with plain(v):
        for block in layout.blocks():
            kept = checkpoints[block.b, block.hv].unflatten(2, (checkpoints.shape[2] // K, K))
            dstate = kept.new_zeros((kept.shape[0] * kept.shape[1], *kept.shape[-2:]))
            for segment in reversed(layout.segments):
                x = _load(arrays, layout, segment, block)
                dy = layout.load(do, segment, block, dtype).mul_(scale).flatten(0, 1)
                state = kept[:, :, segment.index].reshape(dstate.shape)
                scan = Scan(layout, block, segment, initial_state, None, state)
                reverse = Scan(layout, block, segment, dfinal, dinitial, dstate, reverse=True)
                found = Core(x, segment.lengths).backward(dy, scan, reverse)
                dstate = reverse.state
                if u is not None:
                    du = found.pop("u").sum(1)
                    heads = block.hv.stop - block.hv.start
                    grads["u"][block.hv] += du.view(-1, heads, x["v"].shape[1], du.shape[-1]).sum((0, 2))
                for name, y in found.items():
                    layout.store(grads[name], segment, block, y.unflatten(0, x["v"].shape[:2]))
    results = [grads[name].view(x.shape).to(x.dtype) for name, x in named.items() if x is not None]
    if initial_state is not None:
        results.append(dinitial.to(initial_state.dtype))
    return results


@matrix_state_backward.register_fake
def _(do, dfinal, checkpoints, q, k, v, g, gv, beta, a, b, u, initial_state, cu_seqlens, form, scale, chunk):
    given = (q, k, v, g, gv, beta, a, b, u, initial_state)
    return [x.new_empty(x.shape) for x in given if x is not None]


def _setup_context(ctx, inputs, output):
    *arrays, ctx.form, ctx.scale, ctx.chunk = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays, output[2])


def _backward(ctx, do, dfinal, dcheckpoints):
    *arrays, cu_seqlens, checkpoints = ctx.saved_tensors
    none = (None,) * 4  # cu_seqlens, form, scale, chunk
    if do is None and dfinal is None:
        return (*(None for _ in arrays), *none)
    if do is None:
        do = torch.zeros_like(arrays[2])
    grads = iter(_backward_call(do, dfinal, checkpoints, *arrays, cu_seqlens, ctx.form, ctx.scale, ctx.chunk))
    return (*(None if x is None else next(grads) for x in arrays), *none)


_backward_call = register(matrix_state_backward)
matrix_state_call = register(matrix_state, _setup_context, _backward, operations=True)
