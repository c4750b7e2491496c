"""`swerl images pull` and `import`: add images to the store of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swerl.cli._images import (
    DockerConfigOption,
    ImagesArgument,
    RewritesOption,
    failures,
    images_of,
    read_rewrites,
    show_failures,
    shown_bytes,
)
from swerl.cli._options import AgentOption, JsonOption, RecipeSettingsOption, tasks_in
from swerl.cli._output import console, counted, print_json, stderr
from swerl.cli._run import progress_bar, run
from swerl.core.errors import SwerlError
from swerl.core.events import ignore
from swerl.core.image_reference import is_local
from swerl.core.jobs import run_jobs

if TYPE_CHECKING:
    from swerl.core.task import Task
    from swerl.images.pull import Pulled, PullOptions


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
    from swerl.images.login import default_config
    from swerl.images.pull import PullOptions
    from swerl.images.store import default_store

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
    from swerl.images.archive import import_images
    from swerl.images.store import default_store

    with stderr().status(f"importing {file}"):
        found = import_images(file, default_store(), name=name)
    if as_json:
        print_json([{"image": each.reference, "digest": each.digest} for each in found])
    for image in found:
        layers = f"{counted(len(image.layers), 'layer')}, {shown_bytes(image.size)}"
        console().print(f"{image.reference}  [dim]{layers}[/]", soft_wrap=True)
    console().print("next: use it as the image of a task, or run swerl images ls")


def _pull(images: list[str], options: PullOptions) -> list[Pulled]:
    from rich.progress import DownloadColumn, Progress, TimeElapsedColumn, TransferSpeedColumn

    from swerl.images.pull import pull as pull_images
    from swerl.images.store import default_store

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
