"""The recurrent layers of transformers' models on linattn: Qwen3-Next, Kimi-Linear, OLMo-Hybrid, Bamba, Nemotron-H and others.

>>> import linattn.integrations.transformers
>>> linattn.integrations.transformers.enable()

transformers writes the recurrence of a layer as a function in the model's own module, and lets a decorator say which function
of ``fla``, ``mamba_ssm`` or ``causal_conv1d`` means the same and is faster. Where that package is missing, or on a CPU, the
function itself runs, in Python. ``enable()`` reads these decorators and puts linattn's function of that name in the place of
what they made: in the modules that are imported already, whose models may be built already, and in those that will be.

A function that linattn has not stays what it was. So does a call that it refuses, after one warning; an exported model
(``torch.export``), which must not need linattn; and a function whose kernel somebody chose from a hub, with the ``kernels``
package, for the model that is called.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..ops import gated_delta_rule
from ..ops._family import explain
from .fused import FORWARDS, refused
from .seams import (
    AfterImport,
    Asked,
    Switch,
    globals_of_modules,
    logger,
    serving,
    stand_of,
    standing_for,
    stood_for,
    warn_once,
    warned,
)

__all__ = ["FUNCTIONS", "Seam", "Transformers", "disable", "enable", "lines", "seams_of_models", "served", "where"]

DECORATOR = "use_kernel_func_from_hub_with_fallback"
"""What transformers puts on a function that a package may replace, with the name of the package's function and the package."""

SEAM = re.compile(
    rf'^@{DECORATOR}\(\s*"(?P<function>\w+)",\s*"(?P<package>\w+)"[^)]*\)\n(?:@.*\n)*def (?P<name>\w+)\(', re.MULTILINE
)
PEERS = ("fla", "causal_conv1d", "mamba_ssm")
MAMBA_1 = "selective_scan_fn"
"""A model that calls it has a decay for each entry of the state, which is no family of linattn."""


class Seam(NamedTuple):
    """A function of a model that a package may replace.

    Attributes:
        model: The model's folder, e.g. ``"qwen3_next"``.
        name: The function in the model's module, e.g. ``"torch_chunk_gated_delta_rule"``.
        package: The package, e.g. ``"fla"``.
        function: The package's function, e.g. ``"chunk_gated_delta_rule"``.
    """

    model: str
    name: str
    package: str
    function: str


def _functions() -> dict[str, Callable[..., Any]]:
    """``package.function`` and linattn's function of that name."""
    found: dict[str, Callable[..., Any]] = {}
    for package in PEERS:
        functions = import_module(f"{__package__}.{package}").FUNCTIONS
        found |= {f"{package}.{name.rpartition('.')[2]}": function for name, function in functions.items()}
    return found


FUNCTIONS = _functions()
"""Functions that models of transformers take from other packages, ``package.function``, and those here that mean the same."""


def seams_of(model: str, source: str) -> list[Seam]:
    """Every seam of a model's module, read from its source."""
    return [Seam(model, found["name"], found["package"], found["function"]) for found in SEAM.finditer(source)]


@cache
def seams_of_models() -> tuple[Seam, ...]:
    """Every seam of every model of the installed transformers, read from its files: no model is imported."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("linattn.integrations.transformers needs transformers: pip install transformers")
    files = sorted(Path(spec.origin).parent.glob("models/*/modeling_*.py"))
    sources = ((file.parent.name, file.read_bytes()) for file in files)
    return tuple(seam for model, text in sources if DECORATOR.encode() in text for seam in seams_of(model, text.decode()))


def served(seams: Iterable[Seam]) -> list[Seam]:
    """Those of one or more models that linattn has a function for."""
    seams = list(seams)
    mamba_1 = {seam.model for seam in seams if seam.function == MAMBA_1}
    return [
        seam
        for seam in seams
        if f"{seam.package}.{seam.function}" in FUNCTIONS and not (seam.package == "mamba_ssm" and seam.model in mamba_1)
    ]


class Transformers(Switch):
    """The seams of transformers' models: enabled, disabled, or for the time of a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.hook = AfterImport(_is_modelling, self._visit)

    @property
    def fuse(self) -> bool:
        """Whether somebody asks for forwards."""
        return any(one.fuse for one in self.asked)

    def enable(self, *, fuse: bool = False) -> Asked:
        """Serve the recurrent layers of transformers' models, imported or not, built or not. Twice is once.

        Logs one line (``linattn.integrations``, INFO) that says which functions of which models run on linattn now, and a
        warning that names the functions for which this version of transformers has no seam.

        Args:
            fuse: Also replace the forward of the mixers that linattn knows (:mod:`linattn.integrations.fused`), so that gate,
                norm and sigmoid are the operator's. Default ``False``.

        Returns:
            A context manager: ``with enable():`` gives back at the end of the block what nobody else has enabled.

        Raises:
            ModuleNotFoundError: transformers is not installed.
        """
        seams = seams_of_models()
        if not self.asked or fuse > self.fuse:
            self._say(seams, fuse)
        asked = self.ask(fuse)
        self.hook.install()
        for module in list(sys.modules.values()):
            if _is_modelling(getattr(module, "__name__", "")):
                self._visit(module)
        return asked

    def settle(self) -> None:
        """Give back transformers' functions if nobody asks for ours, and its forwards if nobody asks for those."""
        if not self.asked:
            self.hook.remove()
        for namespace, name, value in globals_of_modules() if not self.fuse else ():
            if name in FORWARDS and (before := stood_for(getattr(value, "forward", None))) is not None:
                value.forward = before
            elif not self.asked and (stand := stand_of(value)) is not None and stand.name.startswith("transformers."):
                namespace[name] = stand.before

    def _visit(self, module: ModuleType) -> None:
        """Serve the seams of a module that has been imported."""
        if not hasattr(module, DECORATOR):
            return
        model = module.__name__.split(".")[-2]
        try:
            source = inspect.getsource(module)
        except OSError as error:  # an import must not fail of it
            logger.warning("%s: %s, and its functions run where they ran", module.__name__, error)
            return
        for seam in served(seams_of(model, source)):
            before = getattr(module, seam.name)
            if stood_for(before) is None:
                label = f"transformers.models.{model}: {seam.function}"
                ours = _named_only(FUNCTIONS[f"{seam.package}.{seam.function}"])
                setattr(module, seam.name, serving(before, ours, label, unless=_elsewhere(before, label)))
        for name in FORWARDS if self.fuse else ():
            mixer: Any = getattr(module, name, None)
            if mixer is not None and stood_for(mixer.forward) is None and _takes_cache(mixer.forward, f"{model}: {name}"):
                mixer.forward = _fused(mixer.forward, FORWARDS[name], f"transformers.models.{model}: {name}")

    def _say(self, seams: tuple[Seam, ...], fuse: bool) -> None:
        version = metadata.version("transformers")
        parts = [*_by_functions(served(seams)), *([f"forwards of {', '.join(FORWARDS)}"] if fuse else [])]
        logger.info("transformers %s on linattn, %s: %s", version, where(), "; ".join(parts))
        lost = sorted(EXPECTED - {f"{seam.package}.{seam.function}" for seam in seams})
        if lost:
            logger.warning(
                "transformers %s has no seam for %s: these run where they ran. linattn looks for @%s in models/*/modeling_*.py",
                version,
                ", ".join(lost),
                DECORATOR,
            )


EXPECTED = frozenset(
    {
        "causal_conv1d.causal_conv1d_fn",
        "causal_conv1d.causal_conv1d_update",
        "fla.chunk_gated_delta_rule",
        "fla.chunk_kda",
        "fla.fused_recurrent_gated_delta_rule",
        "fla.fused_recurrent_kda",
        "mamba_ssm.mamba_chunk_scan_combined",
        "mamba_ssm.mamba_split_conv1d_scan_combined",
        "mamba_ssm.selective_state_update",
    }
)
"""Functions that transformers 5.23 has a seam for and linattn serves."""


def _is_modelling(name: str) -> bool:
    return ".modeling_" in name


OFFSETS = "cu_seq_lens_q"
"""What models call the offsets of packed sequences, which functions call ``cu_seqlens``."""
PACKED = (OFFSETS, "cu_seqlens", "seq_idx")
CACHED = ("output_final_state", "return_final_states")


def _named_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without the keywords that it does not name: a model passes on all that it was called with.

    Some models name the offsets of packed sequences for their functions, others pass them on as they were given them.
    """
    names = frozenset(inspect.signature(function).parameters)
    by_offsets = "cu_seqlens" in names and "seq_idx" not in names

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(name) for name in CACHED):
            _warn_of_packed(kwargs)
        if by_offsets and kwargs.get("cu_seqlens") is None:
            kwargs["cu_seqlens"] = kwargs.get(OFFSETS)
        return function(*args, **{name: value for name, value in kwargs.items() if name in names})

    return call


def _warn_of_packed(kwargs: dict[str, Any]) -> None:
    """Say that packed sequences beside a cache are kept apart here, and may not be elsewhere in the model.

    transformers refuses them where its own code would mix them; on linattn nothing does.
    """
    if any(kwargs.get(name) is not None for name in PACKED):
        _say_packed()


def _say_packed() -> None:
    warned(
        "packed sequences come with a cache: recurrent layers keep them apart, but beside a cache transformers makes no mask"
        " that keeps them apart in softmax layers, and only FlashAttention does. Pass use_cache=False",
        UserWarning,
    )


_say_packed._dynamo_marked_constant = True  # type: ignore[attr-defined]  # said when compiled


def _elsewhere(before: Any, label: str) -> Callable[[], bool]:
    """Whether a call is not for linattn: of a model that is being exported, or for which a hub's kernel was chosen."""
    if not hasattr(before.__class__, "kernel_layer_name"):
        return _is_exporting

    def elsewhere() -> bool:
        return _is_exporting() or _has_kernel(before, label)

    return elsewhere


def _is_exporting() -> bool:
    """Whether a model is being exported. PyTorch 2.10 and 2.11 hold ``torch.compiler.is_exporting()`` for true in all that they
    compile.
    """
    return torch.compiler._is_exporting_flag  # pyright: ignore[reportPrivateUsage]


BEFORE_5_24 = "cache_params", "past_key_values"
"""What the parameter ``cache`` of transformers' mixers and models was called before transformers 5.24."""


def cache_parameter(forward: Callable[..., Any]) -> str | None:
    """The name by which a mixer's or a model's forward is given a cache; ``None`` if it is given none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in ("cache", *BEFORE_5_24) if name in parameters), None)


def _takes_cache(forward: Callable[..., Any], label: str) -> bool:
    """Whether a mixer is given its cache by a name that is known; a warning says where it is not."""
    known = cache_parameter(forward) is not None
    if not known:
        logger.warning("transformers.models.%s has no parameter cache, and its forward runs where it ran", label)
    return known


def _fused(before: Callable[..., Any], forward: Callable[..., Any], label: str) -> Callable[..., Any]:
    """A mixer's forward on linattn's operators, with what transformers' has around it for weights that are elsewhere.

    A layer that has what these have not keeps its own forward, after one warning. What is refused later is raised: part of the
    layer's cache may be written by then.
    """
    ours: Any = import_module("transformers.integrations.accelerate").force_accelerate_hooks("conv1d")(forward)

    def served(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_exporting():
            return before(layer, *args, **kwargs)
        if (reason := refused(layer)) is not None:
            warn_once(label, reason)
            return before(layer, *args, **kwargs)
        for name in BEFORE_5_24:
            if name in kwargs:
                kwargs["cache"] = kwargs.pop(name)
        if kwargs.get("cache") is not None:
            _warn_of_packed(kwargs)
        return ours(layer, *args, **kwargs)

    return standing_for(before, served, label)


def _has_kernel(before: Any, label: str) -> bool:
    """Whether ``kernels.kernelize`` gave a function's module a forward that is not its own."""
    forward = before.__dict__.get("forward")
    chosen = forward is not None and getattr(forward, "__func__", forward) is not before.__class__.forward
    if chosen:
        _say_kernel(label)
    return chosen


@cache
def _say_kernel(label: str) -> None:
    logger.info("%s stays with the hub's kernel that was chosen for it", label)


def _by_functions(seams: Iterable[Seam]) -> Iterator[str]:
    """``functions of models``, models that have the same ones together."""
    models: dict[str, list[str]] = {}
    for seam in seams:
        models.setdefault(seam.model, []).append(seam.function)
    together: dict[tuple[str, ...], list[str]] = {}
    for model, functions in models.items():
        together.setdefault(tuple(dict.fromkeys(functions)), []).append(model)
    for functions, names in together.items():
        yield f"{', '.join(functions)} of {', '.join(names)}"


def where() -> str:
    """Which backend a recurrence of a model runs on, for each kind of device that is here, e.g. ``"on cpu by torch"``."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return ", ".join(f"on {device} by {_backend(device)}" for device in devices)


def _backend(device: str) -> str:
    """The backend that takes a gated delta rule as a model calls it, in bfloat16."""
    x = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16, device=device)
    return explain(gated_delta_rule, x, x, x, x[..., 0], x[..., 0]).backend or "nothing"


def lines() -> list[str]:
    """What of which models is served, and what is not: a line for each kind of model."""
    seams = seams_of_models()
    left = set(seams) - set(served(seams))
    return [
        *(f"on linattn: {line}" for line in _by_functions(served(seams))),
        *(f"as before: {line}" for line in _by_functions(seam for seam in seams if seam in left)),
    ]


_INTEGRATION = Transformers()
enable = _INTEGRATION.enable
disable = _INTEGRATION.disable
