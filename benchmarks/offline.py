"""What benchmarks and checks need on a host with GPUs that reaches no network, packed on one that does.

``python benchmarks/offline.py FOLDER [GROUP…] [--limit-mib 64]`` packs the groups of ``offline.toml``, which says what a group
has: each is installed for the host's Python and platform, not for these, and becomes an archive in FOLDER. There, in the root
of a checkout,

    . FOLDER/site.sh

in bash unpacks them, once, and has Python import from there and from the checkout. FOLDER may be one of the checkout that git
ignores, ``.carry`` for one. A second run packs what has changed.

Wheels that are made of sources are made in this environment, which must hold what their set-up asks for: torch, for mamba_ssm.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import itertools
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27}]
"""A window as long as the largest library, which some wheels hold twice."""
LEFT = ("bin/*", "*/__pycache__/*", "*.dist-info/RECORD", "*.dist-info/direct_url.json")
"""What installing leaves that names this host's Python and folders."""
OLDEST = 315532800
"""The time of every packed file: the first that a wheel can say. ninja takes an earlier one, 0, for no file."""

SITE = """\
# Source this in the root of a checkout of linattn. It unpacks what lies beside it, once, and has Python import from there.
if ! [ -e linattn_api ]; then
    echo "site.sh: source it in the root of a checkout of linattn, not in $PWD" >&2
    return 1
fi
site=${{XDG_CACHE_HOME:-$HOME/.cache}}/linattn/{digest}
if ! [ -e "$site" ]; then
    pack=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
    mkdir -p "${{site%/*}}" && part=$(mktemp -d "$site.XXXXXX") || return
    for archive in {archives}; do
        python3 -m tarfile --filter data -e "$pack/$archive" "$part" || return
    done
    mv "$part" "$site" || return
fi
for folder in "$site" {packages}; do
    case ":$PYTHONPATH:" in
        *":$folder:"*) ;;
        *) export PYTHONPATH="$folder${{PYTHONPATH:+:$PYTHONPATH}}" ;;
    esac
done
"""


@dataclass(frozen=True)
class Host:
    """Where it is unpacked: its Python, its machine, the platforms whose wheels it takes, and distributions that it has."""

    python: str
    machine: str
    platforms: tuple[str, ...]
    has: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """What markers of requirements ask for."""
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.0",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": self.machine,
            "extra": "",
        }


@dataclass(frozen=True)
class Group:
    """Distributions that are packed together."""

    name: str
    requirements: tuple[str, ...]
    source: bool = False
    tools: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


def declared(file: Path) -> tuple[Host, dict[str, Group]]:
    """The host and the groups of a file."""
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    groups = {name: Group(name, **fixed(of)) for name, of in found["groups"].items()}
    return Host(**fixed(found["host"])), groups


def fixed(of: dict[str, Any]) -> dict[str, Any]:
    """Lists and tables as tuples."""
    as_tuple = {list: tuple, dict: lambda table: tuple(table.items())}
    return {name: as_tuple.get(type(x), lambda x: x)(x) for name, x in of.items()}


def pip(*arguments: object, **environment: str) -> None:
    """Run pip; what it says is shown where it fails."""
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pip {arguments[0]} failed:\n{done.stdout}{done.stderr}")


def wheels(group: Group, folder: Path) -> list[Path]:
    """Wheels of a group's requirements, made from source."""
    variables = dict(group.environment)
    if group.tools:
        tools = folder / "tools"
        pip("install", "--target", tools, *group.tools)
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")]))
    made = folder / "made"
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-binary=:all:", "-w", made, *group.requirements, **variables)
    return sorted(made.glob("*.whl"))


def install(group: Group, host: Host, folder: Path) -> Path:
    """A folder with what a group brings to the host."""
    site = folder / group.name
    what = wheels(group, folder) if group.source else group.requirements
    kind = [
        f"--python-version={host.python}",
        *(f"--platform={name}_{host.machine}" for name in host.platforms),
        "--only-binary=:all:",
    ]
    pip("install", "--no-deps", "--no-compile", "--target", site, *kind, *what)
    for path in files_of(site):
        name = path.relative_to(site).as_posix()
        if any(fnmatch.fnmatch(name, pattern) for pattern in (*LEFT, *group.drop)):
            path.unlink()
    for name in group.empty:
        (site / name).touch()
    return site


def files_of(folder: Path) -> list[Path]:
    """All files in it, by name."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def complaints(sites: dict[Group, Path], host: Host) -> Iterator[str]:
    """What distributions ask for that the host does not get, or gets in another version."""
    packed = {group: list(metadata.distributions(path=[str(site)])) for group, site in sites.items()}
    every = sorted({(canonicalize_name(one.name), one.version) for of in packed.values() for one in of})
    for (name, first), (other, second) in itertools.pairwise(every):
        if name == other:
            yield f"{name} is packed as {first} and as {second}"
    there = {canonicalize_name(one.name): next(iter(one.specifier), None) for one in map(Requirement, host.has)}
    versions = {name: None if of is None else of.version for name, of in there.items()}
    versions |= dict(every)
    for group, distributions in packed.items():
        for one in distributions:
            yield from (f"{one.name} {one.version} {text}" for text in unmet(one, group, versions, host))


def unmet(one: metadata.Distribution, group: Group, versions: dict[str, str | None], host: Host) -> Iterator[str]:
    """What is amiss with what a distribution asks for."""
    for wanted in map(Requirement, one.requires or ()):
        name = canonicalize_name(wanted.name)
        if name in group.without or (wanted.marker and not wanted.marker.evaluate(host.environment())):
            continue
        if name not in versions:
            yield f"wants {wanted.name}, which is neither packed nor on the host"
        elif versions[name] is not None and not wanted.specifier.contains(versions[name], prereleases=True):
            yield f"wants {wanted.name}{wanted.specifier}, and {versions[name]} is there"


def digest(site: Path, files: Iterable[Path]) -> str:
    """Of names and contents."""
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.relative_to(site).as_posix()}\0{path.stat().st_size}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def archive(name: str, site: Path, folder: Path) -> Path:
    """A folder as an archive, whose name says what is in it; one that is there already stays."""
    files = files_of(site)
    file = folder / f"{name}-{digest(site, files)}.tar.xz"
    for old in set(folder.glob(f"{name}-????????????.tar.xz")) - {file}:
        old.unlink()
    if not file.exists():
        part = file.with_suffix(".part")
        with lzma.open(part, "wb", filters=FILTERS) as packed, tarfile.open(fileobj=packed, mode="w") as into:
            for path in files:
                into.add(path, path.relative_to(site).as_posix(), filter=alike)
        part.rename(file)
    return file


def alike(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """An entry without what differs from host to host."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = OLDEST
    return entry


def site_file(archives: list[Path]) -> str:
    """What a shell sources on the host."""
    names = [file.name for file in archives]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = " ".join(f'"$PWD/{name}"' for name in project["tool"]["hatch"]["build"]["dev-mode-dirs"])
    whole = hashlib.sha256(" ".join(names).encode()).hexdigest()[:12]
    return SITE.format(digest=whole, archives=" ".join(names), packages=packages)


def pack(groups: list[Group], host: Host, folder: Path, limit: float) -> None:
    """Fill FOLDER, and say with what."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "site.sh").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        sites = {}
        for group in groups:
            (own := Path(scratch, f"of-{group.name}")).mkdir()
            sites[group] = install(group, host, own)
        if found := list(complaints(sites, host)):
            sys.exit("\n".join(found))
        archives = [archive(group.name, site, folder) for group, site in sites.items()]
    for file in archives:
        print(f"{file.name:40} {mib(file):6.1f} MiB")
    total = sum(map(mib, archives))
    print(f"{'together':40} {total:6.1f} MiB")
    if total > limit:
        sys.exit(f"{total:.1f} MiB are more than {limit:g} MiB: name fewer groups, or raise --limit-mib")
    (folder / "site.sh").write_text(site_file(archives), encoding="utf-8")


def mib(file: Path) -> float:
    """Its size."""
    return file.stat().st_size / 2**20


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="GROUP", help="default: all")
    parser.add_argument("--limit-mib", type=float, default=64.0, help="what may travel; default 64")
    parser.add_argument("--groups", type=Path, default=Path(__file__).with_name("offline.toml"))
    given = parser.parse_intermixed_args()
    host, groups = declared(given.groups)
    if unknown := [name for name in given.names if name not in groups]:
        parser.error(f"unknown group {unknown[0]!r}: there are {', '.join(groups)}")
    pack([groups[name] for name in given.names] or list(groups.values()), host, given.folder, given.limit_mib)


if __name__ == "__main__":
    main()
