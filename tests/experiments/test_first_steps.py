"""The programs of docs/first-steps.md, cut short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parents[2] / "examples" / "first_steps"


def said(name: str, *words: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAMS / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_is_trained_and_writes(tmp_path):
    model = str(tmp_path / "model.pt")
    assert said("train.py", model, "--steps", "1").startswith("1 steps: 8.0")  # bits per byte of who knows nothing
    written = said("generate.py", model, "The import", "--length", "5")
    assert written.startswith("The import")
    assert said("generate.py", model, "The import", "--length", "5") == written


def test_a_checkpoint_of_fla_is_loaded(tmp_path):
    pytest.importorskip("fla.models", exc_type=ImportError, reason="flash-linear-attention is not installed")
    text = said("load_fla.py", str(tmp_path / "checkpoint"))
    assert text.startswith("660,296 of 660,296 parameters of GatedDeltaNetForCausalLM\nit writes [0, ")
    assert said("load_fla.py", str(tmp_path / "checkpoint")) == text
