"""The cases at other sizes."""

from linattn_conformance.cases import every_case
from linattn_conformance.resized import resized


def test_the_usual_cases_at_other_sizes_keep_their_checks():
    found = {case.id: case for case in resized(every_case(), "bf16", {"K": 128, "V": 64})}
    case = found["gla/chunk/bf16/gv-grouped-state-varlen/T65-K128-V64/gradient"]
    assert (case.dtype, case.size, case.check, case.core) == ("bfloat16", {"T": 65, "K": 128, "V": 64}, "gradient", False)
    assert not case.applies("numpy", "cpu")
    assert {case.check for case in found.values()} >= {"forward", "gradient", "split", "packed", "causal", "repeat", "nan"}


def test_cases_about_widths_dtypes_and_transforms_are_left_out():
    usual = [case for case in every_case() if case.dtype == "float32" and (case.size.get("K"), case.size.get("V")) == (24, 40)]
    found = list(resized(every_case(), "fp16", {"K": 64, "V": 64}))
    assert len(found) == len({case.id for case in found}) == len(usual)
    assert all((case.size["K"], case.size["V"]) == (64, 64) for case in found)
