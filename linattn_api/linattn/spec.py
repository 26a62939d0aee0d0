"""What an operator takes: arguments, symbolic shapes, options. Validation of a call is read off this description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from .call import Call

__all__ = [
    "COMPANIONS",
    "DECODING",
    "FAMILIES",
    "SUMMARIES",
    "SYMBOLS",
    "Arg",
    "Holder",
    "Lowered",
    "Lowering",
    "OpSpec",
    "Option",
    "as_recurrent",
    "decoding_of",
    "lowerings_of",
    "spec_of",
    "summary_of",
]

SYMBOLS = {
    "B": "batch",
    "T": "sequence length",
    "N": "number of sequences",
    "P": "states in a pool",
    "H": "query/key heads",
    "HV": "value heads",
    "K": "key width of one head",
    "V": "value width of one head",
    "G": "heads of the decay",
    "L": "width of one linear head",
    "C": "chunk size",
    "D": "channels",
    "W": "width of a filter",
}

Role = Literal["operand", "float", "index"]


Options = Mapping[str, Any]
Sizes = Mapping[str, int]

# One order of keywords for every family, so that signatures read alike.
KEYWORD_ORDER = (
    "activation", "eps", "norm_before_gate", "group_size",
    "qk_norm", "gate", "beta_map", "state", "state_indices", "D", "z", "dt_bias",
    "dt_softplus", "dt_limit", "bias", "scale", "quad_scale", "lin_scale", "causal", "normalize",
    "initial_state", "output_final_state", "cu_seqlens", "chunk_size",
)  # fmt: skip


def default_scale(options: Options, sizes: Sizes) -> dict[str, Any]:
    """``scale=None`` means ``K ** -0.5``."""
    scale = options["scale"]
    return {**options, "scale": sizes["K"] ** -0.5 if scale is None else float(scale)}


def no_resolution(options: Options, sizes: Sizes) -> dict[str, Any]:
    """No default depends on sizes."""
    return dict(options)


def no_size_complaint(options: Options, sizes: Sizes) -> str | None:
    """Allow every size."""
    return None


def no_complaint(form: str | None, options: Options) -> str | None:
    """Allow every combination."""
    return None


def stateless(options: Options) -> tuple[Arg, ...]:
    """No state is taken."""
    return ()


def never_blocked(call: Call) -> str | None:
    """Allow every call to be lowered."""
    return None


@dataclass(frozen=True)
class Arg:
    """One array argument.

    Args:
        name: Parameter name.
        shape: Symbolic shape; alternatives separated by ``|``, e.g. ``"B T HV | HV"``. ``...`` in front stands for any
            dimensions, the same in every array.
        role: ``"operand"`` arrays share one dtype (float16, bfloat16, float32 or float64), ``"float"`` ones have any float
            dtype, ``"index"`` ones are int32 or int64.
        optional: May be ``None``.
        title: What messages call it; its name, unless that is a symbol too.
    """

    name: str
    shape: str
    role: Role = "operand"
    optional: bool = False
    title: str = ""
    shapes: tuple[tuple[str, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        shapes = tuple(tuple(alternative.split()) for alternative in self.shape.split("|"))
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "title", self.title or self.name)


Finish = Callable[[Any, Any], tuple[Any, Any]]
"""Turns a general family's ``(o, final_state)`` into the special one's."""


class Lowered(NamedTuple):
    """A call rewritten for a more general family.

    Attributes:
        arrays: Values of the general family's arrays by name.
        options: Keyword arguments of the general family.
        finish: Turns the general family's ``(o, final_state)`` into this family's.
    """

    arrays: dict[str, Any]
    options: dict[str, Any]
    finish: Finish


def unchanged(o: Any, state: Any) -> tuple[Any, Any]:
    """The general family's results are this family's."""
    return o, state


@dataclass(frozen=True)
class Lowering:
    """How a call becomes one that more backends run: one of a more general family, or one without an option.

    Args:
        to: Name of the general family; ``None`` for the lowering of an option, which leaves the family as it is.
        apply: ``apply(xp, arrays, options) -> Lowered``, written against the caller's
            :class:`~linattn.frameworks.Framework`.
        describe: The static facts of the lowered call, from those of the call.
        blocked: The reason why this call has no such form, or ``None``.
    """

    to: str | None
    apply: Callable[[Any, dict[str, Any], dict[str, Any]], Lowered]
    describe: Callable[[Call], Call]
    blocked: Callable[[Call], str | None] = never_blocked


@dataclass(frozen=True)
class Holder:
    """A kind of objects that hold arrays, as the value of an option.

    An object has ``leaves``, its arrays, and a ``kind``, what is static of it. A plan rests on the kind and on the facts of the
    arrays; a method gets the object.

    Args:
        objects: Class of the objects.
        shapes: From a kind, the symbolic shape of each array by its name in the object, in the order of ``leaves``.
        title: What messages call an object.
    """

    objects: type[Any]
    shapes: Callable[[Any], Mapping[str, str]]
    title: str


@dataclass(frozen=True)
class Option:
    """One static keyword argument of a family.

    Args:
        name: Parameter name.
        types: The Python types that its value may have; with a holder, a named tuple of constants, the kind of its objects.
        default: Its default, which may always be given.
        choices: The values of a string.
        hint: It never changes a result, and is not passed to a method that does not take it, whatever its value.
        lowering: Applies it for a method that does not take it.
        holder: What its objects are, if they hold arrays; its value in a :class:`~linattn.plugin.Call` is then the kind of the
            object.
    """

    name: str
    types: tuple[type, ...]
    default: Any = None
    choices: tuple[str, ...] = ()
    hint: bool = False
    lowering: Lowering | None = None
    holder: Holder | None = None

    def admits(self, value: Any) -> bool:
        """True for the default, and for a value of one of the types; NumPy's scalars are numbers, a bool is none."""
        if value is self.default or isinstance(value, bool):
            return value is self.default or bool in self.types
        if self.choices:
            return value in self.choices
        if self.holder is not None:
            return isinstance(value, self.types)
        if tuple in self.types:
            return isinstance(value, tuple)
        number = Real if float in self.types else Integral if int in self.types else ()
        return isinstance(value, number)

    def asked(self, call: Call) -> bool:
        """True if a call asks something of it: any value but the default."""
        value: Any = call.option(self.name, self.default)
        return value is not self.default and (type(value) is not type(self.default) or value != self.default)

    @property
    def expected(self) -> tuple[str, ...]:
        """What it may be, for messages."""
        if self.holder is not None:
            return (self.holder.title,)
        return tuple(repr(choice) for choice in self.choices) or tuple(kind.__name__ for kind in self.types)

    def arrays(self, value: Any) -> tuple[Arg, ...]:
        """The arrays that an object of kind ``value`` holds: none if there is none."""
        if self.holder is None or value is None:
            return ()
        return tuple(Arg(f"{self.name}.{name}", shape, "float") for name, shape in self.holder.shapes(value).items())


def accumulation_dtype(call: Call) -> str:
    """The dtype that a call accumulates in: float64 for float64 operands, else float32."""
    return "float64" if call.dtype == "float64" else "float32"


def redescribe(
    call: Call,
    op: str,
    give: Mapping[str, tuple[str, str]] | None = None,
    drop: Sequence[str] = (),
    widen: bool = False,
    dims: Mapping[str, int | None] | None = None,
    options: Options | None = None,
) -> Call:
    """``call`` as one of family ``op``.

    Args:
        call: The call to rewrite.
        op: The general family.
        give: Arrays added or changed: name to ``(symbolic shape, dtype)``.
        drop: Arrays, sizes and options that the general family does not have.
        widen: The operands are cast to the accumulation dtype.
        dims: Sizes that change.
        options: Options that change.
    """
    wide = accumulation_dtype(call) if widen else None
    arrays = {
        name: (shape, wide or dtype) for name, shape, dtype in call.arrays if name not in drop and name not in STATE_ARRAYS
    }
    given = give or {}
    rest = {name: (shape, dtype) for name, shape, dtype in call.arrays if name in STATE_ARRAYS and name not in given}
    return replace(
        call,
        op=op,
        arrays=tuple((name, *fact) for name, fact in {**arrays, **given, **rest}.items()),
        dims=tuple((symbol, size) for symbol, size in {**dict(call.dims), **(dims or {})}.items() if symbol not in drop),
        options=tuple((name, (options or {}).get(name, value)) for name, value in call.options if name not in drop),
    )


SCALE = Option("scale", (float, int))
OUTPUT_FINAL_STATE = Option("output_final_state", (bool,), False)
CHUNK_SIZE = Option("chunk_size", (int,), hint=True)
COMMON_OPTIONS = (SCALE, OUTPUT_FINAL_STATE, CHUNK_SIZE)

MATRIX_STATE = (Arg("initial_state", "N HV K V", "float", optional=True),)
CU_SEQLENS = Arg("cu_seqlens", "N+1", "index", optional=True)
STATE_INDICES = Arg("state_indices", "N", "index", optional=True)
OF_OUTPUTS = ("q", "u", "C", "D", "z", "scale", "causal", "output_final_state")
"""Arguments that read a state, or add to what is read: what a span does to the state does not depend on them."""
OF_SEQUENCES = ("output_final_state", "chunk_size", "causal")
"""Options that a token by itself has no use for."""
STATE_ARRAYS = ("initial_state", "cu_seqlens", "state", "state_indices")

FAMILIES: dict[str, OpSpec] = {}
"""Every family by name, in the order in which they were declared."""

COMPANIONS: dict[str, OpSpec] = {}
"""What stands around the operators in a model, as operators of one form, ``"direct"``, by name."""

DECODING: dict[str, OpSpec] = {}
"""What ``decode_*`` takes, for every family that has it: those whose state is one array."""

SUMMARIES: dict[str, OpSpec] = {}
"""What ``summary_*`` takes, for every family that is affine in its state."""


@dataclass(frozen=True)
class OpSpec:
    """One family of operators.

    Args:
        name: Family name, e.g. ``"gla"``.
        recurrence: The defining equations, in the notation of the docs.
        args: Positional arrays, in order.
        keyword_args: Keyword-only arrays other than the state and ``cu_seqlens``, e.g. the bias of ``mixed_attn``.
        options: Static keyword arguments.
        state: From the options, the arrays of the state in order; one array is passed bare, several as ``state_type``.
        state_type: Named tuple that holds a state of several arrays.
        state_name: The keyword that takes the state.
        index: The array that says which tokens, or which states, are whose.
        mapped: The arguments that a feature map applies to; none if it takes no map.
        like: The argument whose shape and dtype the output has.
        limits: The least and the greatest size of some symbols.
        resolve: Fills defaults that depend on sizes: ``resolve(options, sizes) -> options``.
        check: From the form and the options, the complaint about a forbidden combination, or ``None``.
        check_sizes: From the options and the sizes, the complaint about sizes that do not go together, or ``None``.
        longest: Two sizes of which the first must be no smaller than the second, e.g. ``("L", "W-1")``.
        lowering: The more general family that can run this one, if any.
        otherwise: From a call, the call of another form that does the same for a backend without this one, if any.
    """

    name: str
    recurrence: str
    args: tuple[Arg, ...]
    keyword_args: tuple[Arg, ...] = ()
    options: tuple[Option, ...] = COMMON_OPTIONS
    state: Callable[[Options], tuple[Arg, ...]] = lambda options: MATRIX_STATE
    state_type: type[Any] | None = None
    state_name: str = "initial_state"
    index: Arg | None = CU_SEQLENS
    mapped: tuple[str, ...] = ("q", "k")
    like: str = "v"
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]], hash=False)
    resolve: Callable[[Options, Sizes], dict[str, Any]] = default_scale
    check: Callable[[str | None, Options], str | None] = no_complaint
    check_sizes: Callable[[Options, Sizes], str | None] = no_size_complaint
    longest: tuple[str, str] | None = None
    lowering: Lowering | None = None
    otherwise: Callable[[Call], Call] | None = None
    parameters: tuple[str, ...] = field(init=False)
    """Names of the parameters of a backend's method, in order; all after the positional arrays are keyword-only."""
    keywords: tuple[str, ...] = field(init=False)
    """Names of the keyword-only parameters of a backend's method."""
    required_keywords: tuple[str, ...] = field(init=False)
    """Those that a method must take, because a call has no meaning without them."""
    defaults: Mapping[str, Any] = field(init=False)
    """Of the static keyword arguments."""
    option_names: tuple[str, ...] = field(init=False)
    """Names of the static keyword arguments."""
    holders: tuple[tuple[str, Holder], ...] = field(init=False)
    """Names of those whose values are objects that hold arrays, and which objects."""
    pick_options: Callable[[Options], tuple[Any, ...]] = field(init=False, repr=False, compare=False)
    """From the keywords of a call, the values of the static ones."""
    keyword_arrays: tuple[str, ...] = field(init=False)
    """Names of the keyword arguments that are arrays, in the order in which symbols are bound."""

    def __post_init__(self) -> None:
        options = tuple(option.name for option in self.options)
        unset = {option.name: option.default for option in self.options}
        states = (self.state_name,) if self.state(unset) else ()
        index = () if self.index is None else (self.index.name,)
        arrays = (*(arg.name for arg in self.keyword_args), *states, *index)
        keywords = tuple(sorted((*arrays, *options), key=KEYWORD_ORDER.index))
        object.__setattr__(self, "parameters", (*(arg.name for arg in self.args), *keywords))
        object.__setattr__(self, "keywords", keywords)
        defaults = {option.name: option.default for option in self.options}
        required = tuple(arg.name for arg in (*self.keyword_args, *self.state(defaults)) if not arg.optional)
        object.__setattr__(self, "defaults", defaults)
        object.__setattr__(self, "required_keywords", required)
        object.__setattr__(self, "option_names", options)
        holders = tuple((option.name, option.holder) for option in self.options if option.holder is not None)
        object.__setattr__(self, "holders", holders)
        object.__setattr__(self, "pick_options", _picker(options))
        object.__setattr__(self, "keyword_arrays", arrays)

    def arrays(self, options: Options) -> tuple[Arg, ...]:
        """Every array argument under these options, in the order in which symbols are bound."""
        index = () if self.index is None else (self.index,)
        held = [arg for option in self.options if option.holder for arg in option.arrays(options.get(option.name))]
        return (*self.args, *self.keyword_args, *self.state(options), *index, *held)


def _picker(names: Sequence[str]) -> Callable[[Options], tuple[Any, ...]]:
    """The values of one name or more, as fast as they can be had."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda options: (options[names[0]],)


def spec_of(op: str, form: str | None) -> OpSpec:
    """What an operator of family ``op`` takes in this form."""
    if form == "decode":
        return DECODING[op]
    if form == "summary":
        return SUMMARIES[op]
    return COMPANIONS[op] if op in COMPANIONS else FAMILIES[op]


def lowerings_of(applied: Sequence[str], steps: Sequence[str]) -> list[Lowering]:
    """What rewrites a call of family ``steps[0]`` without the ``applied`` options as one of ``steps[-1]``, in order."""
    options = {option.name: option for option in spec_of(steps[0], None).options}
    found = [*(options[name].lowering for name in applied), *(FAMILIES[step].lowering for step in steps[:-1])]
    return [lowering for lowering in found if lowering is not None]


def decoding_of(spec: OpSpec) -> OpSpec:
    """What ``decode_*`` takes: the family's tokens, and a pool of states that it writes to."""

    def state(options: Options) -> tuple[Arg, ...]:
        return tuple(
            Arg("state", " ".join(("P", *arg.shapes[0][1:])), arg.role)  # N comes first
            for arg in spec.state(options)
        )

    kept = tuple(option for option in spec.options if option.name not in OF_SEQUENCES)
    return replace(spec, options=kept, state=state, state_name="state", index=STATE_INDICES, check=no_complaint)


def summary_of(spec: OpSpec, otherwise: Callable[[Call], Call]) -> OpSpec:
    """What ``summary_*`` takes: of the family's arguments, those that change the state.

    Args:
        spec: The family.
        otherwise: From a summary, the call of the chunk form that it is read off.
    """

    def kept(named: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(item for item in named if item.name not in OF_OUTPUTS)

    return replace(
        spec,
        args=kept(spec.args),
        keyword_args=kept(spec.keyword_args),
        options=kept(spec.options),
        state=stateless,
        mapped=tuple(name for name in spec.mapped if name not in OF_OUTPUTS),
        resolve=no_resolution,
        check=no_complaint if "causal" in spec.option_names else spec.check,
        lowering=None,
        otherwise=otherwise,
    )


def as_recurrent(call: Call) -> Call:
    """A decoding call as the recurrent one that it is lowered to: its states by sequence, and those after them returned."""
    arrays = [
        ("initial_state", " ".join(("N", *shape.split()[1:])), dtype) if name == "state" else (name, shape, dtype)
        for name, shape, dtype in call.arrays
        if name != "state_indices"
    ]
    options = {**FAMILIES[call.op].defaults, **dict(call.options), "output_final_state": True}
    dims = tuple((symbol, size) for symbol, size in call.dims if symbol != "P")
    return replace(call, form="recurrent", arrays=tuple(arrays), options=tuple(options.items()), dims=dims)
