"""The recurrent form: the definition, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from .cores import Arrays, Scan


def step(x: Arrays, S: Tensor) -> tuple[Tensor, Tensor]:
    """One token: operands (and ``u``) ``[..., 1, W]``, ``S [..., K, V]``. Returns ``o [..., 1, V]`` and the new state."""
    q, k, v = x["q"], x["k"], x["v"]
    before = S
    if "g" in x:
        S = S * x["g"].exp().mT
    if "gv" in x:
        S = S * x["gv"].exp()
    if "beta" in x:
        v = x["beta"] * (v - k @ S)
    if "a" in x:
        S = S + x["b"].mT * (x["a"] @ before)
    S = S + k.mT * v
    if "u" in x:
        return q @ before + (q * x["u"] * k).sum(-1, keepdim=True) * v, S
    return q @ S, S


def forward(x: Arrays, lengths: list[int], scan: Scan) -> Tensor:
    """Outputs ``[M, C, V]`` of one segment; the operands are ``[Z, n, C, W]``."""
    u = x.get("u")
    tokens = {name: value for name, value in x.items() if name != "u"}
    o = torch.zeros_like(x["v"])
    for i, length in enumerate(lengths):
        S = scan.enter(i)
        for t in range(length):
            token = {name: value[:, i, t : t + 1] for name, value in tokens.items()}
            if u is not None:
                token["u"] = u[:, i]
            o[:, i, t : t + 1], S = step(token, S)
        scan.leave(i, S)
    return o.flatten(0, 1)
