"""A diff as its files' parts: hostile text, so that every spelling of a name is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NAME_LINES = ("--- ", "+++ ", "rename from ", "rename to ", "copy from ", "copy to ")
_LINK_MODE = re.compile(r"^(?:(?:new file |new )mode|index [0-9a-f.]+) 120000$")


@dataclass(frozen=True, slots=True)
class Section:
    """What a diff says of one file."""

    lines: tuple[str, ...]
    names: tuple[str, ...]
    """Every path that its headers name."""

    @property
    def is_new(self) -> bool:
        """Whether the file is created."""
        return any(line.startswith("new file mode") for line in self._headers())

    @property
    def is_link(self) -> bool:
        """Whether the path is a symbolic link afterwards."""
        return any(_LINK_MODE.match(line.rstrip("\r")) for line in self._headers())

    @property
    def link_target(self) -> str | None:
        """Where the link leads; None where the diff does not say in one line."""
        added = [line[1:] for line in self.lines[len(self._headers()) :] if line.startswith("+")]
        return added[0] if len(added) == 1 else None

    def _headers(self) -> tuple[str, ...]:
        ends = (index for index, line in enumerate(self.lines) if _HUNK.match(line))
        return self.lines[: next(ends, len(self.lines))]


def sections(patch: str) -> Iterator[Section]:
    """Yield each file's part; hunk sizes tell content from headers."""
    lines = patch.split("\n")  # splitlines() would also split inside content, at form feeds
    section: list[str] = []
    num_old = num_new = 0
    for index, line in enumerate(lines):
        if num_old > 0 or num_new > 0:
            num_old -= line[:1] not in ("+", "\\")
            num_new -= line[:1] not in ("-", "\\")
        elif match := _HUNK.match(line):
            num_old, num_new = int(match[1] or 1), int(match[2] or 1)
        elif _begins_file(lines, index, section):
            if section:
                yield _section(section)
            section = []
        section.append(line)
    if section:
        yield _section(section)


def paths(patch: str) -> tuple[str, ...]:
    """Return every path that a diff names, in order, headers of git and plain diffs alike."""
    return tuple(dict.fromkeys(name for section in sections(patch) for name in section.names))


def _section(lines: list[str]) -> Section:
    return Section(tuple(lines), tuple(_names(lines)))


def _begins_file(lines: list[str], index: int, section: list[str]) -> bool:
    if lines[index].startswith("diff --git "):
        return True
    if not lines[index].startswith("--- ") or index + 1 == len(lines):
        return False
    # A plain diff has no `diff --git`: its `---` begins a file unless that file just began.
    has_names = any(line.startswith("+++ ") for line in section)
    return lines[index + 1].startswith("+++ ") and has_names


def _names(section: list[str]) -> list[str]:
    found: dict[str, None] = {}
    for line in section:
        if _HUNK.match(line):
            break
        if line.startswith("diff --git "):
            found.update(dict.fromkeys(_header_names(line[len("diff --git ") :].rstrip("\r"))))
        for prefix in _NAME_LINES:
            if line.startswith(prefix):
                name = _unquote(line[len(prefix) :].rstrip("\r").split("\t")[0])
                found[name if prefix[0] in "rc" else _strip_side(name)] = None
    found.pop("/dev/null", None)
    return list(found)


def _header_names(text: str) -> list[str]:
    if text.startswith('"') or text.endswith('"'):
        parts = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', text)
        return [_strip_side(_unquote(part)) for part in parts]
    # Without quotes both sides are equal unless renamed, and a rename names its paths again.
    half = len(text) // 2
    if text[half : half + 1] == " " and text[2:half] == text[half + 3 :]:
        return [text[2:half]]
    old, _, new = text.partition(" b/")
    return [_strip_side(old), new]


def _strip_side(name: str) -> str:
    """Remove the first folder, as `-p1` does."""
    if name == "/dev/null":
        return name
    stripped = name.split("/", 1)[-1]
    return str(PurePosixPath(stripped))


def _unquote(name: str) -> str:
    if not (len(name) > 1 and name.startswith('"') and name.endswith('"')):
        return name
    raw = name[1:-1].encode("latin-1", "backslashreplace").decode("unicode_escape")
    return raw.encode("latin-1", "replace").decode("utf-8", "replace")
