"""A part of the outside judges, where transformers' sdist can be had from a package index; all of it is ``judges.py``."""

from pathlib import Path

import judges
import pytest
import suites

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("parameterized", reason="transformers' tests need parameterized")

PART = "training or determinism or batching or inputs_embeds or outputs_equivalence or hidden_states or can_init"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return judges.from_index(tmp_path_factory.mktemp("transformers"))
    except OSError as error:
        pytest.skip(str(error))


def test_transformers_own_tests_end_as_they_end_without_linattn(root: Path) -> None:
    families = ("qwen3_next", "kimi_linear", "bamba")
    found = judges.judge(root, families, PART)
    for family in families:
        assert found[family]["differing"] == []
        assert found[family]["with linattn"]["passed"] >= 10
        assert found[family]["with linattn"].get("failed", 0) == 0


def test_a_judge_that_sees_a_difference_says_so(root: Path) -> None:
    """The suite has teeth: with a function of ours that gives no numbers, a test fails that passes with the right one."""
    broken = root / "broken"
    broken.mkdir(exist_ok=True)
    (broken / "sitecustomize.py").write_text(
        "import linattn.integrations.transformers as integration\n"
        "right = integration.FUNCTIONS['fla.chunk_gated_delta_rule']\n"
        "def wrong(q, k, v, g, beta, *, output_final_state=False):\n"
        "    o, state = right(q, k, v, g, beta, output_final_state=output_final_state)\n"
        "    return o * float('nan'), state\n"
        "integration.FUNCTIONS['fla.chunk_gated_delta_rule'] = wrong\n"
        "integration.enable()\n"
    )
    case = ["tests/test_judge_models.py::Test_qwen3_next", "-k", "batching_equivalence"]
    assert set(judges.run(root, case, ["env", f"PYTHONPATH={broken}:{suites.path()}"]).values()) == {"failed"}


def test_in_a_checkout_each_family_is_judged_by_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cases one ends otherwise when linattn is there."""
    file, runs = "tests/models/olmo_hybrid/test_modeling_olmo_hybrid.py", []
    names = [f"{file}::{name}" for name in ("test_there", "test_as_it_was")]

    def run(root: Path, arguments: list[str], prefix: list[str]) -> judges.Outcomes:
        runs.append((root, arguments, prefix[4:5]))
        return dict(zip(names, ["passed", "failed" if prefix else "passed"], strict=True))

    monkeypatch.setattr(judges, "run", run)
    root = Path("checkout")
    found = judges.judge(root, ["olmo_hybrid"], checkout=True)["olmo_hybrid"]
    assert runs == [(root, [file], []), (root, [file], ["transformers"])]
    assert found == {
        "before": {"passed": 2},
        "with linattn": {"passed": 1, "failed": 1},
        "differing": [names[1]],
    }
