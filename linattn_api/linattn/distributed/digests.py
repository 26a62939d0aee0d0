# pyright: basic
"""What ranks exchange has a digest behind it, of the plan and the call it is for: ranks that disagree are found with no message
of their own, and without a wait for a device.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

__all__ = ["Doubt", "differ", "digest", "signed", "spoilt"]


@functools.lru_cache(maxsize=1024)
def digest(call: str, plan: str) -> int:
    """64 bits that tell what is said of a call and its plan from anything else; the same in every process."""
    said = hashlib.blake2b(f"{call}; {plan}".encode(), digest_size=8).digest()
    return int.from_bytes(said, "little", signed=True)


def signed(number: int, like: Tensor) -> Tensor:
    """The bits of a digest, as an array of the dtype and on the device of another."""
    return like.new_full((1,), number, dtype=torch.int64).view(like.dtype)


def differ(found: Tensor, number: int) -> Tensor:
    """Whether one of the digests ``[ranks, …]``, of any dtype, is another: a truth on their device."""
    return (found.contiguous().view(torch.int64) != number).any()


def spoilt(x: Tensor, odd: Tensor) -> Tensor:
    """The array itself; where digests are others nothing may be made of it: it is NaN, and the lowest of integers."""
    return x.masked_fill_(odd, torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).min)


class Doubt:
    """Whether digests were ever others, told to the host by a device in its own time.

    Attributes:
        ever: On the device.
        told: What the host knows of it, in memory that the device writes to.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.ever = torch.zeros((), dtype=torch.uint8, device=device)
            self.told = torch.zeros((), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._read = self.told.numpy()  # which takes a tenth of the time of asking a tensor

    def __bool__(self) -> bool:
        return bool(self._read)

    def add(self, odd: Tensor) -> None:
        """Digests of one more exchange."""
        self.ever.logical_or_(odd)
        self.told.copy_(self.ever, non_blocking=True)
