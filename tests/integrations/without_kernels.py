"""A plug-in of pytest's: transformers as on a machine without fla and its like, whose kernels it would call on a CPU too."""

import sys

import torch

if not torch.cuda.is_available():
    sys.modules.update(dict.fromkeys(("fla", "causal_conv1d", "mamba_ssm")))
