"""Turns the declaration of a family into its four public functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..dispatch import run
from ..plugin import FORMS, Form
from ..spec import OpSpec

P = ParamSpec("P")
R = TypeVar("R")

FAMILIES: dict[str, OpSpec] = {}

_TEMPLATE = """\
def {name}({signature}):
    return run(spec, form, ({arrays},), {{{keywords}}}, feature_map, backend)
"""

_FORM_NOTES = {
    None: "Picks the form from the shape: recurrent for one token, chunk otherwise.",
    "recurrent": "Recurrent form: token by token. For decoding, one token above all; the definition.",
    "chunk": "Chunk form: matmuls inside a chunk, a scan across chunks. For training and prefill.",
    "parallel": "Parallel form: one masked T×T matrix. For short sequences and for inspection.",
}


def family(spec: OpSpec) -> Callable[[Callable[P, R]], tuple[Callable[P, R], Callable[P, R], Callable[P, R], Callable[P, R]]]:
    """Register ``spec`` and make ``(bare, chunk, recurrent, parallel)`` functions of the decorated declaration.

    The declaration has the public signature and docstring and no body: every form shares both, exactly. Python itself binds
    the arguments, because each function is compiled with the declared parameters: an unknown one is a TypeError that names
    the function called, and binding costs nothing on top of the call.
    """

    def declare(function: Callable[P, R]) -> tuple[Callable[P, R], Callable[P, R], Callable[P, R], Callable[P, R]]:
        declared = tuple(inspect.signature(function).parameters)
        assert declared == (*spec.parameters, "feature_map", "backend"), (spec.name, declared, spec.parameters)
        FAMILIES[spec.name] = spec
        return tuple(_compile(spec, form, function) for form in (None, "chunk", "recurrent", "parallel"))  # type: ignore[return-value]

    return declare


def _compile(spec: OpSpec, form: Form | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """One public function: the declared signature around a call of ``dispatch.run``."""
    name = spec.name if form is None else f"{form}_{spec.name}"
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty, default=None if p.default is not p.empty else p.empty) for p in signature.parameters.values()]
    source = _TEMPLATE.format(
        name=name,
        signature=str(signature.replace(parameters=bare, return_annotation=signature.empty))[1:-1],
        arrays=", ".join(arg.name for arg in spec.args),
        keywords=", ".join(f"{key!r}: {key}" for key in spec.keywords),
    )
    namespace: dict[str, Any] = {"run": run, "spec": spec, "form": form}
    exec(compile(source, f"<linattn {name}>", "exec"), namespace)
    compiled = namespace[name]
    compiled.__defaults__ = function.__defaults__
    compiled.__kwdefaults__ = function.__kwdefaults__
    compiled.__annotations__ = function.__annotations__
    compiled.__qualname__ = name
    compiled.__module__ = "linattn"
    compiled.__doc__ = f"{_FORM_NOTES[form]}\n\n{inspect.cleandoc(function.__doc__ or '')}\n"
    compiled.spec, compiled.form = spec, form
    return compiled


__all__ = ["FAMILIES", "FORMS", "family"]
