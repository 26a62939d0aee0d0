"""Mistakes that a valid call may be made with, and what is said of them."""

from __future__ import annotations

import importlib
import inspect
import warnings

import linattn
import numpy as np
import pytest
from backends_for_tests import named
from frameworks_for_tests import INSTALLED, array, compiled
from linattn import errors, frameworks, guards

RNG = np.random.default_rng(7)
B, T, H, K = 1, 40, 2, 8


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(guards, "_told", set())


@pytest.fixture(params=INSTALLED)
def framework(request):
    return request.param


def draw(*shape: int, scale: float = 0.1) -> np.ndarray:
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def qkv(framework: str, *shape: int, key: float = 0.1):
    return [array(framework, draw(*shape, scale=scale)) for scale in (0.1, key, 0.1)]


def told(call, *categories: type[Warning]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, categories or (errors.InputWarning,))]


# -- what is said ------------------------------------------------------------------------------------------------------


def test_decays_that_are_no_logs(framework):
    alpha = np.full((B, T, H, K), 0.9, np.float32)
    alpha[0, 3, 1, 2] = 0.98
    q, k, v = qkv(framework, B, T, H, K)
    assert told(lambda: linattn.chunk_gla(q, k, v, array(framework, alpha))) == [
        "chunk_gla: g has positive entries, 0.98 among them, and the state grows by e^g: pass log decays, log(alpha) for a "
        "decay alpha; linattn.gates makes them from a model's projections"
    ]


def test_value_decays_and_fixed_decays(framework):
    q, k, v = qkv(framework, B, T, H, K)
    zero = array(framework, np.zeros((B, T, H, K)))
    (text,) = told(lambda: linattn.gla(q, k, v, zero, array(framework, np.full((B, T, H, K), 0.5))))
    assert text.startswith("gla: gv has positive entries, 0.5 among them, and the state grows by e^gv: pass log decays, ")
    (text,) = told(lambda: linattn.simple_gla(q, k, v, array(framework, [0.0, 0.25])))
    assert text.startswith("simple_gla: g has positive entries, 0.25 among them")


@pytest.mark.parametrize("family", ["delta_rule", "gated_delta_rule", "kda"])
def test_long_keys_of_the_delta_families(framework, family):
    q, _, v = qkv(framework, B, T, H, K)
    k = np.zeros((B, T, H, K), np.float32)
    k[..., 0] = 0.5
    k[0, 5, 1] = [3, 0, 4, 0, 0, 0, 0, 0]
    beta = array(framework, np.full((B, T, H), 0.1))
    gates = {"delta_rule": (), "gated_delta_rule": (0 * beta,), "kda": (array(framework, np.zeros((B, T, H, K))),)}[family]
    operator = getattr(linattn, f"recurrent_{family}")
    assert told(lambda: operator(q, array(framework, k), v, *gates, beta)) == [
        f'recurrent_{family}: k has keys longer than 1, 5 among them, and the state can grow without bound: pass qk_norm="l2"'
    ]


def test_heads_before_time(framework):
    q, k, v = qkv(framework, 1, 8, 64, 4)
    assert told(lambda: linattn.chunk_linear_attn(q, k, v)) == [
        "chunk_linear_attn: q has T = 8 tokens and H = 64 heads: time comes second, [B, T, H, K]; if yours are [B, H, T, K], "
        "swap axes 1 and 2 of every array"
    ]
    assert len(told(lambda: linattn.parallel_linear_attn(q, k, v))) == 1
    assert told(lambda: linattn.recurrent_linear_attn(q, k, v)) == []


def test_the_mend_mends(framework):
    q, k, v = qkv(framework, B, T, H, K, key=5.0)
    beta = array(framework, np.full((B, T, H), 0.5))
    xp = importlib.import_module({"jax": "jax.numpy", "mlx": "mlx.core"}.get(framework, framework))
    unit = k / xp.sqrt((k * k).sum(-1)[..., None] + 1e-6)
    assert told(lambda: linattn.chunk_delta_rule(q, unit, v, beta)) == []
    assert told(lambda: linattn.chunk_delta_rule(q, k, v, beta, qk_norm="l2")) == []
    assert told(lambda: linattn.chunk_gla(q, unit, v, linattn.gates.gla(k))) == []
    q, k, v = (xp.swapaxes(x, 1, 2) for x in qkv(framework, 1, 8, 64, 4))
    assert told(lambda: linattn.chunk_linear_attn(q, k, v)) == []


def test_what_is_right_passes_in_silence(framework):
    q, k, v = qkv(framework, B, T, H, K)
    gates = np.full((B, T, H, K), -np.inf)
    gates[:, ::2] = 1e-7  # a rounded log of 1
    assert told(lambda: linattn.chunk_gla(q, k, v, array(framework, gates))) == []
    long = [array(framework, draw(B, T, H, K, scale=10.0)) for _ in range(3)]
    assert told(lambda: linattn.chunk_linear_attn(*long)) == []  # no delta rule
    assert told(lambda: linattn.linear_attn(*qkv(framework, 1, 1, 64, 4))) == []  # a token of decoding
    assert told(lambda: linattn.chunk_linear_attn(*qkv(framework, 1, 8, 63, 4))) == []


# -- how often, and where ----------------------------------------------------------------------------------------------


def test_once_a_place_and_kind(framework):
    q, k, v = qkv(framework, B, T, H, K)
    g = array(framework, np.full((B, T, H, K), 0.01))

    def calls():
        for _ in range(4):
            linattn.chunk_gla(q, k, v, g)
        linattn.chunk_gla(q[:, :32], k[:, :32], v[:, :32], g[:, :32])

    assert len(told(calls)) == 2  # a second place
    assert told(calls) == []


def test_it_points_at_the_line_that_calls():
    q, k, v = qkv("numpy", B, T, H, K)
    line = inspect.currentframe().f_lineno + 2
    with pytest.warns(errors.InputWarning) as caught:
        linattn.gla(q, k, v, np.ones((B, T, H, K), np.float32))
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_a_mistake_that_comes_later_shows_soon(framework, monkeypatch):
    """What is learned can go wrong: calls of one decision are looked at again, ever less often."""
    monkeypatch.setattr(guards, "SPARSER", 4)
    q, k, v = qkv(framework, B, T, H, K)
    good, bad = (array(framework, np.full((B, T, H, K), value)) for value in (-0.1, 0.1))
    shown = []
    for call in range(1, 21):
        guards._told.clear()
        g = good if call < 3 else bad
        shown += [call] if told(lambda: linattn.chunk_gla(q, k, v, g)) else []  # noqa: B023
    assert shown == [4, 16]


def test_only_the_first_tokens_are_read(framework, monkeypatch):
    monkeypatch.setattr(frameworks, "GLANCE", 32)
    q, k, v = qkv(framework, 2, T, H, K)
    g = np.zeros((2, T, H, K))
    g[0, 2:] = g[1] = 0.1
    g = array(framework, g)
    assert told(lambda: linattn.chunk_gla(q, k, v, g)) == []
    with linattn.debug():
        assert len(told(lambda: linattn.chunk_gla(q, k, v, g))) == 1


def test_code_that_is_compiled_is_left_alone(framework):
    if framework == "numpy":
        pytest.skip("NumPy compiles nothing")
    q, k, v = qkv(framework, B, T, H, K)
    g = array(framework, np.full((B, T, H, K), 0.01))
    call = compiled(framework, lambda *arrays: linattn.chunk_gla(*arrays)[0])
    assert told(lambda: call(q, k, v, g)) == []
    with linattn.debug():
        assert told(lambda: call(q, k, v, g)) == []
        assert told(lambda: call(q[:, 1:], k[:, 1:], v[:, 1:], g[:, 1:])) == []


def test_transforms_are_left_alone(torch):
    q, k, v = (x[None] for x in qkv("torch", B, T, H, K))
    g = torch.full((1, B, T, H, K), 0.01)
    assert told(lambda: torch.func.vmap(lambda *x: linattn.chunk_gla(*x)[0])(q, k, v, g)) == []
    assert told(lambda: torch.func.grad(lambda g: linattn.chunk_gla(q[0], k[0], v[0], g)[0].sum())(g[0])) == []


def test_recording_modes_are_left_alone(torch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    q, k, v = qkv("torch", B, T, H, K)
    with Recorder():
        assert told(lambda: linattn.chunk_gla(q, k, v, torch.full((B, T, H, K), 0.01))) == []


def test_parameters_are_looked_at(torch):
    q, k, v = qkv("torch", B, T, H, K)
    g = torch.nn.Parameter(torch.full((B, T, H, K), 0.01, dtype=torch.bfloat16))
    assert len(told(lambda: linattn.chunk_gla(q, k, v, g))) == 1


# -- debug -------------------------------------------------------------------------------------------------------------


def test_debug_tells_where_a_result_is_first_not_finite(framework):
    q, k, v = qkv(framework, 2, T, H, K)
    bad = np.zeros((2, T, H, K), np.float32)
    bad[1, 7, 1, 3] = np.nan
    with linattn.debug():
        assert told(lambda: linattn.recurrent_gla(q, k, v + array(framework, bad), 0 * q), errors.NonFiniteWarning) == [
            "recurrent_gla: o is not finite from token 7 on, in head 1 of batch entry 1 first: v[1, 7, 1, 3] is not finite"
        ]
    assert told(lambda: linattn.recurrent_gla(q, k, v + array(framework, bad), 0 * q), errors.NonFiniteWarning) == []


def first_bad(o) -> tuple[int, int, int]:
    t, h, b = np.argwhere(~np.isfinite(np.asarray(o)).all(-1).transpose(1, 2, 0))[0]
    return t, h, b


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (
            dict(g=np.full((B, T, H), 50.0)),
            "g has positive entries, 50 among them, and the state grows by e^g: pass log",
        ),
        (dict(k=np.full((B, T, H, K), 1e4)), "k has keys longer than 1, 2.83e+04 among them, and the state can grow without"),
        (dict(initial_state=np.full((B, H, K, K), np.inf)), "initial_state[0, 0, 0, 0] is not finite"),
        (dict(v=np.full((B, T, H, K), 3e38)), "every input is finite, so a sum overflows or the backend is wrong: compare it"),
    ],
    ids=["g", "k", "initial_state", "overflow"],
)
def test_debug_tells_the_likely_cause(framework, change, cause):
    given = dict(zip("qkv", (np.full((B, T, H, K), value, np.float32) for value in (1.0, 0.35, 0.35)), strict=True))
    given |= dict(g=np.zeros((B, T, H)), beta=np.full((B, T, H), 1.0)) | change
    given = {name: array(framework, x) for name, x in given.items()}
    with linattn.debug(), np.errstate(all="ignore"):
        (text,) = told(lambda: linattn.recurrent_gated_delta_rule(**given, scale=100.0), errors.NonFiniteWarning)
    with np.errstate(all="ignore"):
        o, _ = linattn.recurrent_gated_delta_rule(**given, scale=100.0)
    t, h, b = first_bad(o)
    where = f"o is not finite from token {t} on, in head {h} of batch entry {b} first"
    assert text.startswith(f"recurrent_gated_delta_rule: {where}: {cause}")


def test_debug_knows_where_float16_ends():
    q, k, v = (np.full((B, T, H, K), 100.0, np.float16) for _ in range(3))
    with linattn.debug(), np.errstate(all="ignore"):
        (text,) = told(lambda: linattn.chunk_linear_attn(q, k, v), errors.NonFiniteWarning)
    assert text.endswith(": float16 ends at 65504, bfloat16 and float32 do not")


def test_debug_looks_at_the_state_too():
    def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        state = np.zeros((B, H, K, K))
        state[0, 1, 2, 3] = np.inf
        return v, state

    linattn.register_backend(named("overflowing", chunk_gla=chunk_gla))
    q, k, v = qkv("numpy", B, T, H, K)
    with linattn.debug():
        (text,) = told(lambda: linattn.chunk_gla(q, k, v, 0 * k, backend="overflowing"), errors.NonFiniteWarning)
    cause = "every input is finite, so a sum overflows or the backend is wrong: compare it with another one"
    assert text == f"chunk_gla: the final state is not finite, in head 1 of sequence 0 first: {cause}"


def test_debug_looks_at_decoding(torch):
    q, k, v = qkv("torch", B, 1, H, K)
    v[0, 0, 1] = torch.nan
    with linattn.debug():
        (text,) = told(lambda: linattn.decode_gla(q, k, v, 0 * k, state=torch.zeros(B, H, K, K)), errors.NonFiniteWarning)
    assert text == "decode_gla: o is not finite from token 0 on, in head 1 of batch entry 0 first: v[0, 0, 1, 0] is not finite"


def test_debug_is_for_this_thread_only():
    import threading

    q, k, v = qkv("numpy", B, T, H, K)
    v[0, 0] = np.nan
    found: list[list[str]] = []
    with linattn.debug():
        thread = threading.Thread(
            target=lambda: found.append(told(lambda: linattn.gla(q, k, v, 0 * k), errors.NonFiniteWarning))
        )
        thread.start()
        thread.join()
    assert found == [[]]
