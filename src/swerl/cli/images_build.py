"""`swerl images build`: source images and their Tasks, from archives instead of a registry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from swerl.images.build import SourceSpec
    from swerl.task import Task
    from swerl.tasks.datasets import Row


def build(
    specs: Annotated[Path, typer.Argument(help="JSON list of instance specs.")],
    rows: Annotated[Path, typer.Option(help="JSONL or Parquet file with the instances' rows.")],
    *,
    instances: Annotated[
        list[str] | None, typer.Option("--instance", help="Build this one; all by default.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("tasks.jsonl"),
) -> None:
    """Build instances from their projects' released source archives, and write their Tasks."""
    from swerl.cli._output import console
    from swerl.errors import ImageError
    from swerl.images.build import read_specs
    from swerl.task import write_tasks

    wanted = _select(read_specs(specs), instances)
    by_id = _rows(rows)
    tasks = []
    failed = 0
    for spec in wanted:
        try:
            tasks.append(_build_one(spec, by_id))
        except ImageError as error:
            failed += 1
            console().print(f"[red]{spec.instance_id}[/]: {error}", soft_wrap=True)
            console().print(f"  {error.hint}", soft_wrap=True)
    if not tasks:
        raise ImageError("no image could be built", hint="the reasons stand above")
    count = write_tasks(out, tasks)
    console().print(f"{count} tasks: {out}", soft_wrap=True)
    console().print(f"next: swerl rollout --tasks {out} --instance {tasks[0].id}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _select(specs: list[SourceSpec], instances: list[str] | None) -> list[SourceSpec]:
    from swerl.errors import unknown

    known = {spec.instance_id: spec for spec in specs}
    for name in instances or ():
        if name not in known:
            raise unknown("instance", name, known)
    return [known[name] for name in instances] if instances else specs


def _rows(path: Path) -> dict[str, Row]:
    from swerl.errors import TaskError
    from swerl.tasks.rows import file_rows

    found = {}
    for row in file_rows(path).read(0):
        if isinstance(row, TaskError):
            raise row
        found[str(row.get("instance_id"))] = row
    return found


def _build_one(spec: SourceSpec, rows: dict[str, Row]) -> Task:
    import time

    from swerl.cli._output import console, stderr
    from swerl.errors import unknown
    from swerl.images.build import build, make_task

    if spec.instance_id not in rows:
        raise unknown("row", spec.instance_id, rows)
    task = make_task(spec, rows[spec.instance_id])
    started = time.monotonic()
    with stderr().status(spec.instance_id) as status:
        image = build(spec, lambda step: status.update(f"{spec.instance_id}: {step}"))
    console().print(f"{image}  [dim]{time.monotonic() - started:.1f} s[/]", soft_wrap=True)
    return task
