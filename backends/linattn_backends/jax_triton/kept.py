"""Compiled kernels that Triton's cache on disk keeps, so that a process that starts anew compiles none that another has.

jax-triton keeps what it compiles for as long as the process lives, and JAX's compilation cache is of whole programs, which are
told apart by the compiled kernels in them. A gradient may have ten.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["OURS", "keep_compiled"]

OURS = "linattn_"
"""What names of kernels begin with that are kept; those of others are compiled as if this were not here."""
FILE = "jax_triton.json"
COMPILES = "compile_ttir_to_ptx_inplace"

Compile = Callable[..., Any]


class Text(NamedTuple):
    """A kernel in Triton's intermediate language, without the files and lines that it came from."""

    text: str

    def hash(self) -> str:
        """What tells it from others, where Triton asks a source for it."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@functools.cache
def keep_compiled() -> None:
    """Have jax-triton look among the kept kernels before it compiles one for CUDA, once a process.

    That is no part of jax-triton's interface: a release that compiles in another place keeps nothing.
    """
    from jax_triton import triton_lib

    if compiled := getattr(triton_lib, COMPILES, None):
        setattr(triton_lib, COMPILES, functools.partial(found_or_compiled, compiled))


def found_or_compiled(compiled: Compile, ttir: Any, backend: Any, options: Any, *rest: Any) -> Any:
    """As ``compiled`` does it, unless it is kept."""
    from jax_triton import triton_lib

    place = place_of(ttir, backend, options)  # before it is compiled, which changes it
    if place and (file := place.get_file(FILE)):
        with open(file, encoding="utf-8") as text:
            return triton_lib.CompilationResult(**json.load(text), ttgir=None, llir=None)
    found = compiled(ttir, backend, options, *rest)
    if place:
        kept = {name: getattr(found, name) for name in ("binary", "name", "shared_mem_bytes")}
        with contextlib.suppress(OSError):
            place.put(json.dumps(kept), FILE, binary=False)
    return found


def place_of(ttir: Any, backend: Any, options: Any) -> Any:
    """Where a kernel is kept; nowhere if it is another's, is to be compiled under the eyes of its author, or no folder is
    there that can be written.
    """
    from jax_triton import triton_lib
    from triton import knobs
    from triton.compiler.compiler import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager

    shown = options.debug or getattr(triton_lib, "_JAX_TRITON_DUMP_DIR", None) or knobs.compilation.always_compile
    if shown or not ttir.get_entry_func_name().startswith(OURS):
        return None
    key = get_cache_key(Text(ttir.str_nodebug()), backend, options, get_cache_invalidating_env_vars())
    try:
        return get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    except (OSError, RuntimeError):
        return None
