"""``python -m linattn`` is the ``linattn`` command."""

from .cli import main

main()
