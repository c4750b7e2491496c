"""Logs are read in bounded time, off the event loop, whatever code under test has printed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from swerl.core.grade import TestStatus, Verdict
from swerl.core.task import Task
from swerl.grading.flow import FlowGrader, GradingReport
from swerl.grading.graders import command
from swerl.grading.log_parsers import PARSERS, LogError, find_parser, read_log
from swerl.grading.statuses import Judgement, Statuses

from ._folder_sandbox import opener
from .conftest import GOLD
from .test_hostile_logs import PYTEST, SAMPLES

NUM_LINES = 100_000
"""Lines after which a log is too large for the event loop."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the child process find the parsers of this file, as those of an installed package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))


def endless(log: str) -> Statuses:
    """Read a log with a pattern that takes exponential time."""
    return {"t": TestStatus.PASSED} if re.match(r"(.*)*(.*)*(.*)*\d$", log) else {}


def broken(log: str) -> Statuses:
    """Read a log that must begin with a number."""
    return {"t": TestStatus.PASSED if int(log[0]) else TestStatus.FAILED}


def kind(log: str) -> Statuses:
    """Read any log as one good test."""
    return {"t": TestStatus.PASSED}


@pytest.mark.integration
@pytest.mark.parametrize("name", PARSERS)
async def test_a_large_log_is_read_as_a_small_one(name: str) -> None:
    log = SAMPLES.get(name, PYTEST)
    large = f"{{{' ' * NUM_LINES}{log[1:]}" if name == "json_report" else log + "\n" * NUM_LINES
    assert await read_log(find_parser(name), large) == find_parser(name)(log)


async def test_parsers_of_other_packages_are_read_apart_too() -> None:
    assert await read_log(kind, "\n" * NUM_LINES) == {"t": TestStatus.PASSED}
    with pytest.raises(TypeError, match="must be a function of a module"):
        await read_log(lambda log: {}, "")


async def test_reading_ends_at_its_limit_and_the_event_loop_goes_on() -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    other = asyncio.create_task(turn())
    with pytest.raises(LogError, match="more than 1 s of CPU time"):
        await read_log(endless, "x" * NUM_LINES, limit_s=1)
    other.cancel()
    # Even a busy machine lets the loop run more often than never in a second.
    assert turns > 3


@pytest.mark.parametrize("size", [1, NUM_LINES])
async def test_a_log_that_cannot_be_read_is_unsolved(
    with_spec: Callable[..., Task], size: int
) -> None:
    def judge(spec: object, report: GradingReport) -> Judgement:
        raise AssertionError("nothing was read")

    task = with_spec(test_command=f"head -c {size} /dev/zero | tr '\\0' x")
    grade = await FlowGrader(judge, parser=broken).grade(task, GOLD, opener(task))
    assert grade.verdict is Verdict.UNSOLVED
    assert "a log that cannot be read: ValueError: invalid literal" in grade.reason


async def test_blank_lines_do_not_delay_a_good_result(with_spec: Callable[..., Task]) -> None:
    task = with_spec(test_command="yes '' | head -n 1000000; PYTHONPATH=. python3 hidden/run.py")
    grade = await command.build().grade(task, GOLD, opener(task))
    assert grade.verdict is Verdict.SOLVED
