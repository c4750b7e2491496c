"""`swerl images pull | import | prepare | ls | verify | gc`: the image store of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn

from swerl.cli._images import (
    DockerConfigOption,
    ImagesArgument,
    RewritesOption,
    failures,
    images_of,
    is_file,
    read_rewrites,
    read_size,
    show_failures,
    shown_bytes,
)
from swerl.cli._options import AgentOption, JsonOption, RecipeSettingsOption, tasks_in
from swerl.cli._output import console, counted, print_json, simple_table, stderr
from swerl.cli._run import progress_bar, run
from swerl.core.errors import ImageError, SandboxUnavailableError, SwerlError
from swerl.core.events import ignore
from swerl.core.image_reference import is_local
from swerl.core.jobs import run_jobs
from swerl.core.task import Task
from swerl.images.archive import import_images
from swerl.images.gc import collect
from swerl.images.http import default_config
from swerl.images.pull import Pulled, PullOptions
from swerl.images.pull import pull as pull_images
from swerl.images.store import Named, default_store
from swerl.images.verify import CheckedPart, StorePart
from swerl.images.verify import verify as verify_images
from swerl.sandboxes import docker


def pull(
    images: ImagesArgument,
    *,
    rewrites: RewritesOption = None,
    workers: Annotated[int, typer.Option(min=1, help="Layers at the same time.")] = 4,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Check again if a stored tag has changed.")
    ] = False,
    docker_config: DockerConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pull images into the store, unpacked for local sandboxes; resumes if interrupted."""
    options = PullOptions(
        workers=workers,
        rewrites=read_rewrites(rewrites),
        refresh=refresh,
        docker_config=docker_config or default_config(),
    )
    done = _pull(images_of(images), options)
    failed = [(each.image, each.error) for each in done if each.error]
    show_failures(failed)
    moved = sum(each.moved_bytes for each in done)
    there = sum(each.stored is not None and not each.moved_bytes for each in done)
    console().print(
        f"{counted(len(done) - len(failed), 'image')} ready ({there} already there), "
        f"{len(failed)} failed; "
        f"{shown_bytes(moved)} pulled"
    )
    if as_json:
        stored = {each.image: each.stored.digest for each in done if each.stored}
        lost = failures((each.image, each.error) for each in done)
        root = default_store().root
        print_json({"images": stored, "failed": lost, "moved_bytes": moved, "store": root})
    console().print(f"store: {default_store().root}", soft_wrap=True)
    if failed:
        console().print("next: run the same command again to retry the failed images")
        raise typer.Exit(1)
    console().print("next: swerl images ls, or swerl sandbox smoke TASKS")


def import_image(
    file: Annotated[
        Path, typer.Argument(help="OCI layout, output of `docker save`, or root file system.")
    ],
    *,
    name: Annotated[str, typer.Option(help="Name of the image; its own by default.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Import an image from a file or folder into the store."""
    with stderr().status(f"importing {file}"):
        found = import_images(file, default_store(), name=name)
    if as_json:
        print_json([{"image": each.reference, "digest": each.digest} for each in found])
    for image in found:
        layers = f"{counted(len(image.layers), 'layer')}, {shown_bytes(image.size)}"
        console().print(f"{image.reference}  [dim]{layers}[/]", soft_wrap=True)
    console().print("next: use it as the image of a task, or run swerl images ls")


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


def prepare(
    tasks: Annotated[Path, typer.Argument(help="Task file.")],
    *,
    agent: AgentOption = "builtin",
    settings: RecipeSettingsOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Sandboxes at the same time.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Prepare the sandboxes of tasks ahead; a run does it at the first attempt otherwise."""
    from swerl.recipe.load import load
    from swerl.rollout import wiring

    recipe = load([], ["name=prepare", "steps=1", f"harness.type={agent}", *(settings or ())])
    provisioner = wiring.provisioner_of(recipe, wiring.sandbox_backend(recipe, ignore))
    harness = wiring.harness_of(recipe)
    found = tasks_in(tasks)
    counts: dict[str, int] = {}
    failed: dict[str, str] = {}

    async def one(task: Task) -> None:
        try:
            counts[task.id] = await provisioner.prepare(task, harness)
        except SwerlError as error:
            failed[task.id] = str(error)

    with progress_bar("tasks", len(found)) as advance:
        job = run_jobs(found, one, limit=jobs, on_done=lambda _: advance())
        run(job, after="what is prepared is kept")
    for name, error in failed.items():
        stderr().print(f"{name}: {error}", markup=False, soft_wrap=True)
    whole = [name for name, count in counts.items() if count == 2]
    if as_json:
        print_json({"prepared": whole, "each_time": sorted({*counts} - {*whole}), "failed": failed})
    console().print(
        f"{counted(len(whole), 'task')} prepared; {len(counts) - len(whole)} must be prepared in "
        f"each sandbox; {len(failed)} failed"
    )
    if failed:
        raise typer.Exit(1)


_ALL = "all"


def ls(as_json: JsonOption = False) -> None:
    """List the images of the store."""

    store = default_store()
    table = simple_table("image", "digest", "layers", "unpacked", "since")
    names, rows, num_damaged = store.names(), [], 0
    for named in names:
        since = f"{datetime.fromtimestamp(named.pulled_unix_s, UTC):%Y-%m-%d}"
        num_layers = num_bytes = None
        try:
            found = store.find(named.reference)
            num_layers, num_bytes = len(found.layers), found.size
            shown = (str(num_layers), shown_bytes(num_bytes))
        except ImageError:
            shown = ("[red]damaged[/]", "")
            num_damaged += 1
        rows.append({**asdict(named), "num_layers": num_layers, "num_bytes": num_bytes})
        table.add_row(named.reference, named.digest[7:19], *shown, since)
    if as_json:
        print_json({"store": store.root, "images": rows})
        return
    if names:
        console().print(table)
    console().print(f"{counted(len(names), 'image')} in {store.root}", soft_wrap=True)
    if not names:
        console().print("next: swerl images pull TASKS")
    if num_damaged:
        console().print("next: swerl images verify --repair")


def verify(
    images: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TASKS...|all]", help="Task files, or names of images."),
    ] = None,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Fetch damaged parts again.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Blobs and layers at the same time.")] = 4,
    rewrites: RewritesOption = None,
    docker_config: DockerConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every blob and unpacked file, and list the damaged ones."""
    everything = not images or images == [_ALL]
    store = default_store()
    names = store.names() if everything else _names(images or [])
    options = PullOptions(
        workers=workers,
        rewrites=read_rewrites(rewrites),
        docker_config=docker_config or default_config(),
    )
    damaged = _verify(names, everything=everything, workers=workers)
    if damaged and repair:
        _repair(damaged, options)
        damaged = _verify(names, everything=everything, workers=workers)
    if as_json:
        print_json({"images": [each.reference for each in names], "damaged": damaged})
    if damaged and not repair:
        console().print("next: swerl images verify --repair")
    if damaged:
        raise typer.Exit(1)


def gc(
    keep: Annotated[
        list[str],
        typer.Option(metavar="TASKS", help="Task files or images to keep, most urgent first."),
    ],
    *,
    max_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Shrink the store to this size, such as 500G.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Free space: first images outside of --keep, then the least urgent ones of it.

    `--keep host` keeps no image of the store.
    """
    limit = read_size(max_bytes) if max_bytes else None
    for argument in keep:
        if not is_file(argument):
            _names([argument])  # a mistyped file name must not remove everything
    done = collect(default_store(), images_of(keep), max_bytes=limit, dry_run=dry_run)
    pruning = docker.build(docker.Options()).prune_snapshots(dry_run=dry_run)
    with suppress(SandboxUnavailableError):  # no daemon, no snapshots
        outside = run(pruning, after="the rest is done")
        done = replace(done, num_outside=outside)
    if as_json:
        print_json(done)
    for named in done.removed:
        console().print(f"{named.reference}  [dim]{named.digest[7:19]}[/]", soft_wrap=True)
    for named in done.in_use:
        console().print(f"[yellow]in use[/] {named.reference}", soft_wrap=True)
    verb = "would be freed" if dry_run else "freed"
    console().print(
        f"{counted(len(done.removed), 'image')}, {done.num_parts} blobs and layers: "
        f"{shown_bytes(done.freed_bytes)} ({done.freed_bytes:,} bytes) {verb}, "
        f"{shown_bytes(done.kept_bytes)} kept"
    )
    if done.num_outside:
        console().print(f"{counted(done.num_outside, 'old snapshot')} of docker {verb}")
    if limit is not None and done.kept_bytes > limit:
        console().print("the rest is in use by open sandboxes; run it again later")
        raise typer.Exit(1)


def _names(arguments: Sequence[str]) -> list[Named]:
    """Return the named images. Raises ImageError if one is not in the store."""
    return [default_store().named(image) for image in images_of(arguments) if not is_local(image)]


def _verify(names: list[Named], *, everything: bool, workers: int) -> list[CheckedPart]:
    with progress_bar("blobs and layers", None) as advance:
        job = verify_images(
            default_store(),
            names,
            everything=everything,
            workers=workers,
            on_done=lambda _: advance(),
        )
        checked = run(job, after="nothing was changed")
    damaged = [each for each in checked if each.problem]
    for each in damaged:
        stderr().print(
            f"[red]damaged[/] {_shown(each.part)} {escape(each.problem)}", soft_wrap=True
        )
    read = shown_bytes(sum(each.num_bytes for each in checked))
    console().print(
        f"{counted(len(names), 'image')}, {len(checked)} blobs and layers, {read} read: "
        f"{f'{len(damaged)} damaged' if damaged else 'all as stored'}"
    )
    return damaged


def _repair(damaged: Sequence[CheckedPart], options: PullOptions) -> None:
    from swerl.images.verify import repair

    with stderr().status("repairing"):
        job = repair(default_store(), damaged, options)
        done = run(job, after="run the same command again to resume")
    show_failures((each.image, each.error) for each in done.pulled if each.error)
    for part in done.in_use:
        text = f"[yellow]in use[/] {_shown(part)}: close its sandboxes and run it again"
        stderr().print(text, soft_wrap=True)
    for image in done.lost:
        stderr().print(f"[yellow]not from a registry[/] {image}: import it again", soft_wrap=True)
    count = sum(each.error is None for each in done.pulled)
    console().print(f"{counted(count, 'image')} fetched again")


def _shown(part: StorePart) -> str:
    of = f" of {part.images[0]}" if part.images else ", which no image needs,"
    more = f" and {len(part.images) - 1} more" if len(part.images) > 1 else ""
    return f"{part.kind} {part.digest}{of}{more}"
