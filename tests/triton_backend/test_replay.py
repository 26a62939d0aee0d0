"""Calls like earlier ones run what was written down of those: the same results, on the arrays of the day, and nothing kept."""

import gc
import itertools
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import linattn
import pytest
import torch
import triton
from linattn.feature_maps import Hedgehog
from linattn_backends.triton.features import features
from linattn_backends.triton.runtime import launch, replay
from triton_cases import arrays, call

FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
SIZES = dict(T=20, H=2, HV=2, K=16, V=18, kind="weak")
PACKED = ([0, 5, 5, 20], [0, 7, 9, 20])


@pytest.fixture(autouse=True)
def written_at_once(programs_of_the_test, monkeypatch):
    """The first call of every kind is written down, the second runs the program."""
    monkeypatch.setattr(replay, "OFTEN", 1)


class Compiled:
    """A dictionary of compiled kernels that has any, launched by a function that notes its arguments."""

    def __init__(self):
        self.notes = []

    def get(self, key, default=None):
        return launch.Ready(None, lambda *given: self.notes.append(given), ("fixed",), ("constant",))


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that are launched by address, and note it; the compiler's own way of launching does nothing."""
    kernels, start = Compiled(), launch.start

    def only_without_memory(kernel, count, where, args, config):
        if where.type == "meta":
            start(kernel, count, where, args, config)

    monkeypatch.setattr(launch, "COMPILED", kernels)
    monkeypatch.setattr(launch, "directly", lambda where: True)
    monkeypatch.setattr(launch, "start", only_without_memory)
    return kernels


@pytest.fixture
def replayed(monkeypatch):
    """The programs that ran."""
    ran, run = [], replay.Program.__call__

    def noted(self, args):
        ran.append(self)
        return run(self, args)

    monkeypatch.setattr(replay.Program, "__call__", noted)
    return ran


def trained(family, given, form="chunk"):
    """Outputs, final states and gradients."""
    leaves = {name: x.detach().requires_grad_() if x.is_floating_point() else x for name, x in given.items()}
    o, final = call(family, leaves, form, output_final_state=True)
    floats = [x for x in leaves.values() if x.requires_grad]
    return [o, final, *torch.autograd.grad((o.float() ** 2).sum() + (final**2).sum(), floats)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_a_first_call(family, packed, replayed, monkeypatch):
    """With other numbers, at other places, and with other lengths of packed sequences."""
    given = [arrays(family, **SIZES, cu=PACKED[0] if packed else None) for _ in range(2)]
    given[1] = {name: x * 0.9 if x.is_floating_point() else x for name, x in given[1].items()}
    if packed:
        given[1]["cu_seqlens"] = torch.tensor(PACKED[1], dtype=given[0]["cu_seqlens"].dtype)
    trained(family, given[0])
    replayed.clear()
    found = trained(family, given[1])
    assert len(replayed) == 2  # forward and backward
    monkeypatch.setattr(replay, "kind_of", lambda args: None)
    wanted = trained(family, given[1])
    assert len(replayed) == 2
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_no_array_is_kept(form, replayed):
    given = arrays("gated_delta_rule", **SIZES)
    for _ in range(2):
        kept = [weakref.ref(x) for x in (*given.values(), *trained("gated_delta_rule", given, form))]
        given = {name: x.clone() for name, x in given.items()}
    assert replayed
    del given
    gc.collect()
    assert [x for x in kept if x() is not None] == []


OTHERS = {
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "alignment": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "dtype": lambda x: x.bfloat16(),
    "shape": lambda x: x[:, :-1],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_kinds_are_told_apart(other, replayed):
    """A call of another kind runs no program of this one; both give what they should."""
    given = arrays("linear_attn", **SIZES)
    names = ("q", "k", "v")
    with torch.no_grad():
        call("linear_attn", given)
        changed = {name: other(given[name]) if name in names else x for name, x in given.items()}
        found, _ = call("linear_attn", changed)
        assert not replayed
        again, _ = call("linear_attn", changed)
    assert len(replayed) == 1
    assert torch.equal(found, again)


NODES = {
    "gated_rms_norm": lambda x: torch.ops.linattn.triton_gated_rms_norm(x, x, x[0, 0, 0], 1e-5, 16, True, True)[0],
    "hedgehog": lambda x: features(Hedgehog(torch.eye(16).expand(2, 16, 16)), x),
    "short_conv": lambda x: linattn.short_conv(x[:, :, 0], x[0, 0, 0, :, None], backend="triton")[0],
    "simple_gla": lambda x: linattn.simple_gla(x, x, x, -x[..., 0].abs(), backend="triton")[0],
}


@pytest.mark.parametrize("name", NODES)
def test_a_node_of_a_compiled_graph_runs_what_was_written_down(name, replayed):
    x = torch.randn(2, 20, 2, 16, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(NODES[name], backend="eager", fullgraph=True)
    with torch.no_grad():
        first = compiled(x)
        assert not replayed
        assert torch.equal(compiled(x), first)
    assert replayed


def test_options_are_told_apart(replayed):
    given = arrays("linear_attn", **SIZES)
    with torch.no_grad():
        outputs = [call("linear_attn", given, scale=scale)[0] for scale in (1.0, 2.0)]
    assert not replayed
    torch.testing.assert_close(outputs[1], 2 * outputs[0])


def test_a_rare_kind_is_not_written_down(replayed, monkeypatch):
    monkeypatch.setattr(replay, "OFTEN", 3)
    given = arrays("linear_attn", **SIZES)
    with torch.no_grad():
        for ran in (0, 0, 0, 1, 2):
            call("linear_attn", given)
            assert len(replayed) == ran


def test_who_watches_launches_sees_them(replayed, monkeypatch):
    given = arrays("linear_attn", **SIZES)
    with torch.no_grad():
        call("linear_attn", given)
        monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
        call("linear_attn", given)
    assert not replayed


def test_autocast_does_not_touch_a_program(replayed):
    """Its operations are not the caller's: sums of bfloat16 stay what they are."""
    sizes = SIZES | dict(H=1, dtype=torch.bfloat16)
    given = arrays("gla", **sizes)

    def gradients():
        leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x.is_floating_point()}
        o, _ = call("gla", leaves)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))

    first = gradients()
    for x, y in zip(first, gradients(), strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


def test_a_failure_in_a_program_names_what_ran(monkeypatch):
    given = arrays("linear_attn", **SIZES)

    def broken(*rest):
        raise RuntimeError("out of resources")

    with torch.no_grad():
        call("linear_attn", given)
        monkeypatch.setattr(launch, "start", broken)
        with pytest.raises(RuntimeError, match="out of resources") as caught:
            call("linear_attn", given)
    (note,) = caught.value.__notes__
    assert note.startswith("linattn triton: one of the kernels diagonal_")
    assert " of linear_attn failed on (1, 20, 2, 16) torch.float32, " in note


# -- states that are overwritten -------------------------------------------------------------------------------------


def steps(states, **options):
    """One token a sequence, twice."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 1, 2, 16) for _ in range(3))
    return [linattn.decode_linear_attn(q, k, v, state=states, backend="triton", **options) for _ in range(2)]


def test_steps_go_on_from_the_state_as_it_is(replayed, monkeypatch):
    found, wanted = torch.ones(2, 2, 16, 16), torch.ones(2, 2, 16, 16)
    outputs = steps(found)
    assert replayed
    monkeypatch.setattr(replay, "kind_of", lambda args: None)
    assert all(torch.equal(x, y) for x, y in zip(outputs, steps(wanted), strict=True))
    assert torch.equal(found, wanted)
    assert not torch.equal(outputs[0], outputs[1])


def test_autograd_knows_that_a_state_was_overwritten():
    state = torch.zeros(2, 2, 16, 16)
    x = torch.ones(2, 2, 16, 16, requires_grad=True)
    y = (x * state).sum()
    with torch.no_grad():
        steps(state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_states_of_inference_mode_are_overwritten_there():
    with torch.inference_mode():
        state = torch.zeros(2, 2, 16, 16)
        steps(state)
        assert state.any()


# -- programs --------------------------------------------------------------------------------------------------------


def test_pieces_of_one_allocation_do_not_meet_while_both_are_wanted():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        drawn = torch.randint(0, 12, (9, 3), generator=generator).tolist()
        wanted = [(min(a, b), max(a, b), 100 * size) for a, b, size in drawn]
        total, places = replay.arranged(wanted)
        for (first, place), (second, other) in itertools.combinations(zip(wanted, places, strict=True), 2):
            together = first[0] <= second[1] and second[0] <= first[1]
            apart = place + first[2] <= other or other + second[2] <= place
            assert apart or not together
        assert all(place % replay.ALIGNED == 0 for place in places)
        assert all(place + size <= total for (_, _, size), place in zip(wanted, places, strict=True))
    assert replay.arranged([(0, 1, 256), (2, 3, 256)])[0] == 256


def test_kernels_are_launched_by_the_addresses_of_the_day(compiled):
    """Those of arrays and results are their own; nothing else that is launched on is a tensor."""
    given = arrays("kda", **SIZES | dict(dtype=torch.bfloat16, K=64, V=64))
    with torch.no_grad():
        call("kda", given)
        assert not compiled.notes
        for _ in range(2):
            given = {name: x.clone() for name, x in given.items()}
            compiled.notes.clear()
            o, _ = call("kda", given)
            assert len(compiled.notes) >= 3
            assert all(note[1:5] == (1, 1, None, "fixed") and note[-1] == "constant" for note in compiled.notes)
            launched = [set(note) for note in compiled.notes]
            for name in ("q", "k", "v", "g", "beta"):
                assert any(given[name].data_ptr() in addresses for addresses in launched)
            assert o.data_ptr() in launched[-1]
            assert not any(isinstance(x, torch.Tensor) for addresses in launched for x in addresses)


def functions_called(function):
    """How many functions of linattn's are called."""
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__", "linattn").partition(".")[0].startswith("linattn"):
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(called)


@pytest.mark.parametrize("family", ["gla", "kda"])
def test_few_functions_lie_between_a_call_and_its_launches(family, compiled):
    """The host's time grows with them, on any machine."""
    given = arrays(family, **SIZES, state=False)
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    tokens, state = {name: x[:, :1] for name, x in given.items()}, torch.zeros(given["q"].shape[0], 2, 16, 18)
    step = getattr(linattn, f"decode_{family}")
    calls = {
        "forward": (lambda: call(family, given), 21),
        "kept for gradients": (lambda: call(family, leaves), 25),
        "in place": (lambda: step(**tokens, state=state, backend="triton"), 34),
    }
    for name, (function, most) in calls.items():
        with torch.set_grad_enabled(name == "kept for gradients"):
            for _ in range(2):
                function()
            assert functions_called(function) <= most, name


def test_few_functions_lie_between_a_call_of_ranks_and_its_launches():
    """PyTorch's own among them, which are counted by a command, in a process whose kernels are not interpreted."""
    command = [sys.executable, Path(__file__).with_name("host_work.py"), "kda", "--seconds", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for way, most in {"staged forward": (220, 40), "staged with backward": (380, 70)}.items():
        said = subprocess.run([*command, "--way", way], env=environment, capture_output=True, text=True, check=True).stdout
        functions, operations = map(int, re.search(r"(\d+) functions +(\d+) operations", said).groups())
        assert functions <= most[0]
        assert operations <= most[1]


@pytest.mark.parametrize("softplus", [False, True])
def test_gradients_of_parameters_are_no_operations_of_pytorch(softplus, replayed):
    """Each takes the host as long as several launches."""
    x = dict(C=(1, 20, 2, 16), B=(1, 20, 2, 16), x=(1, 20, 2, 16), dt=(1, 20, 2), A=(2,), D=(2,), dt_bias=(2,))
    leaves = {name: torch.rand(shape).requires_grad_() for name, shape in x.items()}
    for _ in range(2):
        o, _ = linattn.chunk_ssd(**leaves, dt_softplus=softplus, backend="triton")
        torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))
    _, backward = replayed
    assert not backward.computes


def test_a_kernel_with_hooks_of_its_own_is_left_to_the_compiler(compiled, replayed, monkeypatch):
    given = arrays("kda", **SIZES)
    with torch.no_grad():
        call("kda", given)
        (program,) = replay.PROGRAMS.values()
        monkeypatch.setattr(program.kernels[-1], "pre_run_hooks", [print])
        call("kda", given)
    assert not replayed


def test_a_kernel_that_is_not_compiled_is_left_to_the_function(compiled, replayed, monkeypatch):
    monkeypatch.setattr(launch, "COMPILED", {})
    given = arrays("kda", **SIZES)
    with torch.no_grad():
        for _ in range(3):
            call("kda", given)
    assert not replayed


def test_memory_that_was_viewed_is_given_back(monkeypatch):
    """A program lets go of views, too, of what it needs no more."""
    monkeypatch.setattr(replay, "SMALL", 0)

    def summed(x):
        made = torch.empty_like(x)
        made.copy_(x)
        return made.view(2, -1).sum(0)

    note = replay.Recording(torch.device("cpu"), (torch.ones(8),))
    with replay.standing_in(note), note:
        result = summed(*note.args)
    writer = replay.Writer(note, result, torch.device("cpu"), direct=False)
    program = writer.written()
    held = [line.partition(" ")[0] for line in writer.lines[:-1] if "= None" not in line and not line.startswith("_")]
    kept = writer.lines[-1].removeprefix("return ")
    assert len(held) == 3  # memory, a view of it, and the sum
    assert [f"{name} = None" in writer.lines for name in held] == [name != kept for name in held]
    assert torch.equal(program(torch.device("cpu"), None, torch.arange(8.0)), torch.tensor([4.0, 6, 8, 10]))
