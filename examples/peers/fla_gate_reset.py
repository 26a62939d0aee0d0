# flash-linear-attention 0.6.0: a gate of -inf, a hard reset, gives NaN in the chunk operators and none in the recurrent ones.
import torch
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

torch.manual_seed(0)
q, k, v = (torch.randn(1, 64, 1, 32, device="cuda") for _ in range(3))
g = -torch.rand(1, 64, 1, device="cuda") / 8
g[:, 20] = float("-inf")
for op in (chunk_simple_gla, fused_recurrent_simple_gla):  # 0 and 0 are expected
    print(op.__name__, op(q, k, v, g)[0].isnan().sum().item())
