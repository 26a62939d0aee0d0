"""What failed in a report, in few rows."""

import pytest
from linattn_conformance import grouping


def failed(name, message):
    return {"id": name, "status": "failed", "message": message}


def test_results_that_differ_in_figures_are_one_row():
    found = grouping.rows(
        [
            failed("kda/chunk/fp32/huge-state/T97-K24-V40/forward", "o is off by 2.05e+03 times its bound"),
            failed("gla/chunk/bf16/huge-state/T97-K24-V40/gradient", "o is off by 265 times its bound"),
            failed("gla/recurrent/bf16/huge-state/T97-K24-V40/gradient", "o is off by 9.5 times its bound"),
            failed("gla/chunk/fp32/plain/T65-K24-V40/forward", "o is off by 9.5 times its bound"),
            failed("gla/chunk/fp32/huge-state/T97-K24-V40/gradient", "o is not finite"),
        ]
    )
    assert [row[:5] for row in found] == [
        ["`huge`", "3", "chunk gla, kda; recurrent gla", "bf16, fp32", "o is off by 9.5 to 2.05e+03 times its bound"],
        ["ordinary", "1", "chunk gla", "fp32", "o is off by 9.5 times its bound"],
        ["`huge`", "1", "chunk gla", "fp32", "o is not finite"],
    ]
    assert found[0][5] == "`kda/chunk/fp32/huge-state/T97-K24-V40/forward`"


def test_things_tried_on_the_same_operators_of_which_the_same_came_are_one_row():
    """A fault of an operator shows whatever is tried on it."""
    message = "o is off by 9 times its bound"
    names = ["kda/chunk/fp32/state/T97-K24-V40/packed", "gla/chunk/fp32/state/T97-K24-V40/packed"]
    plain = [failed(name.replace("packed", "forward"), message) for name in names]
    found = grouping.rows(
        [*(failed(name, message) for name in names), *plain, *plain, failed(names[0].replace("packed", "nan"), message)]
    )
    assert [row[:4] for row in found] == [
        ["ordinary; `packed`", "6", "chunk gla, kda", "fp32"],
        ["`nan`", "1", "chunk kda", "fp32"],
    ]


def test_of_rows_of_covering_arrays_what_they_share_is_told():
    rows = ("fp16.g-i64-no_grad-vast-varlen.many", "fp16.g-i64-sliced.q-tiny", "fp16.g-retained-reversed.k-strong-zeros.q")
    found = grouping.rows(failed(f"gla/chunk/fp32/{row}/T9-K1-V1/forward", "o is not finite") for row in rows)
    assert [row[:2] for row in found] == [["`fp16.g`", "3"]]
    different = [rows[0], rows[2].replace("fp16.g", "gv")]
    (row,) = grouping.rows(failed(f"gla/chunk/fp32/{row}/T9-K1-V1/forward", "o is not finite") for row in different)
    assert row[0] == "various"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gla/chunk/fp32/state-varlen/T65-K24-V40/gradient", "ordinary"),
        ("gla/chunk/fp32/gv-reset-state/T65-K24-V40/gradient", "`gv`, `reset`"),
        ("gla/chunk/fp32/phi.relu-state/T33-K24-V40/forward", "`phi.relu`"),
        ("gla/chunk/fp32/strided-state/T65-K24-V40/split", "`strided`, `split`"),
        ("gla/chunk/fp32/bad-input/beta-missing", "wrong calls"),
    ],
)
def test_what_was_tried(name, what):
    assert grouping.tried(name) == what


def test_a_long_message_is_cut():
    (row,) = grouping.rows([failed("gla/chunk/fp32/plain/T65-K24-V40/forward", "Error:\n" + "x " * 200)])
    assert row[4].startswith("Error: x x")
    assert len(row[4]) == 160


def test_addresses_are_no_figures():
    names = "gla/chunk/fp32/plain/T65-K24-V40/forward", "gla/chunk/fp32/plain/T1-K24-V40/forward"
    (row,) = grouping.rows([failed(names[0], "<f at 0x7f1ad3a19940>"), failed(names[1], "<f at 0x7fe5837ba660>")])
    assert row[4] == "<f at 0x…>"


def test_a_dtype_is_no_figure():
    name = "gla/chunk/fp32/plain/T65-K24-V40/forward"
    found = grouping.rows(
        [failed(name, "o has dtype float16, expected float32"), failed(name, "o has dtype int64, expected float32")]
    )
    assert [row[4] for row in found] == ["o has dtype float16, expected float32", "o has dtype int64, expected float32"]
