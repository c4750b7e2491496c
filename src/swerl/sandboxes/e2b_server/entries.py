"""What a sandbox's own `stat` and `find` tell about files, read safely whatever their names are.

Every record begins with a random word, so that no file name, newlines included, looks like one.
"""

from __future__ import annotations

import posixpath
import secrets
import stat
from dataclasses import dataclass, replace

from swerl.core.chat import Json

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
"""What `stat` prints for a user or group that has none."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or link."""

    path: str
    mode: int
    size: int
    changed: str
    """When its content changed: RFC 3339, in UTC, as fine as the file system keeps it."""
    owner: str
    group: str
    inode: int
    target: str = ""
    """Where a link leads; empty for all else."""
    target_mode: int = 0
    """Mode of what a link leads to; 0 where that is nothing."""

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder itself."""
        return stat.S_ISDIR(self.mode)

    def message(self) -> dict[str, Json]:
        """Return it as the SDK reads it: a link has the type of what it leads to."""
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


@dataclass(frozen=True, slots=True)
class Marker:
    """The random word of one question, in the forms that ask it."""

    word: str

    @property
    def entry(self) -> str:
        """Format of `stat` for a file itself."""
        return f"{self.word} {_FIELDS}"

    @property
    def link(self) -> str:
        """Begins a record that tells where a link leads: mode, target, and the link's path."""
        return f"{self.word} {_LINK}"

    def read(self, output: str) -> list[Entry]:
        """Return what an answer tells, a folder before what it holds."""
        found: dict[str, Entry] = {}
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
    """Return a marker that no file name can hold."""
    return Marker(f"swerl-{secrets.token_hex(12)}")


def _entry(mode: str, rest: str) -> Entry:
    size, day, hour, _, owner, uid, group, gid, inode, path = rest.split(" ", 9)
    return Entry(
        path=path,
        mode=int(mode, 16),
        size=int(size),
        changed=f"{day}T{hour}Z",
        owner=uid if owner == _NO_NAME else owner,
        group=gid if group == _NO_NAME else group,
        inode=int(inode),
    )
