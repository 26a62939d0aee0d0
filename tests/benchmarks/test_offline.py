"""Packing for a host without network, with a pip that makes small distributions."""

import random
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import offline
finally:
    sys.path.remove(str(BENCHMARKS))

GROUPS = """
[host]
python = "3.12"
machine = "x86_64"
platforms = ["manylinux_2_28"]
has = ["torch==2.11.0", "rich"]

[groups.one]
requirements = ["alpha==1.0", "beta==2.0"]

[groups.two]
requirements = ["gamma==3.0"]
source = true
tools = ["wheel"]
environment = {GAMMA_PLAIN = "1"}
drop = ["gamma_*"]
empty = ["compiled.py"]
"""


class Pip:
    """Makes distributions of one module, and remembers how it was called."""

    def __init__(self):
        self.calls, self.needs, self.size = [], {}, 10

    def __call__(self, *arguments, **environment):
        arguments = [str(x) for x in arguments]
        self.calls.append((arguments, environment))
        if arguments[0] == "wheel":
            made = Path(arguments[arguments.index("-w") + 1])
            made.mkdir()
            for requirement in (x for x in arguments if "==" in x):
                (made / f"{requirement}.whl").touch()
            return
        site = Path(arguments[arguments.index("--target") + 1])
        site.mkdir(exist_ok=True)
        for requirement in (x for x in arguments if "==" in x and not x.startswith("-")):
            name, version = Path(requirement).name.removesuffix(".whl").split("==")
            (site / f"{name}.py").write_text(f"VERSION = '{version}'\n")
            (site / f"{name}_more.py").write_bytes(random.Random(name).randbytes(self.size))
            info = site / f"{name}-{version}.dist-info"
            info.mkdir()
            asks = "".join(f"Requires-Dist: {need}\n" for need in self.needs.get(name, ()))
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asks}")
            (info / "direct_url.json").write_text(str(site))
        (site / "bin").mkdir(exist_ok=True)
        (site / "bin" / "alpha").touch()


@pytest.fixture
def pip(monkeypatch):
    pip = Pip()
    monkeypatch.setattr(offline, "pip", pip)
    return pip


def pack(monkeypatch, tmp_path, *arguments):
    """Run the command; the folder that it fills."""
    groups = tmp_path / "groups.toml"
    groups.write_text(GROUPS)
    monkeypatch.setattr(sys, "argv", ["offline.py", str(tmp_path / "out"), *arguments, "--groups", str(groups)])
    offline.main()
    return tmp_path / "out"


def sourced(folder, home, program, where=offline.ROOT):
    """A program of Python, run in a shell that has sourced ``site.sh`` twice."""
    script = f'. "{folder}/site.sh" && . "{folder}/site.sh" && "{sys.executable}" -c "$0"'
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(home)}
    return subprocess.run(["bash", "-c", script, program], cwd=where, env=environment, capture_output=True, text=True)


def test_a_shell_that_sources_it_imports_what_is_packed_and_the_checkout(pip, monkeypatch, tmp_path, capsys):
    folder = pack(monkeypatch, tmp_path)
    assert [line.split("-")[0] for line in capsys.readouterr().out.splitlines()[:2]] == ["one", "two"]
    program = """
import importlib.metadata, importlib.util, os, sys, alpha, compiled, gamma
print(alpha.VERSION, importlib.metadata.version("gamma"), importlib.util.find_spec("gamma_more"))
folders = os.environ["PYTHONPATH"].split(":")
print(len(folders), folders[-1], sorted(os.listdir(folders[-1])))
print([os.path.basename(folder) for folder in reversed(folders[:-1])])
print(importlib.util.find_spec("linattn_backends").origin)
"""
    done = sourced(folder, tmp_path / "home", program)
    assert done.returncode == 0, done.stderr
    versions, site, packages, origin = done.stdout.splitlines()
    assert versions == "1.0 3.0 None"
    assert site.startswith(f"5 {tmp_path}/home/.cache/linattn/")
    assert "bin" not in site
    assert packages == "['linattn_api', 'backends', 'conformance', 'benchmarks']"
    assert origin == str(offline.ROOT / "backends/linattn_backends/__init__.py")
    (unpacked,) = (tmp_path / "home/.cache/linattn").iterdir()
    (unpacked / "alpha.py").write_text("VERSION = 'kept'")
    assert sourced(folder, tmp_path / "home", "import alpha; print(alpha.VERSION)").stdout == "kept\n"


def test_it_is_sourced_in_a_checkout(pip, monkeypatch, tmp_path):
    done = sourced(pack(monkeypatch, tmp_path, "one"), tmp_path / "home", "", where=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"site.sh: source it in the root of a checkout of linattn, not in {tmp_path}\n"


def test_an_archive_that_is_cut_leaves_nothing_behind_that_is_taken_for_whole(pip, monkeypatch, tmp_path):
    folder = pack(monkeypatch, tmp_path, "one")
    (archive,) = folder.glob("one-*.tar.xz")
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    assert sourced(folder, tmp_path / "home", "").returncode == 1
    archive.write_bytes(whole)
    assert sourced(folder, tmp_path / "home", "import alpha").returncode == 0


def test_what_has_changed_is_packed_again(pip, monkeypatch, tmp_path):
    folder = pack(monkeypatch, tmp_path)
    before = {file: file.stat().st_mtime_ns for file in folder.glob("*.tar.xz")}
    assert len(before) == 2
    pip.size += 1
    pip.needs["gamma"] = ["rich"]
    pack(monkeypatch, tmp_path, "one")
    after = set(folder.glob("*.tar.xz"))
    assert [file.name.split("-")[0] for file in before.keys() & after] == ["two"]
    assert [file.name.split("-")[0] for file in after - before.keys()] == ["one"]
    pack(monkeypatch, tmp_path, "one")
    assert set(folder.glob("*.tar.xz")) == after


def test_what_may_not_travel_is_refused(pip, monkeypatch, tmp_path):
    pack(monkeypatch, tmp_path)
    pip.size = 50_000
    with pytest.raises(SystemExit) as refused:
        pack(monkeypatch, tmp_path, "--limit-mib", "0.05")
    assert refused.value.code == "0.1 MiB are more than 0.05 MiB: name fewer groups, or raise --limit-mib"
    assert not (tmp_path / "out" / "site.sh").exists()


def test_what_distributions_ask_for_must_be_there(pip, monkeypatch, tmp_path):
    pip.needs = {
        "alpha": ["torch>=2.12", "beta<2", "Rich>=99", "delta>=1", "epsilon; python_version < '3.12'", "zeta; extra == 'x'"],
        "gamma": ["alpha>=1", "torch>=2"],
    }
    monkeypatch.setattr(sys.modules[__name__], "GROUPS", GROUPS.replace('"gamma==3.0"', '"gamma==3.0", "Beta==2.1"'))
    with pytest.raises(SystemExit) as refused:
        pack(monkeypatch, tmp_path)
    assert refused.value.code.splitlines() == [
        "beta is packed as 2.0 and as 2.1",
        "alpha 1.0 wants torch>=2.12, and 2.11.0 is there",
        "alpha 1.0 wants beta<2, and 2.1 is there",
        "alpha 1.0 wants delta, which is neither packed nor on the host",
    ]


def test_wheels_are_made_from_source_with_their_tools(pip, monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    pack(monkeypatch, tmp_path, "two")
    (tools, _), (wheel, environment), (install, _) = pip.calls
    assert tools[-1] == "wheel"
    assert environment == {"GAMMA_PLAIN": "1", "PYTHONPATH": tools[tools.index("--target") + 1]}
    assert wheel[:4] == ["wheel", "--no-deps", "--no-build-isolation", "--no-binary=:all:"]
    assert {"--python-version=3.12", "--platform=manylinux_2_28_x86_64", "--only-binary=:all:", "--no-deps"} <= set(install)
    assert install[-1].endswith("gamma==3.0.whl")


def test_what_pip_says_is_shown_where_it_fails():
    with pytest.raises(SystemExit, match=r"^pip download failed:\n") as failed:
        offline.pip("download", "--no-index", "--no-such-option")
    assert "no such option: --no-such-option" in failed.value.code


def test_unknown_groups_are_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        pack(monkeypatch, tmp_path, "three")
    assert capsys.readouterr().err.endswith("error: unknown group 'three': there are one, two\n")


def test_the_core_has_what_it_needs_there():
    host, groups = offline.declared(BENCHMARKS / "offline.toml")
    brought = [one for group in groups.values() if not group.source for one in group.requirements]
    there = {canonicalize_name(Requirement(one).name) for one in (*host.has, *brought)}
    project = tomllib.loads((offline.ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["dependency-groups"]["test"]]
    assert {canonicalize_name(Requirement(one).name) for one in needed} <= there
