"""Names of files that decide how tests run, whichever Task they belong to."""

from __future__ import annotations

import re
import sys
from pathlib import PurePosixPath

from swerl.grading.sections import Section

_FILES = re.compile(
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
"""File names that count whatever folder they stand in."""
_FOLDERS = frozenset({".github", ".circleci", ".cargo", ".mvn"})
_INSTALLED = frozenset(
    {".venv", "site-packages", "dist-packages", "__pypackages__", ".tox", ".nox", ".eggs"}
    | {"node_modules", "bower_components"}
)
"""Folders of what is installed, among which are the runners and the programs that start them."""
_COMPILED = "__pycache__"
"""Folder whose files Python may run in place of the source beside it, a hidden test's too."""
_AT_START = frozenset({"sitecustomize", "usercustomize"})
"""Modules that Python imports as it starts, in whatever form they come."""
_RUNNERS = frozenset(
    {"pytest", "_pytest", "py", "pluggy", "unittest", "doctest", "nose", "xdist", "tox", "coverage"}
)
"""Modules that run tests: a new one of such a name at the root would stand before the real one."""
_LIBRARIES = _RUNNERS | sys.stdlib_module_names | {"iniconfig", "packaging", "pygments", "django"}
"""What those import: a new package or module of such a name would stand before it as well."""
_SOURCE_ROOTS = frozenset({"src", "lib"})
"""Folders that search paths lead to, as they do to the root."""
_PROGRAMS = re.compile(
    r"(ba|da|z)?sh|env|git|g?make|python[\d.]*|py\.?test|tox|nox|pip\d?|uv|conda"
    r"|node(js)?|np[mx]|yarn|pnpm|bun|jest|mocha|vitest|go|cargo|java|mvn|gradle|ant"
    r"|ruby|rspec|rake|bundle|php|phpunit|ctest|cmake"
)
"""Programs that start tests: a new one of such a name may be found before the real one."""
_PROGRAM_FOLDERS = frozenset({"bin", ".bin", "sbin"})


def steers(path: str, section: Section) -> bool:
    """Say whether a path decides how tests run, as a section of a patch changes it."""
    parts = PurePosixPath(path).parts
    *folders, name = parts
    if _COMPILED in parts or _INSTALLED & set(parts) or parts[0] == "venv":
        return True
    if _FILES.fullmatch(name) or _FOLDERS & set(folders):
        return True
    if any(_module(part) in _AT_START for part in parts):
        return True
    return section.is_new and (_stands_before(parts, section) or _is_program(parts))


def _module(name: str) -> str:
    """Return the module that a file or folder of this name may be."""
    return name.partition(".")[0]


def _stands_before(parts: tuple[str, ...], section: Section) -> bool:
    """Say whether this comes to be a module that Python finds before a runner or what it imports.

    A folder without `__init__` never stands before a module that has one.
    """
    if _module(parts[0]) in _RUNNERS:
        return True
    first, *rest = parts[1:] if parts[0] in _SOURCE_ROOTS and parts[1:] else parts
    if rest:
        is_module = _module(rest[0]) == "__init__" and len(rest) == 1 and "." not in first
    else:
        is_module = first.endswith((".py", ".so")) or section.is_link
    return is_module and _module(first) in _LIBRARIES


def _is_program(parts: tuple[str, ...]) -> bool:
    return bool(_PROGRAM_FOLDERS & set(parts[:-1])) and bool(_PROGRAMS.fullmatch(parts[-1]))
