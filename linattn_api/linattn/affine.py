"""Spans of tokens as affine maps of the state, ``S_out = A ∘ S_in + b``, and how two of them make one.

Every family whose state is a matrix is one. How ``A`` acts is told by its shape beside that of the state ``[..., K, V]``:

| ``A`` | acts as | families |
| --- | --- | --- |
| ``[...]`` | ``A S``, a number a head | ``linear_attn``, ``simple_gla``, ``ssd`` |
| ``[..., K]`` | ``Diag(A) S`` | ``gla``, ``rwkv6`` |
| ``[..., K+V]`` | ``Diag(A[:K]) S Diag(A[K:])`` | ``gla`` with ``gv`` |
| ``[..., K, K]`` | ``A S`` | the delta families, ``dplr`` |
| ``[..., V, K, K]`` | ``A[v] S[:, v]``, column by column | the delta families with a ``beta`` per value channel |
"""

from __future__ import annotations

from typing import Any, TypeVar

from .errors import FrameworkError, ShapeError
from .frameworks import Framework, framework_of

__all__ = ["act", "act_transposed", "compose", "gradient_of"]

Array = TypeVar("Array")


def _more(A: Any, S: Any) -> int:
    """Dimensions that ``A`` has and the state has not: -2 a head, -1 a channel, 0 a matrix, 1 a matrix a value channel."""
    return len(A.shape) - len(S.shape)


def _factors(A: Any, S: Any) -> tuple[Any, ...]:
    """What a diagonal ``A`` multiplies the state by, each so shaped that it meets it."""
    K = S.shape[-2]
    if _more(A, S) == -2:
        return (A[..., None, None],)
    keys = A[..., :K, None]
    return (keys,) if A.shape[-1] == K else (keys, A[..., None, K:])


def _columns(xp: Framework, S: Any) -> Any:
    """``[..., K, V]`` as ``[..., V, K, 1]``."""
    return xp.swapaxes(S, -1, -2)[..., None]


def act(xp: Framework, A: Any, S: Any) -> Any:
    """``A ∘ S``."""
    if _more(A, S) == 0:
        return xp.matmul_of_states(A, S)
    if _more(A, S) == 1:
        return xp.swapaxes(xp.matmul_of_states(A, _columns(xp, S))[..., 0], -1, -2)
    first, *others = _factors(A, S)
    acted = first * S
    for factor in others:
        acted = factor * acted
    return acted


def act_transposed(xp: Framework, A: Any, dS: Any) -> Any:
    """The gradient of ``S`` from that of ``A ∘ S``."""
    return act(xp, xp.swapaxes(A, -1, -2) if _more(A, dS) >= 0 else A, dS)


def gradient_of(xp: Framework, A: Any, S: Any, d: Any) -> Any:
    """The gradient of ``A`` from that of ``A ∘ S``."""
    if _more(A, S) == 0:
        return xp.matmul_of_states(d, xp.swapaxes(S, -1, -2))
    if _more(A, S) == 1:
        return xp.matmul_of_states(_columns(xp, d), xp.swapaxes(_columns(xp, S), -1, -2))
    if _more(A, S) == -2:
        return (d * S).sum(-1).sum(-1)
    if A.shape[-1] == S.shape[-2]:
        return (d * S).sum(-1)
    keys, values = _factors(A, S)
    return xp.concat([(d * S * values).sum(-1), (d * S * keys).sum(-2)], axis=-1)


def after(xp: Framework, A1: Any, A2: Any, S: Any) -> Any:
    """The transition that is ``A1``, then ``A2``, of a state like ``S``."""
    return xp.matmul_of_states(A2, A1) if _more(A1, S) >= 0 else A2 * A1


def compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """The summary of two spans, one after the other: ``(A2 ∘ A1, A2 ∘ b1 + b2)``. Differentiable; it is associative.

    Args:
        first: ``(A, b)`` of the earlier span, as ``linattn.summary_…`` returns it.
        second: ``(A, b)`` of the later span, of the same shapes.

    Returns:
        ``(A, b)`` of both, of the same shapes.

    Raises:
        FrameworkError: The arrays are not of one framework.
        ShapeError: The two summaries differ in shape, or are none.
    """
    named: dict[str, Any] = {
        f"{which}[{i}]": x for which, pair in (("first", first), ("second", second)) for i, x in enumerate(pair)
    }
    frameworks = {name: framework_of(x, name, "compose: ") for name, x in named.items()}
    xp = frameworks["first[0]"]
    for name, other in frameworks.items():
        if other is not xp:
            raise FrameworkError(f"compose: {name} is a {other.name} array but first[0] is a {xp.name} array")
    _check_shapes(*(tuple(x.shape) for x in named.values()))
    (A1, b1), (A2, b2) = first, second
    return after(xp, A1, A2, b1), act(xp, A2, b1) + b2


def _check_shapes(A1: tuple[int, ...], b1: tuple[int, ...], A2: tuple[int, ...], b2: tuple[int, ...]) -> None:
    if (A1, b1) != (A2, b2):
        raise ShapeError(
            f"compose: both summaries must have the same shapes, got A {list(A1)} and b {list(b1)}, "
            f"then A {list(A2)} and b {list(b2)}"
        )
    *heads, K, V = b1 if len(b1) >= 2 else (0, 0)
    kinds: tuple[list[int], ...] = ([], [K], [K + V], [K, K], [V, K, K])
    if list(A1) not in [[*heads, *kind] for kind in kinds]:
        raise ShapeError(f"compose: no summary has A {list(A1)} and b {list(b1)}: pass what linattn.summary_… returns")
