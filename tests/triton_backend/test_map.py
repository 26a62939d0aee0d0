"""The map of kernels in ``triton/__init__.py``: every kernel stands in it, and a call launches those of its family.

``python test_map.py`` prints what calls launch, for whoever writes the map.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from itertools import product
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import linattn_backends.triton as package
import pytest
import torch
from linattn.feature_maps import Hedgehog
from linattn.gates import Softplus
from linattn.plugin import MixedState
from linattn_backends.triton.conv import decode_short_conv, short_conv
from linattn_backends.triton.features import features
from linattn_backends.triton.norm import gated_rms_norm
from linattn_backends.triton.runtime import launch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction
from triton_cases import BACKEND, arrays, call, place_of, pretend

FOLDER = Path(package.__file__).parent
SECTION = re.compile(r"((?:`\w+`(?:, )?)+) in (\w+)/.*::")
ROW = re.compile(r"    (forward|backward|decode)?\s*(\S.*?)\s{2,}(\w+\.py:\w+)")
LONG = dict(T=4096)
"""Sequences that are cut into segments, with so few heads."""


def rows():
    """The map's rows: operator, pass, and the place of a kernel."""
    operators, folder, what = [], "", ""
    for line in package.__doc__.splitlines():
        section, row = SECTION.fullmatch(line), ROW.fullmatch(line)
        if section:
            operators, folder = re.findall(r"\w+", section[1]), section[2]
        elif row:
            what = row[1] or what
            only, others = re.findall(r"(\w+) only", row[2]), re.findall(r"not (\w+)", row[2])
            assert {*only, *others} <= set(operators), line
            for operator in only or [name for name in operators if name not in others]:
                yield operator, what, f"{folder}/{row[3]}"
        else:
            assert ".py:" not in line, f"neither a section nor a row: {line}"


def told():
    """The map's kernels, plain ones and those for Hopper, by operator and pass."""
    found = {}
    for operator, what, place in rows():
        found.setdefault((operator, what), (set(), set()))["_sm90.py" in place].add(place)
    return found


# -- what calls launch ---------------------------------------------------------------------------------------------------


def matrix_state(family, **sizes):
    """One call of a family with matrices for states, forward and backward."""
    given = arrays(family, **dict(T=70, H=2, HV=2, K=64, V=64, dtype=torch.bfloat16) | sizes)
    yield "forward"
    o, final = call(family, {n: x.requires_grad_() if x.is_floating_point() else x for n, x in given.items()}, **FINAL)
    yield "backward"
    (o.sum() + final.sum()).backward()


def normalized(family):
    """One call whose outputs are divided by sums of weights, forward and backward."""
    given = arrays(family, T=21, state=False, dtype=torch.bfloat16, cu=[0, 9, 21])
    leaves = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in given.items()}
    yield "forward"
    o, _ = call(family, leaves, normalize=True)
    yield "backward"
    o.sum().backward()


def in_stages(family):
    """One call as ranks run it, which exchange what they found between its stages."""
    given = arrays(family, T=70, H=2, HV=2, K=64, V=64, dtype=torch.bfloat16)
    start, options = given.pop("initial_state"), dict(cu_seqlens=None, offsets=(), scale=None, chunk_size=None)
    yield "forward"
    inputs, stages = BACKEND.stages(family, given, **options)
    layout, digest = stages.layout(inputs), torch.zeros(2)
    made, message = stages.opened(inputs, digest)
    messages = torch.stack((message, message))
    stages.entering(layout, messages, digest, *torch.zeros(2, dtype=torch.uint8).unbind(), 0, 1)
    o, final, kept = stages.finish(inputs, made, start, True)
    yield "backward"
    made = stages.begin(inputs, kept)
    d = stages.adjoint(inputs, made, o, final, None)
    stages.leaving(layout, torch.stack((d, d)), stages.crossed(layout, messages, 1, 0), 1, 1)
    stages.gradients(inputs, stages.recall(inputs, made, start), start, o, final)


def mapped(family):
    """One call on raw projections with every map that the kernels make, forward and backward."""
    given = {name: x.requires_grad_() for name, x in arrays(family, dtype=torch.bfloat16).items()}
    options = {} if family == "simple_gla" else dict(qk_norm="l2", beta_map="sigmoid")
    if family != "delta_rule":
        options["gate"] = Softplus(torch.randn(1).requires_grad_())
    yield "forward"
    o, _ = call(family, given, **options)
    yield "backward"
    o.sum().backward()


FINAL = dict(output_final_state=True)
SHORT = [0, 10, 20, 30, 65]
"""Offsets of so many packed sequences that one kernel may do them all."""


def many_heads(family):
    """Calls without gradients whose heads fill a device, of one sequence and of packed ones."""
    yield "forward"
    with torch.no_grad():
        for cu in (None, SHORT):
            call(family, arrays(family, T=70, H=100, HV=100, K=128, V=128, dtype=torch.bfloat16, cu=cu), **FINAL)


def state_space(form="chunk", bare=False, **sizes):
    """One call of ``ssd``, if ``bare`` without skip and gate, of steps that are a softplus; or a step of decoding."""
    given = arrays("simple_gla", **dict(T=70, H=2, HV=2, K=64, V=64, dtype=torch.bfloat16) | sizes)
    keywords = {name: given.pop(name, None) for name in ("initial_state", "cu_seqlens")}
    C, B, x, dt = given.values()
    inputs = x, dt, torch.randn(x.shape[2]), B, C
    around = dict(dt_softplus=True) if bare else dict(D=torch.randn(x.shape[2]), z=x)
    yield "forward" if form == "chunk" else "decode"
    if form == "decode":
        BACKEND.decode_ssd(*inputs, **around, state=keywords["initial_state"])
        return
    leaves = [a.requires_grad_() for a in inputs]
    o, final = getattr(BACKEND, f"{form}_ssd")(*leaves, **around, **keywords, **FINAL)
    if form == "chunk":
        yield "backward"
        (o.sum() + final.sum()).backward()


def decoding(family):
    """One step of decoding, and the recurrent form."""
    given = arrays(family, T=1, K=64, V=64, dtype=torch.bfloat16)
    yield "decode"
    call(family, given, "recurrent", **FINAL)
    state = given.pop("initial_state")
    getattr(BACKEND, f"decode_{family}")(*given.values(), state=state)
    call(family, arrays(family, T=3, cu=[0, 2]), "recurrent", **FINAL)


def both_directions(T=70):
    """One call of the operator that has no order of time, forward and backward."""
    given = arrays("linear_attn", T=T, state=False)
    yield "forward"
    o, _ = BACKEND.chunk_linear_attn(*(x.requires_grad_() for x in given.values()), causal=False)
    yield "backward"
    o.sum().backward()


def mixed(T=37, form="chunk", C=16, cu=None):
    """One call of ``mixed_attn`` that goes on from a state."""
    heads = [torch.randn(1, T, 2, 16).requires_grad_() for _ in range(5)]
    state = MixedState(torch.randn(1, 2, 16, 16), *torch.randn(3, 1, C, 2, 16), torch.tensor([3], dtype=torch.int32))
    options = dict(bias=torch.randn(2, C, C).requires_grad_(), initial_state=state, chunk_size=C, output_final_state=True)
    options["cu_seqlens"] = cu
    yield "forward" if form == "chunk" else "decode"
    o, _ = getattr(BACKEND, f"{form}_mixed_attn")(*heads, **options)
    if form == "chunk":
        yield "backward"
        o.sum().backward()


def convolution():
    """One call of ``short_conv`` that goes on from a state, and a step of decoding."""
    x, weight, state = torch.randn(1, 9, 8).requires_grad_(), torch.randn(8, 4), torch.randn(1, 8, 3)
    yield "forward"
    y, end = short_conv(x, weight, initial_state=state, **FINAL)
    yield "backward"
    (y.sum() + end.sum()).backward()
    yield "decode"
    decode_short_conv(x.detach(), weight, state=state)


def norm():
    """One call of ``gated_rms_norm``."""
    x = torch.randn(9, 8).requires_grad_()
    yield "forward"
    y = gated_rms_norm(x, x, torch.randn(8))
    yield "backward"
    y.sum().backward()


def feature_map():
    """Features of one array."""
    x = torch.randn(1, 9, 2, 8).requires_grad_()
    yield "forward"
    y = features(Hedgehog(torch.randn(2, 8, 8)), x)
    yield "backward"
    y.sum().backward()


PACKED = dict(cu=[0, 30, 65])
SHAPES = [dict(), LONG, dict(H=1), dict(dtype=torch.float32), PACKED]
WIDE = [dict(K=256, V=192), dict(K=256, V=192, dtype=torch.float32)]
MORE = {
    "linear_attn": [*WIDE, dict(T=4096, cu=[0, 4000])],
    "simple_gla": WIDE,
    "gla": [dict(gv="plain")],
    "dplr": [dict(K=128, V=128), dict(K=128, V=128, T=4096), dict(H=200, HV=200), dict(H=200, HV=200, cu=SHORT)],
}
FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
CALLS = {
    family: [lambda f=family, s=sizes: matrix_state(f, **s) for sizes in SHAPES + MORE.get(family, [])]
    + [lambda f=family: decoding(f), lambda f=family: in_stages(f)]
    for family in FAMILIES
}
CALLS["linear_attn"].append(both_directions)
for family in ("linear_attn", "simple_gla", "gla"):
    CALLS[family].append(lambda f=family: normalized(f))
for family in ("simple_gla", "delta_rule", "gated_delta_rule", "kda"):
    CALLS[family].append(lambda f=family: mapped(f))
for family in ("delta_rule", "gated_delta_rule"):
    CALLS[family].append(lambda f=family: many_heads(f))
CALLS["ssd"] = [lambda s=sizes: state_space(**s) for sizes in SHAPES + WIDE]
CALLS["ssd"] += [lambda: state_space(bare=True, **PACKED), lambda: state_space("decode", T=1)]
CALLS["ssd"] += [lambda: state_space("recurrent", T=3, cu=[0, 2])]
CALLS["mixed_attn"] = [mixed, lambda: mixed(cu=torch.tensor([0, 35])), lambda: mixed(T=1, form="recurrent")]
CALLS |= {"short_conv": [convolution], "gated_rms_norm": [norm], "hedgehog": [feature_map]}
"""Calls that between them take every kernel of an operator: each says which pass begins."""


def launched(operator, patch):
    """The kernels that an operator's calls launch, plain ones and those for Hopper, by pass. None of them is run."""
    noted, found = [], {}
    patch.setattr(launch, "start", lambda kernel, *rest: noted.append(kernel))
    for reason, one in product(("plain kernels are wanted", None), CALLS[operator]):
        pretend(patch, num_sms=132, not_hopper=reason)
        noted.clear()
        steps = one()
        what = next(steps)
        while what:
            following = next(steps, None)
            plain, hopper = found.setdefault((operator, what), (set(), set()))
            for kernel in noted:
                (hopper if isinstance(kernel, GluonJITFunction) else plain).add(place_of(kernel))
            noted.clear()
            what = following
    return found


@pytest.mark.parametrize("operator", CALLS)
def test_calls_launch_what_the_map_tells(operator, monkeypatch):
    found = launched(operator, monkeypatch)
    wanted = {key: kernels for key, kernels in told().items() if key[0] == operator}
    assert found.keys() == wanted.keys()
    for key, kernels in found.items():
        assert kernels == wanted[key], key


def test_every_operator_of_the_map_is_called():
    assert {operator for operator, *_ in rows()} == CALLS.keys()


# -- completeness --------------------------------------------------------------------------------------------------------


def jitted():
    """Every function of the package that the compiler takes."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for x in vars(importlib.import_module(module.name)).values():
            if isinstance(x, InterpretedFunction | GluonJITFunction) and x.fn.__module__ == module.name:
                yield x


def called_by(function):
    """The compiled functions that the code of one names."""
    codes, space = [function.fn.__code__], function.fn.__globals__
    for code in codes:
        codes += [x for x in code.co_consts if hasattr(x, "co_names")]
        yield from (space[name] for name in code.co_names if name in space)


def test_every_kernel_stands_in_the_map():
    """What no compiled function calls is launched, or dead."""
    every = list(jitted())
    called = {id(x) for function in every for x in called_by(function)}
    kernels = {place_of(x) for x in every if id(x) not in called}
    assert kernels == {place for *_, place in rows()}


def test_kernels_are_where_the_map_tells():
    for *_, place in rows():
        file, _, name = place.partition(":")
        assert f"\ndef {name}(" in (FOLDER / file).read_text(), place


def test_the_name_of_a_file_tells_which_kernels_are_for_hopper():
    for kernel in jitted():
        assert isinstance(kernel, GluonJITFunction) == ("sm90" in place_of(kernel).partition(":")[0]), place_of(kernel)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        for operator in CALLS:
            for (_, what), (plain, hopper) in launched(operator, patch).items():
                print(operator, what, *sorted(plain), "|", *sorted(hopper))
