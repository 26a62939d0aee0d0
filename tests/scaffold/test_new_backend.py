"""``linattn new-backend``: the project that it writes can be installed, is found, and conforms."""

from __future__ import annotations

import errno
import importlib
import inspect
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import linattn
import pytest
from linattn import cli
from linattn.call import FORMS
from linattn.errors import OptionError
from linattn.ops._family import OPERATORS
from linattn.registry import check_contract
from linattn.scaffold import Project, project, write
from linattn.scaffold.project import FRAMEWORKS, WITH_TEMPLATE
from linattn.spec import COMPANIONS
from linattn_conformance.adapters import ADAPTERS
from packaging.requirements import Requirement
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
MODULES = {"torch": "torch", "jax": "jax", "mlx": "mlx.core", "numpy": "numpy"}


def new_backend(*words: str):
    return CliRunner().invoke(cli.app, ["new-backend", *words])


def told(done) -> str:
    """What the command says, without the frame that is drawn around it."""
    return " ".join(done.output.replace("│", " ").split())


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote_and_what_comes_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = new_backend("acme")
    assert done.exit_code == 0, done.output
    listed, _, following = done.stdout.partition("\n\nNext:\n")
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert listed.splitlines() == files
    assert files == [
        "linattn-acme/.github/workflows/conformance.yml",
        "linattn-acme/.gitignore",
        "linattn-acme/README.md",
        "linattn-acme/pyproject.toml",
        "linattn-acme/requirements.txt",
        "linattn-acme/src/linattn_acme/__init__.py",
        "linattn-acme/src/linattn_acme/backend.py",
        "linattn-acme/src/linattn_acme/loop.py",
        "linattn-acme/tests/test_backend.py",
    ]
    assert "linattn conformance --backend acme --profile core" in following


def test_names_are_derived():
    project = Project("my-fast_3d")
    assert (project.distribution, project.package, project.kind) == (
        "linattn-my-fast_3d",
        "linattn_my_fast_3d",
        "MyFast3dBackend",
    )


EVERY = [f"{form}_{op}" for op in WITH_TEMPLATE for form in ("chunk", "recurrent", "parallel")]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_written_is_tidy(framework, tmp_path):
    """As the project's own CI would see it."""
    write(Project("acme", framework, EVERY), tmp_path / "acme")
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--no-cache", "."], cwd=tmp_path / "acme", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """The class of a new project with some operators, imported from where it was written."""

    def load(*operators: str, framework: str = "numpy"):
        made = Project("loaded", framework, operators)
        write(made, tmp_path / "loaded")
        monkeypatch.syspath_prepend(str(tmp_path / "loaded" / "src"))
        importlib.invalidate_caches()
        return getattr(importlib.import_module(made.package), made.kind)

    yield load
    for module in [name for name in sys.modules if name.partition(".")[0] == "linattn_loaded"]:
        del sys.modules[module]


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_is_written_as_the_spec_has_it_or_refused_in_a_sentence(operator, loaded):
    spec, complaint = OPERATORS[operator].spec, refusal(operator)
    if complaint is not None:
        with pytest.raises(OptionError) as refused:
            Project("loaded", "numpy", [operator])
        assert str(refused.value) == complaint
        return
    kind = loaded(operator)
    check_contract(kind())
    steps = inspect.getsource(getattr(kind, operator)).partition("def step(S, ")[2]
    arrays = steps.partition(")")[0].split(", ")
    assert {arg.name for arg in (*spec.args, *spec.keyword_args)} == set(arrays)


def test_mlx_is_required_with_a_library_to_load(tmp_path):
    """Elsewhere than on a Mac, ``mlx`` by itself cannot be imported."""
    write(Project("acme", "mlx"), tmp_path / "acme")
    dependencies = tomllib.loads((tmp_path / "acme" / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    assert [Requirement(line) for line in dependencies[1:]] == [
        Requirement("mlx; platform_system == 'Darwin'"),
        Requirement("mlx[cpu]; platform_system == 'Linux'"),
    ]


FOLDER = Path("/no/checkout").as_uri()
COMMIT = "0123456789012345678901234567890123456789"


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (None, f"linattn[conformance]=={linattn.API_VERSION}"),
        (
            {"url": "https://example.com/linattn", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            f"linattn[conformance] @ git+https://example.com/linattn@{COMMIT}",
        ),
        (
            {"url": "https://example.com/linattn-1.0.0.tar.gz", "archive_info": {}},
            "linattn[conformance] @ https://example.com/linattn-1.0.0.tar.gz",
        ),
        ({"url": FOLDER, "dir_info": {"editable": True}}, f"linattn[conformance] @ {FOLDER}"),
    ],
    ids=["index", "git", "archive", "folder"],
)
def test_the_linattn_that_is_here_is_pinned(record, line, tmp_path, monkeypatch):
    told = {"direct_url.json": None if record is None else json.dumps(record)}
    monkeypatch.setattr(project.metadata.PathDistribution, "read_text", lambda self, name: told[name])
    project.source.cache_clear()
    write(Project("acme"), tmp_path / "acme")
    project.source.cache_clear()
    assert (tmp_path / "acme" / "requirements.txt").read_text(encoding="utf-8").splitlines()[1:] == [line]


def test_a_checkout_is_pinned_by_its_commit(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    record = json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.setattr(project.metadata.PathDistribution, "read_text", lambda self, name: record)
    assert project.source.__wrapped__() == f"linattn[conformance] @ git+{project.REPOSITORY}@{head}"


# -- what is refused ---------------------------------------------------------------------------------------------------


RULE = (
    "the name of a backend must be lower case letters, digits, '_' and '-', with a letter first and no '_' or '-' last, "
    "and not 'auto', got "
)
FAMILIES_WITH_TEMPLATE = "delta_rule, dplr, gated_delta_rule, gla, kda, linear_attn, rwkv6, simple_gla, ssd"


def refusal(operator: str) -> str | None:
    """What is said of an operator that no project can start with; ``None`` of the others."""
    family, form = OPERATORS[operator].spec.name, OPERATORS[operator].form
    none = f"there is no template for {operator}"
    if family in COMPANIONS:
        return f"{none}, a companion: there is one for {FAMILIES_WITH_TEMPLATE}"
    if family == "mixed_attn":
        return f"{none}, whose state is no matrix: there is one for {FAMILIES_WITH_TEMPLATE}"
    if form in FORMS:
        return None
    return {
        None: f"{family} is a family, and a backend has forms of it: chunk_{family}, recurrent_{family} or parallel_{family}",
        "decode": f"{none}, which writes to its states: linattn decodes by recurrent_{family}, too",
        "summary": f"{none}, which returns no output: linattn reads it off chunk_{family}, too",
    }[form]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["Acme"], f"{RULE}'Acme'"),
        (["3d"], f"{RULE}'3d'"),
        (["auto"], f"{RULE}'auto'"),
        (["acme kernels"], f"{RULE}'acme kernels'"),
        (["../acme"], f"{RULE}'../acme'"),
        (["acme-"], f"{RULE}'acme-'"),
        (
            ["conformance"],
            "the project's package would be linattn_conformance, which is installed already: choose another name",
        ),
        (["numpy"], "backend 'numpy' is already provided by linattn 1.0.0: choose another name"),
        (["acme", "--framework", "tensorflow"], "unknown framework 'tensorflow': known are torch, jax, mlx, numpy"),
        (
            ["acme", "--op", "chunk_gal"],
            "unknown operator 'chunk_gal': did you mean 'chunk_gla'? families are delta_rule, dplr, gated_delta_rule, gla, "
            "kda, linear_attn, mixed_attn, rwkv6, simple_gla, ssd, forms recurrent, chunk, parallel",
        ),
        (
            ["acme", "--op", "kda"],
            "kda is a family, and a backend has forms of it: chunk_kda, recurrent_kda or parallel_kda",
        ),
        (
            ["acme", "--op", "decode_gla"],
            "there is no template for decode_gla, which writes to its states: linattn decodes by recurrent_gla, too",
        ),
        (
            ["acme", "--op", "chunk_mixed_attn"],
            "there is no template for chunk_mixed_attn, whose state is no matrix: there is one for " + FAMILIES_WITH_TEMPLATE,
        ),
        (
            ["acme", "--op", "summary_gla"],
            "there is no template for summary_gla, which returns no output: linattn reads it off chunk_gla, too",
        ),
        *(
            (
                ["acme", "--op", operator],
                f"there is no template for {operator}, a companion: there is one for {FAMILIES_WITH_TEMPLATE}",
            )
            for operator in ("short_conv", "decode_short_conv", "gated_rms_norm")
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_refusals(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    done = new_backend(*words)
    assert done.exit_code == 2
    assert complaint in told(done)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_whole_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    write_text = Path.write_text

    def full(path, *args, **keywords):
        if path.name == "pyproject.toml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_text(path, *args, **keywords)

    monkeypatch.setattr(Path, "write_text", full)
    done = new_backend("acme")
    assert done.exit_code == 2
    assert "No space left on device: 'linattn-acme/pyproject.toml'" in told(done)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "linattn-acme").mkdir()
    done = new_backend("acme")
    assert done.exit_code == 2
    assert "linattn-acme exists already: nothing was written" in told(done)
    assert not list((tmp_path / "linattn-acme").iterdir())


def test_without_jinja_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = new_backend("acme")
    assert done.exit_code == 2
    assert "needs the package jinja2: pip install 'linattn[conformance]'" in told(done)


# -- installed, and held to what it claims -----------------------------------------------------------------------------


ONE_OF_EACH = [f"chunk_{op}" for op in WITH_TEMPLATE]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> tuple[Path, Path]:
    """The Python of a clean environment with one new project for each framework installed, and their folder.

    It sees the packages of this environment, so that nothing is downloaded.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(symlinks=True).create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    here = sysconfig.get_path("purelib")
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (site / "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n", encoding="utf-8")
    for framework in FRAMEWORKS:
        write(Project(f"my-{framework}", framework, ONE_OF_EACH), folder / framework)
    install = ["install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check"]
    projects = [str(folder / framework) for framework in FRAMEWORKS]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install, *projects], check=True)
    return python, folder


def run(python: Path, *words: str, **variables: str) -> str:
    done = subprocess.run(
        [python, *words], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200", **variables}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_new_backend_is_listed(environment):
    python, _ = environment
    listed = run(python, "-m", "linattn", "backends").partition("\n\n")[0].splitlines()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in listed}
    for framework, module in MODULES.items():
        try:
            __import__(module)
        except ImportError:
            continue
        assert rows[f"my-{framework}"] == f"linattn-my-{framework} 0.1.0 {framework} all but mixed_attn (chunk) ready"


def test_a_new_backend_installs_as_its_workflow_says(environment, tmp_path):
    """With the line that pins linattn, here this checkout's folder, before any index has a release."""
    python, folder = environment
    (folder / "numpy" / "requirements.txt").write_text(f"linattn[conformance] @ {ROOT.as_uri()}\n", encoding="utf-8")
    report = tmp_path / "report.json"  # what pip prints depends on its settings
    words = ["install", "--dry-run", "--report", str(report), "--no-build-isolation", "--no-index"]
    said = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *words, "-r", "requirements.txt", ".[test]"],
        cwd=folder / "numpy",
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    found = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(report.read_text())["install"]}
    assert found == {"linattn": linattn.API_VERSION, "linattn-my-numpy": "0.1.0"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_new_backend_passes_its_own_tests(framework, environment):
    pytest.importorskip(MODULES[framework])
    python, folder = environment
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / framework / "tests"))


@pytest.mark.parametrize("family", ["gla", "ssd"])
@pytest.mark.parametrize("framework", [name for name in FRAMEWORKS if name in ADAPTERS])
def test_a_new_backend_passes_cases_of_the_core(framework, family, environment):
    """Those of a few tokens; all of them run where the page on writing a backend is tested."""
    pytest.importorskip(MODULES[framework])
    python, _ = environment
    words = ["--backend", f"my-{framework}", "--profile", "core", "--case", f"{family}/chunk/*/T?-*", "-n", "1"]
    said = run(python, "-m", "linattn_conformance", *words)
    passed = next(line.split()[1] for line in said.splitlines() if line.startswith(f"{family} "))
    assert int(passed) > 10, said
