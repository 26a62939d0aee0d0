"""``linattn new-backend``: the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import LinattnError
from .project import FRAMEWORKS, Project, write

__all__ = ["new_backend"]


def new_backend(
    name: Annotated[str, typer.Argument(help="What users will call it, e.g. acme.")],
    framework: Annotated[str, typer.Option(help=f"Whose arrays it takes: {', '.join(FRAMEWORKS)}.")] = "torch",
    op: Annotated[
        list[str] | None, typer.Option(help="An operator to start with; repeat for more. Default: chunk_gla.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to write it; must not exist. Default: linattn-NAME.")] = None,
) -> None:
    """Write an installable plug-in project: a backend that is correct and slow, its tests, and a CI that runs conformance."""
    try:
        project = Project(name, framework, op or ["chunk_gla"])
        target = folder or Path(project.distribution)
        written = write(project, target)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"needs the package {error.name}: pip install 'linattn[conformance]'") from error
    except (LinattnError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    for path in written:
        print(target / path)
    print(
        f"\nNext:\n  cd {target}\n  python -m pip install -e '.[test]'\n  python -m pytest\n"
        f"  linattn conformance --backend {name} --profile core"
    )
