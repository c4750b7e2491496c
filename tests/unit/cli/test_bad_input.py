"""`swerl view`, `why` and `eval` on folders that users have: closed, killed, half-written, huge."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.main import app, typer_app
from swerl.core.errors import SwerlError
from swerl.core.files import write_json
from swerl.rollout import record
from swerl.runs.evaluation import TaskResult, summary
from swerl.view.site import Site
from tests.unit.runs import _why_records as records
from tests.unit.view.test_view import HOSTILE, make_run

KILLED = """
import os, signal, sys
from pathlib import Path
from swerl.runs.layout import open_run
from swerl.runs.status import own_run
import asyncio

async def main():
    async with own_run(Path(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def evaluated(root: Path, name: str) -> Path:
    """Write an evaluation with one attempt and its report."""
    run = root / name
    run.mkdir(parents=True)
    write_json(run / "recipe.resolved.json", {"name": name, "engine": {"type": "scripted"}})
    record.write(run / "episodes" / "0f" / "task.0", records.healthy_episode(0, 0, 0))
    found = summary([TaskResult("task", 1, 1, ("solved",))], 1)
    (run / "evals").mkdir()
    write_json(run / "evals" / "eval.json", found)
    return run


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(typer_app, arguments)
    told = f"{done.output}\n{done.exception if done.exit_code else ''}"
    assert "Traceback" not in told
    return done.exit_code, told


def invoke_or_render(*arguments: str) -> tuple[int, str]:
    """Run a command; `page FOLDER PATH` renders a page of `swerl view`."""
    if arguments[0] != "page":
        return invoke(*arguments)
    _, folder, path = arguments
    site = Site(Path(folder))
    try:
        page = site.page(path)
    except SwerlError as error:
        page = site.problem(path, error)
    return 0, page.body.decode()


def typed(*arguments: str) -> tuple[int, str]:
    """Run the command line as a whole, and return its exit code and stderr."""
    with pytest.MonkeyPatch.context() as patch, io.TextIOWrapper(io.BytesIO()) as told:
        patch.setattr(sys, "argv", ["swerl", *arguments])
        patch.setattr(sys, "stderr", told)
        with pytest.raises(SystemExit) as ended:
            app()
        told.seek(0)
        return ended.value.code, told.read()  # type: ignore[return-value]


def by_another_user(
    commands: Sequence[Sequence[str]], call: Callable[..., tuple[int, str]] = invoke
) -> list[str]:
    """Run commands in a child that is not root, and return what each printed."""
    if os.geteuid() != 0:
        return [call(*command)[1] for command in commands]
    read, write = os.pipe()
    if not (child := os.fork()):
        os.setgroups([])
        os.setuid(65534)
        with os.fdopen(write, "w") as out:
            json.dump([call(*command)[1] for command in commands], out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    os.waitpid(child, 0)
    return json.loads(text)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that another user may read and write; pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o777)
        yield Path(made)


def test_a_closed_run_is_named_and_hides_no_other(shared: Path) -> None:
    closed, _ = evaluated(shared / "runs", "closed"), evaluated(shared / "runs", "open")
    runs = str(shared / "runs")
    commands = [
        ["page", runs, "index.html"],
        ["page", runs, "r/closed/index.html"],
        ["why", "closed", "--runs", runs],
        ["eval", "compare", "open", "closed", "--runs", runs],
    ]
    for command in commands:  # A module that only a command imports may be closed as well.
        invoke_or_render(*command)
    closed.chmod(0)
    try:
        listed, page, named, compared = by_another_user(commands, invoke_or_render)
    finally:
        closed.chmod(0o755)
    assert "you may not read" in listed and "evaluated" in listed
    assert "you may not read" in page
    assert "Permission denied" in named
    assert f"you may not read {closed}" in compared


def test_runs_that_may_not_be_read_are_one_error(shared: Path) -> None:
    closed = shared / "closed"
    closed.mkdir(mode=0)
    runs = ["--runs", str(closed)]
    commands = [["train", "status", *runs], ["why", *runs], ["train", "stop", "twin", *runs]]
    for command in commands:  # Imports what the other user may not.
        typed(*command)
    for told in by_another_user(commands, typed):
        first, second = told.splitlines()
        assert first.startswith("error:") and f"{closed}' is not readable" in first
        assert second.startswith("hint:")


def test_a_killed_run_is_shown_as_lost_with_what_it_had_written(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    subprocess.run([sys.executable, "-c", KILLED, str(run)], check=False)
    (run / "episodes" / "00001" / "some_task.1" / "episode.json").unlink()
    assert "lost" in Site(tmp_path).page("index.html").body.decode()
    code, told = invoke("why", str(run))
    assert code == 0
    assert "no fault found in the records of 2 steps, with the Episodes of steps 0, 1" in told
    code, told = invoke("eval", "compare", str(run), str(run))
    assert code == 1 and "names 0 finished evaluations" in told


def test_nuls_and_lone_surrogates_are_text(tmp_path: Path) -> None:
    run = evaluated(tmp_path, "odd")
    odd = replace(records.healthy_episode(0, 0, 1), patch=HOSTILE, log=HOSTILE, error=HOSTILE)
    record.write(run / "episodes" / "0f" / "task.1", odd)
    page = Site(tmp_path).page("r/odd/e/0f/task.1/index.html").body.decode()
    assert "<script>document.title" not in page


def test_of_a_huge_folder_only_a_part_is_read(tmp_path: Path) -> None:
    """A listing reads names alone, so damage is not even met."""
    root = evaluated(tmp_path, "huge")
    stage = root / "episodes" / "0f"
    for number in range(1, 250):
        shutil.copytree(stage / "task.0", stage / f"task.{number}")
        if number > 200:
            (stage / f"task.{number}" / "episode.json").write_text("{")
    assert "250" in Site(tmp_path).page("index.html").body.decode()


def test_a_run_of_an_older_version_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    run = evaluated(tmp_path, "old")
    write_json(run / "recipe.resolved.json", {"name": "old", "gone": {"key": 1}, "model": {"x": 1}})
    trajectory = json.loads((run / "episodes" / "0f" / "task.0" / "trajectory.json").read_text())
    del trajectory["turns"][0]["malformed_calls"]
    trajectory["turns"][0]["more"] = True
    write_json(run / "episodes" / "0f" / "task.0" / "trajectory.json", trajectory)
    assert record.read(run / "episodes" / "0f" / "task.0").trajectory.turns
    assert "evaluated" in Site(tmp_path).page("index.html").body.decode()
    assert invoke("eval", "compare", str(run), str(run))[0] == 0
