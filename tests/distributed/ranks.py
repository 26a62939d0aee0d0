"""What the processes of a group run: every case in turn, each rank holding its result against one device's.

A job is a name and keywords of a function in this module. The processes of a group are started once, and run all of its jobs.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import linking
from sequence_cases import SPREAD, arguments, draw, operator, parts

Job = tuple[str, str, dict[str, Any]]
"""Its id, the function, and the keywords."""

KERNELS = {"float32": 2e-3, "bfloat16": 2e-2}
"""Of the norm, by which kernels may be off, by the dtype of matrices: products of the matrix units, in another order."""
WIDTHS = {"float32": 32, "bfloat16": 128}
"""``K = V`` of kernels, by the dtype of matrices: plain ones, and Hopper's own."""
MATRICES = frozenset("qkvab")
"""Inputs whose rows are as wide as a head."""
SECONDS = 200
"""For a group to say something; a busy machine is slow."""
NOT_RUN = "not run"


def run_jobs(
    world: int,
    jobs: Sequence[Job],
    timeout: float = 30,
    device: str = "cpu",
    heard: Callable[[str, list[str]], None] | None = None,
) -> dict[str, list[str]]:
    """Run jobs on ``world`` processes; return what each rank says to each job: nothing if all is well, else a traceback.

    On ``"cuda"`` each process has a device, and NCCL between them. ``heard`` is told of a job as soon as all ranks did it.
    """
    context = multiprocessing.get_context("spawn" if device == "cuda" else "forkserver")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        processes = [
            context.Process(target=_member, args=(rank, world, str(meeting), list(jobs), queue, timeout, device), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        found: dict[str, list[str]] = {name: [NOT_RUN] * world for name, _, _ in jobs}
        for rank, name, said in _messages(queue, processes):
            found[name][rank] = said
            if heard and NOT_RUN not in found[name]:
                heard(name, found[name])
        ended = all(process.exitcode == 0 for process in processes)
        for process in processes:
            process.terminate()
            process.join()
        if not ended:  # of the first job that some rank did not come back from, these say how they ended
            name = next((name for name, texts in found.items() if NOT_RUN in texts), jobs[-1][0])
            codes = [f"the process was lost, with exit code {process.exitcode}" for process in processes]
            found[name] = [code if text == NOT_RUN else text for text, code in zip(found[name], codes, strict=True)]
    return found


def _messages(queue: Any, processes: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """What ranks say, until all have ended, or one is lost or silent."""
    finished, silent = 0, time.monotonic() + SECONDS
    while finished < len(processes):
        try:
            message = queue.get(timeout=1)
        except Empty:
            if time.monotonic() > silent or any(process.exitcode not in (None, 0) for process in processes):
                return
            continue
        silent = time.monotonic() + SECONDS
        if message is None:
            finished += 1
        else:
            yield message
    for process in processes:
        process.join(timeout=SECONDS)


def _member(rank: int, world: int, meeting: str, jobs: list[Job], queue: Any, timeout: float, device: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    for name, function, keywords in jobs:
        try:
            globals()[function](**keywords)
            said = ""
        except Exception:
            said = traceback.format_exc()
        queue.put((rank, name, said))
        if said:  # the ranks are out of step now, and what follows would wait for nothing
            break
    queue.put(None)
    dist.destroy_process_group()


def here() -> str:
    """The kind of device that the ranks have."""
    import torch.distributed as dist

    return "cuda" if dist.get_backend() == "nccl" else "cpu"


# -- jobs ------------------------------------------------------------------------------------------------------------


def compare(
    name: str,
    variant: str = "",
    cu_seqlens: list[int] | None = None,
    layout: str = "contiguous",
    exchange: str = "gather",
    replicate_states: bool = False,
    state: bool = True,
    compiled: bool = False,
    case: Any = None,
    T: int = 24,
    backend: str | None = None,
    dtype: str | None = None,
    wanted: Sequence[str] | None = None,
    of_outputs: bool = True,
) -> None:
    """Outputs, final states and gradients of the operator on this rank's tokens against those of one device.

    Gradients are those of the inputs that are ``wanted``, or of all; of the outputs and final states, or of these alone. In
    float64; or, of kernels, their matrices in ``dtype`` and all else in float32, with heads of their sizes.
    """
    import torch
    import torch.distributed as dist
    from linattn.distributed import context_parallel
    from linattn.distributed.layout import rank_order

    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = dict(K=WIDTHS[dtype], V=WIDTHS[dtype]) if dtype else {}
    if backend == "linking":
        linking.register()
    case = case or draw(variant, cu_seqlens=cu_seqlens, state=state, T=T, **sizes)
    function = operator(f"{name}_{case.family}" if name else case.family)
    plan = context_parallel(cu_seqlens=cu_seqlens, layout=layout, exchange=exchange, replicate_states=replicate_states)
    order = rank_order(ranks, layout)
    own = [j for j, (holder, _) in enumerate(order) if holder == rank]
    length = T // len(order)
    tokens = torch.cat([torch.arange(j * length, (j + 1) * length) for j in own]).to(here())

    def leaves() -> dict[str, Any]:
        found = {key: torch.from_numpy(x.copy()).to(here()) for key, x in case.arrays.items()}
        if dtype:
            kinds = {key: getattr(torch, dtype) if key in MATRICES else torch.float32 for key in found}
            found = {key: x.to(kinds[key]) if x.is_floating_point() else x for key, x in found.items()}
        asked = found if wanted is None else wanted
        return {key: x.requires_grad_() if x.is_floating_point() and key in asked else x for key, x in found.items()}

    def call(x: dict[str, Any], **more: Any) -> tuple[Any, Any]:
        given = arguments(case, x, function)
        if case.options.get("causal", True):
            given["output_final_state"] = True
        if backend:
            given["backend"] = backend
        return function(**given | more)

    def close(x: Any, y: Any, tolerance: float, what: str) -> None:
        if dtype:
            off = ((x - y).double().norm() / y.double().norm().clamp_min(1e-6)).item()
            assert off < KERNELS[dtype], f"{what}: off by {off:.1e} of its norm"
        else:
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")

    whole = leaves()
    o, final = call(whole)
    generator = torch.Generator().manual_seed(1)
    weights, *state_weights = (
        torch.randn(x.shape, dtype=o.dtype, generator=generator).to(o.device) for x in (o, *parts(final))
    )
    terms = [(o * weights).sum()] * of_outputs
    terms += [(x * w).sum() for x, w in zip(parts(final), state_weights, strict=True) if x.requires_grad]
    sum(terms).backward()

    mine = leaves()
    spec = function.spec
    with_tokens = {arg.name for arg in (*spec.args, *spec.keyword_args) for shape in arg.shapes if shape[1:2] == ("T",)}
    with_tokens = {key for key in with_tokens if key in mine and mine[key].dim() >= 3}
    local = {key: x[:, tokens] if key in with_tokens else x for key, x in mine.items() if key != "cu_seqlens"}

    def spread(x: dict[str, Any]) -> tuple[Any, Any]:
        return call(x, context=plan)

    run = torch.compile(spread, fullgraph=True, backend="aot_eager") if compiled else spread
    o_here, final_here = run(local)
    close(o_here, o[:, tokens], 1e-9, "o")
    terms = [(o_here * weights[:, tokens]).sum()] * of_outputs
    for x, y, w in zip(parts(final_here), parts(final), state_weights, strict=True):
        everyone = x.detach().clone()
        if not replicate_states:
            dist.all_reduce(everyone)
        terms += [(x * w).sum() / (ranks if replicate_states else 1)] * y.requires_grad
        close(everyone, y, 1e-9, "final state")
    sum(terms).backward()
    for key, x in mine.items():
        if not x.is_floating_point() or whole[key].grad is None:
            continue
        gradient = torch.zeros_like(x) if x.grad is None else x.grad.clone()
        dist.all_reduce(gradient)
        close(gradient, whole[key].grad, 1e-8, f"gradient of {key}")
    again, _ = run(local)
    assert torch.equal(again, o_here), "the same call gave other bits"


def hold_nothing() -> None:
    """What the backward pass of a linked call needs is saved by autograd alone, which checkpointing asks to let go of it."""
    import torch
    from linattn.distributed import context_parallel

    linking.register()
    case = draw("kda", T=24)
    function = operator("chunk_kda")
    arrays = {name: torch.from_numpy(x).to(here()).requires_grad_() for name, x in case.arrays.items()}
    o, _ = function(**arguments(case, arrays, function), context=context_parallel(), backend="linking")
    node = o.grad_fn
    while not hasattr(node, "link"):
        node = next(before for before, _ in node.next_functions if before is not None)
    held = torch.utils._pytree.tree_leaves([vars(node.link), vars(node)])
    assert held
    assert not [x.shape for x in held if isinstance(x, torch.Tensor)]


def wait_for_no_offsets() -> None:
    """Later calls of a plan bring no offsets to the device again."""
    from unittest import mock

    import torch
    from linattn.distributed import context_parallel

    case = draw("gla", T=24, cu_seqlens=[0, 7, 24], state=False)
    function = operator("chunk_gla")
    arrays = {name: torch.from_numpy(x).to(here()) for name, x in case.arrays.items() if name != "cu_seqlens"}
    own = {name: x[:, :12] for name, x in arrays.items()}
    plan = context_parallel(cu_seqlens=[0, 7, 24])
    with torch.inference_mode():
        function(**arguments(case, own, function), context=plan)
    own["v"].requires_grad_()
    with mock.patch("linattn.frameworks.Torch.integers", side_effect=AssertionError("brought again")):
        function(**arguments(case, own, function), context=plan)[0].sum().backward()


def other_offsets(exchange: str, offsets: list[int], backend: str = "torch", laid_out: str = "") -> None:
    """Rank 1 packs other sequences, in calls that both ranks know: both say so, or of a device that they do not wait for, in a
    later call, and what they have until then is NaN.
    """
    from unittest import mock

    import linattn
    import pytest
    import torch
    import torch.distributed as dist
    from linattn.distributed import collectives, context_parallel
    from linattn.errors import ContextError

    rank = dist.get_rank()
    packings, group = ([0, 16], offsets), dist.new_group()
    plans = [context_parallel(group, cu_seqlens=own, exchange=exchange, check=False) for own in packings]  # type: ignore[arg-type]

    def call(plan: Any) -> torch.Tensor:
        x = torch.ones(1, 8, 1, 2, device=here())
        return linattn.chunk_linear_attn(x, x, x, context=plan, backend=backend)[0]

    def refused() -> str:
        with pytest.raises(ContextError) as error:
            call(plans[rank])
        return str(error.value)

    expected = call(plans[0])
    if here() == "cpu":
        summary = "8 tokens, with states and summaries of [1, 1, 1] float32, [1, 1, 1, 2, 2] float32"
        said = f"chunk_linear_attn of {summary}{laid_out}; layout 'contiguous', exchange {exchange!r}, states of their own"
        rows = "".join(f"\n  rank {i}: {said}, packed sequences at {own}" for i, own in enumerate(packings))
        assert refused() == f"chunk_linear_attn: the ranks do not agree{rows}"
    assert torch.equal(call(plans[0]), expected), "ranks that agree again are in step"
    with mock.patch.object(collectives, "_is_waited_for", return_value=True):
        assert call(plans[rank])[:, :4].isnan().all()
        if here() == "cuda":
            torch.cuda.synchronize()  # and has told it
        with pytest.raises(ContextError) as error:
            call(plans[0])
    earlier = "in an earlier exchange the ranks did not agree, and what came of it is NaN"
    assert str(error.value) == f"chunk_linear_attn: {earlier}"


def dtensors(variant: str, heads: int = 1, H: int = 2) -> None:
    """Distributed tensors, their heads over another axis of the mesh, but for a single key head, against one device."""
    import torch
    import torch.distributed as dist
    from linattn.distributed import context_parallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(here(), (dist.get_world_size() // heads, heads), mesh_dim_names=("cp", "tp"))
    plan = context_parallel(mesh["cp"])
    case = draw(variant, H=H)
    function = operator(f"chunk_{case.family}")
    args = {
        arg.name: arg
        for arg in (*function.spec.args, *function.spec.keyword_args, *function.spec.state(function.spec.defaults))
    }

    def placed(name: str, x: Any) -> Any:
        symbols = next((s for s in args[name].shapes if len(s) == x.dim()), ()) if name in args else ()
        head = next((i for i, symbol in enumerate(symbols) if symbol in ("H", "HV")), None)
        if name.startswith("gate."):
            head = 0
        if head is not None and x.shape[head] == 1:
            head = None
        along = [Shard(1) if "T" in symbols else Replicate(), Replicate() if head is None else Shard(head)]
        return distribute_tensor(x, mesh, along)

    def called(change: Any, **more: Any) -> tuple[list[Any], dict[str, Any]]:
        x = {name: change(name, torch.from_numpy(x.copy()).to(here())) for name, x in case.arrays.items()}
        x = {name: y.requires_grad_() if y.is_floating_point() else y for name, y in x.items()}
        o, state = function(**arguments(case, x, function), output_final_state=True, **more)
        found = [y.full_tensor() if isinstance(y, DTensor) else y for y in (o, *parts(state))]
        sum(y.square().sum() for y in found if y.is_floating_point()).backward()
        return found, x

    expected, whole = called(lambda name, x: x)
    found, spread = called(placed, context=plan)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    for name, x in whole.items():
        if x.grad is not None:
            gradient = spread[name].grad.full_tensor()
            torch.testing.assert_close(gradient, x.grad, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")


def fully_sharded(layer: str, options: dict[str, Any], axes: tuple[int, int, int], cu_seqlens: list[int] | None = None) -> None:
    """Two layers with heads over one axis of a mesh, their tokens over another, sequences over a third, and parameters over the
    last two (FSDP2), against one device.
    """
    import copy

    import torch
    from linattn import nn
    from linattn.distributed import context_parallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh(here(), axes, mesh_dim_names=("dp", "cp", "tp"))
    everywhere, plan = [Replicate()], context_parallel(mesh["cp"], cu_seqlens)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = torch.nn.Linear(16, 16, dtype=torch.float64, device=here())
            self.layer = getattr(nn, layer)(16, **options, dtype=torch.float64, device=here())

        def forward(self, x: Any, **call: Any) -> Any:
            x = self.before(x)
            if "context" not in call:
                return x + self.layer(x, **call)
            y = self.layer(DTensor.from_local(x, mesh["tp"], everywhere), **call)
            return x + y.redistribute(placements=everywhere).to_local()

    torch.manual_seed(0)
    whole = torch.nn.Sequential(Block(), Block())
    spread, axis = copy.deepcopy(whole), mesh["dp", "cp"]._flatten("dp_cp")
    for block in spread:
        nn.shard_by_heads(block.layer, mesh["tp"])
        fully_shard(block, mesh=axis)
        block.set_gradient_divide_factor(1.0)  # the loss is the sum of what ranks compute
        block.set_force_sum_reduction_for_comms(True)
    sequences = torch.randn(axes[0], 1 if cu_seqlens else 2, 16, 16, dtype=torch.float64).to(here())
    tokens = slice(mesh.get_local_rank("cp") * 16 // axes[1], (mesh.get_local_rank("cp") + 1) * 16 // axes[1])

    def gradients(x: Any, blocks: Any, **call: Any) -> Any:
        y = x.requires_grad_()
        for block in blocks:
            y = block(y, **call)
        y.square().sum().backward()
        return y.detach(), x.grad

    packed = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=here())
    expected = [gradients(x.clone(), whole, cu_seqlens=packed) for x in sequences][mesh.get_local_rank("dp")]
    found = gradients(sequences[mesh.get_local_rank("dp"), :, tokens].clone(), spread, context=plan)
    for what, x, y in zip(("y", "gradient of x"), found, expected, strict=True):
        torch.testing.assert_close(x, y[:, tokens], rtol=1e-9, atol=1e-9, msg=lambda text, what=what: f"{what}: {text}")
    for (name, p), q in zip(spread.named_parameters(), whole.parameters(), strict=True):
        say = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-8, atol=1e-8, msg=say)


def misplaced() -> None:
    """Distributed tensors that do not lie as the values do are refused on every rank: each would read heads of others."""
    import linattn
    import pytest
    import torch
    from linattn.distributed import context_parallel
    from linattn.errors import ContextError
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("cp", "tp"))
    plan, whole, heads = context_parallel(mesh["cp"]), [Shard(1), Replicate()], [Shard(1), Shard(2)]

    def refused(places: dict[str, Any], text: str, H: int = 2, HV: int = 4, T: int = 8) -> None:
        shapes = dict(q=(1, T, H, 4), k=(1, T, H, 4), v=(1, T, HV, 4), g=(1, T, HV), initial_state=(1, HV, 4, 4))
        placed = dict.fromkeys("qkvg", heads) | {"initial_state": [Replicate(), Shard(1)]} | places
        given = {key: distribute_tensor(torch.ones(shape, device=here()), mesh, placed[key]) for key, shape in shapes.items()}
        with pytest.raises(ContextError) as error:
            linattn.chunk_simple_gla(**given, context=plan)
        assert str(error.value) == f"simple_gla: {text}"

    refused(dict(q=whole, k=whole), "q must be Shard(2) along 'tp', got Replicate()")
    refused(dict(v=whole, g=whole), "q must be Replicate() along 'tp', got Shard(2)")
    refused(dict(g=whole), "g must be Shard(2) along 'tp', got Replicate()")
    refused(dict(initial_state=[Replicate()] * 2), "initial_state must be Shard(1) along 'tp', got Replicate()")
    refused(dict(k=[Replicate(), Shard(2)]), "k must be Shard(1) along 'cp', got Replicate()")
    refused({}, "dimension 2 of q must be a multiple of the 2 devices along 'tp', got [1, 8, 3, 4]", H=3, HV=6)
    refused({}, "dimension 1 of q must be a multiple of the 2 devices along 'cp', got [1, 7, 2, 4]", T=7)


def through_fla(name: str, variant: str, cu_seqlens: list[int]) -> None:
    """A function of fla's that takes the context of fla's ranks, as its ``build_cp_context`` makes it, against one device; then
    the same context, whose offsets are written anew in place, those of this rank's last sequence padded.
    """
    import torch
    import torch.distributed as dist
    from linattn.integrations import fla

    rank, last = dist.get_rank(), cu_seqlens[-1]
    T = last // dist.get_world_size()
    context = SimpleNamespace(group=dist.group.WORLD, cu_seqlens=torch.zeros(len(cu_seqlens) + 2, dtype=torch.int64))
    arrays = draw(variant, cu_seqlens=cu_seqlens, T=last, state=False).arrays
    arrays = {{"g": "gk"}.get(key, key) if name == "chunk_dplr_delta_rule" else key: x for key, x in arrays.items()}
    del arrays["cu_seqlens"]
    tokens = slice(rank * T, rank * T + T)
    for offsets in (cu_seqlens, [0, 2, last]):
        own = sorted({min(max(at - rank * T, 0), T) for at in offsets})
        context.cu_seqlens.copy_(torch.tensor(own + [T] * (len(context.cu_seqlens) - len(own))))
        context.is_first_rank = rank * T in offsets
        whole, mine = (
            {key: torch.from_numpy(x)[:, part].clone().requires_grad_() for key, x in arrays.items()}
            for part in (slice(None), tokens)
        )
        o, _ = getattr(fla, name)(**whole, cu_seqlens=torch.tensor(offsets))
        o.square().sum().backward()
        found, _ = getattr(fla, name)(**mine, cp_context=context)
        found.square().sum().backward()
        torch.testing.assert_close(found, o[:, tokens], rtol=1e-9, atol=1e-9)
        for key, x in mine.items():
            say = lambda text, key=key: f"{key}: {text}"  # noqa: E731
            torch.testing.assert_close(x.grad, whole[key].grad[:, tokens], rtol=1e-8, atol=1e-8, msg=say)


def refused_through_fla() -> None:
    """Contexts of fla's that do not fit the tokens are refused by every rank alike; offsets may be of inference mode."""
    import pytest
    import torch
    import torch.distributed as dist
    from linattn.errors import ContextError
    from linattn.integrations import fla

    rank = dist.get_rank()

    def run(tokens: int, end: int, begins: bool) -> torch.Tensor:
        context = SimpleNamespace(group=dist.group.WORLD, cu_seqlens=torch.tensor([0, end]), is_first_rank=begins)
        x = {key: torch.full((1, tokens, 2, 4), 0.4) for key in "qkv"}
        x |= {key: torch.full((1, tokens, 2), value) for key, value in (("g", -0.1), ("beta", 0.5))}
        return fla.chunk_gated_delta_rule(**x, cp_context=context)[0]

    fits = "cp_context: every rank must have as many tokens, and its cu_seqlens end there: "
    for own, text in (
        ((8, 6, rank == 0), fits + "the ranks have [8, 8, 8] tokens, and their cu_seqlens end at [6, 6, 6]"),
        ((8 + rank, 8 + rank, rank == 0), fits + "the ranks have [8, 9, 10] tokens, and their cu_seqlens end at [8, 9, 10]"),
        ((8, 8, False), "cp_context: the first rank must begin with a sequence, got is_first_rank=False there"),
    ):
        with pytest.raises(ContextError) as error:
            run(*own)
        assert str(error.value) == text
    expected = run(8, 8, rank == 0)
    with torch.inference_mode():
        assert torch.equal(run(8, 8, rank == 0), expected)


def compiled_through_fla() -> None:
    """A compiled function that plans by a context of fla's breaks its graph there, and as one graph is refused."""
    import pytest
    import torch
    import torch.distributed as dist
    from linattn.integrations import fla

    context = SimpleNamespace(group=dist.group.WORLD, cu_seqlens=torch.tensor([0, 8]), is_first_rank=dist.get_rank() == 0)
    x = {key: torch.full((1, 8, 2, 4), 0.4).requires_grad_() for key in "qkv"}

    def run() -> torch.Tensor:
        return fla.chunk_gated_delta_rule(**x, g=-x["k"][..., 0], beta=x["k"][..., 1], cp_context=context)[0] * 2

    with pytest.raises(torch._dynamo.exc.Unsupported) as error:  # type: ignore[attr-defined]
        torch.compile(run, backend="eager", fullgraph=True)()
    assert "cp_context: offsets are read on the host: pass fullgraph=False, or linattn's own context=" in str(error.value)
    found = torch.compile(run, backend="eager")()
    gradients = torch.autograd.grad(found.square().sum(), list(x.values()))
    expected = run()
    assert torch.equal(found, expected)
    for a, b in zip(gradients, torch.autograd.grad(expected.square().sum(), list(x.values())), strict=True):
        assert torch.equal(a, b)


def convolve(cu_seqlens: list[int] | None = None, W: int = 4, **options: Any) -> None:
    """``short_conv`` against one device."""
    import numpy as np
    from sequence_cases import Case

    rng = np.random.default_rng(W)
    B, N = (1, len(cu_seqlens) - 1) if cu_seqlens else (2, 2)
    arrays = dict(x=rng.standard_normal((B, 24, 5)), weight=rng.standard_normal((5, W)), bias=rng.standard_normal(5))
    arrays["initial_state"] = rng.standard_normal((N, 5, W - 1))
    if cu_seqlens:
        arrays["cu_seqlens"] = np.array(cu_seqlens)
    compare("", cu_seqlens=cu_seqlens, case=Case("short_conv", arrays, {"activation": "silu"}), **options)


def everywhere(cu_seqlens: list[int] | None = None, normalize: bool = False, **options: Any) -> None:
    """``causal=False`` against one device."""
    case = draw("normalized" if normalize else "linear_attn", cu_seqlens=cu_seqlens, state=False)
    compare("chunk", cu_seqlens=cu_seqlens, case=case._replace(options=case.options | {"causal": False}), **options)


__all__ = ["SPREAD", "Job", "run_jobs"]


# -- faults: each returns what it raised, as the error of the job ----------------------------------------------------


def other_plan() -> None:
    """Rank 1 has another layout."""
    import torch.distributed as dist
    from linattn.distributed import context_parallel

    context_parallel(layout="zigzag" if dist.get_rank() == 1 else "contiguous")


def other_shape() -> None:
    """Rank 1 has twice the heads."""
    import linattn
    import torch
    import torch.distributed as dist
    from linattn.distributed import context_parallel

    x = torch.ones(1, 4, 2 if dist.get_rank() == 1 else 1, 2, device=here())
    linattn.chunk_linear_attn(x, x, x, context=context_parallel())


def other_tokens() -> None:
    """Rank 1 has more tokens, of which its summary has no trace."""
    import linattn
    import torch
    import torch.distributed as dist
    from linattn.distributed import context_parallel

    x = torch.ones(1, 6 if dist.get_rank() == 1 else 4, 1, 2, device=here())
    linattn.chunk_linear_attn(x, x, x, context=context_parallel(cu_seqlens=[0, 7]))


def other_shape_later() -> None:
    """Rank 1 has twice the heads, once both have made a call: only one of them has something to compare."""
    import linattn
    import torch
    import torch.distributed as dist
    from linattn.distributed import context_parallel

    plan = context_parallel()
    for heads in (1, 1 + dist.get_rank()):
        x = torch.ones(1, 4, heads, 2, device=here())
        linattn.chunk_linear_attn(x, x, x, context=plan)


def other_offsets_of_fla() -> None:
    """Rank 1 writes other offsets into a context of fla's that all ranks have planned by."""
    import torch
    import torch.distributed as dist
    from linattn.integrations import fla

    rank = dist.get_rank()
    context = SimpleNamespace(group=dist.group.WORLD, cu_seqlens=torch.tensor([0, 8, 8]), is_first_rank=rank == 0)
    x = {key: torch.full((1, 8, 2, 4), 0.4, device=here()) for key in "qkv"}
    x |= {key: torch.full((1, 8, 2), value, device=here()) for key, value in (("g", -0.1), ("beta", 0.5))}
    fla.chunk_gated_delta_rule(**x, cp_context=context)
    if rank == 1:
        context.cu_seqlens[1] = 5
    fla.chunk_gated_delta_rule(**x, cp_context=context)


def transformed() -> None:
    """A gradient by a transform of torch.func."""
    import linattn
    import torch
    from linattn.distributed import context_parallel

    x, plan = torch.ones(1, 4, 1, 2, device=here()), context_parallel()
    torch.func.grad(lambda x: linattn.chunk_linear_attn(x, x, x, context=plan)[0].sum())(x)


def lost_rank() -> None:
    """The process of rank 1 ends without a word."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def dead_rank() -> None:
    """Rank 1 is gone before the exchange."""
    import linattn
    import torch
    import torch.distributed as dist
    from linattn.distributed import context_parallel

    plan = context_parallel()
    if dist.get_rank() == 1:
        raise SystemError("gone")
    x = torch.ones(1, 4, 1, 2, device=here())
    linattn.chunk_linear_attn(x, x, x, context=plan)
