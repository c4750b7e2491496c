"""The part of an agent's Changes that grading lays: no file that decides how tests run or judge.

In files with settings of a test runner and others (`pyproject.toml`, `setup.cfg`, …), only the
settings of the runner are those of the clean tree (`steering.py`).
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from swerl.core.changes import Changes, FileMap, TreeFile, is_plain, leads_out, parents, touched
from swerl.core.task import GradingSpec, Task
from swerl.grading.steering import holds_steering, without_steering

_TEST_FOLDERS = frozenset({"tests", "test", "__tests__", "e2e"})
_TEST_ROOTS = _TEST_FOLDERS | {"testing", "spec", "specs", "r2e_tests"}
"""Names of test folders; the further ones count only at the root."""
_SCRIPT_FOLDERS = _TEST_ROOTS | {"bin", "ci", "scripts", "tools"}
"""Folders whose files a test command names in order to run them."""

_STEERING_FILES = re.compile(
    r"""
      conftest\..* | \.?pytest\.(ini|toml) | tox\.(ini|toml) | noxfile\.py | \.coveragerc
    | .*\.(pth|egg-link|py[co]) | entry_points\.txt | pyvenv\.cfg
    | (nose2?|unittest)\.cfg | behave\.ini | \.behaverc | \.s?testr\.conf   # Python
    | (jest|vitest|vite|ava|karma|mocha|playwright|cypress|wdio)\.(conf|config|setup|workspace)\..*
    | \.mocharc.* | \.?babelrc.* | babel\.config\..* | \.nycrc.* | \.taprc | \.labrc\..*
    | jasmine\.json | testem\..* | bunfig\.toml | mocha\.opts | \.swcrc     # JavaScript
    | \.(npm|yarn)rc.* | \.pnpmfile\..* | \.pnp\..*               # and what starts its scripts
    | mvnw.* | gradlew.* | init\.gradle.* | go\.work | rust-toolchain.* | \.envrc
    | nextest\.toml | junit-platform\.properties
    | \.rspec(-local)? | phpunit\.xml.* | \.gitattributes
    | \.gitlab-ci\.yml | \.travis\.yml | azure-pipelines\.yml | Jenkinsfile | appveyor\.yml
    """,
    re.VERBOSE,
)
"""Names of files that decide how tests run, in any folder and for any Task."""
_STEERING_FOLDERS = frozenset(
    {".github", ".circleci", ".cargo", ".mvn", "testdata", "test_data", "test-data"}
    | {"__snapshots__", "__fixtures__", "__mocks__"}
)
_DATA = (".json", ".jsonl", ".yml", ".yaml", ".csv", ".txt", ".xml", ".out", ".golden", ".expected")
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
"""Modules that run tests; a new one of such a name would shadow the real one."""
_NEVER_IMPORTED = frozenset(
    {"queue", "sched", "statistics", "secrets", "wave", "chunk", "cmath", "colorsys", "graphlib"}
    | {"turtle", "mailbox", "shelve", "cgi", "crypt", "pipes", "imaplib", "smtplib", "poplib"}
    | {"ftplib", "telnetlib", "tkinter", "aifc", "sunau", "audioop", "mailcap", "uu", "trace"}
)
"""Modules of Python that no test runner imports, so that a project may have its own."""
_LIBRARIES = (
    _RUNNERS
    | (sys.stdlib_module_names - _NEVER_IMPORTED)
    | {"iniconfig", "packaging", "pygments", "django"}
)
"""Modules that runners import; a new one of such a name would shadow the real one too."""
SOURCE_ROOTS = frozenset({"src", "lib"})
"""Folders that are often on the search path, as the root is."""
_NOT_IMPORTED = frozenset({"tests", "test", "testing", "docs", "doc", "examples", "benchmarks"})
"""Names that installed packages leave behind by mistake, and that no test runner imports."""
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
class CleanTree:
    """Facts of the clean work tree that decide about Changes."""

    scripts: Mapping[str, str] = field(default_factory=dict)
    """Texts of scripts that the test command runs."""
    installed: frozenset[str] = frozenset()
    """Those of `new_modules` that an installed package has."""
    owned: frozenset[tuple[str, str]] = frozenset()
    """Modules of such names that the project already has, each with its source folder."""
    searched: frozenset[str] = SOURCE_ROOTS
    """Source folders that may be on Python's search path."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The part of Changes that grading lays, and the paths that it drops or restores."""

    changes: Changes
    dropped: tuple[str, ...]


def accept(task: Task, changes: Changes, clean: CleanTree | None = None) -> Accepted:
    """Drop every change of a file that the Task's tests bring or that decides how tests run.

    What was there before the Changes must be known. A file that the known solution changes is
    kept, so that the solution itself is gradable.
    """
    rules = _Rules(task, clean or CleanTree())
    before = changes.before or {}
    files: dict[str, TreeFile | None] = {}
    dropped: dict[str, None] = {}
    for path, file in changes.files.items():
        old = before.get(path)
        if rules.refuses(path, file, old):
            dropped[path] = None
            continue
        kept = file if rules.allows(path) else _with_settings(path, old, file)
        if kept != file:
            dropped[path] = None
        if kept != old:
            files[path] = kept
    for path in _blocked(files, before, dropped):
        dropped[path] = None
        files.pop(path, None)
    return Accepted(changes.only(files), tuple(dropped))


def _with_settings(path: str, old: TreeFile | None, new: TreeFile | None) -> TreeFile | None:
    """Return a changed file with the test runner's settings of the clean tree."""
    if not holds_steering(path):
        return new
    # A link in its place, or one that was in its place, has no sections to restore.
    if (new and new.is_link) or (old and old.is_link):
        return old
    base, text = (file.data if file else b"" for file in (old, new))
    kept = without_steering(
        path, base.decode("utf-8", "surrogateescape"), text.decode("utf-8", "surrogateescape")
    ).encode("utf-8", "surrogateescape")
    if kept == text:
        return new
    if not kept:
        return None
    known = new or old or TreeFile(b"")
    return replace(known, data=kept) if kept != base else old


def _blocked(files: FileMap, before: FileMap, dropped: Collection[str]) -> list[str]:
    """Return paths that cannot be laid, because a dropped change keeps another file in the way."""
    in_the_way = {path for path in dropped if files.get(path, before.get(path))}
    below = [path for path in files if any(parent in in_the_way for parent in parents(path))]
    # A file in place of a folder would remove the files in it that are kept.
    folders = {parent for path in in_the_way for parent in parents(path)}
    return below + [path for path, file in files.items() if file and path in folders]


class _Rules:
    """The files that a Task protects."""

    def __init__(self, task: Task, clean: CleanTree) -> None:
        spec = task.grading
        self._workdir = f"{task.workdir}/".encode()
        brought = {*spec.test_files, *touched(spec.test_patch)}
        self._hidden = {*brought, *_declared_files(spec)}
        # The known solution may change a protected file, but not a test that grading brings.
        self._allowed = set(touched(task.gold_patch)) - brought
        self._folders = {folder for path in self._hidden if (folder := _test_folder(path))}
        self._above = {folder for path in self._hidden for folder in parents(path)}
        self._roots = {folder.split("/")[0] for folder in self._folders}
        self._modules = {path.removesuffix(".py") for path in self._hidden if path.endswith(".py")}
        self._imported = self._modules | self._above
        named = (path for text in clean.scripts.values() for path in _run_by(text))
        self._drivers = {*_named_scripts(spec), *named}
        self._drives = _starts_tests("\n".join([*commands(spec), *clean.scripts.values()]))
        self._clean = clean
        self._texts = "\n".join((*spec.files.values(), *spec.test_files.values(), spec.test_patch))

    def allows(self, path: str) -> bool:
        """Return True for a path that the known solution changes too."""
        return path in self._allowed

    def refuses(self, path: str, file: TreeFile | None, old: TreeFile | None) -> bool:
        """Return True for a protected file, and for a link that leads out of the repository."""
        if not is_plain(path) or (file and file.is_link and self._leads_out(path, file.data)):
            return True
        if path in self._allowed:
            return False
        is_new = file is not None and old is None
        return steers(path) or self._is_protected(path) or (is_new and self._precedes(path, file))

    def _leads_out(self, path: str, target: bytes) -> bool:
        inside = target.removeprefix(self._workdir)
        return leads_out("" if inside != target else path, inside)

    def _is_protected(self, path: str) -> bool:
        name = posixpath.basename(path)
        if path in self._hidden or path in self._drivers or self._drives(name):
            return True
        # Data that the tests name: they may compare with it.
        if "/" in path and name.endswith(_DATA) and name in re.findall(r"[\w.-]+", self._texts):
            return True
        # A file or link in place of a folder of hidden tests would remove them, and a folder in
        # place of a hidden test would block it.
        return path in self._above or any(
            each in self._folders or each in self._hidden for each in parents(path)
        )

    def _precedes(self, path: str, file: TreeFile | None) -> bool:
        """Return True if a new file would be found before a program or module of a test run."""
        *folders, name = path.split("/")
        if _PROGRAM_FOLDERS & set(folders) and _PROGRAMS.fullmatch(name):
            return True
        is_link = bool(file and file.is_link)
        if self._replaces_tests(path, is_link=is_link):
            return True
        found = _module_of(path, is_link=is_link)
        owned = self._clean.owned
        if (found.root, found.name) in owned:
            return False
        if not found.is_whole or found.root not in {"", *self._clean.searched}:
            return False
        # A package of a later folder wins over a folder of tests that has no `__init__`.
        if found.name in _LIBRARIES or found.name in self._roots:
            return True
        is_moved = any((root, found.name) in owned for root in ("", *SOURCE_ROOTS))
        others = _NOT_IMPORTED | sys.stdlib_module_names
        return found.name in self._clean.installed - others and not is_moved

    def _replaces_tests(self, path: str, *, is_link: bool) -> bool:
        """Return True if Python would import a new file in place of hidden tests or their folder.

        A package wins over a module, an extension module over both of source, and each of them over
        a folder without `__init__`.
        """
        folder, name = posixpath.split(path)
        if is_link and path in self._modules:
            return True
        if not name.endswith((".py", ".so")):
            return False
        if _module(name) == "__init__":
            return folder in self._modules
        return posixpath.join(folder, _module(name)) in self._imported


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


_TEST_FILE = re.compile(
    r"test_.*|.*_(test|spec)\.\w+|.*\.(test|spec)\.\w+|.*Tests?\.(java|kt|scala|cs|php|swift)",
    re.DOTALL,
)


def is_test(path: str) -> bool:
    """Return True if a file of any project belongs to its tests, or decides how they run."""
    name = posixpath.basename(path)
    return bool(_test_folder(path) or _TEST_FILE.fullmatch(name)) or steers(path)


def steers(path: str) -> bool:
    """Return True if the path decides how tests run, whatever the Task."""
    parts = PurePosixPath(path).parts
    *folders, name = parts
    if _COMPILED in parts or _INSTALLED & set(parts) or parts[0] == "venv":
        return True
    if _STEERING_FILES.fullmatch(name) or _STEERING_FOLDERS & set(folders):
        return True
    return any(_module(part) in _AT_START for part in parts)


def _module(name: str) -> str:
    """Return the module name of a file or folder."""
    return name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class _NewModule:
    """The module at the top of the search path to which a new file belongs."""

    name: str
    root: str
    """Folder of sources that holds it; empty for the root."""
    is_whole: bool
    """True if Python finds the module by this file: a folder without `__init__` shadows none."""


def _module_of(path: str, *, is_link: bool) -> _NewModule:
    parts = path.split("/")
    root = parts[0] if parts[0] in SOURCE_ROOTS and len(parts) > 1 else ""
    first, *rest = parts[1:] if root else parts
    if rest:
        is_whole = _module(rest[0]) == "__init__" and len(rest) == 1 and "." not in first
    else:
        is_whole = first.endswith((".py", ".so")) or is_link
    return _NewModule(_module(first), root, is_whole)


def new_modules(changes: Changes) -> set[tuple[str, str]]:
    """Return source folder and name of each module to which Changes add a file."""
    before = changes.before or {}
    added = {path: file for path, file in changes.files.items() if file and not before.get(path)}
    found = [_module_of(path, is_link=file.is_link) for path, file in added.items()]
    return {(each.root, each.name) for each in found if each.is_whole}


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
