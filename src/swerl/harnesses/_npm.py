"""npm on the host: one package's tarball, or a program with everything that it depends on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from swerl.core.errors import ImageError, InputError

_FETCH_TIMEOUT_S = 600.0
_MISSING = re.compile(r"(?:No matching version found for|404\s+'?)\s*(@?[\w./-]+@[\w.^~*+-]*\w)")
"""How npm names what it did not find."""
_QUIET = ("--ignore-scripts", "--fetch-retries=1", "--no-audit", "--no-fund")


def pack(spec: str, folder: Path) -> tuple[Path, str]:
    """Download a package's tarball into `folder`; return it with the integrity npm states."""
    call([_program(spec), "pack", spec, *_QUIET, "--pack-destination", str(folder)], spec)
    shown = call([_program(spec), "view", spec, "dist.integrity", "--json"], spec)
    return next(folder.glob("*.tgz")), str(json.loads(shown))


def install(package: str, version: str, folder: Path, *, lock: Path | None = None) -> Path:
    """Install a program and its dependencies into `folder/node_modules`; return the lock file.

    With `lock` the tree is that one exactly, each tarball checked by the sha512 written there.
    Without it the packages that are released together with the program are taken of its release:
    it accepts later ones too, but was not tried with them.
    """
    what = f"{package}@{version}"
    wanted: dict[str, Any] = {"private": True, "dependencies": {package: version}}
    locked = folder / "package-lock.json"
    if lock:
        shutil.copy(lock, locked)
    elif siblings := _siblings(package, version):
        wanted["overrides"] = siblings
    (folder / "package.json").write_text(json.dumps(wanted))
    where = ["--prefix", str(folder), "--omit=dev", "--omit=optional", "--no-bin-links"]
    call([_program(what), "ci" if lock else "install", *where, *_QUIET], what)
    return locked


def call(command: list[str], what: str) -> str:
    """Run a command that fetches `what`; raise InputError where there is no such thing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ImageError(
            f"fetching {what} took more than {_FETCH_TIMEOUT_S:.0f} s",
            hint="try again on a faster connection",
        ) from error
    if done.returncode == 0:
        return done.stdout
    if "ETARGET" in done.stderr or "E404" in done.stderr:
        found = _MISSING.search(done.stderr)
        missing = found[1] if found and found[1] != what else ""
        message = f"the registry has no {missing or what}"
        message += f", which {what} needs" if missing else ""
        raise InputError(message, hint="give a published version")
    lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    raise ImageError(
        f"cannot fetch {what}: {(lines or ['no reason given'])[0][:200]}",
        hint="check the network and the registry settings, then try again",
    )


def _siblings(package: str, version: str) -> dict[str, str]:
    """Return what a program needs of its own scope that carries the same version."""
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
