"""Small backends that record what reached them."""

from __future__ import annotations

from linattn.plugin import Backend, Call, Unsupported


class Recorder(Backend):
    """Takes NumPy and PyTorch arrays; has only chunk_gla; returns its name's length everywhere so that callers know it."""

    name = "recorder"
    api = ">=1,<2"
    frameworks = ("numpy", "torch")

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.seen: dict[str, object] = {}

    def supports(self, call: Call) -> Unsupported | None:
        self.calls.append(call)
        return Unsupported(f"K must be at most 64, got {call.K}") if call.K and call.K > 64 else None

    def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        self.seen = locals()
        return v * 0 + len(self.name), initial_state


class Other(Recorder):
    name = "other"


def named(name: str, **attributes: object) -> type[Recorder]:
    return type(name.title(), (Recorder,), {"name": name, **attributes})


GOOD = """
from linattn.plugin import Backend

class Plugin(Backend):
    name = "{name}"
    api = "{api}"
    frameworks = ("numpy",)

    def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        return v, None
"""
"""The source of a plug-in as users install it."""
