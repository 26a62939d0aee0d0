"""Loads and stores that several stages of the delta core share.

``beta [B, T, HV]`` has one number a token (``BETA`` is 1), ``beta [B, T, HV, V]`` one a value channel (2), ``dplr`` none (0).
"""

import triton
import triton.language as tl

from ..lib.tiles import load_tile


@triton.jit
def load_tile_transposed(p, rows, stride, columns, L, W: tl.constexpr, BW: tl.constexpr):
    """A tile of ``x [T, W]``, transposed on its way: ``[BW, C]``, zero past ``L`` and past ``W``."""
    keep = (rows < L)[None, :]
    if W % BW != 0:
        keep = keep & (columns < W)[:, None]
    return tl.load(p + rows.to(tl.int64)[None, :] * stride + columns[:, None], mask=keep, other=0.0)


@triton.jit
def load_beta_tile(p, rows, stride, columns_v, L, V: tl.constexpr, BV: tl.constexpr, BETA: tl.constexpr):
    """``beta`` of a chunk's tokens for values ``[BV, C]``, float32: ``[1, C]`` if ``BETA`` is 1, ``[BV, C]`` if it is 2."""
    if BETA == 2:
        beta = tl.trans(load_tile(p, rows, stride, columns_v, L, V, BV)).to(tl.float32)
    else:
        beta = tl.load(p + rows.to(tl.int64) * stride, mask=rows < L, other=0.0).to(tl.float32)[None, :]
    return beta


@triton.jit
def load_beta(beta, rows, L, stride, BETA: tl.constexpr):
    """``beta`` of tokens, one number each, float32; ones if there is none."""
    if BETA == 1:
        return tl.load(beta + rows.to(tl.int64) * stride, mask=rows < L, other=0.0).to(tl.float32)
    return tl.full(rows.shape, 1.0, tl.float32)
