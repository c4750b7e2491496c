"""Looking at and changing a sandbox's folders, by shell scripts that run inside it.

A script runs as the user who asks and, where that fails, as root: E2B's own agent is root and
lets everybody see and change everything in the sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence

from swerl.core.contracts import Sandbox
from swerl.sandboxes.e2b_server.entries import Entry, new_marker
from swerl.sandboxes.e2b_server.failure import Code, Failure

_TIMEOUT_S = 60.0
_ABSENT, _NO_FOLDER, _PRESENT = 44, 45, 46
"""Exit codes of the scripts: nothing is there, it is no folder, it is there already."""

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
"""Where even root may not give files away, everybody may write them."""
_MOVE = """\
[ -e "$1" ] || [ -L "$1" ] || exit 44
mkdir -p -- "$(dirname -- "$2")" || exit
if [ -d "$2" ] && [ ! -d "$1" ]; then exit 46; fi
[ ! -d "$2" ] || rmdir -- "$2" || exit
mv -- "$1" "$2"
"""
_REMOVE = 'rm -rf -- "$1"\n'


class Folders:
    """One sandbox's folders."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._owner = ""

    async def stat(self, path: str, user: str | None) -> Entry:
        """Return what is at a path. Raises Failure, not found."""
        found = await self._ask(_STAT, [path], user)
        if not found:
            raise Failure(Code.NOT_FOUND, f"path not found: {path}")
        return found[0]

    async def entries(self, path: str, depth: int, user: str | None) -> list[Entry]:
        """Return what is in a folder, `depth` levels deep; no link is followed."""
        return await self._ask(_LIST, [path, str(depth)], user)

    async def make(self, path: str, user: str | None) -> None:
        """Make a folder and its parents. Raises Failure, already exists."""
        owner = "" if user else await self._ordinary_owner()
        await self._run(_MAKE, [path], user, {"OWNER": owner})

    async def move(self, source: str, target: str, user: str | None) -> None:
        """Rename, making the target's parents."""
        await self._run(_MOVE, [source, target], user)

    async def remove(self, path: str, user: str | None) -> None:
        """Remove a file, or a folder with all that it holds; nothing where nothing is."""
        if path == "/":
            raise Failure(Code.INVALID_ARGUMENT, "the root folder cannot be removed")
        await self._run(_REMOVE, [path], user)

    async def give(self, path: str) -> None:
        """Let the ordinary user write a file that was written for them."""
        await self._run(_GIVE, [path], None, {"OWNER": await self._ordinary_owner()})

    async def _ask(self, script: str, args: Sequence[str], user: str | None) -> list[Entry]:
        marker = new_marker()
        env = {"MARK": marker.word, "MARK_ENTRY": marker.entry, "MARK_LINK": marker.link}
        return marker.read(await self._run(script, args, user, env))

    async def _run(
        self, script: str, args: Sequence[str], user: str | None, env: dict[str, str] | None = None
    ) -> str:
        """Run a script and return what it prints. Raises Failure as the script tells."""
        said = ""
        for who in dict.fromkeys((user, "root")):
            done = await self._sandbox.run(
                ["sh", "-c", script, "sh", *args],
                cwd="/",
                env={"LC_ALL": "C", "TZ": "UTC", **(env or {})},
                user=who,
                timeout_s=_TIMEOUT_S,
            )
            if done.truncated:
                message = "the folder holds too much for one answer; list less deep"
                raise Failure(Code.RESOURCE_EXHAUSTED, message, status=413)
            if done.exit_code == 0:
                return done.stdout.decode(errors="replace")
            _raise_known(done.exit_code, args)
            said = said or done.stderr.decode(errors="replace").strip()
        raise Failure(Code.INTERNAL, said[:500] or f"it failed: {args[0]}")

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
        raise Failure(Code.NOT_FOUND, f"path not found: {args[0]}")
    if exit_code == _NO_FOLDER:
        raise Failure(Code.INVALID_ARGUMENT, f"path is not a directory: {args[0]}")
    if exit_code == _PRESENT:
        raise Failure(Code.ALREADY_EXISTS, f"path already exists: {args[-1]}")
