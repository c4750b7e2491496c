"""`swerl images build`: images from released source archives."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._options import require_made_from
from swerl.cli._output import console, counted, stderr
from swerl.core.errors import ImageError, InputError, TaskError, unknown
from swerl.core.task import Task, write_tasks
from swerl.images.build import SourceSpec, read_specs, row_id
from swerl.tasks.datasets import Row
from swerl.tasks.rows import file_rows


def build(
    specs: Annotated[Path, typer.Argument(help="JSON list of instance specs.")],
    *,
    rows: Annotated[
        Path | None, typer.Option(help="JSONL or Parquet file with the instances' rows.")
    ] = None,
    instances: Annotated[
        list[str] | None, typer.Option("--instance", help="Build this one; all by default.")
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="Dataset of the rows; `swerl convert list` prints all.")
    ] = "swe-bench",
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("tasks.jsonl"),
) -> None:
    """Build instances from their projects' released source archives, and write their Tasks."""
    selected = _select(specs, instances)
    require_made_from(out, [spec.instance_id for spec in selected])
    _build_sources(selected, _rows(specs, rows, dataset), dataset, out)


def _build_sources(specs: list[SourceSpec], by_id: dict[str, Row], dataset: str, out: Path) -> None:
    tasks = []
    for spec in specs:
        try:
            tasks.append(_build_one(spec, by_id, dataset))
        except ImageError as error:
            console().print(f"[red]{spec.instance_id}[/]: {error}", soft_wrap=True)
            console().print(f"  {error.hint}", soft_wrap=True)
    if not tasks:
        raise ImageError("no image could be built", hint="the reasons are above")
    count = write_tasks(out, tasks)
    console().print(f"{counted(count, 'task')}: {out}", soft_wrap=True)
    console().print(f"next: swerl rollout --tasks {out} --instance {tasks[0].id}", soft_wrap=True)
    if len(tasks) < len(specs):
        raise typer.Exit(1)


def _select(path: Path, instances: list[str] | None) -> list[SourceSpec]:
    specs = read_specs(path)
    by_id = {spec.instance_id: spec for spec in specs}
    for name in instances or ():
        if name not in by_id:
            raise unknown("instance", name, by_id)
    return [by_id[name] for name in instances] if instances else specs


def _rows(specs: Path, path: Path | None, dataset: str) -> dict[str, Row]:
    """Return rows by the ids of their Tasks, without rows that make none."""
    if path is None:
        raise InputError(
            f"the instances of {specs} need their rows",
            hint="pass --rows",
        )
    rows = {}
    for row in file_rows(path):
        if isinstance(row, TaskError):
            raise row
        with suppress(TaskError):
            rows[row_id(row, dataset)] = row
    return rows


def _build_one(spec: SourceSpec, rows: dict[str, Row], dataset: str) -> Task:
    from swerl.images.build import build, make_task

    if spec.instance_id not in rows:
        raise unknown("row", spec.instance_id, rows)
    task = make_task(spec, rows[spec.instance_id], dataset)
    started = time.monotonic()
    with stderr().status(spec.instance_id) as status:
        image = build(spec, lambda step: status.update(f"{spec.instance_id}: {step}"))
    console().print(f"{image}  [dim]{time.monotonic() - started:.1f} s[/]", soft_wrap=True)
    return task
