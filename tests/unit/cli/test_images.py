"""`swerl images pull --dry-run` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swerl.cli import images
from swerl.cli.main import typer_app
from swerl.core.errors import ImageError
from swerl.core.task import GradingSpec, Task, write_tasks
from swerl.images.plan import ImagePlan, PlannedImage


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    spec = GradingSpec(grader="command")
    names = ("host", "built:a")
    found = [Task(f"t{n}", "o/r", name, "/r", "fix", spec) for n, name in enumerate(names)]
    write_tasks(tmp_path / "tasks.jsonl", found)
    return tmp_path / "tasks.jsonl"


def test_a_plan_with_an_unreadable_manifest_does_not_lead_to_a_pull(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = PlannedImage("a/b", error=ImageError("does not answer"))
    made = ImagePlan((lost, PlannedImage("c/d")), frozenset())

    async def plan(*_: object, **__: object) -> ImagePlan:
        return made

    monkeypatch.setattr(images.planning, "plan", plan)

    done = CliRunner().invoke(typer_app, ["images", "pull", "--dry-run", str(tasks)])

    assert done.exit_code == 1
    assert "next:" not in done.stdout
