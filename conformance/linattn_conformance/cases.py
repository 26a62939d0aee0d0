"""The cases: what is tried. Every case has a stable id, read left to right: operator, dtype, flags, sizes, check.

``gla/chunk/fp32/gv-state-varlen.tail/T65-K24-V40/gradient``

Values and gradients are tried on the rows of covering arrays, which :mod:`.factors` makes of the specs in
:data:`linattn.spec.FAMILIES` and :data:`linattn.spec.COMPANIONS`, so that a new family, optional argument, shape or option
gets its cases by being declared; beside them stand a few plain calls of each operator, and what is no question of values.
The list itself is checked in, as the manifest. Flags mean:

======================  ===============================================================================================
``plain``               nothing but the required arrays; no final state is asked for
``state``               an initial state is given and the final state asked for
``initial``, ``final``  only one of the two
``varlen.KIND``         packed sequences: :mod:`.packings` has the kinds. ``varlen`` are zero-length ones among others
``tail``                with ``varlen``: the last packed sequence ends before the last token
``i64``                 offsets, or slots, are int64
``grouped.N``           ``N`` value heads for each query/key head; two without a number
``gv``, ``bias``        the optional array of that name is given
``g.HV``                the array has the shape ``HV`` instead of the first one that the spec lists
``normalize``           the option of that name is set; ``noncausal`` is ``causal=False``
``scale.negative``      a scale below zero; ``zero``, ``one`` (an integer), ``large``, ``tiny`` likewise, or ``given``
``limits``              step sizes lie between two numbers; ``group_size.8`` is the option before the dot
``rank.N``              arrays of any dimensions have ``N`` of them instead of three
``fp16.NAME``           the array of that name has that dtype, whatever that of the operands
``narrow``, ``wide``    gates, beta and states are float16 (or the dtype of the operands) or float64; wide offsets are int64
``slots``               decoding: ``state_indices`` picks states out of order, with padding in between
``slots.all``           the same without padding; ``padding``: every row is padding
``strided``             no array is contiguous; the gaps hold NaN. ``strided.NAME``: only that one
``sliced``              every array is a part of a larger one, NaN around it
``headsfirst``          heads, or channels, lie before tokens in memory
``expanded``            values that repeat along an axis are there once, with a stride of 0
``reversed``            strides are negative, where frameworks have such
``readonly``            arrays cannot be written to
``misaligned``          memory begins in the middle of what is loaded at once
``far``                 tokens of q, k and v lie so far apart that offsets pass 2³¹ elements
``many``                300 packed sequences, of three tokens at most
``tiny`` to ``vast``    values and states are 2⁻⁸⁰, 2⁻⁸ (``small``), 2⁸ (``large``) or 2⁸⁰ times as large
``tiny.NAME``           the array of that name alone is 2⁻⁴² times as large; ``large.NAME``: 2³⁰ times, and what states are
                        taken away by, ``beta`` or ``b``, so much smaller that they do not grow
``blank.NAME``          it is zero throughout
``zeros.NAME``          every third token of the array of that name, or state, is zero; ``zeros.cotangents``: all gradients
                        that are fed in are; ``zeros.d_o``, ``zeros.d_state``: those of one output
``subnormal.NAME``      some numbers of it are the smallest that there are
``zero``                every gate is 0
``reset``               some gates are -inf, the first of all among them
``huge``                some gates are -1e4 to -1e9
``long``                gates add up to some -1e3 in a chunk, -1e2 a token among small ones
``mixed``               gates of every size from 0 to -inf
``deep``                a state of 1e18 that a first gate of -60 takes away
``strong``, ``edges``   beta between 1 and 2; beta of exactly 0, 1 or 2 among others
``carry``               a large float32 state to be carried past small writes
``phi.NAME``            the feature map of that name
``qk_norm.l2``          an input map, or an activation: the option before the dot has the value after it
``gate.NAME``           the gate object of that name, with all its parameters; ``gate.dt_bias.GK``: one a key channel
``only.NAME``           a gradient is asked of the array of that name alone
``constant.NAME``       no gradient is asked of it, nor of the parts of a state of that name
``loss.o``              what is differentiated reads the output alone; ``loss.state``: the final state alone
``KIND.cotangents``     the gradients fed in are laid out so; ``expanded``: one number for all
``retained``            gradients are asked for twice; ``accumulated``: they are left in the inputs
``no_grad``, …          the framework's mode of gradients: also ``inference``, and ``tracked``, where one may be asked for
``pack.3.0.5``          generated: packed sequences of these lengths
``parts``               rows of other lengths, heads of other widths, beyond which there is nothing: see :mod:`.parts`;
                        ``parts.N``: with N problems of its sizes before it
``seed.N``              other values
======================  ===============================================================================================
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import linattn  # noqa: F401 - declares the families
from linattn.call import method_name
from linattn.plugin import FORMS
from linattn.spec import COMPANIONS, DECODING, FAMILIES, SUMMARIES, OpSpec, spec_of

from .bad_input import RULES
from .factors import COTANGENTS, LAYOUTS, Call, group_size, hides, kind_of, plan_of
from .maps import MAPS, WIDTH

__all__ = ["DTYPES", "WITHIN", "Case", "content_hash", "cost", "every_case", "generate", "is_of", "named", "neighbours"]

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
HAVE_BFLOAT16 = ("torch", "jax", "mlx")
WITHIN = ("core", "training", "full")
"""The profiles that hold a case, from the narrowest: ``inference`` is ``training`` without gradients."""
BACKWARD = (
    "gradient",
    "repeat-backward",
    "leak-backward",
    "held-backward",
    "func-grad",
    "jit-gradient",
    "second",
    "parts-backward",
    "widths-backward",
)
"""Checks that ask for a gradient."""
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
    "jvp": ("torch", "jax"),
    "second": ("torch", "jax"),
}
"""Transforms, and the frameworks that have them."""
OF_ROWS = (("jvp", "second"), ("autocast",))
"""Transforms that rows of covering arrays have by turns, where they take no compiler's time."""
TURN = 12
"""Rows from one that has some of them to the next."""
USUAL = {"T": 65, "K": 24, "L": 16, "V": 40, "C": 16, "D": 40, "W": 4}
"""The sizes of every case that is not about sizes."""
CORE = {"family": 20, "decode": 30, "companion": 60}
"""Rows of a covering array that the profile ``core`` has: the first, which cover most. Rare levels have rows beside them.
Those of a family are tried in three forms.
"""
FRESH_OF_CORE = {"family": 10, "decode": 15, "companion": 30}
"""Those of a fresh array."""
FLAG = re.compile(r"[\w.]+")
OF_A_NAME = {*DTYPES, *LAYOUTS, "zeros", "blank", "subnormal", "only", "constant", "tiny", "large"}
WORDS = {
    "plain", "state", "initial", "final", "varlen", "tail", "many", "i64", "grouped", "limits", "rank", "narrow", "wide",
    "slots", "padding", "strided", "sliced", "headsfirst", "expanded", "reversed", "readonly", "misaligned", "far", "tiny",
    "small", "large", "vast", "zero", "reset", "huge", "long", "mixed", "deep", "strong", "edges", "carry", "phi", "loss",
    "zeros", "retained", "accumulated", "no_grad", "inference", "tracked", "pack", "parts", "seed",
}  # fmt: skip
"""What a flag may begin with, beside names of arrays and options."""
SIZE = re.compile(r"([A-Z])(\d+)")
SIZES_OF_PARTS: dict[str, tuple[dict[str, int], ...]] = {
    "": (
        {"T": 257, "K": 130, "V": 130, "B": 2, "H": 3},
        {"T": 40, "K": 32, "V": 32, "B": 5, "H": 9},
        {"T": 12, "K": 10, "V": 10, "B": 33, "H": 4, "G": 5},
        {"T": 16, "K": 256, "V": 8, "B": 5, "H": 3, "G": 5},
        {"T": 16, "K": 8, "V": 256, "B": 5, "H": 2, "G": 5},
        {"T": 4096, "K": 4, "V": 4, "B": 2, "H": 2},
    ),
    "short_conv": (
        {"T": 60, "D": 300, "B": 9},
        {"T": 300, "D": 40, "B": 12},
        {"T": 20, "D": 70, "B": 40},
        {"T": 4096, "D": 4, "B": 2},
    ),
}
"""Sizes of problems of which parts are taken, by operator; ``G`` is for value heads of a query/key head."""
LONG_PARTS = {"T": 4096, "K": 4, "V": 4, "B": 1, "H": 2}
"""Sizes of a problem of which the parts have the lengths around large powers of two, in the form for which that is cheap."""
SIZES_OF_WIDTHS = {"T": 6, "B": 2}
"""Sizes of a call of which there are many, each of another width."""
FIRST_OF_WIDTHS = 10
"""Rows of a covering array in the core from one that has many widths to the next."""
FIRST_OF_PARTS, TURN_OF_PARTS = 5, 20
"""Rows of a covering array from one whose levels such a problem has to the next, in the core and elsewhere."""
WITHOUT_PARTS = ("varlen", "gate", "qk_norm", "i64")
"""What flags begin with that a problem does not have of which parts are taken, nor one that hides what else there is."""
QUADRATIC = 2**21
"""Most weights between two tokens that the parallel form is to make."""
LONGEST_OF_CORE = {"recurrent": 257, "parallel": 257}
"""Tokens of a row that the profile ``core`` has in forms that have no chunks, where they are dear."""
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
        within: The narrowest profile that holds it, one of :data:`WITHIN`; the wider ones hold it too.
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
    within: str = "training"
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
        return self.dtype == "float64" or any(flag in ("wide", "i64") or flag.startswith("fp64.") for flag in self.flags)

    @property
    def block(self) -> Case:
        """The case that has the data of this one: itself, or one block of a ``large`` one."""
        return (
            replace(self, sizes=tuple((s, BLOCK if s == "T" else n) for s, n in self.sizes)) if self.check == "large" else self
        )

    @property
    def place(self) -> int | None:
        """Of a problem of which parts are taken, how many of its sizes come before it."""
        return next((int(flag.partition(".")[2] or 0) for flag in self.flags if flag.partition(".")[0] == "parts"), None)

    @property
    def needs_gradient(self) -> bool:
        return self.check in BACKWARD

    def applies(self, framework: str, device: str, memory: float = 0) -> bool:
        """True if the case is one for this framework and device; ``memory`` is the device's, in GiB."""
        on_host = device.partition(":")[0] == "cpu"
        fits = not self.device if on_host else not self.host and memory >= self.memory
        return fits and (not self.frameworks or framework in self.frameworks)


def named(name: str) -> Case:
    """The case of an id: of the manifest, or any other that the grammar of ids allows. ``ValueError`` if there is none."""
    from . import manifest

    entry = manifest.load().entries.get(name)
    if entry is not None:
        return manifest.case_of(name, entry)
    parts = name.split("/")
    known = {**FAMILIES, **COMPANIONS}
    if len(parts) == 6 and parts[0] in known and parts[2] in DTYPES:
        op, form, short, flags, written, check = parts
        if unknown := [flag for flag in flags.split("-") if not is_flag(known[op], flag)]:
            raise ValueError(f"no case has the id {name}: {unknown[0]!r} is no flag of {op}")
        for case in make(known[op], form, short, flags, check, sizes_in(written)):
            if case.id == name:
                return case
    raise ValueError(f"no case has the id {name}")


def is_flag(spec: OpSpec, flag: str) -> bool:
    """True for what may stand among the flags of an operator's cases."""
    names = {arg.name.partition(".")[0] for arg in spec.arrays(spec.defaults)} | {"state_indices", "state"}
    options = {*spec.option_names} | {f"non{name}" for name in spec.option_names}
    head, _, rest = flag.partition(".")
    if not FLAG.fullmatch(flag):
        return False
    if head in OF_A_NAME and rest:
        return rest in names | {"cotangents", *COTANGENTS}
    return head in WORDS | names | options


def parsed(name: str, **more: Any) -> Case:
    """The case of an id, with the rest of what the manifest knows of it."""
    parts = name.split("/")
    op, form, short = parts[:3]
    if parts[3] == "bad-input":
        return Case(name, op, form, DTYPES[short], (), (), "bad-input", **more)
    flags = tuple(flag for flag in parts[3].split("-") if flag != "plain")
    return Case(name, op, form, DTYPES[short], flags, tuple(sizes_in(parts[4]).items()), parts[5], **more)


def sizes_in(written: str) -> dict[str, int]:
    """The sizes that an id tells."""
    return {symbol: int(size) for symbol, size in SIZE.findall(written)}


@functools.cache
def every_case() -> tuple[Case, ...]:
    """Every case of this API version, as the manifest lists them."""
    from . import manifest

    return neighbours(manifest.cases_of(manifest.load()))


def cost(case: Case) -> tuple[bool, int]:
    """What orders cases so that cheap ones, and those that look at values, come first."""
    return case.check not in ("forward", "gradient"), math.prod(size for _, size in case.sizes)


def neighbours(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Cases without repetition, those on the same data side by side, so that its truth is worked out once: those with gradients
    first, whose truth holds that of the others.
    """
    found = {case.id: case for case in cases}
    order: dict[Any, int] = {}
    for case in found.values():
        order.setdefault(problem(case), len(order))
    return tuple(sorted(found.values(), key=lambda case: (order[problem(case)], not case.needs_gradient)))


def problem(case: Case) -> tuple[object, ...]:
    """What the data of a case depends on: no check, and of forms only whether there is a pool of states."""
    pool = ("decode",) if case.form == "decode" else ()
    return case.op, case.dtype, case.flags, case.sizes, *pool


def content_hash(cases: tuple[Case, ...]) -> str:
    """Changes if any case changes in any field."""
    told = attrgetter(*(field.name for field in fields(Case)))
    text = json.dumps([told(case) for case in sorted(cases, key=lambda case: case.id)])
    return hashlib.sha256(text.encode()).hexdigest()


# -- generation ------------------------------------------------------------------------------------------------------


def generate() -> Iterator[Case]:
    """All cases; an id that comes twice is the same case, first come first kept."""
    for spec in (*FAMILIES.values(), *COMPANIONS.values()):
        yield from landmarks(spec)
        yield from covering(spec)
        yield from parts(spec)
        yield from long_parts(spec)
        yield from widths(spec)
        yield from data(spec)
        yield from properties(spec)
        yield from history(spec)
        yield from feature_maps(spec)
        yield from transforms(spec)
        yield from large(spec)
        yield from decoding(spec) if spec.name in DECODING else ()
    for rule in RULES:
        name = f"{rule.op}/{rule.form}/fp32/bad-input/{rule.name}"
        frameworks = WRITABLE if rule.form == "decode" else ()
        yield Case(name, rule.op, rule.form, "float32", (), (), "bad-input", False, "core", frameworks, host=rule.reads)


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
    narrow = short == "bf16" or any(flag.startswith("bf16.") for flag in chosen)
    frameworks = more.pop("frameworks", HAVE_BFLOAT16 if narrow else ())
    chosen = tuple(flag for flag in chosen if flag != "plain")
    within = more.pop("within", "core" if core else "training")
    yield Case(name, spec.name, form, DTYPES[short], chosen, named, check, core, within, frameworks, **more)


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
    options["initial_state"] = True if {"state", "initial"}.intersection(flags) else None
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


def landmarks(spec: OpSpec) -> Iterator[Case]:
    """The calls that an operator cannot lack: float32, with and without a state, over chunk boundaries. Beside them a few that
    nobody should have to look for: lengths around a chunk size that is given, no tokens, packed sequences, resets, and
    whatever is optional.
    """
    kinds = ["plain", *(["state"] if has_state(spec) else [])]
    given = [arg.name for arg in (*spec.args, *spec.keyword_args) if arg.optional]
    given += ["grouped"] if "grouped" in atoms(spec) else []
    values = [f"reset-{kinds[-1]}"] if "g" in {arg.name for arg in spec.args} else []
    values += [f"limits-{kinds[-1]}"] if "limits" in atoms(spec) else []
    for form in forms_of(spec):
        for flags in kinds:
            yield from both(spec, form, "fp32", flags, core=True)
        yield from both(spec, form, "fp32", kinds[-1], {"T": 131}, core=True)
        yield from both(spec, form, "fp32", kinds[-1], {"T": 97})
        for T in (0, 127):
            yield from both(spec, form, "fp32", kinds[-1], {"T": T}, within="core")
        for T in (15, 16, 17) if form == "chunk" else ():
            yield from both(spec, form, "fp32", "state", {"T": T, "C": 16})
        for flags in ("tail-state-varlen", *values) if has_state(spec) else ():
            yield from both(spec, form, "fp32", flags, within="core")
        for flags in ("state-varlen", "-".join([*given, "state-varlen"])) if has_state(spec) else given:
            yield from both(spec, form, "fp32", flags, within="core")
    for sizes in ({"T": 97, "K": 128, "V": 128}, {"T": 70, "K": 256, "V": 96}) if spec.name in FAMILIES else ():
        linear = {"L": sizes["K"]} if "L" in symbols_of(spec) else {}
        for form in FORMS:
            yield from both(spec, form, "bf16" if sizes["K"] == 128 else "fp32", kinds[-1], {**sizes, **linear, "B": 1})
    if forms_of(spec) == FORMS:
        yield from both(spec, "auto", "fp32", kinds[-1], within="core")


def covering(spec: OpSpec, seed: int = 0, profile: str = "full") -> Iterator[Case]:
    """The rows of a family's covering array, outputs and gradients, in some of its forms."""
    for i, (row, least) in enumerate(rows(spec, "", seed, profile)):
        sizes = dict(row.sizes)
        for form, within in forms_of_row(spec, i, sizes, least, seed, least == "core"):
            if is_of(profile, within):
                yield from both(spec, form, row.dtype, seeded(row.flags, seed), sizes, within=within)
        for check in OF_ROWS[i // TURN % len(OF_ROWS)] if i % TURN == 0 and least != "core" else ():
            if transformable(spec, row, check):
                form = FORMS[1 + i // TURN // len(OF_ROWS) % 2] if forms_of(spec) == FORMS else "direct"
                flags = seeded(row.flags, seed)
                yield from make(spec, form, row.dtype, flags, check, dict(row.sizes), within=least, frameworks=("torch",))


def forms_of_row(
    spec: OpSpec, i: int, sizes: Mapping[str, int], least: str, seed: int, every: bool = False
) -> Iterator[tuple[str, str]]:
    """The forms that a row is tried in, and of each the narrowest profile that has it there: one by turns, and ``full`` has the
    rest, unless profiles have ``every`` form of it; a fresh row has one. Every eighth has the bare name as well.
    """
    if forms_of(spec) != FORMS:
        yield from ((form, least) for form in forms_of(spec))
        return
    square = sizes["T"] ** 2 * sizes["B"] * sizes["H"] > QUADRATIC
    forms = (*(form for form in FORMS if form != "parallel" or not square), *(["auto"] if i % 8 == 0 else []))
    first = forms[(i + 3 * (i // 8)) % len(forms)]
    for form in (first,) if seed else forms:
        late = least == "core" and sizes["T"] > LONGEST_OF_CORE.get(form, sizes["T"])
        yield form, ("training" if late else least) if every or form == first else "full"


def transformable(spec: OpSpec, row: Call, check: str) -> bool:
    """True for a row with something to see: outputs that are linear in values, or operands that autocast casts."""
    if check == "autocast":
        return row.dtype in ("fp32", "fp16")
    flags = set(row.flags.split("-"))
    if spec.name == "short_conv" and flags & {"bias", "activation.silu"}:
        return False
    keys = check == "second" and (spec.state_type is not None or "normalize" in flags)  # a final state that holds some
    return linear(spec) and (not keys or "loss.o" in flags)


def linear(spec: OpSpec) -> bool:
    """True of all but a norm: outputs are linear in values and states."""
    return spec.name != "gated_rms_norm"


def covering_of_decoding(spec: OpSpec, seed: int = 0, profile: str = "full") -> Iterator[Case]:
    """The rows of decoding in place."""
    for row, within in rows(DECODING[spec.name], "decode", seed, profile):
        for case in make(spec, "decode", row.dtype, seeded(row.flags, seed), "forward", dict(row.sizes), within=within):
            yield replace(case, frameworks=tuple(name for name in case.frameworks or WRITABLE if name in WRITABLE))


def parts(spec: OpSpec, seed: int = 0, profile: str = "full") -> Iterator[Case]:
    """Problems of which parts are taken, at sizes of their own, with the other levels of some rows of a covering array."""
    listed = SIZES_OF_PARTS.get(spec.name, SIZES_OF_PARTS[""]) if has_state(spec) else ()
    for i, (row, least) in enumerate(rows(spec, "", seed, profile)) if listed else ():
        n, rest = divmod(i, FIRST_OF_PARTS)
        if rest or (least != "core" and i % TURN_OF_PARTS):
            continue
        own = {symbol: size for symbol, size in row.sizes if symbol == "W" or (symbol == "C" and spec.state_type is not None)}
        sizes = {**listed[n % len(listed)]}
        groups = sizes.pop("G", 1)
        sizes = {**own, **sizes, **({"L": sizes["K"]} if "L" in symbols_of(spec) and "K" in sizes else {})}
        place = f"parts.{n // len(listed)}" if n >= len(listed) else "parts"
        flags = {place, *(flag for flag in row.flags.split("-") if has_parts(spec, row.dtype, flag))}
        if spec.state_type is None and not {"state", "initial", "final"}.intersection(flags):
            flags.add("state")  # there is more to see
        if groups > 1 and "grouped" in atoms(spec) and not any(flag.startswith("grouped") for flag in flags):
            flags.add(f"grouped.{groups}")
        for form, within in forms_of_row(spec, n, sizes, least, seed, every=n % len(listed) == 0):
            if form == "auto":
                continue
            for check in ("parts", "parts-backward") if is_of(profile, within) else ():
                yield from make(spec, form, row.dtype, seeded("-".join(sorted(flags)), seed), check, sizes, within=within)


def long_parts(spec: OpSpec) -> Iterator[Case]:
    """A problem whose parts have the lengths around large powers of two, which hardly a row has."""
    if spec.name in FAMILIES:
        sizes = LONG_PARTS | ({"L": LONG_PARTS["K"]} if "L" in symbols_of(spec) else {})
        yield from make(
            spec, "chunk", "fp32", "parts" if spec.state_type is not None else "parts-state", "parts", sizes, within="core"
        )


def widths(spec: OpSpec, seed: int = 0, profile: str = "full") -> Iterator[Case]:
    """Calls of many widths, with the other levels of some rows, of what has no state and so no parts."""
    listed = rows(spec, "", seed, profile) if not has_state(spec) else ()
    for i, (row, least) in enumerate(listed):
        if i % (FIRST_OF_WIDTHS if least == "core" else TURN_OF_PARTS) == 0 and not any(map(hides, row.flags.split("-"))):
            sizes = {**dict(row.sizes), **SIZES_OF_WIDTHS, "D": max(group_size(row.flags.split("-")), 1) * USUAL["D"]}
            for check in ("widths", "widths-backward"):
                yield from make(spec, "direct", row.dtype, seeded(row.flags, seed), check, sizes, within=least)


def has_parts(spec: OpSpec, dtype: str, flag: str) -> bool:
    """Whether a problem with a flag has parts; of results that float16 does not hold nothing is seen."""
    if dtype == "fp16" and flag.endswith("scale.tiny"):
        return False
    head = flag.partition(".")[0]
    of_a_state = spec.state_type is not None and head in ("state", "initial", "final", "loss")
    return flag != "plain" and not of_a_state and not hides(flag) and not {flag, head}.intersection(WITHOUT_PARTS)


def seeded(flags: str, seed: int) -> str:
    """The flags of a row: a fresh one says the seed that its values are drawn from."""
    return f"{flags}-seed.{seed}" if seed else flags


def rows(spec: OpSpec, form: str, seed: int, profile: str) -> Iterator[tuple[Call, str]]:
    """The rows of an array, and of each the narrowest profile that has it."""
    first = (FRESH_OF_CORE if seed else CORE)[kind_of(spec, form)]
    plan = plan_of(spec, form, seed, first if profile == "core" else 0, triples=profile == "full")
    spanning = plan.spanning(first)
    for i, row in enumerate(plan.calls):
        within = "core" if i in spanning else "training" if i < plan.covering.pairs else "full"
        if is_of(profile, within):
            yield row, within


def is_of(profile: str, within: str) -> bool:
    """Whether a profile has the rows of the narrowest profile that does."""
    return WITHIN.index(within) <= WITHIN.index("training" if profile == "inference" else profile)


def data(spec: OpSpec) -> Iterator[Case]:
    """What no row of a covering array has: memory that is far apart, and states that must be carried in float32."""
    forms = forms_of(spec)
    for form in FORMS if spec.name in FAMILIES and spec.state_type is None else ():
        for short in ("bf16", "fp16"):
            yield from both(spec, form, short, "carry-state", {"T": 131})
    for form in forms if has_state(spec) else ():
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
    for flags in ("state", "grouped-state-varlen") if spec.name in SUMMARIES else ():
        yield from make(spec, "chunk", "fp32", flags, "summary", {"T": 97})


def history(spec: OpSpec) -> Iterator[Case]:
    """What a call may not know of the calls before it, of those beside it, and of its process."""
    flags = "state" if has_state(spec) else "plain"
    sizes = small(spec, T=33)

    def each(form: str, check: str, T: int = 33, **more: Any) -> Iterator[Case]:
        flags_of = "slots.all" if form == "decode" else flags
        pool = {"B": 3, **({"L": 5} if "W" in symbols_of(spec) else {})} if form == "decode" else {}
        yield from make(spec, form, "fp32", flags_of, check, {**sizes, "T": T, **pool}, **more)

    for form in forms_of(spec):
        for check in ("held", "held-backward", "rewritten", "often", "shapes"):
            yield from each(form, check, within="core", frameworks=WRITABLE if check == "rewritten" else ())
        yield from each(form, "threads", frameworks=("numpy", "torch"))
        yield from each(form, "surroundings", frameworks=("torch",))
        yield from each(form, "forked", frameworks=("numpy", "torch"), host=True)
        if form in ("chunk", "direct"):
            yield from each(form, "keeps", 100, frameworks=("numpy", "torch"))
        yield from each(form, "streams", frameworks=("torch",), device=True)
        yield from each(form, "replayed", frameworks=("torch",), device=True)
    for check in ("often", "rewritten") if spec.name in DECODING else ():
        yield from each("decode", check, 2, within="core", frameworks=WRITABLE)


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


def transforms(spec: OpSpec) -> Iterator[Case]:
    """The framework's own transforms."""
    form, flags = ("direct" if spec.name in COMPANIONS else "chunk"), ("state" if has_state(spec) else "plain")
    for check, frameworks in TRANSFORMS.items():
        if check in ("jvp", "second") and not linear(spec):
            continue
        more = "-loss.o" if check == "second" and spec.state_type is not None else ""
        yield from make(spec, form, "fp32", flags + more, check, small(spec, T=33), frameworks=frameworks)
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

    for flags in ("plain", "slots"):
        for T in (1, 4):
            yield from cases("fp32", flags, T=T, core=True)
    yield from covering_of_decoding(spec)
    yield from cases("fp32", "phi.relu-slots", T=3) if spec.mapped else ()
    yield from cases("fp32", "slots", "steps", T=6, core=True)
    yield from cases("fp32", "slots", "repeat", T=6, core=True)
    for check in ("compile", "export", "fake", "autocast"):
        for case in cases("fp32", "slots", check, **small(spec, T=2)):
            yield replace(case, frameworks=("torch",))
