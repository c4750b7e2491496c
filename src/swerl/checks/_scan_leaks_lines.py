"""Which lines of a Task's patches give it away wherever they stand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from swerl.core.patch import edits, touched
from swerl.core.task import Task

MARKS = " \t\r\f+->|"
"""Stripped from both ends of a line, so that a line of a diff equals that of a file."""
_MIN_CHARS = 24
_MIN_LETTERS = 10
_MAX_LINES = 400
_PLAIN = ("#", "//", "/*", "*", "import ", "from ", '"""', "'''", "@", "use ", "package ")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{11,}")


def distinctive(task: Task) -> Mapping[str, list[str]]:
    """Return the lines that only the solution and only the hidden tests bring, by that word."""
    tests = [task.grading.test_patch]
    lines = {
        "solution": _added(task.gold_patch),
        "tests": _added(*tests) | _whole(task.grading.test_files.values()),
    }
    return {label: sorted(found, key=len)[-_MAX_LINES:] for label, found in lines.items() if found}


def words(task: Task) -> list[str]:
    """Return long words that the solution brings; they survive in compiled files."""
    old, new = set(), set()
    for edit in edits(task.gold_patch):
        old |= set(_WORD.findall(edit.old))
        new |= set(_WORD.findall(edit.new))
    return sorted(new - old)


def tails(task: Task) -> list[str]:
    """Return the paths that the solution changes."""
    return list(touched(task.gold_patch))


def _added(*patches: str) -> set[str]:
    old, new = set(), set()
    for patch in patches:
        for edit in edits(patch):
            old |= _lines(edit.old)
            new |= _lines(edit.new)
    return new - old


def _whole(texts: Iterable[str]) -> set[str]:
    return {line for text in texts for line in _lines(text)}


def _lines(text: str) -> set[str]:
    stripped = (line.strip(MARKS) for line in text.split("\n"))
    return {line for line in stripped if _is_telling(line)}


def _is_telling(line: str) -> bool:
    if len(line) < _MIN_CHARS or line.startswith(_PLAIN):
        return False
    return sum(map(str.isalpha, line)) >= _MIN_LETTERS
