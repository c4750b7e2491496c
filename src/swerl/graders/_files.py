"""Which files a diff touches, and the part of an agent's diff that grading accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from swerl.task import Task

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_NAME_LINES = ("--- ", "+++ ", "rename from ", "rename to ", "copy from ", "copy to ")
_STEERING_NAMES = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "tox.ini",
        "sitecustomize.py",
        "usercustomize.py",
    }
)
"""Files that decide how tests run, whatever folder they stand in."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The part of a patch that grading applies, and the paths of the part that it drops."""

    patch: str
    dropped: tuple[str, ...]


def accept(task: Task, patch: str) -> Accepted:
    """Drop every change of a file that the Task's tests bring or that steers how tests run.

    Files that the known solution changes too stay, so that the solution itself is gradable.
    """
    hidden = set(task.grading.test_files) | set(paths(task.grading.test_patch))
    allowed = set(paths(task.gold_patch)) - hidden
    kept: list[str] = []
    dropped: dict[str, None] = {}
    for section in _sections(patch):
        names = _names(section)
        overruled = [n for n in names if n not in allowed and _is_protected(n, hidden)]
        if overruled:
            dropped.update(dict.fromkeys(names))
        else:
            kept.extend(section)
    text = "\n".join(kept).rstrip("\n") + "\n"
    return Accepted(text if text.strip() else "", tuple(dropped))


def paths(patch: str) -> tuple[str, ...]:
    """Return every path that a diff names, in order, headers of git and plain diffs alike."""
    found: dict[str, None] = {}
    for section in _sections(patch):
        found.update(dict.fromkeys(_names(section)))
    return tuple(found)


def _is_protected(path: str, hidden: set[str]) -> bool:
    name = PurePosixPath(path).name
    if path in hidden or name in _STEERING_NAMES or name.endswith(".pth"):
        return True
    # A file or link in place of a folder of hidden tests would carry them away.
    return any(test.startswith(path + "/") for test in hidden)


def _sections(patch: str) -> Iterator[list[str]]:
    """Yield the lines of each file's part; hunk sizes tell content from headers."""
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
                yield section
            section = []
        section.append(line)
    if section:
        yield section


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
