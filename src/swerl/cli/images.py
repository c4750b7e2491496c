"""`swerl images pull | mirror | ls | gc | prepare`: images of tasks, here and in registries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn

from swerl.cli._images import (
    ImagesArgument,
    RewritesOption,
    failures,
    images_of,
    is_file,
    read_rewrites,
    show_failures,
    shown_bytes,
)
from swerl.cli._options import AgentOption, JsonOption, RecipeSettingsOption, tasks_in
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.cli._run import progress_bar, run
from swerl.core.errors import ImageError, InputError, SandboxUnavailableError, SwerlError
from swerl.core.events import ignore
from swerl.core.image_reference import is_local, parse_target
from swerl.core.jobs import run_jobs
from swerl.core.task import Task, write_tasks
from swerl.images import plan as planning
from swerl.images.archive import import_image
from swerl.images.gc import collect
from swerl.images.mirror import MirrorOptions, MirrorReport, mirror, rewrite
from swerl.images.pull import Pulled, PullOptions
from swerl.images.pull import pull as pull_images
from swerl.images.store import Named, default_store
from swerl.sandboxes import docker

_ARCHIVE = "oci-archive:"


def pull(
    images: ImagesArgument,
    *,
    rewrites: RewritesOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Layers at the same time.")] = 4,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Check again if a stored tag has changed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print bytes and pulls; read only manifests.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Pull images into the store, unpacked for local sandboxes; resumes if interrupted.

    `oci-archive:FILE:NAME` imports the image of an OCI layout, a tar or a folder, as NAME.
    """
    archives = [image for image in images if image.startswith(_ARCHIVE)]
    images = [image for image in images if image not in archives]
    options = PullOptions(
        workers=workers,
        rewrites=read_rewrites(rewrites),
        refresh=refresh,
    )
    if dry_run:
        _show_plan(images_of(images), options, as_json=as_json)
        return
    for archive in archives:
        _import(archive)
    if archives and not images:
        return
    pulled = _pull(images_of(images), options)
    failed = [(image.image, image.error) for image in pulled if image.error]
    show_failures(failed)
    moved = sum(image.moved_bytes for image in pulled)
    there = sum(image.stored is not None and not image.moved_bytes for image in pulled)
    console().print(
        f"{counted(len(pulled) - len(failed), 'image')} ready ({there} already there), "
        f"{len(failed)} failed; "
        f"{shown_bytes(moved)} pulled"
    )
    if as_json:
        stored = {image.image: image.stored.digest for image in pulled if image.stored}
        lost = failures((image.image, image.error) for image in pulled)
        root = default_store().root
        print_json({"images": stored, "failed": lost, "moved_bytes": moved, "store": root})
    console().print(f"store: {default_store().root}", soft_wrap=True)
    if failed:
        console().print("next: run the same command again to retry the failed images")
        raise typer.Exit(1)
    console().print("next: swerl images ls, or swerl sandbox smoke TASKS")


def _pull(images: list[str], options: PullOptions) -> list[Pulled]:
    total = sum(not is_local(image) for image in images)
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeElapsedColumn(), console=stderr(), transient=True) as progress:
        bar = progress.add_task(f"0 of {total} images", total=None)
        num_done = 0

        def told(_: Pulled) -> None:
            nonlocal num_done
            num_done += 1
            progress.update(bar, description=f"{num_done} of {total} images")

        job = pull_images(
            images,
            default_store(),
            options=options,
            on_done=told,
            on_bytes=lambda count: progress.advance(bar, count),
        )
        return run(job, after="run the same command again to resume")


def _show_plan(images: list[str], options: PullOptions, *, as_json: bool) -> None:
    with progress_bar("manifests", sum(not is_local(image) for image in images)) as advance:
        job = planning.plan(images, default_store(), options=options, on_done=lambda _: advance())
        plan = run(job, after="manifests that were read are kept")
    num_stored = sum(image.is_stored for image in plan.images)
    registries = sorted({image.registry for image in plan.images if image.registry})
    if as_json:
        print_json(
            {
                "num_images": len(plan.images),
                "num_stored": num_stored,
                "num_local": plan.num_local,
                "unique_bytes": plan.unique_bytes,
                "missing_bytes": plan.missing_bytes,
                "pulls": {name: plan.num_pulls(name) for name in registries},
                "failed": failures((image.image, image.error) for image in plan.failed),
            }
        )
    table = simple_table("", "number", "size", numbers={"number", "size"})
    unique, missing = shown_bytes(plan.unique_bytes), shown_bytes(plan.missing_bytes)
    table.add_row("images in registries", f"{len(plan.images):,}", unique)
    table.add_row("  ready on this machine", f"{num_stored:,}", "")
    table.add_row("blobs to fetch", f"{len(plan.missing):,}", missing)
    for name in registries:
        table.add_row(f"pulls from {name}", f"{plan.num_pulls(name):,}", "")
    console().print(table)
    show_failures((image.image, image.error) for image in plan.failed if image.error)
    if plan.failed:
        raise typer.Exit(1)
    console().print("next: the same command without --dry-run")


def _import(argument: str) -> None:
    path, _, name = argument.removeprefix(_ARCHIVE).partition(":")
    if not name:
        raise InputError(f"{argument} names no image", hint=f"append a name: {argument}:NAME")
    with stderr().status(f"importing {path}"):
        image = import_image(Path(path), default_store(), name)
    layers = f"{counted(len(image.layers), 'layer')}, {shown_bytes(image.size)}"
    console().print(f"{image.reference}  [dim]{layers}[/]", soft_wrap=True)


def mirror_images(
    tasks: Annotated[Path, typer.Argument(help="Task file written by `swerl convert`.")],
    to: Annotated[str, typer.Option(metavar="HOST:PORT/PREFIX", help="Destination registry.")],
    *,
    rewrites: RewritesOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Images and blobs at the same time.")] = 4,
    platform: Annotated[
        str, typer.Option(metavar="OS/ARCH", help="Platform to keep of multi-platform images.")
    ] = "linux/amd64",
    lock: Annotated[
        Path | None, typer.Option(help="Lock file of digests; TASKS.images.json by default.")
    ] = None,
    tasks_out: Annotated[
        Path | None, typer.Option(help="Write the tasks again with the mirrored images by digest.")
    ] = None,
) -> None:
    """Copy the images of a task file to another registry, by digest; resumes if interrupted."""
    options = MirrorOptions(
        workers=workers,
        rewrites=read_rewrites(rewrites),
        platform=_platform(platform),
    )
    lock = lock or tasks.with_suffix(".images.json")
    task_list = tasks_in(tasks)
    images = list(dict.fromkeys(task.image for task in task_list))
    with progress_bar("images", sum(not is_local(image) for image in images)) as advance:
        job = mirror(images, parse_target(to), lock, options=options, on_done=lambda _: advance())
        report = run(job, after="the same command skips what is there already")
    _show(report, lock)
    if report.failed:
        raise typer.Exit(1)
    if tasks_out:
        write_tasks(tasks_out, rewrite(task_list, lock))
        text = f"tasks:   {tasks_out}\nnext: set tasks.source to it in a recipe"
        console().print(text, soft_wrap=True)


def _platform(text: str) -> tuple[str, str]:
    system, slash, architecture = text.partition("/")
    if not (system and slash and architecture):
        raise InputError(
            f"--platform {text!r} is not OS/ARCH", hint="for example --platform linux/arm64"
        )
    return system, architecture


def _show(report: MirrorReport, lock: Path) -> None:
    show_failures((image.image, image.error) for image in report.failed if image.error)
    unchanged = sum(image.was_there for image in report.images)
    console().print(
        f"{counted(len(report.images) - len(report.failed), 'image')} mirrored "
        f"({unchanged} already there), {len(report.failed)} failed, {report.num_local} local; "
        f"{shown_bytes(report.moved_bytes)} moved",
        soft_wrap=True,
    )
    console().print(f"digests: {lock}", soft_wrap=True)
    if report.failed:
        console().print("next: run the same command again to retry the failed images")


def ls(as_json: JsonOption = False) -> None:
    """List the images of the store."""

    store = default_store()
    table = simple_table("image", "digest", "layers", "unpacked", "since")
    names, rows, num_damaged = store.names(), [], 0
    for name in names:
        since = f"{datetime.fromtimestamp(name.pulled_unix_s, UTC):%Y-%m-%d}"
        num_layers = num_bytes = None
        try:
            image = store.find(name.reference)
            num_layers, num_bytes = len(image.layers), image.size
            shown = (str(num_layers), shown_bytes(num_bytes))
        except ImageError:
            shown = ("[red]damaged[/]", "")
            num_damaged += 1
        rows.append({**asdict(name), "num_layers": num_layers, "num_bytes": num_bytes})
        table.add_row(name.reference, name.digest[7:19], *shown, since)
    if as_json:
        print_json({"store": store.root, "images": rows})
        return
    if names:
        console().print(table)
    console().print(f"{counted(len(names), 'image')} in {store.root}", soft_wrap=True)
    if not names:
        console().print("next: swerl images pull TASKS")
    if num_damaged:
        console().print("next: swerl images pull them again")


def gc(
    keep: Annotated[
        list[str],
        typer.Option(metavar="TASKS", help="Task files or images to keep."),
    ],
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed.")
    ] = False,
) -> None:
    """Free space: remove the images outside of --keep.

    `--keep host` keeps no image of the store.
    """
    for argument in keep:
        if not is_file(argument):
            _names([argument])  # a mistyped file name must not remove everything
    result = collect(default_store(), images_of(keep), dry_run=dry_run)
    pruning = docker.build(docker.Options()).prune_snapshots(dry_run=dry_run)
    with suppress(SandboxUnavailableError):  # no daemon, no snapshots
        outside = run(pruning, after="the rest is done")
        result = replace(result, num_outside=outside)
    for image in result.removed:
        console().print(f"{image.reference}  [dim]{image.digest[7:19]}[/]", soft_wrap=True)
    for image in result.in_use:
        console().print(f"[yellow]in use[/] {image.reference}", soft_wrap=True)
    verb = "would be freed" if dry_run else "freed"
    console().print(
        f"{counted(len(result.removed), 'image')}, {result.num_parts} blobs and layers: "
        f"{shown_bytes(result.freed_bytes)} ({result.freed_bytes:,} bytes) {verb}, "
        f"{shown_bytes(result.kept_bytes)} kept"
    )
    if result.num_outside:
        console().print(f"{counted(result.num_outside, 'old snapshot')} of docker {verb}")


def _names(arguments: Sequence[str]) -> list[Named]:
    """Return the named images. Raises ImageError if one is not in the store."""
    return [default_store().named(image) for image in images_of(arguments) if not is_local(image)]


def prepare(
    tasks: Annotated[Path, typer.Argument(help="Task file.")],
    *,
    agent: AgentOption = "builtin",
    settings: RecipeSettingsOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Sandboxes at the same time.")] = 4,
) -> None:
    """Prepare the sandboxes of tasks ahead; a run does it at the first attempt otherwise."""
    from swerl.recipe.load import load
    from swerl.rollout import wiring

    recipe = load([], ["name=prepare", "steps=1", f"harness.type={agent}", *(settings or ())])
    pool = wiring.sandbox_pool_of(recipe, wiring.sandbox_backend(recipe, ignore))
    harness = wiring.harness_of(recipe)
    task_list = tasks_in(tasks)
    counts: dict[str, int] = {}
    failed: dict[str, str] = {}

    async def one(task: Task) -> None:
        try:
            counts[task.id] = await pool.prepare(task, harness)
        except SwerlError as error:
            failed[task.id] = str(error)

    with progress_bar("tasks", len(task_list)) as advance:
        job = run_jobs(task_list, one, limit=jobs, on_done=lambda _: advance())
        run(job, after="what is prepared is kept")
    for name, error in failed.items():
        stderr().print(f"{name}: {error}", markup=False, soft_wrap=True)
    whole = [name for name, count in counts.items() if count == 2]
    console().print(
        f"{counted(len(whole), 'task')} prepared; {len(counts) - len(whole)} must be prepared in "
        f"each sandbox; {len(failed)} failed"
    )
    if failed:
        raise typer.Exit(1)
