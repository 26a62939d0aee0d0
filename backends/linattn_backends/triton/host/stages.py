"""A call in stages, between which ranks that share a sequence tell each other what they found: what cores have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from . import spans
from .parts import Part

__all__ = ["Arrays", "Core", "Stages"]

Arrays = tuple[Tensor | None, ...]


class Core(NamedTuple):
    """The stages of a core, as functions of arrays.

    The arguments of all but the first three, and of ``layout_of``, end in what is made before any state is known, the inputs,
    and the options, one after the other.

    Attributes:
        begin: What is made, of inputs, options and, in the backward pass, of what was kept; else of ``None``.
        bare: What is made for a summary alone, of inputs and options.
        opened: What is made and, last, the message of whole sequences, of a digest, inputs and options.
        message: That message, of a digest.
        layout_of: How it is laid out, of inputs.
        summary: ``A`` and ``b`` of whole sequences.
        finish: Outputs and final states, of the states before the tokens; whether final states are asked for comes last.
        adjoint: The gradient of the states before the tokens, of those of outputs and of final states.
        recall: What else follows from the states before the tokens, of these.
        gradients: Gradients of the inputs that there are, and of the states before the tokens: of these, of the gradients of
            outputs and of final states, and of a list of what is made and recalled, which it may empty; then inputs, options.
        made: The type of what is made, whose method ``cut`` gives one sequence's part of it.
        given_of: The call, of inputs, options and the states before the tokens, or ``None``.
        kept: Of what is made, the arrays that the backward pass is given.
        parameters: Of the inputs, the last so many have no tokens.
    """

    begin: Callable[..., Arrays]
    bare: Callable[..., Arrays]
    opened: Callable[..., tuple[Any, ...]]
    message: Callable[..., Tensor]
    layout_of: Callable[[Arrays], spans.Message]
    summary: Callable[..., tuple[Tensor, Tensor]]
    finish: Callable[..., tuple[Tensor, Tensor | None]]
    adjoint: Callable[..., Tensor]
    recall: Callable[..., Arrays]
    gradients: Callable[..., list[Tensor]]
    made: Callable[..., Any]
    given_of: Callable[..., Any]
    kept: int
    parameters: int


class Stages(NamedTuple):
    """A call in stages, as :mod:`linattn.distributed.linked` runs it.

    Attributes:
        core: What runs.
        options: All that is no array that gradients flow to; as ``cu`` the offsets of packed sequences, or ``None``.
        offsets: Those, as integers.
    """

    core: Core
    options: Any
    offsets: tuple[int, ...]

    def begin(self, inputs: Arrays, kept: Arrays | None = None) -> Arrays:
        """What is made before any state is known; of what the forward pass kept, the rest."""
        return self.core.begin(inputs, self.options, kept)

    def summary(self, inputs: Arrays, made: Arrays | None = None, number: int | None = None) -> tuple[Tensor, Tensor]:
        """``A``, as :mod:`linattn.affine` reads it, and ``b`` of whole sequences, or of one of several, in float32."""
        made = made or self.core.bare(inputs, self.options)
        made, inputs, options, _ = self._only(number, made, inputs)
        return self.core.summary(*made, *inputs, *options)

    def layout(self, inputs: Arrays) -> spans.Message:
        """How messages are laid out: of a batch, or of one of packed sequences."""
        return self.core.layout_of(inputs)

    def opened(self, inputs: Arrays, digest: Tensor) -> tuple[Arrays, Tensor]:
        """What is made before any state is known, and the message of whole sequences."""
        *made, message = self.core.opened(digest, *inputs, *self.options)
        return tuple(made), message

    def message(self, inputs: Arrays, made: Arrays, number: int, digest: Tensor) -> Tensor:
        """The message of one of packed sequences."""
        made, inputs, options, _ = self._only(number, made, inputs)
        return self.core.message(digest, *made, *inputs, *options)

    def sealed(self, layout: spans.Message, digest: Tensor) -> Tensor:
        """A message of which nobody reads more than the digest."""
        return spans.sealed(digest, *layout)

    def parts(self, layout: spans.Message, message: Tensor) -> tuple[Tensor, Tensor]:
        """``A`` and ``b`` where they lie in a message."""
        return layout.A(message), layout.b(message)

    def entering(
        self, layout: spans.Message, messages: Tensor, digest: Tensor, ever: Tensor, told: Tensor, first: int, count: int
    ) -> Tensor:  # fmt: skip
        """The states after ``count`` spans from the ``first`` one on; NaN and ``told`` if a digest is another."""
        return spans.entering(messages, digest, ever, told, first, count, *layout)

    def crossed(self, layout: spans.Message, messages: Tensor, first: int, count: int) -> Tensor:
        """The transitions of ``count`` spans from the ``first`` one on, in memory of their own."""
        return messages[first : first + count, : layout.states].clone()

    def leaving(self, layout: spans.Message, d: Tensor, transitions: Tensor, first: int, count: int) -> Tensor:
        """Gradients of the states after a span, of those before ``count`` spans, from the ``first`` one back."""
        return spans.leaving(d, transitions, first, count, *layout)

    def finish(self, inputs: Arrays, made: Arrays, start: Tensor, final: bool) -> tuple[Tensor, Tensor | None, Arrays]:
        """Outputs, final states if asked for, and what the backward pass is given."""
        o, end = self.core.finish(start, *made, *inputs, *self.options, final)
        return o, end if final else None, made[: self.core.kept]  # segments leave final states all the same

    def adjoint(self, inputs: Arrays, made: Arrays, do: Tensor, dfinal: Tensor | None, number: int | None) -> Tensor:
        """The gradient of the states before the tokens of whole sequences, or of one of several."""
        made, inputs, options, do = self._only(number, made, inputs, do)
        return self.core.adjoint(do, dfinal, *made, *inputs, *options)

    def recall(self, inputs: Arrays, made: Arrays, start: Tensor) -> list[Tensor | None]:
        """What is made, and what else follows from the states before the tokens."""
        return [*made, *self.core.recall(start, *made, *inputs, *self.options)]

    def gradients(
        self, inputs: Arrays, made: list[Tensor | None], start: Tensor, do: Tensor, dfinal: Tensor | None
    ) -> Arrays:  # fmt: skip
        """Gradients of the inputs, and of the states before the tokens; ``made`` may be emptied."""
        *found, dstart = self.core.gradients(start, do, dfinal, made, inputs, self.options)
        of_inputs = iter(found)
        return *(None if x is None else next(of_inputs) for x in inputs), dstart

    def _only(
        self, number: int | None, made: Arrays, inputs: Arrays, do: Tensor | None = None
    ) -> tuple[Arrays, Arrays, Any, Tensor | None]:
        """What concerns one of packed sequences, as if there were no other."""
        if number is None:
            return made, inputs, self.options, do
        part = Part.of(self.offsets, number, self.core.given_of(inputs, self.options, None).chunk)
        tokens = len(inputs) - self.core.parameters
        own = *map(part.tokens, inputs[:tokens]), *inputs[tokens:]
        return self.core.made(*made).cut(part), own, self.options._replace(cu=None), part.tokens(do)
