"""A paragraph of Markdown is a line, everywhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import wrapping  # noqa: E402

PAGES = sorted(
    path
    for part in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", ".github/**/*.md")
    for path in ROOT.glob(part)
    if "_build" not in path.parts
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_paragraph_is_a_line(path):
    text = path.read_text(encoding="utf-8")
    assert wrapping.unwrapped(text) == text, f"run: python docs/wrapping.py {path.relative_to(ROOT)}"


WRAPPED = """\
# A heading
Text that
goes on.
- an item
  of two lines
- another
lazily wrapped

1. first
   line

| a | b |
| --- | --- |
after a table

```{directive} argument
:option: of it

code
  stays
```
<ul>
<li>html</li>
</ul>
"""
UNWRAPPED = """\
# A heading
Text that goes on.
- an item of two lines
- another lazily wrapped

1. first line

| a | b |
| --- | --- |
after a table

```{directive} argument
:option: of it

code
  stays
```
<ul>
<li>html</li>
</ul>
"""


def test_lines_are_joined_where_markdown_joins_them_and_nowhere_else():
    assert wrapping.unwrapped(WRAPPED) == UNWRAPPED
    assert wrapping.unwrapped(UNWRAPPED) == UNWRAPPED


def test_the_command_says_what_it_changed(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.md").write_text(WRAPPED)
    (tmp_path / "b.md").write_text(UNWRAPPED)
    monkeypatch.setattr(sys, "argv", ["wrapping.py", str(tmp_path / "a.md"), str(tmp_path / "b.md")])
    assert wrapping.main() == 1
    assert capsys.readouterr().out == f"{tmp_path / 'a.md'}: a paragraph is a line now\n"
    assert (tmp_path / "a.md").read_text() == UNWRAPPED
    assert wrapping.main() == 0
