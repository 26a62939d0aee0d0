"""What is compiled ahead is what a call will launch."""

from __future__ import annotations

import pytest
import torch
from linattn_backends.triton import ahead, launch
from triton_cases import arrays, call

FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
CASES = [(family, None, cu) for family in FAMILIES for cu in (None, [0, 0, 11, 40])] + [("gla", "plain", None)]


def compiled_for(kernel, config, args):
    return kernel, *config.items(), *map(launch.trait, args)


@pytest.mark.parametrize(("family", "gv", "cu"), CASES)
def test_forward_and_backward_are_foreseen(family, gv, cu, monkeypatch):
    launched, foreseen, start = [], [], launch.start

    def watched(kernel, count, device, args, config):
        if device.type == "cpu":
            if not launched:
                monkeypatch.setattr(ahead.triton, "AsyncCompileMode", NoCompiler)
                ahead.compile_ahead(device)
            launched.append(compiled_for(kernel, config, args))
        start(kernel, count, device, args, config)

    class Noting(ahead.Rehearsal):
        def start(self, kernel, count, args, config):
            foreseen.append(compiled_for(kernel, config, args))

    monkeypatch.setattr(launch, "start", watched)
    monkeypatch.setattr(ahead, "Rehearsal", Noting)
    given = arrays(family, T=40, HV=2, K=16, V=16, dtype=torch.bfloat16, gv=gv, cu=cu, kind="weak")
    leaves = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in given.items()}
    call(family, leaves)[0].sum().backward()
    assert launched
    assert foreseen == launched


class NoCompiler:
    """In place of Triton's, which needs a device."""

    def __init__(self, *args, **options):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass
