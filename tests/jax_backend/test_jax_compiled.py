"""What XLA makes of the plain backend on a CPU: none of the programs that its library, YNNPACK, is known to get wrong.

In jaxlib 0.10.2 a fusion of that library reads memory nobody wrote if it holds both a sum and a product with a broadcast
constant on the right. Which garbage it reads changes from one compilation to the next; the program does not. And sums over
arrays of seven dimensions, some of them of size one, can write where they should not: the process is killed, then or later.
"""

import re

import jax
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
    return max(shape.count(",") + 1 for shape in shapes)


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


@pytest.mark.parametrize(("form", "T"), [("parallel", 65), ("chunk", 33), ("recurrent", 1)])
def test_the_bonus_is_not_fused_with_a_state_of_zeros(form, T):
    rng = np.random.default_rng(0)
    operator = getattr(linattn, f"{form}_rwkv6")
    q, k, g, v = (jax.numpy.asarray(rng.standard_normal((2, T, 2, width)), "float32") for width in (24, 24, 24, 40))
    u = jax.numpy.asarray(rng.standard_normal((2, 24)), "float32")

    def output(q, k, v, g, u):
        return operator(q, k, v, -jax.numpy.exp(g), u, backend="jax")[0]

    program = jax.jit(output).lower(q, k, v, g, u).compile().as_text()
    assert misread(program) == []


def test_sums_have_few_dimensions():
    rng = np.random.default_rng(0)
    q, k, g, v = (jax.numpy.asarray(rng.standard_normal((2, 33, 2, width)), "float32") for width in (8, 8, 8, 12))
    beta = jax.nn.sigmoid(v[..., 0])

    @jax.jit
    @jax.vmap
    def pulled(q, k, v, g, beta, cotangent):
        _, pull = jax.vjp(lambda *given: linattn.chunk_kda(*given, backend="jax")[0], q, k, v, -jax.numpy.exp(g), beta)
        return pull(cotangent)

    given = (jax.numpy.stack([x, x]) for x in (q, k, v, g, beta, v))
    assert most_dimensions(pulled.lower(*given).compile().as_text()) <= 6
