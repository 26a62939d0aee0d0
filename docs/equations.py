"""Typeset equations without a script or a font from elsewhere: MathML, which browsers show by themselves.

``{equation}`` typesets the notation of the specs and of ``operators.md``, ``S = e^g S⁻ + kᵀv;  o = scale · q S``, and
``{recurrence} FAMILY`` that of a family; TeX of ``$``, ``{math}`` and ``:math:`` goes the same way.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from linattn.spec import FAMILIES
from sphinx.util.docutils import SphinxDirective

SYMBOLS = {
    "beta": r"\beta ",
    "Δ": r"\Delta ",
    "Σ": r"\sum",
    "∘": r"\circ ",
    "·": r"\cdot ",
    "−": "-",
    "≤": r"\le ",
    "//": r"\text{//}",
    "²": "^2",
    "⁻": "^{-}",
    "ᵀ": r"^{\top}",
}
TOKEN = re.compile(r"(?P<name>[A-Za-z]+(?:_[A-Za-z]+)*)(?P<call>\??(?=\())?|//|\s+|.")
LONG = 70
"""Characters of a statement that is broken at its sums."""


def tex(notation: str) -> str:
    """TeX of equations in plain notation: a line for each statement, aligned at what each defines."""
    statements = [line for part in notation.split(";") for line in broken(" ".join(part.split()))]
    return r"\begin{aligned} " + r" \\ ".join(map(_line, statements)) + r" \end{aligned}"


def broken(statement: str) -> list[str]:
    """A long statement as several lines, each after the first a term that begins with its sign."""
    lines, depth, start = [], 0, 0
    for i, char in enumerate(statement if len(statement) > LONG else ""):
        depth += (char in "({") - (char in ")}")
        if char == "+" and depth == 0:
            lines.append(statement[start:i].strip())
            start = i
    return [*lines, statement[start:]]


def _line(statement: str) -> str:
    if statement.startswith("+"):
        return r"& \quad " + _translated(statement)
    defined, _, by = statement.partition(" = ")
    return f"{_translated(defined)} &= {_translated(by)}"


def _translated(text: str) -> str:
    """Names in roman or italic, products of neighbours set apart, ``e^gv`` with the whole of its exponent."""
    out: list[str] = []
    for token in TOKEN.finditer(text):
        found = token[0]
        if name := token["name"]:
            found = _name(name, token["call"] is not None) + ("?" if "?" in found else "")
            found = f"{{{found}}}" if out and out[-1] == "^" else found
        elif found.isspace():
            found = r"\, " if out and re.match(r"[\w⁻')}²]\s[\wΣ(]", text[token.start() - 1 :]) else " "
        out.append(SYMBOLS.get(found, found))
    return "".join(out)


def _name(name: str, called: bool) -> str:
    """``q_quad_t`` has the index ``t``; a name of several letters is a word."""
    if name in SYMBOLS:
        return SYMBOLS[name]
    head, *indices = name.split("_")
    if len(head) > 1:
        return rf"\operatorname{{{name}}}" if called and len(name) > 1 else rf"\text{{{name}}}"
    written = [index if len(index) == 1 else rf"\text{{{index}}}" for index in indices]
    return f"{head}_{{{','.join(written)}}} " if written else f"{head} "


class Equation(SphinxDirective):
    """Plain notation, typeset."""

    has_content = True

    def run(self) -> list[Any]:
        return [nodes.math_block("", tex(" ".join(self.content)), nowrap=False, number=None, label=None)]


class Recurrence(SphinxDirective):
    """What defines a family."""

    required_arguments = 1

    def run(self) -> list[Any]:
        recurrence = FAMILIES[self.arguments[0]].recurrence
        return [nodes.math_block("", tex(recurrence), nowrap=False, number=None, label=None)]


def inline(writer: Any, node: Any) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block(writer: Any, node: Any) -> None:
    writer.body.append(f'<div class="equation">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("equation", Equation)
    app.add_directive("recurrence", Recurrence)
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
