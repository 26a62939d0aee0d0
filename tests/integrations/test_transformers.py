import functools
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import linattn.integrations.transformers as integration  # noqa: E402
from linattn.errors import ShapeError, Unsupported  # noqa: E402
from linattn.integrations import seams  # noqa: E402
from linattn.integrations.seams import FallbackWarning, stood_for  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]
pytestmark = pytest.mark.filterwarnings(
    "default", "error::linattn.integrations.seams.FallbackWarning"
)  # transformers' own warnings are its own


class Run(NamedTuple):
    logits: Any
    gradients: dict[str, Any]
    tokens: Any


def run(model: Any) -> Run:
    """What a model computes, is taught by, and says."""
    ids = tokens(model.device)
    logits, gradients = taught(model, ids)
    return Run(logits, gradients, model.generate(ids[:, :9], max_new_tokens=12, min_new_tokens=12, do_sample=False))


def tokens(device: Any) -> Any:
    return torch.randint(3, 99, (2, 21), generator=torch.Generator().manual_seed(1)).to(device)


def taught(model: Any, ids: Any) -> tuple[Any, dict[str, Any]]:
    """Logits, and the gradients of all parameters that have one."""
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class InFloat64(TorchFunctionMode):
    """What a model casts to float32 is cast to float64."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(*map(self.wider, args), **{name: self.wider(x) for name, x in (kwargs or {}).items()})

    def wider(self, x: Any) -> Any:
        return torch.float64 if x is torch.float32 else x


@functools.cache
def true_gradients(family: str) -> dict[str, Any]:
    """The gradients of the model of a family, by transformers' own code in float64, on a CPU."""
    model = tiny_models.model_of(family).double()
    model.set_experts_implementation("eager")  # a product of groups takes no float64
    with InFloat64():
        return taught(model, tokens("cpu"))[1]


def module_of(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def functions_of(family: str) -> list[Any]:
    return [getattr(module_of(family), seam.name) for seam in integration.seams_of_models() if seam.model == family]


FUSED = (
    *("bailing_hybrid", "glm5_next", "kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
    *("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "fuse"), [(family, False) for family in tiny_models.FAMILIES] + [(family, True) for family in FUSED]
)
def test_a_model_computes_learns_and_says_the_same_on_linattn(
    family: str, fuse: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are held against float64: two in float32 may differ by the roundings of either, and those of transformers'
    own code are the larger ones (of ``dt_bias`` of Qwen3-Next, forty times).
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # else transformers' convolution is not float32's
    model = tiny_models.model_of(family).to(device)
    theirs = run(model)
    with integration.enable(fuse=fuse):
        ours = run(model)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    truth = true_gradients(family)
    assert ours.gradients.keys() == theirs.gradients.keys() == truth.keys()
    for name, gradient in truth.items():
        most = gradient.abs().max().item()
        said = f"{name}, at most {most:.2g}: {{}}".format
        torch.testing.assert_close(ours.gradients[name].double().cpu(), gradient, rtol=1e-3, atol=1e-4 * most, msg=said)
    assert ours.tokens.tolist() == theirs.tokens.tolist()


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_while_enabled_every_served_function_of_a_model_is_ours_and_afterwards_none(family: str) -> None:
    tiny_models.model_of(family)
    served = {seam.name for seam in integration.served(integration.seams_of_models()) if seam.model == family}
    before = functions_of(family)
    with integration.enable():
        for seam in integration.seams_of_models():
            if seam.model == family:
                assert (stood_for(getattr(module_of(family), seam.name)) is not None) == (seam.name in served)
    assert all(now is then for now, then in zip(functions_of(family), before, strict=True))


def test_a_mixers_forward_is_ours_only_where_it_was_asked_for(said: pytest.LogCaptureFixture) -> None:
    tiny_models.model_of("qwen3_next")
    mixer = module_of("qwen3_next").Qwen3NextGatedDeltaNet
    before = mixer.forward
    integration.enable()
    assert mixer.forward is before
    integration.enable(fuse=True)
    assert stood_for(mixer.forward) is before
    integration.disable()
    assert mixer.forward is before
    first, second = (record.getMessage() for record in said.records)
    assert "forwards of" not in first
    assert second == f"{first}; forwards of {', '.join(integration.FORWARDS)}"


def test_enabled_twice_is_enabled_once() -> None:
    tiny_models.model_of("qwen3_next")
    before = functions_of("qwen3_next")
    integration.enable()
    once = functions_of("qwen3_next")
    integration.enable()
    assert functions_of("qwen3_next") == once
    integration.disable()
    assert functions_of("qwen3_next") == before


def test_a_block_that_fuses_gives_back_no_more_than_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.model_of("bamba")
    mixer, theirs = module_of("bamba").BambaMixer, functions_of("bamba")
    monkeypatch.setattr(sys.modules[__name__], "BambaMixer", lambda: None, raising=False)  # a name is no class yet
    before = mixer.forward
    with integration.enable():
        ours = functions_of("bamba")
        with integration.enable(fuse=True):
            assert stood_for(mixer.forward) is before
            with integration.enable():
                pass
            assert stood_for(mixer.forward) is before
        assert mixer.forward is before
        assert functions_of("bamba") == ours != theirs
    assert functions_of("bamba") == theirs


def test_mamba_1s_step_is_left_alone() -> None:
    served = {(seam.model, seam.function) for seam in integration.served(integration.seams_of_models())}
    assert ("mamba2", "selective_state_update") in served
    assert not {(model, "selective_state_update") for model in ("mamba", "jamba", "falcon_mamba")} & served


def test_what_is_served_is_said_in_one_line(said: pytest.LogCaptureFixture) -> None:
    integration.enable()
    (line,) = [record.getMessage() for record in said.records]
    assert line.startswith(f"transformers {transformers.__version__} on linattn, on cpu by torch")
    assert re.search(r"chunk_kda of bailing_hybrid, glm5_next, kimi_linear(;|$)", line)
    assert "selective_scan_fn" not in line


def test_a_seam_that_is_gone_is_said_by_name(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    found = integration.seams_of_models()
    monkeypatch.setattr(integration, "seams_of_models", lambda: tuple(seam for seam in found if "kda" not in seam.function))
    integration.enable()
    assert [record.getMessage() for record in said.records if record.levelname == "WARNING"] == [
        f"transformers {transformers.__version__} has no seam for fla.chunk_kda, fla.fused_recurrent_kda: these run where they "
        "ran. linattn looks for @use_kernel_func_from_hub_with_fallback in models/*/modeling_*.py"
    ]


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.seams_of_models.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match="needs transformers: pip install transformers"):
            integration.enable()
    assert integration._INTEGRATION.hook not in sys.meta_path


def test_a_module_whose_source_is_gone_is_said_and_left(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(module: Any) -> str:
        raise OSError("could not get source code")

    tiny_models.model_of("lfm2")
    before = functions_of("lfm2")
    monkeypatch.setattr(integration.inspect, "getsource", gone)
    integration.enable()
    assert functions_of("lfm2") == before
    assert "transformers.models.lfm2.modeling_lfm2: could not get source code, and its functions run where they ran" in [
        record.getMessage() for record in said.records if record.levelname == "WARNING"
    ]


def test_a_call_that_linattn_refuses_goes_where_it_went_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(q: Any, k: Any, v: Any, **options: Any) -> None:
        raise Unsupported("nothing here runs it")

    model = tiny_models.model_of("olmo_hybrid")
    theirs = run(model)
    monkeypatch.setitem(integration.FUNCTIONS, "fla.chunk_gated_delta_rule", refuse)
    with integration.enable(), pytest.warns(FallbackWarning) as warned:
        ours = run(model)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    assert [str(warning.message) for warning in warned if warning.category is FallbackWarning] == [
        "transformers.models.olmo_hybrid: chunk_gated_delta_rule runs where it ran before, not on linattn: nothing here runs it"
    ]


PACK = {"seq_idx": torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)}
PACK |= {"cu_seq_lens_q": torch.tensor([0, 5, 12], dtype=torch.int32)}
"""What a collator says of two sequences in a row of twelve tokens."""


def mixer_of(family: str):
    """The first recurrent layer of a small model."""
    model = tiny_models.model_of(family)
    return next(layer for layer in model.modules() if getattr(layer, "conv1d", None) is not None)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "glm5_next", "bamba"])
def test_packed_sequences_are_kept_apart_without_fla(family: str, fuse: bool) -> None:
    """transformers' own code refuses them; on linattn each row of the pack is what it is alone."""
    layer, x = mixer_of(family), torch.randn(1, 12, 32)
    with pytest.raises(ValueError, match="packed"):
        layer(x, **PACK)
    with integration.enable(fuse=fuse), torch.no_grad():
        packed, alone = layer(x, **PACK), torch.cat([layer(x[:, :5]), layer(x[:, 5:])], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_packed_sequences_beside_a_cache_are_warned_of(fuse: bool, compiled: bool) -> None:
    """transformers makes no mask for its softmax layers then, and does not refuse what recurrent layers keep apart now."""
    model, ids = tiny_models.model_of("qwen3_next"), torch.randint(3, 99, (1, 12))
    positions = torch.tensor([[*range(5), *range(7)]])
    seams.warned.cache_clear()
    with integration.enable(fuse=fuse), torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        apart = model(ids, position_ids=positions, use_cache=False, **PACK).logits
        alone = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :5], ids[:, 5:])], dim=1)
        assert [str(warning.message) for warning in warned if warning.category is UserWarning] == []
        torch._dynamo.reset()
        again = torch.compile(model, backend="eager") if compiled else model
        again(ids, position_ids=positions, use_cache=True, **PACK)
    torch.testing.assert_close(apart, alone, rtol=1e-4, atol=1e-5)
    assert [str(warning.message) for warning in warned if warning.category is UserWarning] == [
        "packed sequences come with a cache: recurrent layers keep them apart, but beside a cache transformers makes no mask"
        " that keeps them apart in softmax layers, and only FlashAttention does. Pass use_cache=False"
    ]


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "bamba"])
def test_a_mixer_with_another_activation_keeps_its_forward(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fused forward has not, the layer's own has."""
    monkeypatch.setitem(tiny_models.COMMON, "hidden_act", "gelu")
    layer, x = mixer_of(family), torch.randn(1, 12, 32)
    expected = layer(x)
    seams.warned.cache_clear()
    with integration.enable(fuse=True), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-6)
    reason = "its convolution's activation is 'gelu', which must be 'silu' or 'swish'"
    assert any(str(warning.message).endswith(f"not on linattn: {reason}") for warning in warned)


@pytest.mark.parametrize(
    "norm",
    [{}, {"mamba_rms_norm": True, "mamba_norm_before_gate": True}, {"mamba_rms_norm": True, "mamba_norm_before_gate": False}],
)
def test_a_fused_mixer_norms_gates_and_pads_as_its_own_forward(norm: dict[str, bool]) -> None:
    torch.manual_seed(0)
    config = tiny_models.config_of("falcon_h1")
    config.update(norm)
    mixer = transformers.FalconH1Model(config).layers[0].mamba
    x, mask = torch.randn(2, 12, 32), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0  # on the left, as in generation
    theirs = mixer(x, attention_mask=mask)
    with integration.enable(fuse=True):
        ours = mixer(x, attention_mask=mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_a_fused_mixer_gates_its_output_as_its_configuration_says(gate: str) -> None:
    """The attention of this family has no small configuration: its mixer is made alone."""
    config = transformers.Qwen4ExpTextConfig(**tiny_models.COMMON | tiny_models.GDN | {"output_gate_type": gate})
    torch.manual_seed(0)
    mixer, x = module_of("qwen4_exp").Qwen4ExpTextGatedDeltaNet(config, 0), torch.randn(2, 12, 32)
    theirs = mixer(x)
    with integration.enable(fuse=True):
        ours = mixer(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["cache_params", "cache"])
def test_a_fused_mixer_takes_its_cache_by_the_name_that_any_version_has(name: str) -> None:
    model = tiny_models.model_of("olmo_hybrid")
    mixer, x = model.model.layers[0].linear_attn, torch.randn(2, 4, 32)
    with torch.no_grad():
        theirs = mixer(x, attention_mask=None)
        with integration.enable(fuse=True):
            cache = transformers.DynamicCache(config=model.config)
            parts = [mixer(x[:, t : t + 1], **{name: cache}) for t in range(4)]
    torch.testing.assert_close(torch.cat(parts, 1), theirs, rtol=1e-4, atol=1e-6)


def test_a_mixer_with_another_signature_keeps_its_forward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mixer = type(tiny_models.model_of("olmo_hybrid").model.layers[0].linear_attn)

    def forward(self: Any, hidden_states: Any, memory: Any = None) -> Any:
        return hidden_states

    monkeypatch.setattr(mixer, "forward", forward)
    with integration.enable(fuse=True):
        assert mixer.forward is forward
    said = "transformers.models.olmo_hybrid: OlmoHybridGatedDeltaNet has no parameter cache, and its forward runs where it ran"
    assert said in caplog.text


class Noted:
    """A compiler that keeps the graphs that it is given, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph


@pytest.fixture
def exporting_all_that_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """``is_exporting()`` as compiled models see it in PyTorch 2.10 and 2.11. The compiler knows its functions by then."""
    torch.compile(lambda x: x + torch.compiler.is_exporting(), backend="eager")(torch.ones(1))
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: torch.compiler.is_compiling())


@pytest.mark.usefixtures("exporting_all_that_compiles")
@pytest.mark.parametrize(("family", "fuse"), [("olmo_hybrid", False), ("qwen3_5", True), ("bamba", True)])
def test_a_step_is_one_graph_of_linattns(family: str, fuse: bool) -> None:
    model, noted = tiny_models.model_of(family), Noted()
    ids = torch.randint(3, 99, (1, 12))
    with integration.enable(fuse=fuse), torch.no_grad():
        eager = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend=noted)(ids, use_cache=False).logits
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    (graph,) = noted.graphs
    mixers = sum(type(m).__name__ in integration.FORWARDS for m in model.modules())
    assert sum("linattn.matrix_state" in str(node.target) for node in graph.graph.nodes) == mixers


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("family", ["bamba", "kimi_linear", "olmo_hybrid", "qwen3_next"])
def test_a_compiled_step_teaches_the_same_on_cuda(family: str, fuse: bool) -> None:
    model = tiny_models.model_of(family).cuda()
    ids = tokens("cuda")
    with integration.enable(fuse=fuse):
        logits, gradients = taught(model, ids)
        model.compile(fullgraph=True, dynamic=False)
        compiled = taught(model, ids)
    torch.testing.assert_close(compiled, (logits, gradients), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["bamba", "kimi_linear", "olmo_hybrid"])
def test_a_token_of_fused_mixers_is_one_graph_and_overwrites_their_states(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No state is made beside the cache's, to be copied there."""
    model, noted = tiny_models.model_of(family), Noted()
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(1))

    def copied(*_: Any, **__: Any) -> Any:
        raise AssertionError("a state was made, and is to be copied")

    with integration.enable(fuse=True), torch.no_grad():
        caches = [transformers.StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
        name = integration.cache_parameter(model.forward)
        for cache in caches:
            model(ids, **{name: cache}, use_cache=True)
        monkeypatch.setattr(transformers.cache_utils.LinearAttentionLayer, "update_recurrent_state", copied)
        runs = model, torch.compile(model, fullgraph=True, dynamic=False, backend=noted)
        for n in range(3):
            token, pairs = ids[:, n : n + 1], zip(runs, caches, strict=True)
            eager, compiled = [run(token, **{name: cache}, use_cache=True).logits for run, cache in pairs]
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    assert len(noted.graphs) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("family", ["bamba", "kimi_linear", "olmo_hybrid", "qwen3_next"])
def test_a_token_that_is_replayed_goes_on_from_the_states_that_are_there(
    family: str, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA graph is recorded in the second call, and replayed from the third on."""
    model, ids = tiny_models.model_of(family).cuda(), tokens("cuda")
    model.set_experts_implementation("batched_mm")  # in float32 the usual one reads on the host how many tokens an expert has
    skips, played = torch._dynamo.utils.counters["inductor"], []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (played.append(graph), replay(graph))[1])
    with integration.enable(fuse=fuse), torch.no_grad():
        caches = [transformers.StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
        name = integration.cache_parameter(model.forward)
        for cache in caches:
            model(ids[:, :12], **{name: cache}, use_cache=True)
        replayed, before = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead"), skips["cudagraph_skips"]
        for n in range(12, 20):
            torch.compiler.cudagraph_mark_step_begin()
            found, expected = [
                run(ids[:, n : n + 1], **{name: cache}, use_cache=True).logits.clone()
                for run, cache in zip((replayed, model), caches, strict=True)
            ]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert skips["cudagraph_skips"] == before
    assert len(played) >= 6


@pytest.mark.parametrize("family", ["kimi_linear", "olmo_hybrid"])
def test_a_token_of_fewer_sequences_than_the_cache_has_is_refused(family: str) -> None:
    model = tiny_models.model_of(family)
    ids = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(1))
    with integration.enable(fuse=True), torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        model(ids, **{integration.cache_parameter(model.forward): cache}, use_cache=True)
        mixer = next(m for m in model.modules() if type(m).__name__ in integration.FORWARDS)
        with pytest.raises(ShapeError, match="initial_state must be"):
            mixer(torch.randn(2, 1, model.config.hidden_size), **{integration.cache_parameter(mixer.forward): cache})


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_an_exported_model_does_not_need_linattn(strict: bool, fuse: bool) -> None:
    layer = tiny_models.model_of("qwen3_next").model.layers[0].linear_attn
    with integration.enable(fuse=fuse):
        exported = torch.export.export(layer, (torch.randn(1, 6, 32),), strict=strict)
    assert "linattn" not in str(exported.graph)


SCRIPT = """
import torch, linattn.integrations.transformers as integration
integration.enable()
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM
model = OlmoHybridForCausalLM(OlmoHybridConfig(
    vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    layer_types=["linear_attention", "full_attention"], linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=2, pad_token_id=0))
ids = torch.randint(99, (1, 8))
model(ids, labels=ids).loss.backward()
print(model.generate(ids, max_new_tokens=4, min_new_tokens=4).shape)
"""


KERNELS = ("fla", "causal_conv1d", "mamba_ssm")
INSTALLED = pytest.mark.skipif(not any(map(importlib.util.find_spec, KERNELS)), reason="none of them is installed")


@pytest.mark.parametrize("hidden", [pytest.param((), id="as installed", marks=INSTALLED), pytest.param(KERNELS, id="none")])
def test_enabled_before_the_models_are_imported(hidden: tuple[str, ...]) -> None:
    """In a process of its own: with fla installed, transformers calls kernels of it, which no CPU runs."""
    script = "import sys\n" + f"sys.modules.update(dict.fromkeys({hidden!r}))" + SCRIPT
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "torch.Size([1, 12])\n", done.stderr


def test_run_with_serves_a_program_that_knows_nothing_of_linattn(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(SCRIPT).replace("integration.enable()", "print(__name__)"))
    done = subprocess.run(
        [sys.executable, "-m", "linattn", "run-with", "transformers", "--", sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["__main__", "torch.Size([1, 12])"]
    assert f"linattn: transformers {transformers.__version__} on linattn, on cpu by torch" in done.stderr
