"""The folders `/testbed` and `/opt/venv` of a source image, made at those very paths.

Installed scripts and editable installs hold absolute paths, so what fills the folders runs in
bubblewrap with the folders bound where a sandbox will show them, and without a network.
"""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerl.core import tarballs
from swerl.core.errors import ImageError
from swerl.images._python import Python

WORKDIR = "/testbed"
VENV = "/opt/venv"

_STEP_S = 1200.0
"""Most seconds for one step: the slowest install known takes a twentieth."""
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
)
_BYPRODUCTS = "__pycache__/\n*.py[cod]\n.pytest_cache/\n.hypothesis/\n.coverage\n"
"""What tests leave in a work tree; a patch must not carry it."""

_GIT = (
    "git", "-c", "user.name=swerl", "-c", "user.email=swerl@localhost", "-c", "core.autocrlf=false",
    "-c", "commit.gpgsign=false", "-c", "safe.directory=*",
)  # fmt: skip
_DATE = "2000-01-01T00:00:00Z"
"""Date of the one commit: two builds of one spec give the same commit."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer in the making."""

    root: Path
    """Folder on the host that stands for `/`."""
    python: Python
    wheels: Path
    env: Mapping[str, str]
    """Environment of the image."""

    @property
    def testbed(self) -> Path:
        """The host's path of the work tree."""
        return self.root / WORKDIR.lstrip("/")

    @property
    def venv(self) -> Path:
        """The host's path of the virtual environment."""
        return self.root / VENV.lstrip("/")


def make_venv(layer: Layer, requirements: Sequence[str]) -> None:
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


def unpack(layer: Layer, archive: Path) -> None:
    """Unpack a source archive, which holds one folder, as `/testbed`. Raises ImageError."""
    into = layer.root / "unpack"
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as file:
                file.extractall(into)
        else:
            tarballs.unpack(archive, into)
        (top,) = into.iterdir()
        layer.testbed.rmdir()
        top.rename(layer.testbed)
        into.rmdir()
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ImageError(
            f"{archive.name} cannot be unpacked: {error}", hint=f"remove {archive} and build again"
        ) from error


def install(layer: Layer, command: str) -> None:
    """Run the project's install command in `/testbed`, then keep the tree as its only commit."""
    git = layer.testbed / ".git"
    if git.exists():  # an archive may bring one
        shutil.rmtree(git)
    _commit(layer)
    if command:
        run_inside(layer, ["bash", "-c", command])
        shutil.rmtree(git)
        _commit(layer)


def run_inside(layer: Layer, argv: Sequence[str]) -> None:
    """Run a command where the layer stands at its final paths, offline. Raises ImageError."""
    try:
        done = subprocess.run(
            [*_bubblewrap(layer), "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_STEP_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ImageError(
            f"`{' '.join(argv):.80}` took over {_STEP_S:g} s",
            hint="try again on a machine that is less busy",
        ) from error
    if done.returncode:
        said = done.stdout.decode("utf-8", "replace").strip()[-600:]
        raise ImageError(
            f"`{' '.join(argv):.80}` failed (exit code {done.returncode}): {said}",
            hint="correct the instance's requirements or install command",
        )


def _bubblewrap(layer: Layer) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise ImageError(
            "building an image needs bubblewrap",
            hint="install it with `apt-get install bubblewrap`",
        )
    argv = [program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in _SYSTEM:
        if Path(path).is_symlink():
            argv += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).exists():
            argv += ["--ro-bind", path, path]
    argv += ["--ro-bind", str(layer.python.prefix), str(layer.python.prefix)]
    argv += ["--ro-bind", str(layer.wheels), "/wheels"]
    argv += ["--bind", str(layer.venv), VENV, "--bind", str(layer.testbed), WORKDIR]
    argv += ["--chdir", WORKDIR, "--clearenv"]
    for name, value in {**layer.env, "HOME": "/tmp"}.items():
        argv += ["--setenv", name, value]
    return argv


def _commit(layer: Layer) -> None:
    """Make the work tree a repository of one commit that holds every file."""
    dates = {"GIT_AUTHOR_DATE": _DATE, "GIT_COMMITTER_DATE": _DATE}
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **dates}
    for step in (
        ["init", "--quiet", "--initial-branch", "main"],
        ["add", "--all", "--force", "."],
        ["commit", "--quiet", "--allow-empty", "--no-verify", "--message", "base"],
    ):
        done = subprocess.run(
            [*_GIT, *step], cwd=layer.testbed, env=env, capture_output=True, check=False
        )
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise ImageError(f"git {step[0]} failed in the work tree: {said}", hint="install git")
    (layer.testbed / ".git" / "info").mkdir(exist_ok=True)
    (layer.testbed / ".git" / "info" / "exclude").write_text(_BYPRODUCTS)
