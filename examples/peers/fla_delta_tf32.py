# flash-linear-attention 0.6.0: chunk_gated_delta_rule multiplies float32 in TF32. Run it with TRITON_F32_DEFAULT=ieee.
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

torch.manual_seed(0)
q, k, v = (torch.randn(1, 64, 1, 64, device="cuda") for _ in range(3))
k, g = torch.nn.functional.normalize(k, dim=-1), -torch.rand(1, 64, 1, device="cuda") / 8
beta = torch.rand(1, 64, 1, device="cuda")
chunk = chunk_gated_delta_rule(q, k, v, g, beta)[0]
token = fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta)[0]
print("relative difference:", ((chunk - token).norm() / token.norm()).item())  # about 1e-6 is expected of float32
