"""A plug-in of pytest's: fla's model tests on a CPU, with linattn's functions in fla, mamba_ssm and causal_conv1d.

What linattn has no function for (norms, short convolutions, rotary positions, token shifts) runs as fla's own kernels, in
Triton's interpreter, for which ``TRITON_INTERPRET`` has to be set. A call that linattn refuses fails, and so does a test in
which none of its operators ran. Batches, sequences and heads are cut to what a CPU manages.
"""

import math

import judged_on_cpu
import numpy as np
import pytest
import triton.language as tl
from fla_on_gpu import pytest_runtest_call as pytest_runtest_call
from fla_on_gpu import seen
from linattn.integrations import fla, mamba_ssm
from linattn.integrations.seams import Integration
from linattn_backends.triton.runtime.interpreter import read_scalars
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

GENERATION = {"B": 2, "T": 20, "H": 2}
"""The largest sizes of a test that decodes, a token at a time, all but a quarter of a sequence."""
OTHERS = {"B": 2, "T": 80, "H": 2}
"""Those of any other: sequences longer than a chunk, and than what fla's layers leave to a recurrent form."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before fla's ``conftest.py`` imports fla, whose layers look for mamba_ssm and causal_conv1d."""
    read_scalars()
    Autotuner._bench = _most_at_once
    InterpreterBuilder.cast_impl = _to_nearest(InterpreterBuilder.cast_impl)
    for operation in ("binary_op", "ternary_op", "create_fma"):
        setattr(InterpreterBuilder, operation, _of_numbers(getattr(InterpreterBuilder, operation)))
    for functions in (fla.FUNCTIONS, mamba_ssm.FUNCTIONS):
        functions.update({name: seen(function) for name, function in functions.items()})
    judged_on_cpu.pytest_configure(early_config)
    import fla_on_cpu  # noqa: F401
    from fla.layers.mamba2 import Mamba2
    from fla.ops.attnres.naive import naive_attnres

    fla.enable()
    attention_residuals = {"fla.ops.attnres.fused_attnres": naive_attnres}  # whose kernels refuse what is not on a GPU
    Integration("fla", "flash-linear-attention", attention_residuals).enable()
    Mamba2.torch_forward = Mamba2.cuda_kernels_forward  # it asks for the device before it calls mamba_ssm


def _most_at_once(self, *args, config, **kwargs):
    """In the place of times on a device: an interpreter is soonest done with the largest blocks."""
    return [-math.prod(size for size in config.kwargs.values() if size)] * 3


def _to_nearest(cast):
    """The interpreter's cast, which cuts float32 off to bfloat16: rounded as on a device."""

    def rounded(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
            src = TensorHandle(nearest(src.data), tl.float32)
        return cast(self, src, dst_type)

    return rounded


def _of_numbers(compute):
    """The interpreter's operations on arrays, which take the bits of bfloat16 for integers: done in float32."""

    def computed(self, *operands):
        if operands[0].dtype.scalar != tl.bfloat16:
            return compute(self, *operands)
        wide = compute(self, *(self.cast_impl(x, tl.float32) if isinstance(x, TensorHandle) else x for x in operands))
        return wide if wide.data.dtype == bool else self.cast_impl(wide, tl.bfloat16)

    return computed


def nearest(x):
    """float32 numbers as the nearest of bfloat16, ties to even."""
    bits = x.view(np.uint32)
    return np.where(np.isfinite(x), ((bits + (0x7FFF + (bits >> 16 & 1))) & 0xFFFF0000).astype(np.uint32).view(np.float32), x)


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "callspec"):
            item.callspec.params.update(cut(item.callspec.params, GENERATION if "generation" in item.name else OTHERS))


def cut(params, most):
    """Those of the parameters that are sizes, none larger than ``most``."""
    return {name: min(params[name], size) for name, size in most.items() if name in params}
