# flash-linear-attention 0.6.0: fused_recurrent_rwkv6 drops the gradient that comes through the final state.
import torch
from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

torch.manual_seed(0)
r, k, v = (torch.randn(1, 8, 1, 16, device="cuda") for _ in range(3))
w, u = -torch.rand_like(r), torch.randn(1, 16, device="cuda")
for op in (chunk_rwkv6, fused_recurrent_rwkv6):  # equal but for rounding is expected; the second prints 0
    leaf = k.clone().requires_grad_()
    state = op(r, leaf, v, w, u, output_final_state=True)[1]
    print(op.__name__, torch.autograd.grad(state.square().sum(), leaf)[0].norm().item())
