"""Find what a sandbox reveals of its Task's solution, hidden tests or name.

Scan a sandbox that no agent uses: the solution enters it. A shell script reads git's side and a
Python script reads files; both live in `_scan_leaks/` and run inside. If the sandbox lacks the
tools for a check, the check is reported as unchecked and never counts as clean.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from swerl.core.changes import edits, touched
from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError
from swerl.core.task import Task
from swerl.tasks.hide_future import (
    Facts,
    object_names,
    script_input,
    solved_files,
    solved_texts,
)

_IMPORT = "from swerl.checks._scan_leaks.formats import *"
_GIT_TIMEOUT_S = 600.0
_FILES_S = 120.0
"""Seconds for reading files; a large image takes about twenty."""
_SECRET_NAME = re.compile(r"(TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_MAX_EVIDENCE = 300
_MARKS = " \t\r\f+->|"
"""Stripped from both ends of a line, so that a line of a diff equals that of a file."""
_MIN_CHARS = 24
_MIN_LETTERS = 10
_MAX_LINES = 400
_PASSAGE_LINES = 3
_MIN_PASSAGE_CHARS = 20
"""Shorter passages, such as closing brackets, occur by chance."""
_INSTALLED = ("/site-packages/", "/dist-packages/", "/node_modules/", "/lib/python", "/.git/")
_SYSTEM = ("/bin/", "/boot/", "/etc/", "/lib", "/sbin/", "/usr/", "/var/lib/")
_PLAIN = ("#", "//", "/*", "*", "import ", "from ", '"""', "'''", "@", "use ", "package ")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{11,}")


class LeakKind(StrEnum):
    """Ways in which an image reveals the solution."""

    REFERENCE = "reference"
    """A branch, tag, remote branch, note or stash that leads past the base commit."""
    REFLOG = "reflog"
    """A git log that names commits after the base."""
    OBJECT = "object"
    """Commits or files in the object store that the base commit does not need."""
    STATE = "state"
    """Git's notes of fetches, merges, work trees or submodules."""
    SETTING = "setting"
    """A hook, or a setting that names another place or runs a program."""
    LINK = "link"
    """The repository lies in, or borrows objects from, another place."""
    COPY = "copy"
    """Another repository on the machine, or a bundle, with the same objects."""
    FILE = "file"
    """A file that datasets or tools leave behind and that reveals the solution."""
    TEXT = "text"
    """Lines of the solution or of the hidden tests in a file that the base does not have."""
    PACKAGE = "package"
    """An installed copy of the project that is newer than the base."""
    NAME = "name"
    """The Task's id or its fixing commit, in a file, a variable or the host name."""
    SECRET = "secret"
    """A key or token that every user can read."""


REASONS: Mapping[LeakKind, str] = {
    LeakKind.REFERENCE: "it leads to commits after the base.",
    LeakKind.REFLOG: "it names commits after the base.",
    LeakKind.OBJECT: "git can list and show objects that the base commit does not need.",
    LeakKind.STATE: "git keeps it beside the history, and it may name commits after the base.",
    LeakKind.SETTING: "it names another place, or a program that git would run.",
    LeakKind.LINK: "the repository's objects lie elsewhere.",
    LeakKind.COPY: "it holds objects of the same project.",
    LeakKind.FILE: "datasets and tools leave such files, and they reveal the solution.",
    LeakKind.TEXT: "it holds lines that only the solution or the hidden tests add.",
    LeakKind.PACKAGE: "an installed copy of the project is newer than the base.",
    LeakKind.NAME: "a reader can look the solution up by it.",
    LeakKind.SECRET: "every user of the sandbox can read it.",
}


@dataclass(frozen=True, slots=True)
class Leak:
    """One thing that an agent could read."""

    kind: LeakKind
    name: str
    """Reference, setting, path or variable."""
    reason: str
    """One sentence."""
    evidence: str = ""
    """An excerpt, at most 300 characters."""


@dataclass(frozen=True, slots=True)
class LeakScan:
    """The leaks of one sandbox, and the checks that could not be made."""

    leaks: tuple[Leak, ...]
    unchecked: tuple[str, ...] = ()
    """Sentences; if there are any, the sandbox is not known to be clean."""


async def scan(sandbox: Sandbox, task: Task) -> LeakScan:
    """Look for every known leak. Raises SandboxError if the sandbox runs no shell."""
    solved = await solved_texts(sandbox, task)
    lines = await _scan_git(sandbox, task, await solved_files(sandbox, task))
    leaks = [_leak(LeakKind(line[1]), line[2], line[3]) for line in lines if line[0] == "leak"]
    unchecked = [line[1] for line in lines if line[0] == "unchecked"]
    files = await _scan_files(sandbox, task, solved)
    if isinstance(files, str):
        unchecked.append(f"text, packages, names: {files}")
    else:
        leaks += _hits(files)
        done = await sandbox.run(["sh", "-c", _VERSION], cwd=task.workdir, timeout_s=60)
        own = done.stdout.decode("utf-8", "replace").strip()
        leaks += _packages(files, own)
        leaks += _surroundings(files, task)
        unchecked += [*files["unchecked"], *_packages_unchecked(files, own)]
    return LeakScan(tuple(dict.fromkeys(leaks)), tuple(dict.fromkeys(unchecked)))


def removable(leak: Leak) -> str:
    """Return the file that a leak stands in if an image can spare it, else an empty string.

    Packages and the system's files may be needed; such a Task has to be rejected.
    """
    path = leak.name.split("!")[0]
    can_go = leak.kind is LeakKind.TEXT and path.startswith("/") and not path.startswith(_SYSTEM)
    return path if can_go and not any(part in path for part in _INSTALLED) else ""


async def _scan_git(sandbox: Sandbox, task: Task, solved: tuple[str, ...]) -> list[list[str]]:
    argv = ["sh", "-c", _script(), "scan", task.workdir, task.base_commit]
    telling = _distinctive_lines(task)
    lines = [f"{label} line {line}" for label, found in telling.items() for line in found]
    text = "\n".join([*script_input(task, Facts(solved)), *lines])
    stdin = text.encode("utf-8", "surrogateescape")
    done = await sandbox.run(argv, cwd="/", timeout_s=_GIT_TIMEOUT_S, stdin=stdin)
    if done.exit_code:
        answer = done.stderr.decode("utf-8", "replace").strip()[-300:] or f"code {done.exit_code}"
        raise SandboxError(
            f"cannot scan {task.image} for leaks: {answer}",
            hint="`swerl sandbox smoke` checks if the image boots",
        )
    told = done.stdout.decode("utf-8", "replace").splitlines()
    return [[*line.split("\t"), "", "", ""] for line in told if line]


async def _scan_files(
    sandbox: Sandbox, task: Task, solved: Mapping[str, str]
) -> dict[str, Any] | str:
    """Return what `_scan_leaks/scan.py` finds, or why the sandbox cannot run it."""
    request = {
        "workdir": task.workdir,
        "base": task.base_commit,
        "lines": _distinctive_lines(task),
        "passages": _passages(task),
        "added": sorted(_rows_added(task.gold_patch)),
        **_whole_files(task, solved),
        "words": _distinctive_words(task),
        "tails": list(touched(task.gold_patch)),
        "names": _names(task),
        "budget_s": _FILES_S,
    }
    done = await sandbox.run(
        ["python3", "-S", "-c", _program()],
        cwd="/",
        timeout_s=2 * _FILES_S,
        stdin=json.dumps(request).encode(),
    )
    if done.exit_code:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        missing = done.exit_code in (126, 127)
        return "the image has no python3" if missing else f"the search failed: {lines[-1:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _distinctive_lines(task: Task) -> Mapping[str, list[str]]:
    """Return the lines that only the solution and only the hidden tests add, by that word."""
    whole = {line for text in task.grading.test_files.values() for line in _telling_lines(text)}
    lines = {"solution": _added(task.gold_patch), "tests": _added(task.grading.test_patch) | whole}
    return {label: sorted(found, key=len)[-_MAX_LINES:] for label, found in lines.items() if found}


def _passages(task: Task) -> Mapping[str, list[list[str]]]:
    """Return rows of lines that only the solution or the hidden tests have in this order."""
    spec = task.grading
    whole = [("", text) for text in spec.test_files.values()]
    hunks = {
        "solution": [(edit.old, edit.new) for edit in edits(task.gold_patch)],
        "tests": [*((edit.old, edit.new) for edit in edits(spec.test_patch)), *whole],
    }
    found = {}
    for label, pairs in hunks.items():
        known = {rows for old, _ in pairs for rows in _rows_of_three(old)}
        new = dict.fromkeys(rows for _, text in pairs for rows in _rows_of_three(text))
        found[label] = [list(rows) for rows in new if rows not in known][:_MAX_LINES]
    return {label: rows for label, rows in found.items() if rows}


def _rows_of_three(text: str) -> Iterator[tuple[str, ...]]:
    rows = [row for row in (line.strip(_MARKS) for line in text.split("\n")) if row]
    length = min(_PASSAGE_LINES, len(rows))
    for start in range(len(rows) - length + 1):
        found = tuple(rows[start : start + length])
        if length and sum(map(len, found)) >= _MIN_PASSAGE_CHARS:
            yield found


def _rows_added(patch: str) -> set[str]:
    """Return the lines that a patch adds, short ones too."""
    old, new = set(), set()
    for edit in edits(patch):
        old |= {line.strip(_MARKS) for line in edit.old.split("\n")}
        new |= {line.strip(_MARKS) for line in edit.new.split("\n")}
    return {line for line in new - old if any(map(str.isalnum, line))}


def _whole_files(task: Task, solved: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the files as the solution leaves them: ids and sizes of all, texts of Python."""
    changed = set(touched(task.gold_patch))
    blobs: dict[str, str] = {}
    sizes: set[int] = set()
    for path, text in solved.items():
        data = text.encode("utf-8", "surrogateescape")
        if len(data) >= _MIN_PASSAGE_CHARS:
            names = object_names(data)
            blobs |= dict.fromkeys(names, "solution" if path in changed else "tests")
            sizes |= {len(data), len(data.replace(b"\n", b"\r\n"))}
    sources = {
        path: text for path, text in solved.items() if path in changed and path.endswith(".py")
    }
    return {"blobs": blobs, "sizes": sorted(sizes), "sources": sources}


def _distinctive_words(task: Task) -> list[str]:
    """Return long words that the solution adds; they survive in compiled files."""
    old, new = set(), set()
    for edit in edits(task.gold_patch):
        old |= set(_WORD.findall(edit.old))
        new |= set(_WORD.findall(edit.new))
    return sorted(new - old)


def _added(patch: str) -> set[str]:
    old, new = set(), set()
    for edit in edits(patch):
        old |= _telling_lines(edit.old)
        new |= _telling_lines(edit.new)
    return new - old


def _telling_lines(text: str) -> set[str]:
    """Return the lines that are too long and too particular to occur by chance."""
    stripped = (line.strip(_MARKS) for line in text.split("\n"))
    return {
        line
        for line in stripped
        if len(line) >= _MIN_CHARS
        and not line.startswith(_PLAIN)
        and sum(map(str.isalpha, line)) >= _MIN_LETTERS
    }


def _names(task: Task) -> list[str]:
    """Return the words that identify the Task: its id, and an image tag that is a commit."""
    tag = task.image.rsplit(":", 1)[-1]
    commit = [tag] if re.fullmatch(r"[0-9a-f]{12,64}", tag) and tag != task.base_commit else []
    return [*([task.id] if len(task.id) >= 8 else []), *commit]


def _hits(scan: Mapping[str, Any]) -> Iterator[Leak]:
    kinds = {"name": LeakKind.NAME, "secret": LeakKind.SECRET}
    for hit in scan["hits"]:
        kind = kinds.get(hit["label"], LeakKind.TEXT)
        evidence = hit["example"]
        if kind is LeakKind.TEXT:
            evidence = f"{hit['count']} of {hit['total']} lines of the {hit['label']}: {evidence}"
        yield _leak(kind, hit["path"], evidence)


def _packages(scan: Mapping[str, Any], own: str) -> Iterator[Leak]:
    """Yield newer copies of changed files; one with lines of the solution is already a text."""
    texts = {hit["path"] for hit in scan["hits"]}
    for found in scan["packages"]:
        is_newer = own and found["version"] and _order(found["version"]) > _order(own)
        if is_newer and found["path"] not in texts:
            yield _leak(LeakKind.PACKAGE, found["path"], f"{found['version']}; the base is {own}")


def _packages_unchecked(scan: Mapping[str, Any], own: str) -> Iterator[str]:
    for found in scan["packages"]:
        if not (own and found["version"]):
            yield f"package: {found['path']} differs from the base, and its version is unknown"


def _surroundings(scan: Mapping[str, Any], task: Task) -> Iterator[Leak]:
    words = [*_names(task), *([task.dataset] if "/" in task.dataset else [])]
    places = {**scan["environment"], "host name": scan["hostname"]}
    for name, value in places.items():
        if any(word.lower() in value.lower() for word in words):
            yield _leak(LeakKind.NAME, name, value)
        elif value and _SECRET_NAME.search(name):
            yield _leak(LeakKind.SECRET, name, f"a variable of {len(value)} characters")


_VERSION = r"""
for file in *.egg-info/PKG-INFO src/*.egg-info/PKG-INFO lib/*.egg-info/PKG-INFO PKG-INFO; do
  [ -f "$file" ] && sed -n 's/^Version: *//p' "$file" | head -n 1 && exit
done
sed -n 's/^ *_*version_* *= *["'\'']\{0,1\}\([0-9][^"'\'' ]*\).*/\1/p' \
  pyproject.toml setup.cfg setup.py */__init__.py src/*/__init__.py */_version.py 2>/dev/null |
  head -n 1
"""


def _order(version: str) -> tuple[int, ...]:
    """Return a version's leading numbers."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _leak(kind: LeakKind, name: str, evidence: str) -> Leak:
    return Leak(kind, name, REASONS[kind], evidence[:_MAX_EVIDENCE])


@functools.cache
def _program() -> str:
    """Return both Python files as one, because the sandbox has no swerl to import from."""
    folder = Path(__file__).with_name("_scan_leaks")
    formats, scan_text = ((folder / name).read_text() for name in ("formats.py", "scan.py"))
    return formats + scan_text.replace(_IMPORT, "")


@functools.cache
def _script() -> str:
    folder = Path(__file__).parents[1]
    hiding = "tasks/_hide_future"
    names = (f"{hiding}/common.sh", f"{hiding}/copies.sh", "checks/_scan_leaks/git.sh")
    return "\n".join([*((folder / name).read_text() for name in names), "main"])
