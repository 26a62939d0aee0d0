"""Everything the author of a backend imports.

A backend is a class with a name, the frameworks whose arrays it takes, and one method per operator form it can run::

    from linattn.plugin import Backend, Call, Unsupported

    class AcmeBackend(Backend):
        name = "acme"
        api = ">=1,<2"
        frameworks = ("torch",)

        def supports(self, call: Call) -> Unsupported | None:
            if call.K > 256:
                return Unsupported(f"K must be at most 256, got {call.K}")
            return None

        def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
            ...
            return o, final_state  # final_state is None unless output_final_state

A method names the keywords that it takes. One that it leaves out is not passed: where a call gives it another value than its
default, linattn applies it first if it can, and the call is unsupported otherwise.

Register it with ``linattn.register_backend(AcmeBackend())`` or, in a distribution, as an entry point of the group
``linattn.backends``. Methods get arguments that the spec has already validated, on the caller's own arrays, with ``scale``
resolved to a float and feature maps applied.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from .call import FORMS, BetaKind, Call, DecayKind, Form, StateKind
from .errors import Unsupported
from .frameworks import Framework, framework_of, has_tangents
from .sources import compiled
from .spec import OpSpec, spec_of

if TYPE_CHECKING:
    from .feature_maps import FeatureMap

__all__ = [
    "API_VERSION",
    "FORMS",
    "Backend",
    "BetaKind",
    "Call",
    "DecayKind",
    "Form",
    "Framework",
    "MixedState",
    "StateKind",
    "Unsupported",
    "form_methods",
    "framework_of",
    "has_tangents",
]

API_VERSION = "1.0.0"
"""Version of the API, of the plug-in contract and of the distribution: one number."""

Array = TypeVar("Array")


class MixedState(NamedTuple, Generic[Array]):
    """State of ``mixed_attn``: constant in size, whatever the number of tokens seen.

    Attributes:
        kv: ``Σ k_linᵀ v`` over whole chunks ``[N, H, L, V]``.
        k_quad: Quadratic keys of the current chunk ``[N, C, H, K]``; rows from ``length`` on are zero.
        k_lin: Linear keys of the current chunk ``[N, C, H, L]``; likewise.
        v: Values of the current chunk ``[N, C, H, V]``; likewise.
        length: Tokens in the current chunk ``[N]`` int32, ``0 ≤ length < C``.
    """

    kv: Array
    k_quad: Array
    k_lin: Array
    v: Array
    length: Array


class Backend:
    """Base class of every backend.

    Attributes:
        name: How users name it. Lower case letters, digits, ``_`` and ``-``.
        api: Version specifier on :data:`linattn.API_VERSION` (PEP 440), e.g. ``">=1,<2"``.
        frameworks: The frameworks whose arrays it takes.
        requires: Name of the library that it adapts, as it is imported; ``None`` for kernels of its own. ``explain`` names an
            adapter that it did not come to where its library is installed.
        families: The families that it runs, those included that linattn lowers to one of its own; empty for all of them.
        differentiable: False for a forward-only backend: auto passes over it when a gradient will be asked for.
        forward_mode: False for a backend that knows no tangents: auto passes over it when the arrays carry some.
        maps: The feature maps that :meth:`features` makes, by the names of their classes.
        implementation: Where the subclass is that has the methods, as ``"package.module:Class"``. For a class that only says
            what a backend is, so that looking at it imports no framework: making an object of it makes one of the subclass.

    A backend defines methods named ``{form}_{family}``, with the positional parameters that the family's spec lists and those
    of its keywords that it takes, each returning ``(o, final_state)``. The dispatcher passes every one of them, ``None`` where
    the caller gave none. Where a call asks something of a keyword that the method leaves out, linattn applies the keyword
    itself if it can, and passes over the backend if not. A method ``decode_{family}`` overwrites ``state`` and returns ``o``;
    without one, decoding runs on ``recurrent_{family}``.
    """

    name: ClassVar[str]
    api: ClassVar[str]
    frameworks: ClassVar[tuple[str, ...]]
    requires: ClassVar[str | None] = None
    families: ClassVar[tuple[str, ...]] = ()
    differentiable: ClassVar[bool] = True
    forward_mode: ClassVar[bool] = True
    maps: ClassVar[tuple[str, ...]] = ()
    implementation: ClassVar[str | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Backend:
        """An object of the subclass that has the methods, where that is another one."""
        elsewhere = vars(cls).get("implementation")
        if elsewhere is None:
            return super().__new__(cls)
        from pkgutil import resolve_name  # which only making such a backend needs

        return super().__new__(resolve_name(elsewhere))

    def supports(self, call: Call) -> Unsupported | None:
        """Say whether this backend can run ``call``: ``None`` if so, else an :class:`~linattn.Unsupported` with the reason.

        Must be a pure function of ``call``: no I/O, no environment, no context variables. Called once per distinct call.
        """
        return None

    def missing_device(self) -> str | None:
        """What this backend runs on if this machine has none of it, e.g. ``"NVIDIA GPUs"``; ``None``: it can run here.

        For ``linattn backends`` and ``linattn doctor``. No call depends on it, so it may look at the machine.
        """
        return None

    def details(self, call: Call) -> str | None:
        """How this backend will run a call that it supports, in a few words for ``explain``; ``None``: nothing to add.

        For a backend that has several ways, e.g. ``"Metal kernels"``. Pure, as :meth:`supports` is.
        """
        return None

    def features(self, phi: FeatureMap, x: Any) -> Any:
        """``phi(x)`` in a way of this backend's own, for the maps that it names; ``None``: the map is made as it is written.

        It is asked for the queries and keys of eager calls that it may run, and gives what the map would, in value, shape and
        dtype, differentiable in ``x`` and in the map's arrays. What the map refuses it leaves to the map.
        """
        return None


B = TypeVar("B", bound=type[Backend])


def form_methods(families: Mapping[str, Callable[..., Any]], forms: Sequence[Form] = FORMS) -> Callable[[B], B]:
    """Give a backend class the methods of whole families, each made of one function::

        @form_methods({"simple_gla": run, "gla": run}, forms=("chunk", "recurrent"))
        class AcmeBackend(Backend):
            ...

        def run(form, arrays, *, scale, initial_state, output_final_state, cu_seqlens):
            q, g, gv = arrays["q"], arrays["g"], arrays.get("gv")
            ...
            return o, final_state

    Args:
        families: The function of each family, by the family's name. It gets the form, the family's positional arrays by name
            (``None`` for one not given), and those of the family's keywords that it names, and returns ``(o, final_state)``;
            of ``"decode"``, ``o``. ``**options`` stands for all keywords but those that linattn can apply itself, such as
            ``normalize``: whoever takes one of these names it.
        forms: The forms that it can run. Default: the three that share a signature.

    Raises:
        KeyError: There is no family of that name.
    """

    def decorate(cls: B) -> B:
        for family, function in families.items():
            for form in forms:
                method = _form_method(f"{cls.__module__}.{cls.__qualname__}", form, spec_of(family, form), function)
                method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
                method.__module__ = cls.__module__
                setattr(cls, method.__name__, method)
        return cls

    return decorate


def _form_method(owner: str, form: Form, spec: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled with the spec's own parameters, so that binding them costs no more than the call."""
    name = f"{form}_{spec.name}"
    positional = [f"{arg.name}=None" if arg.optional else arg.name for arg in spec.args]
    taken = _keywords_taken(spec, function)
    keywords = [f"{keyword}={spec.defaults.get(keyword)!r}" for keyword in taken]
    arrays = ", ".join(f"{arg.name!r}: {arg.name}" for arg in spec.args)
    passed = ", ".join(f"{keyword}={keyword}" for keyword in taken)
    source = f"""\
def {name}({", ".join(["self", *positional, *(["*", *keywords] if keywords else [])])}):
    return function(form, {{{arrays}}}, {passed})
"""
    method = compiled(f"{owner}.{name}", source, {"function": function, "form": form, "inf": math.inf})
    method.__doc__ = f"{form.capitalize()} form of ``{spec.name}``: ``{spec.recurrence}``."
    return method


def _keywords_taken(spec: OpSpec, function: Callable[..., Any]) -> list[str]:
    """The keywords of a family that a function names, or collects."""
    parameters = inspect.signature(function).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        to_be_named = {option.name for option in spec.options if option.lowering}
        named |= set(spec.keywords) - to_be_named
    return [keyword for keyword in spec.keywords if keyword in named]
