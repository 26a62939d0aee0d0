"""How fla's operator tests run on a GPU, and what becomes of them is counted; they themselves are run by ``judges.py``."""

import contextlib
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import fla_on_gpu as plugin
import fla_on_ranks as ranks
import judges
import torch
from case_journal import NOT_RUN
from suites import Case

FIRST = [
    Case("tests/ops/test_gla.py::test_chunk[B1]", "passed"),
    Case("tests/ops/test_gla.py::test_chunk[B2]", "skipped", NOT_RUN),
    Case("tests/ops/test_kda.py::test_gate", "failed", "AssertionError: refused by linattn: none of its functions ran"),
    Case("tests/ops/test_kda.py::test_flash", "skipped", "no FlashKDA"),
]
SECOND = [Case("tests/ops/test_gla.py::test_chunk[B2]", "failed", "AssertionError: o is off")]


def test_a_test_in_which_nothing_of_ours_ran_does_not_pass() -> None:
    call: Any = plugin.pytest_runtest_call(None)
    next(call)
    with pytest.raises(AssertionError, match="refused by linattn: none of its functions ran"):
        call.send(None)
    call = plugin.pytest_runtest_call(None)
    next(call)
    assert plugin.seen(len)([1, 2]) == 2
    with pytest.raises(StopIteration):
        call.send(None)


def test_what_fla_answers_in_our_place_fails_and_what_it_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "reasons", ["gv is not served by linattn"])
    with pytest.raises(AssertionError, match="refused by linattn: int: gv is not served by linattn"):
        plugin.answered(int, "int")("1")
    with pytest.raises(ValueError, match="invalid literal"):
        plugin.answered(int, "int")("one")


def test_processes_take_the_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setenv("JUDGED_ON", judges.devices())
    assert [plugin.device_of(f"gw{n}") for n in range(3)] == ["2", "5", "2"]


def test_what_did_not_run_runs_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def progress(arguments: list[str], root: Path, plugin: str, **options: Any) -> Generator[list[Case]]:
        asked.append(arguments)
        yield []
        yield FIRST if len(asked) == 1 else SECOND

    monkeypatch.setattr(judges.suites, "progress", progress)
    nothing_ran = "refused: none of its functions ran"
    before, found = judges.judge_fla_on_gpu(Path("checkout"), 8, 60.0, {})
    assert before == {"judges": {}, "exceptions": {"not run": judges.fla_files()}}
    assert found == {
        "judges": {
            "fla, test_gla.py": {"passed": 1, "not run": 1},
            "fla, test_kda.py": {nothing_ran: 1, "skipped": 1},
        },
        "exceptions": {
            "not run": ["tests/ops/test_gla.py::test_chunk[B2]"],
            nothing_ran: ["tests/ops/test_kda.py::test_gate"],
            "skipped: no FlashKDA": ["tests/ops/test_kda.py::test_flash"],
        },
    }
    again, whole = judges.judge_fla_on_gpu(Path("checkout"), 8, 60.0, found)
    assert again == found
    assert asked[0][: len(judges.FLA_FILES)] == judges.fla_files()
    assert asked[1][0] == "tests/ops/test_gla.py::test_chunk[B2]"
    assert whole["judges"]["fla, test_gla.py"] == {"passed": 1, "failed: AssertionError: o is off": 1}
    assert whole["exceptions"] == {
        nothing_ran: ["tests/ops/test_kda.py::test_gate"],
        "skipped: no FlashKDA": ["tests/ops/test_kda.py::test_flash"],
        "failed: AssertionError: o is off": ["tests/ops/test_gla.py::test_chunk[B2]"],
    }


SLOW = """
import pathlib, time
import pytest

@pytest.mark.parametrize("n", range(5))
def test_chunk(n):
    while n == 4 and not pathlib.Path("second").exists():
        time.sleep(0.05)
    assert n != 3, "o is off"
"""


def test_a_second_slot_runs_what_the_first_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes of pytest's, on tests made for it. The last one does not end in the first slot."""
    progress = judges.suites.progress
    monkeypatch.setattr(judges.suites, "progress", lambda tests, root, plugin, **options: progress(tests, root, "", **options))
    monkeypatch.setattr(judges.suites, "EVERY", 0.2)
    monkeypatch.setattr(judges, "FLA_FILES", ["gla"])
    (tmp_path / "tests/ops").mkdir(parents=True)
    (tmp_path / "tests/ops/test_gla.py").write_text(SLOW)
    found: dict[str, Any] = {}
    with contextlib.closing(judges.judge_fla_on_gpu(tmp_path, 2, 100.0, {})) as slot:
        for found in slot:
            if found["judges"].get("fla, test_gla.py", {}).get("not run") == 1:
                break
    assert found["exceptions"].pop("not run") == ["tests/ops/test_gla.py::test_chunk[4]"]
    assert found["exceptions"] == {"failed: AssertionError: o is off": ["tests/ops/test_gla.py::test_chunk[3]"]}
    (tmp_path / "second").touch()
    left = found | {"exceptions": found["exceptions"] | {"not run": ["tests/ops/test_gla.py::test_chunk[4]"]}}
    *_, whole = judges.judge_fla_on_gpu(tmp_path, 2, 100.0, left)
    assert whole == {
        "judges": {"fla, test_gla.py": {"passed": 4, "failed: AssertionError: o is off": 1}},
        "exceptions": found["exceptions"],
    }


@pytest.mark.parametrize(("on_gpu", "as_it_is"), [(True, False), (False, False), (True, True)])
def test_ranks_are_judged_file_by_file(on_gpu: bool, as_it_is: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one file has found stays when the others go on; on a CPU, a file waits for the one before it."""
    asked, order = {}, []

    def progress(arguments: list[str], root: Path, plugin: str, **options: Any) -> Generator[list[Case]]:
        timely, packages = options.pop("until") > time.monotonic(), options.pop("packages")
        assert packages[0].name == "on_ranks"
        asked[arguments[0]] = (arguments[1:], plugin, timely, options)
        for cases in ([], SECOND if "test_cp_kda" in arguments[0] else []):
            order.append(arguments[0])
            yield cases

    monkeypatch.setattr(judges.suites, "progress", progress)
    before, found = judges.judge_fla_ranks(Path("checkout"), 60.0, on_gpu, {}, as_it_is)
    files = [f"tests/context_parallel/test_cp_{name}.py" for name in judges.FLA_RANKS]
    assert before == {"judges": {}, "exceptions": {"not run": files}}
    assert order == (files * 2 if on_gpu else [name for name in files for _ in range(2)])
    at_once = "-n3" if on_gpu else "-n0"
    where = ({} if on_gpu else judges.RANKS_OF_CPU) | ({"JUDGED_AS_IT_IS": "1"} if as_it_is else {})
    assert asked["tests/context_parallel/test_cp_kda.py"] == (["-pxdist.plugin", at_once], "fla_on_ranks", True, where)
    assert found["exceptions"]["failed: AssertionError: o is off"] == ["tests/ops/test_gla.py::test_chunk[B2]"]
    assert found["exceptions"]["not run"] == [name for name in files if "kda" not in name]


def test_fla_as_it_is_is_of_its_ranks_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["judges.py", "--fla", "checkout", "--as-it-is"])
    with pytest.raises(SystemExit):
        judges.main()
    assert capsys.readouterr().err.endswith("error: --as-it-is: expected with --fla-ranks\n")


def test_ranks_that_did_not_run_run_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def progress(arguments: list[str], root: Path, plugin: str, **options: Any) -> Generator[list[Case]]:
        asked.append(arguments)
        yield [Case(left, "passed")]

    monkeypatch.setattr(judges.suites, "progress", progress)
    left = "tests/context_parallel/test_cp_gdn.py::test[B2]"
    earlier = {"judges": {"fla, test_cp_gdn.py": {"passed": 1, "not run": 1}}, "exceptions": {"not run": [left]}}
    again, whole = judges.judge_fla_ranks(Path("checkout"), 60.0, False, earlier)
    assert again == earlier
    assert asked == [[left, "-pxdist.plugin", "-n0"]]
    assert whole == {"judges": {"fla, test_cp_gdn.py": {"passed": 2}}, "exceptions": {}}
    assert list(judges.judge_fla_ranks(Path("checkout"), 60.0, False, whole)) == [whole]


def test_ranks_of_a_cpu_share_fewer_tokens() -> None:
    given = ranks.cut(lambda **options: options, 100)(T=400, lengths=[300, 100], H=2, dtype=torch.bfloat16)
    assert given == {"T": 100, "lengths": [75, 25], "H": 2, "dtype": torch.float32}


def test_a_test_of_ranks_fails_with_what_a_rank_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGED_MEETING", "")
    ranks.pytest_runtest_setup("a test")
    folder = Path(os.environ["JUDGED_MEETING"]).parent
    assert folder.is_dir()
    ranks.pytest_runtest_teardown("a test")
    assert not folder.exists()
    call: Any = ranks.pytest_runtest_call(None)
    next(call)
    error = torch.multiprocessing.ProcessRaisedException("\n\nTraceback:\n  line\nAssertionError: dq diff: 0.1\n", 0, 7)
    with pytest.raises(AssertionError, match=r"^dq diff: 0\.1$"):
        call.throw(error)
