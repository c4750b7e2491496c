"""Select Tasks of a file: by an expression, as a sample, or as parts of a split; count a file.

Lines are copied unchanged. The random number of a Task is a hash of the seed and its id (or repo),
so a seed selects the same Tasks whatever else is in the file. Expressions such as `repo ==
"django/django" and patch_lines < 50` have comparisons, `in`, `and`, `or`, `not` and parentheses
over the names of `FACTS`, and `meta.NAME` for a Task's metadata. A missing fact is None, which
equals nothing else and has no order: a comparison with it is false.
"""

from __future__ import annotations

import ast
import hashlib
import heapq
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import orjson

from swerl.core.changes import touched
from swerl.core.chat import Json
from swerl.core.errors import InputError, TaskError, unknown
from swerl.core.task import Task, from_row


def lines(path: Path) -> Iterator[tuple[bytes, Task]]:
    """Yield each line of a task file with its Task. Raises TaskError."""
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
        raise TaskError(f"{path} has no task", hint="`swerl convert` lists why rows were rejected")


def filter_tasks(path: Path, out: Path, choose: Choice) -> tuple[int, int]:
    """Write the selected Tasks; return their number and the total."""
    num_chosen = num_all = 0
    with _written({"": out}) as files:
        for line, task in lines(path):
            num_all += 1
            if choose(task):
                num_chosen += 1
                files[""].write(line)
    return num_chosen, num_all


def sample_tasks(path: Path, out: Path, number: int, *, seed: int) -> tuple[int, int]:
    """Write a sample in the file's order; a larger sample contains every smaller one."""
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
    """Write each part to its own file beside the first; return the files and numbers of Tasks.

    `parts` are fractions with sum 1. With `by_repo` no repository is in two parts.
    """
    if abs(sum(parts.values()) - 1) > 1e-9 or min(parts.values()) <= 0:
        raise InputError("the shares of a split add up to 1", hint="for example train=0.9 test=0.1")
    paths = {name: part_path(path, name) for name in parts}
    counts = dict.fromkeys(parts, 0)
    with _written(paths) as files:
        for line, task in lines(path):
            name = _part(parts, _chance(seed, task.repo if by_repo else task.id))
            files[name].write(line)
            counts[name] += 1
    return {name: (paths[name], counts[name]) for name in parts}


def part_path(path: Path, name: str) -> Path:
    return path.with_name(f"{path.stem}.{name}.jsonl")


def _part(parts: Mapping[str, float], chance: float) -> str:
    edge = 0.0
    for name, share in parts.items():
        edge += share
        if chance < edge:
            return name
    return list(parts)[-1]  # rounding: the sum may be slightly below 1


def _chance(seed: int, key: str) -> float:
    """Return a number from 0 to 1 from seed and key alone."""
    digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
    return int.from_bytes(digest[:7]) / 256**7


def _task(path: Path, number: int, line: bytes) -> Task:
    try:
        row = orjson.loads(line)
        if isinstance(row, dict):
            return from_row(row)
        raise TaskError("the line is not a JSON object")
    except (orjson.JSONDecodeError, TaskError) as error:
        raise TaskError(
            f"{path}:{number}: {error}", hint="write it with `swerl convert`"
        ) from error


@contextmanager
def _written(paths: Mapping[str, Path]) -> Iterator[dict[str, BinaryIO]]:
    """Yield open files that get their names when all are complete."""
    parts = {name: path.with_name(f"{path.name}.part") for name, path in paths.items()}
    try:
        with ExitStack() as stack:
            yield {name: stack.enter_context(part.open("wb")) for name, part in parts.items()}
        for name, part in parts.items():
            part.replace(paths[name])
    except OSError as error:
        raise InputError(
            f"cannot write {error.filename or 'the tasks'}: {error.strerror}",
            hint="name a file in a folder that you may write to",
        ) from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def _changed_lines(task: Task) -> int:
    lines = task.gold_patch.split("\n")
    return sum(line[:1] in {"+", "-"} and line[:4] not in {"+++ ", "--- "} for line in lines)


def _metadata(name: str) -> Callable[[Task], Json]:
    return lambda task: task.metadata.get(name)


FACTS: Mapping[str, Callable[[Task], Json]] = {
    "id": lambda task: task.id,
    "repo": lambda task: task.repo,
    "dataset": lambda task: task.dataset,
    "image": lambda task: task.image,
    "grader": lambda task: task.grading.grader,
    "log_parser": lambda task: task.grading.log_parser,
    "language": _metadata("language"),
    "difficulty": _metadata("difficulty"),
    "solve_rate": _metadata("solve_rate"),
    "prompt_chars": lambda task: len(task.prompt),
    "patch_lines": _changed_lines,
    "patch_files": lambda task: len(touched(task.gold_patch)),
    "num_fail_to_pass": lambda task: len(task.grading.fail_to_pass),
    "num_pass_to_pass": lambda task: len(task.grading.pass_to_pass),
    "timeout_s": lambda task: task.grading.timeout_s,
}
"""Name -> function of a Task; None if the fact is missing."""

NUMBERS = ("prompt_chars", "patch_lines", "patch_files", "num_fail_to_pass", "num_pass_to_pass")
"""Numeric facts of every Task."""


Choice: TypeAlias = Callable[[Task], bool]
_Value: TypeAlias = Callable[[Task], Any]

_HINT = """for example 'repo == "django/django" and patch_lines < 50 and solve_rate > 0'"""
_ORDERS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, group: item in group,
    ast.NotIn: lambda item, group: item not in group,
}


def compile_where(text: str) -> Choice:
    """Return the filter of an expression. Raises InputError on an invalid one."""
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{text!r:.200} is not an expression", hint=_HINT) from error

    def choose(task: Task) -> bool:
        try:
            return bool(value(task))
        except TypeError as error:
            raise InputError(
                f"task {task.id} cannot be compared: {error}",
                hint="text and numbers have no common order",
            ) from error

    return choose


def _value(node: ast.expr) -> _Value:
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            parts = [_value(each) for each in values]
            return lambda task: all(part(task) for part in parts)
        case ast.BoolOp(values=values):
            parts = [_value(each) for each in values]
            return lambda task: any(part(task) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _value(operand)
            return lambda task: not inner(task)
        case ast.Compare():
            return _comparison(node)
        case _:
            return _term(node)


def _comparison(node: ast.Compare) -> _Value:
    terms = [_value(each) for each in (node.left, *node.comparators)]
    links = [_link(op) for op in node.ops]

    def compare(task: Task) -> bool:
        found = [term(task) for term in terms]
        return all(link(found[i], found[i + 1]) for i, link in enumerate(links))

    return compare


def _link(op: ast.cmpop) -> Callable[[Any, Any], bool]:
    if isinstance(op, ast.Eq):
        return operator.eq
    if isinstance(op, ast.NotEq):
        return operator.ne
    if type(op) not in _ORDERS:
        raise _refused("`is`")
    order = _ORDERS[type(op)]
    return lambda left, right: left is not None and right is not None and order(left, right)


def _term(node: ast.expr) -> _Value:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return lambda task: value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return lambda task: -number
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            terms = [_term(each) for each in items]
            return lambda task: [term(task) for term in terms]
        case ast.Attribute(value=ast.Name(id="meta"), attr=name):
            return lambda task: task.metadata.get(name)
        case ast.Name(id=name) if name in FACTS:
            return FACTS[name]
        case ast.Name(id=name):
            raise unknown("name", name, FACTS)
        case _:
            what = f"`{ast.unparse(node):.80}`"
            raise _refused(what)


def _refused(what: str) -> InputError:
    return InputError(f"{what} is not allowed in an expression", hint=_HINT)


GROUPED = ("dataset", "repo", "language", "grader", "difficulty")
"""Facts with counted values."""


@dataclass(slots=True)
class Stats:
    """Counts over a task file."""

    num_tasks: int = 0
    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    """Fact -> value -> number of Tasks, the most frequent first."""
    numbers: dict[str, list[float]] = field(default_factory=dict)
    """Fact -> its smallest value, median, mean and largest value."""
    num_images: int = 0
    solve_rates: list[float] = field(default_factory=list)
    """Measured solve rates."""
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(grader, log parser) -> number of Tasks."""


def count(tasks: Iterable[Task]) -> Stats:
    """Count Tasks; memory grows by a few numbers per Task."""
    stats = Stats()
    groups: dict[str, Counter[str]] = {name: Counter() for name in GROUPED}
    images: set[str] = set()
    values: dict[str, list[float]] = {name: [] for name in NUMBERS}
    for task in tasks:
        stats.num_tasks += 1
        images.add(task.image)
        stats.kinds[task.grading.grader, task.grading.log_parser] += 1
        for name, counter in groups.items():
            counter[str(FACTS[name](task) or "")] += 1
        for name, found in values.items():
            found.append(_number(FACTS[name](task)))
        if (rate := task.metadata.get("solve_rate")) is not None:
            stats.solve_rates.append(_number(rate))
    stats.num_images = len(images)
    stats.groups = {name: dict(each.most_common()) for name, each in groups.items()}
    stats.numbers = {name: _spread(found) for name, found in values.items() if found}
    return stats


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _spread(found: list[float]) -> list[float]:
    found.sort()
    return [found[0], found[len(found) // 2], sum(found) / len(found), found[-1]]
