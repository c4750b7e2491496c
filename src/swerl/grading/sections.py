"""The paths in a Task's own diffs: its test patch and its known solution."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NAME_LINES = ("--- ", "+++ ", "*** ", "Index: ")
_PLAIN_NAME_LINES = ("rename from ", "rename to ", "copy from ", "copy to ")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))


@dataclass(frozen=True, slots=True)
class DiffSection:
    """One file's part of a diff."""

    lines: tuple[str, ...]
    names: tuple[str, ...]
    """Every path in its headers."""


def sections(patch: str) -> Iterator[DiffSection]:
    """Yield each file's part; hunk sizes separate content from headers.

    Text after a file's hunks is left out, because `patch` would read diffs of other kinds in it.
    """
    lines = patch.split("\n")  # splitlines() would also split inside content, at form feeds
    section: list[str] = []
    num_old = num_new = 0
    has_hunks = False
    for index, line in enumerate(lines):
        if num_old > 0 or num_new > 0:
            num_old -= line[:1] not in ("+", "\\")
            num_new -= line[:1] not in ("-", "\\")
        elif match := _HUNK.match(line):
            num_old, num_new = int(match[1] or 1), int(match[2] or 1)
            has_hunks = True
        elif _begins_file(lines, index, section):
            if section:
                yield DiffSection(tuple(section), tuple(_names(section)))
            section, has_hunks = [], False
        elif has_hunks and line.strip() and not line.startswith("\\"):
            continue
        section.append(line)
    if section:
        yield DiffSection(tuple(section), tuple(_names(section)))


def paths(patch: str) -> tuple[str, ...]:
    """Return every path in the headers of a git or plain diff, in order."""
    return tuple(dict.fromkeys(name for section in sections(patch) for name in section.names))


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
                found[_strip_side(_header_name(line, prefix))] = None
        for prefix in _PLAIN_NAME_LINES:
            if line.startswith(prefix):
                found[str(PurePosixPath(_header_name(line, prefix)))] = None
    found.pop("/dev/null", None)
    return list(found)


def _header_name(line: str, prefix: str) -> str:
    return _unquote(line[len(prefix) :].rstrip("\r").split("\t")[0])


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
    raw = name[1:-1].encode("utf-8", "surrogateescape")
    return _ESCAPE.sub(_unescaped, raw).decode("utf-8", "surrogateescape")


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    return bytes([int(code, 8) & 255 if len(code) == 3 else _LETTERS.get(code[0], code[0])])
