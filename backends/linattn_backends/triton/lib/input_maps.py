"""Input maps in registers, float32: unit rows, log decays of raw gates, and writing strengths, with their slopes.

::

    unit            x (Σ x² + ε)^{-1/2}
    SOFTPLUS        g = -e^A softplus(x)            dg/dx = -e^A σ(x)                dg/dA = g
    BOUNDED         g = n σ(e^A x)                  dg/dx = n e^A σ'(e^A x)          dg/dA = x dg/dx
    LOG_SIGMOID     g = n logσ(x)                   dg/dx = n σ(-x)
    NEG_EXP         g = -e^x                        dg/dx = g
    strength        beta = f σ(x)                   dbeta/dx = f σ'(x)

``x`` is the raw gate with its bias. ``rate`` is ``e^A``; ``n`` the map's number: the lower bound, or ``1/τ``.
"""

import triton
import triton.language as tl

from .activations import sigmoid
from .gates import LOG2E

EPSILON = tl.constexpr(1e-6)
"""What is added to a row's sum of squares."""

# Kinds of gate maps, as kernels are compiled for them (``MAP``).
NONE = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
BOUNDED = tl.constexpr(2)
LOG_SIGMOID = tl.constexpr(3)
NEG_EXP = tl.constexpr(4)


@triton.jit
def softplus(x):
    """``log(1 + e^x)``, right to a rounding of itself where ``e^x`` is far below one: the logarithm's instruction is not."""
    return tl.maximum(x, 0.0) + log_of_one_and(tl.exp2(-LOG2E * tl.abs(x)))


@triton.jit
def log_of_one_and(e):
    """``log(1 + e)`` for ``e`` of 0 to 1: ``e`` times a polynomial, which strays from it by 6e-8 of itself."""
    p = 0.0782259330 + e * (-0.0295052268 + e * 0.00523269130)
    p = -0.248429820 + e * (0.191060066 + e * (-0.136632442 + e * p))
    return e * (0.9999999403953552 + e * (-0.499994934 + e * (0.333190978 + e * p)))


@triton.jit
def softplus_and_slope(x):
    """``log(1 + e^x)`` and its derivative ``σ(x)``, of one exponential."""
    e = tl.exp2(-LOG2E * tl.abs(x))
    root = tl.rsqrt(1.0 + e)
    slope = root * root
    return tl.maximum(x, 0.0) + log_of_one_and(e), tl.where(x < 0.0, e * slope, slope)


@triton.jit
def decay_of(x, rate, number, MAP: tl.constexpr):
    """Log decays of raw gates with their bias."""
    if MAP == SOFTPLUS:
        g = -rate * softplus(x)
    elif MAP == BOUNDED:
        g = number * sigmoid(rate * x)
    elif MAP == LOG_SIGMOID:
        g = -number * softplus(-x)
    else:
        g = -tl.exp2(x * LOG2E)
    return g


@triton.jit
def decay_slopes(x, rate, number, MAP: tl.constexpr):
    """Derivatives of log decays by ``x`` and, where the map has such a parameter, by ``A``."""
    if MAP == SOFTPLUS:
        by_A, by_x = softplus_and_slope(x)
        by_A *= -rate
        by_x *= -rate
    elif MAP == BOUNDED:
        s = sigmoid(rate * x)
        by_x = number * rate * s * (1.0 - s)
        by_A = by_x * x
    elif MAP == LOG_SIGMOID:
        by_x = number * sigmoid(-x)
        by_A = by_x
    else:
        by_x = -tl.exp2(x * LOG2E)
        by_A = by_x
    return by_x, by_A


@triton.jit
def load_rate(A_log, place):
    """``e^A`` of a head; one if the map has none."""
    if A_log is None:
        rate = 1.0
    else:
        rate = tl.exp2(tl.load(A_log + place).to(tl.float32) * LOG2E)
    return rate


@triton.jit
def load_bias(bias, place, columns, stride, inside, GATE: tl.constexpr):
    """The bias of a head's raw gate: of key channels ``columns`` if ``GATE`` is 2, one if it is 1; zero if there is none."""
    if bias is None:
        shift = 0.0
    elif GATE == 2:
        shift = tl.load(bias + place + columns * stride, mask=inside, other=0.0).to(tl.float32)
    else:
        shift = tl.load(bias + place).to(tl.float32)
    return shift


@triton.jit
def strength_of(x, factor):
    """Writing strengths of raw ones."""
    return factor * sigmoid(x)


@triton.jit
def strength_slope(x, factor):
    """Derivatives of writing strengths."""
    s = sigmoid(x)
    return factor * s * (1.0 - s)


@triton.jit
def unit(x):
    """A row as one of unit length."""
    return x * tl.rsqrt(tl.sum(x * x, 0) + EPSILON)
