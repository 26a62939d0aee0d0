"""Which sequences a program of the delta families goes through one after the other, in Gluon, for Hopper."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl

__all__ = ["Walk"]


class Walk(NamedTuple):
    """The sequences of a program: ``i``, ``i + STEP``, … of ``N``. Their tokens lie one after the other in every array.

    Without ``cu`` they are of a batch, and have ``T`` tokens and ``PER`` chunks each; of packed ones ``first`` says where
    chunks begin, if that is asked for.
    """

    i: gl.tensor
    STEP: gl.tensor
    N: gl.tensor
    cu: gl.tensor | gl.constexpr
    first: gl.tensor | gl.constexpr
    T: gl.tensor
    PER: gl.tensor
