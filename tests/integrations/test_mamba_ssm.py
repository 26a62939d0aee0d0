"""The functions of ``linattn.integrations.mamba_ssm`` against Mamba-2's recurrence written out, in the package's layouts."""

import math

import linattn
import pytest
import torch
from linattn.integrations import mamba_ssm
from linattn.integrations.mamba_ssm import (
    RMSNormGated,
    mamba_chunk_scan,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    rmsnorm_fn,
    selective_state_update,
)
from mamba_references import close, convolution, gated_norm, pieces, scan, silu, steps

B, L, H, P, G, N, W = 2, 19, 4, 6, 2, 5, 4


def arrays(dtype=torch.float32):
    """Arguments of a scan, by name."""
    return dict(
        x=torch.randn(B, L, H, P, dtype=dtype),
        dt=torch.randn(B, L, H, dtype=dtype) - 1,
        A=-torch.rand(H) - 0.2,
        B=torch.randn(B, L, G, N, dtype=dtype),
        C=torch.randn(B, L, G, N, dtype=dtype),
    )


def expected_scan(given, D=None, z=None, dt_bias=None, softplus=True, limit=(0.0, math.inf), start=None, seq_idx=None):
    """``(y, final states)``, a sequence at a time."""
    delta = steps(given["dt"], dt_bias, softplus, limit)
    ys, finals = [], []
    for b in range(given["x"].shape[0]):
        parts = [(0, given["x"].shape[1], 0)] if seq_idx is None else pieces(seq_idx[b])
        row = []
        for begin, end, number in parts:
            state = start[b] if start is not None and begin == 0 and number == 0 else None
            x, B_, C_ = (given[name][b, begin:end] for name in ("x", "B", "C"))
            gate = None if z is None else z[b, begin:end]
            y, final = scan(x, delta[b, begin:end], given["A"], B_, C_, D, gate, state)
            row.append(y)
        ys.append(torch.cat(row))
        finals.append(final)
    return torch.stack(ys), torch.stack(finals)


OPTIONS = {
    "plain": {},
    "skip": dict(D=(H,)),
    "wide skip": dict(D=(H, P)),
    "gate": dict(D=(H,), z=(B, L, H, P)),
    "bias": dict(dt_bias=(H,)),
    "state": dict(D=(H,), dt_bias=(H,), initial_states=(B, H, P, N)),
}


@pytest.mark.parametrize("seq_idx", [False, True], ids=["rows", "seq_idx"])
@pytest.mark.parametrize("shapes", OPTIONS.values(), ids=OPTIONS)
def test_a_scan_and_its_gradients_are_those_of_the_recurrence(shapes, seq_idx):
    given = {name: x.double().requires_grad_() for name, x in arrays().items()}
    extra = {name: torch.randn(shape).double().requires_grad_() for name, shape in shapes.items()}
    index = torch.tensor([[0] * 3 + [1] * 9 + [2] * 1 + [7] * 6, [0] * 19]).int() if seq_idx else None
    keywords = dict(dt_softplus=True, seq_idx=index, return_final_states=True)
    y, final = mamba_chunk_scan_combined(*given.values(), chunk_size=8, **extra, **keywords)

    wanted = {name: x.detach().clone().requires_grad_() for name, x in {**given, **extra}.items()}
    rest = {name: wanted.get(name) for name in ("D", "z", "dt_bias")}
    ey, efinal = expected_scan(wanted, **rest, start=wanted.get("initial_states"), seq_idx=index)
    close(y, ey)
    close(final, efinal)

    dy, dfinal = torch.randn_like(ey), torch.randn_like(efinal)
    torch.autograd.backward([y, final], [dy, dfinal])
    torch.autograd.backward([ey, efinal], [dy, dfinal])
    for name, x in {**given, **extra}.items():
        close(x.grad, wanted[name].grad)


def test_an_initial_state_is_of_sequence_zero():
    given, start = arrays(), torch.randn(B, H, P, N)
    index = torch.tensor([[3] * L, [0] * L]).int()
    y = mamba_chunk_scan_combined(*given.values(), 64, initial_states=start, seq_idx=index, dt_softplus=True)
    close(y, expected_scan(given, start=start, seq_idx=index)[0])


def test_steps_are_limited_as_asked():
    given = arrays()
    y = mamba_chunk_scan_combined(*given.values(), 64, dt_softplus=True, dt_limit=[0.2, 0.5])
    close(y, expected_scan(given, limit=(0.2, 0.5))[0])
    y = mamba_chunk_scan_combined(*given.values(), 64, dt_limit=(0.0, 0.5))
    close(y, expected_scan(given, softplus=False, limit=(0.0, 0.5))[0])


def test_states_after_every_sequence_of_a_pack():
    given = {name: x if name == "A" else x[:1] for name, x in arrays().items()}
    offsets = torch.tensor([0, 4, 5, L]).int()
    index = torch.tensor([[0] * 4 + [1] + [2] * (L - 5)]).int()
    start = torch.randn(1, H, P, N)
    keywords = dict(dt_softplus=True, cu_seqlens=offsets, seq_idx=index, initial_states=start)
    y, final, states = mamba_chunk_scan_combined(
        *given.values(), 64, return_final_states=True, return_varlen_states=True, **keywords
    )
    ey, efinal = expected_scan(given, start=start, seq_idx=index)
    close(y, ey)
    close(final, efinal)
    delta = steps(given["dt"])[0]
    for i, (begin, end) in enumerate([(0, 4), (4, 5), (5, L)]):
        x, B_, C_ = (given[name][0, begin:end] for name in ("x", "B", "C"))
        close(states[i], scan(x, delta[begin:end], given["A"], B_, C_, state=start[0] if i == 0 else None)[1])
    _, alone = mamba_chunk_scan_combined(*given.values(), 64, return_varlen_states=True, **keywords)
    assert torch.equal(alone, states)


def test_projections_of_another_dtype_are_cast_and_the_result_is_like_x():
    given = arrays(torch.bfloat16)
    given["B"], given["C"] = given["B"].float(), given["C"].float()
    y, final = mamba_chunk_scan_combined(*given.values(), 64, dt_softplus=True, return_final_states=True)
    assert (y.dtype, final.dtype) == (torch.bfloat16, torch.float32)
    close(y, expected_scan(given)[0], rtol=1e-2, atol=1e-2)


def test_a_scan_without_states_is_the_same_scan():
    given = arrays()
    assert torch.equal(
        mamba_chunk_scan(*given.values(), 64, dt_softplus=True),
        mamba_chunk_scan_combined(*given.values(), 64, dt_softplus=True),
    )


# -- one token --------------------------------------------------------------------------------------------------------


def token(H=H):
    """Arguments of one more token, as models expand them."""
    dt, A, dt_bias, D = torch.randn(B, H) - 1, -torch.rand(H) - 0.2, torch.randn(H), torch.randn(H)
    return dict(
        x=torch.randn(B, H, P),
        dt=dt[..., None].expand(-1, -1, P),
        A=A[:, None, None].expand(-1, P, N),
        B=torch.randn(B, G, N),
        C=torch.randn(B, G, N),
        D=D[:, None].expand(-1, P),
        z=torch.randn(B, H, P),
        dt_bias=dt_bias[:, None].expand(-1, P),
    )


def expected_token(given, state, rows=None):
    """``(y, state)`` of every sequence, from the states at ``rows``."""
    delta = steps(given["dt"][..., 0], given["dt_bias"][:, 0])
    one = [
        scan(
            given["x"][b, None], delta[b, None], given["A"][:, 0, 0], given["B"][b, None], given["C"][b, None],
            given["D"], given["z"][b, None], state[b if rows is None else rows[b]],
        )
        for b in range(B)
    ]  # fmt: skip
    return torch.cat([y for y, _ in one]), torch.stack([after for _, after in one])


@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "with a gradient"])
@pytest.mark.parametrize("layout", ["values first", "keys first"])
def test_a_token_goes_on_from_the_state_where_it_lies(layout, gradient):
    given, state = token(), torch.randn(B, H, P, N)
    state = state if layout == "values first" else state.mT.contiguous().mT
    before, where = state.clone(), state.data_ptr()
    given["x"].requires_grad_(gradient)
    y = selective_state_update(state, **given, dt_softplus=True)
    ey, after = expected_token(given, before)
    assert y.requires_grad is gradient
    close(y, ey)
    close(state, after)
    assert state.data_ptr() == where


@pytest.mark.parametrize("gradient", [False, True], ids=["inference", "with a gradient"])
def test_states_in_a_pool_are_found_by_index_and_padding_writes_nothing(gradient):
    given, pool = token(), torch.randn(4, H, P, N)
    given["x"].requires_grad_(gradient)
    before = pool.clone()
    y = selective_state_update(pool, **given, dt_softplus=True, state_batch_indices=torch.tensor([2, -1]).int())
    ey, after = expected_token(given, before, rows=[2, 0])
    close(y[0], ey[0])
    close(pool[2], after[0])
    assert y[1].abs().sum() == 0
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]])


def test_a_state_without_heads_is_one_head():
    given, state = token(H=1), torch.randn(B, P, N)
    expected = state[:, None].clone()
    given["B"], given["C"] = given["B"][:, :1], given["C"][:, :1]
    ey, after = expected_token(given, expected)
    headless = {name: x[0] if name in ("A", "D", "dt_bias") else x[:, 0] for name, x in given.items()}
    y = selective_state_update(state, **headless, dt_softplus=True)
    close(y, ey[:, 0])
    close(state, after[:, 0])


def test_one_number_a_head_is_seen_from_strides_and_never_read():
    given, state = token(), torch.randn(B, H, P, N)

    def call(state, given):
        return selective_state_update(state, **given, dt_softplus=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    kept = state.clone()
    close(compiled(state, given), call(kept, given))
    close(state, kept)


def test_tokens_one_by_one_are_a_scan():
    given = arrays()
    D, state = torch.randn(H), torch.zeros(B, H, P, N)
    y, final = mamba_chunk_scan_combined(*given.values(), 64, D=D, dt_softplus=True, return_final_states=True)
    for t in range(L):
        one = selective_state_update(
            state,
            given["x"][:, t],
            given["dt"][:, t, :, None].expand(-1, -1, P),
            given["A"][:, None, None].expand(-1, P, N),
            given["B"][:, t],
            given["C"][:, t],
            D[:, None].expand(-1, P),
            dt_softplus=True,
        )
        close(one, y[:, t])
    close(state, final)


# -- norm and mixer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before_gate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group_size", [None, 6])
def test_the_norm_is_gated_before_or_after(before_gate, bias, group_size):
    D = 12
    x, z, weight = torch.randn(3, 5, D), torch.randn(3, 5, D), torch.randn(D)
    shift = torch.randn(D) if bias else None
    y = rmsnorm_fn(x, weight, shift, z, 1e-5, group_size, before_gate)
    expected = gated_norm(x, weight, z, 1e-5, D // (group_size or D), before_gate)
    if bias:
        expected = expected + shift.double() * (silu(z.double()) if before_gate else 1)
    close(y, expected)
    ungated = rmsnorm_fn(x, weight, shift, eps=1e-5, group_size=group_size)
    plain = gated_norm(x, weight, torch.full_like(x, 40.0), 1e-5, D // (group_size or D), True) / silu(
        torch.tensor(40.0).double()
    )
    close(ungated, plain + (shift.double() if bias else 0))


def test_the_norm_as_a_module():
    norm = RMSNormGated(8, group_size=4, norm_before_gate=False)
    norm.weight.data.normal_()
    x, z = torch.randn(2, 8), torch.randn(2, 8)
    close(norm(x, z), gated_norm(x, norm.weight.data, z, 1e-5, 2, False))
    assert list(norm.state_dict()) == ["weight"]


@pytest.mark.parametrize("mlp", [0, 3], ids=["no mlp", "mlp"])
@pytest.mark.parametrize("norm", [None, True, False], ids=["no norm", "norm first", "gate first"])
@pytest.mark.parametrize("seq_idx", [False, True], ids=["rows", "seq_idx"])
def test_a_mixer_is_its_parts(mlp, norm, seq_idx):
    width, mixed = H * P, H * P + 2 * G * N
    zxbcdt = torch.randn(B, L, 2 * mlp + width + mixed + H)
    weight, bias, dt_bias, A = torch.randn(mixed, W), torch.randn(mixed), torch.randn(H), -torch.rand(H)
    D, scale, out, start = torch.randn(H), torch.randn(width), torch.randn(7, mlp + width), torch.randn(B, H, P, N)
    index = torch.tensor([[0] * 5 + [1] * 14, [0] * 17 + [1] * 2]).int() if seq_idx else None
    y, final = mamba_split_conv1d_scan_combined(
        zxbcdt, weight, bias, dt_bias, A, D, 64, start, index,
        return_final_states=True, rmsnorm_weight=None if norm is None else scale, rmsnorm_eps=1e-5, outproj_weight=out,
        headdim=P, ngroups=G, norm_before_gate=bool(norm),
    )  # fmt: skip

    gate, up, z, xBC, dt = zxbcdt.double().split([mlp, mlp, width, mixed, H], -1)
    convolved = torch.zeros_like(xBC)
    for b in range(B):
        for begin, end, _ in pieces(index[b]) if seq_idx else [(0, L, 0)]:
            convolved[b, begin:end] = convolution(xBC[b, begin:end].mT, weight, bias).mT
    x, B_, C_ = convolved.split([width, G * N, G * N], -1)
    given = dict(
        x=x.unflatten(-1, (H, P)), dt=dt, A=A, B=B_.unflatten(-1, (G, N)), C=C_.unflatten(-1, (G, N))
    )  # fmt: skip
    ey, efinal = expected_scan(
        given, D=D, dt_bias=dt_bias, start=start, seq_idx=index, z=z.unflatten(-1, (H, P)) if norm is None else None
    )
    ey = ey.flatten(-2)
    ey = ey if norm is None else gated_norm(ey, scale, z, 1e-5, G, norm)
    ey = torch.cat([silu(gate) * up, ey], -1) @ out.double().T
    close(y, ey, rtol=1e-3, atol=1e-3)
    close(final, efinal)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_mamba_1_is_refused_with_the_reason():
    given, state = token(), torch.randn(B, H, P, N)
    given["A"] = given["A"].contiguous()
    with pytest.raises(linattn.Unsupported) as error:
        selective_state_update(state, **given)
    assert str(error.value) == (
        "selective_state_update: A must be one number a head, expanded, got shape (4, 6, 5) with strides (30, 5, 1): "
        "a decay for each entry of the state (Mamba-1) is no linear attention"
    )
    given = token()
    given["dt"] = given["dt"].contiguous()
    with pytest.raises(linattn.Unsupported, match="selective_state_update: dt must be one number a head, expanded"):
        selective_state_update(state, **given)
    scanned = arrays()
    scanned["A"] = torch.randn(H, N)
    with pytest.raises(linattn.Unsupported) as error:
        mamba_chunk_scan_combined(*scanned.values(), 64)
    assert str(error.value) == (
        "mamba_chunk_scan_combined: A must be one number a head, [H], got shape (4, 5): "
        "with a decay for each entry of the state (Mamba-1) there is no chunk form"
    )
    assert not hasattr(mamba_ssm, "selective_scan_fn")


def test_bad_input_is_named():
    given, error = arrays(), linattn.errors.OptionError
    with pytest.raises(error) as caught:
        mamba_chunk_scan_combined(*given.values(), 64, return_varlen_states=True)
    assert str(caught.value) == "mamba_chunk_scan_combined: return_varlen_states needs cu_seqlens and seq_idx"
    mixed = H * P + 2 * G * N
    rest = (torch.randn(mixed, W), None, torch.randn(H), torch.randn(H), torch.randn(H), 64)
    with pytest.raises(error) as caught:
        mamba_split_conv1d_scan_combined(torch.randn(B, L, 90), *rest)
    assert str(caught.value) == (
        "mamba_split_conv1d_scan_combined: headdim is needed where D is [H], got D of shape (4,) and headdim=None"
    )
    with pytest.raises(error) as caught:
        mamba_split_conv1d_scan_combined(torch.randn(B, L, 90), *rest, outproj_bias=torch.randn(3), headdim=P)
    assert str(caught.value) == "mamba_split_conv1d_scan_combined: outproj_bias needs outproj_weight"
    with pytest.raises(linattn.errors.ShapeError) as caught:
        mamba_split_conv1d_scan_combined(torch.randn(B, L, 60), *rest, headdim=P, ngroups=G)
    assert str(caught.value) == (
        "mamba_split_conv1d_scan_combined: zxbcdt must have 2 F + 2 H P + 2 G N + H columns and conv1d_weight "
        "H P + 2 G N rows, got 60 and 44 with H = 4, P = 6, G = 2"
    )
    with pytest.raises(linattn.Unsupported, match="layernorm_fn takes the mean away"):
        mamba_ssm.layernorm_fn(torch.randn(2, 8), torch.ones(8), None)
