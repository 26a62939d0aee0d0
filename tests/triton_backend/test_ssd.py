"""``ssd`` by the kernels around the diagonal core, against the float64 oracle: forward, backward, and decoding."""

from __future__ import annotations

import linattn
import pytest
import torch
from linattn_backends.numpy import oracle
from linattn_backends.triton.ssd import op
from triton_cases import BACKEND, as_numpy, distance, pretend

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
STEPS = dict(dt_softplus=True, dt_limit=(0.2, 1.5))
NAMES = ("x", "dt", "A", "B", "C")
AROUND = [dict(), dict(D=None), dict(z=None), dict(D=None, z=None), dict(dt_bias=None), dict(D=2), dict(D=2, z=None)]


def arrays(B=1, T=21, H=1, HV=2, K=5, V=7, dtype=torch.float32, cu=None, seed=0, D=1, **without):
    """Seeded arguments by name; ``D`` has so many dimensions, and what is given as ``None`` is left out."""
    torch.manual_seed(seed)
    tokens = dict(x=(HV, V), dt=(HV,), A=None, B=(H, K), C=(H, K), z=(HV, V))
    given = {name: -torch.rand(HV) if rest is None else torch.randn(B, T, *rest) for name, rest in tokens.items()}
    given |= dict(D=torch.randn((HV, V)[: D or 1]), dt_bias=torch.randn(HV))
    given = {name: x.to(dtype) if name in "xBCz" else x for name, x in given.items()}
    given["initial_state"] = torch.randn(B if cu is None else len(cu) - 1, HV, K, V)
    if cu is not None:
        given["cu_seqlens"] = torch.tensor(cu)
    missing = [*without, *(["D"] if D is None else [])]
    return {name: x for name, x in given.items() if name not in missing}


def run(given, form="chunk", **options):
    """The backend's method on arguments by name."""
    keywords = {name: x for name, x in given.items() if name not in NAMES}
    return getattr(BACKEND, f"{form}_ssd")(*(given[name] for name in NAMES), **keywords, **options)


def check(given, form="chunk", **options):
    """Outputs, final state and every gradient; and inputs stay as they were."""
    options = STEPS | options | dict(output_final_state=True)
    leaves = {name: x.requires_grad_() for name, x in given.items() if x.is_floating_point()}
    before = {name: x.detach().clone() for name, x in given.items()}
    o, final = run(given, form, **options)
    assert (o.dtype, final.dtype) == (given["x"].dtype, torch.float32)
    exact = as_numpy(given)
    wanted_o, wanted_final = oracle.forward("ssd", exact, options)
    d_o, d_final = torch.randn(o.shape).to(o.dtype), torch.randn(final.shape)
    found = torch.autograd.grad([o, final], list(leaves.values()), [d_o, d_final])
    wanted = oracle.vjp("ssd", exact, options, d_o.double().numpy(), d_final.double().numpy())
    errors = dict(o=distance(o, wanted_o), final=distance(final, wanted_final))
    for name, x in zip(leaves, found, strict=True):
        assert x.dtype == leaves[name].dtype
        errors[f"d{name}"] = distance(x, wanted[name])
    assert all(error < TOLERANCE[o.dtype] for error in errors.values()), {name: float(x) for name, x in errors.items()}
    assert all(torch.equal(x, given[name].detach()) for name, x in before.items())


@pytest.mark.parametrize("around", AROUND, ids=str)
def test_what_is_around(around):
    check(arrays(**around))


@pytest.mark.parametrize("options", [dict(dt_softplus=False), dict(dt_limit=(0.0, float("inf"))), dict(dt_limit=(-1.0, 0.5))])
def test_steps(options):
    check(arrays(), **options)


SIZES = [
    dict(B=2, T=40, H=2, HV=6, K=16, V=16),
    dict(T=24, cu=[0, 5, 5, 20]),
    dict(T=0),
    dict(T=0, cu=[0, 0]),
    dict(V=1, K=1, HV=1),
    dict(T=9, V=130, K=3, HV=1),
    dict(T=40, dtype=torch.bfloat16, D=2),
    dict(T=40, dtype=torch.float16),
]
WEIGHTED = [
    dict(z=None),
    dict(z=None, D=2),
    dict(z=None, D=None),
    dict(B=2, H=2, HV=2, z=None),
    dict(T=150, H=2, HV=6, K=16, V=70, z=None),
    dict(T=90, z=None, cu=[0, 5, 5, 80]),
    dict(T=90, cu=[0, 80]),
    dict(T=40),
]
"""Calls whose step sizes the core takes as weights of values; and those whose skip, or gate, it leaves to others."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes):
    check(arrays(**sizes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", WEIGHTED, ids=str)
def test_weights_in_the_core(sizes, dtype):
    check(arrays(dtype=dtype, **dict(T=70) | sizes))


def test_weights_of_steps_that_are_no_softplus():
    """Whose gradients at zero do not follow from those of keys."""
    given = arrays(dtype=torch.bfloat16, z=None, dt_bias=None)
    given["dt"][:, ::3] = 0
    check(given, dt_softplus=False, dt_limit=(0.0, 1.0))


def test_weights_of_zero():
    """Step sizes that softplus cannot tell from none, and those that are cut off there."""
    given = arrays(dtype=torch.bfloat16, z=None)
    given["dt"][:, ::3] = -300
    check(given, dt_limit=(0.0, float("inf")))
    check(arrays(dtype=torch.bfloat16, z=None), dt_limit=(-1.0, 0.0))


def test_weights_below_zero():
    """Gradients of negative weights do not say those of step sizes. Rates are positive, so that states decay."""
    given = arrays(dtype=torch.bfloat16, z=None)
    given["A"] = -given["A"]
    check(given, dt_limit=(-0.2, -0.1))


@pytest.mark.parametrize("dt", [-2.0, 3.0])
def test_weights_under_gates_that_are_weak_or_strong(dt):
    given = arrays(dtype=torch.bfloat16, T=150, z=None, dt_bias=None)
    given["dt"] += dt
    given["A"] *= 8
    check(given, dt_limit=(0.0, float("inf")))


@pytest.mark.parametrize("cu", [None, [0, 3, 12, 12]])
def test_token_by_token(cu):
    check(arrays(T=14, cu=cu), "recurrent")


def test_programs_that_share_a_heads_tokens(monkeypatch):
    """Some walk over more blocks than others."""
    pretend(monkeypatch, num_sms=1)
    check(arrays(T=70, K=3, V=128))


def test_arrays_that_are_strided():
    given = arrays(B=2, HV=4, H=2)
    given = {name: x if x.dim() < 3 else x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in given.items()}
    given |= {name: torch.stack((x, x), 1)[:, 0] for name, x in given.items() if x.dim() == 1}
    assert not any(given[name].is_contiguous() for name in ("x", "z", "dt", "A", "D", "dt_bias"))
    check(given)


def test_an_expanded_gradient():
    given = arrays(z=None)
    x = given["x"].requires_grad_()
    summed = torch.autograd.grad(run(given)[0].sum(), x)[0]
    (dense,) = torch.autograd.grad(run(given)[0], x, torch.ones(x.shape))
    assert torch.equal(summed, dense)


@pytest.mark.parametrize("around", AROUND[:4], ids=str)
def test_what_lies_behind_packed_sequences_counts_for_nothing(around):
    given = arrays(T=20, cu=[0, 5, 12], **around)
    for name in ("x", "dt", "B", "C", "z"):
        if name in given:
            given[name][:, 12:] = torch.nan
    leaves = {name: x.requires_grad_() for name, x in given.items() if x.is_floating_point()}
    o, _ = run(given, **STEPS)
    assert not o[:, 12:].any()
    d = torch.ones(o.shape)
    d[:, 12:] = torch.nan
    for name, found in zip(leaves, torch.autograd.grad(o, leaves.values(), d), strict=True):
        assert found.isfinite().all(), name
        assert name in ("A", "D", "dt_bias", "initial_state") or not found[:, 12:].any(), name


@pytest.mark.parametrize("around", AROUND, ids=str)
def test_decoding(around):
    given = arrays(B=2, T=2, **around)
    exact, state = as_numpy(given), given.pop("initial_state")
    pool = torch.stack((torch.zeros_like(state), state), 1).flatten(0, 1)
    o = run(given, "decode", state=pool, state_indices=torch.tensor([1, 3]), **STEPS)
    wanted, end = oracle.forward("ssd", exact, STEPS | dict(output_final_state=True))
    assert max(distance(o, wanted), distance(pool[1::2], end)) < TOLERANCE[torch.float32]
    assert not pool[::2].any()


@pytest.mark.parametrize("around", AROUND[:4], ids=str)
def test_slots_of_padding(around):
    """Their outputs are zero, whatever the skip, and no state is written."""
    given = arrays(B=3, T=2, **around)
    pool = given.pop("initial_state")
    before = pool.clone()
    given["x"][0] = torch.nan
    o = run(given, "decode", state=pool, state_indices=torch.tensor([-1, 1, 3]), **STEPS)
    assert not o[[0, 2]].any()
    assert o[1].isfinite().all()
    assert o[1].any()
    assert torch.equal(pool[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("D", [1, 2])
def test_nothing_is_made_that_is_larger_than_the_largest_input(D, monkeypatch):
    """Forward nothing as large but the outputs; backward, with a skip a head, but one gradient."""
    sizes, new = [], torch.empty
    given = arrays(T=128, H=1, HV=8, K=16, V=64, dtype=torch.bfloat16, D=D, z=None)
    largest = given["x"].numel() * 2
    monkeypatch.setattr(torch, "empty", lambda *a, **o: sizes.append(new(*a, **o)) or sizes[-1])
    run(given, **STEPS)
    assert sum(x.numel() * x.element_size() >= largest for x in sizes) == 1
    given = {name: x.requires_grad_() for name, x in given.items()}
    sizes.clear()
    run(given, **STEPS)[0].sum().backward()
    sizes = [x.numel() * x.element_size() for x in sizes]
    assert max(sizes) == largest
    assert sum(size >= largest for size in sizes) == D + 1


def test_it_is_no_longer_lowered():
    given = arrays(T=70, K=64, V=64)
    given = [given[name] for name in NAMES]
    said = str(linattn.explain(linattn.chunk_ssd, *given, D=given[2], backend="triton"))
    assert "triton.chunk_ssd: ssd_inputs_fwd" in said
    assert "ssd_outputs_fwd" in said
    assert "ssd_outputs" not in str(linattn.explain(linattn.chunk_ssd, *given, backend="triton"))


def test_opcheck():
    given = {name: x.requires_grad_() for name, x in arrays(T=5).items()}
    named = [given[name] for name in ("C", "B", "x", "dt", "A", "D", "z", "dt_bias", "initial_state")]
    torch.library.opcheck(op.state_space, (*named, None, "chunk", 1.0, 16, True, True, 0.0, 2.0, True))
    plain = [x.detach() for x in named]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        op.ssd_backward, (plain[2], None, None, *plain, None, 1.0, 16, True, 0.0, 2.0), test_utils=tests
    )  # fmt: skip
    torch.library.opcheck(op.decoded, (*plain[:8], plain[8], None, True, 0.0, 2.0))


def test_under_vmap():
    """Rates that calls share, and skips of their own."""
    given = arrays(T=5)
    x = torch.stack([given["x"], given["x"].flip(1)])
    D = torch.stack([given["D"], -given["D"]])

    def loss(x, D, A):
        return run(given | dict(x=x, D=D, A=A))[0].square().sum()

    found = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)), (0, 0, None))(x, D, given["A"])
    for i in range(2):
        for one, other in zip(torch.func.grad(loss, (0, 1, 2))(x[i], D[i], given["A"]), found, strict=True):
            torch.testing.assert_close(other[i], one)


def test_decoding_under_vmap_needs_states_of_its_own():
    given = arrays(T=1)
    state = given.pop("initial_state")
    with pytest.raises(RuntimeError, match=r"^vmap of decode_ssd needs state mapped as well: every one of its calls"):
        torch.vmap(lambda x: run(given | dict(x=x), "decode", state=state))(torch.stack([given["x"]] * 2))


def test_compiles_without_a_break():
    torch._dynamo.reset()
    given = arrays(T=5)
    compiled = torch.compile(lambda x: run(given | dict(x=x))[0], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(given["x"]), run(given)[0])
