"""Loads a checkpoint of flash-linear-attention into ``linattn.nn``.

    python examples/first_steps/load_fla.py FOLDER

Where there is no such folder, fla makes a model of random weights first and saves it there.
"""

import argparse
import logging
import warnings
from pathlib import Path

warnings.simplefilter("ignore")  # fla and transformers tell of what is not installed
logging.disable(logging.WARNING)

import fla  # noqa: E402, F401 - transformers learns of fla's models
import linattn.nn  # noqa: E402
import torch  # noqa: E402
from fla.models import GatedDeltaNetConfig  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("checkpoint", type=Path, help="folder that fla's save_pretrained wrote")
options = parser.parse_args()

if not options.checkpoint.exists():
    torch.manual_seed(0)
    config = GatedDeltaNetConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_heads=2, head_dim=48)
    AutoModelForCausalLM.from_config(config).save_pretrained(options.checkpoint)

theirs = AutoModelForCausalLM.from_pretrained(options.checkpoint)
ours = linattn.nn.from_fla(theirs)

taken, there = (sum(p.numel() for p in model.parameters()) for model in (ours, theirs))
print(f"{taken:,} of {there:,} parameters of {type(theirs).__name__}")
written = ours.generate(torch.tensor([[0]]), 20)
print(f"it writes {written[0].tolist()}")
