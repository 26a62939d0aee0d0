"""What kernels and tiles are chosen by, of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from linattn_backends.triton.runtime import device

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


def test_an_interpreter_counts_as_one_processor_with_room():
    assert device.properties(torch.device("cpu")) == (1, True, "kernels are interpreted")


def test_what_stands_for_meta_tells_its_own():
    own = device.Properties(78, False, "another compiler")
    with device.standing_in(SimpleNamespace(properties=own)):
        assert device.properties(torch.device("meta")) is own
    with pytest.raises(LookupError):
        device.properties(torch.device("meta"))
