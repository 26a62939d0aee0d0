"""What MLX's transforms need to know of an operation, said once.

An operation is a pair of functions on dicts of arrays: ``forward(arrays) → outputs`` and ``backward(arrays, cotangents,
outputs) → gradients``, a gradient for each array. :func:`differentiable` makes one ``mx.custom_function`` of the first and
another of the second, each with a rule for ``mx.vmap``; a gradient of the gradient is what MLX makes of the operations inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

NOT_BY_ROW = ("u", "bias", "cu_seqlens")
"""Arrays without a batch dimension: shared by the rows, or their gradient sums over them."""

Tree = Any
Forward = Callable[[Tree], Tree]
Backward = Callable[[Tree, Tree, Tree], Tree]


def differentiable(forward: Forward, backward: Backward) -> Forward:
    """``forward`` with ``backward`` for its gradient."""
    gradient = mappable(lambda given: backward(*given))

    def vjp(arrays: Tree, cotangents: Tree, outputs: Tree) -> Tree:
        return gradient((arrays, cotangents, outputs))

    return mappable(forward, vjp)


def mappable(function: Forward, vjp: Backward | None = None) -> Forward:
    """A custom function of one tree, with its vmap rule."""
    custom = mx.custom_function(function)
    if vjp is not None:
        custom.vjp(vjp)

    @custom.vmap
    def _(given: Tree, axes: Tree) -> tuple[Tree, Tree]:
        outputs = mapped(custom, given, dict(tree_flatten(axes, is_leaf=lambda axis: axis is None)))
        return outputs, tree_map(lambda _: 0, outputs)

    return custom


def mapped(function: Forward, given: Tree, axes: dict[str, int | None]) -> Tree:
    """``function`` of many calls at once: their rows as one batch where every array has rows, else one after the other."""
    leaves = dict(tree_flatten(given))
    size = next(x.shape[axes[name]] for name, x in leaves.items() if axes[name] is not None)
    first = {name: x if axes[name] is None else mx.moveaxis(x, axes[name], 0) for name, x in leaves.items()}

    def like_given(values: dict[str, mx.array]) -> Tree:
        paths = iter(leaves)
        return tree_map(lambda _: values[next(paths)], given)

    if any(name.rpartition(".")[2] in NOT_BY_ROW for name in leaves):
        calls = [
            function(like_given({name: x if axes[name] is None else x[i] for name, x in first.items()})) for i in range(size)
        ]
        return tree_map(lambda *each: mx.stack(each), *calls)
    rows = {name: x if axes[name] is not None else mx.broadcast_to(x, (size, *x.shape)) for name, x in first.items()}
    outputs = function(like_given({name: x.reshape(-1, *x.shape[2:]) for name, x in rows.items()}))
    return tree_map(lambda y: y.reshape(size, -1, *y.shape[1:]), outputs)
