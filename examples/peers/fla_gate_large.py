# flash-linear-attention 0.6.0: after a gate of -1e4 the chunk operators lose the small gates of the same chunk.
import torch
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

torch.manual_seed(0)
q, k, v = (torch.randn(1, 64, 1, 32, device="cuda") for _ in range(3))
g = -torch.rand(1, 64, 1, device="cuda") / 8
g[:, 20] = -1e4
chunk, token = (op(q, k, v, g)[0] for op in (chunk_simple_gla, fused_recurrent_simple_gla))
print("relative difference:", ((chunk - token).norm() / token.norm()).item())  # about 1e-6 is expected of float32
