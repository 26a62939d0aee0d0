# flash-linear-attention 0.6.0 with PyTorch 2.11: under torch.compile, the gradient of o is lost.
import torch
from fla.ops.gla import fused_recurrent_gla


def gradients(op):
    leaves = [x.clone().requires_grad_() for x in (q, k, v, -k.abs(), h)]
    o, state = op(*leaves[:4], initial_state=leaves[4], output_final_state=True)
    return torch.autograd.grad(o.square().sum() + state.square().sum(), leaves)


torch.manual_seed(0)
q, k, v = (torch.randn(2, 1, 2, 16, device="cuda") for _ in range(3))
h = torch.randn(2, 2, 16, 16, device="cuda")
compiled = torch.compile(fused_recurrent_gla, backend="aot_eager", fullgraph=True)
for name, x, y in zip(("q", "k", "v", "gk", "h"), gradients(compiled), gradients(fused_recurrent_gla), strict=True):
    print(name, ((x - y).norm() / y.norm()).item())  # 0 is expected of all
