"""Reports: are they intact, what changed between two, and what the pages say."""

import copy
import gzip
import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import report_cases
import typer
from linattn_conformance import capabilities, commands, fresh, packed, provenance, reading, rendering, report, waivers
from linattn_conformance.cases import BACKWARD
from linattn_conformance.comparing import compare
from linattn_conformance.manifest import SUITE_VERSION
from linattn_conformance.reading import ReportError, read, verify
from linattn_conformance.verdict import told_by_no_case, verdict
from typer.testing import CliRunner

BROKEN = report_cases.make()
GOOD = report_cases.make(report_cases.passing())


def written(tmp_path, made, name="report.json"):
    path = tmp_path / name
    path.write_text(json.dumps(made), encoding="utf-8")
    return str(path)


def command(function, *arguments):
    app = typer.Typer()
    app.command()(function)
    return CliRunner().invoke(app, arguments)


def edited(change, made=GOOD):
    """A copy of a report, changed."""
    found = copy.deepcopy(made)
    change(found)
    return found


def with_new_hashes(made):
    """By somebody who knows how the hashes are made."""
    made["results_hash"] = report.results_hash(made["results"])
    made["hash"] = report.report_hash(made)
    return made


RUN = "{:,} of {:,} run".format(*GOOD["verdict"]["coverage"])


# -- verify-report ---------------------------------------------------------------------------------------------------


def test_intact_and_conformant(tmp_path):
    done = command(commands.verify_report, written(tmp_path, GOOD))
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        f"acme: numpy on cpu, {len(GOOD['results'])} results",
        f"intact; the verdict of its results is: conformant: core ({RUN})",
    ]


@pytest.mark.parametrize("made", [BROKEN, GOOD, report_cases.make([])], ids=["with problems", "without", "empty"])
def test_a_report_is_written_a_result_a_line(made):
    text = report.text(made)
    assert json.loads(text) == made
    lines = text.splitlines()
    assert sum(line.startswith('  {"id": ') for line in lines) == len(made["results"])
    assert len(lines) < len(made["results"]) + len(made["verdict"]["problems"]) + len(made["packages"]) + 250


def test_intact_and_not_conformant(tmp_path):
    done = command(commands.verify_report, written(tmp_path, BROKEN))
    assert done.exit_code == 1
    name = next(result["id"] for result in BROKEN["results"] if result["message"].startswith("o is off"))
    assert f"against  {name}: failed: o is off by 2.5 times its bound" in done.stdout
    assert done.stdout.splitlines()[-1] == f"intact; the verdict of its results is: not conformant: core ({RUN})"


def test_known_failures_are_no_conformance(tmp_path):
    found = report_cases.passing()
    found = [replace(result, status="known-failure", message="a cache") if result.id.endswith("/held") and result.status == "passed" else result for result in found]  # fmt: skip  # noqa: E501
    done = command(commands.verify_report, written(tmp_path, report_cases.make(found)))
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (
        1,
        f"intact; the verdict of its results is: conformant except known failures: core ({RUN})",
    )


def test_missing_cases_count_as_failed(tmp_path):
    found = report_cases.passing()
    gone = next(result.id for result in found if result.id.startswith("gla/chunk"))
    made = report_cases.make([result for result in found if result.id != gone])
    done = command(commands.verify_report, written(tmp_path, made))
    assert done.exit_code == 1
    assert f"against  {gone}: not-run" in done.stdout


def remove_failures(made):
    made["results"] = [result for result in made["results"] if result["status"] != "failed"]


def pass_everything(made):
    for result in made["results"]:
        if result["status"] == "failed":
            result.update(status="passed", message="")


def claim(made):
    made["verdict"]["outcome"] = "conformant"


def declared(made):
    return next(result for result in made["results"] if result["status"] == "declared-unsupported")


def first_passed(made):
    """A passed result of a case that the manifest holds: fresh ones are counted otherwise."""
    known = report_cases.HELD.entries
    return next(
        result for result in made["results"] if result["status"] == "passed" and result["error"] and result["id"] in known
    )


EDITS = {
    "a status": (pass_everything, BROKEN, "its results_hash does not belong to its results: they were edited"),
    "results gone": (remove_failures, BROKEN, "its results_hash does not belong to its results: they were edited"),
    "an error": (
        lambda made: first_passed(made).update(error=1e-6),
        GOOD,
        "its results_hash does not belong to its results: they were edited",
    ),
    "the device": (
        lambda made: made.update(device="cuda"),
        GOOD,
        "its hash does not belong to it: something other than the results was edited",
    ),
    "a version": (
        lambda made: made["backend"].update(version="3.0"),
        GOOD,
        "its hash does not belong to it: something other than the results was edited",
    ),
    "complaints": (
        lambda made: made.update(complaints=[]),
        report_cases.make(report_cases.passing(), complaints=["known failure 'x' matches no case"]),
        "its hash does not belong to it: something other than the results was edited",
    ),
    "the verdict": (
        claim,
        BROKEN,
        "its verdict is 'conformant' for profile 'core': its results give 'not conformant: core (RUN)'",
    ),
    "the suite": (
        lambda made: made.update(suite="0.9.0"),
        GOOD,
        "made with suite 0.9.0 of API 1.0.0, and this is suite 1.0.0 of API 1.0.0: verify it with the linattn that made it",
    ),
    "the manifest": (
        lambda made: made.update(manifest="0" * 64),
        GOOD,
        f"its manifest is 000000000000…, and that of suite 1.0.0 of API 1.0.0 is {report_cases.HELD.hash[:12]}…: "
        "other cases were run",
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edited_report_is_not_intact(tmp_path, what):
    change, made, fault = EDITS[what]
    done = command(commands.verify_report, written(tmp_path, edited(change, made)))
    assert done.exit_code == 3
    assert f"fault    {fault.replace('RUN', RUN)}" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1].startswith("not intact; the verdict of its results is: ")


def above_its_bound(made):
    first_passed(made)["error"] = 3.0


def made_up_status(made):
    first_passed(made)["status"] = "excused"


def of_layout_2(made):
    """Without all that later layouts are held to."""
    for key in reading.LATER:
        del made[key]
    made.update(schema=2, verdict={key: made["verdict"][key] for key in reading.VERDICT_KEYS})


def made_up_case(made):
    made["results"].append({**made["results"][0], "id": "gla/chunk/fp8/plain/T65/forward"})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (above_its_bound, "1 cases passed with an error above their bound: "),
        (made_up_status, "1 results have an unknown status: "),
        (lambda made: made["results"].append(first_passed(made)), "1 cases have more than one result: "),
        (made_up_case, "1 results are of no case for numpy on cpu: gla/chunk/fp8/plain/T65/forward"),
        (lambda made: first_passed(made).update(message="barely"), "1 cases passed, and have a message nevertheless: "),
        (
            lambda made: first_passed(made).update(status="declared-unsupported"),
            "1 cases were not run, and have an error nevertheless: ",
        ),
        (lambda made: made["results"].reverse(), "its results are not in the order of their ids"),
        (lambda made: made.update(began="2999-01-01T00:00:00+00:00"), "it ended at "),
        (of_layout_2, "its layout is version 2, and a run of this suite writes version 3"),
        (
            lambda made: made["digests"].update(linattn_conformance="0" * 64),
            "linattn_conformance was another one than that which is here: its digest differs",
        ),
        (lambda made: made["digests"].pop("linattn"), "linattn was another one than that which is here: its digest differs"),
        (lambda made: made["digests"].pop("linattn_backends"), "it does not say what code was run: it has no digest of "),
        (
            lambda made: made.update(results=[one for one in made["results"] if not fresh.is_fresh(one["id"])], seeds=[]),
            "it has fresh cases of 0 seeds, and a run has those of one",
        ),
        (
            lambda made: made["results"].remove(next(result for result in made["results"] if fresh.is_fresh(result["id"]))),
            "it has no result of 1 fresh cases of its seed: ",
        ),
        (lambda made: made.update(seeds=[9]), "its seeds are [9], and those of its results [7]"),
        (lambda made: made["history"].clear(), "its history does not begin with a run"),
        (lambda made: made["history"][0].update(at="2999-01-01T00:00:00+00:00"), "its history goes on after its end"),
        (lambda made: made["history"][0].update(cases=7), "it has results of "),
        (lambda made: first_passed(made).update(seconds=9e5), "its cases took "),
        (lambda made: declared(made).update(message=""), "1 cases did not pass, and do not say why: "),
        (
            lambda made: made["verdict"]["claimed"].append("chunk_kda"),
            "the claimed of its verdict are not those of its results",
        ),
        (
            lambda made: made["verdict"]["badges"].update(decoding="all"),
            "the badges of its verdict are not those of its results",
        ),
        (lambda made: made["verdict"].update(coverage=[9, 9]), "the coverage of its verdict are not those of its results"),
        (
            lambda made: made["verdict"]["problems"].append("chunk_gla: slow"),
            "its verdict gives other reasons against the backend than its results do",
        ),
    ],
)
def test_new_hashes_do_not_help_what_no_run_writes(change, fault):
    found = verify(with_new_hashes(edited(change)))
    assert found.status == 3
    assert any(text.startswith(fault) for text in found.faults)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "no JSON: Expecting property name"),
        ("[]", "no conformance report: it has no 'schema'"),
        ('{"results": []}', "no conformance report: it has no 'schema'"),
        ('{"schema": 99}', "its layout is version 99, and this linattn reads versions 2 and 3"),
        ('{"schema": 2}', "has no 'suite'"),
        (json.dumps({**GOOD, "memory": "much"}), "'memory' is 'much'"),
        (json.dumps({**GOOD, "memory": float("nan")}), "no JSON: NaN is no number"),
        ("[" * 100_000, "no JSON: maximum recursion depth exceeded"),
        (json.dumps({**GOOD, "verdict": {}}), "its verdict: has no 'outcome'"),
        (json.dumps({**GOOD, "verdict": {"outcome": ["conformant"]}}), "its verdict: 'outcome' is ['conformant']"),
        (json.dumps({**GOOD, "backend": {}}), "'backend' is {}"),
        (json.dumps({**GOOD, "environment": [1]}), "'environment' is [1]"),
        (json.dumps({**GOOD, "complaints": [3]}), "'complaints' is [3]"),
        (json.dumps({**GOOD, "results": [{"id": 7}]}), "result 1: 'id' is 7"),
        (json.dumps({**GOOD, "results": [{**GOOD["results"][0], "id": "gla"}]}), "result 1: 'id' is 'gla'"),
        (json.dumps({**GOOD, "results": [{**GOOD["results"][0], "error": -1.0}]}), "result 1: 'error' is -1.0"),
        (json.dumps({**GOOD, "results": [{**GOOD["results"][0], "error": 0.0}]}), "result 1: 'error' is 0.0"),
        (json.dumps({**GOOD, "results": [{**GOOD["results"][0], "seconds": -1.0}]}), "result 1: 'seconds' is -1.0"),
        (
            json.dumps({**GOOD, "results": [{**GOOD["results"][0], "note": ""}]}),
            "result 1: has 'note', which layout 3 does not",
        ),
        (json.dumps({**GOOD, "tighten": 0}), "'tighten' is 0"),
        (json.dumps({**GOOD, "memory": -1.0}), "'memory' is -1.0"),
        (json.dumps({**GOOD, "note": ""}), "has 'note', which layout 3 does not have"),
        (json.dumps(GOOD)[:-1] + ', "profile": "core"}', "no JSON: 'profile' stands more than once in one object"),
        (json.dumps({**GOOD, "results": [3]}), "result 1: expected an object, got int"),
        (json.dumps({**GOOD, "profile": "most"}), "unknown profile 'most': known are core, inference, training, full"),
    ],
)
def test_what_is_no_report(tmp_path, text, complaint):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportError) as raised:
        read(path)
    assert str(raised.value).startswith(str(path))
    assert complaint in str(raised.value)
    assert command(commands.verify_report, str(path)).exit_code == 2


def test_a_file_that_is_not_there(tmp_path):
    done = command(commands.verify_report, str(tmp_path / "none.json"))
    assert done.exit_code == 2
    assert "No such file or directory" in " ".join(done.output.replace("│", " ").split())


# -- compressed ------------------------------------------------------------------------------------------------------


def test_a_report_whose_name_ends_in_gz_is_compressed_and_every_command_reads_it(tmp_path):
    path, page = tmp_path / "report.json.gz", tmp_path / "report.md"
    packed.write(path, report.text(GOOD))
    assert len(path.read_bytes()) * 8 < len(report.text(GOOD))
    assert read(path) == GOOD
    assert command(commands.verify_report, str(path)).exit_code == 0
    assert command(commands.compare_reports, str(path), written(tmp_path, GOOD)).stdout.endswith("no case changed\n")
    assert command(commands.render_report, str(path), "--output", str(page)).exit_code == 0
    assert page.read_text() == rendering.markdown(GOOD)
    assert command(commands.join_reports, str(path), "--output", str(tmp_path / "whole.json.gz")).exit_code == 0
    assert (tmp_path / "whole.json.gz").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (json.dumps(GOOD).encode(), "Not a gzipped file (b'{\"')"),
        (gzip.compress(json.dumps(GOOD).encode())[:-100], "Compressed file ended before the end-of-stream marker was reached"),
        (gzip.compress(b"{}")[:10] + b"\xff" * 20, "Error -3 while decompressing data: invalid block type"),
    ],
    ids=["not compressed", "cut off", "damaged"],
)
def test_what_only_its_name_says_is_compressed(tmp_path, content, complaint):
    path = tmp_path / "report.json.gz"
    path.write_bytes(content)
    with pytest.raises(ReportError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}: expected what gzip compressed, as its name ends in .gz: {complaint}")


# -- compare-reports -------------------------------------------------------------------------------------------------


def test_no_change(tmp_path):
    path = written(tmp_path, GOOD)
    done = command(commands.compare_reports, path, path)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "backend: acme 2.1"
    assert done.stdout.splitlines()[-1] == "no case changed"


@pytest.mark.parametrize("place", [0, 1])
def test_a_report_that_was_edited_is_not_compared(tmp_path, place):
    paths = [written(tmp_path, GOOD, "a.json"), written(tmp_path, GOOD, "b.json")]
    paths[place] = written(tmp_path, edited(pass_everything, BROKEN), "edited.json")
    done = command(commands.compare_reports, *paths)
    assert done.exit_code == 2
    assert "its results_hash does not belong to its results: they were edited" in " ".join(
        done.output.replace("│", " ").split()
    )


def test_worse(tmp_path):
    done = command(commands.compare_reports, written(tmp_path, GOOD, "a.json"), written(tmp_path, BROKEN, "b.json"))
    assert done.exit_code == 1
    assert "verdict: conformant → not conformant" in done.stdout
    assert "gla/chunk/fp32/state/T33-K16-V8/often: passed → failed: RuntimeError: <out of registers>" in done.stdout


def test_better(tmp_path):
    done = command(commands.compare_reports, written(tmp_path, BROKEN, "a.json"), written(tmp_path, GOOD, "b.json"))
    assert done.exit_code == 0
    assert "better: " in done.stdout
    assert "worse: " not in done.stdout


def without(made, name):
    return {**made, "results": [result for result in made["results"] if result["id"] != name]}


def test_cases_that_come_and_go():
    name = first_passed(GOOD)["id"]
    failing = next(result["id"] for result in BROKEN["results"] if result["status"] == "failed")
    gone, new = compare(GOOD, without(GOOD, name)), compare(without(GOOD, name), GOOD)
    assert [str(change) for change in gone.worse] == [f"{name}: passed → missing"]
    assert [str(change) for change in new.better] == [f"{name}: missing → passed"]
    assert [change.id for change in compare(without(BROKEN, failing), BROKEN).worse] == [failing]


def test_an_error_that_grew_is_told_and_no_fault():
    def grow(made):
        first_passed(made)["error"] = 0.9

    found = compare(edited(lambda made: first_passed(made).update(error=0.3)), edited(grow))
    assert [str(change) for change in found.grown] == [f"{first_passed(GOOD)['id']}: 0.3 → 0.9 of its bound"]
    assert found.status == 0


# -- pages -----------------------------------------------------------------------------------------------------------


def test_markdown():
    text = rendering.markdown(BROKEN)
    lines = text.splitlines()
    assert lines[0] == f"# acme 2.1: not conformant (core; {RUN})"
    assert "numpy on cpu; numpy 2.4.6, Python " in lines[2]
    row = "| `often` | 1 | chunk gla | fp32 | RuntimeError: <out of registers> |"
    assert f"{row} `gla/chunk/fp32/state/T33-K16-V8/often` |" in lines
    wide = Counter(result["message"] for result in BROKEN["results"])["K must be at most 128"]
    assert f"- {wide} cases: K must be at most 128" in lines
    assert not any("has no chunk_kda" in line for line in lines)
    assert any(line.startswith("| `chunk_gla` | ") for line in lines)
    assert "## Known failures: 1" in lines


def test_a_summary():
    lines = rendering.summary(BROKEN).splitlines()
    counts = Counter(result["status"] for result in BROKEN["results"])
    assert f"**{counts['passed']:,} passed, {counts['failed']} failed, " in lines[0]
    assert lines[0].endswith("; verdict: not conformant (core).")
    assert "| `often` | 1 | chunk gla | fp32 | RuntimeError: <out of registers> |" in lines
    assert "|" not in rendering.summary(GOOD)


def test_a_summary_of_a_selection_has_no_verdict():
    text = rendering.summary(BROKEN, selection=True)
    assert text.splitlines()[0].endswith(" declared unsupported, 1 known failure**.")


def test_counts():
    lines = rendering.counts([BROKEN, GOOD]).splitlines()
    assert lines[0] == "| backend | arrays | passed | failed | declared unsupported | known failure | not run | verdict |"
    assert lines[2].startswith("| acme 2.1 | numpy on cpu | ")
    assert lines[2].endswith(" | 1 | – | not conformant (core) |")
    assert lines[3].endswith(" | – | – | conformant (core) |")


def test_the_page_holds_the_report_whatever_is_in_it():
    page = rendering.html(BROKEN)
    data = page.partition('<script id="data" type="application/json">')[2].partition("</script>")[0]
    assert (json.loads(data) == BROKEN) is True  # a report is too long for pytest to show what differs
    assert set(re.findall(r"https?://[\w./-]*", page)) == {"http://www.w3.org/2000/svg", "https://example.com/1"}


def test_the_matrix():
    text = rendering.matrix_markdown([BROKEN, GOOD], report_cases.HELD)
    lines = text.splitlines()
    assert lines[0] == "| operator | acme 2.1<br>numpy on cpu | acme 2.1<br>numpy on cpu |"
    (row,) = [line for line in lines if line.startswith("| `chunk_gla` |")]
    failed, passed = row.split("|")[2:4]
    assert "failed" in failed
    assert "passed" in passed
    assert "| `recurrent_gla` | – | – |" in lines
    assert lines[-1] == "| verdict | not conformant (core) | conformant (core) |"
    operators = [line.split("`")[1] for line in lines[2:-1]]
    assert operators.index("recurrent_gla") == operators.index("chunk_gla") + 3


def test_cases_without_a_result_count_in_the_matrix():
    """They are told from those that failed."""
    (row,) = rows_of("chunk_gla", without(GOOD, first_passed(GOOD)["id"]))
    (whole,) = rows_of("chunk_gla", GOOD)
    count = int(whole.split()[3])
    assert whole.startswith(f"| `chunk_gla` | {count} passed<br>")
    assert row == whole.replace(f"{count} passed", f"{count - 1} passed<br>1 not run")
    (row,) = rows_of("chunk_gla", without(BROKEN, first_passed(BROKEN)["id"]))
    assert re.fullmatch(r"\| `chunk_gla` \| \d+ failed<br>1 known<br>\d+ passed<br>1 not run<br>\d+ declared \|", row)


def rows_of(operator, made):
    lines = rendering.matrix_markdown([made], report_cases.HELD).splitlines()
    return [line for line in lines if line.startswith(f"| `{operator}` |")]


def test_a_report_counts_against_the_manifest_that_it_quotes():
    kept = {name: entry for name, entry in report_cases.HELD.entries.items() if name in {r["id"] for r in GOOD["results"][:40]}}
    other = replace(report_cases.HELD, entries=kept)
    late, early = ({**GOOD, "manifest": one.hash} for one in (report_cases.HELD, other))
    both = rendering.matrix_markdown([late, early], report_cases.HELD, other)
    assert both != rendering.matrix_markdown([late, early], report_cases.HELD)
    assert rendering.matrix_markdown([late], report_cases.HELD, other) == rendering.matrix_markdown([late], report_cases.HELD)
    assert "not run" not in rendering.matrix_markdown([early], report_cases.HELD, other)


@pytest.mark.parametrize(("count", "suffix"), [(1, ".html"), (1, ".md"), (2, ".html"), (2, ".md")])
def test_rendering(tmp_path, count, suffix):
    paths = [written(tmp_path, BROKEN, f"{i}.json") for i in range(count)]
    output = tmp_path / f"page{suffix}"
    done = command(commands.render_report, *paths, "--output", str(output))
    assert (done.exit_code, done.stdout) == (0, f"wrote {output}\n")
    assert "acme" in output.read_text()


def test_a_page_is_not_made_of_a_report_that_was_edited(tmp_path):
    page = tmp_path / "page.html"
    done = command(commands.render_report, written(tmp_path, edited(pass_everything, BROKEN)), "-o", str(page))
    assert done.exit_code == 2
    assert not page.exists()


def test_a_page_that_cannot_be_written(tmp_path):
    done = command(commands.render_report, written(tmp_path, GOOD), "-o", "nowhere/page.html")
    assert done.exit_code == 2
    assert "--output nowhere/page.html: No such file or directory" in " ".join(done.output.replace("│", " ").split())


def test_rendering_needs_a_kind_of_page(tmp_path):
    done = command(commands.render_report, written(tmp_path, GOOD), "-o", str(tmp_path / "page.pdf"))
    assert done.exit_code == 2
    assert "expected a name that ends in .html or .md" in " ".join(done.output.replace("│", " ").split())


# -- what a report can be held to ------------------------------------------------------------------------------------------


def resumed(failed):
    """GOOD, of which one case was run again."""
    name = first_passed(GOOD)["id"]
    again = report.entry("resume", report.now(), 1, 0.1, [{"id": name, "status": failed, "message": "o is off"}])
    made = edited(lambda made: made["history"].append(again))
    return name, report.whole(made, verdict(made, report_cases.HELD))


def test_a_case_that_failed_once_is_flaky_and_flaky_is_not_conformant():
    name, made = resumed("failed")
    assert made["verdict"]["problems"] == [f"{name}: flaky: it failed before: o is off"]
    assert made["verdict"]["outcome"] == "not conformant"
    assert resumed("not-run")[1]["verdict"]["outcome"] == "conformant"


def test_the_page_says_why_a_backend_does_not_conform_of_which_every_case_passed():
    name, made = resumed("failed")
    lines = rendering.markdown(made).splitlines()
    assert lines[0].startswith("# acme 2.1: not conformant (core; ")
    assert lines[lines.index("## Other reasons against it") + 2] == f"- {name}: flaky: it failed before: o is off"
    assert told_by_no_case(made) == made["verdict"]["problems"]
    assert told_by_no_case(GOOD) == []


def test_failed_cases_are_no_other_reasons():
    found = report_cases.make([*report_cases.results()][:-1], complaints=["the process died"])
    failed = [result["id"] for result in found["results"] if result["status"] == "failed"]
    told = told_by_no_case(found)
    assert failed
    assert "the process died" in told
    assert not any(text.startswith(tuple(failed)) for text in told)


def test_a_selection_has_no_verdict_anywhere(tmp_path):
    made = edited(lambda made: made.update(selection=["gla/*"]))
    whole = report.whole(made, verdict(made, report_cases.HELD))
    assert (whole["verdict"]["outcome"], whole["verdict"]["problems"], whole["verdict"]["claimed"]) == ("no verdict", [], [])
    done = command(commands.verify_report, written(tmp_path, whole))
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (
        1,
        "intact; the verdict of its results is: no verdict: a selection of cases",
    )
    assert "conformant" not in rendering.markdown(whole)
    assert "no verdict" in rendering.counts([whole])


def test_a_waived_case_counts_neither_way(monkeypatch):
    name = first_passed(GOOD)["id"]
    made = edited(lambda made: first_passed(made).update(status="failed", error=None, message="o is off"))
    assert not verdict(made, report_cases.HELD).conformant
    monkeypatch.setattr(waivers, "load", lambda suite: (waivers.Waiver(name, "the suite is wrong", "https://example.com/1"),))
    judged = verdict(made, report_cases.HELD)
    assert (judged.conformant, judged.counts["waived"]) == (True, 1)


def test_a_fresh_case_can_be_waived_too(monkeypatch):
    made = edited(lambda made: next(r for r in made["results"] if fresh.is_fresh(r["id"])).update(status="failed", message="o"))
    name = next(result["id"] for result in made["results"] if result["status"] == "failed")
    assert verdict(made, report_cases.HELD).problems == (f"{name}: failed: o",)
    monkeypatch.setattr(waivers, "load", lambda suite: (waivers.Waiver(name, "the suite is wrong", "https://example.com/1"),))
    assert verdict(made, report_cases.HELD).conformant


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[waiver]", "no TOML: "),
        ("[[known-failure]]", "expected tables [[waiver]], got known-failure"),
        ("[[waiver]]\npattern = 'x'", "waiver 1: expected the texts link, pattern, reason, got pattern"),
    ],
)
def test_a_list_of_waivers_that_is_wrong(tmp_path, text, complaint):
    path = tmp_path / "1.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {complaint}")):
        waivers.read(path)


def test_the_waivers_of_this_suite_can_be_read():
    assert isinstance(waivers.load(SUITE_VERSION), tuple)


def test_badges_say_what_all_cases_passed():
    badges = GOOD["verdict"]["badges"]
    assert (badges["float32"], badges["float64"], badges["decoding"]) == ("some", "all", "none")
    assert BROKEN["verdict"]["badges"]["float16"] != "all"
    assert badges["long sequences"] == "all"  # with narrow heads


@pytest.mark.parametrize("check", BACKWARD)
def test_whatever_asks_for_a_gradient_shows_gradients(check):
    assert "gradients" in capabilities.shown(f"gla/chunk/fp32/parts-state/T1024-K8-V8/{check}")
    assert "long sequences" in capabilities.shown(f"gla/chunk/fp32/parts-state/T1024-K8-V8/{check}")
    assert "gradients" not in capabilities.shown("gla/chunk/fp32/parts-state/T1023-K8-V8/parts")


def test_a_digest_is_of_names_and_contents(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "acmepkg").mkdir()
    (tmp_path / "acmepkg" / "__init__.py").write_text("x = 1")
    first = provenance.digest("acmepkg")
    assert provenance.digest("acmepkg") == first
    (tmp_path / "acmepkg" / "__init__.py").write_text("x = 2")
    assert provenance.digest("acmepkg") != first
    assert provenance.digest("no_such_package") == ""
    assert set(provenance.digests("acmepkg.Acme")) == {"acmepkg", *provenance.SUITE}


def test_variables_that_matter_are_told_and_secrets_are_not(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("JAX_API_TOKEN", "secret")
    monkeypatch.setenv("EDITOR", "vi")
    monkeypatch.setenv("ACME_FAST_EXACT", "1")
    monkeypatch.setenv("ACME_FAST_KEY", "secret")
    monkeypatch.setenv("TF_XLA_FLAGS", "--fast")
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", "terraform.rc")
    found = provenance.variables("acme-fast")
    assert found["TRITON_INTERPRET"] == found["ACME_FAST_EXACT"] == "1"
    assert found["TF_XLA_FLAGS"] == "--fast"
    assert not {"JAX_API_TOKEN", "EDITOR", "ACME_FAST_KEY", "TF_CLI_CONFIG_FILE"} & found.keys()


# -- join-reports ----------------------------------------------------------------------------------------------------


def halves():
    """Two parts of the run of GOOD, and a base that both went on from."""
    found = report_cases.passing()
    unknown = [replace(result, status="not-run", error=None) for result in found[1::2]]
    return report_cases.make(found[::2] + unknown), report_cases.make(found[1::2] + found[:4:2])


def join(tmp_path, *parts):
    paths = [written(tmp_path, part, f"{i}.json") for i, part in enumerate(parts)]
    done = command(commands.join_reports, *paths, "--output", str(tmp_path / "whole.json"))
    return done, " ".join(done.stderr.replace("│", " ").split()).replace(str(tmp_path) + "/", "")


def test_parts_of_a_run_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "variables", lambda backend: GOOD["variables"])  # which other tests set and unset
    done, _ = join(tmp_path, *halves())
    assert done.exit_code == 0, done.output
    assert done.stdout.strip().endswith(f"whole.json: {len(GOOD['results'])} results; conformant: core")
    whole = read(tmp_path / "whole.json")
    own = ("history", "workers", "began", "ended", "log", "hash")
    assert {name: value for name, value in whole.items() if name not in own} == {
        name: value for name, value in GOOD.items() if name not in own
    }
    assert [entry["kind"] for entry in whole["history"]] == ["run", "run"]
    assert verify(whole).status == 0


def test_what_is_in_no_part_is_not_run(tmp_path):
    done, _ = join(tmp_path, report_cases.make(report_cases.passing()[::2]))
    assert f"{len(GOOD['results'])} results; not conformant: core" in done.stdout
    results = {result["id"]: result for result in read(tmp_path / "whole.json")["results"]}
    missing = [results[result.id] for result in report_cases.passing()[1::2]]
    assert {(result["status"], result["message"]) for result in missing} == {("not-run", "in none of the parts")}


def reseeded(made):
    """As if another seed had been given."""
    for result in made["results"]:
        result["id"] = result["id"].replace("-seed.7/", "-seed.8/")


def test_parts_without_fresh_cases_are_not_joined(tmp_path):
    """Each would be a selection without a seed, and nothing that the backend had not seen before."""
    old = [result for result in report_cases.passing() if not fresh.is_fresh(result.id)]
    done, told = join(tmp_path, report_cases.make(old[::2]), report_cases.make(old[1::2]))
    assert done.exit_code == 2
    assert "the parts have fresh cases of 0 seeds, []: run all of them with the same --seed" in told


def with_results(change):
    made = edited(change, halves()[1])
    return with_new_hashes(made)


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (edited(pass_everything, BROKEN), "1.json: its results_hash does not belong to its results: they were edited"),
        (
            with_new_hashes(edited(lambda made: made.update(device="cuda"))),
            "1.json: its device is 'cuda', and in 0.json it is 'cpu'",
        ),
        (
            with_new_hashes(edited(lambda made: made["packages"].update(acme_kernels="2.1"))),
            "1.json: its packages is {'acme_kernels': '2.1'}, and in 0.json it is {}",
        ),
        (
            with_results(lambda made: made["results"].append(made["results"][0])),
            "1.json: it has more than one result for a case",
        ),
        (BROKEN, "passed in 0.json, and failed in 1.json: run it again"),
        (
            with_results(reseeded),
            "the parts have fresh cases of 2 seeds, [7, 8]: run all of them with the same --seed",
        ),
    ],
    ids=["edited", "elsewhere", "with other code", "twice", "differently", "of another seed"],
)
def test_what_does_not_belong_together_is_not_joined(tmp_path, other, complaint):
    done, told = join(tmp_path, halves()[0], other)
    assert done.exit_code == 2
    assert complaint.replace(" ", "") in told.replace(" ", "")
    assert not (tmp_path / "whole.json").exists()


def test_variables_of_all_parts_are_told(tmp_path):
    """A part may have run where a backend computes otherwise."""
    found = [{"ACME_EXACT": "0"}, {"ACME_EXACT": "1", "ACME_TILE": "64"}]
    parts = [with_new_hashes({**half, "variables": mine}) for half, mine in zip(halves(), found, strict=True)]
    join(tmp_path, *parts)
    assert read(tmp_path / "whole.json")["variables"] == {"ACME_EXACT": "0 or 1", "ACME_TILE": "64"}
    assert report.variables_of([{"ACME_EXACT": "0 or 1"}, found[1]])["ACME_EXACT"] == "0 or 1"


def test_complaints_of_all_parts_stay(tmp_path):
    part = halves()[1]
    complaining = report_cases.make([], complaints=["loading the backend again, the process died"])
    join(tmp_path, halves()[0], part, complaining)
    whole = read(tmp_path / "whole.json")
    assert whole["complaints"] == ["loading the backend again, the process died"]
    assert whole["verdict"]["outcome"] == "not conformant"
