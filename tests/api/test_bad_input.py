"""Every wrong call: one exact message, nothing computed, nothing changed."""

from __future__ import annotations

import importlib
import math

import linattn
import numpy as np
import pytest
from frameworks_for_tests import INSTALLED, array
from linattn import errors

B, T, H, HV, K, V = 2, 8, 2, 4, 16, 24


@pytest.fixture
def good(make):
    return dict(q=make(B, T, H, K), k=make(B, T, H, K), v=make(B, T, HV, V), g=-abs(make(B, T, HV, K)))


# (id, what to change in a good chunk_gla call, error class, the whole message)
SHAPES = [
    ("rank", dict(k=(B, T, K)), "k must be [B, T, H, K] = [2, 8, 2, 16], got [2, 8, 16]"),
    ("rank of the first", dict(q=(B, T, K)), "q must be [B, T, H, K], got [2, 8, 16]"),
    ("size", dict(k=(B, T, H, K + 1)), "k must be [B, T, H, K] = [2, 8, 2, 16], got [2, 8, 2, 17]"),
    ("batch of v", dict(v=(B + 1, T, HV, V)), "v must be [B, T, HV, V] = [2, 8, HV, V], got [3, 8, 4, 24]"),
    (
        "gate",
        dict(g=(B, T, HV)),
        "g must be [B, T, HV, K] = [2, 8, 4, 16] or [B, T, H, K] = [2, 8, 2, 16], got [2, 8, 4]",
    ),
    ("value gate", dict(gv=(B, T, HV, K)), "gv must be [B, T, HV, V] = [2, 8, 4, 24], got [2, 8, 4, 16]"),
    (
        "state",
        dict(initial_state=(B, HV, V, K)),
        "initial_state must be [N, HV, K, V] = [2, 4, 16, 24], got [2, 4, 24, 16]",
    ),
    (
        "heads",
        dict(v=(B, T, 3, V), g=(B, T, 3, K)),
        "the value heads HV must be a multiple of the query/key heads H = 2, got HV = 3",
    ),
    ("no width", dict(q=(B, T, H, 0), k=(B, T, H, 0), g=(B, T, HV, 0)), "K must be at least 1, got 0"),
]


@pytest.mark.parametrize(("change", "message"), [pytest.param(c, m, id=i) for i, c, m in SHAPES])
@pytest.mark.parametrize("form", ["chunk", "recurrent", "parallel"])
def test_wrong_shape(good, make, form, change, message):
    call = good | {name: make(*shape) for name, shape in change.items()}
    name = f"{form}_gla"
    with pytest.raises(errors.ShapeError) as caught:
        getattr(linattn, name)(**call)
    assert str(caught.value) == f"{name}: {message}"


@pytest.mark.parametrize("framework", INSTALLED)
def test_queries_in_groups_get_the_line_that_repeats_keys(framework):
    q = array(framework, np.ones((B, T, 6, K)))
    k, v = (array(framework, np.arange(B * T * 2 * K).reshape(B, T, 2, K)) for _ in range(2))
    repeat = {
        "numpy": "np.repeat(x, 3, axis=2)",
        "torch": "x.repeat_interleave(3, 2)",
        "jax": "jnp.repeat(x, 3, axis=2)",
        "mlx": "mx.repeat(x, 3, axis=2)",
    }[framework]
    line = f"k, v = ({repeat} for x in (k, v))"
    with pytest.raises(errors.ShapeError) as caught:
        linattn.chunk_linear_attn(q, k, v)
    assert str(caught.value) == (
        "chunk_linear_attn: q has 6 heads and k has 2: queries in groups are not taken, so repeat the heads of k and v, and of "
        f"gates that have as few: {line}"
    )
    module = importlib.import_module({"jax": "jax.numpy", "mlx": "mlx.core"}.get(framework, framework))
    names = {"np": module, "jnp": module, "mx": module, "k": k, "v": v}
    exec(line, names)
    np.testing.assert_array_equal(np.asarray(names["k"])[:, :, [0, 2, 3, 5]], np.asarray(k)[:, :, [0, 0, 1, 1]])
    assert linattn.chunk_linear_attn(q, names["k"], names["v"])[0].shape == q.shape


DTYPES = [
    ("operands differ", dict(k="float16"), "k must have the dtype of q, float32, got float16"),
    ("integer operand", dict(q="int32"), "q must be float16, bfloat16, float32 or float64, got int32"),
    ("integer gate", dict(g="int64"), "g must be float16, bfloat16, float32 or float64, got int64"),
]


@pytest.mark.parametrize(("change", "message"), [pytest.param(c, m, id=i) for i, c, m in DTYPES])
def test_wrong_dtype(good, make, change, message):
    call = good | {name: make(*good[name].shape, dtype=dtype) for name, dtype in change.items()}
    with pytest.raises(errors.DtypeError) as caught:
        linattn.chunk_gla(**call)
    assert str(caught.value) == f"chunk_gla: {message}"
    assert isinstance(caught.value, TypeError)


OFFSETS = [
    ("start", [1, 4, 8], "cu_seqlens must start at 0, got 1"),
    ("decreasing", [0, 6, 4, 8], "cu_seqlens must not decrease, got 6 then 4 at index 2"),
    ("long", [0, 4, 9], "cu_seqlens must not pass T = 8, got 9 at the end"),
]


@pytest.mark.parametrize(("offsets", "message"), [pytest.param(o, m, id=i) for i, o, m in OFFSETS])
def test_wrong_offsets(good, make, offsets, message):
    call = {name: x[:1] for name, x in good.items()}
    cu_seqlens = make(len(offsets), dtype="int64")
    for i, offset in enumerate(offsets):
        cu_seqlens[i] = offset
    with pytest.raises(errors.ShapeError) as caught:
        linattn.chunk_gla(**call, cu_seqlens=cu_seqlens)
    assert str(caught.value) == f"chunk_gla: {message}"


def test_wrong_offsets_kind(good, make):
    with pytest.raises(errors.ShapeError) as caught:
        linattn.chunk_gla(**good, cu_seqlens=make(3, dtype="int32") * 0)
    assert str(caught.value) == "chunk_gla: cu_seqlens packs sequences along T and needs B = 1, got B = 2"
    single = {name: x[:1] for name, x in good.items()}
    with pytest.raises(errors.DtypeError) as caught:
        linattn.chunk_gla(**single, cu_seqlens=make(3))
    assert str(caught.value) == "chunk_gla: cu_seqlens must be int32 or int64, got float32"
    with pytest.raises(errors.ShapeError) as caught:
        linattn.chunk_gla(**single, cu_seqlens=make(3, 1, dtype="int32"))
    assert str(caught.value) == "chunk_gla: cu_seqlens must be [N+1] with N the number of packed sequences, got [3, 1]"


def test_not_an_array(good):
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.chunk_gla(**good | {"q": [[1.0]]})
    assert str(caught.value) == "chunk_gla: q: expected an array of numpy, torch, jax or mlx, got list"
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.chunk_gla(**good | {"g": 0.5})
    assert str(caught.value) == "chunk_gla: g: expected an array of numpy, torch, jax or mlx, got float"
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.chunk_gla(**good | {"g": None})
    assert str(caught.value) == "chunk_gla: g is required, got None"


def test_dlpack_only(good):
    class Tensor:
        shape, dtype = (1,), "float32"

        def __dlpack__(self):
            raise AssertionError("nothing may be converted")

    with pytest.raises(errors.FrameworkError) as caught:
        linattn.chunk_gla(**good | {"k": Tensor()})
    kind = f"{__name__}.test_dlpack_only.<locals>.Tensor"
    assert str(caught.value) == (
        f"chunk_gla: k: {kind} is not an array of a framework that linattn knows (numpy, torch, jax, mlx), but it speaks "
        "DLPack: convert it first, e.g. torch.from_dlpack(k) or numpy.from_dlpack(k)"
    )


def test_frameworks_mixed(good, torch):
    other = good["k"].numpy() if isinstance(good["k"], torch.Tensor) else torch.from_numpy(good["k"])
    mine, theirs = ("torch", "numpy") if isinstance(good["k"], torch.Tensor) else ("numpy", "torch")
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.chunk_gla(**good | {"k": other})
    assert str(caught.value) == (
        f"chunk_gla: k is a {theirs} array but q is a {mine} array: convert it, nothing is copied for you"
    )


def test_devices_mixed(torch):
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(errors.DeviceError) as caught:
        linattn.chunk_gla(x, x, x, x.to("meta"))
    assert str(caught.value) == "chunk_gla: g is on meta but q is on cpu: move it, nothing is copied for you"


@pytest.mark.parametrize("option", ["output_final_state", "initial_state"])
def test_no_state_without_causality(make, option):
    x = make(1, 4, 2, 8)
    value = {"output_final_state": True, "initial_state": make(1, 2, 8, 8)}[option]
    with pytest.raises(errors.OptionError) as caught:
        linattn.chunk_linear_attn(x, x, x, causal=False, **{option: value})
    assert str(caught.value) == (
        "chunk_linear_attn: causal=False reads the whole sequence and has no state: drop initial_state and output_final_state"
    )


def test_no_recurrence_without_causality(make):
    x = make(1, 4, 2, 8)
    with pytest.raises(errors.OptionError) as caught:
        linattn.recurrent_linear_attn(x, x, x, causal=False)
    assert str(caught.value) == (
        "recurrent_linear_attn: causal=False has no recurrent form: use chunk_linear_attn or parallel_linear_attn"
    )


OPTIONS = [
    ("scale", "1", "scale must be float or int or None, a static Python value, got '1'"),
    ("scale", float("nan"), "scale must be a finite number, got nan"),
    ("scale", -math.inf, "scale must be a finite number, got -inf"),
    ("output_final_state", 1, "output_final_state must be bool, a static Python value, got 1"),
    ("chunk_size", 0, "chunk_size must be at least 1, got 0"),
    ("chunk_size", 64.0, "chunk_size must be int or None, a static Python value, got 64.0"),
    ("chunk_size", True, "chunk_size must be int or None, a static Python value, got True"),
    ("output_final_state", np.bool_(True), f"output_final_state must be bool, a static Python value, got {np.bool_(True)!r}"),
]


@pytest.mark.parametrize(("name", "value", "message"), OPTIONS)
def test_wrong_option(good, name, value, message):
    with pytest.raises(errors.OptionError) as caught:
        linattn.chunk_gla(**good, **{name: value})
    assert str(caught.value) == f"chunk_gla: {message}"


def test_a_wrong_option_is_not_mistaken_for_an_equal_right_one(good):
    linattn.chunk_gla(**good, chunk_size=16, output_final_state=True)
    with pytest.raises(errors.OptionError):
        linattn.chunk_gla(**good, chunk_size=16.0, output_final_state=True)
    with pytest.raises(errors.OptionError):
        linattn.chunk_gla(**good, chunk_size=16, output_final_state=1)


def test_numbers_of_numpy_are_numbers(good):
    assert linattn.explain("chunk_gla", **good, scale=1 / np.sqrt(np.float32(4)), chunk_size=np.int64(16)).backend
    assert dict(linattn.explain("chunk_gla", **good, scale=np.float32(0.5)).options)["scale"] == 0.5


def test_numbers_of_numpy_reach_a_kernel_as_python_s_own(good):
    options = dict(linattn.explain("chunk_gla", **good, scale=np.float32(0.5), chunk_size=np.int64(16)).options)
    assert [type(options[name]) for name in ("scale", "chunk_size")] == [float, int]
    linattn.chunk_gla(**good, chunk_size=np.int64(16))


def test_flag_that_is_an_array(make):
    x = make(1, 4, 2, 8)
    with pytest.raises(errors.OptionError, match=r"^linear_attn: normalize must be bool, a static Python value, got \w+$"):
        linattn.linear_attn(x, x, x, normalize=x[0, 0])


def test_explain_refuses_offsets_as_the_call_does(good, make):
    single = {name: x[:1] for name, x in good.items()}
    offsets = make(2, dtype="int64") * 0 + 1
    with pytest.raises(errors.ShapeError, match=r"^chunk_gla: cu_seqlens must start at 0, got 1$"):
        linattn.explain("chunk_gla", **single, cu_seqlens=offsets)


def test_option_that_is_an_array(good, make):
    with pytest.raises(
        errors.OptionError, match=r"^chunk_gla: scale must be float or int or None, a static Python value, got \w+$"
    ):
        linattn.chunk_gla(**good, scale=make(1))


def test_unknown_argument(good):
    with pytest.raises(TypeError, match=r"^chunk_gla\(\) got an unexpected keyword argument 'head_first'$"):
        linattn.chunk_gla(**good, head_first=True)


def test_unknown_feature_map(good):
    with pytest.raises(errors.OptionError) as caught:
        linattn.chunk_gla(**good, feature_map="elu")
    assert str(caught.value) == (
        "unknown feature map 'elu': did you mean 'elu1'? known are identity, elu1, relu, relu2, exp, taylor2, hedgehog, t2r, "
        "performer, rfa, cosformer, dpfp, rebased"
    )
    with pytest.raises(errors.OptionError) as caught:
        linattn.chunk_gla(**good, feature_map=abs)
    assert str(caught.value) == (
        "feature_map must be a name or a linattn.feature_maps.FeatureMap, got builtin_function_or_method"
    )


def test_unknown_backend(good):
    with pytest.raises(errors.UnknownBackend) as caught:
        linattn.chunk_gla(**good, backend="nunpy")
    known = ", ".join(sorted(linattn.registry.registry.records))
    assert str(caught.value) == f"unknown backend 'nunpy': did you mean 'numpy'? known are {known}"
    assert isinstance(caught.value, LookupError)


@pytest.mark.parametrize("backend", [(), 3, [None]])
def test_backend_of_the_wrong_kind(good, backend):
    with pytest.raises(errors.OptionError) as caught:
        linattn.chunk_gla(**good, backend=backend)
    assert str(caught.value) == f"backend must be a name or a sequence of names, got {backend!r}"


def test_unknown_operator(good):
    with pytest.raises(errors.OptionError) as caught:
        linattn.explain("chunk_glu", **good)
    families = ", ".join(linattn.spec.FAMILIES)
    assert str(caught.value) == (
        f"unknown operator 'chunk_glu': did you mean 'chunk_gla'? families are {families}, forms recurrent, chunk, parallel"
    )


def test_mixed_state_of_the_wrong_kind(make):
    x = make(1, 4, 2, 8)
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.mixed_attn(x, x, x, x, x, initial_state=x)
    assert str(caught.value) == f"mixed_attn: initial_state must be a linattn.MixedState, got {type(x).__name__}"
    with pytest.raises(errors.OptionError) as caught:
        linattn.mixed_attn(x, x, x, x, x, chunk_size=None)
    assert str(caught.value) == "mixed_attn: chunk_size must be int, a static Python value, got None"


def test_mixed_state_with_a_hole(make):
    x = make(1, 4, 2, 8)
    state = linattn.mixed_attn(x, x, x, x, x, chunk_size=4, output_final_state=True)[1]
    with pytest.raises(errors.FrameworkError) as caught:
        linattn.mixed_attn(x, x, x, x, x, chunk_size=4, initial_state=state._replace(k_lin=None))
    assert str(caught.value) == "mixed_attn: initial_state.k_lin is required, got None"
    with pytest.raises(errors.FrameworkError, match=r"initial_state\.kv is required, got None"):
        linattn.mixed_attn(x, x, x, x, x, chunk_size=4, initial_state=linattn.MixedState(*[None] * 5))


def test_nothing_is_changed(good):
    before = {name: x.copy() if isinstance(x, np.ndarray) else x.clone() for name, x in good.items()}
    with pytest.raises(errors.ShapeError):
        linattn.chunk_gla(**good, gv=good["q"])
    assert all((good[name] == before[name]).all() for name in good)
