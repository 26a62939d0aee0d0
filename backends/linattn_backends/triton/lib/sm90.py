"""Layouts, copies, products and stores of kernels in Gluon for Hopper.

What holds for every kernel here: a buffer's place is given to another after its last use in the program, which for a product is
where it is issued: ``_keep_alive`` says where it is done. And a warp waits for its own rows of a product only: whoever
overwrites an operand needs a barrier after the wait.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .indexing import head_pointer, locate_sequence
from .input_maps import EPSILON


def constants(names):
    """A class of compile-time constants, made of one that names them, to hand to the parts of a kernel: built by keywords."""

    def __init__(self, **given):
        for name, value in given.items():
            setattr(self, name, gl.constexpr(value))

    names.__annotations__ = dict.fromkeys(names.__annotations__, gl.constexpr)
    names.__init__ = gluon.constexpr_function(__init__)
    return aggregate(names)


@gluon.constexpr_function
def mma_layout(width):
    """The layout of a product's results ``[64, width]`` in registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def lhs_layout(width):
    """The layout of a left operand; ``mma_layout`` has the same registers, whatever ``width``."""
    return gl.DotOperandLayout(0, mma_layout(width), 2)


@gluon.constexpr_function
def copy_layout(width):
    """The layout of a tile's rows as they are copied, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def store_layout(width):
    """The layout of a product's results as they are stored, 16 bytes a thread: a warp has its rows of ``mma_layout``.

    So no warp waits for another where results go from there to here.
    """
    across = [[0, 8 << i] for i in range((width // 8).bit_length() - 1)]
    down = [[1 << i, 0] for i in range(4)]
    lanes = 5 - len(across)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *down[lanes:]], across + down[:lanes], [[16, 0], [32, 0]], [], [64, width]
    )


@gluon.jit
def copy_rows_async(buffer, p, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Begin to copy ``count`` rows from ``p`` on to ``buffer [C, W]``, and zeros to the others."""
    layout: gl.constexpr = copy_layout(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(buffer, p + (r[:, None] * stride + columns[None, :]), mask=(r < count)[:, None])


@gluon.jit
def wait_for_predecessor():
    """Wait for the kernel before, then let the one after begin: where it may (``launch_pdl``), it is there when this one ends.

    First in a kernel, so that what any kernel reads was written by those before, however many of them may overlap.
    """
    gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def mma_async(a, b, acc, START: gl.constexpr):
    """Begin ``acc + a b``, without ``acc`` if ``START``."""
    return warpgroup_mma(a, b, acc, use_acc=not START, is_async=True)


@gluon.jit
def store_rows(p, x, stride, count, C: gl.constexpr, W: gl.constexpr):
    """Store the first ``count`` rows of a product's ``x [C, W]``, 16 bytes a thread."""
    layout: gl.constexpr = store_layout(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    columns = gl.arange(0, W, gl.SliceLayout(0, layout))
    gl.store(p + (r[:, None] * stride + columns[None, :]), gl.convert_layout(x, layout), mask=(r < count)[:, None])


@gluon.jit
def store_or_add_rows(p, x, stride, count, TURN, C: gl.constexpr, W: gl.constexpr, PART: gl.constexpr):
    """``store_rows`` of float32 ``x``; where ``PART`` heads take turns, added to the sum of those before."""
    if PART == 1:
        store_rows(p, x.to(p.dtype.element_ty), stride, count, C, W)
    else:
        r = gl.arange(0, C, gl.SliceLayout(1, mma_layout(W)))[:, None]
        p += r * stride + gl.arange(0, W, gl.SliceLayout(0, mma_layout(W)))[None, :]
        gl.store(p, x + gl.load(p, mask=(r < count) & (TURN > 0), other=0.0), mask=r < count)


@gluon.jit
def load_scalars(p, i, stride, count):
    """Numbers of tokens ``i``, float32; zero from ``count`` on."""
    return gl.load(p + i.to(gl.int64) * stride, mask=i < count, other=0.0).to(gl.float32)


@gluon.jit
def load_lengths(u, i, b, row, hv, T, HEADS, count, GROUP: gl.constexpr):
    """Reciprocal lengths ``[B, T, HEADS]`` of the rows that value head ``hv`` reads, of tokens ``i`` from ``row`` on."""
    return load_scalars(head_pointer(u, b, row, hv, T * HEADS, HEADS, 1, GROUP), i, HEADS, count)


WIDEN = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@gluon.jit
def widen(x):
    """``x`` in float32; of bfloat16, two numbers at a time: the compiler takes one instruction more for them."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(WIDEN, "=&r,=r,r", [x], gl.float32, True, 2)
    else:
        return x.to(gl.float32)


@gluon.jit
def reciprocal_lengths(tiles, C: gl.constexpr, W: gl.constexpr, N: gl.constexpr):
    """Reciprocal lengths ``[C]`` of rows that lie in ``N`` tiles ``[C, W]``, as :mod:`.lengths` has them."""
    x = widen(tiles[0].load(mma_layout(W)))
    squares = x * x
    for n in gl.static_range(1, N):
        x = widen(tiles[n].load(mma_layout(W)))
        squares += x * x
    return gl.rsqrt(gl.sum(squares, 1) + EPSILON)


@gluon.jit
def scale_rows(buffer, u, b, row, hv, T, HEADS, count, C: gl.constexpr, W: gl.constexpr, GROUP: gl.constexpr):
    """Rows that a thread copied to ``buffer [C, W]``, and waited for, times their reciprocal lengths, in their place."""
    layout: gl.constexpr = copy_layout(W)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))
    x = buffer.load(layout).to(gl.float32) * load_lengths(u, r, b, row, hv, T, HEADS, count, GROUP)[:, None]
    buffer.store(x.to(buffer.dtype))


@gluon.jit
def program_parts(TILES: gl.constexpr, HV):
    """The tile, value head and piece of a program."""
    pid = gl.program_id(0)
    return pid % TILES, pid // TILES % HV, pid // (TILES * HV)


@gluon.jit
def locate_chunk(i, owner, first, cu, T, PER, C: gl.constexpr, PACKED: gl.constexpr):
    """The place of chunk ``i``: batch row, first token, and how many tokens there are from there on."""
    _, piece, bos, L, b = locate_sequence(i, owner, first, cu, T, PER, PACKED)
    row = piece.to(gl.int64) * C
    return b, bos + row, (L - row).to(gl.int32)


@gluon.jit
def add(a, b):
    """The sum, for scans."""
    return a + b
