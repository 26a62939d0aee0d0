"""The host's way to a launch: what was compiled is found again and launched by addresses, and who watches launches is told."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from linattn_backends.triton.host import chunks  # noqa: E402
from linattn_backends.triton.runtime import launch  # noqa: E402

CUDA = torch.device("cuda", 0)


class Compiled:
    """A compiled kernel of Triton 3.6, which notes how it was launched."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, notes, scratch):
        self.notes = notes
        self.run = SimpleNamespace(
            launch=self.directly,
            global_scratch_size=scratch,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=True,
        )

    def directly(self, *given):
        self.notes.append(("directly", given))

    def __getitem__(self, grid):
        return lambda *given: self.notes.append((grid, given))


@pytest.fixture
def kernel(monkeypatch):
    """``kernel(scratch=0)``: one that takes ``x, n`` and the constants ``C, D``, and the notes of its launches."""
    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(launch, "COMPILED", {})
    driver = SimpleNamespace(get_current_stream=lambda index: ("stream", index))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)

    class Kernel:
        __name__ = "noting"
        pre_run_hooks = ()
        params = tuple(SimpleNamespace(name=name) for name in ("x", "n", "C", "D"))

        def __init__(self, scratch=0):
            self.notes, self.scratch = [], scratch

        def __getitem__(self, grid):
            def compile_and_launch(*args, **config):
                self.notes.append(("compiled", grid, args, config))
                return Compiled(self.notes, self.scratch)

            return compile_and_launch

    return Kernel


def test_what_was_compiled_is_launched_by_addresses(kernel):
    one, x, y = kernel(), torch.randn(8), torch.randn(8)
    launch.start(one, 3, CUDA, (x, 5), {"D": 2, "C": 1, "num_warps": 4})
    launch.start(one, 9, CUDA, (y, 5), {"D": 2, "C": 1, "num_warps": 4})
    first, second = one.notes
    assert first == ("compiled", (3,), (x, 5), {"D": 2, "C": 1, "num_warps": 4})
    fixed = (7, False, True, None, None, (4, 1, 0), None, None, None)
    assert second == ("directly", (9, 1, 1, ("stream", 0), *fixed, y.data_ptr(), 5, 1, 2))


OTHERS = {
    "another alignment": (torch.randn(8)[1:], 5),
    "another dtype": (torch.randn(8).half(), 5),
    "a multiple of 16": (torch.randn(8), 16),
    "nothing": (None, 5),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_a_kernel_is_compiled_for_is_told_apart(kernel, other):
    one = kernel()
    for args in ((torch.randn(8), 5), other):
        launch.start(one, 3, CUDA, args, {"C": 1, "D": 2})
    assert [note[0] for note in one.notes] == ["compiled", "compiled"]


def test_a_kernel_with_memory_of_its_own_is_launched_by_the_compiler(kernel):
    one, x = kernel(scratch=128), torch.randn(8)
    for _ in range(2):
        launch.start(one, 3, CUDA, (x, 5), {"C": 1, "D": 2})
    assert one.notes[1] == ((3, 1, 1), (x, 5, 1, 2))


def test_who_watches_launches_sees_them(kernel, monkeypatch):
    one, x = kernel(), torch.randn(8)
    launch.start(one, 3, CUDA, (x, 5), {"C": 1, "D": 2})
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[print]))
    launch.start(one, 3, CUDA, (x, 5), {"C": 1, "D": 2})
    assert one.notes[1] == ((3, 1, 1), (x, 5, 1, 2))


def test_who_watches_runs_of_a_kernel_sees_them(kernel):
    one, x = kernel(), torch.randn(8)
    one.pre_run_hooks = [print]
    for _ in range(2):
        launch.start(one, 3, CUDA, (x, 5), {"C": 1, "D": 2})
    assert [note[0] for note in one.notes] == ["compiled", "compiled"]


@pytest.mark.parametrize(
    ("knobs", "name", "value"),
    [(triton.knobs.runtime, "debug", True), (triton.knobs.compilation, "instrumentation_mode", "consan")],
)
def test_settings_of_the_compiler_are_told_apart(kernel, knobs, name, value):
    one, x = kernel(), torch.randn(8)
    launch.start(one, 3, CUDA, (x, 5), {"C": 1, "D": 2})
    with knobs.scope():
        setattr(knobs, name, value)
        launch.start(one, 3, CUDA, (x, 5), {"C": 1, "D": 2})
    assert [note[0] for note in one.notes] == ["compiled", "compiled"]


def test_a_hook_may_take_a_kernel_over(kernel, monkeypatch):
    """A ``jit_cache_hook`` that returns true: the compiler returns nothing, each time."""
    one, x = kernel(), torch.randn(8)
    compiler = type(one).__getitem__

    def taken_over(self, grid):
        return lambda *args, **config: compiler(self, grid)(*args, **config) and None

    monkeypatch.setattr(type(one), "__getitem__", taken_over)
    for _ in range(2):
        launch.start(one, 3, CUDA, (x, 5), {"C": 1, "D": 2})
    assert [note[0] for note in one.notes] == ["compiled", "compiled"]
    assert not launch.COMPILED


@pytest.mark.parametrize(("cu", "tokens"), [(None, 4096), ([0, 4096], 4096), ([0, 1024, 2048, 3072, 4096], 1024), ([0], 4096)])
def test_packed_sequences_are_as_long_as_their_mean(cu, tokens):
    """Four sequences of 1,024 tokens end to end are cut as a batch of them would be."""
    offsets = None if cu is None else torch.tensor(cu)
    call = SimpleNamespace(v=torch.empty(1, 4096, 1, 1), cu=offsets, N=1 if cu is None else len(cu) - 1)
    assert chunks.usual_tokens(call) == tokens
