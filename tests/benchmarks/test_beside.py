"""Layers and models beside one another: what is timed is the same function, without its projections, and what is said of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from linattn_benchmarks import beside, commands, elsewhere, environment, sections
from linattn_benchmarks.beside import Job, Prepared

torch = pytest.importorskip("torch")

from linattn_benchmarks import layers  # noqa: E402

JOB = Job("layer", "GLA", "linattn", 2, 12, "cpu", "float32", 3, ("fwd", "fwdbwd", "decode"), ("eager",), True, seconds=1e-3)


@pytest.fixture
def without_kernels(monkeypatch):
    """They are hidden in this process for one test only."""
    for name in beside.KERNELS:
        monkeypatch.setitem(sys.modules, name, None)


def prepared(job: Job) -> Prepared:
    torch.manual_seed(job.seed)
    return layers.prepared(job)


def timed(job: Job, ready: Prepared, what: str) -> beside.Row:
    row, call = beside.first_call(job, ready, "eager", what, beside.Deadline(600))
    for found in beside.timed(job, ready, row, call) if call else ():
        row |= found
    return row


# -- layers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", layers.TRANSFORMERS)
def test_transformers_layer_computes_what_ours_computes(name, tmp_path, without_kernels):
    pytest.importorskip("transformers")
    ours, theirs = tmp_path / "linattn.npz", tmp_path / "transformers.npz"
    for library, kept in (("linattn", ours), ("transformers", theirs)):
        ready = prepared(replace(JOB, name=name, library=library))
        assert beside.prove(ready, kept, beside.Deadline(600)) is None
        is_timed_every_way(ready)
    error = beside.compared(ours, theirs)
    assert error["ok"], error
    assert 0 < error["worst"] < 1e-4


@pytest.mark.parametrize("name", [name for name in layers.NAMES if name not in layers.TRANSFORMERS])
def test_layers_that_transformers_has_not_are_timed_every_way(name):
    is_timed_every_way(prepared(replace(JOB, name=name)))


def is_timed_every_way(ready: Prepared) -> None:
    for what in layers.WHATS:
        row = timed(JOB, ready, what)
        assert (row["status"], row["reason"]) == ("ok", None)
        assert row["ms"]["median"] > 0
        assert row["first_call_s"] > 0


@pytest.mark.parametrize("name", layers.NAMES)
def test_between_the_projections_no_wide_matrix_is_left(name):
    mixer = layers.MIXERS[name]
    layer = layers.made(mixer, replace(JOB, name=name))
    x = torch.randn(1, 5, layer.hidden_size)
    between = layers.without_projections(layer, x, torch.float32, mixer.mixed)
    linear = [module for module in between.modules() if isinstance(module, torch.nn.Linear)]
    assert all(min(module.weight.shape) < layer.hidden_size for module in linear)
    assert sum(isinstance(module, layers.Passed) for module in between.modules()) == (4 if mixer.mixed else 1)


def test_what_a_projection_made_gets_a_gradient_and_the_result_is_the_layers():
    layer = layers.made(layers.MIXERS["GLA"], JOB)
    x = torch.randn(1, 5, layer.hidden_size)
    between = layers.without_projections(layer, x, torch.float32, mixed=False)
    y = between(x)
    torch.testing.assert_close(y @ layer.o_proj.weight.T, layer(x))
    y.sum().backward()
    assert all(getattr(between, name).y.grad.abs().sum() > 0 for name in ("q_proj", "k_proj", "v_proj", "g_proj"))


def test_a_token_without_its_axis_gets_what_was_made_of_it():
    """Layers that decode drop the axis of time before they project."""
    given = layers.Given(torch.arange(6.0).reshape(2, 1, 3))
    assert given(torch.ones(2, 7)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert given.weight.device.type == "cpu"


def test_a_layer_whose_last_projection_is_called_otherwise_is_refused():
    with pytest.raises(layers.OptionError, match=r"^ReLU has no projection named o_proj or out_proj$"):
        layers.without_projections(torch.nn.ReLU(), torch.ones(1), torch.float32, mixed=False)


def test_who_has_a_layer():
    assert layers.libraries("Mamba-2") == ("linattn", "fla", "mamba_ssm", "transformers")
    assert layers.libraries("RWKV-7") == ("linattn", "fla")


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_olmo(monkeypatch, without_kernels):
    """The models, of which OLMo-Hybrid at reduced sizes is tiny."""
    pytest.importorskip("transformers")
    from linattn_benchmarks import models

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    tiny = replace(models.MODELS["olmo_hybrid"], small={**sizes, **heads})
    monkeypatch.setitem(models.MODELS, "olmo_hybrid", tiny)
    return models


def test_a_model_is_the_same_every_way(tmp_path, tiny_olmo):
    models = tiny_olmo
    job = replace(JOB, benchmark="model", name="olmo_hybrid", whats=models.WHATS, layers=4)
    assert models.libraries("olmo_hybrid") == ("linattn", "linattn, fused", "fla", "transformers")
    for library in ("linattn", "linattn, fused", "transformers"):
        ready = models.prepared(replace(job, library=library))
        kept = tmp_path / f"{library}.npz"
        assert beside.prove(ready, kept, beside.Deadline(600)) is None
        assert beside.compared(tmp_path / "linattn.npz", kept)["ok"]
        with ready.timed():
            rows = [timed(job, ready, what) for what in models.WHATS]
        assert [(row["status"], row["reason"]) for row in rows] == [("ok", None)] * 4


def test_a_compiled_model_decodes_with_one_graph(tiny_olmo):
    ready = tiny_olmo.prepared(replace(JOB, benchmark="model", name="olmo_hybrid", layers=2))
    graphs = []

    def counted(graph, _):
        graphs.append(graph)
        return graph.forward

    with ready.timed():
        call = ready.calls["decode"](lambda model: torch.compile(model, fullgraph=True, dynamic=False, backend=counted))
        first = call()
        others = [call() for _ in range(9)]
        grown = ready.calls["decode"](lambda model: model)()
    assert len(graphs) == 1
    assert all(x.isfinite().all() for x in others)
    torch.testing.assert_close(first, grown)


def test_a_still_cache_goes_on_after_the_same_tokens_in_every_call(tiny_olmo, monkeypatch):
    ready, caches = tiny_olmo.prepared(replace(JOB, benchmark="model", name="olmo_hybrid", layers=4)), []
    monkeypatch.setattr(tiny_olmo, "still", lambda *given, make=tiny_olmo.still: caches.append(make(*given)) or caches[-1])
    with ready.timed():
        call = ready.calls["decode"](lambda model: lambda *ids, **given: model(*ids, **given))  # not the model, as if compiled
        (cache,) = caches
        (attention,) = [layer for layer in cache.layers if hasattr(layer, "cumulative_length")]
        kept = attention.keys[:, :, : JOB.T].clone()
        assert (attention.max_cache_len, attention.cumulative_length.item()) == (JOB.T + 1, JOB.T)
        for _ in range(2):
            call()
            assert attention.cumulative_length.item() == JOB.T + 1
            assert torch.equal(attention.keys[:, :, : JOB.T], kept)  # what the tokens before left
            assert attention.keys[:, :, JOB.T].any()
    del attention.cumulative_length
    with pytest.raises(
        TypeError, match="layer 3 of the cache, a StaticLayer, keeps keys and has no tensor cumulative_length: "
    ):
        call()


def test_a_cache_that_grows_goes_on_where_it_is(tiny_olmo):
    model = tiny_olmo.made(replace(JOB, benchmark="model", name="olmo_hybrid", layers=2), True, torch.float32)
    cache = tiny_olmo.growing(model)
    name = tiny_olmo.integration.cache_parameter(model.forward)
    for length in (3, 6):
        model(torch.ones(1, 3, dtype=int), **{name: cache}, use_cache=True)
        tiny_olmo.rewind(cache, 1)
        assert cache.get_seq_length() == length


def test_a_package_that_cannot_be_imported_is_not_timed_as_transformers_own_code(monkeypatch):
    pytest.importorskip("transformers")
    from linattn_benchmarks import models

    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    with pytest.raises(ModuleNotFoundError, match="mamba_ssm"):
        models.prepared(replace(JOB, benchmark="model", name="bamba", library="mamba_ssm"))


def test_models_have_the_published_sizes_and_as_many_layers_as_asked():
    pytest.importorskip("transformers")
    from linattn_benchmarks import models

    for name, hybrid in models.MODELS.items():
        config = hybrid.config(layers=4, small=False)
        assert config.num_hidden_layers == 4, name
        assert config.hidden_size >= 2048, name
    assert models.MODELS["bamba"].config(2, small=True).hidden_size == 1024
    assert models.libraries("bamba") == ("linattn", "linattn, fused", "mamba_ssm", "transformers")


def test_without_its_mixers_a_model_has_the_same_parameters_and_teaches_none_of_theirs(monkeypatch, without_kernels):
    pytest.importorskip("transformers")
    from linattn_benchmarks import models

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "mamba_n_heads": 4, "mamba_d_head": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    monkeypatch.setitem(models.MODELS, "bamba", replace(models.MODELS["bamba"], small={**sizes, **heads}))
    job = replace(JOB, benchmark="model", name="bamba", whats=models.WHATS, layers=2)
    model = models.made(job, True, torch.float32)
    rest = models.without_mixers(model)
    assert [type(layer.mamba).__name__ for layer in model.model.layers[:1]] == ["BambaMixer"]
    assert type(rest.model.layers[0].mamba) is models.HandsOn
    ids = torch.randint(1, 64, (1, 9))
    rest(ids, labels=ids).loss.backward()
    taught = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name, _ in model.named_parameters()} - taught == {
        f"model.layers.0.mamba.{name}" for name, _ in model.model.layers[0].mamba.named_parameters()
    }


def test_between_calls_a_model_keeps_no_gradients(monkeypatch, without_kernels):
    pytest.importorskip("transformers")
    from linattn_benchmarks import models

    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(models, "made", lambda *_: model)
    ready = models.prepared(replace(JOB, benchmark="model", name="bamba"))
    ready.idle()  # before there is a model
    model.config = SimpleNamespace(vocab_size=9)
    ready.calls["train"](lambda model: model)
    model(torch.ones(2)).sum().backward()
    ready.idle()
    assert model.weight.grad is None


# -- one library in a process of its own -------------------------------------------------------------------------------


def test_a_library_that_differs_is_said_to_be_wrong(tmp_path):
    def error(factor):
        y = torch.tensor([1.0, 2.0])
        for name, made in (("ours", y), ("theirs", y * factor)):
            kept = tmp_path / f"{name}.npz"
            assert (
                beside.prove(Prepared(lambda made=made: {"y": made}, {}, contextlib.nullcontext), kept, beside.Deadline(600))
                is None
            )
        return beside.compared(tmp_path / "ours.npz", tmp_path / "theirs.npz")

    assert error(1.0001)["ok"]
    assert not error(1.1)["ok"]
    assert error(1.1)["worst"] == pytest.approx(0.1)
    assert not error(float("nan"))["ok"]


def test_a_proof_that_cannot_be_made_leaves_the_calls(tmp_path):
    def refuse():
        raise ZeroDivisionError("no heads")

    kept = tmp_path / "theirs.npz"
    assert (
        beside.prove(Prepared(refuse, {}, contextlib.nullcontext), kept, beside.Deadline(600)) == "ZeroDivisionError: no heads"
    )
    assert not kept.exists()


def test_a_library_without_what_it_would_call_is_timed_and_it_is_said(monkeypatch):
    absent = beside.Library("numpy", "numpy", calls=("numpy", "no_such_convolution"))
    monkeypatch.setitem(layers.LIBRARIES, "linattn", absent)
    assert absent.refusal("cpu") is None
    assert timed(JOB, prepared(JOB), "fwd")["note"] == "without no_such_convolution"
    monkeypatch.setattr(beside, "called", lambda make, mode: (make(lambda function: function), "more than one graph"))
    assert timed(JOB, prepared(JOB), "fwd")["note"] == "more than one graph, without no_such_convolution"
    monkeypatch.setitem(layers.LIBRARIES, "linattn", absent._replace(kinds=("cuda",)))
    (row,) = beside.run([replace(JOB, whats=("fwd",))], 1)
    assert (row["status"], row["note"]) == ("skipped", None)
    assert beside.Library("numpy", "numpy", calls=("numpy",)).lacks is None


def test_first_calls_end_in_time():
    def slow(compile_):
        return lambda: time.sleep(20)

    soon = beside.Deadline(0.2)
    ready = Prepared(dict, {"fwd": slow}, contextlib.nullcontext)
    for _ in range(2):  # what comes after is not begun
        row, call = beside.first_call(JOB, ready, "eager", "fwd", soon)
        assert call is None
        assert (row["status"], row["reason"]) == ("failed", "TimeoutError: first calls took longer than 0 s")


def test_a_call_that_breaks_the_graph_is_compiled_in_parts(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="eager", **options))

    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    def maker(function):
        return lambda compile_: (lambda run: lambda: run(torch.ones(2)))(compile_(function))

    assert beside.called(maker(lambda x: x + 1), "compiled")[1] is None
    call, note = beside.called(maker(broken), "compiled")
    assert note == "more than one graph"
    assert call().tolist() == [4.0, 4.0]


@pytest.mark.parametrize(("mode", "told", "times"), [("compiled", {}, 1), ("replayed", {"mode": "reduce-overhead"}, 2)])
def test_a_replayed_call_is_recorded_before_it_is_timed(monkeypatch, mode, told, times):
    compiled, made = [], []
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled.append(options) or f)
    beside.called(lambda compile_: compile_(lambda: made.append(1)), mode)
    assert compiled == [{"fullgraph": True, "dynamic": False, **told}]
    assert len(made) == times


def test_a_remark_says_what_is_not_replayed(monkeypatch):
    def skipping():
        torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] += 1

    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    assert beside.called(lambda compile_: compile_(skipping), "replayed")[1] == "not all of it replayed"


@pytest.mark.parametrize("library", ["linattn", "fla"])
def test_what_a_benchmark_compiles_is_no_export(library):
    pytest.importorskip("transformers")
    from linattn_benchmarks import models

    usual = torch.compiler.is_exporting

    def told(x):
        return x + torch.compiler.is_exporting()

    with models.way(library):
        assert torch.compiler.is_exporting is usual
    with models.way(library, compiled=True):
        assert torch.compile(told, backend="eager", fullgraph=True)(torch.zeros(1)).item() == 0
        assert torch.compiler.is_exporting is not usual
    assert torch.compiler.is_exporting is usual


def test_a_call_that_fails_leaves_the_others(monkeypatch):
    def refuse(compile_):
        raise ZeroDivisionError("no heads\nat all")

    row = timed(JOB, Prepared(dict, {"fwd": refuse}, contextlib.nullcontext), "fwd")
    assert (row["status"], row["reason"], row["ms"]) == ("failed", "ZeroDivisionError: no heads", None)


def test_a_quick_call_is_timed_in_every_turn_and_a_slow_one_until_its_time_is_spent(monkeypatch):
    asked = []

    class Clock:
        def times(self, call, seconds):
            asked.append(seconds)
            return [call()]

        def release(self):
            """Nothing."""

    def turns(ms, mode="eager"):
        asked.clear()
        job, ready = replace(JOB, seconds=1.0), Prepared(dict, {}, contextlib.nullcontext)
        *before, last = beside.timed(job, ready, {"mode": mode}, lambda: ms)
        assert len(before) == beside.TURNS - 1
        assert last.get("peak_bytes") == {"eager": 7, "replayed": None}[mode]
        assert last["ms"]["median"] == ms
        assert [found.keys() for found in before] == [{"ms"}] * len(before)
        return asked

    monkeypatch.setitem(beside.RUNNERS, "torch", lambda device: Clock())
    monkeypatch.setattr(beside.fresh, "peak_of", lambda runner, call: {"peak_bytes": 7})
    monkeypatch.setattr(beside, "TURNS", 4)
    assert turns(1) == [0.25] * 4
    assert turns(400) == [0.25] * 3  # of 250, 500, 750 and 1,000 ms by then 0, 400, 800 and 800 are spent
    assert turns(2000) == [0.25]
    assert turns(2000, "replayed") == [0.25]


def test_a_call_that_fails_in_a_turn_answers_for_those_that_are_left():
    """And has given back what it held before the first of them."""
    calls, given_back = iter(range(3)), []
    ready = Prepared(dict, {}, contextlib.nullcontext, lambda: given_back.append(1))
    answers = beside.timed(JOB, ready, {"mode": "eager"}, lambda: next(calls))
    first = next(answers)
    assert given_back == [1]
    assert [first, *answers] == [{"status": "failed", "reason": "StopIteration: no message"}] * beside.TURNS


def test_libraries_take_turns_at_each_call(monkeypatch):
    """Of what two are asked, call by call."""
    asked = []

    class Asked:
        def __init__(self, job, folder):
            self.job = job

        rows = beside.Timed.rows

        def agreement(self):
            return None

        def next(self):
            asked.append(self.job.library)
            return {}

        def __enter__(self):
            return self

        def __exit__(self, *_):
            """Nothing to end."""

        process = property(lambda self: self)

    monkeypatch.setattr(beside, "Timed", Asked)
    monkeypatch.setattr(Job, "refusal", None)
    jobs = [replace(JOB, library=library, whats=("fwd", "decode")) for library in ("linattn", "transformers")]
    rows = list(beside.run(jobs, 2))
    assert [(row["library"], row["what"]) for row in rows] == [
        (job.library, what) for what in ("fwd", "decode") for job in jobs
    ]
    assert asked == ["linattn", "transformers"] * (2 * beside.TURNS)


def test_a_process_without_an_answer_says_why():
    with pytest.raises(elsewhere.NoAnswer, match=r"No module named linattn_benchmarks\.nowhere"):
        elsewhere.ask("linattn_benchmarks.nowhere", {}, 60)
    with pytest.raises(elsewhere.NoAnswer, match="took longer than 0 s"):
        elsewhere.ask("linattn_benchmarks.fresh", {}, 0.01)


def test_answers_are_given_when_they_are_wanted(tmp_path, monkeypatch):
    (tmp_path / "counts.py").write_text(COUNTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with elsewhere.Process("counts", {"to": 2}) as process:
        assert process.answer(60) == 1
        process.say()
        assert process.answer(60) == 2
        process.say()
        with pytest.raises(elsewhere.NoAnswer, match=r"^ValueError: that is all$"):
            process.answer(60)


COUNTS = """
from linattn_benchmarks import elsewhere

def counted(question):
    yield from range(1, question["to"] + 1)
    raise ValueError("that is all")

elsewhere.answers(counted)
"""


def test_rows_of_a_library_that_cannot_be_called_say_why(monkeypatch):
    def rows(job):
        return [(row["what"], row["status"], row["reason"]) for row in beside.run([job], 1)]

    monkeypatch.setitem(layers.LIBRARIES, "fla", beside.Library("no-such-thing", "no_such_thing"))
    assert rows(replace(JOB, library="fla")) == [(what, "skipped", "no-such-thing is not installed") for what in JOB.whats]
    monkeypatch.setitem(layers.LIBRARIES, "fla", beside.Library("linattn", "linattn", ("cuda",)))
    assert rows(replace(JOB, library="fla"))[0] == ("fwd", "skipped", "runs on cuda, not on cpu")
    monkeypatch.setattr(elsewhere, "sys", SimpleNamespace(executable="/bin/false"))
    assert rows(JOB) == [(what, "failed", "ended with status 1") for what in JOB.whats]


# -- what is shown -----------------------------------------------------------------------------------------------------


def row(library, ms=None, **fields):
    usual = {"name": "GLA", "what": "fwd", "mode": "eager", "label": "B1 T8", "status": "ok", "reason": None, "note": None}
    memory = {"peak_bytes": 3 << 20, "peak_of": "device allocator"}
    return {**usual, **memory, "library": library, "ms": ms and {"median": ms}, "first_call_s": 1.5, "error": None, **fields}


def results(*rows):
    return {"settings": {"dtype": "float32"}, "rows": list(rows)}


def test_tables_and_ratios():
    skipped = row("fla", status="skipped", reason="runs on cuda, not on cpu")
    off = row("other", 5.0, status="wrong", error={"worst": 0.5, "bound": 0.002, "ok": False}, note="more than one graph")
    found = results(row("linattn", 2.0), skipped, row("transformers", 8.0, peak_bytes=None), off)
    times, peaks, remarks = beside.sections(found)
    assert times == sections.Section(
        "GLA, B1 T8, float32: ms", ("what", "linattn", "transformers", "other"), [("forward, eager", "2", "8", "5 (WRONG)")]
    )
    assert peaks.lines == [("forward, eager", "3.0 MiB", "–", "3.0 MiB (WRONG)")]
    assert remarks.lines == [
        ("fla", "GLA", "skipped: runs on cuda, not on cpu"),
        ("other", "GLA", "differs from linattn by 0.5 of the largest value, in float32"),
        ("other", "GLA", "more than one graph"),
    ]
    ((title, lines, columns, cells),) = beside.heatmaps(found)
    assert (title, lines, columns) == ("time of linattn over that of", ["GLA, B1 T8, forward, eager"], ["transformers"])
    assert cells == {("GLA, B1 T8, forward, eager", "transformers"): 0.25}
    assert not beside.succeeded(found)


def test_what_a_step_takes_longer_with_its_mixers_is_theirs():
    ours = [
        row("linattn", 9.0, what="train"),
        row("linattn", 5.0, what="rest"),
        row("linattn", 7.0, what="train", mode="compiled"),
    ]
    found = results(*ours, row("fla", 13.0, what="train"), row("fla", 5.0, what="rest"))
    times, *_ = beside.sections(found)
    assert times.lines == [
        ("training step, eager", "9", "13"),
        ("training step without the mixers, eager", "5", "5"),
        ("training step, compiled", "7", "–"),
        ("mixers of a training step, eager", "4", "8"),
    ]
    ((_, _, _, cells),) = beside.heatmaps(found)
    assert cells == {
        ("GLA, B1 T8, training step, eager", "fla"): 9 / 13,
        ("GLA, B1 T8, mixers of a training step, eager", "fla"): 0.5,
    }


def test_a_step_without_mixers_is_that_of_the_same_model_and_shape():
    longer = [row("linattn", 30.0, what="train", label="B1 T16"), row("fla", 40.0, what="train", label="B1 T16")]
    longer += [row("linattn", 20.0, what="rest", label="B1 T16"), row("fla", 20.0, what="rest", label="B1 T16")]
    shorter = [row("linattn", 9.0, what="train"), row("fla", 13.0, what="train")]
    shorter += [row("linattn", 5.0, what="rest"), row("fla", 5.0, what="rest")]
    ((_, _, _, cells),) = beside.heatmaps(results(*shorter, *longer))
    mixers = {line: ratio for (line, _), ratio in cells.items() if "mixers" in line}
    assert list(mixers.values()) == [0.5, 0.5]


def test_two_shapes_of_one_layer_have_a_table_each():
    longer = [row("linattn", 4.0, label="B1 T16"), row("fla", 1.0, label="B1 T16")]
    first, _, second, _ = beside.sections(results(row("linattn", 2.0), *longer))
    assert (first.lines, second.lines) == ([("forward, eager", "2")], [("forward, eager", "4", "1")])


def test_success_is_something_of_ours_and_nothing_failed():
    assert beside.succeeded(results(row("linattn", 2.0), row("fla", status="skipped", reason="away")))
    assert beside.succeeded(results(row("linattn", 2.0), row("fla", status="failed", reason="theirs")))
    assert not beside.succeeded(results(row("linattn", 2.0), row("linattn, fused", status="failed", reason="ours")))
    assert not beside.succeeded(results(row("transformers", 2.0)))


def test_files_of_several_runs_are_shown_as_one(run, tmp_path):
    def file(name, *rows, benchmark="layer"):
        environment.write(tmp_path / name, benchmark, results(*rows))
        return str(tmp_path / name)

    first = file("first.json", row("linattn", 2.0), row("fla", status="failed", reason="out of memory"))
    second = file("second.json", row("linattn", 9.0), row("fla", 5.0))
    out = tmp_path / "both.json"
    done = run("report", first, second, "--out", str(out))
    assert done.exit_code == 0, done.output
    rows = environment.read(out)["results"]["rows"]
    assert [(r["library"], r["ms"]["median"]) for r in rows] == [("linattn", 2.0), ("fla", 5.0)]
    done = run("report", first, file("third.json", row("linattn", 2.0), benchmark="model"))
    assert done.exit_code == 2
    assert "results files of one of operators, parts, layer, model, or one file of table" in " ".join(
        done.output.replace("│", " ").split()
    )


# -- the command -------------------------------------------------------------------------------------------------------


def test_through_the_command(run, tmp_path):
    """In processes of their own, and shown again from the file."""
    out, page = tmp_path / "layer.json", tmp_path / "layer.html"
    words = ("--small", "--shape", "B=1,T=8", "--modes", "eager", "--what", "fwd", "--seconds", "0.01", "--peer", "fla")
    done = run("layer", "gla", *words, "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "GLA, B1 T8, float32: ms" in done.output
    content = environment.read(out)
    assert content["benchmark"] == "layer"
    assert [(r["library"], r["status"]) for r in content["results"]["rows"]] == [("linattn", "ok"), ("fla", "skipped")]
    assert run("report", str(out), "--html", str(page)).exit_code == 0
    assert "GLA, B1 T8, float32: ms" in page.read_text()
    assert json.loads(out.read_text())["results"]["settings"]["small"] is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("layer", "GLAA"),
            "layer: unknown name 'GLAA': did you mean 'GLA'? known are Qwen3-Next, Kimi Linear, Mamba-2, GLA, ",
        ),
        (("layer", "--shape", "B=1,H=2"), "--shape B=1,H=2: layers and models have their own sizes: expected B and T, got H"),
        (("layer", "--what", "train"), "--what: unknown 'train': known are fwd, fwdbwd, decode"),
        (
            ("layer", "--modes", "compile"),
            "--modes: unknown 'compile': did you mean 'compiled'? known are eager, compiled, replayed",
        ),
        (("layer", "--layers", "2"), "--layers goes with model, not with layer"),
        (
            ("layer", "--gates", "weak"),
            "--gates goes with operators, table, grid, scale and overhead --device cuda, not with",
        ),
        (("grid", "--small"), "--small goes with parts, layer and model, not with grid"),
        (("model",), "model: name at least one of qwen3_next, qwen3_5, kimi_linear, bamba, nemotron_h, olmo_hybrid"),
    ],
)
def test_bad_input(run, words, message):
    done = run(*words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_every_library_of_every_layer_is_a_job():
    settings = {"device": "cpu", "dtype": "float32", "seed": 1}
    asked = commands.Asked(settings, (), 0.1, small=True, shape=["B=1/2,T=8"], peers=["transformers"])
    jobs = commands.jobs_of("layer", ["GLA", "Mamba-2"], asked)
    assert [(job.name, job.B, job.library) for job in jobs] == [
        ("GLA", 1, "linattn"),
        ("GLA", 2, "linattn"),
        ("Mamba-2", 1, "linattn"),
        ("Mamba-2", 1, "transformers"),
        ("Mamba-2", 2, "linattn"),
        ("Mamba-2", 2, "transformers"),
    ]
