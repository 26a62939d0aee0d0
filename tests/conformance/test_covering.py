"""Covering arrays: every pair of levels meets in a row, or it is said why not."""

from collections import Counter
from itertools import combinations

import pytest
from linattn.spec import COMPANIONS
from linattn_conformance import factors
from linattn_conformance.cases import CORE, every_case
from linattn_conformance.covering import Factor, Pairs, cover
from linattn_conformance.factors import plan_of

FACTORS = [
    Factor("size", ("usual", "small", "large", "huge"), varied=True, costs={"large": 1.0}, rare={"huge": "dear"}),
    Factor("kind", ("usual", "a", "b", "c")),
    Factor("state", ("none", "given")),
    Factor("layout", ("usual", "strided"), costs={"strided": 1.5}),
    Factor("dtype", ("fp32", "bf16"), late=frozenset({"bf16"})),
    Factor("hides", ("no", "yes"), rare={"yes": "hides"}, hiding=frozenset({"yes"})),
]


def refuses(levels):
    return "they exclude each other" if levels.get("kind") == "a" and levels.get("state") == "given" else ""


def made(seed=0, **more):
    return cover(Pairs(FACTORS, refuses, 2.0), seed, **more)


def pairs_of(rows, of=FACTORS):
    return {pair for row in rows for pair in combinations([(f.name, row[f.name]) for f in of], 2)}


def all_pairs(of):
    for f, g in combinations(of, 2):
        for a in f.levels:
            for b in g.levels:
                yield (f.name, a), (g.name, b)


def test_every_pair_meets_or_is_listed_with_its_reason():
    found = made()
    met = pairs_of(found.rows)
    for pair in all_pairs(FACTORS):
        told = tuple(f"{name}={level}" for name, level in pair)
        assert (pair in met) != (told in found.missing), told
    assert found.missing["kind=a", "state=given"] == "they exclude each other"
    assert found.missing["size=large", "layout=strided"] == "it would cost too much"
    assert set(found.missing.values()) <= {"they exclude each other", "it would cost too much", "dear", "hides"}


def test_no_row_costs_more_for_the_three_levels_that_it_is_made_for():
    dear = [Factor(name, ("usual", "dear"), costs={"dear": 1.0}) for name in "abc"]
    found = cover(Pairs([*dear, Factor("free", ("usual", "other"))], lambda levels: "", 2.0), 0, [("a", "b", "c")])
    assert max(sum(row[name] == "dear" for name in "abc") for row in found.rows) == 2
    assert found.missing == {("a=dear", "b=dear", "c=dear"): "no row has room for all three"}


def test_rows_are_few_and_allowed():
    found = made()
    assert len(found.rows) < 40
    for row in found.rows:
        assert list(row) == [factor.name for factor in FACTORS]
        assert not refuses(row)
        assert sum(factor.costs.get(row[factor.name], 0.0) for factor in FACTORS) <= 2.0


def test_a_pair_beside_a_level_that_hides_is_covered_elsewhere():
    rows = [row for row in made().rows if row["hides"] == "no"]
    assert set(all_pairs(FACTORS[1:3])) - pairs_of(rows) == {(("kind", "a"), ("state", "given"))}


def test_a_single_thing_stands_where_a_row_is_made_for_it_or_nothing_else_has_room():
    """Or where another factor makes many of it."""
    of = [
        Factor("heads", ("one", "two", "three"), varied=True, costs={"two": 1.0, "three": 1.0}, thin={"one": "groups"}),
        Factor("groups", ("usual", "four")),
        *(Factor(name, ("usual", "a", "b", "c", "d")) for name in ("kind", "layout", "mode")),
        Factor("length", ("usual", "long"), costs={"long": 1.0}),
    ]
    rows = cover(Pairs(of, lambda levels: "", 1.0), 0).rows
    one = [row for row in rows if row["heads"] == "one"]
    assert set(all_pairs(of)) - pairs_of(rows, of) == {(("heads", n), ("length", "long")) for n in ("two", "three")}
    assert all(row["heads"] == "one" for row in rows if row["length"] == "long")
    assert len(one) < len(rows) / 2


def test_late_levels_come_in_rows_of_their_own():
    found = made()
    assert all(row["dtype"] == "fp32" for row in found.rows[: found.early])
    assert any(row["dtype"] == "bf16" for row in found.rows[found.early : found.pairs])


def test_triples():
    found = made(triples=[("size", "kind", "dtype")])
    met = {(row["size"], row["kind"], row["dtype"]) for row in found.rows}
    assert met >= {(a, b, c) for a in ("usual", "small", "large") for b in FACTORS[1].levels for c in FACTORS[4].levels}


def test_equal_seeds_give_equal_rows_and_others_do_not():
    assert made(3).rows == made(3).rows
    assert made(3).rows != made(4).rows
    assert made(3, most=5).rows[:5] == made(3).rows[:5]


def test_a_pair_that_no_row_has_room_for_is_listed():
    three = [Factor("a", ("0", "1")), Factor("b", ("0", "1")), Factor("c", ("0", "1"))]

    def crowded(levels):
        return "" if sum(level == "1" for level in levels.values()) < 2 and levels.get("c") != "0" else "no"

    assert cover(Pairs(three, crowded, 0.0), 0).missing["a=0", "c=0"] == "no"
    assert cover(Pairs(three[:2], lambda levels: "", 0.0), 0).missing == {}


def test_pairs_meet_again_where_more_rows_are_asked_for():
    two = [Factor("a", ("0", "1")), Factor("b", ("0", "1", "2"))]
    once, twice = (cover(Pairs(two, lambda levels: "", 0.0), 0, least=least) for least in (0, 12))
    assert len(once.rows) == 6
    assert len(twice.rows) == twice.pairs == twice.usual == 12
    assert Counter(map(str, twice.rows)) == Counter(map(str, once.rows * 2))
    none = cover(Pairs(two, lambda levels: "no" if len(levels) > 1 else "", 0.0), 0, least=12)
    assert none.rows == []  # and it ends


# -- of the operators ------------------------------------------------------------------------------------------------

OPERATORS = {name: (spec, form) for name, spec, form in factors.operators()}


@pytest.mark.parametrize("name", ["gla", "kda", "mixed_attn", "ssd", "short_conv", "decode_gla"])
def test_the_rows_of_an_operator_cover_all_pairs(name):
    plan = plan_of(*OPERATORS[name])
    of = [dimension.factor for dimension in plan.dimensions]
    met = pairs_of(plan.covering.rows[: plan.covering.pairs], of)
    missing = {told for told in plan.covering.missing if len(told) == 2}
    for pair in all_pairs(of):
        assert pair in met or tuple(f"{name}={level}" for name, level in pair) in missing, pair
    assert all(plan.covering.missing.values())


def test_the_table_of_what_is_covered():
    told = factors.coverage(plan_of(*OPERATORS["gla"]))
    assert told["factors"]["state"] == ["usual", "state", "initial", "final"]
    assert "state=usual × dtype of initial_state=fp16" not in told["not covered"]
    assert "dtype of initial_state=fp16 × state=usual" in str(told["not covered"]["initial_state is not given"]) or any(
        "initial_state" in pair for pair in told["not covered"]["initial_state is not given"]
    )
    assert told["covered"] + sum(len(pairs) for pairs in told["not covered"].values() if " × " in pairs[0]) >= told["pairs"]
    assert told["rows"]["training"] <= told["rows"]["full"]


def test_every_level_of_every_factor_has_a_row():
    for name in ("gla", "ssd", "mixed_attn"):
        plan = plan_of(*OPERATORS[name])
        for dimension in plan.dimensions:
            assert {row[dimension.name] for row in plan.covering.rows} == {level.name for level in dimension.levels}, name


@pytest.mark.parametrize("name", ["gla", "mixed_attn", "ssd", "gated_rms_norm", "decode_kda"])
def test_the_first_rows_and_some_of_each_rare_level_have_every_level_but_the_late_ones(name):
    plan, first = plan_of(*OPERATORS[name]), CORE[factors.kind_of(*OPERATORS[name])]
    chosen = [plan.covering.rows[i] for i in plan.spanning(first)]
    assert first <= len(chosen) < plan.covering.pairs / 4
    for dimension in plan.dimensions:
        factor = dimension.factor
        assert set(factor.levels) - factor.late <= {row[factor.name] for row in chosen}, factor.name


@pytest.mark.parametrize("name", [name for name, (_, form) in OPERATORS.items() if not form])
def test_gradients_meet_every_width_that_is_named(name):
    """Widths that fit no tile, that end in half a tile, and that fill it: a fault may know a single one of them."""
    spec, _ = OPERATORS[name]
    form = "direct" if name in COMPANIONS else "chunk"
    cases = [case for case in every_case() if (case.op, case.form, case.check) == (name, form, "gradient")]
    seen = [case for case in cases if case.dtype == "float32" and not factors.HIDING.intersection(case.flags)]
    met = {size for case in seen for size in case.sizes}
    named = {"K": factors.WIDTHS, "V": factors.WIDTHS, "D": factors.CHANNELS, "W": factors.FILTERS}
    symbols = named.keys() & factors.symbols_of(spec)
    assert symbols
    for symbol in symbols:
        assert {(symbol, size) for sizes in named[symbol] for size in sizes if len(sizes) < 9} <= met


def test_sizes_are_drawn_from_their_level_and_differ():
    plan = plan_of(*OPERATORS["gla"])
    sizes = [dict(call.sizes) for call in plan.calls]
    assert len({size["T"] for size in sizes}) > 60
    assert len({size["K"] for size in sizes}) > 25
    assert max(size["T"] for size in sizes) > 1500
    assert all(size["T"] * size["K"] * size["V"] * size["B"] * size["H"] <= factors.COST for size in sizes)


def test_a_gradient_that_every_token_adds_to_is_not_float16():
    refuses, _ = factors.asked("simple_gla", "")
    assert refuses({"g": "g.HV", "dtype of g": "fp16.g"}) == (
        "a gradient that all tokens add to would be larger than float16 holds"
    )
    assert refuses({"g": "g.HV", "dtype of g": "fp64.g"}) == ""
