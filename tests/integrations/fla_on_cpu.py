"""A plug-in of pytest's: fla's tests on a CPU, where its own kernels do not run and linattn does."""

import fla.utils
import torch

fla.utils.device = fla.utils.device_name = "cpu"
fla.utils.device_torch_lib = torch.cpu
