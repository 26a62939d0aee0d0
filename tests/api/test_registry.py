"""Plug-ins as users install them: distributions with entry points, good and bad."""

from __future__ import annotations

import warnings

import linattn
import numpy as np
import pytest
from backends_for_tests import GOOD, Recorder, named
from linattn import errors
from linattn.plugin import API_VERSION, Backend
from linattn.registry import registry


@pytest.fixture
def call():
    x = np.ones((1, 4, 1, 8), np.float32)
    return (x, x, x, -x)


def test_an_installed_plug_in_is_found_and_runs(install, call):
    install("acme")
    assert linattn.explain("chunk_gla", *call, backend="acme").backend == "acme"
    assert registry.record("acme").origin == "acme 1.2"
    assert not registry.record("acme").built_in


def test_installing_a_package_never_changes_a_call_that_worked(install, call):
    before = linattn.explain("chunk_gla", *call)
    install("aaa")
    assert linattn.explain("chunk_gla", *call) == before
    assert before.backend == "numpy"


def test_a_plug_in_that_fails_to_import_is_reported_once_and_breaks_nothing(install, call):
    install("acme", source="raise OSError('libacme.so: not found')")
    message = "backend 'acme' of acme 1.2 failed to load: OSError: libacme.so: not found"
    with pytest.warns(RuntimeWarning, match=f"^linattn: {message}$"):
        plan = linattn.explain("chunk_gla", *call, backend=["acme", "numpy"])
    assert (plan.backend, plan.passed) == ("numpy", (("acme", message),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert linattn.explain("chunk_simple_gla", *call[:3], call[3][..., 0], backend=["acme", "numpy"]).backend == "numpy"
        with pytest.raises(errors.BackendLoadError) as caught:
            linattn.chunk_gla(*call, backend="acme")
    assert str(caught.value) == message
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("name", ["jax", "jax_triton", "pallas"])
def test_a_built_in_backend_without_its_framework_says_what_to_install(name, call, monkeypatch):
    import sys

    for module in [module for module in sys.modules if module.startswith(f"linattn_backends.{name}")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "jax", None)
    registry.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.BackendLoadError) as caught:
            linattn.chunk_gla(*call, backend=name)
    assert str(caught.value) == f"needs the package jax: pip install 'linattn[{name}]'"


def test_a_plug_in_that_exits_on_import_breaks_nothing(install, call):
    install("acme", source="raise SystemExit(3)")
    with pytest.warns(RuntimeWarning, match="SystemExit: 3"):
        assert linattn.explain("chunk_gla", *call, backend=["acme", "numpy"]).backend == "numpy"


def test_a_plug_in_that_panics_on_import_breaks_nothing(install, call):
    install("acme", source="raise type('PanicException', (BaseException,), {{}})('in Rust')")
    with pytest.warns(RuntimeWarning, match="PanicException: in Rust"):
        assert linattn.explain("chunk_gla", *call, backend=["acme", "numpy"]).backend == "numpy"


def test_a_plug_in_that_asserts_on_import_is_its_own_problem(install, call):
    install("acme", source="assert False, 'no licence'")
    with pytest.warns(RuntimeWarning, match="AssertionError: no licence"):
        assert linattn.explain("chunk_gla", *call, backend=["acme", "numpy"]).backend == "numpy"


def test_two_distributions_with_one_name(install, call):
    install("acme-one", name="acme")
    install("other")
    install("acme-two", name="acme")
    with pytest.raises(errors.BackendConflict) as caught:
        linattn.chunk_gla(*call, backend="acme")
    assert str(caught.value) == (
        "backend 'acme' is claimed by acme-one 1.2 and acme-two 1.2: uninstall one of them, or register the one you want "
        "with linattn.register_backend(..., replace=True)"
    )
    assert linattn.explain("chunk_gla", *call, backend="other").backend == "other"
    linattn.register_backend(named("acme"), replace=True)
    assert linattn.explain("chunk_gla", *call, backend="acme").backend == "acme"


def test_a_package_that_claims_a_built_in_name_changes_no_call(install, call):
    before = linattn.explain("chunk_gla", *call)
    install("acme", name="numpy", source="raise AssertionError('imported')")
    assert linattn.explain("chunk_gla", *call) == before
    linattn.chunk_gla(*call)
    linattn.chunk_gla(*call, backend="numpy")
    record = registry.record("numpy")
    assert (record.origin, record.passed_over) == (f"linattn {API_VERSION}", "acme 1.2")


def test_where_warnings_are_errors_a_broken_plug_in_breaks_no_call(install, call, capsys):
    install("acme", source="raise OSError('libacme.so: not found')")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert linattn.explain("chunk_gla", *call, backend=["acme", "numpy"]).backend == "numpy"
    assert capsys.readouterr().err == "linattn: backend 'acme' of acme 1.2 failed to load: OSError: libacme.so: not found\n"


def test_a_plug_in_whose_attributes_raise_is_its_own_problem(install, call):
    install("acme", source=GOOD.replace('frameworks = ("numpy",)', "frameworks = property(lambda self: 1 / 0)"))
    with pytest.warns(RuntimeWarning, match="acme 1.2 failed to load: ZeroDivisionError: division by zero"):
        assert linattn.explain("chunk_gla", *call, backend=["acme", "numpy"]).backend == "numpy"


def test_another_api_major_is_refused_before_its_import(install, call):
    install("acme", source="raise AssertionError('imported')", requires="linattn>=2,<3")
    with pytest.raises(errors.BackendVersionError) as caught:
        linattn.chunk_gla(*call, backend="acme")
    assert str(caught.value) == (
        f"backend 'acme' of acme 1.2 requires linattn <3,>=2, and this is API {API_VERSION}: it was not imported; "
        "install a version of it built for this API"
    )


def test_a_requirement_is_found_however_it_is_spelled(install, call):
    install("acme", source="raise AssertionError('imported')", requires="LinAttn>=2,<3")
    with pytest.raises(errors.BackendVersionError, match="it was not imported"):
        linattn.chunk_gla(*call, backend="acme")


def test_a_requirement_that_admits_this_api_or_does_not_apply(install, call):
    install("acme", requires="linattn>=1,<2")
    assert linattn.explain("chunk_gla", *call, backend="acme").backend == "acme"
    install("extra", requires='linattn>=9; extra == "test"')
    assert linattn.explain("chunk_gla", *call, backend="extra").backend == "extra"


def test_the_class_s_own_specifier_is_checked_too(install, call):
    install("acme", api=">=2")
    with pytest.raises(errors.BackendVersionError) as caught:
        linattn.chunk_gla(*call, backend="acme")
    assert str(caught.value) == f"backend 'acme' is for plug-in API >=2, and this is API {API_VERSION}"


def test_an_entry_point_whose_backend_has_another_name(install, call):
    install("acme", source=GOOD.replace("{name}", "zebra"))
    with pytest.raises(errors.BackendContractError) as caught:
        linattn.chunk_gla(*call, backend="acme")
    assert str(caught.value) == ("entry point 'acme' of acme 1.2 gives a backend named 'zebra': expected the same name")


def test_a_signature_that_differs_is_shown_beside_the_spec():
    def chunk_gla(self, q, k, v, g, *, scale=None, initial_state=None, output_final_state=False, head_first=False):
        raise AssertionError

    with pytest.raises(errors.BackendContractError) as caught:
        linattn.register_backend(named("acme", chunk_gla=chunk_gla))
    assert str(caught.value) == (
        "Acme.chunk_gla does not match the spec\n"
        "  expected: (self, q, k, v, g, gv=None, *, qk_norm, gate, scale, normalize, initial_state, output_final_state, "
        "cu_seqlens, chunk_size)\n"
        "  found:    (self, q, k, v, g, *, scale=None, initial_state=None, output_final_state=False, head_first=False)"
    )


CONTRACT = [
    (type("A", (Backend,), {}), "A must define name"),
    (type("A", (Backend,), {"name": "a"}), "A must define api"),
    (type("A", (Backend,), {"name": "a", "api": ">=1"}), "A must define frameworks"),
    (named("Upper"), "Upper.name must be lower case letters, digits, '_' and '-', and not 'auto', got 'Upper'"),
    (named("auto"), "Auto.name must be lower case letters, digits, '_' and '-', and not 'auto', got 'auto'"),
    (named("a", frameworks="torch"), "A.frameworks must be a tuple of names among numpy, torch, jax, mlx, got 'torch'"),
    (named("a", frameworks=()), "A.frameworks must be a tuple of names among numpy, torch, jax, mlx, got ()"),
    (
        named("a", frameworks=("pytorch",)),
        "A.frameworks must be a tuple of names among numpy, torch, jax, mlx, got ('pytorch',)",
    ),
    (named("a", chunk_kda=3), "A.chunk_kda must be a method with a signature: 3 is not a callable object"),
    (named("a", api="1.x"), "A.api must be a version specifier such as '>=1,<2', got '1.x'"),
    (named("a", api=1), "A.api must be a version specifier such as '>=1,<2', got 1"),
    (named("a", chunk_gal=lambda self: None), "A.chunk_gal is no operator of API 1.0.0, did you mean chunk_gla?"),
    (
        type("A", (Backend,), {"name": "a", "api": ">=1", "frameworks": ("numpy",)}),
        "A defines no operator: it needs at least one method such as chunk_gla",
    ),
    (object, "expected an instance of linattn.plugin.Backend, got object"),
]


@pytest.mark.parametrize(("backend", "message"), CONTRACT)
def test_a_class_that_breaks_the_contract(backend, message):
    with pytest.raises(errors.BackendContractError) as caught:
        linattn.register_backend(backend)
    assert str(caught.value) == message


def test_registering_a_taken_name():
    with pytest.raises(errors.BackendConflict) as caught:
        linattn.register_backend(named("numpy"))
    assert str(caught.value) == (
        f"backend 'numpy' is already provided by linattn {API_VERSION}; pass replace=True to replace it"
    )
    linattn.register_backend(Recorder())
    with pytest.raises(errors.BackendConflict, match="already provided by register_backend"):
        linattn.register_backend(Recorder())


def test_replacing_and_restoring_a_built_in(call):
    linattn.register_backend(named("numpy"), replace=True)
    assert float(linattn.chunk_gla(*call)[0][0, 0, 0, 0]) == 5.0
    linattn.unregister_backend("numpy")
    assert float(linattn.chunk_gla(*call)[0][0, 0, 0, 0]) != 5.0


def test_unregistering():
    with pytest.raises(errors.UnknownBackend):
        linattn.unregister_backend("recorder")
    with pytest.raises(errors.BackendError) as caught:
        linattn.unregister_backend("numpy")
    assert str(caught.value) == (
        f"backend 'numpy' is provided by linattn {API_VERSION}, not by register_backend: uninstall it instead"
    )


def test_threads_that_discover_at_once_lose_no_registration(monkeypatch):
    import threading
    import time

    from linattn import registry as module

    discover = module._discover

    def slowly():
        found = discover()
        time.sleep(0.05)
        return found

    monkeypatch.setattr(module, "_discover", slowly)
    registry.refresh()
    threads = [threading.Thread(target=linattn.register_backend, args=(named(f"acme{i}"),)) for i in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert {f"acme{i}" for i in range(4)} <= set(registry.records)


def test_calls_go_on_while_other_threads_change_the_registry(call):
    import threading

    failures, over = [], threading.Event()

    def calling():
        while not over.is_set():
            try:
                assert linattn.explain("chunk_gla", *call).backend == "numpy"
                linattn.chunk_gla(*call)
            except Exception as error:
                failures.append(error)

    def changing(i):
        for _ in range(60):
            linattn.register_backend(named(f"acme{i}"))
            registry.touch()
            linattn.unregister_backend(f"acme{i}")

    callers = [threading.Thread(target=calling) for _ in range(2)]
    changers = [threading.Thread(target=changing, args=(i,)) for i in range(3)]
    before = registry.generation
    for thread in (*callers, *changers):
        thread.start()
    for thread in changers:
        thread.join()
    over.set()
    for thread in callers:
        thread.join()
    assert failures == []
    assert registry.generation == before + 3 * 60 * 3


ORDER = {
    "torch": ["triton", "torch", "fla", "flash_qla"],
    "jax": ["pallas", "jax_triton", "jax", "jla"],
    "mlx": ["mlx", "mlx_fast", "mlx_lm"],
    "numpy": ["numpy"],
}


@pytest.mark.parametrize("framework", ORDER)
def test_the_order_in_which_auto_tries_the_built_in_backends(framework):
    assert list(registry.order(framework)) == ORDER[framework]
    linattn.register_backend(named("aaa"))
    assert list(registry.order(framework)) == [*ORDER[framework], "aaa"]


def test_a_built_in_backend_that_is_replaced_keeps_its_place():
    linattn.register_backend(named("triton", frameworks=("torch",)), replace=True)
    assert list(registry.order("torch")) == ORDER["torch"]


def test_looking_at_the_built_in_backends_imports_no_framework():
    import subprocess
    import sys

    code = "import sys; from linattn.registry import registry; print(len(registry.built_in), *sys.modules)"
    count, *modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(count) == sum(map(len, ORDER.values()))
    assert not {"torch", "jax", "mlx", "triton"}.intersection(modules)


def test_what_a_built_in_backend_is_said_to_be_is_what_it_is():
    for kind in registry.built_in:
        try:
            made = registry.load(kind.name)
        except errors.BackendError:
            continue
        assert isinstance(made, kind)
        assert (made.name, made.frameworks, made.forward_mode) == (kind.name, kind.frameworks, kind.forward_mode)


def test_making_a_backend_whose_methods_are_elsewhere_makes_those():
    class Facts(Backend):
        name = "recorder"
        api = ">=1,<2"
        frameworks = ("numpy",)
        implementation = "backends_for_tests:Recorder"

    assert type(Facts()) is Recorder
    linattn.register_backend(Facts)
    assert type(registry.load("recorder")) is Recorder
