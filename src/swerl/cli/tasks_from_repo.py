"""`swerl tasks from-repo`: make certified Tasks of a repository's history."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import join
from typing import Annotated

import typer

from swerl.checks.discover import Discoveries, Discovery, declared
from swerl.checks.vet import Runs, fitting_workers
from swerl.cli._options import (
    BackendOption,
    SettingsAndLimitsOption,
    open_backend,
    split_limits,
)
from swerl.cli._output import safe, simple_table, stderr
from swerl.cli._run import progress_bar, run
from swerl.cli.tasks_vet import vet
from swerl.core.changes import touched
from swerl.core.chat import Json
from swerl.core.errors import InputError, SwerlError
from swerl.core.files import read_json
from swerl.core.jobs import run_jobs
from swerl.core.secrets import cache_dir
from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.grading.accept import is_test, steers
from swerl.images.build import build_repository, copy_repository
from swerl.tasks.bugs import MAX_FAILING, bugs, test_files
from swerl.tasks.from_repo import (
    Candidate,
    Commits,
    Dropped,
    candidates,
    git,
    make_task,
    prompt_of,
)

_ENVIRONMENT = re.compile(
    r"(^|/)(pyproject\.toml|setup\.(py|cfg)|.*requirements.*\.txt|environment\.ya?ml|.*\.lock"
    r"|.*-lock\.(json|yaml)|package\.json|go\.(mod|sum)|pom\.xml|build\.gradle.*|Cargo\.toml)$"
)
"""Files that decide about the environment; commits that share them share an image."""
_TIMEOUT_S = 1800.0
"""Limit of the tests; vetting lowers it to what they take."""
_TRIES = 4
"""Bugs to try for each one that is wanted: tests do not notice every one."""
_TESTS = "{tests}"
"""Stands for the changed test files in the test command."""
_CODE = re.compile(
    r".*\.([cm]?[jt]sx?|py|rs|go|java|kt|scala|rb|php|cs|swift|c|cc|cpp|exs|pl|t|lua|dart|sh)"
)
"""Files that a runner takes; it may fail on the tests' data."""


def from_repo(
    repo: Annotated[Path, typer.Argument(help="Clone of the repository, with its history.")],
    test: Annotated[str, typer.Option(help=f"Command of the tests; {_TESTS}: the changed files.")],
    *,
    setup: Annotated[str, typer.Option(help="Command that installs the project.")] = "",
    image: Annotated[
        str, typer.Option(help="Image to use; one is built for each state of the lock files.")
    ] = "",
    commits: Annotated[
        str, typer.Option("--commits", "--commit", help="Only these: A..B, or one commit.")
    ] = "",
    since: Annotated[str, typer.Option(metavar="DATE", help="Only newer commits.")] = "",
    mutate: Annotated[
        int, typer.Option(min=0, help="Make this many tasks of synthetic bugs, not of commits.")
    ] = 0,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of candidates.")] = 50,
    issues: Annotated[
        Path | None, typer.Option(help="JSON file: number of an issue → text.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("tasks.jsonl"),
    backend: BackendOption = "local",
    settings: SettingsAndLimitsOption = None,
) -> None:
    """Make certified tasks of a history, or of synthetic bugs; the same command resumes."""
    started = time.monotonic()
    limits, options = split_limits(settings or (), memory_mib=4096, num_processes=512)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", repo.resolve().name).strip("-._") or "repository"
    place = _Place(repo, name, git(repo, "rev-parse", "HEAD")[:12], image, setup)
    dropped: list[Dropped] = []
    if mutate:
        place = place.with_bugs(mutate)
        chosen = bugs(repo, place.repo, mutate * _TRIES, is_test)
    else:
        chosen, dropped = _candidates(repo, Commits(commits, since), limit)
    journal = out.with_name(f"{out.stem}.discovered.jsonl")
    maker = _Maker(
        place=place,
        most_bugs=mutate,
        spec=GradingSpec("swebench", test_command=test, timeout_s=_TIMEOUT_S),
        issues=_issues(issues),
        discoveries=Discoveries(
            Runs(open_backend(backend, options, run="from-repo"), limits), journal
        ),
    )
    with progress_bar("commits", len(chosen)) as advance:
        num_jobs = fitting_workers(limits)
        jobs = run_jobs(chosen, maker.make, limit=num_jobs, on_done=lambda _: advance())
        results = run(jobs, after=f"the same command resumes from {journal}")
    tasks = [result for result in results if isinstance(result, Task)]
    dropped += [result for result in results if isinstance(result, Dropped)]
    _report(dropped, num_candidates=len(chosen), num_tasks=len(tasks))
    if not tasks:
        raise InputError(f"{repo} gives no task", hint="the table above has the reasons")
    drafts = out.with_name(f"{out.stem}.candidates.jsonl")
    write_tasks(drafts, tasks)
    minutes = (time.monotonic() - started) / 60
    stderr().print(f"{minutes:.1f} minutes for {drafts}; vetting", soft_wrap=True)
    vet(drafts, out=out, drop_flaky=True, backend=backend, settings=settings)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes Tasks of candidates."""

    place: _Place
    spec: GradingSpec
    issues: Mapping[str, str]
    discoveries: Discoveries
    most_bugs: int = 0
    """Tasks to make of synthetic bugs; 0: the candidates are commits."""
    failing: set[frozenset[str]] = field(default_factory=set)
    """The tests that each bug makes fail."""

    async def make(self, candidate: Candidate) -> Task | Dropped:
        if self.most_bugs and len(self.failing) == self.most_bugs:
            return Dropped(candidate.commit, "there are enough bugs")
        try:
            task = await asyncio.to_thread(self._draft, candidate)
            tests = await self.discoveries.of(task)
        except SwerlError as error:
            return Dropped(candidate.commit, error.explained())
        if problem := tests.problem or self._objection(tests):
            return Dropped(candidate.commit, problem)
        prompt, about = prompt_of(candidate, tests.fail_to_pass, self.issues)
        flaky: list[Json] = [*tests.flaky]
        metadata: dict[str, Json] = {**task.metadata, **about, "flaky": flaky}
        grading = declared(task.grading, tests)
        if self.most_bugs:
            files = test_files(self.place.repo, tests.fail_to_pass, is_test)
            grading = replace(grading, test_files=files)
        return replace(task, prompt=prompt, grading=grading, metadata=metadata)

    def _objection(self, tests: Discovery) -> str:
        """Return why a synthetic bug makes no Task; empty if it does."""
        failing = frozenset(tests.fail_to_pass)
        if not self.most_bugs:
            return ""
        if len(failing) > MAX_FAILING or not tests.pass_to_pass:
            return f"it makes all tests or more than {MAX_FAILING} fail"
        if failing in self.failing:
            return "it makes the same tests fail as another bug"
        self.failing.add(failing)
        return ""

    def _draft(self, candidate: Candidate) -> Task:
        place, image = self.place, self.place.image_of(candidate.base)
        # A runner would not find a file that the commit removes.
        tree = git(place.repo, "ls-tree", "-r", "-z", "--name-only", candidate.commit).split("\0")
        paths = {*tree}.intersection(touched(candidate.tests))
        files = sorted(path for path in paths if _holds_tests(path) and _CODE.fullmatch(path))
        command = self.spec.test_command.replace(_TESTS, join(files))
        spec = replace(self.spec, test_patch=candidate.tests, test_command=command)
        # A built image is installed already; any other one is set up in each sandbox.
        setup = place.setup if place.image else ""
        return make_task(candidate, repo=place.name, image=image, setup=setup, spec=spec)


def _holds_tests(path: str) -> bool:
    """Return True if a file belongs to the tests, and not only to how they run."""
    return is_test(path) and not steers(path)


def _candidates(repo: Path, commits: Commits, limit: int) -> tuple[list[Candidate], list[Dropped]]:
    chosen: list[Candidate] = []
    dropped: list[Dropped] = []
    for result in candidates(repo, commits, is_test):
        if isinstance(result, Dropped):
            dropped.append(result)
        elif not any(map(_holds_tests, touched(result.tests))):
            dropped.append(Dropped(result.commit, "it changes no test"))
        else:
            chosen.append(result)
        if len(chosen) == limit:
            break
    return chosen, dropped


@dataclass(frozen=True, slots=True)
class _Place:
    """The repository, and how its images are made."""

    repo: Path
    name: str
    head: str
    """Names the commits that it has."""
    image: str
    setup: str

    def with_bugs(self, number: int) -> _Place:
        """Return the place of a clone in the cache that has this many bugs."""
        head = f"{self.head}-bugs-{number}"
        clone = cache_dir() / "repositories" / f"{self.name}-{head}"
        return replace(self, repo=clone, head=head)

    def image_of(self, base: str) -> str:
        """Return the image of a base commit; build it unless it exists. Raises ImageError."""
        if self.image and self.image != "host":
            return self.image
        if self.image:
            # All commits share one copy: each sandbox checks out its own.
            return copy_repository(self.repo, "HEAD", f"{self.name}-{self.head}")
        tree = git(self.repo, "ls-tree", "-r", base).splitlines()
        state = [line for line in tree if _ENVIRONMENT.search(line.partition("\t")[2])]
        digest = hashlib.sha256("\n".join([self.head, self.setup, *state]).encode()).hexdigest()
        return build_repository(self.repo, base, self.setup, f"{self.name}-{digest[:12]}")


def _issues(path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    texts = read_json(path)
    if not isinstance(texts, dict):
        raise InputError(f"{path} is not a JSON object of numbers and texts")
    return {str(number): str(text) for number, text in texts.items()}


def _report(dropped: Sequence[Dropped], *, num_candidates: int, num_tasks: int) -> None:
    table = simple_table("commits", "result", numbers={"commits"})
    table.add_row(f"{len(dropped) + num_tasks:,}", "looked at")
    table.add_row(f"{num_candidates:,}", "candidates: bugs, or changes of source and tests")
    table.add_row(f"{num_tasks:,}", "with tests that fail before and pass after")
    for reason, count in Counter(result.reason for result in dropped).most_common(20):
        table.add_row(f"{count:,}", f"left out: {safe(reason[:200])}")
    stderr().print(table)
