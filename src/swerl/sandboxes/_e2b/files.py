"""Read and write a sandbox's files, and upload host folders as its mounts.

Files are checked and written inside, as root; large ones are transferred by the provider. A mount
is packed once, and uploaded if the image lacks it.
"""

from __future__ import annotations

import asyncio
import fcntl
import tarfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from swerl.core import secrets
from swerl.core.errors import SandboxError
from swerl.core.sandbox import Exec, Mount, file_error
from swerl.sandboxes._e2b.runner import INLINE_BYTES, Runner, new_folder
from swerl.sandboxes._e2b.sdk import RemoteSandbox

_MISSING, _NOT_PLAIN, _LARGE, _FULL, _HOLES, _FOLDER = 44, 45, 46, 47, 48, 49
_MAX_SPARSE_BYTES = 256 << 20
"""Largest sparse file that is read: the size of such a file is not bounded by a disk."""
_READ = f"""
[ -e "$1" ] || exit {_MISSING}
[ ! -d "$1" ] || exit {_FOLDER}
[ -f "$1" ] || exit {_NOT_PLAIN}
set -- "$1" $(stat -L -c '%s %b %B' -- "$1")
[ "$2" -le {_MAX_SPARSE_BYTES} ] || [ $(($3 * $4)) -ge "$2" ] || exit {_HOLES}
[ "$2" -le {INLINE_BYTES} ] || exit {_LARGE}
exec cat -- "$1"
"""
_WRITE = f"""
[ ! -d "$1" ] || exit {_FOLDER}
if [ -e "$1" ] && [ ! -f "$1" ]; then exit {_NOT_PLAIN}; fi
parent() {{ up=$(dirname -- "$1"; echo .); up=${{up%?.}}; }}
parent "$1"; folder=$up new=
while [ ! -e "$up" ]; do new=$up; parent "$up"; done
own() {{ chown -R -- "$owner" "$1" 2>/dev/null; :; }} # if root may not, there is one user only
owner=$2
[ -z "$new" ] || {{ mkdir -p -- "$folder" && own "$new"; }} || exit
[ -e "$1" ] || made=1
cat >"$1" || exit {_FULL}
[ -z "$made" ] || own "$1"
"""
UNPACK = """
mkdir -p -- "$2" && tar -xzf "$1" -C "$2" --no-same-owner && chmod -R a+rX,a-w -- "$2"
code=$?; rm -f -- "$1"; exit $code
"""
"""Shell script that unpacks an uploaded folder; only root may change the files."""


@dataclass(frozen=True, slots=True)
class SandboxFiles:
    """The files of one sandbox."""

    runner: Runner
    remote: RemoteSandbox
    shell: Callable[[list[str], bytes, str], Awaitable[Exec]]
    """Runs a command as root; arguments: its words, its input, or a file with its input."""
    owner: str
    """`user:group` that written files belong to."""

    async def read(self, path: str) -> bytes:
        """Return a file. Raises FileNotFoundError, and SandboxFileError if it is no plain file."""
        path = _absolute(path)
        done = await self.shell(["sh", "-c", _READ, "swerl", path], b"", "")
        if done.exit_code == 0:
            return done.stdout
        if done.exit_code != _LARGE:
            raise self._error("read", path, done)
        data = b""

        async def attempt() -> bool:
            nonlocal data
            data = await self.remote.read(path)
            return True

        await self.runner.persist(attempt)
        return data

    async def write(self, path: str, data: bytes) -> None:
        path = _absolute(path)
        argv = ["sh", "-c", _WRITE, "swerl", path, self.owner]
        if len(data) <= INLINE_BYTES // 2:
            done = await self.shell(argv, data, "")
        else:
            uploaded = f"{new_folder()}.up"
            await self.runner.upload(uploaded, data, "root")
            done = await self.shell(argv, b"", uploaded)
        if done.exit_code:
            raise self._error("write", path, done)

    def _error(self, verb: str, path: str, done: Exec) -> Exception:
        if done.exit_code == _MISSING:
            return FileNotFoundError(f"no file {path} in sandbox {self.remote.id}")
        detail = done.stderr.decode(errors="replace").strip()[-200:]
        full = done.exit_code == _FULL and "space" in detail
        known = {
            _NOT_PLAIN: "it is no plain file",
            _HOLES: "it is sparse and too large",
            _FOLDER: "it is a folder",
        }
        why = known.get(done.exit_code, detail)
        hint = "raise disk_mib, or the template's disk" if full else ""
        is_folder = done.exit_code == _FOLDER
        return file_error(verb, path, self.remote.id, why, is_folder=is_folder, hint=hint)


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"


async def upload_folder(runner: Runner, remote: RemoteSandbox, mount: Mount) -> str:
    """Upload a folder as an archive, and return the archive's path in the sandbox."""
    packed = await asyncio.to_thread(packed_folder, mount)
    path = f"{new_folder()}.tgz"

    async def attempt() -> bool:
        with packed.open("rb") as file:
            await remote.write(path, file, "root")
        return True

    await runner.persist(attempt)
    return path


def packed_folder(mount: Mount) -> Path:
    """Return the archive of a folder from the cache; one process creates it if it is missing."""
    source = mount.source.resolve()
    packed = secrets.cache_dir() / "e2b" / f"{mount.fingerprint()}.tar.gz"
    try:
        packed.parent.mkdir(parents=True, exist_ok=True)
        with packed.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not packed.exists():
                _pack(source, packed)
    except OSError as error:
        message = f"cannot pack {source} for upload: {error.strerror or error}"
        hint = "free space there, or set SWERL_CACHE to another folder"
        raise SandboxError(message, hint=hint) from error
    return packed


def _pack(source: Path, packed: Path) -> None:
    partial = packed.with_suffix(".part")
    with tarfile.open(partial, "w:gz", compresslevel=4) as archive:
        archive.add(source, arcname=".")
    partial.replace(packed)
