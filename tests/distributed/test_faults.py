"""Ranks that disagree say so, all of them, and one that dies ends the others."""

from __future__ import annotations

import pytest
from ranks import run_jobs

pytest.importorskip("torch.distributed")


def last_lines(fault: str) -> list[str]:
    """What each of two ranks raised."""
    said = run_jobs(2, [(fault, fault, {})], timeout=20)[fault]
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
    call = "chunk_linear_attn with states and summaries of"
    expected = (
        "ContextError: chunk_linear_attn: the ranks do not agree\n"
        f"  rank 0: {call} [1, 1, 1] float32, [1, 1, 1, 2, 2] float32\n"
        f"  rank 1: {call} [1, 1, 2] float32, [1, 1, 2, 2, 2] float32"
    )
    assert last_lines("other_shape") == [expected, expected]


def test_a_dead_rank_ends_the_others():
    alive, dead = last_lines("dead_rank")
    assert "gone" in dead
    assert alive.startswith(
        "ContextError: chunk_linear_attn: rank 0 waited for the 2 ranks of its group, and one of them died or is late: "
    )


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
