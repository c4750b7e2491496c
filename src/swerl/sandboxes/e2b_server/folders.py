"""Read and change a sandbox's folders, with shell scripts that run inside it.

A script runs as the requesting user, and as root if that fails: E2B's own agent is root and gives
every user access to everything in the sandbox. Every record that a script prints begins with a
random word, so no file name, even one with newlines, can imitate a record.
"""

from __future__ import annotations

import posixpath
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson

from swerl.core.chat import Json
from swerl.core.contracts import Sandbox
from swerl.sandboxes.e2b_server.connect import off_loop
from swerl.sandboxes.e2b_server.failure import Code, WireError

_TIMEOUT_S = 60.0
_ABSENT, _NO_FOLDER, _PRESENT = 44, 45, 46
"""Exit codes of the scripts: the path is absent, it is no folder, it exists already."""
_LINKS = """\
links='for l do t=$(readlink -f -- "$l"); m=$(stat -L -c %f -- "$l" 2>/dev/null)
printf "%s %s %s\\n%s\\n%s\\n" "$MARK_LINK" "$m" "$l" "$MARK" "$t"; done'
"""
_STAT = (
    _LINKS
    + """\
[ -e "$1" ] || [ -L "$1" ] || exit 44
stat -c "$MARK_ENTRY" -- "$1" || exit
[ ! -L "$1" ] || sh -c "$links" sh "$1"
"""
)
_LIST = (
    _LINKS
    + """\
[ -e "$1" ] || exit 44
[ -d "$1" ] || exit 45
find "${1%/}/" -mindepth 1 -maxdepth "$2" -exec stat -c "$MARK_ENTRY" -- {} + || exit
find "${1%/}/" -mindepth 1 -maxdepth "$2" -type l -exec sh -c "$links" sh {} +
"""
)
_MAKE = """\
[ ! -d "$1" ] || exit 46
[ ! -e "$1" ] || exit 45
top=$1
while up=$(dirname -- "$top"); [ ! -e "$up" ]; do top=$up; done
mkdir -p -- "$1" || exit
[ -z "$OWNER" ] || chown -R "$OWNER" -- "$top" 2>/dev/null || chmod -R a+rwX -- "$top"
"""
_GIVE = """\
if [ "$(id -u)" != 0 ]; then [ -w "$1" ]; exit; fi
chown "$OWNER" -- "$1" 2>/dev/null || chmod a+rw -- "$1"
"""
"""If even root may not give files away, every user may write them."""
_MOVE = """\
[ -e "$1" ] || [ -L "$1" ] || exit 44
mkdir -p -- "$(dirname -- "$2")" || exit
if [ -d "$2" ] && [ ! -d "$1" ]; then exit 46; fi
[ ! -d "$2" ] || rmdir -- "$2" || exit
mv -- "$1" "$2"
"""
_REMOVE = 'rm -rf -- "$1"\n'
_FIELDS = "%f %s %y %U %u %G %g %i %n"
"""Mode, size, time of change (three words), owner, group, inode, path."""
_LINK = "link"
_TYPES = {
    stat.S_IFREG: "FILE_TYPE_FILE",
    stat.S_IFDIR: "FILE_TYPE_DIRECTORY",
    stat.S_IFLNK: "FILE_TYPE_SYMLINK",
}
_UNKNOWN_TYPE = "FILE_TYPE_UNSPECIFIED"
_NO_NAME = "UNKNOWN"
"""Output of `stat` for a user or group without a name."""


class Folders:
    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._owner = ""

    async def stat(self, path: str, user: str | None) -> FileEntry:
        """Return the entry at a path. Raises WireError, not found."""
        marker = new_marker()
        found = marker.read(await self._run(_STAT, [path], user, marker.env))
        if not found:
            raise WireError(Code.NOT_FOUND, f"path not found: {path}")
        return found[0]

    async def listing(self, path: str, depth: int, user: str | None) -> orjson.Fragment:
        """Return the messages of a folder's entries as JSON, `depth` levels deep.

        Links are not followed. A list of 60,000 entries would hold the event loop for 0.4 s.
        """
        marker = new_marker()
        output = await self._run(_LIST, [path, str(depth)], user, marker.env)

        def read() -> orjson.Fragment:
            return orjson.Fragment(orjson.dumps([each.message() for each in marker.read(output)]))

        return await off_loop(len(output), read)

    async def make(self, path: str, user: str | None) -> None:
        """Make a folder and its parents. Raises WireError, already exists."""
        owner = "" if user else await self._ordinary_owner()
        await self._run(_MAKE, [path], user, {"OWNER": owner})

    async def move(self, source: str, target: str, user: str | None) -> None:
        """Rename; make the target's parents."""
        await self._run(_MOVE, [source, target], user)

    async def remove(self, path: str, user: str | None) -> None:
        """Remove a file, or a folder with its contents; nothing if the path is absent."""
        if path == "/":
            raise WireError(Code.INVALID_ARGUMENT, "the root folder cannot be removed")
        await self._run(_REMOVE, [path], user)

    async def give(self, path: str) -> None:
        """Make a file writable for the ordinary user."""
        await self._run(_GIVE, [path], None, {"OWNER": await self._ordinary_owner()})

    async def _run(
        self, script: str, args: Sequence[str], user: str | None, env: dict[str, str] | None = None
    ) -> str:
        """Run a script and return its output. Raises WireError for the script's exit codes."""
        complaint = ""
        for who in dict.fromkeys((user, "root")):
            done = await self._sandbox.run(
                ["sh", "-c", script, "sh", *args],
                cwd="/",
                env={"LC_ALL": "C", "TZ": "UTC", **(env or {})},
                user=who,
                timeout_s=_TIMEOUT_S,
            )
            if done.truncated:
                message = "the folder has too many entries for one answer; list fewer levels"
                raise WireError(Code.RESOURCE_EXHAUSTED, message, status=413)
            if done.exit_code == 0:
                return done.stdout.decode(errors="replace")
            _raise_known(done.exit_code, args)
            complaint = complaint or done.stderr.decode(errors="replace").strip()
        raise WireError(Code.INTERNAL, complaint[:500] or f"the script failed: {args[0]}")

    async def _ordinary_owner(self) -> str:
        """Return the ordinary user's `uid:gid`."""
        if not self._owner:
            done = await self._sandbox.run(
                ["sh", "-c", 'echo "$(id -u):$(id -g)"'], cwd="/", timeout_s=_TIMEOUT_S
            )
            self._owner = done.stdout.decode().strip()
        return self._owner


def _raise_known(exit_code: int, args: Sequence[str]) -> None:
    if exit_code == _ABSENT:
        raise WireError(Code.NOT_FOUND, f"path not found: {args[0]}")
    if exit_code == _NO_FOLDER:
        raise WireError(Code.INVALID_ARGUMENT, f"path is not a directory: {args[0]}")
    if exit_code == _PRESENT:
        raise WireError(Code.ALREADY_EXISTS, f"path already exists: {args[-1]}")


def resolve(path: str, home: str) -> str:
    """Return an absolute path. Raises WireError for another user's home."""
    if path.startswith("~"):
        if path != "~" and not path.startswith("~/"):
            raise WireError(Code.INVALID_ARGUMENT, f"cannot expand the home in {path!r}")
        path = path[2:]
    return posixpath.normpath("/" + posixpath.join(home, path).lstrip("/"))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file, folder or link."""

    path: str
    mode: int
    size: int
    changed: str
    """Time at which its content changed: RFC 3339, in UTC, with the file system's precision."""
    owner: str
    group: str
    inode: int
    target: str = ""
    """Target of a link; empty for other files."""
    target_mode: int = 0
    """Mode of a link's target; 0 if there is none."""

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def message(self) -> dict[str, Json]:
        """Return it in the SDK's form: a link has the type of its target."""
        shown = self.target_mode or self.mode
        body: dict[str, Json] = {
            "name": posixpath.basename(self.path) or "/",
            "type": _TYPES.get(stat.S_IFMT(shown), _UNKNOWN_TYPE),
            "path": self.path,
            "size": str(self.size),
            "mode": stat.S_IMODE(shown) & 0o777,
            "permissions": stat.filemode(self.mode).replace("l", "L", 1),
            "owner": self.owner,
            "group": self.group,
            "modifiedTime": self.changed,
        }
        if stat.S_ISLNK(self.mode):
            body |= {"symlinkTarget": self.target, "isSymlink": True}
        return body


def _entry(mode: str, rest: str) -> FileEntry:
    size, day, hour, _, owner, uid, group, gid, inode, path = rest.split(" ", 9)
    return FileEntry(
        path=path,
        mode=int(mode, 16),
        size=int(size),
        changed=f"{day}T{hour}Z",
        owner=uid if owner == _NO_NAME else owner,
        group=gid if group == _NO_NAME else group,
        inode=int(inode),
    )


@dataclass(frozen=True, slots=True)
class Marker:
    """The random word of one script run, in the forms that the script needs."""

    word: str

    @property
    def entry(self) -> str:
        """Format of `stat` for a file itself."""
        return f"{self.word} {_FIELDS}"

    @property
    def env(self) -> dict[str, str]:
        """Variables of the scripts. MARK_LINK begins a record about a link: the target's mode and
        the link's path follow."""
        return {"MARK": self.word, "MARK_ENTRY": self.entry, "MARK_LINK": f"{self.word} {_LINK}"}

    def read(self, output: str) -> list[FileEntry]:
        """Return the entries in a script's output, a folder before its contents."""
        found: dict[str, FileEntry] = {}
        for record in output.split(f"{self.word} ")[1:]:
            kind, _, rest = record.removesuffix("\n").partition(" ")
            if kind != _LINK:
                entry = _entry(kind, rest)
                found[entry.path] = entry
                continue
            mode, _, rest = rest.partition(" ")
            path, _, target = rest.partition(f"\n{self.word}\n")
            if path in found:
                found[path] = replace(
                    found[path], target=target or path, target_mode=int(mode or "0", 16)
                )
        return sorted(found.values(), key=lambda entry: entry.path.split("/"))


def new_marker() -> Marker:
    return Marker(f"swerl-{secrets.token_hex(12)}")
