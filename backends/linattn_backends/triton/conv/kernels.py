"""A causal convolution over time, one filter a channel, and its gradients.

::

    z_t = b + Σ_{i<W} w_i ∘ x_{t-W+1+i}          y_t = z_t, or SiLU: z_t ∘ σ(z_t)
    dz_t = dy_t, or dy_t ∘ silu'(z_t)
    dx_s = Σ_{i<W} w_i ∘ dz_{s+W-1-i}            inside s's sequence; its last W - 1 tokens have a final state's gradient too
    dw_i = Σ_t dz_t ∘ x_{t-W+1+i}                db = Σ_t dz_t

``x_s`` before a sequence's first token is a column of its initial state, or zero; its final state is its last ``W - 1`` inputs,
oldest first.

Memory is all that counts. A program walks the tokens of one piece, ``BD`` channels wide, row by row: each row is read once,
and the rows that a filter reaches back to stay in registers: a tuple, which costs nothing to shift where loops are unrolled.
``UNROLL`` rows are on their way before the first is used. Pieces are cut from the array, not from its sequences: a walk knows
where its sequence ends, and begins the next one from that one's initial state. A block of rows in which nothing ends needs no
questions; in others they are asked of every row, which then is in the cache.
"""

import triton
import triton.language as tl

from ..lib.activations import sigmoid, silu_slope

__all__ = ["conv_final_state_fwd", "conv_gradients_bwd", "conv_initial_state_bwd", "conv_outputs_fwd", "conv_tokens_fwd"]


# -- where a walk is ---------------------------------------------------------------------------------------------------


@triton.jit
def sequence_at(cu, N, t):
    """The last of ``N`` sequences that begins at token ``t`` or before: a search that looks at 32 bounds at a time."""
    low = t * 0
    high = low + N
    while high - low > 1:
        step = (high - low + 31) // 32
        at = low + step * (1 + tl.arange(0, 32))
        begun = (tl.load(cu + at, mask=at < high, other=0) <= t) & (at < high)
        low += step * tl.sum(begun.to(tl.int32), 0)
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def sequence_of(cu, T, N, b, t, PACKED: tl.constexpr):
    """The sequence of token ``t`` in row ``b``, where it begins and where it ends."""
    if PACKED:
        n = sequence_at(cu, N, t)
        return n, tl.load(cu + n).to(tl.int32), tl.load(cu + n + 1).to(tl.int32)
    return b, t * 0, t * 0 + T


@triton.jit
def sequence_after(cu, n, end, t):
    """The sequence of token ``t``, and its end, from one before it: some may have no tokens."""
    while end <= t:
        n += 1
        end = tl.load(cu + n + 1).to(tl.int32)
    return n, end


@triton.jit
def filled(cu, T, N, PACKED: tl.constexpr):
    """How many of ``T`` tokens belong to sequences."""
    if PACKED:
        return tl.load(cu + N).to(tl.int32)
    return T


@triton.jit
def piece_of(T, D, PIECE, BD: tl.constexpr):
    """A program's row of the batch, the first token of its piece, its piece among all, and its channels."""
    pid = tl.program_id(0)
    ND = tl.cdiv(D, BD)
    per = tl.cdiv(T, PIECE)
    piece = pid // ND
    return piece // per, piece % per * PIECE, piece, pid % ND * BD + tl.arange(0, BD)


# -- what a walk holds -------------------------------------------------------------------------------------------------


@triton.jit
def taps_of(weight, columns, inside, W: tl.constexpr):
    """``w_0 … w_{W-1}`` of these channels, float32: read as a tile, in which neighbours in memory are neighbours."""
    i = tl.arange(0, triton.next_power_of_2(W))
    at = weight + columns.to(tl.int64)[:, None] * W + i[None, :]
    return columns_of(tl.load(at, mask=inside[:, None] & (i < W)[None, :], other=0.0), W)


@triton.jit
def columns_of(tile, W: tl.constexpr):
    """The first ``W`` columns of a tile, float32; a thread has whole rows of it, and need not ask others."""
    i = tl.arange(0, tile.shape[1])
    columns = ()
    for k in tl.static_range(W):
        columns += (tl.sum(tl.where((i == k)[None, :], tile.to(tl.float32), 0.0), 1),)
    return columns


@triton.jit
def bias_of(bias, columns, inside, bd, BIAS: tl.constexpr):
    """``b``, or zeros."""
    if BIAS:
        return tl.load(bias + columns.to(tl.int64) * bd, mask=inside, other=0.0).to(tl.float32)
    return tl.zeros(columns.shape, tl.float32)


@triton.jit
def rows_before(t, begin, x, xt, start, n, sn, sd, sc, columns, inside, W: tl.constexpr, START: tl.constexpr):
    """``x_{t-W+1} … x_{t-1}`` of sequence ``n``, float32; before its first token, from its initial state, or zeros."""
    rows = ()
    for k in tl.static_range(W - 1):
        s = t - (W - 1) + k
        row = row_at(x, s, xt, columns, inside & (s >= begin)).to(tl.float32)
        if START:
            at = start + n.to(tl.int64) * sn + columns.to(tl.int64) * sd + tl.cast(s - begin + W - 1, tl.int64) * sc
            row += tl.load(at, mask=inside & (s < begin), other=0.0).to(tl.float32)
        rows += (row,)
    return rows


@triton.jit
def row_at(p, t, stride, columns, mask):
    """Row ``t`` of an array in its own dtype; zeros where it is masked."""
    return tl.load(p + tl.cast(t, tl.int64) * stride + columns, mask=mask, other=0.0)


@triton.jit
def rows_at(p, t, stop, stride, columns, inside, UNROLL: tl.constexpr):
    """Rows ``t … t+UNROLL-1``; zeros from ``stop`` on."""
    rows = ()
    for u in tl.static_range(UNROLL):
        rows += (row_at(p, t + u, stride, columns, inside & (t + u < stop)),)
    return rows


@triton.jit
def zero_rows(like, W: tl.constexpr):
    """``W`` rows of zeros."""
    rows = ()
    for _ in tl.static_range(W):
        rows += (tl.zeros(like.shape, tl.float32),)
    return rows


@triton.jit
def convolved(rows, taps, bias, W: tl.constexpr):
    """``z`` of the last of ``W`` rows."""
    z = bias
    for k in tl.static_range(W):
        z += taps[k] * rows[k]
    return z


@triton.jit
def activated(z, SILU: tl.constexpr):
    """``y``."""
    if SILU:
        return z * sigmoid(z)
    return z


@triton.jit
def clear(p, columns, t, stop, D, inside):
    """Zeros in rows ``t … stop-1``, which belong to no sequence."""
    for s in range(t, stop):
        tl.store(p + tl.cast(s, tl.int64) * D + columns, tl.zeros(columns.shape, p.dtype.element_ty), mask=inside)


# -- forward -----------------------------------------------------------------------------------------------------------


@triton.jit
def step_fwd(y, t, D, row, rows, taps, bias, columns, inside, W: tl.constexpr, SILU: tl.constexpr):
    """``y_t`` of ``x_t`` and the ``W - 1`` rows before it; the rows before the next one."""
    rows += (row.to(tl.float32),)
    out = activated(convolved(rows, taps, bias, W), SILU)
    tl.store(y + tl.cast(t, tl.int64) * D + columns, out.to(y.dtype.element_ty), mask=inside)
    return rows[1:]


@triton.jit(do_not_specialize=["T", "N", "PIECE"])
def conv_outputs_fwd(
    x, weight, bias, start, y, cu, T, N, D, PIECE, xb, xt, bd, sn, sd, sc,
    W: tl.constexpr, BD: tl.constexpr, UNROLL: tl.constexpr,
    SILU: tl.constexpr, BIAS: tl.constexpr, START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``y`` of one piece."""
    b, t0, _, columns = piece_of(T, D, PIECE, BD)
    inside = columns < D
    x += b.to(tl.int64) * xb
    y += b.to(tl.int64) * T * D
    stop = tl.minimum(t0 + PIECE, filled(cu, T, N, PACKED))
    if t0 < stop:
        n, begin, end = sequence_of(cu, T, N, b, t0, PACKED)
        taps = taps_of(weight, columns, inside, W)
        shift = bias_of(bias, columns, inside, bd, BIAS)
        rows = rows_before(t0, begin, x, xt, start, n, sn, sd, sc, columns, inside, W, START)
        new = rows_at(x, t0, stop, xt, columns, inside, UNROLL)
        for block in range(t0, stop, UNROLL):
            ahead = rows_at(x, block + UNROLL, stop, xt, columns, inside, UNROLL)
            if block + UNROLL <= tl.minimum(stop, end):
                for u in tl.static_range(UNROLL):
                    rows = step_fwd(y, block + u, D, new[u], rows, taps, shift, columns, inside, W, SILU)
            else:
                for t in range(block, tl.minimum(block + UNROLL, stop)):
                    if PACKED:  # noqa: SIM102 - the compiler reads both sides of an `and`
                        if t == end:
                            n, end = sequence_after(cu, n, end, t)
                            rows = rows_before(t, t, x, xt, start, n, sn, sd, sc, columns, inside, W, START)
                    row = row_at(x, t, xt, columns, inside)
                    rows = step_fwd(y, t, D, row, rows, taps, shift, columns, inside, W, SILU)
            new = ahead
    if PACKED:
        clear(y, columns, tl.maximum(stop, t0), tl.minimum(t0 + PIECE, T), D, inside)


@triton.jit(do_not_specialize=["T", "N"])
def conv_final_state_fwd(
    x, start, end, cu, T, N, D, xb, xt, sn, sd, sc,
    W: tl.constexpr, BD: tl.constexpr, START: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The final state of one sequence, ``[BD, W-1]`` of ``[N, D, W-1]``."""
    FULL: tl.constexpr = triton.next_power_of_2(W - 1)
    ND = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    n = (pid // ND).to(tl.int64)
    columns = (pid % ND * BD + tl.arange(0, BD))[:, None]
    wide = columns.to(tl.int64)
    c = tl.arange(0, FULL)[None, :]
    inside = (columns < D) & (c < W - 1)
    begin = n * 0
    length = begin + T
    if PACKED:
        begin = tl.load(cu + n).to(tl.int64)
        length = tl.load(cu + n + 1).to(tl.int64) - begin
    else:
        x += n * xb
    t = length - (W - 1) + c
    own = tl.load(x + (begin + t) * xt + wide, mask=inside & (t >= 0), other=0.0).to(tl.float32)
    if START:
        at = start + n * sn + wide * sd + (length + c) * sc
        own += tl.load(at, mask=inside & (t < 0), other=0.0).to(tl.float32)
    tl.store(end + (n * D + wide) * (W - 1) + c, own, mask=inside)


@triton.jit
def column_at(state, columns, k, sd, sc):
    """Where column ``k`` of a slot lies."""
    return state + columns.to(tl.int64) * sd + tl.cast(k, tl.int64) * sc


@triton.jit
def held_columns(state, columns, inside, sd, sc, L: tl.constexpr):
    """The ``L`` columns of a slot, float32."""
    held = ()
    for k in tl.static_range(L):
        column = tl.load(column_at(state, columns, k, sd, sc), mask=inside, other=0.0)
        held += (column.to(tl.float32),)
    return held


@triton.jit
def hold_columns(held, state, columns, inside, sd, sc, L: tl.constexpr):
    """Overwrite the ``L`` columns of a slot."""
    for k in tl.static_range(L):
        tl.store(column_at(state, columns, k, sd, sc), held[k].to(state.dtype.element_ty), mask=inside)


@triton.jit
def shifted(state, x, first, D, L: tl.constexpr, BD: tl.constexpr):
    """A slot without gaps as one token leaves it, neighbours in memory, from channel ``first`` on; and where that lies.

    Each number is what lay behind it, but for the last of a channel, which is the token's.
    """
    i = tl.arange(0, BD * triton.next_power_of_2(L))
    inside = (i < BD * L) & (i < (D - first) * L)
    last = i % L == L - 1
    at = first.to(tl.int64) * L + i
    old = tl.load(state + at + 1, mask=inside & ~last, other=0.0)
    new = tl.load(x + first + i // L, mask=inside & last, other=0.0).to(tl.float32)
    return at, inside, tl.where(last, new.to(state.dtype.element_ty), old)


@triton.jit(do_not_specialize=["T", "P"])
def conv_tokens_fwd(
    x, weight, bias, state, slots, y, T, P, D, xb, xt, bd, sn, sd, sc,
    W: tl.constexpr, L: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr, BIAS: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """``y`` of a sequence's few tokens, which go on from its slot of ``state [P, D, L]`` and shift what that holds.

    ``SHIFT``: of one token, on slots without gaps, whose columns are then written as they lie in memory.
    """
    ND = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    b = (pid // ND).to(tl.int64)
    columns = pid % ND * BD + tl.arange(0, BD)
    inside = columns < D
    x += b * xb
    y += b * T * D
    slot = b
    if SLOTS:
        slot = tl.load(slots + b).to(tl.int64)
    if (slot < 0) | (slot >= P):
        clear(y, columns, 0, T, D, inside)
        return
    state += slot * sn
    taps = taps_of(weight, columns, inside, W)
    shift = bias_of(bias, columns, inside, bd, BIAS)
    held = held_columns(state, columns, inside, sd, sc, L)
    if SHIFT:
        at, there, window = shifted(state, x, pid % ND * BD, D, L, BD)
    for t in range(0, T):
        row = row_at(x, t, xt, columns, inside)
        step_fwd(y, t, D, row, held[L - W + 1 :], taps, shift, columns, inside, W, SILU)
        held += (row.to(tl.float32),)  # rounded once, when the window is written
        held = held[1:]
    tl.debug_barrier()  # all threads have read what they are about to write over
    if SHIFT:
        tl.store(state + at, window, mask=there)
    else:
        hold_columns(held, state, columns, inside, sd, sc, L)


# -- backward ----------------------------------------------------------------------------------------------------------


@triton.jit
def slope_times(dy, rows, taps, bias, W: tl.constexpr, SILU: tl.constexpr):
    """``dz`` of the last of ``W`` rows."""
    if SILU:
        z = convolved(rows, taps, bias, W)
        return dy * silu_slope(z, sigmoid(z))
    return dy


@triton.jit
def added(sums, dz, rows, W: tl.constexpr):
    """``dw`` so far, with ``dz_t ∘ x_{t-W+1+i}``."""
    result = ()
    for k in tl.static_range(W):
        result += (sums[k] + dz * rows[k],)
    return result


@triton.jit
def input_gradient(later, taps, W: tl.constexpr):
    """``dx_s`` from ``dz_s … dz_{s+W-1}``."""
    acc = taps[W - 1] * later[0]
    for j in tl.static_range(1, W):
        acc += taps[W - 1 - j] * later[j]
    return acc


@triton.jit
def last_input_gradient(later, taps, left, dfinal, fc, mask, W: tl.constexpr, FINAL: tl.constexpr):
    """``dx_s`` where only ``left`` of them may be of its sequence; ``dfinal`` is that of the sequence's final state."""
    acc = tl.zeros(later[0].shape, tl.float32)
    for j in tl.static_range(W):
        acc += tl.where(j < left, taps[W - 1 - j] * later[j], 0.0)
    if FINAL:
        at = dfinal + tl.cast(W - 1 - left, tl.int64) * fc
        acc += tl.load(at, mask=mask & (left < W), other=0.0).to(tl.float32)
    return acc


@triton.jit
def step_bwd(x_t, dy_t, rows, later, taps, shift, W: tl.constexpr, SILU: tl.constexpr):
    """``dz_t``; the last ``W`` rows with ``x_t``, and the last ``W`` of ``dz`` with it."""
    rows += (x_t.to(tl.float32),)
    dz = slope_times(dy_t.to(tl.float32), rows, taps, shift, W, SILU)
    later += (dz,)
    return dz, rows, later


@triton.jit
def keep_row(p, t, D, row, columns, mask):
    """Store row ``t`` of an array without gaps."""
    tl.store(p + tl.cast(t, tl.int64) * D + columns, row.to(p.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "PIECE"])
def conv_gradients_bwd(
    x, dy, weight, bias, start, dfinal, dx, parts, cu, T, N, D, PIECE, xb, xt, yb, yt, bd, sn, sd, sc, fn, fd, fc,
    W: tl.constexpr, BD: tl.constexpr, UNROLL: tl.constexpr,
    SILU: tl.constexpr, BIAS: tl.constexpr, START: tl.constexpr, FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """``dx`` of one piece, and its part of ``dw`` and ``db``: ``[W + BIAS, BD]`` of ``parts [pieces, W + BIAS, D]``.

    Token ``t`` of sequence ``n`` gives ``dz_t``, with which ``dx`` of ``s = t - W + 1``, of sequence ``m``, is complete: a walk
    goes ``W - 1 ≤ UNROLL`` tokens past its piece, and its first ``dx`` are another's.
    """
    b, t0, piece, columns = piece_of(T, D, PIECE, BD)
    inside = columns < D
    x += b.to(tl.int64) * xb
    dy += b.to(tl.int64) * yb
    dx += b.to(tl.int64) * T * D
    total = filled(cu, T, N, PACKED)
    stop = tl.minimum(t0 + PIECE, total)
    dtaps = zero_rows(columns, W)
    dshift = tl.zeros((BD,), tl.float32)
    if t0 < stop:
        n, begin, end_n = sequence_of(cu, T, N, b, t0, PACKED)
        m = n
        end_m = end_n
        taps = taps_of(weight, columns, inside, W)
        shift = bias_of(bias, columns, inside, bd, BIAS)
        rows = rows_before(t0, begin, x, xt, start, n, sn, sd, sc, columns, inside, W, START)
        later = zero_rows(columns, W - 1)
        past = tl.minimum(stop + W - 1, total)
        new = rows_at(x, t0, past, xt, columns, inside, UNROLL)
        dnew = rows_at(dy, t0, past, yt, columns, inside, UNROLL)
        for block in range(t0, stop + W - 1, UNROLL):
            ahead = rows_at(x, block + UNROLL, past, xt, columns, inside, UNROLL)
            dahead = rows_at(dy, block + UNROLL, past, yt, columns, inside, UNROLL)
            if block + UNROLL <= tl.minimum(stop, end_m):
                for u in tl.static_range(UNROLL):
                    dz, rows, later = step_bwd(new[u], dnew[u], rows, later, taps, shift, W, SILU)
                    dtaps = added(dtaps, dz, rows, W)
                    dshift += dz
                    s = block + u - (W - 1)
                    keep_row(dx, s, D, input_gradient(later, taps, W), columns, inside & (s >= t0))
                    rows = rows[1:]
                    later = later[1:]
            elif (block == stop) & (stop + W - 1 <= end_m):
                for u in tl.static_range(W - 1):
                    _, rows, later = step_bwd(new[u], dnew[u], rows, later, taps, shift, W, SILU)
                    keep_row(dx, block + u - (W - 1), D, input_gradient(later, taps, W), columns, inside)
                    rows = rows[1:]
                    later = later[1:]
            else:
                for t in range(block, tl.minimum(block + UNROLL, stop + W - 1)):
                    s = t - (W - 1)
                    mine = (s >= t0) & (s < stop)
                    if PACKED:
                        if (t == end_n) & (t < total):
                            n, end_n = sequence_after(cu, n, end_n, t)
                            rows = rows_before(t, t, x, xt, start, n, sn, sd, sc, columns, inside, W, START)
                        if mine & (s >= end_m):
                            m, end_m = sequence_after(cu, m, end_m, s)
                    there = inside & (t < total)
                    x_t, dy_t = row_at(x, t, xt, columns, there), row_at(dy, t, yt, columns, there)
                    dz, rows, later = step_bwd(x_t, dy_t, rows, later, taps, shift, W, SILU)
                    own = tl.where(t < stop, dz, 0.0)
                    dtaps = added(dtaps, own, rows, W)
                    dshift += own
                    tail = dfinal
                    if FINAL:
                        tail = dfinal + m.to(tl.int64) * fn + columns.to(tl.int64) * fd
                    grad = last_input_gradient(later, taps, end_m - s, tail, fc, inside & mine, W, FINAL)
                    keep_row(dx, s, D, grad, columns, inside & mine)
                    rows = rows[1:]
                    later = later[1:]
            new = ahead
            dnew = dahead
    if PACKED:
        clear(dx, columns, tl.maximum(stop, t0), tl.minimum(t0 + PIECE, T), D, inside)
    parts += piece.to(tl.int64) * (W + BIAS) * D + columns
    for k in tl.static_range(W):
        tl.store(parts + k * D, dtaps[k], mask=inside)
    if BIAS:
        tl.store(parts + W * D, dshift, mask=inside)


@triton.jit(do_not_specialize=["T", "N"])
def conv_initial_state_bwd(
    x, dy, weight, bias, start, dfinal, dstart, cu, T, N, D, xb, xt, yb, yt, bd, sn, sd, sc, fn, fd, fc,
    W: tl.constexpr, BD: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, FINAL: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The gradient of one sequence's initial state, ``[N, D, W-1]``: column ``c`` is read by the tokens ``t ≤ c``."""
    ND = tl.cdiv(D, BD)
    pid = tl.program_id(0)
    n = pid // ND
    columns = pid % ND * BD + tl.arange(0, BD)
    inside = columns < D
    wide = columns.to(tl.int64)
    b = n
    if PACKED:
        b = n * 0
    begin = n * 0
    end = begin + T
    if PACKED:
        begin = tl.load(cu + n).to(tl.int32)
        end = tl.load(cu + n + 1).to(tl.int32)
    x += b.to(tl.int64) * xb
    dy += b.to(tl.int64) * yb
    taps = taps_of(weight, columns, inside, W)
    shift = bias_of(bias, columns, inside, bd, BIAS)
    rows = rows_before(begin, begin, x, xt, start, n, sn, sd, sc, columns, inside, W, True)
    new = rows_at(x, begin, end, xt, columns, inside, W - 1)
    dnew = rows_at(dy, begin, end, yt, columns, inside, W - 1)
    dz = ()
    for t in tl.static_range(W - 1):
        rows += (new[t].to(tl.float32),)
        own = slope_times(dnew[t].to(tl.float32), rows, taps, shift, W, SILU)
        dz += (tl.where(begin + t < end, own, 0.0),)
        rows = rows[1:]
    dstart += (n.to(tl.int64) * D + wide) * (W - 1)
    for c in tl.static_range(W - 1):
        acc = tl.zeros((BD,), tl.float32)
        for t in tl.static_range(c + 1):
            acc += taps[c - t] * dz[t]
        if FINAL:
            kept = c - (end - begin)  # a column that the sequence is too short to shift out
            at = dfinal + n.to(tl.int64) * fn + wide * fd + tl.cast(kept, tl.int64) * fc
            acc += tl.load(at, mask=inside & (kept >= 0), other=0.0).to(tl.float32)
        tl.store(dstart + c, acc.to(dstart.dtype.element_ty), mask=inside)
