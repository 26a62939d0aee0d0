"""Valid calls: drawn, made to meet a condition, run, and printed as a user would write them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import linattn
import numpy as np
from linattn.call import method_name
from linattn.spec import OpSpec, spec_of

from .conditions import LARGEST, Atom, Condition
from .frameworks import Arrays

__all__ = ["Draft", "draw_draft"]

DELTA = ("delta_rule", "gated_delta_rule", "kda", "dplr")


def unit(x: Any) -> Any:
    """Rows of length one."""
    return x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-6)


UNIT = "unit = lambda x: x / np.maximum(np.sqrt((x * x).sum(-1, keepdims=True)), 1e-6)"
EXPRESSIONS = {
    "g": "-np.exp(rng.standard_normal({shape}) - 2)",
    "gv": "-np.exp(rng.standard_normal({shape}) - 2)",
    "beta": "rng.random({shape})",
    "a": "-unit(rng.standard_normal({shape}))",
    "b": "-a * rng.random({row})",
    "dt": "0.3 * np.abs(rng.standard_normal({shape}))",
    "A": "-np.exp(0.5 * rng.standard_normal({shape}) - 1)",
}
"""The values of those arrays that are not normal random numbers."""


@dataclass
class Draft:
    """A valid call of the public API, and what is around it.

    Attributes:
        op: The family.
        form: The form; ``"direct"`` for a companion.
        seed: Of its values.
        sizes: By symbol.
        given: The optional arrays that are given.
        dtypes: By array; those of operands and of the others by ``"operand"`` and ``"float"``.
        options: Static options that have another value than their default.
        layouts: By array, unless plain.
        factors: By array, what its values are multiplied by.
        special: By array: ``"infinite"``, ``"rows"`` or ``"all"``.
        lengths: Of packed sequences; None if they are not packed.
        tail: Tokens behind the last of them.
        gradient: Gradients are asked for.
        constants: Arrays of which none is.
        cotangents: By output, if no plain gradient comes in: ``"none"``, ``"zeros"`` or ``"strided"``.
        alike: Calls of the same shape before it.
        changed: A call of another shape comes right before it.
        around: Surroundings: ``"thread"``, ``"autocast"``, ``"inference"``, ``"no grad"``.
    """

    op: str
    form: str
    seed: int
    sizes: dict[str, int]
    given: set[str] = field(default_factory=set)
    dtypes: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    layouts: dict[str, str] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)
    lengths: list[int] | None = None
    tail: int = 0
    gradient: bool = False
    constants: set[str] = field(default_factory=set)
    cotangents: dict[str, str] = field(default_factory=dict)
    alike: int = 0
    changed: bool = False
    around: set[str] = field(default_factory=set)

    @property
    def spec(self) -> OpSpec:
        return spec_of(self.op, self.form)

    @property
    def operator(self) -> str:
        return method_name(self.form, self.op)

    # -- arrays --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Make what was proposed piece by piece one valid call."""
        sizes = self.sizes
        if self.form == "decode":
            self.lengths = None
        if self.lengths is not None:
            sizes["B"], sizes["T"] = 1, sum(self.lengths) + self.tail
            self.given.add("cu_seqlens")
        else:
            self.given.discard("cu_seqlens")
        sizes["N"] = sizes["B"] if self.lengths is None else len(self.lengths)
        sizes["HV"] = sizes["H"] * sizes.pop("group", 1)
        sizes["C"] = self.options.get("chunk_size") or 256
        if self.form == "decode":
            sizes["P"] = sizes["B"] + 2
        if self.around & {"inference", "no grad"} or self.form == "decode":
            self.gradient = False

    def shape(self, symbols: tuple[str, ...]) -> tuple[int, ...]:
        """The shape that symbols stand for."""
        found: list[int] = []
        for symbol in symbols:
            if symbol == "...":
                found += [self.sizes["B"], self.sizes["T"]]
                continue
            base, _, more = symbol.replace("-", "+-").partition("+")
            found.append(self.sizes[base] + int(more or 0))
        return tuple(found)

    def expressions(self) -> dict[str, tuple[str, str, str]]:
        """Of each array the expression of its values, its dtype and its layout."""
        found: dict[str, tuple[str, str, str]] = {}
        for arg in self.spec.arrays({**self.spec.defaults, **self.options}):
            if "." in arg.name or (arg.optional and arg.name not in self.given):
                continue
            if arg.name == "state_indices":
                found[arg.name] = f"np.array({[*range(self.sizes['P'])][::-1][: self.sizes['B']]})", "int32", "plain"
                continue
            if arg.role == "index":
                offsets = np.cumsum([0, *(self.lengths or [])]).tolist()
                found[arg.name] = f"np.array({offsets})", self.dtypes.get(arg.name, "int32"), "plain"
                continue
            usual = self.dtypes.get("operand" if arg.role == "operand" else "float", "float32")
            dtype = usual if arg.role == "operand" else self.dtypes.get(arg.name, usual)
            found[arg.name] = self._values(arg.name, self.shape(arg.shapes[0])), dtype, self.layouts.get(arg.name, "plain")
        return found

    def _values(self, name: str, shape: tuple[int, ...]) -> str:
        row = (*shape[:-1], 1)
        text = EXPRESSIONS.get(name, "rng.standard_normal({shape})").format(shape=shape, row=row)
        if name == "k" and self.op in DELTA and self.options.get("qk_norm") is None:
            text = f"unit({text})"
        if self.options.get("normalize") and name in ("q", "k", "initial_state"):
            text = f"np.abs({text}) + 0.1"
        if name in self.factors:
            text = f"{self.factors[name]!r} * ({text})"
        special = self.special.get(name)
        if special == "infinite":
            return f"np.where(rng.random({shape}) < 0.1, -np.inf, {text})"
        if special == "all":
            return f"np.zeros({shape})"
        return f"({text}) * (rng.random({row}) < 0.8)" if special == "rows" else text

    def arrays(self, xp: Arrays, seed: int) -> dict[str, Any]:
        """The arrays, with values of a seed."""
        rng = np.random.default_rng(seed)
        values: dict[str, Any] = {}
        made: dict[str, Any] = {}
        for name, (text, dtype, layout) in self.expressions().items():
            values[name] = eval(text, {"np": np, "rng": rng, "unit": unit, **values})  # what text() prints
            made[name] = xp.make(np.asarray(values[name]), dtype, layout)
        return made

    # -- running -------------------------------------------------------------------------------------------------------

    def call(self, xp: Arrays, backend: Any, arrays: dict[str, Any], gradient: bool | None = None) -> dict[str, Any]:
        """Outputs by name, and gradients as ``d name``; as the framework's arrays."""
        gradient = self.gradient if gradient is None else gradient
        static = {"backend": backend.name, **self.options}
        function = getattr(linattn, self.operator)
        trained = [name for name in arrays if gradient and name not in (*self.constants, "cu_seqlens")]
        with self._surroundings(xp):
            if not gradient:
                found = named(function(**arrays, **static))
                return found | {"state": arrays["state"]} if self.form == "decode" else found
            return PULLED[xp.name](function, arrays, static, trained, backend, self)

    @contextlib.contextmanager
    def _surroundings(self, xp: Arrays) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if xp.name == "torch":
                torch = xp.torch  # type: ignore[attr-defined]
                if "autocast" in self.around:
                    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                if "inference" in self.around:
                    stack.enter_context(torch.inference_mode())
                if "no grad" in self.around:
                    stack.enter_context(torch.no_grad())
            yield

    def in_place(self, act: Callable[[], Any]) -> Any:
        """What ``act`` returns, in another thread if the call is made in one."""
        if "thread" not in self.around:
            return act()
        found: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.append(act())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return found[0]

    # -- printing ------------------------------------------------------------------------------------------------------

    def text(self, xp: Arrays, backend: str) -> str:
        """The call as Python, for a person to run; comments say what is around it."""
        lines = (
            [f"rng = np.random.default_rng({self.seed})", UNIT]
            if "unit(" in str(self.expressions())
            else [f"rng = np.random.default_rng({self.seed})"]
        )
        rewritten: dict[str, str] = {}
        for name, (text, dtype, layout) in self.expressions().items():
            lines.append(f"{name} = {text}")
            rewritten[name] = xp.made(name, dtype, layout)
        words = [f"{name}={text}" for name, text in rewritten.items()]
        words += [f"{name}={value!r}" for name, value in self.options.items()]
        lines.append(f'linattn.{self.operator}({", ".join(words)}, backend="{backend}")')
        notes = [f"{self.alike} calls of this shape come before it"] if self.alike else []
        notes += ["a call of another shape comes right before it"] if self.changed else []
        notes += [f"around it: {', '.join(sorted(self.around))}"] if self.around else []
        notes += [f"the gradient of {name} that comes in: {what}" for name, what in self.cotangents.items() if self.gradient]
        if self.gradient:
            notes.append(f"with gradients{f' but of {chr(44).join(sorted(self.constants))}' if self.constants else ''}")
        return "\n".join([*lines, *(f"# {note}" for note in notes)])


def named(found: Any) -> dict[str, Any]:
    """What a function returned, by name."""
    if not isinstance(found, tuple):
        return {"o": found}
    o, state = found
    if isinstance(state, tuple):
        return {"o": o, **{f"state {name}": x for name, x in state._asdict().items()}}
    return {"o": o} if state is None else {"o": o, "state": state}


def _cotangents(xp: Arrays, outputs: dict[str, Any], draft: Draft) -> dict[str, Any]:
    """The gradients that come in."""
    rng = np.random.default_rng(1)
    found: dict[str, Any] = {}
    for name, x in outputs.items():
        what = draft.cotangents.get(name)
        values = rng.standard_normal(tuple(x.shape)) * (what != "zeros")
        if "int" not in xp.dtype(x) and what != "none":
            found[name] = xp.make(values, xp.dtype(x), "sliced" if what == "strided" else "plain")
    return found


def _pulled_numpy(
    function: Any, arrays: dict[str, Any], static: dict[str, Any], trained: list[str], backend: Any, draft: Draft
) -> dict[str, Any]:
    from .frameworks import NumpyArrays

    outputs = named(function(**arrays, **static))
    fed = _cotangents(NumpyArrays(), outputs, draft)
    options = {**draft.spec.defaults, **draft.options}
    gradients = backend.vjp(draft.op, dict(arrays), options, fed.get("o"), fed.get("state"))
    return outputs | {f"d {name}": x for name, x in gradients.items() if name in trained}


def _pulled_torch(
    function: Any, arrays: dict[str, Any], static: dict[str, Any], trained: list[str], backend: Any, draft: Draft
) -> dict[str, Any]:
    import torch

    from .frameworks import TorchArrays

    for name in trained:
        arrays[name].requires_grad_()
    outputs = named(function(**arrays, **static))
    fed = _cotangents(TorchArrays(), outputs, draft)
    used = [name for name in fed if outputs[name].requires_grad]
    wanted = [arrays[name] for name in trained]
    if not used or not wanted:
        return outputs
    found = torch.autograd.grad([outputs[name] for name in used], wanted, [fed[name] for name in used], allow_unused=True)
    return {name: x.detach() for name, x in outputs.items()} | {
        f"d {name}": x if x is not None else torch.zeros_like(arrays[name]) for name, x in zip(trained, found, strict=True)
    }


def _pulled_jax(
    function: Any, arrays: dict[str, Any], static: dict[str, Any], trained: list[str], backend: Any, draft: Draft
) -> dict[str, Any]:
    import jax

    from .frameworks import JaxArrays

    rest = {name: x for name, x in arrays.items() if name not in trained}

    def run(leaves: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in named(function(**leaves, **rest, **static)).items() if "int" not in str(x.dtype)}

    outputs, pull = jax.vjp(run, {name: arrays[name] for name in trained})
    (found,) = pull(_cotangents(JaxArrays(), outputs, draft))
    return outputs | {f"d {name}": x for name, x in found.items()}


PULLED = {"numpy": _pulled_numpy, "torch": _pulled_torch, "jax": _pulled_jax}


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw_draft(rng: np.random.Generator, spec: OpSpec, forms: tuple[str, ...], xp: Arrays, tokens: int) -> Draft:
    """A valid call of a family, of at most so many tokens, of sizes that users try first."""
    form = forms[rng.integers(len(forms))]
    spec = spec_of(spec.name, form)
    sizes = {"B": int(rng.integers(1, 3)), "T": int(rng.integers(1, min(tokens // 2, 70) + 1)), "H": int(rng.integers(1, 3))}
    sizes |= {symbol: int(rng.integers(4, 25)) for symbol in ("K", "V", "L", "D")} | {"W": 4, "group": int(rng.integers(1, 3))}
    draft = Draft(spec.name, form, int(rng.integers(2**31)), sizes)
    if not any("HV" in shape for arg in spec.args for shape in arg.shapes):
        sizes["group"] = 1
    for option in spec.options:
        if option.name == "output_final_state" or (bool in option.types and rng.random() < 0.3):
            draft.options[option.name] = bool(rng.integers(2)) if option.name != "output_final_state" else rng.random() < 0.7
    if any(option.name == "chunk_size" and not option.hint for option in spec.options):
        draft.options["chunk_size"] = int(rng.choice([4, 16, 32]))
    optional = [arg.name for arg in spec.arrays(spec.defaults) if arg.optional and arg.role != "index" and "." not in arg.name]
    draft.given |= {name for name in optional if rng.random() < 0.5}
    if form != "decode" and spec.index is not None and rng.random() < 0.25:
        draft.lengths = rng.integers(0, max(sizes["T"] // 2, 2), int(rng.integers(1, 5))).tolist()
    draft.gradient = bool(rng.integers(2))
    return draft


def meet(draft: Draft, atom: Atom, rng: np.random.Generator, tokens: int) -> None:
    """Change a call so that a fact holds, as far as it can."""
    kind, _, of = atom.fact.partition(" ")
    MEETING[kind](draft, atom, of, rng, tokens)


def _fitting(atom: Atom, rng: np.random.Generator, least: int, most: int) -> int:
    """A number that an atom admits, mostly a small one."""
    number = int(atom.value)
    if atom.relation == "is":
        return number
    if atom.relation == "above":
        return min(number + 1 + int(rng.integers(0, 1 + max(number // 4, 2))), max(most, number + 1))
    if atom.relation == "below":
        return int(rng.integers(min(least, number - 1), number))
    if atom.relation == "is a multiple of":
        return number * int(rng.integers(1, max(min(most // number, 4), 1) + 1))
    found = int(rng.integers(least, min(most, 3 * number + 2) + 1))
    return found if found % number else found + 1


def _meet_size(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    if of == "N" and (draft.lengths is not None or atom.value > 4):
        count = _fitting(atom, rng, 1, 40)
        draft.lengths = rng.integers(0, max(min(tokens // max(count, 1), 12), 1) + 1, count).tolist()
        return
    if of == "T":
        number = _fitting(atom, rng, 1, tokens)
        if draft.lengths is not None:
            cuts = np.sort(rng.integers(0, number + 1, 2))
            draft.lengths, draft.tail = np.diff([0, *cuts, number]).tolist(), 0
        draft.sizes["T"] = number
        draft.sizes["B"] = max(min(draft.sizes["B"], tokens // max(number, 1)), 1)
        return
    number = _fitting(atom, rng, 1, LARGEST[of])
    draft.sizes["B" if of == "N" else of] = number
    if of == "B" and number > 1:
        draft.lengths = None


def _meet_option(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    if atom.relation == "is":
        draft.options[of] = atom.value
    elif of == "chunk_size":
        draft.options[of] = max(_fitting(atom, rng, 1, 300), 1)
    else:
        draft.options[of] = {0.0: -0.7, 1.0: 2.5, 30.0: 100.0}.get(atom.value, float(atom.value) + 1)


def _meet_given(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    if of == "cu_seqlens":
        draft.lengths = [5, 0, 9, 3] if atom.value else None
    elif atom.value:
        draft.given.add(of)
    else:
        draft.given.discard(of)


def _meet_dtype(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    if of == "cu_seqlens":
        draft.lengths = draft.lengths or [5, 0, 9, 3]
        draft.dtypes[of] = atom.value
        return
    roles = {arg.name: arg.role for arg in draft.spec.arrays({**draft.spec.defaults, **draft.options})}
    draft.given.add(of)
    draft.dtypes["operand" if roles.get(of) == "operand" else of] = atom.value


def _meet_layout(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    draft.given.add(of)
    draft.layouts[of] = str(rng.choice(["transposed", "sliced"]))


def _meet_gradient(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    draft.given.add(of)
    draft.gradient = True
    if not atom.value:
        draft.constants.add(of)


def _meet_largest(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    draft.given.add(of)
    draft.factors[of] = float(atom.value) * (2.0 if atom.relation == "above" else 2.0**-4)


def _meet_special(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    draft.given.add(of)
    draft.special[of] = "infinite" if atom.value is True else atom.value


def _meet_sequence(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    draft.lengths = draft.lengths or [5, 4, 9, 3]
    if of == "tail":
        draft.tail = int(rng.integers(1, 9))
    elif of == "whole":
        draft.lengths[0] = 16 * int(rng.integers(1, max(min(tokens // 32, 4), 1) + 1))
    elif of == "shortest":
        draft.lengths = [max(n, int(atom.value)) for n in draft.lengths]
        draft.lengths[int(rng.integers(len(draft.lengths)))] = int(atom.value)
    elif atom.relation == "above":
        draft.lengths[0] = int(atom.value) + 1 + int(rng.integers(3))
    else:
        draft.lengths = [min(n, int(atom.value) - 1) for n in draft.lengths]


def _meet_calls(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    if of == "changed":
        draft.changed = True
    else:
        draft.alike = max(draft.alike, int(atom.value) + 1)


def _meet_cotangent(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    draft.gradient = True
    draft.cotangents[of] = atom.value
    if of == "state":
        draft.options["output_final_state"] = True


def _meet_around(draft: Draft, atom: Atom, of: str, rng: np.random.Generator, tokens: int) -> None:
    draft.around.add("no grad" if of == "grad" else of)


MEETING: dict[str, Callable[..., None]] = {
    "size": _meet_size, "option": _meet_option, "given": _meet_given, "dtype": _meet_dtype, "layout": _meet_layout,
    "gradient": _meet_gradient, "largest": _meet_largest, "infinite": _meet_special, "zeros": _meet_special,
    "sequence": _meet_sequence, "calls": _meet_calls, "around": _meet_around, "cotangent": _meet_cotangent,
}  # fmt: skip


def meeting(draft: Draft, condition: Condition, rng: np.random.Generator, tokens: int) -> Draft:
    """The call, changed so that a condition holds, as far as it can."""
    for i in rng.permutation(len(condition.atoms)):
        meet(draft, condition.atoms[i], rng, tokens)
    draft.settle()
    return draft
