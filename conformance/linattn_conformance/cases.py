"""The cases: what is tried. Every case has a stable id, read left to right: operator, dtype, flags, sizes, check.

``gla/chunk/fp32/gv-state-varlen/T65-K24-V40/gradient``

The list is generated from the specs in :data:`linattn.spec.FAMILIES` and :data:`linattn.spec.COMPANIONS`, so that a new
family, optional argument, shape or flag gets its cases by being declared. Flags mean:

===================  ==================================================================================================
``plain``            nothing but the required arrays; no final state is asked for
``state``            an initial state is given and the final state asked for
``final``            the final state alone is asked for
``varlen``           packed sequences, zero-length ones among them
``tail``             the last packed sequence ends before the last token
``grouped``          two value heads for each query/key head
``gv``, ``bias``     the optional array of that name is given
``g.HV``             the array has the shape ``HV`` instead of the first one that the spec lists
``normalize``        the option of that name is set; ``noncausal`` is ``causal=False``
``scale``            every scale is given
``limits``           step sizes lie between two numbers; ``group_size.8`` is the option before the dot
``rank.N``           arrays of any dimensions have ``N`` of them instead of three
``narrow``, ``wide`` gates, beta and states are float16 (or the dtype of the operands) or float64; wide offsets are int64
``slots``            decoding: ``state_indices`` picks states out of order, with padding in between
``padding``          decoding: every row is padding
``strided``          no array is contiguous; the gaps hold NaN
``far``              tokens of q, k and v lie so far apart that offsets pass 2³¹ elements
``sliced``           every array is a part of a larger one, NaN around it
``headsfirst``       heads, or channels, lie before tokens in memory
``many``             300 packed sequences, of three tokens at most
``zero``             every gate is 0
``reset``            some gates are -inf
``huge``             some gates are -1e4
``long``             gates add up to some -1e3 in a chunk, -1e2 a token among small ones
``deep``             a state of 1e18 that a first gate of -60 takes away
``strong``           beta between 1 and 2
``carry``            a large float32 state to be carried past small writes
``phi.NAME``         the feature map of that name
``qk_norm.l2``       an input map, or an activation: the option before the dot has the value after it
``gate.NAME``        the gate object of that name, with all its parameters; ``gate.dt_bias.GK``: one a key channel
``mixed``            generated: gates of every size from 0 to -inf
``pack.3.0.5``       generated: packed sequences of these lengths
``constant.NAME``    generated: no gradient is asked of the array of that name, nor of the parts of a state of that name
``seed.N``           generated: other values
===================  ==================================================================================================
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import linattn  # noqa: F401 - declares the families
from linattn.call import method_name
from linattn.plugin import FORMS
from linattn.spec import COMPANIONS, DECODING, FAMILIES, OpSpec, spec_of

from .bad_input import RULES
from .maps import MAPS, WIDTH

__all__ = ["DTYPES", "Case", "content_hash", "every_case", "named"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
HAVE_BFLOAT16 = ("torch", "jax", "mlx")
WRITABLE = ("numpy", "torch")
"""Frameworks whose arrays can be written to."""
GATED = {"simple_gla": "linear_attn", "gla": "linear_attn", "gated_delta_rule": "delta_rule", "kda": "delta_rule"}
"""Gated families, and what each is when its gates are zero."""
STRIDED = ("numpy", "torch")
"""Frameworks whose users choose the strides of arrays."""
TRANSFORMS = {
    "compile": ("torch", "mlx"),
    "export": ("torch",),
    "fake": ("torch",),
    "func-grad": ("torch",),
    "autocast": ("torch",),
    "vmap": ("torch", "jax", "mlx"),
    "jit": ("jax",),
    "jit-gradient": ("jax",),
    "eval-shape": ("jax",),
}
"""Transforms, and the frameworks that have them."""
USUAL = {"T": 65, "K": 24, "L": 16, "V": 40, "C": 16, "D": 40, "W": 4}
"""The sizes of every case that is not about sizes."""
BLOCK = 256
"""Tokens of which a ``large`` case is made, over and over."""


@dataclass(frozen=True)
class Case:
    """One thing to try.

    Attributes:
        id: Its name, stable for an API version.
        op: Family.
        form: ``recurrent``, ``chunk``, ``parallel``, ``decode``, or ``auto`` for the bare name.
        dtype: Dtype of the operands.
        flags: See the module.
        sizes: ``(symbol, size)``; ``C`` only where a chunk size is given.
        check: Name of the check that runs it.
        core: Part of what a backend that has this operator cannot declare away.
        frameworks: The frameworks that it is for; all if empty.
        memory: GiB of memory that it needs on a device other than the host.
        host: Only for arrays in host memory, where values can be read without waiting for a device.
        device: Only for arrays on a device.
    """

    id: str
    op: str
    form: str
    dtype: str
    flags: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    check: str
    core: bool = False
    frameworks: tuple[str, ...] = ()
    memory: int = 0
    host: bool = False
    device: bool = False

    @property
    def size(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def operator(self) -> str:
        """The public function, e.g. ``chunk_gla``."""
        return method_name(None if self.form == "auto" else self.form, self.op)

    @property
    def spec(self) -> OpSpec:
        return spec_of(self.op, self.form)

    @property
    def has_64_bits(self) -> bool:
        """True if an array of it has elements of 64 bits."""
        return self.dtype == "float64" or "wide" in self.flags

    @property
    def block(self) -> Case:
        """The case that has the data of this one: itself, or one block of a ``large`` one."""
        return (
            replace(self, sizes=tuple((s, BLOCK if s == "T" else n) for s, n in self.sizes)) if self.check == "large" else self
        )

    @property
    def needs_gradient(self) -> bool:
        return self.check in ("gradient", "repeat-backward", "leak-backward", "func-grad", "jit-gradient")

    def applies(self, framework: str, device: str, memory: float = 0) -> bool:
        """True if the case is one for this framework and device; ``memory`` is the device's, in GiB."""
        on_host = device.partition(":")[0] == "cpu"
        fits = not self.device if on_host else not self.host and memory >= self.memory
        return fits and (not self.frameworks or framework in self.frameworks)


def named(name: str) -> Case:
    """The case of an id: of the manifest, or any other that the grammar of ids allows. ``ValueError`` if there is none."""
    if name in _by_id():
        return _by_id()[name]
    parts = name.split("/")
    known = {**FAMILIES, **COMPANIONS}
    if len(parts) == 6 and parts[0] in known and parts[2] in DTYPES:
        op, form, short, flags, written, check = parts
        sizes = {symbol: int(size) for symbol, size in re.findall(r"([A-Z])(\d+)", written)}
        for case in make(known[op], form, short, flags, check, sizes):
            if case.id == name:
                return case
    raise ValueError(f"no case has the id {name}")


@functools.cache
def _by_id() -> dict[str, Case]:
    return {case.id: case for case in every_case()}


@functools.cache
def every_case() -> tuple[Case, ...]:
    """Every case of this API version. Cases on the same data are neighbours, so that its truth is worked out once."""
    cases = {case.id: case for case in generate()}
    order = {problem: i for i, problem in enumerate(dict.fromkeys(problem(case) for case in cases.values()))}
    return tuple(sorted(cases.values(), key=lambda case: order[problem(case)]))


def problem(case: Case) -> tuple[object, ...]:
    """What the data of a case depends on: no check, and of forms only whether there is a pool of states."""
    pool = ("decode",) if case.form == "decode" else ()
    return case.op, case.dtype, case.flags, case.sizes, *pool


def content_hash(cases: tuple[Case, ...]) -> str:
    """Changes if any case changes in any field."""
    text = json.dumps([asdict(case) for case in sorted(cases, key=lambda case: case.id)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# -- generation ------------------------------------------------------------------------------------------------------


def generate() -> Iterator[Case]:
    """All cases; an id that comes twice is the same case, first come first kept."""
    for spec in (*FAMILIES.values(), *COMPANIONS.values()):
        yield from grid(spec)
        yield from lengths(spec)
        yield from widths(spec)
        yield from data(spec)
        yield from properties(spec)
        yield from feature_maps(spec)
        yield from input_maps(spec)
        yield from transforms(spec)
        yield from large(spec)
        yield from decoding(spec) if spec.name in DECODING else ()
    for rule in RULES:
        name = f"{rule.op}/{rule.form}/fp32/bad-input/{rule.name}"
        frameworks = WRITABLE if rule.form == "decode" else ()
        yield Case(name, rule.op, rule.form, "float32", (), (), "bad-input", frameworks=frameworks, host=rule.reads)


def make(
    spec: OpSpec, form: str, short: str, flags: str, check: str, sizes: dict[str, int] | None = None, core: bool = False, **more
) -> Iterator[Case]:
    """One case, unless the spec forbids the combination. ``flags`` are joined by ``-``."""
    chosen = tuple(flag for flag in flags.split("-") if flag)
    if forbidden(spec, form, chosen):
        return
    symbols = symbols_of(spec)
    sizes = {symbol: size for symbol, size in USUAL.items() if symbol in symbols or symbol == "T"} | (sizes or {})
    named = tuple((symbol, sizes[symbol]) for symbol in ("T", "K", "L", "V", "C", "D", "W", "B", "H") if symbol in sizes)
    written = "-".join(f"{symbol}{size}" for symbol, size in named)
    name = f"{spec.name}/{form}/{short}/{flags}/{written}/{check}"
    frameworks = more.pop("frameworks", HAVE_BFLOAT16 if short == "bf16" else ())
    chosen = tuple(flag for flag in chosen if flag != "plain")
    yield Case(name, spec.name, form, DTYPES[short], chosen, named, check, core, frameworks, **more)


def symbols_of(spec: OpSpec) -> set[str]:
    """The symbols of a spec's arrays."""
    return {symbol for arg in spec.arrays(spec.defaults) for shape in arg.shapes for symbol in shape}


def forms_of(spec: OpSpec) -> tuple[str, ...]:
    """The forms of a family, or the one of a companion."""
    return ("direct",) if spec.name in COMPANIONS else FORMS


def has_state(spec: OpSpec) -> bool:
    """Whether an operator goes on from a state, and so from token to token."""
    return "output_final_state" in spec.option_names


def forbidden(spec: OpSpec, form: str, flags: tuple[str, ...]) -> bool:
    """True if the spec refuses the form and options that the flags stand for."""
    options = {**spec.defaults, "initial_state": None, "chunk_size": 16}
    options |= {"causal": "noncausal" not in flags, "output_final_state": bool({"state", "final"}.intersection(flags))}
    options["initial_state"] = True if "state" in flags else None
    return spec.check(None if form == "auto" else form, options) is not None


def atoms(spec: OpSpec) -> list[str]:
    """Every single thing that can differ from a plain call, as flags."""
    found = ["grouped"] if any("HV" in shape for arg in spec.args for shape in arg.shapes) else []
    for arg in (*spec.args, *spec.keyword_args):
        if arg.optional:
            found.append(arg.name)
        found += [f"{arg.name}.{''.join(shape)}" for shape in arg.shapes[1:]]
    for option in spec.options:
        if option.types == (bool,) and option.name != "output_final_state":
            found.append(f"non{option.name}" if option.default else option.name)
        if option.name == "dt_limit":
            found.append("limits")
        if option.name == "group_size":
            found.append("group_size.8")
        if option.lowering is None:
            found += [f"{option.name}.{choice}" for choice in option.choices if choice != option.default]
    return [*found, "scale"] if any(option.name.endswith("scale") for option in spec.options) else found


def both(
    spec: OpSpec, form: str, short: str, flags: str, sizes: dict[str, int] | None = None, core: bool = False, **more
) -> Iterator[Case]:
    """Outputs, and gradients of every input."""
    for check in ("forward", "gradient"):
        yield from make(spec, form, short, flags, check, sizes, core, **more)


def grid(spec: OpSpec) -> Iterator[Case]:
    """Family × form × dtype × flag."""
    found = atoms(spec)
    for short in DTYPES:
        everywhere = ["plain", *(["state-varlen", "tail-state-varlen"] if has_state(spec) else [])]
        everywhere += [_joined(spec, atom, "state-varlen") if has_state(spec) else atom for atom in found]
        once = ["state", "final", "varlen", *found] if has_state(spec) else []
        for flags in everywhere + (once if short == "fp32" else []):
            for form in forms_of(spec):
                yield from both(spec, form, short, flags, core=short == "fp32" and flags in ("plain", "state"))


def _joined(spec: OpSpec, atom: str, flags: str) -> str:
    if atom == "noncausal":
        return f"{atom}-varlen"
    return f"{atom}-{flags}" if atom in ("grouped", "normalize") or "grouped" not in atoms(spec) else f"{atom}-grouped-{flags}"


def lengths(spec: OpSpec) -> Iterator[Case]:
    """Around nothing, one token, chunk boundaries, and primes."""
    flags = "state" if has_state(spec) else "plain"
    for form in (*forms_of(spec), *(["auto"] if forms_of(spec) == FORMS else [])):
        for T in (0, 1) if form == "auto" else (0, 1, 2, 63, 64, 97, 131, 257):
            yield from both(spec, form, "fp32", flags, {"T": T}, core=T == 131)
        for T in (15, 16, 17, 48) if form in ("chunk", "parallel") else ():
            yield from both(spec, form, "fp32", flags, {"T": T, "C": 16})
        for T in (0, 5, 150) if form != "auto" and has_state(spec) else ():
            yield from both(spec, form, "fp32", "state-varlen", {"T": T})
            yield from both(spec, form, "fp32", "tail-state-varlen", {"T": T})


def widths(spec: OpSpec) -> Iterator[Case]:
    """Widths that do and do not fit tiles, ``K ≠ V``."""
    if spec.name in COMPANIONS:
        yield from widths_of_companion(spec)
        return
    for form in FORMS:
        for K, V in ((1, 1), (1, 24), (64, 64), (96, 128), (256, 24), (24, 256), (128, 128)):
            sizes = {"T": 33, "K": K, "V": V} | ({"L": K} if spec.name == "mixed_attn" else {})
            yield from both(spec, form, "fp32" if K in (1, 96, 256) else "bf16", "state", sizes)


def widths_of_companion(spec: OpSpec) -> Iterator[Case]:
    """Channels that do and do not fit tiles; every filter, over sequences longer and shorter than it."""
    flags = "state" if has_state(spec) else "plain"
    for D in (1, 2, 24, 64, 257, 1024):
        yield from both(spec, "direct", "bf16" if D in (64, 1024) else "fp32", flags, {"T": 9, "D": D})
    for W in range(1, 9) if "W" in symbols_of(spec) else ():
        for T in (3, 33):
            yield from both(spec, "direct", "fp32", "bias-activation.silu-state", {"T": T, "W": W})
            yield from both(spec, "direct", "fp32", "bias-activation.silu-state-varlen", {"T": T, "W": W})
    for rank in (1, 2, 4) if any(shape[0] == "..." for arg in spec.args for shape in arg.shapes) else ():
        for flags in (f"rank.{rank}", f"nonnorm_before_gate-rank.{rank}"):
            yield from both(spec, "direct", "fp32", flags)
    for size in (1, 4, 40) if "group_size" in spec.option_names else ():
        for flags in (f"group_size.{size}", f"nonnorm_before_gate-activation.sigmoid-group_size.{size}"):
            yield from both(spec, "direct", "fp32", flags)


def data(spec: OpSpec) -> Iterator[Case]:
    """Values, dtypes and layouts out of the ordinary."""
    if not has_state(spec):
        for flags in ("strided", "sliced", "headsfirst", "narrow", "wide"):
            yield from both(spec, "direct", "fp32", flags)
        yield from both(spec, "direct", "bf16", "narrow")
        return
    roles = {arg.name for arg in spec.args}
    forms = forms_of(spec)
    kinds = ["strided-state", "narrow-state", "wide-state"]
    if spec.name in COMPANIONS:
        kinds += ["sliced-state", "headsfirst-state"]
    if "g" in roles:
        kinds += ["zero-state", "reset-state", "reset-state-varlen", "huge-state", "long-state"]
    if spec.name in GATED:
        kinds.append("deep-state")
    if "gv" in roles:
        kinds += ["gv-zero-state", "gv-reset-state", "gv-huge-state"]
    if "beta" in roles:
        kinds += ["strong-state", "beta.BTHVV-strong-state"]
    for flags in kinds:
        for form in forms:
            yield from both(spec, form, "fp32", flags, {"T": 97} if {"huge", "long"} & set(flags.split("-")) else None)
    optional = [arg.name for arg in (*spec.args, *spec.keyword_args) if arg.optional]
    for form in forms if optional else ():
        yield from both(spec, form, "fp32", f"{'-'.join(optional)}-tail-state-varlen")
    for form in FORMS if spec.name in FAMILIES and spec.state_type is None else ():
        for short in ("bf16", "fp16"):
            yield from both(spec, form, short, "carry-state", {"T": 131})
    for form in forms:
        yield from both(spec, form, "bf16", "narrow-state")
        yield from both(spec, form, "fp32", "wide-state-varlen")
        yield from both(spec, form, "fp32", "many-state-varlen", {"T": 450, **small(spec)})
        yield from both(spec, form, "fp16", "far-state", {"T": 33}, frameworks=STRIDED, memory=16)


def properties(spec: OpSpec) -> Iterator[Case]:
    """What must hold between calls."""
    if not has_state(spec):
        for check in ("repeat", "repeat-backward"):
            yield from make(spec, "direct", "fp32", "plain", check, {"T": 97}, core=check == "repeat")
        return
    first = forms_of(spec)[0] if spec.name in COMPANIONS else "chunk"
    for form in forms_of(spec):
        core = {"split", "causal", "repeat"}
        for check in ("split", "packed", "causal", "repeat", "repeat-backward"):
            flags = "state-varlen" if check == "packed" else "state"
            yield from make(spec, form, "fp32", flags, check, {"T": 97}, core=check in core)
        yield from make(spec, form, "fp32", "tail-state-varlen", "packed", {"T": 97})
        yield from make(spec, form, "fp32", "state", "nan", {"T": 400 if form == "chunk" else 97})
        yield from make(spec, form, "bf16", "state", "split", {"T": 97})
        yield from make(spec, form, "bf16", "state", "causal", {"T": 97})
        yield from make(spec, form, "fp32", "state", "leak", wide(spec))
        if "g" in {arg.name for arg in spec.args}:
            yield from make(spec, form, "fp32", "state", "forgets", {"T": 97})
    yield from make(spec, first, "fp32", "state", "leak-backward", wide(spec))
    for short in ("fp32", "fp64") if first == "chunk" else ():
        yield from make(spec, first, short, "state", "agree", {"T": 97})
    if spec.name in GATED:
        yield from make(spec, "chunk", "fp32", "zero-state", "ungated", {"T": 97})


def small(spec: OpSpec, **more: int) -> dict[str, int]:
    """Small widths, where it is not values that matter."""
    return {"D": 8, **more} if spec.name in COMPANIONS else {"K": 16, "V": 8, **more}


def wide(spec: OpSpec) -> dict[str, int]:
    """Results that are large beside what a call needs otherwise."""
    return {"T": 17, "D": 2048, "W": 8} if spec.name in COMPANIONS else {"T": 17, "K": 16, "V": 256}


def feature_maps(spec: OpSpec) -> Iterator[Case]:
    """Each map."""
    if not spec.mapped:
        return
    if spec.name not in ("linear_attn", "mixed_attn"):
        # relu keeps keys no longer than one: the delta families would amplify every error with longer ones
        yield from make(spec, "chunk", "fp32", "phi.relu-state", "forward", {"T": 33})
        return
    sizes = {"T": 33, "K": WIDTH} | ({"L": WIDTH} if spec.name == "mixed_attn" else {})
    for name, phi in MAPS.items():
        yield from make(spec, "chunk", "fp32", f"phi.{name}-state", "forward", sizes)
        if spec.name == "linear_attn" and phi.normalizes:
            yield from make(spec, "chunk", "fp32", f"phi.{name}-normalize-final", "forward", sizes)


def input_maps(spec: OpSpec) -> Iterator[Case]:
    """Each map by itself, and one of each at once: outputs and gradients, raw projections and parameters included."""
    names = [option.name for option in spec.options]
    single = [f"{option.name}.{choice}" for option in spec.options if option.lowering for choice in option.choices]
    if "gate" in names:
        by_channel = "-gate.dt_bias.GK" if spec.name in ("gla", "kda", "dplr") else ""
        single += [f"gate.Softplus{by_channel}", "gate.BoundedSigmoid", "gate.LogSigmoid", "gate.NegExp"]
    several = [value for value in ("qk_norm.l2", "gate.Softplus", "beta_map.sigmoid") if value.partition(".")[0] in names]
    for form in FORMS if single else ():
        for flags in single:
            yield from both(spec, form, "fp32", f"{flags}-grouped-state-varlen")
        if len(several) > 1:
            for short in ("fp32", "bf16"):
                yield from both(spec, form, short, f"{'-'.join(several)}-state", core=short == "fp32")


def transforms(spec: OpSpec) -> Iterator[Case]:
    """The framework's own transforms."""
    form, flags = ("direct" if spec.name in COMPANIONS else "chunk"), ("state" if has_state(spec) else "plain")
    for check, frameworks in TRANSFORMS.items():
        yield from make(spec, form, "fp32", flags, check, small(spec, T=33), frameworks=frameworks)
    if form == "chunk":
        yield from make(spec, "recurrent", "fp32", "state", "compile", small(spec, T=1), frameworks=("torch",))


def large(spec: OpSpec) -> Iterator[Case]:
    """More than 2³¹ elements in one array, on devices that hold them."""
    if spec.name in ("simple_gla", "gla", "gated_delta_rule"):
        sizes = {"T": 2**18 + 37, "K": 64, "V": 128, "B": 1, "H": 65}
        yield from make(spec, "chunk", "bf16", "reset", "large", sizes, memory=60, device=True)


def decoding(spec: OpSpec) -> Iterator[Case]:
    """Decoding in place: one token, and the few of speculative decoding."""

    def cases(short: str, flags: str, check: str = "forward", T: int = 1, core: bool = False, **sizes: int) -> Iterator[Case]:
        frameworks = tuple(name for name in WRITABLE if name in HAVE_BFLOAT16) if short == "bf16" else WRITABLE
        window = {"L": 5} if "W" in symbols_of(spec) else {}
        yield from make(spec, "decode", short, flags, check, {"T": T, "B": 5} | window | sizes, core, frameworks=frameworks)

    for short in DTYPES:
        for flags in ("plain", "slots"):
            yield from cases(short, flags, core=short == "fp32")
            yield from cases(short, flags, T=4, core=short == "fp32")
    for atom in atoms(DECODING[spec.name]):
        yield from cases("fp32", atom)
        yield from cases("fp32", _joined(spec, atom, "slots"), T=4)
    for T in (0, 2, 16):
        yield from cases("fp32", "slots", T=T)
    yield from cases("fp32", "padding", T=2)
    kinds = ["strided-slots", "narrow-slots", "wide-slots", *(["phi.relu-slots"] if spec.mapped else [])]
    for flags in (*kinds, "reset-slots") if "g" in {arg.name for arg in spec.args} else kinds:
        yield from cases("fp32", flags, T=3)
    yield from cases("bf16", "narrow-slots", T=3)
    for name, value in (("qk_norm", "l2"), ("gate", "Softplus"), ("beta_map", "2sigmoid")):
        if name in DECODING[spec.name].option_names:
            yield from cases("fp32", f"{name}.{value}-slots", T=2)
    for K, V in ((1, 1), (1, 24), (128, 128), (256, 24)) if spec.name in FAMILIES else ():
        yield from cases("fp32", "slots", T=2, K=K, V=V)
    for W, L in ((1, 0), (1, 1), (2, 1), (3, 2), (4, 6), (8, 7), (8, 9)) if spec.name in COMPANIONS else ():
        for T in (1, 5):
            yield from cases("fp32", "bias-activation.silu-slots", T=T, W=W, L=L)
    yield from cases("fp32", "slots", "steps", T=6, core=True)
    yield from cases("fp32", "slots", "repeat", T=6, core=True)
    for check in ("compile", "export", "fake", "autocast"):
        for case in cases("fp32", "slots", check, **small(spec, T=2)):
            yield replace(case, frameworks=("torch",))
