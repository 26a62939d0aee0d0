"""What XLA makes of the plain backend on a CPU: none of the programs that its library, YNNPACK, is known to get wrong.

In jaxlib 0.10.2 a fusion of that library reads memory nobody wrote if it holds both a sum and a product with a broadcast
constant on the right. Which garbage it reads changes from one compilation to the next; the program does not. And sums over
arrays of seven dimensions, some of them of size one, can write where they should not: the process is killed, then or later.
"""

import re

import jax
import jax.numpy as jnp
import linattn
import numpy as np
import pytest

FUSED = """\
%inside (given: f32[4,8,3], other: f32[4,8,3]) -> f32[4,8,5] {
  %given = f32[4,8,3]{2,1,0} parameter(0)
  %other = f32[4,8,3]{2,1,0} parameter(1)
  %zero = f32[] constant(0)
  %state = f32[4,3,5]{2,1,0} broadcast(%zero), dimensions={}
  %read = f32[4,8,5]{2,1,0} dot(%given, %state), lhs_batch_dims={0}
  %sum = f32[4,8]{1,0} reduce(%other, %zero), dimensions={2}, to_apply=%add
  %wide = f32[4,8,5]{2,1,0} broadcast(%sum), dimensions={0,1}
  ROOT %all = f32[4,8,5]{2,1,0} add(%read, %wide)
}
"""
ENTRY = 'ROOT %ynn_fusion = f32[4,8,5]{2,1,0} fusion(%x, %y), kind=kCustom, calls=%inside, config="__ynn_fusion"'


def fusions(program):
    """The library's fusions in a compiled ``program``: their instructions, by name."""
    library = set(re.findall(r"kind=kCustom, calls=%([\w.-]+),.*__ynn_fusion", program))
    bodies = re.findall(r"^%([\w.-]+) \(.*?\{\n(.*?)^\}", program, re.M | re.S)
    return {name: body for name, body in bodies if name in library}


def misread(program):
    """Names of those that hold a sum and a product with a broadcast scalar."""
    return [name for name, body in fusions(program).items() if " reduce(" in body and reads_a_constant(body)]


def most_dimensions(program):
    """Of any array in one of them."""
    shapes = [shape for body in fusions(program).values() for shape in re.findall(r"= \w+\[([\d,]+)\]", body)]
    return max((shape.count(",") + 1 for shape in shapes), default=0)


def reads_a_constant(body):
    """Whether the right side of a product is one number everywhere."""
    made = {
        name: (shape, operation, re.findall(r"%([\w.-]+)", given))
        for name, shape, operation, given in re.findall(r"%([\w.-]+) = (\S+) ([\w-]+)\(([^)]*)\)", body)
    }

    def constant(name):
        shape, operation, given = made[name]
        return "[]" in shape or (operation in ("broadcast", "bitcast") and constant(given[0]))

    return any(operation == "dot" and constant(given[1]) for _, operation, given in made.values())


def test_such_a_fusion_is_seen():
    assert misread(FUSED + ENTRY) == ["inside"]
    assert misread(FUSED.replace("broadcast(%zero)", "parameter(2)") + ENTRY) == []
    assert misread(FUSED.replace("reduce", "slice") + ENTRY) == []
    assert misread(FUSED) == []
    assert most_dimensions(FUSED + ENTRY) == 3


FAMILIES = ("linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr")
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # fusions are made before that
AS_USERS = QUICKLY | {"xla_cpu_use_fusion_emitters": True}  # other tests are compiled without


def compiled(function, *given):
    """The text of the program."""
    return jax.jit(function).lower(*given).compile(AS_USERS).as_text()


def drawn(family, T):
    """Operands of a call."""
    rng = np.random.default_rng(0)
    q, k, gate, v, a, b = (jnp.asarray(rng.standard_normal((2, T, 2, width)), "float32") for width in (24, 24, 24, 40, 24, 24))
    g, beta = -jnp.exp(gate), jax.nn.sigmoid(v[..., 0])
    more = {"simple_gla": (g[..., 0],), "gla": (g,), "rwkv6": (g, k[0, 0]), "dplr": (g, a, b)}
    more |= {"delta_rule": (beta,), "gated_delta_rule": (g[..., 0], beta), "kda": (g, beta)}
    return (q, k, a, b, v) if family == "mixed_attn" else (q, k, v, *more.get(family, ()))


@pytest.mark.parametrize("form", ["chunk", "parallel"])
@pytest.mark.parametrize(
    "family", ["linear_attn", "simple_gla", "gla", "rwkv6", "delta_rule", "gated_delta_rule", "kda", "dplr"]
)
def test_a_state_of_zeros_is_not_fused_with_a_sum(family, form):
    """The caller's sum, here; the bonus of rwkv6 is one more."""
    operator = getattr(linattn, f"{form}_{family}")
    given = drawn(family, 32)
    state = {"initial_state": jnp.zeros((2, 2, 24, 40))} if form == "parallel" else {}
    assert misread(compiled(lambda *x: operator(*x, backend="jax", **state)[0].sum(), *given)) == []


def test_mixed_attn_without_a_state():
    given = drawn("mixed_attn", 32)
    assert misread(compiled(lambda *x: linattn.chunk_mixed_attn(*x, chunk_size=32, backend="jax")[0].sum(), *given)) == []


@pytest.mark.parametrize(("form", "T"), [("parallel", 65), ("chunk", 33)])
def test_the_bonus_is_not_fused_with_a_state_of_zeros(form, T):
    operator = getattr(linattn, f"{form}_rwkv6")
    assert misread(compiled(lambda *x: operator(*x, backend="jax")[0], *drawn("rwkv6", T))) == []


def test_sums_have_few_dimensions():
    def pulled(q, k, v, g, beta, cotangent):
        _, pull = jax.vjp(lambda *given: linattn.chunk_kda(*given, backend="jax")[0], q, k, v, g, beta)
        return pull(cotangent)

    q, k, v, g, beta = drawn("kda", 33)
    given = (jnp.stack([x, x]) for x in (q, k, v, g, beta, v))
    assert most_dimensions(compiled(jax.vmap(pulled), *given)) <= 6
