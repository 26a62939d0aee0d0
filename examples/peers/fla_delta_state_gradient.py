# flash-linear-attention 0.6.0: fused_recurrent_delta_rule has no backward beside a state without gradient or contiguity.
import torch
from fla.ops.delta_rule import fused_recurrent_delta_rule

q, k, v = (torch.randn(1, 8, 2, 16, device="cuda") for _ in range(3))
beta, state = torch.rand(1, 8, 2, device="cuda"), torch.randn(1, 2, 16, 16, device="cuda")
for h in (state, state.clone().requires_grad_(), state.mT.requires_grad_()):
    try:
        o, _ = fused_recurrent_delta_rule(q.requires_grad_(), k, v, beta, initial_state=h)
        print(torch.autograd.grad(o.sum(), q)[0].norm().item() > 0)  # True is expected of all
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[-1])
