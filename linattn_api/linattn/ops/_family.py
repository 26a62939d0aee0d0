"""Turns the declaration of a family into its four public functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .. import decoding as in_place
from .. import summarizing
from ..call import FORMS, Form, method_name
from ..dispatch import explain_call, run
from ..errors import OptionError
from ..planning import Plan
from ..sources import compiled
from ..spec import COMPANIONS, DECODING, FAMILIES, SUMMARIES, OpSpec, decoding_of, summary_of
from ..suggestions import closest
from ._summary import as_chunk, kind_of

P = ParamSpec("P")
R = TypeVar("R")

OPERATORS: dict[str, Callable[..., Any]] = {}
"""Every public operator by name, e.g. ``"chunk_gla"``."""

_TEMPLATE = """\
def {name}({signature}):
    # declared in {module}
    return target(spec, form, ({arrays},), {{{keywords}}}, {feature_map}, backend{context})
"""

_FORM_NOTES: dict[Form | None, str] = {
    None: "Pick the form from the shape: recurrent for one token, chunk otherwise.",
    "recurrent": "Recurrent form: token by token. For decoding, one token above all; the definition.",
    "chunk": "Chunk form: matmuls inside a chunk, a scan across chunks. For training and prefill.",
    "parallel": "Parallel form: one masked T×T matrix. For short sequences and for inspection.",
}

_DECODE = """\
``{recurrence}``

For decoding, one token or a few at a time: each sequence goes on from its own state, and the state after its last token
stays there. Inference only.

Args:
{arguments}

Returns:
    ``o``, of the shape and dtype of ``{like}``.

Raises:
    ArgumentError: An argument is wrong, as for ``{family}``; a gradient is asked for; ``state`` cannot be written to, as no
        array of JAX or MLX can: there, pass the state of ``recurrent_{family}`` on.
    BackendError: The backend asked for cannot be used; ``Unsupported`` if none can run the call.
"""

_SUMMARY = """\
What a span of tokens does to the state, whatever came before it: ``S_out = A ∘ S_in + b``.

``{recurrence}``

Args:
{arguments}

Returns:
    ``(A, b)``, float32 (float64 for float64 inputs). ``b [N, HV, K, V]`` is what becomes of a state of zeros.
    {action}

Raises:
    ArgumentError: An argument is wrong, as for ``{family}``.
    BackendError: The backend asked for cannot be used; ``Unsupported`` if none can run the call. A backend without
        ``summary_{family}`` runs its chunk form on wider values.

``linattn.compose`` chains summaries: linear scans across devices, or across pieces of a prompt, are made of them (Martin and
Cundy 2018, §2.1).
"""

_ACTIONS = {
    "one": "``A [N, HV]`` is 1.",
    "head": "``A [N, HV]`` multiplies the state of a head, ``e^{Σ g}``.",
    "keys": "``A [N, HV, K]`` multiplies its rows, ``e^{Σ g}``{each}.",
    "matrix": "``A [N, HV, K, K]`` multiplies it from the left{each}.",
}
_EACH = {
    "gla": "; with ``gv``, ``A [N, HV, K+V]`` is followed by what multiplies its columns",
    **dict.fromkeys(
        ("delta_rule", "gated_delta_rule", "kda"),
        "; with ``beta`` per value channel, ``A [N, HV, V, K, K]`` has a matrix for each of its columns",
    ),
}

_DECODING_KEYWORDS = {
    "state": "States ``[{state}]``, any float dtype; overwritten. Accumulation is float32 (float64 for float64 inputs) all\n"
    "        the same, rounded once, when the state is written.",
    "state_indices": "Which of the ``P`` states is each sequence's, ``[N]`` with ``N = B``, int32 or int64, distinct. ``-1``\n"
    "        is padding: that row of ``o`` is zero and no state is written. Default: state ``n`` for sequence ``n``.",
    "normalize": "As in ``linear_attn``; a state then has ``V+1`` value columns.",
    "backend": 'A name (strict), a sequence in order of preference, or ``"auto"``. A backend that cannot write in place runs\n'
    "        its recurrent form on copies.",
}

_KEYWORDS = {
    "qk_norm": '``"l2"`` gives queries and keys unit length: ``x · (Σ x² + 1e-6)^{{-1/2}}``. Default: nothing.',
    "gate": "An object of ``linattn.gates`` that makes log decays of a raw projection ``g``. Default: ``g`` holds decays.",
    "beta_map": '``"sigmoid"`` or ``"2sigmoid"`` (negative eigenvalues): what makes strengths of ``beta``. Default: nothing.',
    "scale": "Multiplies the output. Default ``K ** -0.5``.",
    "initial_state": "State before the first token, {state}, any float dtype. Default zeros.",
    "output_final_state": "Return the state after the last token, else ``None`` in its place. Default False.",
    "cu_seqlens": "Offsets ``[N+1]``, int32 or int64, of sequences packed end to end along ``T``; ``B`` must be 1.",
    "chunk_size": "A hint for the chunk form; never changes the result beyond rounding. Default: the backend's choice.",
    "feature_map": "Applied to {mapped} first: a name or an object from ``linattn.feature_maps``.",
    "context": "How the tokens are spread over devices, from ``linattn.distributed``: this call has one device's own.\n"
    "        Default: they are all here.",
    "backend": 'A name (strict), a sequence in order of preference, or ``"auto"``. Default: ``use_backend``, else the\n'
    '        environment variable ``LINATTN_BACKEND``, else ``"auto"``.',
}

_RESULTS = """\
Returns:
    ``(o, final_state)``: ``o`` has the shape and dtype of ``v``; the state is float32 (float64 for float64 inputs).

Raises:
    ArgumentError: An argument is wrong: ``ShapeError``, ``DtypeError``, ``DeviceError``, ``FrameworkError``, ``OptionError``.
    BackendError: The backend asked for cannot be used; ``Unsupported`` if none can run the call.
"""


def _document(spec: OpSpec, form: Form | None, declared: Callable[..., Any]) -> str:
    """The declared docstring, headed by the form and completed by the keywords that it does not describe itself."""
    own = inspect.cleandoc(declared.__doc__ or "")
    if spec.name in COMPANIONS:
        return own
    if form == "decode":
        return f"{own}\n\n{_document_decoding(spec)}"
    if form == "summary":
        return f"{own}\n\n{_document_summary(spec)}"
    state = "``[N, HV, K, V]``" if spec.state_type is None else f"a ``linattn.{spec.state_type.__name__}``"
    mapped = " and ".join(f"``{name}``" for name in spec.mapped)
    taken = (*spec.keywords, *(("feature_map",) if spec.mapped else ()), "context", "backend")
    keywords = [
        f"    {name}: {text.format(state=state, mapped=mapped)}"
        for name, text in _KEYWORDS.items()
        if name in taken and f"\n    {name}: " not in own
    ]
    return "\n".join([_FORM_NOTES[form], "", own, *keywords, "", _RESULTS])


def family(
    spec: OpSpec,
) -> Callable[[Callable[P, R]], tuple[Callable[P, R], Callable[P, R], Callable[P, R], Callable[P, R]]]:
    """Register ``spec`` and make ``(bare, chunk, recurrent, parallel)`` functions of the decorated declaration.

    The declaration has the public signature and docstring and no body: every form shares both, exactly. Python itself binds
    the arguments, because each function is compiled with the declared parameters: an unknown one is a TypeError that names
    the function called, and binding costs nothing on top of the call.
    """

    def declare(
        function: Callable[P, R],
    ) -> tuple[Callable[P, R], Callable[P, R], Callable[P, R], Callable[P, R]]:
        _check_declared(spec, function)
        FAMILIES[spec.name] = spec
        if spec.state_type is None:
            DECODING[spec.name] = decoding_of(spec)
            SUMMARIES[spec.name] = summary_of(spec, as_chunk)
        return tuple(_compile(spec, form, function) for form in (None, "chunk", "recurrent", "parallel"))  # type: ignore[return-value]

    return declare


def companion(spec: OpSpec) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register ``spec`` and make the public function of the decorated declaration, which has its signature and no body."""

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        _check_declared(spec, function)
        COMPANIONS[spec.name] = spec
        return _compile(spec, "direct", function)

    return declare


def _check_declared(spec: OpSpec, declared: Callable[..., Any]) -> None:
    """The parameters of a spec, in its order and with its defaults."""
    parameters = inspect.signature(declared).parameters
    mapped = ("feature_map",) if spec.mapped else ()
    context = ("context",) if "context" in parameters else ()
    assert tuple(parameters) == (*spec.parameters, *mapped, *context, "backend"), (spec.name, *parameters)
    for option in spec.options:
        assert parameters[option.name].default == option.default, (spec.name, option)


def decoding(declared: Callable[P, R]) -> Callable[P, R]:
    """Make ``decode_*`` of a declared family. The declaration has the public signature, one line of docstring and no body."""
    spec = DECODING[declared.__name__.removeprefix("decode_")]
    _check_declared(spec, declared)
    return _compile(spec, "decode", declared)


def summary(declared: Callable[P, R]) -> Callable[P, R]:
    """Make ``summary_*`` of a declared family. The declaration has the public signature, a line of docstring and no body."""
    spec = SUMMARIES[declared.__name__.removeprefix("summary_")]
    _check_declared(spec, declared)
    return _compile(spec, "summary", declared)


def _document_summary(spec: OpSpec) -> str:
    """What is the same for every family, with its own arrays and equation."""
    own = {"normalize": f"As in ``{spec.name}``. ``b`` then has ``V+1`` value columns."}
    return _SUMMARY.format(
        recurrence=spec.recurrence,
        arguments=_arguments(spec, own),
        action=_ACTIONS[kind_of(spec.name, value_gate=False, value_beta=False)].replace("{each}", _EACH.get(spec.name, "")),
        family=spec.name,
    )


def _document_decoding(spec: OpSpec) -> str:
    """What is the same for every family, with its own arrays and equation."""
    state = ", ".join(spec.state({"normalize": False})[0].shapes[0])
    arguments = _arguments(spec, _DECODING_KEYWORDS, state=state)
    return _DECODE.format(recurrence=spec.recurrence, arguments=arguments, like=spec.like, family=spec.name)


def _arguments(spec: OpSpec, own: dict[str, str], **named: str) -> str:
    """Every parameter on a line: its ``own`` text, what is said of it everywhere, or that the family says it."""
    same = f"as in ``{spec.name}``."
    shaped = {arg.name: f"``[{', '.join(arg.shapes[0])}]``, {same}" for arg in (*spec.args, *spec.keyword_args)}
    texts = {**_KEYWORDS, **shaped, **own}
    taken = (*spec.parameters, *(("feature_map",) if spec.mapped else ()), "backend")
    mapped = " and ".join(f"``{name}``" for name in spec.mapped)
    return "\n".join(f"    {name}: {texts.get(name, same.capitalize()).format(mapped=mapped, **named)}" for name in taken)


_RUNNERS: dict[Form | None, tuple[Any, Any]] = {
    "decode": (in_place.run, in_place.explain_call),
    "summary": (summarizing.run, explain_call),
}


def _compile(spec: OpSpec, form: Form | None, declared: Callable[..., Any]) -> Callable[..., Any]:
    """One public function; its ``explain`` attribute takes the same arguments and returns the plan."""
    name = method_name(form, spec.name)
    runs, explains = _RUNNERS.get(form, (run, explain_call))
    operator = _bound_to(runs, f"linattn.{name}", name, spec, form, declared)
    operator.__doc__ = _document(spec, form, declared)
    operator.explain = _bound_to(explains, f"linattn.{name}.explain", "explain", spec, form, declared)
    operator.spec, operator.form = spec, form
    OPERATORS[name] = operator
    return operator


def _bound_to(target: Any, path: str, name: str, spec: OpSpec, form: Form | None, declared: Callable[..., Any]) -> Any:
    """A function with the declared signature that hands its arguments to ``target``."""
    signature = inspect.signature(declared)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    source = _TEMPLATE.format(
        name=name,
        module=declared.__module__,
        signature=str(signature.replace(parameters=bare, return_annotation=signature.empty))[1:-1],
        arrays=", ".join(arg.name for arg in spec.args),
        keywords=", ".join(f"{key!r}: {key}" for key in spec.keywords),
        feature_map="feature_map" if spec.mapped else None,
        context=", context" if "context" in signature.parameters else "",
    )
    # the names in the annotations, for typing.get_type_hints; not __name__, since Dynamo would look for target in that module
    named = {key: value for key, value in declared.__globals__.items() if not key.startswith("__")}
    function: Any = compiled(path, source, {**named, "inf": math.inf, "target": target, "spec": spec, "form": form})
    function.__annotations__ = declared.__annotations__
    function.__module__ = "linattn"
    return function


def explain(operator: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Say which backend a call would run on and why, without running it.

    Args:
        operator: An operator or its name, e.g. ``linattn.chunk_gla`` or ``"chunk_gla"``.
        *args: The arguments of the call.
        **kwargs: Its keyword arguments, ``backend=`` and ``feature_map=`` included.

    Returns:
        The :class:`Plan`: print it. Its ``backend`` is ``None`` if nothing can run the call.

    Raises:
        OptionError: There is no such operator.
        ArgumentError: The call is invalid, as the operator itself would say.
    """
    return operator_named(getattr(operator, "__name__", operator)).explain(*args, **kwargs)


def operator_named(name: Any) -> Any:
    """The public operator of that name; ``OptionError`` with close matches if there is none."""
    if name in OPERATORS:
        return OPERATORS[name]
    close = closest(str(name), OPERATORS)
    hint = f"did you mean {close!r}? " if close else ""
    raise OptionError(f"unknown operator {name!r}: {hint}families are {', '.join(FAMILIES)}, forms {', '.join(FORMS)}")
