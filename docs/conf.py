"""Sphinx settings. Everything is local: no font, script or inventory is fetched while building."""

from pathlib import Path
from typing import Any

import linattn
from linattn_conformance import manifest, reading, rendering
from sphinx.util.docutils import SphinxDirective

project = "linattn"
author = "the linattn authors"
copyright = "the linattn authors"
release = version = linattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = [
    "_build",
    "experiments/**/*.table.md",
    "experiments/*.table.md",
    "conformance/matrix.md",
]  # pages include these
html_theme = "furo"
html_title = f"linattn {release}"
html_static_path = ["_static"]
html_css_files = ["linattn.css"]

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
    ("py:.*", r"(linattn\.[a-z0-9_.]+\.)?[AB]|(np|numpy|collections|typing|NDArray).*|Finish|linattn\.frameworks\.Framework"),
]


class Report(SphinxDirective):
    """What came of a report of conformance: the argument, a path from the page."""

    required_arguments = 1

    def run(self) -> list[Any]:
        relative, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative)
        return self.parse_text_to_nodes(rendering.summary(reading.read(Path(path))))


def render_reports(app: Any, failure: Exception | None) -> None:
    """A page of each report of conformance, and the matrix of all, beside the pages that name them."""
    if failure or app.builder.format != "html":
        return
    folder = Path(app.outdir, "conformance", "reports")
    folder.mkdir(parents=True, exist_ok=True)
    paths = sorted(Path(app.srcdir, "conformance", "reports").glob("*.json"))
    reports = [reading.read(path) for path in paths]
    for path, report in zip(paths, reports, strict=True):
        (folder / f"{path.stem}.html").write_text(rendering.html(report), encoding="utf-8")
    (folder / "index.html").write_text(rendering.matrix_html(reports, manifest.load()), encoding="utf-8")


def setup(app: Any) -> None:
    app.add_directive("conformance-report", Report)
    app.connect("build-finished", render_reports)
