"""The search: generated cases, for what the manifest did not think of. It never decides a verdict.

Hypothesis draws operators, dtypes, flags, sizes, packings, layouts of memory, gates and feature maps, runs each against the
oracle as any case is run, and shrinks what fails to the smallest case that still does. Every generated case has an id like
those of the manifest, which holds all there is to know about it, data included: ``linattn conformance --case ID`` runs it
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from linattn.plugin import FORMS
from linattn.spec import DECODING, FAMILIES, OpSpec

from .cases import DTYPES, HAVE_BFLOAT16, STRIDED, WRITABLE, Case, atoms, make
from .maps import HEADS, LARGEST, MAPS, WIDTH
from .pool import Pool
from .runner import Result, Subject

__all__ = ["Finding", "Search", "needs_hypothesis"]

EXAMPLES = 200
"""In a round; each round has a seed of its own."""
GATES = ("", "zero", "reset", "huge", "long", "mixed")
SLOW = ("late", "outgrew")
"""Ways to lose a process that take long."""
LAYOUTS = ("", "strided", "sliced", "headsfirst")


def needs_hypothesis() -> None:
    """Say how to get it, if it is not there."""
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise RuntimeError("the search needs the package hypothesis: pip install hypothesis") from None


@dataclass(frozen=True)
class Finding:
    """A generated case that fails.

    Attributes:
        case: Its id, after shrinking.
        message: What is wrong.
        seed: Seed of the round that found it.
        steady: False if it did not fail each time that it was tried.
    """

    case: str
    message: str
    seed: int
    steady: bool = True


class _Failed(Exception):
    """A case failed."""

    def __init__(self, case: Case, message: str) -> None:
        super().__init__(f"{case.id}: {message}")
        self.case, self.message = case, message


class _Lost(BaseException):
    """A case took a process and much time with it. No :class:`Exception`: it is not shrunk, which would do that again."""

    def __init__(self, case: Case, message: str) -> None:
        super().__init__(f"{case.id}: {message}")
        self.case, self.message = case, message


@dataclass
class Search:
    """A search of one backend.

    Attributes:
        pool: Runs the cases.
        families: What is searched; every family by default.
        dtypes: Short names; every dtype by default.
        ran: Called after each case.
        examples: How many cases were run so far.
        seeds: The seeds of the rounds so far.
        findings: What was found.
    """

    pool: Pool
    families: tuple[str, ...] = tuple(FAMILIES)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    ran: Callable[[Search], None] = lambda search: None
    examples: int = 0
    seeds: list[int] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def run(self, seconds: float, seed: int, told: Callable[[Finding], None] | None = None) -> None:
        """Search for a time, in rounds with the seeds ``seed``, ``seed + 1`` …, or for one whole round if the time is 0.

        ``told`` hears of each finding at once.
        """
        until = time.monotonic() + (seconds or float("inf"))
        while time.monotonic() < until and not (self.seeds and seconds == 0):
            self.seeds.append(seed)
            finding = self.round(seed, until)
            if finding is not None:
                self.findings.append(finding)
                if told is not None:
                    told(finding)
            seed += 1

    def round(self, seed: int, until: float) -> Finding | None:
        """One round: what it found, shrunk. What is wrong with an operator and check already is not looked for again."""
        import hypothesis
        from hypothesis.errors import Flaky

        found = {kind_of(finding.case) for finding in self.findings}
        failing: list[_Failed] = []

        def holds(case: Case) -> None:
            if kind_of(case.id) in found or (not failing and time.monotonic() > until):
                return
            result = self.result(case)
            if result.status == "not-run" or any(how in SLOW for _, how in self.pool.lost):
                raise _Lost(case, result.message)
            if result.status == "failed":
                failing.append(_Failed(case, result.message))
                raise failing[-1]

        settings = hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            verbosity=hypothesis.Verbosity.quiet,
        )
        generated = hypothesis.given(strategy(self.pool.subject, self.families, self.dtypes))
        try:
            hypothesis.seed(seed)(settings(generated(holds)))()
        except (_Failed, _Lost) as failed:
            return Finding(failed.case.id, failed.message, seed)
        except Flaky:
            return Finding(failing[-1].case.id, failing[-1].message, seed, steady=False)
        return None

    def result(self, case: Case) -> Result:
        """Run one case, whatever became of those before it."""
        self.examples += 1
        self.pool.lost.clear()
        (result,) = self.pool.run([case])
        self.ran(self)
        return result


def kind_of(case: str) -> tuple[str, str, str]:
    """Family, form and check."""
    family, form, *_, check = case.split("/")
    return family, form, check


# -- what is generated -----------------------------------------------------------------------------------------------


def strategy(subject: Subject, families: tuple[str, ...], dtypes: tuple[str, ...]) -> Any:
    """Cases for a framework. What comes first in a choice is what shrinking prefers."""
    from hypothesis import reject
    from hypothesis import strategies as st

    short = [name for name in dtypes if name != "bf16" or subject.framework in HAVE_BFLOAT16]
    layouts = LAYOUTS if subject.framework in STRIDED else LAYOUTS[:1]

    @st.composite
    def cases(draw: Any) -> Case:
        spec = FAMILIES[draw(st.sampled_from(families))]
        form = draw(st.sampled_from(forms(spec, subject.framework)))
        kind = decoding if form == "decode" else calling
        flags, sizes, checks = kind(draw, st, spec, form)
        flags.append(draw(st.sampled_from(("", "narrow", "wide"))))
        if "narrow" in flags:  # a state that is rounded after every token is not the one that is rounded once
            checks = tuple(check for check in checks if check != "steps")
        flags.append(draw(st.sampled_from(layouts)))
        dtype = draw(st.sampled_from(short))
        if spec.mapped and dtype == "fp32" and "varlen" not in flags and draw(st.booleans()):
            name, sizes = mapped(draw, st, spec, flags, sizes)
            flags, checks = [*flags, f"phi.{name}"], ("forward",)
        check = draw(st.sampled_from(checks))
        flags += constants(draw, st, spec, flags) if check == "gradient" else []
        flags.append(f"seed.{draw(st.integers(0, 999))}")
        made = list(make(spec, form, dtype, "-".join(filter(None, flags)), check, sizes))
        return made[0] if made else reject()

    return cases()


def forms(spec: OpSpec, framework: str) -> tuple[str, ...]:
    """What can be called; decoding in place where arrays can be written to."""
    return (*FORMS, "auto", *(["decode"] if spec.name in DECODING and framework in WRITABLE else []))


Drawn = tuple[list[str], dict[str, int], tuple[str, ...]]
"""Flags, sizes, and the checks to choose from."""


def calling(draw: Any, st: Any, spec: OpSpec, form: str) -> Drawn:
    """A call of a form that returns its state."""
    flags = [flag for flag in atoms(spec) if draw(st.booleans())]
    flags.append(draw(st.sampled_from(("", "final", "state"))))
    flags += [draw(st.sampled_from(choices)) for choices in ways(spec)]
    lengths = draw(st.none() | st.lists(st.integers(0, 70), max_size=6) | st.lists(st.integers(0, 3), max_size=90))
    sizes = {"T": draw(st.integers(0, 150)) if lengths is None else sum(lengths), **rows(draw, st)}
    if lengths is not None:
        flags += ["varlen", ".".join(["pack", *map(str, lengths)])]
        sizes["B"] = 1
    checks = ("forward", "gradient", "agree", *(("packed",) if lengths is not None else ()))
    return flags, sizes | chunk(draw, st, spec, form), checks


def decoding(draw: Any, st: Any, spec: OpSpec, form: str) -> Drawn:
    """A few tokens on states that are overwritten."""
    flags = [flag for flag in atoms(DECODING[spec.name]) if draw(st.booleans())]
    flags.append(draw(st.sampled_from(("", "slots", "padding"))))
    flags += [draw(st.sampled_from(choices)) for choices in ways(spec)]
    sizes = {"T": draw(st.integers(0, 12)), **rows(draw, st), "B": draw(st.integers(1, 9))}
    return flags, sizes, ("forward", *(("steps", "repeat") if sizes["T"] else ()))


def rows(draw: Any, st: Any) -> dict[str, int]:
    """Sizes that every call has."""
    return {symbol: draw(st.integers(1, most)) for symbol, most in (("K", 40), ("V", 40), ("B", 3), ("H", 3))}


def mapped(draw: Any, st: Any, spec: OpSpec, flags: list[str], sizes: dict[str, int]) -> tuple[str, dict[str, int]]:
    """A feature map that the flags allow, and sizes that it takes: those of its parameters, and few, for it widens them."""
    from hypothesis import reject

    if spec.name not in ("linear_attn", "mixed_attn"):
        names = ["relu"]  # keys must stay no longer than one
    else:
        names = [name for name, phi in MAPS.items() if phi.normalizes or "normalize" not in flags]
    if "normalize" in flags and {"state", "slots", "padding"}.intersection(flags):
        reject()  # the sums of keys in such a state are those of no map
    name = draw(st.sampled_from(names))
    fixed = {"K": WIDTH, "H": HEADS} if MAPS[name].shapes else {"K": min(sizes["K"], WIDTH)}
    fixed |= {"L": fixed["K"]} if "L" in sizes else {}
    return name, sizes | fixed | {"T": min(sizes["T"], LARGEST)}


def ways(spec: OpSpec) -> list[tuple[str, ...]]:
    """Choices of values that the arrays of a family have."""
    names = {arg.name for arg in spec.args}
    return [*([GATES] if "g" in names else []), *([("", "strong")] if "beta" in names else [])]


def constants(draw: Any, st: Any, spec: OpSpec, flags: list[str]) -> list[str]:
    """Arrays that no gradient is asked of; mostly none, and never all."""
    names = ["initial_state"] if "state" in flags else []
    names += [arg.name for arg in spec.args if not arg.optional or arg.name in flags]
    chosen = draw(st.just([]) | st.lists(st.sampled_from(names), max_size=len(names) - 1, unique=True))
    return [f"constant.{name}" for name in chosen]


def chunk(draw: Any, st: Any, spec: OpSpec, form: str) -> dict[str, int]:
    """A chunk size, where one may be given; part of the meaning of ``mixed_attn``."""
    if spec.name == "mixed_attn":
        return {"C": draw(st.integers(1, 40)), "L": draw(st.integers(1, 24))}
    size = draw(st.just(0) | st.integers(1, 130)) if form in ("chunk", "auto") else 0
    return {"C": size} if size else {}
