"""What is installed: the backends and the extras, as ``linattn backends`` and ``linattn doctor`` show them."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from .apart import apart, is_foreign
from .call import FORMS
from .errors import BackendError
from .plugin import API_VERSION, Backend
from .progress import bars
from .registry import registry, told
from .spec import COMPANIONS, FAMILIES

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["show_backends", "show_extras"]

PURPOSES = {
    "torch": "PyTorch arrays",
    "triton": "kernels for NVIDIA GPUs",
    "jax": "JAX arrays",
    "jax_triton": "Triton kernels on JAX arrays",
    "pallas": "kernels for TPUs",
    "mlx": "MLX arrays",
    "fla": "flash-linear-attention",
    "flash_qla": "FlashQLA",
    "jla": "jax-linear-attention",
    "mlx_fast": "MLX's own gated delta rule",
    "mlx_lm": "mlx-lm",
    "conformance": "pytest plug-in, new-backend",
    "bench": "pages and plots of linattn bench",
    "docs": "the documentation",
    "test": "the project's tests",
    "all": "everything for contributors",
}
"""What each extra is for."""


class Row(NamedTuple):
    """One backend in the list; the note, if it has one, stands below."""

    name: str
    origin: str
    arrays: str
    operators: str
    status: str
    note: str = ""


class Said(NamedTuple):
    """What a backend says of itself."""

    arrays: str
    operators: str
    status: str
    note: str = ""


def show_backends() -> None:
    """Print every backend, where it comes from, and why one cannot be used."""
    with bars() as progress:  # a backend is asked, and so is its framework, which may take seconds to load
        rows = [_row(name) for name in progress.track(sorted(registry.records), description="loading")]
    table = Table("backend", "from", "arrays", "operators", "status", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row[:-1])
    _print(table)
    noted = [row for row in rows if row.note]
    if noted:
        print()
    for row in noted:
        print(f"{row.name}: {row.note}")


def _row(name: str) -> Row:
    record = registry.records[name]
    origin = "linattn" if record.origin == f"linattn {API_VERSION}" else record.origin
    try:
        said = apart(name, facts_of) if is_foreign(name) else facts_of(name)
    except BackendError as error:
        said = Said("", "", "unusable", str(error))
    notes = [said.note, f"{record.passed_over} claims this name too, and is not used" if record.passed_over else ""]
    return Row(name, origin, said.arrays, said.operators, said.status, "; ".join(filter(None, notes)))


def facts_of(name: str) -> Said:
    """Load a backend and look at it.

    Raises:
        BackendError: It cannot be used.
    """
    backend = registry.load(name)
    arrays, operators = ", ".join(backend.frameworks), _operators(backend)
    try:
        device = backend.missing_device()
    except Exception as error:  # a plug-in's own code, which must not hide the others
        return Said(arrays, operators, "unusable", f"missing_device raised {told(error)}")
    if device:
        return Said(arrays, operators, "installed, no device here", f"runs on {device}")
    return Said(arrays, operators, "ready")


def _operators(backend: Backend) -> str:
    """The families it has, ``ssd`` by what it is lowered to if need be, with the forms of each where some are missing."""
    families = {op: tuple(form for form in FORMS if _runs(backend, form, op)) for op in FAMILIES}
    by_forms: dict[tuple[str, ...], list[str]] = {}
    for op, forms in families.items():
        if forms:
            by_forms.setdefault(forms, []).append(op)
    companions = [name for name in COMPANIONS if hasattr(backend, name)]
    whole = companions if len(companions) < len(COMPANIONS) or set(by_forms) != {FORMS} else []
    return "; ".join([*(_families(ops) + _those(forms) for forms, ops in by_forms.items()), *whole])


def _runs(backend: Backend, form: str, op: str) -> bool:
    """Whether it has a method of a family, or of the one beside it that means the same."""
    return hasattr(backend, f"{form}_{op}") or (op == "ssd" and hasattr(backend, f"{form}_simple_gla"))


def _families(ops: list[str]) -> str:
    """Their names, or those of the others where these are fewer."""
    others = [op for op in FAMILIES if op not in ops]
    if len(others) >= len(ops):
        return ", ".join(ops)
    return f"all but {', '.join(others)}" if others else "all"


def _those(forms: Iterable[str]) -> str:
    return "" if tuple(forms) == FORMS else f" ({', '.join(forms)})"


def show_extras() -> None:
    """Print the versions of what linattn needs, what there is of every extra, and the commands that install the rest."""
    core = Table("package", "version", box=None, pad_edge=False)
    for name, version in (("python", platform.python_version()), ("linattn", API_VERSION)):
        core.add_row(name, version)
    for requirement in _requirements(None):
        core.add_row(requirement.name, _version(requirement.name) or "missing")
    _print(core)
    print()
    extras = Table("extra", "for", "packages", box=None, pad_edge=False)
    missing: list[str] = []
    for extra in _extras():
        packages, complete = _packages(extra)
        extras.add_row(extra, PURPOSES.get(extra, ""), packages)
        missing += [] if complete else [extra]
    _print(extras)
    if missing:
        print()
    for extra in missing:
        print(f"{extra}: pip install 'linattn[{extra}]'")


def _extras() -> list[str]:
    """Every extra, spelled as the backend is; metadata has dashes."""
    return [extra.replace("-", "_") for extra in metadata.metadata("linattn").get_all("Provides-Extra") or ()]


def _requirements(extra: str | None) -> list[Requirement]:
    """What linattn, or one of its extras, requires on this Python and system."""
    from packaging.requirements import Requirement

    found: list[Requirement] = []
    for text in metadata.requires("linattn") or ():
        requirement = Requirement(text)
        of_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        names = {"extra": (extra or "").replace("_", "-")}
        if of_extra == (extra is not None) and (requirement.marker is None or requirement.marker.evaluate(names)):
            found.append(requirement)
    return found


def _packages(extra: str) -> tuple[str, bool]:
    """The versions that are installed and true; where some are missing or too old, what these are and false."""
    requirements = _requirements(extra)
    complaints = [complaint for requirement in requirements if (complaint := _complaint(requirement))]
    if complaints:
        return ", ".join(complaints), False
    found = [f"{requirement.name} {_version(requirement.name)}" for requirement in requirements]
    return ", ".join(found) or "none for this Python and system", True


def _complaint(requirement: Requirement) -> str | None:
    version = _version(requirement.name)
    if version is None:
        return f"{requirement.name} is missing"
    fits = requirement.specifier.contains(version, prereleases=True)
    return None if fits else f"{requirement.name} {version} is not {requirement.specifier}"


def _version(package: str) -> str | None:
    """The version installed, or ``None``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _print(table: Table) -> None:
    """A table in the terminal's width, or unwrapped into a file or pipe."""
    width = None if Console().is_terminal else 10_000
    Console(highlight=False, markup=False, width=width).print(table)
