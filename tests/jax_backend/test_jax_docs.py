"""The page on JAX runs as it is written."""

import re
from pathlib import Path


def test_examples_run():
    page = Path(__file__).parents[2] / "docs" / "jax.md"
    blocks = re.findall(r"```python\n(?!>>>)(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 7
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": "page"})
