"""What a wheel holds: the four packages and what they need to run. ``python wheel.py WHEEL`` fails if there is more or less."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

PACKAGES = {"linattn", "linattn_backends", "linattn_benchmarks", "linattn_conformance"}
CODE = {".py", ".metal", ".html", ".jinja"}
DATA = {
    "linattn/py.typed",
    "linattn/demo/byte_lm.json",
    "linattn/demo/byte_lm.npz",
    "linattn_conformance/frozen.json",
    "linattn_conformance/manifests/1.0.json",
    "linattn_conformance/waivers/1.0.0.toml",
}


def faults(path: Path) -> list[str]:
    """What should not be in a wheel, and what should be and is not."""
    with zipfile.ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    known = {name for name in names if name.partition("/")[0] in PACKAGES and (Path(name).suffix in CODE or name in DATA)}
    return [
        *(f"not expected: {name}" for name in sorted(names - known)),
        *(f"missing: {name}" for name in sorted(DATA - names)),
    ]


if __name__ == "__main__":
    found = faults(Path(sys.argv[1]))
    print(*found, sep="\n")
    sys.exit(bool(found))
