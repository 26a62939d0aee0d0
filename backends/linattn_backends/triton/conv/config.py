"""Which kernels the convolution runs, and with which tiles: by shape, and nothing is tuned at run time."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..host.tiles import Tile, power_of_two, programs
from ..host.variant import Stage, Variant
from ..lib.sums import column_sums
from .kernels import conv_final_state_fwd, conv_gradients_bwd, conv_initial_state_bwd, conv_outputs_fwd, conv_tokens_fwd

__all__ = ["ConvTile", "token_variant", "variant"]

RESIDENT = 12
"""Programs of one warp that a multiprocessor runs at once, more or less: registers are what there is too few of."""


class ConvTile(NamedTuple):
    """A program's work: ``BD`` channels of ``piece`` tokens, of which ``unroll`` are read at once; its warps."""

    BD: int
    piece: int
    unroll: int
    warps: int
    stages: int = 1


@functools.lru_cache(maxsize=1024)
def variant(B: int, T: int, D: int, W: int, bytes_each: int, num_sms: int, backward: bool) -> Variant:
    """The kernels of a forward or a backward pass."""
    walk = walk_tile(B, T, D, W, bytes_each, num_sms, backward)
    state = ConvTile(channels(D, 256), 1, 1, 2)
    if not backward:
        return Variant({"outputs": Stage(conv_outputs_fwd, walk), "final": Stage(conv_final_state_fwd, state)}, None)
    stages = {
        "gradients": Stage(conv_gradients_bwd, walk),
        "sums": Stage(column_sums, Tile(32, 64, 4, 1)),
        "initial": Stage(conv_initial_state_bwd, state),
    }
    return Variant(stages, None)


@functools.lru_cache(maxsize=1024)
def token_variant(D: int) -> Variant:
    """The kernel that decodes: programs share the channels, and each takes all of a sequence's tokens."""
    return Variant({"tokens": Stage(conv_tokens_fwd, ConvTile(channels(D, 128), 1, 1, 1))}, None)


def walk_tile(B: int, T: int, D: int, W: int, bytes_each: int, num_sms: int, backward: bool) -> ConvTile:
    """One warp, which waits for no other, and pieces as long as leave no multiprocessor idle.

    A thread reads 16 bytes of a row, but has fewer channels where each takes many registers: ``2 W`` forward, ``4 W`` backward.
    """
    most = (4 if W <= 4 else 2) if backward else (8 if W <= 4 else 4)
    BD = channels(D, 32 * min(16 // bytes_each, most))
    piece, least = 128, 32 if backward else 16
    while piece > least and B * programs(T, D, piece, BD) < RESIDENT * num_sms:
        piece //= 2
    return ConvTile(BD, piece, 4 if backward else 8, 1)


def channels(D: int, most: int) -> int:
    """A power of two that covers ``D``, or the ``most`` there may be."""
    return min(power_of_two(D), most)
