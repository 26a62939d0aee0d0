"""Checkpoints of a run: parameters and optimiser by ``torch.distributed.checkpoint``, which any number of ranks can load.

``{run}/{step}/`` has the state after that many steps, and ``record.json`` in it the options and what was measured until then.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def save(run: Path, step: int, model: nn.Module, optimiser: torch.optim.Optimizer, record: dict[str, Any]) -> None:
    """Write the state after ``step`` steps; every rank calls this."""
    folder = run / f"{step:08d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    parameters, moments = get_state_dict(model, optimiser)
    dcp.save({"model": parameters, "optimiser": moments}, checkpoint_id=folder)


def latest(run: Path) -> Path | None:
    """The last folder that was written to its end."""
    return max((path.parent for path in run.glob("*/.metadata")), default=None)


def record_of(folder: Path) -> dict[str, Any]:
    """Options, and what was measured."""
    return json.loads((folder / "record.json").read_text())


def load(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Take over a state, each rank its share; every rank calls this."""
    parameters, moments = get_state_dict(model, optimiser)
    dcp.load({"model": parameters, "optimiser": moments}, checkpoint_id=folder)
    set_state_dict(model, optimiser, model_state_dict=parameters, optim_state_dict=moments)
