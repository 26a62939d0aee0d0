"""Flags with which XLA compiles what tests call in a part of the time: ``XLA_FLAGS=$(python .ci/xla_flags.py)``.

XLA ends a process that names a flag it does not know, so these are the flags of the jaxlib that is installed.
"""

from __future__ import annotations

from importlib import metadata

FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
)
BEFORE_0_11 = ("--xla_cpu_use_fusion_emitters=false",)
"""Fusions take the longest of all. Later releases have no other way to compile them, and take three times as long."""


def flags() -> str:
    """The flags, with spaces between them; none where JAX is not installed."""
    try:
        version = metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        return ""
    older = tuple(map(int, version.split(".")[:2])) < (0, 11)
    return " ".join(FLAGS + BEFORE_0_11 * older)


if __name__ == "__main__":
    print(flags())
