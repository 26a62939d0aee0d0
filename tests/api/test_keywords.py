"""A backend's method names the keywords that it takes: what becomes of the others."""

from __future__ import annotations

import linattn
import numpy as np
import pytest
from backends_for_tests import named
from linattn import errors
from linattn.plugin import Backend, Unsupported, form_methods
from linattn_backends.numpy import oracle


class Spare(Backend):
    """The oracle's gla, with no keyword but the scale."""

    name = "spare"
    api = ">=1,<2"
    frameworks = ("numpy",)

    def chunk_gla(self, q, k, v, g, gv=None, *, scale):
        arrays = {"q": q, "k": k, "v": v, "g": g, "gv": gv}
        return oracle.forward("gla", arrays, {"scale": scale})[0].astype(v.dtype), None


class Bare(Spare):
    """None at all."""

    name = "bare"

    def chunk_gla(self, q, k, v, g, gv=None):
        return super().chunk_gla(q, k, v, g, gv, scale=None)


@pytest.fixture
def call():
    linattn.register_backend(Spare)
    linattn.register_backend(Bare)
    x = np.random.default_rng(0).random((1, 8, 2, 4), np.float32)
    return {"q": x, "k": x, "v": x, "g": -x}


def same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)


def test_a_call_that_asks_for_nothing_more_runs(call):
    same(linattn.chunk_gla(**call, backend="spare"), linattn.chunk_gla(**call, backend="numpy"))
    same(linattn.chunk_gla(**call, backend="bare"), linattn.chunk_gla(**call, backend="numpy"))
    plan = linattn.explain("chunk_gla", **call, backend="spare")
    assert plan.omitted == ("qk_norm", "gate", "normalize", "initial_state", "output_final_state", "cu_seqlens", "chunk_size")
    assert linattn.explain("chunk_gla", **call, backend="numpy").omitted == ("qk_norm", "gate")


def test_a_hint_is_not_passed(call):
    same(linattn.chunk_gla(**call, chunk_size=4, backend="bare"), linattn.chunk_gla(**call, backend="numpy"))


def test_what_linattn_can_do_itself_it_does(call):
    same(linattn.chunk_gla(**call, normalize=True, backend="spare"), linattn.chunk_gla(**call, normalize=True, backend="numpy"))
    plan = linattn.explain("chunk_gla", **call, normalize=True, backend="spare")
    assert (plan.applied, plan.steps) == (("normalize",), ("gla",))
    assert str(plan).splitlines()[2] == "  runs         spare.chunk_gla (linattn applies normalize)"
    q, k, v = (call[name] for name in ("q", "k", "v"))
    plan = linattn.explain("chunk_linear_attn", q, k, v, normalize=True, backend="spare")
    lowered = "(linattn applies normalize; lowered: linear_attn → simple_gla → gla)"
    assert str(plan).splitlines()[2] == f"  runs         spare.chunk_gla {lowered}"


def test_a_method_that_takes_it_gets_it(call):
    assert linattn.explain("chunk_gla", **call, normalize=True, backend="numpy").applied == ()


def test_a_backend_may_refuse_what_its_method_takes(call):
    class Picky(Spare):
        name = "picky"

        def supports(self, call):
            return Unsupported("does not divide") if call.option("normalize") else None

        def chunk_gla(self, q, k, v, g, gv=None, *, scale, normalize):
            assert normalize is False
            return super().chunk_gla(q, k, v, g, gv, scale=scale)

    linattn.register_backend(Picky)
    found = linattn.chunk_gla(**call, normalize=True, backend="picky")
    same(found, linattn.chunk_gla(**call, normalize=True, backend="numpy"))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"output_final_state": True}, "chunk_gla does not take output_final_state=True"),
        ({"initial_state": np.zeros((1, 2, 4, 4))}, "chunk_gla does not take initial_state"),
        ({"cu_seqlens": np.array([0, 8])}, "chunk_gla does not take cu_seqlens"),
        ({"scale": 0.5, "cu_seqlens": np.array([0, 8])}, "chunk_gla does not take scale=0.5 and cu_seqlens"),
    ],
    ids=lambda asked: "-".join(asked) if isinstance(asked, dict) else "",
)
def test_anything_else_makes_the_call_unsupported(call, asked, reason):
    plan = linattn.explain("chunk_gla", **call, **asked, backend=["bare", "numpy"])
    assert (plan.backend, plan.passed) == ("numpy", (("bare", reason),))
    with pytest.raises(Unsupported) as caught:
        linattn.chunk_gla(**call, **asked, backend="bare")
    assert str(caught.value).splitlines()[1] == f"  bare: {reason}"


def test_a_keyword_of_the_special_family_only(call):
    q, k, v = (call[name] for name in ("q", "k", "v"))

    class Causal(Spare):
        name = "causal"

        def chunk_linear_attn(self, q, k, v, *, scale): ...

    linattn.register_backend(Causal)
    plan = linattn.explain("chunk_linear_attn", q, k, v, causal=False, backend="causal")
    assert plan.passed[0].reason == (
        "chunk_linear_attn does not take causal=False; causal=False is no special case of simple_gla"
    )


def test_decoding_without_indices_goes_by_copies(call):
    class Rows(Spare):
        name = "rows"

        def recurrent_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state):
            return v, initial_state

        def decode_gla(self, q, k, v, g, gv=None, *, state, scale):
            state[:] = 3.0
            return v

    linattn.register_backend(Rows)
    token, pool = {name: x[:, :1] for name, x in call.items()}, np.zeros((2, 2, 4, 4), np.float32)
    linattn.decode_gla(**token, state=pool, backend="rows")
    assert (pool == 3.0).all()
    linattn.decode_gla(**token, state=pool, state_indices=np.array([1]), backend="rows")
    plan = linattn.explain("decode_gla", **token, state=pool, state_indices=np.array([1]), backend="rows")
    assert plan.method == "recurrent_gla"


def test_a_state_cannot_be_left_out():
    def decode_gla(self, q, k, v, g, gv=None, *, state_indices, scale): ...

    with pytest.raises(errors.BackendContractError, match=r"^Acme\.decode_gla does not match the spec"):
        linattn.register_backend(named("acme", decode_gla=decode_gla))


def test_a_method_that_collects_keywords_is_refused():
    def chunk_gla(self, q, k, v, g, gv=None, *, scale, **options): ...

    with pytest.raises(errors.BackendContractError) as caught:
        linattn.register_backend(named("acme", chunk_gla=chunk_gla))
    assert str(caught.value) == (
        "Acme.chunk_gla must name the arguments that it takes, not collect them: "
        "(self, q, k, v, g, gv=None, *, scale, **options)"
    )


def test_methods_made_of_a_function_take_what_it_names(call):
    seen = {}

    def run(form, arrays, *, scale, no_such_keyword=None):
        seen.update(arrays)
        return arrays["v"], None

    def collects(form, arrays, *, scale, **options):
        seen.update(options)
        return arrays["v"], None

    @form_methods({"gla": run, "linear_attn": collects}, forms=("chunk",))
    class Made(Backend):
        name = "made"
        api = ">=1,<2"
        frameworks = ("numpy",)

    linattn.register_backend(Made)
    assert linattn.explain("chunk_gla", **call, backend="made").omitted[:3] == ("qk_norm", "gate", "normalize")
    linattn.chunk_gla(**call, backend="made")
    assert set(seen) == {"q", "k", "v", "g", "gv"}
    seen.clear()
    linattn.chunk_linear_attn(call["q"], call["k"], call["v"], normalize=True, backend="made")
    assert set(seen) == {"causal", "initial_state", "output_final_state", "cu_seqlens", "chunk_size"}


def test_traced(torch):
    class Traced(Spare):
        name = "traced"
        frameworks = ("torch",)

        def chunk_gla(self, q, k, v, g, gv=None, *, scale):
            return v * scale, None

    linattn.register_backend(Traced)
    x = torch.rand(1, 8, 2, 4)
    function = torch.compile(lambda x: linattn.chunk_gla(x, x, x, -x, backend="traced")[0], fullgraph=True, backend="eager")
    assert torch.equal(function(x), x * 0.5)
