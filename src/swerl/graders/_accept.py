"""The part of an agent's diff that grading applies: nothing that decides how tests run or judge."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from swerl.graders._sections import Section, paths, sections
from swerl.task import GradingSpec, Task

_STEERING = re.compile(
    r"""
      conftest\.py | \.?pytest\.(ini|toml) | tox\.(ini|toml) | noxfile\.py | \.coveragerc
    | (site|user)customize\.py | .*\.(pth|egg-link) | entry_points\.txt   # Python
    | (jest|vitest|ava|karma|mocha|playwright|cypress|wdio)\.(conf|config|setup)\..*
    | \.mocharc.* | \.?babelrc.* | babel\.config\..* | \.nycrc.*      # JavaScript
    | \.rspec | phpunit\.xml.* | \.gitattributes
    | \.gitlab-ci\.yml | \.travis\.yml | azure-pipelines\.yml | Jenkinsfile | appveyor\.yml
    """,
    re.VERBOSE,
)
"""File names that decide how tests run, whatever folder they stand in."""
_STEERING_FOLDERS = frozenset({".github", ".circleci", ".cargo"})
_RUNNERS = frozenset(
    {"pytest", "_pytest", "py", "pluggy", "unittest", "doctest", "nose", "xdist", "tox", "coverage"}
)
"""Modules that run tests: a new one of such a name at the root would stand before the real one."""
_TEST_FOLDERS = frozenset({"tests", "test", "__tests__", "e2e"})
_TEST_ROOTS = _TEST_FOLDERS | {"testing", "spec", "specs", "r2e_tests"}
"""Names of folders of tests; some of them only where they stand at the root."""
_COMPILED = "__pycache__"
"""Folder whose files Python may run in place of the source beside it, a hidden test's too."""
_WORD = re.compile(r"[\w./-]+")
_SCRIPT_FOLDERS = frozenset({"bin", "ci", "scripts", "tools"})


@dataclass(frozen=True, slots=True)
class Accepted:
    """The part of a patch that grading applies, and the paths of the part that it drops."""

    patch: str
    dropped: tuple[str, ...]


def accept(task: Task, patch: str) -> Accepted:
    """Drop every change of a file that the Task's tests bring or that steers how tests run.

    Files that the known solution changes too stay, so that the solution itself is gradable.
    """
    rules = _Rules(task)
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

    def __init__(self, task: Task) -> None:
        spec = task.grading
        self._hidden = {*spec.test_files, *paths(spec.test_patch), *_declared_files(spec)}
        brought = {*spec.test_files, *paths(spec.test_patch)}
        self._allowed = set(paths(task.gold_patch)) - brought
        self._folders = {folder for path in self._hidden if (folder := _test_folder(path))}
        self._scripts = set(_scripts(spec.test_command))

    def refuse(self, section: Section) -> bool:
        """Say whether a section changes what it must not."""
        if any(_is_outside(name) for name in section.names) or _leads_out(section):
            return True
        closed = [name for name in section.names if name not in self._allowed]
        return any(self._is_protected(name, is_new=section.is_new) for name in closed)

    def _is_protected(self, path: str, *, is_new: bool) -> bool:
        parts = PurePosixPath(path).parts
        if _COMPILED in parts:
            return True
        if _STEERING.fullmatch(parts[-1]) or _STEERING_FOLDERS & set(parts[:-1]):
            return True
        if is_new and parts[0].removesuffix(".py") in _RUNNERS:
            return True
        if path in self._hidden or path in self._scripts:
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


def _scripts(command: str) -> Iterable[str]:
    """Return the scripts of the repository that a test command names."""
    words = {posixpath.normpath(word) for word in _WORD.findall(command)}
    for word in words:
        parts = PurePosixPath(word).parts
        if word.endswith(".sh") or (set(parts[:-1]) & (_TEST_ROOTS | _SCRIPT_FOLDERS)):
            yield word


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
