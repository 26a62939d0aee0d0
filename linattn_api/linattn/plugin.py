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

Register it with ``linattn.register_backend(AcmeBackend())`` or, in a distribution, as an entry point of the group
``linattn.backends``. Methods get arguments that the spec has already validated, on the caller's own arrays, with ``scale``
resolved to a float and feature maps applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from .errors import Unsupported

if TYPE_CHECKING:
    from .spec import OpSpec

__all__ = ["API_VERSION", "FORMS", "Backend", "Call", "Form", "MixedState", "Unsupported", "form_methods"]

API_VERSION = "1.0.0"
"""Version of the API, of the plug-in contract and of the distribution: one number."""

A = TypeVar("A")

Form = Literal["recurrent", "chunk", "parallel", "decode"]
FORMS: tuple[Form, ...] = ("recurrent", "chunk", "parallel")
"""The forms that share one signature and one meaning. ``"decode"`` is the recurrent form on states that it overwrites."""


class MixedState(NamedTuple, Generic[A]):
    """State of ``mixed_attn``: constant in size, whatever the number of tokens seen.

    Attributes:
        kv: ``Σ k_linᵀ v`` over whole chunks ``[N, H, L, V]``.
        k_quad: Quadratic keys of the current chunk ``[N, C, H, K]``; rows from ``length`` on are zero.
        k_lin: Linear keys of the current chunk ``[N, C, H, L]``; likewise.
        v: Values of the current chunk ``[N, C, H, V]``; likewise.
        length: Tokens in the current chunk ``[N]`` int32, ``0 ≤ length < C``.
    """

    kv: A
    k_quad: A
    k_lin: A
    v: A
    length: A


@dataclass(frozen=True, slots=True)
class Call:
    """The static facts of one operator call: what a backend may decide on. Never data.

    Attributes:
        op: Family name, e.g. ``"gla"``.
        form: ``"recurrent"``, ``"chunk"``, ``"parallel"`` or ``"decode"``.
        framework: ``"numpy"``, ``"torch"``, ``"jax"`` or ``"mlx"``.
        device: Kind of device, e.g. ``"cpu"``, ``"cuda"``, ``"tpu"``, ``"metal"``.
        arrays: ``(name, symbolic shape, dtype)`` of every array given, e.g. ``("g", "B T HV K", "float32")``; optional
            arguments that are ``None`` are absent.
        dims: ``(symbol, size)`` of every bound symbol. ``B``, ``T`` and ``N`` are ``None`` where they are symbolic under
            tracing: any size. Heads and widths are always numbers.
        options: ``(name, value)`` of the family's static options (``output_final_state``, ``chunk_size``, ``causal`` …).
        needs_grad: True if a gradient will be asked for; None where the framework cannot say.
        forward_mode: True if a forward-mode derivative is being computed: the arrays carry tangents.
    """

    op: str
    form: Form
    framework: str
    device: str
    arrays: tuple[tuple[str, str, str], ...]
    dims: tuple[tuple[str, int | None], ...]
    options: tuple[tuple[str, object], ...] = ()
    needs_grad: bool | None = None
    forward_mode: bool = False

    @property
    def method(self) -> str:
        """Name of the backend method that runs this call, e.g. ``"chunk_gla"``."""
        return f"{self.form}_{self.op}"

    @property
    def dtype(self) -> str:
        """The dtype that the operands (``q``, ``k``, ``v``) share."""
        return self.arrays[0][2]

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Dtype name of each array given."""
        return {name: dtype for name, _, dtype in self.arrays}

    @property
    def shapes(self) -> Mapping[str, str]:
        """Symbolic shape of each array given, e.g. ``{"g": "HV"}`` for a fixed decay."""
        return {name: shape for name, shape, _ in self.arrays}

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """Size of each symbol, e.g. ``{"B": 2, "T": 128}``; ``None`` where it is symbolic under tracing."""
        return dict(self.dims)

    def has(self, name: str) -> bool:
        """True if the optional array ``name`` was given."""
        return any(name == given for given, _, _ in self.arrays)

    def option(self, name: str, default: object = None) -> object:
        """Value of a static option; ``default`` if the family has no such option."""
        return dict(self.options).get(name, default)

    @property
    def varlen(self) -> bool:
        """True if sequences are packed (``cu_seqlens`` was given)."""
        return self.has("cu_seqlens")

    def _known(self, symbol: str) -> int:
        size = self.sizes[symbol]
        assert size is not None, symbol
        return size

    @property
    def N(self) -> int | None:
        """Number of sequences."""
        return self.sizes.get("N")

    @property
    def B(self) -> int | None:
        """Batch size."""
        return self.sizes.get("B")

    @property
    def T(self) -> int | None:
        """Sequence length (total length when packed)."""
        return self.sizes.get("T")

    @property
    def H(self) -> int:
        """Query/key heads."""
        return self._known("H")

    @property
    def HV(self) -> int:
        """Value heads (``H`` for a family without grouped value heads)."""
        return self._known("HV" if "HV" in self.sizes else "H")

    @property
    def K(self) -> int:
        """Key width of one head."""
        return self._known("K")

    @property
    def V(self) -> int:
        """Value width of one head."""
        return self._known("V")

    def __str__(self) -> str:
        sizes = " ".join(f"{symbol}={'any' if size is None else size}" for symbol, size in self.dims)
        dtypes = ", ".join(f"{name} {dtype}" for name, _, dtype in self.arrays if dtype != self.dtype)
        flags = " ".join(f"{name}={value}" for name, value in self.options if value not in (None, False))
        parts = [
            f"{self.method} on {self.framework} {self.device} {self.dtype}",
            f"({dtypes})" if dtypes else "",
            sizes,
            flags,
        ]
        return " ".join(part for part in parts if part)


class Backend:
    """Base class of every backend.

    Attributes:
        name: How users name it. Lower case letters, digits, ``_`` and ``-``.
        api: Version specifier on :data:`linattn.API_VERSION` (PEP 440), e.g. ``">=1,<2"``.
        frameworks: The frameworks whose arrays it takes.
        differentiable: False for a forward-only backend: auto passes over it when a gradient will be asked for.
        forward_mode: False for a backend that knows no tangents: auto passes over it when the arrays carry some.

    A backend defines methods named ``{form}_{family}``, with the parameters that the family's spec lists, each returning
    ``(o, final_state)``. The dispatcher passes every one of them, ``None`` where the caller gave none. A method
    ``decode_{family}`` overwrites ``state`` and returns ``o``; without one, decoding runs on ``recurrent_{family}``.
    """

    name: ClassVar[str]
    api: ClassVar[str]
    frameworks: ClassVar[tuple[str, ...]]
    differentiable: ClassVar[bool] = True
    forward_mode: ClassVar[bool] = True

    def supports(self, call: Call) -> Unsupported | None:
        """Say whether this backend can run ``call``: ``None`` if so, else an :class:`~linattn.Unsupported` with the reason.

        Must be a pure function of ``call``: no I/O, no environment, no context variables. Called once per distinct call.
        """
        return None

    def details(self, call: Call) -> str | None:
        """How this backend will run a call that it supports, in a few words for ``explain``; ``None``: nothing to add.

        For a backend that has several ways, e.g. ``"Metal kernels"``. Pure, as :meth:`supports` is.
        """
        return None


B = TypeVar("B", bound=type[Backend])


def form_methods(families: Mapping[str, Callable[..., Any]], forms: Sequence[Form] = FORMS) -> Callable[[B], B]:
    """Give a backend class the methods of whole families, each made of one function::

        @form_methods({"simple_gla": run, "gla": run}, forms=("chunk", "recurrent"))
        class AcmeBackend(Backend):
            ...

        def run(form, arrays, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
            q, g, gv = arrays["q"], arrays["g"], arrays.get("gv")
            ...
            return o, final_state

    Args:
        families: The function of each family, by the family's name. It gets the form, the family's positional arrays by name
            (``None`` for one not given), and the family's keywords, and returns ``(o, final_state)``; of ``"decode"``, ``o``.
        forms: The forms that it can run. Default: the three that share a signature.

    Raises:
        KeyError: There is no family of that name.
    """
    from .spec import spec_of  # the specs are made of this module's Call

    def decorate(cls: B) -> B:
        for family, function in families.items():
            for form in forms:
                method = _form_method(form, spec_of(family, form), function)
                method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
                method.__module__ = cls.__module__
                setattr(cls, method.__name__, method)
        return cls

    return decorate


def _form_method(form: Form, spec: OpSpec, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled with the spec's own parameters, so that binding them costs no more than the call."""
    name = f"{form}_{spec.name}"
    positional = [f"{arg.name}=None" if arg.optional else arg.name for arg in spec.args]
    default = {option.name: option.default for option in spec.options}
    keywords = [f"{keyword}={default.get(keyword)!r}" for keyword in spec.keywords]
    arrays = ", ".join(f"{arg.name!r}: {arg.name}" for arg in spec.args)
    passed = ", ".join(f"{keyword}={keyword}" for keyword in spec.keywords)
    source = f"""\
def {name}(self, {", ".join(positional)}, *, {", ".join(keywords)}):
    return function(form, {{{arrays}}}, {passed})
"""
    namespace: dict[str, Any] = {"function": function, "form": form}
    exec(compile(source, f"<linattn {name}>", "exec"), namespace)
    method = namespace[name]
    method.__doc__ = f"{form.capitalize()} form of ``{spec.name}``: ``{spec.recurrence}``."
    return method
