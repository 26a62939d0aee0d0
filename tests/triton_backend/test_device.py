"""What kernels and tiles are chosen by, of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from linattn.plugin import Call
from linattn_backends.triton.explain import details_of
from linattn_backends.triton.runtime import device
from triton_cases import with_states

CUDA = torch.device("cuda", 0)


@pytest.fixture
def found(monkeypatch):
    """``found(major, minor, smem_KB)``: the properties that PyTorch tells of a device of CUDA."""

    def present(major=9, minor=0, smem_KB=227):
        known = SimpleNamespace(
            major=major, minor=minor, multi_processor_count=132, shared_memory_per_block_optin=smem_KB << 10
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: known)

    device.measured.cache_clear()
    yield present
    device.measured.cache_clear()


@pytest.mark.parametrize(
    ("capability", "hip", "interpreted", "release", "reason"),
    [
        ((9, 0), None, False, "3.6.0", None),
        ((9, 0), None, False, "3.9.0", "Triton is 3.9.0, not 3.6"),
        ((9, 4), "6.4", False, "3.6.0", "the device is not NVIDIA's"),
        ((9, 0), "6.4", False, "3.6.0", "the device is not NVIDIA's"),
        ((10, 0), None, False, "3.6.0", "the device has compute capability 10.0, not 9.0"),
        ((9, 0), None, True, "3.6.0", "kernels are interpreted"),
    ],
)
def test_kernels_for_hopper_run_on_hopper_alone(found, monkeypatch, capability, hip, interpreted, release, reason):
    """AMD's devices say 9 as well."""
    found(*capability)
    monkeypatch.setattr(device, "INTERPRETED", interpreted)
    monkeypatch.setattr(device.torch.version, "hip", hip)
    monkeypatch.setattr(device.triton, "__version__", release)
    assert device.properties(CUDA).not_hopper == reason


@pytest.mark.parametrize(("smem_KB", "large"), [(99, False), (163, False), (220, True), (227, True)])
def test_large_shared_memory_is_that_of_hopper(found, smem_KB, large):
    found(smem_KB=smem_KB)
    assert device.properties(CUDA)[:2] == (132, large)


@pytest.fixture
def compiling(monkeypatch):
    """Kernels are compiled, by the release of Triton that kernels in Gluon are for."""
    monkeypatch.setattr(device, "INTERPRETED", False)
    monkeypatch.setattr(device.triton, "__version__", "3.6.0")


SUMS, MATRICES = "diagonal_running_sums_fwd", "diagonal_sum_matrices_fwd, diagonal_vector_scores_fwd"
IN_REGISTERS = {
    "linear_attn": "diagonal_scan; gradients diagonal_scan",
    "simple_gla": f"{SUMS}, diagonal_scan; gradients {SUMS}, diagonal_scan, diagonal_states, diagonal_scalar_gradients_bwd",
    "gla": f"{MATRICES}, diagonal_vector_scan; gradients diagonal_states, diagonal_vector_scan, diagonal_vector_inter_bwd, "
    "diagonal_sum_matrices_fwd, diagonal_vector_intra_bwd",
}
THROUGH_MEMORY = {
    "linear_attn": "diagonal_states, diagonal_outputs; gradients diagonal_states, diagonal_outputs, diagonal_gradients_bwd",
    "simple_gla": f"{SUMS}, diagonal_states, diagonal_outputs; "
    f"gradients {SUMS}, diagonal_states, diagonal_outputs, diagonal_scalar_gradients_bwd",
    "gla": f"{MATRICES}, diagonal_states, diagonal_vector_outputs; gradients diagonal_states, diagonal_vector_outputs, "
    "diagonal_vector_inter_bwd, diagonal_sum_matrices_fwd, diagonal_vector_intra_bwd",
}
EVERYWHERE = {
    "gated_delta_rule": "delta_scores_fwd, delta_solve_fwd, delta_state_fwd; "
    "gradients delta_state_fwd, delta_state_bwd, delta_gradients_bwd",
    "kda": "delta_vector_scores_fwd, delta_solve_fwd, delta_state_fwd; gradients delta_vector_rows_fwd, delta_state_fwd, "
    "delta_state_bwd, delta_scores_bwd, delta_vector_gradients_bwd",
}


@pytest.mark.parametrize(
    ("capability", "smem_KB", "kernels"),
    [
        ((8, 0), 163, THROUGH_MEMORY | EVERYWHERE),
        ((8, 9), 99, THROUGH_MEMORY | EVERYWHERE),
        ((10, 0), 227, IN_REGISTERS | EVERYWHERE),
        ((12, 0), 99, THROUGH_MEMORY | EVERYWHERE),
    ],
)
@pytest.mark.usefixtures("compiling")
def test_which_kernels_run_on_each_kind_of_gpu(found, capability, smem_KB, kernels):
    """Plain ones, for the reason that is said."""
    found(*capability, smem_KB)
    major, minor = capability
    for family, named in kernels.items():
        reason = f"(none for Hopper: the device has compute capability {major}.{minor}, not 9.0)"
        assert details_of(training(family), CUDA) == f"{with_states(named)} {reason}"


@pytest.mark.parametrize("family", EVERYWHERE | IN_REGISTERS)
@pytest.mark.usefixtures("compiling")
def test_on_hopper_each_of_these_calls_has_a_kernel_for_it(found, family):
    found(9, 0)
    assert "_sm90" in details_of(training(family), CUDA)


def training(family):
    """A call of the usual heads, with gradients."""
    arrays = [(name, "B T H K" if name in "qk" else "B T H V", "bfloat16") for name in "qkv"]
    if family != "linear_attn":
        arrays.append(("g", "B T H" if family in ("simple_gla", "gated_delta_rule") else "B T H K", "float32"))
    if family in EVERYWHERE:
        arrays.append(("beta", "B T H", "bfloat16"))
    dims = dict(B=1, T=4096, N=1, H=4, HV=4, K=128, V=128)
    return Call(family, "chunk", "torch", "cuda:0", tuple(arrays), tuple(dims.items()), (), True)


def test_an_interpreter_counts_as_one_processor_with_room():
    assert device.properties(torch.device("cpu")) == (1, True, "kernels are interpreted")


def test_what_stands_for_meta_tells_its_own():
    own = device.Properties(78, False, "another compiler")
    with device.standing_in(SimpleNamespace(properties=own)):
        assert device.properties(torch.device("meta")) is own
    with pytest.raises(LookupError):
        device.properties(torch.device("meta"))
