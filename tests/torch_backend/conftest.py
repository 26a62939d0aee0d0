import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
