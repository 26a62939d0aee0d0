"""The published reports of conformance, ours before others', and their matrices: ``python docs/matrices.py`` writes these."""

from __future__ import annotations

from pathlib import Path

from linattn_conformance import manifest, reading, rendering

CONFORMANCE = Path(__file__).parent / "conformance"
OURS = ("numpy", "torch", "triton", "jax", "jax_triton", "pallas", "mlx")
"""Backends that have an algorithm of their own; the others are adapters."""


def ordered(folder: Path = CONFORMANCE) -> list[Path]:
    """Every report, ours first and in that order."""
    paths = sorted((folder / "reports").glob("*.json.gz"), key=lambda path: path.name)
    return sorted(paths, key=lambda path: OURS.index(backend(path)) if backend(path) in OURS else len(OURS))


def backend(path: Path) -> str:
    """Whose report a file is: ``jax_triton-h200.json.gz`` is jax_triton's."""
    return path.name.partition("-")[0]


def manifests(folder: Path = CONFORMANCE) -> tuple[manifest.Manifest, manifest.Manifest]:
    """The manifest of this version, and the earlier one of reports that quote that."""
    return manifest.load(), manifest.read(folder / "reports" / "manifest.json")


def matrices(folder: Path = CONFORMANCE) -> dict[str, str]:
    """File name and Markdown of both matrices."""
    of = {"ours.matrix.md": True, "others.matrix.md": False}
    return {
        name: rendering.matrix_markdown(
            [reading.read(path) for path in ordered(folder) if (backend(path) in OURS) is ours], *manifests(folder)
        )
        for name, ours in of.items()
    }


def main() -> None:
    """Write them."""
    for name, text in matrices().items():
        (CONFORMANCE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
