"""Build source images: a project's released source archive, installed and ready for its tests.

`cache_dir()/images/<name>/` then holds `layer/` (`/testbed` as a one-commit repository, and
`/opt/venv`) and, written last, `image.json`. A Task names it `built:<name>`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from swerl.core.chat import Json
from swerl.core.errors import ImageError, InputError, TaskError
from swerl.core.secrets import cache_dir
from swerl.core.task import Task
from swerl.images import _layer as layers
from swerl.images._fit import misfits
from swerl.images._python import fetch_sdist, fetch_wheels, find_python
from swerl.tasks.datasets import find_converter

_FORMAT = 1
"""Raised when a build's result changes, so that images of before are built anew."""
_PATH = f"{layers.VENV}/bin:/usr/local/bin:/usr/bin:/bin"


class TestException(BaseModel):
    """A declared test that cannot hold in this tree."""

    __test__ = False
    model_config = ConfigDict(frozen=True)

    test: str
    why: str = ""


class SourceSpec(BaseModel):
    """How to build the image of one instance. Unknown keys are notes to people."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Also the image's name and that of its folder."""
    sdist: str = Field(pattern=r"^[^=\s]+==[^=\s]+$")
    """The project's source archive as `name==version`."""
    python: str = Field(pattern=r"^\d+\.\d+$")
    """Release line of Python, such as `3.9`."""
    requirements: tuple[str, ...] = ()
    """Pinned packages of the environment."""
    frozen: tuple[str, ...] = ()
    """The whole environment, pinned; taken in place of `requirements` where given."""
    install: str = ""
    """Shell command that installs the project, run in its folder without a network."""
    env: Mapping[str, str] = {}
    """Environment of the install command and of the image."""
    test_cmd: str
    p2p_exceptions: tuple[TestException, ...] = ()

    @property
    def pins(self) -> tuple[str, ...]:
        """The packages to install."""
        return self.frozen or self.requirements


def read_specs(path: Path) -> list[SourceSpec]:
    """Read the specs of a JSON file. Raises InputError."""
    try:
        return TypeAdapter(list[SourceSpec]).validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}", hint="pass a JSON list of instance specs"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{path} is no list of instance specs: {where}: {first['msg']}",
            hint="docs/guides/datasets.md shows the fields",
        ) from error


def build(spec: SourceSpec, say: Callable[[str], None] = lambda _: None) -> str:
    """Build the image of a spec unless it stands already, and return its reference.

    `say` hears each step. Two builds of one name wait for each other. Raises ImageError.
    """
    images = cache_dir() / "images"
    try:
        with _alone(images, spec.instance_id):
            home = images / spec.instance_id
            if _digest_of(home) != _digest(spec):
                _build(spec, home, say)
    except OSError as error:
        hint = "free some space and build again" if error.errno == errno.ENOSPC else ""
        raise ImageError(f"cannot build {spec.instance_id}: {error}", hint=hint) from error
    return f"built:{spec.instance_id}"


def make_task(spec: SourceSpec, row: Mapping[str, Json], dataset: str = "swe-bench") -> Task:
    """Return the Task of a dataset's row that runs in the spec's image. Raises TaskError."""
    if (named := row_id(row, dataset)) != spec.instance_id:
        raise TaskError(
            f"the row is of {named}, the spec of {spec.instance_id}",
            hint="pass the rows that the specs were written for",
        )
    task = find_converter(dataset).to_task(row)
    broken = {exception.test for exception in spec.p2p_exceptions}
    kept = tuple(test for test in task.grading.pass_to_pass if test not in broken)
    # The dataset's command installs the project again, and its settings of pip are for that.
    env = {name: value for name, value in task.grading.env.items() if not name.startswith("PIP_")}
    grading = replace(
        task.grading, pass_to_pass=kept, test_command=spec.test_cmd, env=env, timeout_s=600.0
    )
    # The image's repository has one commit of its own, so the dataset's commit is not in it.
    return replace(task, image=f"built:{spec.instance_id}", base_commit="", grading=grading)


def misfits_of(spec: SourceSpec, task: Task) -> list[str]:
    """Return what does not fit between a Task's diffs and the image that stands, a line each."""
    return misfits(task, cache_dir() / "images" / spec.instance_id / "layer" / "testbed")


def row_id(row: Mapping[str, Json], dataset: str) -> str:
    """Return the id of a row's Task. Raises TaskError where only a whole row would tell."""
    return str(row.get("instance_id") or find_converter(dataset).to_task(row).id)


def _build(spec: SourceSpec, home: Path, say: Callable[[str], None]) -> None:
    python = find_python(spec.python)
    wheels = cache_dir() / "wheels" / f"python{spec.python}"
    say("fetch wheels")
    fetch_wheels(python, spec.pins, wheels)
    env = {
        "PATH": _PATH,
        "VIRTUAL_ENV": layers.VENV,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONDONTWRITEBYTECODE": "1",
        **spec.env,
    }
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}.") as scratch:
        part = Path(scratch) / home.name
        layer = layers.Layer(part / "layer", python, wheels, env)
        say("make the environment")
        layers.make_venv(layer, spec.pins)
        say("fetch the source archive")
        archive = fetch_sdist(layer.venv / "bin" / "python", spec.sdist, cache_dir() / "sdists")
        layers.unpack(layer, archive)
        say("install")
        layers.install(layer, spec.install)
        binds = [str(python.prefix)]
        _write_description(part, {"layers": ["layer"], "binds": binds, "env": env}, _digest(spec))
        shutil.rmtree(home, ignore_errors=True)
        part.rename(home)


def _write_description(home: Path, fields: Mapping[str, object], digest: str) -> None:
    text = json.dumps({**fields, "digest": digest}, indent=1) + "\n"
    (home / "image.json").write_text(text, encoding="utf-8")


def _digest(spec: SourceSpec) -> str:
    """Name everything that the image depends on; tests and their exceptions are not in it."""
    fields = spec.model_dump(mode="json", include={"sdist", "python", "install", "env"})
    text = json.dumps([_FORMAT, fields, sorted(spec.pins)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_of(home: Path) -> str:
    """Return the digest of what stands there, or nothing where the image is not whole."""
    try:
        return str(json.loads((home / "image.json").read_text(encoding="utf-8"))["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@contextmanager
def _alone(images: Path, name: str) -> Iterator[None]:
    """Hold the lock of one image name; the kernel frees it however this process ends."""
    images.mkdir(parents=True, exist_ok=True)
    with (images / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
