"""Small ceilings, no fresh processes unless asked for, and a registry that every test leaves as it was."""

from __future__ import annotations

import pytest
import typer
from linattn.registry import registry
from linattn_benchmarks import ceilings, cli, on_ranks, operators, warm
from linattn_benchmarks.cases import Case, complete
from linattn_benchmarks.subjects import PEERS, subjects
from typer.testing import CliRunner


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Threads that wait for each other on a busy machine take longer than these small shapes."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quick_processes(copied):
    copied(on_ranks)
    copied(warm)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LINATTN_BACKEND", raising=False)
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(ceilings, "MATMUL_WIDTH", {"cpu": 64})
    yield
    registry.refresh()


@pytest.fixture
def case():
    """``case("chunk_gla", "fwd", T=64)``."""

    def make(operator: str, what: str = "fwd", gates: str = "model", **sizes: int) -> Case:
        full = complete({"T": 70, "H": 2, "K": 8, "V": 6, "C": 16} | sizes)
        return Case(operator, what, tuple(full.items()), gates=gates, seed=7)

    return make


@pytest.fixture
def rows():
    """``rows([case], ["numpy"])``: the rows of a run without fresh processes."""

    def run(cases, backends=(), peers=False, framework=None):
        chosen = subjects(list(backends), framework, PEERS if peers else ())
        return operators.run(cases, chosen, seconds=0.01, fresh_process=False)["rows"]

    return run


@pytest.fixture
def run():
    """``run("chunk_gla", "--seconds", "0.01")``: the command, and what it said."""
    app = typer.Typer()
    app.command()(cli.bench)
    return lambda *words: CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})
