"""Reverse a unified diff, so that it reverts the change."""

from __future__ import annotations

import re

from swerl.core.errors import TaskError

_HUNK = re.compile(r"^@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)$")
_GIT = re.compile(r"^diff --git a/(.*) b/(.*)$")
_SWAPPED = (
    ("new file mode ", "deleted file mode "),
    ("old mode ", "new mode "),
    ("rename from ", "rename to "),
)


def reverse(patch: str) -> str:
    """Return the diff that reverts a git diff. Raises TaskError if it has binary parts."""
    out: list[str] = []
    header: list[str] = []
    remaining = (0, 0)
    run: list[str] = []
    for line in patch.split("\n"):
        if any(remaining) or line.startswith("\\"):
            run.append(line)
            remaining = _rest(remaining, line)
        elif match := _HUNK.match(line):
            out += [*_header(header), *_hunk(run), f"@@ -{match[2]} +{match[1]} @@{match[3]}"]
            header, run = [], []
            remaining = (_length(match[1]), _length(match[2]))
        else:
            out += _hunk(run)
            run = []
            if line.startswith("diff --git "):
                out += _header(header)
                header = []
            header.append(line)
    return "\n".join([*out, *_hunk(run), *_header(header)])


def _length(span: str) -> int:
    return int(span.partition(",")[2] or 1)


def _rest(remaining: tuple[int, int], line: str) -> tuple[int, int]:
    return remaining[0] - (line[:1] not in {"+", "\\"}), remaining[1] - (
        line[:1] not in {"-", "\\"}
    )


def _header(lines: list[str]) -> list[str]:
    if any(line.startswith(("GIT binary patch", "Binary files ")) for line in lines):
        raise TaskError("column patch changes a binary file, which cannot be reverted")
    swapped = [_swapped(line) for line in lines]
    for first, second in (("--- ", "+++ "), *_SWAPPED):
        at = [i for i, line in enumerate(swapped) if line.startswith((first, second))]
        if len(at) == 2:
            # Restore the order of the pair: `---` before `+++`, `old` before `new`.
            swapped[at[0]], swapped[at[1]] = swapped[at[1]], swapped[at[0]]
    return swapped


def _swapped(line: str) -> str:
    if match := _GIT.match(line):
        return f"diff --git a/{match[2]} b/{match[1]}"
    if line.startswith("index ") and ".." in line:
        ids, _, mode = line.removeprefix("index ").partition(" ")
        old, _, new = ids.partition("..")
        return f"index {new}..{old}{' ' + mode if mode else ''}"
    if line.startswith("--- "):
        return "+++ " + _other_side(line[4:], "a/", "b/")
    if line.startswith("+++ "):
        return "--- " + _other_side(line[4:], "b/", "a/")
    for first, second in _SWAPPED:
        if line.startswith(first):
            return second + line.removeprefix(first)
        if line.startswith(second):
            return first + line.removeprefix(second)
    return line


def _other_side(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _hunk(lines: list[str]) -> list[str]:
    """Swap the marks. In each group of changes, removed lines come first."""
    out: list[str] = []
    removed: list[str] = []
    added: list[str] = []
    last = out
    for line in lines:
        if line.startswith("\\"):
            last.append(line)
        elif line.startswith(("+", "-")):
            last = removed if line[0] == "+" else added
            last.append(("-" if line[0] == "+" else "+") + line[1:])
        else:
            out += [*removed, *added, line]
            removed, added = [], []
            last = out
    return [*out, *removed, *added]
