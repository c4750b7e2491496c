"""Find a Python of a given release line on this machine, and fetch packages with its pip."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerl.core.errors import ImageError
from swerl.core.secrets import child_environment

_FETCH_S = 1200.0
"""Time limit of one pip command: a slow index and a dozen large wheels."""
_SHADOWS = ("PYTHON", "PYENV_VERSION", "VIRTUAL_ENV", "__PYVENV")
"""Variables of this process's own Python that would mislead another one."""
_ASK = (
    "import os, sys; print('%d.%d' % sys.version_info[:2], sys.base_prefix,"
    " os.path.realpath(sys.executable))"
)
"""The real file: a virtual environment's own link would lead a sandbox into a hidden folder."""


@dataclass(frozen=True, slots=True)
class Python:
    version: str
    """Release line, such as `3.9`."""
    executable: Path
    prefix: Path
    """Its installation folder."""


def find_python(version: str) -> Python:
    """Return a Python of this release line. Raises ImageError if there is none."""
    for candidate in _candidates(version):
        if python := _ask(candidate, version):
            return python
    raise ImageError(
        f"no Python {version} on this machine",
        hint=f"install one, for example with `pyenv install {version}`",
    )


def fetch_wheels(python: Python, requirements: Sequence[str], folder: Path) -> None:
    """Download or build a wheel of every pinned requirement into the folder.

    The user's pip configuration chooses the index. Raises ImageError.
    """
    if requirements:
        flags = ["--no-deps", "--use-pep517", "--wheel-dir", str(folder)]
        arguments = ["wheel", *flags, *requirements]
        _pip(python.executable, arguments, f"wheels for Python {python.version}")


def fetch_sdist(python: Path, pin: str, folder: Path) -> Path:
    """Download a project's source archive `name==version` into a new folder and return its path.

    pip builds the archive's metadata before it stores the archive, so `python` must have its build
    requirements. Raises ImageError.
    """
    name = pin.split("==")[0]
    flags = ["--no-deps", "--no-build-isolation", "--no-binary", name, "--dest", str(folder)]
    _pip(python, ["download", *flags, pin], f"the source archive {pin}")
    (archive,) = folder.iterdir()
    return archive


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that would mislead another Python."""
    ours = child_environment(PIP_DISABLE_PIP_VERSION_CHECK="1")
    return {name: value for name, value in ours.items() if not name.startswith(_SHADOWS)}


def _candidates(version: str) -> Iterator[Path]:
    """Yield candidate paths of a Python of this line: PATH first, then pyenv's folders."""
    if on_path := shutil.which(f"python{version}"):
        yield Path(on_path)
    environment = child_environment()
    roots = [Path(environment.get("PYENV_ROOT") or Path.home() / ".pyenv")]
    for root in roots:
        shims = root.glob(f"versions/{version}.*/bin/python{version}")
        yield from sorted(shims, reverse=True)


def _ask(candidate: Path, version: str) -> Python | None:
    """Return the Python behind a path, or None; a pyenv shim may exist without a Python."""
    try:
        process = subprocess.run(
            [candidate, "-c", _ASK],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = process.stdout.split()
    if process.returncode or len(words) != 3 or words[0] != version:
        return None
    return Python(version, Path(words[2]), Path(words[1]))


def _pip(python: Path, arguments: Sequence[str], what: str) -> None:
    try:
        process = subprocess.run(
            [python, "-m", "pip", "--quiet", "--no-input", *arguments],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=_FETCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ImageError(
            f"fetching {what} took more than {_FETCH_S:g} s",
            hint="try again",
            retryable=True,
        ) from error
    if process.returncode:
        raise ImageError(
            f"cannot fetch {what}: {_errors_of(process.stderr)}",
            hint="check the network and the index that `pip config list` names",
        )


def _errors_of(complaint: str) -> str:
    """Return the lines of pip's output that name an error; if there are none, its last line."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror:", line, re.IGNORECASE)]
    return " | ".join(errors or lines[-1:] or ["pip printed nothing"])[:400]
