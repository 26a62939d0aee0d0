"""The recurrence of the delta families, and decoding of all, token by token, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from linattn.gates import Softplus
from linattn_backends.numpy import oracle
from linattn_backends.triton.host.maps import Maps
from linattn_backends.triton.recurrent.op import Tokens, decode
from triton_cases import BACKEND, TOLERANCE, arrays, as_numpy, call, check_forward, distance, gate

FAMILIES = ("delta_rule", "gated_delta_rule", "kda", "dplr")


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    check_forward(family, arrays(family, B=2, T=5, H=2, HV=4, K=20, V=18))


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_a_writing_strength_for_each_value_channel(family):
    check_forward(family, arrays(family, T=5, HV=2, per_value=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_without_a_state(family):
    check_forward(family, arrays(family, T=12, HV=2, cu=[0, 0, 5, 12], state=False))


@pytest.mark.parametrize("kind", ["zero", "strong", "-inf", "mixed"])
@pytest.mark.parametrize("family", FAMILIES[1:])
def test_gates(family, kind):
    check_forward(family, arrays(family, T=6, kind=kind))


@pytest.mark.parametrize(("K", "V"), [(1, 1), (17, 33), (200, 40)])
def test_widths(K, V):
    check_forward("kda", arrays("kda", T=3, K=K, V=V))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits(family, dtype):
    check_forward(family, arrays(family, T=5, K=16, V=16, dtype=dtype), scale=0.3)


def test_strided_inputs():
    given = arrays("kda", B=2, T=5, H=2, HV=2)
    for name in ("k", "v", "g"):
        given[name] = torch.stack((given[name], given[name] + 1), -1)[..., 0]
        assert not given[name].is_contiguous()
    given["initial_state"] = given["initial_state"].transpose(2, 3).contiguous().transpose(2, 3)
    check_forward("kda", given)


def test_no_tokens():
    given = arrays("kda", T=0)
    o, final = call("kda", given, "recurrent", output_final_state=True)
    assert o.shape == (1, 0, 1, 7)
    assert torch.equal(final, given["initial_state"])


ALL = ("linear_attn", "simple_gla", "gla", "rwkv6", *FAMILIES)


def check_decoding(family, given, slots=None, dtype=torch.float32, slack=1.0, **options):
    """Outputs, states at their slots, and every other state, agree with the oracle."""
    given = dict(given)
    start = given.pop("initial_state")
    N = start.shape[0]
    pool = torch.randn(N + 2, *start.shape[1:]).to(dtype)
    live = [(n, n if slots is None else slots[n]) for n in range(N) if slots is None or slots[n] >= 0]
    for n, slot in live:
        pool[slot] = start[n]
    before = pool.clone()
    indices = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    o = getattr(BACKEND, f"decode_{family}")(*given.values(), state=pool, state_indices=indices, **options)
    tolerance = TOLERANCE[given["v"].dtype] * slack
    for n, slot in live:
        alone = {name: x if name == "u" or x.dim() == 1 else x[n : n + 1] for name, x in given.items()}
        exact = as_numpy(alone | {"initial_state": before[slot : slot + 1]})
        wanted_o, wanted = oracle.forward(family, exact, dict(options, output_final_state=True))
        assert distance(o[n : n + 1], wanted_o) < tolerance
        assert distance(pool[slot : slot + 1], wanted) < tolerance
    others = [p for p in range(N + 2) if p not in [slot for _, slot in live]]
    assert torch.equal(pool[others], before[others])
    padding = [n for n in range(N) if n not in [n for n, _ in live]]
    assert torch.equal(o[padding], torch.zeros_like(o[padding]))


@pytest.mark.parametrize("slots", [None, [4, -1, 1], [-1, -1, -1]])
@pytest.mark.parametrize("family", ALL)
def test_decoding_in_place(family, slots):
    check_decoding(family, arrays(family, B=3, T=1 if slots is None else 4, H=1, HV=2), slots)


@pytest.mark.parametrize("family", ["linear_attn", "simple_gla", "gla"])
def test_decoding_with_a_normaliser(family):
    given = arrays(family, B=2, T=3, V=7, state=False)
    for name in ("q", "k"):
        given[name] = given[name].abs() + 0.1
    if family == "gla":
        given["gv"] = gate((2, 3, 1, 7), "mixed")
    check_decoding(family, given | {"initial_state": torch.rand(2, 1, 5, 8) + 0.1}, [3, 0], normalize=True)


def test_decoding_with_a_value_gate_and_a_fixed_decay():
    given = arrays("gla", B=2, T=2, HV=2)
    state = given.pop("initial_state")
    check_decoding("gla", given | {"gv": gate((2, 2, 2, 7), "mixed"), "initial_state": state})
    check_decoding("simple_gla", arrays("simple_gla", B=2, T=2, HV=2, shape=(2,)), [1, 0])


def test_decoding_states_of_sixteen_bits():
    check_decoding("kda", arrays("kda", B=2, T=2), [3, 1], dtype=torch.float16, slack=300)


def test_decoding_strided_states():
    given = arrays("gla", B=2, T=2)
    o, final = call("gla", given, "recurrent", output_final_state=True)
    wide = torch.full((2, 7, 1, 5, 2), 7.0)
    pool = wide[..., 0].permute(0, 2, 3, 1)
    pool.copy_(given.pop("initial_state"))
    assert torch.equal(BACKEND.decode_gla(*given.values(), state=pool), o)
    assert torch.equal(pool, final)
    assert (wide[..., 1] == 7).all()


def test_slots_out_of_range_are_padding():
    """On a device nobody can look: no memory outside the pool is touched."""
    given = arrays("gla", B=2, T=1)
    pool = given.pop("initial_state")
    before = pool.clone()
    o = BACKEND.decode_gla(*given.values(), state=pool, state_indices=torch.tensor([2, 1000]))
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(pool, before)


def test_opcheck_decoding():
    given = arrays("kda", B=2, T=1, K=4, V=4)
    pool = given.pop("initial_state")
    named = [given.get(name) for name in Tokens._fields]
    gate = Softplus(torch.randn(1), torch.randn(1, 4))
    maps = Maps.of(gate, "sigmoid", "l2")
    torch.library.opcheck(decode, (*named, pool, torch.tensor([1, 0]), 0.5, False, *maps.gate, maps.factor, maps.unit))


def test_decoding_compiles_without_a_break():
    torch._dynamo.reset()
    given = arrays("kda", B=2, T=1)
    pool = given.pop("initial_state")
    eager, slots = pool.clone(), torch.tensor([1, 0])

    def step(pool, *tokens):
        return BACKEND.decode_kda(*tokens, state=pool, state_indices=slots)

    wanted = step(eager, *given.values())
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(pool, *given.values())
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(pool, eager)


def test_decoding_states_that_reach_past_32_bits():
    """Their memory is never touched but where elements are, so little of it is real."""
    far = 1 << 30
    pool = torch.empty(2 * far + 8, dtype=torch.bfloat16).as_strided((1, 1, 3, 4), (0, 0, far, 1))
    start = torch.randn(1, 1, 3, 4).bfloat16()
    pool.copy_(start)
    given = arrays("linear_attn", T=2, K=3, V=4, state=False)
    near = start.clone()
    expected = BACKEND.decode_linear_attn(**given, state=near, state_indices=None, scale=None)
    assert torch.equal(BACKEND.decode_linear_attn(**given, state=pool, state_indices=None, scale=None), expected)
    assert torch.equal(pool, near)


@pytest.mark.parametrize("slots", [None, [[1, -1], [0, 2]]])
def test_decoding_under_vmap(slots):
    rows = [torch.randn(2, 2, 3, 1, 4) for _ in range(3)]
    pools, indices = torch.randn(3, 2, 1, 4, 4), None if slots is None else torch.tensor(slots)
    expected, separate = [], pools.clone()
    for i in range(2):
        given = dict(state=separate[:, i], state_indices=None if indices is None else indices[i], scale=None)
        expected.append(BACKEND.decode_linear_attn(*(x[i] for x in rows), **given))

    def one(q, k, v, state, indices):
        return BACKEND.decode_linear_attn(q, k, v, state=state, state_indices=indices, scale=None)

    found = torch.func.vmap(one, in_dims=(0, 0, 0, 1, None if slots is None else 0))(*rows, pools, indices)
    assert torch.equal(found, torch.stack(expected))
    assert torch.equal(pools, separate)
    with pytest.raises(RuntimeError, match="vmap of decode_… needs state mapped as well"):
        torch.func.vmap(one, in_dims=(0, 0, 0, None, None))(*rows, pools[:, 0], None)


def test_a_write_that_the_dispatcher_sees_is_counted_without_the_schema(monkeypatch):
    """PyTorch's own way of counting reads the schema, which takes longer than the rest of such a call."""

    def read(*_):
        raise AssertionError("the schema was read")

    monkeypatch.setattr(torch._library.utils, "fill_defaults", read)
    x, state = torch.ones(2, 1, 8), torch.zeros(2, 8, 3)
    y = torch.ops.linattn.triton_decode_short_conv(x, torch.ones(8, 4), None, state, None, False)
    assert torch.equal(y, x)
    assert torch.equal(state[..., -1], x[:, 0])
    assert state._version == 1


def test_a_gradient_of_what_was_written_over_is_refused():
    state, x = torch.ones(2, 8, 3), torch.ones(2, 8, 3, requires_grad=True)
    product = (state * x).sum()
    torch.ops.linattn.triton_decode_short_conv(torch.ones(2, 1, 8), torch.ones(8, 4), None, state, None, False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
