"""``python -m linattn_conformance``: the same as ``linattn conformance``."""

import typer

from .cli import conformance

if __name__ == "__main__":
    typer.run(conformance)
