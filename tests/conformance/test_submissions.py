"""The vendor's road behind a run: submissions and their page, lists of what must pass, versions that are frozen."""

import hashlib

import pytest
import report_cases
import typer
from linattn_conformance import commands, frozen, manifest, must_pass, packed, report
from linattn_conformance.verdict import PROFILES, verdict
from typer.testing import CliRunner

ABOUT = """vendor = "Acme"
product = "acme-linattn 2.1"
link = "https://example.com/acme"
contact = "acme@example.com"
profile = "core"
"""


@pytest.fixture
def submission(tmp_path):
    """Writes a submission; keywords change its report before its verdict is made."""

    def write(name="acme", about=ABOUT, log="all was well\n", **changes):
        folder = tmp_path / "submissions" / name
        folder.mkdir(parents=True)
        digest = hashlib.sha256(log.encode()).hexdigest()
        run = report.Circumstances(log=digest)
        made = report.make(report_cases.SUBJECT, report_cases.HELD, "core", report_cases.passing(), (), 60.0, {}, run) | changes
        packed.write(folder / "report.json.gz", report.text(report.whole(made, verdict(made, report_cases.HELD))))
        (folder / "log.txt").write_text(log)
        (folder / "submission.toml").write_text(about)
        return folder

    return write


def checked(*words):
    app = typer.Typer()
    app.command()(commands.check_submission)
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_submission_is_accepted_and_stands_on_the_page(submission, tmp_path):
    folder = submission()
    done = checked(tmp_path / "submissions", "-o", tmp_path / "page.md")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, f"accepted  {folder}: acme-linattn 2.1, core")
    page = (tmp_path / "page.md").read_text()
    assert "| [acme-linattn 2.1](https://example.com/acme) | Acme | numpy on cpu | core | " in page
    assert "| `chunk_gla` | " in page


@pytest.mark.parametrize(
    ("changes", "against"),
    [
        ({"about": ABOUT.replace("core", "full")}, "it claims full, and its report is of core"),
        ({"about": ABOUT.replace("2.1", "3.0")}, "it is of acme-linattn 3.0, and its report is of acme-linattn 2.1"),
        ({"complaints": ["the process died"]}, "its results give: not conformant: core ("),
        ({"selection": ["gla/*"]}, "its results give: no verdict: a selection of cases"),
        ({"log_": "another\n"}, "log.txt is not what the run printed: its digest is another than the report's"),
        ({"digests": {"linattn_backends": "0", "linattn_conformance": "0"}}, "linattn_conformance was another one than that"),
        ({"tighten": 0.5}, "its bounds were tightened: a submission has those of the suite"),
    ],
)
def test_what_is_not_accepted(changes, against, submission):
    log = changes.pop("log_", None)
    folder = submission(**changes)
    if log:
        (folder / "log.txt").write_text(log)
    done = checked(folder)
    assert done.exit_code == 1
    assert any(line.startswith(f"  against  {against}") for line in done.stdout.splitlines()), done.stdout


def test_what_is_no_submission(submission, tmp_path):
    folder = submission(about='vendor = "Acme"')
    assert f"refused   {folder}/submission.toml: needs product, what users install" in checked(folder).stdout
    (folder / "log.txt").unlink()
    assert f"refused   {folder}: has no log.txt: a submission is" in checked(folder).stdout
    assert checked(tmp_path / "nothing").exit_code == 2


# -- lists of the suite ------------------------------------------------------------------------------------------------


def test_the_lists_of_what_must_pass_are_files_one_a_profile(tmp_path):
    held = manifest.load()
    written = must_pass.write(tmp_path, held)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [f"{held.suite}/{name}.txt" for name in PROFILES]
    ids = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in written}
    assert ids["full"] == sorted(held.entries)
    assert set(ids["core"]) < set(ids["inference"]) < set(ids["training"]) <= set(ids["full"])


def test_a_suite_that_is_released_does_not_change(monkeypatch):
    held = manifest.load()
    assert frozen.complaint(held) == ""
    monkeypatch.setattr(frozen, "versions", lambda: {held.suite: held.hash})
    assert frozen.complaint(held) == ""
    monkeypatch.setattr(frozen, "versions", lambda: {held.suite: "0" * 64})
    released = f"suite {held.suite} is released, and its manifest has the hash 000000000000…"
    assert frozen.complaint(held) == f"{released}, not {held.hash[:12]}…: raise SUITE_VERSION"
