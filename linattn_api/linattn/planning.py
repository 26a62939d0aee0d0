"""Decides which backend runs a call, how, and why: static facts in, a :class:`Plan` out.

One decision procedure serves everybody: an eager call looks its plan up by a cheap key, a call under ``torch.compile`` asks for
it once, at compile time, and ``explain`` prints it.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .call import Call, method_name
from .errors import BackendError, UnknownBackend, Unsupported
from .plugin import Backend
from .preference import Preference
from .registry import registry, told
from .spec import COMPANIONS, as_recurrent, lowerings_of, spec_of

__all__ = ["Answer", "Passed", "Plan", "Route", "answer_of", "candidates", "decide", "refusal"]


class Passed(NamedTuple):
    """A candidate that was passed over, and why."""

    backend: str
    reason: str


class Route(NamedTuple):
    """How a call is rewritten for a method that does not take it as it is.

    Attributes:
        form: The form that runs.
        applied: Options that are applied before the method is called, because it does not take them.
        steps: The families from the caller's to the method's.
        omitted: Keywords of that family that the method does not take. None of them asks for anything.
    """

    form: str
    applied: tuple[str, ...]
    steps: tuple[str, ...]
    omitted: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The decision for one call.

    Attributes:
        call: The call, as the caller made it.
        preference: Which backends were asked for, and where that was said.
        passed: Every candidate passed over before the chosen one, with its reason.
        backend: Name of the chosen backend; ``None`` if none can run the call.
        steps: The families from the caller's to the one that the backend runs; more than one if the call is lowered.
        form: The form that runs.
        options: The call's static options, defaults filled in.
        details: How the backend will run it, if it has something to say.
        applied: Options that linattn applies itself, because the backend's method does not take them.
        omitted: Keywords that the backend's method does not take, and that ask for nothing in this call.
        mapped_by: The backend that makes the features of queries and keys itself, if there is a map and one does.
    """

    call: Call
    preference: Preference
    passed: tuple[Passed, ...]
    backend: str | None
    steps: tuple[str, ...]
    form: str
    options: tuple[tuple[str, Any], ...]
    details: str | None = None
    applied: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    mapped_by: str | None = None

    @property
    def route(self) -> Route | None:
        """From the call to the method; ``None`` where that gets the call's own arguments."""
        rewritten = self.form != self.call.form and self.call.form in ("decode", "summary")
        direct = len(self.steps) == 1 and not self.applied and not rewritten
        return None if direct else Route(self.form, self.applied, self.steps, self.omitted)

    @property
    def method(self) -> str:
        """The method of the chosen backend that runs, e.g. ``"chunk_gla"``."""
        return method_name(self.form, self.steps[-1])

    def __str__(self) -> str:
        lines = [
            str(self.call),
            f"  asked for    {', '.join(self.preference.backends)} ({self.preference.source})",
        ]
        if self.backend is None:
            lines.append("  runs         nothing: no candidate can")
        else:
            notes = [f"linattn applies {', '.join(self.applied)}"] if self.applied else []
            notes += [f"lowered: {' → '.join(self.steps)}"] if len(self.steps) > 1 else []
            notes += ["on copies of the states, written back"] if self.form != self.call.form == "decode" else []
            notes += ["read off the state of a wider call"] if self.form != self.call.form == "summary" else []
            rewritten = f" ({'; '.join(notes)})" if notes else ""
            details = f": {self.details}" if self.details else ""
            lines.append(f"  runs         {self.backend}.{self.method}{rewritten}{details}")
        lines += [f"  feature map  {self.mapped_by}"] if self.mapped_by else []
        lines += [f"  passed over  {backend}: {reason}" for backend, reason in self.passed]
        lines += [
            f"  not tried    {peer}: another library, which auto tries after our own backends" for peer in _not_tried(self)
        ]
        return "\n".join(lines)


def _not_tried(plan: Plan) -> list[str]:
    """Adapters of other libraries that are installed, are for the family, and would have come after the chosen backend."""
    if plan.backend is None or "auto" not in plan.preference.backends:
        return []
    done = {plan.backend, *(passed.backend for passed in plan.passed)}
    return [
        kind.name
        for kind in registry.built_in
        if kind.requires
        and kind.name in registry.records
        and kind.name not in done
        and plan.call.framework in kind.frameworks
        and plan.call.op in (kind.families or (plan.call.op,))
        and importlib.util.find_spec(kind.requires)
    ]


# -- the decision ----------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """A call that a backend runs, and how the caller's becomes it."""

    call: Call
    route: Route


class Answer(NamedTuple):
    """What a backend says of a call.

    Attributes:
        fit: How it runs the call; ``None`` if it does not.
        reasons: Why not.
        details: What it has to say about how.
    """

    fit: Fit | None
    reasons: tuple[str, ...] = ()
    details: str | None = None


def answer_of(name: str, ways: Sequence[Call]) -> Answer:
    """Ask the backend of that name about the calls that do what was asked for, best first."""
    reasons: list[str] = []
    backend = _loaded(name, reasons)
    fits = (_fit(backend, way, reasons) for way in ways if backend)
    fit = next((fit for fit in fits if fit), None)
    return Answer(fit, tuple(dict.fromkeys(reasons)), _details(backend, fit.call) if backend and fit else None)


def decide(
    call: Call,
    options: Mapping[str, Any],
    preference: Preference,
    bare: bool = False,
    ask: Callable[[str, Sequence[Call]], Answer] = answer_of,
) -> Plan:
    """Walk the candidates and return the plan; ``plan.backend`` is ``None`` if none can run the call.

    Args:
        call: A validated call.
        options: Its static options, defaults filled in.
        preference: What to try.
        bare: The form was not asked for by name, so another form of the same operator may run instead.
        ask: Asks a backend, here or in another process.
    """
    ways = _ways(call, bare)
    passed: list[Passed] = []
    for name in candidates(call.framework, preference):
        answer = ask(name, ways)
        if answer.fit:
            (form, applied, steps, omitted), static = answer.fit.route, tuple(options.items())
            return Plan(call, preference, tuple(passed), name, steps, form, static, answer.details, applied, omitted)
        passed.append(Passed(name, "; ".join(answer.reasons)))
    return Plan(call, preference, tuple(passed), None, (call.op,), call.form, tuple(options.items()))


def _ways(call: Call, bare: bool) -> list[Call]:
    """The calls that do what was asked for, best first: other forms of a bare name; decoding by the recurrent form."""
    if call.form == "decode" and call.op not in COMPANIONS:
        return [call, as_recurrent(call)]
    otherwise = spec_of(call.op, call.form).otherwise
    if otherwise is not None:
        return [call, otherwise(call)]
    return [call, *(replace(call, form=form) for form in ("chunk", "recurrent") if bare and form != call.form)]


def candidates(framework: str, preference: Preference) -> Iterator[str]:
    """Names in order, each once; auto stands for the built-in backends of the framework, then the others."""
    seen: set[str] = set()
    for wanted in preference.backends:
        for name in registry.order(framework) if wanted == "auto" else (wanted,):
            if name not in seen:
                seen.add(name)
                yield name


def _loaded(name: str, reasons: list[str]) -> Backend | None:
    """The backend; None if it cannot be used, with the reason noted."""
    try:
        return registry.load(name)
    except UnknownBackend:
        raise
    except BackendError as error:
        reasons.append(str(error))
        return None


def _fit(backend: Backend, call: Call, reasons: list[str]) -> Fit | None:
    """How a backend can run ``call``, rewriting it if need be; else None, with the reasons noted.

    First with the options that its methods take left to them, then with all of them applied; each time for the family itself,
    then for the more general ones.
    """
    complaint = _excluded(backend, call)
    if complaint:
        reasons.append(complaint)
        return None
    asked = _to_apply(call)
    seen: set[tuple[Any, ...]] = set()
    for keep in (True, False) if asked else (True,):
        for steps in _chain(call.op, call.form):
            taken = keywords_of(backend, method_name(call.form, steps[-1])) if keep else frozenset[str]()
            applied = tuple(name for name in asked if name not in taken)
            lowered = _lowered(call, applied, steps, reasons)
            if lowered is None:
                break
            if (applied, steps) in seen:
                continue
            seen.add((applied, steps))
            complaint = _refusal(backend, lowered)
            if complaint is None:
                return Fit(lowered, Route(call.form, applied, steps, _omitted(backend, lowered)))
            reasons.append(complaint)
    return None


def _to_apply(call: Call) -> tuple[str, ...]:
    """Names of the options that ask for something which linattn can do itself."""
    return tuple(option.name for option in spec_of(call.op, call.form).options if option.lowering and option.asked(call))


def _chain(op: str, form: str) -> Iterator[tuple[str, ...]]:
    """The families down to ``op`` itself, then down to each more general one, but for summaries, which differ in shape."""
    steps = (op,)
    while True:
        yield steps
        lowering = spec_of(steps[-1], form).lowering
        if lowering is None or lowering.to is None:
            return
        steps = (*steps, lowering.to)


def _lowered(call: Call, applied: tuple[str, ...], steps: tuple[str, ...], reasons: list[str]) -> Call | None:
    """``call`` without some options and as one of family ``steps[-1]``; None if there is none, with the reason noted."""
    for lowering in lowerings_of(applied, steps):
        complaint = lowering.blocked(call)
        if complaint:
            reasons.append(complaint)
            return None
        call = lowering.describe(call)
    return call


# -- what a backend answers ------------------------------------------------------------------------------------------


def refusal(backend: Backend, call: Call) -> str | None:
    """Why ``backend`` does not run ``call``, whatever it is rewritten as; ``None`` if it does."""
    reasons: list[str] = []
    return None if _fit(backend, call, reasons) else "; ".join(dict.fromkeys(reasons))


def _excluded(backend: Backend, call: Call) -> str | None:
    """What the backend declares of itself rules out, of whatever operator."""
    if call.framework not in backend.frameworks:
        return f"takes {' and '.join(backend.frameworks)} arrays, not {call.framework}"
    if call.needs_grad and not backend.differentiable:
        return "is forward-only, and a gradient is asked for"
    if call.forward_mode and not backend.forward_mode:
        return "has no forward-mode derivatives, and the arrays carry tangents"
    return None


def _refusal(backend: Backend, call: Call) -> str | None:
    """What the backend has no method for, no keyword for, or says that it does not support."""
    if not hasattr(backend, call.method):
        return f"has no {call.method}"
    wanted = [text for name in _omitted(backend, call) if (text := _asked(call, name))]
    if wanted:
        return f"{call.method} does not take {' and '.join(wanted)}"
    try:
        answer = backend.supports(call)
    except Exception as error:
        raise BackendError(f"backend {backend.name!r}: supports raised {told(error)}{_hint(call, error)}") from error
    if answer is None:
        return None
    if not isinstance(answer, Unsupported):  # pyright: ignore[reportUnnecessaryIsInstance] - plug-ins may return anything
        raise BackendError(f"{type(backend).__qualname__}.supports must return None or Unsupported, got {answer!r}")
    return str(answer)


def _hint(call: Call, error: Exception) -> str:
    """What a plug-in's author may not have known."""
    if isinstance(error, Unsupported):
        return ": it is returned, not raised"
    symbolic = [symbol for symbol, size in call.dims if size is None]
    return f"; {' and '.join(symbolic)} of this call {_are(symbolic)} None: any size, under tracing" if symbolic else ""


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _details(backend: Backend, call: Call) -> str | None:
    """What the backend says about a call that it runs. Nothing that it does here fails the call."""
    try:
        found = backend.details(call)
    except Exception as error:
        return f"details raised {told(error)}"
    is_text = found is None or isinstance(found, str)  # pyright: ignore[reportUnnecessaryIsInstance] - plug-ins may return anything
    return found if is_text else f"details gave no text but {type(found).__name__}"


def keywords_of(backend: Backend, method: str) -> frozenset[str]:
    """The keywords that a method takes; none if there is no such method."""
    found = getattr(backend, method, None)
    if found is None:
        return frozenset()
    parameters = inspect.signature(found).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def _omitted(backend: Backend, call: Call) -> tuple[str, ...]:
    """The keywords of its family that the method of a call does not take."""
    taken = keywords_of(backend, call.method)
    return tuple(name for name in spec_of(call.op, call.form).keywords if name not in taken)


def _asked(call: Call, name: str) -> str | None:
    """A keyword as the call has it; ``None`` if it asks for nothing: it has its default, or is a hint."""
    for option in spec_of(call.op, call.form).options:
        if option.name == name:
            return f"{name}={call.option(name)!r}" if option.asked(call) and not option.hint else None
    return name if any(given.partition(".")[0] == name for given, _, _ in call.arrays) else None
