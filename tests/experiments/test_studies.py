"""Studies on the protocol: what models learn side by side they learn alone, rates are chosen, schedules are doubled."""

from __future__ import annotations

import json
import math
import random
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from experiments import __main__ as command  # noqa: E402
from experiments import batched, crew, graphs, pages, protocol, runner, studies  # noqa: E402
from experiments.checks import CHECKS  # noqa: E402
from experiments.frame import Model, ScaleNorm, of  # noqa: E402
from experiments.mixers import GATES, GatedMixer, layer  # noqa: E402
from experiments.protocol import RATES, Setting, Study  # noqa: E402
from experiments.record import DOCS  # noqa: E402
from experiments.schedule import rise_and_fall  # noqa: E402
from experiments.studies import rows  # noqa: E402
from experiments.studies.flash import quad, units  # noqa: E402
from experiments.tasks import Recall, Text, read  # noqa: E402
from linattn_conformance import packed  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402

STUDIES = {name: studies.study(name) for name in studies.NAMES}


@pytest.fixture
def little(monkeypatch):
    """Text of a thousand bytes in the place of what is installed."""
    generator = torch.Generator().manual_seed(0)
    parts = {
        part: torch.randint(256, (1000,), generator=generator, dtype=torch.uint8) for part in ("training", "validation", "test")
    }
    monkeypatch.setattr("experiments.tasks.read", lambda packages: parts)


# -- side by side ----------------------------------------------------------------------------------------------------


def alone(make, task, rate, seed, steps):
    """The same training of one model, written out as one would: a loss, clipped gradients, AdamW."""
    model = batched.seeded(make, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    stream, carried = task.batches(seed), {}
    for step in range(steps):
        ids, targets, fresh = next(stream)
        carried = {} if fresh else carried
        for group in optimiser.param_groups:
            group["lr"] = rate * rise_and_fall(step / steps)
        logits, carried = model(ids, carried)
        carried = {name: x.detach() for name, x in carried.items()}
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return model


SIDE_BY_SIDE = {
    "GLA on recall": (of(rows.gla), lambda: Recall(4, 3), True),
    "softmax on text": (of(rows.softmax), lambda: Text(16, 2), True),
    "FLASH on text": (of(partial(units, expand=1.0)), lambda: Text(16, 2), True),
    "FLASH-Quad, both sides": (of(partial(quad, causal=False)), lambda: Text(16, 2, masked=True), True),
    "GLA, carried": (of(rows.gla, carries=True), lambda: Text(16, 2, segments=3), False),
    "RetNet, carried": (of(rows.retnet, carries=True), lambda: Text(16, 2, segments=3), False),
}


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_models_learn_side_by_side_what_each_learns_alone(name, little):
    """In float64, over steps enough for moments, clipping and segments to matter; two rates and two seeds."""
    build, task, convolution = SIDE_BY_SIDE[name]
    task, setting = task(), Setting(width=16, depth=1, heads=2, length=16, chunk=4, convolution=convolution)
    make, rates, seeds, steps = (lambda: build(setting, task).double()), (1e-3, 1e-2), [0, 5], 4
    models = batched.Batched(make, rates, seeds, steps)
    streams, carried = [task.batches(seed) for seed in seeds], None
    for _ in range(steps):
        drawn = [next(stream) for stream in streams]
        _, carried = models.step([(ids, targets) for ids, targets, _ in drawn], None if drawn[0][2] else carried)
    assert models.members == [(1e-3, 0), (1e-3, 5), (1e-2, 0), (1e-2, 5)]
    for i, (rate, seed) in enumerate(models.members):
        for key, p in alone(make, task, rate, seed, steps).named_parameters():
            torch.testing.assert_close(
                models.parameters[key][i], p.detach(), rtol=1e-7, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}"
            )


def test_they_learn_to_recall():
    task = Recall(4, 32, keys=8)
    setting = Setting(width=32, depth=2, heads=2)
    runs = batched.train(lambda: of(rows.softmax)(setting, task), task, (1e-2,), [0], 100)
    assert all(len(run["course"]) == batched.MARKS for run in runs)
    assert all(run["course"][0]["recalled"] < 0.3 < 0.6 < run["test"]["recalled"] for run in runs)


def test_a_model_that_broke_down_recalls_no_share(little):
    task, setting = Recall(4, 8), Setting(width=16, depth=1, heads=2)
    models = batched.Batched(lambda: of(rows.softmax)(setting, task), (1e-2,), [0, 1], 1)
    for parameter in models.parameters.values():
        parameter.data[1] = torch.nan
    sound, broken = batched.scores(models, task, "test")
    assert 0 <= sound["recalled"] <= 1
    assert broken == {"recalled": None}


def test_those_that_have_learned_enough_stop():
    task, setting = Recall(4, 8), Setting(width=16, depth=1, heads=2)
    make, seen = (lambda: of(rows.softmax)(setting, task)), []
    enough = lambda members, scores: seen.append((members, scores)) or len(seen) == 3  # noqa: E731
    (run,) = batched.train(make, task, (1e-2,), (5,), 20, enough=enough)
    assert (run["steps"], run["taken"], len(run["course"])) == (20, 6, 3)
    assert seen[-1] == ([(1e-2, 5)], [run["validation"]])


def test_what_would_not_end_in_time_is_left(monkeypatch):
    task, setting = Recall(4, 8), Setting(width=16, depth=1, heads=2)
    make = lambda: of(rows.softmax)(setting, task)  # noqa: E731
    with pytest.raises(batched.OutOfTime, match="its deadline is over"):
        batched.train(make, task, (1e-2,), (0,), 2, deadline=time.time() - 1)
    monkeypatch.setattr(batched.Clock, "FIRST", 2)
    monkeypatch.setattr(batched.Clock, "MORE", 2)
    with pytest.raises(batched.OutOfTime, match=r"^1000000 steps of [\d.]+ ms$"):
        batched.train(make, task, (1e-2,), (0,), 10**6, deadline=time.time() + 60)


def test_one_that_diverges_is_written_as_none_and_leaves_the_others_alone(little):
    task, setting = Text(16, 2, scored=64), Setting(width=16, depth=1, heads=2)
    make = lambda: of(rows.linear)(setting, task)  # noqa: E731
    wild, tame = batched.train(make, task, (1e30, 1e-3), [0], 3)
    assert wild["test"]["bits"] is None
    assert 4 < tame["test"]["bits"] < 12
    json.dumps([wild, tame], allow_nan=False)


class Graph:
    """In the place of a CUDA graph: counts how often it is replayed, and knows where it was recorded."""

    replays, stream, ended = 0, None, False

    def replay(self):
        self.replays += 1

    def reset(self):
        self.ended = True


@pytest.fixture
def streams(monkeypatch):
    """In the place of CUDA's streams: the current one, which can be changed, and the default one."""
    at = {"current": "default"}

    def capture(graph, stream, capture_error_mode):
        graph.stream = stream
        return nullcontext()

    monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
    monkeypatch.setattr("torch.cuda.graph", capture)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: at["current"])
    monkeypatch.setattr("torch.cuda.default_stream", lambda: "default")
    return at


def test_a_graph_is_recorded_on_the_stream_of_its_thread(streams):
    for current, wanted in (("mine", "mine"), ("default", None)):
        streams["current"] = current
        assert graphs.record(lambda x: x, {"x": torch.zeros(2)})[0].stream == wanted


def test_graphs_end_together(streams):
    recorded = graphs.Recorded()
    for size in (2, 3):
        for _ in range(3):
            recorded(lambda x: x, x=torch.zeros(size))
    made = [graph for graph, _, _ in recorded.graphs.values()]
    assert [graph.ended for graph in made] == [False, False]
    recorded.forget()
    assert ([graph.ended for graph in made], recorded.graphs) == ([True, True], {})


def test_training_ends_its_graphs_whatever_happens(monkeypatch):
    closed = []
    monkeypatch.setattr(batched.Batched, "close", lambda models: closed.append(models))
    task, setting = Recall(4, 8), Setting(width=16, depth=1, heads=2)
    make = lambda: of(rows.softmax)(setting, task)  # noqa: E731
    with pytest.raises(batched.OutOfTime):
        batched.train(make, task, (1e-2,), (0,), 2, deadline=time.time() - 1)
    batched.train(make, task, (1e-2,), (0,), 1)
    assert len(closed) == 2


def test_the_third_call_with_arrays_of_a_kind_is_recorded_and_later_ones_replay_it(streams):
    read, recorded = [], graphs.Recorded()

    def function(x):
        read.append(x)
        return x

    calls = [recorded(function, x=torch.full((2,), float(i))) for i in range(5)]
    assert len(read) == 3  # two as they come, and the one that is recorded
    assert calls[2] is calls[3] is calls[4] is read[2]
    assert read[2].tolist() == [4.0, 4.0]
    assert [graph.replays for graph, _, _ in recorded.graphs.values()] == [3]
    recorded(function, x=torch.zeros(3))
    assert len(read) == 4


# -- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_recall_asks_for_every_key_once_then_for_any_and_its_answer_follows(count):
    ids, targets = Recall(5, 7).draw(torch.full((7,), count), torch.Generator().manual_seed(1))
    assert ids.shape == targets.shape == (7, 20)
    told = 2 * count
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        known = dict(zip(row[:told:2], row[1:told:2], strict=True))
        asked = row[told::2]
        assert len(known) == count
        assert sorted(asked[:count]) == sorted(known)
        assert set(asked) == set(known)
        assert row[told + 1 :: 2] == wanted[told::2] == [known[key] for key in asked]
        assert set(wanted[:told] + wanted[told + 1 :: 2]) == {-100}


def test_recall_is_trained_with_fewer_pairs_too_and_scored_with_all():
    task = Recall(8, 200)
    ids, targets, fresh = next(task.batches(1))
    assert (ids.shape, fresh) == ((200, 32), True)
    told = ((targets[:, ::2] < 0).sum(1)).tolist()
    assert {count: told.count(count) > 25 for count in told} == {1: True, 2: True, 4: True, 8: True}
    assert set((task.held_out("test")[1][:, ::2] < 0).sum(1).tolist()) == {8}


def test_segments_follow_one_another_in_the_text(little):
    stream = Text(8, 2, segments=3).batches(0)
    (first, _, fresh), (second, _, going_on), (third, targets, _), (_, _, anew) = (next(stream) for _ in range(4))
    assert (fresh, going_on, anew) == (True, False, True)
    text = bytes(Text(8, 2).held_out("test")[0][0].tolist())
    assert len(text) == 8
    whole = torch.cat([first, second, third, targets[:, -1:]], 1)
    training = sys.modules["experiments.tasks"].read(False)["training"].unfold(0, 25, 1)
    assert all((training == row).all(1).any() for row in whole)


def test_masked_bytes_are_asked_for_and_hidden(little):
    task = Text(64, 8, masked=True)
    ids, targets, _ = next(task.batches(0))
    hidden = ids == Text.hidden
    assert 0.1 < hidden.float().mean() < 0.2
    assert ((targets >= 0) == hidden).all()


def test_bits_are_given_by_their_place():
    lost = torch.cat([torch.zeros(1, 4), torch.full((1, 12), math_log_2 := 0.6931471805599453)], 1)
    found = Text(8, 1, octaves=True).figures(lost, lost > 0, torch.zeros(1, 16, dtype=torch.long))
    assert found == pytest.approx({"bits": 0.75, "2": 0.0, "4": 0.0, "8": 1.0, "16": 1.0})
    assert math_log_2


def test_held_out_text_is_not_trained_on():
    parts = {part: bytes(of.tolist()).decode().split("\n\n") for part, of in read(False).items()}
    long = {part: {plain for p in of if len(plain := " ".join(p.split())) > 40} for part, of in parts.items()}
    assert min(map(len, long.values())) > 50
    assert not long["training"] & long["test"]
    assert not long["training"] & long["validation"]


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STUDIES)
def test_models_of_a_study_have_as_many_parameters(name):
    """Within 2 %: the numbers that norms, offsets and biases of distances have."""
    study = STUDIES[name]
    columns = dict.fromkeys(column for _, column in study.cells())
    setting = study.cells()[next(iter(study.models)), next(iter(columns))]
    counts = {}
    for model in study.models:
        make, _ = study.make(model, setting)
        with torch.device("meta"):
            try:
                counts[model] = sum(p.numel() for p in make().parameters())
            except NotImplementedError:
                continue
    first = counts[next(iter(study.models))]
    assert {model: count for model, count in counts.items() if abs(count / first - 1) > 0.02} == {}
    assert len(counts) == len(study.models)


@pytest.mark.parametrize("make", [rows.linear, rows.gla, rows.mamba2, rows.delta_net, rows.gated_delta_net, rows.retnet])
def test_positions_are_rotary_in_every_layer(make):
    """Keys and queries moved together give the same output; without rotary positions any two orders would."""
    torch.manual_seed(0)
    setting = Setting(width=16, heads=2)
    mixer, x = make(setting, 0).double(), torch.randn(1, 9, 16, dtype=torch.float64)
    plain = mixer(x)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linattn.rotary", lambda x, **given: found.setdefault("turned", x))
        patch.setattr("linattn.nn.mixer.rotary", lambda x, **given: found.setdefault("turned", x))
        other = mixer(x)
    assert found
    assert not torch.allclose(plain, other)


@pytest.mark.parametrize("gate", GATES)
def test_a_gated_mixer_carries_its_state(gate):
    torch.manual_seed(0)
    model, ids = of(lambda s, i: GatedMixer(s.width, s.heads, gate, layer_idx=i), carries=True), torch.randint(257, (2, 20))
    model = model(Setting(width=16, depth=2, heads=2, convolution=False), Text(8, 1)).double()
    whole, _ = model(ids, {})
    first, carried = model(ids[:, :13], {})
    torch.testing.assert_close(torch.cat([first, model(ids[:, 13:], carried)[0]], 1), whole)


def test_the_vector_gate_is_the_layer_of_gla_with_positions():
    torch.manual_seed(0)
    ours, x = GatedMixer(16, 2, "vector"), torch.randn(1, 9, 16)
    theirs = layer("GatedLinearAttention", hidden_size=16, num_heads=2)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("model", STUDIES["size"].models)
def test_with_half_products_are_of_bfloat16_and_parameters_are_not(model, little):
    study = STUDIES["size"]
    setting = study.cells(small=True)[model, ""]
    found = []
    for half in (False, True):
        make, task = study.make(model, replace(setting, half=half))
        models = batched.Batched(make, (1e-3,), [0], 10)
        ids, targets, _ = next(task.batches(0))
        loss, _ = models.step([(ids, targets)], None)
        assert {p.dtype for p in models.parameters.values()} == {torch.float32}
        one = {name: p[0] for name, p in models.parameters.items()}
        assert models.called(one, {}, ids, {})[0].dtype == (torch.bfloat16 if half else torch.float32)
        found.append(loss.item())
    assert found[0] != found[1]
    assert found == pytest.approx([found[0]] * 2, rel=1e-2)


def test_scale_norm_has_one_number():
    x = torch.randn(3, 16)
    norm = ScaleNorm(16)
    assert [p.shape for p in norm.parameters()] == [()]
    torch.testing.assert_close(norm(x).norm(dim=-1), torch.full((3,), 4.0))


def test_states_and_a_convolution_are_refused_together():
    with pytest.raises(
        ValueError, match=r"^Model: a convolution leaves no state to the next segment: make it with convolution=False$"
    ):
        Model(4, 8, [], convolution=True, carries=True)


# -- protocol --------------------------------------------------------------------------------------------------------


def made_up(**scores):
    """Runs by ``rate_steps``: a score for each seed."""
    runs = []
    for key, found in scores.items():
        rate, steps = key.removeprefix("r").split("_")
        runs += [
            {"model": "a", "setting": "", "rate": int(rate) / 1000, "seed": i, "steps": int(steps), "parameters": 7,
             "validation": {"bits": x}, "test": {"bits": None if x is None else x + 0.1}} for i, x in enumerate(found)
        ]  # fmt: skip
    return runs


STUDY = Study("made up", "?", lambda s: Text(8, 1), {"a": of(rows.softmax)}, Setting(steps=10, doublings=1), {})
SOLVABLE = replace(STUDY, solved_by="a", solved=2.2)


def test_the_rate_is_the_best_on_validation_data_and_the_figure_that_of_test_data():
    runs = made_up(r1_10=(3, 3, 3), r2_10=(2, 2.2, 2.4), r5_10=(1, 1, None), r10_10=(9, 9, 9))
    cell = protocol.summary(STUDY, runs)
    assert (cell.rate, cell.steps, cell.parameters) == (0.002, 10, 7)
    assert cell.figures["bits"] == pytest.approx((2.3, 2.1, 2.5))
    assert cell.lacks == ["schedule not shown to be long enough"]
    assert protocol.summary(STUDY, runs + made_up(r1_20=(3, 3, 3), r2_20=(2, 2, 2))).lacks == []


@pytest.mark.parametrize(
    ("after", "settled"),
    [
        ((2.0, 2.0, 2.0), True),
        ((1.9, 1.9, 1.9), False),
        ((1.5, 2.0, 2.5), True),
        ((1.5, 1.9, 2.5), False),  # seeds that differ are no sign of an end
        ((None, 2, 2), False),
    ],
)
def test_a_schedule_is_long_enough_when_doubling_it_changes_nothing(after, settled):
    runs = made_up(r1_10=(2.3, 2.3, 2.3), r1_20=[x and x + 0.3 for x in after])
    assert protocol.settled(SOLVABLE, runs) is protocol.long_enough(SOLVABLE, runs) is settled
    assert not protocol.settled(SOLVABLE, made_up(r1_10=(2.3,), r1_30=(2.3,)))


@pytest.mark.parametrize(("found", "solved"), [((2.0, 2.0, 2.1), True), ((2.0, 2.0, 2.2), False), ((2.0, 2.0, None), False)])
def test_a_task_is_solved_by_all_seeds_or_not_at_all(found, solved):
    assert protocol.solved(SOLVABLE, made_up(r1_10=found)) is solved
    assert protocol.long_enough(SOLVABLE, made_up(r1_10=found)) is solved
    assert not protocol.solved(STUDY, made_up(r1_10=found))


@pytest.mark.parametrize(
    ("before", "after", "lacks"),
    [
        ((1.0, 1.1, 1.2), (0.9, 0.9, 0.9), ["a is overtaken by b in a schedule twice as long"]),
        ((1.0, 1.1, 1.6), (0.9, 0.9, 0.9), []),  # it was not behind with all seeds before
        ((1.0, 1.1, 1.2), (0.7, 0.9, 0.9), []),  # nor ahead with all after
    ],
)
def test_doubling_must_not_turn_the_order_of_two_models(before, after, lacks):
    runs = {"a": made_up(r1_10=before, r1_20=after), "b": made_up(r1_10=(1.5, 1.5, 1.5), r1_20=(0.8, 0.8, 0.8))}
    found = {
        model: [lack for lack in cell.lacks if "overtaken" in lack] for model, cell in protocol.summaries(STUDY, runs).items()
    }
    assert found == {"a": lacks, "b": []}


def test_models_that_read_different_texts_are_not_compared():
    runs = [[run | {"text": text} for run in made_up(r1_10=(1, 1, 1))] for text in ("x", "x", "y", "")]
    found = lambda *of: protocol.summaries(STUDY, dict(zip("ab", of, strict=True)))["a"].lacks  # noqa: E731
    assert "runs of the setting read different texts" in found(runs[0], runs[2])
    assert "runs of the setting read different texts" not in found(runs[0], runs[1])
    assert "runs of the setting read different texts" not in found(runs[0], runs[3])


def test_a_text_is_told_by_its_hash(monkeypatch):
    texts = iter([{"training": torch.tensor([1, 2], dtype=torch.uint8)}, {"training": torch.tensor([1, 3], dtype=torch.uint8)}])
    monkeypatch.setattr("experiments.tasks.read", lambda packages: next(texts))
    one, other = Text(8, 1).text, Text(8, 1).text
    assert len(one) == len(other) == 16
    assert one != other


def test_what_a_run_lacks_is_said():
    assert protocol.lacks(STUDY, made_up(r1_10=(2.0, 2.0))) == [
        "2 of 3 seeds", "1 of 4 rates", "schedule not shown to be long enough",
    ]  # fmt: skip
    whole = {f"r{rate}_{steps}": (abs(rate - 2.1),) * 3 for rate in (1, 2, 5, 10) for steps in (10, 20)}
    assert protocol.lacks(STUDY, made_up(**whole)) == []
    assert protocol.lacks(STUDY, made_up(**whole | {"r2_20": (0.1, 0.1)})) == ["2 of 3 seeds"]  # of the longest schedule
    assert protocol.lacks(STUDY, made_up(**whole | {"r10_20": (0, 0, 0)})) == ["the best rate is at an end of those tried"]
    del whole["r2_20"]
    assert protocol.lacks(STUDY, made_up(**whole))[1:] == ["the best rate has no longer schedule"]
    whole["r2_20"] = (0.1, 0.1, 0.1)
    summary = runner.results(STUDY, {"a": {"found": made_up(**whole)}})["summary"]
    assert pages.state(STUDY, summary) == "*On the protocol*."
    scouted = replace(STUDY, scout={})
    assert pages.state(scouted, summary) == "*On the protocol*, with one seed, and rates chosen in small."
    assert pages.state(STUDY, None).startswith("*Not run yet on this protocol*: 1 cells")
    lacking = {("a", "x"): {"lacks": ["2 of 3 seeds", "late"]}, ("a", "y"): {"lacks": ["1 of 3 seeds", "late", "odd"]}}
    assert pages.lacking(lacking) == ["1 of 3 seeds", "late (2 cells)", "odd (1 cell)"]


@pytest.mark.parametrize(
    ("study", "steps"), [(STUDY, [1000, 1000, 2000, 4000, 8000]), (SOLVABLE, [1000, 1000, 2000, 4000])], ids=["text", "recall"]
)
def test_schedules_are_doubled_to_the_end_or_until_the_task_is_solved(study, steps):
    taken, runs = [], []
    while due := protocol.due(study, Setting(doublings=3, together=6), runs):
        some = due[0]  # one at a time, as if it had been cut off after each
        taken.append((some.steps, len(some.rates) * len(some.seeds)))
        score = {1000: 3.0, 2000: 2.2}.get(some.steps, 1.995)
        for rate in some.rates:
            runs += made_up(**{f"r{int(1000 * rate)}_{some.steps}": (score + abs(rate - 2e-3),) * 3})
    assert [at for at, _ in taken] == steps
    assert [members for _, members in taken][:4] == [6, 6, 6, 3]


def test_what_is_left_is_told_by_the_pace_of_what_was_spent():
    setting = Setting(steps=10, doublings=1, rates=(1e-3, 2e-3))
    study = replace(STUDY, full=setting, models={"a": of(rows.softmax), "b": of(rows.softmax)})
    whole = protocol.minutes(study)
    assert whole[0] == 0
    half = {"found": made_up(r1_10=(2.0,) * 3, r2_10=(2.0,) * 3), "seconds": 30.0}  # of 120: 6 take 10 steps, 3 take 20, twice
    assert protocol.minutes(study, [half]) == pytest.approx((0.5, 1.5))
    ended = {"found": [*half["found"], *made_up(r1_20=(2.0,) * 3)], "seconds": 60.0}
    assert protocol.minutes(study, [ended]) == pytest.approx((1.0, 1.0))
    solvable = replace(study, solved_by="a", solved=2.2)
    assert protocol.minutes(solvable, [half]) == pytest.approx((0.5, 1.0))


@pytest.mark.parametrize(("study", "inside"), [(STUDY, ["white", pages.COLOURS[0]]), (SOLVABLE, [pages.COLOURS[0]] * 2)])
def test_a_shorter_schedule_is_drawn_hollow(study, inside):
    found = {"a": made_up(r1_10=(3, 3, 3)), "b": made_up(r1_20=(2, 2, 2))}
    summary = {"": {model: cell._asdict() for model, cell in protocol.summaries(study, found).items()}}
    figure = pages.dots(study, summary)
    assert [line.get_markerfacecolor() for line in figure.axes[0].lines if line.get_marker() == "o"] == inside
    plt.close(figure)


def test_panels_of_a_share_go_from_none_to_all_of_it():
    share, found = replace(STUDY, higher=True), {"a": made_up(r1_10=(0.994, 0.995, 1.0))}
    summary = {"": {model: cell._asdict() for model, cell in protocol.summaries(share, found).items()}}
    for study, wide in ((share, True), (STUDY, False)):
        figure = pages.dots(study, summary)
        assert (figure.axes[0].get_xlim()[0] <= 0 and figure.axes[0].get_xlim()[1] >= 1) == wide
        plt.close(figure)


def test_those_that_lack_a_seed_are_trained_again():
    runs = made_up(r1_10=(2.0, 2.0), r2_10=(2.0, 2.0, 2.0))
    setting = replace(STUDY.full, rates=(1e-3, 2e-3), together=3)
    assert protocol.due(STUDY, setting, runs) == [(10, (0.001,), (0, 1, 2))]


def test_training_stops_once_all_seeds_of_a_rate_have_learned_the_task():
    study, of = replace(STUDY, score="recalled", higher=True, solved_by="a"), [(1e-3, 0), (1e-3, 1), (1e-2, 0), (1e-2, 1)]
    found = lambda *scores: protocol.learned(study, of, [{"recalled": x} for x in scores])  # noqa: E731
    assert found(0.2, 0.3, 1.0, 0.996)
    assert not found(0.2, 1.0, 1.0, 0.993)  # solved, but by so little that other data might deny it
    assert not found(0.2, None, 1.0, None)
    assert not protocol.learned(replace(study, solved_by=""), of, [{"recalled": 1.0}] * 4)


def test_the_better_half_of_the_rates_goes_on():
    runs = made_up(r1_10=(3, 3, 3), r2_10=(2, 2, 2.5), r5_10=(1, 1, None), r10_10=(2, 2, 2))
    assert protocol.best_rates(STUDY, runs, protocol.half(4)) == (0.002, 0.01)
    assert protocol.best_rates(STUDY, runs[:9], protocol.half(3)) == (0.001, 0.002)
    assert protocol.best_rates(STUDY, runs[:3], protocol.half(1)) == (0.001,)


def test_where_the_best_rate_is_at_an_end_one_beyond_is_tried():
    setting = Setting(steps=10, doublings=1)
    best = lambda at, steps, rates: [  # noqa: E731
        run | {"rate": rate} for rate in rates for run in made_up(**{f"r1_{steps}": (1 + abs(rate - at),) * 3})
    ]
    taken, runs = [], []
    while due := protocol.due(STUDY, setting, runs):
        taken += [(some.steps, some.rates) for some in due]
        runs += [run for some in due for run in best(0.1, some.steps, some.rates)]
    assert taken == [(10, RATES), (10, (0.02,)), (10, (0.04,)), (10, (0.08,)), (20, (0.04, 0.08))]
    assert "the best rate is at an end of those tried" in protocol.lacks(STUDY, runs)
    runs = best(0.0055, 10, RATES) + best(0.01, 20, (0.002, 0.005, 0.01))
    assert protocol.due(STUDY, setting, runs) == [(20, (0.02,), (0, 1, 2))]
    assert protocol.due(SOLVABLE, setting, best(0.01, 10, RATES)) == []  # solved: a better score is none


def test_at_its_limits_a_cell_is_left_and_what_it_lacks_is_said():
    """Seeds that each doubling brings elsewhere, and rates that are the better the higher they are."""
    setting, runs = Setting(steps=10, doublings=2), []
    while due := protocol.due(SOLVABLE, setting, runs):
        some, score = due[0], lambda rate, steps: 9 - 10 * rate - steps / 10
        made = {rate: made_up(**{f"r1_{some.steps}": (score(rate, some.steps),) * 3}) for rate in some.rates}
        runs += [run | {"rate": rate} for rate, of in made.items() for run in of]
    assert max(run["steps"] for run in runs) == 40
    assert max(run["rate"] for run in runs) == protocol.WIDEST[1]
    assert protocol.lacks(SOLVABLE, runs) == [
        "the best rate is at an end of those tried",
        "schedule not shown to be long enough",
    ]
    assert pages.state(SOLVABLE, {"": {"a": protocol.summary(SOLVABLE, runs)._asdict()}}).startswith(
        "*Not yet on the protocol*"
    )


def test_what_prolongs_a_schedule_that_is_long_enough_comes_last(tmp_path):
    models = dict.fromkeys(("stands still", "learns", "new"), of(rows.softmax))
    study = replace(SOLVABLE, models=models, full=Setting(steps=10, doublings=2, rates=(1e-3, 2e-3)))
    running = runner.Running(study, tmp_path, "cpu", False)
    for model, after in {"stands still": 3.0, "learns": 2.7}.items():
        runs = made_up(r1_10=(3.0,) * 3, r2_10=(3.5,) * 3, r1_20=(after,) * 3)
        running.record.add(model, [run | {"model": model} for run in runs], 1.0)
    waiting = sorted(running.due(), key=running.turn)
    assert [(work.model, work.some.steps) for work in waiting] == [("new", 10), ("learns", 40), ("stands still", 40)]


def test_of_a_doubled_schedule_only_rates_without_runs_are_trained():
    runs = made_up(**{f"r{rate}_{10}": (abs(rate - 2.1),) * 3 for rate in (1, 2, 5, 10)}, r2_20=(2, 2, 2))
    assert protocol.due(STUDY, Setting(steps=10, doublings=1), runs) == [(20, (0.001,), (0, 1, 2))]


def test_a_study_goes_on_with_more_runs_and_not_with_other_ones(tmp_path):
    study, device = STUDIES["gates"], "cpu"
    first = runner.Running(study, tmp_path, device, True)
    first.record.add("some", [run | {"model": "none", "setting": "1 head"} for run in made_up(r1_10=(1, 1, 1))], 1.0)
    first.publish()
    longer = replace(study, full=replace(study.full, doublings=5, rates=(*RATES, 0.02)))
    assert runner.Running(longer, tmp_path, "cuda", True).record.parts == first.record.parts
    (tmp_path / "gates.partial.json").unlink()
    assert runner.Running(longer, tmp_path, "cuda", True).record.parts == first.record.parts
    other = replace(study, full=replace(study.full, batch=9))
    with pytest.raises(
        SystemExit, match=r"gates\.json is of other options, \{.*\}: give another --out, or remove it and its runs$"
    ):
        runner.Running(other, tmp_path, device, True)
    scouts = [protocol.options(replace(STUDIES["size"], scout={"width": width}), False) for width in (128, 256)]
    assert scouts[0] != scouts[1]


def test_a_part_that_says_no_device_was_found_where_the_last_one_was_if_by_the_same_code(tmp_path):
    study = STUDIES["gates"]
    first = runner.Running(study, tmp_path, "cpu", True)
    for key in ("old", "same", "other"):
        first.record.add(key, [run | {"model": "none", "setting": "1 head"} for run in made_up(r1_10=(1, 1, 1))], 1.0)
    del first.record.parts["old"]["device"], first.record.parts["other"]["device"]
    first.record.parts["other"]["code"] = "of another time"
    first.record.versions["device"] = "the card of that time"
    first.publish()
    (tmp_path / "gates.partial.json").unlink()
    parts = runner.Running(study, tmp_path, "cpu", True).record.parts
    here = parts["same"].pop("device")
    assert here not in ("", "the card of that time")
    assert {key: part.get("device") for key, part in parts.items()} == {
        "old": "the card of that time", "same": None, "other": None,
    }  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_on_the_protocol(name):
    for setting in STUDIES[name].cells(scout=STUDIES[name].scout is not None).values():
        assert len(setting.rates) >= 4
        assert (min(setting.rates), max(setting.rates)) == (RATES[0], RATES[-1])
        assert STUDIES[name].scout or (setting.seeds >= 3 and setting.doublings >= 1)
    assert protocol.minutes(STUDIES[name])[1] > 1


# -- the command -----------------------------------------------------------------------------------------------------

ROWS = [(name, model) for name, study in STUDIES.items() for model in study.models]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "model"), ROWS)
def test_every_model_of_every_study_learns(name, model, little):
    study = STUDIES[name]
    setting = list(study.cells(small=True).values())[-1]
    make, task = study.make(model, setting)
    (run,) = batched.train(make, task, (1e-3,), [0], 1)
    assert run["test"][study.score] is not None
    assert run["tokens per second"] > 0


@pytest.mark.parametrize("published", [False, True])
def test_a_study_runs_small_and_goes_on_where_it_was_cut_off(published, tmp_path, monkeypatch, capsys, little):
    given = ["experiments", "extrapolation", "--small", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    train, calls = runner.train, []

    def cut_off(*args):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(args)
        return train(*args)

    monkeypatch.setattr(runner, "train", cut_off)
    with pytest.raises(KeyboardInterrupt):
        command.main()
    cut = json.loads(packed.read(tmp_path / "extrapolation.runs.json.gz"))
    assert len(cut) == 3
    if published:  # what a checkout has: partial files are not committed
        (tmp_path / "extrapolation.partial.json").unlink()
    monkeypatch.setattr(runner, "train", lambda *args: calls.append(args) or train(*args))
    command.main()
    assert len(calls) == len(STUDIES["extrapolation"].models)
    assert "in small, to try the program" in capsys.readouterr().out
    whole = json.loads((tmp_path / "extrapolation.json").read_text())
    assert len(whole["versions"]["code"]) == 64
    assert whole["codes"] == [whole["versions"]["code"]]
    assert whole["command"] == "PYTHONPATH=examples python -m experiments extrapolation"
    ends = ("json", "runs.json.gz", "table.md", "png")
    assert {path.name for path in tmp_path.iterdir()} == {f"extrapolation.{end}" for end in ends}


@pytest.mark.parametrize(("again", "inside"), [(2.05, True), (2.6, False), (None, False)])
def test_a_cell_that_is_run_again_agrees_or_not(again, inside, monkeypatch):
    whole = {f"r{rate}_{steps}": (1.9, 2.0, 2.1) for rate in (1, 2, 5, 10) for steps in (1000, 2000)}
    recorded = {"options": {}, "results": runner.results(STUDY, {"a": {"found": made_up(**whole)}})}
    asked = []

    def train(make, task, rates, seeds, steps, device, *rest):
        asked.append((rates, seeds, steps))
        return made_up(r1_2000=[None if again is None else again] * len(seeds))

    monkeypatch.setattr(runner, "train", train)
    found = runner.check(STUDY, recorded, "cpu", random.Random(0))
    assert asked == [((0.001,), (1000, 1001, 1002), 2000)]
    assert found.pop("recorded") == pytest.approx([2.1, 2.0, 2.2])
    assert found.pop("again") == (again and pytest.approx([again + 0.1] * 3))
    assert found == {"model": "a", "setting": "", "score": "bits", "agrees": inside}


def test_what_was_run_again_is_kept(tmp_path, monkeypatch):
    for name in ("mqar", "gates"):
        (tmp_path / f"{name}.json").write_text("{}")
    monkeypatch.setattr(command, "DOCS", tmp_path)
    of = {"model": "a", "score": "bits", "recorded": [2.1, 2.0, 2.2], "again": [2.15, 2.1, 2.2], "agrees": True}
    found = [{**of, "setting": ""}, {**of, "setting": "x", "again": None, "agrees": False}]
    monkeypatch.setattr(runner, "check", lambda *given: found.pop(0))
    assert command.checked("mqar", tmp_path, "cpu")
    assert not command.checked("gates", tmp_path, "cpu")
    kept = json.loads((tmp_path / "checks.json").read_text())
    assert list(kept["results"]) == ["mqar", "gates"]
    assert set(kept["results"]["mqar"]["versions"]) >= {"code", "torch", "device"}
    assert (tmp_path / "checks.table.md").read_text().splitlines()[2:] == [
        "| mqar | a | bits | 2.100 (2.000 to 2.200) | 2.150 (2.100 to 2.200) | yes |",
        "| gates | a, x | bits | 2.100 (2.000 to 2.200) | not finite | no |",
    ]


def test_the_page_shows_what_was_run_again():
    kept = json.loads((DOCS / "checks.json").read_text())["results"]
    assert (DOCS / "checks.table.md").read_text() == command.checks(kept)
    assert "{include} checks.table.md" in (DOCS / "index.md").read_text()


def test_tables_of_one_seed_are_checked_too(tmp_path, monkeypatch):
    """The kernel's estimates come out again with other directions; an error that is off does not agree."""
    assert set(CHECKS) == {"estimators", "minilm", "retrieval"}
    whole = json.loads((DOCS / "estimators.json").read_text())
    whole["options"]["maps"] = 20000
    assert CHECKS["estimators"](whole, random.Random(1))["agrees"]
    whole["results"] = {name: {cosine: 1.1 * x for cosine, x in of.items()} for name, of in whole["results"].items()}
    found = CHECKS["estimators"](whole, random.Random(1))
    assert not found["agrees"]
    monkeypatch.setitem(CHECKS, "minilm", lambda whole, draw: found)
    assert not command.checked("minilm", tmp_path, "cpu")
    kept = json.loads((tmp_path / "checks.json").read_text())["results"]
    assert kept.keys() == json.loads((DOCS / "checks.json").read_text())["results"].keys() | {"minilm"}
    assert f"| minilm | {found['model']}, {found['setting']} | error | " in (tmp_path / "checks.table.md").read_text()


def test_what_has_no_spread_is_not_run_again():
    recorded = {"options": {}, "results": runner.results(STUDY, {"a": {"found": made_up(r1_10=(2.0,))}})}
    error = r"^no recorded cell of made up has all its seeds: run it first, python -m experiments made up$"
    with pytest.raises(SystemExit, match=error):
        runner.check(STUDY, recorded, "cpu", random.Random(0))


@pytest.mark.parametrize(
    ("device", "gpus", "places", "size"),
    [
        ("cpu", 0, ["cpu"] * 3, 3),
        ("cuda", 1, ["cuda:0"], 3),
        ("cuda", 2, ["cuda:0", "cuda:1"], 6),
        ("cuda:1", 2, ["cuda:1"], 3),
    ],
)
def test_every_place_of_a_crew_is_one_device(device, gpus, places, size, monkeypatch):
    """Told by its number: a thread cannot choose ``"cuda"``."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = crew.Crew(3, device)
    assert (found.places, found.size) == (places, size)


def test_text_that_comes_twice_is_scored_by_itself():
    task = Text(8, 1, scored=32, twice=True)
    ids, targets = task.held_out("test")
    assert ids.shape == (6, 8)
    assert (ids[4:, 4:] == ids[:2, :4]).all()
    assert (ids[4:, :4] == ids[:2, :4]).all()
    lost = torch.zeros(6, 8)
    lost[:4], lost[4:, :4], lost[4:, 4:] = math.log(2), 9.0, 3 * math.log(2)
    assert task.figures(lost, lost > 0, targets) == {"bits": pytest.approx(1), "bits again": pytest.approx(3)}


def test_cells_run_in_processes_too(tmp_path, copied):
    copied(crew)
    runner.run([STUDIES["gates"]], tmp_path, "cpu", small=True, jobs=2)
    parts = json.loads(packed.read(tmp_path / "gates.runs.json.gz"))
    found = [(run["model"], run["setting"]) for part in parts.values() for run in part["found"]]
    assert sorted(found) == sorted(STUDIES["gates"].cells(small=True))


def test_what_is_late_is_said_and_what_fails_stops_only_itself(tmp_path, monkeypatch, capsys, little):
    def train(make, task, rates, seeds, steps, device, *rest):
        if not done:
            done.append("failed")
            raise ValueError("no such kernel")
        if len(done) == 1:
            done.append("late")
            raise batched.OutOfTime
        return real(make, task, rates, seeds, steps, device, *rest)

    real, done = runner.train, []
    monkeypatch.setattr(runner, "train", train)
    with pytest.raises(RuntimeError, match=r"^failed: extrapolation: softmax; ; 4 steps; 0\.003; seeds 0$"):
        runner.run([STUDIES["extrapolation"]], tmp_path, "cpu", small=True, seconds=600)
    said = capsys.readouterr().out
    assert "ValueError: no such kernel" in said
    assert "extrapolation: RetNet; ; 4 steps; 0.003; seeds 0: not within 600 s" in said
    assert len(json.loads(packed.read(tmp_path / "extrapolation.runs.json.gz"))) == len(STUDIES["extrapolation"].models) - 2


def test_cells_without_runs_go_first_and_before_all_what_ends_in_time(tmp_path, monkeypatch, little):
    """Of two studies: what is new in the second comes before a longer schedule of the first."""
    order = []

    def train(make, task, rates, seeds, steps, device, *rest):
        order.append((task.length, steps, rates))
        return [run | {"rate": rate} for rate in rates for run in made_up(**{f"r1_{steps}": (1 + rate,) * len(seeds)})]

    quick = {"models": {"a": of(rows.softmax)}, "settings": {"": {}}, "small": {"seeds": 1, "rates": (1e-3, 2e-3)}}
    few = [
        replace(
            STUDIES[name], task=lambda s: Text(s.length, s.batch), full=Setting(steps=4, doublings=1, length=length), **quick
        )
        for name, length in (("gates", 16), ("masked", 32))
    ]
    monkeypatch.setattr(runner, "train", train)
    monkeypatch.setattr(runner.studies, "study", lambda name: next(study for study in few if study.name == name))
    runner.run(few, tmp_path, "cpu", small=True)
    assert order == [(16, 4, (1e-3, 2e-3)), (32, 4, (1e-3, 2e-3)), (16, 8, (1e-3,)), (32, 8, (1e-3,))]
    order.clear()
    monkeypatch.setattr(runner.Running, "seconds", lambda running, work: 100 if running.study is few[0] else 1)
    runner.run(few, tmp_path / "late", "cpu", small=True, seconds=50)
    assert [length for length, *_ in order] == [32, 32, 16, 16]


@pytest.mark.parametrize("name", ["mqar", "recall_by_map", "gates", "flash"])
def test_what_is_published_in_the_documentation_is_gone_on_with_elsewhere(name, tmp_path):
    running, published = runner.Running(STUDIES[name], tmp_path, "cuda", False), packed.read(DOCS / f"{name}.runs.json.gz")
    assert running.record.parts == json.loads(published)
    due, left = running.due(), protocol.minutes(STUDIES[name], running.record.parts.values())[1]
    assert not {str(work) for work in due} & set(running.record.parts)
    assert bool(due) == (left > 0)
    assert sum(map(running.seconds, due)) <= 60 * left * (1 + 1e-9)
    assert runner.Running(STUDIES[name], tmp_path, "cpu", True).record.parts == {}


def test_a_check_ends_in_time(tmp_path, capsys):
    assert not command.checked("gates", DOCS, "cpu", deadline=0.0)
    assert capsys.readouterr().out == "gates: not within the time that was given: its deadline is over\n"


def test_a_large_study_chooses_its_rates_in_small(tmp_path, monkeypatch, little):
    asked = []

    def train(make, task, rates, seeds, steps, device, *rest):
        asked.append((rates, steps))
        runs = made_up(**{f"r{int(1000 * rate)}_{steps}": (abs(rate - 2e-3),) for rate in rates})
        return [{key: x for key, x in run.items() if key not in ("model", "setting")} | {"rate": rate}
                for run, rate in zip(runs, rates, strict=True)]  # fmt: skip

    monkeypatch.setattr(runner, "train", train)
    study = replace(STUDIES["size"], models={"Transformer++": STUDIES["size"].models["Transformer++"]})
    running = runner.Running(study, tmp_path, "cpu", True)
    for _ in range(2):
        (work,) = running.due()
        running.record.add(str(work), runner.part(work, True, math.inf, "cpu"), 1.0)
    assert not running.due()
    assert asked == [(RATES, 4), ((2e-3,), 4)]
    summary = runner.results(study, running.record.parts)["summary"]
    assert list(summary) == ["", runner.SCOUT]


def test_without_a_name_studies_are_listed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments"])
    command.main()
    found = capsys.readouterr().out
    assert found == (DOCS / "studies.table.md").read_text(encoding="utf-8"), "run: python -m experiments --write"
    for name, study in STUDIES.items():
        spent, left = pages.pace(study)
        assert f"| {name} | {study.question} | {spent} | {left} | " in found


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["mqar", "--small"], "--small is no result: give a folder of your own, e.g. --out /tmp/small"),
        (["mqr"], f"unknown study 'mqr': there are {', '.join(studies.NAMES)}"),
        (
            ["mqr", "--check"],
            f"unknown study 'mqr': there are {', '.join(studies.NAMES)}, and to --check estimators, minilm, retrieval",
        ),
    ],
)
def test_what_cannot_be_run_is_said(given, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments", *given])
    with pytest.raises(SystemExit):
        command.main()
    assert capsys.readouterr().err.endswith(f"error: {error}\n")
