# flash-linear-attention 0.6.0: the backward of chunk_gla does not compile for values narrower than 16.
import torch
from fla.ops.gla import chunk_gla

for V in (16, 8):
    q, k, v, g = (torch.randn(1, 64, 2, n, device="cuda") for n in (32, 32, V, 32))
    o, _ = chunk_gla(q.requires_grad_(), k, v, -g.abs())
    try:
        print(V, torch.autograd.grad(o.sum(), q)[0].norm().item() > 0)  # True is expected of both
    except Exception as error:
        print(V, type(error).__name__, str(error).splitlines()[-1])
