"""The pages in a browser: what their main states show, and that they still look as they did.

``python tests/conformance/test_report_pages.py`` writes the pictures again: look at them before they are committed.
Without Chromium these tests are skipped; continuous integration installs none.
"""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import report_cases
from linattn_conformance import rendering

PICTURES = Path(__file__).parent / "pictures"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STATES = {
    "all": "report.html",
    "failed": "report.html#status=failed",
    "family": "report.html#family=gla&form=chunk",
    "nothing": "report.html#text=no+such+case",
    "matrix": "matrix.html",
}
WIDTH, HEIGHT, BLOCK = 1000, 800, 8

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="NO CHROMIUM: nobody looked at the pages of conformance reports")


def write_pages(folder):
    broken, good = report_cases.make(), report_cases.make(report_cases.passing())
    broken["platform"].update(python="3.11.7", system="Linux", machine="x86_64")
    (folder / "report.html").write_text(rendering.html(broken), encoding="utf-8")
    (folder / "matrix.html").write_text(rendering.matrix_html([broken, good], report_cases.HELD), encoding="utf-8")


def chromium(folder, state, *options):
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},{HEIGHT}",
    ]
    page, _, view = STATES[state].partition("#")
    url = f"{(folder / page).as_uri()}#{view}"
    profile = [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}"]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run([*command, *profile, *options, url], capture_output=True, timeout=90, check=True, env=environment)
    return done.stdout.decode()


def picture(folder, state):
    """A screenshot as averages over blocks: letters differ from machine to machine, where things stand does not."""
    from matplotlib.image import imread

    path = folder / f"{state}.png"
    chromium(folder, state, f"--screenshot={path}")
    pixels = imread(path)[:HEIGHT, :WIDTH, :3]
    return pixels.reshape(HEIGHT // BLOCK, BLOCK, WIDTH // BLOCK, BLOCK, 3).mean((1, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    write_pages(made)
    return made


@pytest.mark.parametrize("state", STATES)
def test_it_looks_as_it_did(folder, state):
    """Near its own picture, and nearer than to any other state's."""
    from matplotlib.image import imread

    found = picture(folder, state)
    apart = {other: float(np.abs(found - imread(PICTURES / f"{other}.png")[..., :3]).mean()) for other in STATES}
    assert min(apart, key=apart.__getitem__) == state, apart
    assert apart[state] < 0.03, f"it differs by {apart[state]:.3f} from {PICTURES / state}.png: look at {folder / state}.png"


def body(text):
    return text.partition("<body>")[2].partition('<script id="data"')[0]


def test_filters(folder):
    made = report_cases.make()["results"]
    failed = [result["id"] for result in made if result["status"] == "failed"]
    page = body(chromium(folder, "failed", "--dump-dom"))
    assert page.count('<td class="status">failed</td>') == len(failed)
    assert 'class="status">passed' not in page
    assert f"{len(failed)} of {len(made):,} cases" in page
    assert page.count("<circle") == len(failed)
    assert "RuntimeError: &lt;out of registers&gt;" in page
    assert "not conformant: core" in page


def test_nothing_left(folder):
    page = body(chromium(folder, "nothing", "--dump-dom"))
    assert "<td" not in page
    assert '<div id="none">No case is left by these filters.</div>' in page


def main():
    import tempfile

    from matplotlib.image import imsave

    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        write_pages(Path(name))
        for state in STATES:
            imsave(PICTURES / f"{state}.png", picture(Path(name), state))


if __name__ == "__main__":
    main()
