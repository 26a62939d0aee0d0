# flash-linear-attention 0.6.0: fused_recurrent_delta_rule gives a wrong gradient of a beta per value channel where V > 32.
import torch
from fla.ops.delta_rule import fused_recurrent_delta_rule


def gradient(v, beta):
    leaf = beta.contiguous().requires_grad_()
    return torch.autograd.grad(fused_recurrent_delta_rule(q, k, v.contiguous(), leaf)[0].square().sum(), leaf)[0]


torch.manual_seed(0)
q, k, v, beta = (torch.rand(1, 8, 1, 64, device="cuda") / 8 for _ in range(4))
whole, half = gradient(v, beta), gradient(v[..., 32:], beta[..., 32:])  # value channels do not depend on each other
print("relative difference:", ((whole[..., 32:] - half).norm() / half.norm()).item())  # 0 is expected
