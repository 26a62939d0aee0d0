"""A small call for each road that a call may take through the Triton backend on a Hopper GPU.

Which kernels serve a call depends on its widths, its heads, its lengths, its gates and on what is asked of it. Here stands one
call for each choice, small enough for a sanitizer, with what is not aligned in it: lengths off every chunk, empty sequences,
tokens behind the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import linattn
import torch
import torch.nn.functional as F
from linattn.feature_maps import Hedgehog
from linattn.gates import Softplus
from torch import Tensor

Draw = Callable[["Lengths"], dict[str, Any]]


@dataclass(frozen=True)
class Lengths:
    """Of packed sequences, with ``behind`` tokens after the last; of ``batch`` equal ones, where that is given.

    Attributes:
        of: Tokens of each sequence.
        behind: Tokens that belong to none.
        batch: Sequences that are not packed, as long as ``of`` says.
    """

    of: tuple[int, ...]
    behind: int = 0
    batch: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens of an array."""
        return (self.batch, self.of[0]) if self.batch else (1, sum(self.of) + self.behind)

    @property
    def states(self) -> int:
        """How many there are."""
        return self.batch or len(self.of)

    @property
    def offsets(self) -> dict[str, Tensor]:
        """``cu_seqlens``, of packed sequences."""
        if self.batch:
            return {}
        return {"cu_seqlens": torch.tensor([0, *itertools.accumulate(self.of)], dtype=torch.int32)}


@dataclass(frozen=True)
class Road:
    """A call.

    Attributes:
        operator: Its name.
        draw: Makes the arrays for some lengths.
        lengths: Of its sequences.
        options: Its static keywords.
        trains: Whether gradients are asked for.
    """

    operator: str
    draw: Draw
    lengths: Lengths
    options: dict[str, Any] = field(default_factory=dict)
    trains: bool = True

    def arrays(self, device: str, seed: int = 0) -> dict[str, Any]:
        """Drawn on a device, by a seed."""
        torch.manual_seed(seed)
        with torch.device(device):
            return self.draw(self.lengths) | self.lengths.offsets

    def __call__(self, given: dict[str, Any], backend: str) -> dict[str, Tensor]:
        """Outputs and, where it trains, gradients by name; with states that an operator overwrites."""
        floats = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()}
        leaves = {name: x.detach().clone().requires_grad_(self.trains) for name, x in floats.items()}
        found = getattr(linattn, self.operator)(**given | leaves, **self.options, backend=backend)
        outputs = dict(zip(("o", "final_state"), found if isinstance(found, tuple) else (found,), strict=False))
        outputs = {name: x for name, x in outputs.items() if x is not None}
        if not self.trains:
            return outputs | {name: x for name, x in leaves.items() if name == "state"}
        torch.manual_seed(1)
        pulled = [torch.randn(x.shape, dtype=torch.float64).to(x) for x in outputs.values()]
        grads = torch.autograd.grad(list(outputs.values()), list(leaves.values()), pulled)
        return {name: x.detach() for name, x in outputs.items()} | {
            f"d{name}": x for name, x in zip(leaves, grads, strict=True)
        }


def half(*shape: int) -> Tensor:
    """Numbers of bfloat16."""
    return torch.randn(*shape).bfloat16()


def unit(*shape: int) -> Tensor:
    """Rows of length 1 in bfloat16."""
    return F.normalize(torch.randn(*shape), dim=-1).bfloat16()


def delta(H: int, HV: int, K: int = 128, V: int = 128, gates: str = "head", strong: float = 1.0) -> Draw:
    """Arrays of the delta rule: without gates, with one a head (``"head"``) or one a channel (``"channel"``)."""

    def draw(lengths: Lengths) -> dict[str, Tensor]:
        shape = lengths.shape
        arrays = {
            "q": half(*shape, H, K),
            "k": unit(*shape, H, K),
            "v": half(*shape, HV, V),
            "beta": torch.rand(*shape, HV),
            "initial_state": torch.randn(lengths.states, HV, K, V),
        }
        of = {"head": (HV,), "channel": (HV, K)}.get(gates)
        return arrays if of is None else arrays | {"g": strong * F.logsigmoid(torch.randn(*shape, *of) + 2)}

    return draw


def raw_kda(H: int, K: int = 128) -> Draw:
    """Raw projections of Kimi's layer, which the operator maps itself."""

    def draw(lengths: Lengths) -> dict[str, Any]:
        shape = lengths.shape
        return {
            "q": half(*shape, H, K),
            "k": half(*shape, H, K),
            "v": half(*shape, H, K),
            "g": half(*shape, H, K),
            "beta": half(*shape, H),
            "initial_state": torch.randn(lengths.states, H, K, K),
            "gate": Softplus(torch.randn(H), torch.randn(H, K)),
        }

    return draw


def dplr(H: int, K: int, strong: float = 0.3) -> Draw:
    """Arrays of a transition that is diagonal plus low rank, as RWKV-7 has it."""

    def draw(lengths: Lengths) -> dict[str, Tensor]:
        rows = (*lengths.shape, H, K)
        key = F.normalize(torch.randn(*rows), dim=-1)
        return {
            "q": half(*rows),
            "k": half(*rows),
            "v": half(*rows),
            "a": -key,
            "b": key * torch.rand(*rows),
            "g": -strong * torch.rand(*rows),
            "initial_state": torch.randn(lengths.states, H, K, K),
        }

    return draw


def diagonal(H: int, HV: int, K: int, V: int, gates: str = "", bonus: bool = False) -> Draw:
    """Arrays of a family whose state decays: not at all, a head (``"head"``) or a channel (``"channel"``) at a time."""

    def draw(lengths: Lengths) -> dict[str, Tensor]:
        shape = lengths.shape
        arrays = {
            "q": half(*shape, H, K),
            "k": half(*shape, H, K),
            "v": half(*shape, HV, V),
            "initial_state": torch.randn(lengths.states, HV, K, V),
        }
        of = {"head": (HV,), "channel": (HV, K)}.get(gates)
        if of is not None:
            arrays["g"] = F.logsigmoid(torch.randn(*shape, *of) + 2)
        return arrays | ({"u": torch.randn(HV, K)} if bonus else {})

    return draw


def alone(H: int, K: int) -> Draw:
    """Queries, keys and values."""

    def draw(lengths: Lengths) -> dict[str, Tensor]:
        rows = (*lengths.shape, H, K)
        return {"q": half(*rows), "k": half(*rows), "v": half(*rows)}

    return draw


def normalised(H: int, K: int) -> Draw:
    """Positive features, for a call that divides by their sums."""

    def draw(lengths: Lengths) -> dict[str, Any]:
        return alone(H, K)(lengths) | {"feature_map": Hedgehog(torch.randn(H, K, K // 2) / K**0.5)}

    return draw


def mamba(H: int, HV: int, N: int = 128, P: int = 64) -> Draw:
    """Mamba-2's arrays, skip and gate among them."""

    def draw(lengths: Lengths) -> dict[str, Tensor]:
        shape = lengths.shape
        return {
            "x": half(*shape, HV, P),
            "dt": half(*shape, HV),
            "A": -4 * torch.rand(HV),
            "B": half(*shape, H, N),
            "C": half(*shape, H, N),
            "D": torch.randn(HV),
            "z": half(*shape, HV, P),
            "dt_bias": torch.randn(HV) - 2,
            "initial_state": torch.randn(lengths.states, HV, N, P),
        }

    return draw


def convolved(D: int, W: int) -> Draw:
    """A filter of ``W`` taps for each of ``D`` channels."""

    def draw(lengths: Lengths) -> dict[str, Tensor]:
        arrays = {"x": half(*lengths.shape, D), "weight": torch.randn(D, W), "bias": torch.randn(D)}
        return arrays | {"initial_state": half(lengths.states, D, W - 1)}

    return draw


def normed(D: int) -> Draw:
    """Rows, their gates and one weight a channel."""

    def draw(lengths: Lengths) -> dict[str, Tensor]:
        return {"x": half(*lengths.shape, D), "z": half(*lengths.shape, D), "weight": torch.randn(D)}

    return draw


def decoded(draw: Draw) -> Draw:
    """One token of each sequence, with a pool of states in the place of first ones."""

    def drawn(lengths: Lengths) -> dict[str, Any]:
        arrays = draw(lengths)
        pool = arrays.pop("initial_state")
        order = torch.randperm(lengths.states)
        return arrays | {"state": pool, "state_indices": torch.where(order == 0, -1, order)}

    return drawn


KEEP = {"output_final_state": True}
RAW = {"qk_norm": "l2", "beta_map": "sigmoid"}
SHORT = Lengths((64, 1, 130, 64, 200, 0, 63, 65))
UNEVEN = Lengths((2100, 64, 1, 700, 0), behind=35)
MANY = Lengths((33,) * 40)
CROWD = Lengths((64, 1, 130, 0, 33, 70) * 12, behind=5)
LONG = Lengths((4096,))
ROWS = Lengths((300,), batch=2)
TOKENS = Lengths((1,), batch=24)
FULL = 128
"""Channels of keys and values for which there are kernels of their own."""

ROADS = {
    "delta: many heads": Road("chunk_gated_delta_rule", delta(16, 16), SHORT, KEEP, trains=False),
    "delta: many heads, no gate, tokens behind": Road(
        "chunk_delta_rule", delta(32, 32, gates=""), Lengths((70, 128, 1, 190), behind=9), KEEP, trains=False
    ),
    "delta: few heads, cut": Road("chunk_gated_delta_rule", delta(2, 4), LONG, KEEP),
    "delta: few heads, cut, for values alone": Road("chunk_gated_delta_rule", delta(2, 4), LONG, KEEP, trains=False),
    "delta: uneven": Road("chunk_gated_delta_rule", delta(4, 8), UNEVEN, KEEP),
    "delta: uneven, for values alone": Road("chunk_gated_delta_rule", delta(4, 8), UNEVEN, KEEP, trains=False),
    "delta: short sequences": Road("chunk_gated_delta_rule", delta(2, 4), MANY, KEEP),
    "delta: crowd": Road("chunk_gated_delta_rule", delta(4, 8), CROWD, KEEP),
    "delta: crowd, for values alone": Road("chunk_gated_delta_rule", delta(4, 8), CROWD, KEEP, trains=False),
    "delta: crowd of rows": Road("chunk_gated_delta_rule", delta(4, 4), Lengths((100,), batch=80), KEEP),
    "delta: crowd of rows, for values alone": Road(
        "chunk_delta_rule", delta(4, 4, gates=""), Lengths((100,), batch=80), KEEP, trains=False
    ),
    "delta: wide keys": Road("chunk_gated_delta_rule", delta(1, 1, K=256), Lengths((1100,), batch=1), KEEP),
    "delta: narrow": Road("chunk_delta_rule", delta(2, 2, K=64, V=64, gates=""), ROWS, KEEP),
    "kda": Road("chunk_kda", delta(4, 4, gates="channel"), SHORT, KEEP),
    "kda: cut": Road("chunk_kda", delta(2, 2, gates="channel"), LONG, KEEP),
    "kda: crowd": Road("chunk_kda", delta(4, 4, gates="channel"), CROWD, KEEP),
    "kda: strong gates": Road("chunk_kda", delta(4, 4, gates="channel", strong=8.0), SHORT, KEEP),
    "kda: raw projections": Road("chunk_kda", raw_kda(4), SHORT, KEEP | RAW),
    "kda: raw projections, for values alone": Road("chunk_kda", raw_kda(4), SHORT, KEEP | RAW, trains=False),
    "dplr": Road("chunk_dplr", dplr(4, FULL), SHORT, KEEP),
    "dplr: crowd": Road("chunk_dplr", dplr(4, FULL), CROWD, KEEP),
    "dplr: 64 channels": Road("chunk_dplr", dplr(4, 64), SHORT, KEEP),
    "dplr: 64 channels, rows": Road("chunk_dplr", dplr(4, 64), ROWS, KEEP),
    "dplr: strong gates": Road("chunk_dplr", dplr(4, 64, strong=8.0), SHORT, KEEP),
    "linear_attn": Road("chunk_linear_attn", diagonal(4, 4, FULL, FULL), SHORT, KEEP),
    "linear_attn: all tokens": Road("chunk_linear_attn", alone(4, 64), ROWS, {"causal": False}),
    "linear_attn: learned features, divided": Road("chunk_linear_attn", normalised(2, 64), ROWS, {"normalize": True}),
    "linear_attn: crowd": Road("chunk_linear_attn", diagonal(4, 4, FULL, FULL), CROWD, KEEP),
    "simple_gla": Road("chunk_simple_gla", diagonal(4, 4, FULL, FULL, "head"), SHORT, KEEP),
    "simple_gla: groups": Road("chunk_simple_gla", diagonal(1, 16, FULL, 64, "head"), ROWS, KEEP),
    "simple_gla: groups, full width": Road("chunk_simple_gla", diagonal(2, 16, FULL, FULL, "head"), ROWS, KEEP),
    "simple_gla: cut": Road("chunk_simple_gla", diagonal(4, 4, FULL, FULL, "head"), LONG, KEEP),
    "simple_gla: uneven": Road("chunk_simple_gla", diagonal(4, 4, FULL, FULL, "head"), UNEVEN, KEEP),
    "simple_gla: short sequences": Road("chunk_simple_gla", diagonal(4, 4, 64, 64, "head"), MANY, KEEP),
    "simple_gla: crowd": Road("chunk_simple_gla", diagonal(4, 4, FULL, FULL, "head"), CROWD, KEEP),
    "simple_gla: crowd of rows": Road("chunk_simple_gla", diagonal(4, 4, 64, 64, "head"), Lengths((100,), batch=80), KEEP),
    "gla": Road("chunk_gla", diagonal(4, 4, FULL, FULL, "channel"), SHORT, KEEP),
    "gla: cut": Road("chunk_gla", diagonal(4, 4, FULL, FULL, "channel"), LONG, KEEP),
    "gla: crowd": Road("chunk_gla", diagonal(4, 4, FULL, FULL, "channel"), CROWD, KEEP),
    "rwkv6": Road("chunk_rwkv6", diagonal(2, 2, 64, 64, "channel", bonus=True), SHORT, KEEP),
    "ssd": Road("chunk_ssd", mamba(1, 8), Lengths((700,), batch=2), KEEP | {"dt_softplus": True}),
    "ssd: cut": Road("chunk_ssd", mamba(1, 8), Lengths((4096,), batch=1), KEEP | {"dt_softplus": True}),
    "ssd: packed": Road("chunk_ssd", mamba(2, 8), SHORT, KEEP | {"dt_softplus": True}),
    "ssd: crowd": Road("chunk_ssd", mamba(2, 8), CROWD, KEEP | {"dt_softplus": True}),
    **{
        f"short_conv: {W} taps": Road("short_conv", convolved(384, W), SHORT, KEEP | {"activation": "silu"})
        for W in (2, 4, 5, 8)
    },
    "gated_rms_norm": Road("gated_rms_norm", normed(2048), Lengths((70,), batch=2)),
    "gated_rms_norm: gate first, groups": Road(
        "gated_rms_norm", normed(2048), Lengths((70,), batch=2), {"norm_before_gate": False, "group_size": 128}
    ),
    "decode_gated_delta_rule": Road("decode_gated_delta_rule", decoded(delta(4, 8)), TOKENS, trains=False),
    "decode_kda": Road("decode_kda", decoded(raw_kda(4)), TOKENS, RAW, trains=False),
    "decode_gla": Road("decode_gla", decoded(diagonal(4, 4, FULL, FULL, "channel")), TOKENS, trains=False),
    "decode_ssd": Road("decode_ssd", decoded(mamba(1, 8)), TOKENS, {"dt_softplus": True}, trains=False),
    "decode_short_conv": Road("decode_short_conv", decoded(convolved(384, 4)), TOKENS, {"activation": "silu"}, trains=False),
}
