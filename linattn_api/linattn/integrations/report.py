"""What ``linattn doctor`` says of the integrations: which libraries are here, and what of them linattn serves, and where."""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata

from .run_with import LIBRARIES

__all__ = ["show_integrations"]


def show_integrations() -> None:
    """Print a line for each library that has an integration, and for transformers one for each kind of model."""
    print("integrations: linattn.integrations.NAME.enable(), or linattn run-with NAME -- COMMAND")
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is None:
            print(f"{library}: not installed")
            continue
        try:
            lines = _lines(library)
        except Exception as error:  # a library that cannot be imported here must not hide the others
            lines = [f"cannot be imported: {type(error).__name__}: {error}"]
        for line in lines:
            print(f"{library}: {line}")


def _lines(library: str) -> list[str]:
    integration = importlib.import_module(f"linattn.integrations.{library}")
    if library == "transformers":
        version = metadata.version("transformers")
        return [f"{version}, {integration.where()}", *integration.lines()]
    names = sorted(name.rpartition(".")[2] for name in integration.FUNCTIONS)
    return [", ".join(names)]
