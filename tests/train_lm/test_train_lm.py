"""The training program: one curve on any number of processes, and packs of documents that do not depend on them."""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("pydoc_data.topics")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402
from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: E402

FOLDER = Path(__file__).parents[2] / "examples" / "train_lm"
SMALL = "--text topics --width 16 --depth 2 --heads 2 --tokens 128 --length 64 --steps 6 --every 3 --dtype float64 --device cpu"


def load(name):
    spec = importlib.util.spec_from_file_location(f"train_lm_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


data = load("data")


@pytest.fixture
def train(monkeypatch):
    """The program, whose modules are found beside it, and forgotten again."""
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("checkpoint", "data", "model"):
        monkeypatch.setitem(sys.modules, name, load(name))
    return load("train")


def program(words, log):
    """The program with its command line, in a process of its own; what it prints goes to the end of a file."""
    with log.open("a") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    sys.argv = ["train.py", *words]
    sys.path.insert(0, str(FOLDER))
    runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")


def trained(processes, run, *options):
    """What the program prints on so many processes: one alone, or several as torchrun starts them."""
    log = run.with_suffix(".log")
    given = [*SMALL.split(), "--out", str(run), *options], log
    if processes > 1:
        nodes = dict(min_nodes=1, max_nodes=1, nproc_per_node=processes, max_restarts=0)
        meeting = dict(run_id="train", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
        try:
            elastic_launch(LaunchConfig(**nodes, **meeting, start_method="forkserver"), program)(*given)
        except ChildFailedError as error:
            raise AssertionError(log.read_text()) from error
    else:
        process = multiprocessing.get_context("forkserver").Process(target=program, args=given)
        process.start()
        process.join(500)
        assert process.exitcode == 0, log.read_text()
    return log.read_text()


def curve(run):
    return [row["bits_per_byte"] for row in json.loads((run / "00000006" / "record.json").read_text())["steps"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The curve of one process."""
    run = tmp_path_factory.mktemp("runs") / "one"
    output = trained(1, run)
    assert "held out" in output
    assert (run / "curves.png").stat().st_size > 10_000
    found = curve(run)
    assert len(found) == 6
    assert found[-1] < found[0] - 0.1
    return found


def test_a_checkpoint_of_pairs_of_processes_goes_on_on_one(whole, tmp_path):
    """Of four processes two share the tokens of every document, with compiled norms and MLPs, until they stop half-way."""
    run = tmp_path / "four"
    trained(4, run, "--context", "2", "--steps-now", "3", "--compile", "aot_eager")
    trained(1, run, "--resume")
    np.testing.assert_allclose(curve(run), whole, rtol=1e-7)
    assert [row["ranks"] for row in json.loads((run / "00000006" / "record.json").read_text())["steps"]] == [4] * 3 + [1] * 3


def test_a_run_that_was_made_with_other_options_is_not_gone_on_with(tmp_path, train):
    folder = tmp_path / "00000006"
    folder.mkdir()
    (folder / ".metadata").touch()
    (folder / "record.json").write_text(json.dumps({"options": {"seed": 0, "width": 16}, "steps": []}))
    trainer = object.__new__(train.Trainer)
    trainer.options = argparse.Namespace(seed=1, width=16, context=2, resume=True, out=tmp_path)
    with pytest.raises(SystemExit, match=f"^{re.escape(f'--resume: {folder} was made with seed 0, not 1')}$"):
        trainer.resume()


# -- data ------------------------------------------------------------------------------------------------------------

TEXTS = [b"abc", b"d" * 20, b"", b"efghij"]


def test_packs_hold_every_document_once_a_round():
    stream = data.Stream(TEXTS, tokens=8, length=4, seed=0)
    assert stream.packs == 4
    read = b"".join(stream[number].inputs.astype(np.uint8).tobytes() for number in range(4))
    assert all(b"\0" + text in read for text in TEXTS[:2])
    for number in range(8):
        pack = stream[number]
        np.testing.assert_array_equal(pack.targets[:-1], pack.inputs[1:])
        begins = {0, 4, *np.flatnonzero(pack.inputs == 0).tolist()}
        assert set(pack.offsets) == begins | {8}
    orders = [b"".join(stream[number].inputs.astype(np.uint8).tobytes() for number in range(r, r + 4)) for r in (0, 4)]
    assert orders[0] != orders[1]


def test_parts_of_a_pack_are_the_pack():
    pack = data.Stream(TEXTS, tokens=16, length=4, seed=1)[0]
    parts = [data.part(pack, number, 2) for number in range(2)]
    np.testing.assert_array_equal(np.concatenate([part.inputs for part in parts]), pack.inputs)
    np.testing.assert_array_equal(np.concatenate([part.targets for part in parts]), pack.targets)
    offsets = sorted({offset + 8 * number for number, part in enumerate(parts) for offset in part.offsets})
    assert tuple(offsets) == pack.offsets


def test_no_document_is_both_trained_on_and_held_out(tmp_path):
    training, held_out = data.documents("topics")
    assert not set(training) & set(held_out)
    assert 3 < len(training) / len(held_out) < 16
    for number in range(40):
        (tmp_path / f"{number}.md").write_text(f"text {number % 39}\n")
    assert sum(map(len, data.documents(str(tmp_path)))) == 39
    message = "--text: expected topics, library, all or a folder of text files, got 'nowhere'"
    with pytest.raises(SystemExit, match=f"^{re.escape(message)}$"):
        data.documents("nowhere")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"context": 3}, "--context: expected a divisor of the 4 ranks, got 3"),
        (
            {"tokens": 96},
            "--tokens: expected a multiple of the 4 ranks, and for each of 2 groups of them a multiple of --length 64, got 96",
        ),
    ],
)
def test_sizes_that_do_not_go_into_each_other_are_refused(given, message, train):
    with pytest.raises(SystemExit, match=f"^{re.escape(message)}$"):
        train.check(argparse.Namespace(**{"context": 2, "tokens": 128, "length": 64, **given}), 4)
