"""The suite as a pytest plug-in: ``pytest --pyargs linattn_conformance --linattn-backend acme``, one item a case.

The verdict is derived from the report, as everywhere; it becomes pytest's exit status, because a case that was not run
would not make pytest fail. Light to import: pytest loads it in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from .cases import Case
    from .runner import Result

STATE = "linattn_conformance_state"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, all beginning with ``--linattn-``."""
    group = parser.getgroup("linattn", "linattn conformance")
    group.addoption("--linattn-backend", help="name of the backend, or module:Class")
    group.addoption("--linattn-device", default="cpu", help="device of the arrays")
    group.addoption("--linattn-framework", help="one of the backend's frameworks")
    group.addoption("--linattn-profile", default="full", help="core, inference, training or full")
    group.addoption("--linattn-report", help="write the report here, as JSON")
    group.addoption("--linattn-seed", type=int, default=0, help="seed of the fresh cases; drawn unless given")
    group.addoption("--linattn-case", action="append", help="only ids that match; no verdict then")
    group.addoption("--linattn-known-failures", help="TOML or JSON list of known failures")
    group.addoption("--linattn-time-limit", type=float, default=300.0, help="seconds for one case")


class State:
    """What the items of one session share."""

    def __init__(self, config: pytest.Config) -> None:
        from pathlib import Path

        from . import cli, known_failures, manifest
        from .options import check_number, check_writable
        from .pool import Pool
        from .worker import Setting

        option = config.getoption
        self.profile, self.patterns, self.path = (
            option("--linattn-profile"),
            option("--linattn-case"),
            option("--linattn-report"),
        )
        check_number("--linattn-time-limit", option("--linattn-time-limit"), positive=True)
        if self.path:
            check_writable("--linattn-report", Path(self.path))
        known = option("--linattn-known-failures")
        self.known = known_failures.load(Path(known)) if known else []
        self.manifest = manifest.load()
        setting = Setting(option("--linattn-backend"), option("--linattn-framework"), option("--linattn-device"))
        self.pool = Pool(setting, time_limit=option("--linattn-time-limit")).__enter__()
        try:
            seed = option("--linattn-seed")  # 0 for one that is drawn, where there are no patterns
            self.cases = cli.selected(
                self.pool.subject, self.manifest, self.profile, self.patterns, cli.drawn(self.profile, self.patterns, seed)
            )
        except BaseException:
            self.pool.close()
            raise
        self.results: list[Result] = []

    def run_one(self, case: Case) -> Result:
        """Run one case."""
        (result,) = self.pool.run([case])
        self.results.append(result)
        return result

    def is_known(self, name: str) -> bool:
        """True if a failure of this case is known."""
        from fnmatch import fnmatchcase

        return any(fnmatchcase(name, entry.pattern) for entry in self.known)

    def judge(self) -> Any:
        """Apply the known failures, write the report, return the verdict. A case that pytest left out was not run."""
        import datetime
        from pathlib import Path

        from . import known_failures, report, verdict
        from .runner import Result

        ran = {result.id for result in self.results}
        left = [Result(case.id, "not-run", message="pytest did not run it") for case in self.cases if case.id not in ran]
        results, complaints = known_failures.apply([*self.results, *left], self.known, datetime.date.today())
        seconds = sum(result.seconds for result in results)
        made = report.make(
            self.pool.subject, self.manifest, self.profile, results, [*self.pool.complaints, *complaints], seconds
        )
        judged = verdict.verdict(made, self.manifest)
        if self.path:
            report.write(Path(self.path), made, judged)
        return judged


def state_of(config: pytest.Config) -> Any:
    """The session's state, made on first use; None without ``--linattn-backend``."""
    if not config.getoption("--linattn-backend"):
        return None
    if not hasattr(config, STATE):
        setattr(config, STATE, _new_state(config))
    return getattr(config, STATE)


def _new_state(config: pytest.Config) -> State:
    """Wrong options are a usage error, not a traceback."""
    import pytest
    from linattn.errors import LinattnError

    from .pool import PoolError

    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        raise pytest.UsageError("a verdict needs all results in one process: leave out -n, or use linattn conformance -n")
    try:
        return State(config)
    except (PoolError, LinattnError, ValueError, OSError) as error:
        raise pytest.UsageError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    """Find out now whether the options are wrong."""
    state_of(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that ran the cases."""
    state = getattr(config, STATE, None)
    if state is not None:
        state.pool.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item a case."""
    if "linattn_case" in metafunc.fixturenames:
        state = state_of(metafunc.config)
        cases = state.cases if state else []
        metafunc.parametrize("linattn_case", cases, ids=[case.id for case in cases])


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Say the verdict."""
    judged = getattr(config, "linattn_verdict", None)
    if judged is not None:
        terminalreporter.section(f"linattn verdict: {judged}")
        for problem in judged.problems[:20]:
            terminalreporter.line(problem)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """The verdict decides the exit status."""
    state = getattr(session.config, STATE, None)
    if state is None or session.config.option.collectonly or state.patterns:
        return
    session.config.linattn_verdict = judged = state.judge()  # type: ignore[attr-defined]
    session.exitstatus = 0 if judged.conformant else 1
