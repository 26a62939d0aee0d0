"""Continues a text with the model that ``train.py`` saved.

python examples/first_steps/generate.py model.pt "The import statement"
"""

import argparse

import linattn.nn
import torch

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("model", help="file that train.py wrote")
parser.add_argument("prompt")
parser.add_argument("--length", type=int, default=200, help="bytes to add")
options = parser.parse_args()

saved = torch.load(options.model)
model = linattn.nn.LanguageModel(**saved["arguments"])
model.load_state_dict(saved["weights"])

prompt = torch.tensor([list(options.prompt.encode())])
dice = torch.Generator().manual_seed(0)
written = model.generate(prompt, options.length, temperature=0.5, generator=dice)
print(bytes(written[0].tolist()).decode(errors="replace"))
