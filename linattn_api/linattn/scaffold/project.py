"""What a new plug-in project is made of: the author's choices, checked, and the templates that they fill in."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..errors import BackendConflict, OptionError
from ..ops._family import operator_named
from ..plugin import API_VERSION
from ..registry import registry
from ..spec import COMPANIONS, FAMILIES, OpSpec

__all__ = ["FRAMEWORKS", "Framework", "Operator", "Project", "source", "write"]

REPOSITORY = "https://github.com/linattn/linattn"

NAME = re.compile(r"(?!auto$)[a-z]([a-z0-9_-]*[a-z0-9])?")
SMALL = {"B": 2, "T": 20, "H": 2, "HV": 4, "K": 8, "V": 6}
WITH_TEMPLATE = tuple(name for name, spec in FAMILIES.items() if spec.state_type is None)
"""Families whose state is a matrix: the recurrence of any other does not fit the loop of the template."""
INSTEAD = {
    "decode": "which writes to its states: linattn decodes by recurrent_{family}, too",
    "summary": "which returns no output: linattn reads it off chunk_{family}, too",
}
"""Forms of a family that are no run of the loop: what they are, and what a backend without them has."""
MLX = "mlx; platform_system == 'Darwin'", "mlx[cpu]; platform_system == 'Linux'"
"""Elsewhere than on a Mac, ``mlx`` alone has no library to load."""


@dataclass(frozen=True)
class Framework:
    """How the templates spell what frameworks spell differently.

    Attributes:
        title: Its name, for people.
        requires: What the project requires.
        load: The import.
        xp: The module's name in the code.
        wide: The dtype of sums, from the dtype of ``v``.
        cast: An array in another dtype, of ``{x}`` and ``{dtype}``.
        repeat: Every head of ``x`` ``n`` times.
        zeros: A state of zeros.
        array: An array from a NumPy one, of ``{x}``.
        differentiable: Gradients come from the framework.
    """

    title: str
    requires: tuple[str, ...]
    load: str
    xp: str
    wide: str
    cast: str
    repeat: str
    zeros: str
    array: str
    differentiable: bool = True
    single: str = ""
    """Why calls in float64 are refused, where the framework's own functions are not as precise."""

    def to(self, x: str, dtype: str) -> str:
        """The code that casts ``x``."""
        return self.cast.format(x=x, dtype=dtype)

    def made_of(self, x: str) -> str:
        """The code that makes an array of the NumPy array ``x``."""
        return self.array.format(x=x)


def _like_numpy(
    title: str, requires: tuple[str, ...], load: str, xp: str, array: str, differentiable: bool = True, single: str = ""
) -> Framework:
    """One that follows NumPy's names."""
    return Framework(
        title=title,
        requires=requires,
        load=load,
        xp=xp,
        wide=f"{xp}.float64 if v.dtype == {xp}.float64 else {xp}.float32",
        cast="{x}.astype({dtype})",
        repeat=f"{xp}.repeat(x, HV // x.shape[2], axis=2)",
        zeros=f"{xp}.zeros((N, HV, K, V), dtype=wide)",
        array=array,
        differentiable=differentiable,
        single=single,
    )


FRAMEWORKS = {
    "torch": Framework(
        title="PyTorch",
        requires=("torch",),
        load="import torch",
        xp="torch",
        wide="torch.float64 if v.dtype == torch.float64 else torch.float32",
        cast="{x}.to({dtype})",
        repeat="x.repeat_interleave(HV // x.shape[2], 2)",
        zeros="v.new_zeros((N, HV, K, V), dtype=wide)",
        array="torch.from_numpy({x})",
    ),
    "jax": _like_numpy("JAX", ("jax",), "import jax.numpy as jnp", "jnp", "jnp.asarray({x})"),
    "mlx": _like_numpy(
        "MLX", MLX, "import mlx.core as mx", "mx", "mx.array({x})", single="mx.exp of float64 has the precision of float32"
    ),
    "numpy": _like_numpy("NumPy", ("numpy",), "import numpy as np", "np", "{x}", differentiable=False),
}


class Operator(NamedTuple):
    """One operator that the new backend has: a form of a family."""

    method: str
    form: str
    spec: OpSpec

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """A small shape for each array, for the project's tests."""
        given = (*self.spec.args, *(arg for arg in self.spec.keyword_args if arg.name in self.keywords))
        return {arg.name: tuple(SMALL[symbol] for symbol in arg.shapes[0]) for arg in given}

    @property
    def arrays(self) -> str:
        """The positional parameters as a method declares them, ``gv=None`` where one is optional."""
        return ", ".join(f"{arg.name}=None" if arg.optional else arg.name for arg in self.spec.args)

    @property
    def keywords(self) -> tuple[str, ...]:
        """The keyword parameters, in the order of the operator's own."""
        return tuple(name for name in self.spec.keywords if name in KEYWORDS)

    @property
    def looped(self) -> tuple[str, ...]:
        """The arrays that the loop goes through, as its step takes them."""
        return LOOPED.get(self.spec.name) or tuple(arg.name for arg in self.spec.args)

    @property
    def scale(self) -> str:
        """The code of what multiplies the output."""
        return "scale" if "scale" in self.keywords else "1.0"


KEYWORDS = ("scale", "D", "z", "dt_bias", "dt_softplus", "dt_limit", "initial_state", "output_final_state", "cu_seqlens")
"""What the templates take of an operator's keywords. A call that asks for more is unsupported, or linattn rewrites it."""
LOOPED = {"ssd": ("C", "B", "x", "dt", "A", "D", "z", "dt_bias")}
"""The arrays of a loop, for families whose positional ones do not begin with queries, keys and values: these have to."""


@dataclass(frozen=True)
class Project:
    """A plug-in project to be written.

    Args:
        name: Name of the backend: lower case letters, digits, ``_`` and ``-``, a letter first, and a letter or digit last.
        framework: One of ``torch``, ``jax``, ``mlx`` and ``numpy``. Default ``torch``.
        operators: The operators to start with, e.g. ``["chunk_gla"]``, which is the default.

    Raises:
        OptionError: One of them is wrong.
        BackendConflict: A backend of that name, or a package of the name that this one would have, is installed.
    """

    name: str
    framework: str = "torch"
    operators: Sequence[str] = ("chunk_gla",)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            rule = "lower case letters, digits, '_' and '-', with a letter first and no '_' or '-' last, and not 'auto'"
            raise OptionError(f"the name of a backend must be {rule}, got {self.name!r}")
        if self.name in registry.records:
            taken = registry.records[self.name].origin
            raise BackendConflict(f"backend {self.name!r} is already provided by {taken}: choose another name")
        if importlib.util.find_spec(self.package) is not None:
            raise BackendConflict(
                f"the project's package would be {self.package}, which is installed already: choose another name"
            )
        if self.framework not in FRAMEWORKS:
            raise OptionError(f"unknown framework {self.framework!r}: known are {', '.join(FRAMEWORKS)}")
        _ = self.methods

    @property
    def distribution(self) -> str:
        """Name of the distribution and of its folder, e.g. ``linattn-acme``."""
        return f"linattn-{self.name}"

    @property
    def package(self) -> str:
        """Name of the import package, e.g. ``linattn_acme``."""
        return self.distribution.replace("-", "_")

    @property
    def kind(self) -> str:
        """Name of the class, e.g. ``AcmeBackend``."""
        return "".join(part.capitalize() for part in re.split("[-_]+", self.name)) + "Backend"

    @property
    def methods(self) -> list[Operator]:
        """The operators, each once."""
        return [_operator(name) for name in dict.fromkeys(self.operators)]

    @property
    def api(self) -> str:
        """The versions of linattn that it is for: this major version."""
        major = int(API_VERSION.partition(".")[0])
        return f">={major},<{major + 1}"


@functools.cache
def source() -> str:
    """The line of requirements that installs this very linattn, wherever it came from.

    A release from an index is pinned by its version; a checkout by its commit; any other folder or archive by its address.
    """
    name = "linattn[conformance]"
    record = metadata.distribution("linattn").read_text("direct_url.json")
    if record is None:
        return f"{name}=={API_VERSION}"
    direct: dict[str, Any] = json.loads(record)
    if "vcs_info" in direct:
        return f"{name} @ {direct['vcs_info']['vcs']}+{direct['url']}@{direct['vcs_info']['commit_id']}"
    commit = _commit(url2pathname(urlsplit(str(direct["url"])).path)) if "dir_info" in direct else None
    return f"{name} @ git+{REPOSITORY}@{commit}" if commit else f"{name} @ {direct['url']}"


def _commit(folder: str) -> str | None:
    """The commit that is checked out in a folder; ``None`` without git, or if the folder is no checkout."""
    if not Path(folder, ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _operator(name: str) -> Operator:
    function = operator_named(name)
    spec: OpSpec = function.spec
    if spec.name not in WITH_TEMPLATE:
        why = "a companion" if spec.name in COMPANIONS else "whose state is no matrix"
        raise OptionError(f"there is no template for {name}, {why}: there is one for {', '.join(WITH_TEMPLATE)}")
    if function.form is None:
        raise OptionError(
            f"{name} is a family, and a backend has forms of it: chunk_{name}, recurrent_{name} or parallel_{name}"
        )
    if function.form in INSTEAD:
        raise OptionError(f"there is no template for {name}, {INSTEAD[function.form].format(family=spec.name)}")
    return Operator(name, function.form, spec)


def write(project: Project, folder: Path) -> list[Path]:
    """Write the files of a project into a new folder; all of them or none.

    Args:
        project: What to write.
        folder: Where; it must not exist.

    Returns:
        The files, relative to ``folder``.

    Raises:
        FileExistsError: ``folder`` exists.
        OSError: It cannot be written, whatever the reason.
        ModuleNotFoundError: Jinja is not installed.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if folder.exists():
        raise FileExistsError(f"{folder} exists already: nothing was written")
    environment = Environment(
        loader=PackageLoader(__package__ or "linattn.scaffold"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    texts = {
        _target(template, project): environment.get_template(template).render(
            project=project,
            framework=FRAMEWORKS[project.framework],
            methods=project.methods,
            source=source(),
            repository=REPOSITORY,
        )
        for template in _templates(files(__package__ or "linattn.scaffold").joinpath("templates"), PurePosixPath())
    }
    try:
        for path, text in texts.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return sorted(texts)


def _templates(folder: Traversable, below: PurePosixPath) -> list[str]:
    """Every template but the macros, as Jinja names them."""
    found: list[str] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _templates(entry, below / entry.name)
        elif entry.name.endswith(".jinja") and entry.name != "steps.jinja":
            found.append(str(below / entry.name))
    return found


def _target(template: str, project: Project) -> Path:
    """Where a template's text goes: ``_github`` stands for ``.github``, which tools for packaging like to skip."""
    parts = [project.package if part == "PACKAGE" else part for part in PurePosixPath(template.removesuffix(".jinja")).parts]
    return Path(*[f".{part[1:]}" if part.startswith("_") and not part.startswith("__") else part for part in parts])
