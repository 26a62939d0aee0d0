"""The controls of sanitizers, on NumPy: their results, and that no barrier is waited for in vain."""

import sys
from pathlib import Path

import gluon_on_numpy
import pytest

sys.path.append(str(Path(__file__).parents[1] / "triton_device"))

from controls import CONTROLS


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_is_right(name):
    CONTROLS[name].check("cpu", lambda kernel, given, TILE: gluon_on_numpy.run(kernel, 1, given, {"TILE": TILE}))
