"""Every kernel compiles for Hopper: the interpreter, which runs all other tests, takes code that the compiler refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from linattn.spec import FAMILIES

pytest.importorskip("triton")


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile(family, tmp_path):
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script, family],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    plain, gluon, *mixed = (int(word) for word in re.findall(r"\d+", done.stdout))
    assert plain > (0 if family == "mixed_attn" else 3)
    assert mixed[0] > 10
    in_gluon = ("linear_attn", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda", "dplr")
    assert (gluon > 3) == (family in in_gluon)
