"""fla's functions from linattn, against fla's own: signatures, and what its plain PyTorch references compute."""

import contextlib
import gc
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
F = torch.nn.functional

from linattn.errors import OptionError, Unsupported  # noqa: E402
from linattn.integrations import fla as ours  # noqa: E402
from linattn.integrations.seams import FallbackWarning, stood_for  # noqa: E402

B, T, H, K, V = 2, 13, 2, 8, 6


@pytest.fixture(scope="module")
def fla() -> Any:
    """The package, which warns that this machine has no GPU."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("fla", reason="flash-linear-attention is not installed")
        return importlib.import_module("fla.ops")


def theirs(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


@pytest.fixture
def x() -> dict[str, Any]:
    """Arrays of every function, by their names."""

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.float64).float()

    k = F.normalize(normal(B, T, H, K), dim=-1)
    return {
        "q": normal(B, T, H, K),
        "k": k,
        "v": normal(B, T, H, V),
        "g": F.logsigmoid(normal(B, T, H)),
        "gk": F.logsigmoid(normal(B, T, H, K)),
        "gv": F.logsigmoid(normal(B, T, H, V)),
        "beta": normal(B, T, H).sigmoid(),
        "a": -k,
        "b": k * normal(B, T, H, K).sigmoid(),
        "u": normal(H, K),
        "state": normal(B, H, K, V),
        "A_log": normal(H),
        "dt_bias": normal(H),
    }


def close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ours.FUNCTIONS)
def test_a_signature_is_flas_and_names_what_fla_takes_by_any_keyword(fla: Any, name: str) -> None:
    wanted = [p for p in inspect.signature(inspect.unwrap(theirs(name))).parameters.values() if p.kind != p.VAR_KEYWORD]
    found = list(inspect.signature(ours.FUNCTIONS[name]).parameters.values())
    assert [(p.name, p.default) for p in found[: len(wanted)]] == [(p.name, p.default) for p in wanted]
    assert all(p.kind is p.KEYWORD_ONLY for p in found[len(wanted) :])


def test_names_reach_whatever_of_flas_holds_a_function_and_its_registry_few(fla: Any) -> None:
    """What docs/from-fla.md says of both."""
    for package in ("fla.layers", "fla.models"):
        importlib.import_module(package)
    before = {name: theirs(name) for name in ours.FUNCTIONS}
    names = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    for function in before.values():
        holders = [holder for holder in gc.get_referrers(function) if isinstance(holder, dict) and holder is not before]
        assert holders
        assert {id(holder) for holder in holders} <= names
    registered = {name.rpartition(".")[2] for name, function in before.items() if goes_through_the_registry(function)}
    assert registered == {
        *("chunk_gated_delta_rule", "chunk_kda", "chunk_dplr_delta_rule"),
        *("fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"),
    }


def goes_through_the_registry(function: Any) -> bool:
    """Whether a function, or one that it wraps, is what fla's registry made of it."""
    parts = [function, *(cell.cell_contents for cell in getattr(function, "__closure__", None) or ())]
    files = [part.__code__.co_filename for part in parts if hasattr(part, "__code__")]
    inner = getattr(function, "__wrapped__", None)
    return any(file.endswith("fla/backends.py") for file in files) or (inner is not None and goes_through_the_registry(inner))


def reference(x: dict[str, Any], g: Any = None, beta: Any = None) -> Any:
    """``(o, S)`` by the definition, a token at a time, for any decay."""
    state, outputs = x["state"].clone(), []
    for t in range(T):
        if g is not None:
            decay = g if g.dim() == 1 else g[:, t]
            state = state * (decay.exp()[..., None, None] if decay.dim() < 3 else decay.exp()[..., None])
        k, v = x["k"][:, t], x["v"][:, t]
        if beta is not None:
            v = beta[:, t][..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., None] * v[..., None, :]
        outputs.append(K**-0.5 * torch.einsum("bhk,bhkv->bhv", x["q"][:, t], state))
    return torch.stack(outputs, 1), state


CASES: dict[str, Callable[[dict[str, Any]], tuple[dict[str, Any], dict[str, Any]]]] = {
    "chunk_simple_gla": lambda x: ({"g": x["g"]}, {"g": x["g"]}),
    "fused_chunk_simple_gla": lambda x: ({"g": x["g"]}, {"g": x["g"]}),
    "fused_recurrent_simple_gla": lambda x: ({"g_gamma": x["g"][0, 0]}, {"g": x["g"][0, 0]}),
    "chunk_gla": lambda x: ({"g": x["gk"]}, {"g": x["gk"]}),
    "fused_recurrent_gla": lambda x: ({"gk": x["gk"]}, {"g": x["gk"]}),
    "fused_recurrent_linear_attn": lambda x: ({}, {}),
    "chunk_delta_rule": lambda x: ({"beta": x["beta"]}, {"beta": x["beta"]}),
    "fused_recurrent_delta_rule": lambda x: ({}, {"beta": torch.ones(B, T, H)}),
    "chunk_gated_delta_rule": lambda x: ({"g": x["g"], "beta": x["beta"]}, {"g": x["g"], "beta": x["beta"]}),
    "fused_recurrent_gated_delta_rule": lambda x: (
        {"g": x["g"], "gk": x["gk"], "beta": x["beta"]},
        {"g": x["g"][..., None] + x["gk"], "beta": x["beta"]},
    ),
    "chunk_kda": lambda x: ({"g": x["gk"], "beta": x["beta"]}, {"g": x["gk"], "beta": x["beta"]}),
    "fused_recurrent_kda": lambda x: ({"g": x["gk"], "beta": x["beta"]}, {"g": x["gk"], "beta": x["beta"]}),
    "chunk_retention": lambda x: ({}, {"g": torch.log1p(-(2.0 ** (-5.0 - torch.arange(H))))}),
    "chunk_lightning_attn": lambda x: (
        {"layer_idx": 1, "num_layers": 4},
        {"g": -(8 / H) * (1 - 1 / 4) * torch.arange(H, dtype=torch.float32)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_computes_what_its_definition_says(x: dict[str, Any], name: str) -> None:
    given, definition = CASES[name](x)
    o, state = getattr(ours, name)(x["q"], x["k"], x["v"], initial_state=x["state"], output_final_state=True, **given)
    expected, final = reference(x, **definition)
    close(o, expected)
    close(state, final)


def test_rwkv6_and_dplr_are_flas_own(fla: Any, x: dict[str, Any]) -> None:
    from fla.ops.generalized_delta_rule.dplr.naive import dplr_recurrence
    from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

    def turned(*names: str) -> list[Any]:
        return [x[name].transpose(1, 2) for name in names]

    o, state = ours.chunk_rwkv6(x["q"], x["k"], x["v"], x["gk"], x["u"], 0.5, x["state"], True)
    expected, final = naive_recurrent_rwkv6(*turned("q", "k", "v", "gk"), x["u"], 0.5, x["state"], True)
    close(o, expected.transpose(1, 2))
    close(state, final)

    expected, final = dplr_recurrence(*turned("q", "k", "v", "a", "b", "gk"), x["state"])
    o, state = ours.chunk_dplr_delta_rule(x["q"], x["k"], x["v"], x["a"], x["b"], x["gk"], None, x["state"], True)
    close(o, expected.transpose(1, 2))
    close(state, final)
    o, state = ours.fused_recurrent_rwkv7(x["q"], x["gk"], x["k"], x["v"], x["a"], x["b"], None, x["state"])
    close(o, expected.transpose(1, 2))
    o, state = ours.chunk_rwkv7(x["q"], x["gk"], x["k"], x["v"], x["a"], x["b"])
    assert state is None
    multiplied, _ = ours.fused_mul_recurrent_rwkv7(x["q"], x["gk"], x["k"], x["v"], -x["a"], x["b"] / -x["a"])
    close(multiplied, o, 1e-3)
    o, state = ours.chunk_iplr_delta_rule(x["q"], x["k"], x["v"], x["a"], x["b"], None, x["state"], True)
    close(o, dplr_recurrence(*turned("q", "k", "v", "a", "b"), torch.zeros(B, H, T, K), x["state"])[0].transpose(1, 2))


@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attention_is_normalised_as_fla_does(fla: Any, x: dict[str, Any], normalize: bool) -> None:
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    q, k = x["q"].abs(), x["k"].abs()
    given = (x["state"], torch.rand(B, 1, H, K)) if normalize else x["state"]
    expected, final = naive_recurrent_linear_attn(
        q, k, x["v"], initial_state=given, output_final_state=True, normalize=normalize
    )
    for function in (ours.chunk_linear_attn, ours.fused_recurrent_linear_attn, ours.fused_chunk_linear_attn):
        o, state = function(q, k, x["v"], initial_state=given, output_final_state=True, normalize=normalize)
        close(o, expected)
        for ours_, theirs_ in zip(state if normalize else [state], final if normalize else [final], strict=True):
            close(ours_, theirs_)
    assert ours.chunk_linear_attn(q, k, x["v"])[1] == (None, None)


def test_gates_norms_and_sigmoids_may_be_the_operators(x: dict[str, Any]) -> None:
    """Asked for in the call, they give what they give before it."""
    raw, logits = x["g"] * 3, x["beta"] * 4 - 2
    gate = -x["A_log"].exp() * F.softplus(raw + x["dt_bias"])
    expected, _ = ours.chunk_gated_delta_rule(
        F.normalize(x["q"], dim=-1), F.normalize(x["k"], dim=-1), x["v"], gate, 2 * logits.sigmoid()
    )
    asked = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "A_log": x["A_log"], "dt_bias": x["dt_bias"]}
    asked |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    for function in (ours.chunk_gated_delta_rule, ours.fused_recurrent_gated_delta_rule):
        close(function(x["q"] * 5, x["k"] * 3, x["v"], g=raw, beta=logits, **asked)[0], expected)


@pytest.mark.parametrize("A_log", [True, False])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_kdas_gates(x: dict[str, Any], A_log: bool, lower_bound: float | None) -> None:
    raw, dt_bias, log = x["gk"] * 3, torch.randn(H * K), x["A_log"] if A_log else None
    asked = {"use_gate_in_kernel": True, "A_log": log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    if log is None and lower_bound is None:
        with pytest.raises(OptionError, match="use_gate_in_kernel=True needs A_log, one number a head"):
            ours.chunk_kda(x["q"], x["k"], x["v"], raw, x["beta"], **asked)
        return
    slope, moved = (log.exp() if A_log else torch.ones(H))[:, None], raw + dt_bias.view(H, K)
    gate = -slope * F.softplus(moved) if lower_bound is None else lower_bound * torch.sigmoid(slope * moved)
    expected, _ = ours.chunk_kda(x["q"], x["k"], x["v"], gate, x["beta"])
    close(ours.chunk_kda(x["q"], x["k"], x["v"], raw, x["beta"], safe_gate=lower_bound is not None, **asked)[0], expected)
    close(ours.fused_recurrent_kda(x["q"], x["k"], x["v"], raw, x["beta"], **asked)[0], expected)


@pytest.mark.parametrize("former_name", [False, True])
def test_states_of_the_other_layout_go_in_and_out_as_views(x: dict[str, Any], former_name: bool) -> None:
    arrays = x["q"], x["k"], x["v"], x["g"], x["beta"]
    layout = {"transpose_state_layout" if former_name else "state_v_first": True}
    expected, final = ours.chunk_gated_delta_rule(*arrays, initial_state=x["state"], output_final_state=True)
    given = {"initial_state": x["state"].mT.contiguous(), "output_final_state": True, **layout}
    with pytest.warns(DeprecationWarning, match="is now state_v_first") if former_name else contextlib.nullcontext():
        o, state = ours.chunk_gated_delta_rule(*arrays, **given)
    close(o, expected)
    close(state, final.mT)
    assert state.shape == (B, H, V, K)
    assert state.mT.is_contiguous()
    with pytest.raises(OptionError, match="state_v_first: transpose_state_layout is its former name; pass one of the two"):
        ours.chunk_gated_delta_rule(*arrays, state_v_first=True, transpose_state_layout=True)


def test_backwards_is_the_recurrence_from_the_last_token(x: dict[str, Any]) -> None:
    arrays = [x[name] for name in ("q", "k", "v", "gk")]
    o, state = ours.fused_recurrent_gla(*arrays, initial_state=x["state"], output_final_state=True, reverse=True)
    flipped, final = ours.fused_recurrent_gla(
        *(array.flip(1) for array in arrays), initial_state=x["state"], output_final_state=True
    )
    close(o, flipped.flip(1))
    close(state, final)


def test_packed_sequences_backwards(x: dict[str, Any]) -> None:
    arrays = [x[name][:1] for name in ("q", "k", "v", "gk")]
    offsets = torch.tensor([0, 5, 13])
    given = {"initial_state": x["state"], "output_final_state": True, "reverse": True}
    o, state = ours.fused_recurrent_gla(*arrays, cu_seqlens=offsets, **given)
    for n, (start, end) in enumerate([(0, 5), (5, 13)]):
        rows = [array[:, start:end] for array in arrays]
        alone, final = ours.fused_recurrent_gla(*rows, **given | {"initial_state": x["state"][n : n + 1]})
        close(o[:, start:end], alone)
        close(state[n], final[0])


def test_operands_of_several_dtypes_are_computed_in_the_widest(x: dict[str, Any]) -> None:
    q, k, v = x["q"].bfloat16(), x["k"].half(), x["v"]
    o, _ = ours.chunk_gla(q, k, v, x["gk"])
    expected, _ = ours.chunk_gla(q.float(), k.float(), v, x["gk"])
    assert o.dtype is torch.bfloat16
    close(o, expected.bfloat16())


def test_what_only_says_how_to_compute_changes_nothing(x: dict[str, Any]) -> None:
    arrays = [x[name][:1] for name in ("q", "k", "v", "gk", "beta")]
    offsets = torch.tensor([0, 5, 13])
    expected, _ = ours.chunk_kda(*arrays, cu_seqlens=offsets)
    o, _ = ours.chunk_kda(
        *arrays,
        cu_seqlens=offsets,
        cu_seqlens_cpu=offsets,
        chunk_indices=torch.zeros(3, 2),
        chunk_size=32,
        disable_recompute=True,
        use_graph=True,
        max_num_seqs=4,
        head_first=False,
    )
    assert torch.equal(o, expected)


@pytest.mark.parametrize(
    ("function", "names", "option", "text"),
    [
        (
            "chunk_kda",
            "q k v gk beta",
            {"cp_context": object()},
            "cp_context: expected a context of fla.ops.cp.build_cp_context with a group and cu_seqlens, got object",
        ),
        (
            "chunk_kda",
            "q k v gk beta",
            {"cp_context": SimpleNamespace(group=1, cu_seqlens=1, layout="zigzag")},
            "cp_context: layout='zigzag' is not served by linattn, only 'contiguous'",
        ),
        (
            "chunk_gated_delta_rule",
            "q k v g beta",
            {"cp_context": object(), "output_final_state": True},
            "chunk_gated_delta_rule: initial_state and output_final_state do not go with cp_context",
        ),
        (
            "chunk_kda",
            "q k v gk beta",
            {"return_intermediate_states": True},
            "chunk_kda: return_intermediate_states=True is not served by linattn",
        ),
        ("chunk_rwkv6", "q k v gk u", {"head_first": True}, "chunk_rwkv6: head_first=True is not served by linattn"),
        (
            "fused_recurrent_gated_delta_rule",
            "q k v",
            {"gv": object()},
            "fused_recurrent_gated_delta_rule: gv is not served by linattn",
        ),
        (
            "parallel_retention",
            "q k v",
            {"output_attentions": True},
            "parallel_retention: output_attentions=True is not served by linattn",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    x: dict[str, Any], function: str, names: str, option: dict[str, Any], text: str
) -> None:
    with pytest.raises(Unsupported) as refused:
        getattr(ours, function)(*(x[name] for name in names.split()), **option)
    assert str(refused.value) == text


def test_ranks_know_the_offsets_of_all() -> None:
    """A boundary of ranks is one of sequences where the next rank's first sequence begins there."""
    from linattn.integrations.fla_ranks import offsets_of_all

    assert offsets_of_all([([0, 8], True), ([0, 8], False)]) == [0, 16]
    assert offsets_of_all([([0, 3, 8], True), ([0, 8], True), ([0, 2, 8], False)]) == [0, 3, 8, 18, 24]
    assert offsets_of_all([([0, 8, 8, 8], True), ([0, 8, 8, 8], False)]) == [0, 16]
    assert offsets_of_all([([0, 3, 8, 8], True), ([0, 8], False)]) == [0, 3, 16]


def test_a_keyword_of_nobodys_is_an_error(x: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'use_l2norm'"):
        ours.chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"], use_l2norm=True)


def test_kdas_chunks_have_flas_sizes(x: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as refused:
        ours.chunk_kda(*(x[name] for name in ("q", "k", "v", "gk", "beta")), chunk_size=16)
    assert str(refused.value) == "chunk_kda: chunk_size must be 32 or 64, got 16"


def test_a_doubled_sigmoid_needs_the_sigmoid(x: dict[str, Any]) -> None:
    with pytest.raises(
        OptionError, match="allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True: it doubles the sigmoid"
    ):
        ours.chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"], allow_neg_eigval=True)


def test_gradients_flow_to_everything(x: dict[str, Any]) -> None:
    raw = x["g"] * 3
    leaves = [
        t.clone().requires_grad_() for t in (x["q"], x["k"], x["v"], raw, x["beta"], x["state"], x["A_log"], x["dt_bias"])
    ]
    q, k, v, g, beta, state, A_log, dt_bias = leaves
    o, final = ours.fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    (o.sum() + final.sum()).backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)


def test_enabled_flas_layers_run_on_a_cpu_and_afterwards_call_fla_again(fla: Any) -> None:
    layers = importlib.import_module("fla.layers.gla")
    before = layers.chunk_gla
    with ours.enable():
        assert stood_for(layers.chunk_gla) is before
        assert layers.chunk_gla is theirs("fla.ops.gla.chunk_gla")
        assert fla.chunk_gdn is fla.chunk_gated_delta_rule
    assert layers.chunk_gla is before
    assert theirs("fla.ops.gla.chunk_gla") is before


def test_enabled_a_refused_call_is_flas(fla: Any, x: dict[str, Any]) -> None:
    arrays = [x[name] for name in ("q", "k", "v", "gk", "beta")]
    with (
        ours.enable(),
        pytest.warns(
            FallbackWarning, match="fla.ops.kda.chunk_kda runs where it ran before, not on linattn: chunk_kda: initial_state"
        ),
        pytest.raises(AssertionError, match="not supported for CP"),
    ):
        fla.chunk_kda(*arrays, cp_context=object(), output_final_state=True)


def test_kda_is_nearer_the_truth_than_the_reference_that_its_tests_hold_it_to(fla: Any) -> None:
    """In bfloat16, with long keys that are nearly parallel, as fla's tests of ranks draw them, which allow 0.8 % of ``dq``."""
    torch.manual_seed(42)
    q, k = torch.randn(1, 160, 2, 128) + 1, 10 * torch.randn(1, 160, 2, 128) - 50
    rest = torch.randn(1, 160, 2, 128), -5 * (torch.randn(1, 160, 2, 128) - 5).sigmoid(), torch.randn(1, 160, 2).sigmoid()
    given = [x.bfloat16() for x in (q, k, *rest)]
    d = torch.randn(1, 160, 2, 128).bfloat16()

    def dq(function: Callable[..., Any], dtype: Any) -> Any:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        o, _ = function(*leaves)
        return torch.autograd.grad((o * d.to(dtype)).sum(), leaves[0])[0].double()

    def reference(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return theirs("fla.ops.kda.naive.naive_recurrent_kda")(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta)

    def served(*arrays: Any) -> Any:
        return ours.chunk_kda(*arrays, use_qk_l2norm_in_kernel=True)

    truth, expected, found = dq(reference, torch.float32), dq(reference, torch.bfloat16), dq(served, torch.bfloat16)
    assert (found - expected).norm() > 0.008 * truth.norm()
    assert (found - truth).norm() < (expected - truth).norm()


def test_a_chunk_in_bfloat16_is_further_off_than_the_tests_of_kda_allow() -> None:
    """Of such keys: with one operand of one product rounded, outputs are more than 0.8 % off, whatever else is exact."""
    torch.manual_seed(42)
    q, k = (F.normalize(x, dim=-1).double() for x in (torch.randn(64, 128) + 1, 10 * torch.randn(64, 128) - 50))
    v, beta = torch.randn(64, 128).double(), torch.randn(64).sigmoid().double()
    sums = (-5 * (8 * torch.randn(64, 128) - 32).sigmoid()).double().cumsum(0)
    decay = (sums[:, None] - sums).clamp(max=0).exp()
    q_k, k_k = (torch.einsum("tk,sk,tsk->ts", x, k, decay).tril() for x in (q, k))
    written = torch.linalg.solve(torch.eye(64) + beta[:, None] * k_k.tril(-1), beta[:, None] * v)
    o = q_k @ written
    for rounded in (q_k.bfloat16().double() @ written, q_k @ written.bfloat16().double()):
        assert (rounded - o).norm() > 0.008 * o.norm()
