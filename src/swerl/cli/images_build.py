"""`swerl images build`: images from released sources, or from task folders' Dockerfiles."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from swerl.core.task import Task
    from swerl.images.build import SourceSpec
    from swerl.tasks.datasets import Row


def build(
    specs: Annotated[
        Path, typer.Argument(help="JSON list of instance specs, or a folder of task folders.")
    ],
    *,
    rows: Annotated[
        Path | None, typer.Option(help="JSONL or Parquet file with the instances' rows.")
    ] = None,
    instances: Annotated[
        list[str] | None, typer.Option("--instance", help="Build this one; all by default.")
    ] = None,
    dataset: Annotated[
        str, typer.Option(help="Whose rows they are; `swerl convert list` names datasets.")
    ] = "swe-bench",
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.")] = Path("tasks.jsonl"),
    network: Annotated[
        str, typer.Option(help="Task folders: what a Dockerfile reaches, none or default.")
    ] = "none",
) -> None:
    """Build instances from their projects' released source archives, and write their Tasks.

    With a folder: build the Dockerfiles of the task folders in it with a Docker daemon.
    """
    if specs.is_dir():
        _build_folders(specs, network)
    else:
        wanted = _select(specs, instances)
        _build_sources(wanted, _rows(specs, rows, dataset), dataset, out)


def _build_folders(root: Path, network: str) -> None:
    from swerl.cli._output import console, stderr
    from swerl.cli._text import counted
    from swerl.core.errors import ImageError, unknown
    from swerl.images.docker_build import Network, build_folders

    if network not in set(Network):
        raise unknown("network", network, [*Network])
    num_built = num_stood = num_failed = 0
    with stderr().status("asking for a daemon") as status:
        for one in build_folders(root, network=Network(network), say=status.update):
            if one.error:
                num_failed += 1
                for text in (f"{one.folder}: {one.error}", f"  {one.error.hint}"):
                    console().print(text, soft_wrap=True, markup=False)
                continue
            num_built, num_stood = num_built + one.is_new, num_stood + (not one.is_new)
            console().print(one.image, soft_wrap=True, markup=False)
    if num_failed and not num_built + num_stood:
        raise ImageError("no image could be built", hint="the reasons stand above")
    console().print(f"{counted(num_built, 'image')} built, {num_stood} stood, {num_failed} failed")
    console().print(f"next: swerl convert harbor --rows {root}", soft_wrap=True, markup=False)
    if num_failed:
        raise typer.Exit(1)


def _build_sources(
    wanted: list[SourceSpec], by_id: dict[str, Row], dataset: str, out: Path
) -> None:
    from swerl.cli._output import console
    from swerl.core.errors import ImageError
    from swerl.core.task import write_tasks

    tasks = []
    failed = 0
    for spec in wanted:
        try:
            tasks.append(_build_one(spec, by_id, dataset))
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


def _select(path: Path, instances: list[str] | None) -> list[SourceSpec]:
    from swerl.core.errors import unknown
    from swerl.images.build import read_specs

    specs = read_specs(path)
    known = {spec.instance_id: spec for spec in specs}
    for name in instances or ():
        if name not in known:
            raise unknown("instance", name, known)
    return [known[name] for name in instances] if instances else specs


def _rows(specs: Path, path: Path | None, dataset: str) -> dict[str, Row]:
    """Return the rows by the ids of their Tasks; rows without one are left out."""
    from swerl.core.errors import InputError, TaskError
    from swerl.images.build import row_id
    from swerl.tasks.rows import file_rows

    if path is None:
        raise InputError(
            f"the instances of {specs} need their rows",
            hint="pass --rows, or a folder of task folders",
        )
    found = {}
    for row in file_rows(path).read(0):
        if isinstance(row, TaskError):
            raise row
        with suppress(TaskError):
            found[row_id(row, dataset)] = row
    return found


def _build_one(spec: SourceSpec, rows: dict[str, Row], dataset: str) -> Task:
    import time

    from swerl.cli._output import console, stderr
    from swerl.core.errors import unknown
    from swerl.images.build import build, make_task, misfits_of

    if spec.instance_id not in rows:
        raise unknown("row", spec.instance_id, rows)
    task = make_task(spec, rows[spec.instance_id], dataset)
    started = time.monotonic()
    with stderr().status(spec.instance_id) as status:
        image = build(spec, lambda step: status.update(f"{spec.instance_id}: {step}"))
    console().print(f"{image}  [dim]{time.monotonic() - started:.1f} s[/]", soft_wrap=True)
    for text in misfits_of(spec, task):
        console().print(f"  {text}; try another release", style="yellow", soft_wrap=True)
    return task
