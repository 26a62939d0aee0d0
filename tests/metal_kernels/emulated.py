"""The MLX backend with its Metal kernels emulated, for the conformance suite::

    PYTHONPATH=tests/metal_kernels linattn conformance --backend emulated:EmulatedBackend --case 'kda/recurrent/*'

Slow: every new shape is a program to build. Tests judge a selection of cases.
"""

import atexit
import shutil
import tempfile
from pathlib import Path

from emulator import Emulator
from linattn_backends.mlx import MlxBackend, metal, selection
from linattn_backends.mlx.metal import launch


class EmulatedBackend(MlxBackend):
    """Kernels for whatever fits them."""

    name = "emulated"

    def __init__(self):
        folder = tempfile.mkdtemp(prefix="linattn-metal-")
        atexit.register(shutil.rmtree, folder)
        launch.run = Emulator(Path(folder))
        selection.unfit = metal.unfit
