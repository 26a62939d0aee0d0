"""The functions of ``linattn.integrations.causal_conv1d`` against the convolution written out, in the package's layouts."""

import linattn
import pytest
import torch
from linattn.integrations.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from mamba_references import close, convolution, pieces

B, D, L, W = 2, 6, 13, 4


def layouts():
    """``[B, D, L]`` of values next to each other in time, in channels, and as columns of something wider."""
    return {
        "time": lambda: torch.randn(B, D, L),
        "channels": lambda: torch.randn(B, L, D).mT,
        "columns": lambda: torch.randn(B, L, D + 9)[..., 4 : 4 + D].mT,
    }


@pytest.fixture(params=layouts())
def x(request):
    return layouts()[request.param]()


@pytest.fixture
def weight():
    return torch.randn(D, W)


@pytest.fixture
def bias():
    return torch.randn(D)


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_the_convolution_is_that_of_the_paper_in_every_layout(x, weight, bias, activation):
    expected = torch.stack([convolution(row, weight, bias, activation=activation is not None) for row in x])
    y = causal_conv1d_fn(x, weight, bias, activation=activation)
    assert y.shape == x.shape
    close(y, expected)


def test_states_go_in_and_come_out(x, weight, bias):
    before = torch.randn(B, W - 1, D).mT
    expected = torch.stack([convolution(row, weight, bias, start) for row, start in zip(x, before, strict=True)])
    y, final = causal_conv1d_fn(x, weight, bias, None, before, True, None, "silu")
    close(y, expected)
    close(final, x[..., -(W - 1) :])
    kept = torch.empty(B, W - 1, D).mT
    y, final = causal_conv1d_fn(x, weight, bias, initial_states=before, return_final_states=True, final_states_out=kept)
    assert final is kept
    close(kept, x[..., -(W - 1) :])


def test_a_short_sequence_leaves_some_of_its_initial_state(weight):
    x, before = torch.randn(B, D, 1), torch.randn(B, D, W - 1)
    _, final = causal_conv1d_fn(x, weight, initial_states=before, return_final_states=True)
    close(final, torch.cat([before[..., 1:], x], -1))


@pytest.mark.parametrize("with_state", [False, True], ids=["from zeros", "from a state"])
def test_no_tap_reaches_over_a_change_of_seq_idx_and_padding_gives_zeros(x, weight, bias, with_state):
    seq_idx = torch.tensor([[0] * 2 + [1] * 7 + [2] * 1 + [5] * 3, [4] * 9 + [7] * 2 + [-1] * 2]).int()
    before = torch.randn(B, D, W - 1) if with_state else None
    x = x.clone()
    x[1, :, -2:] = 1e4  # padding may hold anything
    given = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias, before)]
    y = causal_conv1d_fn(given[0], given[1], given[2], seq_idx=seq_idx, initial_states=given[3], activation="silu")

    wanted = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias, before)]
    expected = torch.zeros_like(y)
    for b in range(B):
        for i, (begin, end, number) in enumerate(pieces(seq_idx[b])):
            if number >= 0:
                start = wanted[3][b] if with_state and i == 0 else None
                expected[b, :, begin:end] = convolution(wanted[0][b, :, begin:end], wanted[1], wanted[2], start)
    close(y, expected)

    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy)
    for got, want in zip(given, wanted, strict=True):
        if got is not None:
            close(got.grad, want.grad)


def test_seq_idx_stays_on_its_device(weight):
    def call(x, seq_idx):
        return causal_conv1d_fn(x, weight, seq_idx=seq_idx, activation="silu")

    x, seq_idx = torch.randn(B, D, L), torch.zeros(B, L, dtype=torch.int32)
    compiled = torch.compile(call, fullgraph=True, backend="eager")  # a value that is read breaks the graph
    close(compiled(x, seq_idx), call(x, seq_idx))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("S", [W - 1, W, W + 3])
@pytest.mark.parametrize("circular", [False, True], ids=["shifted", "circular"])
@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "with a gradient"])
def test_updates_go_on_from_the_state(weight, bias, tokens, S, circular, gradient):
    seen, x = torch.randn(B, D, S), torch.randn(B, tokens, D).mT.requires_grad_(gradient)
    count = torch.tensor([S + 1, 2 * S + 2]).int()
    state = seen.clone()
    if circular:
        state = torch.stack([row.roll(int(n) % S, -1) for row, n in zip(seen, count, strict=True)])
    y = causal_conv1d_update(x, state, weight, bias, "silu", count if circular else None)
    expected = [convolution(row, weight, bias, start[:, S - W + 1 :]) for row, start in zip(x, seen, strict=True)]
    close(y, torch.stack(expected))
    after = torch.cat([seen, x], -1)[..., -S:]
    if circular:
        after = torch.stack([row.roll((int(n) + tokens) % S, -1) for row, n in zip(after, count, strict=True)])
    close(state, after)
    assert y.requires_grad is gradient


def test_a_token_without_a_time_dimension_has_none_in_the_result(weight):
    state, x = torch.zeros(B, D, W), torch.randn(B, D)
    y = causal_conv1d_update(x, state, weight)
    assert y.shape == (B, D)
    close(y, x * weight[:, -1])


@pytest.mark.parametrize("how", ["in place", "circular", "with a gradient"])
def test_states_in_a_pool_are_found_by_index_and_padding_writes_nothing(weight, bias, how):
    pool = torch.randn(5, D, W)
    before, x = pool.clone(), torch.randn(3, D, 1).requires_grad_(how == "with a gradient")
    indices = torch.tensor([3, -1, 0]).int()
    count = torch.tensor([W, W, W]).int() if how == "circular" else None
    y = causal_conv1d_update(x, pool, weight, bias, "silu", count, indices)
    assert y[1].abs().sum() == 0
    for row, slot in ((0, 3), (2, 0)):
        close(y[row], convolution(x[row], weight, bias, before[slot][:, 1:]))
    assert torch.equal(pool[[1, 2, 4]], before[[1, 2, 4]])
    nothing = pool.clone()
    causal_conv1d_update(x, pool, weight, bias, "silu", count, torch.full((3,), -1).int())
    assert torch.equal(pool, nothing)


def test_a_gradient_flows_through_the_state_from_call_to_call(weight):
    x = torch.randn(1, D, 2, dtype=torch.float64, requires_grad=True)
    state = torch.zeros(1, D, W, dtype=torch.float64)
    first = causal_conv1d_update(x[..., :1], state, weight)
    second = causal_conv1d_update(x[..., 1:], state, weight)
    grads = torch.autograd.grad((first + second).sum(), x)[0]
    close(grads[0], torch.stack([weight[:, -1] + weight[:, -2], weight[:, -1]], 1))


def test_states_of_packed_sequences_are_their_last_inputs():
    x, offsets = torch.randn(9, D), torch.tensor([0, 5, 5, 7, 9]).int()
    states = causal_conv1d_varlen_states(x, offsets, 3)
    assert states.shape == (4, D, 3)
    zeros = torch.zeros(1, D)
    close(states[0], x[2:5].mT)
    close(states[1], torch.zeros(D, 3))
    close(states[2], torch.cat([zeros, x[5:7]]).mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_and_states_have_the_dtype_of_the_inputs(weight, dtype):
    x = torch.randn(B, D, L).to(dtype)
    y, final = causal_conv1d_fn(x, weight, return_final_states=True)
    assert y.dtype == final.dtype == dtype
    assert causal_conv1d_update(x[..., 0], final, weight).dtype == dtype


def test_bad_input_is_named(weight):
    x = torch.randn(B, D, L)
    with pytest.raises(linattn.errors.OptionError) as error:
        causal_conv1d_fn(x, weight, activation="gelu")
    assert str(error.value) == "causal_conv1d_fn: activation must be None, 'silu' or 'swish', got 'gelu'"
    with pytest.raises(linattn.errors.OptionError) as error:
        causal_conv1d_fn(x, weight, seq_idx=torch.zeros(B, L).int(), return_final_states=True)
    assert str(error.value) == "causal_conv1d_fn: return_final_states has no meaning beside seq_idx: leave out one of them"
    with pytest.raises(linattn.errors.OptionError) as error:
        causal_conv1d_update(x, torch.zeros(B, D, W), weight, activation="relu")
    assert str(error.value) == "causal_conv1d_update: activation must be None, 'silu' or 'swish', got 'relu'"
