"""A byte-level language model of Gated DeltaNet layers, trained for 200 steps and saved.

python examples/first_steps/train.py model.pt
"""

import argparse
import math
from pydoc_data.topics import topics

import linattn.nn
import torch
from linattn.progress import bars
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("out", help="file that the model is saved in")
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
torch.manual_seed(0)

model = linattn.nn.LanguageModel(
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=2,
    mixer="GatedDeltaNet",
    mixer_options={"num_heads": 2, "head_dim": 48},
)
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

# what help("topics") lists, as bytes
text = torch.tensor(list("\n\n".join(topics.values()).encode()))
B, T = 8, 256
losses = []
with bars() as progress:
    for _ in progress.track(range(options.steps), description="training"):
        starts = torch.randint(len(text) - T, (B, 1))
        ids = text[starts + torch.arange(T + 1)]
        logits = model(ids[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item() / math.log(2))

few = min(10, options.steps)
first, last = (sum(part) / few for part in (losses[:few], losses[-few:]))
print(f"{len(losses)} steps: {first:.2f} bits per byte in the first {few}, {last:.2f} in the last {few}")
torch.save({"arguments": model.arguments, "weights": model.state_dict()}, options.out)
