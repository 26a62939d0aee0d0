import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_is_enabled() -> Iterator[None]:
    """A test finds every function where its package put it, and leaves it there."""
    yield
    for name in ("fla", "transformers"):
        if module := sys.modules.get(f"linattn.integrations.{name}"):
            module.disable()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What linattn.integrations logs."""
    caplog.set_level(logging.INFO, "linattn.integrations")
    return caplog
