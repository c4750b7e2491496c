"""Find what an agent's sandbox reveals of its Task's solution, hidden tests or name.

Scan a sandbox that no agent uses, after its future is hidden: the solution enters it.
`_scan_inside.py` runs in the sandbox and reads its files. If the image lacks the tools for a check,
the check is reported as unchecked and never counts as clean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from swerl.core.changes import edits, touched
from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError
from swerl.core.task import Task
from swerl.tasks.hide_future import object_names, solved_texts

_BUDGET_S = 120.0
"""Seconds for reading files; a large image takes about twenty."""
_MAX_EVIDENCE = 300
_MARKS = " \t\r\f+->|"
"""Stripped from both ends of a line, so that a line of a diff equals that of a file."""
_MIN_CHARS = 24
_MIN_LETTERS = 10
_MAX_LINES = 400
_PASSAGE_LINES = 3
_MIN_PASSAGE_CHARS = 20
"""Shorter passages, such as closing brackets, occur by chance."""
_INSTALLED = (
    "/site-packages/", "/dist-packages/", "/lib/python", "/node_modules/", "/registry/src/",
    "/pkg/mod/", "/.git/",
)  # fmt: skip
_SYSTEM = ("/bin/", "/boot/", "/etc/", "/lib", "/sbin/", "/usr/", "/var/lib/")
_COMMON_STARTS = ("#", "//", "/*", "*", "import ", "from ", '"""', "'''", "@", "use ", "package ")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{11,}")
_GREP = r"""
cat >/tmp/.lines
find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -name .git -o -name .lines \) \
  -prune -o -type f -exec grep -l -F -f /tmp/.lines {} + 2>/dev/null
rm /tmp/.lines
"""


class LeakKind(StrEnum):
    """Ways in which an image reveals the solution."""

    TEXT = "text"
    """Parts of the solution or of the hidden tests in a file that the base does not have."""
    NAME = "name"
    """The Task's id or its fixing commit, in a file or a variable: a reader can look it up."""


@dataclass(frozen=True, slots=True)
class Leak:
    """One thing that an agent could read."""

    kind: LeakKind
    name: str
    """Path or variable."""
    evidence: str = ""
    """An excerpt, at most 300 characters."""


@dataclass(frozen=True, slots=True)
class LeakScan:
    """The leaks of one sandbox, and the checks that could not be made."""

    leaks: tuple[Leak, ...]
    unchecked: tuple[str, ...] = ()
    """Sentences; if there are any, the sandbox is not known to be clean."""


async def scan(sandbox: Sandbox, task: Task) -> LeakScan:
    """Search every file and variable. Raises SandboxError if the search fails."""
    solved = await solved_texts(sandbox, task)
    lines = _distinctive_lines(task)
    request = {
        "workdir": task.workdir,
        "base": task.base_commit,
        "lines": lines,
        "passages": _passages(task),
        "added": sorted(_rows_added(task.gold_patch)),
        **_whole_files(task, solved),
        # Long words survive in compiled files.
        "words": sorted(_added(task.gold_patch, _WORD.findall, ".py")),
        "tails": list(touched(task.gold_patch)),
        "installed": [*_INSTALLED, "/usr/"],
        "tests": [*touched(task.grading.test_patch), *task.grading.test_files],
        "names": _names(task),
        "budget_s": _BUDGET_S,
    }
    result = await sandbox.run(
        ["python3", "-S", "-c", _program()],
        cwd="/",
        timeout_s=2 * _BUDGET_S,
        stdin=json.dumps(request).encode(),
    )
    if result.exit_code in (126, 127):
        return await _grep(sandbox, [line for texts in lines.values() for line in texts])
    if result.exit_code:
        error = result.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise SandboxError(
            f"cannot scan {task.image} for leaks: {error}",
            hint="`swerl sandbox smoke` checks if the image boots",
        )
    report: dict[str, Any] = json.loads(result.stdout)
    leaks = dict.fromkeys([*_hits(report["hits"]), *_named_variables(report["environment"], task)])
    return LeakScan(tuple(leaks), tuple(report["unchecked"]))


def removable(leak: Leak) -> str:
    """Return the file with the leak if the image can lose it; otherwise an empty string.

    Packages and the system's files may be needed; such a Task has to be rejected.
    """
    path = leak.name.split("!")[0]
    can_go = leak.kind is LeakKind.TEXT and path.startswith("/") and not path.startswith(_SYSTEM)
    return path if can_go and not any(part in path for part in _INSTALLED) else ""


async def _grep(sandbox: Sandbox, lines: Sequence[str]) -> LeakScan:
    """Search plain files for whole lines, in an image without Python."""
    reason = "the image has no python3: only plain files were searched, for long lines"
    if not lines:
        return LeakScan((), (reason,))
    stdin = "\n".join(lines).encode("utf-8", "surrogateescape")
    grep = await sandbox.run(["sh", "-c", _GREP], cwd="/", timeout_s=2 * _BUDGET_S, stdin=stdin)
    paths = grep.stdout.decode("utf-8", "surrogateescape").splitlines()
    return LeakScan(tuple(Leak(LeakKind.TEXT, path) for path in paths), (reason,))


def _distinctive_lines(task: Task) -> Mapping[str, list[str]]:
    """Return the lines that only the solution and only the hidden tests add, by that word."""
    whole = {row for text in task.grading.test_files.values() for row in _rows(text)}
    tests = _rows_added(task.grading.test_patch) | whole
    return {
        label: sorted(filter(_is_telling, rows), key=len)[-_MAX_LINES:]
        for label, rows in (("solution", _rows_added(task.gold_patch)), ("tests", tests))
    }


def _passages(task: Task) -> Mapping[str, list[list[str]]]:
    """Return rows of lines that only the solution or the hidden tests have in this order."""
    spec = task.grading
    whole = [("", text) for text in spec.test_files.values()]
    hunks = {
        "solution": [(edit.old, edit.new) for edit in edits(task.gold_patch)],
        "tests": [*((edit.old, edit.new) for edit in edits(spec.test_patch)), *whole],
    }
    passages = {}
    for label, pairs in hunks.items():
        old_rows = {rows for old, _ in pairs for rows in _rows_of_three(old)}
        new = dict.fromkeys(rows for _, text in pairs for rows in _rows_of_three(text))
        passages[label] = [list(rows) for rows in new if rows not in old_rows][:_MAX_LINES]
    return passages


def _rows_of_three(text: str) -> Iterator[tuple[str, ...]]:
    rows = [row for row in _rows(text) if row]
    length = min(_PASSAGE_LINES, len(rows))
    for start in range(len(rows) - length + 1):
        passage = tuple(rows[start : start + length])
        if length and sum(map(len, passage)) >= _MIN_PASSAGE_CHARS:
            yield passage


def _rows_added(patch: str) -> set[str]:
    """Return the lines that a patch adds, short ones too."""
    return {line for line in _added(patch, _rows) if any(map(str.isalnum, line))}


def _added(patch: str, pieces: Callable[[str], list[str]], suffix: str = "") -> set[str]:
    """Return the pieces of text that a patch adds to files with this suffix."""
    changes = [edit for edit in edits(patch) if edit.path.endswith(suffix)]
    old = {piece for edit in changes for piece in pieces(edit.old)}
    return {piece for edit in changes for piece in pieces(edit.new)} - old


def _whole_files(task: Task, solved: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the ids and sizes of the files as the solution leaves them."""
    changed = set(touched(task.gold_patch))
    blobs: dict[str, str] = {}
    sizes: set[int] = set()
    for path, text in solved.items():
        data = text.encode("utf-8", "surrogateescape")
        if len(data) >= _MIN_PASSAGE_CHARS:
            names = object_names(data)
            blobs |= dict.fromkeys(names, "solution" if path in changed else "tests")
            sizes |= {len(data), len(data.replace(b"\n", b"\r\n"))}
    return {"blobs": blobs, "sizes": sorted(sizes)}


def _rows(text: str) -> list[str]:
    return [line.strip(_MARKS) for line in text.split("\n")]


def _is_telling(line: str) -> bool:
    """Return whether a line is too long and too particular to occur by chance."""
    is_long = len(line) >= _MIN_CHARS and sum(map(str.isalpha, line)) >= _MIN_LETTERS
    return is_long and not line.startswith(_COMMON_STARTS)


def _names(task: Task) -> list[str]:
    """Return the words that identify the Task: its id, and an image tag that is a commit."""
    tag = task.image.rsplit(":", 1)[-1]
    commit = [tag] if re.fullmatch(r"[0-9a-f]{12,64}", tag) and tag != task.base_commit else []
    return [*([task.id] if len(task.id) >= 8 else []), *commit]


def _hits(hits: Sequence[Mapping[str, Any]]) -> Iterator[Leak]:
    for hit in hits:
        is_name = hit["label"] == "name"
        kind = LeakKind.NAME if is_name else LeakKind.TEXT
        share = "" if is_name else f"{hit['count']} of {hit['total']} lines of the {hit['label']}: "
        yield Leak(kind, hit["path"], f"{share}{hit['example']}"[:_MAX_EVIDENCE])


def _named_variables(environment: Mapping[str, str], task: Task) -> Iterator[Leak]:
    words = [*_names(task), *([task.dataset] if "/" in task.dataset else [])]
    for name, value in environment.items():
        if any(word.lower() in value.lower() for word in words):
            yield Leak(LeakKind.NAME, name, value[:_MAX_EVIDENCE])


def _program() -> str:
    return Path(__file__).with_name("_scan_inside.py").read_text()
