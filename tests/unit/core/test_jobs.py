"""Jobs are bounded, ordered, cancelled together, and resumed from a file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from swerl.core.errors import InputError
from swerl.core.jobs import append_result, read_results, run_jobs


async def test_results_keep_the_order_of_the_items_and_are_reported_as_they_end() -> None:
    ended: list[float] = []

    async def work(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    items = [0.05, 0.0, 0.02]
    assert await run_jobs(items, work, limit=3, on_done=ended.append) == items
    assert ended == sorted(items)


async def test_no_more_jobs_run_than_the_limit_and_items_are_read_late() -> None:
    running, most, ended = 0, 0, 0

    def items() -> Iterator[int]:
        for number in range(6):
            assert number <= ended + 2
            yield number

    async def work(number: int) -> int:
        nonlocal running, most, ended
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        ended += 1
        return number

    assert await run_jobs(items(), work, limit=2) == list(range(6))
    assert most == 2


async def test_the_first_error_cancels_the_other_jobs_and_is_raised_itself() -> None:
    cancelled = False

    async def work(number: int) -> None:
        nonlocal cancelled
        if number == 1:
            raise ZeroDivisionError
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(ZeroDivisionError):
        await run_jobs(range(3), work, limit=2)
    assert cancelled


def test_a_result_after_a_cut_line_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    append_result(path, {"task": "a"})
    with path.open("a") as file:
        file.write('{"task": "b')
    append_result(path, {"task": "c"})
    assert read_results(path, lambda row: row["task"], kind="result") == ["a", "c"]
    assert read_results(tmp_path / "absent", dict, kind="result") == []


def test_a_file_of_something_else_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"task": "a"}\n[1]\n')
    with pytest.raises(InputError, match="line 2 is not a result"):
        read_results(path, lambda row: row["task"], kind="result")
