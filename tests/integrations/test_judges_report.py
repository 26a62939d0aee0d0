"""What ``linattn doctor`` says of the integrations."""

import importlib.util
from typing import Any

import pytest
from linattn.integrations import report
from linattn.integrations.run_with import LIBRARIES


def lines_of(library: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    report.show_integrations()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "integrations: linattn.integrations.NAME.enable(), or linattn run-with NAME -- COMMAND"
    assert {line.partition(":")[0] for line in lines[1:]} == set(LIBRARIES)
    return [line.removeprefix(f"{library}: ") for line in lines if line.startswith(f"{library}: ")]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hide every library but one."""
    find = importlib.util.find_spec

    def hide(library: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: find(name) if name not in LIBRARIES or name == library else None
        )

    return hide


def test_a_library_that_is_not_here_is_said(only: Any, capsys: pytest.CaptureFixture[str]) -> None:
    only("")
    assert lines_of("transformers", capsys) == ["not installed"]


def test_of_transformers_it_says_what_of_which_models_runs_where(only: Any, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    only("transformers")
    head, *lines = lines_of("transformers", capsys)
    assert head.startswith(f"{transformers.__version__}, on cpu by torch")
    served = [line.removeprefix("on linattn: ") for line in lines if line.startswith("on linattn: ")]
    left = [line.removeprefix("as before: ") for line in lines if line.startswith("as before: ")]
    assert any("chunk_kda of " in line and "kimi_linear" in line for line in served)
    assert any("mamba_chunk_scan_combined of bamba" in line for line in served)
    assert any("selective_scan_fn" in line and "falcon_mamba" in line for line in left)
    assert len(served) + len(left) == len(lines)


def test_a_library_that_breaks_hides_no_other(
    only: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    only("transformers")
    monkeypatch.setattr(report, "_lines", lambda library: 1 / 0)
    assert lines_of("transformers", capsys) == ["cannot be imported: ZeroDivisionError: division by zero"]
