"""What Mamba-2's parts compute, written down token by token from the papers, in float64 and without linattn.

Convolution: Gu & Dao 2023, §3.4. State-space duality: Dao & Gu 2024, eqs. 1 and 2 with ``Ā = exp(Δ A)`` and ``B̄ = Δ B``.
"""

import torch


def silu(x):
    return x / (1 + torch.exp(-x))


def convolution(x, weight, bias=None, before=None, activation=True):
    """``x [D, L]`` of one sequence, after the inputs ``before [D, W-1]``."""
    x, weight = x.double(), weight.double()
    D, W = weight.shape
    before = torch.zeros(D, W - 1).double() if before is None else before.double()
    longer = torch.cat([before, x], 1)
    y = torch.stack([(longer[:, t : t + W] * weight).sum(1) for t in range(x.shape[1])], 1)
    y = y if bias is None else y + bias.double()[:, None]
    return silu(y) if activation else y


def steps(dt, dt_bias=None, softplus=True, limit=(0.0, float("inf"))):
    """Step sizes ``[..., H]`` of their projections."""
    dt = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    return (torch.log1p(torch.exp(dt)) if softplus else dt).clamp(*limit)


def scan(x, delta, A, B, C, D=None, z=None, state=None):
    """``x [L, H, P]``, ``delta [L, H]``, ``B, C [L, G, N]`` of one sequence: ``(y, state [H, P, N])``."""
    x, A, B, C = x.double(), A.double(), B.double(), C.double()
    L, H, P = x.shape
    heads = H // B.shape[1]
    B, C = B.repeat_interleave(heads, 1), C.repeat_interleave(heads, 1)
    state = torch.zeros(H, P, B.shape[-1]).double() if state is None else state.double()
    y = []
    for t in range(L):
        decay = torch.exp(delta[t] * A)
        state = decay[:, None, None] * state + delta[t][:, None, None] * x[t][:, :, None] * B[t][:, None, :]
        y.append((state * C[t][:, None, :]).sum(-1))
    y = torch.stack(y) if y else x.new_zeros(0, H, P)
    if D is not None:
        y = y + (D.double() if D.dim() == 2 else D.double()[:, None]) * x
    return (y if z is None else y * silu(z.double())), state


def gated_norm(x, weight, z, eps, groups, before_gate):
    """RMS norm over groups of columns, with the gate after it or before it."""
    x, weight, z = x.double(), weight.double(), z.double()
    h = x if before_gate else x * silu(z)
    h = h.unflatten(-1, (groups, -1))
    h = (h / (h.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2) * weight
    return h * silu(z) if before_gate else h


def pieces(seq_idx):
    """Of one row's sequences, begin, end and number."""
    ids = seq_idx.tolist()
    begins = [t for t in range(len(ids)) if t == 0 or ids[t] != ids[t - 1]]
    return [(b, e, ids[b]) for b, e in zip(begins, [*begins[1:], len(ids)], strict=True)]


def close(got, expected, rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(got.double(), expected.double(), rtol=rtol, atol=atol)
