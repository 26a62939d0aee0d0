"""Calls of the kernels of ``partitions.py``. ``python controls.py NAME`` runs one on a GPU, for a sanitizer to look at.

They are right, so a tool that reports one does not follow what it has, and what the tool reports of another kernel that has
this, too, says nothing. Numbers are whole and few, and so are all sums: results are exact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import partitions
import torch
from torch import Tensor

TILES = 50


@dataclass(frozen=True)
class Control:
    """A kernel, what it makes of ``x [TILES, …]`` and ``y``, and their shape and dtype."""

    kernel: Any
    result: Callable[[Tensor, Tensor], Tensor]
    shape: tuple[int, ...] = (128,)
    dtype: torch.dtype = torch.float32

    def arrays(self, device: str) -> tuple[Tensor, Tensor]:
        """``x`` and ``y``."""
        torch.manual_seed(0)
        return tuple(torch.randint(-4, 5, shape).to(device, self.dtype) for shape in ((TILES, *self.shape), self.shape))

    def check(self, device: str, launch: Callable[..., None]) -> None:
        """Run the kernel by ``launch(kernel, arguments, TILE)``, and compare."""
        x, y = self.arrays(device)
        out = torch.full(self.shape, float("nan"), device=device)
        launch(self.kernel, (x, y, out, TILES), self.shape[0])
        torch.testing.assert_close(out, self.result(x.float(), y.float()), rtol=0, atol=0)


MATRICES = {"shape": (64, 64), "dtype": torch.bfloat16}
CONTROLS = {
    "handover": Control(partitions.handover_control, lambda x, y: x.sum(0)),
    "ring": Control(partitions.ring_control, lambda x, y: x.sum(0)),
    "captures": Control(partitions.captures_control, lambda x, y: x.sum(0) + len(x) * y[:48].sum()),
    "third": Control(partitions.third_control, lambda x, y: 2 * x.sum(0)),
    "copies": Control(partitions.copies_control, lambda x, y: x.sum(0)),
    "copies and stores": Control(partitions.copies_and_stores_control, lambda x, y: x.sum(0) + len(x) * y),
    "sums": Control(partitions.sums_control, lambda x, y: x.sum(0) + x.sum()),
    "product": Control(partitions.product_control, lambda x, y: y @ x.sum(0), **MATRICES),
    "product of copies": Control(partitions.product_of_copies_control, lambda x, y: y @ x.sum(0), **MATRICES),
}
"""By what a kernel has besides two partitions."""


def main() -> None:
    """Run one in four programs."""
    control = CONTROLS[sys.argv[1]]
    control.check("cuda", lambda kernel, given, TILE: kernel[(4,)](*given, TILE=TILE, num_warps=4))
    print('{"ok": true}')


if __name__ == "__main__":
    main()
