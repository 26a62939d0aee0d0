"""The cases: what is tried. Every case has a stable id, read left to right: operator, dtype, flags, sizes, check.

``gla/chunk/fp32/gv-state-varlen/T65-K24-V40/gradient``

The list is generated from the specs in :data:`linattn.spec.FAMILIES`, so that a new family, optional argument, shape or
flag gets its cases by being declared. Flags mean:

===================  ==================================================================================================
``plain``            nothing but the required arrays; no final state is asked for
``state``            an initial state is given and the final state asked for
``final``            the final state alone is asked for
``varlen``           packed sequences, zero-length ones among them
``grouped``          two value heads for each query/key head
``gv``, ``bias``     the optional array of that name is given
``g.HV``             the array has the shape ``HV`` instead of the first one that the spec lists
``normalize``        the option of that name is set; ``noncausal`` is ``causal=False``
``scale``            every scale is given
``narrow``, ``wide`` gates, beta and states are float16 (or the dtype of the operands) or float64; wide offsets are int64
``slots``            decoding: ``state_indices`` picks states out of order, with padding in between
``padding``          decoding: every row is padding
``strided``          no array is contiguous; the gaps hold NaN
``far``              tokens of q, k and v lie so far apart that offsets pass 2³¹ elements
``sliced``           every array is a part of a larger one, NaN around it
``headsfirst``       heads lie before tokens in memory
``many``             300 packed sequences, of three tokens at most
``zero``             every gate is 0
``reset``            some gates are -inf
``huge``             some gates are -1e4
``long``             gates add up to some -1e3 in a chunk, -1e2 a token among small ones
``deep``             a state of 1e18 that a first gate of -60 takes away
``strong``           beta between 1 and 2
``carry``            a large float32 state to be carried past small writes
``phi.NAME``         the feature map of that name
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
from linattn.plugin import FORMS
from linattn.spec import DECODING, FAMILIES, OpSpec, spec_of

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
        return self.op if self.form == "auto" else f"{self.form}_{self.op}"

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
    if len(parts) == 6 and parts[0] in FAMILIES and parts[2] in DTYPES:
        op, form, short, flags, written, check = parts
        sizes = {symbol: int(size) for symbol, size in re.findall(r"([A-Z])(\d+)", written)}
        for case in make(FAMILIES[op], form, short, flags, check, sizes):
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
    for spec in FAMILIES.values():
        yield from grid(spec)
        yield from lengths(spec)
        yield from widths(spec)
        yield from data(spec)
        yield from properties(spec)
        yield from feature_maps(spec)
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
    sizes = {"T": 65, "K": 24, "V": 40} | (sizes or {})
    if spec.name == "mixed_attn":
        sizes = {"L": 16, "C": 16} | sizes
    named = tuple((symbol, sizes[symbol]) for symbol in ("T", "K", "L", "V", "C", "B", "H") if symbol in sizes)
    written = "-".join(f"{symbol}{size}" for symbol, size in named)
    name = f"{spec.name}/{form}/{short}/{flags}/{written}/{check}"
    frameworks = more.pop("frameworks", HAVE_BFLOAT16 if short == "bf16" else ())
    chosen = tuple(flag for flag in chosen if flag != "plain")
    yield Case(name, spec.name, form, DTYPES[short], chosen, named, check, core, frameworks, **more)


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
    return [*found, "scale"]


def both(
    spec: OpSpec, form: str, short: str, flags: str, sizes: dict[str, int] | None = None, core: bool = False, **more
) -> Iterator[Case]:
    """Outputs, and gradients of every input."""
    for check in ("forward", "gradient"):
        yield from make(spec, form, short, flags, check, sizes, core, **more)


def grid(spec: OpSpec) -> Iterator[Case]:
    """Family × form × dtype × flag."""
    for short in DTYPES:
        everywhere = ["plain", "state-varlen"]
        everywhere += [_joined(atom, "state-varlen") for atom in atoms(spec)]
        once = ["state", "final", "varlen", *atoms(spec)]
        for flags in everywhere + (once if short == "fp32" else []):
            for form in FORMS:
                yield from both(spec, form, short, flags, core=short == "fp32" and flags in ("plain", "state"))


def _joined(atom: str, flags: str) -> str:
    if atom == "noncausal":
        return f"{atom}-varlen"
    return f"{atom}-{flags}" if atom in ("grouped", "normalize") else f"{atom}-grouped-{flags}"


def lengths(spec: OpSpec) -> Iterator[Case]:
    """Around nothing, one token, chunk boundaries, and primes."""
    for form in (*FORMS, "auto"):
        for T in (0, 1) if form == "auto" else (0, 1, 2, 63, 64, 97, 131, 257):
            yield from both(spec, form, "fp32", "state", {"T": T}, core=T == 131)
        for T in () if form in ("recurrent", "auto") else (15, 16, 17, 48):
            yield from both(spec, form, "fp32", "state", {"T": T, "C": 16})
        for T in () if form == "auto" else (0, 5, 150):
            yield from both(spec, form, "fp32", "state-varlen", {"T": T})


def widths(spec: OpSpec) -> Iterator[Case]:
    """Widths that do and do not fit tiles, ``K ≠ V``."""
    for form in FORMS:
        for K, V in ((1, 1), (1, 24), (64, 64), (96, 128), (256, 24), (24, 256), (128, 128)):
            sizes = {"T": 33, "K": K, "V": V} | ({"L": K} if spec.name == "mixed_attn" else {})
            yield from both(spec, form, "fp32" if K in (1, 96, 256) else "bf16", "state", sizes)


def data(spec: OpSpec) -> Iterator[Case]:
    """Values, dtypes and layouts out of the ordinary."""
    roles = {arg.name for arg in spec.args}
    kinds = ["strided-state", "narrow-state", "wide-state"]
    if "g" in roles:
        kinds += ["zero-state", "reset-state", "reset-state-varlen", "huge-state", "long-state"]
    if spec.name in GATED:
        kinds.append("deep-state")
    if "gv" in roles:
        kinds += ["gv-zero-state", "gv-reset-state", "gv-huge-state"]
    if "beta" in roles:
        kinds += ["strong-state", "beta.BTHVV-strong-state"]
    for flags in kinds:
        for form in FORMS:
            yield from both(spec, form, "fp32", flags, {"T": 97} if {"huge", "long"} & set(flags.split("-")) else None)
    for form in FORMS if spec.name != "mixed_attn" else ():
        for short in ("bf16", "fp16"):
            yield from both(spec, form, short, "carry-state", {"T": 131})
    for form in FORMS:
        yield from both(spec, form, "bf16", "narrow-state")
        yield from both(spec, form, "fp32", "wide-state-varlen")
        yield from both(spec, form, "fp32", "many-state-varlen", {"T": 450, "K": 16, "V": 8})
        yield from both(spec, form, "fp16", "far-state", {"T": 33}, frameworks=STRIDED, memory=16)


def properties(spec: OpSpec) -> Iterator[Case]:
    """What must hold between calls."""
    for form in FORMS:
        core = {"split", "causal", "repeat"}
        for check in ("split", "packed", "causal", "repeat", "repeat-backward"):
            flags = "state-varlen" if check == "packed" else "state"
            yield from make(spec, form, "fp32", flags, check, {"T": 97}, core=check in core)
        yield from make(spec, form, "fp32", "state", "nan", {"T": 400 if form == "chunk" else 97})
        yield from make(spec, form, "bf16", "state", "split", {"T": 97})
        yield from make(spec, form, "bf16", "state", "causal", {"T": 97})
        yield from make(spec, form, "fp32", "state", "leak", {"T": 17, "K": 16, "V": 256})
        if "g" in {arg.name for arg in spec.args}:
            yield from make(spec, form, "fp32", "state", "forgets", {"T": 97})
    yield from make(spec, "chunk", "fp32", "state", "leak-backward", {"T": 17, "K": 16, "V": 256})
    yield from make(spec, "chunk", "fp32", "state", "agree", {"T": 97})
    yield from make(spec, "chunk", "fp64", "state", "agree", {"T": 97})
    if spec.name in GATED:
        yield from make(spec, "chunk", "fp32", "zero-state", "ungated", {"T": 97})


def feature_maps(spec: OpSpec) -> Iterator[Case]:
    """Each map."""
    if spec.name not in ("linear_attn", "mixed_attn"):
        # relu keeps keys no longer than one: the delta families would amplify every error with longer ones
        yield from make(spec, "chunk", "fp32", "phi.relu-state", "forward", {"T": 33})
        return
    sizes = {"T": 33, "K": WIDTH} | ({"L": WIDTH} if spec.name == "mixed_attn" else {})
    for name, phi in MAPS.items():
        yield from make(spec, "chunk", "fp32", f"phi.{name}-state", "forward", sizes)
        if spec.name == "linear_attn" and phi.normalizes:
            yield from make(spec, "chunk", "fp32", f"phi.{name}-normalize-final", "forward", sizes)


def transforms(spec: OpSpec) -> Iterator[Case]:
    """The framework's own transforms."""
    small = {"T": 33, "K": 16, "V": 8}
    for check, frameworks in TRANSFORMS.items():
        yield from make(spec, "chunk", "fp32", "state", check, small, frameworks=frameworks)
    yield from make(spec, "recurrent", "fp32", "state", "compile", {"T": 1, "K": 16, "V": 8}, frameworks=("torch",))


def large(spec: OpSpec) -> Iterator[Case]:
    """More than 2³¹ elements in one array, on devices that hold them."""
    if spec.name in ("simple_gla", "gla", "gated_delta_rule"):
        sizes = {"T": 2**18 + 37, "K": 64, "V": 128, "B": 1, "H": 65}
        yield from make(spec, "chunk", "bf16", "reset", "large", sizes, memory=60, device=True)


def decoding(spec: OpSpec) -> Iterator[Case]:
    """Decoding in place: one token, and the few of speculative decoding."""

    def cases(short: str, flags: str, check: str = "forward", T: int = 1, core: bool = False, **sizes: int) -> Iterator[Case]:
        frameworks = tuple(name for name in WRITABLE if name in HAVE_BFLOAT16) if short == "bf16" else WRITABLE
        yield from make(spec, "decode", short, flags, check, {"T": T, "B": 5} | sizes, core, frameworks=frameworks)

    for short in DTYPES:
        for flags in ("plain", "slots"):
            yield from cases(short, flags, core=short == "fp32")
            yield from cases(short, flags, T=4, core=short == "fp32")
    for atom in atoms(DECODING[spec.name]):
        yield from cases("fp32", atom)
        yield from cases("fp32", _joined(atom, "slots"), T=4)
    for T in (0, 2, 16):
        yield from cases("fp32", "slots", T=T)
    yield from cases("fp32", "padding", T=2)
    kinds = ["strided-slots", "narrow-slots", "wide-slots", "phi.relu-slots"]
    for flags in (*kinds, "reset-slots") if "g" in {arg.name for arg in spec.args} else kinds:
        yield from cases("fp32", flags, T=3)
    yield from cases("bf16", "narrow-slots", T=3)
    for K, V in ((1, 1), (1, 24), (128, 128), (256, 24)):
        yield from cases("fp32", "slots", T=2, K=K, V=V)
    yield from cases("fp32", "slots", "steps", T=6, core=True)
    yield from cases("fp32", "slots", "repeat", T=6, core=True)
    for check in ("compile", "export", "fake", "autocast"):
        for case in cases("fp32", "slots", check, T=2, K=16, V=8):
            yield replace(case, frameworks=("torch",))
