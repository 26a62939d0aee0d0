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
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from .graphs import Recorded
from .schedule import rise_and_fall

MARKS = 10
"""How often models are scored on validation data while they learn."""
DRAWING = threading.Lock()
"""Held by whoever draws from PyTorch's generator, which threads share."""
Carried = dict[str, Tensor]
"""The states that a segment leaves to the next one."""
Member = tuple[float, int]
"""A rate and a seed."""
Scores = dict[str, float | None]


class Batched:
    """A model for each pair of ``rates`` and ``seeds``, in that order, made by ``make`` after its seed was set."""

    def __init__(
        self, make: Callable[[], nn.Module], rates: tuple[float, ...], seeds: tuple[int, ...], steps: int, device: str = "cpu"
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
        # Rates are an array, so that a recorded step reads what the schedule writes.
        self.rates = torch.tensor(rates, device=device)
        self.speeds, self.steps, self.taken = torch.zeros_like(self.rates), steps, 0
        groups = [{"params": views, "lr": self.speeds[i]} for i, views in enumerate(self.views)]
        recorded = on_gpu(device)
        self.optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=recorded)
        self.recorded = Recorded() if recorded else None

    def step(self, batches: list[tuple[Tensor, Tensor]], carried: Carried | None) -> tuple[Tensor, Carried]:
        """One step of all, given a batch for each seed. Returns the losses, and the states after it."""
        torch.mul(self.rates, rise_and_fall(self.taken / self.steps), out=self.speeds)
        self.taken += 1
        ids, targets = (torch.stack(parts) for parts in zip(*batches, strict=True))
        given = {"ids": ids, "targets": targets, **(carried or {})}
        return self.recorded(self.learn, **given) if self.recorded else self.learn(**given)

    def learn(self, ids: Tensor, targets: Tensor, **carried: Tensor) -> tuple[Tensor, Carried]:
        """The same of tokens ``[seeds, B, T]``; where the schedule stands is left to it."""
        each = len(self.seeds)
        ids, targets = (x.repeat(len(self.views), 1, 1) for x in (ids, targets))
        gradients, (losses, after) = vmap(self._gradients)(self.parameters, self.buffers, ids, targets, carried)
        for i, views in enumerate(self.views):
            for view, gradient in zip(views, gradients.values(), strict=True):
                view.grad = gradient[i * each : (i + 1) * each]
        self.optimiser.step()
        return losses, after

    def called(self, parameters: Any, buffers: Any, ids: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
        """What one model says; of a ``half`` one with its parameters as bfloat16, which are kept and updated in float32."""
        if self.model.half:
            parameters = {name: p.bfloat16() for name, p in parameters.items()}
        return functional_call(self.model, (parameters, buffers), (ids, carried))

    def _gradients(self, parameters: Any, buffers: Any, ids: Tensor, targets: Tensor, carried: Carried) -> Any:
        def loss(parameters: Any) -> tuple[Tensor, Carried]:
            logits, after = self.called(parameters, buffers, ids, carried)
            return nats(logits, targets).sum() / (targets >= 0).sum(), after

        gradients, (value, after) = grad_and_value(loss, has_aux=True)(parameters)
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        clip = (1 / (norm + 1e-6)).clamp(max=1.0)
        return {name: g * clip for name, g in gradients.items()}, (value, {name: x.detach() for name, x in after.items()})

    def wait(self) -> None:
        """For what was launched."""
        if self.recorded:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Take no step any more."""
        self.wait()
        if self.recorded:
            self.recorded.forget()

    @torch.no_grad()
    def read(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Nats of each target, and whether it came first, of the same tokens read by all: ``[members, B, T]`` each."""

        def one(parameters: Any, buffers: Any) -> tuple[Tensor, Tensor]:
            logits, _ = self.called(parameters, buffers, ids, {})
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


class OutOfTime(Exception):
    """Training that would not end before its deadline."""


def train(
    make: Callable[[], nn.Module],
    task: Any,
    rates: tuple[float, ...],
    seeds: tuple[int, ...],
    steps: int,
    device: str = "cpu",
    enough: Callable[[list[Member], list[Scores]], bool] = lambda members, scores: False,
    deadline: float = math.inf,
) -> list[dict[str, Any]]:
    """Runs, one for each rate and seed: figures of validation and test data, and of validation data on the way.

    Scored on the way they may have learned ``enough``, and stop there. ``deadline`` is of ``time.time``.
    """
    with closing(Batched(make, rates, seeds, steps, device)) as models:
        streams: list[Iterator[tuple[Tensor, Tensor, bool]]] = [task.batches(seed, device) for seed in seeds]
        carried: Carried | None = None
        course: list[list[Scores]] = []
        clock = Clock(steps, deadline, models.wait)
        clock.tick(0)
        for step in range(1, steps + 1):
            batches = [next(stream) for stream in streams]
            if batches[0][2]:
                carried = None
            _, carried = models.step([(ids, targets) for ids, targets, _ in batches], carried)
            clock.tick(step)
            if step * MARKS // steps > (step - 1) * MARKS // steps:
                course.append(scores(models, task, "validation"))
                if enough(models.members, course[-1]):
                    break
        last, seconds = scores(models, task, "test"), clock.seconds
        speed = round(len(models.members) * step * task.batch * task.tokens / seconds)
    text = task.text
    return [
        {"rate": rate, "seed": seed, "steps": steps, "taken": step, "parameters": models.count, "seconds": round(seconds, 2),
         "tokens per second": speed, "text": text, "validation": course[-1][i], "test": last[i],
         "course": [at[i] for at in course]}
        for i, (rate, seed) in enumerate(models.members)
    ]  # fmt: skip


class Clock:
    """Tells whether ``steps`` end before a deadline, once it has seen some: the first ones compile and record."""

    FIRST, MORE = 8, 32

    def __init__(self, steps: int, deadline: float, wait: Callable[[], None]) -> None:
        self.steps, self.deadline, self.wait = steps, deadline, wait
        self.began = self.since = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def tick(self, step: int) -> None:
        """Refuse to go on if what is left would take too long."""
        if step == 0 and time.time() > self.deadline:
            raise OutOfTime("its deadline is over")
        if step == self.FIRST:
            self.wait()
            self.since = time.perf_counter()
        elif step > self.FIRST and (step - self.FIRST) % self.MORE == 0 and self.deadline < math.inf:
            self.wait()
            each = (time.perf_counter() - self.since) / (step - self.FIRST)
            if time.time() + each * (self.steps - step) > self.deadline:
                raise OutOfTime(f"{self.steps} steps of {1e3 * each:.1f} ms")


def scores(models: Batched, task: Any, part: str) -> list[Scores]:
    """The task's figures for each member; ``None`` where one is not finite."""
    ids, targets = (x.to(models.device) for x in task.held_out(part))
    rows = max(1, 65536 // (ids.shape[1] * len(models.members)))
    read = [models.read(*some) for some in zip(ids.split(rows), targets.split(rows), strict=True)]
    lost, right = (torch.cat(parts, 1).cpu() for parts in zip(*read, strict=True))
    right = torch.where(lost.isfinite(), right.float(), math.nan)  # the largest of no numbers is the first
    found = (task.figures(lost[i], right[i], targets.cpu()) for i in range(len(models.members)))
    return [{name: x if math.isfinite(x) else None for name, x in one.items()} for one in found]
