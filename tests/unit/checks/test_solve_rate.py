"""Solve rates come from real attempts, survive interruptions, and feed filters and tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import typer_app
from swerl.core.certificate import objection
from swerl.core.episode import Episode, Group, Status
from swerl.core.grade import Grade, Verdict
from swerl.core.task import Task, read_tasks, write_tasks
from swerl.core.turn import Trajectory
from swerl.runs.evaluation import result_of
from swerl.tasks import twin
from tests.unit.tasks.test_admission import with_certificate


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of two certified tasks; what commands print goes to this test."""
    tasks = twin.make_tasks(tmp_path / "twin", split="heldout", count=2, seed=0)
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, map(with_certificate, tasks))
    return path


def call(*arguments: object) -> str:
    done = CliRunner().invoke(typer_app, ["tasks", *map(str, arguments)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def measured(file: Path, *arguments: object) -> list[Task]:
    out = file.with_name("out.jsonl")
    call("solve-rate", file, "--runs", file.parent / "runs", "-o", out, *arguments)
    return list(read_tasks(out))


def episodes(file: Path) -> dict[Path, int]:
    """Return when each Episode under the run folder was finished."""
    return {path: path.stat().st_mtime_ns for path in file.parent.rglob("episode.json")}


def test_the_solve_rate_goes_into_the_row_and_the_certificate_stays_good(file: Path) -> None:
    solved = measured(file, "--engine", "scripted:gold", "-k", 2)
    assert [task.metadata["solve_rate"] for task in solved] == [1.0, 1.0]
    assert [objection(task) for task in solved] == ["", ""]
    told = solved[0].metadata["probe"]
    assert isinstance(told, dict)
    assert (told["agent"], told["engine"], told["attempts"]) == ("builtin", "scripted:gold", 2)
    assert told["tokens"] > 0 < told["turns"]
    unsolved = measured(file, "--engine", "scripted:noop", "-k", 1, "--set", "name=nothing")
    assert [task.metadata["solve_rate"] for task in unsolved] == [0.0, 0.0]


def test_finished_attempts_are_kept_and_more_are_added(file: Path) -> None:
    measured(file, "--engine", "scripted:gold", "-k", 1)
    first = episodes(file)
    assert len(first) == 2
    [changed, other] = read_tasks(file)
    write_tasks(file, [replace(changed, prompt="Mend it another way."), other])
    solved = measured(file, "--engine", "scripted:gold", "-k", 2)
    later = episodes(file)
    assert first.items() <= later.items()
    assert len(later) == 2 + 1 + 2
    assert {task.metadata["probe"]["attempts"] for task in solved} == {2}  # type: ignore[index,call-overload]


def test_filters_and_tables_read_the_solve_rate(file: Path) -> None:
    rates: tuple[float | None, ...] = (0.0, 0.1, 0.5, 1.0, None)
    plain = next(read_tasks(file))
    noted = [
        replace(plain, id=str(n), metadata={} if rate is None else {"solve_rate": rate})
        for n, rate in enumerate(rates)
    ]
    write_tasks(file, noted)
    out = file.with_name("some.jsonl")
    command = ["tasks", "filter", str(file), "--solve-rate", "0.1:0.9", "-o", str(out)]
    warned = CliRunner().invoke(typer_app, command).stderr
    assert f"1 task without a solve rate: swerl tasks solve-rate {file}" in warned
    assert [task.id for task in read_tasks(out)] == ["1", "2"]
    assert json.loads(call("show", file, "--json"))["solve_rates"] == [0.0, 0.1, 0.5, 1.0]


@pytest.mark.parametrize("arguments", [(), ("--solve-rate", "high"), ("--solve-rate", "0.1")])
def test_a_filter_that_says_nothing_is_refused(file: Path, arguments: tuple[str, ...]) -> None:
    command = ["tasks", "filter", str(file), "-o", str(file) + ".out", *arguments]
    done = CliRunner().invoke(typer_app, command)
    assert "--solve-rate" in done.exception.hint  # type: ignore[union-attr]


def test_attempts_that_the_infrastructure_lost_do_not_count() -> None:
    verdicts = [Verdict.SOLVED, Verdict.UNSOLVED, Verdict.TIMEOUT, Verdict.INFRA, Verdict.INVALID]
    tried = tuple(
        Episode(
            *(f"a.{n}", "a", Status.COMPLETED, Grade(verdict), 0.0, Trajectory(f"a.{n}", ())),
            timings={"total": 3.0 * n},
        )
        for n, verdict in enumerate(verdicts)
    )
    found = result_of(Group("a", tried)).solve_rate
    assert (found["attempts"], found["solved"], found["lost"], found["seconds"]) == (3, 1, 2, 3.0)
    assert found["solve_rate"] == 0.3333
    assert result_of(Group("a", tried[3:])).solve_rate["solve_rate"] is None
