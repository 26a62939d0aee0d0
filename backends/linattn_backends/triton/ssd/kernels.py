"""What stands around the core in ``ssd``: step sizes before it, the skip and the gate after it, and their gradients.

::

    Δ = clip(dt + bias), or clip(softplus(dt + bias))
    v = Δ x                        g = Δ A             what the core takes
    y = (o + D∘x) ∘ silu(z)                            of what it gives

    do = dy ∘ silu(z)              dz = dy ∘ (o + D∘x) ∘ silu'(z)
    dΔ = Σ_v dv ∘ x + dg A         ddt = dΔ · dΔ/ddt   none where it is clipped
    dx = Δ dv + D∘do
    dA = Σ dg Δ                    dbias = Σ ddt                     dD = Σ do ∘ x

A core that takes weights of values, and a skip, is given ``Δ`` and ``x`` in the place of ``v``, and ``D``, if there is no gate
after it; and it gives ``dx``, and for each token ``Δ Σ_v dv ∘ x`` and ``Σ_v do ∘ x``.

Numbers are ``[M, HV, V]``, ``M`` the tokens of all sequences: ``x``, ``z``, ``dt`` and the outputs' gradient as they lie, and
what kernels make without gaps. Behind packed sequences, and of slots that are padding, all that is stored is zero, whatever
lies there. Backward, a program walks over tokens of one head, and adds up its part of the parameters' gradients.
"""

import triton
import triton.language as tl

from ..lib.activations import sigmoid, silu_slope
from ..lib.input_maps import softplus

__all__ = ["ssd_inputs_bwd", "ssd_inputs_fwd", "ssd_outputs_bwd", "ssd_outputs_fwd", "ssd_steps_bwd", "ssd_steps_fwd"]


@triton.jit
def live_rows(cu, M, N):
    """How many tokens belong to sequences."""
    if cu is None:
        return M
    else:
        return tl.load(cu + N).to(tl.int32)


@triton.jit
def rows_of_program(HV, R: tl.constexpr):
    """A program's rows, and the token and the head of each."""
    first = tl.program_id(0).to(tl.int64) * R
    local = (first % HV).to(tl.int32) + tl.arange(0, R)
    return first + tl.arange(0, R), (first // HV).to(tl.int32) + local // HV, local % HV


@triton.jit
def place_of(tokens, heads, T, b_stride, t_stride, h_stride):
    """Where rows of an array as it lies begin."""
    at = (tokens // T).to(tl.int64) * b_stride + (tokens % T).to(tl.int64) * t_stride
    return at + heads.to(tl.int64) * h_stride


@triton.jit
def rows_at(p, place, columns, mask):
    """A tile of rows that begin at ``place``, float32."""
    return tl.load(p + place[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_of_heads(p, heads, inside):
    """A parameter's numbers for the heads of rows, float32; zeros if there is none."""
    if p is None:
        numbers = tl.zeros(heads.shape, tl.float32)
    else:
        numbers = tl.load(p + heads, mask=inside, other=0.0).to(tl.float32)
    return numbers


@triton.jit
def load_skip(D, heads, columns, inside, V: tl.constexpr, SKIP: tl.constexpr):
    """``D`` of the heads of rows: one number each if ``SKIP`` is 1, one a value channel if it is 2."""
    if SKIP == 2:
        skip = tl.load(D + heads[:, None] * V + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        skip = tl.load(D + heads).to(tl.float32)[:, None]
    return skip


@triton.jit
def step_of(x, least, most, SOFTPLUS: tl.constexpr):
    """``Δ``."""
    if SOFTPLUS:
        x = softplus(x)
    return tl.where(x < least, least, tl.where(x > most, most, x))


@triton.jit
def step_slope(x, least, most, SOFTPLUS: tl.constexpr):
    """``dΔ/ddt``."""
    slope = x * 0.0 + 1.0
    if SOFTPLUS:
        slope = sigmoid(x)
        x = softplus(x)
    return tl.where((x < least) | (x > most), 0.0, slope)


@triton.jit(do_not_specialize=["M", "T", "HV", "N"])
def ssd_inputs_fwd(
    x, dt, A, bias, v, g, cu, M, T, HV, N, least, most, xb, xt, xh, db, dt_stride, dh,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """``v`` and ``g`` of ``R`` rows, each a token of a head."""
    rows, tokens, heads = rows_of_program(HV, R)
    columns = tl.arange(0, BV)
    live = tokens < live_rows(cu, M, N)
    shift = load_of_heads(bias, heads, live)
    raw = tl.load(dt + place_of(tokens, heads, T, db, dt_stride, dh), mask=live, other=0.0).to(tl.float32)
    step = tl.where(live, step_of(raw + shift, least, most, SOFTPLUS), 0.0)
    tile = rows_at(x, place_of(tokens, heads, T, xb, xt, xh), columns, live[:, None] & (columns < V)[None, :])
    inside = (tokens < M)[:, None] & (columns < V)[None, :]
    tl.store(v + rows[:, None] * V + columns[None, :], (tile * step[:, None]).to(v.dtype.element_ty), mask=inside)
    tl.store(g + rows, step * load_of_heads(A, heads, live), mask=tokens < M)


@triton.jit(do_not_specialize=["M", "T", "HV", "N"])
def ssd_steps_fwd(
    dt, A, bias, step, g, cu, M, T, HV, N, least, most, db, dt_stride, dh, R: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """``Δ`` and ``g`` of ``R`` rows, each a token of a head."""
    rows, tokens, heads = rows_of_program(HV, R)
    live = tokens < live_rows(cu, M, N)
    shift = load_of_heads(bias, heads, live)
    raw = tl.load(dt + place_of(tokens, heads, T, db, dt_stride, dh), mask=live, other=0.0).to(tl.float32)
    found = tl.where(live, step_of(raw + shift, least, most, SOFTPLUS), 0.0)
    tl.store(step + rows, found, mask=tokens < M)
    tl.store(g + rows, found * load_of_heads(A, heads, live), mask=tokens < M)


@triton.jit(do_not_specialize=["M", "T", "HV", "N", "P"])
def ssd_outputs_fwd(
    o, x, D, z, y, slots, P, cu, M, T, HV, N, xb, xt, xh, zb, zt, zh,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, SKIP: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """``y`` of ``R`` rows; it may lie where ``o`` does. A sequence whose slot is none of ``0 … P-1`` is padding."""
    rows, tokens, heads = rows_of_program(HV, R)
    columns = tl.arange(0, BV)
    here = tokens < live_rows(cu, M, N)
    if slots is not None:
        slot = tl.load(slots + tokens // T, mask=here, other=-1)
        here &= (slot >= 0) & (slot < P)
    live = here[:, None] & (columns < V)[None, :]
    tile = rows_at(o, rows * V, columns, live)
    if SKIP:
        skip = load_skip(D, heads, columns, live, V, SKIP)
        tile += skip * rows_at(x, place_of(tokens, heads, T, xb, xt, xh), columns, live)
    if GATED:
        gate = rows_at(z, place_of(tokens, heads, T, zb, zt, zh), columns, live)
        tile *= gate * sigmoid(gate)
    inside = (tokens < M)[:, None] & (columns < V)[None, :]
    tl.store(y + rows[:, None] * V + columns[None, :], tile.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "T", "HV", "N"])
def ssd_outputs_bwd(
    dy, o, x, D, z, do, dz, cu, M, T, HV, N, yb, yt, yh, xb, xt, xh, zb, zt, zh,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """``do`` and ``dz`` of ``R`` rows."""
    rows, tokens, heads = rows_of_program(HV, R)
    columns = tl.arange(0, BV)
    live = (tokens < live_rows(cu, M, N))[:, None] & (columns < V)[None, :]
    tile = rows_at(o, rows * V, columns, live)
    if SKIP:
        skip = load_skip(D, heads, columns, live, V, SKIP)
        tile += skip * rows_at(x, place_of(tokens, heads, T, xb, xt, xh), columns, live)
    d = rows_at(dy, place_of(tokens, heads, T, yb, yt, yh), columns, live)
    gate = rows_at(z, place_of(tokens, heads, T, zb, zt, zh), columns, live)
    s = sigmoid(gate)
    at = rows[:, None] * V + columns[None, :]
    inside = (tokens < M)[:, None] & (columns < V)[None, :]
    tl.store(do + at, (d * gate * s).to(do.dtype.element_ty), mask=inside)
    tl.store(dz + at, (d * tile * silu_slope(gate, s)).to(dz.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "T", "HV", "N"])
def ssd_inputs_bwd(
    dv, dg, do, x, dt, A, D, bias, dx, ddt, parts, skip_parts, cu, M, T, HV, N, least, most,
    ob, ot, oh, xb, xt, xh, db, dt_stride, dh,
    V: tl.constexpr, BV: tl.constexpr, R: tl.constexpr, SKIP: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """``dx``, which may lie where ``dv`` does, and ``ddt`` of every so many tokens of one head.

    And ``parts [walks, rows, HV]`` of the gradients of ``A``, of the bias, and of a ``D`` of a number a head; those of another
    ``D`` are ``skip_parts [walks, HV, V]``.
    """
    pid = tl.program_id(0)
    head = pid % HV
    heads = head + tl.zeros((R,), tl.int32)
    columns = tl.arange(0, BV)
    wide = (columns < V)[None, :]
    end = live_rows(cu, M, N)
    rate = tl.load(A + head).to(tl.float32)
    shift = 0.0
    if bias is not None:
        shift = tl.load(bias + head).to(tl.float32)
    if SKIP:
        skip = load_skip(D, heads, columns, wide & (heads < HV)[:, None], V, SKIP)
    by_rate = tl.zeros((R,), tl.float32)
    by_bias = tl.zeros((R,), tl.float32)
    by_skip = tl.zeros((R, BV), tl.float32)
    for block in range(pid // HV, tl.cdiv(M, R), tl.num_programs(0) // HV):
        tokens = block * R + tl.arange(0, R)
        live = tokens < end
        inside = live[:, None] & wide
        rows = tokens.to(tl.int64) * HV + head
        at = rows[:, None] * V + columns[None, :]
        raw = tl.load(dt + place_of(tokens, heads, T, db, dt_stride, dh), mask=live, other=0.0).to(tl.float32) + shift
        step = step_of(raw, least, most, SOFTPLUS)
        tile = rows_at(x, place_of(tokens, heads, T, xb, xt, xh), columns, inside)
        d = rows_at(dv, rows * V, columns, inside)
        of_decay = tl.load(dg + rows, mask=live, other=0.0).to(tl.float32)
        through = tl.sum(d * tile, 1) + of_decay * rate
        through = tl.where(live, through * step_slope(raw, least, most, SOFTPLUS), 0.0)
        by_rate += tl.where(live, of_decay * step, 0.0)
        by_bias += through
        d *= step[:, None]
        if SKIP:
            outer = rows_at(do, place_of(tokens, heads, T, ob, ot, oh), columns, inside)
            d += skip * outer
            by_skip += outer * tile
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=(tokens < M)[:, None] & wide)
        tl.store(ddt + rows, through.to(ddt.dtype.element_ty), mask=tokens < M)
    parts += pid // HV * ((2 + (SKIP == 1)) * HV) + head
    tl.store(parts, tl.sum(by_rate, 0))
    tl.store(parts + HV, tl.sum(by_bias, 0))
    if SKIP == 1:
        tl.store(parts + 2 * HV, tl.sum(tl.sum(by_skip, 1), 0))
    if SKIP == 2:
        tl.store(skip_parts + pid.to(tl.int64) * V + columns, tl.sum(by_skip, 0), mask=columns < V)


@triton.jit(do_not_specialize=["M", "T", "HV", "N"])
def ssd_steps_bwd(
    dg, dlog, dskip, dt, A, bias, ddt, parts, cu, M, T, HV, N, least, most, db, dt_stride, dh,
    R: tl.constexpr, BH: tl.constexpr, SKIP: tl.constexpr, SOFTPLUS: tl.constexpr,
):  # fmt: skip
    """``ddt`` of every so many tokens of ``BH`` heads, and their ``parts [walks, WIDTH, HV]`` of the parameters' gradients.

    Of ``A``, of the bias, and of ``D`` if there is one. ``dlog`` is the gradient of ``log Δ`` as a weight of values, ``dskip``
    a token's part of that of ``D``.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(HV, BH)
    heads = pid % blocks * BH + tl.arange(0, BH)
    there = heads < HV
    end = live_rows(cu, M, N)
    rate = tl.load(A + heads, mask=there, other=0.0).to(tl.float32)[None, :]
    shift = load_of_heads(bias, heads, there)[None, :]
    by_rate = tl.zeros((R, BH), tl.float32)
    by_bias = tl.zeros((R, BH), tl.float32)
    by_skip = tl.zeros((R, BH), tl.float32)
    for block in range(pid // blocks, tl.cdiv(M, R), tl.num_programs(0) // blocks):
        tokens = block * R + tl.arange(0, R)
        live = (tokens < end)[:, None] & there[None, :]
        rows = tokens.to(tl.int64)[:, None] * HV + heads[None, :]
        place = place_of(tokens, tokens * 0, T, db, dt_stride, dh)[:, None] + heads.to(tl.int64)[None, :] * dh
        raw = tl.load(dt + place, mask=live, other=0.0).to(tl.float32) + shift
        of_decay = tl.load(dg + rows, mask=live, other=0.0)
        step = step_of(raw, least, most, SOFTPLUS)
        through = tl.load(dlog + rows, mask=live, other=0.0) / tl.where(step == 0.0, 1.0, step) + of_decay * rate
        through = tl.where(live, through * step_slope(raw, least, most, SOFTPLUS), 0.0)
        by_rate += tl.where(live, of_decay * step, 0.0)
        by_bias += through
        if SKIP:
            by_skip += tl.load(dskip + rows, mask=live, other=0.0)
        tl.store(ddt + rows, through.to(ddt.dtype.element_ty), mask=(tokens < M)[:, None] & there[None, :])
    parts += pid // blocks * ((2 + SKIP) * HV) + heads
    tl.store(parts, tl.sum(by_rate, 0), mask=there)
    tl.store(parts + HV, tl.sum(by_bias, 0), mask=there)
    if SKIP:
        tl.store(parts + 2 * HV, tl.sum(by_skip, 0), mask=there)
