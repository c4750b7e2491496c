"""Find the commits of a repository that can become Tasks: they change source and tests together.

A merge is one change against its first parent, as a squashed pull request is. Every commit that is
left out has a reason.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath

from swerl.core.changes import touched
from swerl.core.chat import Json
from swerl.core.errors import InputError
from swerl.core.task import GradingSpec, Task

MAX_FILES, MAX_LINES = 20, 1000
"""Changed source files and lines of a candidate; larger commits hold several changes."""
WORKDIR = "/testbed"
_TEXTS = re.compile(
    r".*\.(md|rst|txt|adoc|png|svg|gif|jpg|po|pot)|(CHANGE|CHANGELOG|NEWS|AUTHORS|LICENSE).*", re.I
)
_FOREIGN = re.compile(
    r"(^|/)(vendor|third_party|node_modules|dist|build|generated)/"
    r"|(\.lock|-lock\.(json|yaml)|\.min\.js|_pb2\.py|\.pb\.go|\.snap|go\.sum)$"
)
"""Vendored and generated files."""
_TRAILER = re.compile(r"^(?:\w[\w-]*-by:|Change-Id:|Merge (?:pull request|branch) |-{9}).*$", re.M)
_LOG = (
    *("--first-parent", "--diff-merges=first-parent", "-M", "-z", "--numstat"),
    *("--ignore-submodules=none", "--no-show-signature", "--format=%x1e%H%x1f%P%x1f%B%x1f"),
)
DIFF = ("diff-tree", "-r", "--no-renames")
"""Unlike `git diff`, it ignores the user's settings, such as `diff.noprefix` or `diff.external`."""
_PAGE = 1000
"""Commits that one call of git reads."""
_NUMBER = re.compile(r"#(\d+)\b")
_MIN_WORDS = 8
"""Words of a message below which it does not describe a problem."""
_MIN_CODE_CHARS = 20
"""Characters of a line of the solution that count as code in a prompt."""


@dataclass(frozen=True, slots=True)
class Commits:
    """The commits to look at."""

    names: str = ""
    """A range such as `v1.0..main`, or one commit; empty: all of HEAD."""
    since: str = ""
    """Date of the oldest one, in any form that git reads."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A commit that may become a Task."""

    commit: str
    base: str
    """Its first parent."""
    message: str
    solution: str
    """Diff of everything outside the tests."""
    tests: str
    """Diff of the tests."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A commit that cannot become a Task."""

    commit: str
    reason: str


def candidates(
    repo: Path, commits: Commits, is_test: Callable[[str], bool]
) -> Iterator[Candidate | Dropped]:
    """Yield every commit, the newest first. Raises InputError if it is no complete repository."""
    if git(repo, "rev-parse", "--is-shallow-repository") == "true":
        hint = f"git -C {repo} fetch --unshallow"
        raise InputError(f"{repo} is a shallow clone, without its history", hint=hint)
    is_single = commits.names and ".." not in commits.names
    size = 1 if is_single else _PAGE
    since = [f"--since={commits.since}"] if commits.since else []
    for page in count():
        part = [f"--max-count={size}", f"--skip={page * size}", commits.names or "HEAD", "--"]
        entries = git(repo, "log", *_LOG, *since, *part).split("\x1e")[1:]
        for entry in entries:
            yield _judged(repo, entry, is_test)
        if is_single or len(entries) < size:
            return


def _judged(repo: Path, entry: str, is_test: Callable[[str], bool]) -> Candidate | Dropped:
    """Return the candidate that an entry of the log becomes, or why it becomes none."""
    commit, parents, message, changes = entry.split("\x1f", 3)
    base = parents.partition(" ")[0]
    if reason := _objection(base, message, _changed_lines(changes), is_test):
        return Dropped(commit, reason)
    # A name that git quotes would not match its own path.
    paths = git(repo, *DIFF, "-z", "--name-only", base, commit).split("\0")
    tests = [path for path in paths if path and is_test(path)]
    sides = [
        git(repo, *DIFF, "--binary", "--full-index", base, commit, "--", *side)
        for side in (
            [".", *(f":(top,exclude,literal){path}" for path in tests)],
            [f":(top,literal){path}" for path in tests],
        )
    ]
    if "\n+Subproject commit " in sides[0]:
        return Dropped(commit, "it changes a submodule")
    return Candidate(commit, base, message.strip(), sides[0] + "\n", sides[1] + "\n")


def _objection(
    base: str, message: str, files: Mapping[str, int | None], is_test: Callable[[str], bool]
) -> str:
    """Return why a commit cannot become a Task; empty if it may."""
    if not base:
        return "it has no parent"
    if re.match(r"Revert\b", message):
        return "it is a revert"
    if not any(map(is_test, files)):
        return "it changes no test"
    source = {path: lines for path, lines in files.items() if is_source(path, is_test)}
    if not source:
        return "it changes no source file"
    if len(source) > MAX_FILES:
        return f"it changes more than {MAX_FILES} source files"
    if None in source.values():
        return "it changes a binary file"
    num_lines = sum(lines or 0 for lines in source.values())
    if num_lines > MAX_LINES:
        return f"it changes more than {MAX_LINES} lines of source"
    return "" if num_lines else "it only moves files"


def is_source(path: str, is_test: Callable[[str], bool]) -> bool:
    """Return True unless a file is a test, text for people, vendored or generated."""
    is_code = not _FOREIGN.search(path) and not _TEXTS.fullmatch(PurePosixPath(path).name)
    return is_code and not is_test(path)


def _changed_lines(numstat: str) -> dict[str, int | None]:
    """Return the changed lines of each file; None if it is binary. Moves change no line."""
    files: dict[str, int | None] = {}
    fields = iter(numstat.strip("\0\n").split("\0"))
    for entry in fields:
        if not entry:
            continue
        added, deleted, path = entry.split("\t", 2)
        if not path:  # of a move, both names follow
            next(fields)
            path = next(fields)
        files[path] = None if added == "-" else int(added) + int(deleted)
    return files


def git(repo: Path, *arguments: str) -> str:
    """Return the output of a git command. Raises InputError."""
    process = subprocess.run(
        ["git", "-C", str(repo), "-c", "core.quotePath=true", *arguments],
        capture_output=True,
        check=False,
    )
    if process.returncode:
        complaint = process.stderr.decode("utf-8", "replace").strip().split("\n")[0]
        raise InputError(f"git {arguments[0]} failed in {repo}: {complaint}", hint="pass a clone")
    # A binary patch ends with a blank line; without it, git leaves out the last file.
    return process.stdout.decode("utf-8", "surrogateescape").removesuffix("\n")


def make_task(
    candidate: Candidate, *, repo: str, image: str, setup: str, spec: GradingSpec
) -> Task:
    """Return the Task of a candidate in an image that has the whole repository at `WORKDIR`.

    Each sandbox checks out the base commit. `spec` has the command and the tests; the patch with
    the tests is added. The prompt is still empty.
    """
    checkout = f"git -c safe.directory='*' checkout --quiet --force {candidate.base} --"
    return Task(
        id=f"{repo}-{candidate.commit[:12]}",
        repo=repo,
        image=image,
        workdir=WORKDIR,
        prompt="",
        grading=spec,
        base_commit=candidate.base,
        gold_patch=candidate.solution,
        dataset="from-repo",
        setup="\n".join(["set -e", checkout, setup]).rstrip(),
        metadata={"commit": candidate.commit},
    )


def prompt_of(
    candidate: Candidate, tests: tuple[str, ...], issues: Mapping[str, str]
) -> tuple[str, dict[str, Json]]:
    """Return the prompt, and where it comes from with what is doubtful about it.

    It is the linked issue, else the commit's message, else the names of the failing tests, as of a
    synthetic bug.
    """
    numbers = _NUMBER.findall(candidate.message)
    linked = next((issues[number] for number in numbers if number in issues), "")
    source, text = ("issue", linked) if linked else ("message", _statement(candidate.message))
    if not linked and len(text.split()) < _MIN_WORDS:
        source = "template"
        names = "\n".join(f"- {test}" for test in tests[:20])
        text = f"{text}\n\nThese tests, some of them hidden, fail and should pass:\n{names}".strip()
    prompt = (
        f"You are in {WORKDIR}, a repository with the following issue:\n\n<issue>\n{text}\n"
        "</issue>\n\nChange the code so that the issue is resolved. Hidden tests will check the "
        "result, so fix the cause and keep everything else working."
    )
    return prompt, {"prompt_source": source, "prompt_doubts": _doubts(text, source, candidate)}


def _statement(message: str) -> str:
    """Return a commit's message without trailers and numbers of pull requests."""
    text = _TRAILER.sub("", message)
    return re.sub(r"\s*\(#\d+\)", "", text).strip()


def _doubts(text: str, source: str, candidate: Candidate) -> list[Json]:
    added = (
        line[1:].strip()
        for line in candidate.solution.splitlines()
        if line.startswith("+") and not line.startswith("+++")
    )
    names = {PurePosixPath(path).name: path for path in touched(candidate.solution)}
    code = (name for name in names if name in text and not _TEXTS.fullmatch(name))
    doubts = [f"it names {names[name]}, which the solution changes" for name in code]
    if any(len(line) >= _MIN_CODE_CHARS and line in text for line in added):
        doubts.append("it has code of the solution")
    if source == "template" and candidate.message:
        doubts.append("the commit's message is too short to describe the problem")
    return [*doubts]
