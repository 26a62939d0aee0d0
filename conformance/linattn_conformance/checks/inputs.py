"""Wrong calls: the error is of the right type, says exactly the right thing, and nothing was touched."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..bad_input import RULES, SIZES
from ..calls import Failure, Run, call_arguments
from ..data import chosen_shape, size_of

__all__ = ["bad_input"]


def bad_input(run: Run) -> None:
    """Break the rule that the case is named after."""
    name = run.case.id.rpartition("/")[2]
    rule = next(rule for rule in RULES if (rule.op, rule.form, rule.name) == (run.case.op, run.case.form, name))
    given = valid(run)
    changed = {**given, **rule.change(lambda size, dtype: make(run, size, dtype), given)}
    before = {key: run.adapter.to_float64(x) for key, x in changed.items() if run.adapter.is_array(x)}
    try:
        with run.witness.permit():
            run.function()(**call_arguments(run.case.op, changed), backend=run.backend.name)
    except Exception as error:
        if type(error) is not rule.error or str(error) != rule.text:
            raise Failure(f"expected {rule.error.__name__}: {rule.text}; got {type(error).__name__}: {error}") from error
    else:
        raise Failure(f"expected {rule.error.__name__}: {rule.text}; got a result")
    if run.witness.own:
        raise Failure("the backend ran on arguments that are wrong")
    run.check_untouched(before, {key: changed[key] for key in before})


def valid(run: Run) -> dict[str, Any]:
    """Arguments of a call that is right."""
    spec = run.case.spec
    defaults = {option.name: option.default for option in spec.options}
    arrays = {
        arg.name: make(run, tuple(size_of(symbol, SIZES) for symbol in chosen_shape(arg, ())), "float32")
        for arg in spec.arrays(defaults)
        if not arg.optional
    }
    return arrays | ({"chunk_size": SIZES["C"]} if run.case.op == "mixed_attn" else {})


def make(run: Run, size: Any, dtype: str) -> Any:
    """An array of a shape, or, from a list, of these values."""
    values = np.array(size) if isinstance(size, list) else np.linspace(-1.0, 0.0, int(np.prod(size))).reshape(size)
    return run.adapter.from_float64(values, dtype)
