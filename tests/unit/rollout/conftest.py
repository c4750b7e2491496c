"""The rollout tests' task and run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from swerl.core.task import Task
from swerl.runs.layout import RunFolder
from swerl.tasks import twin


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    [task] = twin.make_tasks(tmp_path_factory.mktemp("twin"), split="train", count=1, seed=3)
    return task


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)
