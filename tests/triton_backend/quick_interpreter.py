"""What Triton's interpreter finds out anew for every operation, found out once: the same numbers in half the time."""

from __future__ import annotations

import functools

from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

__all__ = ["quicken"]


def quicken() -> None:
    """Let the interpreter of this process remember."""
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = of_elements(interpreter._get_np_dtype)
    core.block_type.__init__ = describe_block
    core.tensor.__init__ = describe_tensor


def patched_once(patch):
    """A kernel puts the interpreter's functions into the modules that it names; what it calls finds them there."""

    @functools.cache
    def named_by(fn):
        return [module for module in (tl, core) if any(x is module for x in fn.__globals__.values())]

    def patched(fn):
        unchanged = any(core.is_builtin(module.load) for module in named_by(fn))
        return patch(fn) if unchanged else interpreter._LangPatchScope()

    return patched


def of_elements(find):
    """NumPy's dtype of an element, by what the element is."""
    known = functools.cache(find)
    pointers = find(core.pointer_type(core.int8))
    return lambda ty: pointers if isinstance(ty.scalar, core.pointer_type) else known(ty.scalar)


@functools.cache
def block(shape):
    """A block's shape, and how many elements it has."""
    return core.tuple(shape), core.validate_block_shape(shape)


@functools.cache
def dimensions(shape):
    """A tensor's shape and number of elements, which kernels may compute with."""
    numel = 1
    for n in shape:
        numel *= n
    return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(numel)


def describe_block(self, element_ty, shape):
    """In place of ``block_type.__init__``."""
    shape = tuple(n.value if isinstance(n, core.constexpr) else n for n in shape)
    if not shape:
        raise TypeError("a block has at least one dimension")
    self.element_ty = element_ty
    self.shape, self.numel = block(shape)
    self.name = f"<{shape}, {element_ty}>"


def describe_tensor(self, handle, type):
    """In place of ``tensor.__init__``."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = dimensions(tuple(type.shape) if type.is_block() else ())
