"""The part of an agent's diff that grading applies: no file that decides how tests run or judge."""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from swerl.core.task import GradingSpec, Task
from swerl.grading.sections import DiffSection, paths, sections

_TEST_FOLDERS = frozenset({"tests", "test", "__tests__", "e2e"})
_TEST_ROOTS = _TEST_FOLDERS | {"testing", "spec", "specs", "r2e_tests"}
"""Names of test folders; the further ones count only at the root."""
_SCRIPT_FOLDERS = _TEST_ROOTS | {"bin", "ci", "scripts", "tools"}
"""Folders whose files a test command names in order to run them."""

_STEERING_FILES = re.compile(
    r"""
      conftest\..* | \.?pytest\.(ini|toml) | tox\.(ini|toml) | noxfile\.py | \.coveragerc
    | .*\.(pth|egg-link|py[co]) | entry_points\.txt | pyvenv\.cfg   # Python
    | (jest|vitest|vite|ava|karma|mocha|playwright|cypress|wdio)\.(conf|config|setup|workspace)\..*
    | \.mocharc.* | \.?babelrc.* | babel\.config\..* | \.nycrc.* | \.taprc | \.labrc\..*
    | jasmine\.json | testem\..* | bunfig\.toml                   # JavaScript
    | \.(npm|yarn)rc.* | \.pnpmfile\..* | \.pnp\..*               # and what starts its scripts
    | mvnw.* | gradlew.* | init\.gradle.* | go\.work | rust-toolchain.* | \.envrc
    | \.rspec | phpunit\.xml.* | \.gitattributes
    | \.gitlab-ci\.yml | \.travis\.yml | azure-pipelines\.yml | Jenkinsfile | appveyor\.yml
    """,
    re.VERBOSE,
)
"""Names of files that decide how tests run, in any folder and for any Task."""
_STEERING_FOLDERS = frozenset({".github", ".circleci", ".cargo", ".mvn"})
_INSTALLED = frozenset(
    {".venv", "site-packages", "dist-packages", "__pypackages__", ".tox", ".nox", ".eggs"}
    | {"node_modules", "bower_components"}
)
"""Folders of installed packages, test runners among them."""
_COMPILED = "__pycache__"
"""Folder whose files Python may run in place of the source beside it, even of a hidden test."""
_AT_START = frozenset({"sitecustomize", "usercustomize"})
"""Modules that Python imports at its start, in any form."""
_RUNNERS = frozenset(
    {"pytest", "_pytest", "py", "pluggy", "unittest", "doctest", "nose", "xdist", "tox", "coverage"}
)
"""Modules that run tests; a new one of such a name at the root would shadow the real one."""
_LIBRARIES = _RUNNERS | sys.stdlib_module_names | {"iniconfig", "packaging", "pygments", "django"}
"""Modules that runners import; a new one of such a name would shadow the real one too."""
_SOURCE_ROOTS = frozenset({"src", "lib"})
"""Folders that are often on the search path, as the root is."""
_PROGRAMS = re.compile(
    r"(ba|da|z)?sh|env|git|g?make|python[\d.]*|py\.?test|tox|nox|pip\d?|uv|conda"
    r"|node(js)?|np[mx]|yarn|pnpm|bun|jest|mocha|vitest|go|cargo|java|mvn|gradle|ant"
    r"|ruby|rspec|rake|bundle|php|phpunit|ctest|cmake"
)
"""Programs that start tests; a new one of such a name may be found before the real one."""
_PROGRAM_FOLDERS = frozenset({"bin", ".bin", "sbin"})

_WORD = re.compile(r"[\w./-]+")
_RUN = re.compile(
    r"(?:^|[\s;&|({])(?:"
    r"(?:\.|source|(?:ba|da|z)?sh)[ \t]+(?:-[a-z]+[ \t]+)*(?P<shell>[\w./-]+)"
    r"|(?:python[\d.]*|node|ruby|perl|php)[ \t]+(?:-\S+[ \t]+)*(?P<other>[\w./-]+\.[a-z]+)"
    r")",
    re.MULTILINE,
)
"""A file that a shell reads or another interpreter runs."""
_TARGETS = r"\b(?:[^\n;&|]*[\s:_-])?(?:tests?|check|spec|ci)\b"
_BUILDS = (
    (re.compile(rf"\bg?make{_TARGETS}"), re.compile(r"(GNUm|M|m)akefile|.*\.mk")),
    (re.compile(rf"\brake{_TARGETS}"), re.compile(r"[Rr]akefile(\.rb)?|.*\.rake")),
    (re.compile(rf"\bjust{_TARGETS}"), re.compile(r"\.?justfile", re.IGNORECASE)),
    (re.compile(rf"\b(?:gulp|grunt){_TARGETS}"), re.compile(r"(gulp|Grunt)file\..*")),
    (re.compile(rf"\btask{_TARGETS}"), re.compile(r"[Tt]askfile(\.dist)?\.ya?ml")),
    (re.compile(rf"\b(?:invoke|inv){_TARGETS}"), re.compile(r"tasks\.py")),
)
"""Commands that start tests by the rules of a build file, and the names of such files."""
_PACKAGE_SCRIPTS = re.compile(r"\b(?:npm|yarn|pnpm|bun)\b")
_PACKAGES, _MAKEFILE = "package.json", "Makefile"
_BUILD_SCRIPT = "setup.py"
"""A command runs it to build, and fixes change it."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The part of a patch that grading applies, and the paths of the dropped part."""

    patch: str
    dropped: tuple[str, ...]


def accept(task: Task, patch: str, scripts: Mapping[str, str] | None = None) -> Accepted:
    """Drop every change of a file that the Task's tests bring or that decides how tests run.

    `scripts` holds the texts, at the base, of scripts that the test command runs. A file that the
    known solution changes is kept, so that the solution itself is gradable.
    """
    rules = _Rules(task, scripts or {})
    kept: list[str] = []
    dropped: dict[str, None] = {}
    ends_kept = True
    for section in sections(patch):
        ends_kept = not rules.refuses(section)
        if ends_kept:
            kept.extend(section.lines)
        else:
            dropped.update(dict.fromkeys(section.names))
    text = "\n".join(kept)
    # A binary part ends with a blank line; only the last part of a diff has both line ends.
    if not text.endswith("\n") or not ends_kept:
        text += "\n"
    return Accepted(text if text.strip() else "", tuple(dropped))


class _Rules:
    """The files that a Task protects."""

    def __init__(self, task: Task, scripts: Mapping[str, str]) -> None:
        spec = task.grading
        brought = {*spec.test_files, *paths(spec.test_patch)}
        self._hidden = {*brought, *_declared_files(spec)}
        # The known solution may change a protected file, but not a test that grading brings.
        self._allowed = set(paths(task.gold_patch)) - brought
        self._folders = {folder for path in self._hidden if (folder := _test_folder(path))}
        named = (path for text in scripts.values() for path in _run_by(text))
        self._drivers = {*_named_scripts(spec), *named}
        self._drives = _starts_tests("\n".join([*commands(spec), *scripts.values()]))

    def refuses(self, section: DiffSection) -> bool:
        """Return True if a section changes a protected file, or a path outside the repository."""
        if any(_is_outside(name) for name in section.names) or _leads_out(section):
            return True
        closed = [name for name in section.names if name not in self._allowed]
        return any(_steers(name, section) or self._is_protected(name) for name in closed)

    def _is_protected(self, path: str) -> bool:
        name = posixpath.basename(path)
        if path in self._hidden or path in self._drivers or self._drives(name):
            return True
        if any(path.startswith(folder + "/") for folder in self._folders):
            return True
        # A file or link in place of a folder of hidden tests would remove them, and a folder in
        # place of a hidden test would block it.
        return any(
            test.startswith(path + "/") or path.startswith(test + "/") for test in self._hidden
        )


def _declared_files(spec: GradingSpec) -> Iterator[str]:
    """Yield the files in ids such as `tests/test_a.py::test_b`."""
    for test in (*spec.fail_to_pass, *spec.pass_to_pass):
        path, found, _ = test.partition("::")
        if found:
            yield posixpath.normpath(path)


def _test_folder(path: str) -> str:
    """Return the outermost test folder of a file; empty if there is none."""
    parts = PurePosixPath(path).parts[:-1]
    for index, part in enumerate(parts):
        if part in _TEST_FOLDERS or (index == 0 and part in _TEST_ROOTS):
            return "/".join(parts[: index + 1])
    return ""


def _is_outside(path: str) -> bool:
    """Return True for a path that is not one of the repository's own files."""
    parts = path.split("/")
    return (
        path in ("", ".")
        or path.startswith("/")
        or ".." in parts
        or ".git" in [part.lower() for part in parts]
    )


def _leads_out(section: DiffSection) -> bool:
    if not section.is_link:
        return False
    target = section.link_target
    if target is None or target.startswith("/"):
        return True
    reached = posixpath.normpath(posixpath.join(posixpath.dirname(section.names[-1]), target))
    return _is_outside(reached)


def _steers(path: str, section: DiffSection) -> bool:
    """Return True if this change of the path decides how tests run, whatever the Task."""
    parts = PurePosixPath(path).parts
    *folders, name = parts
    if _COMPILED in parts or _INSTALLED & set(parts) or parts[0] == "venv":
        return True
    if _STEERING_FILES.fullmatch(name) or _STEERING_FOLDERS & set(folders):
        return True
    if any(_module(part) in _AT_START for part in parts):
        return True
    is_program = _PROGRAM_FOLDERS & set(folders) and _PROGRAMS.fullmatch(name)
    # An existing file of such a name belongs to the project, so a fix may change it.
    return section.is_new and (_shadows(parts, section) or bool(is_program))


def _module(name: str) -> str:
    """Return the module name of a file or folder."""
    return name.partition(".")[0]


def _shadows(parts: tuple[str, ...], section: DiffSection) -> bool:
    """Return True if Python would find this new module before a runner or its imports.

    A folder without `__init__` never shadows a module that has one.
    """
    if _module(parts[0]) in _RUNNERS:
        return True
    first, *rest = parts[1:] if parts[0] in _SOURCE_ROOTS and parts[1:] else parts
    if rest:
        is_module = _module(rest[0]) == "__init__" and len(rest) == 1 and "." not in first
    else:
        is_module = first.endswith((".py", ".so")) or section.is_link
    return is_module and _module(first) in _LIBRARIES


def commands(spec: GradingSpec) -> list[str]:
    """Return the shell texts that a Task brings itself."""
    files = {**spec.files, **spec.test_files}
    hidden = [text for path, text in files.items() if _is_shell(path)]
    return [spec.test_command, spec.test_setup, *hidden]


def scripts_to_read(text: str) -> set[str]:
    """Return the files that a shell text runs and that may run further files."""
    found = {path for path in _run_by(text) if _is_shell(path) or not PurePosixPath(path).suffix}
    if _PACKAGE_SCRIPTS.search(text):
        found.add(_PACKAGES)
    if _starts_tests(text)(_MAKEFILE):
        found.add(_MAKEFILE)
    # No patch can change an absolute path: the first check refuses it.
    return {path for path in found if not path.startswith("/")}


def script_text(path: str, text: str) -> str:
    """Return the shell text in a file: of `package.json`, its test scripts."""
    if path != _PACKAGES:
        return text
    try:
        found = json.loads(text).get("scripts", {})
        return "\n".join(str(found[key]) for key in found if "test" in key)
    except (ValueError, AttributeError, TypeError):
        return ""


def _named_scripts(spec: GradingSpec) -> set[str]:
    """Return files of the repository that the test command names in order to run them."""
    named = {posixpath.normpath(word) for word in _WORD.findall(spec.test_command)}
    chosen = {word for word in named if _SCRIPT_FOLDERS & set(PurePosixPath(word).parts[:-1])}
    return chosen.union(*map(_run_by, commands(spec)))


def _run_by(text: str) -> Iterator[str]:
    """Yield the files that a shell text names to run or read."""
    named = (match["shell"] or match["other"] for match in _RUN.finditer(text))
    for word in (*filter(_is_shell, _WORD.findall(text)), *named):
        path = posixpath.normpath(word)
        if path not in (".", "..", _BUILD_SCRIPT) and not path.startswith("-"):
            yield path


def _starts_tests(text: str) -> Callable[[str], bool]:
    """Return a predicate of file names: do the rules of such a file start the tests of a text?"""
    names = [name for command, name in _BUILDS if command.search(text)]
    return lambda name: any(each.fullmatch(name) for each in names)


def _is_shell(path: str) -> bool:
    return path.endswith((".sh", ".bash"))
