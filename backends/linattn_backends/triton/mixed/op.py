"""``mixed_attn``, and ``linear_attn`` with ``causal=False``: launches and custom ops of :mod:`.kernels`.

The recurrent form is the chunk form, which goes on from any state, but for one token a sequence (:mod:`.step`). Like the
other launches, these read no tensor's data: how many tokens a state holds, and where packed sequences end, is found out on the
device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from linattn.plugin import MixedState
from torch import Tensor

from linattn_backends.torch.transforms import register

from ..host.chunks import Cut, cut, rows_contiguous, strides, type_of_products
from ..host.tiles import fit, power_of_two, programs
from ..runtime.launch import launch
from ..runtime.precompile import foreseen
from . import kernels
from . import step as mixed_step

__all__ = ["bidirectional_call", "mixed_attention", "mixed_call"]

New = tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor]


class Widths(NamedTuple):
    """Tile of every kernel: tokens, and channels of quadratic keys, linear keys and values."""

    BT: int
    BK: int
    BL: int
    BV: int


@functools.cache
def widths(K: int, L: int, V: int, element: torch.dtype) -> Widths:
    """Narrower in float32, whose products take more registers."""
    full = element == torch.float32
    least, most = (16, 32) if full else (64, 64)  # 16-bit tiles of 32 channels came out wrong on Hopper (Triton 3.6.0)
    return Widths(32 if full or K > 128 else 64, max(power_of_two(K), least), fit(L, most, least), fit(V, most, least))


@dataclass(frozen=True)
class Attention:
    """One call. ``q_quad`` and ``k_quad`` are ``None`` where there are sums alone; ``held`` is the state to go on from."""

    new: New
    bias: Tensor | None
    held: MixedState[Tensor] | None
    cu: Tensor | None
    C: int
    quad_scale: float
    lin_scale: float
    causal: bool

    @classmethod
    def of(cls, new: New, bias: Tensor | None, held: Any, *rest: Any) -> Attention:
        """Take the arrays of a call: rows contiguous, states whole."""
        rows = tuple(None if x is None else rows_contiguous(x) for x in new)
        state = None if held is None or held[0] is None else MixedState(*(x.contiguous() for x in held))
        return cls(rows, None if bias is None else bias.contiguous(), state, *rest)  # type: ignore[arg-type]

    family = property(lambda self: "linear_attn" if self.new[0] is None else "mixed_attn")
    q = property(lambda self: self.new[2])
    k = property(lambda self: self.new[3])
    v = property(lambda self: self.new[4])
    g = None

    @property
    def N(self) -> int:
        """Number of sequences."""
        return self.v.shape[0] if self.cu is None else self.cu.shape[0] - 1

    @property
    def sizes(self) -> dict[str, int]:
        """Widths; that of the quadratic heads is 1 where there are none."""
        return dict(K=1 if self.new[0] is None else self.new[0].shape[-1], L=self.k.shape[-1], V=self.v.shape[-1])

    @property
    def tiles(self) -> Widths:
        """Chosen by shape."""
        return widths(**self.sizes, element=self.v.dtype)

    @property
    def blocks(self) -> int:
        """Blocks of ``BT`` tokens in the longest chunk that there can be."""
        T = self.v.shape[1]
        return -(-min(self.C, T + (0 if self.held is None else self.C)) // self.tiles.BT)

    @functools.cached_property
    def chunks(self) -> Cut:
        """All chunks, and with packed sequences room for more."""
        T, N, C = self.v.shape[1], self.N, self.C
        if self.held is None:
            return cut(T, N, C, self.cu)
        if self.cu is None:
            per = -(-(T + C - 1) // C)
            return Cut(N * per, per, None, None)
        count = T // C + 2 * N
        pieces = (self.cu.diff() + self.held.length + (C - 1)) // C
        first = torch.zeros(N + 1, dtype=torch.int32, device=self.cu.device)
        torch.cumsum(pieces, 0, dtype=torch.int32, out=first[1:])
        at = torch.arange(count, dtype=torch.int32, device=self.cu.device)
        return Cut(count, 0, torch.searchsorted(first[1:], at, right=True, out_int32=True), first)

    @property
    def table(self) -> tuple[Any, ...]:
        """Which chunk is whose."""
        length = None if self.held is None else self.held.length
        return self.chunks.owner, self.chunks.first, self.cu, length

    @property
    def counts(self) -> tuple[int, ...]:
        """``T``, chunks a sequence, sequences, heads and tokens a chunk."""
        return self.v.shape[1], max(self.chunks.per, 1), self.N, self.v.shape[2], self.C

    @property
    def flags(self) -> dict[str, Any]:
        """What every kernel is told at compile time."""
        precision = "tf32x3" if self.v.dtype == torch.float32 else "tf32"
        return dict(PACKED=self.cu is not None, HELD=self.held is not None, PREC=precision, num_warps=4)

    @property
    def inside(self) -> dict[str, Any]:
        """The same, for kernels that look inside chunks."""
        tiles = self.tiles._asdict() | self.sizes
        stages = 1 if self.v.dtype == torch.float32 and self.sizes["K"] > 128 else 2  # in 99 KB of shared memory
        quad = dict(CAUSAL=self.causal, QUAD=self.new[0] is not None, DT=type_of_products(self.v), num_stages=stages)
        return tiles | self.flags | quad

    @property
    def group(self) -> int:
        """Value heads that share a linear query/key head."""
        return self.v.shape[2] // self.k.shape[2]

    def new_state(self, *shape: int, narrow: bool = False) -> Tensor:
        """An array of states ``[…, HV, L, V]``, float32; ``narrow`` ones are only read by products."""
        kind = torch.bfloat16 if narrow and self.v.dtype == torch.bfloat16 else torch.float32
        return self.v.new_empty((*shape, self.v.shape[2], self.k.shape[3], self.v.shape[3]), dtype=kind)


def chunk_sums(call: Attention, x: Tensor, y: Tensor, held: tuple[Any, Any], scale: float, queries: bool) -> Tensor:
    """``scale xᵀ y`` of every chunk."""
    tiles, sizes, HV = call.tiles, call.sizes, call.v.shape[2]
    out = call.new_state(call.chunks.count)
    count = call.chunks.count * HV * programs(sizes["L"], sizes["V"], tiles.BL, tiles.BV)
    launch(
        kernels.sums, count, call, x, y, *held, out, *call.table, *call.counts, scale, *strides(x), *strides(y),
        HV * sizes["L"], HV * sizes["V"], L=sizes["L"], V=sizes["V"], BT=tiles.BT, BL=tiles.BL, BV=tiles.BV,
        GROUP=call.group, QUERIES=queries, num_stages=2, **call.flags,
    )  # fmt: skip
    return out


def scanned(
    call: Attention, local: Tensor, start: Tensor | None, end: Tensor | None, reverse: bool
) -> Tensor:  # fmt: skip
    """What every chunk reads; the state at the far end goes to ``end``."""
    kept = call.new_state(call.chunks.count, narrow=True)
    size, block = local.shape[-2] * local.shape[-1], 1024
    launch(
        kernels.scan, call.N * call.v.shape[2] * programs(size, 1, block, 1), call,
        local, kept, start, end, *call.table, *call.counts, SIZE=size, BLOCK=block, PACKED=call.cu is not None,
        HELD=call.held is not None, CAUSAL=call.causal, REVERSE=reverse, START=start is not None, END=end is not None,
        num_warps=4,
    )  # fmt: skip
    return kept


def states(call: Attention, end: Tensor | None = None) -> Tensor:
    """``S`` of every chunk; the state after the last whole one goes to ``end``."""
    held = (None, None) if call.held is None else (call.held.k_lin, call.held.v)
    local = chunk_sums(call, call.k, call.v, held, 1.0, False)
    return scanned(call, local, None if call.held is None else call.held.kv, end, False)


def per_block(call: Attention, tiles_v: int = 1) -> int:
    """Programs of a kernel on blocks of chunks."""
    return call.chunks.count * call.v.shape[2] * call.blocks * tiles_v


def forward(call: Attention, out_dtype: torch.dtype, end: Tensor | None) -> Tensor:
    """Outputs; the sum after the last whole chunk goes to ``end``."""
    q_quad, k_quad, q_lin, _, v = call.new
    kept = states(call, end)
    out = v.new_empty(v.shape, dtype=out_dtype)
    held_k, held_v = (None, None) if call.held is None else (call.held.k_quad, call.held.v)
    launch(
        kernels.outputs, per_block(call, programs(1, v.shape[3], 1, call.tiles.BV)), call,
        q_quad, k_quad, q_lin, v, held_k, held_v, call.bias, kept, out, *call.table, *call.counts, call.blocks,
        call.quad_scale, call.lin_scale, *strides(q_quad), *strides(k_quad), *strides(q_lin), *strides(v),
        GROUP=call.group, BIAS=call.bias is not None, **call.inside,
    )  # fmt: skip
    return out


class Tail(NamedTuple):
    """Gradients of a final state; ``None`` where none flows in."""

    kv: Tensor | None = None
    k_quad: Tensor | None = None
    k_lin: Tensor | None = None
    v: Tensor | None = None


def backward(call: Attention, do: Tensor, tail: Tail) -> tuple[list[Any], Tensor | None, MixedState[Any]]:
    """Gradients of the new arrays, of the bias, and of the state gone on from."""
    q_quad, k_quad, q_lin, k_lin, v = call.new
    do = rows_contiguous(do)
    tail = Tail(*(None if x is None else x.contiguous() for x in tail))
    B, T, HV, V = v.shape
    held, sizes, bias = call.held, call.sizes, call.bias
    linear = v.dtype if call.group == 1 else torch.float32
    dq_lin, dk_lin = (v.new_empty((B, T, HV, sizes["L"]), dtype=linear) for _ in range(2))
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)
    dquad = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_quad, k_quad)]
    dheld = [None] * 4
    if held is not None:
        dheld = [torch.zeros_like(x, dtype=torch.float32) for x in held[:4]]
    kept = states(call)
    local = chunk_sums(call, q_lin, do, (None, None), call.lin_scale, True)
    dkept = scanned(call, local, tail.kv, dheld[0], True)
    old_k, old_l, old_v = (None,) * 3 if held is None else held[1:4]
    shared = (*call.table, *call.counts, call.blocks, call.quad_scale)
    quad = (*strides(q_quad), *strides(k_quad))
    launch(
        kernels.queries, per_block(call), call,
        q_quad, k_quad, q_lin, v, do, old_k, old_v, bias, kept, dquad[0], dq_lin, *shared, call.lin_scale,
        *quad, *strides(v), *strides(do), BIAS=bias is not None, **call.inside,
    )  # fmt: skip
    launch(
        kernels.keys, per_block(call), call,
        q_quad, k_quad, v, do, old_k, old_v, bias, dkept, dquad[1], dk_lin, dheld[1], dheld[2], tail.k_quad, tail.k_lin,
        *shared, *quad, *strides(v), *strides(do), BIAS=bias is not None, TAIL_QUAD=tail.k_quad is not None,
        TAIL_LIN=tail.k_lin is not None, **call.inside,
    )  # fmt: skip
    launch(
        kernels.values, per_block(call, programs(1, V, 1, call.tiles.BV)), call,
        q_quad, k_quad, k_lin, do, old_k, old_l, bias, dkept, dv, dheld[3], tail.v, *shared,
        *quad, *strides(k_lin), *strides(do), GROUP=call.group, BIAS=bias is not None, TAIL=tail.v is not None, **call.inside,
    )  # fmt: skip
    if call.group > 1:
        dq_lin, dk_lin = (x.unflatten(2, (-1, call.group)).sum(3).to(v.dtype) for x in (dq_lin, dk_lin))
    dbias = None if bias is None else bias_gradient(call, do)
    return [*dquad, dq_lin, dk_lin, dv], dbias, MixedState(*dheld, None)


def bias_gradient(call: Attention, do: Tensor) -> Tensor:
    """Summed by one program for each tile, chunk after chunk."""
    q_quad, k_quad, _, _, v = call.new
    out = call.bias.new_zeros(call.bias.shape, dtype=torch.float32)
    held_k, held_v = (None, None) if call.held is None else (call.held.k_quad, call.held.v)
    options = {name: value for name, value in call.inside.items() if name not in ("L", "BL", "QUAD", "DT")}
    launch(
        kernels.biases, v.shape[2] * call.blocks**2, call,
        q_quad, k_quad, v, do, held_k, held_v, call.bias, out, *call.table, *call.counts, call.blocks, call.chunks.count,
        call.quad_scale, *strides(q_quad), *strides(k_quad), *strides(v), *strides(do), **options,
    )  # fmt: skip
    return out


def held_after(call: Attention) -> list[Tensor]:
    """What the final state holds of the last chunk, float32, and how many tokens."""
    v, held = call.v, call.held
    T, N, C = v.shape[1], call.N, call.C
    at = torch.arange(N, device=v.device)
    begin = torch.zeros_like(at) if call.cu is None else call.cu[:-1].long()
    tokens = torch.full_like(at, T) if call.cu is None else call.cu.diff().long()
    p = torch.zeros_like(at) if held is None else held.length.long()
    length = (tokens + p) % C
    r = torch.arange(C, device=v.device)
    j = (tokens + p - length)[:, None] + r  # as the sequence counts its tokens, held ones first
    old, there = j < p[:, None], r < length[:, None]
    row = (at if call.cu is None else torch.zeros_like(at))[:, None]
    column = (begin[:, None] + j - p[:, None]).clamp_(0, max(T - 1, 0))
    found = []
    for new, before in zip((call.new[1], call.k, v), (None,) * 3 if held is None else held[1:4], strict=True):
        x = new[row, column].float() if T else new.new_zeros((N, C, *new.shape[2:]), dtype=torch.float32)
        x = x if before is None else torch.where(old[..., None, None], before.float(), x)
        found.append(x.masked_fill(~there[..., None, None], 0.0))
    return [*found, length.to(torch.int32)]


def step(call: Attention) -> tuple[Tensor, MixedState[Tensor]]:
    """The output and the state after one new token of every sequence."""
    q_quad, k_quad, q_lin, k_lin, v = call.new
    held, C, sizes = call.held, call.C, call.sizes
    N, HV, V = v.shape[0], v.shape[2], v.shape[3]
    state = MixedState(
        *(torch.empty_like(x, dtype=torch.float32) for x in held[:4]), torch.empty_like(held.length, dtype=torch.int32)
    )
    out = v.new_empty(v.shape)
    BV = fit(V, 64)
    launch(
        mixed_step.step, N * HV * programs(1, V, 1, BV), call,
        q_quad, k_quad, q_lin, k_lin, v, call.bias, *held, out, *state, HV, C, call.quad_scale, call.lin_scale,
        *(x.stride(axis) for x in call.new for axis in (0, 2)), **sizes, BT=32, BK=max(power_of_two(sizes["K"]), 16),
        BL=fit(sizes["L"], 64), BV=BV, BIAS=call.bias is not None, PREC="tf32x3", num_warps=4,
    )  # fmt: skip
    return out, state


@torch.library.custom_op("linattn::triton_mixed", mutates_args=())
@foreseen()
def mixed(
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    bias: Tensor | None,
    kv: Tensor | None,
    held_k_quad: Tensor | None,
    held_k_lin: Tensor | None,
    held_v: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
    C: int,
    quad_scale: float,
    lin_scale: float,
    causal: bool,
    final: bool,
    recurrent: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``o`` and the five arrays of the final state, which are empty unless ``final``. Only one token is ``recurrent``'s own."""
    new, held = (q_quad, k_quad, q_lin, k_lin, v), (kv, held_k_quad, held_k_lin, held_v, length)
    call = Attention.of(new, bias, held, cu_seqlens, C, quad_scale, lin_scale, causal)
    if recurrent and final and call.held is not None and cu_seqlens is None and v.shape[1] == 1:
        o, state = step(call)
        return o, *state
    end = call.new_state(call.N) if final else None
    o = forward(call, v.dtype, end)
    nothing = [v.new_empty(0, dtype=torch.float32) for _ in range(4)]
    return (o, end, *held_after(call)) if final else (o, *nothing, v.new_empty(0, dtype=torch.int32))


@mixed.register_fake
def _(q_quad, k_quad, q_lin, k_lin, v, bias, kv, hk, hl, hv, length, cu_seqlens, C, quad_scale, lin_scale, causal, final, one):
    B, _, H, K = k_quad.shape
    L, V = k_lin.shape[3], v.shape[3]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shapes = ((N, H, L, V), (N, C, H, K), (N, C, H, L), (N, C, H, V)) if final else ((0,),) * 4
    arrays = (v.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return v.new_empty(v.shape), *arrays, v.new_empty((N,) if final else (0,), dtype=torch.int32)


@torch.library.custom_op("linattn::triton_mixed_backward", mutates_args=())
@foreseen()
def mixed_backward(
    do: Tensor,
    dkv: Tensor | None,
    dk_quad: Tensor | None,
    dk_lin: Tensor | None,
    dv: Tensor | None,
    q_quad: Tensor,
    k_quad: Tensor,
    q_lin: Tensor,
    k_lin: Tensor,
    v: Tensor,
    bias: Tensor | None,
    kv: Tensor | None,
    held_k_quad: Tensor | None,
    held_k_lin: Tensor | None,
    held_v: Tensor | None,
    length: Tensor | None,
    cu_seqlens: Tensor | None,
    C: int,
    quad_scale: float,
    lin_scale: float,
    causal: bool,
) -> list[Tensor]:
    """Gradients of the float arrays given, in the order of the arguments."""
    new, held = (q_quad, k_quad, q_lin, k_lin, v), (kv, held_k_quad, held_k_lin, held_v, length)
    call = Attention.of(new, bias, held, cu_seqlens, C, quad_scale, lin_scale, causal)
    dnew, dbias, dheld = backward(call, do, Tail(dkv, dk_quad, dk_lin, dv))
    given = zip((*new, bias, *held[:4]), (*dnew, dbias, *dheld[:4]), strict=True)
    return [gradient.to(x.dtype) for x, gradient in given if x is not None]


@mixed_backward.register_fake
def _(do, dkv, dk_quad, dk_lin, dv, *inputs):
    return [x.new_empty(x.shape) for x in inputs[:10] if x is not None]


def _setup_context(ctx, inputs, output):
    *arrays, ctx.C, ctx.quad_scale, ctx.lin_scale, ctx.causal, ctx.final, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[5])
    ctx.save_for_backward(*arrays)


def _backward(ctx, do, *dfinal):
    arrays = ctx.saved_tensors
    none = (None,) * 8  # length, cu_seqlens and the six options
    dfinal = dfinal[:4] if ctx.final else (None,) * 4
    if do is None and all(d is None for d in dfinal):
        return (*(None for _ in arrays[:10]), *none)
    do = torch.zeros_like(arrays[4]) if do is None else do
    grads = iter(_backward_call(do, *dfinal, *arrays, ctx.C, ctx.quad_scale, ctx.lin_scale, ctx.causal))
    return (*(None if x is None else next(grads) for x in arrays[:10]), *none)


_backward_call = register(mixed_backward)
mixed_call = register(mixed, _setup_context, _backward)


def mixed_attention(
    form: str,
    arrays: dict[str, Tensor],
    *,
    bias: Tensor | None,
    quad_scale: float | None,
    lin_scale: float | None,
    causal: bool,
    initial_state: MixedState[Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, MixedState[Tensor] | None]:
    """``(o, final_state)``, the state a ``MixedState``."""
    scales = [1.0 / chunk_size if scale is None else float(scale) for scale in (quad_scale, lin_scale)]
    C = chunk_size
    if bias is None and initial_state is None and not output_final_state:
        C = min(C, arrays["v"].shape[1] + 1)  # nothing has this size: FLASH-Quad may say any number
    state = (None,) * 5 if initial_state is None else initial_state
    flags = causal, output_final_state, form == "recurrent"
    o, *final = mixed_call(*arrays.values(), bias, *state, cu_seqlens, C, *scales, *flags)
    return o, MixedState(*final) if output_final_state else None


# -- linear_attn that reads the whole sequence -------------------------------------------------------------------------

SUM = 256
"""Tokens that are summed by one program."""


@torch.library.custom_op("linattn::triton_bidirectional", mutates_args=())
@foreseen()
def bidirectional(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """``scale · q Σ kᵀv`` over the whole sequence, float32 if ``wide``; and nothing, since a node has several results."""
    call = Attention.of((None, None, q, k, v), None, None, cu_seqlens, SUM, 0.0, scale, False)
    return forward(call, torch.float32 if wide else v.dtype, None), v.new_empty(0)


@bidirectional.register_fake
def _(q, k, v, cu_seqlens, scale, wide):
    return v.new_empty(v.shape, dtype=torch.float32 if wide else v.dtype), v.new_empty(0)


@torch.library.custom_op("linattn::triton_bidirectional_backward", mutates_args=())
@foreseen()
def bidirectional_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float
) -> list[Tensor]:  # fmt: skip
    """Gradients of ``q``, ``k`` and ``v``."""
    call = Attention.of((None, None, q, k, v), None, None, cu_seqlens, SUM, 0.0, scale, False)
    return backward(call, do, Tail())[0][2:]


@bidirectional_backward.register_fake
def _(do, q, k, v, cu_seqlens, scale):
    return [x.new_empty(x.shape) for x in (q, k, v)]


def _remember(ctx, inputs, output):
    *arrays, ctx.scale, _ = inputs
    ctx.save_for_backward(*arrays)


def _pull(ctx, do, _):
    return (*_bidirectional_backward_call(do, *ctx.saved_tensors, ctx.scale), None, None, None)


_bidirectional_backward_call = register(bidirectional_backward)
bidirectional_call = register(bidirectional, _remember, _pull)
