"""A kernel with one barrier less, or one shuffle over another distance, is found out.

Every barrier and every shuffle of every kernel is tried, in the source that MLX would compile.
"""

import re

import pytest
from emulator import EmulatorError
from linattn_backends.mlx.metal import launch
from metal_cases import Options, draw

BARRIER = re.compile(r"\b(threadgroup|simdgroup)_barrier\(mem_flags::\w+\);")
SHUFFLE = re.compile(r"(simd_shuffle_xor\(\w+, )(.*)(\)\)?;)$", re.MULTILINE)


def wrong_sources(source):
    """Each change that must not go unnoticed, by its name."""
    for at, found in enumerate(BARRIER.finditer(source)):
        yield f"without barrier {at}", source[: found.start()] + source[found.end() :]
    for at, found in enumerate(SHUFFLE.finditer(source)):
        call, distance, rest = found.groups()
        for name, other in ("twice", f"2 * ({distance})"), ("half", f"({distance}) / 2"), ("fixed", "1"):
            yield (
                f"shuffle {at} over {name} the distance",
                source[: found.start()] + call + other + rest + source[found.end() :],
            )


# Kernels and the calls that between them run every line of theirs.
CASES = {"recurrent": ("kda",), "backward": ("gated_delta_rule", "rwkv6"), "chunk": ("kda",)}


def unnoticed(emulated, name, variant, tried):
    """The names of the changes, of those that are tried, that change nothing in one call; without any, all are."""
    case = draw(variant, T=20 if name == "chunk" else 7, B=1, H=1, HV=1, K=30, V=20)
    options = Options(form="chunk" if name == "chunk" else "recurrent")
    emulator = emulated()
    assert max(case.errors(options, backward=name == "backward").values()) < 1
    source = next(source for source in emulator.launches if f"custom_kernel_linattn_{name}" in source)
    for what, wrong in wrong_sources(source):
        if tried and what not in tried:
            continue
        emulated(mutate=lambda given, wrong=wrong: wrong if given == source else given)
        try:
            errors = case.errors(options, backward=name == "backward")
        except EmulatorError:
            continue
        if not max(errors.values()) > 100:
            yield what


@pytest.mark.parametrize("name", CASES)
def test_no_barrier_and_no_shuffle_is_there_in_vain(emulated, name):
    left = set()
    for variant in CASES[name]:
        left = set(unnoticed(emulated, name, variant, left))
        if not left:
            return
    pytest.fail(f"nobody would notice: {sorted(left)}")


def test_every_barrier_and_shuffle_is_tried():
    for name, barriers, shuffles in ("recurrent", 0, 1), ("backward", 3, 2), ("chunk", 3, 0):
        source = "".join(launch.text(part) for part in (*launch.HEADERS[name], f"{name}.metal"))
        assert len(re.findall("_barrier", source)) == barriers
        assert len(re.findall("simd_shuffle", source)) == shuffles
        assert len(list(wrong_sources(source))) == barriers + 3 * shuffles
