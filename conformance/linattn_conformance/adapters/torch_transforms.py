"""``torch.compile``, ``torch.export``, FakeTensor, ``torch.func`` with its second derivatives, and autocast on one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ..calls import Failure
from ..cases import has_state
from ..checks.derivatives import compare_second, compare_tangents, direction, directions, values_of

if TYPE_CHECKING:
    from ..calls import Run

__all__ = ["TRANSFORMS"]


class Flat(torch.nn.Module):
    """A call from a list of tensors to a tuple of tensors."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.names = list(run.values)
        self.function = run.function()
        self.static = {**run.problem.options, "backend": run.backend.name}
        self.state_type = run.case.spec.state_type
        self.in_place, self.returns_state = run.case.form == "decode", has_state(run.case.spec)

    def forward(self, *leaves: Any) -> tuple[Any, ...]:
        arrays = dict(zip(self.names, leaves, strict=True))
        if self.state_type is not None:
            parts = [x for name, x in arrays.items() if name.startswith("initial_state.")]
            arrays = {name: x for name, x in arrays.items() if not name.startswith("initial_state.")}
            arrays["initial_state"] = self.state_type(*parts)
        if self.in_place:
            return self.function(**arrays, **self.static), arrays["state"]
        found = self.function(**arrays, **self.static)
        if not self.returns_state:
            return (found,)
        o, state = found
        return (o, *state) if self.state_type is not None else (o, state)


def named(run: Run, results: Any) -> dict[str, Any]:
    return dict(zip(run.truth.outputs, results, strict=True))


def leaves_of(run: Run, tracked: bool = False) -> list[Any]:
    arrays = run.arrays()
    return list((run.adapter.tracked(arrays) if tracked else arrays).values())


def compiled(run: Run) -> None:
    """One graph without a break, forward and, if the backend has a gradient, backward."""
    torch._dynamo.reset()
    function = torch.compile(Flat(run), backend="aot_eager", fullgraph=True)
    if run.case.form == "decode" or run.declares(run.adapter.tracked(run.arrays())):
        run.compare(named(run, function(*leaves_of(run))), run.truth.outputs)
        return
    leaves = leaves_of(run, tracked=True)
    outputs = named(run, function(*leaves))
    run.compare(outputs, run.truth.outputs)
    wanted = [x for x in leaves if x.requires_grad]
    cotangents = run.cotangents()
    found = torch.autograd.grad([outputs[name] for name in cotangents], wanted, list(cotangents.values()))
    run.compare(dict(zip(run.problem.floats, found, strict=True)), run.true_gradients)


def exported(run: Run) -> None:
    """A program that does without this library's Python code."""
    leaves = tuple(leaves_of(run))
    program = torch.export.export(Flat(run), leaves)
    run.compare(named(run, program.module()(*leaves)), run.truth.outputs)


def fake(run: Run) -> None:
    """Shapes and dtypes without data."""
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(x) for x in leaves_of(run)]
        outputs = named(run, Flat(run)(*leaves))
    for name, quantity in run.truth.outputs.items():
        run.check_kind(name, outputs[name], quantity)


def func_grad(run: Run) -> None:
    """``torch.func.grad`` of a scalar."""
    leaves, cotangents = leaves_of(run), run.cotangents()

    def loss(*leaves: Any) -> Any:
        outputs = named(run, Flat(run)(*leaves))
        return sum((outputs[name].double() * x.double()).sum() for name, x in cotangents.items())

    positions = tuple(i for i, x in enumerate(leaves) if x.is_floating_point())
    found = torch.func.grad(loss, positions)(*leaves)
    run.compare(dict(zip(run.problem.floats, found, strict=True)), run.true_gradients)


def vmapped(run: Run) -> None:
    """Two calls as one: the second has the rows of the batch in reverse order."""
    leaves = leaves_of(run)
    rows = [symbols[0] in ("B", "N") for symbols in run.problem.symbols.values()]
    stacked = [torch.stack([x, x.flip(0) if flip else x]) for x, flip in zip(leaves, rows, strict=True)]
    outputs = named(run, torch.func.vmap(Flat(run))(*stacked))
    run.compare({name: x[0] for name, x in outputs.items()}, run.truth.outputs)
    run.compare({name: x[1].flip(0) for name, x in outputs.items()}, run.truth.outputs)


def autocast(run: Run) -> None:
    """Operands are cast before the backend sees them, as those of PyTorch's attention, and nothing inside is."""
    spec = run.case.spec
    operands = {arg.name for arg in (*spec.args, *spec.keyword_args) if arg.role == "operand"}

    def cast() -> dict[str, Any]:
        return {name: x.to(torch.bfloat16) if name in operands else x for name, x in run.arrays().items()}

    if run.declares(cast()):
        return
    with torch.autocast(torch.device(run.adapter.device).type, dtype=torch.bfloat16):
        found = run.outputs(run.arrays())
    for name, x in run.outputs(cast()).items():
        if found[name].dtype != x.dtype or not torch.equal(found[name], x):
            raise Failure(f"{name} under autocast is not what operands give that were cast to bfloat16 before")


def call_of(run: Run) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The call, from float tensors by name to outputs by name."""
    others = {name: x for name, x in run.compact().items() if name not in run.problem.floats}
    return lambda floats: run.outputs({**others, **floats})


def moving(run: Run, along: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every float tensor of a case, in no layout of its own, which PyTorch's tangents have not, and the direction of some."""
    arrays = run.compact()
    floats = {name: arrays[name] for name in run.problem.floats}
    moved = direction(run, along)
    return floats, {name: run.adapter.from_float64(moved[name], run.adapter.dtype(x)) for name, x in floats.items()}


def tangents(run: Run) -> None:
    """``torch.func.jvp``."""
    floats, moved = moving(run, values_of(run))
    compare_tangents(run, lambda: torch.func.jvp(call_of(run), (floats,), (moved,))[1])


def twice(run: Run) -> None:
    """Second derivatives along each direction whose truth is known."""
    for along in directions(run):
        twice_along(run, along)


def twice_along(run: Run, along: tuple[str, ...]) -> None:
    """The tangents of gradients, and the gradient of a product with gradients."""
    floats, moved = moving(run, along)
    call, cotangents = call_of(run), run.cotangents()

    def loss(floats: dict[str, Any]) -> Any:
        outputs = call(floats)
        return sum((outputs[name].double() * x.double()).sum() for name, x in cotangents.items())

    def product(floats: dict[str, Any]) -> Any:
        found = torch.func.grad(loss)(floats)
        return sum((found[name].double() * moved[name].double()).sum() for name in floats)

    compare_second(run, along, lambda: torch.func.jvp(torch.func.grad(loss), (floats,), (moved,))[1], forward=True)
    compare_second(run, along, lambda: torch.func.grad(product)(floats), forward=False)


TRANSFORMS: dict[str, Callable[[Any], None]] = {
    "compile": compiled,
    "export": exported,
    "fake": fake,
    "func-grad": func_grad,
    "vmap": vmapped,
    "autocast": autocast,
    "jvp": tangents,
    "second": twice,
}
