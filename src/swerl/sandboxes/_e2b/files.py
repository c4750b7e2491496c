"""Plain files of a sandbox: checked and put in place inside, as root, moved by the provider."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swerl.core.errors import SandboxError
from swerl.core.sandbox import Exec
from swerl.sandboxes._e2b.job import INLINE_BYTES, new_folder
from swerl.sandboxes._e2b.runner import Runner
from swerl.sandboxes._e2b.sdk import Machine

_MISSING, _NOT_PLAIN, _LARGE, _FULL, _HOLES = 44, 45, 46, 47, 48
_MOST_HOLES = 256 << 20
"""Bytes up to which a file with holes is read: its size is a claim, which no disk bounds."""
_READ = f"""
[ -e "$1" ] || exit {_MISSING}
[ -f "$1" ] || exit {_NOT_PLAIN}
set -- "$1" $(stat -L -c '%s %b %B' -- "$1")
[ "$2" -le {_MOST_HOLES} ] || [ $(($3 * $4)) -ge "$2" ] || exit {_HOLES}
[ "$2" -le {INLINE_BYTES} ] || exit {_LARGE}
exec cat -- "$1"
"""
_WRITE = f"""
if [ -e "$1" ] && [ ! -f "$1" ]; then exit {_NOT_PLAIN}; fi
parent() {{ up=$(dirname -- "$1"; echo .); up=${{up%?.}}; }}
parent "$1"; folder=$up new=
while [ ! -e "$up" ]; do new=$up; parent "$up"; done
own() {{ chown -R -- "$owner" "$1" 2>/dev/null; :; }} # where root may not, all is one user's anyway
owner=$2
[ -z "$new" ] || {{ mkdir -p -- "$folder" && own "$new"; }} || exit
[ -e "$1" ] || made=1
cat >"$1" || exit {_FULL}
[ -z "$made" ] || own "$1"
"""


@dataclass(frozen=True, slots=True)
class Files:
    """Reads and writes the files of one sandbox."""

    runner: Runner
    machine: Machine
    shell: Callable[[list[str], bytes, str], Awaitable[Exec]]
    """Runs a command as root: its words, its input, a file with its input."""
    owner: str
    """`user:group` that written files belong to."""

    async def read(self, path: str) -> bytes:
        """Return a file. Raises FileNotFoundError, and SandboxError where it is no plain file."""
        path = _absolute(path)
        done = await self.shell(["sh", "-c", _READ, "swerl", path], b"", "")
        if done.exit_code == 0:
            return done.stdout
        if done.exit_code != _LARGE:
            raise self._error("read", path, done)
        data = b""

        async def attempt() -> bool:
            nonlocal data
            data = await self.machine.read(path)
            return True

        await self.runner.persist(attempt)
        return data

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, making its parents. Raises SandboxError where that cannot be."""
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
            return FileNotFoundError(f"no file {path} in sandbox {self.machine.id}")
        said = done.stderr.decode(errors="replace").strip()[-200:]
        full = done.exit_code == _FULL and "space" in said
        known = {_NOT_PLAIN: "it is no plain file", _HOLES: "it claims more bytes than it holds"}
        why = known.get(done.exit_code, said)
        hint = "raise disk_mib, or the template's disk" if full else "name a plain file"
        message = f"cannot {verb} {path} in sandbox {self.machine.id}: {why}"
        return SandboxError(message, hint=hint)


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"
