"""What a test command runs of the repository: scripts, those that they run, and build files."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from swerl.core.task import GradingSpec

_WORD = re.compile(r"[\w./-]+")
_FOLDERS = frozenset(
    {"tests", "test", "__tests__", "e2e", "testing", "spec", "specs", "r2e_tests"}
    | {"bin", "ci", "scripts", "tools"}
)
"""Folders whose files a test command names in order to run them."""
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
"""Commands that start tests by a build file's rules, and the names of such files."""
_PACKAGE_SCRIPTS = re.compile(r"\b(?:npm|yarn|pnpm|bun)\b")
_PACKAGES, _MAKEFILE = "package.json", "Makefile"
_BUILD_SCRIPT = "setup.py"
"""It is run in order to build, and fixes change it."""


def scripts(spec: GradingSpec) -> set[str]:
    """Return files of the repository that the test command names in order to run them."""
    named = {posixpath.normpath(word) for word in _WORD.findall(spec.test_command)}
    chosen = {word for word in named if _FOLDERS & set(PurePosixPath(word).parts[:-1])}
    return chosen.union(*map(run_by, commands(spec)))


def run_by(text: str) -> Iterator[str]:
    """Yield the files that a shell script runs or reads, as far as its text tells."""
    named = (match["shell"] or match["other"] for match in _RUN.finditer(text))
    for word in (*filter(_is_shell, _WORD.findall(text)), *named):
        path = posixpath.normpath(word)
        if path not in (".", "..", _BUILD_SCRIPT) and not path.startswith("-"):
            yield path


def starts_tests(text: str) -> Callable[[str], bool]:
    """Return what says whether a file of a name holds the rules by which a text starts tests."""
    names = [name for command, name in _BUILDS if command.search(text)]
    return lambda name: any(each.fullmatch(name) for each in names)


def to_read(text: str) -> set[str]:
    """Return the files that a text runs and whose own texts tell what else is run."""
    found = {path for path in run_by(text) if _is_shell(path) or not PurePosixPath(path).suffix}
    if _PACKAGE_SCRIPTS.search(text):
        found.add(_PACKAGES)
    if starts_tests(text)(_MAKEFILE):
        found.add(_MAKEFILE)
    return {path for path in found if not path.startswith("/")}


def script_text(path: str, text: str) -> str:
    """Return what a shell would run of a file: of `package.json`, its scripts that test."""
    if path != _PACKAGES:
        return text
    try:
        found = json.loads(text).get("scripts", {})
        return "\n".join(str(found[key]) for key in found if "test" in key)
    except (ValueError, AttributeError, TypeError):
        return ""


def commands(spec: GradingSpec) -> list[str]:
    """Return the shell texts that a Task brings itself."""
    files = {**spec.files, **spec.test_files}
    hidden = [text for path, text in files.items() if _is_shell(path)]
    return [spec.test_command, spec.test_setup, *hidden]


def _is_shell(path: str) -> bool:
    return path.endswith((".sh", ".bash"))
