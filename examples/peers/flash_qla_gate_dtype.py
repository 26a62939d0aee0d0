# FlashQLA 0.1.3: gates in bfloat16, as in its documentation, are summed in bfloat16.
import torch
from flash_qla import chunk_gated_delta_rule

torch.manual_seed(0)
q, k, v = (torch.randn(1, 64, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
k, beta = torch.nn.functional.normalize(k, dim=-1), torch.rand(1, 64, 1, device="cuda")
g = -torch.rand(1, 64, 1, device="cuda").bfloat16()
narrow, wide = (chunk_gated_delta_rule(q, k, v, gates, beta)[0].float() for gates in (g, g.float()))
print("relative difference:", ((narrow - wide).norm() / wide.norm()).item())  # the same gates: 0 is expected
