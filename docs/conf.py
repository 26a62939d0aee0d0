"""Sphinx settings. Everything is local: no font, script or inventory is fetched while building."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import linattn
from docutils import nodes
from docutils.parsers.rst import directives
from linattn_conformance import reading, rendering
from sphinx.util import inspect
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))
import matrices

project = "linattn"
author = "the linattn authors"
copyright = "the linattn authors"
release = version = linattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "equations"]
exclude_patterns = [
    "_build",
    "experiments/**/*.table.md",
    "experiments/*.table.md",
    "conformance/*.matrix.md",
]  # pages include these
html_theme = "furo"
html_title = f"linattn {release}"
html_static_path = ["_static"]
html_css_files = ["linattn.css"]
html_js_files = [("sortable.js", {"defer": "defer"})]

html_math_renderer = "mathml"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_use_ivar = True
napoleon_custom_sections = [("Keyword arguments that every recurrence has", "params_style")]

nitpicky = True
# Types of other projects, whose inventories would have to be fetched, and type variables.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(linattn\.[a-z0-9_.]+\.)?(Array|B)|(np|numpy|torch|collections|typing|NDArray).*|Finish|linattn\.(frameworks|gate_maps)\.[A-Z]\w+",
    ),
]


class Made(SphinxDirective):
    """Text made of JSON files, which are the arguments, as paths from the page."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[Any]:
        files: list[Path] = []
        for argument in self.arguments[0].split():
            relative, path = self.env.relfn2path(argument)
            self.env.note_dependency(relative)
            files.append(Path(path))
        return self.parse_text_to_nodes(self.text(files))

    def text(self, files: list[Path]) -> str:
        raise NotImplementedError


class Report(Made):
    """What came of a report of conformance; ``selection`` if it has no verdict."""

    option_spec: ClassVar[Any] = {"selection": directives.flag}

    def text(self, files: list[Path]) -> str:
        return "\n".join(rendering.summary(reading.read(path), "selection" in self.options) for path in files)


class Counts(Made):
    """A row a report."""

    def text(self, files: list[Path]) -> str:
        return rendering.counts([reading.read(path) for path in files])


class SideBySide(Made):
    """What ``examples/peers/side_by_side.py`` wrote, a column a file; ``of`` is how the names of the rows begin."""

    option_spec: ClassVar[Any] = {"of": directives.unchanged_required}

    def text(self, files: list[Path]) -> str:
        made = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        checks = dict.fromkeys(name for found in made for name in found["errors"] if name.startswith(self.options["of"]))
        rows = [["check", "computed by", *(found["where"] for found in made)], ["---", "---", *["---:"] * len(made)]]
        for check in checks:
            for which in dict.fromkeys(
                which for found in made for which in found["errors"].get(check, {}) if which != "not run"
            ):
                errors = [found["errors"].get(check, {}).get(which, "–") for found in made]
                rows.append([f"`{check}`", which, *(x if isinstance(x, str) else f"{x:.1e}" for x in errors)])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class SpeedUps(SphinxDirective):
    """The front page's figure, in the page itself: it has the theme's colours, and its words are found and read aloud."""

    def run(self) -> list[Any]:
        relative, path = self.env.relfn2path("/_static/speedups.svg")
        self.env.note_dependency(relative)
        return [nodes.raw("", Path(path).read_text(encoding="utf-8"), format="html")]


class Judged(Made):
    """What ``tests/integrations/judges.py`` wrote: a row for each family."""

    def text(self, files: list[Path]) -> str:
        rows = [["family", "cases", "passed", "skipped", "failed", "passed with linattn", "end differently"]]
        rows.append(["---", *["---:"] * 6])
        for path in files:
            for family, found in json.loads(path.read_text(encoding="utf-8"))["families"].items():
                before, after = found["before"], found["with linattn"]
                counts = [sum(before.values()), *(before.get(outcome, 0) for outcome in ("passed", "skipped", "failed"))]
                rows.append([f"`{family}`", *map(str, [*counts, after.get("passed", 0), len(found["differing"])])])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class JudgedFunctions(Made):
    """What ``tests/integrations/kernel_judges.py`` wrote: a row for each file of tests."""

    def text(self, files: list[Path]) -> str:
        records = [json.loads(path.read_text(encoding="utf-8"))["judges"] for path in files]
        left = any("not run" in found for record in records for found in record.values())
        kinds = ("passed", "refused", "failed", *(["not run"] if left else []))
        rows = [["judge", "cases", *kinds], ["---", *["---:"] * (len(kinds) + 1)]]
        for record in records:
            for judge, found in record.items():
                counts = [sum(n for outcome, n in found.items() if outcome.startswith(kind)) for kind in kinds]
                rows.append([judge, *map(str, [sum(counts), *counts])])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


class JudgedExceptions(Made):
    """What ``tests/integrations/judges.py`` wrote of cases that did not pass: a row for each thing that became of some."""

    def text(self, files: list[Path]) -> str:
        rows = [["what became of them", "cases", "tests"], ["---", "---:", "---"]]
        for path in files:
            exceptions = json.loads(path.read_text(encoding="utf-8"))["exceptions"]
            for outcome, cases in exceptions.items():
                if outcome == "not run":
                    continue
                tests = Counter(case.rpartition("/")[2].partition("[")[0].replace(".py::", ": ") for case in cases)
                named = ", ".join(f"`{test}`" + (f" × {n}" if n > 1 else "") for test, n in tests.items())
                rows.append([outcome.replace("|", "\\|"), str(len(cases)), named])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def render_reports(app: Any, failure: Exception | None) -> None:
    """A page of each report of conformance, and the matrices, beside the pages that name them."""
    if failure or app.builder.format != "html":
        return
    folder = Path(app.outdir, "conformance", "reports")
    folder.mkdir(parents=True, exist_ok=True)
    paths = matrices.ordered(Path(app.srcdir, "conformance"))
    reports = [reading.read(path) for path in paths]
    for path, report in zip(paths, reports, strict=True):
        (folder / f"{path.name.removesuffix('.json.gz')}.html").write_text(rendering.html(report), encoding="utf-8")
    held = matrices.manifests(Path(app.srcdir, "conformance"))
    for name, ours in {"index.html": True, "others.html": False}.items():
        chosen = [report for report in reports if (report["backend"]["name"] in matrices.OURS) is ours]
        (folder / name).write_text(rendering.matrix_html(chosen, *held), encoding="utf-8")


def constructor(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: Any) -> Any:
    """The arguments that a class says it takes, where its ``__new__`` takes any."""
    if what != "class" or not (signature or "").startswith("(*args"):
        return None
    return inspect.stringify_signature(inspect.signature(obj), show_return_annotation=False), None


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", constructor)
    app.add_directive("figure-of-speed-ups", SpeedUps)
    app.add_directive("conformance-report", Report)
    app.add_directive("conformance-counts", Counts)
    app.add_directive("side-by-side", SideBySide)
    app.add_directive("judged", Judged)
    app.add_directive("judged-functions", JudgedFunctions)
    app.add_directive("judged-exceptions", JudgedExceptions)
    app.connect("build-finished", render_reports)
