"""`swerl images build`: images from released source archives; `bake`: images with agents."""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from swerl.cli._images import show_failures, shown_bytes
from swerl.cli._options import require_made_from, tasks_in
from swerl.cli._output import console, counted, stderr
from swerl.cli._run import progress_bar, run
from swerl.core import plugins
from swerl.core.errors import ImageError, InputError, TaskError, unknown
from swerl.core.image_reference import is_local
from swerl.core.task import Task, write_tasks
from swerl.images import bake as baking
from swerl.images.bake import AgentLayer, Baked, make_layer
from swerl.images.build import SourceSpec, read_specs, row_id
from swerl.images.http import default_config
from swerl.images.mirror import LockFile, Pinned, rewrite
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


def bake(
    tasks: Annotated[Path, typer.Argument(help="Task file with mirrored images.")],
    agents: Annotated[
        list[str], typer.Option("--agent", metavar="NAME[@VERSION]", help="Agent to add.")
    ],
    *,
    mirror_lock: Annotated[
        Path | None, typer.Option(help="The mirror's lock file; TASKS.images.json by default.")
    ] = None,
    lock: Annotated[
        Path | None, typer.Option(help="Lock file of the new images; TASKS.baked.json by default.")
    ] = None,
    tasks_out: Annotated[
        Path | None, typer.Option(help="Write the tasks again with the baked images by digest.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Images at the same time.")] = 4,
) -> None:
    """Add agents to mirrored images as one shared layer, for sandboxes that mount no folders."""
    task_list = tasks_in(tasks)
    images = _mirrored({task.image for task in task_list}, mirror_lock, tasks)
    lock = lock or tasks.with_suffix(".baked.json")
    with tempfile.TemporaryDirectory() as folder:
        layer = _layer(agents, Path(folder, "agents.tar.gz"))
        with progress_bar("images", len(images)) as advance:
            job = baking.bake(
                *(images, layer, lock),
                docker_config=default_config(),
                workers=workers,
                on_done=lambda _: advance(),
            )
            baked = run(job, after="the same command skips what is there already")
    _show(baked, layer, lock)
    if any(result.error for result in baked):
        raise typer.Exit(1)
    if tasks_out:
        write_tasks(tasks_out, rewrite(task_list, lock))
        console().print(f"tasks:   {tasks_out}\nnext: set tasks.source to it", soft_wrap=True)


def _mirrored(images: set[str], lock: Path | None, tasks: Path) -> dict[str, Pinned]:
    lock = lock or tasks.with_suffix(".images.json")
    pinned = LockFile(lock).images
    remote = {image for image in images if not is_local(image)}
    if missing := sorted(remote - pinned.keys()):
        more = f", and {len(missing) - 1} more are not" if missing[1:] else ""
        message = f"image {missing[0]} is not in {lock}{more}"
        hint = f"mirror them first: swerl images mirror {tasks} --to HOST:PORT/PREFIX"
        raise InputError(message, hint=hint)
    return {image: pinned[image] for image in sorted(remote)}


def _layer(agents: list[str], path: Path) -> AgentLayer:
    mounts, labels = [], []
    for agent in agents:
        name, _, version = agent.partition("@")
        module = plugins.module("harnesses", name)
        if not hasattr(module, "fetch"):
            raise InputError(
                f"{name} runs outside of the sandbox and needs no image",
                hint="bake an agent that is a CLI, such as claude-code",
            )
        version = version or module.DEFAULT_VERSION
        labels.append(f"{name}@{version}")
        with stderr().status(f"fetching {labels[-1]}"):
            mounts += module.fetch(version)
    with stderr().status("packing the layer"):
        return make_layer(mounts, labels, path)


def _show(baked: list[Baked], layer: AgentLayer, lock: Path) -> None:
    failed = [(result.image, result.error) for result in baked if result.error]
    show_failures(failed)
    console().print(
        f"{', '.join(layer.agents)} ({shown_bytes(layer.blob.size)}, stored once) "
        f"in {counted(len(baked) - len(failed), 'image')}, {len(failed)} failed",
        soft_wrap=True,
    )
    console().print(f"digests: {lock}", soft_wrap=True)
    if failed:
        console().print("next: run the same command again to retry the failed images")
