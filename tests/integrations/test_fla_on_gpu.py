"""How fla's operator tests run on a GPU, and what becomes of them is counted; they themselves are run by ``judges.py``."""

import os
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import fla_on_gpu as plugin
import fla_on_ranks as ranks
import judges
import torch

FIRST = """<suite>
  <testcase classname="tests.ops.test_gla" name="test_chunk[B1]" />
  <testcase classname="tests.ops.test_gla" name="test_chunk[B2]"><skipped message="not run: no time was left" /></testcase>
  <testcase classname="tests.ops.test_kda" name="test_gate">
    <failure message="AssertionError: refused by linattn: none of its functions ran" />
  </testcase>
  <testcase classname="tests.ops.test_kda" name="test_flash"><skipped message="no FlashKDA" /></testcase>
</suite>"""
SECOND = """<suite>
  <testcase classname="tests.ops.test_gla" name="test_chunk[B2]"><failure message="AssertionError: o is off" /></testcase>
</suite>"""


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


def test_after_its_time_no_test_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGED_UNTIL", str(time.time() + 60))
    plugin.pytest_runtest_setup(None)
    monkeypatch.setenv("JUDGED_UNTIL", str(time.time() - 1))
    with pytest.raises(pytest.skip.Exception, match="not run: no time was left"):
        plugin.pytest_runtest_setup(None)


def test_at_its_time_a_test_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGED_UNTIL", str(time.time() + 0.05))
    call: Any = plugin.pytest_runtest_call(None)
    next(call)
    with pytest.raises(pytest.skip.Exception, match="not run: no time was left"):
        time.sleep(30)
    with pytest.raises(pytest.skip.Exception):
        call.throw(pytest.skip.Exception("not run: no time was left"))


@pytest.mark.parametrize("until", ["inf", None])
def test_without_a_time_a_test_takes_its_own(until: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGED_UNTIL", raising=False)
    if until:
        monkeypatch.setenv("JUDGED_UNTIL", until)
    with plugin.interrupted():
        assert plugin.left() == float("inf")


def test_processes_take_the_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.setenv("JUDGED_ON", judges.devices())
    assert [plugin.device_of(f"gw{n}") for n in range(3)] == ["2", "5", "2"]


def test_what_did_not_run_runs_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(arguments: list[str], root: Path, plugin: str, **environment: str) -> list[ElementTree.Element]:
        asked.append(arguments)
        return list(ElementTree.fromstring(FIRST if len(asked) == 1 else SECOND))

    monkeypatch.setattr(judges.suites, "run", run)
    nothing_ran = "refused: none of its functions ran"
    found = judges.judge_fla_on_gpu(Path("checkout"), 8, 60.0, {})
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
    whole = judges.judge_fla_on_gpu(Path("checkout"), 8, 60.0, found)
    assert asked[0][: len(judges.FLA_FILES)] == judges.fla_files()
    assert asked[1][0] == "tests/ops/test_gla.py::test_chunk[B2]"
    assert whole["judges"]["fla, test_gla.py"] == {"passed": 1, "failed: AssertionError: o is off": 1}
    assert whole["exceptions"] == {
        nothing_ran: ["tests/ops/test_kda.py::test_gate"],
        "skipped: no FlashKDA": ["tests/ops/test_kda.py::test_flash"],
        "failed: AssertionError: o is off": ["tests/ops/test_gla.py::test_chunk[B2]"],
    }


@pytest.mark.parametrize("on_gpu", [True, False])
def test_ranks_are_judged_file_by_file(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def run(arguments: list[str], root: Path, plugin: str, *, packages: Any, **where: str) -> list[ElementTree.Element]:
        asked[arguments[0]] = (arguments[1:], plugin, float(where.pop("JUDGED_UNTIL")) > time.time(), where)
        return list(ElementTree.fromstring(SECOND if "test_cp_kda" in arguments[0] else "<suite/>"))

    monkeypatch.setattr(judges.suites, "run", run)
    found = judges.judge_fla_ranks(Path("checkout"), 60.0, on_gpu)
    assert sorted(asked) == [f"tests/context_parallel/test_cp_{name}.py" for name in ("dplr", "gdn", "kda", "rwkv7")]
    at_once = "-n3" if on_gpu else "-n0"
    where = {} if on_gpu else judges.RANKS_OF_CPU
    assert asked["tests/context_parallel/test_cp_kda.py"] == (["-pxdist.plugin", at_once], "fla_on_ranks", True, where)
    assert found["exceptions"] == {"failed: AssertionError: o is off": ["tests/ops/test_gla.py::test_chunk[B2]"]}


def test_ranks_of_a_cpu_share_fewer_tokens() -> None:
    given = ranks.cut(lambda **options: options, 100)(T=400, lengths=[300, 100], H=2, dtype=torch.bfloat16)
    assert given == {"T": 100, "lengths": [75, 25], "H": 2, "dtype": torch.float32}


def test_a_test_of_ranks_fails_with_what_a_rank_said(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(ranks, "begun", begun.append)
    monkeypatch.setenv("JUDGED_PORT", "")
    ranks.pytest_runtest_setup("a test")
    assert begun == ["a test"]
    assert int(os.environ["JUDGED_PORT"]) > 0
    call: Any = ranks.pytest_runtest_call(None)
    next(call)
    error = torch.multiprocessing.ProcessRaisedException("\n\nTraceback:\n  line\nAssertionError: dq diff: 0.1\n", 0, 7)
    with pytest.raises(AssertionError, match=r"^dq diff: 0\.1$"):
        call.throw(error)
