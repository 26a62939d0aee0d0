"""The reference names everything that can be called, and its equations are typeset."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import linattn
import linattn.nn
import pytest
from linattn.ops._family import OPERATORS
from linattn.spec import COMPANIONS, FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")}


def named(page: str) -> set[str]:
    """What a page documents, without the package."""
    return set(re.findall(r"(?:auto\w+:: |py:function:: |^ {10,})linattn\.([\w.]+)", page, re.MULTILINE))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operator_of_a_family_is_on_its_page(family):
    forms = {name for name, operator in OPERATORS.items() if name.removeprefix(f"{operator.form}_") == family}
    assert {family, f"chunk_{family}"} < forms
    assert forms <= named(REFERENCE[family])
    assert f"```{{recurrence}} {family}\n" in REFERENCE[family]
    assert f"[`{family}`]({family}.md)" in REFERENCE["index"]


def test_every_companion_is_on_a_page():
    assert set(COMPANIONS) <= named(REFERENCE["companions"])


def test_everything_public_is_on_one_page():
    pages = [name for page in REFERENCE.values() for name in named(page)]
    modules = {name for name in linattn.__all__ if isinstance(getattr(linattn, name), type(linattn))}
    assert set(linattn.__all__) - modules <= set(pages)
    assert {"errors", "feature_maps", "gates", "plugin"} <= set(pages)
    assert sorted(pages) == sorted(set(pages))


def test_every_layer_is_on_their_page():
    assert {name.removeprefix("nn.") for name in named(REFERENCE["layers"])} >= set(linattn.nn.__all__)


@pytest.fixture
def equations(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    import equations

    return equations


@pytest.mark.parametrize("family", FAMILIES)
def test_every_recurrence_is_typeset(equations, family):
    from docutils.utils.math.latex2mathml import tex2mathml

    recurrence = FAMILIES[family].recurrence
    made = tex2mathml(equations.tex(recurrence), as_block=True)
    assert made.count("<mtr>") == sum(len(equations.broken(" ".join(part.split()))) for part in recurrence.split(";"))
    shown = re.sub(r"<[^>]*>|&\w+;", "", made)
    assert [mark for mark in "ᵀ⁻²^_{}\\" if mark in shown.replace("_scale", "").replace("dt_bias", "")] == []


TEX = {
    "S = Diag(e^g) S⁻ Diag(e^gv) + kᵀv;  o = scale · q S": (
        r"\begin{aligned} S &= \operatorname{Diag}(e ^{g })\, S ^{-}\, \operatorname{Diag}(e ^{\text{gv}}) + k ^{\top}v \\ "
        r"o &= \text{scale} \cdot q \, S \end{aligned}"
    ),
    "o_t = q_quad_t·k": r"\begin{aligned} o_{t} &= q_{\text{quad},t} \cdot k \end{aligned}",
}


@pytest.mark.parametrize("notation", TEX)
def test_notation_becomes_tex(equations, notation):
    assert " ".join(equations.tex(notation).split()) == TEX[notation]


def test_a_long_statement_is_broken_at_its_outer_sums(equations):
    long = f"o = {'a · ' * 20}f(b + c) + d"
    assert equations.broken(long) == [f"o = {'a · ' * 20}f(b + c)", "+ d"]
    assert equations.broken("o = a + b") == ["o = a + b"]


NAMES = (DOCS / "names.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["fla", "Hugging Face", "Mamba", "mamba-ssm", "transformers", "mlx-lm", "KV cache", "varlen"])
def test_search_finds_what_others_call_it(name):
    assert re.search(rf"\b{name}\b", NAMES)


def test_what_names_lead_to_exists():
    """The second column of functions and of models names operators of ours."""
    sections = [NAMES.partition(f"\n## {title}\n")[2].partition("\n## ")[0] for title in ("Functions", "Models")]
    rows = [line.split(" | ") for section in sections for line in section.splitlines() if line.startswith("| ")]
    found = {name for *_, here in rows for name in re.findall(r"`([a-z]\w*)", here)}
    named = {name for name in found if "_" in name or name in FAMILIES} - {"g_gamma"}
    assert {"simple_gla", "decode_ssd", "gated_rms_norm", "dplr"} <= named
    assert named <= set(linattn.__all__)
