"""Choose Tasks of a file: those that an expression fits, a sample, or parts of a split.

Lines go from file to file as they are. Chance is a hash of the seed and the Task's id (or repo), so
that the same seed chooses the same Tasks whatever else the file holds.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import orjson

from swerl.core.errors import InputError, TaskError
from swerl.core.task import Task, from_row
from swerl.tasks.where import Choice


def lines(path: Path) -> Iterator[tuple[bytes, Task]]:
    """Yield each line of a task file with its Task. Raises TaskError on a line or file of none."""
    is_empty = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield line.rstrip(b"\n") + b"\n", _task(path, number, line)
                    is_empty = False
    except OSError as error:
        raise TaskError(
            f"cannot read task file {path}: {error.strerror}", hint="make one with `swerl convert`"
        ) from error
    if is_empty:
        raise TaskError(f"{path} holds no task", hint="`swerl convert` says why rows were rejected")


def filter_tasks(path: Path, out: Path, choose: Choice) -> tuple[int, int]:
    """Write the Tasks that are chosen; return their number and that of all."""
    num_chosen = num_all = 0
    with _written({"": out}) as files:
        for line, task in lines(path):
            num_all += 1
            if choose(task):
                num_chosen += 1
                files[""].write(line)
    return num_chosen, num_all


def sample_tasks(path: Path, out: Path, number: int, *, seed: int) -> tuple[int, int]:
    """Write a number of Tasks in the file's order; a larger sample holds every smaller one."""
    num_all = 0

    def ranks() -> Iterator[tuple[float, str]]:
        nonlocal num_all
        for _, task in lines(path):
            num_all += 1
            yield _chance(seed, task.id), task.id

    chosen = {task_id for _, task_id in heapq.nsmallest(number, ranks())}
    filter_tasks(path, out, lambda task: task.id in chosen)
    return len(chosen), num_all


def split_tasks(
    path: Path, parts: Mapping[str, float], *, by_repo: bool, seed: int
) -> dict[str, tuple[Path, int]]:
    """Write each part to a file of its own beside the first; return where, and how many Tasks.

    `parts` are shares that add up to 1. With `by_repo` no repository is in two parts.
    """
    if abs(sum(parts.values()) - 1) > 1e-9 or min(parts.values()) <= 0:
        raise InputError("the shares of a split add up to 1", hint="for example train=0.9 test=0.1")
    paths = {name: path.with_name(f"{path.stem}.{name}.jsonl") for name in parts}
    counts = dict.fromkeys(parts, 0)
    with _written(paths) as files:
        for line, task in lines(path):
            name = _part(parts, _chance(seed, task.repo if by_repo else task.id))
            files[name].write(line)
            counts[name] += 1
    return {name: (paths[name], counts[name]) for name in parts}


def _part(parts: Mapping[str, float], chance: float) -> str:
    edge = 0.0
    for name, share in parts.items():
        edge += share
        if chance < edge:
            return name
    return list(parts)[-1]  # the shares' sum may be a hair under 1


def _chance(seed: int, key: str) -> float:
    """Return a number from 0 to 1 that nothing but the seed and the key decides."""
    digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
    return int.from_bytes(digest[:7]) / 256**7


def _task(path: Path, number: int, line: bytes) -> Task:
    try:
        row = orjson.loads(line)
        if isinstance(row, dict):
            return from_row(row)
        raise TaskError("the line is no JSON object")
    except (orjson.JSONDecodeError, TaskError) as error:
        raise TaskError(
            f"{path}:{number}: {error}", hint="write it with `swerl convert`"
        ) from error


@contextmanager
def _written(paths: Mapping[str, Path]) -> Iterator[dict[str, BinaryIO]]:
    """Yield open files that appear under their names when all is written, or not at all."""
    parts = {name: path.with_name(f"{path.name}.part") for name, path in paths.items()}
    try:
        with ExitStack() as stack:
            yield {name: stack.enter_context(part.open("wb")) for name, part in parts.items()}
        for name, part in parts.items():
            part.replace(paths[name])
    except OSError as error:
        raise InputError(
            f"cannot write {error.filename or 'the tasks'}: {error.strerror}",
            hint="name a file in a folder that exists",
        ) from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
