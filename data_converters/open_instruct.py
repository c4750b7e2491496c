"""Open-Instruct's task folders: `instruction.md`, `image.txt`, seed files and tests."""

from __future__ import annotations

from swerl.core.task import Task

from ._common import Row, text
from ._folder_task import files_of, image_of, instruction, reward_spec, under

SOURCE = "hamishivi/agent-task-combined"
SPLITS = ("train",)
FILES = "task-data.tar.gz"
"""The hub has one archive with all folders."""

WORKDIR = "/workspace"
TIMEOUT_S = 600.0
"""Open-Instruct's own minimum."""


def to_task(row: Row) -> Task:
    """Turn a task folder's row into a Task."""
    name, files = text(row, "task_id"), files_of(row)
    image, note = image_of(name, files, files.get("image.txt", "").strip())
    return Task(
        id=name,
        repo=name,
        image=image,
        workdir=WORKDIR,
        prompt=instruction(files),
        grading=reward_spec(files, TIMEOUT_S, {}),
        dataset=SOURCE,
        files=under(files, "environment/seeds", WORKDIR),
        setup="mkdir -p /workspace /output",
        metadata=note,
    )
