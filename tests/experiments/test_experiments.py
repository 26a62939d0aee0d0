"""The experiments' parts: their task, resuming, what they write, and that what is recorded is what the pages show."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from experiments import estimators, layers, recall_by_map  # noqa: E402
from experiments.extrapolation import by_octave  # noqa: E402
from experiments.language import Text, bits_by_place, read, windows  # noqa: E402
from experiments.recall import Recaller, Task, accuracy, train  # noqa: E402
from experiments.record import DOCS, Record, again, axes, table  # noqa: E402
from experiments.schedule import one_cycle, rise_and_fall  # noqa: E402
from models.blocks import Attention, transformer  # noqa: E402
from models.hedgehog import HedgehogAttention  # noqa: E402


def test_the_task_asks_for_every_key_once_and_its_answer_follows():
    task = Task(pairs=5, symbols=9)
    ids, answers = task.draw(7, torch.Generator().manual_seed(1))
    assert ids.shape == (7, 20)
    for row, wanted in zip(ids.tolist(), answers.tolist(), strict=True):
        told, asked = row[:10], row[10:]
        known = dict(zip(told[::2], told[1::2], strict=True))
        assert sorted(asked[::2]) == sorted(known)
        assert asked[1::2] == [known[key] for key in asked[::2]] == wanted
        assert len(known) == 5
        assert all(9 <= value < 18 for value in wanted)
        assert all(key < 9 for key in known)


def test_a_model_does_not_see_the_answer():
    task = Task(pairs=3, symbols=8)
    torch.manual_seed(0)
    model = Recaller(task, 16, [Attention(16, 2)])
    ids, _ = task.draw(4, torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, -1] = 8 + (changed[:, -1] + 1) % 8  # the last answer comes after the last question
    assert (model(ids) == model(changed)).all()


def test_softmax_learns_to_recall():
    torch.manual_seed(0)
    model = Recaller(Task(pairs=4, symbols=8), 32, [Attention(32, 2) for _ in range(2)])
    assert accuracy(model, 64, 0) < 0.3
    found = train(model, 150, 32, 1e-2, 0, lambda: None)
    assert found["accuracy"] > 0.9


@pytest.mark.parametrize("name", ["softmax", *recall_by_map.MAPS])
def test_every_map_runs_and_its_entropy_is_measured(name):
    options = argparse.Namespace(width=16, heads=2, steps=2, batch=4, rate=1e-3, seed=0, pairs=4)
    found = recall_by_map.run(name, options, lambda: None)
    assert len(found["entropy"]) == 2
    assert all(0 < entropy < 2.8 for entropy in found["entropy"])  # of at most sixteen places


TINY = {
    "mqar": "--symbols 16 --steps 2 --batch 2 --seeds 0",
    "extrapolation": "--width 16 --depth 1 --heads 2 --length 16 --longest 64 --steps 2 --batch 1 --seeds 0",
    "estimators": "--maps 100",
    "flash": "--width 16 --units 2 --keys 8 --chunk 8 --length 64 --steps 2 --batch 1 --seeds 0 --tokens 32 --contexts 16,32",
    "layers": "--device cpu --width 128 --tokens 32 --contexts 16,32 --repeats 1 --compiler aot_eager",
}


@pytest.mark.parametrize("name", TINY)
def test_an_experiment_runs_from_its_command_and_goes_on_where_it_was_cut_off(name, tmp_path, monkeypatch, capsys):
    experiment = importlib.import_module(f"experiments.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path), *TINY[name].split()])
    little = Text(*torch.randint(256, (2, 500)))
    monkeypatch.setattr(experiment, "read", lambda: little, raising=False)
    with monkeypatch.context() as context:
        context.setattr(experiment, "plot", lambda *given: pytest.fail("cut off"))
        with pytest.raises(pytest.fail.Exception):
            experiment.main()
    work = {"estimators": "error", "layers": "cost"}.get(name, "train")
    monkeypatch.setattr(experiment, work, lambda *given: pytest.fail("worked out twice"))
    experiment.main()
    assert f"{name}.json" in {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.glob("*.partial.*"))
    assert (tmp_path / f"{name}.table.md").read_text() in capsys.readouterr().out


def test_the_error_of_independent_features_is_the_papers():
    """Choromanski et al. 2021, lemma 2; Sutherland & Schneider 2015. Relative to the kernel, of ``K`` directions."""
    options, square = argparse.Namespace(K=16, norm=0.6, maps=20000, seed=0), 2 * 0.36 * (1 + 0.3)
    positive = (math.exp(square) - 1) / 16
    assert estimators.error("positive, independent", 0.3, options) == pytest.approx(positive**0.5, rel=0.1)
    kernel = math.exp(-0.36 * (1 - 0.3))  # of a Gaussian
    sines = (1 - kernel**2) ** 2 / 2 / kernel**2 / 16
    assert estimators.error("sin/cos, independent", 0.3, options) == pytest.approx(sines**0.5, rel=0.1)


@pytest.mark.parametrize("steps", [1, 2, 3, 9, 10, 11, 15, 20, 100])
def test_the_rate_goes_up_and_comes_down_in_any_number_of_steps(steps):
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    schedule, rates = one_cycle(optimiser, 0.5, steps), []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimiser.step()
        schedule.step()
    assert all(0 < rate <= 0.5 for rate in rates)
    assert steps < 9 or (max(rates) > 0.45 and rates[-1] < 0.01)


def test_the_rate_by_share_is_the_rate_by_steps():
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    schedule = one_cycle(optimiser, 1.0, 1000)
    for step in range(1000):
        assert schedule.get_last_lr()[0] == pytest.approx(rise_and_fall(step / 1000), abs=0.01)
        optimiser.step()
        schedule.step()


@pytest.mark.parametrize("kind", ["softmax", "Hedgehog"])
def test_attention_alone_is_what_the_layer_does_between_its_projections(kind, monkeypatch):
    torch.manual_seed(0)
    layer, alone = (layers.KINDS[name][1](128) for name in (kind, f"{kind} alone"))
    x = torch.randn(2, 9, 128)
    inside = "models.hedgehog" if isinstance(layer, HedgehogAttention) else "models.blocks"
    monkeypatch.setattr(f"{inside}.rotary", lambda x, position: x)
    projected = torch.cat([linear(x) for linear in (layer.q, layer.k, layer.v)], -1)
    torch.testing.assert_close(layer.out(alone(projected)[0].flatten(2)), layer(x)[0])


def test_bits_are_those_of_their_places():
    class Knowing(torch.nn.Module):
        """Certain of the first four bytes after the first, which are zeros, and knows nothing of the others."""

        def forward(self, ids):
            logits = torch.zeros(*ids.shape, 256)
            logits[:, :4, 0] = 1000.0
            return logits, []

    stream = torch.cat([torch.zeros(5, dtype=torch.long), torch.randint(256, (12,))])
    bits = bits_by_place(Knowing(), windows(stream, 17, 17))
    assert bits.tolist() == [0.0] * 4 + [8.0] * 12
    assert by_octave(bits, 2) == {"2": 0.0, "4": 0.0, "8": 8.0, "16": 8.0}
    assert windows(torch.arange(10), 4, 3).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_held_out_text_is_not_trained_on():
    text = read()
    training, held_out = (bytes(part.tolist()).decode().split("\n\n") for part in text)
    assert not {p for p in training if len(p) > 20} & set(held_out)


def test_a_model_with_rotary_positions_reads_long_texts_as_it_decodes_them():
    """Without a state the mask is implicit; with one it is written out."""
    torch.manual_seed(0)
    model, ids = transformer(256, 16, 1, lambda: Attention(16, 2)), torch.randint(256, (1, 40))
    whole, _ = model(ids)
    _, state = model(ids[:, :30])
    torch.testing.assert_close(model(ids[:, 30:], state, 30)[0], whole[:, 30:])


def shown(results, options):
    tables = {"": (["what", "value"], results.items()), "more": (["seed"], [(options["seed"],)])}
    return tables, axes(1)[0]


def test_a_record_goes_on_where_it_stopped(tmp_path):
    options = argparse.Namespace(out=str(tmp_path), seed=3, weights="/somewhere/weights")
    first = Record("some", options, shown)
    assert first.once("a", lambda: 1.5) == 1.5
    second = Record("some", options, shown)
    assert second.once("a", lambda: pytest.fail("worked out twice")) == 1.5
    second.finish({"a": 1.5})
    assert not list(tmp_path.glob("*.partial.json"))
    whole = json.loads((tmp_path / "some.json").read_text())
    assert (whole["results"], whole["options"]) == ({"a": 1.5}, {"seed": 3})
    assert (tmp_path / "some.table.md").read_text() == "| what | value |\n| --- | --- |\n| a | 1.500 |\n"
    assert (tmp_path / "some.more.table.md").read_text() == "| seed |\n| --- |\n| 3 |\n"
    assert (tmp_path / "some.png").stat().st_size > 1000


def test_a_record_of_other_options_is_not_mixed_in(tmp_path):
    Record("some", argparse.Namespace(out=str(tmp_path), seed=3), shown).once("a", lambda: 1)
    with pytest.raises(SystemExit, match=r"some\.partial\.json is of other options, \{'seed': 3\}: remove it or use those"):
        Record("some", argparse.Namespace(out=str(tmp_path), seed=4), shown)


def test_tables():
    assert table(["a"], [(0.12345,), (3,)]) == "| a |\n| --- |\n| 0.123 |\n| 3 |\n"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.json")), ids=lambda path: str(path.relative_to(DOCS)))
def test_every_recorded_experiment_has_its_table_plot_and_page(path):
    page, within = (DOCS / f"{path.stem}.md").read_text(encoding="utf-8"), path.relative_to(DOCS).with_suffix("")
    assert f"{{include}} {within}.table.md" in page
    plot = path.with_suffix(".png").is_file()
    assert plot or path.parent != DOCS  # the same with other options may do without
    assert (f"({within}.png)" in page) == plot
    cells = path.with_suffix(".table.md").read_text(encoding="utf-8").split()
    numbers = [cell for cell in cells if "." in cell and cell.lstrip("-")[0].isdigit()]
    recorded = path.read_text(encoding="utf-8")
    found = {f"{float(x):.3f}" for x in _numbers(json.loads(recorded)["results"])}
    assert numbers
    assert set(numbers) <= found


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.json")), ids=lambda path: str(path.relative_to(DOCS)))
def test_what_is_shown_of_an_experiment_is_made_of_its_record(path, tmp_path):
    """Write it again: PYTHONPATH=examples python -m experiments.record PATH."""
    again(path, tmp_path)
    kept = [path, path.with_suffix(".table.md"), *path.parent.glob(f"{path.stem}.*.table.md")]
    assert {file.name: file.read_text() for file in kept} == {file.name: (tmp_path / file.name).read_text() for file in kept}
    assert (tmp_path / f"{path.stem}.png").read_bytes()[:4] == b"\x89PNG"


def _numbers(x):
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, list):
        for item in x:
            yield from _numbers(item)
    elif isinstance(x, (int, float)):
        yield x
