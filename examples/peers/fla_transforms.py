# flash-linear-attention 0.6.0: chunk_gla cannot be compiled as one graph, exported or mapped.
import torch
from fla.ops.gla import chunk_gla

x = [-torch.rand(1, 64, 2, 32, device="cuda") for _ in range(4)]
model, twice = torch.nn.Module(), [torch.stack([y, y]) for y in x]
model.forward = attend = lambda *x: chunk_gla(*x)[0]
compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
for call in (lambda: compiled(*x), lambda: torch.export.export(model, tuple(x)), lambda: torch.func.vmap(attend)(*twice)):
    try:
        print(call() is not None)  # True is expected of all
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
