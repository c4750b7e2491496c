"""Build source images: a project's released source archive, installed and ready for its tests.

`cache_dir()/images/<name>/` holds `layer/` (`/testbed` as a one-commit repository, and `/opt/venv`)
and `image.json`, written last. A Task refers to it as `built:<name>`. Installed scripts and
editable installs hold absolute paths, so every step runs in bubblewrap with the folders bound at
their final paths.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from swerl.core.errors import ImageError, InputError, SwerlError
from swerl.core.files import unpack_tarball
from swerl.core.secrets import cache_dir
from swerl.core.task import Task
from swerl.images.local import host_settings
from swerl.images.wheels import Python, fetch_sdist, fetch_wheels, find_python
from swerl.tasks.datasets import Row, find_converter

WORKDIR = "/testbed"
VENV = "/opt/venv"
_STEP_S = 1200.0
"""Time limit of one step: 20 times the slowest install known."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl", "/etc/pip.conf")
_NETWORK_ENV = re.compile(
    r"PIP_|.*_proxy$|SSL_CERT_|REQUESTS_CA_BUNDLE$|NPM_CONFIG_", re.IGNORECASE
)
"""Variables with the user's package index and proxy."""
_BYPRODUCTS = "__pycache__/\n*.py[cod]\n.pytest_cache/\n.hypothesis/\n.coverage\n"
"""Files that tests leave in a work tree; a patch must not include them."""
_LAYER_GIT = (
    "git", "-c", "user.name=swerl", "-c", "user.email=swerl@localhost", "-c", "core.autocrlf=false",
    "-c", "commit.gpgsign=false", "-c", "safe.directory=*", "-c", "core.eol=lf",
    "-c", "core.hooksPath=/dev/null", "-c", "clone.defaultRemoteName=origin",
)  # fmt: skip
_DATE = "2000-01-01T00:00:00Z"
"""Date of the only commit, so that two builds of one spec give the same commit."""
_FORMAT = 1
"""Raised when a build's result changes, so that older images are built again."""
_PATH = f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin"


class TestException(BaseModel):
    """A declared test that cannot pass in this tree."""

    __test__ = False
    model_config = ConfigDict(frozen=True)

    test: str
    why: str = ""


class SourceSpec(BaseModel):
    """The recipe for the image of one instance. Unknown keys are notes to people."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Also the name of the image and of its folder."""
    sdist: str = Field(pattern=r"^[^=\s]+==[^=\s]+$")
    """The project's source archive as `name==version`."""
    python: str = Field(pattern=r"^\d+\.\d+$")
    """Release line of Python, such as `3.9`."""
    requirements: tuple[str, ...] = ()
    """Pinned packages of the environment."""
    frozen: tuple[str, ...] = ()
    """The whole environment, pinned; replaces `requirements` if it is given."""
    install: str = ""
    """Shell command that installs the project, run in its folder without a network."""
    env: Mapping[str, str] = {}
    """Environment of the install command and of the image."""
    sha256: str = ""
    """Checksum of the source archive; empty to accept any."""
    dataset: str = ""
    """Dataset of its row on the hub, and below the split; needed without a file of rows."""
    split: str = ""
    test_cmd: str
    p2p_exceptions: tuple[TestException, ...] = ()

    @property
    def pins(self) -> tuple[str, ...]:
        return self.frozen or self.requirements


def shipped() -> dict[str, SourceSpec]:
    """Return the specs that come with swerl by instance id."""
    text = Path(__file__).with_name("instances.json").read_bytes()
    return {spec.instance_id: spec for spec in TypeAdapter(list[SourceSpec]).validate_json(text)}


def prepare(
    spec: SourceSpec, rows: Iterable[Row | SwerlError], say: Callable[[str], None] = lambda _: None
) -> Task:
    """Find the spec's row, build its image unless it exists, and return its Task.

    `say` gets the name of each step. Raises InputError without the row, TaskError if it is
    malformed, ImageError if the image cannot be built.
    """
    say("read the row")
    readable = (row for row in rows if not isinstance(row, SwerlError))
    row = next((row for row in readable if row.get("instance_id") == spec.instance_id), None)
    if row is None:
        message = f"the rows have no instance {spec.instance_id}"
        raise InputError(message, hint="pass rows of SWE-bench with --tasks or --rows")
    task = make_task(spec, row)
    build(spec, say)
    return task


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
        field = ".".join(str(part) for part in first["loc"])
        raise InputError(
            f"{path} is not a list of instance specs: {field}: {first['msg']}",
            hint="docs/guides/images.md shows the fields",
        ) from error


def build(spec: SourceSpec, say: Callable[[str], None] = lambda _: None) -> str:
    """Build the image of a spec unless it exists, and return its reference.

    `say` gets the name of each step. Raises ImageError.
    """

    def fill(layer: SourceLayer) -> None:
        say("fetch wheels")
        fetch_wheels(layer.python, spec.pins, layer.wheels)
        say("make the environment")
        make_venv(layer, spec.pins)
        say("fetch the source archive")
        archive = fetch_sdist(layer.venv / "bin" / "python", spec.sdist, layer.wheels / "sdist")
        _check_sum(archive, spec.sha256)
        unpack(layer, archive)
        say("install")
        install(layer, spec.install)

    env = {"TZ": "UTC", "PYTHONDONTWRITEBYTECODE": "1", **spec.env}
    return _make(spec.instance_id, spec.python, _digest(spec), env, fill)


def build_repository(repo: Path, commit: str, setup: str, name: str) -> str:
    """Build the image of a whole repository at a commit, and return its reference.

    `setup` installs the project into `/opt/venv`, with the network and pip's settings of the user.
    An image of this name that exists is kept. Raises ImageError.
    """

    def fill(layer: SourceLayer) -> None:
        make_venv(layer, ())
        _clone(repo, commit, layer.testbed)
        run_inside(layer, ["bash", "-c", setup], network=True)

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(json.dumps([_FORMAT, setup]).encode()).hexdigest()
    return _make(name, python, digest, {"TZ": "UTC"}, fill)


def _make(
    name: str,
    python_version: str,
    digest: str,
    env: Mapping[str, str],
    fill: Callable[[SourceLayer], None],
) -> str:
    """Make the image `name` unless one of this digest exists, and return its reference.

    Two builds of one name wait for each other. Raises ImageError.
    """
    home = cache_dir() / "images" / name
    try:
        with _alone(home.parent, name), _scratch(home) as scratch:
            if _digest_of(home) != digest:
                python = find_python(python_version)
                env = {"PATH": _PATH, "VIRTUAL_ENV": VENV, "LANG": "C.UTF-8", **env}
                (scratch / "wheels").mkdir()
                part = scratch / name
                fill(SourceLayer(part / "layer", python, scratch / "wheels", env))
                fields = {"layers": ["layer"], "binds": [str(python.prefix)], "env": env}
                text = json.dumps({**fields, "digest": digest}, indent=1) + "\n"
                (part / "image.json").write_text(text, encoding="utf-8")
                shutil.rmtree(home, ignore_errors=True)
                part.rename(home)
    except OSError as error:
        hint = "free some space and build again" if error.errno == errno.ENOSPC else ""
        raise ImageError(f"cannot build {name}: {error}", hint=hint) from error
    return f"built:{name}"


def copy_repository(repo: Path, commit: str, name: str) -> str:
    """Copy a whole repository into the cache, and return its reference as a folder.

    A copy of this name that exists is kept. Raises ImageError.
    """
    folder = cache_dir() / "repositories" / name
    with _alone(folder.parent, name):
        if not folder.exists():
            with _scratch(folder) as scratch:
                _clone(repo, commit, scratch / name)
                (scratch / name).rename(folder)
    return f"dir:{folder}"


def _clone(repo: Path, commit: str, into: Path) -> None:
    """Copy a repository with its whole history, its work tree at a commit. Raises ImageError."""
    steps = (
        ["clone", "--quiet", "--no-hardlinks", "--no-checkout", str(repo.resolve()), str(into)],
        ["-C", str(into), "checkout", "--quiet", "--detach", commit],
        ["-C", str(into), "remote", "remove", "origin"],
    )
    for step in steps:
        process = subprocess.run([*_LAYER_GIT, *step], capture_output=True, check=False)
        if process.returncode:
            complaint = process.stderr.decode("utf-8", "replace").strip()[-300:]
            raise ImageError(f"cannot clone {repo}: {complaint}", hint="check the repository")
    (into / ".git" / "info").mkdir(exist_ok=True)  # a template of the user may lack it
    (into / ".git" / "info" / "exclude").write_text(_BYPRODUCTS)


def _check_sum(archive: Path, digest: str) -> None:
    """Raise ImageError if a source archive is not the one that the spec was verified with."""
    actual = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest and actual != digest:
        message = f"{archive.name} has another checksum: {actual}"
        raise ImageError(message, hint="check the index that pip uses")


def _digest(spec: SourceSpec) -> str:
    """Return a digest of everything that the image depends on, so not of the tests."""
    fields = spec.model_dump(mode="json", include={"sdist", "python", "install", "env"})
    text = json.dumps([_FORMAT, fields, sorted(spec.pins)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _digest_of(home: Path) -> str:
    """Return the digest of the existing image; empty if it is absent or incomplete."""
    try:
        return str(json.loads((home / "image.json").read_text(encoding="utf-8"))["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    """Make a temporary folder beside the folder of an image."""
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}.") as folder:
        yield Path(folder)


@contextmanager
def _alone(images: Path, name: str) -> Iterator[None]:
    """Hold the lock of one image name; the kernel frees it however this process ends."""
    images.mkdir(parents=True, exist_ok=True)
    with (images / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_task(spec: SourceSpec, row: Row) -> Task:
    """Return the Task of the spec's row, to run in its image. Raises TaskError."""
    task = find_converter("swe-bench").to_task(row)
    broken = {exception.test for exception in spec.p2p_exceptions}
    passing = tuple(test for test in task.grading.pass_to_pass if test not in broken)
    # The dataset's command would install the project again; its pip settings serve only that.
    env = {name: value for name, value in task.grading.env.items() if not name.startswith("PIP_")}
    grading = replace(
        task.grading, pass_to_pass=passing, test_command=spec.test_cmd, env=env, timeout_s=600.0
    )
    # The image's repository has one commit of its own, so the dataset's commit is not in it.
    return replace(task, image=f"built:{spec.instance_id}", base_commit="", grading=grading)


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """A layer while it is built."""

    root: Path
    """Folder on the host that becomes `/`."""
    python: Python
    wheels: Path
    env: Mapping[str, str]
    """Environment of the image."""

    @property
    def testbed(self) -> Path:
        return self.root / WORKDIR.lstrip("/")

    @property
    def venv(self) -> Path:
        return self.root / VENV.lstrip("/")


def make_venv(layer: SourceLayer, requirements: Sequence[str]) -> None:
    """Fill `/opt/venv` with exactly these pinned packages. Raises ImageError."""
    layer.venv.mkdir(parents=True)
    layer.testbed.mkdir(parents=True)
    run_inside(layer, [str(layer.python.executable), "-m", "venv", VENV])
    pip = [f"{VENV}/bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    tools = [pin for pin in requirements if pin.split("==")[0] in {"pip", "setuptools", "wheel"}]
    rest = [pin for pin in requirements if pin not in tools]
    for pins in (tools, rest):
        if pins:
            run_inside(layer, [*pip, "--find-links", "/wheels", *pins])


def unpack(layer: SourceLayer, archive: Path) -> None:
    """Unpack a source archive, which has one top folder, as `/testbed`. Raises ImageError."""
    into = layer.root / "unpack"
    try:
        unpack_tarball(archive, into)
        (top,) = into.iterdir()
        layer.testbed.rmdir()
        top.rename(layer.testbed)
        into.rmdir()
    except (OSError, ValueError) as error:
        raise ImageError(
            f"{archive.name} cannot be unpacked: {error}", hint="check the index that pip uses"
        ) from error


def install(layer: SourceLayer, command: str) -> None:
    """Run the project's install command in `/testbed`, then commit the tree. Raises ImageError."""
    git = layer.testbed / ".git"
    if git.exists():  # an archive may bring one
        shutil.rmtree(git)
    _commit(layer)
    if command:
        run_inside(layer, ["bash", "-c", command])
        shutil.rmtree(git)
        _commit(layer)


def run_inside(layer: SourceLayer, argv: Sequence[str], *, network: bool = False) -> None:
    """Run a command with the layer at its final paths, offline by default. Raises ImageError."""
    try:
        process = subprocess.run(
            [*_bubblewrap(layer, network=network), "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_STEP_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ImageError(
            f"`{' '.join(argv):.80}` took more than {_STEP_S:g} s",
            hint="try again on a less busy machine",
        ) from error
    if process.returncode:
        complaint = process.stdout.decode("utf-8", "replace").strip()[-600:]
        raise ImageError(
            f"`{' '.join(argv):.80}` failed (exit code {process.returncode}): {complaint}",
            hint="correct the requirements or the install command",
        )


def _bubblewrap(layer: SourceLayer, *, network: bool) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise ImageError(
            "building an image needs bubblewrap",
            hint="install it with `apt-get install bubblewrap`",
        )
    argv = [program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    env = dict(layer.env)
    if network:
        argv.append("--share-net")
        argv += [word for path in _NETWORK for word in ("--ro-bind-try", path, path)]
        env |= {name: value for name, value in os.environ.items() if _NETWORK_ENV.match(name)}
    for path in (*_SYSTEM, *map(str, host_settings())):
        if Path(path).is_symlink():
            argv += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            argv += ["--ro-bind", path, path]
    argv += ["--ro-bind", str(layer.python.prefix), str(layer.python.prefix)]
    argv += ["--ro-bind", str(layer.wheels), "/wheels"]
    argv += ["--bind", str(layer.venv), VENV, "--bind", str(layer.testbed), WORKDIR]
    argv += ["--chdir", WORKDIR, "--clearenv"]
    for name, value in {**env, "HOME": "/tmp"}.items():
        argv += ["--setenv", name, value]
    return argv


def _commit(layer: SourceLayer) -> None:
    """Make the work tree a repository with every file in one commit."""
    dates = {"GIT_AUTHOR_DATE": _DATE, "GIT_COMMITTER_DATE": _DATE}
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **dates}
    for step in (
        ["init", "--quiet", "--initial-branch", "main"],
        ["add", "--all", "--force", "."],
        ["commit", "--quiet", "--allow-empty", "--no-verify", "--message", "base"],
    ):
        process = subprocess.run(
            [*_LAYER_GIT, *step], cwd=layer.testbed, env=env, capture_output=True, check=False
        )
        if process.returncode:
            complaint = process.stderr.decode("utf-8", "replace").strip()[-300:]
            raise ImageError(
                f"git {step[0]} failed in the work tree: {complaint}", hint="install git"
            )
    (layer.testbed / ".git" / "info").mkdir(exist_ok=True)
    (layer.testbed / ".git" / "info" / "exclude").write_text(_BYPRODUCTS)
