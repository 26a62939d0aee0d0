"""What calls of the Triton kernels cost the host, where there is no GPU: ``… [FAMILY…] [--way WAY]… [--functions]``.

Kernels are chosen as for a Hopper GPU, on arrays of the CPU, and launched by a function that does nothing, to which every
kernel is taken to have been compiled. So a call does all that the host does for one on a GPU, but for what the driver, the
allocator and collectives take there. Prints of each family processor microseconds of a call, in the fastest of many rounds,
how many functions of Python it calls, those of libraries included, how many operations of PyTorch, and how much a GPU is given
to do: kernels, operations that are more than memory or another view of it, and collectives. A ``staged`` call is that of one of
several ranks.
"""

import argparse
import collections
import ctypes
import itertools
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from linattn.distributed import collectives, context_parallel, on_torch
from linattn.spec import DECODING
from linattn_backends.triton import backend
from linattn_backends.triton.runtime import device, launch, replay
from linattn_benchmarks import clocks, fresh, host
from linattn_benchmarks.cases import SWEPT, Case, complete
from linattn_benchmarks.subjects import Linattn
from torch import profiler
from torch.testing._internal.distributed.fake_pg import FakeStore

SETTINGS = dict(device="cpu", dtype="bfloat16", gate_dtype="float32", gates="model")
STAGED = {"staged forward": "fwd", "staged with backward": "fwdbwd"}
WAYS = (*host.WAYS, *STAGED)
NOT_STAGED = ("mixed_attn",)
RANKED = host.SIZES | {"T": 1024, "H": 1}
"""Sizes on each rank: few heads, since what ranks do to states is done here, on a device that they fill."""
OPERATIONS = "aten::", "c10d::", "linattn::"
IDLE = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "is_nonzero", "item", "new_empty",
        "permute", "reshape", "select", "slice", "split_with_sizes", "t", "transpose", "unbind", "unsqueeze", "view",
    )
)  # fmt: skip
"""Operations that give a device nothing to do."""
LAUNCHED = "".format
"""What launches: a function that takes anything, and is seen when it is called."""


class Anything(dict):
    """Compiled kernels: whichever is asked for, launched by a function that takes anything."""

    def get(self, key, default=None):
        return launch.Ready(None, LAUNCHED, (0, False, True, None, None, (4, 1, 0), None, None, None), (64, 64, 2, True))


def stand_in(rank=1, ranks=3):
    """Let calls on arrays of the CPU go where those on a GPU's go, and ranks find nobody to talk to."""
    start = launch.start

    def only_without_memory(kernel, count, where, args, config):
        if where.type == "meta":
            start(kernel, count, where, args, config)

    launch.start = only_without_memory
    launch.COMPILED, launch.directly = Anything(), lambda where: True
    backend._device_complaint = lambda kind: None
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    on_torch.cpu_group_of = lambda group, timeout: group
    collectives._is_waited_for = lambda where: True  # as a GPU would be, of which nothing is read
    on_torch.agree = collectives.agree = lambda *said: None
    torch.set_num_threads(1)
    for option in (-1, -3):  # how much free memory goes back to the system, and from where on it is asked for by itself
        ctypes.CDLL(None).mallopt(option, 1 << 25)


def call_of(family, way):
    """A call, and the block that it is to run in."""
    properties, where = device.Properties(1 if way in STAGED else 132, True, None), {}
    device.measured = lambda where: properties
    if way in STAGED:
        case = Case(f"chunk_{family}", STAGED[way], tuple(complete(RANKED).items()), **SETTINGS)
        where["context"] = context_parallel()
    else:
        case = host.cases(SETTINGS, [family])[family, way]
    subject = Linattn("triton")
    _, arrays, pulled = fresh.prepared(case, subject)
    function, given = subject.function(case), subject.given(case, arrays)
    if not pulled:
        return lambda: function(given | where), torch.no_grad()
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    wanted, do = list(leaves.values()), pulled["o"]
    return lambda: torch.autograd.grad(function(leaves | where)[0], wanted, do), nullcontext()


def functions(call):
    """How often each function of Python is called, and how many kernels are launched."""
    count, kernels = collections.Counter(), 0

    def note(frame, event, called):
        nonlocal kernels
        kernels += event == "c_call" and called is LAUNCHED
        if event == "call":
            code = frame.f_code
            count[f"{'/'.join(code.co_filename.split('/')[-3:])}:{code.co_firstlineno} {code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count, kernels


def operations(call):
    """How often each operation of PyTorch is called, but by others."""
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU]) as found:
        call()
    own = [x for x in found.events() if x.name.startswith(OPERATIONS)]
    return collections.Counter(x.name for x in own if x.cpu_parent is None or not x.cpu_parent.name.startswith(OPERATIONS))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="default: all")
    parser.add_argument("--way", action="append", choices=WAYS, help="default: all")
    parser.add_argument("--seconds", type=float, default=0.3, help="for one figure")
    parser.add_argument("--functions", action="store_true", help="say which functions and operations are called")
    parser.add_argument("--rank", type=int, default=1, help="of a staged call; default: the second of three")
    parser.add_argument("--ranks", type=int, default=3)
    asked = parser.parse_args()
    stand_in(asked.rank, asked.ranks)
    for way, family in itertools.product(asked.way or WAYS, asked.family or SWEPT):
        if (way == "one token in place" and family not in DECODING) or (way in STAGED and family in NOT_STAGED):
            continue
        call, inside = call_of(family, way)
        with inside:
            for _ in range(2 * replay.OFTEN):
                call()
            us = min(clocks.queueing_times(call, lambda result: None, asked.seconds, time.process_time)) * 1e3
            (called, kernels), done = functions(call), operations(call)
        given = kernels + sum(number for name, number in done.items() if name not in IDLE)
        found = f"{called.total():4} functions {done.total():3} operations {given:3} for the device"
        print(f"{way:21} {family:16} {us:7.1f} µs {found}", flush=True)
        for name, count in (*done.most_common(), *called.most_common()) if asked.functions else ():
            print(f"    {count:4} {name}")


if __name__ == "__main__":
    main()
