"""Ranks that disagree say so, all of them, and one that dies ends the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import NOT_RUN, run_jobs

pytest.importorskip("torch.distributed")


def last_lines(fault: str, timeout: float = 20) -> list[str]:
    """What each of two ranks raised."""
    said = run_jobs(2, [(fault, fault, {})], timeout=timeout)[fault]
    return [text.partition("linattn.errors.")[2].strip() or text for text in said]


def test_another_plan_is_named_on_every_rank():
    plan = "exchange 'auto', states of their own, no packed sequences"
    expected = (
        "ContextError: context_parallel: the ranks do not agree\n"
        f"  rank 0: layout 'contiguous', {plan}\n"
        f"  rank 1: layout 'zigzag', {plan}"
    )
    assert last_lines("other_plan") == [expected, expected]


def test_another_shape_is_named_on_every_rank():
    call = "chunk_linear_attn of 4 tokens, with states and summaries of"
    expected = (
        "ContextError: chunk_linear_attn: the ranks do not agree\n"
        f"  rank 0: {call} [1, 1, 1] float32, [1, 1, 1, 2, 2] float32\n"
        f"  rank 1: {call} [1, 1, 2] float32, [1, 1, 2, 2, 2] float32"
    )
    assert last_lines("other_shape") == [expected, expected]


def test_another_number_of_tokens_is_named_on_every_rank():
    summary = "with states and summaries of [1, 1, 1] float32, [1, 1, 1, 2, 2] float32"
    expected = (
        "ContextError: chunk_linear_attn: the ranks do not agree\n"
        f"  rank 0: chunk_linear_attn of 4 tokens, {summary}\n"
        f"  rank 1: chunk_linear_attn of 6 tokens, {summary}"
    )
    assert last_lines("other_tokens") == [expected, expected]


def test_a_call_that_others_do_not_make_ends_all_of_them():
    for rank, said in enumerate(last_lines("other_shape_later", timeout=2)):
        assert said.startswith(f"ContextError: chunk_linear_attn: rank {rank} waited for the 2 ranks of its group, and one of")


def test_offsets_of_fla_that_one_rank_changes_end_all_of_them():
    waited = "rank {0} waited for the 2 ranks of its group, and one of"
    told = last_lines("other_offsets_of_fla", timeout=2)
    for rank, (said, what) in enumerate(zip(told, ("gated_delta_rule", "cp_context"), strict=True)):
        assert said.startswith(f"ContextError: {what}: {waited.format(rank)}")


def test_a_dead_rank_ends_the_others():
    alive, dead = last_lines("dead_rank")
    assert "gone" in dead
    assert alive.startswith(
        "ContextError: chunk_linear_attn: rank 0 waited for the 2 ranks of its group, and one of them died or is late: "
    )


def test_transforms_are_refused_by_every_rank():
    expected = (
        "ContextError: chunk_linear_attn: transforms of torch.func do not pass what ranks exchange: take gradients by "
        "torch.autograd"
    )
    assert last_lines("transformed") == [expected, expected]


def test_a_lost_process_is_told_and_waited_for_no_longer():
    heard: list[str] = []
    jobs = [("lost_rank", "lost_rank", {}), ("behind it", "other_plan", {})]
    found = run_jobs(2, jobs, timeout=20, heard=lambda name, said: heard.append(name))
    assert found["lost_rank"][1] == "the process was lost, with exit code 3"
    assert found["behind it"] == [NOT_RUN] * 2
    assert heard == []


def test_jobs_that_were_equal_are_not_run_again(tmp_path: Path):
    from on_devices import Record

    file = tmp_path / "ranks.json"
    record = Record(file, 3)
    record.add("a", ["", ""])
    record.add("b", ["", "off"])
    kept = json.loads(file.read_text())
    assert (kept["equal"], kept["names"], kept["wrong"]) == (1, ["a", "b"], {"b": ["", "off"]})
    again = Record(file, 3)
    assert list(again.said) == ["a"]
    again.add("b", ["", ""])
    assert (again.equal, json.loads(file.read_text())["wrong"]) == (2, {})
    file.write_text(json.dumps(kept | {"device": "another"}))
    with pytest.raises(SystemExit, match="is of another, and this is"):
        Record(file, 3)


def test_another_error_comes_out_as_it_is(monkeypatch: pytest.MonkeyPatch):
    from linattn.distributed import agreement

    monkeypatch.setattr(agreement.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda group: 4)
    error = RuntimeError("Tensors must be contiguous")
    assert agreement.rank_is_gone("chunk_gla", None, error) is None
    assert error.__notes__ == ["chunk_gla: rank 1 waited for the 4 ranks of its group"]
    gone = agreement.rank_is_gone("chunk_gla", None, RuntimeError("[pair.cc:553] Connection closed by peer [::1]:7\nGLHF"))
    assert str(gone) == (
        "chunk_gla: rank 1 waited for the 4 ranks of its group, and one of them died or is late: "
        "[pair.cc:553] Connection closed by peer [::1]:7"
    )
