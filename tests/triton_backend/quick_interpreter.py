"""What Triton's interpreter finds out anew for every operation, found out once: the same numbers in a third of the time."""

from __future__ import annotations

import dataclasses
import functools
import numbers

import numpy as np
from triton import language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

__all__ = ["describe_types", "quicken"]


def quicken() -> None:
    """Let the interpreter of this process remember."""
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = of_elements(interpreter._get_np_dtype)
    TritonSemantic.binary_op_type_checking_impl = of_one_type(TritonSemantic.binary_op_type_checking_impl)
    builder = interpreter.interpreter_builder  # without ``debug`` it looks for overflows of integers, and tells nobody
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter.ScanOps.generic_scan = scanned_by_rows
    describe_types()


def scanned_by_rows(self, inputs):
    """A scan that takes the rows of a block one after the other, and not its numbers."""
    blocks = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    found = [np.empty_like(block) for block in blocks]
    so_far = ()
    for step, row in enumerate(zip(*blocks, strict=True)):
        given = tuple(self.to_tensor(np.array(part), x.dtype) for part, x in zip(row, inputs, strict=True))
        result = self.combine_fn.fn(*so_far, *given) if step else given
        so_far = result if isinstance(result, tuple) else (result,)
        for into, x in zip(found, so_far, strict=True):
            into[step] = x.handle.data
    return [self.to_tensor(np.moveaxis(block, 0, self.axis), x.dtype) for block, x in zip(found, inputs, strict=True)]


def describe_types() -> None:
    """Types of blocks and tensors, which the compiler's front end makes as often."""
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


def of_one_type(agree):
    """Two operands as they are operated on: their types follow from what they were, and NumPy repeats the smaller one."""
    known = {}

    def agreed(self, lhs, rhs, *how, **named):
        if not all(isinstance(x, core.tensor | numbers.Number) for x in (lhs, rhs)):
            return agree(self, lhs, rhs, *how, **named)
        key = (*map(what, (lhs, rhs)), how, *named.items())
        if key not in known:
            pair = agree(self, lhs, rhs, *how, **named)
            known[key] = [x.type for x in pair]
            return pair
        return [as_type(self, x, type) for x, type in zip((lhs, rhs), known[key], strict=True)]

    return agreed


def what(operand):
    """A tensor's type, or a number and its own."""
    return operand.type.name if isinstance(operand, core.tensor) else (operand, type(operand))


def as_type(semantic, x, type):
    """A number or a tensor with elements of a type, which is said to have all that the type has."""
    if not isinstance(x, core.tensor):
        return core.tensor(constant(semantic, x, x.__class__, type.scalar), type)
    if x.type.name == type.name:
        return x
    return core.tensor(semantic.cast(x, type.scalar).handle, type)


@functools.cache
def constant(semantic, value, kind, element_ty):
    """The array of one element; ``True`` is not 1."""
    return semantic.scalar_constant(value, element_ty).handle


@functools.cache
def block(shape, element):
    """A block's shape, how many elements it has, and its name."""
    return core.tuple(shape), core.validate_block_shape(shape), f"<{shape}, {element}>"


@functools.cache
def dimensions(shape):
    """A tensor's shape and number of elements, which kernels may compute with."""
    numel = 1
    for n in shape:
        numel *= n
    return core.tuple([core.constexpr(n) for n in shape]), core.constexpr(numel)


def describe_block(self, element_ty, shape):
    """In place of ``block_type.__init__``."""
    shape = tuple([n.value if isinstance(n, core.constexpr) else n for n in shape])
    if not shape:
        raise TypeError("a block has at least one dimension")
    self.element_ty = element_ty
    self.shape, self.numel, self.name = block(shape, element_ty.name)


def describe_tensor(self, handle, type):
    """In place of ``tensor.__init__``."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = dimensions(tuple(type.shape) if type.is_block() else ())
