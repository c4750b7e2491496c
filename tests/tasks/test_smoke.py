"""`swerl sandbox smoke`: every image is tried once and told apart from the ready ones."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli.sandbox import app
from swerl.sandboxes import local
from swerl.task import GradingSpec, Task, write_tasks
from swerl.tasks import smoke


@pytest.fixture
def tasks(tmp_path: Path) -> list[Task]:
    plain, repository = tmp_path / "plain", tmp_path / "repository"
    for folder in (plain, repository):
        folder.mkdir()
        (folder / "f.py").write_text("x = 1\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    first = Task("a", "r", f"dir:{repository}", "/testbed", "fix it", GradingSpec("command"))
    return [
        first,
        replace(first, id="b"),
        replace(first, id="c", image=f"dir:{plain}"),
        replace(first, id="d", image="built:no-such-image"),
    ]


async def test_each_image_is_judged_once_in_order(tasks: list[Task]) -> None:
    heard: list[smoke.Smoke] = []
    results = await smoke.check(local.build(local.Options()), tasks, tell=heard.append)
    assert [(result.num_tasks, result.ok) for result in results] == [
        (2, True),
        (1, True),
        (1, False),
    ]
    assert [result.work_tree for result in results] == ["yes", "made", ""]
    assert "Python 3" in results[0].interpreter
    assert results[0].boot_s > results[0].exec_s > 0
    assert "no-such-image" in results[2].failure
    assert sorted(heard, key=results.index) == results


def test_the_command_fails_and_names_the_broken_image(tasks: list[Task], tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    done = CliRunner().invoke(app, ["smoke", str(tmp_path / "tasks.jsonl"), "--json"])
    assert done.exit_code == 1
    rows = json.loads(done.stdout)
    assert [row["ok"] for row in rows] == [True, True, False]


def test_the_command_shows_a_table_when_all_is_well(tasks: list[Task], tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", tasks[:2])
    done = CliRunner().invoke(app, ["smoke", str(tmp_path / "tasks.jsonl"), "--workers", "2"])
    assert done.exit_code == 0, done.output
    assert "all 1 images are ready" in done.output
