"""Read unified diffs: the files that they touch, and the edits with which an agent makes them."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class FileEdit:
    """One replacement in one file; `old` is empty if the file is new."""

    path: str
    old: str
    new: str


def touched(patch: str) -> tuple[str, ...]:
    """Return the paths that a git-style diff changes, creates, deletes or renames, in order."""
    paths: dict[str, None] = {}
    for line in patch.splitlines():
        if line.startswith("diff --git "):
            for side in _git_paths(line):
                paths[side] = None
        elif line.startswith(("--- a/", "+++ b/")):
            paths[line[6:].split("\t")[0]] = None
    return tuple(paths)


def edits(patch: str) -> list[FileEdit]:
    """Return one edit per hunk: context and removed lines -> context and added lines."""
    found = []
    path = ""
    lines = deque(patch.splitlines(keepends=True))
    while lines:
        line = lines.popleft()
        if line.startswith(("--- a/", "+++ b/")):
            path = line[6:].split("\t")[0].rstrip("\n")
        elif match := _HUNK.match(line):
            old, new = _hunk(lines, int(match[1] or 1), int(match[2] or 1))
            found.append(FileEdit(path, old, new))
    return found


def _hunk(lines: deque[str], num_old: int, num_new: int) -> tuple[str, str]:
    """Remove one hunk from `lines`; a file may end without a newline, on either side."""
    old: list[str] = []
    new: list[str] = []
    while lines and (len(old) < num_old or len(new) < num_new):
        line = lines.popleft()
        sides = [side for side, marks in ((old, " -\n"), (new, " +\n")) if line[:1] in marks]
        text = line[1:] or "\n"
        if lines and lines[0].startswith("\\"):
            lines.popleft()
            text = text.removesuffix("\n")
        for side in sides:
            side.append(text)
    return "".join(old), "".join(new)


def _git_paths(line: str) -> list[str]:
    match = re.match(r"diff --git a/(.+) b/(.+)$", line)
    return [match[1], match[2]] if match else []
