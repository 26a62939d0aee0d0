"""One of several packed sequences: its own tokens and chunks of what was made for all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

__all__ = ["Part"]


class Part(NamedTuple):
    """Where a sequence lies.

    Attributes:
        start, stop: Its tokens.
        first, last: Its chunks.
    """

    start: int
    stop: int
    first: int
    last: int

    @classmethod
    def of(cls, offsets: tuple[int, ...], number: int, chunk: int) -> Part:
        """Sequence ``number`` of those at ``offsets``, in chunks of ``chunk`` tokens."""
        counts = [-(-(stop - start) // chunk) for start, stop in pairwise(offsets)]
        first = sum(counts[:number])
        return cls(offsets[number], offsets[number + 1], first, first + counts[number])

    def tokens(self, x: Tensor | None) -> Tensor | None:
        """The tokens of an array ``[1, T, …]`` that are the sequence's."""
        return None if x is None else x[:, self.start : self.stop]

    def of_tokens(self, arrays: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The tokens of arrays ``[1, T, …]`` that are the sequence's, by name."""
        return {name: self.tokens(x) for name, x in arrays.items()}

    def of_chunks(self, arrays: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The chunks of arrays ``[chunks, …]`` that are the sequence's, by name."""
        return {name: None if x is None else x[self.first : self.last] for name, x in arrays.items()}
