"""Runs calls: from arrays to static facts, from those to a :class:`~linattn.planning.Plan`, and from that to a method.

An eager call looks its plan up by a cheap key; a call under ``torch.compile`` asks for it once, at compile time.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from . import feature_maps, guards, mapping, preference
from .call import Call, method_name
from .context import Context
from .errors import FrameworkError, OptionError, ShapeError, SignedWeightsWarning, Unsupported
from .frameworks import BY_TYPE, LOADED, Facts, Framework, framework_of
from .planning import Answer, Plan, Route, answer_of, decide
from .preference import ENVIRONMENT_VARIABLE, Preference, preference_of
from .registry import registry
from .spec import CU_SEQLENS, Arg, Finish, Holder, Lowering, OpSpec, lowerings_of, spec_of
from .validate import check_offsets, check_slots, describe

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "Rewriting",
    "explain_call",
    "plan_of",
    "resolve",
    "run",
    "run_rewritten",
    "use_backend",
]


@contextlib.contextmanager
def use_backend(backend: str | Sequence[str]) -> Generator[None]:
    """Prefer a backend inside a ``with`` block, in this thread or asyncio task only.

    Args:
        backend: A name (strict: that backend or an error), ``"auto"``, or a sequence in order of preference, which may end
            in ``"auto"``.

    Raises:
        UnknownBackend: A name that no installed or registered backend has.

    A call's own ``backend=`` argument comes first. Functions compiled by ``torch.compile`` or ``jax.jit`` notice the change
    and are compiled again; they see the preference of the thread, that is, of the block entered last, where asyncio tasks
    of one thread interleave, and none in a thread that only copied the context (``asyncio.to_thread``): pass ``backend=``
    there. As with every context variable, blocks must be left in the order opposite to that in which they were entered,
    generators that hold one open included.
    """
    names = preference.names(backend)
    for name in names:
        if name != "auto":
            registry.record(name)
    before = preference.context.get()
    token = preference.context.set(names)
    _mirror(names)
    try:
        yield
    finally:
        preference.context.reset(token)
        _mirror(before)


def _mirror(names: tuple[str, ...] | None) -> None:
    preference.thread.backends = names
    for framework in LOADED.values():
        framework.mirror(names)


# -- from a call to its plan -----------------------------------------------------------------------------------------


def plan_of(
    spec: OpSpec,
    form: str | None,
    framework: str,
    given: Sequence[tuple[str, Facts]],
    options: Mapping[str, Any],
    preference: Preference,
    needs_grad: bool | None = None,
    forward_mode: bool = False,
    ask: Callable[[str, Sequence[Call]], Answer] = answer_of,
) -> Plan:
    """Validate static facts and decide. ``options`` holds every static keyword and ``initial_state`` (or None)."""
    call, resolved = describe(spec, form, framework, given, options, needs_grad, forward_mode)
    return decide(call, {name: resolved[name] for name in spec.option_names}, preference, form is None, ask)


def _flatten_state(spec: OpSpec, form: str | None, arrays: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Any]:
    """Every array of a call whose state has several arrays, in the order of ``spec.arrays``; None where one is absent."""
    state = keywords["initial_state"]
    if state is not None and not isinstance(state, spec.state_type or ()):
        expected, found = getattr(spec.state_type, "__name__", ""), type(state).__name__
        raise FrameworkError(f"{_name(spec, form)}: initial_state must be a linattn.{expected}, got {found}")
    leaves = list(arrays)
    for name in spec.keyword_arrays:
        if name == "initial_state":
            leaves.extend([None] * len(spec.state(keywords)) if state is None else state)
        else:
            leaves.append(keywords[name])
    return leaves


def _inspect(
    spec: OpSpec,
    form: str | None,
    framework: Framework,
    leaves: Sequence[Any],
    keywords: Mapping[str, Any],
    preference: Preference,
) -> Plan:
    """Read the facts off real arrays and decide."""
    given: list[tuple[str, Facts]] = []
    first = spec.args[0].name
    for arg, leaf in zip(spec.arrays(keywords), leaves, strict=True):
        if leaf is None:
            continue
        other = framework_of(leaf, arg.title, f"{_name(spec, form)}: ")
        if other is not framework:
            raise FrameworkError(
                f"{_name(spec, form)}: {arg.title} is a {other.name} array but {first} is a {framework.name} array: "
                f"convert it, nothing is copied for you"
            )
        given.append((arg.name, framework.facts(leaf)))
    derivatives = framework.needs_grad(leaves), framework.forward_mode(leaves)
    return plan_of(spec, form, framework.name, given, keywords, preference, *derivatives)


def _name(spec: OpSpec, form: str | None) -> str:
    return method_name(form, spec.name)


class Rewriting(NamedTuple):
    """A route with everything looked up that running it needs.

    Attributes:
        form: The form that runs.
        given: Names of the call's positional arrays.
        lowerings: What is done to its arguments, in order.
        wanted: Names of the method's positional arrays.
        keywords: Those that the method takes, and their defaults.
    """

    form: str
    given: tuple[str, ...]
    lowerings: tuple[Lowering, ...]
    wanted: tuple[str, ...]
    keywords: tuple[tuple[str, Any], ...]


def _rewriting(route: Route | None) -> Rewriting | None:
    if route is None:
        return None
    form, applied, steps, omitted = route
    spec = spec_of(steps[-1], form)
    given, wanted = (tuple([arg.name for arg in found.args]) for found in (spec_of(steps[0], form), spec))
    keywords = tuple([(name, spec.defaults.get(name)) for name in spec.keywords if name not in omitted])
    return Rewriting(form, given, tuple(lowerings_of(applied, steps)), wanted, keywords)


class _Decided(NamedTuple):
    """A memoised plan with what running it needs: the options that are passed on, and what else is by its name."""

    plan: Plan
    function: Any
    rewriting: Rewriting | None
    options: dict[str, Any]
    given: tuple[str, ...]
    watch: guards.Watch


def _passed_on(spec: OpSpec, plan: Plan) -> tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]:
    """Of the keywords that the method takes, or all where the call is rewritten first: the options with their values, then the
    names of those that come from each call: arrays, and objects that hold arrays."""
    left_out = plan.omitted if plan.route is None else ()
    given = (*spec.keyword_arrays, *[name for name, _ in spec.holders])
    options = tuple((name, value) for name, value in plan.options if name not in left_out and name not in given)
    return options, tuple(name for name in given if name not in left_out)


_decided: dict[Any, _Decided] = {}
_MOST_DECIDED = 8192  # an entry is small; a program with more distinct shapes than this decides again


def _look_up(
    spec: OpSpec,
    form: str | None,
    framework: Framework,
    leaves: Sequence[Any],
    keywords: Mapping[str, Any],
    backend: str | Sequence[str] | None,
) -> _Decided:
    """The memoised decision for an eager call."""
    context, wanted, environment = preference.context.get(), backend, None
    if backend is None:
        environment = os.environ.get(ENVIRONMENT_VARIABLE) if context is None else None  # it takes most of a microsecond
    elif isinstance(backend, list):
        wanted = tuple(backend)  # hashable
    key = decided = None
    try:
        options = spec.pick_options(keywords)
        # with the types of the options, because True == 1 == 1.0 and only one of them is right
        types = tuple(map(type, options))
        key = (spec.name, form, wanted, context, environment, registry.generation, options, types, framework.key(leaves))
        decided = _decided.get(key)
    except (TypeError, AttributeError):  # a symbolic size, or no array at all: the long way round
        key = None
    if decided is None:
        plan = _inspect(spec, form, framework, leaves, keywords, preference_of(backend, context, environment))
        function = None if plan.backend is None else getattr(registry.load(plan.backend), plan.method)
        static, names = _passed_on(spec, plan)
        watch = guards.Watch(spec, _name(spec, form), plan.call)
        decided = _Decided(plan, function, _rewriting(plan.route), dict(static), names, watch)
        if key is not None:
            if len(_decided) >= _MOST_DECIDED:
                _decided.clear()
            _decided[key] = decided
    return decided


# -- running ---------------------------------------------------------------------------------------------------------


def run(
    spec: OpSpec,
    form: str | None,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
    feature_map: str | feature_maps.FeatureMap | None,
    backend: str | Sequence[str] | None,
    context: Context | None = None,
) -> Any:
    """Run one call: what every public operator does.

    Args:
        spec: The family.
        form: The form, ``None`` for the bare name.
        arrays: The positional arrays, in the spec's order.
        keywords: Every keyword of the spec.
        feature_map: Applied to the spec's ``mapped`` arguments first.
        backend: The caller's wish.
        context: How the tokens are spread over devices, for a call on one device's own. Default: as the arrays' types say.
    """
    if context is None:
        context = _framework(spec, form, arrays[0]).context(spec, arrays, keywords)
    if context is not None:
        return _spread(spec, form, context).run(spec, form, arrays, keywords, feature_map, backend)
    function, rewriting, framework, arrays, keywords = resolve(spec, form, arrays, keywords, feature_map, backend)
    if rewriting is None:
        results = function(*arrays, **keywords)
    else:
        results = run_rewritten(function, rewriting, framework, arrays, keywords)
    if guards.debug_was_entered:
        guards.check_results(spec, _name(spec, form), framework, arrays, keywords, results)
    return results


def _spread(spec: OpSpec, form: str | None, context: Any) -> Context:
    """The context, if it is one."""
    if isinstance(context, Context):
        return context
    raise OptionError(
        f"{_name(spec, form)}: context must be what context_parallel or shard_axis of linattn.distributed makes, "
        f"got {type(context).__name__}"
    )


def resolve(
    spec: OpSpec,
    form: str | None,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
    feature_map: str | feature_maps.FeatureMap | None,
    backend: str | Sequence[str] | None,
) -> tuple[Any, Rewriting | None, Framework, tuple[Any, ...], dict[str, Any]]:
    """The method to call, how the call is rewritten for it, the framework, and the call's arrays and keywords settled."""
    arrays, keywords, framework, leaves, static = _prepare(spec, form, arrays, keywords, feature_map, backend)
    if framework.tracing():
        name, method, route, options, names = _decide_while_tracing(spec, form, framework, leaves, static, backend)
        rewriting = _rewriting(None if route is None else Route(*route))
        settled = {**dict(options), **{name: keywords[name] for name in names}}
        return getattr(registry.loaded[name], method), rewriting, framework, arrays, settled
    try:
        plan, function, rewriting, options, names, watch = _look_up(spec, form, framework, leaves, static, backend)
    except ShapeError as error:
        if feature_map is not None:
            error.add_note("K (L in mixed_attn) is the width after the feature map")
        raise
    index = spec.index
    if index is not None and keywords[index.name] is not None:
        _check_index(spec, form, framework, arrays, keywords)
    if function is None:
        _refuse(plan)
    watch.calls += 1
    if watch.calls >= watch.due or guards.debug_was_entered:
        watch(framework, arrays)
    settled = options.copy()
    for name in names:
        settled[name] = keywords[name]
    return function, rewriting, framework, arrays, settled


def _framework(spec: OpSpec, form: str | None, first: Any) -> Framework:
    """That of a call, by its first array; the words of an error are not put together for every call."""
    return BY_TYPE.get(type(first)) or framework_of(first, spec.args[0].name, f"{_name(spec, form)}: ")


def _prepare(
    spec: OpSpec,
    form: str | None,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
    feature_map: str | feature_maps.FeatureMap | None,
    backend: str | Sequence[str] | None,
) -> tuple[tuple[Any, ...], dict[str, Any], Framework, list[Any], dict[str, Any]]:
    """Apply the feature map, and cast as autocast wants it; return the arrays, the keywords, their framework, every array of
    the call in one list, and what is static.
    """
    if feature_map is not None:
        arrays = _map_features(spec, form, arrays, keywords, feature_map, backend)
    framework = _framework(spec, form, arrays[0])
    wanted = framework.autocast(arrays[0])
    if wanted:
        arrays = tuple(_cast_operands(spec.args, arrays, spec, form, framework, wanted))
        named = [keywords[arg.name] for arg in spec.keyword_args]
        cast = _cast_operands(spec.keyword_args, named, spec, form, framework, wanted)
        keywords = {**keywords, **dict(zip([arg.name for arg in spec.keyword_args], cast, strict=True))}
    if spec.state_type is None:
        leaves = list(arrays)
        for name in spec.keyword_arrays:  # faster than a comprehension, and every call comes by
            leaves.append(keywords[name])
    else:
        leaves = _flatten_state(spec, form, arrays, keywords)
    static = keywords
    for name, holder in spec.holders:
        if keywords[name] is not None:
            leaves, static = _open(spec, form, name, holder, leaves, static)
    return arrays, keywords, framework, leaves, static


def _open(
    spec: OpSpec, form: str | None, name: str, holder: Holder, leaves: list[Any], keywords: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arrays of a call and those that an option's object holds; the keywords with the kind of the object in its place."""
    held = keywords[name]
    if not isinstance(held, holder.objects):
        found = type(held).__name__ if not isinstance(held, str) else repr(held)
        raise OptionError(f"{_name(spec, form)}: {name} must be {holder.title} or None, got {found}")
    return [*leaves, *held.leaves], {**keywords, name: held.kind}


def _cast_operands(
    args: Sequence[Arg], arrays: Sequence[Any], spec: OpSpec, form: str | None, framework: Framework, dtype: str
) -> Iterator[Any]:
    """The operands as autocast wants them; float64 stays what it is, as do gates, states and what is refused later."""
    for arg, x in zip(args, arrays, strict=True):
        if arg.role == "operand" and x is not None and framework_of(x, arg.name, f"{_name(spec, form)}: ") is framework:
            x = framework.astype(x, dtype) if framework.dtype(x) in ("float16", "bfloat16", "float32") else x
        yield x


def run_rewritten(
    function: Any, rewriting: Rewriting, framework: Framework, arrays: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Any, Any]:
    """Rewrite the arguments step by step until they are the method's, call it, and undo the steps on its results."""
    options = keywords
    finishes: list[Finish] = []
    if rewriting.lowerings:
        named = dict(zip(rewriting.given, arrays, strict=True))
        for lowering in rewriting.lowerings:
            named, options, finish = lowering.apply(framework, named, options)
            finishes.append(finish)
        arrays = tuple([named.get(name) for name in rewriting.wanted])
    result = function(*arrays, **{name: options.get(name, default) for name, default in rewriting.keywords})
    if not finishes:
        return result
    o, state = result
    for finish in reversed(finishes):
        o, state = finish(o, state)
    return o, state


def _map_features(
    spec: OpSpec,
    form: str | None,
    arrays: tuple[Any, ...],
    keywords: Mapping[str, Any],
    feature_map: str | feature_maps.FeatureMap,
    backend: str | Sequence[str] | None,
) -> tuple[Any, ...]:
    if keywords.get("qk_norm") is not None:
        raise OptionError(f"{_name(spec, form)}: qk_norm and feature_map both map q and k: pass one of them")
    phi = feature_maps.resolve(feature_map)
    mapped: list[Any] = []
    for arg, x in zip(spec.args, arrays, strict=True):
        if arg.name in spec.mapped:
            x = mapping.features(phi, x, framework_of(x, arg.name, f"{_name(spec, form)}: "), backend)
        mapped.append(x)
    if keywords.get("normalize") and _signed(phi, arrays[0], keywords):
        _warn_of_signed_weights(_name(spec, form), type(phi).__name__)
    return tuple(mapped)


def _signed(phi: feature_maps.FeatureMap, q: Any, keywords: Mapping[str, Any]) -> bool:
    """Whether a call's weights can be negative, as far as lengths are known: not in packed sequences, nor in a trace."""
    if keywords.get("cu_seqlens") is not None or framework_of(q, "q").tracing() or len(q.shape) < 2:
        return phi.signed
    return phi.signed_within(q.shape[1]) if isinstance(q.shape[1], int) else phi.signed


def _warn_of_signed_weights(operator: str, feature_map: str) -> None:
    warnings.warn(
        f"{operator}: normalize=True divides by a sum of weights, and those of {feature_map} can be negative: the sum can come "
        f"close to zero and the output grow without bound. Take a map whose weights are positive, or drop normalize",
        SignedWeightsWarning,
        stacklevel=7,  # the caller of the operator
    )


_warn_of_signed_weights._dynamo_marked_constant = True  # type: ignore[attr-defined]  # said when compiled


def _check_index(
    spec: OpSpec, form: str | None, framework: Framework, arrays: tuple[Any, ...], keywords: Mapping[str, Any]
) -> None:
    """The values of ``cu_seqlens``, or of ``state_indices``, where they are given and at hand."""
    index = None if spec.index is None else keywords[spec.index.name]
    values = None if index is None else framework.offsets(index)
    if values is None:
        return
    if spec.index is CU_SEQLENS:
        check_offsets(_name(spec, form), values, arrays[0].shape[1])
    else:
        check_slots(_name(spec, form), values, keywords[spec.state_name].shape[0])


def _refuse(plan: Plan) -> NoReturn:
    """No candidate is left: raise the one backend's own error, or say what each of them lacks."""
    if plan.preference.strict:
        registry.load(plan.preference.backends[0])
    call, passed = plan.call, plan.passed
    if not passed:
        known = ", ".join(sorted(registry.records))
        raise Unsupported(f"no backend takes {call.framework} arrays: installed are {known}")
    rows = "".join(f"\n  {name}: {reason}" for name, reason in passed)
    raise Unsupported(f"no backend can run {call}{rows}")


# -- tracing ---------------------------------------------------------------------------------------------------------


def _decide_while_tracing(
    spec: OpSpec,
    form: str | None,
    framework: Framework,
    leaves: Sequence[Any],
    keywords: Mapping[str, Any],
    backend: str | Sequence[str] | None,
) -> Any:
    """The same decision, made once while ``torch.compile`` traces this code: only constants go in and come out."""
    return _decide_from_constants(
        spec.name,
        form,
        framework.name,
        tuple([None if leaf is None else framework.constant_facts(leaf) for leaf in leaves]),
        tuple([framework.constant_option(_constant(keywords[name])) for name in spec.option_names]),
        keywords.get("initial_state") is not None,
        backend if backend is None or isinstance(backend, str) else tuple(backend),
        preference.thread.backends,
        framework.needs_grad(leaves),
        framework.forward_mode(leaves),
        registry.generation,
    )


def _constant(value: Any) -> Any:
    """An option as a compiler takes it for a constant: a plain tuple for a named one."""
    return tuple(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _decide_from_constants(
    op: str,
    form: str | None,
    framework: str,
    facts: tuple[Facts | None, ...],
    option_values: tuple[Any, ...],
    has_state: bool,
    backend: str | tuple[str, ...] | None,
    context: tuple[str, ...] | None,
    needs_grad: bool | None,
    forward_mode: bool,
    generation: int,
) -> Any:
    spec = spec_of(op, form)
    options: dict[str, Any] = {**dict(zip(spec.option_names, option_values, strict=True)), "initial_state": has_state or None}
    for option in spec.options:
        if option.holder is not None and options[option.name] is not None:
            options[option.name] = option.types[0](*options[option.name])
    names = [arg.name for arg in spec.arrays(options)]
    given = [(name, Facts(*fact)) for name, fact in zip(names, facts, strict=True) if fact is not None]
    wanted = preference_of(backend, context, os.environ.get(ENVIRONMENT_VARIABLE))
    plan = plan_of(spec, form, framework, given, options, wanted, needs_grad, forward_mode)
    if plan.backend is None:
        _refuse(plan)
    return plan.backend, plan.method, None if plan.route is None else tuple(plan.route), *_passed_on(spec, plan)


# What torch._dynamo.assume_constant_result does, without importing torch: Dynamo calls it and keeps the result.
_decide_from_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- explaining ------------------------------------------------------------------------------------------------------


def explain_call(
    spec: OpSpec,
    form: str | None,
    arrays: tuple[Any, ...],
    keywords: dict[str, Any],
    feature_map: str | feature_maps.FeatureMap | None,
    backend: str | Sequence[str] | None,
    context: Context | None = None,
) -> Plan:
    """The plan of a call, from the same arguments as :func:`run`; ``plan.backend`` is None if nothing can run it.

    With a context, that of the call on the device's own tokens, whatever enters them. Arrays whose types say how they are
    spread are taken for whole ones, of which :func:`run` gives each device its own.
    """
    if context is not None:
        _spread(spec, form, context)
    raw = arrays[0]
    arrays, keywords, framework, leaves, static = _prepare(spec, form, arrays, keywords, feature_map, backend)
    plan = _look_up(spec, form, framework, leaves, static, backend).plan
    if spec.index is not None and keywords[spec.index.name] is not None:
        _check_index(spec, form, framework, arrays, keywords)
    if feature_map is not None:
        plan = replace(plan, mapped_by=mapping.made_by(feature_maps.resolve(feature_map), raw, framework, backend))
    return plan
