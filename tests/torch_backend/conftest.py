import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # the tensors are tiny: more threads only wait for each other
