"""How fla's model tests run on a CPU, and what becomes of them is counted; they themselves are run by ``judges.py``."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="fla's kernels need triton")
pytest.importorskip("transformers")

import fla_models_on_cpu as plugin  # noqa: E402
import fla_on_gpu  # noqa: E402
import judges  # noqa: E402
from suites import Case  # noqa: E402


def test_sizes_are_cut_and_nothing_else_is() -> None:
    assert plugin.cut({"B": 4, "T": 1024, "H": 1, "D": 64, "dtype": torch.bfloat16}, plugin.OTHERS) == {"B": 2, "T": 80, "H": 1}


def test_numbers_are_rounded_to_bfloat16_as_torch_does() -> None:
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])
    x = torch.cat([torch.randn(1000), ties, torch.tensor([0.0, 3.4e38, float("inf"), -float("inf"), float("nan")])])
    found = torch.from_numpy(plugin.nearest(x.numpy()))
    torch.testing.assert_close(found, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_a_case_counts_by_the_rule_of_fla_s_operators() -> None:
    """That one in which nothing of ours ran does not pass is tested there."""
    assert plugin.pytest_runtest_call is fla_on_gpu.pytest_runtest_call
    assert plugin.seen is fla_on_gpu.seen


def test_cases_are_counted_by_file(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        Case("tests/models/test_modeling_gla.py::a", "passed"),
        Case("tests/models/test_modeling_gla.py::b", "skipped", "Hopper"),
        Case(
            "tests/models/test_modeling_kda.py::a",
            "failed",
            "refused by linattn: chunk_kda: g must be an array",
        ),
        Case("tests/models/test_modeling_kda.py::b", "failed", "logits diff"),
    ]
    monkeypatch.setattr(judges.kernel_judges, "fetch", lambda package, folder: folder / package)
    monkeypatch.setattr(judges.suites, "run", lambda files, *args, **kwargs: cases)
    assert judges.judge_fla_models(Path("checkout")) == {
        "fla, test_modeling_gla.py": {"passed": 1, "skipped": 1},
        "fla, test_modeling_kda.py": {"refused: chunk_kda: g": 1, "failed: logits diff": 1},
    }


def test_bfloat16_is_computed_with_and_compared_as_numbers() -> None:
    builder = plugin.InterpreterBuilder()
    binary_op = plugin._of_numbers(plugin.InterpreterBuilder.binary_op)

    def handle(*numbers: float) -> Any:
        return plugin.TensorHandle(
            torch.tensor(numbers).bfloat16().view(torch.int16).numpy().view("uint16"), plugin.tl.bfloat16
        )

    multiplied = plugin._of_numbers(plugin.InterpreterBuilder.create_fma)(builder, handle(3.0), handle(-2.0), handle(1.0))
    assert multiplied.data.tolist() == handle(-5.0).data.tolist()
    difference = binary_op(builder, handle(1.0, -2.0), handle(3.0, 4.0), np.subtract)
    assert difference.data.tolist() == handle(-2.0, -6.0).data.tolist()
    assert binary_op(builder, handle(1.0, -2.0), handle(3.0, -4.0), np.less).data.tolist() == [True, False]
