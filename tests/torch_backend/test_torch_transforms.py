"""Compile, export, func, vmap, FakeTensor, autocast, opcheck: one custom op each, with the rules that tracers need."""

import linattn
import pytest
import torch
import torch._dynamo.testing
from linattn_backends.torch import TorchBackend
from linattn_backends.torch.library import matrix_state, matrix_state_backward
from linattn_backends.torch.mixed import mixed
from linattn_backends.torch.transforms import unwatched
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import VARIANTS, draw, error, forms, gradients, leaves, outputs, run, run_method

SOME = ["simple_gla", "gla_value_gate", "rwkv6", "kda", "kda_vector_beta", "dplr", "normalized", "mixed_bias"]


def loss_of(form, family, arrays, options):
    """A function of the float leaves, and the leaves."""
    wrt = leaves(arrays)

    def loss(*values):
        rebuilt = rebuild(arrays, dict(zip(wrt, values, strict=True)))
        return sum(y.square().sum() for y in outputs(run(form, family, rebuilt, options)).values())

    return loss, list(wrt.values())


def rebuild(arrays, values):
    rebuilt = {}
    for name, x in arrays.items():
        if isinstance(x, tuple):
            rebuilt[name] = type(x)(*(values.get(f"{name}.{f}", y) for f, y in zip(x._fields, x, strict=True)))
        else:
            rebuilt[name] = values.get(name, x)
    return rebuilt


def close(found, expected):
    for y, x in zip(found, expected, strict=True):
        assert error(y, x.double()) < 1e-9


@pytest.mark.parametrize(("form", "T"), [("chunk", 20), ("recurrent", 1)])
@pytest.mark.parametrize("variant", SOME)
def test_compile(variant, form, T):
    loss, wrt = loss_of(form, *draw(variant, T))
    for x in wrt:
        x.requires_grad_()
    expected = torch.autograd.grad(loss(*wrt), wrt)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    close(torch.autograd.grad(compiled(*wrt), wrt), expected)


def test_compile_packed():
    loss, wrt = loss_of("chunk", *draw("kda", 0, lengths=[5, 0, 40, 3]))
    for x in wrt:
        x.requires_grad_()
    expected = torch.autograd.grad(loss(*wrt), wrt)
    torch._dynamo.reset()
    close(torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*wrt), wrt), expected)


@pytest.mark.parametrize("variant", ["gla", "kda", "mixed_attn"])
def test_dynamic_length_compiles_once(variant):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    family, arrays, options = draw(variant, 30, state=False)

    def call(*values):
        return run("chunk", family, dict(zip(arrays, values, strict=True)), options)[0]

    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for T in (30, 70, 600, 1100):
        _, more, _ = draw(variant, T, state=False)
        values = [x.requires_grad_() for x in more.values()]
        found, expected = compiled(*values), call(*values)
        close([found], [expected.detach()])
        close(torch.autograd.grad(found.sum(), values[:3]), torch.autograd.grad(call(*values).sum(), values[:3]))
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 4


@pytest.mark.parametrize("variant", SOME)
def test_export(variant):
    family, arrays, options = draw(variant, 40)
    wrt = leaves(arrays)

    class Model(torch.nn.Module):
        def forward(self, *values):
            return run("chunk", family, rebuild(arrays, dict(zip(wrt, values, strict=True))), options)

    exported = torch.export.export(Model(), tuple(wrt.values()))
    found = outputs(exported.module()(*wrt.values()))
    close(found.values(), outputs(run("chunk", family, arrays, options)).values())


def test_export_dynamic_length():
    class Model(torch.nn.Module):
        def forward(self, q, k, v, g):
            return TorchBackend().chunk_gla(q, k, v, g)[0]

    def inputs(T):
        return tuple(draw("gla", T, state=False)[1].values())

    T = torch.export.Dim("T", min=2, max=4096)
    exported = torch.export.export(Model(), inputs(40), dynamic_shapes=[{1: T}] * 4)
    for length in (7, 700):
        values = inputs(length)
        close([exported.module()(*values)], [Model()(*values)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_has_the_op():
    def call(*values):
        return TorchBackend().chunk_gla(*values, scale=0.5)[0]  # a trace has sizes in tensors, and a scale made of them too

    first, second = (tuple(draw("gla", T, state=False)[1].values()) for T in (40, 70))
    traced = torch.jit.trace(call, first)
    assert "linattn::matrix_state" in [node.kind() for node in traced.graph.nodes()]
    close([traced(*second)], [call(*second)])


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("variant", SOME)
def test_func_grad_and_vmap(variant, form):
    if variant == "mixed_bias" and form == "recurrent":
        pytest.skip("the same op as the chunk form")
    loss, wrt = loss_of(form, *draw(variant, 20))
    stacked = [torch.stack([x.detach(), 0.5 * x.detach()], -1) for x in wrt]
    every = tuple(range(len(wrt)))
    for x in wrt:
        x.requires_grad_()
    expected = torch.autograd.grad(loss(*wrt), wrt)
    gradient = torch.func.grad(loss, argnums=every)
    close(gradient(*(x.detach() for x in wrt)), expected)
    halved = gradient(*(0.5 * x.detach() for x in wrt))
    mapped = torch.func.vmap(gradient, in_dims=-1)(*stacked)
    close([d[0] for d in mapped], expected)
    close([d[1] for d in mapped], halved)
    summed = torch.func.grad(lambda *x: torch.func.vmap(loss, in_dims=-1)(*x).sum(), argnums=every)(*stacked)
    close([d[..., 1] for d in summed], halved)


def test_vmap_over_one_argument_and_packed():
    family, arrays, options = draw("simple_gla", 0, lengths=[3, 9])
    scales = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def scaled(c):
        return run("chunk", family, {**arrays, "v": arrays["v"] * c}, options)[0]

    mapped = torch.func.vmap(scaled)(scales)
    close(mapped, [scaled(c) for c in scales])


def test_a_default_device_watches_no_call():
    """It is a mode, and those turn the eager way off; but all that it sees is what makes tensors."""
    x = [torch.zeros(2)]
    with torch.device("cpu"):
        assert unwatched(x)
        with torch.overrides.TorchFunctionMode():
            assert not unwatched(x)
    torch.set_default_device("cpu")
    try:
        assert unwatched(x)
    finally:
        torch.set_default_device(None)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in jvp
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("variant", SOME)
def test_forward_mode(variant, form):
    """Tangents, alone and under other transforms, against the gradient."""
    loss, wrt = loss_of(form, *draw(variant, 20))
    directions = [torch.randn_like(x) for x in wrt]
    expected = sum((d * x).sum() for d, x in zip(torch.func.grad(loss, tuple(range(len(wrt))))(*wrt), directions, strict=True))

    def derivative(*values):
        return torch.func.jvp(loss, values, tuple(directions))[1]

    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(x, d) for x, d in zip(wrt, directions, strict=True)]
        close([torch.autograd.forward_ad.unpack_dual(loss(*duals)).tangent], [expected])
    close([derivative(*wrt)], [expected])
    stacked, moved = ([torch.stack([x, 2 * x]) for x in given] for given in (wrt, directions))
    rows = torch.func.jvp(torch.func.vmap(loss), tuple(stacked), tuple(moved))[1]
    close([rows[0]], [expected])
    every = tuple(range(len(wrt)))
    backwards = torch.func.grad(derivative, every)(*wrt)
    forwards = torch.func.jvp(lambda *values: torch.func.grad(loss, every)(*values), tuple(wrt), tuple(directions))[1]
    close(forwards, backwards)


@pytest.mark.parametrize("variant", SOME)
def test_gradient_beside_somebody_elses_tangents(variant):
    loss, wrt = loss_of("chunk", *draw(variant, 20))
    x = [y.requires_grad_() for y in wrt]
    expected = torch.autograd.grad(loss(*x), x)
    with torch.autograd.forward_ad.dual_level():
        found = torch.autograd.grad(loss(*x), x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in jvp
@pytest.mark.parametrize("operator", [linattn.chunk_linear_attn, linattn.recurrent_linear_attn, linattn.parallel_linear_attn])
@pytest.mark.parametrize("T", [5, 70])
@pytest.mark.parametrize(("dtype", "of_state"), [("float16", "bfloat16"), ("float64", "float32"), ("float32", "float64")])
def test_tangents_have_the_dtypes_of_their_outputs(dtype, of_state, T, operator):
    """Outputs are linear in values and state: along these they are their own tangents."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, 4, generator=rng).to(getattr(torch, dtype)) for _ in range(3))
    state = torch.randn(1, 2, 4, 4, generator=rng).to(getattr(torch, of_state))

    def call(v, state):
        return operator(q, k, v, initial_state=state, output_final_state=True, backend="torch")

    found, moved = torch.func.jvp(call, (v, state), (v, state))
    assert [x.dtype for x in moved] == [x.dtype for x in found]
    assert all(error(x, y.double()) < (1e-2 if dtype == "float16" else 1e-5) for x, y in zip(moved, found, strict=True))


SECOND = (
    "the gradient of a linattn operator has no gradient of its own: for a second derivative, take the forward-mode derivative "
    'of it, as torch.func.hessian does, with backend="torch"'
)


def test_second_derivative_is_refused():
    loss, wrt = loss_of("chunk", *draw("gla", 10))
    x = [y.requires_grad_() for y in wrt]
    (first,) = torch.autograd.grad(loss(*x), x[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=f"^{SECOND}$"):
        torch.autograd.grad(first.sum(), x[1])
    once = torch.func.grad(loss)
    twice = torch.func.grad(lambda *y: once(*y).sum())
    with pytest.raises(RuntimeError, match=f"^{SECOND}$"):
        twice(*(y.detach() for y in wrt))


@pytest.mark.parametrize("variant", VARIANTS)
def test_fake_tensor(variant):
    torch.manual_seed(0)
    family, arrays, options = draw(variant, 70, dtype=torch.bfloat16)
    for form in forms(variant):
        expected = outputs(run(form, family, arrays, options))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = {
                name: type(x)(*map(mode.from_tensor, x)) if isinstance(x, tuple) else mode.from_tensor(x)
                for name, x in arrays.items()
            }
            found = outputs(run(form, family, fake, options))
        for name, y in expected.items():
            assert found[name].shape == y.shape, name
            assert found[name].dtype == y.dtype, name


@pytest.mark.parametrize("T", [1, 70])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_without_data(variant, T):
    """Shapes and dtypes, of gradients too, and of packed sequences, whose lengths nobody knows."""
    torch.manual_seed(0)
    family, arrays, options = draw(variant, T, dtype=torch.bfloat16)
    for form in forms(variant):
        expected = outputs(run(form, family, arrays, options))
        empty = {
            name: type(x)(*(y.to("meta") for y in x)) if isinstance(x, tuple) else x.to("meta") for name, x in arrays.items()
        }
        leaves = {
            name: x.requires_grad_() for name, x in empty.items() if isinstance(x, torch.Tensor) and x.is_floating_point()
        }
        found = outputs(run(form, family, {**empty, **leaves}, options))
        for name, y in expected.items():
            assert (found[name].device.type, found[name].shape, found[name].dtype) == ("meta", y.shape, y.dtype), name
        found["o"].sum().backward()
        assert all(x.grad is None or x.grad.shape == x.shape for x in leaves.values())
        assert any(x.grad is not None for x in leaves.values())


def operands(variant, T=20, **how):
    _, arrays, _ = draw(variant, T, **how)
    order = ("q", "k", "v", "g", "gv", "beta", "a", "b", "u", "initial_state", "cu_seqlens")
    return [arrays.get(name) for name in order]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", ["linear_attn", "gla_value_gate", "rwkv6", "kda", "dplr"])
def test_opcheck(variant, packed):
    args = operands(variant, lengths=[4, 0, 9] if packed else None, dtype=torch.float32)
    args = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in args]
    options = ("chunk", 0.5, 64)
    torch.library.opcheck(matrix_state, (*args, *options))
    plain = [None if x is None else x.detach() for x in args]
    o, final, checkpoints = matrix_state(*plain, *options)
    torch.library.opcheck(matrix_state_backward, (o, final, checkpoints, *plain, *options))


def test_opcheck_mixed():
    _, arrays, options = draw("mixed_bias", 40)
    state = arrays.pop("initial_state")
    args = [arrays[name].requires_grad_() for name in ("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias")]
    torch.library.opcheck(mixed, (*args, *state, None, options["chunk_size"], 0.3, 0.2, True))


def same_under_autocast(run, family, arrays, options):
    """Outputs and gradients have the same bits and dtypes, whether the forward pass is under autocast or not."""
    for form in ("chunk", "recurrent"):
        weights = {
            name: torch.ones(y.shape, dtype=torch.float64) for name, y in outputs(run(form, family, arrays, options)).items()
        }
        expected, dexpected = gradients(form, family, arrays, options, weights, run=run)
        found, dfound = gradients(form, family, arrays, options, weights, autocast=True, run=run)
        for name, y in {**expected, **dexpected}.items():
            z = {**found, **dfound}[name]
            assert torch.equal(z, y), name
            assert z.dtype == y.dtype, name


@pytest.mark.parametrize("variant", [variant for variant in SOME if variant != "normalized"])  # linattn divides, not a method
@pytest.mark.parametrize("T", [1, 30])
def test_autocast_changes_nothing_in_the_backend(variant, T):
    same_under_autocast(run_method, *draw(variant, T, dtype=torch.float32))


@pytest.mark.parametrize("variant", SOME)
@pytest.mark.parametrize("T", [1, 30])
def test_autocast_changes_nothing_where_operands_have_its_dtype(variant, T):
    same_under_autocast(run, *draw(variant, T, dtype=torch.bfloat16))


@pytest.mark.parametrize("variant", SOME)
def test_autocast_casts_the_operands_of_a_public_call_and_nothing_else(variant):
    """The bits are those of operands that were cast before; gradients come back in the dtypes of what was given."""
    family, arrays, options = draw(variant, 30, dtype=torch.float32)
    operator = getattr(linattn, f"chunk_{family}")
    operands = {arg.name for arg in operator.spec.args if arg.role == "operand"}
    before = {name: x.bfloat16() if name in operands else x for name, x in arrays.items()}
    expected = outputs(operator(**before, **options))
    wrt = leaves(arrays)
    for x in wrt.values():
        x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = outputs(operator(**arrays, **options))
    for name, y in expected.items():
        assert found[name].dtype == y.dtype, name
        assert torch.equal(found[name], y), name
    sum(y.float().sum() for y in found.values()).backward()
    assert all(x.grad is None or x.grad.dtype == x.dtype for x in wrt.values())
    assert wrt["v"].grad.abs().sum() > 0


@pytest.mark.parametrize("gates", [torch.float16, torch.float64])
def test_autocast_leaves_gates_what_they_are(gates):
    """A column is put beside those of values; autocast of a CPU joins no arrays of float16."""
    q, k = torch.rand(2, 1, 5, 1, 4)
    v, g, gv = torch.randn(1, 5, 1, 3), -torch.rand(1, 5, 1, 4).to(gates), -torch.rand(1, 5, 1, 3).to(gates)
    expected, _ = linattn.parallel_gla(q.bfloat16(), k.bfloat16(), v.bfloat16(), g, gv=gv, normalize=True, backend="torch")
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = linattn.parallel_gla(q, k, v, g, gv=gv, normalize=True, backend="torch")
    assert torch.equal(found, expected)


def test_autocast_leaves_float64_and_other_devices_alone():
    q = torch.ones(1, 3, 1, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert linattn.linear_attn(q, q, q)[0].dtype == torch.float64
        meta = torch.ones(1, 3, 1, 4, device="meta")
        assert linattn.linear_attn(meta, meta, meta, backend="torch")[0].dtype == torch.float32
        assert linattn.linear_attn(q.float(), q.half(), q.bfloat16())[0].dtype == torch.bfloat16


def test_autocast_casts_what_a_feature_map_gives():
    q = torch.rand(1, 3, 1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = linattn.linear_attn(q, q, q, feature_map="exp")
    expected, _ = linattn.linear_attn(q.exp().bfloat16(), q.exp().bfloat16(), q.bfloat16())
    assert torch.equal(found, expected)


def test_compiled_code_notices_autocast():
    q = torch.rand(1, 3, 1, 4)
    torch._dynamo.reset()
    call = torch.compile(lambda q: linattn.linear_attn(q, q, q)[0], fullgraph=True, backend="aot_eager")
    assert call(q).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert call(q).dtype == torch.bfloat16
    assert call(q).dtype == torch.float32


def test_compile_under_autocast():
    family, arrays, options = draw("kda", 1, dtype=torch.float32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(arrays):
        with torch.autocast("cpu", torch.bfloat16):
            return run("recurrent", family, arrays, options)

    torch._dynamo.reset()
    found = call(arrays)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run("recurrent", family, arrays, options)
    assert found[0].dtype == torch.bfloat16
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_public_call_reaches_this_backend_compiled(variant):
    family, arrays, options = draw(variant, 12)
    torch._dynamo.reset()
    name = f"{forms(variant)[-1]}_{family}"

    def call(arrays):
        return getattr(linattn, name)(**arrays, **options, backend="torch")

    found = torch.compile(call, fullgraph=True, backend="aot_eager")(arrays)
    for y, x in zip(outputs(found).values(), outputs(call(arrays)).values(), strict=True):
        assert torch.equal(y, x)


class Seen(TorchDispatchMode):
    """Notes the names of linattn's ops that go by."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "linattn":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", ["simple_gla", "kda"])
def test_a_mode_sees_the_op_and_its_gradient(variant):
    loss, wrt = loss_of("chunk", *draw(variant, 20))
    for x in wrt:
        x.requires_grad_()
    expected = torch.autograd.grad(loss(*wrt), wrt)
    with Seen() as seen:
        found = torch.autograd.grad(loss(*wrt), wrt)
    assert seen.names == ["matrix_state", "matrix_state_backward"]
    close(found, expected)


def test_a_plain_call_goes_past_the_dispatcher(monkeypatch):
    """It costs as much as several kernels; what is computed is the same function."""
    calls = []
    wrapped = matrix_state._init_fn
    monkeypatch.setattr(matrix_state, "_init_fn", lambda *args: calls.append(len(args)) or wrapped(*args))
    loss, wrt = loss_of("chunk", *draw("simple_gla", 20))
    with torch.no_grad():
        loss(*wrt)
    assert len(calls) == 1
    for x in wrt:
        x.requires_grad_()
    torch.autograd.grad(loss(*wrt), wrt)
    assert len(calls) == 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        loss(*wrt)
    assert len(calls) == 2


def test_autocast_casts_an_operand_that_is_optional():
    rng = torch.Generator().manual_seed(0)
    x, z = (torch.randn(1, 9, 2, 4, generator=rng) for _ in range(2))
    B, C = (torch.randn(1, 9, 2, 3, generator=rng) for _ in range(2))
    dt, A = torch.rand(1, 9, 2, generator=rng), -torch.rand(2, generator=rng)
    with torch.autocast("cpu", torch.bfloat16):
        found = linattn.ssd(x, dt, A, B, C, z=z, backend="torch")[0]
    low = [y.bfloat16() for y in (x, B, C, z)]
    expected = linattn.ssd(low[0], dt, A, *low[1:3], z=low[3], backend="torch")[0]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
