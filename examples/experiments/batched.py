"""Models that learn side by side: one for each rate and seed, stacked, and called as one (``torch.func.vmap``).

Each learns what it would learn alone: its own data, its own norm of the gradient, its own rate. On a GPU their steps are
recorded and replayed.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from .graphs import Recorded
from .schedule import rise_and_fall

MARKS = 10
"""How often models are scored on validation data while they learn."""
DRAWING = threading.Lock()
"""Held by whoever draws from PyTorch's generator, which threads share."""
Carried = dict[str, Tensor]
"""The states that a segment leaves to the next one."""


class Batched:
    """A model for each pair of ``rates`` and ``seeds``, in that order, made by ``make`` after its seed was set."""

    def __init__(
        self, make: Callable[[], nn.Module], rates: tuple[float, ...], seeds: list[int], steps: int, device: str = "cpu"
    ) -> None:
        self.members = [(rate, seed) for rate in rates for seed in seeds]
        self.seeds, self.device = seeds, device
        models = [seeded(make, seed).to(device) for _, seed in self.members]
        self.parameters, self.buffers = stack_module_state(models)  # type: ignore[arg-type]
        self.count = sum(p.numel() for p in models[0].parameters())
        self.model = copy.deepcopy(models[0]).to("meta")
        each = len(seeds)
        # Views of the stacked parameters, so that every rate has a group of its own.
        self.views = [[p.detach()[i * each : (i + 1) * each] for p in self.parameters.values()] for i in range(len(rates))]
        # Rates are arrays, so that a recorded step reads what the schedule writes.
        speeds = [torch.tensor(rate, device=device) for rate in rates]
        groups = [{"params": views, "lr": speed} for views, speed in zip(self.views, speeds, strict=True)]
        recorded = on_gpu(device)
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=recorded)
        self.schedule = LambdaLR(self.optimiser, lambda step: rise_and_fall(step / steps))
        self.recorded = Recorded() if recorded else None

    def step(self, batches: list[tuple[Tensor, Tensor]], carried: Carried | None) -> tuple[Tensor, Carried]:
        """One step of all, given a batch for each seed. Returns the losses, and the states after it."""
        ids, targets = (self._by_member(parts) for parts in zip(*batches, strict=True))
        given = {"ids": ids, "targets": targets, **(carried or {})}
        found = self.recorded(self.learn, **given) if self.recorded else self.learn(**given)
        self.schedule.step()
        return found

    def learn(self, ids: Tensor, targets: Tensor, **carried: Tensor) -> tuple[Tensor, Carried]:
        """The same of tokens ``[members, B, T]``; where the schedule stands is left to it."""
        gradients, (losses, after) = vmap(self._gradients)(self.parameters, self.buffers, ids, targets, carried)
        each = len(self.seeds)
        for i, views in enumerate(self.views):
            for view, gradient in zip(views, gradients.values(), strict=True):
                view.grad = gradient[i * each : (i + 1) * each]
        self.optimiser.step()
        return losses, after

    def _by_member(self, parts: tuple[Tensor, ...]) -> Tensor:
        """``[members, …]`` of what each seed has."""
        return torch.stack(parts).to(self.device).repeat(len(self.members) // len(self.seeds), *[1] * parts[0].ndim)

    def _gradients(self, parameters: Any, buffers: Any, ids: Tensor, targets: Tensor, carried: Carried) -> Any:
        def loss(parameters: Any) -> tuple[Tensor, Carried]:
            logits, after = functional_call(self.model, (parameters, buffers), (ids, carried))
            return nats(logits, targets).sum() / (targets >= 0).sum(), after

        gradients, (value, after) = grad_and_value(loss, has_aux=True)(parameters)
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        clip = (1 / (norm + 1e-6)).clamp(max=1.0)
        return {name: g * clip for name, g in gradients.items()}, (value, {name: x.detach() for name, x in after.items()})

    @torch.no_grad()
    def read(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Nats of each target, and whether it came first, of the same tokens read by all: ``[members, B, T]`` each."""

        def one(parameters: Any, buffers: Any) -> tuple[Tensor, Tensor]:
            logits, _ = functional_call(self.model, (parameters, buffers), (ids, {}))
            return nats(logits, targets), logits.argmax(-1) == targets

        return vmap(one)(self.parameters, self.buffers)


def nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each target ``[B, T]``, zero where it is negative."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.mT, targets, reduction="none", ignore_index=-100)


def on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with DRAWING:
        torch.manual_seed(seed)
        return make()


def train(
    make: Callable[[], nn.Module], task: Any, rates: tuple[float, ...], seeds: list[int], steps: int, device: str = "cpu"
) -> list[dict[str, Any]]:
    """Runs, one for each rate and seed: figures of validation and test data, and of validation data on the way."""
    models = Batched(make, rates, seeds, steps, device)
    streams: list[Iterator[tuple[Tensor, Tensor, bool]]] = [task.batches(seed) for seed in seeds]
    carried: Carried | None = None
    course: list[list[dict[str, Any]]] = []
    began = time.perf_counter()
    for step in range(1, steps + 1):
        batches = [next(stream) for stream in streams]
        if batches[0][2]:
            carried = None
        _, carried = models.step([(ids, targets) for ids, targets, _ in batches], carried)
        if step * MARKS // steps > (step - 1) * MARKS // steps:
            course.append(scores(models, task, "validation"))
    last, seconds = scores(models, task, "test"), time.perf_counter() - began
    speed = round(len(models.members) * steps * task.batch * task.tokens / seconds)
    return [
        {"rate": rate, "seed": seed, "steps": steps, "parameters": models.count, "tokens per second": speed,
         "validation": course[-1][i], "test": last[i], "course": [at[i] for at in course]}
        for i, (rate, seed) in enumerate(models.members)
    ]  # fmt: skip


def scores(models: Batched, task: Any, part: str) -> list[dict[str, float | None]]:
    """The task's figures for each member; ``None`` where one is not finite."""
    ids, targets = (x.to(models.device) for x in task.held_out(part))
    rows = max(1, 65536 // (ids.shape[1] * len(models.members)))
    read = [models.read(*some) for some in zip(ids.split(rows), targets.split(rows), strict=True)]
    lost, right = (torch.cat(parts, 1).cpu() for parts in zip(*read, strict=True))
    found = (task.figures(lost[i], right[i], targets.cpu()) for i in range(len(models.members)))
    return [{name: x if math.isfinite(x) else None for name, x in one.items()} for one in found]
