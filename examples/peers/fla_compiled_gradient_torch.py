# PyTorch 2.11.0, no longer 2.13.0: compiled, an autograd.Function that returns what it saved loses the gradient.
import torch


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, y := torch.empty_like(x).copy_(x.exp()))
        return y, None

    @staticmethod
    def backward(ctx, dy, _):
        return ctx.saved_tensors[1] * dy


x = torch.zeros(3, requires_grad=True)
y = torch.compile(lambda x: Exp.apply(x)[0], backend="aot_eager", fullgraph=True)(x)
print(torch.autograd.grad(y.sum(), x)[0])  # 1, 1, 1 is expected
