"""The part of an agent's diff that grading applies: nothing that decides how tests run or judge."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from swerl.core.task import GradingSpec, Task
from swerl.grading import drivers as _drivers
from swerl.grading import steering as _steering
from swerl.grading.sections import Section, paths, sections

_TEST_FOLDERS = frozenset({"tests", "test", "__tests__", "e2e"})
_TEST_ROOTS = _TEST_FOLDERS | {"testing", "spec", "specs", "r2e_tests"}
"""Names of folders of tests; some of them only where they stand at the root."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The part of a patch that grading applies, and the paths of the part that it drops."""

    patch: str
    dropped: tuple[str, ...]


def accept(task: Task, patch: str, scripts: Mapping[str, str] | None = None) -> Accepted:
    """Drop every change of a file that the Task's tests bring or that steers how tests run.

    `scripts` holds the texts, at the base, of scripts that the test command runs. Files that the
    known solution changes too stay, so that the solution itself is gradable.
    """
    rules = _Rules(task, scripts or {})
    kept: list[str] = []
    dropped: dict[str, None] = {}
    ends_kept = True
    for section in sections(patch):
        ends_kept = not rules.refuse(section)
        if ends_kept:
            kept.extend(section.lines)
        else:
            dropped.update(dict.fromkeys(section.names))
    text = "\n".join(kept)
    # A binary part ends with a blank line, of which the last part of a diff alone holds both ends.
    if not text.endswith("\n") or not ends_kept:
        text += "\n"
    return Accepted(text if text.strip() else "", tuple(dropped))


class _Rules:
    """What a Task protects."""

    def __init__(self, task: Task, scripts: Mapping[str, str]) -> None:
        spec = task.grading
        self._hidden = {*spec.test_files, *paths(spec.test_patch), *_declared_files(spec)}
        brought = {*spec.test_files, *paths(spec.test_patch)}
        self._allowed = set(paths(task.gold_patch)) - brought
        self._folders = {folder for path in self._hidden if (folder := _test_folder(path))}
        named = (path for text in scripts.values() for path in _drivers.run_by(text))
        self._drivers = {*_drivers.scripts(spec), *named}
        self._drives = _drivers.starts_tests(
            "\n".join([*_drivers.commands(spec), *scripts.values()])
        )

    def refuse(self, section: Section) -> bool:
        """Say whether a section changes what it must not."""
        if any(_is_outside(name) for name in section.names) or _leads_out(section):
            return True
        closed = [name for name in section.names if name not in self._allowed]
        return any(_steering.steers(name, section) or self._is_protected(name) for name in closed)

    def _is_protected(self, path: str) -> bool:
        name = posixpath.basename(path)
        if path in self._hidden or path in self._drivers or self._drives(name):
            return True
        if any(path.startswith(folder + "/") for folder in self._folders):
            return True
        # A file or link in place of a folder of hidden tests would carry them away, and a folder in
        # place of a hidden test would be in its way.
        return any(
            test.startswith(path + "/") or path.startswith(test + "/") for test in self._hidden
        )


def _declared_files(spec: GradingSpec) -> Iterator[str]:
    """Yield the files that ids such as `tests/test_a.py::test_b` name."""
    for test in (*spec.fail_to_pass, *spec.pass_to_pass):
        path, found, _ = test.partition("::")
        if found:
            yield posixpath.normpath(path)


def _test_folder(path: str) -> str:
    """Return the outermost folder of tests that a file stands in; empty for none."""
    parts = PurePosixPath(path).parts[:-1]
    for index, part in enumerate(parts):
        if part in _TEST_FOLDERS or (index == 0 and part in _TEST_ROOTS):
            return "/".join(parts[: index + 1])
    return ""


def _is_outside(path: str) -> bool:
    """Say whether a path is none of a repository's own files."""
    parts = path.split("/")
    return (
        path in ("", ".")
        or path.startswith("/")
        or ".." in parts
        or ".git" in [part.lower() for part in parts]
    )


def _leads_out(section: Section) -> bool:
    if not section.is_link:
        return False
    target = section.link_target
    if target is None or target.startswith("/"):
        return True
    reached = posixpath.normpath(posixpath.join(posixpath.dirname(section.names[-1]), target))
    return _is_outside(reached)
