# flash-linear-attention 0.6.0: on FakeTensors its kernels are launched, and the process has lost its GPU.
import torch
from fla.ops.gla import fused_recurrent_gla
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    q, k, v, g = (torch.empty(1, 8, 2, 16, device="cuda") for _ in range(4))
    print(fused_recurrent_gla(q, k, v, g)[0].shape)
torch.cuda.synchronize()  # an illegal memory access was encountered
