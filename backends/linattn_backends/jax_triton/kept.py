"""Compiled kernels that Triton's cache on disk keeps, so that a process that starts anew compiles none that another has.

jax-triton keeps what it compiles for as long as the process lives, and JAX's compilation cache is of whole programs, which are
told apart by the compiled kernels in them. A gradient may have ten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

__all__ = ["OURS", "keep_compiled"]

OURS = "linattn_"
"""What names of kernels begin with that are kept; those of others are compiled as if this were not here."""
FILE = "jax_triton.json"
COMPILES = "compile_ttir_to_ptx_inplace"
KEPT = ("binary", "name", "shared_mem_bytes")
"""What there is to keep of a compiled kernel."""
SHOWN = ("ttgir", "llir")
"""What jax-triton has of it beside that where it shows how kernels are compiled, and ``None`` elsewhere."""

Compile = Callable[..., Any]


class Source(NamedTuple):
    """What a kernel is compiled from: its text, without the files and lines that it came from, by a release of jax-triton."""

    text: str
    release: str

    def hash(self) -> str:
        """What tells it from others, where Triton asks a source for it."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()


@functools.cache
def keep_compiled() -> None:
    """Have jax-triton look among the kept kernels before it compiles one for CUDA, once a process.

    That is no part of jax-triton's interface: a release that compiles in another place, or has more of a kernel, keeps nothing.
    """
    from jax_triton import triton_lib

    compiled, result = (getattr(triton_lib, name, None) for name in (COMPILES, "CompilationResult"))
    if compiled and result and {field.name for field in dataclasses.fields(result)} == {*KEPT, *SHOWN}:
        setattr(triton_lib, COMPILES, functools.partial(found_or_compiled, compiled))


def found_or_compiled(compiled: Compile, ttir: Any, backend: Any, options: Any, *rest: Any) -> Any:
    """As ``compiled`` does it, unless it is kept."""
    from jax_triton import triton_lib

    place = place_of(ttir, backend, options)  # before it is compiled, which changes it
    if place and (kept := read(place)):
        return triton_lib.CompilationResult(**kept, **dict.fromkeys(SHOWN))
    found = compiled(ttir, backend, options, *rest)
    if place:
        with contextlib.suppress(OSError):
            place.put(json.dumps({name: getattr(found, name) for name in KEPT}), FILE, binary=False)
    return found


def place_of(ttir: Any, backend: Any, options: Any) -> Any:
    """Where a kernel is kept; nowhere if it is another's, or is compiled to be looked at or into, or there is no folder."""
    from jax_triton import triton_lib
    from triton import knobs
    from triton.compiler.compiler import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager

    shown = options.debug or getattr(triton_lib, "_JAX_TRITON_DUMP_DIR", None) or knobs.compilation.always_compile
    instrumented = knobs.compilation.instrumentation_mode or backend.instrumentation
    if shown or instrumented or not ttir.get_entry_func_name().startswith(OURS):
        return None
    source = Source(ttir.str_nodebug(), version("jax-triton"))
    key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
    try:
        return get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    except (OSError, RuntimeError):
        return None


def read(place: Any) -> dict[str, Any] | None:
    """What is kept there; nothing if it cannot be read, as after a crash, and then it is written again."""
    try:
        file = place.get_file(FILE)
        if not file:
            return None
        with open(file, encoding="utf-8") as text:
            found = json.load(text)
    except (OSError, ValueError):
        return None
    return found if found.keys() == set(KEPT) else None
