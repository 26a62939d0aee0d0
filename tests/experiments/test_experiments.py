"""What experiments share: resuming, what they write, and that what is recorded is what the pages show."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from experiments import estimators, layers  # noqa: E402
from experiments.record import DOCS, Record, again, axes, table  # noqa: E402

TINY = {
    "estimators": "--maps 100",
    "latency": "--device cpu --width 32 --depth 1 --tokens 32 --contexts 16,32",
    "layers": "--device cpu --width 128 --tokens 32 --contexts 16,32 --repeats 1 --compiler eager",
}
WORK = {"estimators": "error", "latency": "seconds", "layers": "cost"}


@pytest.mark.parametrize("name", TINY)
def test_an_experiment_runs_from_its_command_and_goes_on_where_it_was_cut_off(name, tmp_path, monkeypatch, capsys):
    experiment = importlib.import_module(f"experiments.{name}")
    monkeypatch.setattr(layers, "KINDS", {kind: layers.KINDS[kind] for kind in ("softmax", "Hedgehog alone")})  # compiled
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path), *TINY[name].split()])
    with monkeypatch.context() as context:
        context.setattr(experiment, "plot", lambda *given: pytest.fail("cut off"))
        with pytest.raises(pytest.fail.Exception):
            experiment.main()
    monkeypatch.setattr(experiment, WORK[name], lambda *given: pytest.fail("worked out twice"))
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


@pytest.mark.parametrize("kind", ["softmax", "Hedgehog"])
def test_attention_alone_is_what_the_layer_does_between_its_projections(kind, monkeypatch):
    torch.manual_seed(0)
    layer, alone = (layers.KINDS[name][1](128) for name in (kind, f"{kind} alone"))
    x = torch.randn(2, 9, 128)
    monkeypatch.setattr("linattn.rotary", lambda x, **positions: x)
    monkeypatch.setattr("linattn.nn.mixer.rotary", lambda x, **positions: x)
    names = ("q_proj", "k_proj", "v_proj", "o_proj") if kind == "Hedgehog" else ("q", "k", "v", "out")
    *projections, out = (getattr(layer, name) for name in names)
    projected = torch.cat([linear(x) for linear in projections], -1)
    torch.testing.assert_close(out(alone(projected).flatten(2)), layer(x))


@pytest.mark.parametrize("kind", layers.KINDS)
def test_every_kind_is_timed(kind, monkeypatch):
    """As it is called; what is alone has as many channels as its layer gives it."""
    monkeypatch.setattr(layers, "CHUNK", 16)
    chosen = argparse.Namespace(seed=0, device="cpu", width=128, tokens=64, repeats=1, compiler="")
    found = layers.cost(kind, 32, chosen)
    assert set(found) == {"forward", "with backward"}
    assert min(found.values()) > 0


def test_blocks_have_as_many_parameters():
    """FLASH's keys of 128 are two in a hundred more."""
    blocks = {kind: make(1024) for kind, (_, make) in layers.KINDS.items() if kind.endswith("block")}
    counts = {kind: sum(p.numel() for p in block.parameters()) for kind, block in blocks.items()}
    assert len(counts) == 4
    assert all(abs(count / (12 * 1024**2) - 1) < 0.025 for count in counts.values()), counts


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


RECORDED = sorted(set(DOCS.rglob("*.json")) - {DOCS / "checks.json"})


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: str(path.relative_to(DOCS)))
def test_every_recorded_experiment_is_shown_on_a_page(path):
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    within = path.relative_to(DOCS).with_suffix("")
    assert f"{{include}} {within}.table.md" in pages
    assert f"({within}.png)" in pages


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: str(path.relative_to(DOCS)))
def test_what_is_shown_of_an_experiment_is_made_of_its_record(path, tmp_path):
    """Write it again: PYTHONPATH=examples python -m experiments.record PATH."""
    again(path, tmp_path)
    kept = [path, path.with_suffix(".table.md"), *path.parent.glob(f"{path.stem}.*.table.md")]
    assert {file.name: file.read_text() for file in kept} == {file.name: (tmp_path / file.name).read_text() for file in kept}
    assert (tmp_path / f"{path.stem}.png").read_bytes()[:4] == b"\x89PNG"
