"""Every family and flag on simulated ranks is what one device gives, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from linattn.distributed import simulate
from linattn.errors import LinattnError
from sequence_cases import SPREAD, Case, arguments, draw, operator, parts

torch = pytest.importorskip("torch")

PACKINGS = {
    "batch": None,
    "packed": [0, 3, 3, 4, 15, 16, 16, 22],
    "one": [0, 24],
    "aligned": [0, 6, 12, 18, 24],
    "ends": [0, 0, 1, 23, 23],
}


X, STATE = np.ones((1, 24, 2, 4)), np.ones((1, 2, 4, 4))
REFUSED = {
    "one head of states": ("chunk_linear_attn", dict(initial_state=STATE[:, :1])),
    "states of one column": ("chunk_linear_attn", dict(initial_state=STATE[..., :1])),
    "states of integers": ("chunk_linear_attn", dict(initial_state=STATE.astype(int))),
    "a state that is no array": ("chunk_linear_attn", dict(initial_state=[1])),
    "a state of no dimensions": ("chunk_linear_attn", dict(initial_state=STATE[0, 0, 0, 0])),
    "a state of what has none": ("chunk_linear_attn", dict(initial_state=STATE, causal=False)),
    "a final state of what has none": ("chunk_linear_attn", dict(output_final_state=True, causal=False)),
    "a state of one array": ("chunk_mixed_attn", dict(initial_state=STATE)),
    "a filter of no width": ("short_conv", dict(weight=np.ones(4))),
    "too short windows": ("short_conv", dict(initial_state=np.ones((1, 4, 1)))),
    "windows of one channel": ("short_conv", dict(initial_state=np.ones((1, 1, 3)))),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_refuse_what_one_device_refuses(case: str):
    name, changed = REFUSED[case]
    function = operator(name)
    given = (
        {arg.name: X for arg in function.spec.args} if name != "short_conv" else {"x": X[:, :, 0], "weight": np.ones((4, 4))}
    )
    with pytest.raises(LinattnError) as one:
        function(**given | changed)
    with pytest.raises(type(one.value)) as ranks:
        simulate(function, **given | changed, ranks=2)
    assert str(ranks.value) == str(one.value)


def tensors(case: Case) -> dict[str, Any]:
    found = {name: torch.from_numpy(np.array(x)) for name, x in case.arrays.items()}
    return {name: x.requires_grad_() if x.is_floating_point() else x for name, x in found.items()}


def both(case: Case, name: str, cu_seqlens: list[int] | None, **options: Any):
    """Outputs and gradients of the plain call, and of the simulated one."""
    results = []
    for spread in (False, True):
        x = tensors(case)
        function = operator(name)
        given = arguments(case, x, function)
        if "output_final_state" in function.spec.parameters and case.options.get("causal", True):
            given["output_final_state"] = True
        if spread:
            given.pop("cu_seqlens", None)
            found = simulate(function, **given, cu_seqlens=cu_seqlens, **options)
        else:
            found = function(**given)
        found = [found[0], *parts(found[1])]
        torch.manual_seed(0)
        loss = sum((y * torch.randn(y.shape, dtype=y.dtype)).sum() for y in found if y.is_floating_point())
        leaves = {name: y for name, y in x.items() if y.requires_grad}
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        results.append((found, dict(zip(leaves, gradients, strict=True))))
    return results


def assert_same(plain: Any, spread: Any) -> None:
    for x, y in zip(plain[0], spread[0], strict=True):
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-9)
    for name, gradient in plain[1].items():
        if gradient is not None:
            torch.testing.assert_close(
                spread[1][name], gradient, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("variant", SPREAD)
def test_ranks_give_what_one_device_gives(variant: str, packing: str):
    cu_seqlens = PACKINGS[packing]
    case = draw(variant, cu_seqlens=cu_seqlens)
    ranks, layout = (
        (3, "contiguous") if packing in ("batch", "ends") else (2, "zigzag") if packing == "packed" else (4, "contiguous")
    )
    assert_same(*both(case, f"chunk_{case.family}", cu_seqlens, ranks=ranks, layout=layout))
