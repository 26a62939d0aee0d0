"""A paragraph of Markdown is a line: ``python docs/wrapping.py FILE...`` makes it one, and fails if one was not.

A change of a word then is a change of one paragraph, and editors wrap lines as wide as they are. Code, tables and HTML stay
as they are.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FENCE = re.compile(r"\s*(`{3,}|~{3,}|:{3,})")
ALONE = re.compile(r"\s*(#{1,6} |\||<|>|:|\[\^?[^\]]+\]: |(-{3,}|\*{3,}|={3,})\s*$|$)")
"""Begins a line that no other is joined to, before or after."""
ITEM = re.compile(r"\s*([-*+]|\d{1,9}[.)])\s")


def unwrapped(text: str) -> str:
    """The text with every paragraph, and every item of a list, in one line."""
    lines: list[str] = []
    fence, open_paragraph = "", False
    for line in text.split("\n"):
        mark = FENCE.match(line)
        if fence or mark:
            lines.append(line)
            if not fence and mark:
                fence = mark[1]
            elif mark and line.strip() == fence[0] * len(line.strip()) and len(line.strip()) >= len(fence):
                fence = ""
            open_paragraph = False
        elif open_paragraph and not ALONE.match(line) and not ITEM.match(line):
            lines[-1] = f"{lines[-1]} {line.strip()}"
        else:
            lines.append(line.rstrip())
            open_paragraph = not ALONE.match(line)
    return "\n".join(lines)


def main() -> int:
    """Rewrite the files named on the command line; 1 if that changed any."""
    changed = 0
    for path in map(Path, sys.argv[1:]):
        before = path.read_text(encoding="utf-8")
        if (after := unwrapped(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path}: a paragraph is a line now")
            changed = 1
    return changed


if __name__ == "__main__":
    sys.exit(main())
