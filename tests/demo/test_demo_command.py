"""``linattn demo`` as a user sees it."""

from __future__ import annotations

import functools
import heapq
import os
from pathlib import Path

import numpy as np
import pytest
import typer
from linattn import register_backend
from linattn.demo.cli import DEFAULT_LIMIT, LARGEST_LIMIT, demo
from linattn.demo.run import NotRun, Result, record, run
from linattn.errors import Unsupported
from linattn.registry import registry
from typer.testing import CliRunner

from conftest import bridge

TEXT = 'The "pass" statement\n\n"pass" is a null operation --- when it is executed, nothing happens.\n'


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def invoke(*arguments: object):
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def rows(output: str) -> dict[str, list[str]]:
    """The table's rows by backend."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("backend "))
    found = {}
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        found[line.split()[0]] = line.split()
    return found


def refusal(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.strip()


# -- what it prints --------------------------------------------------------------------------------------------------


def test_table_of_one_backend(text):
    result = invoke(text, "--backend", "numpy")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"Scoring the {len(TEXT)} bytes of {text}.\n")
    name, *arrays, bits, prefill, decode, difference = rows(result.stdout)["numpy"]
    assert (name, arrays) == ("numpy", ["numpy", "cpu"])
    assert 0.3 < float(bits) < 8
    assert float(prefill.replace(",", "")) > 0
    assert float(decode.replace(",", "")) > 0
    assert float(difference) < 1e-3
    scores = record()["bits_per_byte"]
    assert f"the model scores {scores['test']:.2f} bits per byte" in result.stdout


def test_no_progress_bar_where_nobody_looks(text):
    result = invoke(text, "--backend", "numpy")
    assert result.stderr == ""
    assert "\x1b" not in result.stdout


def test_every_installed_backend_is_reported(text):
    result = invoke(text)
    shown = set(rows(result.stdout))
    for name in registry.records:
        assert name in shown or f"\n{name} did not run: " in result.stdout, name
    assert result.exit_code == 0, result.output


def test_every_backend_that_runs_agrees_with_the_oracle():
    for result in run(TEXT.encode()):
        assert isinstance(result, NotRun) or result.difference < 1e-3, result
        assert isinstance(result, Result) or not result.failed, result


def test_default_text_ships_with_python(monkeypatch):
    result = invoke("--backend", "numpy", "--limit", 64)
    size = len(heapq.__about__.encode())
    assert f"Scoring the first 64 of {size:,} bytes of heapq.__about__, a text that ships with Python" in result.stdout
    monkeypatch.delattr(heapq, "__about__")
    result = invoke("--backend", "numpy", "--limit", 64)
    assert result.stdout.startswith("Scoring the first 64 of 856 bytes of this, the Zen of Python; --limit")


def test_one_byte(tmp_path):
    (tmp_path / "one").write_text("x")
    result = invoke(tmp_path / "one", "--backend", "numpy")
    assert result.exit_code == 0, result.output
    assert len(rows(result.stdout)["numpy"]) == 6  # nothing was decoded, so no rate


def test_limit(text):
    result = invoke(text, "--backend", "numpy", "--limit", 50)
    assert f"Scoring the first 50 of {len(TEXT)} bytes of {text}; --limit scores up to 1,048,576.\n" in result.stdout


# -- backends that do not run ----------------------------------------------------------------------------------------


def test_a_declared_limit_is_shown_and_hides_nothing(text):
    backend = bridge("numpy")
    type(backend).supports = lambda self, call: Unsupported("K must be at most 16, got 32")
    register_backend(backend)
    result = invoke(text, "--backend", "numpy", "--backend", "bridge")
    assert result.exit_code == 0
    assert "\nbridge did not run: K must be at most 16, got 32\n" in result.stdout
    assert "numpy" in rows(result.stdout)


def test_an_error_in_a_backend_is_shown_and_hides_nothing(text, monkeypatch):
    backend = bridge("numpy")

    @functools.wraps(type(backend).chunk_gla)  # its signature says which keywords it takes
    def broken(*args, **kwargs):
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(type(backend), "chunk_gla", broken)
    register_backend(backend)
    result = invoke(text, "--backend", "bridge", "--backend", "numpy")
    assert result.exit_code == 1
    assert "\nbridge failed: RuntimeError: out of shared memory\n" in result.stdout
    assert "numpy" in rows(result.stdout)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_numbers_that_are_not_finite_are_a_failure(text, monkeypatch):
    backend = bridge("numpy")
    right = type(backend).chunk_gla

    @functools.wraps(right)  # its signature says which keywords it takes
    def wrong(*args, **kwargs):
        return [x * np.nan for x in right(*args, **kwargs)]

    monkeypatch.setattr(type(backend), "chunk_gla", wrong)
    register_backend(backend)
    result = invoke(text, "--backend", "bridge")
    assert result.exit_code == 1
    assert "\nbridge failed: gave log probabilities that are not finite\n" in result.stdout


def test_nothing_ran(text):
    backend = bridge("numpy")
    type(backend).supports = lambda self, call: Unsupported("no")
    register_backend(backend)
    assert invoke(text, "--backend", "bridge").exit_code == 1


def test_arrays_the_demo_cannot_make(text):
    backend = bridge("numpy")
    register_backend(backend)
    type(backend).frameworks = ("tinygrad",)  # the contract knows no such framework yet
    result = invoke(text, "--backend", "bridge")
    assert "\nbridge did not run: the demo cannot make tinygrad arrays\n" in result.stdout


def test_unknown_backend(text):
    assert refusal(text, "--backend", "nunpy").startswith("linattn demo: unknown backend 'nunpy': did you mean 'numpy'?")


# -- files that cannot be scored -------------------------------------------------------------------------------------


def test_missing_file(tmp_path):
    path = tmp_path / "absent.txt"
    assert refusal(path) == f"linattn demo: {path} does not exist"


def test_directory(tmp_path):
    assert refusal(tmp_path) == f"linattn demo: {tmp_path} is a directory: name a text file"


def test_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert refusal(path) == f"linattn demo: {path} is not a regular file: name a text file"


def test_empty_file(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    assert refusal(path) == f"linattn demo: {path} is empty: there is nothing to score"


def test_unreadable_file(text, monkeypatch):
    def forbid(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", forbid)
    assert refusal(text) == f"linattn demo: cannot read {text}: Permission denied"


def test_binary_file(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"ELF\x00\x01\x02")
    message = "is a binary file (a NUL byte at offset 3): --force scores its bytes as they are"
    assert refusal(path) == f"linattn demo: {path} {message}"
    assert invoke(path, "--force", "--backend", "numpy").exit_code == 0


def test_text_in_another_encoding(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("déjà vu".encode("latin-1"))
    message = "is not UTF-8 text (byte 0xe9 at offset 1): --force scores its bytes as they are"
    assert refusal(path) == f"linattn demo: {path} {message}"


def test_a_character_cut_by_the_limit_is_no_error(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("aé" * 10, encoding="utf-8")
    assert invoke(path, "--limit", 2, "--backend", "numpy").exit_code == 0


def test_huge_file_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.write(TEXT.encode() * (DEFAULT_LIMIT // len(TEXT) + 1))
        file.truncate(2**40)  # sparse: no disk is used
    result = invoke(path, "--backend", "numpy", "--limit", 100)
    assert result.exit_code == 0, result.output
    assert f"Scoring the first 100 of 1,099,511,627,776 bytes of {path}; --limit scores up to 1,048,576." in result.stdout


@pytest.mark.parametrize("limit", [0, -1, LARGEST_LIMIT + 1])
def test_limit_out_of_range(text, limit):
    assert refusal(text, "--limit", limit) == f"linattn demo: --limit must be from 1 to 1,048,576, got {limit:,}"
