"""Decoding in place: what it computes on any backend, where it writes, and what it refuses."""

from __future__ import annotations

import re

import linattn
import numpy as np
import pytest
from backends_for_tests import Recorder
from linattn import decoding, errors
from linattn.plugin import Backend
from linattn.spec import DECODING, FAMILIES

B, T, H, HV, K, V, P = 3, 2, 2, 4, 5, 6, 7


def close(x, y):
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-5)


@pytest.fixture
def good(make):
    return dict(q=make(B, T, H, K), k=make(B, T, H, K), v=make(B, T, HV, V), g=-abs(make(B, T, HV, K)))


@pytest.fixture
def pool(make):
    return make(P, HV, K, V)


class InPlace(Backend):
    """Has decode_gla alone, and writes sevens."""

    name = "in-place"
    api = ">=1,<2"
    frameworks = ("numpy", "torch")

    def __init__(self):
        self.calls = []

    def supports(self, call):
        self.calls.append(call)

    def decode_gla(self, q, k, v, g, gv=None, *, state, state_indices, scale):
        self.seen = locals()
        state[...] = 7
        return v * 0 + scale


class TokenByToken(Recorder):
    """Has recurrent_gla alone."""

    name = "steps"

    def recurrent_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        self.seen = locals()
        return v * 0 + 1, initial_state + 1


def copied(x):
    return x.copy() if isinstance(x, np.ndarray) else x.clone()


def test_every_family_with_a_matrix_state_has_it():
    assert set(DECODING) == set(FAMILIES) - {"mixed_attn"} | {"short_conv"}
    assert all(hasattr(linattn, f"decode_{op}") for op in DECODING)


def test_state_n_is_of_sequence_n(good, pool):
    before = copied(pool)
    wanted, final = linattn.recurrent_gla(**good, initial_state=before[:B], output_final_state=True)
    o = linattn.decode_gla(**good, state=pool)
    close(o, wanted)
    close(pool[:B], final)
    assert (pool[B:] == before[B:]).all()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_slots_pick_states_and_minus_one_is_padding(good, pool, make, dtype):
    before = copied(pool)
    wanted, final = linattn.recurrent_gla(**good, initial_state=before[[6, 0, 2]], output_final_state=True)
    slots = make(B, dtype=dtype) * 0
    for n, slot in enumerate((6, -1, 2)):
        slots[n] = slot
    o = linattn.decode_gla(**good, state=pool, state_indices=slots)
    close(o[[0, 2]], wanted[[0, 2]])
    assert (o[1] == 0).all()
    close(pool[[6, 2]], final[[0, 2]])
    others = [0, 1, 3, 4, 5]
    assert (pool[others] == before[others]).all()


def test_padding_alone_writes_nothing(good, pool, make):
    before = copied(pool)
    o = linattn.decode_gla(**good, state=pool, state_indices=make(B, dtype="int64") * 0 - 1)
    assert (o == 0).all()
    assert (pool == before).all()


def test_no_sequences(make, pool):
    x = make(0, 1, HV, K)
    o = linattn.decode_linear_attn(x, x, make(0, 1, HV, V), state=pool, state_indices=make(0, dtype="int32"))
    assert tuple(o.shape) == (0, 1, HV, V)


def test_token_by_token_is_the_same(good, pool):
    other = copied(pool)
    o = linattn.decode_gla(**good, state=pool)
    for t in range(T):
        close(linattn.decode_gla(**{name: x[:, t : t + 1] for name, x in good.items()}, state=other), o[:, t : t + 1])
    close(pool, other)


def test_a_normaliser_is_one_more_column(make):
    q, k, v, pool = abs(make(B, T, H, K)), abs(make(B, T, H, K)), make(B, T, H, V), abs(make(B, H, K, V + 1))
    wanted, final = linattn.recurrent_linear_attn(q, k, v, normalize=True, initial_state=copied(pool), output_final_state=True)
    close(linattn.decode_linear_attn(q, k, v, state=pool, normalize=True), wanted)
    close(pool, final)


def test_a_state_keeps_its_dtype(good, pool, make):
    narrow = make(P, HV, K, V, dtype="float16")
    wide = make(P, HV, K, V)
    wide[...] = narrow
    close(linattn.decode_gla(**good, state=narrow), linattn.decode_gla(**good, state=wide))
    assert str(narrow.dtype).endswith("float16")
    np.testing.assert_allclose(np.asarray(narrow, "float32"), np.asarray(wide), rtol=2e-3, atol=2e-3)


def test_a_feature_map_applies(good, pool):
    other = copied(pool)
    mapped = good | {name: (abs(good[name]) + good[name]) / 2 for name in "qk"}
    o = linattn.decode_gla(**good, state=pool, feature_map="relu")
    close(o, linattn.decode_gla(**mapped, state=other))


def test_a_backend_that_writes_in_place_gets_the_pool(good, pool, make):
    backend = InPlace()
    linattn.register_backend(backend)
    slots = make(B, dtype="int32") * 0 - 1
    o = linattn.decode_gla(**good, state=pool, state_indices=slots, backend="in-place", scale=2)
    assert backend.seen["state"] is pool
    assert backend.seen["state_indices"] is slots
    assert (o == 2).all()
    assert (pool == 7).all()
    (call,) = backend.calls
    assert (call.form, call.method, call.sizes["P"]) == ("decode", "decode_gla", P)


def test_it_also_gets_simpler_families(good, pool):
    backend = InPlace()
    linattn.register_backend(backend)
    del good["g"]
    plan = linattn.explain(linattn.decode_linear_attn, **good, state=pool, backend="in-place")
    assert (plan.method, plan.steps) == ("decode_gla", ("linear_attn", "simple_gla", "gla"))
    linattn.decode_linear_attn(**good, state=pool, backend="in-place")
    assert backend.seen["state"] is pool


def test_a_backend_with_the_recurrent_form_gets_copies(good, pool):
    backend = TokenByToken()
    linattn.register_backend(backend)
    before = copied(pool)
    o = linattn.decode_gla(**good, state=pool, backend="steps")
    assert (o == 1).all()
    close(pool[:B], before[:B] + 1)
    assert backend.seen["output_final_state"] is True
    assert backend.seen["scale"] == K**-0.5
    call = backend.calls[-1]
    assert (call.form, call.shapes["initial_state"], call.option("output_final_state")) == ("recurrent", "N HV K V", True)
    assert not call.has("state")
    framework = "numpy" if isinstance(pool, np.ndarray) else "torch"
    assert str(linattn.explain("decode_gla", **good, state=pool, backend="steps")) == (
        f"decode_gla on {framework} cpu float32 B=3 T=2 H=2 K=5 N=3 HV=4 V=6 P=7\n"
        "  asked for    steps (argument)\n"
        "  runs         steps.recurrent_gla (on copies of the states, written back)"
    )


def test_a_backend_without_either_says_so(good, pool):
    linattn.register_backend(Recorder)
    with pytest.raises(errors.Unsupported, match="recorder: has no decode_gla; has no recurrent_gla"):
        linattn.decode_gla(**good, state=pool, backend="recorder")


REFUSED = [
    (lambda make: {"state": make(P, HV, V, K)}, errors.ShapeError,
     "state must be [P, HV, K, V] = [P, 4, 5, 6], got [7, 4, 6, 5]"),
    (lambda make: {"state": make(2, HV, K, V)}, errors.ShapeError,
     "state must have a slot for each of N = 3 sequences without state_indices, got P = 2"),
    (lambda make: {"state": None}, errors.FrameworkError, "state is required, got None"),
    (lambda make: {"state": make(0, HV, K, V), "state_indices": make(B, dtype="int32") * 0 - 1}, errors.ShapeError,
     "P must be at least 1, got 0"),
    (lambda make: {"state_indices": make(2, dtype="int32")}, errors.ShapeError, "state_indices must be [N] = [3], got [2]"),
    (lambda make: {"state_indices": make(B)}, errors.DtypeError, "state_indices must be int32 or int64, got float32"),
    (lambda make: {"state_indices": make(B, dtype="int32") * 0 + 7}, errors.ShapeError,
     "state_indices must be slots below P = 7, or -1, got 7 at index 0"),
    (lambda make: {"state_indices": make(B, dtype="int32") * 0 - 2}, errors.ShapeError,
     "state_indices must be slots below P = 7, or -1, got -2 at index 0"),
    (lambda make: {"state_indices": make(B, dtype="int32") * 0 + 5}, errors.ShapeError,
     "state_indices must be distinct, got 5 at index 0 and at index 1"),
    (lambda make: {"scale": "1"}, errors.OptionError, "scale must be float or int or None, a static Python value, got '1'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_what_is_refused(good, pool, make, change, kind, message):
    before = copied(pool)
    with pytest.raises(errors.LinattnError) as caught:
        linattn.decode_gla(**(good | {"state": pool} | change(make)))
    assert type(caught.value) is kind
    assert str(caught.value) == f"decode_gla: {message}"
    assert (pool == before).all()


def test_options_of_other_forms_are_unknown(good, pool):
    with pytest.raises(TypeError, match="unexpected keyword argument 'initial_state'"):
        linattn.decode_gla(**good, state=pool, initial_state=pool)


def test_arrays_that_cannot_be_written_to(good):
    shape = (B, HV, K, V)
    if isinstance(good["q"], np.ndarray):
        state, reason = np.broadcast_to(np.float32(0), shape), "it is read-only"
    else:
        state, reason = good["v"].new_zeros(()).expand(shape), "it is expanded: some of its elements share their memory"
    for function in (linattn.decode_gla, linattn.decode_gla.explain):
        with pytest.raises(errors.ArgumentError) as caught:
            function(**good, state=state)
        assert str(caught.value) == f"decode_gla: state cannot be written to: {reason}"


def apart(x, strides):
    """A view of shape ``[B, HV, K, V]`` with these strides, of ``x``."""
    if isinstance(x, np.ndarray):
        return np.lib.stride_tricks.as_strided(x, (B, HV, K, V), [n * x.itemsize for n in strides])
    return x.as_strided((B, HV, K, V), strides)


def test_states_whose_elements_share_memory(good, make):
    state = apart(make(1000), (HV * (K + V), K + V, 1, 1))
    for function in (linattn.decode_gla, linattn.decode_gla.explain):
        with pytest.raises(errors.ArgumentError) as caught:
            function(**good, state=state)
        assert str(caught.value) == (
            f"decode_gla: state cannot be written to: its strides are {(HV * (K + V), K + V, 1, 1)}: "
            "some of its elements share their memory"
        )


@pytest.mark.parametrize("n", range(300))
def test_whether_elements_share_memory_is_answered_exactly(n):
    """Against looking at every element, on small arrays of which about half do."""
    rng = np.random.default_rng(n)
    shape, strides = tuple(rng.integers(1, 5, 4).tolist()), tuple(rng.integers(-40, 40, 4).tolist())
    places = sum(np.ix_(*(step * np.arange(size) for step, size in zip(strides, shape, strict=True))))
    if np.unique(places).size == places.size:
        decoding._check_apart("decode_gla", shape, strides)
    else:
        with pytest.raises(errors.ArgumentError, match="share their memory"):
            decoding._check_apart("decode_gla", shape, strides)


@pytest.mark.parametrize(
    "strides", [(1, B, B * HV, B * HV * K), (HV * K * V * 2, K * V * 2, V * 2, 2), (300, 60, V + 1, 1), (1000, 100, V, V - 1)]
)
def test_states_with_gaps_interleaved_or_in_another_order_of_dimensions(good, make, strides):
    state, pool = apart(make(4000), strides), make(B, HV, K, V)
    pool[:] = state
    o, wanted = (linattn.decode_gla(**good, state=one) for one in (state, pool))
    np.testing.assert_allclose(np.asarray(o), np.asarray(wanted), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(state), np.asarray(pool), rtol=1e-5)


def test_arrays_of_jax_cannot_be_written_to():
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.ones((1, 1, 1, 1))
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.decode_linear_attn(x, x, x, state=x)
    assert str(caught.value) == (
        "decode_linear_attn: state is written to, and jax arrays cannot be: "
        "call recurrent_linear_attn with initial_state and output_final_state=True"
    )


def test_there_is_no_gradient(torch):
    x, pool = torch.ones(1, 1, 1, 1, requires_grad=True), torch.ones(1, 1, 1, 1)
    message = (
        "decode_linear_attn: has no gradient, because it overwrites state: call it under torch.no_grad(), "
        "or recurrent_linear_attn with initial_state and output_final_state=True"
    )
    with pytest.raises(errors.OptionError) as caught:
        linattn.decode_linear_attn(x, x, x, state=pool)
    assert str(caught.value) == message
    assert (pool == 1).all()
    with torch.no_grad():
        linattn.decode_linear_attn(x, x, x, state=pool)
    assert (pool == 2).all()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in jvp
def test_there_is_no_forward_mode_derivative(torch):
    x, pool = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    message = (
        "decode_linear_attn: has no forward-mode derivative, because it overwrites state: "
        "call recurrent_linear_attn with initial_state and output_final_state=True"
    )
    calls = {"q": lambda q: linattn.decode_linear_attn(q, x, x, state=pool)}
    calls["state"] = lambda state: linattn.decode_linear_attn(x, x, x, state=state)
    for call in calls.values():
        with pytest.raises(errors.OptionError) as caught:
            torch.func.jvp(call, (x.clone(),), (x,))
        assert str(caught.value) == message
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.clone(), x)
        with pytest.raises(errors.OptionError, match="forward-mode"):
            linattn.decode_linear_attn(dual, x, x, state=pool)
        assert (pool == 1).all()
        linattn.decode_linear_attn(x, x, x, state=pool)  # nothing here has a tangent
    assert (pool == 2).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state[:, :, :1].expand(-1, -1, 4, -1), "it is expanded"),
        (lambda state: state.as_strided(state.shape, (16, 16, 1, 1)), "its strides are (16, 16, 1, 1)"),
    ],
    ids=["expanded", "strided"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_compiling_says_what_cannot_be_written_to(torch, change, reason, inside):
    torch._dynamo.reset()
    q, g, pool = torch.randn(2, 1, 1, 4), -torch.rand(2, 1, 1, 4), torch.zeros(2, 1, 4, 4)

    def step(pool, q, g):
        return linattn.decode_gla(q, q, q, g, state=change(pool) if inside else pool)

    message = f"decode_gla: state cannot be written to: {reason}: some of its elements share their memory"
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=False)
    with pytest.raises(Exception, match=re.escape(message)):  # Dynamo's own, around it
        compiled(pool if inside else change(pool), q, g)


def test_it_compiles_into_one_graph(torch):
    torch._dynamo.reset()
    q, g, pool = torch.randn(2, 1, 1, 4), -torch.rand(2, 1, 1, 4), torch.randn(5, 1, 4, 4)
    slots, other = torch.tensor([3, -1]), pool.clone()

    def step(pool, q, g, slots):
        return linattn.decode_gla(q, q, q, g, state=pool, state_indices=slots)

    wanted = step(other, q, g, slots)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(pool, q, g, slots)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(pool, other)


def test_typos_in_a_method_are_caught():
    class Typo(Recorder):
        name = "typo"

        def decode_gla(self, q, k, v, g, gv=None, *, state, slots, scale): ...

    with pytest.raises(errors.BackendContractError) as caught:
        linattn.register_backend(Typo)
    assert str(caught.value) == (
        "test_typos_in_a_method_are_caught.<locals>.Typo.decode_gla does not match the spec\n"
        "  expected: (self, q, k, v, g, gv=None, *, qk_norm, gate, state, state_indices, scale, normalize)\n"
        "  found:    (self, q, k, v, g, gv=None, *, state, slots, scale)"
    )


def test_a_state_made_in_inference_mode():
    torch = pytest.importorskip("torch")
    with torch.inference_mode():
        state = torch.rand(B, HV, K, V)
    q, v = torch.rand(B, 1, HV, K), torch.rand(B, 1, HV, V)
    with pytest.raises(linattn.errors.ArgumentError, match="it was made in inference mode, and this is outside of it"):
        linattn.decode_linear_attn(q, q, v, state=state)
    with torch.inference_mode():
        assert linattn.decode_linear_attn(q, q, v, state=state).shape == v.shape
