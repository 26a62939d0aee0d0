# FlashQLA 0.1.3: a gate of -inf, a hard reset, gives NaN.
import torch
from flash_qla import chunk_gated_delta_rule

torch.manual_seed(0)
q, k, v = (torch.randn(1, 64, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
k, beta = torch.nn.functional.normalize(k, dim=-1), torch.rand(1, 64, 1, device="cuda")
g = -torch.rand(1, 64, 1, device="cuda") / 8
g[:, 20] = float("-inf")
print(chunk_gated_delta_rule(q, k, v, g, beta)[0].isnan().sum().item())  # 0 is expected
