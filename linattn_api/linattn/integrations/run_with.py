"""``linattn run-with``: a program that cannot be edited, with integrations enabled in it and in what it starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["ENVIRONMENT_VARIABLE", "LIBRARIES", "run_with"]

ENVIRONMENT_VARIABLE = "LINATTN_INTEGRATIONS"
LIBRARIES = ("transformers", "fla", "mamba_ssm", "causal_conv1d", "mlx_lm")
"""What has an integration that can be enabled."""

STARTUP = str(Path(__file__).parent / "startup")


def run_with(
    libraries: Annotated[str, typer.Argument(help=f"Of {', '.join(LIBRARIES)}; several with commas between them.")],
    command: Annotated[list[str], typer.Argument(help="After --: the program and its arguments, e.g. -- python train.py.")],
) -> None:
    """Run a program whose models use linattn: python train.py, torchrun, accelerate launch.

    An integration is enabled when its library is imported, in the program and in every Python that it starts.
    """
    names = libraries.split(",")
    if unknown := [name for name in names if name not in LIBRARIES]:
        raise typer.BadParameter(f"no integration for {', '.join(unknown)}: there are {', '.join(LIBRARIES)}")
    if shutil.which(command[0]) is None:
        raise typer.BadParameter(f"{command[0]}: no such program")
    path = os.pathsep.join([STARTUP, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execvpe(command[0], command, os.environ | {"PYTHONPATH": path, ENVIRONMENT_VARIABLE: ",".join(names)})
