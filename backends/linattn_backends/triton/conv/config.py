"""Which kernels the convolution runs, and with which tiles: by shape, and nothing is tuned at run time."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ...chunks import power_of_two
from ..host.tiles import Tile, programs
from ..host.variant import Stage, Variant
from ..lib.sums import column_sums
from .kernels import conv_final_state_fwd, conv_gradients_bwd, conv_initial_state_bwd, conv_outputs_fwd, conv_tokens_fwd

__all__ = ["ConvTile", "token_variant", "variant"]

RESIDENT = {False: (12, 12, 12, 12, 16, 16, 16, 16), True: (16, 16, 16, 12, 16, 12, 12, 11)}
"""Programs of one warp that a multiprocessor of Hopper runs at once, forward and backward, by the filter's width: there is room
for the registers of so many."""


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
    """One warp, which waits for no other, and as many pieces as programs run at once, or a few times as many.

    A thread reads 16 bytes of a row, but has fewer channels where each takes many registers: ``2 W`` forward, ``4 W`` backward.
    """
    most = (4 if W <= 4 else 2) if backward else (8 if W <= 4 else 4)
    BD, unroll = channels(D, 32 * min(16 // bytes_each, most)), 4 if backward and W <= 5 else 8
    piece = max(-(-T // pieces_a_row(B * programs(1, D, 1, BD), RESIDENT[backward][W - 1] * num_sms)), 32 if backward else 16)
    return ConvTile(BD, -(-piece // unroll) * unroll, unroll, 1)


def pieces_a_row(rows: int, at_once: int) -> int:
    """Into how many pieces each of ``rows`` is cut: as many as fill rounds of ``at_once`` programs, to nine tenths or best."""
    pieces = {rounds: rounds * at_once // max(rows, 1) for rounds in (1, 2, 3, 4)}
    filled = {rounds: n * rows / (rounds * at_once) for rounds, n in pieces.items()}
    return max(pieces[next((rounds for rounds, x in filled.items() if x >= 0.9), max(filled, key=filled.__getitem__))], 1)


def channels(D: int, most: int) -> int:
    """A power of two that covers ``D``, or the ``most`` there may be."""
    return min(power_of_two(D), most)
