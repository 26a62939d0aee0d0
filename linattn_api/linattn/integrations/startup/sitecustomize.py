"""Runs at the start of every Python under ``linattn run-with``: enables an integration once its library is imported.

Python imports the first ``sitecustomize`` it finds, so this one lets the next have its turn.
"""

import importlib
import logging
import os
import sys
from pathlib import Path
from types import ModuleType

HERE = str(Path(__file__).parent)


def enable(library: ModuleType) -> None:
    """Enable the integration of a library that has been imported."""
    importlib.import_module(f"linattn.integrations.{library.__name__}").enable()


def start() -> None:
    """Wait for the libraries that the environment names, and let ``linattn.integrations`` be read on stderr."""
    try:
        from linattn.integrations.run_with import ENVIRONMENT_VARIABLE
        from linattn.integrations.seams import AfterImport, logger
    except ModuleNotFoundError as error:  # another Python than that of the command
        if error.name != "linattn":
            raise
        print(f"linattn run-with: linattn is not installed for {sys.executable}, which runs without it", file=sys.stderr)
        return
    names = frozenset(os.environ.get(ENVIRONMENT_VARIABLE, "").split(","))
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("linattn: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    AfterImport(names.__contains__, enable).install()


def next_sitecustomize() -> None:
    """The one that this hides, if there is one."""
    sys.path[:] = [entry for entry in sys.path if entry != HERE]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if mine is not None:
            sys.modules["sitecustomize"] = mine


start()
next_sitecustomize()
