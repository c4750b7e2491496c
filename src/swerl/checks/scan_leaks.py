"""Find what a sandbox still tells of its Task's solution, tests or name.

Sweep a sandbox of its own, never an agent's: the lines looked for enter it. git's side is read by
a shell script, files by a Python script; both live in `_scan_leaks/` and run inside. What a sandbox
lacks the tools for is said, and never counted as clean.
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

from swerl.checks import _scan_leaks_lines as _sweep_lines
from swerl.core.contracts import Sandbox
from swerl.core.errors import SandboxError
from swerl.core.task import Task
from swerl.tasks.hide_future import Facts, orders

_GIT_TIMEOUT_S = 600.0
_SCAN_S = 120.0
"""Seconds for reading files; a large image takes some twenty."""
_SECRET_NAME = re.compile(r"(TOKEN|API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_MAX_EVIDENCE = 300


class Kind(StrEnum):
    """Ways in which an image tells what it should not."""

    REFERENCE = "reference"
    """A branch, tag, remote branch, note or stash that leads past the base commit."""
    REFLOG = "reflog"
    """A log of git's that names commits after the base."""
    OBJECT = "object"
    """Commits or files in the object store that the base commit does not need."""
    STATE = "state"
    """What git noted of fetches, merges, work trees or submodules."""
    SETTING = "setting"
    """A setting that names another place or runs a program, or a hook."""
    LINK = "link"
    """The repository lies, or borrows objects from, elsewhere."""
    COPY = "copy"
    """Another repository on the machine, or a bundle, with the same objects."""
    FILE = "file"
    """A file that datasets or tools leave behind and that gives the Task away."""
    TEXT = "text"
    """Lines of the solution or of the hidden tests in a file that the base does not have."""
    PACKAGE = "package"
    """An installed copy of the project that is newer than the base."""
    NAME = "name"
    """The Task's id or its fixing commit, in a file, a variable or the host name."""
    SECRET = "secret"
    """A key or token that every user can read."""


REASONS: Mapping[Kind, str] = {
    Kind.REFERENCE: "it leads to commits after the base.",
    Kind.REFLOG: "it names commits after the base.",
    Kind.OBJECT: "git can list and show what the base commit does not need.",
    Kind.STATE: "git keeps it beside the history, and it may name commits after the base.",
    Kind.SETTING: "it names another place, or a program that git would run.",
    Kind.LINK: "the repository's objects lie elsewhere.",
    Kind.COPY: "it holds objects of the same project.",
    Kind.FILE: "datasets and tools leave such files, and they give the Task away.",
    Kind.TEXT: "it holds lines that only the solution or the hidden tests bring.",
    Kind.PACKAGE: "an installed copy of the project is newer than the base.",
    Kind.NAME: "who reads it can look the solution up.",
    Kind.SECRET: "every user of the sandbox can read it.",
}


@dataclass(frozen=True, slots=True)
class Leak:
    """One thing that an agent could read."""

    kind: Kind
    name: str
    """Reference, setting, path or variable."""
    reason: str
    """One sentence."""
    evidence: str = ""
    """What was seen there, at most 300 characters."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The leaks of one sandbox, and what could not be looked at."""

    leaks: tuple[Leak, ...]
    unchecked: tuple[str, ...] = ()
    """Sentences; a sandbox is not known to be clean where there are any."""


async def sweep(sandbox: Sandbox, task: Task) -> Sweep:
    """Look for every known leak. Raises SandboxError where the sandbox runs no shell."""
    told = await _ask_git(sandbox, task)
    leaks = [_leak(Kind(line[1]), line[2], line[3]) for line in told if line[0] == "leak"]
    unchecked = [line[1] for line in told if line[0] == "unchecked"]
    scan = await _scan(sandbox, task)
    if scan is None:
        unchecked.append("text, packages, names: the image has no python3 to read files with")
    else:
        leaks += _files(scan)
        own = await _own_version(sandbox, task)
        leaks += _packages(scan, own)
        leaks += _surroundings(scan, task)
        unchecked += [*scan["unchecked"], *_packages_unchecked(scan, own)]
    return Sweep(tuple(dict.fromkeys(leaks)), tuple(dict.fromkeys(unchecked)))


async def _ask_git(sandbox: Sandbox, task: Task) -> list[list[str]]:
    argv = ["sh", "-c", _script(), "sweep", task.workdir, task.base_commit]
    stdin = "\n".join(orders(task, Facts())).encode("utf-8", "surrogateescape")
    done = await sandbox.run(argv, cwd="/", timeout_s=_GIT_TIMEOUT_S, stdin=stdin)
    if done.exit_code:
        said = done.stderr.decode("utf-8", "replace").strip()[-300:] or f"code {done.exit_code}"
        raise SandboxError(
            f"cannot sweep {task.image}: {said}",
            hint="`swerl sandbox smoke` checks whether the image boots",
        )
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return [[*line.split("\t"), "", "", ""] for line in lines if line]


async def _scan(sandbox: Sandbox, task: Task) -> dict[str, Any] | None:
    order = {
        "workdir": task.workdir,
        "lines": _sweep_lines.distinctive(task),
        "words": _sweep_lines.words(task),
        "tails": _sweep_lines.tails(task),
        "names": _names(task),
        "budget_s": _SCAN_S,
    }
    program = Path(__file__).with_name("_scan_leaks") / "scan.py"
    done = await sandbox.run(
        ["python3", "-S", "-c", program.read_text()],
        cwd="/",
        timeout_s=2 * _SCAN_S,
        stdin=json.dumps(order).encode(),
    )
    if done.exit_code:
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _names(task: Task) -> list[str]:
    """Return the words by which the Task can be looked up: its id, and a tag that is a commit."""
    tag = task.image.rsplit(":", 1)[-1]
    commit = [tag] if re.fullmatch(r"[0-9a-f]{12,64}", tag) and tag != task.base_commit else []
    return [*([task.id] if len(task.id) >= 8 else []), *commit]


def _files(scan: Mapping[str, Any]) -> Iterator[Leak]:
    kinds = {"name": Kind.NAME, "secret": Kind.SECRET}
    for hit in scan["hits"]:
        kind = kinds.get(hit["label"], Kind.TEXT)
        evidence = hit["example"]
        if kind is Kind.TEXT:
            evidence = f"{hit['count']} of {hit['total']} lines of the {hit['label']}: {evidence}"
        yield _leak(kind, hit["path"], evidence)


def _packages(scan: Mapping[str, Any], own: str) -> Iterator[Leak]:
    """Yield copies of changed files that are newer; one with lines of the solution is a text."""
    texts = {hit["path"] for hit in scan["hits"]}
    for found in scan["packages"]:
        is_newer = own and found["version"] and _order(found["version"]) > _order(own)
        if is_newer and found["path"] not in texts:
            yield _leak(Kind.PACKAGE, found["path"], f"{found['version']}; the base is {own}")


def _packages_unchecked(scan: Mapping[str, Any], own: str) -> Iterator[str]:
    for found in scan["packages"]:
        if not (own and found["version"]):
            yield f"package: {found['path']} differs from the base, and no version tells its age"


def _surroundings(scan: Mapping[str, Any], task: Task) -> Iterator[Leak]:
    words = [*_names(task), *([task.dataset] if "/" in task.dataset else [])]
    places = {**scan["environment"], "host name": scan["hostname"]}
    for name, value in places.items():
        if any(word.lower() in value.lower() for word in words):
            yield _leak(Kind.NAME, name, value)
        elif value and _SECRET_NAME.search(name):
            yield _leak(Kind.SECRET, name, f"a variable of {len(value)} characters")


_VERSION = r"""
for file in *.egg-info/PKG-INFO src/*.egg-info/PKG-INFO lib/*.egg-info/PKG-INFO PKG-INFO; do
  [ -f "$file" ] && sed -n 's/^Version: *//p' "$file" | head -n 1 && exit
done
sed -n 's/^ *_*version_* *= *["'\'']\{0,1\}\([0-9][^"'\'' ]*\).*/\1/p' \
  pyproject.toml setup.cfg setup.py */__init__.py src/*/__init__.py */_version.py 2>/dev/null |
  head -n 1
"""


async def _own_version(sandbox: Sandbox, task: Task) -> str:
    done = await sandbox.run(["sh", "-c", _VERSION], cwd=task.workdir, timeout_s=60)
    return done.stdout.decode("utf-8", "replace").strip()


def _order(version: str) -> tuple[int, ...]:
    """Return a version's numbers up to the first part that is none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def _leak(kind: Kind, name: str, evidence: str) -> Leak:
    return Leak(kind, name, REASONS[kind], evidence[:_MAX_EVIDENCE])


@functools.cache
def _script() -> str:
    folder = Path(__file__).parents[1]
    hiding = "tasks/_hide_future"
    names = (f"{hiding}/common.sh", f"{hiding}/copies.sh", "checks/_scan_leaks/git.sh")
    return "\n".join([*((folder / name).read_text() for name in names), "main"])
