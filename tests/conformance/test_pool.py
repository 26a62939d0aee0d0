"""What a backend does to its process is the failure of the case that it was at; the others have their results."""

import functools
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hanging import leap
from linattn.registry import registry
from linattn_conformance.adapters.torch import TorchAdapter
from linattn_conformance.broken import on_process
from linattn_conformance.cases import every_case, named
from linattn_conformance.memory import GIB
from linattn_conformance.pool import TIME_LIMIT, Pool, PoolError
from linattn_conformance.runner import Runner
from linattn_conformance.worker import Setting

BEFORE = "gla/chunk/fp32/state/T15-K24-V40-C16/forward"
HIT = "gla/chunk/fp32/state/T97-K24-V40/forward"
LONG = 1e6
"""A limit that no hanging reaches before a budget is over."""
AFTER = "gla/chunk/fp32/state/T16-K24-V40-C16/forward"


def cases(*ids):
    by_id = {case.id: case for case in every_case()}
    return [by_id[name] for name in ids]


def setting(kind):
    return Setting(f"{on_process.__name__}:{kind}")


STRIKER = """
import contextlib, gc, io, locale, os, random, signal, stat, sys, time, warnings
from pathlib import Path
import numpy as np
from linattn_conformance.broken import on_process

class Striker(on_process.OnProcess):
    name = "rogue"

    def strike(self):
        exec(Path(__file__).with_name("body").read_text(), {**globals(), "self": self})
"""


@pytest.fixture(scope="module", autouse=True)
def hangs(tmp_path_factory):
    """What a backend runs to hang; nobody waits until it is late."""
    with pytest.MonkeyPatch.context() as patch:
        yield leap(patch, tmp_path_factory.mktemp("hanging"))


@pytest.fixture(scope="module")
def striker(tmp_path_factory):
    """A pool for most of the tests, and the file that says what its backend does."""
    folder = tmp_path_factory.mktemp("striker")
    (folder / "striker.py").write_text(STRIKER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with Pool(Setting("striker:Striker")) as pool:
            yield pool, folder / "body"


@pytest.fixture
def struck(striker):
    """Has the backend of the pool strike in a way of its own, at ``HIT``: the results of cases by id."""
    pool, file = striker

    def run(body, *ids):
        file.write_text(body)
        pool.lost.clear()
        results = {result.id: result for result in pool.run(cases(*(ids or (BEFORE, HIT, AFTER))))}
        assert pool.complaints == []
        return results

    return run


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes a module with a backend ``Rogue`` and gives its setting."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source):
        (tmp_path / "rogue.py").write_text(source)
        return Setting("rogue:Rogue")

    return write


def striking(body, imports="", base="linattn_conformance.broken.on_process import OnProcess as Base", method="strike(self)"):
    """The source of a backend that does something of its own in one method."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"{imports}\nfrom {base}\nclass Rogue(Base):\n    name = 'rogue'\n    kept = []\n    def {method}:\n{lines}"


def asked(body):
    """The source of a backend that does something of its own when it is asked about ``HIT``: it is asked once a process."""
    base = "linattn_conformance.broken import Honest as Base"
    return striking(f"if call.T == 97:\n    {body}", base=base, method="supports(self, call)")


def results_of(setting, *ids, **limits):
    with Pool(setting, **limits) as pool:
        return {result.id: result for result in pool.run(cases(*ids))}


def run(kind, *ids, **limits):
    """Results by id, and what was complained of."""
    with Pool(setting(kind), **limits) as pool:
        return {result.id: result for result in pool.run(cases(*ids))}, pool.complaints


ONE_FAILS = {BEFORE: "passed", HIT: "failed", AFTER: "passed"}


def statuses(results):
    return {name: result.status for name, result in results.items()}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Crashes", r"the process was killed by SIGSEGV, in __init__.py:\d+ string_at"),
        ("EndsTheProcess", "the process ended with exit status 0"),
        ("Interrupts", "the process ended with exit status 1: KeyboardInterrupt"),
        ("Exits", "SystemExit: 3"),
        ("Prints", r"prints to standard output: '(autotuning chunk_gla \.\.\.\\n)+'"),
        ("PrintsNatively", r"prints to standard output: '(�\\x00 garbage\\n)+'"),
        ("ChangesErrorHandling", "changes the floating-point error handling of NumPy: divide: warn before, raise after"),
        ("DrawsFromGlobalState", "changes the random state of NumPy"),
    ],
)
def test_the_case_fails_and_the_others_go_on(kind, message, struck):
    results = struck(f"on_process.{kind}.strike(self)")
    assert statuses(results) == ONE_FAILS
    assert re.fullmatch(message, results[HIT].message), results[HIT].message


def test_a_case_that_hangs_fails_and_the_others_go_on(struck, hangs):
    results = struck(hangs)
    assert statuses(results) == ONE_FAILS
    assert results[HIT].message == f"no result after {TIME_LIMIT:g} s: the process was ended"


def test_a_case_that_grows_fails_and_the_others_go_on(struck, striker, monkeypatch):
    monkeypatch.setattr(striker[0], "memory_limit", 0.5 * GIB)
    results = struck("kept = np.ones(2**27)\ntime.sleep(600)")
    assert statuses(results) == ONE_FAILS
    assert results[HIT].message == "the process outgrew 0.5 GiB and was ended"


@pytest.mark.parametrize("written", [b"\x00\x00\x00\x04junk", b"\x00more to come than ever comes"], ids=["whole", "begun"])
def test_what_a_backend_writes_to_the_suite_is_its_failure(written, struck):
    """To every socket that it finds: that of the messages is one of them."""
    body = (
        "for there in range(3, 64):\n"
        "    with contextlib.suppress(OSError):\n"
        "        if stat.S_ISSOCK(os.fstat(there).st_mode):\n"
        f"            os.write(there, {written!r})\n"
    )
    results = struck(body)
    assert statuses(results) == ONE_FAILS
    assert results[HIT].message == "the process sent the suite what is no message: it was ended"


OF_THE_PROCESS = {
    "os.chdir('/')": "changes the working directory: .* before, / after",
    "os.environ['ACME'] = '1'": "changes the environment: ACME: None before, 1 after",
    "os.environ.pop('PATH', None)": "changes the environment: PATH(: .* before, None after)?",
    "locale.setlocale(locale.LC_ALL, 'C.UTF-8' if locale.setlocale(locale.LC_ALL) == 'C' else 'C')": "changes the locale.*",
    "with contextlib.suppress(ValueError): signal.signal(signal.SIGALRM, signal.SIG_IGN)": (
        "changes the handlers of signals: SIGALRM: .* before, .* after"
    ),
    "sys.stdout = io.StringIO()": "changes the standard streams",
    "sys.path.append('/acme')": "changes the import path",
    "warnings.simplefilter('error')": "changes the filters of warnings",
    "gc.disable()": "changes the garbage collection: True before, False after",
    "np.set_printoptions(precision=3)": "changes the print options of NumPy: precision: 8 before, 3 after",
    "random.seed(0)": "changes the random state of Python",
    "np.random.random()": "changes the random state of NumPy",
}


@pytest.mark.parametrize("statement", OF_THE_PROCESS)
def test_state_of_the_process_is_looked_at_and_put_back(statement, struck):
    """What one case changed is no failure of the next one."""
    results = struck(statement, HIT, AFTER, BEFORE)
    assert statuses(results) == ONE_FAILS
    assert re.fullmatch(OF_THE_PROCESS[statement], results[HIT].message), results[HIT].message


@pytest.mark.parametrize(
    ("framework", "statement", "message"),
    [
        ("torch", "torch.set_num_threads(1 + torch.get_num_threads())", r"number of threads: \d+ before, \d+ after"),
        ("torch", "torch.set_default_dtype(torch.float64)", "default dtype: torch.float32 before, torch.float64 after"),
        ("torch", "torch.set_autocast_enabled('cpu', True)", r"autocast: cpu: \(False, .*\) before, \(True, .*\) after"),
        ("torch", "torch.autograd.set_detect_anomaly(True)", "anomaly mode: False before, True after"),
        ("torch", "torch.backends.cudnn.benchmark = True", "settings of cuDNN: benchmark: False before, True after"),
        ("jax", "jax.config.update('jax_enable_x64', True)", "configuration of JAX: jax_enable_x64: False before, True after"),
        ("jax", "jax.config.update('jax_debug_nans', True)", "configuration of JAX: jax_debug_nans: False before, True after"),
        ("mlx.core", "mlx.random.seed(7)", r"random state of MLX(: \[.*\] before, \[.*\] after)?"),
    ],
)
def test_state_of_a_framework_is_looked_at_and_put_back(framework, statement, message, monkeypatch):
    module = pytest.importorskip(framework)
    name = framework.partition(".")[0]
    names = {name: module, "jax": module}
    kind = type(registry.load(name))

    class Changes(kind):
        name = "changes"

        @functools.wraps(kind.chunk_gla)
        def chunk_gla(self, *arrays, **keywords):
            exec(statement, names)
            return super().chunk_gla(*arrays, **keywords)

    registry.register(Changes(), replace=True)
    try:
        runner = Runner("changes")
        first, second = runner.run([next(case for case in cases(BEFORE))] * 2)
        assert (first.status, second.status) == ("failed", "failed")
        assert re.fullmatch(f"changes the {message}", first.message), first.message
        assert second.message == first.message
    finally:
        registry.unregister("changes")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('\\udcff\\x1b[2J gone\\nmore')", "RuntimeError: \\udcff\\x1b[2J gone\nmore"),
        ("raise RuntimeError('x' * 10**6)", f"RuntimeError: {'x' * (2000 - 14)}\n…\n{'x' * 2000}"),
        (
            "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})",
            "Mute: (its text cannot be had: ZeroDivisionError)",
        ),
    ],
    ids=["control", "long", "mute"],
)
def test_a_message_can_be_printed_whatever_the_backend_says(body, message, struck):
    result = struck(body, HIT)[HIT]
    assert result.message == message
    assert result.message.encode()


def test_a_leak_is_found():
    name = "gla/chunk/fp32/state/T17-K16-V256/leak"
    results, _ = run("Leaks", name)
    assert re.fullmatch(r"16 calls hold [\d.]+ MiB more each time, 3 times in a row", results[name].message)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("self.kept.append(open(__file__))", "16 calls hold 16 open files more each time, 3 times in a row"),
        (
            "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            r"16 calls hold ([\d.]+ MiB and )?16 threads more each time, 3 times in a row",
        ),
    ],
)
def test_files_and_threads_leak_too(statement, message, plugin):
    body = f"{statement}\nreturn super().forward(*arguments)"
    base = "linattn_conformance.broken import Honest as Base"
    name = "gla/chunk/fp32/state/T17-K16-V256/leak"
    result = results_of(plugin(striking(body, "import threading, time", base, "forward(self, *arguments)")), name)[name]
    assert re.fullmatch(message, result.message), result.message


def test_an_operator_that_goes_on_hanging_is_given_up(struck, hangs):
    hit = [case.id for case in every_case() if case.id.startswith("gla/chunk/fp32/state/T97") and case.check != "agree"]
    results = struck(hangs, *hit)
    assert {result.message for result in results.values()} == {
        f"no result after {TIME_LIMIT:g} s: the process was ended",
        "not tried: 2 processes were lost at other cases of chunk_gla",
    }
    assert [result.status for result in results.values()].count("failed") == 2


def test_what_has_no_result_when_the_time_is_over_is_not_run(hangs, plugin):
    """The case that hangs has not failed: nobody knows how long it would have taken."""
    with Pool(plugin(striking(hangs)), time_limit=LONG, budget=300) as pool:
        results = {result.id: result for result in pool.run(cases(BEFORE, HIT, AFTER))}
    assert statuses(results) == {BEFORE: "passed", HIT: "not-run", AFTER: "not-run"}
    assert {results[HIT].message, results[AFTER].message} == {"not tried: the 300 s of the run were over"}
    assert pool.complaints == []


def test_what_is_declared_unsupported_comes_first(plugin, hangs):
    """It takes no time, and a run that is cut short has it: here by a case that hangs."""
    packed = [case.id for case in every_case() if case.op == "gla" and "varlen" in case.flags and case.applies("numpy", "cpu")]
    supports = (
        "    def supports(self, call):\n        return Unsupported('takes no packed sequences') if call.varlen else None\n"
    )
    source = striking(hangs, "from linattn.plugin import Unsupported") + supports
    with Pool(plugin(source), time_limit=LONG, budget=300) as pool:
        results = list(pool.run(cases(HIT, BEFORE, *packed)))
    assert [result.id for result in results[: len(packed)]] == packed
    assert {result.status for result in results[: len(packed)]} == {"declared-unsupported"}
    assert {result.id: result.status for result in results[len(packed) :]} == {HIT: "not-run", BEFORE: "not-run"}


def test_a_run_that_has_no_time_at_all_has_a_result_for_each_case():
    results, _ = run("Hangs", HIT, BEFORE, budget=1e-9)
    assert {name: result.status for name, result in results.items()} == {HIT: "not-run", BEFORE: "not-run"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("print('hello')", r"prints to standard output: 'hello\\n'"),
        ("import random; random.random()", "changes the random state of Python"),
        (
            "raise RuntimeError('no licence')",
            "BackendError: backend 'rogue': supports raised RuntimeError: no licence\ncaused by RuntimeError: no licence",
        ),
        ("import os; os._exit(3)", "the process ended with exit status 3"),
    ],
)
def test_what_a_backend_does_when_it_is_asked_is_a_failure_of_the_case(body, message, plugin):
    results = results_of(plugin(asked(body)), BEFORE, HIT, AFTER)
    assert statuses(results) == ONE_FAILS
    assert re.fullmatch(message, results[HIT].message), results[HIT].message


def test_hanging_when_it_is_asked_is_a_failure_of_the_case(plugin, hangs):
    results = results_of(plugin(asked(hangs)), BEFORE, HIT, AFTER)
    assert statuses(results) == ONE_FAILS
    assert results[HIT].message == f"no result after {TIME_LIMIT:g} s: the process was ended"


def test_several_workers_share_the_cases():
    mine = [case for case in every_case() if case.id.startswith("gla/chunk/fp32/") and case.applies("numpy", "cpu")]
    ids = [HIT, *[case.id for case in mine if case.check == "forward" and case.size["T"] != 97][:40]]
    results, complaints = run("Crashes", *ids, workers=2)
    assert set(results) == set(ids)
    failed = {name for name, result in results.items() if result.status == "failed"}
    assert failed == {name for name in ids if "/T97-" in name}
    assert complaints == []


def test_workers_can_start_before_it_is_known_what_they_run():
    pool = Pool(Setting("linattn_conformance.broken.on_numpy:Honest"), 3)
    pool.start(4)
    with pool:
        assert len(pool.workers) == pool.born == 3
        results = list(pool.run(cases(BEFORE, HIT, AFTER)))
        assert pool.born == 3
    assert [result.status for result in results] == ["passed"] * 3


def test_cases_that_need_much_memory_run_alone_at_the_end():
    far, near = "gla/chunk/fp16/far-state/T33-K24-V40/forward", [HIT, BEFORE, AFTER]
    with Pool(Setting("linattn_conformance.broken.on_numpy:Honest"), 2) as pool:
        pool.subject = replace(pool.subject, memory=80.0)  # as on a device; on the host nobody keeps memory for later
        done = [(result.id, len(pool.workers)) for result in pool.run(cases(far, *near))]
    assert {name for name, _ in done[:3]} == set(near)
    assert done[3] == (far, 1)


@pytest.mark.parametrize(("device", "seen"), [("cpu", {"on-4", "on-7"}), ("cpu:0", {"on-4-7"})])
def test_workers_take_the_accelerators_in_turn(device, seen, tmp_path, monkeypatch):
    """Unless the device names one. The backend is named after what a framework would find when it is imported."""
    (tmp_path / "placed.py").write_text(
        "import os\n"
        "from linattn_conformance.broken.on_numpy import Honest\n"
        "class Placed(Honest):\n"
        "    name = 'on-' + os.environ['CUDA_VISIBLE_DEVICES'].replace(',', '-')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with Pool(Setting("placed:Placed", device=device)) as pool:
        second = pool._start()
        second.hear()
        assert {worker.subject.name for worker in pool.workers} == seen
        list(pool._lose(pool.workers[0], "died", "gone"))  # the next one is in its place
        pool._start().hear()
        assert {worker.subject.name for worker in pool.workers} == seen


def test_a_worker_ends_with_its_parent():
    with Pool(setting("Leaks")) as pool:
        pid = pool.workers[0].process.pid
        folder = pool.folder
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os; os._exit(7)", "backend 'rogue:Rogue' cannot be loaded: the process ended with exit status 7"),
        (
            "import os; os.write(2, b'starting\\nUnknown flag in XLA_FLAGS: --no\\n'); os._exit(1)",
            "cannot be loaded: the process ended with exit status 1; the last that it said: Unknown flag in XLA_FLAGS: --no",
        ),
        ("raise RuntimeError('no licence')", "backend 'rogue:Rogue' cannot be loaded: RuntimeError: no licence"),
        ("", "module 'rogue' has no attribute 'Rogue'"),
        (
            "from linattn_conformance.broken.on_numpy import SwallowsKeywords as Rogue",
            "SwallowsKeywords.chunk_gla must name the arguments that it takes, not collect them: "
            "(self, q, k, v, g, gv=None, *, scale=None, output_final_state=False, **ignored)",
        ),
    ],
)
def test_a_backend_that_cannot_be_loaded(source, message, plugin):
    with pytest.raises(PoolError, match=re.escape(message) + "$"), Pool(plugin(source)):
        pass


def test_a_backend_that_hangs_as_it_is_loaded(plugin):
    source = "import time; time.sleep(600)"
    with (
        pytest.raises(PoolError, match=r"backend 'rogue:Rogue' was not loaded after 0\.5 s"),
        Pool(plugin(source), time_limit=0.5),
    ):
        pass


def test_a_process_that_ends_between_cases_is_complained_of(tmp_path, monkeypatch):
    (tmp_path / "rogue.py").write_text(
        "import os, pathlib, threading, time\n"
        "from linattn_conformance.broken import Honest\n"
        "def end():\n"
        "    while not pathlib.Path(__file__).with_name('loaded').exists():\n"
        "        time.sleep(0.01)\n"
        "    os._exit(5)\n"
        "class Rogue(Honest):\n"
        "    name = 'rogue'\n"
        "    def __init__(self):\n"
        "        threading.Thread(target=end, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Pool(Setting("rogue:Rogue")) as pool:
        (tmp_path / "loaded").touch()
        pool.workers[0].process.join()
        (result,) = pool.run(cases(AFTER))
    assert result.status in ("passed", "not-run")
    assert pool.complaints[0] == "between two cases, the process ended with exit status 5"


def test_what_a_device_reports_late_is_of_the_case_that_did_it(tmp_path, monkeypatch):
    """And the process ends, for nothing that comes after it can be trusted."""
    (tmp_path / "late.py").write_text(
        "from linattn_conformance.adapters.numpy import NumpyAdapter\n"
        "from linattn_conformance.broken.on_process import OnProcess\n"
        "struck = []\n"
        "def wait(adapter):\n"
        "    if struck:\n"
        "        raise RuntimeError('an illegal memory access was encountered')\n"
        "NumpyAdapter.wait = wait\n"
        "class Late(OnProcess):\n"
        "    name = 'late'\n"
        "    def strike(self):\n"
        "        struck.append(True)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Pool(Setting("late:Late")) as pool:
        results = {result.id: result for result in pool.run(cases(BEFORE, HIT, AFTER))}
    assert {name: result.status for name, result in results.items()} == {BEFORE: "passed", HIT: "failed", AFTER: "passed"}
    complaint = "the process ended with exit status 1: RuntimeError: an illegal memory access was encountered"
    assert results[HIT].message == complaint
    assert pool.complaints == []


def test_a_graph_without_a_backward_is_compiled_where_the_backend_has_none(tmp_path, monkeypatch):
    (tmp_path / "forward.py").write_text(
        "from linattn.plugin import Unsupported\n"
        "from linattn_backends.torch import TorchBackend\n"
        "class Forward(TorchBackend):\n"
        "    name = 'forward'\n"
        "    def supports(self, call):\n"
        "        return Unsupported('has no backward') if call.needs_grad else super().supports(call)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with Pool(Setting("forward:Forward")) as pool:
        (result,) = pool.run(cases("gla/recurrent/fp32/state/T1-K16-V8/compile"))
    assert (result.status, result.message) == ("passed", "")


def test_a_lock_that_a_library_makes_on_import_leaves_nothing_behind(tmp_path):
    """The parent of a process that was killed would warn of it as it ends."""
    (tmp_path / "rogue.py").write_text(
        "import multiprocessing\nfrom linattn_conformance.broken import Honest as Rogue\nlock = multiprocessing.RLock()\n"
    )
    command = [sys.executable, "-m", "linattn_conformance", "--backend", "rogue:Rogue", "--case", AFTER]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("PatchesTheDistance", "nothing was compared: no result came for any comparison"),
        ("PatchesTheChecks", "nothing was compared: no result came for any comparison"),
        ("PatchesTheBounds", r"o is off by .* times its bound"),
    ],
)
def test_what_is_true_and_how_far_one_may_be_is_nowhere_that_a_backend_can_reach(kind, message):
    results, _ = run(kind, BEFORE, AFTER)
    for result in results.values():
        assert result.status == "failed"
        assert re.fullmatch(message, result.message), result.message


FALLS_BACK = """
from linattn.plugin import Backend
from linattn_backends.numpy import NumpyBackend

{before}

class Rogue(Backend):
    name, api, frameworks = "rogue", ">=1,<2", ("numpy",)

    def chunk_gla(self, q, k, v, g, gv=None, *, scale, initial_state, output_final_state, cu_seqlens, chunk_size):
        return {call}(q, k, v, g, gv, scale=scale, initial_state=initial_state, output_final_state=output_final_state)
"""


@pytest.mark.parametrize(
    ("before", "call"),
    [
        ("", "NumpyBackend().chunk_gla"),
        ("bound = NumpyBackend().chunk_gla", "bound"),
        ("plain = NumpyBackend.chunk_gla.__get__(NumpyBackend())", "plain"),
    ],
    ids=["called", "bound-before", "taken-before"],
)
def test_the_witness_sees_methods_that_were_bound_before_it_came(before, call):
    exec(FALLS_BACK.format(before=before, call=call), made := {})
    registry.register(made["Rogue"](), replace=True)
    try:
        (result,) = Runner("rogue").run(cases(BEFORE))
    finally:
        registry.unregister("rogue")
    assert result.message == "falls back: NumpyBackend.chunk_gla ran inside a call of backend 'rogue'"


def test_where_the_suite_has_no_truth_the_case_says_so():
    from linattn_conformance.judge import Judge
    from linattn_conformance.worker import answer

    judge = Judge("numpy", "cpu", 1.0)
    (case,) = cases(BEFORE)
    there, found = answer(judge, "truth", replace(case, op="none"))
    assert (there, found) == (False, "the suite has no truth for this case: KeyError: 'none'")


def forged(case, **changes):
    """The result of a case that passed by a claim, true of each output but for these ``changes`` of its sealed arrays."""
    from linattn_conformance.judge import Judge
    from linattn_conformance.runner import Result
    from linattn_conformance.sealed import Claim

    judge = Judge("numpy", "cpu", 1.0)
    judge.begin(case)
    judge.truth(case)
    truth = judge.truths[0].outputs["o"]
    sealed = judge.truth(case).outputs["o"]
    claim = Claim(truth.value, sealed.value, sealed.noise, sealed.dtype, name="o")
    judge.hear(replace(claim, **{name: change(getattr(claim, name)) for name, change in changes.items()}))
    return judge.end(Result(case.id, "passed"))


def test_what_was_foreseen_of_a_case_stays_however_much_the_case_before_asks_for():
    """A case of many widths has forty truths, and so may the one before it have."""
    from linattn_conformance.judge import Judge
    from linattn_conformance.sealed import Claim

    before, case = (named(f"gated_rms_norm/direct/fp32/{flags}/T6-D40-B2/forward") for flags in ("plain", "plain-seed.1"))
    judge = Judge("numpy", "cpu", 1.0)
    judge.begin(before)
    sealed = judge.truth(case).outputs["o"]
    value = judge.truths[0].outputs["o"].value
    for one in (before, case):
        for D in range(1, 41):
            judge.truth(replace(one, sizes=tuple({**one.size, "D": D}.items())))
        if one is before:
            judge.begin(case)
    judge.hear(Claim(value, sealed.value, sealed.noise, sealed.dtype, name="o"))
    assert judge.wrong == ""


def at(*place):
    """A sealed array of another place; the dots stand for what it has there."""
    return lambda x: replace(x, place=tuple(old if new is ... else new for old, new in zip(x.place, place, strict=True)))


FORGED = {
    "of no truth": (dict(value=at(7, ..., ..., ...), noise=at(7, ..., ..., ...)), "KeyError: 7"),
    "a bound of its own": (dict(noise=lambda x: np.full(x.shape, 1e30)), "ValueError: its bound is not that of the truth"),
    "the truth as its bound": (dict(noise=at(..., ..., ..., "value")), "ValueError: its bound is not that of the truth"),
    "a larger bound": (dict(noise=lambda x: x * 1e9), "ValueError: its bound is not that of the truth"),
    "a larger bound of values": (
        dict(value=lambda x: np.zeros(x.shape), noise=lambda x: x * 1e9),
        "ValueError: its bound is not that of the truth",
    ),
    "the bound of a state": (dict(noise=at(..., ..., "final_state", ...)), "ValueError: its bound is that of another result"),
    "a bound as the value": (dict(value=at(..., ..., ..., "noise")), "ValueError: its bound is that of another result"),
    "a coarser dtype": (dict(dtype=lambda _: "float16"), "ValueError: its dtype is not that of the truth"),
}


@pytest.mark.parametrize("what", FORGED)
def test_what_no_check_claims_is_a_failure(what):
    changes, why = FORGED[what]
    case = named("gla/chunk/fp32/plain/T65-K24-V40/forward")
    assert forged(case).status == "passed"
    result = forged(case, **changes)
    assert (result.status, result.message) == ("failed", f"what is claimed cannot be judged: {why}")


def test_a_claim_of_another_case_is_none_of_this_one():
    from linattn_conformance.judge import Judge
    from linattn_conformance.runner import Result
    from linattn_conformance.sealed import Claim

    judge = Judge("numpy", "cpu", 1.0)
    case, other = named("gla/chunk/fp32/plain/T65-K24-V40/forward"), named("gla/chunk/fp32/plain/T0-K24-V40/forward")
    judge.begin(case)
    judge.truth(case)
    empty = judge.truth(other).outputs["o"]
    judge.hear(Claim(np.zeros(empty.value.shape), empty.value, empty.noise, empty.dtype, name="o"))
    result = judge.end(Result(case.id, "passed"))
    assert (result.status, result.message) == ("failed", "nothing was compared: no result came for o")


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_what_was_given_back_does_not_count_as_in_use(struck):
    """Where backends run. A thread of GNU's allocator keeps seven pieces of a size for itself, unless it is told not to."""
    body = (
        "import ctypes\n"
        "from linattn_conformance.memory import allocated\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "pieces = [libc.malloc(1000) for _ in range(7)]\n"
        "before = allocated()\n"
        "for piece in pieces:\n"
        "    libc.free(piece)\n"
        "raise RuntimeError(f'given back: {(before - allocated()) // 1000}')"
    )
    assert struck(body)[HIT].message == "RuntimeError: given back: 7"


def test_a_message_of_a_backend_runs_no_code_of_its_own(struck):
    body = (
        "import linattn_conformance.sealed as sealed, pickle\n"
        "class Code:\n"
        "    def __reduce__(self):\n"
        "        return print, ('taken',)\n"
        "sealed.pickle = type('Fake', (), dict(dumps=staticmethod(lambda *_, **__: pickle.dumps(Code()))))"
    )
    results = struck(body)
    assert statuses(results) == ONE_FAILS
    assert results[HIT].message == "the process sent the suite what is no message: it was ended"


def test_what_a_framework_keeps_of_a_gpu_goes_back_between_cases(monkeypatch):
    given = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: given.append(1))
    for reserved, device, expected in ((2**29, "cuda", 1), (2**20, "cuda", 0), (2**29, "cpu", 0)):
        given.clear()
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda _, reserved=reserved: reserved)
        TorchAdapter(device).give_back()
        assert len(given) == expected


def test_jax_is_asked_whether_its_device_still_takes_anything(monkeypatch):
    """JAX goes on after a kernel has faulted, and every call that follows fails."""
    jax = pytest.importorskip("jax")
    from linattn_conformance.adapters.jax import JaxAdapter

    def lost(x, place):
        raise RuntimeError(f"CUDA_ERROR_MISALIGNED_ADDRESS on {place.platform}")

    monkeypatch.setattr(jax, "device_put", lost)
    adapter = JaxAdapter("cpu")
    adapter.wait()
    adapter.place = SimpleNamespace(platform="gpu")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_MISALIGNED_ADDRESS on gpu"):
        adapter.wait()
