"""flash-linear-attention without the minutes of autotuning: of every kernel the first configuration that the GPU can launch.

``PYTHONPATH=examples/peers linattn conformance --backend first_configuration:FlaBackend --device cuda``

A kernel at another configuration is another program, and is not tried. Say so in the report:
``--environment "autotuner=first configuration of each kernel"``.
"""

from __future__ import annotations

from typing import Any

from triton.compiler.errors import CompileTimeAssertionFailure
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources, PTXASError

__all__ = ["FlaBackend"]


def run(self: Autotuner, *args: Any, **keywords: Any) -> Any:
    """In place of measuring the configurations: they are tried in order until one fits."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    failure: Exception | None = None
    for config in self.prune_configs(keywords):
        given = {**keywords, **config.all_kwargs()}
        try:
            if config.pre_hook is not None:
                config.pre_hook({**self.nargs, **given})
            return self.fn.run(*args, **given)
        except (OutOfResources, CompileTimeAssertionFailure, PTXASError) as error:
            failure = error
    raise failure or RuntimeError("no configuration is left to try")


Autotuner.run = run

from linattn_backends.fla import FlaBackend  # noqa: E402 - its kernels are to be made with what stands above
