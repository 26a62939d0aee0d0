"""A kernel of two partitions of warps, right by its form, for finding out what a sanitizer makes of such kernels.

One partition stores 128 numbers in a buffer, the other adds them up, tile after tile: ``out[i] = Σ_n x[n, i]``. The one waits
until the buffer is read and the other until it is full, on barriers in shared memory (PTX's ``mbarrier``). What a tool reports
of a kernel of this form says nothing if it reports this one, too.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TILE = 128


@gluon.jit
def give(x, buffer, full, empty, n):
    """Store tile after tile."""
    size: gl.constexpr = buffer.shape[0]
    rows = gl.arange(0, size, gl.BlockedLayout([1], [32], [4], [0]))
    for i in range(n):
        mbarrier.wait(empty, (i & 1) ^ 1)
        buffer.store(gl.load(x + i * size + rows))
        gl.thread_barrier()
        mbarrier.arrive(full, count=1)


@gluon.jit
def take(out, buffer, full, empty, n):
    """Add tile after tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    size: gl.constexpr = buffer.shape[0]
    total = gl.zeros([size], gl.float32, layout)
    for i in range(n):
        mbarrier.wait(full, i & 1)
        total += buffer.load(layout)
        gl.thread_barrier()
        mbarrier.arrive(empty, count=1)
    gl.store(out + gl.arange(0, size, layout), total)


@gluon.jit
def handover_control(x, out, n, TILE: gl.constexpr):
    """A program is both partitions."""
    buffer = gl.allocate_shared_memory(gl.float32, [TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize([(take, (out, buffer, full, empty, n)), (give, (x, buffer, full, empty, n))], [4], [48])
    full._keep_alive()
    empty._keep_alive()


def main():
    """Run it, and compare."""
    x = torch.randn(50, TILE, device="cuda")
    out = torch.full([TILE], float("nan"), device="cuda")
    handover_control[(4,)](x, out, len(x), TILE=TILE, num_warps=4)
    torch.testing.assert_close(out, x.sum(0))
    print('{"ok": true}')


if __name__ == "__main__":
    main()
