# FlashQLA 0.1.3: of packed sequences none may be empty. The code that decides on splitting says so; without it?
import torch
from flash_qla import chunk_gated_delta_rule

torch.manual_seed(0)
q, k, v = (torch.randn(1, 128, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
k, beta = torch.nn.functional.normalize(k, dim=-1), torch.rand(1, 128, 1, device="cuda")
g, offsets = -torch.rand(1, 128, 1, device="cuda"), torch.tensor([0, 64, 64, 128], device="cuda")
for auto_cp in (True, False):
    try:
        print(chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=offsets, auto_cp=auto_cp)[0].isfinite().all().item())
    except Exception as error:
        print(type(error).__name__, error)
