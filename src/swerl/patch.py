"""Unified diffs: which files they touch, and the edits by which an agent would make them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@dataclass(frozen=True, slots=True)
class FileEdit:
    """One replacement in one file; `old` is empty where the file is new."""

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
    lines = iter(patch.splitlines(keepends=True))
    for line in lines:
        if line.startswith("+++ b/"):
            path = line[6:].split("\t")[0].rstrip("\n")
        elif match := _HUNK.match(line):
            old, new = _hunk(lines, int(match[1] or 1), int(match[2] or 1))
            found.append(FileEdit(path, old, new))
    return found


def _hunk(lines: Iterator[str], num_old: int, num_new: int) -> tuple[str, str]:
    old: list[str] = []
    new: list[str] = []
    while len(old) < num_old or len(new) < num_new:
        line = next(lines, None)
        if line is None:
            break
        mark, text = line[:1], line[1:]
        if mark in " -\n":
            old.append(text or "\n")
        if mark in " +\n":
            new.append(text or "\n")
    return "".join(old), "".join(new)


def _git_paths(line: str) -> list[str]:
    match = re.match(r"diff --git a/(.+) b/(.+)$", line)
    return [match[1], match[2]] if match else []
