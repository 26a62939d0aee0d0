"""Trains a byte-level language model of linear-attention layers, on one device or on many.

    python examples/train_lm/train.py --out runs/one
    torchrun --nproc-per-node 4 examples/train_lm/train.py --out runs/four --context 4

``--context`` ranks share the tokens of a sequence; the others have sequences of their own. Parameters and optimiser are
sharded over all of them. ``README.md`` beside this file says more.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import checkpoint
import data
import torch
import torch.distributed as dist
from linattn.distributed import context_parallel
from linattn.progress import bars
from model import KINDS, compile_blocks, language_model, loss, shard
from torch.distributed.device_mesh import init_device_mesh

FREE = ("out", "steps_now", "device", "context", "compile", "every")
"""Options that a resumed run may change."""


class Trainer:
    """A model, its optimiser, and this rank's place among the others.

    Attributes:
        options: Those of the command line.
        record: They, and what was measured: what checkpoints keep beside the state.
        step: Steps that are done.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        world = dist.get_world_size()
        self.contexts, self.parts = options.context, world // options.context
        check(options, world)
        mesh = init_device_mesh(device.type, (self.parts, self.contexts), mesh_dim_names=("data", "context"))
        self.place, self.part = mesh.get_local_rank("context"), mesh.get_local_rank("data")
        self.context = mesh["context"]
        training, held_out = data.documents(options.text)
        self.training, self.held_out = (
            data.Stream(texts, options.tokens, options.length, options.seed) for texts in (training, held_out)
        )
        torch.manual_seed(options.seed)
        self.model = language_model(options.model, options.width, options.depth, options.heads)
        self.model.to(device, torch.float64 if options.dtype == "float64" else torch.float32)
        if options.compile != "none":
            compile_blocks(self.model, options.compile, whole=self.contexts == 1)
        shard(self.model, init_device_mesh(device.type, (world,)))
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.record: dict[str, Any] = {"options": settings(options), "steps": [], "held_out": []}
        self.step = self.planned = 0

    def nats(self, pack: data.Pack) -> torch.Tensor:
        """Sum over this rank's tokens of a pack."""
        pack = data.part(pack, self.part, self.parts)
        tokens = len(pack.inputs) // self.contexts
        own = slice(self.place * tokens, (self.place + 1) * tokens)
        inputs, targets = (torch.from_numpy(x[own]).to(self.device) for x in (pack.inputs, pack.targets))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.dtype == "bfloat16"):
            return loss(self.model, inputs, targets, **self.where(pack.offsets))

    def where(self, offsets: tuple[int, ...]) -> dict[str, Any]:
        """What tells the model where documents lie; ranks compare their first plan."""
        if self.contexts == 1:
            return {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32, device=self.device)}
        self.planned += 1
        return {"context": context_parallel(self.context, offsets, check=self.planned == 1)}

    def bits_per_byte(self, nats: torch.Tensor, packs: int = 1) -> float:
        """Of the tokens of all ranks, from the sums of each."""
        total = nats.detach().clone()
        dist.all_reduce(total)
        return total.item() / (packs * self.options.tokens * math.log(2))

    def train(self) -> None:
        """One step."""
        started = time.perf_counter()
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.lr * rate(self.step, self.options.steps)
        nats = self.nats(self.training[self.step])
        (nats / self.options.tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        bits = self.bits_per_byte(nats)
        speed = round(self.options.tokens / (time.perf_counter() - started), 1)
        self.step += 1
        ranks = {"ranks": dist.get_world_size(), "context": self.contexts}
        self.record["steps"].append({"step": self.step, "bits_per_byte": bits, "tokens_per_second": speed, **ranks})

    @torch.no_grad()
    def validate(self) -> float:
        """Bits per byte of documents that are held out, four packs at most."""
        packs = min(4, self.held_out.packs)
        bits = self.bits_per_byte(sum(self.nats(self.held_out[number]) for number in range(packs)), packs)
        self.record["held_out"].append({"step": self.step, "bits_per_byte": bits})
        return bits

    def save(self) -> None:
        """Write a checkpoint."""
        checkpoint.save(self.options.out, self.step, self.model, self.optimiser, self.record)

    def resume(self) -> None:
        """Go on from the last checkpoint of the run, if there is one."""
        if not (folder := checkpoint.latest(self.options.out)):
            return
        self.record = checkpoint.record_of(folder)
        before, now = self.record["options"], settings(self.options)
        if others := [f"{name} {before[name]}, not {now[name]}" for name in now if before[name] != now[name]]:
            raise SystemExit(f"--resume: {folder} was made with {'; '.join(others)}")
        checkpoint.load(folder, self.model, self.optimiser)
        self.step = len(self.record["steps"])


def rate(step: int, steps: int) -> float:
    """A share of the highest learning rate: a short linear rise, then a cosine down to a tenth."""
    rise = max(1, min(200, steps // 10))
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise))


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options on which the loss depends."""
    return {name: value for name, value in vars(options).items() if name not in (*FREE, "resume")}


def check(options: argparse.Namespace, world: int) -> None:
    """Refuse sizes that do not go into each other."""
    if options.context < 1 or world % options.context:
        raise SystemExit(f"--context: expected a divisor of the {world} ranks, got {options.context}")
    own = options.tokens // (world // options.context)
    if options.tokens % world or own % options.length:
        raise SystemExit(
            f"--tokens: expected a multiple of the {world} ranks, and for each of {world // options.context} groups of them a "
            f"multiple of --length {options.length}, got {options.tokens}"
        )


def main() -> None:
    """Train, and write checkpoints, the record and the plot."""
    options = _options()
    device = start(options.device)
    try:
        run(Trainer(options, device))
    finally:
        dist.destroy_process_group()


def start(kind: str) -> torch.device:
    """Join the ranks that torchrun started, or be the only one."""
    name = "nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(name)
    else:
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def run(trainer: Trainer) -> None:
    """All steps that are left."""
    options, first = trainer.options, dist.get_rank() == 0
    if options.resume:
        trainer.resume()
    last = min(options.steps, options.steps_now or options.steps)
    with bars() as bar:
        bar.disable = bar.disable or not first
        task = bar.add_task("training", total=last, completed=trainer.step)
        while trainer.step < last:
            trainer.train()
            bar.update(task, completed=trainer.step)
            if trainer.step == last or trainer.step % options.every == 0:
                held_out = trainer.validate()
                trainer.save()
                if first:
                    row = trainer.record["steps"][-1]
                    print(
                        f"step {trainer.step}: {row['bits_per_byte']:.3f} bits per byte, {held_out:.3f} held out, "
                        f"{row['tokens_per_second']:,.0f} tokens/s",
                        flush=True,
                    )
    if first and trainer.record["steps"]:
        from plots import draw

        draw({options.out.name: trainer.record}, options.out / "curves.png")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the run: checkpoints, record and plot")
    add("--resume", action="store_true", help="go on from its last checkpoint, on any number of ranks")
    add("--text", default="library", help="topics, library, all, or a folder of text files; default library")
    add("--model", choices=KINDS, default="hybrid", help="default hybrid")
    add("--width", type=int, default=256, help="of the model; default 256")
    add("--depth", type=int, default=4, help="blocks; default 4")
    add("--heads", type=int, default=4, help="of a layer; default 4")
    add("--steps", type=int, default=1000, help="of the whole schedule; default 1000")
    add("--steps-now", type=int, help="stop after that many steps of it, to go on later")
    add("--tokens", type=int, default=8192, help="bytes of a step, over all ranks; default 8192")
    add("--length", type=int, default=2048, help="longer documents are cut at multiples of it; default 2048")
    add("--lr", type=float, default=3e-3, help="highest learning rate; default 3e-3")
    add("--seed", type=int, default=0, help="of the first parameters and the order of documents; default 0")
    add("--dtype", choices=["float32", "bfloat16", "float64"], default="float32", help="bfloat16 is autocast; default float32")
    add("--context", type=int, default=1, help="ranks that share the tokens of a sequence; default 1")
    add("--compile", default="none", help="backend of torch.compile, such as inductor, or none; default none")
    add("--every", type=int, default=100, help="steps between checkpoints; default 100")
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=["cpu", "cuda"], default=usual, help=f"default {usual}")
    return parser.parse_args()


if __name__ == "__main__":
    main()
