"""The backend: which calls it takes, and its methods."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
from linattn.feature_maps import FeatureMap
from linattn.plugin import Call, Unsupported, form_methods
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor

from .. import Triton
from .conv import decode_short_conv, short_conv
from .delta import stages as delta_stages
from .delta.op import delta_call
from .diagonal import stages as diagonal_stages
from .diagonal.op import diagonal_call
from .explain import details_of
from .features import features
from .host.maps import Maps
from .host.stages import Stages
from .maps import with_scalars_mapped
from .mixed.bidirectional import bidirectional_call
from .mixed.op import mixed_attention
from .norm import gated_rms_norm
from .normalizer import normalized
from .recurrent.op import Tokens, decode_call
from .runtime.device import INTERPRETED
from .ssd import decode_ssd, ssd

__all__ = ["TritonBackend"]

WIDEST = 512
WIDEST_DELTA = 256
DELTA = ("delta_rule", "gated_delta_rule", "kda", "dplr")
COMPANIONS = ("short_conv", "gated_rms_norm")

UNFIT = {"<3.2": "it lacks what the kernels use"}
"""Releases of Triton that are refused, and why. One that compiles a kernel wrongly belongs here, with what was seen."""

OPT_IN = "LINATTN_UNTESTED_DEVICES"
"""The environment variable that lets plain kernels run where nobody has run them."""
OPTED_IN = os.environ.get(OPT_IN) == "1"
UNTESTED = {"hip": "AMD's GPUs", "xpu": "Intel's GPUs"}
"""Devices that Triton compiles for, besides NVIDIA's."""

Result = tuple[Tensor, Tensor | None]
Arrays = tuple[Tensor | None, ...]
DIAGONAL_UPDATES = ("k", "v", "g", "gv", "u")
DELTA_UPDATES = ("k", "v", "g", "beta", "a", "b")
"""What changes the state of a family of each core, as the cores take it."""


def scale_of(arrays: dict[str, Tensor | None], scale: float | None) -> float:
    """The scale, or its default."""
    return arrays["q"].shape[-1] ** -0.5 if scale is None else float(scale)


def matrix_state(
    form: str,
    arrays: dict[str, Tensor | None],
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    normalize: bool = False,
) -> Result:
    """Any family with a diagonal gate."""
    q, k, v, g, gv, u = named(arrays, "q", *DIAGONAL_UPDATES)
    if g is not None and g.dim() == 1 and torch._C._are_functorch_transforms_active():
        g = g.expand(v.shape[:3])  # vmap folds the mapped dimension into B, which a fixed decay does not have
    rest = initial_state, cu_seqlens, form
    if normalize:
        o, final = normalized(q, k, v, g, gv, *rest, chunk_size or 0, output_final_state)
    else:
        o, final = diagonal_call(q, k, v, g, gv, u, *rest, scale_of(arrays, scale), chunk_size or 0, output_final_state)
    return o, final if output_final_state else None


def linear_attn(form: str, arrays: dict[str, Tensor | None], *, causal: bool, normalize: bool, **options) -> Result:
    """The ungated family."""
    if causal:
        return matrix_state(form, arrays, normalize=normalize, **options)
    dtype, scale = arrays["v"].dtype, scale_of(arrays, options["scale"])
    arrays = with_ones(arrays) if normalize else arrays
    o, _ = bidirectional_call(*arrays.values(), options["cu_seqlens"], scale, normalize)
    return divided(o, dtype) if normalize else o, None


def simple_gla(form: str, arrays: dict[str, Tensor | None], *, normalize: bool, gate: Any = None, **options) -> Result:
    """The family with one log decay a token and head, which may be raw."""
    arrays, _ = with_scalars_mapped(arrays, Maps.of(gate))
    return matrix_state(form, arrays, normalize=normalize, **options)


def with_ones(arrays: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The normaliser is one more value column, of ones, that sums the keys; a decay of values leaves it alone."""
    v, gv = arrays["v"], arrays.get("gv")
    wider = {} if gv is None else {"gv": torch.cat((gv, torch.zeros_like(gv[..., :1])), -1)}
    return dict(arrays, v=torch.cat((v, torch.ones_like(v[..., :1])), -1), **wider)


def divided(o: Tensor, dtype: torch.dtype) -> Tensor:
    """All columns by the last one; a denominator of zero gives a zero row."""
    numerator, denominator = o[..., :-1], o[..., -1:]
    zero = denominator == 0
    return (numerator / denominator.masked_fill(zero, 1.0)).masked_fill(zero, 0.0).to(dtype)


def delta(
    form: str,
    arrays: dict[str, Tensor | None],
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
    qk_norm: str | None = None,
    gate: Any = None,
    beta_map: str | None = None,
) -> Result:
    """The delta families and ``dplr``."""
    maps = Maps.of(gate, beta_map, qk_norm)
    arrays, maps = with_scalars_mapped(arrays, maps)
    given = named(arrays, "q", *DELTA_UPDATES)
    scale = scale_of(arrays, scale)
    A_log, bias, kind, number = maps.gate
    o, final = delta_call(
        *given, A_log, bias, initial_state, cu_seqlens, form, scale, chunk_size or 0, output_final_state,
        kind, number, maps.unit,
    )  # fmt: skip
    return o, final if output_final_state else None


def diagonal_summary(form: str, arrays: dict[str, Tensor | None], *, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the tokens of whole sequences do to the state, of a family with a diagonal gate."""
    return summary(arrays, False, Maps.of())


def scalar_summary(
    form: str, arrays: dict[str, Tensor | None], *, cu_seqlens: Tensor | None, gate: Any = None
) -> tuple[Tensor, Tensor]:
    """What the tokens of whole sequences do to the state, of one log decay a token and head, which may be raw."""
    return summary(arrays, False, Maps.of(gate))


def delta_summary(
    form: str,
    arrays: dict[str, Tensor | None],
    *,
    cu_seqlens: Tensor | None,
    qk_norm: str | None = None,
    gate: Any = None,
    beta_map: str | None = None,
) -> tuple[Tensor, Tensor]:
    """What the tokens of whole sequences do to the state, of the delta families and ``dplr``."""
    return summary(arrays, True, Maps.of(gate, beta_map, qk_norm))


def summary(arrays: dict[str, Tensor | None], delta: bool, maps: Maps) -> tuple[Tensor, Tensor]:
    """``A`` and ``b`` of whole sequences; of no tokens, what changes nothing."""
    if arrays["v"].shape[1] == 0:
        return nothing_done(arrays, delta)
    inputs, found = in_stages(dict(arrays, q=arrays["k"]), delta, maps, None, (), 1.0, 0)
    return found.summary(inputs)


def nothing_done(arrays: dict[str, Tensor | None], delta: bool) -> tuple[Tensor, Tensor]:
    """The summary of no tokens."""
    k, v, g, gv = (arrays.get(name) for name in ("k", "v", "g", "gv"))
    (B, _, HV, V), K = v.shape, k.shape[-1]
    new = functools.partial(torch.zeros, dtype=torch.float32, device=v.device)
    if delta:
        A = torch.eye(K, dtype=torch.float32, device=v.device).expand(B, HV, K, K)
    else:
        A = new((B, HV, *(() if g is None or g.dim() < 4 else (K + (0 if gv is None else V),)))) + 1
    return A, new((B, HV, K, V))


def stages(
    op: str,
    arrays: dict[str, Tensor | None],
    *,
    cu_seqlens: Tensor | None,
    offsets: tuple[int, ...],
    scale: float | None,
    chunk_size: int | None,
    qk_norm: str | None = None,
    gate: Any = None,
    beta_map: str | None = None,
) -> tuple[Arrays, Stages]:
    """The chunk form in stages, for ranks that share sequences."""
    maps = Maps.of(gate, beta_map, qk_norm)
    return in_stages(arrays, op in DELTA, maps, cu_seqlens, offsets, scale_of(arrays, scale), chunk_size or 0)


def in_stages(
    arrays: dict[str, Tensor | None],
    delta: bool,
    maps: Maps,
    cu: Tensor | None,
    offsets: tuple[int, ...],
    scale: float,
    chunk: int,
) -> tuple[Arrays, Stages]:
    """The stages of either core."""
    arrays, maps = with_scalars_mapped(arrays, maps)
    if delta:
        A_log, bias, *numbers = maps.gate
        inputs = *named(arrays, "q", *DELTA_UPDATES), A_log, bias
        return inputs, Stages(delta_stages.DELTA, delta_stages.Options(cu, scale, chunk, *numbers, maps.unit), offsets)
    g = arrays.get("g")
    if g is not None and g.dim() == 1:
        arrays = dict(arrays, g=g.expand(arrays["v"].shape[:3]))
    inputs = tuple(named(arrays, "q", *DIAGONAL_UPDATES))
    return inputs, Stages(diagonal_stages.DIAGONAL, diagonal_stages.Options(cu, scale, chunk), offsets)


def named(arrays: dict[str, Tensor | None], *names: str) -> list[Any]:
    """The arrays of these names, ``None`` for those that are not given."""
    return [*map(arrays.get, names)]


def summary_complaint(call: Call) -> str | None:
    """Why a summary is read off a wider call."""
    if call.needs_grad is not False or call.forward_mode:
        return "makes summaries without gradients"
    if call.varlen:
        return "makes summaries of whole batches, not of packed sequences"
    if call.option("normalize"):
        return "makes no summary of a normaliser"
    if call.op in DELTA and (call.K > 128 or call.beta == "vector"):
        return "makes summaries of delta families with K up to 128 and one beta a token"
    return None


def decoded(
    form: str,
    arrays: dict[str, Tensor | None],
    *,
    state: Tensor,
    state_indices: Tensor | None,
    scale: float | None,
    normalize: bool = False,
    qk_norm: str | None = None,
    gate: Any = None,
    beta_map: str | None = None,
) -> Tensor:
    """Any matrix-state family, on states that are overwritten."""
    dtype = arrays["v"].dtype
    arrays = with_ones(arrays) if normalize else arrays
    given = named(arrays, *Tokens._fields)
    maps = Maps.of(gate, beta_map, qk_norm)
    o = decode_call(*given, state, state_indices, scale_of(arrays, scale), normalize, *maps.gate, maps.factor, maps.unit)
    return divided(o, dtype) if normalize else o


def widest(call: Call, symbol: str) -> int:
    """The widest head that a call may have."""
    if call.op == "mixed_attn" and symbol == "V":
        return 1 << 20  # in tiles, any number of them
    if call.op in (*DELTA, "mixed_attn"):
        return WIDEST_DELTA
    ones = symbol == "V" and bool(call.option("normalize")) and (call.form == "decode" or not call.option("causal", True))
    return WIDEST - int(ones)


@functools.cache
def _release_complaint(release: str) -> str | None:
    """Why the kernels must not run with this release of Triton."""
    version = Version(release.partition("+")[0])
    reasons = [reason for releases, reason in UNFIT.items() if SpecifierSet(releases).contains(version, prereleases=True)]
    return f"does not run with Triton {release}: {reasons[0]}" if reasons else None


def call_complaint(call: Call) -> str | None:
    """Why the kernels do not take a call, on whatever device."""
    complaint = _release_complaint(triton.__version__)
    if complaint:
        return complaint
    if "float64" in call.dtypes.values():
        return "has no float64"
    if call.op in COMPANIONS:
        return None
    for symbol, size in (("K", call.K), ("V", call.V)):
        most = widest(call, symbol)
        if not 1 <= size <= most:
            return f"{symbol} must be at most {most}, got {size}"
    return None


def map_complaint(call: Call) -> str | None:
    """Why the kernels do not make what a call's input maps make; linattn then does."""
    if call.form == "decode":
        return None
    if call.option("beta_map") is not None and call.beta == "vector":
        return "makes no beta of value channels"
    if call.op == "dplr" and any(call.option(name) is not None for name in ("qk_norm", "gate")):
        return "makes no maps of dplr in chunks"
    return None


def _device_complaint(device: str) -> str | None:
    """Why kernels cannot run on a device: what there is to know before any array arrives."""
    kind = device.partition(":")[0]
    if kind == "cpu":
        return None if INTERPRETED else "runs on CUDA devices (on cpu only in Triton's interpreter: TRITON_INTERPRET=1)"
    if kind in UNTESTED:
        return untested(kind, kind)
    if kind != "cuda":
        return f"runs on CUDA devices, not {kind}"
    return _ARCHITECTURES.get(device, _ARCHITECTURES.get("cuda:0"))


def untested(make: str, kind: str) -> str | None:
    """Why kernels do not run on devices of a make that nobody has tried; ``None`` for who wants to."""
    if OPTED_IN:
        return None
    return (
        f"has not been run on {UNTESTED[make]}: {OPT_IN}=1 in the environment runs the plain kernels there, and what "
        f"`linattn conformance --backend triton --device {kind} --report report.json` says of them is welcome as an issue"
    )


def _architectures() -> dict[str, str | None]:
    """For each device present at import, the reason why it cannot be used, or ``None``."""
    if not torch.cuda.is_available():
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if torch.version.hip is not None:
            found[f"cuda:{index}"] = untested("hip", "cuda")
        else:
            found[f"cuda:{index}"] = None if major >= 8 else f"needs compute capability 8.0 or newer, got {major}.{minor}"
    return found


_ARCHITECTURES: dict[str, str | None] = _architectures()


@form_methods(dict.fromkeys(("linear_attn", "simple_gla", "gla", "rwkv6", *DELTA), decoded), forms=("decode",))
@form_methods({"ssd": decode_ssd}, forms=("decode",))
@form_methods(
    {
        **dict.fromkeys(("linear_attn", "gla", "rwkv6"), diagonal_summary),
        "simple_gla": scalar_summary,
        **dict.fromkeys(DELTA, delta_summary),
    },
    forms=("summary",),
)
@form_methods({"mixed_attn": mixed_attention}, forms=("chunk", "recurrent"))
@form_methods(
    {
        "linear_attn": linear_attn,
        "simple_gla": simple_gla,
        "gla": matrix_state,
        "rwkv6": matrix_state,
        **dict.fromkeys(DELTA, delta),
        "ssd": ssd,
    },
    forms=("chunk", "recurrent"),
)
class TritonBackend(Triton):
    """Triton kernels on NVIDIA GPUs."""

    stages = staticmethod(stages)
    short_conv = staticmethod(short_conv)
    decode_short_conv = staticmethod(decode_short_conv)
    gated_rms_norm = staticmethod(gated_rms_norm)

    def features(self, phi: FeatureMap, x: Tensor) -> Tensor | None:
        """Hedgehog's features, where the kernels run."""
        return None if _device_complaint(str(x.device)) else features(phi, x)

    def supports(self, call: Call) -> Unsupported | None:
        """Whether the kernels take this call."""
        complaint = _device_complaint(call.device) or call_complaint(call) or map_complaint(call)
        if call.form == "summary":
            complaint = complaint or summary_complaint(call)
        return None if complaint is None else Unsupported(complaint)

    def missing_device(self) -> str | None:
        other = OPTED_IN and torch.xpu.is_available()
        return None if _ARCHITECTURES or INTERPRETED or other else "CUDA devices"

    def details(self, call: Call) -> str:
        """Which kernels run."""
        kind = call.device.partition(":")[0]
        if kind == "cuda" and not _ARCHITECTURES:
            return details_of(call, None)
        return details_of(call, torch.device(call.device) if call.device in _ARCHITECTURES else torch.device(kind, 0))
