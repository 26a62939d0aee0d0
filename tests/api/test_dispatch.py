"""Which backend a call takes, and what is said about it."""

from __future__ import annotations

import asyncio
import threading

import linattn
import numpy as np
import pytest
from backends_for_tests import Other, Recorder, named
from linattn import errors
from linattn.plugin import Unsupported
from linattn.registry import registry


@pytest.fixture
def call(make):
    x = make(1, 8, 2, 16)
    return (x, x, x, -abs(x))


def chosen(call, **kwargs):
    return linattn.explain(linattn.chunk_gla, *call, **kwargs).backend


def test_auto_takes_the_framework_s_own_backend(make):
    x = make(1, 8, 2, 16)
    own = "numpy" if isinstance(x, np.ndarray) else "torch"
    linattn.register_backend(named("aaa"))
    assert chosen((x, x, x, -abs(x))) == own


def test_the_argument_comes_before_the_context_and_that_before_the_environment(call, monkeypatch):
    for name in ("one", "two", "three"):
        linattn.register_backend(named(name))
    monkeypatch.setenv("LINATTN_BACKEND", "three")
    assert chosen(call) == "three"
    with linattn.use_backend("two"):
        assert chosen(call) == "two"
        assert chosen(call, backend="one") == "one"
        with linattn.use_backend("one"):
            assert chosen(call) == "one"
        assert chosen(call) == "two"
    assert chosen(call) == "three"
    monkeypatch.delenv("LINATTN_BACKEND")
    assert chosen(call) not in ("one", "two", "three")


def test_the_environment_may_name_an_order(call, monkeypatch):
    linattn.register_backend(Recorder)
    monkeypatch.setenv("LINATTN_BACKEND", "recorder, auto")
    assert linattn.explain("chunk_gla", *call).preference == (("recorder", "auto"), "LINATTN_BACKEND")
    assert chosen(call) == "recorder"


def test_an_unknown_name_in_the_environment_is_an_error(call, monkeypatch):
    monkeypatch.setenv("LINATTN_BACKEND", "recoder")
    linattn.register_backend(Recorder)
    with pytest.raises(errors.UnknownBackend, match="unknown backend 'recoder': did you mean 'recorder'"):
        linattn.chunk_gla(*call)


def test_use_backend_refuses_an_unknown_name_at_once():
    with pytest.raises(errors.UnknownBackend), linattn.use_backend("nonesuch"):
        pytest.fail("entered")


def test_a_sequence_is_an_order(make):
    wide = make(1, 8, 2, 128)
    linattn.register_backend(Recorder)
    linattn.register_backend(named("last", supports=lambda self, call: None))
    plan = linattn.explain("chunk_gla", wide, wide, wide, -abs(wide), backend=["recorder", "last"])
    assert plan.backend == "last"
    assert plan.passed == (("recorder", "K must be at most 64, got 128"),)


def test_strict_means_that_backend_or_an_error(make):
    wide = make(1, 8, 2, 128)
    linattn.register_backend(Recorder)
    framework = "numpy" if isinstance(wide, np.ndarray) else "torch"
    with pytest.raises(Unsupported) as caught:
        linattn.chunk_gla(wide, wide, wide, -abs(wide), backend="recorder")
    assert str(caught.value) == (
        f"no backend can run chunk_gla on {framework} cpu float32 B=1 T=8 H=2 K=128 N=1 HV=2 V=128\n"
        "  recorder: K must be at most 64, got 128"
    )
    assert isinstance(caught.value, NotImplementedError)


def test_the_oracle_never_takes_torch_tensors(torch):
    x = torch.randn(1, 8, 2, 16)
    with pytest.raises(Unsupported, match="numpy: takes numpy arrays, not torch"):
        linattn.chunk_gla(x, x, x, x, backend="numpy")


def test_third_parties_come_after_the_built_in_ones_and_in_order_of_name(call, monkeypatch):
    for name in ("zeta", "alpha"):
        linattn.register_backend(named(name))
    monkeypatch.setattr(registry, "_built_in", ())
    assert chosen(call) == "alpha"


def test_lowering_walks_to_the_more_general_family(call):
    q, k, v, _ = call
    linattn.register_backend(Recorder)
    plan = linattn.explain("linear_attn", q, k, v, normalize=True, backend="recorder")
    assert (plan.steps, plan.form, plan.method) == (("linear_attn", "simple_gla", "gla"), "chunk", "chunk_gla")
    assert plan.applied == ("normalize",)
    lowered = registry.loaded["recorder"].calls[-1]
    assert (lowered.op, lowered.V, lowered.shapes["g"], lowered.dtypes["g"]) == ("gla", 17, "B T HV K", "float32")


def test_a_normalised_state_is_described_as_it_is_handed_over(call, make):
    q, k, v, _ = call
    linattn.register_backend(Recorder)
    linattn.chunk_linear_attn(q, k, v, normalize=True, initial_state=make(1, 2, 16, 17), backend="recorder")
    lowered = registry.loaded["recorder"].calls[-1]
    assert (lowered.V, lowered.shapes["initial_state"]) == (17, "N HV K V")


def test_what_a_lowered_call_hands_over(call):
    q, k, v, _ = call
    linattn.register_backend(Recorder)
    o, _ = linattn.chunk_simple_gla(q, k, v, v[0, 0, :, 0] * 0 - 1, backend="recorder")
    seen = registry.loaded["recorder"].seen
    assert seen["g"].shape == (1, 8, 2, 16)
    assert (np.asarray(seen["g"]) == -1).all()
    assert seen["scale"] == 0.25
    assert o.shape == v.shape


def test_a_lowering_that_does_not_hold_is_named(make):
    x = make(1, 8, 2, 16)
    dplr = lambda self, q, k, v, g, a, b, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size: (v, None)  # noqa: E731
    linattn.register_backend(type("D", (Recorder,), {"name": "d", "chunk_dplr": dplr}))
    assert linattn.explain("chunk_delta_rule", x, x, x, x[..., 0], backend="d").steps == (
        "delta_rule",
        "gated_delta_rule",
        "kda",
        "dplr",
    )
    plan = linattn.explain("chunk_delta_rule", x, x, x, x, backend="d")
    assert plan.backend is None
    assert plan.passed[0].reason == (
        "has no chunk_delta_rule; has no chunk_gated_delta_rule; has no chunk_kda; "
        "beta per value channel is no special case of dplr"
    )


def test_the_bare_name_picks_the_form_and_takes_another_if_it_must(call):
    q, k, v, g = call
    assert linattn.explain("gla", q, k, v, g).form == "chunk"
    one = [x[:, :1] for x in call]
    assert linattn.explain("gla", *one).form == "recurrent"
    linattn.register_backend(Recorder)
    assert linattn.explain("gla", *one, backend="recorder").form == "chunk"
    assert linattn.explain("recurrent_gla", *one, backend="recorder").backend is None


def test_a_gradient_passes_over_a_forward_only_backend(torch):
    linattn.register_backend(named("forward", differentiable=False))
    x = torch.randn(1, 8, 2, 16)
    assert linattn.explain("chunk_gla", x, x, x, x, backend="forward").backend == "forward"
    plan = linattn.explain("chunk_gla", x, x.clone().requires_grad_(), x, x, backend="forward")
    assert plan.passed == (("forward", "is forward-only, and a gradient is asked for"),)
    with torch.no_grad():
        assert linattn.explain("chunk_gla", x, x.clone().requires_grad_(), x, x, backend="forward").backend == "forward"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # PyTorch's own, in jvp
def test_tangents_pass_over_a_backend_that_knows_none(torch):
    linattn.register_backend(named("kernels", forward_mode=False))
    x = torch.randn(1, 8, 2, 16)

    def planned(y, v=x):
        plans.append(linattn.explain("chunk_gla", x, y, v, x, backend="kernels"))
        return y

    plans = []
    torch.func.vmap(planned)(x[None])
    with torch.autograd.forward_ad.dual_level():
        planned(x)
    assert {plan.backend for plan in plans} == {"kernels"}
    plans.clear()
    with torch.autograd.forward_ad.dual_level():
        planned(torch.autograd.forward_ad.make_dual(x, x))
    torch.func.jvp(planned, (x,), (x,))
    torch.func.jvp(torch.func.vmap(planned), (x[None],), (x[None],))
    torch.func.jvp(torch.func.grad(lambda y: planned(y).sum()), (x,), (x,))
    assert len(plans) == 4
    for plan in plans:
        assert plan.passed == (("kernels", "has no forward-mode derivatives, and the arrays carry tangents"),)


def test_tangents_of_jax_do_so_too():
    jax = pytest.importorskip("jax")
    linattn.register_backend(named("kernels", frameworks=("jax",), forward_mode=False))
    x = jax.numpy.ones((1, 8, 2, 16))

    def planned(y):
        plans.append(linattn.explain("chunk_gla", x, y, x, x, backend=["kernels", "jax"]))
        return (y * y).sum()

    plans = []
    jax.vmap(jax.grad(planned))(x[None])
    jax.jit(planned)(x)
    assert [plan.backend for plan in plans] == ["kernels"] * 2
    plans.clear()
    jax.jvp(planned, (x,), (x,))
    jax.jvp(jax.grad(planned), (x,), (x,))
    jax.grad(lambda y: jax.jvp(jax.vmap(planned), (y,), (y,))[1].sum())(x[None])
    assert [plan.backend for plan in plans] == ["jax"] * 3
    assert plans[0].passed == (("kernels", "has no forward-mode derivatives, and the arrays carry tangents"),)


def test_an_exception_in_a_kernel_is_raised_and_nothing_else_is_tried(call):
    def broken(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        raise ZeroDivisionError("in the kernel")

    linattn.register_backend(named("broken", chunk_gla=broken))
    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        linattn.chunk_gla(*call, backend=["broken", "auto"])


def test_plans_are_made_once_for_each_distinct_call(call, make):
    linattn.register_backend(Recorder)
    backend = registry.loaded["recorder"]
    for _ in range(3):
        linattn.chunk_gla(*call, backend="recorder")
    assert len(backend.calls) == 1
    other = [make(1, 9, 2, 16) for _ in call]
    linattn.chunk_gla(*other, backend="recorder")
    linattn.chunk_gla(*call, backend=["recorder"])
    linattn.chunk_gla(*call, backend=("recorder",))
    linattn.chunk_gla(*call, backend="recorder", output_final_state=True)
    assert [c.T for c in backend.calls] == [8, 9, 8, 8]


def test_registering_makes_plans_anew(call, monkeypatch):
    monkeypatch.setattr(registry, "_built_in", ())
    linattn.register_backend(Recorder)
    assert chosen(call) == "recorder"
    linattn.register_backend(named("earlier"))
    assert chosen(call) == "earlier"
    linattn.unregister_backend("earlier")
    assert chosen(call) == "recorder"


def test_supports_sees_facts_only(make):
    linattn.register_backend(Recorder)
    x, v = make(1, 8, 2, 16, dtype="float16"), make(1, 8, 4, 24, dtype="float16")
    offsets = make(3, dtype="int64") * 0
    offsets[1:] = 8
    linattn.chunk_gla(
        x, x, v, -abs(make(1, 8, 4, 16)), initial_state=make(2, 4, 16, 24), cu_seqlens=offsets, backend="recorder"
    )
    call = registry.loaded["recorder"].calls[-1]
    assert (call.op, call.form, call.method, call.dtype) == ("gla", "chunk", "chunk_gla", "float16")
    assert call.sizes == {"B": 1, "T": 8, "H": 2, "K": 16, "N": 2, "HV": 4, "V": 24}
    assert call.shapes["g"] == "B T HV K"
    assert call.dtypes["initial_state"] == "float32"
    assert call.varlen
    assert call.has("initial_state")
    assert not call.has("gv")
    assert call.option("output_final_state") is False
    assert call.option("no_such_option", 7) == 7


def raising(error):
    def method(self, call):
        raise error

    return method


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("dt"), "KeyError: 'dt'"),
        (Unsupported("K is too large"), "Unsupported: K is too large: it is returned, not raised"),
        (type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})(), "Odd (its text cannot be had: ZeroDivisionError)"),
    ],
)
def test_a_supports_that_raises_is_named(call, error, text):
    linattn.register_backend(named("odd", supports=raising(error)))
    with pytest.raises(errors.BackendError) as caught:
        linattn.chunk_gla(*call, backend=["odd", "numpy"])
    assert str(caught.value) == f"backend 'odd': supports raised {text}"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("details", "text"),
    [(raising(KeyError("dt")), "details raised KeyError: 'dt'"), (lambda self, call: 3, "details gave no text but int")],
)
def test_details_fail_no_call(call, details, text):
    linattn.register_backend(named("odd", details=details))
    linattn.chunk_gla(*call, backend="odd")
    assert linattn.explain("chunk_gla", *call, backend="odd").details == text


def test_a_supports_that_answers_nonsense_is_an_error(call):
    linattn.register_backend(named("odd", supports=lambda self, call: False))
    with pytest.raises(errors.BackendError, match=r"^Odd\.supports must return None or Unsupported, got False$"):
        linattn.chunk_gla(*call, backend="odd")


def test_threads_do_not_see_each_other_s_preference(call):
    linattn.register_backend(Recorder)
    found = []
    with linattn.use_backend("recorder"):
        thread = threading.Thread(target=lambda: found.append(chosen(call)))
        thread.start()
        thread.join()
        found.append(chosen(call))
    assert found == [chosen(call), "recorder"]


def test_asyncio_tasks_do_not_see_each_other_s_preference(call):
    linattn.register_backend(Recorder)
    linattn.register_backend(Other)

    async def task(name: str, order: list[str]) -> str | None:
        with linattn.use_backend(name):
            order.append(name)
            await asyncio.sleep(0)  # the other task enters its own block here
            return chosen(call)

    async def both() -> list[str | None]:
        order: list[str] = []
        return await asyncio.gather(task("recorder", order), task("other", order))

    assert asyncio.run(both()) == ["recorder", "other"]


def test_explain_prints_the_decision(make):
    linattn.register_backend(Recorder)
    x = make(2, 8, 2, 16)
    framework = "numpy" if isinstance(x, np.ndarray) else "torch"
    wide = make(2, 8, 2, 65)
    text = str(linattn.explain("chunk_simple_gla", wide, wide, x, x[..., 0], backend=["recorder", "auto"], scale=1.0))
    assert text.startswith(
        f"chunk_simple_gla on {framework} cpu float32 B=2 T=8 H=2 K=65 N=2 HV=2 V=16 scale=1.0\n"
        "  asked for    recorder, auto (argument)\n"
        f"  runs         {framework}.chunk_simple_gla\n"
        "  passed over  recorder: has no chunk_simple_gla; K must be at most 64, got 65"
    )
    text = str(linattn.explain("simple_gla", x, x, x, x[..., 0], backend="recorder"))
    assert text.splitlines()[2] == "  runs         recorder.chunk_gla (lowered: simple_gla → gla)"


def test_a_backend_may_say_how_it_will_run_a_call(make):
    class Talker(Recorder):
        def details(self, call):
            return f"the {call.op} way"

    linattn.register_backend(Talker)
    x = make(2, 8, 2, 16)
    plan = linattn.explain("simple_gla", x, x, x, x[..., 0], backend="recorder")
    assert plan.details == "the gla way"
    assert str(plan).splitlines()[2] == "  runs         recorder.chunk_gla (lowered: simple_gla → gla): the gla way"


def test_explain_runs_nothing(call):
    linattn.register_backend(Recorder)
    linattn.explain("chunk_gla", *call, backend="recorder")
    assert registry.loaded["recorder"].seen == {}


def test_no_backend_for_a_framework(call, monkeypatch):
    monkeypatch.setattr(registry, "_built_in", ())
    framework = "numpy" if isinstance(call[0], np.ndarray) else "torch"
    known = ", ".join(sorted(registry.records))
    with pytest.raises(Unsupported) as caught:
        linattn.chunk_gla(*call)
    assert str(caught.value) == f"no backend takes {framework} arrays: installed are {known}"


def test_a_call_tells_kinds(make):
    linattn.register_backend(named("zzz", supports=lambda self, call: Unsupported("nothing")))
    x, per_token, per_head = make(1, 8, 2, 16), make(1, 8, 2), make(2)
    plan = linattn.explain("chunk_simple_gla", x, x, x, per_token).call
    assert (plan.decay, plan.beta, plan.state, plan.varlen, plan.ranks["g"]) == ("scalar", "none", "none", False, 3)
    assert linattn.explain("chunk_simple_gla", x, x, x, per_head).call.decay == "fixed"
    assert linattn.explain("chunk_gla", x, x, x, x).call.decay == "vector"
    assert linattn.explain("chunk_linear_attn", x, x, x).call.decay == "none"
    assert linattn.explain("chunk_delta_rule", x, x, x, per_token).call.beta == "scalar"
    assert linattn.explain("chunk_delta_rule", x, x, x, x).call.beta == "vector"
    state = make(1, 2, 16, 16)
    assert linattn.explain("chunk_linear_attn", x, x, x, initial_state=state).call.state == "initial"
    assert linattn.explain("chunk_linear_attn", x, x, x, output_final_state=True).call.state == "final"
    assert linattn.explain("chunk_linear_attn", x, x, x, initial_state=state, output_final_state=True).call.state == "both"
    assert linattn.explain("decode_linear_attn", x, x, x, state=state).call.state == "pool"
    assert linattn.explain("chunk_linear_attn", x, x, x, scale=0.5).call.option("scale") == 0.5
