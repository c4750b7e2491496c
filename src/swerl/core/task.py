"""Task: one frozen problem, and its slime-compatible JSONL row."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from swerl.core.chat import Json
from swerl.core.errors import TaskError, unknown


@dataclass(frozen=True, slots=True)
class Edit:
    """A replaced part of a test file."""

    path: str
    """Absolute path of the test file in the sandbox."""
    start: int
    """First replaced byte."""
    end: int
    """Byte after the last replaced one."""
    new: str
    """The replacing text."""


@dataclass(frozen=True, slots=True)
class MutatedTests:
    """The hidden tests with one other expectation in each test that has one, and their effect."""

    edits: tuple[Edit, ...]
    digests: Mapping[str, str]
    """SHA-256 of each edited file before the edits, in hexadecimal."""
    tests: tuple[str, ...]
    """Mutated tests, which must fail; empty if only an exit code or a number shows it."""
    fails: tuple[str, ...] = ()
    """Other tests that fail with the known solution, such as those that depend on order."""


class Strength(StrEnum):
    """How well mutated tests protect a Task against forged reports."""

    STRONG = "strong"
    """Each test to fix asserts a value that code has to compute."""
    SOME = "some"
    """Some tests to fix can be mutated."""
    NONE = "none"
    """No test to fix can be mutated."""


@dataclass(frozen=True, slots=True)
class Protection:
    """The mutated tests of a Task, and how well they protect it."""

    versions: tuple[MutatedTests, ...] = ()
    strength: Strength = Strength.NONE
    share: float = 0.0
    """Share of the tests to fix with a replaced value that is no truth value or exception, and
    stands neither in the prompt, nor in a test's id, nor elsewhere in the test."""
    reason: str = "no test to fix has an expected value that can be replaced"
    """One line for people."""


@dataclass(frozen=True, slots=True)
class GradingSpec:
    """The tests that decide whether a patch solves a Task. Never shown to the agent."""

    grader: str
    """Name of the grader: `swebench`, `command`, …"""
    fail_to_pass: tuple[str, ...] = ()
    """Test ids that must fail before and pass after the patch."""
    pass_to_pass: tuple[str, ...] = ()
    """Test ids that must pass before and after the patch."""
    expected: Mapping[str, str] = field(default_factory=dict)
    """Status of every test after the solution, for datasets that fix the whole report."""
    test_patch: str = ""
    """Unified diff that adds the hidden tests; applied after the agent's patch."""
    test_files: Mapping[str, str] = field(default_factory=dict)
    """Hidden files by path relative to the workdir; written after the agent's patch."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Hidden files by absolute path in the sandbox; `file_bytes` reads a value."""
    test_setup: str = ""
    """Shell command for other preparation of the tests; run after the agent's patch."""
    test_command: str = ""
    """Shell command that runs the tests in the workdir."""
    log_parser: str = ""
    """Name of the parser that turns the test log into statuses per test id."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the test command."""
    timeout_s: float = 600.0
    """Time limit of the test command in seconds."""
    mutated: tuple[MutatedTests, ...] | None = None
    """Versions of the hidden tests with other expected values; None if vetting has not measured
    them. Then a run or evaluation measures them once, before it confirms a patch."""
    not_run: tuple[str, ...] | None = None
    """Tests that the known solution skips or fails as expected; no other test may be skipped. None
    if vetting has not measured it."""
    report_path: str = ""
    """Absolute path of the report or reward that the test command writes; empty if none."""
    report_command: str = ""
    """Shell command that makes the report from the test log on its standard input, for test
    commands that write none; run after the tests, when `files` have been written again."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: a repository at one commit, a prompt, and the tests that judge a patch."""

    id: str
    repo: str
    image: str
    """Image reference: an OCI name, or a local one such as `host` or `built:<name>`."""
    workdir: str
    """Absolute path of the repository inside the sandbox."""
    prompt: str
    grading: GradingSpec
    base_commit: str = ""
    """Commit of the image's work tree; empty for its HEAD."""
    gold_patch: str = ""
    """The known solution as a unified diff. Never shown to the agent."""
    dataset: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files by absolute path in every sandbox of the Task; `file_bytes` reads a value."""
    setup: str = ""
    """Shell command that root runs in the workdir of every new sandbox, the agent's too."""
    metadata: Mapping[str, Json] = field(default_factory=dict)
    """Facts from the dataset and measured solve rates; nothing here decides a Grade."""
    certificate: Mapping[str, Json] = field(default_factory=dict)
    """Result of vetting; empty if it was never vetted."""


_DOWNLOADS = re.compile(
    r"(?<![\w./-])(?:curl|wget|uvx|uv (?:pip|run|sync)|pip3? install|"
    r"apt(?:-get)? (?:update|install)|"
    r"npm (?:ci|install)|git clone)(?![\w-])"
)


def download_in(spec: GradingSpec) -> str:
    """Return the first command of the tests that needs a network, which no sandbox has, or ""."""
    scripts = [text for path, text in spec.files.items() if path.endswith(".sh")]
    lines = "\n".join([spec.test_setup, spec.test_command, *scripts]).splitlines()
    commands = (_DOWNLOADS.search(line) for line in lines if not line.lstrip().startswith("#"))
    return next((match[0] for match in commands if match), "")


_BASE64 = "data:;base64,"


def file_text(data: bytes) -> str:
    """Return a file's content as the text that a Task stores; `file_bytes` reverses it."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = _BASE64
    return text if not text.startswith(_BASE64) else _BASE64 + b64encode(data).decode()


def file_bytes(text: str) -> bytes:
    """Return the content of a file that a Task stores: UTF-8 text, or a data URL in base64."""
    if text.startswith(_BASE64):
        return b64decode(text.removeprefix(_BASE64))
    return text.encode()


_SHARED_FIELDS = {"fail_to_pass", "pass_to_pass", "test_patch", "mutated"}
_OLD_FIELDS = ("swaps", "blind_runs")
"""Fields that vetting wrote in another form; the certificate beside them is refused."""
_PLAIN = {str, float, dict}
_SPEC_FIELDS = [each.name for each in fields(GradingSpec) if each.name not in _SHARED_FIELDS]


def to_row(task: Task) -> dict[str, Json]:
    """Turn a Task into one row of slime-compatible JSONL; `from_row` reverses it without loss.

    Fields that slime's trainer reads are stored once, at slime's keys; the rest is under `swerl`.
    """
    spec = task.grading
    return {
        "prompt": task.prompt,
        "label": task.id,
        "metadata": {
            "instance_id": task.id,
            "image": task.image,
            "workdir": task.workdir,
            "remote_env_info": {
                "instance_id": task.id,
                "image_url": task.image,
                "workdir": task.workdir,
                "repo": task.repo,
                "base_commit": task.base_commit,
                "test_patch": spec.test_patch,
                "FAIL_TO_PASS": list(spec.fail_to_pass),
                "PASS_TO_PASS": list(spec.pass_to_pass),
            },
            "swerl": {
                "gold_patch": task.gold_patch,
                "dataset": task.dataset,
                "files": _json(task.files),
                "setup": task.setup,
                "metadata": _json(task.metadata),
                "grading": {name: _json(getattr(spec, name)) for name in _SPEC_FIELDS}
                | {"mutated": None if spec.mutated is None else [*map(asdict, spec.mutated)]},
                **({"certificate": dict(task.certificate)} if task.certificate else {}),
            },
        },
    }


def from_row(row: Mapping[str, Json]) -> Task:
    """Read a Task from a row written by `to_row`. Raises TaskError on anything else."""
    try:
        metadata = _object(row["metadata"])
        fields_of_swerl: dict[str, Any] = dict(_object(metadata["swerl"]))
        shared: dict[str, Any] = _object(metadata["remote_env_info"])
        grading: dict[str, Any] = dict(_object(fields_of_swerl.pop("grading")))
        mutated = grading.pop("mutated", None)
        for name in _OLD_FIELDS:
            grading.pop(name, None)
        not_run = grading.pop("not_run", None)
        spec = GradingSpec(
            fail_to_pass=tuple(shared["FAIL_TO_PASS"]),
            pass_to_pass=tuple(shared["PASS_TO_PASS"]),
            test_patch=shared["test_patch"],
            mutated=None if mutated is None else tuple(map(mutated_tests, mutated)),
            not_run=None if not_run is None else tuple(not_run),
            **grading,
        )
        return Task(
            id=str(row["label"]),
            repo=shared["repo"],
            image=shared["image_url"],
            workdir=shared["workdir"],
            prompt=str(row["prompt"]),
            base_commit=shared["base_commit"],
            grading=spec,
            **fields_of_swerl,
        )
    except (KeyError, TypeError) as error:
        raise TaskError(
            f"a task row has a missing or unknown field: {error}",
            hint="write the file with `swerl convert`",
        ) from error


def read_tasks(path: Path) -> Iterator[Task]:
    """Yield the Tasks of a JSONL file. Raises TaskError with the line number of a bad row."""
    return (task for _, task in task_lines(path))


def task_lines(path: Path) -> Iterator[tuple[bytes, Task]]:
    """Yield each line of a task file, with its line end, and its Task.

    Raises TaskError with the line number of a bad row, or if the Episodes of two Tasks would share
    a folder: their ids are equal, but for slashes.
    """
    numbers: dict[str, int] = {}
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                task = _parse_line(path, number, line)
                folder = folder_name(task)
                if folder in numbers:
                    message = f"task {task.id!r:.200} is also in line {numbers[folder]}"
                    raise TaskError(f"{path}:{number}: {message}", hint="remove one of the lines")
                numbers[folder] = number
                yield line.rstrip(b"\n") + b"\n", task
    except OSError as error:
        raise TaskError(
            f"cannot read task file {path}: {error.strerror}", hint="make one with `swerl convert`"
        ) from error


def folder_name(task: Task) -> str:
    """Return a Task's name in paths."""
    return task.id.replace("/", "_")


def write_tasks(path: Path, tasks: Iterable[Task]) -> int:
    """Write Tasks as JSONL under a temporary name, then rename; return how many."""
    temporary = path.with_name(path.name + ".part")
    count = 0
    with temporary.open("w", encoding="utf-8") as out:
        for task in tasks:
            out.write(json.dumps(to_row(task), ensure_ascii=False) + "\n")
            count += 1
    temporary.replace(path)
    return count


def find_task(tasks: Iterable[Task], task_id: str) -> Task:
    """Return the Task with this id. Raises UnknownNameError with the nearest ids."""
    ids = []
    for task in tasks:
        if task.id == task_id:
            return task
        ids.append(task.id)
    raise unknown("instance", task_id, ids)


def _parse_line(path: Path, number: int, line: bytes) -> Task:
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise TaskError("the line is not a JSON object")
        return from_row(row)
    except ValueError as error:  # TaskError, JSON or UTF-8
        raise TaskError(
            f"{path}:{number}: {error}", hint="write it with `swerl convert`"
        ) from error


def mutated_tests(value: Mapping[str, Any]) -> MutatedTests:
    """Read one version of the tests from JSON types."""
    edits = tuple(Edit(**edit) for edit in value["edits"])
    tests, fails = tuple(value["tests"]), tuple(value["fails"])
    return MutatedTests(edits, value["digests"], tests, fails)


def _json(value: Any) -> Any:
    """Return the value as a JSON type; a look-up by type is faster than isinstance here."""
    return value if type(value) in _PLAIN or not isinstance(value, Mapping) else dict(value)


def _object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {value!r:.40}")
    return value
