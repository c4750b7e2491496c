"""`swerl images mirror` as a user types it, against a registry that is not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli import images
from swerl.cli.main import typer_app
from swerl.core.errors import ImageError, InputError
from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.images.pull import PullPlan
from swerl.images.store import default_store
from swerl.tasks import twin


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    spec = GradingSpec(grader="command")
    names = ("host", "built:a")
    found = [Task(f"t{n}", "o/r", name, "/r", "fix", spec) for n, name in enumerate(names)]
    write_tasks(tmp_path / "tasks.jsonl", found)
    return tmp_path / "tasks.jsonl"


def mirror(*arguments: str) -> str:
    result = CliRunner().invoke(typer_app, ["images", "mirror", *arguments], catch_exceptions=False)
    return result.output


def test_unreachable_target_is_one_clear_error(tasks: Path) -> None:
    with pytest.raises(ImageError, match=r"registry 127\.0\.0\.1:9 does not answer") as caught:
        mirror(str(tasks), "--to", "127.0.0.1:9/m")
    assert caught.value.hint


def test_a_plan_with_an_unreadable_manifest_does_not_lead_to_a_pull(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def plan(*_: object, **__: object) -> PullPlan:
        return PullPlan(2, 0, failed={"a/b": ImageError("does not answer")})

    monkeypatch.setattr(images, "read_plan", plan)

    done = CliRunner().invoke(typer_app, ["images", "pull", "--dry-run", str(tasks)])

    assert done.exit_code == 1
    assert "next:" not in done.stdout


def test_target_without_a_host_is_your_input(tasks: Path) -> None:
    with pytest.raises(InputError, match="is not a registry with an optional prefix"):
        mirror(str(tasks), "--to", "mirror")


def test_prepared_tasks_are_listed_and_stay_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERL_CACHE", str(tmp_path / "cache"))
    made = twin.make_tasks(tmp_path / "tasks", split="train", count=1, seed=3)
    # A task that names no repository is listed, and stops no other.
    broken = replace(made[0], id="broken", image=f"dir:{tmp_path}/absent")
    write_tasks(tmp_path / "tasks.jsonl", [*made, broken])
    for _ in range(2):
        arguments = ["prepare", str(tmp_path / "tasks.jsonl"), "--jobs", "1"]
        done = CliRunner().invoke(typer_app, ["images", *arguments])
        assert done.exit_code == 1
        assert "1 task prepared; 0 must be prepared in each sandbox; 1 failed" in done.output
        assert "broken: " in done.output and "no folder at" in done.output
    assert len(default_store().snapshots()) == 2
