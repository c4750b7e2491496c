"""Host folders in a remote sandbox: packed once, uploaded where the image has them not."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import tarfile
from pathlib import Path

from swerl.core import secrets
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Mount
from swerl.sandboxes._e2b.job import new_folder
from swerl.sandboxes._e2b.runner import Runner
from swerl.sandboxes._e2b.sdk import Machine

UNPACK = """
mkdir -p -- "$2" && tar -xzf "$1" -C "$2" --no-same-owner && chmod -R a+rX,a-w -- "$2"
code=$?; rm -f -- "$1"; exit $code
"""
"""Shell script that unpacks an uploaded folder where nobody but root may change it."""


async def upload(runner: Runner, machine: Machine, mount: Mount) -> str:
    """Upload a folder, packed, and return where its pack lies in the sandbox."""
    packed = await asyncio.to_thread(_packed, mount.source.resolve())
    path = f"{new_folder()}.tgz"

    async def attempt() -> bool:
        with packed.open("rb") as file:
            await machine.write(path, file, "root")
        return True

    await runner.persist(attempt)
    return path


def _packed(source: Path) -> Path:
    """Return the pack of a folder, made where it is not in the cache; one process makes it."""
    packed = secrets.cache_dir() / "e2b" / f"{_fingerprint(source)}.tar.gz"
    try:
        packed.parent.mkdir(parents=True, exist_ok=True)
        with packed.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not packed.exists():
                _pack(source, packed)
    except OSError as error:
        message = f"cannot pack {source} for upload: {error.strerror or error}"
        hint = "free space there, or name another SWERL_CACHE"
        raise SandboxError(message, hint=hint) from error
    return packed


def _fingerprint(source: Path) -> str:
    """Return a key that changes with any file of the folder."""
    if not source.is_dir():
        raise SandboxError(
            f"the folder {source} to mount is not there",
            hint="`swerl agents fetch` gets an agent's files",
        )
    digest = hashlib.sha256(str(source).encode())
    for folder, folders, names in os.walk(source):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)  # noqa: PTH118  thousands of files
            stat = os.lstat(path)
            digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:32]


def _pack(source: Path, packed: Path) -> None:
    """Pack under a temporary name, then rename."""
    partial = packed.with_suffix(".part")
    with tarfile.open(partial, "w:gz", compresslevel=4) as archive:
        archive.add(source, arcname=".")
    partial.replace(packed)
