"""What is timed side by side: the backends of linattn, and the peers that are installed.

A peer is called only for the operators it has, with the arguments it documents, on the very arrays that the backends get.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from linattn.errors import BackendError
from linattn.ops._family import operator_named
from linattn.registry import registry

from .cases import Case
from .environment import installed
from .runners import RUNNERS, Arrays, Function, Runner


class Subject:
    """One implementation.

    Attributes:
        library: Who wrote it.
        backend: Which of linattn's backends; None for a peer.
        framework: Whose arrays it takes.
        checked: Whether it computes the same function, so that its results can be checked.
    """

    library: str
    backend: str | None = None
    framework: str = "torch"
    checked: bool = True

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.library}:{self.backend}" if self.backend else self.library

    def refusal(self, case: Case) -> str | None:
        """Why it is not timed for this case; None if it is."""
        return self.runner(case).refusal()

    def runner(self, case: Case) -> Runner:
        """Makes its arrays and times it."""
        return RUNNERS[self.framework](case.device)

    def function(self, case: Case) -> Function:
        """The call itself."""
        raise NotImplementedError

    def names(self, case: Case) -> list[str]:
        """The arrays it is given."""
        return [arg.name for arg in case.arrays]

    def given(self, case: Case, arrays: Arrays) -> Arrays:
        """The arrays as it wants them laid out, which is not timed."""
        return arrays

    def keywords(self, case: Case) -> dict[str, Any]:
        """What the call is told besides arrays: options, and where packed sequences begin."""
        packed = {"cu_seqlens": starts(self.framework, case.device, case.lengths)} if case.lengths else {}
        return packed | case.options

    def note(self, case: Case) -> str | None:
        """What a reader of its figures must know."""
        return None


@functools.lru_cache(maxsize=1)
def starts(framework: str, device: str, lengths: tuple[int, ...]) -> Any:
    """``cu_seqlens``: one array for every call of a case, of which libraries that keep what they make of it make it once."""
    return RUNNERS[framework](device).array(np.cumsum((0, *lengths), dtype=np.int32), "int32")


class Linattn(Subject):
    """One of linattn's backends, or its own choice: ``"auto"``."""

    library = "linattn"

    def __init__(self, backend: str, framework: str | None = None):
        self.backend = backend
        self.framework = framework or self.first_framework(backend)

    @staticmethod
    def first_framework(backend: str) -> str:
        """The first installed framework whose arrays the backend takes."""
        known = ("torch", "numpy") if backend == "auto" else registry.load(backend).frameworks
        return next((name for name in known if importlib.util.find_spec(name)), known[0])

    def function(self, case: Case) -> Function:
        operator, options, backend = operator_named(case.operator), self.keywords(case), self.backend
        if case.in_place:
            return lambda arrays: (operator(**arrays, **options, backend=backend), arrays["state"])
        return lambda arrays: operator(**arrays, **options, backend=backend)

    def plan(self, case: Case, arrays: Arrays) -> str:
        """The backend and method that run."""
        plan = operator_named(case.operator).explain(**arrays, **self.keywords(case), backend=self.backend)
        return f"{plan.backend}.{plan.method}"


class Peer(Subject):
    """Somebody else's implementation.

    Attributes:
        distribution: What to install.
        module: What is imported.
        kinds: The kinds of device it runs on.
        families: The families it has, to its own names.
        whats: What can be done with it.
    """

    distribution: str
    module: str
    kinds: tuple[str, ...] = ("cuda",)
    families: ClassVar[dict[str, str]]
    whats: tuple[str, ...] = ("fwd", "fwdbwd")

    def refusal(self, case: Case) -> str | None:
        if case.spec.name not in self.families:
            return f"has no {case.spec.name}"
        if case.what not in self.whats:
            return f"is not called for {case.what}"
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"{self.distribution} is not installed"
        if case.device not in self.kinds:
            return f"runs on {' or '.join(self.kinds)}, not on {case.device}"
        return super().refusal(case) or self.limits(case)

    def limits(self, case: Case) -> str | None:
        """Why it does not take this shape or dtype."""
        return None


def on_hopper() -> bool:
    """Whether the first CUDA device is one."""
    import torch

    return torch.cuda.get_device_capability()[0] == 9


class Fla(Peer):
    """flash-linear-attention: Triton."""

    library, distribution, module = "fla", "flash-linear-attention", "fla.ops"
    families: ClassVar = {
        "linear_attn": "linear_attn",
        "simple_gla": "simple_gla",
        "gla": "gla",
        "rwkv6": "rwkv6",
        "delta_rule": "delta_rule",
        "gated_delta_rule": "gated_delta_rule",
        "kda": "kda",
        "dplr": "dplr_delta_rule",
    }
    whats = ("fwd", "fwdbwd", "decode")
    refused = ("simple_gla", "gated_delta_rule")

    def limits(self, case: Case) -> str | None:
        if case.operator.startswith("parallel_"):
            return "is not called in parallel form"
        grouped = case.size["HV"] != case.size["H"]
        return "takes no grouped heads here" if grouped and case.spec.name != "gated_delta_rule" else None

    def function(self, case: Case) -> Function:
        recurrent = case.operator.startswith(("recurrent_", "decode_"))
        family = self.families[case.spec.name]
        package = "generalized_delta_rule" if case.spec.name == "dplr" else family
        name = f"{'fused_recurrent' if recurrent else 'chunk'}_{family}"
        operator = getattr(importlib.import_module(f"fla.ops.{package}"), name)
        renamed, extra = self.spelling(case, recurrent)
        if self.forced(case):
            force_fla()
        options = {"output_final_state": True} if case.in_place else self.keywords(case)
        return lambda arrays: operator(**{renamed.get(key, key): x for key, x in arrays.items()}, **extra, **options)

    def spelling(self, case: Case, recurrent: bool) -> tuple[dict[str, str], dict[str, Any]]:
        """Its names for our arguments, and what it must be told besides."""
        renamed = {
            "gla": {"g": "gk"} if recurrent else {},
            "dplr": {"g": "gk"},
            "rwkv6": {"q": "r", "g": "w"},
        }.get(case.spec.name, {})
        renamed |= {"state": "initial_state"}  # it returns a new one
        extra = {"normalize": False} if case.spec.name == "linear_attn" else {}
        return renamed, extra

    def forced(self, case: Case) -> bool:
        """Whether fla refuses this backward."""
        return case.spec.name in self.refused and case.what == "fwdbwd" and fla_refuses()

    def note(self, case: Case) -> str | None:
        return "fla refuses this backward with this Triton: timed with its check off" if self.forced(case) else None


def fla_refuses() -> bool:
    """Whether fla refuses backward passes with a scalar decay: on Hopper, with Triton releases that compile them wrongly."""
    return on_hopper() and triton_before("3.7.1")


def force_fla() -> None:
    """Turn the check off by which it refuses."""
    importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True


def triton_before(version: str) -> bool:
    """Whether the installed Triton is older."""
    from packaging.version import Version

    found = installed("triton")
    return found is not None and Version(found) < Version(version)


class Jla(Peer):
    """jax-linear-attention: Pallas kernels for Hopper."""

    library, distribution, module, framework = "jla", "jax-linear-attention", "jla.ops", "jax"
    kinds = ("cuda", "cpu")
    families: ClassVar = {
        "simple_gla": "simple_gla",
        "gla": "gla",
        "delta_rule": "deltanet",
        "gated_delta_rule": "gated_deltanet",
        "kda": "kda",
    }

    def limits(self, case: Case) -> str | None:
        return "is not called with packed sequences" if case.lengths else None

    def function(self, case: Case) -> Function:
        from jla.ops import linear_attention

        kind, scale = self.families[case.spec.name], case.size["K"] ** -0.5
        return lambda arrays: (linear_attention(kind, **arrays, scale=scale)[0], None)


class FlashQla(Peer):
    """FlashQLA: TileLang, the gated delta rule only."""

    library, distribution, module = "FlashQLA", "flash-qla", "flash_qla"
    families: ClassVar = {"gated_delta_rule": "chunk_gated_delta_rule"}

    def function(self, case: Case) -> Function:
        from flash_qla import chunk_gated_delta_rule

        keywords = self.keywords(case)
        return lambda arrays: chunk_gated_delta_rule(**arrays, **keywords)


class FlashInfer(Peer):
    """FlashInfer: the gated delta rule of packed sequences, forward; it takes decays, not their logarithms."""

    library, distribution, module = "FlashInfer", "flashinfer-python", "flashinfer"
    families: ClassVar = {"gated_delta_rule": "chunk_gated_delta_rule"}
    whats = ("fwd",)

    def limits(self, case: Case) -> str | None:
        return None if case.gate_dtype == "float32" else f"takes float32 gates, not {case.gate_dtype}"

    def given(self, case: Case, arrays: Arrays) -> Arrays:
        state = {"initial_state": arrays["initial_state"].mT.contiguous()} if case.states else {}
        packed = {name: x.flatten(0, 1) for name, x in arrays.items() if name != "initial_state"}
        return packed | state | {"g": packed["g"].exp()}

    def function(self, case: Case) -> Function:
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        B, T = case.size["B"], case.size["T"]
        offsets = case.offsets if case.lengths else np.arange(0, B * T + 1, T)
        starts = self.runner(case).array(offsets, "int64")

        def function(arrays: Arrays) -> tuple[Any, Any]:
            found = chunk_gated_delta_rule(**arrays, **case.options, cu_seqlens=starts)
            o, state = found if case.states else (found, None)
            return o.unflatten(0, (B, T)), None if state is None else state.mT

        return function


class Cudnn(Peer):
    """The front end of cuDNN: Kimi Delta Attention on packed sequences."""

    library, distribution, module = "cuDNN", "nvidia-cudnn-frontend", "cudnn"
    families: ClassVar = {"kda": "kimi_delta_attention"}

    def limits(self, case: Case) -> str | None:
        if case.states:
            return "is not called with states"
        return None if case.gate_dtype == "float32" else f"takes float32 gates, not {case.gate_dtype}"

    def function(self, case: Case) -> Function:
        from cudnn.linear_attention import kimi_delta_attention

        B, T = case.size["B"], case.size["T"]
        offsets = self.runner(case).array(case.offsets if case.lengths else np.arange(0, B * T + 1, T), "int32")

        def function(arrays: Arrays) -> tuple[Any, Any]:
            packed = {name: x.flatten(0, 1) for name, x in arrays.items()}
            found = kimi_delta_attention(**packed, cu_seqlens=offsets)
            o = found[0] if isinstance(found, (tuple, list)) else found
            return o.unflatten(0, (B, T)), None

        return function


class Softmax(Peer):
    """PyTorch's softmax attention: another function of the same arrays, for scale."""

    library, distribution, module = "softmax (SDPA)", "torch", "torch"
    kinds = ("cpu", "cuda")
    checked = False
    families: ClassVar = dict.fromkeys(
        ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr"),
        "scaled_dot_product_attention",
    )

    def limits(self, case: Case) -> str | None:
        if case.lengths:
            return "is not called with packed sequences"
        if case.size["HV"] != case.size["H"]:
            return "is not called with grouped value heads"
        return None if case.size["K"] == case.size["V"] else "its fast kernels want K = V"

    def names(self, case: Case) -> list[str]:
        return ["q", "k", "v"]

    def note(self, case: Case) -> str | None:
        return "another function of the same arrays, for scale; not checked, and the floor is the linear operator's"

    def function(self, case: Case) -> Function:
        from torch.nn.functional import scaled_dot_product_attention

        def function(arrays: Arrays) -> tuple[Any, Any]:
            q, k, v = (arrays[name].transpose(1, 2) for name in "qkv")
            return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None

        return function


PEERS: dict[str, Callable[[], Peer]] = {peer.library: peer for peer in (Fla, Jla, FlashQla, FlashInfer, Cudnn, Softmax)}


def subject_named(library: str, backend: str | None, framework: str) -> Subject:
    """The inverse of a subject's ``library``, ``backend`` and ``framework``."""
    return PEERS[library]() if library in PEERS else Linattn(backend or "auto", framework)


def subjects(backends: Sequence[str], framework: str | None, peers: Iterable[str]) -> list[Subject]:
    """The backends asked for, then the peers, by their names in :data:`PEERS`.

    Raises:
        UnknownBackend: No backend has one of the names.
    """
    ours: list[Subject] = []
    for name in backends:
        if name != "auto":
            registry.record(name)
        ours.append(Linattn(name, framework or usable_framework(name)))
    return ours + [PEERS[name]() for name in peers]


def usable_framework(backend: str) -> str:
    """As :meth:`Linattn.first_framework`; a backend that cannot be loaded says so when it is run."""
    try:
        return Linattn.first_framework(backend)
    except BackendError:
        return "numpy"
