"""Make synthetic bugs of a repository: its newest commit with one operator or constant changed.

Each is a commit without a parent, so no history in its sandbox has the correct line. The operators
are those of mutation testing (Y. Jia, M. Harman, "An Analysis and Survey of the Development of
Mutation Testing", 2011) that most languages share; what does not compile fails every test.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from swerl.core.files import disk_errors
from swerl.tasks.from_repo import DIFF, Candidate, git, is_source

MAX_FAILING = 20
"""Tests that a bug may make fail; more do not point to it."""
_PAIRS = (
    ("<=", "<"), (">=", ">"), ("==", "!="), ("+", "-"), ("&&", "||"), ("and", "or"),
    ("True", "False"), ("true", "false"), ("min", "max"), ("any", "all"), ("break", "continue"),
)  # fmt: skip
_OTHERS = {old: new for pair in _PAIRS for old, new in (pair, pair[::-1])}
_OTHERS |= {"is not": "is", "not in": "in", "not": ""}
"""Code -> what takes its place; a whole number becomes the next one."""
_PACKAGES = frozenset({"init", "mod", "lib", "index"})
"""Names of files that stand for their folder."""
_BRANCHES = "refs/heads/bugs"
_IDENTITY = ("-c", "user.name=swerl", "-c", "user.email=swerl@localhost")
_PLACES = re.compile(
    r"""
      \"\"\"[\s\S]*?\"\"\" | '''[\s\S]*?''' | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'
    | \#[^\n]* | //[^\n]* | /\*[\s\S]*?\*/
    | (?P<code> (?<=\s)(?:[<>]=?|==|!=|[+-]|&&|\|\|)(?=\s) | \b\d+\b(?![.\w])
      | \b(?:is\ not|not\ in|not|and|or|[Tt]rue|[Ff]alse|min|max|any|all|break|continue)\b )
    """,
    re.VERBOSE,
)
"""Texts and comments, which stay, and the code that may change."""
_MAX_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class _Place:
    """A piece of a file, and what takes its place."""

    path: str
    start: int
    end: int
    new: str


def bugs(repo: Path, clone: Path, number: int, is_test: Callable[[str], bool]) -> list[Candidate]:
    """Return at most this many bugs of HEAD, as commits of a clone that is made once.

    They are in files whose names the tests have, one in a line. Raises InputError.
    """
    if not clone.exists():
        with disk_errors(clone):
            clone.parent.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.TemporaryDirectory(dir=clone.parent, prefix=f".{clone.name}.")
        with scratch as folder:
            part = Path(folder) / clone.name
            git(repo, "clone", "--quiet", str(repo.resolve()), str(part))
            _make(part, number, is_test)
            part.rename(clone)
    diff = [*DIFF, "-p", "--full-index"]
    commits = git(clone, "for-each-ref", "--format=%(objectname)", _BRANCHES).split()
    return [
        Candidate(commit, commit, "", git(clone, *diff, commit, "HEAD") + "\n", "")
        for commit in commits
    ]


def test_files(clone: Path, tests: Sequence[str], is_test: Callable[[str], bool]) -> dict[str, str]:
    """Return the test files of HEAD with the names of these tests; grading writes them again."""
    names = {(re.findall(r"\w+", test.partition("[")[0]) or [""])[-1] for test in tests}
    return {
        path: text
        for path in _paths(clone)
        if is_test(path) and names & set(re.findall(r"\w+", text := _text(clone / path)))
    }


def _make(clone: Path, number: int, is_test: Callable[[str], bool]) -> None:
    """Commit each bug under a branch of its own."""
    paths = _paths(clone)
    tests = "\n".join(_text(clone / path) for path in paths if is_test(path))
    words = set(re.findall(r"\w+", tests))
    places = [
        place
        for path in paths
        if is_source(path, is_test) and _is_named(path, words)
        for place in _places(path, _text(clone / path))
    ]
    random.Random(git(clone, "rev-parse", "HEAD")).shuffle(places)
    for index, place in enumerate(places[:number]):
        file, text = clone / place.path, _text(clone / place.path)
        changed = text[: place.start] + place.new + text[place.end :]
        file.write_bytes(changed.encode())
        git(clone, "add", "--", f":(top,literal){place.path}")
        tree = git(clone, "write-tree")
        commit = git(clone, *_IDENTITY, "commit-tree", tree, "-m", "Import")
        git(clone, "update-ref", f"{_BRANCHES}/{index:06}", commit)
        git(clone, "reset", "--quiet", "--hard")


def _paths(clone: Path) -> list[str]:
    return [path for path in git(clone, "ls-files", "-z").split("\0") if path]


def _text(file: Path) -> str:
    """Return a file's text; empty if it is a link, large, or not UTF-8."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size > _MAX_BYTES:
        return ""
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        return ""


def _is_named(path: str, words: set[str]) -> bool:
    """Return whether tests name a file, or the package that it is."""
    parts = PurePosixPath(path)
    stem = parts.stem.strip("_")
    return stem in words or (stem in _PACKAGES and parts.parent.name in words)


def _places(path: str, text: str) -> Iterator[_Place]:
    """Yield the first place of each line."""
    lines: set[int] = set()
    for match in _PLACES.finditer(text):
        line = text.count("\n", 0, match.start())
        if (old := match["code"]) and line not in lines:
            lines.add(line)
            new = str(int(old) + 1) if old.isdigit() else _OTHERS[old]
            yield _Place(path, match.start("code"), match.end("code"), new)
