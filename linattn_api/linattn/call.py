"""The static facts of one operator call: what a decision may rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .gate_maps import GateKind

__all__ = ["FORMS", "BetaKind", "Call", "DecayKind", "Form", "StateKind", "method_name"]

Form = Literal["recurrent", "chunk", "parallel", "decode", "summary", "direct"]
FORMS: tuple[Form, ...] = ("recurrent", "chunk", "parallel")
"""The forms that share one signature and one meaning. ``"decode"`` is the recurrent form on states that it overwrites,
``"summary"`` what a span of tokens does to the state, and a companion of the operators, which has one form only, is
``"direct"``."""

DecayKind = Literal["none", "fixed", "scalar", "vector"]
"""Of ``g``: not there, one number a head, one a token and head, or one a token, head and key channel."""

BetaKind = Literal["none", "scalar", "vector"]
"""Of ``beta``: not there, one number a token and head, or one a token, head and value channel."""

StateKind = Literal["none", "initial", "final", "both", "pool"]
"""Of states: none, one is given, one is asked for, both, or a pool of them is overwritten."""


def method_name(form: str | None, op: str) -> str:
    """What an operator, and a backend's method, is called: a companion and a bare operator by its own name."""
    return op if form in (None, "direct") else f"{form}_{op}"


@dataclass(frozen=True, slots=True)
class Call:
    """The static facts of one operator call: what a backend may decide on. Never data.

    Attributes:
        op: Name of the family, e.g. ``"gla"``, or of a companion, e.g. ``"short_conv"``.
        form: ``"recurrent"``, ``"chunk"``, ``"parallel"``, ``"decode"``, ``"summary"`` or, of a companion, ``"direct"``.
        framework: ``"numpy"``, ``"torch"``, ``"jax"`` or ``"mlx"``.
        device: Kind of device, e.g. ``"cpu"``, ``"cuda"``, ``"tpu"``, ``"metal"``.
        arrays: ``(name, symbolic shape, dtype)`` of every array given, e.g. ``("g", "B T HV K", "float32")``; optional
            arguments that are ``None`` are absent.
        dims: ``(symbol, size)`` of every bound symbol. ``B``, ``T`` and ``N`` are ``None`` where they are symbolic under
            tracing: any size. Heads and widths are always numbers.
        options: ``(name, value)`` of the family's static options (``scale``, ``output_final_state``, ``causal`` …), as the
            caller gave them.
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
        return method_name(self.form, self.op)

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
    def ranks(self) -> Mapping[str, int]:
        """Number of dimensions of each array given, e.g. ``{"g": 1}`` for a fixed decay."""
        return {name: len(shape.split()) for name, shape, _ in self.arrays}

    @property
    def decay(self) -> DecayKind:
        """The kind of decay, ``"none"``, ``"fixed"``, ``"scalar"`` or ``"vector"``."""
        kinds: dict[int | None, DecayKind] = {None: "none", 1: "fixed", 3: "scalar", 4: "vector"}
        return kinds[self.ranks.get("g")]

    @property
    def gate(self) -> GateKind | None:
        """The input map that makes log decays of ``g``; ``None`` where ``g`` holds them already."""
        gate = self.option("gate")
        return gate if isinstance(gate, GateKind) else None

    @property
    def beta(self) -> BetaKind:
        """The kind of writing strength, ``"none"``, ``"scalar"`` or ``"vector"``."""
        kinds: dict[int | None, BetaKind] = {None: "none", 3: "scalar", 4: "vector"}
        return kinds[self.ranks.get("beta")]

    @property
    def state(self) -> StateKind:
        """The states, ``"none"``, ``"initial"``, ``"final"``, ``"both"``, or the ``"pool"`` of a decoding call."""
        if self.form == "decode":
            return "pool"
        given = any(name.partition(".")[0] == "initial_state" for name, _, _ in self.arrays)
        wanted = bool(self.option("output_final_state"))
        return "both" if given and wanted else "initial" if given else "final" if wanted else "none"

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
