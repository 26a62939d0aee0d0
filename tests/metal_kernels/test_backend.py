"""The MLX backend with its kernels emulated: what MLX's transforms and the dispatcher make of them."""

import linattn
import mlx.core as mx
import numpy as np
import pytest
from linattn_backends.mlx import MlxBackend, metal, selection
from linattn_backends.numpy import forward, vjp
from metal_cases import Options, as_numpy, draw, error


@pytest.fixture
def kernels(emulated, monkeypatch):
    """Kernels for whatever fits them; returns what counts launches."""
    monkeypatch.setattr(selection, "unfit", metal.unfit)
    return emulated()


def explained(**sizes):
    q = np.zeros([sizes.get(name, 8) for name in ("B", "T", "H", "K")], sizes.get("dtype", np.float32))
    call = linattn.explain(linattn.recurrent_gla, q, q, q, q, backend="numpy").call
    return MlxBackend().details(type(call)(**{**{name: getattr(call, name) for name in call.__slots__}, "device": "metal"}))


def test_explain_says_why_not():
    assert explained() == "Metal kernels"
    assert explained(K=1025) == "MLX operations (no Metal kernels: K must be at most 1024, got 1025)"
    assert explained(dtype=np.float64) == "MLX operations (no Metal kernels: q is float64)"


def test_gradients(kernels):
    case = draw("kda")
    plain = {name: as_numpy(x) for name, x in case.arrays.items()}
    names, values = zip(*case.arrays.items(), strict=True)

    def loss(*values):
        o, final = linattn.recurrent_kda(
            **dict(zip(names, values, strict=True)), scale=0.3, output_final_state=True, backend="mlx"
        )
        return (o * case.d_o).sum() + (final * case.d_final).sum()

    found = mx.grad(loss, argnums=tuple(range(len(values))))(*values)
    wanted = vjp(case.op, plain, {"scale": 0.3}, as_numpy(case.d_o), as_numpy(case.d_final))
    assert max(error(x, wanted[name]) for name, x in zip(names, found, strict=True)) < 1
    assert len(kernels.launches) == 3


@pytest.mark.parametrize("lengths", [None, [0, 0]])
def test_no_tokens(kernels, lengths):
    case = draw("gated_delta_rule", T=0, lengths=lengths)
    o, final = linattn.gated_delta_rule(**case.arrays, output_final_state=True, backend="mlx")
    assert o.shape == case.arrays["v"].shape
    assert mx.array_equal(final, case.arrays["initial_state"])
    assert not kernels.launches


def test_a_decay_that_is_fixed_and_a_normaliser(kernels):
    case = draw("simple_gla")
    arrays = {**case.arrays, "g": mx.array([-0.1, -0.2, -0.3, -np.inf])}
    o, _ = linattn.recurrent_simple_gla(**arrays, backend="mlx")
    wanted, _ = forward("simple_gla", {name: as_numpy(x) for name, x in arrays.items()}, {})
    assert error(o, wanted) < 1
    arrays = {name: mx.abs(x) for name, x in draw("linear_attn", state=False, dtype=mx.bfloat16).arrays.items()}
    o, _ = linattn.linear_attn(**arrays, normalize=True, backend="mlx")
    wanted, _ = forward("linear_attn", {name: as_numpy(x) for name, x in arrays.items()}, {"normalize": True})
    assert error(o, wanted) < 1
    assert len(kernels.launches) == 2


def test_a_traced_call_and_its_gradient_hold_the_kernels():
    """What is recorded where nothing can be evaluated: under ``mx.compile`` on a Mac."""
    case, options = draw("kda", T=20), Options(form="chunk")
    names, values = zip(*case.arrays.items(), strict=True)
    found = []

    def record(event):
        if event.get("name") == "CustomKernel":
            found.append(event["arguments"][0].split("_")[3])

    def both(*values):
        arrays = dict(zip(names, values, strict=True))
        outputs = metal.forward(arrays, options)
        gradients = metal.backward(arrays, {"o": case.d_o, "final": case.d_final}, outputs, options)
        return [outputs["o"], outputs["final"], *gradients.values()]

    mx.export_function(record, both, *values)
    assert sorted(found) == ["backward", "chunk", "recurrent"]
