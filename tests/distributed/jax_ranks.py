"""Calls over an axis of a mesh of CPU devices against those of one device: run by test_mesh_axis.py, in processes of its own.

As a program: ``jax_ranks.py`` for four devices of one process, ``jax_ranks.py ADDRESS RANK`` for one of two processes with one
device each. It prints the cases that are equal.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import linattn
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linattn.distributed import shard_axis
from linattn.distributed.layout import rank_order
from linattn.feature_maps import Cosformer
from sequence_cases import Case, arguments, draw, operator, parts

T = 24
PACKED = [0, 3, 3, 4, 15, 16, 16, 22]
TWO_PROCESSES = ("gla", "short_conv-zigzag-packed")


class Run(NamedTuple):
    """One comparison: the case, the operator, and how its tokens are spread."""

    name: str
    case: Case
    operator: str
    cu_seqlens: list[int] | None = None
    layout: str = "contiguous"
    inside: bool = True
    check_vma: bool = True


def convolution(cu_seqlens: list[int] | None, W: int) -> Case:
    rng = np.random.default_rng(W)
    B, N = (1, len(cu_seqlens) - 1) if cu_seqlens else (2, 2)
    arrays = dict(x=rng.standard_normal((B, T, 5)), weight=rng.standard_normal((5, W)), bias=rng.standard_normal(5))
    arrays["initial_state"] = rng.standard_normal((N, 5, W - 1))
    return Case("short_conv", arrays, {"activation": "silu"})


def aligned() -> Case:
    """Chunks that no span's end cuts."""
    case = draw("mixed", T=T, state=False)
    return case._replace(options={"causal": False, "chunk_size": 3})


def everywhere(cu_seqlens: list[int] | None) -> Case:
    case = draw("linear_attn", cu_seqlens=cu_seqlens, state=False)
    return case._replace(options={"causal": False})


ONCE = ("ssd", "gla", "kda", "dplr", "normalized", "mapped_delta", "mixed_biased")
"""One of each kind of summary: the rules are shared with simulated ranks, among which every family runs."""


def runs() -> Iterator[Run]:
    """Every kind of summary and what changes it, the packings and layouts dealt out over them."""
    ways = [(None, "contiguous"), (PACKED, "contiguous"), (None, "zigzag"), (PACKED, "zigzag")]
    for i, variant in enumerate(ONCE):
        packed, layout = ways[i % 4]
        case = draw(variant, T=T, cu_seqlens=packed)
        # marks of what differs between ranks may be switched off, and one operator alone maps itself over the axis
        yield Run(
            variant,
            case,
            f"chunk_{case.family}",
            packed,
            layout,
            check_vma=variant != "gla",
            inside=variant not in ("kda", "mapped_delta"),
        )
    for packed, layout in (ways[0], ways[3]):
        where = f"{layout}{'-packed' if packed else ''}"
        yield Run(f"short_conv-{where}", convolution(packed, 8), "short_conv", packed, layout)
        yield Run(f"everywhere-{where}", everywhere(packed), "chunk_linear_attn", packed, layout)
    yield Run("everywhere-mixed", aligned(), "chunk_mixed_attn")


def specs_of(run: Run) -> dict[str, Any]:
    """Of what has a row a token, along the axis."""
    spec = operator(run.operator).spec
    args = {arg.name: arg for arg in (*spec.args, *spec.keyword_args)}
    by_token = lambda name, x: name in args and any(s[1:2] == ("T",) and len(s) == x.ndim for s in args[name].shapes)  # noqa: E731
    return {name: P(None, "cp") if by_token(name, x) else P() for name, x in run.case.arrays.items() if name != "cu_seqlens"}


def order(ranks: int, layout: str) -> np.ndarray:
    """Which token of the whole stands where, once the tokens are laid out."""
    places = rank_order(ranks, layout)
    length = T // len(places)
    spans = [j for rank in range(ranks) for j, (holder, _) in enumerate(places) if holder == rank]
    return np.concatenate([np.arange(j * length, (j + 1) * length) for j in spans])


def compare(run: Run, mesh: Any, heads: str | None = None) -> None:
    """Outputs, states and gradients; value heads lie along an axis of their own, if one is named."""
    function, specs = operator(run.operator), specs_of(run)
    moved = order(mesh.shape["cp"], run.layout)
    arrays = {name: x.astype(np.int32 if x.dtype.kind == "i" else np.float32) for name, x in run.case.arrays.items()}
    offsets = {} if run.cu_seqlens is None else {"cu_seqlens": arrays.pop("cu_seqlens", np.array(run.cu_seqlens, np.int32))}
    laid = {name: x[:, moved] if specs[name] != P() else x for name, x in arrays.items()}
    keep = {"output_final_state": True} if run.case.options.get("causal", True) else {}
    plan = shard_axis("cp", run.cu_seqlens, run.layout, replicate_states=True, mesh=None if run.inside else mesh)

    def spread(x: dict[str, Any]) -> Any:
        return function(**arguments(run.case, x, function), **keep, context=plan)

    if run.inside:
        spread = jax.shard_map(spread, mesh=mesh, in_specs=(specs,), out_specs=(P(None, "cp"), P()), check_vma=run.check_vma)
    expected, gradients, weights = on_one_device(run, arrays, offsets, keep)
    lies = {name: P(None, "cp", heads) if heads and specs[name] != P() else spec for name, spec in specs.items()}
    laid = {name: jax.device_put(x, NamedSharding(mesh, lies[name])) for name, x in laid.items()}
    found, own = differentiated(spread, (weights[0][:, moved], weights[1]))(*halves(laid))
    close("o", found[0], expected[0][:, moved])
    for x, y in zip(parts(found[1]), parts(expected[1]), strict=True):
        close("final state", x, y)
    for name, gradient in gradients.items():
        close(f"gradient of {name}", own[name], gradient[:, moved] if specs[name] != P() else gradient)


def on_one_device(run: Run, arrays: dict[str, Any], offsets: dict[str, Any], keep: dict[str, Any]) -> tuple[Any, Any, Any]:
    """PyTorch's outputs in float64, weights for all of them, and the gradients of the weighted sum; nothing is compiled."""
    function, rng = operator(run.operator), np.random.default_rng(5)
    x = {name: torch.from_numpy(y.astype(np.float64) if y.dtype.kind == "f" else y) for name, y in arrays.items()}
    floats = {name: y.requires_grad_() for name, y in x.items() if y.is_floating_point()}
    found = function(**arguments(run.case, x, function), **{name: torch.from_numpy(y) for name, y in offsets.items()}, **keep)
    weights = jax.tree.map(lambda y: rng.standard_normal(y.shape).astype(np.float32), found)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(weights), strict=True)
    sum((y * torch.from_numpy(w)).sum() for y, w in pairs).backward()
    gradients = {name: np.zeros(y.shape) if y.grad is None else y.grad.numpy() for name, y in floats.items()}
    return jax.tree.map(lambda y: y.detach().numpy(), found), gradients, weights


def halves(arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of floats, and those of integers."""
    floats = {name: x for name, x in arrays.items() if x.dtype.kind == "f"}
    return floats, {name: x for name, x in arrays.items() if name not in floats}


def differentiated(function: Any, weights: Any) -> Any:
    """From arrays of floats and of integers, what ``function`` gives, and the gradient of a weighted sum of it."""

    def both(floats: dict[str, Any], integers: dict[str, Any]) -> Any:
        def total(floats: dict[str, Any]) -> Any:
            found = function({**floats, **integers})
            return sum(jax.tree.leaves(jax.tree.map(lambda y, w: (y * w).sum(), found, weights))), found

        (_, found), gradients = jax.value_and_grad(total, has_aux=True)(floats)
        return found, gradients

    return jax.jit(both)


FOLLOWED = ("gla", "kda", "mapped_delta", "dplr", "ssd", "mixed_biased", "short_conv", "everywhere")


def followed_case(name: str) -> Case:
    """The case of this name."""
    if name == "short_conv":
        return convolution(None, 4)
    return everywhere(None) if name == "everywhere" else draw(name, T=T)


def follow(name: str) -> None:
    """Without a context, arrays whose types say that tokens lie along one axis, and heads along another."""
    case = followed_case(name)
    run = Run(name, case, case.family if name == "short_conv" else f"chunk_{case.family}")
    mesh = jax.make_mesh((2, 2), ("cp", "heads"))
    function, args = operator(run.operator), {}
    spec = function.spec
    keep = {"output_final_state": True} if case.options.get("causal", True) else {}
    arrays = {name: x.astype(np.int32 if x.dtype.kind == "i" else np.float32) for name, x in case.arrays.items()}
    expected, gradients, weights = on_one_device(run, arrays, {}, keep)
    args = {arg.name: arg for arg in (*spec.args, *spec.keyword_args)}
    axes = {"T": "cp", "HV": "heads", "H": "heads", "D": "heads"}

    def lies(name: str, x: Any) -> P:
        symbols = next((s for s in args[name].shapes if len(s) == x.ndim), ()) if name in args else ()
        return P(*(axes.get(symbol) if size % 2 == 0 else None for symbol, size in zip(symbols, x.shape, strict=False)))

    where = {name: lies(name, x) for name, x in arrays.items()}
    with jax.set_mesh(mesh):
        laid = {name: jax.device_put(x, NamedSharding(mesh, where[name])) for name, x in arrays.items()}

        def spread(x: dict[str, Any]) -> Any:
            return function(**arguments(case, x, function), **keep)

        both = differentiated(spread, weights)
        found, own = both(*halves(laid))
        program = both.lower(*halves(laid)).compile().as_text()
    close("o", found[0], expected[0])
    for x, y in zip(parts(found[1]), parts(expected[1]), strict=True):
        close("final state", x, y)
    for name, gradient in gradients.items():
        close(f"gradient of {name}", own[name], gradient)
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", program)
    assert not [shape for shape in gathered if str(T) in shape.split(",")], f"tokens are gathered: {gathered}"


def follow_with_positions() -> None:
    """A map that is told where tokens are, along rows, tokens and heads, of which there are as many as rows."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    x = np.random.default_rng(0).standard_normal((2, T, 2, 8)).astype(np.float32)
    rows = np.arange(T, dtype=np.int32) + np.array([[0], [5]], np.int32)

    def call(x: Any, positions: Any) -> Any:
        return linattn.linear_attn(x, x, x, feature_map=Cosformer(40).at(positions), normalize=True)[0]

    for positions in (rows[:1], rows):
        expected = call(jnp.asarray(x), jnp.asarray(positions))
        with jax.set_mesh(mesh):
            for where in (P("d"), P(None, "d"), P(None, None, "d")):
                given = jax.device_put(x, NamedSharding(mesh, where))
                close(f"o {where}", jax.jit(call)(given, jnp.asarray(positions)), expected)


def leave_to_the_compiler(mesh: Any) -> None:
    """Without a context, arrays whose types say nothing of how they lie: the compiler moves them as it likes."""
    x = np.random.default_rng(0).standard_normal((3, 1, T, 2, 4), np.float32)
    given = [jax.device_put(each, NamedSharding(mesh, P(None, "cp"))) for each in x]
    loss = lambda q, k, v: (linattn.chunk_linear_attn(q, k, v)[0] ** 2).sum()  # noqa: E731
    for found, wanted in zip(*(jax.jit(jax.value_and_grad(loss))(*each) for each in (given, map(jnp.asarray, x))), strict=True):
        close("value, gradient", found, wanted)


def transform_followed() -> None:
    """Transforms of calls that follow their arrays: along tokens those of reverse mode, along heads all."""
    mesh = jax.make_mesh((2, 2), ("cp", "heads"))
    x = np.random.default_rng(0).standard_normal((3, 2, 1, T, 2, 4), np.float32)
    call = lambda q, k, v: linattn.chunk_linear_attn(q, k, v)[0]  # noqa: E731
    tangent = lambda *x: jax.jvp(call, x, x)[1]  # noqa: E731
    square = lambda *x: (jax.grad(lambda *x: (call(*x) ** 2).sum(), 1)(*x) ** 2).sum()  # noqa: E731
    with jax.set_mesh(mesh):
        for function, axis in ((call, "cp"), (call, None), (tangent, None), (jax.grad(square), None)):
            given = [jax.device_put(each, NamedSharding(mesh, P(None, None, axis, "heads"))) for each in x]
            close("mapped", jax.jit(jax.vmap(function))(*given), jax.vmap(function)(*map(jnp.asarray, x)))
        given = [jax.device_put(each[0], NamedSharding(mesh, P(None, "cp"))) for each in x]
        program = jax.export.export(jax.jit(call))(*given)
        close("exported", jax.jit(program.call)(*given), call(*map(jnp.asarray, x[:, 0])))


def beside_other_axes() -> None:
    """Packed sequences along one axis of a mesh, heads along another: left to the compiler, or in the arrays' types; and ranks
    inside ``shard_map`` over another axis of the mesh.
    """
    cases = {"kda": draw("kda", T=T, cu_seqlens=PACKED), "mixed": draw("mixed", T=T, cu_seqlens=PACKED)}
    cases["short_conv"] = convolution(PACKED, 4)
    for kind, names in ((AxisType.Auto, cases), (AxisType.Explicit, ("kda",))):
        mesh = jax.make_mesh((2, 2), ("cp", "heads"), axis_types=(kind,) * 2)
        for name in names:
            case = cases[name]
            run = Run(name, case, case.family if name == "short_conv" else f"chunk_{case.family}", PACKED, inside=False)
            compare(run, mesh, {"kda": "heads"}.get(name))
    x = np.random.default_rng(0).standard_normal((3, 2, T, 2, 4), np.float32)
    mesh = jax.make_mesh((2, 2), ("cp", "batch"), axis_types=(AxisType.Auto,) * 2)
    inner = lambda q, k, v: linattn.chunk_linear_attn(q, k, v, context=shard_axis("cp", mesh=mesh))[0]  # noqa: E731
    outer = jax.shard_map(inner, mesh=mesh, in_specs=P("batch"), out_specs=P("batch"), axis_names={"batch"})
    close("o", jax.jit(outer)(*x), linattn.chunk_linear_attn(*map(jnp.asarray, x))[0])


def refuse_to_spread(mesh: Any) -> None:
    """What ranks cannot share, and what one device refuses, of the call as it is written; arrays may lie anywhere."""
    x, plan = jnp.ones((1, T, 2, 4)), shard_axis("cp", mesh=mesh)
    call = linattn.chunk_linear_attn
    errors = linattn.errors
    for given, changed, error, text in (
        (
            [x[:, :22]] * 3,
            {},
            errors.ContextError,
            "22 tokens cannot be dealt out to 4 ranks in 4 spans of equal length: pad them",
        ),
        ([x, x[:, :20], x], {}, errors.ShapeError, "k must be [B, T, H, K] = [1, 24, 2, 4], got [1, 20, 2, 4]"),
        (
            [x] * 3,
            {"initial_state": x[:, :1]},
            errors.ShapeError,
            "initial_state must be [N, HV, K, V] = [1, 2, 4, 4], got [1, 1, 2, 4]",
        ),
    ):
        with pytest.raises(error) as raised:
            call(*given, **changed, context=plan)
        assert str(raised.value).removeprefix("chunk_linear_attn: ") == text
    with pytest.raises(errors.ContextError) as raised:
        plan.positions(x[:, :22])
    assert str(raised.value) == "22 tokens cannot be dealt out to 4 ranks in 4 spans of equal length: pad them"
    zigzag = lambda x: call(x, x, x, context=shard_axis("cp", layout="zigzag"))[0]  # noqa: E731
    with pytest.raises(errors.ContextError) as raised:
        jax.shard_map(zigzag, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))(x[:, :20])
    assert str(raised.value) == "layout 'zigzag' halves a rank's tokens, and 5 are odd: pad them"
    spread = jax.device_put(x, NamedSharding(mesh, P(None, "cp")))
    close("o", call(spread, x, spread, initial_state=jnp.zeros((1, 2, 4, 4)), context=plan)[0], call(x, x, x)[0])


def refuse_to_follow() -> None:
    """What cannot be followed is said."""
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    for axes, packed, text in (
        (("a", "b"), None, "chunk_linear_attn: the tokens lie along the axes ['a', 'b'], and ranks exchange along one of them"),
        (
            "a",
            jnp.array([0, 8, T]),
            "chunk_linear_attn: the tokens lie along the axis 'a', and which sequences its ranks share must be known while "
            "they are traced: pass context=shard_axis('a', cu_seqlens=...) with plain integers",
        ),
    ):
        x = jax.device_put(jnp.ones((1, T, 2, 4)), NamedSharding(mesh, P(None, axes)))
        with pytest.raises(linattn.errors.ContextError) as error:
            linattn.chunk_linear_attn(x, x, x, cu_seqlens=packed)
        assert str(error.value) == text


def refuse_shapes() -> None:
    """What is ill-shaped is refused as anywhere else, however it lies, and rows of a norm are not followed."""
    mesh = jax.make_mesh((2,), ("cp",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, few, state = (jax.device_put(jnp.ones(shape), P(None, "cp")) for shape in ((1, T, 2, 4), (1, T, 2), (2, 4, 4)))
        for changed, text in (
            (dict(g=few), "g must be [B, T, HV, K] = [1, 24, 2, 4] or [B, T, H, K] = [1, 24, 2, 4], got [1, 24, 2]"),
            (dict(k=few), "k must be [B, T, H, K] = [1, 24, 2, 4], got [1, 24, 2]"),
            (dict(v=few), "v must be [B, T, HV, V] = [1, 24, HV, V], got [1, 24, 2]"),
            (dict(gv=few), "gv must be [B, T, HV, V] = [1, 24, 2, 4], got [1, 24, 2]"),
            (dict(initial_state=state), "initial_state must be [N, HV, K, V] = [1, 2, 4, 4], got [2, 4, 4]"),
        ):
            with pytest.raises(linattn.errors.ShapeError) as error:
                linattn.chunk_gla(**dict(q=x, k=x, v=x, g=x) | changed)
            assert str(error.value) == f"chunk_gla: {text}"
        given = [x] * 5
        with pytest.raises(linattn.errors.FrameworkError) as error:
            linattn.chunk_mixed_attn(*given, initial_state=state)
        assert str(error.value) == "chunk_mixed_attn: initial_state must be a linattn.MixedState, got ArrayImpl"
        for rows in (x, jax.device_put(jnp.ones((T, 4)), P(None, "cp"))):
            assert linattn.gated_rms_norm(rows, rows, jnp.ones(4), backend="jax").shape == rows.shape


def close(what: str, found: Any, expected: Any) -> None:
    """Of what this process has of it."""
    expected = np.asarray(expected, np.float64)
    most = max(1.0, np.abs(expected).max(initial=0.0))
    for shard in found.addressable_shards:
        value = np.asarray(shard.data, np.float64)
        np.testing.assert_allclose(value, expected[shard.index], rtol=2e-4, atol=2e-5 * most, err_msg=what)


def export(mesh: Any) -> None:
    """An exported program for sharded arrays."""
    x = np.random.default_rng(0).standard_normal((3, 1, T, 2, 4), np.float32)
    spread = NamedSharding(mesh, P(None, "cp"))
    plan = shard_axis("cp", mesh=mesh)
    program = jax.export.export(jax.jit(lambda q, k, v: linattn.chunk_linear_attn(q, k, v, context=plan)[0]))
    given = [jax.device_put(each, spread) for each in x]
    close("o", jax.jit(program(*given).call)(*given), linattn.chunk_linear_attn(*map(jnp.asarray, x))[0])


def positions(mesh: Any) -> None:
    """Of every token in its sequence, inside ``shard_map`` and outside."""
    for offsets in (None, PACKED):
        starts = np.searchsorted([0] if offsets is None else offsets, np.arange(T), side="right") - 1
        wanted = np.arange(T) - np.asarray([0] if offsets is None else offsets)[starts]
        for layout in ("contiguous", "zigzag"):
            plan, x = shard_axis("cp", offsets, layout, mesh=mesh), jnp.zeros((1, T, 2))
            inside = jax.shard_map(plan.positions, mesh=mesh, in_specs=P(None, "cp"), out_specs=P("cp"))
            for found in (inside(x), plan.positions(x)):
                np.testing.assert_array_equal(np.asarray(found), wanted[order(mesh.shape["cp"], layout)])


def main() -> None:
    """Run them all, or in each of two processes a few."""
    if len(sys.argv) > 1:
        jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
    mesh = jax.make_mesh((len(jax.devices()),), ("cp",), axis_types=(AxisType.Auto,))
    jobs = {run.name: partial(compare, run) for run in runs()} | {"export": export, "positions": positions}
    jobs |= {f"followed-{name}": lambda _, name=name: follow(name) for name in FOLLOWED}
    jobs |= {
        "placed": lambda _: follow_with_positions(),
        "left": leave_to_the_compiler,
        "beside": lambda _: beside_other_axes(),
        "unspread": refuse_to_spread,
        "transforms": lambda _: transform_followed(),
        "refused": lambda _: refuse_to_follow(),
        "ill-shaped": lambda _: refuse_shapes(),
    }
    if len(sys.argv) > 1:
        jobs = {name: jobs[name] for name in TWO_PROCESSES}
    for name, job in jobs.items():
        try:
            job(mesh)
            print(f"equal {name}", flush=True)
        except Exception:
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)


if __name__ == "__main__":
    main()
