"""Read and change a sandbox's files and folders, with shell scripts that run inside it.

A script runs as the requesting user, and as root if that fails: E2B's own agent is root and gives
every user access to everything in the sandbox. No script runs outside, so no path can name a file
of the server's machine. Every record that a script prints begins with a random word, so no file
name, even one with newlines, can imitate a record.
"""

from __future__ import annotations

import posixpath
import secrets
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from swerl.core.chat import Json
from swerl.core.contracts import Process, Sandbox
from swerl.core.errors import SandboxError
from swerl.sandboxes.e2b_server.connect import too_large
from swerl.sandboxes.e2b_server.failure import Code, WireError

_TIMEOUT_S = 60.0
_OPENED = b"open\n"
_MAX_LINE_BYTES = 256
_STAT = """\
[ -e "$1" ] || [ -L "$1" ] || exit 44
exec stat -c "$MARK" -- "$1"
"""
_LIST = """\
[ -e "$1" ] || exit 44
[ -d "$1" ] || exit 45
exec find "${1%/}/" -mindepth 1 -maxdepth "$2" -exec stat -c "$MARK" -- {} +
"""
_GIVE = """\
give() { [ -z "$OWNER" ] || chown -R "$OWNER" -- "$1" 2>/dev/null || chmod -R a+rwX -- "$1"; }
"""
"""If even root may not give files away, every user may write them."""
_MAKE = f"""{_GIVE}
[ ! -d "$1" ] || exit 46
[ ! -e "$1" ] || exit 45
top=$1
while up=${{top%/*}}; [ ! -e "${{up:-/}}" ]; do top=$up; done
mkdir -p -- "$1" || exit
give "$top"
"""
_MOVE = """\
[ -e "$1" ] || [ -L "$1" ] || exit 44
mkdir -p -- "$(dirname -- "$2")" || exit
if [ -d "$2" ] && [ ! -d "$1" ]; then exit 46; fi
[ ! -d "$2" ] || rmdir -- "$2" || exit
mv -- "$1" "$2"
"""
_REMOVE = 'rm -rf -- "$1"\n'
_PLAIN = """\
kernel() { case $(stat -f -c %T -- "$1") in proc | sysfs) exit 48 ;; esac; }
[ ! -d "$1" ] || exit 47
[ ! -e "$1" ] || [ -f "$1" ] || exit 48
"""
_READ = f"""{_PLAIN}
[ -e "$1" ] || exit 44
kernel "$1"
size=$(stat -L -c %s -- "$1") || exit
[ "$size" -le "$2" ] || exit 49
exec 3<"$1" || exit
printf 'open\\n%s\\n' "$size"
exec head -c "$size" <&3
"""
_WRITE = f"""{_GIVE}{_PLAIN}
folder=${{1%/*}}
top=$folder new=$1
while [ ! -e "${{top:-/}}" ]; do new=$top; top=${{top%/*}}; done
kernel "${{top:-/}}"
[ ! -e "$1" ] || {{ kernel "$1"; new=$1; }}
mkdir -p -- "${{folder:-/}}" && : >>"$1" || exit
[ "$(id -u)" != 0 ] || give "$new"
exec 3>"$1" || exit
echo open
cat >&3 || exit 50
"""
_REASONS: Mapping[int, tuple[Code, int, str]] = {
    44: (Code.NOT_FOUND, 0, "path not found"),
    45: (Code.INVALID_ARGUMENT, 0, "path is not a directory"),
    46: (Code.ALREADY_EXISTS, 0, "path already exists"),
    47: (Code.INVALID_ARGUMENT, 0, "path is a directory"),
    48: (Code.INVALID_ARGUMENT, 0, "path is no plain file"),
    50: (Code.RESOURCE_EXHAUSTED, 507, "the sandbox's disk is full"),
}
"""Exit code of a script -> error code, status if it is not the code's own, message."""
_OVER_MAXIMUM = 49
_FIELDS = "%f %s %y %U %u %G %g %n"
"""Mode, size, time of change (three words), owner, group, path."""
_TYPES = {
    stat.S_IFREG: "FILE_TYPE_FILE",
    stat.S_IFDIR: "FILE_TYPE_DIRECTORY",
    stat.S_IFLNK: "FILE_TYPE_SYMLINK",
}
_NO_NAME = "UNKNOWN"
"""Output of `stat` for a user or group without a name."""


class Filesystem:
    """The files and folders of one sandbox. Paths are absolute; all methods raise WireError."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._owner = ""

    async def stat(self, path: str, user: str | None) -> Json:
        """Return the entry at a path, in the SDK's form."""
        entries = await self._stat(_STAT, [path], user)
        if not entries:
            raise WireError(Code.NOT_FOUND, f"path not found: {path}")
        return entries[0]

    async def listing(self, path: str, depth: int, user: str | None) -> list[Json]:
        """Return a folder's entries in the SDK's form, `depth` levels deep; links are not
        followed."""
        return await self._stat(_LIST, [path, str(depth)], user)

    async def make(self, path: str, user: str | None) -> None:
        """Make a folder and its parents."""
        await self._run(_MAKE, [path], user, {"OWNER": await self._owner_for(user)})

    async def move(self, source: str, target: str, user: str | None) -> None:
        """Rename; make the target's parents."""
        await self._run(_MOVE, [source, target], user)

    async def remove(self, path: str, user: str | None) -> None:
        """Remove a file, or a folder with its contents; do nothing if the path is absent."""
        if path == "/":
            raise WireError(Code.INVALID_ARGUMENT, "the root folder cannot be removed")
        await self._run(_REMOVE, [path], user)

    @asynccontextmanager
    async def reading(
        self, path: str, max_bytes: int, user: str | None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Yield a file's size and its pieces; `/proc` and `/sys` are refused."""
        async with self._opened(_READ, [path, str(max_bytes)], user, {}) as (process, rest):
            data = (chunk.data async for chunk in process.output() if not chunk.is_stderr)
            while b"\n" not in rest:
                rest += await anext(data, b"\n")
            size, _, first = rest.partition(b"\n")

            async def pieces() -> AsyncIterator[bytes]:
                yield first
                async for piece in data:
                    yield piece

            yield int(size or b"0"), pieces()

    async def write(self, path: str, pieces: AsyncIterator[bytes], user: str | None) -> None:
        """Write a file as its data arrives; make its parents. The user can change what is made."""
        env = {"OWNER": await self._owner_for(user)}
        async with self._opened(_WRITE, [path], user, env) as (process, _):
            try:
                async for piece in pieces:
                    await process.send(piece)
            except SandboxError:  # the script has ended: its disk is full
                pass
            await process.end_input()
            code = await process.wait()
        if code:
            raise _failure(code, [path])

    async def _stat(self, script: str, args: Sequence[str], user: str | None) -> list[Json]:
        word = f"swerl-{secrets.token_hex(12)}"
        return _entries(await self._run(script, args, user, {"MARK": f"{word} {_FIELDS}"}), word)

    async def _run(
        self, script: str, args: Sequence[str], user: str | None, env: Mapping[str, str] = {}
    ) -> str:
        """Run a script and return its output."""
        complaint = ""
        for account in (user, None if user else "root"):
            result = await self._sandbox.run(
                ["sh", "-c", script, "sh", *args],
                cwd="/",
                env={"LC_ALL": "C", "TZ": "UTC", **env},
                user=account,
                timeout_s=_TIMEOUT_S,
            )
            if result.truncated:
                message = "the folder has too many entries for one answer; list fewer levels"
                raise WireError(Code.RESOURCE_EXHAUSTED, message, status=413)
            if result.exit_code == 0:
                return result.stdout.decode(errors="replace")
            if result.exit_code in _REASONS:
                raise _failure(result.exit_code, args)
            complaint = complaint or result.stderr.decode(errors="replace").strip()
        raise WireError(Code.PERMISSION_DENIED, complaint[:500] or f"cannot use {args[0]}")

    @asynccontextmanager
    async def _opened(
        self, script: str, args: Sequence[str], user: str | None, env: Mapping[str, str]
    ) -> AsyncIterator[tuple[Process, bytes]]:
        """Start a script; yield it once it has opened its file, with the output that follows."""
        complaint = b""
        async with AsyncExitStack() as stack:
            # Root inside may lack the right to read other users' files.
            for account in (user, None if user else "root"):
                command = self._sandbox.start(
                    ["sh", "-c", script, "sh", *args], cwd="/", env={"LC_ALL": "C", **env},
                    user=account,
                )  # fmt: skip
                process = await stack.enter_async_context(command)
                output = b""
                async for chunk in process.output():
                    if chunk.is_stderr:
                        complaint = (complaint + chunk.data)[:500]
                        continue
                    output += chunk.data
                    if output.startswith(_OPENED) or len(output) > _MAX_LINE_BYTES:
                        break
                if output.startswith(_OPENED):
                    yield process, output.removeprefix(_OPENED)
                    return
                code = await process.wait()
                if code == _OVER_MAXIMUM:
                    raise too_large(int(args[-1]))
                if code in _REASONS:
                    raise _failure(code, args)
        text = complaint.decode(errors="replace").strip()
        raise WireError(Code.PERMISSION_DENIED, text or f"cannot open {args[0]}")

    async def _owner_for(self, user: str | None) -> str:
        """Return the `uid:gid` that new files of this user get if root makes them."""
        if user == "root":
            return ""
        if not self._owner:
            script = 'echo "$(id -u):$(id -g)"'
            result = await self._sandbox.run(["sh", "-c", script], cwd="/", timeout_s=_TIMEOUT_S)
            self._owner = result.stdout.decode().strip()
        return self._owner


def _failure(exit_code: int, args: Sequence[str]) -> WireError:
    code, status, message = _REASONS.get(
        exit_code, (Code.INTERNAL, 0, f"the script ended with {exit_code}")
    )
    return WireError(code, f"{message}: {args[-1] if exit_code == 46 else args[0]}", status=status)


def resolve(path: str, home: str) -> str:
    """Return an absolute path. Raises WireError for another user's home."""
    if path.startswith("~"):
        if path != "~" and not path.startswith("~/"):
            raise WireError(Code.INVALID_ARGUMENT, f"cannot expand the home in {path!r}")
        path = path[2:]
    return posixpath.normpath("/" + posixpath.join(home, path).lstrip("/"))


def _entries(output: str, word: str) -> list[Json]:
    """Return the entries that `stat` printed, in the SDK's form, a folder before its contents."""
    entries: dict[str, dict[str, Json]] = {}
    for record in output.split(f"{word} ")[1:]:
        fields = record.removesuffix("\n").split(" ", 9)
        hex_mode, size, day, hour, _, owner, uid, group, gid, path = fields
        mode = int(hex_mode, 16)
        entries[path] = {
            "name": posixpath.basename(path) or "/",
            "type": _TYPES.get(stat.S_IFMT(mode), "FILE_TYPE_UNSPECIFIED"),
            "path": path,
            "size": size,
            "mode": stat.S_IMODE(mode) & 0o777,
            "permissions": stat.filemode(mode).replace("l", "L", 1),
            "owner": uid if owner == _NO_NAME else owner,
            "group": gid if group == _NO_NAME else group,
            "modifiedTime": f"{day}T{hour}Z",
        }
    return [entries[path] for path in sorted(entries, key=lambda path: path.split("/"))]
