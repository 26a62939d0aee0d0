"""Short convolutions in the interpreter, forward, backward and decoding, against the formulas in float64 NumPy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from linattn_backends.triton.conv import config, decode_short_conv, op, short_conv
from linattn_backends.triton.runtime import launch
from linattn_backends.triton.runtime.device import standing_in
from linattn_backends.triton.runtime.precompile import Rehearsal, without_memory

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # the interpreter truncates to bfloat16
PACKED = [0, 0, 3, 4, 4, 6, 40, 41, 77]


def exact(x):
    return None if x is None else x.detach().double().numpy()


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def sequences(x, cu):
    """``(row, begin, end)`` of each sequence."""
    B, T = x.shape[:2]
    return [(b, 0, T) for b in range(B)] if cu is None else [(0, *bounds) for bounds in pairwise(cu)]


def reference(x, weight, bias, start, cu, silu, dy=None, dfinal=None):
    """``y`` and final states; with cotangents, the gradients of ``x, weight, bias, initial_state`` instead."""
    D, W = weight.shape
    y, finals = np.zeros_like(x), []
    dx, dweight, dbias, dstart = np.zeros_like(x), np.zeros_like(weight), np.zeros(D), []
    for n, (b, begin, end) in enumerate(sequences(x, cu)):
        before = np.zeros((W - 1, D)) if start is None else start[n].T
        full, L = np.concatenate((before, x[b, begin:end])), end - begin
        z = sum(weight[:, i] * full[i : i + L] for i in range(W)) + (0 if bias is None else bias)
        y[b, begin:end] = z * sigmoid(z) if silu else z
        finals.append(full[L:].T)
        if dy is None:
            continue
        dz = dy[b, begin:end]
        if silu:
            dz = dz * (sigmoid(z) + z * sigmoid(z) * (1 - sigmoid(z)))
        dfull = np.zeros_like(full)
        for i in range(W):
            dfull[i : i + L] += weight[:, i] * dz
            dweight[:, i] += (dz * full[i : i + L]).sum(0)
        dbias += dz.sum(0)
        if dfinal is not None:
            dfull[L:] += dfinal[n].T
        dx[b, begin:end] = dfull[W - 1 :]
        dstart.append(dfull[: W - 1].T)
    if dy is None:
        return y, np.stack(finals)
    return [g for g, x in ((dx, x), (dweight, weight), (dbias, bias), (np.stack(dstart), start)) if x is not None]


def draw(B=1, T=77, D=5, W=4, bias=True, state=True, cu=None, dtype=torch.float32, other=torch.float32, seed=0):
    """Seeded ``x, weight, bias, initial_state, cu_seqlens``; ``other`` is the dtype of all but ``x``."""
    torch.manual_seed(seed)
    N = B if cu is None else len(cu) - 1
    x, weight = torch.randn(B, T, D).to(dtype), torch.randn(D, W).to(other)
    shift, start = torch.randn(D).to(other), torch.randn(N, D, W - 1).to(other)
    return x, weight, shift if bias else None, start if state else None, None if cu is None else torch.tensor(cu)


def run(given, silu=True, final=True):
    x, weight, bias, start, cu = given
    activation = "silu" if silu else None
    return short_conv(
        x, weight, bias, activation=activation, initial_state=start, output_final_state=final, cu_seqlens=cu
    )  # fmt: skip


def floats(given):
    return [x for x in given[:4] if x is not None]


def error(found, wanted, dtype=None):
    """The largest one as a part of the largest number, in units of what ``found``'s dtype, or a coarser one, allows."""
    assert found.shape == wanted.shape
    if wanted.size == 0:
        return 0.0
    tolerance = max(TOLERANCE[found.dtype], TOLERANCE[dtype or found.dtype])
    return np.abs(exact(found) - wanted).max() / max(np.abs(wanted).max(), 1e-30) / tolerance


def compare(given, silu=True, final=True, through_outputs=True):
    """Outputs, final states, every gradient; and inputs stay as they were."""
    inputs = floats(given)
    before = [x.clone() for x in inputs]
    for x in inputs:
        x.requires_grad_()
    y, end = run(given, silu, final)
    cu = None if given[4] is None else given[4].tolist()
    arrays = [exact(x) for x in given[:4]]
    wanted_y, wanted_end = reference(*arrays, cu, silu)
    errors = [error(y, wanted_y)]
    assert y.dtype == given[0].dtype
    dy = torch.randn(y.shape).to(y.dtype) * through_outputs
    dend = torch.randn(wanted_end.shape)
    if final:
        assert end.dtype == torch.float32
        errors.append(error(end, wanted_end))
    else:
        assert end is None
    outputs, cotangents = ((y, end), (dy, dend)) if final else ((y,), (dy,))
    if not through_outputs:
        outputs, cotangents = (end,), (dend,)
    found = torch.autograd.grad(outputs, inputs, cotangents)
    wanted = reference(*arrays, cu, silu, exact(dy), exact(dend) if final else None)
    for x, gradient, expected in zip(inputs, found, wanted, strict=True):
        assert gradient.dtype == x.dtype
        errors.append(error(gradient, expected, y.dtype))
    assert max(errors) < 1, errors
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize(("W", "cu"), [*((W, PACKED) for W in range(1, 9)), (1, None), (8, None)])
def test_widths(W, cu):
    compare(draw(B=1, T=77, D=3, W=W, cu=cu))


@pytest.mark.parametrize("cu", [None, PACKED])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("bias", "state"), [(False, False), (True, False), (False, True)])
def test_what_is_left_out(bias, state, silu, cu):
    compare(draw(B=1 if cu else 2, T=77 if cu else 37, bias=bias, state=state, cu=cu), silu, final=state)


@pytest.mark.parametrize("T", [1, 2, 3, 7, 8, 9, 31, 32, 33, 129, 131])
def test_lengths(T):
    compare(draw(B=2, T=T, D=2))


def test_a_long_sequence_has_several_pieces():
    compare(draw(T=300, D=2, cu=[0, 127, 130, 258, 300]))


@pytest.mark.parametrize("D", [1, 33, 300])
def test_channels(D):
    compare(draw(B=2, T=9, D=D))


@pytest.mark.parametrize("W", [4, 8])
def test_sequences_shorter_than_the_filter(W):
    """Their final state holds columns of the initial one too."""
    compare(draw(T=17, W=W, cu=[0, 1, 3, 3, 6, 10, 15, 15, 17]))


def test_many_sequences():
    """More than one look at the bounds finds a piece's sequence."""
    torch.manual_seed(3)
    cu = sorted(torch.randint(0, 161, (1100,)).tolist())
    compare(draw(T=160, D=1, W=3, cu=[0, *cu, 160], state=False), final=False)


@pytest.mark.parametrize("cu", [[0, 20, 20, 41], [0, 0], [0, 64, 64]])
def test_tokens_of_no_sequence(cu):
    """Whatever they hold: their rows are zero, and nothing of them reaches a gradient."""
    given = draw(T=77, cu=cu)
    given[0][:, cu[-1] :] = 0
    compare(given)
    given[0].data[:, cu[-1] :] = torch.nan
    y, _ = run(given)
    dy = torch.ones_like(y)
    dy[:, cu[-1] :] = torch.nan
    grads = torch.autograd.grad(y, floats(given), dy)
    assert (y[:, cu[-1] :] == 0).all()
    assert (grads[0][:, cu[-1] :] == 0).all()
    assert all(x.isfinite().all() for x in grads)


def test_no_tokens():
    given = draw(B=2, T=0)
    compare(given)
    assert torch.equal(run(given)[1], given[3])
    compare(draw(T=0, cu=[0, 0, 0], state=False))


def test_no_sequences():
    y, end = run(draw(T=9, cu=[0]))
    assert torch.equal(y, torch.zeros(1, 9, 5))
    assert end.shape == (0, 5, 3)


def test_through_the_final_state_alone():
    compare(draw(T=12, cu=[0, 2, 12]), through_outputs=False)


@pytest.mark.parametrize("cu", [None, PACKED])
def test_a_sequence_in_two_parts(cu):
    """The second goes on from the first one's final state: the same bits."""
    given = draw(T=77, cu=cu)
    x, weight, bias, start, _ = given
    whole, end = run(given)
    bounds = sequences(x, cu)
    for n, (_, first, last) in enumerate(bounds):
        half = (first + last) // 2
        state, parts = start[n : n + 1], []
        for part in (x[:, first:half], x[:, half:last]):
            y, state = run((part, weight, bias, state, None))
            parts.append(y)
        assert torch.equal(torch.cat(parts, 1), whole[:, first:last])
        assert torch.equal(state, end[n : n + 1])


def test_twice_the_same_bits():
    given = draw(T=300, D=3, cu=[0, 5, 170, 300])
    for x in floats(given):
        x.requires_grad_()
    results = []
    for _ in range(2):
        y, end = run(given)
        results.append((y, end, *torch.autograd.grad((y.sum(), end.sum()), floats(given))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype, other):
    compare(draw(T=40, cu=[0, 2, 40], dtype=dtype, other=other))


def test_sixteen_bit_parameters_of_wide_inputs():
    given = draw(T=20, other=torch.bfloat16)
    for x in floats(given):
        x.requires_grad_()
    y, _ = run(given)
    wanted, _ = reference(*(exact(x) for x in given[:4]), None, True)
    assert error(y, wanted) < 1


def test_strides():
    x, weight, bias, start, cu = draw(B=2, T=40, D=6)
    strided = (
        x.transpose(1, 2).contiguous().transpose(1, 2), weight.t().contiguous().t(), torch.stack((bias, bias), 1)[:, 0],
        start.transpose(1, 2).contiguous().transpose(1, 2), cu,
    )  # fmt: skip
    assert not any(x.is_contiguous() for x in strided[:4])
    compare(strided)


def test_part_of_a_wide_projection():
    torch.manual_seed(0)
    wide = torch.randn(2, 40, 20, requires_grad=True)
    _, weight, bias, start, _ = draw(B=2, D=6)
    y, _ = run((wide[..., 7:13], weight, bias, start, None))
    (gradient,) = torch.autograd.grad(y, wide, torch.ones(2, 40, 12)[..., ::2])
    arrays = [exact(x) for x in (wide[..., 7:13], weight, bias, start)]
    assert error(y, reference(*arrays, None, True)[0]) < 1
    wanted = reference(*arrays, None, True, np.ones((2, 40, 6)))[0]
    assert error(gradient[..., 7:13], wanted) < 1


def test_rows_that_lie_past_32_bits():
    """Memory is never touched but where elements are, so little of it is real."""
    far = 1 << 30
    x = torch.empty(3 * far + 4, dtype=torch.bfloat16).as_strided((1, 4, 3), (0, far, 1))
    x.copy_(torch.randn(1, 4, 3))
    _, weight, *_ = draw(D=3)
    near = x.clone()
    assert torch.equal(run((x, weight, None, None, None))[0], run((near, weight, None, None, None))[0])


@pytest.fixture
def poisoned(monkeypatch):
    """What is made without being filled holds NaN."""
    empty = torch.empty

    def filled(*args, **options):
        x = empty(*args, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("cu", [None, [0, 3, 3, 50]])
def test_every_output_is_written(cu):
    compare(draw(T=77, D=37, cu=cu))


def test_nothing_is_read_on_the_host():
    """Arrays without data give the same launches; none needs to know where sequences lie."""
    x, weight, bias, start, cu = map(without_memory, draw(T=77, cu=PACKED))
    stage = Rehearsal(torch.device("cpu"))
    with standing_in(stage):
        y, end = op.computed(x, weight, bias, start, cu, True, True)
        op.backward(op.Convolution.of(x, weight, bias, start, cu, True), y, end)
    assert [kernel.__name__ for kernel, *_ in stage.launches] == [
        "conv_outputs_fwd", "conv_final_state_fwd", "conv_gradients_bwd", "column_sums", "conv_initial_state_bwd",
    ]  # fmt: skip


@pytest.mark.parametrize("cu", [None, [0, 3, 7]])
def test_opcheck(cu):
    given = draw(T=7, D=3, cu=cu)
    for x in floats(given):
        x.requires_grad_()
    torch.library.opcheck(op.conv, (*given, True, True))
    y, end = run([None if x is None else x.detach() for x in given])
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(op.conv_backward, (y, end, *(x if x is None else x.detach() for x in given), True), test_utils=tests)


def test_transforms():
    """One call for each row under ``vmap``, gradients too."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 2, 9, 4), torch.randn(4, 3), torch.randn(4)

    def loss(x, weight, bias):
        return short_conv(x, weight, bias, activation="silu")[0].square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, None, None))(x, weight, bias)
    alone = [torch.func.grad(loss, (0, 1, 2))(row, weight, bias) for row in x]
    for found, expected in zip(mapped, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected))


def test_compiles_without_a_break():
    torch._dynamo.reset()
    given = draw(T=9, cu=[0, 4, 9])
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(given)
    for x, y in zip(found, run(given), strict=True):
        assert torch.equal(x, y)


def test_a_failed_launch_names_what_failed(monkeypatch):
    def broken(*_):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(launch, "start", broken)
    with pytest.raises(RuntimeError, match="out of resources") as caught:
        run(draw(T=5))
    (note,) = caught.value.__notes__
    assert note.startswith("linattn triton: kernel conv_outputs_fwd of short_conv failed on")


# -- decoding ----------------------------------------------------------------------------------------------------------


def pool_of(P=5, D=6, L=3, layout="dense", dtype=torch.float32):
    """A pool ``[P, D, L]`` that lies in one of several ways."""
    pool = torch.randn(P, D, L).to(dtype)
    if layout == "channels last":
        return pool.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "gaps":
        return torch.stack((pool, torch.full_like(pool, 7)), -1)[..., 0]
    return pool


def check_decoding(x, weight, bias, pool, slots=None, silu=True):
    """Outputs, the columns of the slots listed, and every other slot."""
    before, activation = pool.clone(), "silu" if silu else None
    indices = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    y = decode_short_conv(x, weight, bias, state=pool, state_indices=indices, activation=activation)
    (B, T), (P, _, L), W = x.shape[:2], pool.shape, weight.shape[1]
    wanted = before.clone()
    for b, slot in enumerate(range(B) if slots is None else slots):
        if not 0 <= slot < P:
            assert (y[b] == 0).all()
            continue
        start = exact(before[slot : slot + 1, :, L - W + 1 :])
        out, _ = reference(exact(x[b : b + 1]), exact(weight), exact(bias), start, None, silu)
        assert error(y[b : b + 1], out) < 1
        wanted[slot] = torch.cat((before[slot], x[b].t().to(pool.dtype)), 1)[:, T:]
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("layout", ["dense", "channels last", "gaps"])
@pytest.mark.parametrize("T", [1, 2, 5])
@pytest.mark.parametrize("L", [3, 4, 7, 8])
def test_decoding_in_place(L, T, layout):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, T, 6), torch.randn(6, 4), torch.randn(6)
    check_decoding(x, weight, bias, pool_of(L=L, layout=layout), [4, -1, 1])


@pytest.mark.parametrize("W", range(1, 9))
def test_decoding_widths(W):
    torch.manual_seed(0)
    check_decoding(torch.randn(2, 2, 6), torch.randn(6, W), None, pool_of(L=W - 1), silu=False)


def test_decoding_many_channels():
    torch.manual_seed(0)
    check_decoding(torch.randn(2, 1, 300), torch.randn(300, 4), torch.randn(300), pool_of(D=300), [1, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_sixteen_bits(dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 2, 6).bfloat16()
    check_decoding(x, torch.randn(6, 4), torch.randn(6), pool_of(dtype=dtype), [1, 0])


def test_decoding_goes_on_like_the_whole_sequence():
    x, weight, bias, start, _ = draw(B=2, T=9)
    whole, end = run((x, weight, bias, start, None))
    pool = start.clone()
    parts = [x[:, :1], x[:, 1:4], x[:, 4:]]
    found = [decode_short_conv(part, weight, bias, state=pool, activation="silu") for part in parts]
    assert torch.equal(torch.cat(found, 1), whole)
    assert torch.equal(pool, end)


def test_slots_out_of_range_are_padding():
    """On a device nobody can look: no memory outside the pool is touched."""
    torch.manual_seed(0)
    check_decoding(torch.randn(2, 1, 6), torch.randn(6, 4), None, pool_of(), [5, 1000])


def test_decoding_a_pool_that_reaches_past_32_bits():
    far = 1 << 30
    pool = torch.empty(2 * far + 16, dtype=torch.bfloat16).as_strided((1, 4, 3), (0, 1, far))
    start, x, weight = torch.randn(1, 4, 3).bfloat16(), torch.randn(1, 2, 4), torch.randn(4, 4)
    pool.copy_(start)
    near = start.clone()
    assert torch.equal(decode_short_conv(x, weight, state=pool), decode_short_conv(x, weight, state=near))
    assert torch.equal(pool, near)


def test_opcheck_decoding():
    torch.library.opcheck(op.decode, (torch.randn(2, 1, 6), torch.randn(6, 4), None, pool_of(), torch.tensor([1, -1]), True))


@pytest.mark.parametrize("slots", [None, [[1, -1], [0, 2]]])
def test_decoding_under_vmap(slots):
    torch.manual_seed(0)
    x, weight, pools = torch.randn(2, 2, 1, 6), torch.randn(6, 4), torch.randn(3, 2, 6, 3)
    indices, separate, expected = None if slots is None else torch.tensor(slots), pools.clone(), []
    for i in range(2):
        given = dict(state=separate[:, i], state_indices=None if indices is None else indices[i])
        expected.append(decode_short_conv(x[i], weight, **given))

    def one(x, state, indices):
        return decode_short_conv(x, weight, state=state, state_indices=indices)

    found = torch.func.vmap(one, in_dims=(0, 1, None if slots is None else 0))(x, pools, indices)
    assert torch.equal(found, torch.stack(expected))
    assert torch.equal(pools, separate)
    with pytest.raises(RuntimeError, match="vmap of decode_short_conv needs state mapped as well"):
        torch.func.vmap(one, in_dims=(0, None, None))(x, pools[:, 0], None)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("W", [2, 4, 5, 8])
@pytest.mark.parametrize(("B", "T", "D"), [(4, 4096, 4096), (1, 32768, 2048), (8, 2048, 8192), (3, 5000, 6144)])
def test_pieces_fill_rounds_of_a_device(B, T, D, W, backward):
    """What runs last keeps nearly all of an H200 busy."""
    tile = config.walk_tile(B, T, D, W, 2, 132, backward)
    rounds = B * -(-T // tile.piece) * -(-D // tile.BD) / (config.RESIDENT[backward][W - 1] * 132)
    assert rounds > 0.8 * -(-rounds // 1)
    assert tile.piece % tile.unroll == 0


def test_nothing_is_cut_into_pieces_of_something():
    assert [config.walk_tile(*sizes, 4, 2, 132, True).piece for sizes in ((0, 5, 8), (2, 0, 8), (1, 1, 1))] == [32] * 3
