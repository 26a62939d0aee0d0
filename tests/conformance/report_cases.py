"""A report with a bit of everything, made up: of profile core, which has a quarter of the cases of training."""

from linattn_conformance import manifest, report
from linattn_conformance.cases import every_case
from linattn_conformance.fresh import fresh_cases
from linattn_conformance.runner import Result, Subject
from linattn_conformance.verdict import cases_of, verdict

HELD = manifest.load()
RUN = cases_of("core", HELD.applicable("numpy", "cpu"))
SEED = 7
CASES = [case for case in every_case() if case.id in RUN]
CASES += [case for case in fresh_cases(SEED, "core") if case.applies("numpy", "cpu")]
SUBJECT = Subject("acme", "linattn_backends.Acme", "acme-linattn", "2.1", "numpy", "cpu", 0.0, 1.0, {"numpy": "2.4.6"})


def results(family="gla", form="chunk"):
    """One result a case: most passed, the others failed, were declared or are known."""
    made = []
    for i, case in enumerate(CASES):
        error = 10.0 ** (-3.5 + 3.0 * ((i * 37) % 101) / 101) if case.check != "bad-input" else None
        if case.op != family or case.form != form:
            if case.check == "bad-input":
                made.append(Result(case.id, "passed"))
            else:
                made.append(Result(case.id, "declared-unsupported", message=f"has no {case.operator}"))
        elif case.size.get("K") == 256 and case.dtype != "float64":
            made.append(Result(case.id, "declared-unsupported", message="K must be at most 128"))
        elif case.dtype == "float16" and "subnormal" in " ".join(case.flags):
            made.append(Result(case.id, "failed", 2.5, 0.01, "o is off by 2.5 times its bound"))
        elif case.check == "often":
            made.append(Result(case.id, "failed", None, 0.3, "RuntimeError: <out of registers>"))
        elif case.check == "held":
            made.append(Result(case.id, "known-failure", None, 0.3, "a cache (https://example.com/1, until 2027-01-01)"))
        else:
            made.append(Result(case.id, "passed", error, 0.01))
    return made


def passing(family="gla", form="chunk"):
    """The same without what went wrong."""
    return [
        Result(result.id, "passed", 0.1, 0.01) if result.status in ("failed", "known-failure") else result
        for result in results(family, form)
    ]


def make(found=None, profile="core", complaints=(), subject=SUBJECT):
    """A whole report of these results."""
    made = report.make(subject, HELD, profile, results() if found is None else found, complaints, 12.3)
    return report.whole(made, verdict(made, HELD))
