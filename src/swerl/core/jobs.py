"""Run many jobs a few at a time, and resume them from a file of results.

    done = {each.task: each for each in read_results(path, from_row, kind="smoke result")}
    results = await run_jobs(todo, check, limit=4, on_done=lambda x: append_result(path, row(x)))

`check` is a coroutine function of one item; it catches the errors that are results of that item
alone. Any other error, or a cancellation such as Ctrl-C, cancels the jobs that still run and leaves
the file as it is: the same call continues from it. `PatientLoop` is the event loop of processes
whose deadlines decide results.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from swerl.core.errors import InputError
from swerl.core.files import disk_errors

T = TypeVar("T")
R = TypeVar("R")


async def run_jobs(
    items: Iterable[T],
    work: Callable[[T], Awaitable[R]],
    *,
    limit: int,
    on_done: Callable[[R], None] = lambda _: None,
) -> list[R]:
    """Run `work` on every item, at most `limit` at a time; return the results in item order.

    Items are read one by one as jobs become free. `on_done` gets each result when its job ends.
    Raises the first error of a job or of `on_done`, after the other jobs are cancelled.
    """
    results: dict[int, R] = {}
    waiting = enumerate(items)

    async def worker() -> None:
        for number, item in waiting:
            results[number] = await work(item)
            on_done(results[number])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(worker())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[number] for number in sorted(results)]


def read_results(
    path: Path,
    from_row: Callable[[Mapping[str, Any]], R],
    *,
    kind: str,
    hint: str = "name another file with --out",
) -> list[R]:
    """Return the results in a file of JSON lines, in file order; none if there is no file.

    A line that a crash cut short is skipped. Raises InputError if `from_row` rejects a line with
    KeyError, TypeError or ValueError: the file then holds something else than a `kind`.
    """
    if not path.exists():
        return []
    results = []
    with disk_errors(path), path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            try:
                results.append(from_row(dict(row)))
            except (KeyError, TypeError, ValueError) as error:
                raise InputError(f"{path}: line {number} is not a {kind}", hint=hint) from error
    return results


def append_result(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row as one JSON line in a single write. Raises RunError.

    If a crash cut the last line short, the row starts a new line.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as out:
            if is_cut := out.tell() > 0:
                out.seek(-1, os.SEEK_END)
                is_cut = out.read(1) != b"\n"
            os.write(out.fileno(), ("\n" * is_cut + json.dumps(row) + "\n").encode())


_TICK_S, _STALL_S = 0.5, 2.0


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock excludes the time during which this process stood still.

    A stopped or starved controller or sandbox server answers nobody. Without this, every budget and
    timeout that runs out meanwhile would end its Episode, and infrastructure would become a reward
    of 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen_s = time.monotonic()
        self._lost_s = 0.0
        self._tick()

    def time(self) -> float:
        """Return seconds of CLOCK_MONOTONIC, less those lost so far."""
        now_s = time.monotonic()
        passed_s, self._seen_s = now_s - self._seen_s, now_s
        if passed_s > _STALL_S:
            self._lost_s += passed_s - _TICK_S
        return now_s - self._lost_s

    def _tick(self) -> None:
        """Read the clock regularly, so that a long gap between two readings is a stall."""
        self.call_later(_TICK_S, self._tick)
