"""Real SWE-bench instances that build from released archives: their specs come with swerl.

The rows do not: they are read from the dataset's hub, or from a file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import Field, TypeAdapter

from swerl.core.errors import InputError, SwerlError
from swerl.core.task import Task
from swerl.images.build import SourceSpec, build, make_task
from swerl.tasks.rows import file_rows, hub_rows


class Instance(SourceSpec):
    """The spec of an instance, and its row's place on the hub."""

    dataset: str
    split: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


def shipped() -> dict[str, Instance]:
    """Return the specs that come with swerl by instance id."""
    text = Path(__file__).with_name("instances.json").read_bytes()
    return {spec.instance_id: spec for spec in TypeAdapter(list[Instance]).validate_json(text)}


def prepare(spec: Instance, rows: Path | None, say: Callable[[str], None]) -> Task:
    """Read the row, build the image unless it exists, and return the Task.

    `rows` replaces the hub; `say` gets the name of each step. Raises InputError without the row,
    ImageError if the image cannot be built.
    """
    say("read the row")
    records = file_rows(rows) if rows else hub_rows(spec.dataset, spec.split)
    readable = (row for row in records if not isinstance(row, SwerlError))
    row = next((row for row in readable if row.get("instance_id") == spec.instance_id), None)
    if row is None:
        message = f"{rows or spec.dataset} has no row {spec.instance_id}"
        raise InputError(message, hint=f"pass --tasks with rows of {spec.dataset}")
    task = make_task(spec, row)
    build(spec, say)
    return task
