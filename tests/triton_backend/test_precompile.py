"""What is compiled ahead is what a call will launch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import linattn
import pytest
import torch
from linattn_backends.triton.runtime import launch, precompile
from linattn_backends.triton.runtime.device import stand_in
from triton.runtime._async_compile import active_mode
from triton_cases import arrays, call

FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
CASES = [(family, None, cu) for family in FAMILIES for cu in (None, [0, 0, 11, 40])] + [("gla", "plain", None)]


def compiled_for(kernel, config, args):
    return kernel, *config.items(), *launch.specialized(args)[0]


def noted(monkeypatch, every):
    """What is launched, and what was foreseen: before the first launch, or whatever function launches."""
    launched, foreseen, start = [], [], launch.start

    def watched(kernel, count, device, args, config):
        if device.type == "cpu":
            if every or not launched:
                precompile.precompile(device)
            launched.append(compiled_for(kernel, config, args))
        start(kernel, count, device, args, config)

    class Noting(precompile.Rehearsal):
        def start(self, kernel, count, args, config):
            foreseen.append(compiled_for(kernel, config, args))

    monkeypatch.setattr(launch, "start", watched)
    monkeypatch.setattr(precompile, "Rehearsal", Noting)
    monkeypatch.setattr(precompile.triton, "AsyncCompileMode", NoCompiler)
    return launched, foreseen


@pytest.mark.parametrize(("family", "gv", "cu"), CASES)
def test_forward_and_backward_are_foreseen(family, gv, cu, monkeypatch):
    launched, foreseen = noted(monkeypatch, every=False)
    given = arrays(family, T=40, HV=2, K=16, V=16, dtype=torch.bfloat16, gv=gv, cu=cu, kind="weak")
    leaves = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in given.items()}
    call(family, leaves)[0].sum().backward()
    assert launched
    assert foreseen == launched


@pytest.mark.parametrize("family", ["mixed_attn", "linear_attn"])
def test_of_operators_without_a_state_the_forward_pass_is_foreseen_and_then_the_backward_pass(family, monkeypatch):
    launched, foreseen = noted(monkeypatch, every=True)
    operands = [torch.randn(1, 40, 2, 16).bfloat16().requires_grad_() for _ in range(5 if family == "mixed_attn" else 3)]
    options = dict(chunk_size=16) if family == "mixed_attn" else {}
    o, _ = getattr(linattn, f"chunk_{family}")(*operands, **options, causal=False, backend="triton")
    forward = len(launched)
    o.sum().backward()
    assert len(launched) > forward > 0
    assert foreseen == launched


class NoCompiler:
    """In place of Triton's, which needs a device."""

    def __init__(self, *args, **options):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


class Kernel:
    """Notes in which of Triton's modes it is compiled."""

    def __init__(self):
        self.modes = []

    def warmup(self, *args, grid, **config):
        self.modes.append(active_mode.get())


def compile_first(kernel):
    """As the first launch of a call does."""

    @precompile.precompiled()
    def body(x):
        if x.is_meta:
            stand_in().start(kernel, 1, (x,), {})
        else:
            precompile.precompile(x.device)

    body(torch.zeros(1))


def test_inside_a_mode_of_the_caller_there_is_one_of_its_own():
    kernel = Kernel()
    with ThreadPoolExecutor(1) as threads, precompile.triton.AsyncCompileMode(threads) as outer:
        compile_first(kernel)
        assert active_mode.get() is outer
    (inner,) = kernel.modes
    assert inner is not None
    assert inner is not outer


def test_no_mode_outlives_an_interrupt(monkeypatch):
    def leave(mode, *error):
        raise KeyboardInterrupt

    monkeypatch.setattr(precompile.triton.AsyncCompileMode, "__exit__", leave)
    with pytest.raises(KeyboardInterrupt):
        compile_first(Kernel())
    assert active_mode.get() is None


class Loadable(Kernel):
    """Compiled at once; notes in which thread its launcher is made, and then loaded; it cannot be."""

    src = metadata = None

    def __init__(self):
        super().__init__()
        self.threads = []

    def warmup(self, *args, grid, **config):
        return self

    @property
    def run(self):
        self.threads.append(threading.current_thread())
        raise RuntimeError("too large for the device")


def test_launchers_are_made_in_threads_and_loaded_in_one(monkeypatch):
    """Triton's are modules of one name: loaded at once, one can take the place of another."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    kernel, made = Loadable(), []

    def launcher(src, metadata):
        assert not kernel.threads
        made.append(threading.current_thread())

    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher))
    monkeypatch.setattr(precompile.triton.runtime, "driver", driver)
    compile_first(kernel)
    (thread,) = made
    assert thread is not threading.current_thread()
    assert kernel.threads == [threading.current_thread()]


def test_a_launcher_that_cannot_be_made_is_left_to_the_launch(monkeypatch):
    def no_compiler(src, metadata):
        raise RuntimeError("no C compiler")

    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=no_compiler))
    monkeypatch.setattr(precompile.triton.runtime, "driver", driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    kernel = Loadable()
    compile_first(kernel)
    assert kernel.threads == []
